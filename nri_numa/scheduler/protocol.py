"""What kube-scheduler asks an extender, and how it is answered (k8s.io/kube-scheduler/extender/v1).

The Go structs have no JSON names: keys are written with a capital letter, and read in any case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

MAX_NODE_NAMES: Final = 20_000
"""Nodes in one question; four times the largest cluster that Kubernetes supports."""

MAX_NODES_PER_REASON: Final = 500
"""Nodes that an answer names for one reason: kube-scheduler samples as many of 5,000."""


class BadRequest(ValueError):
    """The question cannot be answered; the text says what was expected."""


@dataclass(frozen=True, slots=True)
class ExtenderArgs:
    """ExtenderArgs: a pod, and the nodes that are left for it."""

    pod: Mapping[str, Any]
    node_names: list[str]


@dataclass(frozen=True, slots=True)
class BindingArgs:
    """ExtenderBindingArgs: a pod, and the node that was chosen."""

    namespace: str
    name: str
    uid: str
    node: str


def parse_extender_args(body: bytes) -> ExtenderArgs:
    """Read the body of filter or prioritize.

    Raises:
        BadRequest: it is none, or has nodes instead of their names.
    """
    keys = _decode_lowercase_keys(body, "ExtenderArgs")
    pod, names = keys.get("pod"), keys.get("nodenames")
    if not isinstance(pod, Mapping):
        raise BadRequest("Pod is not there, expected a v1 Pod")
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
    found = []
    for key in ("PodNamespace", "PodName", "PodUID", "Node"):
        value = keys.get(key.lower())
        if not isinstance(value, str) or not value or len(value) > 512 or "/" in value:
            raise BadRequest(f"{key} is not there, or is no name")
        found.append(value)
    return BindingArgs(*found)


def _decode_lowercase_keys(body: bytes, what: str) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is no JSON: {str(error)[:200]}") from None
    if not isinstance(document, dict):
        raise BadRequest(f"the body is no object, expected {what}")
    return {key.lower(): value for key, value in document.items()}


def encode_filter_result(
    names: Sequence[str], failed: Mapping[str, str], hopeless: Mapping[str, str]
) -> bytes:
    """ExtenderFilterResult; nodes only by name, and not more than so many for one reason."""
    document = {
        "NodeNames": names,
        "FailedNodes": _drop_nodes_beyond_reason_limit(failed),
        "FailedAndUnresolvableNodes": _drop_nodes_beyond_reason_limit(hopeless),
        "Error": "",
    }
    return msgspec.json.encode(document)


def _drop_nodes_beyond_reason_limit(reasons: Mapping[str, str]) -> Mapping[str, str]:
    """Some nodes for each reason; the reason says of how many others it holds."""
    if len(reasons) <= MAX_NODES_PER_REASON:
        return reasons
    members: dict[str, list[str]] = {}
    for name, text in reasons.items():
        members.setdefault(text, []).append(name)
    found: dict[str, str] = {}
    for text, names in members.items():
        if (more := len(names) - MAX_NODES_PER_REASON) > 0:
            text = f"{text} (also on {more} more nodes)"
        found.update(dict.fromkeys(names[:MAX_NODES_PER_REASON], text))
    return found


def encode_priorities(scores: Sequence[tuple[str, int]]) -> bytes:
    """HostPriorityList."""
    return msgspec.json.encode([{"Host": name, "Score": score} for name, score in scores])


def encode_error(text: str) -> bytes:
    """An ExtenderFilterResult or ExtenderBindingResult that says what is wrong; empty for done."""
    return msgspec.json.encode({"Error": text})
