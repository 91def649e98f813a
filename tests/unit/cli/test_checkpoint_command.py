"""``nri-numa checkpoint`` beside a store that holds its directory."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_numa.engine.state import ContainerKind, NodeState, build_node_state
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.workload import ChangedStateIds, Policy
from nri_numa.store import journal
from nri_numa.store.checkpoint import CheckpointStore
from tests.beds.allocations import allocation
from tests.beds.cli import invoke


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A state directory in use, with one exclusive and one unpinned container."""
    state = build_node_state(
        [
            allocation(
                "c1",
                ContainerKind.EXCLUSIVE,
                pod="cart-0",
                container="server",
                cpus=CPUSet([2, 3]),
                exclusive=True,
                numa_nodes=NUMASet([0]),
                mems=NUMASet([0]),
                policy=Policy.RESTRICTED,
                reason="because",
            ),
            allocation("c2", pod="evil\x1b[31m"),
        ]
    )
    identity = {"version": "0.1.0", "machine": "m", "boot": "b"}
    store = CheckpointStore(str(tmp_path), identity=identity, clock=lambda: 1.0)
    store.load()
    change = ChangedStateIds(containers=("c1", "c2"), pods=("u",))
    store.append_documents(journal.changed_documents(NodeState(), state, change))
    yield tmp_path
    store.close()


def test_the_table_shows_what_was_meant_while_the_agent_runs(directory: Path) -> None:
    result = invoke("checkpoint", "--state-dir", str(directory), code=0)
    assert "by version 0.1.0" in result.output
    (line,) = [row for row in result.output.splitlines() if "cart-0" in row]
    assert line.split()[:6] == ["shop", "cart-0", "server", "exclusive", "2-3", "0"]
    assert "\x1b" not in result.output


def test_the_document_names_every_field(directory: Path) -> None:
    result = invoke("checkpoint", str(directory / "checkpoint"), "-o", "json", code=0)
    first, second = json.loads(result.output)["containers"]
    assert (first["cpus"], first["policy"], first["reason"]) == ("2-3", "restricted", "because")
    assert (second["kind"], second["pod"]) == ("unpinned", "evil\x1b[31m")


def test_a_torn_file_is_shown_as_far_as_it_goes_and_is_exit_code_1(directory: Path) -> None:
    path = directory / "checkpoint"
    torn = directory / "torn"
    torn.write_bytes(path.read_bytes()[:-7])
    result = invoke("checkpoint", str(torn), code=1)
    assert "unfinished record" in result.output
