"""What kube-scheduler asks an extender, and how it is answered (k8s.io/kube-scheduler/extender/v1).

The Go structs have no JSON names: keys are written with a capital letter, and read in any case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

MOST_NAMES: Final = 20_000
"""Nodes in one question; four times the largest cluster that Kubernetes supports."""


class BadRequest(ValueError):
    """The question cannot be answered; the text says what was expected."""


@dataclass(frozen=True, slots=True)
class Question:
    """ExtenderArgs: a pod, and the nodes that are left for it."""

    pod: Mapping[str, Any]
    names: list[str]


@dataclass(frozen=True, slots=True)
class Binding:
    """ExtenderBindingArgs: a pod, and the node that was chosen."""

    namespace: str
    name: str
    uid: str
    node: str


def question(body: bytes) -> Question:
    """Read the body of filter or prioritize.

    Raises:
        BadRequest: it is none, or has nodes instead of their names.
    """
    keys = _keys(body, "ExtenderArgs")
    pod, names = keys.get("pod"), keys.get("nodenames")
    if not isinstance(pod, Mapping):
        raise BadRequest("Pod is not there, expected a v1 Pod")
    if names is None:
        raise BadRequest("NodeNames is not there, expected names: set nodeCacheCapable: true")
    if not isinstance(names, list) or len(names) > MOST_NAMES:
        raise BadRequest(f"NodeNames is no list of at most {MOST_NAMES} names")
    if not {*map(type, names)} <= {str}:
        raise BadRequest("NodeNames has something else than names")
    return Question(pod, names)


def binding(body: bytes) -> Binding:
    """Read the body of bind.

    Raises:
        BadRequest: something is missing.
    """
    keys = _keys(body, "ExtenderBindingArgs")
    found = []
    for key in ("PodNamespace", "PodName", "PodUID", "Node"):
        value = keys.get(key.lower())
        if not isinstance(value, str) or not value or len(value) > 512 or "/" in value:
            raise BadRequest(f"{key} is not there, or is no name")
        found.append(value)
    return Binding(*found)


def _keys(body: bytes, what: str) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is no JSON: {str(error)[:200]}") from None
    if not isinstance(document, dict):
        raise BadRequest(f"the body is no object, expected {what}")
    return {key.lower(): value for key, value in document.items()}


def filter_result(
    names: Sequence[str], failed: Mapping[str, str], hopeless: Mapping[str, str]
) -> bytes:
    """ExtenderFilterResult; nodes only by name."""
    document = {
        "NodeNames": names,
        "FailedNodes": failed,
        "FailedAndUnresolvableNodes": hopeless,
        "Error": "",
    }
    return msgspec.json.encode(document)


def priorities(scores: Sequence[tuple[str, int]]) -> bytes:
    """HostPriorityList."""
    return msgspec.json.encode([{"Host": name, "Score": score} for name, score in scores])


def error(text: str) -> bytes:
    """An ExtenderFilterResult or ExtenderBindingResult that says what is wrong; empty for done."""
    return msgspec.json.encode({"Error": text})
