"""The sections ``offlineCapacity`` and ``controller``: capacity from outside the node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Final, Literal

from msgspec import Meta, Struct

from nri_numa.config.names import camel_case

if TYPE_CHECKING:
    from nri_numa.config.sections import AgentConfig

_MAX_PATH: Final = 4095


class OfflineCapacity(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """How annotations of the Node about its capacity get to the agent."""

    file: Annotated[
        str,
        Meta(
            description="File that nri-numa publish writes and the agent reads every second: what "
            "the annotations offline-capacity and drained of the Node say. Empty for neither. Its "
            "directory must be the publisher's alone to write."
        ),
    ] = ""
    interval: Annotated[
        str | float,
        Meta(description="Time between two looks of nri-numa publish at its Node; 1s or more."),
    ] = "15s"


class Prometheus(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """Capacity factors from a query."""

    url: Annotated[
        str, Meta(description="Of the server, such as http://prometheus:9090; empty for none.")
    ] = ""
    query: Annotated[
        str,
        Meta(
            description="Instant query whose samples are capacity factors from 0 to 1, one for "
            "each NUMA node of each Node."
        ),
    ] = ""
    node_label: Annotated[
        str, Meta(min_length=1, description="Label of a sample with the name of the Node.")
    ] = "node"
    numa_node_label: Annotated[
        str, Meta(min_length=1, description="Label of a sample with the NUMA node.")
    ] = "numa_node"
    interval: Annotated[str | float, Meta(description="Time between two queries; 1s or more.")] = (
        "30s"
    )
    token_file: Annotated[
        str, Meta(description="File with a bearer token for the server; empty for none.")
    ] = ""
    ca_file: Annotated[
        str, Meta(description="PEM file with the server's authority; the system's when empty.")
    ] = ""


class Lease(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """Which of several replicas works."""

    name: Annotated[str, Meta(min_length=1, description="Of the Lease.")] = "nri-numa-controller"
    namespace: Annotated[
        str, Meta(description="Of the Lease; that of the credentials when empty.")
    ] = ""
    duration: Annotated[
        str | float,
        Meta(description="Time after which a silent leader is replaced; 3s or more."),
    ] = "15s"


class Drain(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """Moving pods away from NUMA nodes that the annotation ``drained`` names."""

    evict: Annotated[
        bool,
        Meta(
            description="Evict pods with pinned containers there that a workload makes again. "
            "Needs publish.podAnnotation, and rights to list and evict pods."
        ),
    ] = False
    after: Annotated[
        str | float,
        Meta(
            description="Time between the annotation and the first eviction; longer than "
            "offlineCapacity.interval, so that the agent knows first."
        ),
    ] = "30s"
    per_minute: Annotated[
        float, Meta(gt=0, le=600, description="Evictions a minute in the whole cluster.")
    ] = 6.0
    dry_run: Annotated[
        bool, Meta(description="Let the API server say what it would do, and do nothing.")
    ] = False


class Stuck(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """Moving pods that a node refuses again and again to another one that has room."""

    evict: Annotated[
        bool,
        Meta(
            description="Evict pods that their node refuses again and again, while another "
            "node has room. Needs publish.nodeResourceTopology, and rights to watch and evict pods."
        ),
    ] = False
    partly_running: Annotated[
        bool,
        Meta(
            description="Also pods in the phase Running: a container ran, ended and is refused "
            "since. What runs ends with them. Needs evict, and the right to follow Events."
        ),
    ] = False
    after: Annotated[
        str | float, Meta(description="Time that a pod is refused at least before it goes.")
    ] = "2m"
    per_minute: Annotated[
        float, Meta(gt=0, le=600, description="Evictions a minute in the whole cluster.")
    ] = 6.0
    per_workload: Annotated[
        int,
        Meta(
            ge=1,
            le=1000,
            description="Evictions of one workload's pods in the time of per; then it is left "
            "alone.",
        ),
    ] = 3
    per: Annotated[
        str | float, Meta(description="Time in which evictions of one workload are counted.")
    ] = "1h"
    dry_run: Annotated[
        bool, Meta(description="Let the API server say what it would do, and do nothing.")
    ] = False


class Steal(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """Moving pods away from NUMA nodes whose CPU time the host takes away."""

    evict: Annotated[
        bool,
        Meta(
            description="Evict pods with pinned containers from NUMA nodes whose measured factor "
            "stays low. Needs measuredCapacity.mode act, publish.nodeResourceTopology and "
            "podAnnotation, and rights to list and evict pods."
        ),
    ] = False
    below: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="A measured factor lower than this is low. measuredCapacity.floor must be "
            "lower still.",
        ),
    ] = 0.7
    well: Annotated[
        float, Meta(gt=0, le=1, description="Evictions end at this factor; below or more.")
    ] = 0.9
    after: Annotated[
        str | float, Meta(description="Time that a factor is low before the first eviction.")
    ] = "10m"
    at_most: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Part of the cluster's NUMA nodes that may be low at the same time; if "
            "more are, nobody is evicted.",
        ),
    ] = 0.25
    per_minute: Annotated[
        float, Meta(gt=0, le=600, description="Evictions a minute in the whole cluster.")
    ] = 1.0
    per_workload: Annotated[
        int,
        Meta(
            ge=1,
            le=1000,
            description="Evictions of one workload's pods in the time of per; then it is left "
            "alone.",
        ),
    ] = 3
    per: Annotated[
        str | float, Meta(description="Time in which evictions of one workload are counted.")
    ] = "1h"
    dry_run: Annotated[
        bool, Meta(description="Let the API server say what it would do, and do nothing.")
    ] = False


class Page(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """The page of the cluster, at ``/cluster/`` of the controller's address."""

    enabled: Annotated[
        bool,
        Meta(
            description="Serve a page with the NUMA nodes of all nodes. Needs the right to list "
            "and watch noderesourcetopologies."
        ),
    ] = False
    token_file: Annotated[
        str,
        Meta(
            description="File with the bearer token of those who may look; another one than "
            "controller.tokenFile, with which capacity is PUT. Needed wider than loopback."
        ),
    ] = ""


class Controller(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """``nri-numa controller``; the agent reads none of it."""

    address: Annotated[
        str,
        Meta(
            min_length=1,
            description="host:port for its metrics, its probes and PUT of capacity, or off. Wider "
            "than loopback PUT needs tokenFile and TLS.",
        ),
    ] = "127.0.0.1:9893"
    token_file: Annotated[
        str,
        Meta(
            description="File with the bearer token that a PUT must carry, read again when it "
            "changes; without one PUT is refused."
        ),
    ] = ""
    tls_cert: Annotated[str, Meta(description="PEM file with the server's certificate chain.")] = ""
    tls_key: Annotated[str, Meta(description="PEM file with the certificate's private key.")] = ""
    allow_plaintext_token: Annotated[
        bool,
        Meta(
            description="Take the token on an address wider than loopback without TLS, for "
            "networks that encrypt by themselves."
        ),
    ] = False
    capacity_file: Annotated[
        str,
        Meta(
            description="YAML or JSON file with nodes and their capacity factors, read again when "
            "it changes; empty for none."
        ),
    ] = ""
    prometheus: Annotated[Prometheus, Meta(description="Capacity factors from a query.")] = (
        Prometheus()
    )
    validity: Annotated[
        str | float,
        Meta(
            description="How long a value counts that its source does not repeat; 5s to 7 days. A "
            "PUT may say less."
        ),
    ] = "5m"
    silent: Annotated[
        Literal["full", "last"],
        Meta(
            description="What counts for a node when all of its sources are silent: full, or the "
            "last value."
        ),
    ] = "full"
    smoothing: Annotated[
        str | float,
        Meta(description="Time constant of the exponential average over a source's values."),
    ] = "30s"
    hysteresis: Annotated[
        float,
        Meta(
            ge=0,
            le=0.5,
            description="A factor is written again when it differs by so much from what is "
            "written.",
        ),
    ] = 0.05
    least_time: Annotated[
        str | float,
        Meta(description="Time between two changes of one Node's annotation at least."),
    ] = "10s"
    page: Annotated[Page, Meta(description="A page of the whole cluster.")] = Page()
    drain: Annotated[Drain, Meta(description="Moving pods away from drained NUMA nodes.")] = Drain()
    stuck: Annotated[
        Stuck, Meta(description="Moving pods that their node refuses while another has room.")
    ] = Stuck()
    steal: Annotated[
        Steal, Meta(description="Moving pods away from NUMA nodes that the host takes away.")
    ] = Steal()
    rate: Annotated[
        float, Meta(gt=0, le=100, description="Requests to the API server per second at most.")
    ] = 10.0
    burst: Annotated[
        int, Meta(ge=1, le=1000, description="Requests at once after a quiet time.")
    ] = 20
    credentials: Annotated[
        str,
        Meta(
            min_length=1,
            description="Directory with token, ca.crt and namespace, read again when they change.",
        ),
    ] = "/var/run/secrets/kubernetes.io/serviceaccount"
    lease: Annotated[Lease, Meta(description="Which of several replicas works.")] = Lease()


def controlling_problems(config: AgentConfig) -> Iterator[str]:
    """What the schema cannot say, each ``path: what is wrong, what was expected``."""
    from nri_numa.config.values import is_loopback, parse_duration, split_address

    def duration(path: str, value: str | float, least: float, most: float) -> Iterator[str]:
        try:
            seconds = parse_duration(value)
        except ValueError as error:
            yield f"{path}: {error}"
            return
        if not least <= seconds <= most:
            yield f"{path}: {value}, expected {least:g}s to {most:g}s"

    offline, controller = config.offline_capacity, config.controller
    if offline.file and (offline.file[0] != "/" or len(offline.file) > _MAX_PATH):
        yield f"offlineCapacity.file: {offline.file[:120]!r}, expected an absolute path"
    day = 86400.0
    yield from duration("offlineCapacity.interval", offline.interval, 1, day)
    yield from duration("controller.prometheus.interval", controller.prometheus.interval, 1, day)
    yield from duration("controller.validity", controller.validity, 5, 7 * day)
    yield from duration("controller.smoothing", controller.smoothing, 0, day)
    yield from duration("controller.leastTime", controller.least_time, 0, day)
    yield from duration("controller.drain.after", controller.drain.after, 0, day)
    stuck, steal = controller.stuck, controller.steal
    yield from duration("controller.stuck.after", stuck.after, 1, day)
    yield from duration("controller.stuck.per", stuck.per, 60, 7 * day)
    yield from duration("controller.steal.after", steal.after, 1, day)
    yield from duration("controller.steal.per", steal.per, 60, 7 * day)
    if not 0 < steal.below <= steal.well <= 1:  # NaN is neither
        yield (
            f"controller.steal.well: {steal.well}, expected a number from controller.steal.below "
            f"({steal.below}) to 1"
        )
    if not 0 <= steal.at_most <= 1:
        yield f"controller.steal.atMost: {steal.at_most}, expected a number from 0 to 1"
    yield from duration("controller.lease.duration", controller.lease.duration, 3, 3600)
    if not 0 <= controller.hysteresis <= 0.5:  # NaN is neither
        yield f"controller.hysteresis: {controller.hysteresis}, expected a number from 0 to 0.5"
    prometheus = controller.prometheus
    if prometheus.url and not prometheus.url.startswith(("http://", "https://")):
        yield f"controller.prometheus.url: {prometheus.url[:80]!r}, expected http:// or https://"
    if bool(prometheus.url) != bool(prometheus.query):
        missing, given = ("query", "url") if prometheus.url else ("url", "query")
        yield f"controller.prometheus.{missing}: is empty, but {given} is set; it takes both"
    if bool(controller.tls_cert) != bool(controller.tls_key):
        missing, given = ("tlsKey", "tlsCert") if controller.tls_cert else ("tlsCert", "tlsKey")
        yield f"controller.{missing}: is not set, but {given} is; TLS needs both"
    yield from _address(controller, split_address, is_loopback)


def _address(
    controller: Controller,
    split: Callable[[str], tuple[str, int] | None],
    loopback: Callable[[str], bool],
) -> Iterator[str]:
    try:
        address = split(controller.address)
    except ValueError as error:
        yield f"controller.address: {error}"
        return
    page = controller.page
    if page.enabled and page.token_file and page.token_file == controller.token_file:
        yield (
            f"controller.page.tokenFile: {page.token_file[:120]!r} is controller.tokenFile too, "
            "expected another token: who may look need not be who may PUT"
        )
    if address is None or loopback(address[0]):
        return
    if page.enabled and not page.token_file:
        yield (
            f"controller.page.tokenFile: is not set, but {controller.address} is reached from "
            "other machines; expected a file with a token"
        )
    if not controller.token_file and not (page.enabled and page.token_file):
        return
    if not (controller.tls_cert or controller.allow_plaintext_token):
        name = "tokenFile" if controller.token_file else "page.tokenFile"
        yield (
            f"controller.{name}: clients would send the token to {controller.address} "
            "unencrypted; set controller.tlsCert and controller.tlsKey, or listen on 127.0.0.1, or "
            "set controller.allowPlaintextToken: true where the network itself encrypts"
        )
