"""What should be in the API server, from the agent's documents. Pure.

The texts are the promise to all that read Nodes, Pods and Events; docs/kubernetes-objects.md lists
them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from nri_numa.model.offline_capacity import (
    CPU_ID_LIMIT,
    NODE_EXISTING_NUMA_IDS_ANNOTATION,
    format_id_list,
    parse_id_list,
)
from nri_numa.observe.notices import Notice
from nri_numa.text import escape_unprintable
from nri_numa.web.responses import Assignment, MachineNUMAInfo

Object = dict[str, Any]

MAX_EVENT_NOTE_BYTES: Final = 1024
"""Bytes of an Event's note; the API server refuses more."""
MAX_EVENT_NAME_CHARS: Final = 253
PINNED_KINDS: Final = frozenset({"exclusive", "shared", "explicit", "kubelet"})
"""Kinds of containers that we or the kubelet's managers gave something."""

EVENT_REASONS: Final = {
    "refused": ("PlacementRefused", "Warning"),
    "widened": ("PlacedWider", "Normal"),
    "unpinned": ("NotPinned", "Warning"),
    "gap": ("PlacedAfterStart", "Warning"),
    "late": ("PlacedLate", "Warning"),
    "moved": ("Moved", "Normal"),
    "room": ("RoomFound", "Normal"),
    "drift": ("CpusetDrift", "Warning"),
    "ignored": ("AnnotationIgnored", "Warning"),
    "undone": ("PlacementUndone", "Warning"),
    "shared": ("NoLongerExclusive", "Warning"),
    "reservation": ("ReservationReleased", "Normal"),
}
"""Reason and type of an Event by what happened."""


def node_annotations(prefix: str, info: MachineNUMAInfo) -> dict[str, str]:
    """CPUs and bytes of memory, one field for each NUMA node, ``|`` between them."""
    return {
        f"{prefix}/numacpu": "|".join(info.data.cpulist),
        f"{prefix}/numamem": "|".join(info.data.memsize),
    }


def numa_ids_annotation(prefix: str, topology: Mapping[str, Any]) -> dict[str, str]:
    """Which NUMA nodes there are; says too that capacity from outside counts on this node."""
    return {
        f"{prefix}/{NODE_EXISTING_NUMA_IDS_ANNOTATION}": format_id_list(
            {one["id"] for one in topology["numaNodes"]}
        )
    }


def node_labels(prefix: str, topology: Mapping[str, Any]) -> dict[str, str]:
    """The shape of a machine, for node selectors."""
    counts, listed = topology["counts"], topology["numaNodes"]
    with_cpus = [len(parse_id_list(one["cpus"], CPU_ID_LIMIT)) for one in listed if one["cpus"]]
    return {
        f"{prefix}/sockets": str(counts["sockets"]),
        f"{prefix}/numa-nodes": str(counts["numaNodes"]),
        f"{prefix}/memory-only-numa-nodes": str(len(listed) - len(with_cpus)),
        f"{prefix}/cores": str(counts["cores"]),
        f"{prefix}/cpus": str(counts["cpus"]),
        f"{prefix}/threads-per-core": str(counts["threadsPerCore"]),
        # For requests that must fit one NUMA node, and for who adds nodes by their labels.
        f"{prefix}/largest-numa-node-cpus": str(max(with_cpus, default=0)),
    }


NODE_ANNOTATIONS: Final = ("numacpu", "numamem", NODE_EXISTING_NUMA_IDS_ANNOTATION)
NODE_LABELS: Final = (
    "sockets",
    "numa-nodes",
    "memory-only-numa-nodes",
    "cores",
    "cpus",
    "threads-per-core",
    "largest-numa-node-cpus",
)
"""Keys below the prefix that are ours on a Node: those that are not wanted are taken away."""


def pod_annotations(assignments: Iterable[Assignment]) -> dict[tuple[str, str], tuple[str, str]]:
    """By namespace and name of each pod with pinned containers: its UID, and the text."""
    pods: dict[tuple[str, str], dict[str, Object]] = defaultdict(dict)
    uids: dict[tuple[str, str], str] = {}
    for one in assignments:
        # One with numamem alone has its memory bound, and runs on the shared pool, which changes.
        memory_alone = one.kind == "unbound" and one.mems
        if one.kind not in PINNED_KINDS and not memory_alone:
            continue
        uids[one.namespace, one.pod] = one.pod_uid
        pods[one.namespace, one.pod][one.container] = {
            "cpus": "" if memory_alone else one.foreign_cpus or one.cpus,
            "mems": one.mems,
            "policy": one.policy,
            "preferred": one.aligned,
            "reason": one.reason,
        }
    return {
        name: (uids[name], json.dumps(containers, sort_keys=True, separators=(",", ":")))
        for name, containers in pods.items()
    }


def event_name(pod: str, id: str) -> str:
    """The same for the same id, whichever process writes it: so it is made once."""
    end = f".{id}"
    return pod[: MAX_EVENT_NAME_CHARS - len(end)].rstrip("-.") + end


def build_event(notice: Notice, prefix: str, node: str) -> Object:
    """An Event of events.k8s.io/v1; the prefix names the reporting controller."""
    reason, kind = EVENT_REASONS.get(
        notice.notice_kind, (f"NUMA{notice.notice_kind[:100].title()}", "Warning")
    )
    text = f"{notice.reason}: {notice.message}" if notice.reason else notice.message
    made = pod_event(
        notice.namespace,
        notice.pod,
        # For a static pod the hash of its manifest, by which kubectl and the kubelet know it.
        notice.pod_uid,
        id=notice.id,
        at=notice.first_time,
        text=text,
        reportingController=f"{prefix}/nri-numa",
        reportingInstance=node[:128],
        action="Placing",
        reason=reason,
        type=kind,
    )
    if notice.container:
        made["regarding"]["fieldPath"] = f"spec.containers{{{notice.container}}}"
    return {**made, **event_series(notice)}


def pod_event(
    namespace: str, name: str, uid: str, *, id: str, at: float, text: str, **fields: str
) -> Object:
    """An Event about a pod."""
    regarding = {"apiVersion": "v1", "kind": "Pod", "namespace": namespace, "name": name}
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": event_name(name, id), "namespace": namespace},
        "eventTime": micro_time_text(at),
        "note": _truncate_note(text),
        "regarding": {**regarding, "uid": uid},
        **fields,
    }


def event_series(notice: Notice) -> Object:
    """What of an Event changes when it happens again; nothing the first time."""
    if notice.count < 2:
        return {}
    return {
        "series": {"count": notice.count, "lastObservedTime": micro_time_text(notice.last_time)}
    }


def _truncate_note(text: str) -> str:
    # One line that moves no cursor, whatever prints it: kubectl, a bridge to chat, a log.
    data = escape_unprintable(text).encode()
    if len(data) <= MAX_EVENT_NOTE_BYTES:
        return data.decode()
    return data[: MAX_EVENT_NOTE_BYTES - 3].decode(errors="ignore") + "…"


def micro_time_text(seconds: float) -> str:
    """Seconds since the epoch as Kubernetes' MicroTime."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
