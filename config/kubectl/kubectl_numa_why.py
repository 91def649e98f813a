"""``kubectl numa why POD``: what scheduler and node say about one pod, joined. Pure.

It stands beside ``kubectl-numa`` and needs nothing but Python 3.9. Everything is read from the
API server: the pod's condition and Events of its scheduler, the annotation ``placed`` that our
extender binds it with, the annotation ``assigned`` and the Events that ``nri-numa publish`` writes,
and what its containers wait for.
"""

from __future__ import annotations

import json
import re
from typing import Any, Iterable

from kubectl_numa_cluster import Object, ids, listed, refusal
from kubectl_numa_reasons import RETRY_CONDITIONS

_UNREADABLE = (AttributeError, KeyError, TypeError, ValueError, RecursionError)
_OURS = ("PlacementRefused", "PlacementUndone", "NoLongerExclusive", "ReservationReleased",
         "PlacedWider", "NotPinned", "PlacedAfterStart", "PlacedLate", "Moved", "RoomFound",
         "CpusetDrift",
         "AnnotationIgnored", "NUMANodeDrained", "NUMAPodMoved", "NUMANodeStolen")  # fmt: skip
"""Reasons of Events that ``nri-numa publish`` and ``nri-numa controller`` write."""
_SAID = frozenset({"placed", "assigned"})
"""Annotations that are answers; the others below the prefix are what the pod asks for.

The extender writes ``containers`` together with ``placed``; without that it is the author's own.
"""
CLAIM_REFUSED = "FailedPrepareDynamicResources"
"""The kubelet's reason where a DRA driver refuses a claim; the message is the driver's."""
_WAITING = {
    "never": "Waiting does not help: what the message names has to be changed.",
    "node-change": "It starts once the node, its configuration or the claim is as the message "
    "expects: the kubelet asks again every 10 to 15 seconds.",
    "room": "The kubelet asks again every 10 to 15 seconds, and starts it when there is room, "
    "which a node that is too small never has; no scheduler looks at it any more.",
}
"""What waiting is good for, by the reason's condition; of an unknown reason as for want of room."""


def document(pod: Object, events: Iterable[Object], prefix: str) -> Object:
    """What is known of a pod, as ``-o json`` prints it.

    Args:
        pod: of the API server.
        events: of its namespace that are about a pod of its name; those of an earlier pod of that
            name are passed over.
        prefix: of the annotations.
    """
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    annotations = metadata.get("annotations") or {}
    answers = _SAID | ({"containers"} if f"{prefix}/placed" in annotations else set())
    asks = {
        key[len(prefix) + 1 :]: str(value).strip()
        for key, value in sorted(annotations.items())
        if key.startswith(f"{prefix}/") and key[len(prefix) + 1 :] not in answers
    }
    uids = {metadata.get("uid"), annotations.get("kubernetes.io/config.hash")} - {None}
    mine = [_event(one) for one in events if (one.get("involvedObject") or {}).get("uid") in uids]
    mine.sort(key=lambda one: (one["last"], one["reason"]))
    unscheduled = [
        str(one.get("message", ""))
        for one in status.get("conditions") or []
        if one.get("type") == "PodScheduled" and one.get("status") == "False"
    ]
    if not unscheduled and not spec.get("nodeName"):
        unscheduled = [one["message"] for one in mine if one["reason"] == "FailedScheduling"][-1:]
    return {
        "namespace": metadata["namespace"],
        "pod": metadata["name"],
        "phase": status.get("phase", ""),
        "reason": str(status.get("reason") or ""),
        "message": str(status.get("message") or ""),
        "node": spec.get("nodeName", ""),
        "scheduler": spec.get("schedulerName", ""),
        "gates": [str(one.get("name", "")) for one in spec.get("schedulingGates") or []],
        "asks": asks,
        "refusedByScheduler": reasons("".join(unscheduled)) if not spec.get("nodeName") else [],
        "placed": _mapping(annotations.get(f"{prefix}/placed")),
        "assigned": _mapping(annotations.get(f"{prefix}/assigned")),
        "waiting": _waiting(pod),
        "claimRefused": _refusal_of_claim(mine),
        "events": [one for one in mine if one["reason"] in _OURS],
    }


_AFTER_FILTERS = re.compile(
    r"\.? (?=(?:no new claims to deallocate|still not schedulable|preemption: ))"
)
"""Where in kube-scheduler's message the words of its PostFilter plugins begin."""


def reasons(message: str) -> list[Object]:
    """The classes of reasons in a scheduler's message: how many nodes, and why not those.

    ``0/3 nodes are available: 1 Insufficient cpu, 2 needs 12 exclusive CPUs on one NUMA node; most
    free: 8.``; a message of another form is one reason without a number.
    """
    match = re.match(r"\d+/\d+ nodes are available: ?", message)
    if match is None:
        return [{"nodes": None, "reason": message}] if message else []
    rest = _AFTER_FILTERS.split(message[match.end() :])[0]
    found: list[Object] = []
    for part in re.split(r", (?=\d+ )", rest):
        number, _, why = part.strip().partition(" ")
        if number.isdigit() and why:
            found.append({"nodes": int(number), "reason": why.rstrip(". ")})
        elif part.strip():
            found.append({"nodes": None, "reason": part.strip(" .")})
    return found


def _refusal_of_claim(events: list[Object]) -> str:
    """What the last Event says of a claim that a DRA driver of the node refused; else empty."""
    return next((one["message"] for one in reversed(events) if one["reason"] == CLAIM_REFUSED), "")


def _event(one: Object) -> Object:
    series = one.get("series") or {}
    return {
        "reason": str(one.get("reason", "")),
        "message": str(one.get("message", "")),
        "count": int(series.get("count") or one.get("count") or 1),
        "last": str(
            series.get("lastObservedTime") or one.get("lastTimestamp") or one.get("eventTime") or ""
        ),
    }


def _mapping(value: object) -> dict[str, Any]:
    """A JSON object in an annotation; empty where there is none, or none that can be read."""
    try:
        found = json.loads(value) if isinstance(value, str) else {}
    except _UNREADABLE:
        return {}
    return found if isinstance(found, dict) else {}


def _waiting(pod: Object) -> list[Object]:
    found: list[Object] = []
    metadata, status = pod["metadata"], pod.get("status") or {}
    for kind in ("initContainerStatuses", "containerStatuses"):
        for one in status.get(kind) or []:
            waiting = (one.get("state") or {}).get("waiting")
            if not waiting:
                continue
            message = str(waiting.get("message", ""))
            ours = refusal(metadata["namespace"], metadata["name"], message)
            found.append(
                {
                    "container": str(one.get("name", "")),
                    "waits": str(waiting.get("reason", "")),
                    "refused": ours is not None,
                    "reason": ours[0] if ours else "",
                    "message": ours[1] if ours else message,
                }
            )
    return found


# --- in sentences ---------------------------------------------------------------------------------


def nowhere(found: Object) -> bool:
    """Whether the pod has no node, or is refused there."""
    if not found["node"] or found["phase"] == "Failed":
        return True
    return any(one["refused"] or found["claimRefused"] for one in found["waiting"])


def sentences(found: Object) -> list[str]:
    """The document for people: where it is, why there, or why nowhere."""
    name = f"{found['namespace']}/{found['pod']}"
    lines: list[str] = []
    if found["asks"]:
        asks = ", ".join(f"{key}={value}" for key, value in found["asks"].items())
        lines.append(f"{name} asks for {asks}.")
    else:
        lines.append(f"{name} asks for nothing by annotation; rules and defaults may.")
    lines += _about_scheduler(found) if found["node"] else _without_node(found)
    if found["node"]:
        lines += _about_node(found)
    for one in found["events"]:
        often = f", {one['count']} times" if one["count"] > 1 else ""
        lines.append(f"Event {one['reason']}{often}, last at {one['last']}: {one['message']}")
    return lines


def _without_node(found: Object) -> list[str]:
    if found["gates"]:
        return [f"It has no node: it waits for the scheduling gates {', '.join(found['gates'])}."]
    who = found["scheduler"] or "default-scheduler"
    if not found["refusedByScheduler"]:
        return [
            f"It has no node, and no scheduler has said why: does one with the name {who} run, and "
            "does its extender?"
        ]
    lines = [f"It has no node. The scheduler {who} says:"]
    for one in found["refusedByScheduler"]:
        count = one["nodes"]
        told = "" if count is None else f"{count} node{'' if count == 1 else 's'}: "
        lines.append(f"  {told}{one['reason']}")
    return lines


def _about_scheduler(found: Object) -> list[str]:
    lines = [f"It is on node {found['node']}, phase {found['phase'] or 'unknown'}."]
    who = found["scheduler"] or "its scheduler"
    for container, text in sorted(found["placed"].items()):
        lines.append(f"The scheduler {who} held NUMA node {text} there for container {container}.")
    if found["phase"] == "Failed" and found["reason"]:
        why = f": {found['message']}" if found["message"] else ""
        lines.append(f"It failed there, {found['reason']}{why}")
    if not found["placed"] and who != "default-scheduler":
        lines.append(
            f"The scheduler {who} held no NUMA nodes for it: the pod asks for none that can be "
            "counted, or nri-numa's extender was not asked."
        )
    return lines


def _about_node(found: Object) -> list[str]:
    lines: list[str] = []
    for container, one in sorted(found["assigned"].items()):
        if not isinstance(one, dict):
            continue
        lines.append(
            f"Container {container} runs on CPUs {one.get('cpus') or 'any'} with memory of NUMA "
            f"nodes {one.get('mems') or 'any'}, policy {one.get('policy') or 'none'}"
            f"{'' if one.get('preferred', True) else ', wider than would be ideal'}"
            f"{': ' + str(one['reason']).rstrip('.') if one.get('reason') else ''}."
        )
        held = _ids(found["placed"].get(container))
        there = _ids(one.get("mems"))
        if held and there and not held & there:
            lines.append(
                f"That is not what the scheduler held: NUMA node {listed(held)} had no room for "
                f"{container} any more, or something suited better, and the node decided again."
            )
    for one in found["waiting"]:
        if one["refused"]:
            lines.append(
                f"Container {one['container']} does not start: the node refuses it, "
                f"{one['reason']}: {one['message']}"
            )
            lines.append(_WAITING[RETRY_CONDITIONS.get(one["reason"], "room")])
        elif found["claimRefused"]:
            lines.append(
                f"Container {one['container']} does not start: its ResourceClaim is refused on the "
                f"node: {found['claimRefused']}"
            )
        else:
            lines.append(
                f"Container {one['container']} waits, and not because of its placement: "
                f"{one['waits']}{' (' + one['message'] + ')' if one['message'] else ''}."
            )
    if not found["assigned"] and not found["waiting"] and found["phase"] != "Failed":
        lines.append(
            "The node says nothing here of where it runs (publish.podAnnotation is off, or nothing "
            f"of it is pinned): kubectl numa explain {found['pod']} -n {found['namespace']} asks "
            "the agent."
        )
    return lines


def _ids(text: object) -> set[int]:
    try:
        return ids(str(text or ""))
    except ValueError:
        return set()
