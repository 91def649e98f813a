"""Desired objects in the API server, from the agent's documents. Pure.

The texts are the interface for readers of Nodes, Pods and Events; docs/kubernetes-objects.md lists
them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final

from nri_numa.kube.events import pod_event
from nri_numa.model.offline_capacity import (
    CPU_ID_LIMIT,
    NODE_EXISTING_NUMA_IDS_ANNOTATION,
    format_id_list,
    parse_id_list,
)
from nri_numa.observe.notices import Notice
from nri_numa.text import micro_time_text
from nri_numa.web.responses import Assignment, MachineNUMAInfo

Object = dict[str, Any]

PINNED_KINDS: Final = frozenset({"exclusive", "shared", "listed", "kubelet"})
"""Kinds of containers that the agent or the kubelet's managers have placed."""

EVENT_REASONS: Final = {
    "rejected": ("PlacementRejected", "Warning"),
    "misaligned": ("Misaligned", "Normal"),
    "unpinned": ("Unpinned", "Warning"),
    "missed-start": ("PlacedAfterStart", "Warning"),
    "undelivered-update": ("UndeliveredUpdate", "Warning"),
    "moved": ("Moved", "Normal"),
    "room": ("RoomFound", "Normal"),
    "drift": ("CpusetDrift", "Warning"),
    "ignored": ("AnnotationIgnored", "Warning"),
    "undone": ("PlacementUndone", "Warning"),
    "shared": ("NoLongerExclusive", "Warning"),
    "reservation": ("ReservationReleased", "Normal"),
}
"""Reason and type of an Event by the kind of the notice."""


def node_annotations(prefix: str, info: MachineNUMAInfo) -> dict[str, str]:
    """Return CPUs and bytes of memory, one field for each NUMA node, separated by ``|``."""
    return {
        f"{prefix}/numacpu": "|".join(info.data.cpulist),
        f"{prefix}/numamem": "|".join(info.data.memsize),
    }


def numa_ids_annotation(prefix: str, topology: Mapping[str, Any]) -> dict[str, str]:
    """Return the ids of the NUMA nodes; they also mark that offline capacity counts here."""
    ids = format_id_list({node["id"] for node in topology["numaNodes"]})
    return {f"{prefix}/{NODE_EXISTING_NUMA_IDS_ANNOTATION}": ids}


def node_labels(prefix: str, topology: Mapping[str, Any]) -> dict[str, str]:
    """Return the shape of a machine, for node selectors."""
    counts, listed = topology["counts"], topology["numaNodes"]
    with_cpus = [len(parse_id_list(node["cpus"], CPU_ID_LIMIT)) for node in listed if node["cpus"]]
    return {
        f"{prefix}/sockets": str(counts["sockets"]),
        f"{prefix}/numa-nodes": str(counts["numaNodes"]),
        f"{prefix}/memory-only-numa-nodes": str(len(listed) - len(with_cpus)),
        f"{prefix}/cores": str(counts["cores"]),
        f"{prefix}/cpus": str(counts["cpus"]),
        f"{prefix}/threads-per-core": str(counts["threadsPerCore"]),
        # For requests that must fit one NUMA node, and for autoscalers that select by label.
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
"""Keys below the prefix that the publisher owns on a Node; undesired ones are removed."""


def pod_annotations(assignments: Iterable[Assignment]) -> dict[tuple[str, str], tuple[str, str]]:
    """Return UID and annotation of each pod with pinned containers, by namespace and name."""
    pods: dict[tuple[str, str], dict[str, Object]] = defaultdict(dict)
    uids: dict[tuple[str, str], str] = {}
    for assignment in assignments:
        # With numamem alone the memory is bound, and the CPUs are the shared pool, which changes.
        memory_alone = assignment.kind == "unpinned" and assignment.mems
        if assignment.kind not in PINNED_KINDS and not memory_alone:
            continue
        uids[assignment.namespace, assignment.pod] = assignment.pod_uid
        pods[assignment.namespace, assignment.pod][assignment.container] = {
            "cpus": "" if memory_alone else assignment.foreign_cpus or assignment.cpus,
            "mems": assignment.mems,
            "policy": assignment.policy,
            "aligned": assignment.aligned,
            "reason": assignment.reason,
        }
    return {
        name: (uids[name], json.dumps(containers, sort_keys=True, separators=(",", ":")))
        for name, containers in pods.items()
    }


def build_event(notice: Notice, prefix: str, node: str) -> Object:
    """Build an Event of events.k8s.io/v1; the prefix names the reporting controller."""
    reason, kind = EVENT_REASONS.get(
        notice.notice_kind, (f"NUMA{notice.notice_kind[:100].title()}", "Warning")
    )
    text = f"{notice.reason}: {notice.message}" if notice.reason else notice.message
    event = pod_event(
        notice.namespace,
        notice.pod,
        # For a static pod the hash of its manifest, which kubectl and the kubelet use as its UID.
        notice.pod_uid,
        id=notice.id,
        event_time=notice.first_time,
        text=text,
        reportingController=f"{prefix}/nri-numa",
        reportingInstance=node[:128],
        action="Placing",
        reason=reason,
        type=kind,
    )
    if notice.container:
        event["regarding"]["fieldPath"] = f"spec.containers{{{notice.container}}}"
    return {**event, **event_series(notice)}


def event_series(notice: Notice) -> Object:
    """Return the changed fields of a repeated Event; empty the first time."""
    if notice.count < 2:
        return {}
    last_time = micro_time_text(notice.last_time)
    return {"series": {"count": notice.count, "lastObservedTime": last_time}}
