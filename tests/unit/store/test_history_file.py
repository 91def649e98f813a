"""What is remembered of decisions over a restart: what comes back, and what is lost of a bad file.

Ids and numbers of notices go on whatever became of the file; explanations are as before.
"""

import asyncio
import errno
import itertools
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from zlib import compress, crc32, decompress

import msgspec
import pytest
from msgspec.structs import replace

from nri_numa.agent.agent import Agent
from nri_numa.engine.decision import Rejected
from nri_numa.engine.explain import explanation, sentences
from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.old_records import with_old_names
from nri_numa.engine.state import NodeState
from nri_numa.model.reasons import RejectionReason
from nri_numa.model.settings import Settings
from nri_numa.model.workload import Device, DeviceRequest
from nri_numa.store import history_file as module
from nri_numa.store.history_file import MAX_HISTORY_BYTES, HistoryFile, encode_lines
from nri_numa.store.journal import JournalLine, allocation_document, encode, frame_line
from tests.beds.notices import add_rejection
from tests.beds.stores import IDENTITY, BrokenOS, Opened, Stores
from tests.beds.world import StillClock, agent_of, container, pod, resources
from tests.machines import named as machines

MACHINE = NodeModel(topology=machines.snc_smt(), settings=Settings())
ALIGNED = {"policy": "single-numa-node"}


def agent(state: NodeState | None = None, now: Callable[[], float] = lambda: 7.0) -> Agent:
    """An agent that starts with this state."""
    made = agent_of(MACHINE, clock=StillClock(now))
    made.current.restore_state(state or NodeState())
    return made


def create(of: Agent, name: str, cpus: int) -> object:
    """Have a container come, and what becomes of it."""
    its_pod = pod(name, ALIGNED)
    return of.create_container(its_pod, container(its_pod, wants=resources(cpus, 1)))


def busy() -> Agent:
    """One with an owner, a container that asked for nothing, and a refusal."""
    made = agent()
    create(made, "own", 2)
    of = pod("plain")
    made.create_container(of, container(of))
    assert isinstance(create(made, "big", 99), Rejected)
    return made


class HistoryBed:
    """The file of history in a directory."""

    def __init__(self, directory: Path, stores: Stores, opened: Opened) -> None:
        self.directory, self.path, self._stores = directory, directory / "history", stores
        self.opened = partial(opened, directory)

    def open_for(self, of: Agent, identity: dict[str, str] = IDENTITY) -> tuple[HistoryFile, str]:
        """The open file of an agent, and what was wrong with it."""
        file = HistoryFile(str(self.directory), identity=identity, history=of.history)
        self._stores.append(file.stop_writing)
        return file, file.restore_and_open(of.current.state.allocations)

    def restarted(self, state: NodeState, identity: dict[str, str] = IDENTITY) -> Agent:
        """The agent that starts with what another left, and finds nothing wrong."""
        made = agent(state)
        assert self.open_for(made, identity)[1] == ""
        return made


@pytest.fixture
def bed(tmp_path: Path, stores: Stores, opened: Opened) -> HistoryBed:
    return HistoryBed(tmp_path, stores, opened)


def told(of: Agent, name: str = "own") -> Any:
    """The whole explanation of the container of a pod, None when it is not kept."""
    (allocation,) = (a for a in of.current.state.allocations.values() if a.pod == name)
    known = of.history.explanation_of(allocation.container_id)
    return None if known is None else explanation.explain_allocation(allocation, known, "0")


def why_rejected(of: Agent) -> Any:
    """The whole explanation of the only rejection."""
    (one,) = of.history.rejections
    known = of.history.explanation_of_rejection(one)
    return explanation.explain_rejection(known, one.reason, one.message)


def edit(path: Path, change: Callable[[str, dict[str, Any]], object]) -> None:
    """Change documents of a file by key, and make its lines intact again."""
    lines = [json.loads(line.split(b" ", 4)[4]) for line in path.read_bytes().splitlines()]
    for one in lines:
        for key, document in one.get("set", {}).items():
            change(key, document)
    framed = [
        frame_line(n, msgspec.convert(line, JournalLine) if n == 1 else _line_of(line))
        for n, line in enumerate(lines, 1)
    ]
    path.write_bytes(b"".join(framed))


def _line_of(line: dict[str, Any]) -> JournalLine:
    return JournalLine(updates={k: msgspec.Raw(encode(v)) for k, v in line["set"].items()})


# --- both over a restart ------------------------------------------------------------------------


def test_a_restart_keeps_notices_rejections_and_traces(bed: HistoryBed) -> None:
    before = agent()
    file, _ = bed.open_for(before)
    create(before, "own", 2)
    create(before, "big", 99)
    asyncio.run(file.save_last_changes())
    assert bed.path.stat().st_mode & 0o077 == 0
    # An upgrade reads the same file.
    after = bed.restarted(before.current.state, identity={**IDENTITY, "version": "2"})
    assert told(after) == told(before) is not None
    (then,), (now,) = before.history.rejections, after.history.rejections
    assert (now.pod, now.message, now.last_time) == (then.pod, then.message, then.last_time)
    assert why_rejected(after) == why_rejected(before)
    assert after.history.notices.notices_after() == before.history.notices.notices_after() != []
    create(after, "big", 99)
    (one,) = after.history.notices.notices_after()
    assert (one.id, one.count) == (before.history.notices.notices_after()[0].id, 2)


def test_files_of_the_version_before(bed: HistoryBed) -> None:
    before = busy()
    notices = before.history.notices
    notices.instance = "beef"
    head = {"nri_numa_notices": 1, "instance": "beef", "identity": IDENTITY, "number": 9}
    lines = [encode(one) for one in (head, *notices.notices_after())]
    (bed.directory / "notices").write_bytes(b"\n".join([*lines, b'{"id": "torn']))
    traces = [
        [i, crc32(encode(allocation_document(allocation))), trace]
        for i, (trace, allocation) in before.history.packed_traces().items()
    ]
    rest = msgspec.msgpack.encode([IDENTITY, traces, before.history.rejections])
    (bed.directory / "explanations").write_bytes(
        b"nri-numa explanations 7 %08x\n" % crc32(rest) + rest
    )
    for _ in range(2):
        after = bed.restarted(before.current.state)
        assert list(bed.directory.iterdir()) == [bed.path]
        assert told(after) == told(before) is not None
        assert why_rejected(after) == why_rejected(before)
        kept = after.history.notices
        assert (kept.instance, kept.number) == ("beef", 9)
        assert kept.notices_after() == notices.notices_after() != []


@pytest.mark.parametrize("more", [True, False])
def test_a_file_with_a_field_more_or_less_is_read(bed: HistoryBed, more: bool) -> None:
    """After an upgrade and after a rollback: what both versions know is explained."""
    before = busy()
    file, _ = bed.open_for(before)
    add_rejection(before.history.notices, 1)
    file.stop_writing()

    def change(key: str, document: dict[str, Any]) -> None:
        if "trace" in document:
            trace = document["trace"]
            packed = msgspec.msgpack.decode(decompress(msgspec.convert(trace["data"], bytes)))
            basis, alignment = packed
            if more:
                basis.append("new")
                packed.append("new")
            else:
                del basis[-1]
            if alignment is not None and more:
                alignment["new"] = alignment["problem"]["new"] = [1]
            trace["data"] = compress(msgspec.msgpack.encode(packed))
        if more:
            document["new"] = 7
        elif key.startswith("rejection/"):
            document.pop("count", None)

    edit(bed.path, change)
    if more:
        number = len(bed.path.read_bytes().splitlines()) + 1
        unknown = JournalLine(updates={"x/of a kind to come": msgspec.Raw(b"{}")})
        bed.path.write_bytes(bed.path.read_bytes() + frame_line(number, unknown))
    after = bed.restarted(before.current.state)
    assert told(after) == told(before) is not None
    assert "99 exclusive CPUs" in sentences.render_text(why_rejected(after), 200)
    assert after.history.notices.notices_after() == before.history.notices.notices_after()


@pytest.mark.parametrize("data", [compress(b"\x93\x01\x02\x03"), b"x is no zlib"])
def test_what_a_later_version_wrote_may_not_be_known(bed: HistoryBed, data: bytes) -> None:
    before = busy()
    bed.open_for(before)[0].stop_writing()
    edit(bed.path, lambda _, document: document.get("trace", {}).update(data=data))
    after = bed.restarted(before.current.state)
    for document in (told(after), why_rejected(after)):
        text = sentences.render_text(document, 200)
        assert "another version of nri-numa wrote" in text
        assert "last started" not in text, "no restart is blamed"


def test_the_devices_part_is_kept(bed: HistoryBed) -> None:
    before = agent()
    gpu = Device(id="gpu", numa_nodes=frozenset((2,)))
    requests = (DeviceRequest(resource="GPU", count=1, devices=(gpu,)),)
    for name, cpus in (("own", 2), ("big", 99)):
        of = pod(name, ALIGNED)
        made = container(of, wants=resources(cpus, 1))
        before.create_container(of, replace(made, devices=requests, pod_devices=requests))
    bed.open_for(before)
    after = bed.restarted(before.current.state)
    assert told(after) == told(before) is not None
    assert "GPU" in sentences.render_text(told(after), 200)
    assert [one.message for one in after.history.rejections] == [
        one.message for one in before.history.rejections
    ]


def test_a_decision_that_was_changed_since_is_not_explained_by_the_old_one(bed: HistoryBed) -> None:
    """The checkpoint has every resize, the file perhaps not the last one."""
    before = busy()
    bed.open_for(before)
    (own,) = (a for a in before.current.state.allocations.values() if a.pod == "own")
    changed = before.current.state.without_allocation(own.container_id).with_allocation(
        replace(own, cpu_milli=1000, reason="resized")
    )
    assert told(bed.restarted(changed)) is None
    assert bed.restarted(NodeState()).history.packed_traces() == {}


def test_former_kinds_and_reasons_are_read_as_the_current_ones(bed: HistoryBed) -> None:
    before = busy()
    (own,) = (a for a in before.current.state.allocations.values() if a.pod == "own")
    running = replace(own, unpinned_for=RejectionReason.CPU_EXCLUSIVE)
    state = before.current.state.with_allocation(running)
    before.current.restore_state(state)
    bed.open_for(before)[0].stop_writing()

    def write_former(key: str, document: dict[str, Any]) -> None:
        if key.startswith("trace/" + own.container_id):
            former = {**with_old_names(allocation_document(running)), "unpinned_for": "CPUOwned"}
            document["allocation_digest"] = crc32(encode(former))
        elif key.startswith("notice/"):
            document |= {"what": "refused", "reason": "GivenUp"}
        elif key.startswith("rejection/"):
            document["reason"] = "UnpaidCPUs"

    edit(bed.path, write_former)
    after = bed.restarted(state)
    assert told(after) is not None
    (notice,) = after.history.notices.notices_after()
    assert (notice.notice_kind, notice.reason) == ("rejected", "RepairsAbandoned")
    assert [one.reason for one in after.history.rejections] == ["CPUsNotRequested"]


# --- notices ------------------------------------------------------------------------------------


def test_a_killed_agent_goes_on_with_the_same_sequence(bed: HistoryBed) -> None:
    """Nothing is closed: every line is in the file already."""
    notices, _, _ = bed.opened()
    first = add_rejection(notices, 1)
    add_rejection(notices, 2)
    again, _, problem = bed.opened({**IDENTITY, "version": "2"})
    assert problem == ""
    assert (again.instance, again.number) == (notices.instance, 2)
    assert again.notices_after() == notices.notices_after()
    assert add_rejection(again, 1).id == first.id
    assert add_rejection(again, 3).id not in {one.id for one in notices.notices_after()}


def test_a_notice_with_former_fields_is_read(bed: HistoryBed) -> None:
    notices, file, _ = bed.opened()
    add_rejection(notices, 1)
    file.stop_writing()

    def write_former(key: str, document: dict[str, Any]) -> None:
        for former, current in (("what", "kind"), ("first", "firstTime"), ("last", "lastTime")):
            document[former] = document.pop(current)

    edit(bed.path, write_former)
    again, _, problem = bed.opened()
    assert (problem, again.notices_after()) == ("", notices.notices_after())


def test_numbers_go_on_when_nothing_is_kept(bed: HistoryBed) -> None:
    """A reader that asked for what comes after 5 must not miss a new 1."""
    notices, file, _ = bed.opened(limit=1)
    for n in range(5):
        add_rejection(notices, n)
    file.stop_writing()
    again, _, _ = bed.opened(limit=1)
    assert again.number == 5
    assert len(again.notices_after()) == 1


def test_what_is_noted_while_the_file_is_written_anew_is_in_the_new_one(
    bed: HistoryBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And until that takes the old one's place it is in the old one."""
    notices, file, _ = bed.opened()
    real, before = module.encode_lines, bed.path.stat().st_ino

    def slow_encode(*arguments: Any) -> list[bytes]:
        lines = real(*arguments)
        add_rejection(notices, 2)
        assert b"pod-2" in bed.path.read_bytes()
        return lines

    async def save() -> None:
        add_rejection(notices, 1)
        monkeypatch.setattr(module, "encode_lines", slow_encode)
        file.save_soon()
        file.save_soon()  # one at a time
        (saving,) = asyncio.all_tasks() - {asyncio.current_task()}
        await saving

    asyncio.run(save())
    assert bed.path.stat().st_ino != before
    monkeypatch.undo()
    assert [one.pod for one in bed.opened()[0].notices_after()] == ["pod-1", "pod-2"]


# --- files that are not as they were ------------------------------------------------------------


UNKNOWN = JournalLine(updates={"notice/x": msgspec.Raw(b'{"id":7}')})


def _without_line(data: bytes, number: int) -> bytes:
    lines = data.splitlines(keepends=True)
    lines[number] = lines[number].replace(b"pod", b"dop")
    return b"".join(lines)


@pytest.mark.parametrize(
    ("spoilt", "kept", "said"),
    [
        # A line costs itself, and one that a killed agent left unfinished is no news.
        (lambda good: good[:-20], 1, ""),
        (lambda good: _without_line(good, 1), 1, "1 of its lines"),
        (lambda good: good + b'{"id":"\xed\xa0"}\n', 2, "1 of its lines"),
        (lambda good: good + frame_line(4, UNKNOWN), 2, "1 of its lines"),
        # The head costs everything.
        (lambda good: good.replace(b'"instance":"', b'"instance":"x'), None, "is damaged"),
        (lambda good: good.ljust(3 * MAX_HISTORY_BYTES + 1, b"\n"), None, "larger than"),
        (lambda good: b"2 " + good, None, "of a newer version"),
        (lambda good: b"", None, "is damaged"),
        (lambda good: b"{}\n", None, "is damaged"),
        (lambda good: b"\xff" * 100, None, "is damaged"),
    ],
)
def test_of_a_spoilt_file_what_is_intact_counts(
    bed: HistoryBed, spoilt: Callable[[bytes], bytes], kept: int | None, said: str
) -> None:
    notices, _, _ = bed.opened()
    add_rejection(notices, 1)
    add_rejection(notices, 2)
    bed.path.write_bytes(spoilt(bed.path.read_bytes()))
    found, _, problem = bed.opened()
    assert said in problem if said else not problem
    assert len(found.notices_after()) == (kept or 0)
    assert (found.instance == notices.instance) is (kept is not None)
    add_rejection(found, 3)
    again, _, problem = bed.opened()
    assert (again.instance, again.notices_after(), problem) == (
        found.instance,
        found.notices_after(),
        "",
    )


def test_after_a_reboot_all_begins_anew(bed: HistoryBed) -> None:
    before = busy()
    bed.open_for(before)
    after = agent(before.current.state)
    _, problem = bed.open_for(after, {**IDENTITY, "boot": "another"})
    assert "another machine or boot" in problem
    assert after.history.notices.instance != before.history.notices.instance
    assert told(after) is None
    assert not after.history.rejections


def test_a_fifo_or_a_link_is_not_read(bed: HistoryBed) -> None:
    os.mkfifo(bed.path)
    assert "expected a regular file" in bed.opened()[2]
    bed.path.unlink()
    bed.path.symlink_to("/etc/passwd")
    assert "cannot be read" in bed.opened()[2]


def test_a_directory_that_is_not_ours_alone_is_not_written(bed: HistoryBed) -> None:
    notices, file, problem = bed.opened(writable=False)
    assert problem == ""
    assert len(notices.instance) == 8
    add_rejection(notices)
    asyncio.run(file.save_last_changes())
    assert list(bed.directory.iterdir()) == []


def test_a_link_at_the_new_file_is_not_followed(bed: HistoryBed) -> None:
    theirs = bed.directory / "theirs"
    theirs.write_text("precious")
    (bed.directory / "history.tmp").symlink_to(theirs)
    bed.opened()
    assert theirs.read_text() == "precious"
    assert not bed.path.is_symlink()


# --- when it is written, and how much -----------------------------------------------------------


def test_nothing_is_written_when_nothing_changed(bed: HistoryBed) -> None:
    again = busy()
    file, _ = bed.open_for(again)
    first = bed.path.stat().st_ino
    asyncio.run(file.save_last_changes())
    assert bed.path.stat().st_ino == first
    create(again, "new", 1)
    asyncio.run(file.save_last_changes())
    assert told(bed.restarted(again.current.state), "new") is not None


def test_the_file_stays_small(bed: HistoryBed, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written anew after as many bytes as said, not at each notice."""
    monkeypatch.setattr(module, "MAX_HISTORY_BYTES", 20_000)
    notices, _, _ = bed.opened(limit=4)
    files = set()
    for n in range(1000):
        add_rejection(notices, n % 4)
        files.add(bed.path.stat().st_ino)
        assert bed.path.stat().st_size < 24_000
    again, _, _ = bed.opened(limit=4)
    assert [one.count for one in again.notices_after()] == [250] * 4


def test_the_file_is_bounded_and_the_youngest_are_kept(bed: HistoryBed) -> None:
    """Whatever the number of containers; the oldest explanations are missed least."""
    clock = itertools.count()
    full = agent(now=lambda: float(next(clock)))
    for n in range(40):
        of = pod(f"p{n}", {"policy": "best-effort", "cpus": "shared"})
        full.create_container(of, container(of, wants=resources(0.1, 0.01)))
    snapshot = bed.open_for(full)[0]._current_snapshot()
    lines = encode_lines({}, snapshot, 10_000)
    assert sum(map(len, lines[1:])) <= 10_000 < sum(map(len, encode_lines({}, snapshot)))
    kept = [next(iter(json.loads(one.split(b" ", 4)[4])["set"])) for one in lines[1:]]
    youngest = sorted(full.current.state.allocations.values(), key=lambda a: -a.assigned_at)
    assert kept == [f"trace/{a.container_id}" for a in youngest[: len(kept)]]
    assert 0 < len(kept) < 40


def test_a_full_disk_is_said_once_and_nothing_is_lost(
    bed: HistoryBed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    notices, file, _ = bed.opened()
    broken = BrokenOS()
    monkeypatch.setattr(module, "os", broken)
    monkeypatch.setattr("nri_numa.store.files.os", broken)
    for n, (failing, most) in enumerate((({"write": errno.ENOSPC}, None), ({}, 9))):
        broken.failing, broken.write_at_most = dict(failing), most
        add_rejection(notices, 2 * n)
        add_rejection(notices, 2 * n + 1)
        if failing:
            asyncio.run(file.save_last_changes())
        assert [one.getMessage() for one in caplog.records] == ["history not saved"]
        caplog.clear()
        broken.failing, broken.write_at_most = {}, None
        asyncio.run(file.save_last_changes())
    assert caplog.records == []
    assert len(bed.opened()[0].notices_after()) == 4


def test_a_directory_in_place_of_the_file_costs_what_outlives_the_process(bed: HistoryBed) -> None:
    bed.path.mkdir()
    before = busy()
    file, problem = bed.open_for(before)
    assert "cannot be read" in problem
    asyncio.run(file.save_last_changes())
    assert bed.path.is_dir()
    assert not (bed.directory / "history.tmp").exists()
    assert told(before) is not None
