"""What stands in the configuration file: frozen records, one per section.

The texts in `Meta(description=…)` are the reference: the JSON Schema, ``config/agent.yaml`` and the
documentation are generated from them (`nri_numa.config.schema`).

Keys are camelCase with the acronyms kept (``reservedCPUs``), as in Kubernetes' own files.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct, field

from nri_numa.config.controlling import Controller, OfflineCapacity
from nri_numa.config.cpu_waiting import CPUWaiting
from nri_numa.config.device_sources import Devices
from nri_numa.config.dra import DRA
from nri_numa.config.locality import MemoryLocality
from nri_numa.config.measured_capacity import MeasuredCapacity
from nri_numa.config.names import camel_case
from nri_numa.config.scheduling import Scheduling
from nri_numa.config.tenants import PermissionDocument, PodMatch, Quotas, SharedPool
from nri_numa.engine.values.settings import CPUOrder, IsolatedCPUs, NohzFullCPUs, PreferredCores
from nri_numa.engine.values.workload import KubeletOverride, Strategy

# --- The ``publish`` section: what ``nri-numa publish`` writes to the API server, and how fast ----


class Publish(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """What ``nri-numa publish`` writes to the API server; the agent itself reads none of it."""

    events: Annotated[
        bool,
        Meta(
            description="Events on pods: refused, placed wider than ideal, not pinned, late, "
            "drift, placed after the start."
        ),
    ] = True
    node_annotations: Annotated[
        bool,
        Meta(
            description="Annotations numacpu and numamem of the Node, below the annotation prefix: "
            "CPUs and bytes by NUMA node."
        ),
    ] = True
    node_labels: Annotated[
        bool,
        Meta(
            description="Labels of the Node, below the annotation prefix, with the machine's shape."
        ),
    ] = True
    pod_annotation: Annotated[
        bool,
        Meta(
            description="Annotation assigned on each pod with pinned containers: what they have. "
            "Needs the rights to list and patch pods."
        ),
    ] = False
    capacity: Annotated[
        bool,
        Meta(
            description="Exclusive CPUs in the status of the Node, as devicePlugin.resourceName, "
            "for the scheduler to count by; instead of nri-numa device-plugin. Needs the right to "
            "patch nodes/status."
        ),
    ] = False
    node_resource_topology: Annotated[
        bool,
        Meta(
            description="A NodeResourceTopology of the Node: what each NUMA node has and what is "
            "left, for schedulers. Needs its definition in the cluster and the rights to get, "
            "create and patch it."
        ),
    ] = False
    node_resource_topology_force: Annotated[
        bool,
        Meta(description="Take that object's zones from another publisher."),
    ] = False
    node_resource_topology_validity: Annotated[
        str | float,
        Meta(
            description="Time after which readers may not believe that object any more where "
            "nobody renews it, at every resync; three times resync or more. 0: they may for ever."
        ),
    ] = 0
    numatopology: Annotated[
        bool,
        Meta(
            description="A Numatopology of the Node, for Volcano's plugin numaaware. Needs "
            "Volcano's definition in the cluster and the rights to create and patch it."
        ),
    ] = False
    rate: Annotated[
        float, Meta(gt=0, le=100, description="Requests to the API server per second at most.")
    ] = 5.0
    burst: Annotated[
        int, Meta(ge=1, le=1000, description="Requests at once after a quiet time.")
    ] = 10
    resync: Annotated[
        str | float,
        Meta(
            description="Time between two looks at what is really there, to put back what somebody "
            "removed; 1s or more."
        ),
    ] = "5m"
    credentials: Annotated[
        str,
        Meta(
            min_length=1,
            description="Directory with token and ca.crt; both are read again when they change.",
        ),
    ] = "/var/run/secrets/kubernetes.io/serviceaccount"
    address: Annotated[
        str,
        Meta(
            min_length=1,
            description="host:port on loopback for its metrics and probes, or off.",
        ),
    ] = "127.0.0.1:9892"


# --- The section of the configuration about the kubelet on this node ------------------------------


class Kubelet(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """The kubelet on this node, and who may take a container away from it."""

    override: Annotated[
        KubeletOverride,
        Meta(
            description="Whether a pod may take a container away from the kubelet's static "
            "policies by listing CPUs or memory nodes itself: never, or annotated."
        ),
    ] = KubeletOverride.NEVER
    config: Annotated[
        Annotated[str, Meta(min_length=1)],
        Meta(
            description="File of the kubelet's configuration (--config): a path, auto to take it "
            "from the command line of the kubelet that runs, or off. What it reserves becomes ours "
            "where reservedCPUs, strictReserved and reservedMemory are not set."
        ),
    ] = "auto"
    config_dir: Annotated[
        str,
        Meta(
            description="Directory of drop-ins for it (--config-dir); with config: auto the "
            "command line tells."
        ),
    ] = ""


API_VERSION: Final = "nri-numa/v1"
KIND: Final = "AgentConfig"


class LogLevel(StrEnum):
    """Least severe line that is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """How a line is written."""

    LOGFMT = "logfmt"
    JSON = "json"


class InternalErrorAnswer(StrEnum):
    """What the runtime is told when we fail by a mistake of our own."""

    UNPINNED = "unpinned"
    REJECT = "reject"


Text = Annotated[str, Meta(min_length=1)]
IdList = str | int  # a YAML reader makes a number of a list with one id
AnnotationValue = str | int
Duration = str | float
Quantity = str | int


class LinkKind(StrEnum):
    """The interface of the runtime that is used."""

    NRI = "nri"
    CRI = "cri"


class Runtime(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """How the container runtime is reached."""

    link: Annotated[
        LinkKind,
        Meta(
            description="nri: the runtime asks before a container starts. cri: for runtimes "
            "without NRI; containers are watched and get their CPUs by an update after they were "
            "created, so mostly after their start, and refusals stop nothing (docs/cri.md)."
        ),
    ] = LinkKind.NRI
    nri_socket: Annotated[
        Text, Meta(description="Unix socket on which the runtime serves NRI.")
    ] = "/var/run/nri/nri.sock"
    cri_socket: Annotated[
        Text, Meta(description="Unix socket on which the runtime serves CRI; for link: cri.")
    ] = "/run/containerd/containerd.sock"
    cri_listing: Annotated[
        Duration,
        Meta(
            description="Time between two listings of containers over CRI while the runtime sends "
            "no events; 100ms or more. For link: cri."
        ),
    ] = "1s"
    plugin_name: Annotated[
        Text, Meta(description="Name under which the plugin registers.", pattern="^[^/\\s]+$")
    ] = "nri-numa"
    plugin_index: Annotated[
        str | int,
        Meta(
            description="Two digits that order the plugins of a node; the last one to write a "
            "container's cpuset must be us, so it is high."
        ),
    ] = "90"
    hung_after: Annotated[
        Duration,
        Meta(
            description="How long a registration may wait for its answer before the runtime is "
            "said to hang. A container in its grace period makes it wait, so longer than those."
        ),
    ] = "60s"


class HTTP(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """Metrics, health, the API and the page."""

    address: Annotated[
        Text,
        Meta(
            description="host:port to listen on, or off. Loopback by default; anything wider "
            "needs tokenFile, or allowAnonymous."
        ),
    ] = "127.0.0.1:9891"
    socket: Annotated[
        str,
        Meta(
            description="Unix socket to serve the API on besides, for nri-numa publish; empty for "
            "none. Its user and the group of its directory may connect, without a token."
        ),
    ] = ""
    token_file: Annotated[
        str,
        Meta(
            description="File with a bearer token that every request but /healthz and /readyz "
            "must carry. It is read again when it changes."
        ),
    ] = ""
    tls_cert: Annotated[str, Meta(description="PEM file with the server's certificate chain.")] = ""
    tls_key: Annotated[str, Meta(description="PEM file with the certificate's private key.")] = ""
    allow_anonymous: Annotated[
        bool,
        Meta(
            description="Listen wider than loopback without a token. Everybody who reaches the "
            "address can then read which pods run here and where."
        ),
    ] = False
    allow_plaintext_token: Annotated[
        bool,
        Meta(
            description="Take the token on an address wider than loopback without TLS. Whoever "
            "sees the traffic has the token then; for networks that encrypt by themselves."
        ),
    ] = False


class DevicePlugin(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """``nri-numa device-plugin``; the agent reads none of it."""

    resource_name: Annotated[
        Text,
        Meta(
            description="Name of the extended resource that the scheduler counts exclusive CPUs "
            "by; outside kubernetes.io, best below a domain of yours."
        ),
    ] = "numa.example.com/exclusive-cpu"
    topology: Annotated[
        bool,
        Meta(
            description="Announce the NUMA node of each slot, for a kubelet whose Topology Manager "
            "aligns CPUs with devices. Its choice binds then: CPUs are taken on those NUMA nodes "
            "and on no others."
        ),
    ] = False
    directory: Annotated[
        Text,
        Meta(
            description="The kubelet's directory for device plugins, which is the same whatever "
            "the kubelet's root is."
        ),
    ] = "/var/lib/kubelet/device-plugins"


class Log(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """Log lines, written to standard error."""

    level: Annotated[LogLevel, Meta(description="Least severe line that is written.")] = (
        LogLevel.INFO
    )
    format: Annotated[LogFormat, Meta(description="logfmt (key=value) or json.")] = LogFormat.LOGFMT
    file: Annotated[
        str,
        Meta(
            description="File to append to instead of standard error. A plugin that the runtime "
            "launched has no standard error and writes to the journal without this."
        ),
    ] = ""


class Reconcile(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """Comparing the real cgroups with what was decided."""

    interval: Annotated[
        Duration,
        Meta(
            description="Time between two rounds: seconds, or a text such as 30s or 5m. 0 is off. "
            "A container whose cpuset somebody writes is looked at within a second."
        ),
    ] = "30s"
    max_repairs: Annotated[
        int,
        Meta(
            ge=1,
            description="Repairs of one container within repairWindow after which the fight is "
            "reported instead of fought.",
        ),
    ] = 3
    repair_window: Annotated[
        Duration, Meta(description="The window that maxRepairs counts in.")
    ] = "10m"
    without_runtime: Annotated[
        bool,
        Meta(
            description="While the runtime cannot be reached, write the cgroups that are not as "
            "decided; else they wait until it is back. CPU limits wait in any case."
        ),
    ] = False


class History(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """How much of the past stays in memory for explain and the page."""

    refusals: Annotated[int, Meta(ge=0, le=100_000, description="Refusals kept.")] = 256


class RuleMatch(PodMatch, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """Which containers a rule is for; everything given must match, nothing given matches all."""

    runtime_handlers: Annotated[
        tuple[str, ...],
        Meta(description="Handlers of RuntimeClasses; the empty text is the default handler."),
    ] = ()
    containers: Annotated[
        tuple[Text, ...], Meta(description="Shell patterns of container names; one must match.")
    ] = ()


class RuleDocument(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """One rule: which containers, and which annotation keys they get."""

    set: Annotated[
        dict[str, AnnotationValue],
        Meta(description="Annotation keys, without the prefix, and their values; not empty."),
    ] = field(default_factory=dict)
    match: Annotated[RuleMatch, Meta(description="Which containers; without it, all of them.")] = (
        RuleMatch()
    )


class AgentConfig(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """The whole configuration of the node agent."""

    api_version: Annotated[
        Literal["nri-numa/v1"], Meta(description="Version of this document's form.")
    ] = API_VERSION
    kind: Annotated[Literal["AgentConfig"], Meta(description="What this document is.")] = KIND
    runtime: Annotated[Runtime, Meta(description="How the container runtime is reached.")] = (
        Runtime()
    )
    node_name: Annotated[
        str,
        Meta(
            description="Name of this node in the page, the API and the metrics, and of the Node "
            "object; the host name when empty. The manifests set it to the name that Kubernetes "
            "has, by the environment."
        ),
    ] = ""
    state_dir: Annotated[
        Text,
        Meta(
            description="Directory of the checkpoint. /run is right: containers do not outlive a "
            "reboot either."
        ),
    ] = "/run/nri-numa"
    sysfs_root: Annotated[
        Text,
        Meta(
            description="Directory that holds the sys/ tree the machine is read from. Another one "
            "than / is a captured machine."
        ),
    ] = "/"
    cgroup_root: Annotated[Text, Meta(description="Where the cgroup file systems are mounted.")] = (
        "/sys/fs/cgroup"
    )
    kubelet_root: Annotated[
        Text,
        Meta(
            description="The kubelet's directory, read to find CPUs that its managers have pinned."
        ),
    ] = "/var/lib/kubelet"
    kubelet: Annotated[
        Kubelet,
        Meta(description="The kubelet, and who may take a container away from its managers."),
    ] = Kubelet()
    http: Annotated[HTTP, Meta(description="Metrics, health, the API and the page.")] = HTTP()
    device_plugin: Annotated[
        DevicePlugin,
        Meta(description="Exclusive CPUs as an extended resource that the scheduler counts."),
    ] = DevicePlugin()
    devices: Annotated[
        Devices, Meta(description="Placing containers beside the devices that they have.")
    ] = Devices()
    dra: Annotated[
        DRA, Meta(description="NUMA nodes as devices that ResourceClaims allocate (DRA).")
    ] = DRA()
    publish: Annotated[
        Publish, Meta(description="What nri-numa publish writes to the API server.")
    ] = Publish()
    offline_capacity: Annotated[
        OfflineCapacity,
        Meta(description="How annotations of the Node about its capacity get to the agent."),
    ] = OfflineCapacity()
    controller: Annotated[
        Controller, Meta(description="nri-numa controller, one for the cluster.")
    ] = Controller()
    scheduler: Annotated[
        Scheduling, Meta(description="The extender of kube-scheduler, nri-numa scheduler.")
    ] = Scheduling()
    log: Annotated[Log, Meta(description="Log lines, written to standard error.")] = Log()
    observe: Annotated[bool, Meta(description="Decide, log and count, but change nothing.")] = False
    on_internal_error: Annotated[
        InternalErrorAnswer,
        Meta(
            description="When we fail by a mistake of our own: start the container unpinned, or "
            "reject it."
        ),
    ] = InternalErrorAnswer.UNPINNED
    annotation_prefix: Annotated[
        Text, Meta(description="Prefix of the annotations that pods ask with, without the slash.")
    ] = "numa.kubernetes.io"
    defaults: Annotated[
        dict[str, AnnotationValue],
        Meta(description="Annotation keys and values for pods that say nothing themselves."),
    ] = field(default_factory=dict)
    rules: Annotated[
        tuple[RuleDocument, ...],
        Meta(
            description="Annotation keys for matching containers. The first matching rule that "
            "sets a key wins it; an annotation always beats a rule, a rule beats the defaults."
        ),
    ] = ()
    permissions: Annotated[
        tuple[PermissionDocument, ...],
        Meta(
            description="What the annotations of pods may ask for. The first entry that matches a "
            "pod counts; a pod that none matches may use every key, gets exclusive CPUs only as "
            "far as its CPU request pays for them, and lists no reserved CPUs. Rules and "
            "defaults need no permission."
        ),
    ] = ()
    quotas: Annotated[Quotas, Meta(description="How many CPUs may be withheld from others.")] = (
        Quotas()
    )
    shared_pool: Annotated[
        SharedPool, Meta(description="What stays for containers without exclusive CPUs.")
    ] = SharedPool()
    keep_exclusive_cpus: Annotated[
        Duration,
        Meta(
            description="How long a pod keeps exclusive CPUs of a container that ended, for its "
            "restart or the next container of the pod, and of one that was created and never "
            "started (at least 2m); no longer than its sandbox runs. 0 gives them back at once."
        ),
    ] = "10m"
    strategy: Annotated[
        Strategy,
        Meta(
            description="Of equally good NUMA nodes take the emptiest (spread) or the fullest that "
            "fits (pack), by what is scarcest there; or the one with the most memory free, without "
            "memory the most CPU (most-left)."
        ),
    ] = Strategy.SPREAD
    oversale: Annotated[
        float,
        Meta(
            ge=1,
            le=100,
            description="Factor on each NUMA node's CPUs when shared requests are accounted.",
        ),
    ] = 1.0
    capacity_factor: Annotated[
        dict[int, Annotated[float, Meta(ge=0, le=1)]],
        Meta(
            description="By NUMA node, the part of its CPUs that is really there; 1 where nothing "
            "is said, 0 drains the node."
        ),
    ] = field(default_factory=dict)
    reserved_cpus: Annotated[
        IdList,
        Meta(
            description="CPUs, as a kernel list such as 0-1,32, that are never given exclusively."
        ),
    ] = ""
    strict_reserved: Annotated[
        bool, Meta(description="Keep the reserved CPUs out of the shared pool too.")
    ] = False
    reserved_memory: Annotated[
        dict[int, Quantity | dict[str, Quantity]],
        Meta(
            description="By NUMA node, memory that is never allocated to containers, such as 1Gi; "
            "or a mapping of memory and huge pages of each size (hugepages-1Gi) to amounts."
        ),
    ] = field(default_factory=dict)
    prefer_closest: Annotated[
        bool, Meta(description="Of equally narrow sets of NUMA nodes take the closest ones.")
    ] = True
    kubelet_ties: Annotated[
        bool,
        Meta(
            description="Break ties between equally good sets of NUMA nodes as the kubelet does "
            "(lowest ids) instead of by strategy."
        ),
    ] = False
    kubelet_memory: Annotated[
        bool,
        Meta(
            description="Keep the rules of the kubelet's Memory Manager: only Guaranteed pods are "
            "counted and get memory nodes, groups of NUMA nodes never overlap, and what the kernel "
            "says is free does not count."
        ),
    ] = False
    kubelet_cpus: Annotated[
        bool,
        Meta(
            description="Keep the rules of the kubelet's static CPU Manager: only exclusive "
            "CPUs are aligned and counted; all other containers run on all shared CPUs, also "
            "where a policy asks for a NUMA node (unless the pod says cpus: shared)."
        ),
    ] = False
    static_cpus: Annotated[
        bool,
        Meta(
            description="Give exclusive CPUs to each container of a Guaranteed pod with a whole "
            "number of CPUs, as the kubelet's static CPU Manager does, also without a policy; they "
            "are not aligned then, and memory is left alone."
        ),
    ] = False
    cpu_order: Annotated[
        CPUOrder,
        Meta(
            description="Which CPUs first: default keeps whole nodes, L3 groups and cores free; "
            "kubelet reproduces the kubelet's order."
        ),
    ] = CPUOrder.DEFAULT
    distribute_across_numa: Annotated[
        bool,
        Meta(
            description="Spread an exclusive request evenly over the NUMA nodes it needs, or over "
            "those of its hint where devices or memory make that wider."
        ),
    ] = False
    distribute_across_cores: Annotated[
        bool,
        Meta(
            description="With cpuOrder: kubelet, take single CPUs by number instead of whole cores "
            "(the kubelet's distribute-cpus-across-cores). Needs alignL3: false."
        ),
    ] = False
    align_l3: Annotated[
        bool, Meta(description="Keep an exclusive request inside few last-level caches.")
    ] = True
    align_by_socket: Annotated[
        bool,
        Meta(
            description="Prefer NUMA nodes of one socket, and take CPUs from all of it. Not "
            "together with single-numa-node, whose pods stay on their NUMA node."
        ),
    ] = False
    isolated_cpus: Annotated[
        IsolatedCPUs,
        Meta(
            description="What exclusive assignments do with the CPUs of the kernel's isolcpus "
            "list. Containers that share run on none of them, unless this is any or no others are "
            "left; with only, exclusive containers get no others."
        ),
    ] = IsolatedCPUs.AVOID
    nohz_full_cpus: Annotated[
        NohzFullCPUs,
        Meta(
            description="What exclusive assignments do with the CPUs of the kernel's nohz_full "
            "list. isolatedCPUs goes first where the two contradict each other, and no NUMA node "
            "more is used for it."
        ),
    ] = NohzFullCPUs.ANY
    cores: Annotated[
        PreferredCores,
        Meta(description="Which cores of a hybrid processor exclusive assignments take first."),
    ] = PreferredCores.ANY
    memory_only_nodes: Annotated[
        IdList,
        Meta(
            description="NUMA nodes without CPUs (HBM, CXL, PMEM), as a kernel list, that computed "
            "assignments may use."
        ),
    ] = ""
    memory_tiers: Annotated[
        IdList,
        Meta(
            description="Memory tiers of the kernel, as a list of their numbers, whose NUMA nodes "
            "without CPUs computed assignments may use; the N of "
            "/sys/devices/virtual/memory_tiering/memory_tierN."
        ),
    ] = ""
    lift_quota: Annotated[
        bool, Meta(description="Run containers with exclusive CPUs without CFS quota.")
    ] = True
    environment: Annotated[
        bool, Meta(description="Put NUMA_CPUS and NUMA_MEMS into pinned containers.")
    ] = True
    reconcile: Annotated[
        Reconcile, Meta(description="Comparing the real cgroups with what was decided.")
    ] = Reconcile()
    history: Annotated[History, Meta(description="How much of the past stays in memory.")] = (
        History()
    )
    memory_locality: Annotated[
        MemoryLocality, Meta(description="Looking where the memory of containers is.")
    ] = MemoryLocality()
    cpu_waiting: Annotated[
        CPUWaiting, Meta(description="Looking how much containers wait for CPUs.")
    ] = CPUWaiting()
    measured_capacity: Annotated[
        MeasuredCapacity, Meta(description="Capacity factors that follow steal.")
    ] = MeasuredCapacity()
