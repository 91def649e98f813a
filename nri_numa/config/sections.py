"""Sections of the configuration file, one frozen record each.

Names of keys, environment names, checks of single values (`with_parser`) and the effect of a reload
(`RESTART_REQUIRED`) follow from these declarations. The text below a key is its reference: the JSON
Schema and docs/configuration.md are generated from it (`tools.config_schema`).

Keys are camelCase with the acronyms kept (``reservedCPUs``), as in Kubernetes' own files.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, cast

import msgspec
from msgspec import Meta, Struct, field

from nri_numa.config import values
from nri_numa.config.values import (
    AUTO,
    DAY_S,
    MAX_SOCKET_PATH_BYTES,
    build_absolute_path_check,
    build_duration_check,
)
from nri_numa.model.settings import (
    ANY_ANNOTATION_KEY,
    IsolatedCPUs,
    KubeletRules,
    NohzFullCPUs,
    OnDenied,
    PreferredCores,
)
from nri_numa.model.workload import KubeletGrantOverriders, QoSClass, Strategy

_ACRONYMS = {"ca": "CA", "cpus": "CPUs", "numa": "NUMA", "l3": "L3", "uid": "UID", "url": "URL"}


def camel_case(name: str) -> str:
    """Name of a key in the file: ``reservedCPUs`` for ``reserved_cpus``."""
    head, *parts = name.split("_")
    return head + "".join(_ACRONYMS.get(part, part.capitalize()) for part in parts)


class Section(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """A mapping of the file; unknown keys are errors."""


def with_parser(parse: Callable[[Any], object]) -> Meta:
    """Annotate a value as invalid if ``parse`` raises `ValueError`."""
    return Meta(extra={"check": parse})


RESTART_REQUIRED: Final = Meta(extra={"restart": True})
"""Read once: a reload leaves the key, or the whole section, as it was."""

AGENT_CONFIG_API_VERSION: Final = "nri-numa/v1"
CONFIG_KIND: Final = "AgentConfig"

Text = Annotated[str, Meta(min_length=1)]
AnnotationValue = str | int
Quantity = str | int
CPUCountOrPercent = Annotated[str | int, with_parser(values.parse_cpu_count_or_percent)]
CPUList = Annotated[str | int, with_parser(values.parse_cpus)]
NUMAList = Annotated[str | int, with_parser(values.parse_numa_nodes)]
Duration = Annotated[str | float, with_parser(values.parse_duration)]
Interval = Annotated[str | float, with_parser(build_duration_check(1, DAY_S))]
HostPortOrOff = Annotated[Text, with_parser(values.split_address)]


class PodMatch(Section, frozen=True):
    """Which pods; everything given must match, nothing given matches all."""

    namespaces: tuple[Text, ...] = ()
    """Shell patterns of namespaces; one must match."""
    labels: dict[str, str] = field(default_factory=dict)
    """Pod labels that must have exactly these values."""
    qos: tuple[QoSClass, ...] = ()
    """QoS classes; the pod's must be one of them."""


class PermissionDocument(Section, frozen=True):
    """One permission: which pods, and what their annotations may ask for."""

    match: PodMatch = PodMatch()
    """Which pods; without it, all of them."""
    keys: tuple[Text, ...] = (ANY_ANNOTATION_KEY,)
    """Annotation keys, without the prefix, that may be used; * is all of them, an empty list
    none."""
    values: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    """By key, the only values it may have. numacpu and numamem may name no others than these lists
    together."""
    unpaid_cpus: bool = False
    """Exclusive CPUs, and shared lists that keep theirs, may be more than the CPU request pays
    for."""
    reserved_cpus: bool = False
    """numacpu may name reserved CPUs."""
    on_denied: OnDenied = msgspec.field(name="otherwise", default=OnDenied.REFUSE)
    """What is not permitted is refused, or ignored with a warning: the key is passed over, and who
    does not pay for exclusive CPUs shares."""


class SharedPool(Section, frozen=True):
    """CPUs that remain for containers without exclusive CPUs."""

    cpus: Annotated[str | int, with_parser(values.parse_pool_floor)] = AUTO
    """CPUs of the machine that may become neither exclusive nor idle siblings, as a number or such
    as 10%. auto is 1 where reservedCPUs are part of the pool, else a twentieth of the CPUs, at
    least 1."""
    numa_node_cpus: CPUCountOrPercent = 0
    """The same for each NUMA node, of its CPUs. 0 sets no floor there."""


class NamespaceQuotaDocument(Section, frozen=True):
    """Quotas for each namespace by itself that one of the patterns matches."""

    namespaces: tuple[Text, ...] = ()
    """Shell patterns; the first item with one that matches counts."""
    exclusive_cpus: CPUCountOrPercent = "100%"
    """Exclusive CPUs of its containers, siblings kept idle for them included."""
    listed_cpus: CPUCountOrPercent = "100%"
    """The same of its own shared lists."""


class CPUWithholdingLimits(Section, frozen=True):
    """Limits on CPUs withheld from others, as numbers or parts of the machine's CPUs."""

    exclusive_cpus: CPUCountOrPercent = "100%"
    """Exclusive CPUs of containers, siblings kept idle for them included."""
    idle_cpus: CPUCountOrPercent = "25%"
    """Siblings that smt: isolate may keep idle, which no request pays for."""
    listed_cpus: CPUCountOrPercent = "50%"
    """CPUs in shared lists (numacpu) that cannot become exclusive, since a permission has
    unpaidCPUs. A part of the machine is at least one core, and two CPUs. Paid lists are counted and
    never refused; all others give way to exclusive CPUs and do not count."""
    namespaces: tuple[NamespaceQuotaDocument, ...] = ()
    """Quotas of single namespaces, besides the ones for all together."""


class ContainerMatch(PodMatch, frozen=True):
    """Which containers a rule is for; everything given must match, nothing given matches all."""

    runtime_handlers: tuple[str, ...] = ()
    """Handlers of RuntimeClasses; the empty text is the default handler."""
    containers: tuple[Text, ...] = ()
    """Shell patterns of container names; one must match."""


class RuleDocument(Section, frozen=True):
    """One rule: which containers, and which annotation keys they get."""

    keys: dict[str, AnnotationValue] = field(default_factory=dict, name="set")
    """Annotation keys, without the prefix, and their values; not empty."""
    match: ContainerMatch = ContainerMatch()
    """Which containers; without it, all of them."""


class RuntimeLinkKind(StrEnum):
    """The interface of the runtime that is used."""

    NRI = "nri"
    CRI = "cri"


class RuntimeLinkSection(Section, frozen=True):
    """Access to the container runtime."""

    link: RuntimeLinkKind = RuntimeLinkKind.NRI
    """nri: the runtime asks before a container starts. cri: for runtimes without NRI; containers
    are watched and get their CPUs by an update after they were created, so mostly after their
    start, and refusals stop nothing (docs/runtimes.md)."""
    nri_socket: Annotated[Text, with_parser(build_absolute_path_check(MAX_SOCKET_PATH_BYTES))] = (
        "/var/run/nri/nri.sock"
    )
    """Unix socket on which the runtime serves NRI."""
    cri_socket: Annotated[Text, with_parser(values.check_unix_socket_address)] = (
        "/run/containerd/containerd.sock"
    )
    """Unix socket on which the runtime serves CRI; for link: cri."""
    plugin_name: Annotated[Text, Meta(pattern="^[^/\\s]+$")] = "nri-numa"
    """Name under which the plugin registers."""
    plugin_index: Annotated[str | int, with_parser(values.parse_plugin_index)] = "90"
    """Two digits that order the plugins of a node; the last one to write a container's cpuset must
    be us, so it is high."""
    hung_after: Duration = "60s"
    """How long a registration may wait for its answer before the runtime is said to hang. A
    container in its grace period makes it wait, so longer than those."""


class KubeletSection(Section, frozen=True):
    """The kubelet on this node, and who may take a container away from it."""

    override: KubeletGrantOverriders = KubeletGrantOverriders.NEVER
    """Whether a pod may take a container away from the kubelet's static policies by listing CPUs or
    memory nodes itself: never, or annotated."""
    config: Text = "auto"
    """File of the kubelet's configuration (--config): a path, auto to take it from the command line
    of the kubelet that runs, or off. What it reserves becomes ours where reservedCPUs,
    strictReserved and reservedMemory are not set."""
    config_dir: str = ""
    """Directory of drop-ins for it (--config-dir); with config: auto the command line says."""


class KubeletCompatibilityMode(StrEnum):
    """Which of the kubelet's rules are kept."""

    OFF = "off"
    POLICIES = "policies"
    FULL = "full"


KUBELET_RULE_NAMES: Final = {camel_case(name): name for name in KubeletRules.__struct_fields__}
"""Fields of `KubeletRules` by their names in the file."""


def _check_kubelet_rule_names(exceptions: Mapping[str, bool]) -> None:
    for name in exceptions.keys() - KUBELET_RULE_NAMES.keys():
        raise ValueError(f"{name[:80]!r}, expected one of {', '.join(KUBELET_RULE_NAMES)}")


class KubeletCompatibilitySection(Section, frozen=True):
    """Rules of the kubelet that are kept instead of the agent's own."""

    mode: KubeletCompatibilityMode = KubeletCompatibilityMode.OFF
    """off: none. policies: ties, cpus and memory, by which the kubelet's managers align. full:
    staticCPUs and cpuOrder too; and preferClosest, alignL3 and sharedPool.cpus are false, false and
    1 where nothing is said of them."""
    exceptions: Annotated[dict[str, bool], with_parser(_check_kubelet_rule_names)] = msgspec.field(
        name="except", default_factory=dict
    )
    """By rule, true to keep it whatever the mode, false not to. ties: equally good sets of NUMA
    nodes go by the lowest ids instead of by strategy. cpus: only exclusive CPUs are aligned and
    counted; all other containers run on all shared CPUs, also where a policy asks for a NUMA node
    (unless the pod says cpus: shared). memory: only Guaranteed pods are counted and get memory
    nodes, groups of NUMA nodes never overlap, and what the kernel says is free does not count.
    staticCPUs: exclusive CPUs for each container of a Guaranteed pod with a whole number of CPUs,
    also without a policy; they are not aligned then, and memory is left alone. cpuOrder: which CPUs
    first; without it whole nodes, L3 groups and cores are kept free. Only here, in no mode:
    distributeCPUsAcrossNUMA spreads an exclusive request evenly over the NUMA nodes it needs, or
    over those of its hint where devices or memory make that wider; distributeCPUsAcrossCores, with
    cpuOrder and alignL3: false, takes single CPUs by number instead of whole cores; alignBySocket
    prefers NUMA nodes of one socket, and takes CPUs from all of it, not together with
    single-numa-node."""


class HTTP(Section, frozen=True):
    """Metrics, health, the API and the page."""

    address: HostPortOrOff = "127.0.0.1:9891"
    """host:port to listen on, or off. Loopback by default; anything wider needs tokenFile, or
    allowAnonymous."""
    socket: Annotated[
        str, with_parser(build_absolute_path_check(MAX_SOCKET_PATH_BYTES, empty=True))
    ] = ""
    """Unix socket to serve the API on besides, for nri-numa publish; empty for none. Its user and
    the group of its directory may connect, without a token."""
    token_file: str = ""
    """File with a bearer token that every request but /healthz and /readyz must carry. It is read
    again when it changes."""
    tls_cert: str = ""
    """PEM file with the server's certificate chain."""
    tls_key: str = ""
    """PEM file with the certificate's private key."""
    allow_anonymous: bool = False
    """Listen wider than loopback without a token. Anyone who reaches the address can then read
    which pods run here and where."""
    allow_plaintext_token: bool = False
    """Take the token on an address wider than loopback without TLS. Anyone who sees the traffic has
    the token then; for networks that encrypt by themselves."""


class DevicePluginSection(Section, frozen=True):
    """``nri-numa device-plugin``; the agent reads none of it."""

    resource_name: Annotated[Text, with_parser(values.check_extended_resource)] = (
        "numa.example.com/exclusive-cpu"
    )
    """Name of the extended resource that the scheduler counts exclusive CPUs by; outside
    kubernetes.io, best below a domain of yours."""
    topology: bool = False
    """Announce the NUMA node of each slot, for a kubelet whose Topology Manager aligns CPUs with
    devices. Its choice binds then: CPUs are taken on those NUMA nodes and on no others."""
    directory: Annotated[
        Text,
        with_parser(
            build_absolute_path_check(
                MAX_SOCKET_PATH_BYTES - len("/kubelet.sock"),
                note=", because sockets in it have no longer paths",
            )
        ),
    ] = "/var/lib/kubelet/device-plugins"
    """The kubelet's directory for device plugins, which is the same whatever the kubelet's root
    is."""


class Devices(Section, frozen=True):
    """Placement of containers by the devices they have."""

    enabled: bool = False
    """Find out which devices a container has before it starts, and place its CPUs and memory beside
    them. Off, none of the rest is looked at."""
    nodes: bool = True
    """Device files that the runtime puts into the container: VFIO, RDMA, disks, NVMe, GPUs and any
    other that sysfs knows by number."""
    variables: bool = True
    """PCIDEVICE_* variables of the SR-IOV network device plugin."""
    nvidia: bool = True
    """NVIDIA_VISIBLE_DEVICES and NVIDIA's device files, by what its driver says below
    /proc/driver/nvidia."""
    cdi: bool = True
    """Names of the Container Device Interface, with its files."""
    cdi_directories: Annotated[tuple[str, ...], with_parser(values.check_absolute_paths)] = (
        "/etc/cdi",
        "/var/run/cdi",
    )
    """Where those files are; a later directory wins over an earlier one."""
    network: bool = True
    """Network interfaces in the pod's namespace; needs CAP_SYS_ADMIN and the host's /run/netns, and
    10 MiB of memory for pyroute2.minimal."""
    pod_resources: bool = True
    """The kubelet's PodResources socket, asked once for each pod, for 50 ms; 8 MiB of memory for
    grpc."""
    count: bool = False
    """Ask the kubelet how many devices of each extended resource it can give on each NUMA node,
    whatever enabled says, for /v1/zones and so for publish.nodeResourceTopology; two calls in
    four seconds at most, by its PodResources socket, and only while it is read."""


class DRA(Section, frozen=True):
    """The driver of dynamic resource allocation: the agent prepares, the publisher publishes."""

    enabled: bool = False
    """Serve the kubelet as a DRA driver, and publish each NUMA node as a device with consumable
    capacity. Needs nri-numa publish, Kubernetes 1.36 or newer, and a runtime with CDI."""
    driver: Annotated[str, with_parser(values.check_driver_name)] = "dra.numa.example.com"
    """Name of the driver, in ResourceSlices and DeviceClasses; best below a domain of yours."""
    list_attributes: bool = False
    """Publish attributes that have several values as lists. Only where API server and scheduler
    have the feature gate DRAListTypeAttributes: others refuse the ResourceSlice."""
    handover: Annotated[str, with_parser(build_absolute_path_check())] = "/run/nri-numa-claims"
    """Directory in which the agent asks nri-numa publish for claims, and gets them; both write
    there, and no other program."""
    cdi_directory: Annotated[str, with_parser(build_absolute_path_check())] = "/var/run/cdi"
    """Where the runtime looks for CDI files; the agent writes there."""


class Publish(Section, frozen=True):
    """Objects that ``nri-numa publish`` writes to the API server, and its spans."""

    events: bool = True
    """Events on pods: rejections, misaligned and unpinned containers, missed starts, undelivered
    updates, drift, moves."""
    node_annotations: bool = True
    """Annotations numacpu and numamem of the Node, below the annotation prefix: CPUs and bytes by
    NUMA node."""
    node_labels: bool = True
    """Labels of the Node, below the annotation prefix, with the machine's shape."""
    pod_annotation: bool = False
    """Annotation assigned on each pod with pinned containers: what they have. Needs the rights to
    list, watch and patch pods; with them a NodeResourceTopology names Guaranteed pods from their
    binding on."""
    capacity: bool = False
    """Exclusive CPUs in the status of the Node, as devicePlugin.resourceName, for the scheduler to
    count by; instead of nri-numa device-plugin. Needs the right to patch nodes/status."""
    node_resource_topology: bool = False
    """A NodeResourceTopology of the Node: what each NUMA node has and what is left, for schedulers.
    Needs its definition in the cluster and the rights to get, create and patch it."""
    node_resource_topology_force: bool = False
    """Take that object's zones from another publisher."""
    node_resource_topology_touch: bool = True
    """Change that object once more seven seconds after something was given back, as the stock
    plugin NodeResourceTopologyMatch needs it. false: where nri-numa scheduler alone reads it."""
    node_resource_topology_validity: Duration = 0
    """Time after which readers may not believe that object any more where it is not renewed, at
    every resync; three times resync or more. 0: they may for ever."""
    numatopology: bool = False
    """A Numatopology of the Node, for Volcano's plugin numaaware. Needs Volcano's definition in the
    cluster and the rights to create and patch it."""
    otlp_endpoint: Annotated[str, with_parser(values.check_prometheus_url)] = ""
    """OTLP receiver over HTTP, such as http://127.0.0.1:4318, that gets a span of each request of
    the runtime that was decided; empty for none. Needs nri-numa[otel]."""
    rate: Annotated[float, Meta(gt=0, le=100)] = 5.0
    """Requests to the API server per second at most."""
    resync: Interval = "5m"
    """Time between two comparisons with what is really there, to put back what was removed; 1s or
    more."""
    credentials: Text = "/var/run/secrets/kubernetes.io/serviceaccount"
    """Directory with token and ca.crt; both are read again when they change."""
    address: HostPortOrOff = "127.0.0.1:9892"
    """host:port on loopback for its metrics and probes, or off."""


class CapacityFromNodeAnnotationsSection(Section, frozen=True):
    """Handover of the Node's capacity annotations to the agent."""

    file: Annotated[str, with_parser(build_absolute_path_check(empty=True))] = ""
    """File that nri-numa publish writes and the agent reads every second: what the annotations
    offline-capacity and drained of the Node say. Empty for neither. Its directory must be the
    publisher's alone to write."""
    interval: Interval = "15s"
    """Time between two looks of nri-numa publish at its Node; 1s or more."""


class Prometheus(Section, frozen=True):
    """Capacity factors from a query."""

    url: Annotated[str, with_parser(values.check_prometheus_url)] = ""
    """Of the server, such as http://prometheus:9090; empty for none."""
    query: str = ""
    """Instant query whose samples are capacity factors from 0 to 1, one for each NUMA node of each
    Node."""
    node_label: Text = "node"
    """Label of a sample with the name of the Node."""
    numa_node_label: Text = "numa_node"
    """Label of a sample with the NUMA node."""
    token_file: str = ""
    """File with a bearer token for the server; empty for none."""
    ca_file: str = ""
    """PEM file with the server's authority; the system's when empty."""


class DrainEviction(Section, frozen=True):
    """Moving pods away from NUMA nodes that the annotation ``drained`` names."""

    evict: bool = False
    """Evict pods with pinned containers there that a workload makes again. Needs
    publish.podAnnotation, and rights to list and evict pods."""
    delay: Annotated[str | float, with_parser(build_duration_check(0, DAY_S))] = "30s"
    """Time between the annotation and the first eviction; longer than offlineCapacity.interval, so
    that the agent knows first."""


class StuckPodEviction(Section, frozen=True):
    """Moving pods that a node refuses again and again to another one that has room."""

    evict: bool = False
    """Evict pods that their node refuses again and again, while another node has room. Needs
    publish.nodeResourceTopology, and rights to watch and evict pods."""
    include_running: bool = False
    """Also pods in the phase Running: a container ran, ended and is refused since. What runs ends
    with them. Needs evict, and the right to follow Events."""
    delay: Interval = "2m"
    """Time that a pod is refused at least before it goes."""


class CPUStealEviction(Section, frozen=True):
    """Moving pods away from NUMA nodes whose CPU time the host takes away."""

    evict: bool = False
    """Evict pods with pinned containers from NUMA nodes whose measured factor stays low, one in a
    minute. Needs measuredCapacity.mode act, publish.nodeResourceTopology and podAnnotation, and
    rights to list and evict pods."""
    below_factor: Annotated[float, Meta(gt=0, le=0.9)] = 0.7
    """A measured factor lower than this is low. measuredCapacity.floor must be lower still."""
    delay: Interval = "10m"
    """Time that a factor is low before the first eviction."""
    max_affected_fraction: Annotated[float, Meta(ge=0, le=1)] = 0.25
    """Part of the cluster's NUMA nodes that may be low at the same time; if more are, no pod is
    evicted."""


class EvictionSection(Section, frozen=True):
    """Moving pods to other nodes by the Eviction API, and what holds for all reasons together."""

    max_per_minute: Annotated[float, Meta(gt=0, le=600)] = 6.0
    """Evictions a minute in the whole cluster."""
    max_per_workload_per_hour: Annotated[int, Meta(ge=1, le=1000)] = 3
    """Evictions of one workload's pods in an hour; then it is left alone. Drained NUMA nodes are
    emptied without this limit."""
    dry_run: bool = False
    """Let the API server say what it would do, and do nothing."""
    drained_numa_nodes: DrainEviction = DrainEviction()
    """Moving pods away from drained NUMA nodes."""
    stuck_pods: StuckPodEviction = StuckPodEviction()
    """Moving pods that their node refuses while another has room."""
    cpu_steal: CPUStealEviction = CPUStealEviction()
    """Moving pods away from NUMA nodes that the host takes away."""


class ClusterPageSection(Section, frozen=True):
    """The page of the cluster, at ``/cluster/`` of the controller's address."""

    enabled: bool = False
    """Serve a page with the NUMA nodes of all nodes. Needs the right to list and watch
    noderesourcetopologies."""
    token_file: str = ""
    """File with the bearer token of those who may look; another one than controller.tokenFile, with
    which capacity is PUT. Needed wider than loopback, but for allowAnonymous."""
    allow_anonymous: bool = False
    """Show the page to every client without a token, as kubectl numa cluster needs it."""
    node_url: Annotated[str, with_parser(values.check_node_page_url_template)] = ""
    """Where an agent's page is for those who look, such as https://{address}:9891/: {node} is the
    name of the node, {address} its InternalIP. Each node then links to its page."""


class VerdictsSection(Section, frozen=True):
    """Answers to why a Pending pod fits nowhere, for ``kubectl numa why``."""

    enabled: bool = False
    """Serve /v1/verdicts to the API server's service proxy; who asks must know the pod's UID. Needs
    the rights to list and watch noderesourcetopologies and pods."""


class Controller(Section, frozen=True):
    """``nri-numa controller``; the agent reads none of it."""

    address: HostPortOrOff = "127.0.0.1:9893"
    """host:port for its metrics, its probes and PUT of capacity, or off. Wider than loopback PUT
    needs tokenFile and TLS."""
    token_file: str = ""
    """File with the bearer token that a PUT must carry, read again when it changes; without one PUT
    is refused."""
    tls_cert: str = ""
    """PEM file with the server's certificate chain."""
    tls_key: str = ""
    """PEM file with the certificate's private key."""
    allow_plaintext_token: bool = False
    """Take the token on an address wider than loopback without TLS, for networks that encrypt by
    themselves."""
    capacity_file: str = ""
    """YAML or JSON file with nodes and their capacity factors, read again when it changes; empty
    for none."""
    prometheus: Prometheus = Prometheus()
    """Capacity factors from a query."""
    validity: Annotated[str | float, with_parser(build_duration_check(5, 7 * DAY_S))] = "5m"
    """How long a value counts that its source does not repeat; 5s to 7 days. A PUT may say less."""
    on_stale_source: Literal["full", "last"] = msgspec.field(name="silent", default="full")
    """What counts for a node when all of its sources are silent: full, or the last value."""
    smoothing: Annotated[str | float, with_parser(build_duration_check(0, DAY_S))] = "30s"
    """Time constant of the exponential average over a source's values."""
    min_update_interval: Annotated[str | float, with_parser(build_duration_check(0, DAY_S))] = (
        msgspec.field(name="leastTime", default="10s")
    )
    """Time between two changes of one Node's annotation at least."""
    page: ClusterPageSection = ClusterPageSection()
    """A page of the whole cluster."""
    verdicts: VerdictsSection = VerdictsSection()
    """Where a Pending pod fits, and why not elsewhere."""
    evictions: EvictionSection = EvictionSection()
    """Moving pods to other nodes."""
    rate: Annotated[float, Meta(gt=0, le=100)] = 10.0
    """Requests to the API server per second at most."""
    credentials: Text = "/var/run/secrets/kubernetes.io/serviceaccount"
    """Directory with token, ca.crt and namespace, read again when they change."""


class MissingTopologyAction(StrEnum):
    """What becomes of pods that ask for something, on nodes that publish nothing."""

    REFUSE = "refuse"
    ALLOW = "allow"


MAX_BIND_TIMEOUT_S: Final = 4.0
"""Seconds; a Lease that was lost is taken by another replica 5 s after the last renewal counted."""


class Scheduling(Section, frozen=True):
    """The extender of kube-scheduler; the agent itself reads none of it."""

    address: HostPortOrOff = "127.0.0.1:9894"
    """host:port where kube-scheduler asks, with /metrics, /healthz and /readyz."""
    tls_cert: str = ""
    """Certificate chain in PEM; read again when it changes."""
    tls_key: str = ""
    """Its key."""
    client_ca: str = ""
    """Certificate authority, in PEM, of those who may ask. Metrics and probes need no
    certificate."""
    allow_anonymous: bool = False
    """Answer every client that reaches an address that is not loopback: it can send any
    waiting pod to any node."""
    lease: str = ""
    """Name of the Lease by which one of several replicas leads, in the namespace of the
    credentials; empty for a single replica."""
    on_missing_topology: MissingTopologyAction = msgspec.field(
        name="unknownNodes", default=MissingTopologyAction.REFUSE
    )
    """Whether pods that ask for something may go to nodes without a readable
    NodeResourceTopology."""
    filter_to_best: bool = msgspec.field(name="narrow", default=True)
    """Of the nodes with room filter names those that suit best, so that the scheduler needs no
    prioritizeVerb; false where one is configured, or where another extender filters after this
    one."""
    bind_timeout: Annotated[
        str | float, with_parser(build_duration_check(0.1, MAX_BIND_TIMEOUT_S))
    ] = "4s"
    """Time for one binding; below the scheduler's httpTimeout, at most 4s."""
    settle: Annotated[str | float, with_parser(build_duration_check(0, 600))] = "10s"
    """Time from the start of a pod's containers until its node's NodeResourceTopology counts them,
    where that does not name them."""
    credentials: Text = "/var/run/secrets/kubernetes.io/serviceaccount"
    """Directory with token, ca.crt and namespace."""


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


class Log(Section, frozen=True):
    """Log lines, written to standard error."""

    level: LogLevel = LogLevel.INFO
    """Least severe line that is written."""
    format: Annotated[LogFormat, RESTART_REQUIRED] = LogFormat.LOGFMT
    """logfmt (key=value) or json."""
    file: Annotated[str, RESTART_REQUIRED] = ""
    """File to append to instead of standard error. A plugin that the runtime launched has no
    standard error and writes to the journal without this."""


class InternalErrorAnswer(StrEnum):
    """What the runtime gets as an answer when we fail by a mistake of our own."""

    UNPINNED = "unpinned"
    REJECT = "reject"


class Reconcile(Section, frozen=True):
    """Comparing the real cgroups with what was decided."""

    interval: Duration = "30s"
    """Time between two rounds: seconds, or a text such as 30s or 5m. 0 is off. A container whose
    cpuset another program writes is looked at within a second."""
    max_repairs: Annotated[int, Meta(ge=1)] = 3
    """Repairs of one container within ten minutes after which the fight is reported instead of
    fought."""
    without_runtime: bool = False
    """While the runtime cannot be reached, write the cgroups that are not as decided; else they
    wait until it is back. CPU limits wait in any case."""


class Rebalance(Section, frozen=True):
    """Moving containers that are movable, so that another one is not refused."""

    max_moves: Annotated[int, Meta(ge=0, le=3)] = msgspec.field(name="moves", default=2)
    """Containers that move at most for one that would be refused otherwise; 0: none ever."""


class UsageReadMode(StrEnum):
    """What is done with a measurement of all containers."""

    OFF = "off"
    READ = "read"
    METRIC = "metric"


class ContainerUsageSection(Section, frozen=True):
    """Measurements of all containers, repeated at an interval."""

    memory: UsageReadMode = UsageReadMode.OFF
    """read: what part of a container's memory is on its own NUMA nodes, for the page, nri-numa
    status -o wide, explain and the API. Needs HTTP. metric: expose
    nri_numa_container_local_memory_ratio as well, a series for each container."""
    cpu_pressure: UsageReadMode = UsageReadMode.OFF
    """read: the CPU pressure of a container's cgroup and how many of its threads wait on run
    queues, for the page, nri-numa status -o wide and the API. Needs HTTP. metric: expose
    nri_numa_container_cpu_pressure_ratio and nri_numa_container_waiting_tasks as well, a series of
    each for each container."""
    interval: Interval = "30s"
    """Time between two rounds over all containers; 1s or more."""


class StealTimeMode(StrEnum):
    """What is done with steal."""

    OFF = "off"
    OBSERVE = "observe"
    ENFORCE = "act"


class StealCapacity(Section, frozen=True):
    """Steal on each NUMA node, for virtual machines on hosts that promise more than they have."""

    mode: StealTimeMode = StealTimeMode.OFF
    """off; observe: measure steal of each NUMA node, log and expose the capacity factors that would
    follow; act: give new containers no more than these leave, and what capacityFactor says. What
    runs stays where it is."""
    interval: Interval = "5s"
    """Time between two readings; 1s or more."""
    half_life: Interval = "30s"
    """Time after which half of a change has arrived in what is averaged; 1s or more."""
    floor: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """No factor is lower, however much is stolen."""


class AgentConfig(Section, frozen=True):
    """The whole configuration of the node agent."""

    api_version: Annotated[Literal["nri-numa/v1"], RESTART_REQUIRED] = AGENT_CONFIG_API_VERSION
    """Version of this document's form."""
    kind: Annotated[Literal["AgentConfig"], RESTART_REQUIRED] = CONFIG_KIND
    """What this document is."""
    runtime: Annotated[RuntimeLinkSection, RESTART_REQUIRED] = RuntimeLinkSection()
    """How the container runtime is reached."""
    node_name: Annotated[str, with_parser(values.check_node_name), RESTART_REQUIRED] = ""
    """Name of this node in the page, the API and the metrics, and of the Node object; the kubelet's
    `--hostname-override` or the host name when empty. The manifests set it to the name that
    Kubernetes has, by the environment."""
    node_group: Annotated[str, RESTART_REQUIRED] = ""
    """Name of the kind of nodes whose settings these are, for `nri-numa check` and the log; set by
    the Helm chart, from its `nodeGroups`."""
    state_dir: Annotated[Text, RESTART_REQUIRED] = "/run/nri-numa"
    """Directory of the checkpoint. /run is right: containers do not outlive a reboot either."""
    sysfs_root: Annotated[Text, RESTART_REQUIRED] = "/"
    """Directory that holds the sys/ tree the machine is read from. Another one than / is a captured
    machine."""
    cgroup_root: Annotated[Text, RESTART_REQUIRED] = "/sys/fs/cgroup"
    """Where the cgroup file systems are mounted."""
    kubelet_root: Annotated[Text, RESTART_REQUIRED] = "/var/lib/kubelet"
    """The kubelet's directory, read to find CPUs that its managers have pinned."""
    kubelet: KubeletSection = KubeletSection()
    """The kubelet, and who may take a container away from its managers."""
    http: Annotated[HTTP, RESTART_REQUIRED] = HTTP()
    """Metrics, health, the API and the page."""
    device_plugin: Annotated[DevicePluginSection, RESTART_REQUIRED] = DevicePluginSection()
    """Exclusive CPUs as an extended resource that the scheduler counts."""
    devices: Annotated[Devices, RESTART_REQUIRED] = Devices()
    """Placing containers beside the devices that they have."""
    dra: Annotated[DRA, RESTART_REQUIRED] = DRA()
    """NUMA nodes as devices that ResourceClaims allocate (DRA)."""
    publish: Annotated[Publish, RESTART_REQUIRED] = Publish()
    """What nri-numa publish writes to the API server."""
    offline_capacity: Annotated[CapacityFromNodeAnnotationsSection, RESTART_REQUIRED] = (
        CapacityFromNodeAnnotationsSection()
    )
    """How annotations of the Node about its capacity get to the agent."""
    controller: Annotated[Controller, RESTART_REQUIRED] = Controller()
    """nri-numa controller, one for the cluster."""
    scheduler: Annotated[Scheduling, RESTART_REQUIRED] = Scheduling()
    """The extender of kube-scheduler, nri-numa scheduler."""
    log: Log = Log()
    """Log lines, written to standard error."""
    observe: bool = False
    """Decide, log and count, but change nothing."""
    on_internal_error: InternalErrorAnswer = InternalErrorAnswer.UNPINNED
    """When we fail by a mistake of our own: start the container unpinned, or reject it."""
    annotation_prefix: Annotated[Text, with_parser(values.check_annotation_prefix)] = (
        "numa.kubernetes.io"
    )
    """Prefix of the annotations that pods ask with, without the slash."""
    defaults: dict[str, AnnotationValue] = field(default_factory=dict)
    """Annotation keys and values for pods that say nothing themselves."""
    rules: tuple[RuleDocument, ...] = ()
    """Annotation keys for matching containers. The first matching rule that sets a key applies;
    annotations come before rules, and rules before the defaults."""
    permissions: tuple[PermissionDocument, ...] = ()
    """What the annotations of pods may ask for. The first entry that matches a pod counts; a pod
    that none matches may use every key, gets exclusive CPUs only as far as its CPU request pays for
    them, and lists no reserved CPUs. Rules and defaults need no permission."""
    quotas: CPUWithholdingLimits = CPUWithholdingLimits()
    """How many CPUs may be withheld from others."""
    shared_pool: SharedPool = SharedPool()
    """What stays for containers without exclusive CPUs."""
    keep_exclusive_cpus: Duration = "10m"
    """How long what a pod's sum leaves is reserved for its containers to come, after the last one
    was created or ended, before it gives way to other pods, and then until it is given back; also
    how long a container that never started keeps what it has (at least 2m). 0 reserves nothing."""
    interrupts_off_exclusive_cpus: Annotated[bool, RESTART_REQUIRED] = False
    """Keep interrupts of devices off CPUs that containers have exclusively (and off their idle
    siblings), by /proc/irq or, where irqbalance runs, by its list of banned CPUs. Given back when
    the agent stops. Interrupts that the kernel manages stay where they are, and the log says so."""
    strategy: Strategy = Strategy.SPREAD
    """Of equally good NUMA nodes take the emptiest (spread) or the fullest that fits (pack), by
    what is scarcest there; or the one with the most memory free, without memory the most CPU
    (most-left)."""
    oversale: Annotated[float, Meta(ge=1, le=100)] = 1.0
    """Factor on each NUMA node's CPUs when shared requests are accounted."""
    capacity_factor: dict[int, Annotated[float, Meta(ge=0, le=1)]] = field(default_factory=dict)
    """By NUMA node, the part of its CPUs that is really there; 1 where nothing is said, 0 drains
    the NUMA node."""
    reserved_cpus: CPUList = ""
    """CPUs, as a kernel list such as 0-1,32, that are never exclusive."""
    strict_reserved: bool = False
    """Keep the reserved CPUs out of the shared pool too."""
    reserved_memory: dict[int, Quantity | dict[str, Quantity]] = field(default_factory=dict)
    """By NUMA node, memory that is never allocated to containers, such as 1Gi; or a mapping of
    memory and huge pages of each size (hugepages-1Gi) to amounts."""
    prefer_closest: bool | None = None
    """Of equally narrow sets of NUMA nodes take the closest ones. Where nothing is said true, and
    false with kubeletCompatibility.mode: full."""
    kubelet_compatibility: KubeletCompatibilitySection = KubeletCompatibilitySection()
    """Rules of the kubelet that are kept instead of the agent's own."""
    align_l3: bool | None = None
    """Keep an exclusive request inside few last-level caches. Where nothing is said true, and false
    with kubeletCompatibility.mode: full."""
    isolated_cpus: IsolatedCPUs = IsolatedCPUs.AVOID
    """What exclusive assignments do with the CPUs of the kernel's isolcpus list. Containers that
    share run on none of them, unless this is any or no others are left; with only, exclusive
    containers get no others."""
    nohz_full_cpus: NohzFullCPUs = NohzFullCPUs.ANY
    """What exclusive assignments do with the CPUs of the kernel's nohz_full list. isolatedCPUs goes
    first where the two contradict each other, and no NUMA node more is used for it."""
    cores: PreferredCores = PreferredCores.ANY
    """Which cores of a hybrid processor exclusive assignments take first."""
    memory_only_nodes: NUMAList = ""
    """NUMA nodes without CPUs (HBM, CXL, PMEM), as a kernel list, that computed assignments may
    use."""
    memory_tiers: NUMAList = ""
    """Memory tiers of the kernel, as a list of their numbers, whose NUMA nodes without CPUs
    computed assignments may use; the N of /sys/devices/virtual/memory_tiering/memory_tierN."""
    lift_quota: bool = True
    """Run containers with exclusive CPUs without CFS quota."""
    environment: bool = True
    """Put NUMA_CPUS and NUMA_MEMS into pinned containers."""
    assigned_files: Annotated[bool, RESTART_REQUIRED] = False
    """Mount /run/numa into pinned containers, read-only: assigned.cpuset and assigned.memset say
    what the container has at any time, also after a resize. Not over CRI."""
    reconcile: Reconcile = Reconcile()
    """Comparing the real cgroups with what was decided."""
    room: Rebalance = Rebalance()
    """Making room for containers that strict policies would refuse."""
    container_usage: Annotated[ContainerUsageSection, RESTART_REQUIRED] = ContainerUsageSection()
    """Looking where the memory of containers is, and how much they wait for CPUs."""
    measured_capacity: Annotated[StealCapacity, RESTART_REQUIRED] = StealCapacity()
    """Capacity factors that follow steal."""


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One key that is not a section, by its dotted path; ``check`` refuses with `ValueError`."""

    path: str
    default: object
    restart: bool
    check: Callable[[Any], object] | None
    names: tuple[str, ...]

    def value_in(self, config: AgentConfig) -> Any:
        """Its value in a configuration."""
        return functools.reduce(getattr, self.names, config)


@functools.cache
def config_keys() -> Mapping[str, ConfigKey]:
    """Return every key that is not a section by dotted path, in order of declaration."""
    from msgspec import inspect

    def walk_struct_fields(
        struct: inspect.StructType, path: str, names: tuple[str, ...], restart: bool
    ) -> Iterator[ConfigKey]:
        for item in struct.fields:
            kind: inspect.Type = item.type
            extra: Mapping[str, Any] = {}
            if isinstance(item.type, inspect.Metadata):
                kind, extra = item.type.type, item.type.extra or {}
            key_path, field_names = f"{path}{item.encode_name}", (*names, item.name)
            needs_restart = restart or "restart" in extra
            if isinstance(kind, inspect.StructType):
                yield from walk_struct_fields(kind, f"{key_path}.", field_names, needs_restart)
            else:
                default = (
                    item.default
                    if item.default_factory is msgspec.NODEFAULT
                    else item.default_factory()
                )
                yield ConfigKey(key_path, default, needs_restart, extra.get("check"), field_names)

    root = cast("inspect.StructType", inspect.type_info(AgentConfig))
    return {leaf.path: leaf for leaf in walk_struct_fields(root, "", (), False)}
