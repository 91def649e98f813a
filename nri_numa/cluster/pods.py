"""Pods and their containers as manifests describe them, and as a plugin sees them.

Manifests are taken after the API server's defaulting. The kubelet's rules apply: QoS classes
(``pkg/apis/core/v1/helper/qos``), CPU shares and quota (``pkg/kubelet/cm/helpers_linux.go``), OOM
scores (``pkg/kubelet/qos/policy.go``), the resources of the sandbox
(``kuberuntime_sandbox_linux.go``), whose sum counts the peak of the init containers (KEP-753 for
sidecars), and the pod's cgroup as the systemd driver names it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from nri_numa.engine.request.annotations import (
    annotated_container_names,
    misspelt_prefix_sentences,
    request_annotation_names,
    unknown_container_sentence,
)
from nri_numa.engine.request.demand import DEFAULT_CFS_PERIOD_US as PERIOD
from nri_numa.engine.request.demand import MAX_CPU_SHARES, MAX_SLOTS, SHARES_PER_CPU
from nri_numa.kube.requests import (
    annotations_of,
    list_of_mappings,
    section_of,
    text_in_section,
)
from nri_numa.model.workload import ENDED_POD_PHASES, Container, PodSandbox, QoSClass, Resources

MIN_CFS_QUOTA_US: Final = 1_000
MIN_CPU_SHARES: Final = 2

GUARANTEED_OOM_SCORE: Final = -997
BEST_EFFORT_OOM_SCORE: Final = 1000


class ContainerRole(StrEnum):
    """Role of a container in its pod."""

    INIT = "init"
    SIDECAR = "sidecar"
    """An init container with ``restartPolicy: Always``: it starts in its turn and stays."""
    APP = "app"
    EPHEMERAL = "ephemeral"
    """A container for debugging, which may not have resources."""


class ResourceQuantities(msgspec.Struct, frozen=True, kw_only=True):
    """Requests or limits, memory in bytes, huge pages by their size; None is *not given*."""

    cpu_milli: int | None = None
    memory: int | None = None
    hugepages: Mapping[int, int] = msgspec.field(default_factory=dict)

    def with_defaults(self, weak: ResourceQuantities) -> ResourceQuantities:
        """Return CPU and memory of this one, with defaults from ``weak``."""
        return ResourceQuantities(
            cpu_milli=weak.cpu_milli if self.cpu_milli is None else self.cpu_milli,
            memory=weak.memory if self.memory is None else self.memory,
        )


NO_QUANTITIES = ResourceQuantities()


class ContainerManifest(msgspec.Struct, frozen=True, kw_only=True):
    """One container.

    Attributes:
        requests: a missing request is the limit, as in the API server.
        slots: exclusive CPUs requested by the extended resource that counts them.
        devices: requested count by extended resource.
        claims: names of the pod's ResourceClaims that it uses.
    """

    name: str
    role: ContainerRole = ContainerRole.APP
    requests: ResourceQuantities = NO_QUANTITIES
    limits: ResourceQuantities = NO_QUANTITIES
    slots: int = 0
    devices: Mapping[str, int] = msgspec.field(default_factory=dict)
    claims: tuple[str, ...] = ()


class PodManifest(msgspec.Struct, frozen=True, kw_only=True):
    """One pod.

    Attributes:
        source: file and document it comes from.
        containers: in the order in which the kubelet creates them.
        pod_requests, pod_limits: pod-level resources (KEP-2837); None where there are none.
        critical: node-critical by its priority class.
        runtime_handler: name of its runtime class, which ordinarily is the handler's too.
        node_constraints: of its spec, what says which Nodes it may be put on.
    """

    source: str
    namespace: str
    name: str
    uid: str
    qos: QoSClass
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    containers: tuple[ContainerManifest, ...]
    pod_requests: ResourceQuantities | None = None
    pod_limits: ResourceQuantities | None = None
    critical: bool = False
    runtime_handler: str = ""
    node_constraints: Mapping[str, object] = msgspec.field(default_factory=dict)

    @property
    def full_name(self) -> str:
        """``namespace/name``."""
        return f"{self.namespace}/{self.name}"


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """One document of a file: a pod, or something that makes as many pods on one machine.

    Attributes:
        annotations: outside of the pods' template, which no pod has.
    """

    source: str
    kind: str
    namespace: str
    name: str
    pods: tuple[PodManifest, ...]
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)

    @property
    def identity_key(self) -> tuple[str, str, str]:
        """Key that a later version of this document shares."""
        return self.kind, self.namespace, self.name


def ineffective_annotation_sentences(workloads: Iterable[Workload], prefix: str) -> list[str]:
    """Return a sentence for each annotation with a wrong prefix, container or location."""
    all_sentences: dict[str, None] = {}
    for workload in workloads:
        for pod in workload.pods:
            names = tuple(item.name for item in pod.containers)
            missing = [
                unknown_container_sentence(annotation, name, names)
                for name, annotation in annotated_container_names(pod.annotations, prefix).items()
                if name not in names
            ]
            sentences = [*missing, *misspelt_prefix_sentences(pod.annotations, prefix)]
            all_sentences.update((f"{pod.source}: {item}", None) for item in sentences)
        templates = {name for pod in workload.pods for name in pod.annotations}
        below = "jobTemplate.spec." if workload.kind == "CronJob" else ""
        outside = [
            f"annotation {name} is ignored, because it stands on the {workload.kind} and not on "
            f"its pods; expected in spec.{below}template.metadata.annotations"
            for name in request_annotation_names(workload.annotations, prefix)
            if name not in templates
        ]
        sentences = [*outside, *misspelt_prefix_sentences(workload.annotations, prefix)]
        all_sentences.update((f"{workload.source}: {item}", None) for item in sentences)
    return list(all_sentences)


# --- As the API server has them ----------------------------------------------------------------


def is_finished(document: Mapping[str, Any]) -> bool:
    """Return True if a pod has ended, so it takes no resources on any node."""
    return text_in_section(document, "status", "phase") in ENDED_POD_PHASES


def pod_priority(document: Mapping[str, Any]) -> int:
    """Return the priority of a pod; 0 without one, as in kube-scheduler."""
    value = section_of(document, "spec").get("priority")
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def is_replaced_after_eviction(document: Mapping[str, Any]) -> bool:
    """Return True if a controller replaces a pod after its eviction, possibly on another node.

    Static pods and those of a DaemonSet return to the same node; a pod without a controller is not
    replaced. Pods of kube-system are never evicted, which an admission policy enforces.
    """
    metadata = section_of(document, "metadata")
    if metadata.get("deletionTimestamp") or metadata.get("namespace") == "kube-system":
        return False
    if is_finished(document) or "kubernetes.io/config.mirror" in annotations_of(document):
        return False
    owner = _controller_reference(document)
    return bool(owner) and owner.get("kind") not in ("DaemonSet", "Node")


def controller_uid(document: Mapping[str, Any]) -> str:
    """Return the uid of the controller that replaces a pod; empty for none."""
    return str(_controller_reference(document).get("uid", ""))


def _controller_reference(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the reference to the controller; empty if there is none. The input is untrusted."""
    owners = list_of_mappings(section_of(document, "metadata").get("ownerReferences"))
    return next((owner for owner in owners if owner.get("controller")), {})


# --- As a plugin sees them ----------------------------------------------------------------------


def qos_of(
    containers: Iterable[ContainerManifest],
    pod_requests: ResourceQuantities | None = None,
    pod_limits: ResourceQuantities | None = None,
) -> QoSClass:
    """Compute the QoS class by CPU and memory, without ephemeral containers; 0 counts as not set.

    Pod-level resources, if set, decide alone.
    """
    if pod_requests is not None or pod_limits is not None:
        pairs = [(pod_requests or NO_QUANTITIES, pod_limits or NO_QUANTITIES)]
    else:
        resource_containers = [c for c in containers if c.role is not ContainerRole.EPHEMERAL]
        pairs = [(c.requests, c.limits) for c in resource_containers]
    if not any(a.cpu_milli or a.memory for pair in pairs for a in pair):
        return QoSClass.BEST_EFFORT
    complete = all(limits.cpu_milli and limits.memory for _, limits in pairs)
    cpu = sum(r.cpu_milli or 0 for r, _ in pairs), sum(x.cpu_milli or 0 for _, x in pairs)
    memory = sum(r.memory or 0 for r, _ in pairs), sum(x.memory or 0 for _, x in pairs)
    if complete and cpu[0] == cpu[1] and memory[0] == memory[1]:
        return QoSClass.GUARANTEED
    return QoSClass.BURSTABLE


def cpu_shares_of(milli: int | None) -> int:
    """Return the CPU shares of a request."""
    if not milli:
        return MIN_CPU_SHARES
    return min(max(milli * SHARES_PER_CPU // 1000, MIN_CPU_SHARES), MAX_CPU_SHARES)


def cfs_quota_of(milli: int | None) -> int | None:
    """Return the CFS quota of a limit; None without one."""
    return max(milli * PERIOD // 1000, MIN_CFS_QUOTA_US) if milli else None


def resources_of(requests: ResourceQuantities, limits: ResourceQuantities) -> Resources:
    """Return the Linux resources that the kubelet sets for requests and limits."""
    return Resources(
        cpu_shares=cpu_shares_of(requests.cpu_milli or limits.cpu_milli),
        cpu_quota=cfs_quota_of(limits.cpu_milli),
        cpu_period=PERIOD,
        memory_limit=limits.memory or None,
        hugepages={size: amount for size, amount in limits.hugepages.items() if amount},
    )


def sum_pod_quantities(
    containers: Sequence[ContainerManifest], pick: Callable[[ContainerManifest], ResourceQuantities]
) -> ResourceQuantities:
    """Sum requests or limits over a pod: what runs together, or the peak while it starts.

    An init container that ends counts beside the sidecars started before it.
    """

    def peak_amount(key: str) -> int | None:
        staying, peak, app_sum, has_amount = 0, 0, 0, False
        for container in containers:
            value: int | None = getattr(pick(container), key)
            has_amount, amount = has_amount or value is not None, value or 0
            if container.role is ContainerRole.APP:
                app_sum += amount
            else:
                peak = max(peak, staying + amount)
                if container.role is ContainerRole.SIDECAR:
                    staying += amount
        return max(staying + app_sum, peak) if has_amount else None

    return ResourceQuantities(cpu_milli=peak_amount("cpu_milli"), memory=peak_amount("memory"))


def pod_sandbox(pod: PodManifest) -> PodSandbox:
    """Return the sandbox as an NRI plugin sees it."""
    requests = sum_pod_quantities(pod.containers, lambda c: c.requests)
    limits = sum_pod_quantities(pod.containers, lambda c: c.limits)
    requests = (pod.pod_requests or NO_QUANTITIES).with_defaults(requests)
    limits = (pod.pod_limits or NO_QUANTITIES).with_defaults(limits)
    return PodSandbox(
        id=_runtime_id(pod.uid),
        uid=pod.uid,
        namespace=pod.namespace,
        name=pod.name,
        labels={**pod.labels, **_kubelet_pod_labels(pod)},
        annotations=pod.annotations,
        qos=pod.qos,
        runtime_handler=pod.runtime_handler,
        cgroup_parent=cgroup_parent(pod.uid, pod.qos),
        # Huge pages are not part of the sandbox's resources.
        resources=resources_of(requests, limits),
    )


def container_of(
    pod: PodManifest, container: ContainerManifest, memory_total: int, slots_key: str = ""
) -> Container:
    """Return a container as an NRI plugin sees it.

    The OOM score depends on the machine's memory, in bytes. The annotation ``slots_key``, if set,
    has the slots that the device plugin allocated.
    """
    # The kubelet applies the pod's limits to a container without its own (KEP-2837).
    limits = container.limits.with_defaults(pod.pod_limits or NO_QUANTITIES)
    limits = replace(limits, hugepages=container.limits.hugepages)
    slots = ",".join(f"slot-{number}" for number in range(min(container.slots, MAX_SLOTS + 1)))
    return Container(
        id=container_id(pod, container.name),
        pod_id=_runtime_id(pod.uid),
        name=container.name,
        labels={"io.kubernetes.container.name": container.name, **_kubelet_pod_labels(pod)},
        annotations={slots_key: slots} if slots_key and slots else {},
        resources=resources_of(container.requests, limits),
        oom_score_adj=oom_score(pod, container, memory_total),
        cgroups_path=f"{cgroup_parent(pod.uid, pod.qos).rpartition('/')[2]}:cri-containerd:"
        f"{container_id(pod, container.name)}",
    )


def container_id(pod: PodManifest, name: str) -> str:
    """Return the runtime's id for a container of the pod."""
    return _runtime_id(f"{pod.uid}/{name}")


def oom_score(pod: PodManifest, container: ContainerManifest, memory_total: int) -> int:
    """Compute the OOM score adjustment, which alone shows a Burstable pod's memory request."""
    if pod.critical or pod.qos is QoSClass.GUARANTEED:
        return GUARANTEED_OOM_SCORE
    if pod.qos is QoSClass.BEST_EFFORT:
        return BEST_EFFORT_OOM_SCORE
    score = _burstable_oom_score(container.requests.memory, memory_total)
    if container.role is ContainerRole.SIDECAR:
        # A sidecar is not killed before the least of the containers it serves.
        min_request = min(
            (c.requests.memory or 0 for c in pod.containers if c.role is ContainerRole.APP),
            default=0,
        )
        score = min(score, _burstable_oom_score(min_request, memory_total))
    return min(max(score, BEST_EFFORT_OOM_SCORE + GUARANTEED_OOM_SCORE), BEST_EFFORT_OOM_SCORE - 1)


def cgroup_parent(uid: str, qos: QoSClass) -> str:
    """Return the pod's cgroup as the systemd driver names it."""
    pod = f"pod{uid.replace('-', '_')}"
    if qos is QoSClass.GUARANTEED:
        return f"/kubepods.slice/kubepods-{pod}.slice"
    tier = f"kubepods-{qos.lower()}"
    return f"/kubepods.slice/{tier}.slice/{tier}-{pod}.slice"


def _burstable_oom_score(request: int | None, memory_total: int) -> int:
    return 1000 - 1000 * (request or 0) // max(memory_total, 1)


def _kubelet_pod_labels(pod: PodManifest) -> dict[str, str]:
    return {
        "io.kubernetes.pod.name": pod.name,
        "io.kubernetes.pod.namespace": pod.namespace,
        "io.kubernetes.pod.uid": pod.uid,
    }


def _runtime_id(text: str) -> str:
    """Return a stable id of 64 hexadecimal digits, as runtimes have them."""
    return hashlib.sha256(text.encode()).hexdigest()
