"""The answers of the API, field by field. Names here are a promise to their readers.

Keys are camelCase as in ``nri-numa topology -o json``; id sets are texts in the kernel's list
format, sizes are bytes, times are seconds since the epoch, CPU amounts are thousandths of a CPU.
The OpenAPI file is generated from these records and the texts of their fields (`tools.openapi`).
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Struct, UnsetType

from nri_numa.config.sections import camel_case
from nri_numa.observe.notices import DecidedRequest, Notice

IdList = Annotated[str, "Ids in the kernel's list format, such as 0-3,8."]
UnixTimeSeconds = Annotated[float, "Seconds since the epoch."]


class Document(Struct, frozen=True, rename=camel_case, kw_only=True):
    """Base of all answers."""


class HugePages(Document, frozen=True, kw_only=True):
    """Huge pages of one size on one NUMA node, in bytes."""

    size_bytes: int
    total_bytes: int
    allocated_bytes: int


class NUMANodeAllocation(Document, frozen=True, kw_only=True):
    """Allocation of one NUMA node: the sets of its CPUs, and its free amounts."""

    id: int
    cpus: IdList
    exclusive: Annotated[str, "CPUs that are exclusive to one container."]
    idle_siblings: Annotated[str, "Siblings of exclusive CPUs that are kept idle."]
    kubelet: Annotated[str, "CPUs that the kubelet's static policy granted exclusively."] = ""
    shared: Annotated[str, "CPUs of the shared pool."]
    reserved: Annotated[str, "CPUs that are never exclusive."]
    cpu_capacity_milli: int
    cpu_allocated_milli: int
    cpu_free_milli: int
    memory_bytes: int
    memory_allocated_bytes: int
    memory_free_bytes: int
    huge_pages: tuple[HugePages, ...] = ()
    capacity_factor: float = 1.0
    free_exclusive_cpus: Annotated[
        int, "CPUs that could become exclusive to one more container."
    ] = 0


class ActualCpuset(Document, frozen=True, kw_only=True):
    """Actual cpuset of a container, from its cgroup, if it differs from the desired one."""

    cpus: Annotated[str, "CPUs of its cgroup."]
    mems: Annotated[str, "Memory nodes of its cgroup."]
    desired_cpus: Annotated[str, "Desired CPUs; empty if they are the actual ones."]
    desired_mems: Annotated[str, "Desired memory nodes; empty if they are the actual ones."]
    observed_at: Annotated[float, "When the drift was first observed; seconds since the epoch."]
    text: Annotated[str, "Both sides: desired 4-7, actual 0-7."]
    finding: Annotated[str, "Content of the files of its cgroup."]
    on_exclusive_cpus: Annotated[bool, "True if it can run on exclusive CPUs of others."]
    holders: Annotated[
        tuple[str, ...], "Containers that have these CPUs, as namespace/pod/container."
    ]
    repairs_abandoned: Annotated[
        bool, "True if no repair is tried for a while, because another program rewrites the cpuset."
    ]


class ContainerMemory(Document, frozen=True, kw_only=True):
    """Memory of a container by NUMA node, as last read."""

    local_percent: Annotated[
        float | None, "Part of its memory on its own NUMA nodes; null if unknown."
    ]
    by_numa_node: Annotated[dict[str, int], "Bytes of its memory by NUMA node."]
    source: Annotated[str, "memory.numa_stat or numa_maps; empty if neither can be read."]
    read_at: Annotated[float, "When it was read; seconds since the epoch, or 0."]
    problem: Annotated[str, "Why it cannot be read; empty if it can."]


class ContainerCPUPressure(Document, frozen=True, kw_only=True):
    """CPU pressure and waiting tasks of a container, as last read."""

    pressure_percent: Annotated[
        float | None,
        "Part of the last minute in which one of its tasks waited for a CPU; null if unknown.",
    ]
    waiting_tasks: Annotated[
        float | None,
        "Mean number of its tasks that waited for a CPU since the previous reading; null if "
        "unknown.",
    ]
    read_at: Annotated[float, "When it was read; seconds since the epoch, or 0."]
    problem: Annotated[str, "Why one of them cannot be read; empty if both can."]


class Assignment(Document, frozen=True, kw_only=True):
    """One container with its desired CPUs and memory nodes."""

    id: str
    pod_uid: str
    namespace: str
    pod: str
    container: str
    kind: Annotated[
        str,
        "exclusive, shared, listed, unpinned, foreign (pinned by others), "
        "kubelet (by the kubelet's static policy), or kept (the container ended, and its pod "
        "keeps its exclusive CPUs; container is * for those of containers to come).",
    ]
    reservation: Annotated[
        str | UnsetType,
        "Of kind reservation, hard or soft: it gives way to a container of another pod; else left "
        "out.",
    ] = UNSET
    policy: str
    qos: str
    smt: str
    cpus: Annotated[str, "Desired CPUs; empty if its CPUs are not pinned."]
    foreign_cpus: Annotated[
        str, "CPUs that another program pinned it to, for foreign and kubelet."
    ] = ""
    mems: Annotated[str, "Its memory nodes; empty if its memory is not pinned."]
    migration: Annotated[
        str | UnsetType,
        "Source, target and progress of the migration of its memory; left out without one.",
    ] = UNSET
    mempolicy: Annotated[
        str | UnsetType, "Memory policy requested from the runtime; left out without one."
    ] = UNSET
    numa_nodes: Annotated[str, "NUMA nodes that its CPUs belong to."]
    idle_siblings: Annotated[str, "Siblings of its CPUs that are kept idle."]
    displaced: Annotated[
        str, "Its CPUs, if all of them are offline and it runs on the shared pool."
    ] = ""
    reserved: Annotated[
        str, "Exclusive CPUs of it that have become reserved since; they stay exclusive."
    ] = ""
    aligned: Annotated[
        bool,
        "False if misaligned: on more NUMA nodes than preferred, or pinned less than requested.",
    ]
    reason: str
    cpu_milli: int
    memory_bytes: int
    assigned_at: UnixTimeSeconds
    actual: Annotated[ActualCpuset | None, "Actual cpuset; null if it is the desired one."] = None
    slots: Annotated[str, "Ids of its slots, separated by commas."] = ""
    memory: Annotated[
        ContainerMemory | UnsetType,
        "Its memory by NUMA node; left out unless containerUsage.memory reads it.",
    ] = UNSET
    start_delay: Annotated[
        float | UnsetType,
        "Seconds from its start until its cpuset was written; only over CRI, and left out while "
        "unknown.",
    ] = UNSET
    cpu_pressure: Annotated[
        ContainerCPUPressure | UnsetType,
        "Its CPU pressure; left out unless containerUsage.cpuPressure reads it.",
    ] = UNSET


class WholeNodeAllocation(Document, frozen=True, kw_only=True):
    """Allocation of the whole node; these fields precede the list of assignments."""

    serial: Annotated[int, "Grows with every change of the state."]
    shared_pool: IdList
    numa_nodes: tuple[NUMANodeAllocation, ...]


class Assignments(WholeNodeAllocation, frozen=True, kw_only=True):
    """Every container on the node."""

    containers: tuple[Assignment, ...]


class RejectionRecord(Document, frozen=True, kw_only=True):
    """Rejection of a container."""

    namespace: str
    pod: str
    container: str
    reason: str
    message: str
    last_time: UnixTimeSeconds
    observed: Annotated[
        bool, "True if the agent only observes, so the container was not rejected."
    ] = False
    count: Annotated[int, "Number of rejections until lastTime."] = 1


class RejectionsDocument(Document, frozen=True, kw_only=True):
    """Latest rejections of existing pods, newest first; one for each container and reason."""

    rejections: tuple[RejectionRecord, ...]


class NUMANodeExclusiveCPUSlots(Document, frozen=True, kw_only=True):
    """Exclusive CPUs of one NUMA node, counted for the scheduler."""

    id: int
    allocated: Annotated[int, "CPUs of containers that have slots for them."]
    free: Annotated[int, "CPUs that could become exclusive."]


class ExclusiveCPUSlotsDocument(Document, frozen=True, kw_only=True):
    """Exclusive CPUs that the scheduler may count: allocated ones with slots, and free ones."""

    serial: Annotated[int, "Grows with every change of the state."]
    ready: Annotated[bool, "True if containers are placed and pinned."]
    reason: Annotated[str, "Why not ready; empty if ready."]
    annotation: Annotated[str, "Annotation that names the slots of containers."]
    total: Annotated[int, "Sum of allocated and free over the NUMA nodes."]
    exclusive: Annotated[int, "CPUs that are exclusive to containers, with slots or without."]
    numa_nodes: tuple[NUMANodeExclusiveCPUSlots, ...]
    ids: Annotated[tuple[str, ...], "Ids of the allocated slots."]


class Notices(Document, frozen=True, kw_only=True):
    """Notices in the order of their numbers."""

    instance: Annotated[str, "Id of the sequence; if it has changed, read from 0 again."]
    number: Annotated[int, "The last number assigned."]
    evicted: Annotated[int, "Number of notices evicted by newer ones."]
    notices: tuple[Notice, ...]


class DecidedRequests(Document, frozen=True, kw_only=True):
    """Requests in the order of their numbers; none without publish.otlpEndpoint."""

    instance: Annotated[str, "Id of the sequence; if it has changed, read from 0 again."]
    number: Annotated[int, "The last number assigned."]
    requests: tuple[DecidedRequest, ...]


class NUMANodeLoad(Document, frozen=True, kw_only=True):
    """Actual usage of one NUMA node; histories are oldest first, with all samples so far."""

    id: int
    cpu_percent: Annotated[int | None, "Used part of its CPU time; null if unknown."]
    memory_bytes: int
    memory_used_bytes: Annotated[int, "Neither free nor reclaimable."]
    memory_reclaimable_bytes: int
    remote_percent: Annotated[
        float | None,
        "Part of the latest page allocations here by tasks on other NUMA nodes; null without "
        "any, or if the kernel does not count.",
    ]
    cpu_history: tuple[int | None, ...]
    memory_history: tuple[int | None, ...]


class NodeUsage(Document, frozen=True, kw_only=True):
    """Actual usage of the node, as the kernel counts it, now and in the last minutes."""

    sampled_at: Annotated[
        float | None, "Time of the last sample, seconds since the epoch; null before the first."
    ]
    interval: Annotated[float, "Seconds that the last sample covers."]
    problem: Annotated[str, "Why there is no new sample; empty if there is one."]
    cpus: Annotated[dict[str, int], "Per cent of the time of each CPU."]
    numa_nodes: tuple[NUMANodeLoad, ...]


class MeasuredContainer(Document, frozen=True, kw_only=True):
    """Actual usage of one container, measured now."""

    namespace: str
    pod: str
    container: str
    cpu_milli: Annotated[int | None, "CPU time, in thousandths of a CPU."]
    cpu_set_milli: Annotated[int, "CPUs of its cpuset, in thousandths of a CPU."]
    memory_by_numa_node: Annotated[dict[str, int], "Bytes of its memory by NUMA node."]
    local_percent: Annotated[
        float | None, "Part of its memory on its own NUMA nodes; null without memory."
    ]
    problem: Annotated[str, "Why something cannot be measured; empty if everything can."]


class MeasuredContainersOfName(Document, frozen=True, kw_only=True):
    """Usage of the containers of one name in a pod: one, except for a moment of a restart."""

    containers: tuple[MeasuredContainer, ...]


class Explanation(Document, frozen=True, kw_only=True):
    """Explanation of one container's placement or rejection."""

    namespace: str
    pod: str
    container: str
    outcome: Annotated[str, "admitted or rejected."]
    summary: str
    decision_steps: Annotated[
        tuple[str, ...], "Steps of the decision; empty if they are not stored."
    ]
    assignment: Assignment | None = None
    rejection: RejectionRecord | None = None
    details: Annotated[
        dict[str, Any] | None,
        "Basis of the steps: options with their sources, demand, hints of each resource and "
        "rejected masks. Fields may be added.",
    ] = None


class PodExplanations(Document, frozen=True, kw_only=True):
    """Explanations for the containers of a pod, or for one of them."""

    explanations: tuple[Explanation, ...]


class RuntimeLinkStatus(Document, frozen=True, kw_only=True):
    """The link to the container runtime."""

    state: str
    detail: str
    runtime: str
    runtime_version: str
    pending_registration: Annotated[
        str, "Sentence about a registration that the runtime does not answer; else empty."
    ] = ""
    problem: Annotated[
        str, "Sentence about a missing link and what it means for containers; empty with a link."
    ] = ""
    interface: Annotated[
        str | UnsetType, "`cri` if the runtime is reached over CRI; left out over NRI."
    ] = UNSET


class Checkpoint(Document, frozen=True, kw_only=True):
    """The saved state."""

    written_at: Annotated[float | None, "Seconds since the epoch; null before the first write."]
    problem: str


class Status(Document, frozen=True, kw_only=True):
    """The agent itself."""

    version: str
    node_name: Annotated[str, "Name of the Node object."] = ""
    started_at: UnixTimeSeconds
    observe: Annotated[bool, "True if the agent decides and reports, and changes nothing."]
    ready: bool
    serial: int
    containers: Annotated[dict[str, int], "Number of containers by kind."]
    misaligned: Annotated[
        int, "Containers on more NUMA nodes than preferred, or pinned less than requested."
    ] = 0
    drifted: Annotated[int, "Containers whose actual cpuset differs from the desired one."] = 0
    on_exclusive_cpus: Annotated[
        int, "Drifted containers that can run on exclusive CPUs of others."
    ] = 0
    kubelet_cpus: Annotated[str, "CPUs that the kubelet's static policy granted exclusively."] = ""
    kubelet_conflicts: Annotated[
        int, "Containers whose cpuset the kubelet also writes; see /v1/kubelet."
    ] = 0
    link: RuntimeLinkStatus
    checkpoint: Checkpoint


class KubeletGrant(Document, frozen=True, kw_only=True):
    """Grant of the kubelet's static managers to one container, or to a whole pod."""

    pod_uid: str
    container: Annotated[str, "Its name; empty for a whole pod."]
    namespace: Annotated[str, "Empty while no such container runs."]
    pod: Annotated[str, "Empty while no such container runs."]
    cpus: Annotated[str, "Exclusive CPUs; empty without any."]
    mems: Annotated[str, "NUMA nodes of its memory; empty without any."]
    overridden: Annotated[
        bool, "True if it runs on other CPUs, because its pod lists CPUs or memory nodes."
    ]


class KubeletConflict(Document, frozen=True, kw_only=True):
    """A container whose cpuset the kubelet and nri-numa both write."""

    container_id: str
    namespace: str
    pod: str
    pod_uid: str
    container: str
    requested_cpus: Annotated[str, "CPUs that the kubelet writes."]
    actual_cpus: Annotated[str, "Actual CPUs; empty if they are the requested ones."]
    yields_to: Annotated[str, "kubelet or nri-numa, as configured."]
    detected_in: Annotated[str, "UpdateContainer or cgroup."]
    first_time: UnixTimeSeconds
    count: Annotated[int, "Number of observations."]


class KubeletDocument(Document, frozen=True, kw_only=True):
    """State of the kubelet: grants of its managers, and conflicts with the agent."""

    cpu_policy: Annotated[str, "none or static; empty if unknown."] = ""
    memory_policy: Annotated[str, "None or Static; empty if unknown."] = ""
    override: Annotated[str, "never or annotated: kubelet.overrideGrants."] = "never"
    shared_cpus: Annotated[
        str, "CPUs that its CPU Manager gives to containers without a grant."
    ] = ""
    granted_cpus: Annotated[str, "All CPUs that it granted exclusively."] = ""
    grants: tuple[KubeletGrant, ...] = ()
    conflicts: tuple[KubeletConflict, ...] = ()
    problems: Annotated[tuple[str, ...], "Problems of its state files, as sentences."] = ()
    configuration: Annotated[str, "Path of its configuration file; empty without one."] = ""
    inherited: Annotated[
        tuple[str, ...], "Settings inherited from its configuration, as sentences."
    ] = ()
    differences: Annotated[
        tuple[str, ...], "Differences between its configuration and the agent's, as sentences."
    ] = ()


class Readiness(Document, frozen=True, kw_only=True):
    """Readiness: True if containers are being placed."""

    ready: bool
    reason: Annotated[str, "Why not ready; empty if ready."]


class ErrorBody(Document, frozen=True, kw_only=True):
    """Reason and message of an error."""

    reason: Annotated[str, "A short CamelCase name."]
    message: str


class Error(Document, frozen=True, kw_only=True):
    """Every answer with a status of 400 and above."""

    error: ErrorBody


class NUMAInfoData(Struct, frozen=True, kw_only=True):
    """One entry for each NUMA node, in the order of their ids."""

    nodenums: int
    cpulist: Annotated[tuple[str, ...], "Online CPUs, each by its number: 0,2,4."]
    memsize: Annotated[tuple[str, ...], "Bytes of memory, as texts."]


class MachineNUMAInfo(Struct, frozen=True, kw_only=True):
    """The machine in the form of the numacpu and numamem node annotations."""

    code: int
    message: str
    data: NUMAInfoData


TopologyDocument = dict[str, Any]
"""As `nri_numa.model.machine.topology_document` makes it."""

# --- /v1/zones: each NUMA node as a scheduler counts it, all of one moment ------------------------


class ZoneHugePages(Document, frozen=True, kw_only=True):
    """Huge pages of one size on one NUMA node, in bytes."""

    size_bytes: int
    capacity_bytes: int
    allocatable_bytes: int
    available_bytes: int


class ZoneDevices(Document, frozen=True, kw_only=True):
    """Devices of one extended resource on one NUMA node, as the kubelet counts them."""

    resource: str
    allocatable: Annotated[int, "Healthy ones."]
    available: Annotated[int, "Those that no pod has."]


class Distance(Document, frozen=True, kw_only=True):
    """Distance of a NUMA node, from the firmware's SLIT table; 10 is itself."""

    id: int
    value: int


class Zone(Document, frozen=True, kw_only=True):
    """One NUMA node with its total, allocatable and available amounts."""

    id: int
    socket: Annotated[int | None, "Socket of its CPUs; null without CPUs, or with several."]
    distances: tuple[Distance, ...]
    cpus: Annotated[int, "CPUs that are online."]
    cpu_allocatable_milli: Annotated[int, "Overcommit and capacity factor included."]
    cpu_available_milli: int
    exclusive_cpus: Annotated[
        int, "CPUs that could be exclusive to one container on an empty node."
    ]
    free_exclusive_cpus: Annotated[int, "CPUs that could become exclusive to one more container."]
    exclusive_cpus_after_moves: Annotated[
        int | None, "The same after moves of movable containers; null if that is not more."
    ] = None
    shared_cpus: Annotated[int, "CPUs of the shared pool."]
    memory_bytes: int
    memory_allocatable_bytes: int
    memory_available_bytes: int
    huge_pages: tuple[ZoneHugePages, ...]
    capacity_factor: float
    measured_capacity_factor: Annotated[
        float,
        "Part of its CPU time that the host leaves, as measured, if measuredCapacity.mode is "
        "enforce; capacityFactor includes it, unless another source sets it.",
    ] = 1.0
    devices: tuple[ZoneDevices, ...] = ()
    core_kind: Annotated[
        str, "Kind of its cores on a hybrid machine: performance, efficient or mixed; else empty."
    ] = ""
    pcie_roots: Annotated[
        tuple[str, ...], "PCIe root complexes next to it, such as pci0000:00, with dra.enabled."
    ] = ()


class NodePod(Document, frozen=True, kw_only=True):
    """A pod with containers on the node."""

    namespace: str
    name: str
    qos: str


class CountedContainer(Document, frozen=True, kw_only=True):
    """A container whose CPUs or memory are taken from the numbers."""

    pod_uid: str
    name: str


class Zones(Document, frozen=True, kw_only=True):
    """Every NUMA node as schedulers count it, and the pods of the node."""

    serial: Annotated[int, "Grows with every change of the state."]
    ready: Annotated[bool, "True if containers are placed and pinned."]
    reason: Annotated[str, "Why not ready; empty if ready."]
    policy: Annotated[str, "Policy of pods without one; the kubelet's if its managers pin."]
    scope: Annotated[str, "Scope of pods without one; the kubelet's if its managers pin."]
    cpu_manager_policy: Annotated[
        str | None, "The kubelet's; null if none of its managers pins, or that is unknown."
    ] = None
    memory_manager_policy: Annotated[str | None, "The kubelet's; null in the same cases."] = None
    defaults_to_shared: Annotated[bool, "True if pods without options share CPUs, by the defaults."]
    threads_per_core: int
    free_exclusive_cpus: Annotated[
        int | None, "CPUs that could still become exclusive on the whole machine."
    ] = None
    zones: tuple[Zone, ...]
    pods: Annotated[
        tuple[NodePod, ...],
        "Ordered by namespace and name, each once; Guaranteed ones from their "
        "sandbox on, before anything of them is charged.",
    ]
    counted_containers: Annotated[
        tuple[CountedContainer, ...] | None,
        "Containers that the numbers count, ordered: all with placement options, also without a "
        "charge; null from an agent that does not report them.",
    ] = None
    devices_problem: Annotated[
        str | None,
        "Sentence why the kubelet's devices are unknown; empty if they are known; null if they are "
        "not counted (devices.countFree).",
    ] = None
