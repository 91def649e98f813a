"""What is repaired, decided without a cgroup, a runtime or a clock."""

from __future__ import annotations

import pytest

from nri_numa.agent.drift_policy import REPAIR_COUNT_WINDOW_S, RepairHistory, plan_repairs
from nri_numa.engine.desired import Drift, recorded_actual
from nri_numa.model.cpuset import CPUSet

NOW = 1000.0


def drift(name: str, cpus: str = "0") -> Drift:
    """One whose list is to be written; without CPUs it is only reported."""
    actual = recorded_actual("1", "", None)
    return Drift(container_id=name, name=name, cpus=CPUSet.parse(cpus), actual=actual)


@pytest.mark.parametrize(
    ("given", "drifted", "abandoned", "writes"),
    [
        ({}, "fought new stuck", "fought", "late new updating"),
        ({"may_repair": False}, "fought new stuck", "fought", "late"),
        ({"observe": True}, "fought new stuck", "", ""),
        ({"max_repairs": 3}, "fought new stuck", "", "fought late new updating"),
        ({"now": NOW + REPAIR_COUNT_WINDOW_S}, "fought new stuck", "", "fought late new updating"),
    ],
    ids=["usual", "without the runtime", "observe", "fewer repairs", "later"],
)
def test_what_is_late_or_being_updated_is_written_and_no_drift(
    given: dict[str, float], drifted: str, abandoned: str, writes: str
) -> None:
    history = RepairHistory()
    for _ in range(2):
        history.add("fought", NOW)
    found = [*map(drift, ("fought", "late", "new", "updating")), drift("stuck", "")]
    usual = {"now": NOW, "max_repairs": 2, "observe": False, "may_repair": True}
    plan = plan_repairs(found, history, late={"late"}, updating={"updating"}, **usual | given)
    for some, names in (
        (plan.drifted, drifted),
        (plan.abandoned, abandoned),
        (plan.writes, writes),
    ):
        assert sorted(one.container_id for one in some) == names.split()


def test_repairs_are_remembered_for_a_window_of_those_that_live() -> None:
    history = RepairHistory()
    for name in ("drifting", "right", "gone"):
        history.add(name, NOW)
    history.retain({"drifting"}, {"right"}, NOW + 1)
    assert [name in history for name in ("drifting", "right", "gone")] == [True, True, False]
    history.retain({"drifting"}, {"right"}, NOW + REPAIR_COUNT_WINDOW_S)
    assert [name in history for name in ("drifting", "right")] == [True, False]
