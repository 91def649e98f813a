"""What a Node says of itself, and which pods it keeps away.

The rules are those of kube-scheduler's filters NodeUnschedulable, TaintToleration and NodeAffinity
(k8s.io/component-helpers/scheduling/corev1). A word that is not known here is a no.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct

from nri_numa.kube.requests import annotations_of, list_of_mappings, mapping_or_empty
from nri_numa.model.offline_capacity import DRAINED_ANNOTATION, parse_ids_or_empty

NODE_CONSTRAINTS: Final = ("tolerations", "nodeSelector", "affinity")
"""Fields of a pod's spec that say which Nodes it may be put on."""
INTERNAL_ADDRESS_TYPE: Final = "InternalIP"
"""Type of the address of a Node by which the cluster reaches it."""
_TAINT_EFFECTS: Final = frozenset({"NoSchedule", "NoExecute"})
_INTEGER_PATTERN: Final = re.compile(r"[-+]?[0-9]{1,18}")
_UNSCHEDULABLE_TAINT_KEY: Final = "node.kubernetes.io/unschedulable"


class Exclusion(StrEnum):
    """Why a Node takes no pod of a kind, whatever is free there."""

    CORDONED = "cordoned"
    TAINT = "taint"
    AFFINITY = "affinity"


class Taint(Struct, frozen=True):
    """A taint that keeps pods away."""

    key: str
    value: str
    effect: str


class NodeFacts(Struct, frozen=True, kw_only=True):
    """What counts of a Node.

    Attributes:
        taints: those that keep pods away, with the one of a cordon.
        drained: NUMA nodes that are to be emptied.
        address: by which the cluster reaches it; empty where its status was not read.
    """

    name: str
    labels: Mapping[str, str]
    taints: tuple[Taint, ...]
    unschedulable: bool
    drained: frozenset[int]
    address: str


def read_node(name: str, document: Mapping[str, Any], prefix: str) -> NodeFacts:
    """Read a Node; what makes no sense in it is not there."""
    spec = mapping_or_empty(document.get("spec"))
    taints = [
        Taint(str(one.get("key") or ""), str(one.get("value") or ""), one["effect"])
        for one in list_of_mappings(spec.get("taints"))
        if one.get("effect") in _TAINT_EFFECTS
    ]
    unschedulable = bool(spec.get("unschedulable"))
    if unschedulable and not any(one.key == _UNSCHEDULABLE_TAINT_KEY for one in taints):
        taints.append(Taint(_UNSCHEDULABLE_TAINT_KEY, "", "NoSchedule"))
    addresses = list_of_mappings(mapping_or_empty(document.get("status")).get("addresses"))
    internal = (
        str(one.get("address", "")) for one in addresses if one.get("type") == INTERNAL_ADDRESS_TYPE
    )
    return NodeFacts(
        name=name,
        labels=mapping_or_empty(mapping_or_empty(document.get("metadata")).get("labels")),
        taints=tuple(taints),
        unschedulable=unschedulable,
        drained=parse_ids_or_empty(annotations_of(document).get(f"{prefix}/{DRAINED_ANNOTATION}")),
        address=next(internal, ""),
    )


def node_admits(facts: NodeFacts, spec: Mapping[str, Any]) -> Exclusion | None:
    """Why a Node takes no pod with this spec; None where it may be put there."""
    tolerations = list_of_mappings(spec.get("tolerations"))
    for taint in facts.taints:
        if not any(_tolerates_taint(one, taint) for one in tolerations):
            cordon = taint.key == _UNSCHEDULABLE_TAINT_KEY
            return Exclusion.CORDONED if cordon else Exclusion.TAINT
    selector = mapping_or_empty(spec.get("nodeSelector"))
    if any(facts.labels.get(key) != value for key, value in selector.items()):
        return Exclusion.AFFINITY
    affinity = mapping_or_empty(mapping_or_empty(spec.get("affinity")).get("nodeAffinity"))
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return None
    terms = list_of_mappings(mapping_or_empty(required).get("nodeSelectorTerms"))
    return None if any(_matches_term(facts, one) for one in terms) else Exclusion.AFFINITY


def _tolerates_taint(toleration: Mapping[str, Any], taint: Taint) -> bool:
    if toleration.get("effect") not in (None, "", taint.effect):
        return False
    operator = toleration.get("operator") or "Equal"
    if not toleration.get("key"):
        return bool(operator == "Exists")
    if toleration["key"] != taint.key:
        return False
    same = (toleration.get("value") or "") == taint.value
    return bool(operator == "Exists" or (operator == "Equal" and same))


def _matches_term(facts: NodeFacts, term: Mapping[str, Any]) -> bool:
    """All of a term's expressions; an empty term takes no pod."""
    labels = list_of_mappings(term.get("matchExpressions"))
    fields = list_of_mappings(term.get("matchFields"))
    if not labels and not fields:
        return False
    return all(_matches_expression(facts.labels, one) for one in labels) and all(
        _matches_expression({"metadata.name": facts.name}, one) for one in fields
    )


def _matches_expression(labels: Mapping[str, str], expression: Mapping[str, Any]) -> bool:
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
    """-1, 0 or 1; 0 where one of both is no whole number."""
    texts = [one for one in (value, *values) if isinstance(one, str)]
    if len(texts) != 2 or len(values) != 1 or not all(map(_INTEGER_PATTERN.fullmatch, texts)):
        return 0
    one, other = map(int, texts)
    return (one > other) - (one < other)
