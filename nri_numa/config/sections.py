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

_ACRONYMS = ("CA", "CFS", "CPU", "CPUs", "L3", "NUMA", "QPS", "UID", "URL")
_ACRONYM_BY_PART = {acronym.lower(): acronym for acronym in _ACRONYMS}


def camel_case(name: str) -> str:
    """Name of a key in the file: ``reservedCPUs`` for ``reserved_cpus``."""
    head, *parts = name.split("_")
    return head + "".join(_ACRONYM_BY_PART.get(part, part.capitalize()) for part in parts)


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
    """Pods that match every condition; all pods without one."""

    namespaces: tuple[Text, ...] = ()
    """Shell patterns of namespaces; one must match."""
    labels: dict[str, str] = field(default_factory=dict)
    """Pod labels that must have exactly these values."""
    qos: tuple[QoSClass, ...] = ()
    """QoS classes; the pod's must be one of them."""


class PermissionDocument(Section, frozen=True):
    """Annotations that the matching pods may use."""

    match: PodMatch = PodMatch()
    """Pods that the entry is for; all pods if not set."""
    allowed_keys: tuple[Text, ...] = (ANY_ANNOTATION_KEY,)
    """Annotation keys, without the prefix, that may be used. * allows all keys, an empty list
    none."""
    allowed_values: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    """By key, its only allowed values. numacpu and numamem may name only ids that are in these
    lists."""
    allow_unrequested_cpus: bool = False
    """true: exclusive CPUs, and lists (numacpu) that keep their CPUs from exclusive containers, may
    exceed the CPU request."""
    allow_reserved_cpus: bool = False
    """true: numacpu may name reserved CPUs."""
    on_denied: OnDenied = OnDenied.REJECT
    """Treatment of what is not permitted. reject: reject the container. ignore: ignore the
    annotation with a warning; exclusive CPUs that are not requested become shared ones."""


class SharedPool(Section, frozen=True):
    """CPUs that remain for containers without exclusive CPUs."""

    min_cpus: Annotated[str | int, with_parser(values.parse_pool_floor)] = AUTO
    """Minimum number of CPUs in the shared pool, or a percentage such as 10%: they become neither
    exclusive nor idle siblings. auto: 1 if reservedCPUs are in the pool, else 5% of the CPUs, at
    least 1."""
    min_cpus_per_numa_node: CPUCountOrPercent = 0
    """Minimum on each NUMA node, as a number or a percentage of its CPUs. 0: no minimum."""


class NamespaceQuotaDocument(Section, frozen=True):
    """Quotas of each single namespace that one of the patterns matches."""

    namespaces: tuple[Text, ...] = ()
    """Shell patterns; the first entry with a matching one applies."""
    exclusive_cpus: CPUCountOrPercent = "100%"
    """Maximum number of exclusive CPUs of the namespace, idle siblings included."""
    listed_cpus: CPUCountOrPercent = "100%"
    """Maximum number of CPUs in its shared lists (numacpu)."""


class CPUWithholdingLimits(Section, frozen=True):
    """Limits on CPUs withheld from others, as numbers or percentages of the machine's CPUs."""

    exclusive_cpus: CPUCountOrPercent = "100%"
    """Maximum number of exclusive CPUs, idle siblings included."""
    idle_siblings: CPUCountOrPercent = "25%"
    """Maximum number of siblings that smt: isolate keeps idle; no request covers them."""
    listed_cpus: CPUCountOrPercent = "50%"
    """Maximum number of CPUs in shared lists (numacpu) that cannot become exclusive, because of
    allowUnrequestedCPUs. A percentage is at least one core, and two CPUs. Lists that the CPU
    request covers are counted and never rejected. Yielding lists do not count."""
    namespaces: tuple[NamespaceQuotaDocument, ...] = ()
    """Quotas of single namespaces, besides those for all together."""


class ContainerMatch(PodMatch, frozen=True):
    """Containers that match every condition; all containers without one."""

    runtime_handlers: tuple[str, ...] = ()
    """Handlers of RuntimeClasses; the empty text is the default handler."""
    containers: tuple[Text, ...] = ()
    """Shell patterns of container names; one must match."""


class RuleDocument(Section, frozen=True):
    """Annotation keys that the matching containers get."""

    keys: dict[str, AnnotationValue] = field(default_factory=dict, name="set")
    """Annotation keys, without the prefix, and their values; not empty."""
    match: ContainerMatch = ContainerMatch()
    """Containers that the rule is for; all containers if not set."""


class RuntimeLinkKind(StrEnum):
    """Interface of the runtime that the agent uses."""

    NRI = "nri"
    CRI = "cri"


class RuntimeLinkSection(Section, frozen=True):
    """Access to the container runtime."""

    link: RuntimeLinkKind = RuntimeLinkKind.NRI
    """nri: the runtime calls the agent before a container starts. cri: for runtimes without NRI;
    containers get their CPUs by an update, mostly after their start, and a rejection stops no
    container (docs/runtimes.md)."""
    nri_socket: Annotated[Text, with_parser(build_absolute_path_check(MAX_SOCKET_PATH_BYTES))] = (
        "/var/run/nri/nri.sock"
    )
    """Unix socket on which the runtime serves NRI."""
    cri_socket: Annotated[Text, with_parser(values.check_unix_socket_address)] = (
        "/run/containerd/containerd.sock"
    )
    """Unix socket on which the runtime serves CRI; used with link: cri."""
    plugin_name: Annotated[Text, Meta(pattern="^[^/\\s]+$")] = "nri-numa"
    """Name under which the plugin registers."""
    plugin_index: Annotated[str | int, with_parser(values.parse_plugin_index)] = "90"
    """Two digits that order the plugins of a node. It is high, because this plugin must be the
    last one that writes a container's cpuset."""
    registration_timeout: Duration = "60s"
    """Maximum time for a registration before the runtime is reported as hanging. A container in its
    grace period delays registrations, so longer than those periods."""


class KubeletSection(Section, frozen=True):
    """The kubelet on this node, and pods that may override its grants."""

    override_grants: KubeletGrantOverriders = KubeletGrantOverriders.NEVER
    """Pods that may override CPUs or memory granted by the kubelet's static policies. never: no
    pod. annotated: pods with the annotation numacpu or numamem."""
    config: Text = "auto"
    """File of the kubelet's configuration (--config): a path, auto (as on the command line of the
    running kubelet), or off. Its reservations apply if reservedCPUs, strictCPUReservation and
    reservedMemory are not set."""
    config_dir: str = ""
    """Directory of drop-ins for that file (--config-dir); with config: auto as on the kubelet's
    command line."""


class KubeletCompatibilityMode(StrEnum):
    """Set of the kubelet's rules that apply."""

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
    """off: no rule. policies: ties, cpus and memory, by which the kubelet's managers align. full:
    staticCPUs and cpuOrder too; then the defaults of preferClosestNUMANodes and alignL3 are false,
    and that of sharedPool.minCPUs is 1."""
    exceptions: Annotated[dict[str, bool], with_parser(_check_kubelet_rule_names)] = msgspec.field(
        name="except", default_factory=dict
    )
    """By rule, true to apply it whatever the mode, false not to. ties: choose among equally good
    sets of NUMA nodes by the lowest ids instead of by strategy. cpus: align and count only
    exclusive CPUs; all other containers run on all shared CPUs, even if a policy asks for a NUMA
    node (unless the pod says cpus: shared). memory: count only Guaranteed pods and give only them
    memory nodes; groups of NUMA nodes never overlap, and the kernel's free memory does not count.
    staticCPUs: exclusive CPUs for each container of a Guaranteed pod with a whole number of CPUs;
    without a policy they are not aligned, and memory is left alone. cpuOrder: the kubelet's order
    of CPUs, instead of the one that keeps whole NUMA nodes, L3 groups and cores free. Part of no
    mode: distributeCPUsAcrossNUMA spreads an exclusive request evenly over the NUMA nodes that it
    needs, or over those of its hint if devices or memory need more. distributeCPUsAcrossCores, with
    cpuOrder and alignL3: false, takes single CPUs by number instead of whole cores. alignBySocket
    prefers NUMA nodes of one socket and takes CPUs from all of it; not together with
    single-numa-node."""


class MemoryOnlyNUMANodesSection(Section, frozen=True):
    """Memory-only NUMA nodes that computed assignments may use."""

    ids: NUMAList = ""
    """NUMA nodes, as a kernel list such as 2-3."""
    memory_tiers: NUMAList = ""
    """Memory tiers of the kernel, as a list of their numbers; the N of
    /sys/devices/virtual/memory_tiering/memory_tierN."""


class HTTP(Section, frozen=True):
    """Metrics, health, the API and the page."""

    address: HostPortOrOff = "127.0.0.1:9891"
    """host:port to listen on, or off. An address other than loopback needs tokenFile or
    allowAnonymous."""
    socket: Annotated[
        str, with_parser(build_absolute_path_check(MAX_SOCKET_PATH_BYTES, empty=True))
    ] = ""
    """Unix socket that serves the API too, for nri-numa publish; empty for none. Its user and the
    group of its directory may connect without a token."""
    token_file: str = ""
    """File with the bearer token of every request except /healthz and /readyz; read again when it
    changes."""
    tls_cert: str = ""
    """PEM file with the server's certificate chain."""
    tls_key: str = ""
    """PEM file with the certificate's private key."""
    allow_anonymous: bool = False
    """true: listen on other addresses than loopback without a token. Anyone who reaches the address
    can then read which pods run here and where."""
    allow_plaintext_token: bool = False
    """true: accept the token without TLS on other addresses than loopback. Only for networks that
    encrypt traffic themselves: anyone else who sees the traffic can read the token."""


class DevicePluginSection(Section, frozen=True):
    """``nri-numa device-plugin``; the agent reads none of it."""

    resource_name: Annotated[Text, with_parser(values.check_extended_resource)] = (
        "numa.example.com/exclusive-cpu"
    )
    """Extended resource by which the scheduler counts exclusive CPUs; outside kubernetes.io, best
    below a domain of yours."""
    advertise_topology: bool = False
    """true: report the NUMA node of each slot to the kubelet, so that its Topology Manager aligns
    CPUs with devices. CPUs are then taken only on the NUMA nodes that it chose."""
    socket_dir: Annotated[
        Text,
        with_parser(
            build_absolute_path_check(
                MAX_SOCKET_PATH_BYTES - len("/kubelet.sock"),
                note=", because sockets in it have no longer paths",
            )
        ),
    ] = "/var/lib/kubelet/device-plugins"
    """Directory of the kubelet's device plugin sockets. It does not depend on kubeletRoot."""


class Devices(Section, frozen=True):
    """Placement of containers by the devices they have."""

    enabled: bool = False
    """true: find out which devices a container has before it starts, and place its CPUs and memory
    near them. Without it only countFree and cdiSpecDirs have an effect."""
    device_nodes: bool = True
    """true: use device files that the runtime puts into the container: VFIO, RDMA, disks, NVMe,
    GPUs and any other that sysfs knows by number."""
    sriov_variables: bool = True
    """true: use PCIDEVICE_* variables of the SR-IOV network device plugin."""
    nvidia: bool = True
    """true: use NVIDIA_VISIBLE_DEVICES and NVIDIA's device files, with the driver's
    /proc/driver/nvidia."""
    cdi: bool = True
    """true: use names of the Container Device Interface (CDI)."""
    cdi_spec_dirs: Annotated[tuple[str, ...], with_parser(values.check_absolute_paths)] = (
        "/etc/cdi",
        "/var/run/cdi",
    )
    """Directories of CDI specs, as in the runtime's configuration; a later directory overrides an
    earlier one. The DRA driver writes its specs into the last one."""
    network_interfaces: bool = True
    """true: use network interfaces in the pod's namespace. Needs CAP_SYS_ADMIN, the host's
    /run/netns, and 10 MiB of memory for pyroute2.minimal."""
    pod_resources: bool = True
    """true: query the kubelet's PodResources socket once for each pod, for 1 s at most, and all
    devices every four seconds at most. Needs 8 MiB of memory for grpc."""
    count_free: bool = False
    """true: query the kubelet for the free devices of each extended resource on each NUMA node,
    even if enabled is false. /v1/zones and publish.nodeResourceTopology have them. At most two
    PodResources calls in four seconds, and only while a client reads them."""


class DRA(Section, frozen=True):
    """The driver of dynamic resource allocation: the agent prepares, the publisher publishes."""

    enabled: bool = False
    """true: serve the kubelet as a DRA driver, and publish each NUMA node as a device with
    consumable capacity. Needs nri-numa publish, Kubernetes 1.36 or newer, and a runtime with
    CDI."""
    driver: Annotated[str, with_parser(values.check_driver_name)] = "dra.numa.example.com"
    """Name of the driver in ResourceSlices and DeviceClasses; best below a domain of yours."""
    list_attributes: bool = False
    """true: publish attributes that have several values as lists. Only if API server and scheduler
    are 1.37 or newer and have the feature gate DRAListTypeAttributes."""
    handover_dir: Annotated[str, with_parser(build_absolute_path_check())] = "/run/nri-numa-claims"
    """Directory in which the agent requests claims from nri-numa publish and receives them; no
    other program may write there."""


class Publish(Section, frozen=True):
    """Objects that ``nri-numa publish`` writes to the API server, and its spans."""

    events: bool = True
    """true: write Events on pods: rejections, misaligned and unpinned containers, missed starts,
    undelivered updates, drift, moves."""
    node_annotations: bool = True
    """true: write the Node's annotations numacpu and numamem, below the annotation prefix: CPUs and
    bytes by NUMA node."""
    node_labels: bool = True
    """true: write labels of the Node, below the annotation prefix, with the machine's shape."""
    pod_annotation: bool = False
    """true: write the annotation assigned on each pod with pinned containers. Needs the rights to
    list, watch and patch pods. A NodeResourceTopology then names Guaranteed pods as soon as they
    are bound."""
    node_capacity: bool = False
    """true: write exclusive CPUs into the Node's status, as devicePlugin.resourceName, for the
    scheduler to count; instead of nri-numa device-plugin. Needs the right to patch nodes/status."""
    node_resource_topology: bool = False
    """true: write a NodeResourceTopology: capacity and free amounts of each NUMA node, for
    schedulers. Needs its definition in the cluster and the rights to get, create and patch it."""
    node_resource_topology_force: bool = False
    """true: overwrite that object's zones even if another publisher wrote them."""
    node_resource_topology_touch_on_release: bool = True
    """true: change that object once more seven seconds after a release, as the stock plugin
    NodeResourceTopologyMatch needs it. false: if only nri-numa scheduler reads it."""
    node_resource_topology_validity: Duration = 0
    """Maximum age of that object, after which readers ignore it; it is renewed every
    resyncInterval, so at least three times that. 0: no limit."""
    numatopology: bool = False
    """true: write a Numatopology, for Volcano's plugin numaaware. Needs Volcano's definition in the
    cluster and the rights to create and patch it."""
    otlp_endpoint: Annotated[str, with_parser(values.check_prometheus_url)] = ""
    """OTLP receiver over HTTP, such as http://127.0.0.1:4318, that gets a span of each decided
    request of the runtime; empty for none. Needs nri-numa[otel]."""
    api_qps: Annotated[float, Meta(gt=0, le=100)] = 5.0
    """Maximum number of requests to the API server per second."""
    resync_interval: Interval = "5m"
    """Time between two comparisons with the objects in the cluster, which restore what was removed;
    1s or more."""
    credentials_dir: Text = "/var/run/secrets/kubernetes.io/serviceaccount"
    """Directory with token and ca.crt; both are read again when they change."""
    address: HostPortOrOff = "127.0.0.1:9892"
    """host:port on loopback for its metrics and probes, or off."""


class CapacityFromNodeAnnotationsSection(Section, frozen=True):
    """Handover of the Node's capacity annotations to the agent."""

    file: Annotated[str, with_parser(build_absolute_path_check(empty=True))] = ""
    """File with the Node's annotations offline-capacity and drained, written by nri-numa publish
    and read by the agent every second; empty for none. Only the publisher may write to its
    directory."""
    interval: Interval = "15s"
    """Time between two reads of the Node by nri-numa publish; 1s or more."""


class PrometheusCapacityQuery(Section, frozen=True):
    """Capacity factors from a query."""

    url: Annotated[str, with_parser(values.check_prometheus_url)] = ""
    """URL of the server, such as http://prometheus:9090; empty for none."""
    query: str = ""
    """Instant query whose samples are capacity factors from 0 to 1, one for each NUMA node of each
    Node."""
    node_label: Text = "node"
    """Label that has the name of the Node."""
    numa_node_label: Text = "numa_node"
    """Label that has the NUMA node."""
    token_file: str = ""
    """File with a bearer token for the server; empty for none."""
    ca_file: str = ""
    """PEM file with the server's certificate authority; empty for the system's."""


class DrainEviction(Section, frozen=True):
    """Eviction of pods from NUMA nodes that the annotation ``drained`` names."""

    evict: bool = False
    """true: evict pods with pinned containers there, if a workload recreates them. Needs
    publish.podAnnotation, and rights to list and evict pods."""
    delay: Annotated[str | float, with_parser(build_duration_check(0, DAY_S))] = "30s"
    """Minimum time between the annotation and the first eviction. Longer than
    offlineCapacity.interval, so that the agent drains first."""


class StuckPodEviction(Section, frozen=True):
    """Eviction of pods that their node keeps rejecting, while another one has room."""

    evict: bool = False
    """true: evict pods that their node keeps rejecting, while another node has room, or for better
    devices (devices.countFree). Needs publish.nodeResourceTopology, and rights to watch and evict
    pods."""
    include_running: bool = False
    """true: also evict pods in phase Running of which a container ended and is rejected since.
    Their running containers end too. Needs evict, and the right to watch Events."""
    delay: Interval = "2m"
    """Minimum time a pod has been rejected before it is evicted."""


class CPUStealEviction(Section, frozen=True):
    """Eviction of pods from NUMA nodes whose CPU time the hypervisor gives to other guests."""

    evict: bool = False
    """true: evict pods with pinned containers from NUMA nodes whose measured factor stays low, one
    pod per minute. Needs measuredCapacity.mode: enforce, publish.nodeResourceTopology,
    publish.podAnnotation, and rights to list and evict pods."""
    below_factor: Annotated[float, Meta(gt=0, le=0.9)] = 0.7
    """Measured factors below this value are low. measuredCapacity.minFactor must be lower still."""
    delay: Interval = "10m"
    """Minimum time a factor has been low before the first eviction."""
    max_affected_fraction: Annotated[float, Meta(ge=0, le=1)] = 0.25
    """Maximum fraction of the cluster's NUMA nodes with a low factor. If more are low, no pod is
    evicted."""


class EvictionSection(Section, frozen=True):
    """Evictions for all reasons, and limits that hold for all reasons together."""

    max_per_minute: Annotated[float, Meta(gt=0, le=600)] = 6.0
    """Maximum number of evictions per minute in the whole cluster."""
    max_per_workload_per_hour: Annotated[int, Meta(ge=1, le=1000)] = 3
    """Maximum number of evictions of one workload's pods per hour. Drained NUMA nodes are emptied
    without this limit."""
    dry_run: bool = False
    """true: send evictions as dry runs, which evict no pod."""
    drained_numa_nodes: DrainEviction = DrainEviction()
    """Eviction of pods from drained NUMA nodes."""
    stuck_pods: StuckPodEviction = StuckPodEviction()
    """Eviction of pods that their node keeps rejecting while another has room."""
    cpu_steal: CPUStealEviction = CPUStealEviction()
    """Eviction of pods from NUMA nodes with much steal."""


class ClusterPageSection(Section, frozen=True):
    """The page of the cluster, at ``/cluster/`` of the controller's address."""

    enabled: bool = False
    """true: serve a page with the NUMA nodes of all nodes. Needs the right to list and watch
    noderesourcetopologies."""
    token_file: str = ""
    """File with the bearer token for reading the page; another one than controller.tokenFile, with
    which capacity is PUT. Needed on other addresses than loopback, unless allowAnonymous is
    true."""
    allow_anonymous: bool = False
    """true: show the page to every client without a token, as kubectl numa cluster needs it."""
    node_url: Annotated[str, with_parser(values.check_node_page_url_template)] = ""
    """Link from each node to its agent's page, such as https://{address}:9891/: {node} is the name
    of the node, {address} its InternalIP."""


class VerdictsSection(Section, frozen=True):
    """Answers to why a Pending pod fits nowhere, for ``kubectl numa why``."""

    enabled: bool = False
    """true: serve /v1/verdicts to the API server's service proxy; a client must know the pod's UID.
    Needs the rights to list and watch noderesourcetopologies and pods."""


class Controller(Section, frozen=True):
    """``nri-numa controller``; the agent reads none of it."""

    address: HostPortOrOff = "127.0.0.1:9893"
    """host:port for its metrics, its probes and PUT of capacity, or off. On other addresses than
    loopback PUT needs tokenFile and TLS."""
    token_file: str = ""
    """File with the bearer token of a PUT, read again when it changes; without one PUT is
    rejected."""
    tls_cert: str = ""
    """PEM file with the server's certificate chain."""
    tls_key: str = ""
    """PEM file with the certificate's private key."""
    allow_plaintext_token: bool = False
    """true: accept the token without TLS on other addresses than loopback. Only for networks that
    encrypt traffic themselves."""
    capacity_file: str = ""
    """YAML or JSON file with nodes and their capacity factors, read again when it changes; empty
    for none."""
    prometheus: PrometheusCapacityQuery = PrometheusCapacityQuery()
    """Capacity factors from a query."""
    validity: Annotated[str | float, with_parser(build_duration_check(5, 7 * DAY_S))] = "5m"
    """Maximum age of a value that its source does not repeat; 5s to 7 days. A PUT may set less."""
    on_stale_source: Literal["full", "last"] = "full"
    """Capacity of a node whose sources are all stale. full: its whole capacity. last: the last
    value."""
    smoothing_time: Annotated[str | float, with_parser(build_duration_check(0, DAY_S))] = "30s"
    """Time constant of the exponential average over a source's values."""
    min_update_interval: Annotated[str | float, with_parser(build_duration_check(0, DAY_S))] = "10s"
    """Minimum time between two changes of one Node's annotation."""
    page: ClusterPageSection = ClusterPageSection()
    """A page of the whole cluster."""
    verdicts: VerdictsSection = VerdictsSection()
    """Nodes on which a Pending pod fits, and why not on others."""
    evictions: EvictionSection = EvictionSection()
    """Evictions of pods, which their workloads recreate on other nodes."""
    api_qps: Annotated[float, Meta(gt=0, le=100)] = 10.0
    """Maximum number of requests to the API server per second."""
    credentials_dir: Text = "/var/run/secrets/kubernetes.io/serviceaccount"
    """Directory with token, ca.crt and namespace, read again when they change."""


class MissingTopologyAction(StrEnum):
    """Treatment of nodes without a NodeResourceTopology, for pods with placement options."""

    REJECT = "reject"
    ALLOW = "allow"


MAX_BIND_TIMEOUT_S: Final = 4.0
"""Seconds; a Lease that was lost is taken by another replica 5 s after the last renewal counted."""


class Scheduling(Section, frozen=True):
    """The extender of kube-scheduler; the agent itself reads none of it."""

    address: HostPortOrOff = "127.0.0.1:9894"
    """host:port that kube-scheduler calls; also serves /metrics, /healthz and /readyz."""
    tls_cert: str = ""
    """PEM file with the server's certificate chain, read again when it changes."""
    tls_key: str = ""
    """PEM file with the certificate's private key."""
    client_ca: str = ""
    """PEM file with the certificate authority of clients that may call the extender. Metrics and
    probes need no certificate."""
    allow_anonymous: bool = False
    """true: answer every client on an address other than loopback. Any client can then bind any
    pending pod to any node."""
    lease_name: str = ""
    """Name of the Lease that elects one of several replicas, in the namespace of the credentials;
    empty for a single replica."""
    on_missing_topology: MissingTopologyAction = MissingTopologyAction.REJECT
    """Treatment of nodes without a valid NodeResourceTopology, for pods with placement options.
    reject: filter them out. allow: use them if no other node fits."""
    filter_to_best: bool = True
    """true: filter returns only the best of the nodes that fit, so the scheduler needs no
    prioritizeVerb. false: if one is configured, or if another extender filters after this one."""
    bind_timeout: Annotated[
        str | float, with_parser(build_duration_check(0.1, MAX_BIND_TIMEOUT_S))
    ] = "4s"
    """Maximum time for one binding; below the scheduler's httpTimeout, at most 4s."""
    topology_report_delay: Annotated[str | float, with_parser(build_duration_check(0, 600))] = "10s"
    """Maximum time from the start of a pod's containers until its node's NodeResourceTopology
    counts them, if that object does not name them."""
    credentials_dir: Text = "/var/run/secrets/kubernetes.io/serviceaccount"
    """Directory with token, ca.crt and namespace."""


class LogLevel(StrEnum):
    """Minimum severity of log lines."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """Format of log lines."""

    LOGFMT = "logfmt"
    JSON = "json"


class Log(Section, frozen=True):
    """Log lines, written to standard error."""

    level: LogLevel = LogLevel.INFO
    """Minimum severity of lines that are written."""
    format: Annotated[LogFormat, RESTART_REQUIRED] = LogFormat.LOGFMT
    """logfmt (key=value) or json."""
    file: Annotated[str, RESTART_REQUIRED] = ""
    """File to append to, instead of standard error. Without it a plugin that the runtime launched
    writes to the journal, because it has no standard error."""


class InternalErrorAnswer(StrEnum):
    """Answer to the runtime after an internal error of the agent."""

    UNPINNED = "unpinned"
    REJECT = "reject"


class Reconcile(Section, frozen=True):
    """Comparison of actual cgroups with desired ones, and their repair."""

    interval: Duration = "30s"
    """Time between two comparisons: seconds, or a text such as 30s or 5m. 0 is off. A cpuset that
    another program writes is checked within a second."""
    max_repairs: Annotated[int, Meta(ge=1)] = 3
    """Maximum number of repairs of one container within ten minutes. Then repairs are abandoned
    and reported."""
    repair_without_runtime: bool = False
    """true: write cgroups that differ while the runtime is unreachable. false: wait until it is
    back. CPU limits wait in any case."""


class Rebalance(Section, frozen=True):
    """Moves of movable containers so that another one fits."""

    max_moves: Annotated[int, Meta(ge=0, le=3)] = 2
    """Maximum number of containers moved for one that would be rejected without it. 0: no
    moves."""


class UsageReadMode(StrEnum):
    """Use of a measurement of all containers."""

    OFF = "off"
    READ = "read"
    METRIC = "metric"


class ContainerUsageSection(Section, frozen=True):
    """Measurements of all containers, repeated at an interval."""

    memory: UsageReadMode = UsageReadMode.OFF
    """read: measure the part of a container's memory on its own NUMA nodes, for the page, nri-numa
    status -o wide, explain and the API. Needs HTTP. metric: expose
    nri_numa_container_local_memory_ratio too, a series for each container."""
    cpu_pressure: UsageReadMode = UsageReadMode.OFF
    """read: measure the CPU pressure of a container's cgroup and its threads waiting on run queues,
    for the page, nri-numa status -o wide and the API. Needs HTTP. metric: expose
    nri_numa_container_cpu_pressure_ratio and nri_numa_container_waiting_tasks too, a series of each
    for each container."""
    interval: Interval = "30s"
    """Time between two measurements of all containers; 1s or more."""


class StealTimeMode(StrEnum):
    """Use of measured steal."""

    OFF = "off"
    REPORT = "report"
    ENFORCE = "enforce"


class StealCapacity(Section, frozen=True):
    """Capacity factors from steal on each NUMA node, for guests of overcommitted hypervisors."""

    mode: StealTimeMode = StealTimeMode.OFF
    """report: measure steal of each NUMA node, log and expose the capacity factors that follow.
    enforce: also limit new containers to these factors and capacityFactor. Running containers are
    not moved."""
    interval: Interval = "5s"
    """Time between two measurements; 1s or more."""
    half_life: Interval = "30s"
    """Time in which the average follows half of a change; 1s or more."""
    min_factor: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Minimum capacity factor, however high the steal."""


class AgentConfig(Section, frozen=True):
    """The whole configuration of the node agent."""

    api_version: Annotated[Literal["nri-numa/v1"], RESTART_REQUIRED] = AGENT_CONFIG_API_VERSION
    """Version of this document's form."""
    kind: Annotated[Literal["AgentConfig"], RESTART_REQUIRED] = CONFIG_KIND
    """Type of this document."""
    runtime: Annotated[RuntimeLinkSection, RESTART_REQUIRED] = RuntimeLinkSection()
    """Access to the container runtime."""
    node_name: Annotated[str, with_parser(values.check_node_name), RESTART_REQUIRED] = ""
    """Name of the Node, also used in the page, the API and the metrics. If empty, the kubelet's
    `--hostname-override` or the host name. The manifests set it by the environment."""
    node_group: Annotated[str, RESTART_REQUIRED] = ""
    """Name of the group of nodes that these settings are for, in `nri-numa check` and the log; set
    by the Helm chart from its `nodeGroups`."""
    state_dir: Annotated[Text, RESTART_REQUIRED] = "/run/nri-numa"
    """Directory of the checkpoint. /run is right, because containers do not outlive a reboot."""
    sysfs_root: Annotated[Text, RESTART_REQUIRED] = "/"
    """Directory whose sys/ describes the machine: / for this one, or a captured machine."""
    cgroup_root: Annotated[Text, RESTART_REQUIRED] = "/sys/fs/cgroup"
    """Mount point of the cgroup file systems."""
    kubelet_root: Annotated[Text, RESTART_REQUIRED] = "/var/lib/kubelet"
    """The kubelet's directory, read to find CPUs that its managers have pinned."""
    kubelet: KubeletSection = KubeletSection()
    """The kubelet, and pods that may override its grants."""
    http: Annotated[HTTP, RESTART_REQUIRED] = HTTP()
    """Metrics, health, the API and the page."""
    device_plugin: Annotated[DevicePluginSection, RESTART_REQUIRED] = DevicePluginSection()
    """Exclusive CPUs as an extended resource that the scheduler counts."""
    devices: Annotated[Devices, RESTART_REQUIRED] = Devices()
    """Placement of containers near their devices."""
    dra: Annotated[DRA, RESTART_REQUIRED] = DRA()
    """NUMA nodes as devices that ResourceClaims allocate (DRA)."""
    publish: Annotated[Publish, RESTART_REQUIRED] = Publish()
    """Objects that nri-numa publish writes to the API server."""
    offline_capacity: Annotated[CapacityFromNodeAnnotationsSection, RESTART_REQUIRED] = (
        CapacityFromNodeAnnotationsSection()
    )
    """Handover of the Node's capacity annotations to the agent."""
    controller: Annotated[Controller, RESTART_REQUIRED] = Controller()
    """nri-numa controller, one for the cluster."""
    scheduler: Annotated[Scheduling, RESTART_REQUIRED] = Scheduling()
    """The extender of kube-scheduler, nri-numa scheduler."""
    log: Log = Log()
    """Log lines, written to standard error."""
    observe: bool = False
    """true: decide, log and count, but change nothing."""
    on_internal_error: InternalErrorAnswer = InternalErrorAnswer.UNPINNED
    """Answer after an internal error of the agent. unpinned: start the container unpinned. reject:
    reject it."""
    annotation_prefix: Annotated[Text, with_parser(values.check_annotation_prefix)] = (
        "numa.kubernetes.io"
    )
    """Prefix of the annotations of pods, without the slash."""
    defaults: dict[str, AnnotationValue] = field(default_factory=dict)
    """Annotation keys and values that apply if neither pod nor rules set the key."""
    rules: tuple[RuleDocument, ...] = ()
    """Annotation keys for matching containers. The first matching rule that sets a key applies;
    annotations come before rules, and rules before the defaults."""
    permissions: tuple[PermissionDocument, ...] = ()
    """Annotations that pods may use. The first entry that matches a pod applies. A pod without an
    entry may use every key, gets exclusive CPUs only up to its CPU request, and may not list
    reserved CPUs. Rules and defaults need no permission."""
    quotas: CPUWithholdingLimits = CPUWithholdingLimits()
    """Limits on CPUs that are withheld from other containers."""
    shared_pool: SharedPool = SharedPool()
    """Minimum of CPUs for containers without exclusive CPUs."""
    pod_reservation_timeout: Duration = "10m"
    """Minimum time that free CPUs and memory of a pod stay reserved for its next containers, since
    its last container was created or ended; then other pods may take them. Also the maximum time
    for a container to start before it is released (at least 2m). 0: no reservations."""
    interrupts_off_exclusive_cpus: Annotated[bool, RESTART_REQUIRED] = False
    """true: keep device interrupts off exclusive CPUs and their idle siblings, by /proc/irq or, if
    irqbalance runs, by its list of banned CPUs; undone when the agent stops. Interrupts that the
    kernel manages stay where they are, and the log names them."""
    strategy: Strategy = Strategy.SPREAD
    """Choice among equally good NUMA nodes. spread: the emptiest. pack: the fullest that fits. Both
    by the scarcest resource. most-memory: the one with the most free memory, or without memory the
    most free CPU."""
    cpu_overcommit: Annotated[float, Meta(ge=1, le=100)] = 1.0
    """Factor on each NUMA node's CPUs for requests of shared containers."""
    capacity_factor: dict[int, Annotated[float, Meta(ge=0, le=1)]] = field(default_factory=dict)
    """By NUMA node, the usable fraction of its CPUs. NUMA nodes without an entry have 1; 0 drains
    the NUMA node."""
    reserved_cpus: CPUList = ""
    """CPUs, as a kernel list such as 0-1,32, that never become exclusive."""
    strict_cpu_reservation: bool = False
    """true: keep the reserved CPUs out of the shared pool too."""
    reserved_memory: dict[int, Quantity | dict[str, Quantity]] = field(default_factory=dict)
    """By NUMA node, memory that is never allocated to containers, such as 1Gi; or a mapping with
    amounts of memory and of huge pages of each size (hugepages-1Gi)."""
    prefer_closest_numa_nodes: bool | None = None
    """true: choose the closest of equally good sets of NUMA nodes. Default: true, but false with
    kubeletCompatibility.mode: full."""
    kubelet_compatibility: KubeletCompatibilitySection = KubeletCompatibilitySection()
    """Rules of the kubelet that apply instead of the agent's own."""
    align_l3: bool | None = None
    """true: keep an exclusive request inside few last-level caches. Default: true, but false with
    kubeletCompatibility.mode: full."""
    isolated_cpus: IsolatedCPUs = IsolatedCPUs.AVOID
    """Use of the kernel's isolcpus list for exclusive CPUs; only: exclusive containers get no other
    CPUs. Shared containers run on isolated CPUs only with any, or if no others are left."""
    nohz_full_cpus: NohzFullCPUs = NohzFullCPUs.ANY
    """Use of the kernel's nohz_full list for exclusive CPUs. isolatedCPUs goes first where both
    contradict each other. No further NUMA node is used for it."""
    preferred_cores: PreferredCores = PreferredCores.ANY
    """Cores of a hybrid processor that exclusive assignments take first."""
    memory_only_numa_nodes: MemoryOnlyNUMANodesSection = MemoryOnlyNUMANodesSection()
    """NUMA nodes without CPUs (HBM, CXL, PMEM) that computed assignments may use, named by id or by
    memory tier."""
    disable_cfs_quota: bool = True
    """true: run containers with exclusive CPUs without CFS quota."""
    inject_environment: bool = True
    """true: set NUMA_CPUS and NUMA_MEMS in pinned containers, and with CPUs on several NUMA nodes
    NUMA_CPUS_0 and so on."""
    assigned_files: Annotated[bool, RESTART_REQUIRED] = False
    """true: mount /run/numa into pinned containers, read-only. assigned.cpuset and assigned.memset
    have the container's current CPUs and memory nodes, also after a resize; assigned.json has CPUs
    and devices by NUMA node. Not over CRI."""
    reconcile: Reconcile = Reconcile()
    """Comparison of actual cgroups with desired ones, and their repair."""
    rebalance: Rebalance = Rebalance()
    """Moves of movable containers so that another one fits."""
    container_usage: Annotated[ContainerUsageSection, RESTART_REQUIRED] = ContainerUsageSection()
    """Measurements of containers: memory on their own NUMA nodes, and CPU pressure."""
    measured_capacity: Annotated[StealCapacity, RESTART_REQUIRED] = StealCapacity()
    """Capacity factors from measured steal."""


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

    defaults = AgentConfig()

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
                default = functools.reduce(getattr, field_names, defaults)
                yield ConfigKey(key_path, default, needs_restart, extra.get("check"), field_names)

    root = cast("inspect.StructType", inspect.type_info(AgentConfig))
    return {leaf.path: leaf for leaf in walk_struct_fields(root, "", (), False)}
