"""Arguments and results of kube-scheduler's extender protocol (k8s.io/kube-scheduler/extender/v1).

The Go structs have no JSON names: keys are written with a capital letter, and read in any case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

MAX_NODE_NAMES: Final = 20_000
"""Nodes in one question; four times the largest cluster that Kubernetes supports."""

MAX_VICTIMS: Final = 100_000
"""Pods that one question may name."""

MAX_NODES_PER_REASON: Final = 500
"""Nodes that an answer names for one reason: kube-scheduler samples as many of 5,000."""


class BadRequest(ValueError):
    """A question that cannot be answered; the text says what was expected."""


@dataclass(frozen=True, slots=True)
class ExtenderArgs:
    """ExtenderArgs: a pod, and the nodes that passed kube-scheduler's own filters."""

    pod: Mapping[str, Any]
    node_names: list[str]


@dataclass(frozen=True, slots=True)
class BindingArgs:
    """ExtenderBindingArgs: a pod, and the node that was chosen."""

    namespace: str
    name: str
    uid: str
    node: str


@dataclass(frozen=True, slots=True)
class ProposedVictims:
    """MetaVictims: UIDs of pods to evict from a node, and evictions that no budget allows."""

    uids: tuple[str, ...]
    violations: int


@dataclass(frozen=True, slots=True)
class PreemptionArgs:
    """ExtenderPreemptionArgs: a pod, and the victims that kube-scheduler proposes by node."""

    pod: Mapping[str, Any]
    victims_by_node: Mapping[str, ProposedVictims]


def parse_extender_args(body: bytes) -> ExtenderArgs:
    """Read the body of filter or prioritize.

    Raises:
        BadRequest: it is not valid, or has nodes instead of their names.
    """
    keys = _decode_lowercase_keys(body, "ExtenderArgs")
    pod, names = _require_pod(keys), keys.get("nodenames")
    if names is None:
        raise BadRequest("NodeNames is not there, expected names: set nodeCacheCapable: true")
    if not isinstance(names, list) or len(names) > MAX_NODE_NAMES:
        raise BadRequest(f"NodeNames is no list of at most {MAX_NODE_NAMES} names")
    if not {*map(type, names)} <= {str}:
        raise BadRequest("NodeNames has something else than names")
    return ExtenderArgs(pod, names)


def parse_binding_args(body: bytes) -> BindingArgs:
    """Read the body of bind.

    Raises:
        BadRequest: something is missing.
    """
    keys = _decode_lowercase_keys(body, "ExtenderBindingArgs")
    values = []
    for key in ("PodNamespace", "PodName", "PodUID", "Node"):
        value = keys.get(key.lower())
        if not isinstance(value, str) or not value or len(value) > 512 or "/" in value:
            raise BadRequest(f"{key} is not there, or is no name")
        values.append(value)
    return BindingArgs(*values)


def parse_preemption_args(body: bytes) -> PreemptionArgs:
    """Read the body of preempt.

    Raises:
        BadRequest: it is not valid, or has pods instead of their UIDs.
    """
    keys = _decode_lowercase_keys(body, "ExtenderPreemptionArgs")
    pod, nodes = _require_pod(keys), keys.get("nodenametometavictims")
    if nodes is None:
        raise BadRequest(
            "NodeNameToMetaVictims is not there, expected UIDs: set nodeCacheCapable: true"
        )
    if not isinstance(nodes, Mapping) or len(nodes) > MAX_NODE_NAMES:
        raise BadRequest(f"NodeNameToMetaVictims is no mapping of at most {MAX_NODE_NAMES} nodes")
    victims_by_node = {name: _parse_victims(name, value) for name, value in nodes.items()}
    if sum(len(victims.uids) for victims in victims_by_node.values()) > MAX_VICTIMS:
        raise BadRequest(f"NodeNameToMetaVictims has more than {MAX_VICTIMS} pods")
    return PreemptionArgs(pod, victims_by_node)


def _require_pod(keys: Mapping[str, Any]) -> Mapping[str, Any]:
    pod = keys.get("pod")
    if not isinstance(pod, Mapping):
        raise BadRequest("Pod is not there, expected a v1 Pod")
    return pod


def _parse_victims(node: str, value: object) -> ProposedVictims:
    keys = _lowercase_keys(value)
    pods, violations = keys.get("pods") or [], keys.get("numpdbviolations") or 0
    uids = [_lowercase_keys(p).get("uid") for p in pods] if isinstance(pods, list) else [None]
    if not all(isinstance(uid, str) for uid in uids) or not isinstance(violations, int):
        raise BadRequest(f"NodeNameToMetaVictims, {node[:253]}: expected Pods with UID")
    return ProposedVictims(tuple(map(str, uids)), violations)


def _lowercase_keys(value: object) -> dict[str, Any]:
    return {k.lower(): v for k, v in value.items()} if isinstance(value, Mapping) else {}


def _decode_lowercase_keys(body: bytes, kind: str) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is no JSON: {str(error)[:200]}") from None
    if not isinstance(document, dict):
        raise BadRequest(f"the body is no object, expected {kind}")
    return _lowercase_keys(document)


def encode_filter_result(
    names: Sequence[str], failed: Mapping[str, str], hopeless: Mapping[str, str]
) -> bytes:
    """Encode ExtenderFilterResult, with at most `MAX_NODES_PER_REASON` names for each reason."""
    document = {
        "NodeNames": names,
        "FailedNodes": _drop_nodes_beyond_reason_limit(failed),
        "FailedAndUnresolvableNodes": _drop_nodes_beyond_reason_limit(hopeless),
        "Error": "",
    }
    return msgspec.json.encode(document)


def _drop_nodes_beyond_reason_limit(reasons: Mapping[str, str]) -> Mapping[str, str]:
    """Limit the nodes of each reason; its text then says how many more nodes it applies to."""
    if len(reasons) <= MAX_NODES_PER_REASON:
        return reasons
    members: dict[str, list[str]] = {}
    for name, text in reasons.items():
        members.setdefault(text, []).append(name)
    listed_reasons: dict[str, str] = {}
    for text, names in members.items():
        if (surplus := len(names) - MAX_NODES_PER_REASON) > 0:
            text = f"{text} (also on {surplus} more nodes)"
        listed_reasons.update(dict.fromkeys(names[:MAX_NODES_PER_REASON], text))
    return listed_reasons


def encode_priorities(scores: Sequence[tuple[str, int]]) -> bytes:
    """Encode HostPriorityList."""
    return msgspec.json.encode([{"Host": name, "Score": score} for name, score in scores])


def encode_victims(victims_by_node: Mapping[str, ProposedVictims]) -> bytes:
    """Encode ExtenderPreemptionResult; a node without victims would be an error of the call."""
    document = {
        name: {
            "Pods": [{"UID": uid} for uid in victims.uids],
            "NumPDBViolations": victims.violations,
        }
        for name, victims in victims_by_node.items()
        if victims.uids
    }
    return msgspec.json.encode({"NodeNameToMetaVictims": document})


def encode_error(text: str) -> bytes:
    """Encode a filter or binding result that has only an error; an empty text is success."""
    return msgspec.json.encode({"Error": text})
