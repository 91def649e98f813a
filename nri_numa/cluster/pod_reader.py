"""What a pod asks for, read by the engine's own rules before any node has seen it.

The kubelet creates init containers one after another and then the others, which run together; what
an ended init container had is free again. So an init container is placed beside the sidecars that
started before it, and the rest together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec.structs import replace

from nri_numa.cluster.manifests import ManifestError, read_pod
from nri_numa.cluster.pod_request import (
    AmountByResource,
    ContainerRequest,
    PodRequest,
    peak_request,
)
from nri_numa.cluster.pods import ContainerRole, PodManifest, container_of, pod_sandbox
from nri_numa.config.derived import derive_settings, slots_resource
from nri_numa.config.sections import AgentConfig
from nri_numa.engine.place.memory import (
    MEMPOLICY_KEY,
    hugepages_resource_name,
    unpinned_memory_policy_rejection,
)
from nri_numa.engine.pod_admission import MAX_EXPECTED_CONTAINERS
from nri_numa.engine.request.annotations import (
    SCHEDULED_NODES_KEY,
    parse_scheduled_nodes,
    resolve_placement_options,
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
from nri_numa.kube.requests import annotations_of, mapping_or_empty
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

POLICY_NAMES: Final = tuple(str(policy) for policy in Policy)
_MAX_POD_CONTAINERS: Final = 500
"""Containers of a pod that is read at all, in 40 ms."""
_MAX_CACHED_PODS: Final = 10_000
"""Pods that are known by their uid, for `bind`, which is not given the pod."""


class PodReader:
    """Reads pods, and remembers what `filter` was asked for until `bind`.

    Prefix, rules, defaults, permissions, what counts exclusive CPUs and whether the DRA driver is
    on are those of the nodes. The NUMA nodes of its claims are chosen, and counted, by
    kube-scheduler itself: holding others for a container would count it twice. A pod does not say
    whose driver its claims are for, so every container with one is left out, and its node has the
    last word.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._settings, self._counted = derive_settings(config), slots_resource(config)
        self._claims = config.dra.enabled
        self._known: dict[str, tuple[str, PodRequest]] = {}

    @property
    def prefix(self) -> str:
        """Of annotations and attributes, as the nodes have it."""
        return self._settings.prefix

    def read_pod_request(self, document: Mapping[str, Any]) -> PodRequest:
        """What a pod asks for. A pod that cannot be read asks for nothing, or wrongly."""
        metadata = mapping_or_empty(document.get("metadata"))
        uid, version = str(metadata.get("uid", "")), str(metadata.get("resourceVersion", ""))
        known = self._known.get(uid)
        if known is not None and version and known[0] == version:
            return known[1]
        request = self._decode_pod_request(document, metadata)
        if uid:
            if len(self._known) >= _MAX_CACHED_PODS:
                self._known.clear()
            self._known[uid] = version, request
        return request

    def cached_request(self, uid: str) -> PodRequest | None:
        """What was last read of a pod; None for one that is not known."""
        known = self._known.get(uid)
        return known[1] if known is not None else None

    def drop_pod(self, uid: str) -> None:
        """A pod has its node, or does not exist any more."""
        self._known.pop(uid, None)

    def single_container_request(self, *, cpus: int, memory: int, policy: str) -> PodRequest:
        """What a pod of one container asks for whose limits are its requests.

        Without exclusive CPUs it shares one; the policy is one of `POLICY_NAMES`.
        """
        prefix = self._settings.prefix
        amounts = {"cpu": str(cpus or 1), **({"memory": str(memory)} if memory else {})}
        annotations = {
            f"{prefix}/policy": policy,
            **({f"{prefix}/cpus": "exclusive"} if cpus else {}),
        }
        resources = {"requests": amounts, "limits": amounts}
        return self.read_pod_request(
            {
                "metadata": {"name": "asked", "namespace": "default", "annotations": annotations},
                "spec": {"containers": [{"name": "main", "resources": resources}]},
            }
        )

    def scheduled_numa_nodes(self, document: Mapping[str, Any]) -> dict[str, NUMASet]:
        """NUMA nodes by container, as a pod's annotation says; empty where it says nothing."""
        text = annotations_of(document).get(f"{self._settings.prefix}/{SCHEDULED_NODES_KEY}")
        return (parse_scheduled_nodes(text) if isinstance(text, str) else None) or {}

    def _decode_pod_request(
        self, document: Mapping[str, Any], metadata: Mapping[str, Any]
    ) -> PodRequest:
        try:
            spec = mapping_or_empty(document.get("spec"))
            listed = [spec.get(key) for key in ("containers", "initContainers")]
            count = sum(len(one) for one in listed if isinstance(one, list))
            if count > _MAX_POD_CONTAINERS:
                problem = f"it has {count} containers, expected at most {_MAX_POD_CONTAINERS}"
                raise ManifestError((problem,))
            pod = read_pod(document, counted=self._counted)
        except (ManifestError, RecursionError, OverflowError) as error:
            prefix = f"{self._settings.prefix}/"
            ours = any(
                prefix in str(name) for name in mapping_or_empty(metadata.get("annotations"))
            )
            return PodRequest(
                uid=str(metadata.get("uid", "")),
                namespace=str(metadata.get("namespace", "")),
                name=str(metadata.get("name", "")),
                invalid_reason=f"cannot be read: {str(error)[:300]}" if ours else "",
                has_placement_request=ours,
            )
        return self.build_pod_request(pod)

    def build_pod_request(self, pod: PodManifest) -> PodRequest:
        """What a pod asks for that was read before.

        Containers beyond the first `MAX_CONTAINERS` are left to the node.
        """
        settings, sandbox = self._settings, pod_sandbox(pod)
        request = PodRequest(uid=sandbox.uid, namespace=sandbox.namespace, name=sandbox.name)
        containers: list[ContainerRequest] = []
        kubelets: list[ContainerRequest] = []
        scopes: set[Scope] = set()
        allocated, whole_milli = NO_CHARGE, NO_CHARGE  # of the containers that stay
        for one in pod.containers[:MAX_EXPECTED_CONTAINERS]:
            if self._claims and one.claims:
                continue
            container = container_of(pod, one, 0, f"{settings.prefix}/{SLOTS_KEY}")
            ends, memory = one.role is ContainerRole.INIT, one.requests.memory or 0
            requested = resolve_placement_options(settings, sandbox, container)
            requested = complete_options(settings, sandbox, container, requested)
            if isinstance(requested, Rejection):
                return _invalid_request(request, requested)
            whole = _static_policy_cpus(sandbox, container, whole_milli)
            if whole:
                kubelets.append(_kubelet_request(container, ends, memory, whole, one.devices))
                if not ends:
                    whole_milli = whole_milli.add(Charge(cpu_milli=1000 * whole))
            # Whole CPUs a kubelet may pin, and what it pins is left to it.
            if not whole and _is_mempolicy_always_refused(requested):
                return _invalid_request(request, unpinned_memory_policy_rejection(requested))
            if requested.is_unpinned or requested.numacpu is not None:
                continue  # CPUs by number are known on the node alone
            share = replace(
                share_of_first_container(sandbox, container.resources), other_charge=allocated
            )
            found = compute_demand(sandbox, container, requested, 0, share)
            if isinstance(found, Rejection):
                return _invalid_request(request, found)
            scopes.add(requested.scope)
            amounts = _required_and_charged_memory(sandbox.qos, memory, found)
            asks = _container_request(container, ends, requested, found, amounts)
            if one.devices and requested.devices is DeviceAlignmentMode.ALIGN:
                devices = _device_amounts(one.devices)
                asks = replace(
                    asks,
                    amounts=asks.amounts + devices,
                    charged_amounts=asks.charged_amounts + devices,
                )
            containers.append(asks)
            if not ends:
                milli = 1000 * asks.exclusive_cpus or min(asks.shared_milli, asks.charged_milli)
                allocated = allocated.add(
                    Charge(milli, dict(asks.charged_amounts).get("memory", 0))
                )
        return replace(
            request,
            containers=tuple(containers),
            pod_scope_request=peak_request(containers)
            if Scope.POD in scopes and len(containers) > 1
            else None,
            kubelet_aligned=tuple(kubelets),
            has_placement_request=bool(containers),
        )


def _invalid_request(request: PodRequest, refusal: Rejection) -> PodRequest:
    """A request with the refusal without the names, so that replicas have one text."""
    return replace(request, invalid_reason=refusal.detail, has_placement_request=True)


def _is_mempolicy_always_refused(requested: PlacementOptions) -> bool:
    """Whether every node refuses its memory policy, since no machine pins its memory."""
    listed = requested.numacpu is not None and requested.numamem is None
    return (
        requested.mempolicy.needs_nodes
        and (requested.is_unpinned or listed)
        and requested.on_failure is not OnFailure.UNPINNED
        and requested.is_from_annotation(MEMPOLICY_KEY)
    )


def _static_policy_cpus(pod: PodSandbox, container: Container, others: Charge) -> int:
    """CPUs that the kubelet's static policy would give (cm/cpumanager/policy_static.go)."""
    if pod.qos is not QoSClass.GUARANTEED:
        return 0
    requested = PlacementOptions(cpus=None, policy=Policy.BEST_EFFORT)
    share = replace(share_of_first_container(pod, container.resources), other_charge=others)
    found = compute_demand(pod, container, requested, 0, share)
    return found.exclusive_cpus if isinstance(found, Demand) else 0


def _kubelet_request(
    container: Container, ends: bool, memory: int, cpus: int, devices: Mapping[str, int]
) -> ContainerRequest:
    amounts = _memory_amounts(container.resources.hugepages, memory) + _device_amounts(devices)
    return ContainerRequest(
        container=container.name,
        is_init=ends,
        policy=Policy.BEST_EFFORT,
        exclusive_cpus=cpus,
        amounts=amounts,
        charged_amounts=amounts,
        smt=SMT.ANY,
    )


def _required_and_charged_memory(qos: QoSClass, requested: int, found: Demand) -> tuple[int, int]:
    """Bytes that must be on its NUMA nodes, and what of these is allocated.

    The node reads a memory request from the OOM score; here it is known.
    """
    if qos is not QoSClass.BURSTABLE:
        return found.memory_bytes, found.memory_requested
    least = requested if found.memory_source == "none" and requested else found.memory_bytes
    return least, min(least, requested)


def _container_request(
    container: Container,
    ends: bool,
    requested: PlacementOptions,
    found: Demand,
    memory: tuple[int, int],
) -> ContainerRequest:
    near = requested.bind is Bind.CPU_MEM and requested.numamem is None
    return ContainerRequest(
        container=container.name,
        is_init=ends,
        policy=requested.effective_policy,
        exclusive_cpus=found.exclusive_cpus,
        shared_milli=0 if found.exclusive_cpus else found.cpu_milli,
        charged_milli=0 if found.exclusive_cpus else found.cpu_requested_milli,
        amounts=_memory_amounts(found.hugepages, memory[0]) if near else (),
        charged_amounts=_memory_amounts(found.hugepages, memory[1]) if near else (),
        smt=requested.smt,
        on_failure=requested.effective_on_failure,
    )


def _memory_amounts(hugepages: Mapping[int, int], memory: int) -> AmountByResource:
    found = [("memory", memory)] if memory else []
    return (
        *found,
        *((hugepages_resource_name(size), n) for size, n in sorted(hugepages.items()) if n),
    )


def _device_amounts(devices: Mapping[str, int]) -> AmountByResource:
    return tuple(sorted(devices.items()))
