"""Facts of a Node, and the pods that it excludes.

The rules are those of kube-scheduler's filters NodeUnschedulable, TaintToleration and NodeAffinity
(k8s.io/component-helpers/scheduling/corev1). An unknown operator or effect does not match.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct

from nri_numa.kube.requests import annotations_of, list_of_mappings, mapping_or_empty, section_of
from nri_numa.model.offline_capacity import DRAINED_ANNOTATION, parse_ids_or_empty

NODE_CONSTRAINTS: Final = ("tolerations", "nodeSelector", "affinity")
"""Fields of a pod's spec that say which Nodes it may be put on."""
INTERNAL_ADDRESS_TYPE: Final = "InternalIP"
"""Type of the address of a Node by which the cluster reaches it."""
_TAINT_EFFECTS: Final = frozenset({"NoSchedule", "NoExecute"})
_INTEGER_PATTERN: Final = re.compile(r"[-+]?[0-9]{1,18}")
_UNSCHEDULABLE_TAINT_KEY: Final = "node.kubernetes.io/unschedulable"


class Exclusion(StrEnum):
    """Reason why a Node excludes a pod, whatever its free resources."""

    CORDONED = "cordoned"
    TAINT = "taint"
    AFFINITY = "affinity"


class Taint(Struct, frozen=True):
    """A taint that keeps pods away."""

    key: str
    value: str
    effect: str


class NodeFacts(Struct, frozen=True, kw_only=True):
    """Facts of a Node that decide about pods.

    Attributes:
        taints: taints that keep pods away, including that of a cordon.
        drained: NUMA nodes that are drained.
        address: internal address; empty if the status was not read.
    """

    name: str
    labels: Mapping[str, str]
    taints: tuple[Taint, ...]
    unschedulable: bool
    drained: frozenset[int]
    address: str


def read_node(name: str, document: Mapping[str, Any], prefix: str) -> NodeFacts:
    """Read a Node; invalid fields count as missing."""
    spec = section_of(document, "spec")
    taints = [
        Taint(str(e.get("key") or ""), str(e.get("value") or ""), e["effect"])
        for e in list_of_mappings(spec.get("taints"))
        if e.get("effect") in _TAINT_EFFECTS
    ]
    unschedulable = bool(spec.get("unschedulable"))
    if unschedulable and not any(e.key == _UNSCHEDULABLE_TAINT_KEY for e in taints):
        taints.append(Taint(_UNSCHEDULABLE_TAINT_KEY, "", "NoSchedule"))
    addresses = list_of_mappings(section_of(document, "status").get("addresses"))
    internal = (
        str(e.get("address", "")) for e in addresses if e.get("type") == INTERNAL_ADDRESS_TYPE
    )
    return NodeFacts(
        name=name,
        labels=section_of(document, "metadata", "labels"),
        taints=tuple(taints),
        unschedulable=unschedulable,
        drained=parse_ids_or_empty(annotations_of(document).get(f"{prefix}/{DRAINED_ANNOTATION}")),
        address=next(internal, ""),
    )


def node_admits(facts: NodeFacts, spec: Mapping[str, Any]) -> Exclusion | None:
    """Return the reason why a Node excludes a pod with this spec; None if it admits the pod."""
    tolerations = list_of_mappings(spec.get("tolerations"))
    for taint in facts.taints:
        if not any(_tolerates_taint(t, taint) for t in tolerations):
            cordon = taint.key == _UNSCHEDULABLE_TAINT_KEY
            return Exclusion.CORDONED if cordon else Exclusion.TAINT
    selector = section_of(spec, "nodeSelector")
    if any(facts.labels.get(key) != value for key, value in selector.items()):
        return Exclusion.AFFINITY
    affinity = section_of(spec, "affinity", "nodeAffinity")
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return None
    terms = list_of_mappings(mapping_or_empty(required).get("nodeSelectorTerms"))
    return None if any(_matches_term(facts, t) for t in terms) else Exclusion.AFFINITY


def _tolerates_taint(toleration: Mapping[str, Any], taint: Taint) -> bool:
    if toleration.get("effect") not in (None, "", taint.effect):
        return False
    operator = toleration.get("operator") or "Equal"
    if not toleration.get("key"):
        return bool(operator == "Exists")
    if toleration["key"] != taint.key:
        return False
    same_value = (toleration.get("value") or "") == taint.value
    return bool(operator == "Exists" or (operator == "Equal" and same_value))


def _matches_term(facts: NodeFacts, term: Mapping[str, Any]) -> bool:
    """Return True if all of a term's expressions match; an empty term matches no pod."""
    labels = list_of_mappings(term.get("matchExpressions"))
    fields = list_of_mappings(term.get("matchFields"))
    if not labels and not fields:
        return False
    return all(matches_expression(facts.labels, e) for e in labels) and all(
        matches_expression({"metadata.name": facts.name}, e) for e in fields
    )


def matches_expression(labels: Mapping[str, str], expression: Mapping[str, Any]) -> bool:
    """Return True if labels match an expression of a selector."""
    value = labels.get(str(expression.get("key", "")))
    listed = expression.get("values")
    values = listed if isinstance(listed, list) else []
    match expression.get("operator"):
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt":
            return _compare_integers(value, values) > 0
        case "Lt":
            return _compare_integers(value, values) < 0
        case _:
            return False


def _compare_integers(value: str | None, values: Sequence[object]) -> int:
    """Return -1, 0 or 1; 0 if either text is no whole number."""
    texts = [number for number in (value, *values) if isinstance(number, str)]
    if len(texts) != 2 or len(values) != 1 or not all(map(_INTEGER_PATTERN.fullmatch, texts)):
        return 0
    number, limit = map(int, texts)
    return (number > limit) - (number < limit)
