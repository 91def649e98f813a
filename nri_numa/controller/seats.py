"""Which Nodes a pod may be put on, as far as its own words and the Nodes' tell. Pure.

The rules are those of kube-scheduler's filters NodeAffinity, NodeUnschedulable and TaintToleration
(k8s.io/component-helpers/scheduling/corev1). What else keeps a pod from a node (volumes, affinity
among pods, spread, sums of requests) is not looked at here: whoever asks must bear a wrong yes.
A word that is not known here is a no.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

_FORBIDS: Final = frozenset({"NoSchedule", "NoExecute"})
_UNSCHEDULABLE: Final = ("node.kubernetes.io/unschedulable", "", "NoSchedule")

Taint = tuple[str, str, str]
"""Key, value and effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What of a Node decides who may come.

    Attributes:
        name: of the Node.
        labels: of it.
        taints: those that keep pods away.
    """

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()


def seat(
    name: str,
    labels: Mapping[str, str] | None,
    taints: Sequence[Taint],
    *,
    unschedulable: bool,
) -> Seat:
    """What counts of a Node.

    Args:
        name: of the Node.
        labels: of it.
        taints: all of them.
        unschedulable: it is cordoned.
    """
    found = [one for one in taints if one[2] in _FORBIDS]
    if unschedulable and not any(one[0] == _UNSCHEDULABLE[0] for one in found):
        found.append(_UNSCHEDULABLE)
    return Seat(name=name, labels=dict(labels or {}), taints=tuple(found))


def admits(to: Seat, spec: Mapping[str, Any]) -> bool:
    """Whether a pod with this spec may be put there.

    Args:
        to: the Node.
        spec: of the pod, as the API server has it.
    """
    tolerations = spec.get("tolerations") or ()
    if not all(any(_tolerates(one, taint) for one in tolerations) for taint in to.taints):
        return False
    chosen: Mapping[str, str] = spec.get("nodeSelector") or {}
    if any(to.labels.get(key) != value for key, value in chosen.items()):
        return False
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return True
    return any(_term(to, one) for one in required.get("nodeSelectorTerms") or ())


def _tolerates(toleration: Mapping[str, Any], taint: Taint) -> bool:
    key, value, effect = taint
    if toleration.get("effect") not in (None, "", effect):
        return False
    operator = toleration.get("operator") or "Equal"
    if not toleration.get("key"):
        return bool(operator == "Exists")
    if toleration["key"] != key:
        return False
    return bool(
        operator == "Exists" or (operator == "Equal" and (toleration.get("value") or "") == value)
    )


def _term(to: Seat, term: Mapping[str, Any]) -> bool:
    """All of a term's expressions; an empty term takes nobody."""
    labels, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not labels and not fields:
        return False
    return all(_matches(to.labels, one) for one in labels) and all(
        _matches({"metadata.name": to.name}, one) for one in fields
    )


def _matches(labels: Mapping[str, str], expression: Mapping[str, Any]) -> bool:
    value = labels.get(str(expression.get("key", "")))
    values = expression.get("values") or ()
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
            return _compared(value, values) > 0
        case "Lt":
            return _compared(value, values) < 0
        case _:
            return False


def _compared(value: str | None, values: Sequence[object]) -> int:
    """-1, 0 or 1; 0 where one of both is no whole number."""
    one = _number(value)
    other = _number(values[0]) if len(values) == 1 else None
    if one is None or other is None:
        return 0
    return (one > other) - (one < other)


def _number(text: object) -> int | None:
    if not isinstance(text, str) or len(text) > 18:
        return None
    try:
        return int(text)
    except ValueError:
        return None
