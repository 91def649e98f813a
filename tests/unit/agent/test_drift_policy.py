"""What is repaired, decided without a cgroup, a runtime or a clock."""

from typing import Any

import pytest

from nri_numa.agent.confirmations import TRY_COUNT_WINDOW_S, Confirmations
from nri_numa.agent.drift_policy import plan_repairs
from nri_numa.engine.desired import Drift, recorded_actual
from nri_numa.model.cpuset import CPUSet

NOW = 1000.0


def drift(name: str, cpus: str = "0") -> Drift:
    """One whose list is to be written; without CPUs it is only reported."""
    actual = recorded_actual("1", "", None)
    return Drift(
        container_id=name, pod=name, container="app", cpus=CPUSet.parse(cpus), actual=actual
    )


@pytest.mark.parametrize(
    ("given", "drifted", "abandoned", "writes"),
    [
        ({}, "fought new stuck", "fought", "late new updating"),
        ({"may_repair": False}, "fought new stuck", "fought", "late"),
        ({"observe": True}, "fought new stuck", "", ""),
        ({"exhausted": ()}, "fought new stuck", "", "fought late new updating"),
    ],
    ids=["usual", "without the runtime", "observe", "fewer repairs"],
)
def test_what_is_late_or_being_updated_is_written_and_no_drift(
    given: dict[str, Any], drifted: str, abandoned: str, writes: str
) -> None:
    found = [*map(drift, ("fought", "late", "new", "updating")), drift("stuck", "")]
    usual = {"exhausted": {"fought", "late"}, "observe": False, "may_repair": True}
    plan = plan_repairs(found, undelivered={"late"}, updating={"updating"}, **usual | given)
    for some, names in (
        (plan.drifted, drifted),
        (plan.abandoned, abandoned),
        (plan.writes, writes),
    ):
        assert sorted(one.container_id for one in some) == names.split()


def test_repairs_are_remembered_for_a_window_of_those_that_live() -> None:
    confirmations = Confirmations()
    for name in ("drifting", "right", "gone"):
        confirmations.get_entry(name).tries = (NOW,)
    confirmations.retain_drifting({"drifting"}, {"right"}, NOW + 1)
    assert list(confirmations.entries) == ["drifting", "right"]
    confirmations.retain_drifting({"drifting"}, {"right"}, NOW + TRY_COUNT_WINDOW_S)
    assert list(confirmations.entries) == ["drifting"]
    assert confirmations.count_tries("drifting", NOW + TRY_COUNT_WINDOW_S) == 0
