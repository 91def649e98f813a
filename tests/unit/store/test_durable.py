"""A state that cannot be written is said once, made up for, and said again when it is well."""

from __future__ import annotations

from nri_numa.engine.state import NodeState
from nri_numa.engine.values.workload import StateChange
from nri_numa.observe.metrics import Metrics
from nri_numa.store.durable import Durable
from tests.beds.allocations import allocation
from tests.beds.world import MemoryStore

BEFORE = NodeState()
AFTER = BEFORE.with_allocation(allocation())
CHANGE = StateChange(containers=("c",), pods=("u",))


class Bed:
    """A store, and what is said about it."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.metrics = Metrics("test")
        self.said: list[tuple[str, str]] = []
        self.clock = 10.0
        self.durable = Durable(
            self.store,
            self.metrics,
            now=lambda: self.clock,
            note=lambda level, event, **fields: self.said.append((level, event)),
        )

    @property
    def errors(self) -> float | None:
        return self.metrics.registry.get_sample_value("nri_numa_checkpoint_errors_total")


def test_a_disk_that_is_full_for_a_while_is_said_when_it_is_and_when_it_was() -> None:
    bed = Bed()
    bed.store.full = True
    bed.durable.write(BEFORE, AFTER, CHANGE)
    bed.durable.write(BEFORE, AFTER, CHANGE)
    assert bed.said == [("error", "checkpoint not written")]
    assert "no space left on device" in bed.durable.problem
    assert (bed.errors, bed.durable.written_at) == (2, None)
    bed.store.full = False
    bed.durable.flush()
    assert bed.said[1:] == [("info", "checkpoint written again")]
    assert (bed.durable.problem, bed.durable.written_at) == ("", 10.0)
    assert set(bed.store.documents) == {"c/c"}


def test_where_nothing_changed_nothing_is_written() -> None:
    bed = Bed()
    bed.durable.write(AFTER, AFTER, CHANGE)
    bed.durable.flush()
    assert (bed.durable.written_at, bed.said, bed.store.documents) == (None, [], {})
    bed.durable.write(BEFORE, AFTER, CHANGE)
    bed.clock = 20.0
    bed.durable.flush()
    assert bed.durable.written_at == 10.0
