"""Requests of pods, read by the engine's own rules before a node has seen them.

The kubelet creates init containers one after another, then the others, which run together. An init
container releases its resources when it ends. So it is placed beside the sidecars that started
before it, and the other containers together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from nri_numa.cluster.manifests import ManifestError, read_pod
from nri_numa.cluster.pod_request import (
    AmountByResource,
    ContainerRequest,
    PodRequest,
    peak_request,
)
from nri_numa.cluster.pods import (
    ContainerManifest,
    ContainerRole,
    PodManifest,
    container_of,
    pod_priority,
    pod_sandbox,
)
from nri_numa.config.derived import derive_settings, slots_resource
from nri_numa.config.sections import AgentConfig
from nri_numa.engine.assigned import ASSIGNED_KEY
from nri_numa.engine.place.memory import (
    MEMPOLICY_KEY,
    unpinned_memory_policy_rejection,
)
from nri_numa.engine.pod_admission import MAX_EXPECTED_CONTAINERS
from nri_numa.engine.request.annotations import (
    SCHEDULED_NODES_KEY,
    parse_scheduled_nodes,
    resolve_placement_options,
    written_annotation,
)
from nri_numa.engine.request.demand import (
    SLOTS_KEY,
    Demand,
    complete_options,
    compute_demand,
    share_of_first_container,
)
from nri_numa.engine.request.options import PlacementOptions
from nri_numa.engine.state import NO_CHARGE, Charge
from nri_numa.kube.requests import annotations_of, mapping_or_empty, section_of
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.reasons import Rejection
from nri_numa.model.workload import (
    SMT,
    Bind,
    Container,
    DeviceAlignmentMode,
    OnFailure,
    PodSandbox,
    Policy,
    QoSClass,
    Scope,
)
from nri_numa.text import hugepages_resource_name

POLICY_NAMES: Final = tuple(str(policy) for policy in Policy)
_MAX_POD_CONTAINERS: Final = 500
"""Maximum containers of a pod that is read, in 40 ms."""
_MAX_CACHED_PODS: Final = 10_000
"""Pods cached by uid, for `bind`, which does not receive the pod."""


class PodReader:
    """Reads pods, and caches their requests from `filter` to `bind`.

    Prefix, rules, defaults, permissions, the slots resource and the state of the DRA driver are
    those of the nodes. kube-scheduler itself selects and counts the NUMA nodes of claims: assuming
    others for a container would count it twice. A pod does not name the driver of its claims, so
    every container with a claim is omitted, and its node decides.
    """

    def __init__(self, config: AgentConfig) -> None:
        self.prefix = config.annotation_prefix
        self._settings, self._counted = derive_settings(config), slots_resource(config)
        self._claims = config.dra.enabled
        self._known: dict[str, tuple[str, PodRequest]] = {}

    def read_pod_request(self, document: Mapping[str, Any]) -> PodRequest:
        """Read a pod's request; an unreadable pod has an empty or an invalid one."""
        metadata = section_of(document, "metadata")
        uid, version = str(metadata.get("uid", "")), str(metadata.get("resourceVersion", ""))
        entry = self._known.get(uid)
        if entry is not None and version and entry[0] == version:
            return entry[1]
        request = self._decode_pod_request(document)
        if uid:
            if len(self._known) >= _MAX_CACHED_PODS:
                self._known.clear()
            self._known[uid] = version, request
        return request

    def cached_request(self, uid: str) -> PodRequest | None:
        """Return the last request of a pod; None for an unknown pod."""
        entry = self._known.get(uid)
        return entry[1] if entry is not None else None

    def drop_pod(self, uid: str) -> None:
        """Drop a pod that is bound or no longer exists."""
        self._known.pop(uid, None)

    def single_container_request(self, *, cpus: int, memory: int, policy: str) -> PodRequest:
        """Return the request of a pod with one container whose limits are its requests.

        Without exclusive CPUs it has one shared CPU; the policy is one of `POLICY_NAMES`.
        """
        amounts = {"cpu": str(cpus or 1), **({"memory": str(memory)} if memory else {})}
        exclusive = {f"{self.prefix}/cpus": "exclusive"} if cpus else {}
        annotations = {f"{self.prefix}/policy": policy, **exclusive}
        resources = {"requests": amounts, "limits": amounts}
        return self.read_pod_request(
            {
                "metadata": {"name": "asked", "namespace": "default", "annotations": annotations},
                "spec": {"containers": [{"name": "main", "resources": resources}]},
            }
        )

    def scheduled_numa_nodes(self, document: Mapping[str, Any]) -> dict[str, NUMASet]:
        """Read the NUMA nodes by container from a pod's annotation; empty without one."""
        text = written_annotation(annotations_of(document), self.prefix, SCHEDULED_NODES_KEY)
        return (parse_scheduled_nodes(text) if isinstance(text, str) else None) or {}

    def assigned_numa_nodes(self, document: Mapping[str, Any]) -> dict[str, NUMASet]:
        """Read the memory nodes by container that the publisher wrote; empty without them."""
        text = annotations_of(document).get(f"{self.prefix}/{ASSIGNED_KEY}")
        try:
            entries = mapping_or_empty(msgspec.json.decode(text)) if isinstance(text, str) else {}
            return {
                name: NUMASet.parse(str(mapping_or_empty(entry).get("mems", "")))
                for name, entry in entries.items()
            }
        except (ValueError, RecursionError):
            return {}

    def _decode_pod_request(self, document: Mapping[str, Any]) -> PodRequest:
        try:
            spec = section_of(document, "spec")
            listed = [spec.get(key) for key in ("containers", "initContainers")]
            count = sum(len(c) for c in listed if isinstance(c, list))
            if count > _MAX_POD_CONTAINERS:
                problem = f"it has {count} containers, expected at most {_MAX_POD_CONTAINERS}"
                raise ManifestError((problem,))
            pod = read_pod(document, slots_resource=self._counted)
        except (ManifestError, RecursionError, OverflowError) as error:
            metadata = section_of(document, "metadata")
            names = map(str, annotations_of(document))
            has_annotation = any(f"{self.prefix}/" in name for name in names)
            return PodRequest(
                uid=str(metadata.get("uid", "")),
                namespace=str(metadata.get("namespace", "")),
                name=str(metadata.get("name", "")),
                invalid_reason=f"cannot be read: {str(error)[:300]}" if has_annotation else "",
                has_placement_request=has_annotation,
            )
        return replace(self.build_pod_request(pod), priority=pod_priority(document))

    def build_pod_request(self, pod: PodManifest) -> PodRequest:
        """Build the request of a manifest.

        Containers beyond the first `MAX_EXPECTED_CONTAINERS` are left to the node.
        """
        settings, sandbox = self._settings, pod_sandbox(pod)
        request = PodRequest(uid=sandbox.uid, namespace=sandbox.namespace, name=sandbox.name)
        containers: list[ContainerRequest] = []
        kubelets: list[ContainerRequest] = []
        scopes: set[Scope] = set()
        allocated, whole_milli = NO_CHARGE, NO_CHARGE  # of the containers that stay
        for manifest in pod.containers[:MAX_EXPECTED_CONTAINERS]:
            if self._claims and manifest.claims:
                continue
            container = container_of(pod, manifest, 0, f"{self.prefix}/{SLOTS_KEY}")
            is_init = manifest.role is ContainerRole.INIT
            requested = resolve_placement_options(settings, sandbox, container)
            requested = complete_options(settings, sandbox, container, requested)
            if isinstance(requested, Rejection):
                return _invalid_request(request, requested)
            cpus = _static_policy_cpus(sandbox, container, whole_milli)
            if cpus:
                kubelets.append(_kubelet_request(container, manifest, cpus))
                if not is_init:
                    whole_milli = whole_milli.add(Charge(cpu_milli=1000 * cpus))
            # The kubelet may pin whole CPUs, and its pins are left to it.
            if not cpus and _is_mempolicy_always_rejected(requested):
                return _invalid_request(request, unpinned_memory_policy_rejection(requested))
            if requested.is_unpinned or requested.numacpu is not None:
                continue  # CPUs by number are known on the node alone
            pod_share = replace(
                share_of_first_container(sandbox, container.resources), other_charge=allocated
            )
            demand = compute_demand(sandbox, container, requested, 0, pod_share)
            if isinstance(demand, Rejection):
                return _invalid_request(request, demand)
            scopes.add(requested.scope)
            need = _container_request(sandbox.qos, manifest, requested, demand)
            containers.append(need)
            if not is_init:
                milli = 1000 * need.exclusive_cpus or min(need.shared_milli, need.charged_milli)
                allocated = allocated.add(
                    Charge(milli, dict(need.charged_amounts).get("memory", 0))
                )
        has_pod_scope = Scope.POD in scopes and len(containers) > 1
        return replace(
            request,
            containers=tuple(containers),
            pod_scope_request=peak_request(containers) if has_pod_scope else None,
            kubelet_aligned=tuple(kubelets),
            has_placement_request=bool(containers),
        )


def _invalid_request(request: PodRequest, rejection: Rejection) -> PodRequest:
    """Return an invalid request with the rejection's detail, without names, equal for replicas."""
    return replace(request, invalid_reason=rejection.detail, has_placement_request=True)


def _is_mempolicy_always_rejected(requested: PlacementOptions) -> bool:
    """Return True if every node rejects the memory policy because the memory is not pinned."""
    listed = requested.numacpu is not None and requested.numamem is None
    return (
        requested.mempolicy.needs_nodes
        and (requested.is_unpinned or listed)
        and requested.on_failure is not OnFailure.UNPINNED
        and requested.is_from_annotation(MEMPOLICY_KEY)
    )


def _static_policy_cpus(pod: PodSandbox, container: Container, charge: Charge) -> int:
    """Return the CPUs that the kubelet would grant (cm/cpumanager/policy_static.go)."""
    if pod.qos is not QoSClass.GUARANTEED:
        return 0
    requested = PlacementOptions(cpus=None, policy=Policy.BEST_EFFORT)
    pod_share = replace(share_of_first_container(pod, container.resources), other_charge=charge)
    demand = compute_demand(pod, container, requested, 0, pod_share)
    return demand.exclusive_cpus if isinstance(demand, Demand) else 0


def _kubelet_request(
    container: Container, manifest: ContainerManifest, cpus: int
) -> ContainerRequest:
    memory = _memory_amounts(container.resources.hugepages, manifest.requests.memory or 0)
    amounts = memory + _device_amounts(manifest.devices)
    return ContainerRequest(
        container=manifest.name,
        is_init=manifest.role is ContainerRole.INIT,
        policy=Policy.BEST_EFFORT,
        exclusive_cpus=cpus,
        amounts=amounts,
        charged_amounts=amounts,
        smt=SMT.ANY,
    )


def _required_and_charged_memory(qos: QoSClass, requested: int, demand: Demand) -> tuple[int, int]:
    """Return the bytes that must be on its NUMA nodes, and those that are charged.

    The node reads a memory request from the OOM score; here it is known.
    """
    if qos is not QoSClass.BURSTABLE:
        return demand.memory_bytes, demand.memory_requested
    size = requested if demand.memory_source == "none" and requested else demand.memory_bytes
    return size, min(size, requested)


def _container_request(
    qos: QoSClass, manifest: ContainerManifest, requested: PlacementOptions, demand: Demand
) -> ContainerRequest:
    aligns_devices = requested.devices is DeviceAlignmentMode.ALIGN
    amounts = charged_amounts = _device_amounts(manifest.devices) if aligns_devices else ()
    if requested.bind is Bind.CPU_MEM and requested.numamem is None:
        required_bytes, charged_bytes = _required_and_charged_memory(
            qos, manifest.requests.memory or 0, demand
        )
        amounts = _memory_amounts(demand.hugepages, required_bytes) + amounts
        charged_amounts = _memory_amounts(demand.hugepages, charged_bytes) + charged_amounts
    return ContainerRequest(
        container=manifest.name,
        is_init=manifest.role is ContainerRole.INIT,
        policy=requested.effective_policy,
        exclusive_cpus=demand.exclusive_cpus,
        shared_milli=0 if demand.exclusive_cpus else demand.cpu_milli,
        charged_milli=0 if demand.exclusive_cpus else demand.cpu_requested_milli,
        amounts=amounts,
        charged_amounts=charged_amounts,
        smt=requested.smt,
        on_failure=requested.effective_on_failure,
        is_movable=requested.movable,
    )


def _memory_amounts(hugepages: Mapping[int, int], memory: int) -> AmountByResource:
    amounts = [(hugepages_resource_name(size), n) for size, n in sorted(hugepages.items())]
    return tuple([(name, amount) for name, amount in [("memory", memory), *amounts] if amount])


def _device_amounts(devices: Mapping[str, int]) -> AmountByResource:
    return tuple(sorted(devices.items()))
