"""Where the scheduler would let a pod go, by its own words and the Nodes'."""

from __future__ import annotations

from typing import Any

import pytest

from nri_numa.controller.seats import admits, seat

LABELS = {"zone": "a", "size": "12"}


def terms(*expressions: dict[str, Any], of: str = "matchExpressions") -> dict[str, Any]:
    return affinity({of: list(expressions)})


def affinity(*listed: dict[str, Any]) -> dict[str, Any]:
    required = {"nodeSelectorTerms": list(listed)}
    return {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    }


def expression(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"key": key, "operator": operator, "values": list(values)}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, True),
        ({"nodeSelector": None, "affinity": None, "tolerations": None}, True),
        ({"nodeSelector": {"zone": "a"}}, True),
        ({"nodeSelector": {"zone": "b"}}, False),
        ({"nodeSelector": {"other": "a"}}, False),
        ({"affinity": {"nodeAffinity": {}}}, True),
        ({"affinity": {"podAffinity": {}}}, True),
        (terms(expression("zone", "In", "a", "b")), True),
        (terms(expression("zone", "In", "b")), False),
        (terms(expression("zone", "NotIn", "b")), True),
        (terms(expression("absent", "NotIn", "b")), True),
        (terms(expression("zone", "NotIn", "a")), False),
        (terms(expression("zone", "Exists")), True),
        (terms(expression("absent", "Exists")), False),
        (terms(expression("absent", "DoesNotExist")), True),
        (terms(expression("zone", "DoesNotExist")), False),
        (terms(expression("size", "Gt", "11")), True),
        (terms(expression("size", "Gt", "12")), False),
        (terms(expression("size", "Lt", "13")), True),
        (terms(expression("size", "Lt", "12")), False),
        (terms(expression("zone", "Gt", "1")), False),
        (terms(expression("absent", "Lt", "1")), False),
        (terms(expression("size", "Gt", "1", "2")), False),
        (terms(expression("size", "Gt", "9" * 30)), False),
        (terms(expression("zone", "Like", "a")), False),
        (terms(expression("metadata.name", "In", "n"), of="matchFields"), True),
        (terms(expression("metadata.name", "In", "m"), of="matchFields"), False),
        (terms(expression("zone", "Exists"), expression("size", "Lt", "1")), False),
        (affinity({}, {"matchExpressions": [expression("zone", "Exists")]}), True),
        (affinity({}), False),
        (affinity(), False),
    ],
)
def test_labels(spec: dict[str, Any], expected: bool) -> None:
    assert admits(seat("n", LABELS, (), unschedulable=False), spec) is expected


@pytest.mark.parametrize(
    ("taint", "tolerations", "expected"),
    [
        (("a", "b", "NoSchedule"), [], False),
        (("a", "b", "NoExecute"), [], False),
        (("a", "b", "PreferNoSchedule"), [], True),
        (("a", "b", "NoSchedule"), [{"operator": "Exists"}], True),
        (("a", "b", "NoSchedule"), [{"operator": "Exists", "effect": "NoExecute"}], False),
        (("a", "b", "NoSchedule"), [{"key": "a", "operator": "Exists"}], True),
        (("a", "b", "NoSchedule"), [{"key": "a", "value": "b"}], True),
        (("a", "", "NoSchedule"), [{"key": "a"}], True),
        (("a", "b", "NoSchedule"), [{"key": "a", "value": "c"}], False),
        (("a", "b", "NoSchedule"), [{"key": "c", "operator": "Exists"}], False),
        (("a", "b", "NoSchedule"), [{"value": "b"}], False),
        (("a", "5", "NoSchedule"), [{"key": "a", "operator": "Gt", "value": "4"}], False),
    ],
)
def test_taints(
    taint: tuple[str, str, str], tolerations: list[dict[str, Any]], expected: bool
) -> None:
    there = seat("n", None, [taint], unschedulable=False)
    assert admits(there, {"tolerations": tolerations}) is expected


def test_a_cordoned_node_takes_nobody_who_does_not_bear_it() -> None:
    for taints in ((), [("node.kubernetes.io/unschedulable", "", "NoSchedule")]):
        there = seat("n", {}, taints, unschedulable=True)
        assert len(there.taints) == 1
        assert not admits(there, {})
        assert admits(there, {"tolerations": [{"operator": "Exists"}]})
