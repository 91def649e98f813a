"""An upgrade over containers whose records the version before wrote: nothing moves.

tests/golden/checkpoints/v1 has the checkpoint of that version, and tests/golden/upgrade pods and
containers as the runtime had them, each with the annotation of that version.
"""

import io
import json
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from nri_numa.engine.old_records import with_new_names, with_old_names
from nri_numa.engine.state import Allocation, ContainerKind
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.settings import Settings
from nri_numa.model.workload import Container, PodSandbox
from nri_numa.observe import logs
from nri_numa.store.checkpoint import CheckpointStore
from tests.beds.world import World
from tests.machines import named as machines

GOLDEN = Path(__file__).parents[1] / "golden"
CHECKPOINT = GOLDEN / "checkpoints" / "v1" / "containers.checkpoint"
RUNTIME = GOLDEN / "upgrade" / "containers.json"
IDENTITY = {"version": "0.1.0", "machine": "two sockets", "boot": "b1"}


class Runtime(msgspec.Struct):
    """Pods and containers of the fixture."""

    pods: list[PodSandbox]
    containers: list[Container]


def old_documents() -> dict[str, Any]:
    """What the version before wrote, by container."""
    (_, line) = CHECKPOINT.read_text().splitlines()
    documents = json.loads(line.split(" ", 4)[4])["set"]
    return {key[2:]: document for key, document in documents.items() if key.startswith("c/")}


def node(documents: dict[str, Any]) -> World:
    """The node with those containers, before the agent starts."""
    world = World(machines.dual_smt(cores_per_numa=8), Settings(reservation_seconds=600.0))
    world.store.documents = documents
    runtime = msgspec.json.decode(RUNTIME.read_bytes(), type=Runtime)
    world.pods = {of.id: of for of in runtime.pods}
    world.live = {made.id: made for made in runtime.containers}
    return world


def facts(a: Allocation) -> dict[str, Any]:
    """What an allocation says under the old names, for comparison."""
    return {
        "kind": a.kind, "cpus": a.cpus, "mems": a.mems, "numa": a.numa_nodes,
        "idle": a.idle_siblings, "owned": a.exclusive, "soft": a.yields_to_exclusive,
        "preferred": a.aligned, "leaves": a.migrating_from, "cpu_milli": a.cpu_milli,
    }  # fmt: skip


def old_facts(document: dict[str, Any]) -> dict[str, Any]:
    texts = {key: CPUSet.parse(document.get(key, "")) for key in ("cpus", "idle")}
    nodes = {key: NUMASet.parse(document.get(key, "")) for key in ("mems", "numa", "leaves")}
    flags = {key: document.get(key, False) for key in ("owned", "soft")}
    return {
        **texts, **nodes, **flags, "kind": ContainerKind(document["kind"]),
        "preferred": document.get("preferred", True), "cpu_milli": document.get("cpu_milli", 0),
    }  # fmt: skip


def test_a_checkpoint_of_the_version_before_moves_nobody(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.write_bytes(CHECKPOINT.read_bytes())
    store = CheckpointStore(str(tmp_path), identity=IDENTITY, clock=lambda: 0.0)
    loaded = store.load()
    store.close()
    assert loaded.problems == []
    written = path.read_text()
    assert all(line.startswith("2 ") for line in written.splitlines())
    for old in ("numa", "preferred", "idle", "owned", "soft", "leaves", "fixed", "former"):
        # A pod's affinity is the one thing that is still called preferred.
        assert f'"{old}":' not in written or old == "preferred"
    world = node(loaded.entries)
    assert world.restart() == ()
    state = world.agent.current.state
    documents = old_documents()
    assert {i: facts(a) for i, a in state.allocations.items()} == {
        i: old_facts(document) for i, document in documents.items()
    }
    assert {i for i, a in state.allocations.items() if a.immovable} == {"policy-app"}
    assert str(state.pods["uid-two"].affinity) == "1"
    assert str(state.pods["uid-ended"].previous["init"].cpus) == documents["ended-init"]["cpus"]
    world.check()
    assert world.restart() == (), "nor does the next start"


def test_annotations_of_the_version_before_move_nobody() -> None:
    """The checkpoint is lost, so they are all that says whose the CPUs are."""
    world = node({})
    before = {i: world.cpus(i) for i in world.live}
    updates = world.restart()
    # The reservation for a pod whose container ended is lost with the checkpoint.
    given_back = CPUSet.parse(old_documents()["ended-init"]["cpus"])
    assert {one.container_id for one in updates} == {"mems-app", "plain-app", "yielding-app"}
    assert {world.cpus(i) - cpus for i, cpus in before.items()} == {CPUSet(), given_back}
    state = world.agent.current.state
    expected = {i: old_facts(d) for i, d in old_documents().items() if i in world.live}
    assert {i: facts(a) for i, a in state.allocations.items()} == expected
    world.check()


def test_an_annotation_of_a_newer_version_is_not_adopted() -> None:
    world = node({})
    made = world.live["own-app"]
    (name, text) = next(iter(made.annotations.items()))
    newer = json.dumps(json.loads(text) | {"format": 3})
    world.live = {"own-app": replace(made, annotations={name: newer})}
    output = io.StringIO()
    logs.setup_logging("debug", stream=output)
    world.restart()
    assert "is in format 3, expected at most 2: decided anew" in output.getvalue()


def test_a_document_has_the_names_of_either_format() -> None:
    document = {"podUID": "u", "numaNodes": "0", "exclusive": True, "cpus": "1"}
    assert with_new_names(with_old_names(document)) == document
    assert with_old_names(document) == {"pod_uid": "u", "numa": "0", "owned": True, "cpus": "1"}
