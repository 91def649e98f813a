"""The answers of the API, field by field. Names here are a promise to their readers.

Keys are camelCase as in ``nri-numa topology -o json``; id sets are texts in the kernel's list
format, sizes are bytes, times are seconds since the epoch, CPU amounts are thousandths of a CPU.
The OpenAPI file is generated from these records and the texts of their fields (`tools.openapi`).
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Struct, UnsetType, field

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
    idle_siblings: Annotated[str, "Thread siblings kept idle for their neighbour."] = field(
        name="idle"
    )
    kubelet: Annotated[str, "CPUs that the kubelet's static policy granted exclusively."] = ""
    shared: Annotated[str, "CPUs of the shared pool."]
    reserved: Annotated[str, "CPUs that are never given exclusively."]
    cpu_capacity_milli: int
    cpu_allocated_milli: int
    cpu_free_milli: int = field(name="cpuAvailableMilli")
    memory_bytes: int
    memory_allocated_bytes: int
    memory_free_bytes: int = field(name="memoryAvailableBytes")
    huge_pages: tuple[HugePages, ...] = ()
    capacity_factor: float = 1.0
    free_exclusive_cpus: Annotated[
        int, "CPUs that one more container could have exclusively there."
    ] = 0


class ActualCpuset(Document, frozen=True, kw_only=True):
    """Actual cpuset of a container, from its cgroup, if it differs from the desired one."""

    cpus: Annotated[str, "CPUs that it can really run on."]
    mems: Annotated[str, "Memory nodes that it can really use."]
    desired_cpus: Annotated[str, "CPUs that it should have; empty where it has."] = field(
        name="meantCPUs"
    )
    desired_mems: Annotated[str, "Memory nodes that it should have; empty where it has."] = field(
        name="meantMems"
    )
    observed_at: Annotated[
        float, "From when on it was so, as far as seen; seconds since the epoch."
    ] = field(name="since")
    text: Annotated[str, "Both sides: meant 4-7, has 0-7."]
    finding: Annotated[str, "What the files of its cgroup say."] = field(name="found")
    on_exclusive_cpus: Annotated[bool, "It can run on exclusive CPUs of others."] = field(
        name="intruder"
    )
    holders: Annotated[tuple[str, ...], "Those others, as namespace/pod/container."] = field(
        name="owners"
    )
    repairs_abandoned: Annotated[
        bool,
        "Put right again and again; left as it is for a while, because something else rewrites it.",
    ] = field(name="givenUp")


class ContainerMemory(Document, frozen=True, kw_only=True):
    """On which NUMA nodes the memory of a container is, as last read."""

    local_percent: Annotated[
        float | None, "Of its memory, what is on its own NUMA nodes; null when not known."
    ]
    by_numa_node: Annotated[dict[str, int], "By NUMA node, the bytes that it has there."]
    source: Annotated[str, "memory.numa_stat or numa_maps; empty when neither is known."]
    read_at: Annotated[float, "When it was read; seconds since the epoch, or 0."] = field(name="at")
    problem: Annotated[str, "Why it is not known; else empty."]


class ContainerCPUPressure(Document, frozen=True, kw_only=True):
    """Waiting of a container for CPUs, as last read."""

    pressure_percent: Annotated[
        float | None,
        "Of the last minute, the part in which something of it was ready and had "
        "no CPU; null when not known.",
    ]
    waiting_tasks: Annotated[
        float | None,
        "Threads of it that waited for a CPU, on average since the round before; "
        "null when not known.",
    ]
    read_at: Annotated[float, "When it was read; seconds since the epoch, or 0."] = field(name="at")
    problem: Annotated[str, "Why one of them is not known; else empty."]


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
    cpus: Annotated[str, "CPUs it is meant to run on; empty when they are left alone."]
    foreign_cpus: Annotated[str, "CPUs that others pinned it to, for foreign and kubelet."] = field(
        name="pinned", default=""
    )
    mems: Annotated[str, "Its memory nodes; empty when they are left alone."]
    migration: Annotated[
        str | UnsetType,
        "Its memory is on its way: from where to where, and how much has moved; left out else.",
    ] = field(name="moving", default=UNSET)
    mempolicy: Annotated[
        str | UnsetType, "The memory policy that the runtime was asked for; left out without one."
    ] = UNSET
    numa_nodes: Annotated[str, "NUMA nodes that its CPUs belong to."]
    idle_siblings: Annotated[str, "Thread siblings kept idle for it."] = field(name="idle")
    displaced: Annotated[
        str, "CPUs it was placed on, while all are offline and it shares the pool."
    ] = ""
    reserved: Annotated[
        str,
        "Of its exclusive CPUs, those that became reserved later: it keeps them.",
    ] = ""
    aligned: Annotated[bool, "False when a wider set had to be taken."] = field(name="preferred")
    reason: str
    cpu_milli: int
    memory_bytes: int
    assigned_at: UnixTimeSeconds = field(name="since")
    actual: Annotated[ActualCpuset | None, "What it has instead; null while it is as meant."] = None
    slots: Annotated[str, "Ids of the extended resource that it holds, separated by commas."] = ""
    memory: Annotated[
        ContainerMemory | UnsetType,
        "Where its memory is; left out unless containerUsage.memory reads it.",
    ] = UNSET
    start_delay: Annotated[
        float | UnsetType,
        "Seconds from its start until its cgroup had what was decided; only over "
        "CRI, and left out while it is not known.",
    ] = field(name="late", default=UNSET)
    cpu_pressure: Annotated[
        ContainerCPUPressure | UnsetType,
        "How much it waits for CPUs; left out unless containerUsage.cpuPressure reads it.",
    ] = field(name="waiting", default=UNSET)


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
    last_time: UnixTimeSeconds = field(name="at")
    observed: Annotated[
        bool, "It only would have been refused: the agent observed and changed nothing."
    ] = False
    count: Annotated[int, "How often, at last at that moment."] = 1


class Rejections(Document, frozen=True, kw_only=True):
    """Latest rejections of existing pods, newest first; one for each container and reason."""

    rejections: tuple[RejectionRecord, ...] = field(name="refusals")


class NUMANodeExclusiveCPUSlots(Document, frozen=True, kw_only=True):
    """Exclusive CPUs of one NUMA node, counted for the scheduler."""

    id: int
    allocated: Annotated[int, "CPUs of containers that hold slots for them."] = field(name="held")
    free: Annotated[int, "CPUs that could become exclusive."]


class ExclusiveCPUSlotsDocument(Document, frozen=True, kw_only=True):
    """Exclusive CPUs that the scheduler may count: those held with slots, and those still free."""

    serial: Annotated[int, "Grows with every change of the state."]
    ready: Annotated[bool, "Containers are being placed, and really pinned."]
    reason: Annotated[str, "Why not; empty when ready."]
    annotation: Annotated[str, "Annotation of containers that names the slots they hold."]
    total: Annotated[int, "Sum of held and free over the NUMA nodes."]
    exclusive: Annotated[int, "CPUs that are exclusive to containers, with slots or without."]
    numa_nodes: tuple[NUMANodeExclusiveCPUSlots, ...]
    ids: Annotated[tuple[str, ...], "Ids that containers hold."]


class Notices(Document, frozen=True, kw_only=True):
    """Notices in the order of their numbers."""

    instance: Annotated[str, "Names the sequence; when it is another one, ask from 0 again."]
    number: Annotated[int, "The last number given out."]
    evicted: Annotated[int, "Notices that made room for newer ones."]
    notices: tuple[Notice, ...]


class DecidedRequests(Document, frozen=True, kw_only=True):
    """Requests in the order of their numbers; none without publish.otlpEndpoint."""

    instance: Annotated[str, "Names the sequence; when it is another one, ask from 0 again."]
    number: Annotated[int, "The last number given out."]
    requests: tuple[DecidedRequest, ...]


class NUMANodeLoad(Document, frozen=True, kw_only=True):
    """Actual usage of one NUMA node; histories are oldest first, with all samples so far."""

    id: int
    cpu_percent: Annotated[int | None, "Of its CPUs' time; null when not known."]
    memory_bytes: int
    memory_used_bytes: Annotated[int, "Neither free nor reclaimable."]
    memory_reclaimable_bytes: int
    remote_percent: Annotated[
        float | None,
        "Of the pages taken here lately, those that programs on other NUMA nodes "
        "took; null when none were, or the kernel does not count.",
    ]
    cpu_history: tuple[int | None, ...]
    memory_history: tuple[int | None, ...]


class NodeUsage(Document, frozen=True, kw_only=True):
    """Actual usage of the node, as the kernel counts it, now and in the last minutes."""

    sampled_at: Annotated[
        float | None, "Of the last sample, seconds since the epoch; null before."
    ] = field(name="at")
    interval: Annotated[float, "Seconds that the last sample is taken over."]
    problem: Annotated[str, "Why there is nothing new; else empty."]
    cpus: Annotated[dict[str, int], "By CPU, per cent of its time."]
    numa_nodes: tuple[NUMANodeLoad, ...]


class MeasuredContainer(Document, frozen=True, kw_only=True):
    """Actual usage of one container, measured now."""

    namespace: str
    pod: str
    container: str
    cpu_milli: Annotated[int | None, "CPU time, in thousandths of a CPU."]
    cpu_set_milli: Annotated[int, "The CPUs that it may use."]
    memory_by_numa_node: Annotated[dict[str, int], "By NUMA node, the bytes that it has there."]
    local_percent: Annotated[
        float | None, "Of its memory, what is on its own NUMA nodes; null when it has none."
    ]
    problem: Annotated[str, "Why something is not known; else empty."]


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
        tuple[str, ...], "How the decision came about; empty when not kept."
    ] = field(name="steps")
    assignment: Assignment | None = None
    rejection: RejectionRecord | None = field(name="refusal", default=None)
    details: Annotated[
        dict[str, Any] | None,
        "What the steps are made from: inputs with their sources, what each "
        "resource could have had, what the losers lacked. Fields may be added.",
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
        str, "What the runtime has not answered for too long, as a sentence; else empty."
    ] = field(name="unanswered", default="")
    problem: Annotated[
        str,
        "Since when there is no link, and what that means for containers, as a sentence; empty "
        "while there is one.",
    ] = ""
    interface: Annotated[
        str | UnsetType, "`cri` where the runtime is reached over CRI; absent over NRI."
    ] = field(name="over", default=UNSET)


class Checkpoint(Document, frozen=True, kw_only=True):
    """The saved state."""

    written_at: Annotated[float | None, "Seconds since the epoch; null before the first time."]
    problem: str


class Status(Document, frozen=True, kw_only=True):
    """The agent itself."""

    version: str
    node_name: Annotated[str, "Of the node, as Kubernetes has it."] = ""
    started_at: UnixTimeSeconds
    observe: Annotated[bool, "Decides and reports, but changes nothing."]
    ready: bool
    serial: int
    containers: Annotated[dict[str, int], "Number of containers by kind."]
    misaligned: Annotated[
        int,
        "Containers on more NUMA nodes than ideal, or unpinned because what they "
        "asked for could not be met.",
    ] = field(name="wider", default=0)
    drifted: Annotated[int, "Containers that have something else than they should."] = field(
        name="differing", default=0
    )
    on_exclusive_cpus: Annotated[int, "Those of them that can run on exclusive CPUs of others."] = (
        field(name="intruders", default=0)
    )
    kubelet_cpus: Annotated[str, "CPUs that the kubelet's static policy granted exclusively."] = ""
    kubelet_conflicts: Annotated[
        int, "Containers whose cpuset the kubelet writes too; see /v1/kubelet."
    ] = field(name="contested", default=0)
    link: RuntimeLinkStatus
    checkpoint: Checkpoint


class KubeletGrant(Document, frozen=True, kw_only=True):
    """Grant of the kubelet's static managers to one container, or to a whole pod."""

    pod_uid: str
    container: Annotated[str, "Its name; empty for a whole pod."]
    namespace: Annotated[str, "Empty while no such container runs."]
    pod: Annotated[str, "Empty while no such container runs."]
    cpus: Annotated[str, "Exclusive CPUs; empty when none were granted."]
    mems: Annotated[str, "NUMA nodes of its memory; empty when none is."]
    overridden: Annotated[bool, "It runs elsewhere: its pod lists CPUs or memory nodes itself."]


class KubeletConflict(Document, frozen=True, kw_only=True):
    """A container whose cpuset the kubelet and nri-numa both write."""

    container_id: str
    namespace: str
    pod: str
    pod_uid: str
    container: str
    requested_cpus: Annotated[str, "CPUs that the kubelet wants."] = field(name="asked")
    actual_cpus: Annotated[str, "CPUs that it has instead; empty when it has those."] = field(
        name="kept"
    )
    yields_to: Annotated[str, "kubelet or nri-numa, as configured."]
    detected_in: Annotated[str, "UpdateContainer or cgroup."] = field(name="seenIn")
    first_time: UnixTimeSeconds = field(name="since")
    times: Annotated[int, "How often it was seen."]


class KubeletDocument(Document, frozen=True, kw_only=True):
    """State of the kubelet: grants of its managers, and conflicts with the agent."""

    cpu_policy: Annotated[str, "none or static; empty when unknown."] = ""
    memory_policy: Annotated[str, "None or Static; empty when unknown."] = ""
    override: Annotated[str, "never or annotated: kubelet.override."] = "never"
    shared_cpus: Annotated[
        str, "CPUs that its CPU Manager gives to containers without a grant."
    ] = ""
    granted_cpus: Annotated[str, "All CPUs that it granted exclusively."] = ""
    grants: tuple[KubeletGrant, ...] = ()
    conflicts: tuple[KubeletConflict, ...] = field(name="contests", default=())
    problems: Annotated[tuple[str, ...], "What is wrong with its state files, as sentences."] = ()
    configuration: Annotated[str, "Its configuration file as found; empty when none was."] = ""
    inherited: Annotated[
        tuple[str, ...], "What of its configuration became ours, as sentences."
    ] = field(name="adopted", default=())
    differences: Annotated[
        tuple[str, ...], "Where its configuration and ours differ, as sentences."
    ] = ()


class Readiness(Document, frozen=True, kw_only=True):
    """Readiness: True if containers are being placed."""

    ready: bool
    reason: Annotated[str, "Why not; empty when ready."]


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
    cpu_allocatable_milli: Annotated[int, "Oversale and capacity factor are in it."]
    cpu_available_milli: int
    exclusive_cpus: Annotated[int, "CPUs that one container could have exclusively, were it alone."]
    free_exclusive_cpus: Annotated[int, "CPUs that one more container could have exclusively."]
    exclusive_cpus_after_moves: Annotated[
        int | None, "The same once movable containers moved; null where that is not more."
    ] = field(name="exclusiveCPUsAfterMoving", default=None)
    shared_cpus: Annotated[int, "CPUs of the shared pool."]
    memory_bytes: int
    memory_allocatable_bytes: int
    memory_available_bytes: int
    huge_pages: tuple[ZoneHugePages, ...]
    capacity_factor: float
    measured_capacity_factor: Annotated[
        float,
        "What of its CPUs' time the host leaves, as measured, where "
        "measuredCapacity.mode is act; capacityFactor has it too, unless something else counts.",
    ] = field(name="measuredFactor", default=1.0)
    devices: tuple[ZoneDevices, ...] = ()
    core_kind: Annotated[
        str,
        "Of a hybrid machine: performance, efficient, or mixed where the NUMA node "
        "has both; empty elsewhere.",
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
    ready: Annotated[bool, "Containers are being placed, and really pinned."]
    reason: Annotated[str, "Why not; empty when ready."]
    policy: Annotated[
        str, "Policy of pods that ask for none; the kubelet's where its managers pin."
    ]
    scope: Annotated[str, "Scope of pods that ask for none; the kubelet's where its managers pin."]
    cpu_manager_policy: Annotated[
        str | None, "The kubelet's; null where none of its managers pins, or that is not known."
    ] = None
    memory_manager_policy: Annotated[str | None, "The kubelet's; null in the same cases."] = None
    defaults_to_shared: Annotated[
        bool, "Pods that ask for nothing share CPUs, by the defaults."
    ] = field(name="shares")
    threads_per_core: int
    free_exclusive_cpus: Annotated[
        int | None, "CPUs that containers could still have exclusively on the whole machine."
    ] = None
    zones: tuple[Zone, ...]
    pods: Annotated[
        tuple[NodePod, ...],
        "Ordered by namespace and name, each once; Guaranteed ones from their "
        "sandbox on, before anything of them is charged.",
    ]
    counted_containers: Annotated[
        tuple[CountedContainer, ...] | None,
        "Containers that the numbers count, ordered: all that asked for NUMA nodes, also with "
        "nothing; null from an agent that does not say it.",
    ] = field(name="charged", default=None)
    devices_problem: Annotated[
        str | None,
        "Why the kubelet's devices are not known, as a sentence; empty when they "
        "are; null where they are not looked up (devices.count).",
    ] = None
