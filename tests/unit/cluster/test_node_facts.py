"""What a Node says of itself, and which pods it keeps away."""

from collections.abc import Mapping
from typing import Any

import pytest

from nri_numa.cluster.node_facts import Exclusion, NodeFacts, node_admits, read_node
from tests.beds.objects import PREFIX


def facts(labels: Mapping[str, str] | None = None, **spec: Any) -> NodeFacts:
    return read_node("n", {"metadata": {"labels": labels}, "spec": spec}, PREFIX)


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
        (terms(expression("size", "Lt", "9" * 18)), True),
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
    found = node_admits(facts(labels=LABELS), spec)
    assert found is (None if expected else Exclusion.AFFINITY)


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
    there = facts(taints=[dict(zip(("key", "value", "effect"), taint, strict=True))])
    found = node_admits(there, {"tolerations": tolerations})
    assert found is (None if expected else Exclusion.TAINT)


def test_a_cordoned_node_takes_no_pod_that_does_not_bear_it() -> None:
    written = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    for taints in ([], [written]):
        there = facts(taints=taints, unschedulable=True)
        assert len(there.taints) == 1
        assert node_admits(there, {}) is Exclusion.CORDONED
        assert node_admits(there, {"tolerations": [{"operator": "Exists"}]}) is None


@pytest.mark.parametrize(
    "odd",
    [
        {"metadata": 3, "spec": [], "status": "x"},
        {"metadata": {"labels": [], "annotations": {f"{PREFIX}/drained": 1}}},
        {"spec": {"taints": [3, {"effect": "NoSchedul"}]}, "status": {"addresses": [{}, "x"]}},
    ],
)
def test_what_makes_no_sense_in_a_node_is_not_there(odd: dict[str, Any]) -> None:
    assert read_node("n", odd, PREFIX) == facts()
    for spec in ({"tolerations": 3, "nodeSelector": "x", "affinity": []}, {"tolerations": ["x"]}):
        assert node_admits(facts(), spec) is None


def test_what_is_drained_and_where_a_node_is() -> None:
    found = read_node(
        "n",
        {
            "metadata": {"annotations": {f"{PREFIX}/drained": "0-1"}},
            "status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.7"}]},
        },
        PREFIX,
    )
    assert (found.drained, found.address) == ({0, 1}, "10.0.0.7")
