"""Containers and pods as the checkpoint keeps them: everything that is known, and nothing else."""

import io

import pytest

from nri_numa.engine.state import FORMER_KINDS, NodeState
from nri_numa.model.reasons import FORMER_REASONS
from nri_numa.model.workload import ChangedStateIds
from nri_numa.observe import logs
from nri_numa.observe.metrics import Metrics
from nri_numa.store.journal import state_from
from tests.beds.allocations import allocation
from tests.beds.world import MemoryStore

SHORT = {
    "podID": "s",
    "podUID": "u",
    "namespace": "shop",
    "pod": "web",
    "container": "app",
    "kind": "unpinned",
    "qos": "BestEffort",
    "since": 0.0,
    "reason": "",
}


@pytest.mark.parametrize(
    "damage",
    [
        {"kind": "other"},
        {"pod": 3},
        {"slots": 3},
        {"cpus": "x"},
        {"charges": {"0": ["x"]}},
        {"since": "x"},
        {"kind": "exclusive"},
        {"memory": 10**30},
        {"memory": -1},
        {"cpuMilli": 10**30},
        {"hugepages": {"2097152": 10**30}},
        {"charges": {"0": [0, 10**30, {}]}},
        {"quota": -(10**30)},
    ],
)
def test_a_damaged_document_costs_itself_and_is_said(damage: dict[str, object]) -> None:
    state, problems = state_from(
        {"c/bad": {**SHORT, **damage}, "c/good": SHORT, "p/u": {"podID": "s"}, "x/y": SHORT}
    )
    assert set(state.allocations) == {"good"}
    assert state.pods["u"].containers == {"good"}
    assert problems[0].startswith("checkpoint entry 'c/bad' is damaged and was left out: ")
    assert problems[1:] == ["checkpoint entry 'x/y' is of no known sort and was left out"]


@pytest.mark.parametrize(
    ("reason", "facts"),
    [
        ("shared CPUs on NUMA node 0, misaligned", {"is_misaligned"}),
        ("shared CPUs on NUMA node 0, misaligned, less than requested",
         {"is_misaligned", "has_shortfall"}),
        ("unpinned: not decided yet, and it was running already", {"is_undecided"}),
        ("unpinned: NotEnoughCPUs, and it was running already", {"unpinned_for"}),
        ("unpinned: QuotaExceeded", {"unpinned_for"}),
        ("not pinned: bind: none", set()),
        ("1 exclusive CPU on NUMA node 0; moved to make room for a/b/c", {"moved_for"}),
    ],
)  # fmt: skip
def test_what_older_versions_said_in_the_reason_is_known(reason: str, facts: set[str]) -> None:
    state, problems = state_from({"c/old": {**SHORT, "reason": reason}})
    one = state.allocations["old"]
    names = ("has_shortfall", "is_misaligned", "is_undecided", "moved_for", "unpinned_for")
    assert {name for name in names if getattr(one, name)} == facts
    assert (problems, one.reason) == ([], reason), "which older versions need again"


@pytest.mark.parametrize(("former", "current"), FORMER_REASONS.items())
def test_a_former_reason_is_read_as_the_current_one(former: str, current: str) -> None:
    state, problems = state_from({"c/old": {**SHORT, "unpinnedFor": former}})
    assert (problems, state.allocations["old"].unpinned_for) == ([], current)


@pytest.mark.parametrize(("former", "current"), FORMER_KINDS.items())
def test_a_former_kind_is_read_as_the_current_one(former: str, current: str) -> None:
    document = {**SHORT, "cpus": "1"} if current == "listed" else SHORT
    state, problems = state_from({"c/old": {**document, "kind": former}})
    assert (problems, state.allocations["old"].kind) == ([], current)


def test_what_an_older_version_also_said_is_passed_over() -> None:
    assert state_from({"c/old": {**SHORT, "ahead": True}}) == state_from({"c/old": SHORT})


BEFORE = NodeState()
AFTER = BEFORE.with_allocation(allocation())
CHANGE = ChangedStateIds(containers=("c",), pods=("u",))


def test_a_disk_that_is_full_for_a_while_is_said_when_it_is_and_when_it_was() -> None:
    store = MemoryStore(lambda: 10.0)
    store.metrics = Metrics("test")
    output = io.StringIO()
    logs.setup_logging("debug", stream=output)
    store.full = True
    store.write_change(BEFORE, AFTER, CHANGE)
    store.write_change(BEFORE, AFTER, CHANGE)
    assert "no space left on device" in store.write_problem
    assert store.metrics.registry.get_sample_value("nri_numa_checkpoint_errors_total") == 2
    assert store.written_at is None
    store.full = False
    store.write_change(AFTER, AFTER, CHANGE)
    assert (store.write_problem, store.written_at, set(store.documents)) == ("", 10.0, {"c/c"})
    text = output.getvalue()
    assert text.count("checkpoint not written") == text.count("checkpoint written again") == 1


def test_where_nothing_changed_nothing_is_written() -> None:
    store = MemoryStore()
    store.write_change(AFTER, AFTER, CHANGE)
    assert (store.written_at, store.documents) == (None, {})
