"""Explanations over a restart: what comes back, and what is not used and why."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from zlib import compress, crc32, decompress

import msgspec
import pytest
from msgspec.structs import replace

from nri_numa.agent import explanations
from nri_numa.agent.agent import Agent
from nri_numa.agent.explanations import (
    MAX_EXPLANATIONS_FILE_BYTES,
    ExplanationFile,
    encode_snapshot,
)
from nri_numa.engine.decision import Rejected
from nri_numa.engine.explain import explanation, sentences
from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.state import NodeState
from nri_numa.model.settings import Settings
from nri_numa.model.workload import Device, DeviceRequest
from nri_numa.observe.traces import PackedTrace
from tests.beds.world import StillClock, agent_of, container, pod, resources
from tests.machines import named as machines

MACHINE = NodeModel(topology=machines.snc_smt(), settings=Settings())
IDENTITY = {"machine": "/", "boot": "b1", "version": "1"}
ALIGNED = {"policy": "single-numa-node"}


def agent(state: NodeState | None = None, now: Callable[[], float] = lambda: 7.0) -> Agent:
    """An agent that starts with this state."""
    made = agent_of(MACHINE, clock=StillClock(now))
    made.current.restore_state(state or NodeState())
    return made


def busy() -> Agent:
    """One with an owner, a container that asked for nothing, and a refusal."""
    made = agent()
    of = pod("own", ALIGNED)
    made.create_container(of, container(of, wants=resources(2, 1)))
    of = pod("plain")
    made.create_container(of, container(of))
    of = pod("big", ALIGNED)
    assert isinstance(made.create_container(of, container(of, wants=resources(99, 1))), Rejected)
    return made


def saved(directory: Path, of: Agent, identity: dict[str, str] = IDENTITY) -> Path:
    """The file that an agent leaves when it ends."""
    file = ExplanationFile(str(directory), identity=identity, agent=of)
    asyncio.run(file.save_last_changes())
    return Path(file.path)


def loaded(directory: Path, state: NodeState, identity: dict[str, str] = IDENTITY) -> Agent:
    """The agent that starts after that, for which all is well."""
    made = agent(state)
    assert ExplanationFile(str(directory), identity=identity, agent=made).load() == ""
    return made


def told(of: Agent, name: str = "own") -> object:
    """The whole explanation of the container of a pod, None when it is not kept."""
    (allocation,) = (a for a in of.current.state.allocations.values() if a.pod == name)
    known = of.history.explanation_of(allocation.container_id)
    return None if known is None else explanation.explain_allocation(allocation, known, "0")


def test_what_was_explained_is_explained_again_after_a_restart(tmp_path: Path) -> None:
    before = busy()
    path = saved(tmp_path, before)
    assert path.stat().st_mode & 0o077 == 0
    # An upgrade reads the same file, unless the form of what is kept has changed.
    after = loaded(tmp_path, before.current.state, {**IDENTITY, "version": "2"})
    assert told(after) == told(before) is not None
    (then,), (now,) = before.history.rejections, after.history.rejections
    assert (now.pod, now.message, now.last_time) == (then.pod, then.message, then.last_time)
    assert explanation.explain_rejection(
        after.history.explanation_of_rejection(now), now.reason, now.message
    ) == (
        explanation.explain_rejection(
            before.history.explanation_of_rejection(then), then.reason, then.message
        )
    )


@pytest.mark.parametrize("data", [compress(b"\x93\x01\x02\x03"), b"x is no zlib"])
def test_what_a_later_version_wrote_may_not_be_known(tmp_path: Path, data: bytes) -> None:
    before = busy()
    (name,) = before.history.packed_traces()
    before.history._traces[name] = PackedTrace(data)
    before.history._rejections = {
        key: replace(one, trace=PackedTrace(data))
        for key, one in before.history._rejections.items()
    }
    saved(tmp_path, before)
    after = loaded(tmp_path, before.current.state)
    (refusal,) = after.history.rejections
    known = after.history.explanation_of_rejection(refusal)
    for document in (
        told(after),
        explanation.explain_rejection(known, refusal.reason, refusal.message),
    ):
        text = sentences.render_text(document, 200)  # type: ignore[arg-type]
        assert "written by another version of nri-numa" in text
        assert "last started" not in text, "no restart is blamed"


@pytest.mark.parametrize("more", [True, False])
def test_a_file_with_a_field_more_or_less_is_read(tmp_path: Path, more: bool) -> None:
    """After an upgrade and after a rollback: what both versions know is explained."""
    before = busy()
    path = saved(tmp_path, before)
    identity, traces, refusals = msgspec.msgpack.decode(path.read_bytes().partition(b"\n")[2])
    for trace in [*(one[-1] for one in traces), *(one["trace"] for one in refusals)]:
        basis, alignment = packed = msgspec.msgpack.decode(decompress(trace["data"]))
        if more:
            basis.append("new")
            packed.append("new")
        else:
            del basis[-1]
        if alignment is not None and more:
            alignment["new"] = alignment["problem"]["new"] = [1]
        trace["data"] = compress(msgspec.msgpack.encode(packed))
    for one in refusals:
        if more:
            one["new"] = 7
        else:
            del one["count"]
    rest = explanations._encode([identity, traces, refusals, *([{}] if more else [])])
    path.write_bytes(b"nri-numa explanations %08x %08x\n" % (7, crc32(rest)) + rest)
    after = loaded(tmp_path, before.current.state)
    assert told(after) == told(before) is not None
    (then,), (now,) = before.history.rejections, after.history.rejections
    assert now.message == then.message
    assert "99 exclusive CPUs" in sentences.render_text(
        explanation.explain_rejection(
            after.history.explanation_of_rejection(now), now.reason, now.message
        ),
        200,
    )


def test_what_devices_had_to_do_with_it_is_kept(tmp_path: Path) -> None:
    before = agent()
    gpu = Device(id="gpu", numa_nodes=frozenset((2,)))
    requests = (DeviceRequest(resource="GPU", count=1, devices=(gpu,)),)
    for name, cpus in (("own", 2), ("big", 99)):
        of = pod(name, ALIGNED)
        made = container(of, wants=resources(cpus, 1))
        before.create_container(of, replace(made, devices=requests, pod_devices=requests))
    saved(tmp_path, before)
    after = loaded(tmp_path, before.current.state)
    (name,) = before.history.packed_traces()
    assert after.history.explanation_of(name) == before.history.explanation_of(name) is not None
    assert "GPU" in sentences.render_text(told(after), 200)  # type: ignore[arg-type]
    assert [one.message for one in after.history.rejections] == [
        one.message for one in before.history.rejections
    ]


def test_nothing_is_written_when_nothing_changed(tmp_path: Path) -> None:
    before = busy()
    path = saved(tmp_path, before)
    path.with_name("marker").touch()
    again = agent(before.current.state)
    file = ExplanationFile(str(tmp_path), identity=IDENTITY, agent=again)
    assert file.load() == ""
    path.unlink()
    asyncio.run(file.save_last_changes())
    assert not path.exists()
    of = pod("new", ALIGNED)
    again.create_container(of, container(of, wants=resources(1, 1)))
    asyncio.run(file.save_last_changes())
    assert told(loaded(tmp_path, again.current.state), "new") is not None


def test_a_decision_that_was_changed_since_is_not_explained_by_the_old_one(tmp_path: Path) -> None:
    """The checkpoint has every resize, the file perhaps not the last one."""
    before = busy()
    saved(tmp_path, before)
    (own,) = (a for a in before.current.state.allocations.values() if a.pod == "own")
    changed = before.current.state.without_allocation(own.container_id).with_allocation(
        replace(own, cpu_milli=1000, reason="resized")
    )
    assert told(loaded(tmp_path, changed)) is None
    assert loaded(tmp_path, NodeState()).history.packed_traces() == {}


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda data: b"", "damaged"),
        (lambda data: data[: len(data) // 2], "damaged"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "damaged"),
        (lambda data: b"nonsense", "damaged"),
        (lambda data: data + b"x" * MAX_EXPLANATIONS_FILE_BYTES, "larger than"),
    ],
)
def test_a_file_that_cannot_be_used_is_left_out_with_a_sentence(
    tmp_path: Path, spoil: Callable[[bytes], bytes], why: str
) -> None:
    before = busy()
    path = saved(tmp_path, before)
    path.write_bytes(spoil(path.read_bytes()))
    after = agent(before.current.state)
    said = ExplanationFile(str(tmp_path), identity=IDENTITY, agent=after).load()
    assert why in said
    assert said.endswith("it is not used")
    assert told(after) is None
    assert not after.history.rejections


def test_intact_nonsense_is_damage_too(tmp_path: Path) -> None:
    before = busy()
    path = saved(tmp_path, before)
    for rest in (b"\xc1", explanations._encode([{}, [], [{"pod": 7}]])):
        head = explanations._HEADER_FORMAT % crc32(rest)
        path.write_bytes(head + rest)
        file = ExplanationFile(str(tmp_path), identity={}, agent=agent(before.current.state))
        assert file.load().endswith("it is not used")


def test_another_boot_begins_anew(tmp_path: Path) -> None:
    before = busy()
    saved(tmp_path, before)
    other = {**IDENTITY, "boot": "b2"}
    after = agent(before.current.state)
    said = ExplanationFile(str(tmp_path), identity=other, agent=after).load()
    assert "another machine or boot" in said


def test_a_directory_that_cannot_be_read_or_written_costs_the_explanations_only(
    tmp_path: Path,
) -> None:
    before = busy()
    (tmp_path / explanations.EXPLANATIONS_FILE_NAME).mkdir()
    file = ExplanationFile(str(tmp_path), identity=IDENTITY, agent=before)
    assert "cannot be read" in file.load()
    asyncio.run(file.save_last_changes())
    assert (tmp_path / explanations.EXPLANATIONS_FILE_NAME).is_dir()
    assert told(before) is not None
    assert ExplanationFile(str(tmp_path / "absent"), identity={}, agent=before).load() == ""


def test_the_file_is_bounded_and_the_youngest_are_kept() -> None:
    """Whatever the number of containers; the oldest explanations are missed least."""
    clock = itertools.count()
    full = agent(now=lambda: float(next(clock)))
    for n in range(40):
        of = pod(f"p{n}", {"policy": "best-effort", "cpus": "shared"})
        full.create_container(of, container(of, wants=resources(0.1, 0.01)))
    file = ExplanationFile("/nowhere", identity={}, agent=full)
    everything, some = (
        encode_snapshot(file._current_snapshot(), {}),
        encode_snapshot(file._current_snapshot(), {}, 10_000),
    )
    assert len(some) <= 10_000 < len(everything)
    _, _, rest = some.partition(b"\n")
    kept = [one.container_id for one in explanations._decode(rest).traces]
    youngest = sorted(full.current.state.allocations.values(), key=lambda a: -a.assigned_at)
    assert kept == [a.container_id for a in youngest[: len(kept)]]
    assert 0 < len(kept) < 40
