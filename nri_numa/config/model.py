"""What stands in the configuration file: frozen records, one per section.

The texts in `Meta(description=…)` are the reference: the JSON Schema, ``config/agent.yaml`` and the
documentation are generated from them (`nri_numa.config.schema`).

Keys are camelCase with the acronyms kept (``reservedCPUs``), as in Kubernetes' own files.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct, field

from nri_numa.engine.settings import CPUOrder, IsolatedCPUs, PreferredCores
from nri_numa.engine.workload import QoSClass, Strategy

API_VERSION: Final = "nri-numa/v1"
KIND: Final = "AgentConfig"

_ACRONYMS = {"cpus": "CPUs", "numa": "NUMA", "l3": "L3", "uid": "UID"}


def camel_case(name: str) -> str:
    """Name of a key in the file: ``reserved_cpus`` is ``reservedCPUs``."""
    first, *rest = name.split("_")
    return first + "".join(_ACRONYMS.get(part, part.capitalize()) for part in rest)


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


class Runtime(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """How the container runtime is reached."""

    nri_socket: Annotated[
        Text, Meta(description="Unix socket on which the runtime serves NRI.")
    ] = "/var/run/nri/nri.sock"
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


class HTTP(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """Metrics, health, the API and the page."""

    address: Annotated[
        Text,
        Meta(
            description="host:port to listen on, or off. Loopback by default; anything wider "
            "needs tokenFile, or allowAnonymous."
        ),
    ] = "127.0.0.1:9891"
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
            description="Time between two rounds: seconds, or a text such as 30s or 5m. 0 is off."
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


class History(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """How much of the past stays in memory for explain and the page."""

    refusals: Annotated[int, Meta(ge=0, le=100_000, description="Refusals kept.")] = 256


class RuleMatch(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """Which containers a rule is for; everything given must match, nothing given matches all."""

    namespaces: Annotated[
        tuple[Text, ...], Meta(description="Shell patterns of namespaces; one must match.")
    ] = ()
    labels: Annotated[
        dict[str, str], Meta(description="Pod labels that must have exactly these values.")
    ] = field(default_factory=dict)
    qos: Annotated[
        tuple[QoSClass, ...], Meta(description="QoS classes; the pod's must be one of them.")
    ] = ()
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
        Meta(description="The kubelet's directory, read to find CPUs that its own managers own."),
    ] = "/var/lib/kubelet"
    http: Annotated[HTTP, Meta(description="Metrics, health, the API and the page.")] = HTTP()
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
    strategy: Annotated[
        Strategy,
        Meta(
            description="Of equally good NUMA nodes take the emptiest (spread) or the fullest that "
            "fits (pack)."
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
        dict[int, Quantity],
        Meta(description="By NUMA node, memory that is never promised to containers, such as 1Gi."),
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
            description="Keep the kubelet's memory rules: groups of NUMA nodes never overlap, and "
            "only Guaranteed pods are accounted."
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
        Meta(description="Spread an exclusive request evenly over the NUMA nodes it needs."),
    ] = False
    align_l3: Annotated[
        bool, Meta(description="Keep an exclusive request inside few last-level caches.")
    ] = True
    align_by_socket: Annotated[
        bool, Meta(description="Prefer NUMA nodes of one socket, and take CPUs from all of it.")
    ] = False
    isolated_cpus: Annotated[
        IsolatedCPUs,
        Meta(
            description="What exclusive assignments do with the CPUs of the kernel's isolcpus list."
        ),
    ] = IsolatedCPUs.AVOID
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
