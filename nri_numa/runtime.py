"""The link to a container runtime, in the engine's types; NRI and CRI are two ways to make one.

A link calls a `RuntimeHandler` for everything that happens to pods and containers, and sends what
it answers. Protobuf and gRPC stay in the rooms that implement a link: `nri_numa.nri` and
`nri_numa.cri`.
"""

from __future__ import annotations

import enum
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, Protocol

import msgspec

from nri_numa.engine.request.demand import cpu_limit_milli, cpu_request_milli
from nri_numa.errors import AgentError
from nri_numa.model.workload import (
    Container,
    ContainerAdjustment,
    ContainerUpdate,
    PodSandbox,
    PodTable,
    QoSClass,
    Resources,
)

STABLE_LINK_S: Final = 10.0
"""A connection that was active this long starts the pauses between attempts from the beginning."""


class LinkState(enum.StrEnum):
    """Where the link stands."""

    DISCONNECTED = "disconnected"
    REGISTERING = "registering"
    CONFIGURED = "configured"
    """Known to the runtime; Synchronize may wait for a long container stop."""
    ACTIVE = "active"
    STOPPED = "stopped"


class RuntimeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the runtime says of itself.

    Attributes:
        name: ``containerd``, ``cri-o`` or another.
        version: the runtime's version as it wrote it.
        nri_version: NRI release inside the runtime; empty before NRI 0.12, and over CRI.
        registration_timeout: seconds; 0 when not given (before NRI 0.7).
        request_timeout: seconds for the answer to any request; 0 when not given.
        config: the drop-in file of a pre-installed plugin, as text; empty for others.
    """

    name: str
    version: str
    nri_version: str = ""
    registration_timeout: float = 0.0
    request_timeout: float = 0.0
    config: str = ""


class RequestRejected(Exception):
    """Raised by a handler to fail the runtime's operation, with this message as its reason."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class PermanentlyRejected(AgentError):
    """The runtime will never accept this plugin as it is; raised out of `RuntimeLink.run`."""

    reason = "RegistrationRefused"


class PushResult(msgspec.Struct, frozen=True):
    """What became of a push: why the runtime did not take it, empty when it did.

    Over NRI it does not say which of the updates had no effect.
    """

    detail: str = ""

    @property
    def succeeded(self) -> bool:
        """Whether the runtime took the updates."""
        return not self.detail


Planner = Callable[[PodTable, Sequence[Container]], Sequence[ContainerUpdate]]
"""From all pods and containers of a runtime to the updates it gets, at most one for each."""


class RuntimeHandler(Protocol):
    """What a link calls. All methods are synchronous and quick.

    Those that stand for a request of the runtime may raise `RequestRejected`; what that fails
    depends on the link. Any other exception goes to `on_internal_error`.
    """

    @property
    def reads_mentions(self) -> bool:
        """Whether ``mentions`` and ``network_namespace`` are used; reading them costs time."""
        ...

    def on_runtime_configured(self, info: RuntimeInfo) -> None:
        """The runtime introduced itself. A refusal here ends `RuntimeLink.run`."""
        ...

    def synchronize(
        self, pods: PodTable, containers: Sequence[Container]
    ) -> Sequence[ContainerUpdate]:
        """All pods and live containers of the node; returns updates, at most one for each."""
        ...

    def create_container(
        self, pod: PodSandbox, container: Container
    ) -> tuple[ContainerAdjustment, Sequence[ContainerUpdate]]:
        """Place a container that is about to be created; updates are for others."""
        ...

    def update_container(
        self, pod: PodSandbox, container: Container, requested: Resources
    ) -> Sequence[ContainerUpdate]:
        """Judge a change of resources; returns what to set over the request.

        The container's own update comes first; without one the request passes as it is.
        """
        ...

    def post_update_container(self, container_id: str) -> None:
        """The runtime is through with an update of a container, whatever came of it."""
        ...

    def stop_container(self, container_id: str) -> Sequence[ContainerUpdate]:
        """A container ended or will; the id may be unknown. Returns updates for others."""
        ...

    def remove_container(self, container_id: str) -> None:
        """A container is removed; the id may be unknown."""
        ...

    def start_container(self, pod: PodSandbox, container: Container) -> None:
        """A container's cgroup is there and its program does not run yet."""
        ...

    def post_start_container(self, pod: PodSandbox, container: Container) -> None:
        """A container's program runs."""
        ...

    def run_pod(self, pod: PodSandbox) -> None:
        """A pod sandbox runs. Refusing here leaks sandboxes on older runtimes."""
        ...

    def update_pod(self, pod: PodSandbox, total: Resources) -> None:
        """The sum of a pod changes; ``pod`` may have the one of before, now and later."""
        ...

    def stop_pod(self, pod: PodSandbox) -> None:
        """A pod sandbox was stopped; only its id may be known."""
        ...

    def remove_pod(self, pod: PodSandbox) -> None:
        """A pod sandbox is removed; only its id may be known."""
        ...

    def on_request_answered(self, event_name: str, seconds: float) -> None:
        """A request was answered; the place for logging and other slow things.

        ``seconds`` are those from the parsed request to the written answer.
        """
        ...

    def on_link_changed(self, state: LinkState, detail: str) -> None:
        """The link changed its state."""
        ...

    def on_protocol_broken(self) -> None:
        """A connection was closed because the runtime broke the protocol."""
        ...

    def on_internal_error(self, event_name: str, error: Exception) -> None:
        """A method above raised: the answer is empty, unless this raises `RequestRejected`."""
        ...


class CallTimer:
    """Own calls that wait for the runtime, and since when: one that hangs says nothing at all.

    containerd (2.1.9, 2.4.2) hangs for good when a plugin registers while a sandbox is removed
    together with containers in it (docs/testing.md). No pod starts from then on, and no request
    arrives, as on a quiet node. What shows it is a call of ours: a registration that is not
    answered.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}

    def start_call(self, what: str) -> None:
        """A call was made; one that waits already keeps its time, also over a new connection."""
        self._since.setdefault(what, self._clock())

    def end_call(self, what: str) -> None:
        """The runtime answered, hung up, or is not there: it does not hang."""
        self._since.pop(what, None)

    def longest_pending(self) -> tuple[str, float]:
        """The call that waits longest, and its seconds; empty and 0 when none does."""
        if not self._since:
            return "", 0.0
        what, since = min(self._since.items(), key=lambda item: item[1])
        return what, self._clock() - since


class PodObserver:
    """Follows pods and their containers."""

    def on_synchronize(self, pods: PodTable, containers: Sequence[Container]) -> None:
        """These are all pods and containers."""

    def on_container(self, pod: PodSandbox, name: str) -> None:
        """A container is created; the decision about it follows."""

    def on_decided(self, pod_id: str) -> None:
        """The decision about a container was made, or failed."""

    def on_run_pod(self, pod: PodSandbox) -> None:
        """A sandbox runs."""

    def on_stop_pod(self, pod_id: str) -> None:
        """A sandbox stops."""

    def on_remove_pod(self, pod_id: str, uid: str) -> None:
        """A sandbox is gone."""


class RuntimeLink(ABC):
    """A connection to a runtime that is kept up.

    Attributes:
        runtime: what the runtime said of itself last; None before.
        watch: own calls that the runtime has not answered.
        state: where the link stands.
    """

    def __init__(self, handler: RuntimeHandler, clock: Callable[[], float]) -> None:
        self._handler = handler
        self.runtime: RuntimeInfo | None = None
        self.watch = CallTimer(clock)
        self.state = LinkState.DISCONNECTED
        self._reported: tuple[LinkState, str] | None = None

    @abstractmethod
    async def run(self) -> None:
        """Keep the link up until cancelled, or until a runtime that launched us closes it.

        Raises:
            PermanentlyRejected: the runtime will never accept this plugin.
        """

    @abstractmethod
    async def push_updates(self, updates: Sequence[ContainerUpdate]) -> PushResult:
        """Send updates that answer no request, at most one for each container."""

    @abstractmethod
    async def ensure_containers_reported(self) -> str:
        """Have all pods and containers reported to the handler now; returns why that failed."""

    def _set_link_state(self, state: LinkState, detail: str) -> None:
        if (state, detail) == self._reported:
            return  # the same failure again: said once
        self._reported = (state, detail)
        self.state = state
        try:
            self._handler.on_link_changed(state, detail)
        except Exception as error:
            with suppress(RequestRejected):
                self._handler.on_internal_error("link_changed", error)


def backoff_delays(fraction: Callable[[], float], *, jitter: float = 0.1) -> Iterator[float]:
    """Yield the pauses between attempts: 1, 2, 4, 8, 16, 30, 30 … seconds.

    Up to the share ``jitter`` is added to each, by random numbers from 0 to 1 that ``fraction``
    returns: it keeps plugins of many nodes from moving in step.
    """
    delay = 1.0
    while True:
        yield delay * (1 + jitter * fraction())
        delay = min(delay * 2, 30.0)


# --- what the kubelet gives every runtime, whichever way it arrives ---------------------------

EMPTY_RESOURCES: Final = Resources()

_GUARANTEED_OOM_SCORE: Final = -997
_BEST_EFFORT_OOM_SCORE: Final = 1000
# The kubelet never writes a quota below 1 ms in 100 ms, so small requests and limits differ.
_MILLI_TOLERANCE: Final = 10

_PAGE_SIZE_PATTERN: Final = re.compile(r"([0-9]{1,12})([KMGT]?)i?B?", re.ASCII | re.IGNORECASE)
_SHIFT_BY_UNIT: Final[Mapping[str, int]] = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def parse_page_bytes(text: str) -> int:
    """Bytes of a huge page size such as ``2MB`` (units of 1024); 0 when it is none."""
    match = _PAGE_SIZE_PATTERN.fullmatch(text)
    return 0 if match is None else int(match[1]) << _SHIFT_BY_UNIT[match[2].upper()]


def inferred_qos(pod_resources: Resources, container: Container | None) -> QoSClass:
    """The QoS class of a pod outside the kubelet's cgroups, by its resources or one container.

    First the OOM score, which the kubelet derives from the class; then resources: limits that
    equal the requests make a Guaranteed pod, any other number a Burstable one.
    """
    resources = pod_resources
    if container is not None:
        score = container.oom_score_adj
        if score == _GUARANTEED_OOM_SCORE:
            return QoSClass.GUARANTEED
        if score == _BEST_EFFORT_OOM_SCORE:
            return QoSClass.BEST_EFFORT
        if score is not None and 2 <= score < _BEST_EFFORT_OOM_SCORE:
            return QoSClass.BURSTABLE
        if resources == EMPTY_RESOURCES:
            resources = container.resources
    limit, request = cpu_limit_milli(resources, []), cpu_request_milli(resources, [])
    memory = resources.memory_limit or 0
    if limit and memory > 0 and (not request or abs(limit - request) <= _MILLI_TOLERANCE):
        return QoSClass.GUARANTEED
    return QoSClass.BURSTABLE if limit or request or memory > 0 else QoSClass.BEST_EFFORT
