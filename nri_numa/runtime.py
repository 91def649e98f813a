"""Link to a container runtime, in the engine's types; NRI and CRI are the two implementations.

A link calls a `RuntimeHandler` for every event of pods and containers, and sends its answers.
Protobuf and gRPC stay in the rooms that implement a link: `nri_numa.nri` and `nri_numa.cri`.
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
"""Seconds of activity after which a connection resets the pauses between attempts."""


class LinkState(enum.StrEnum):
    """State of the link."""

    DISCONNECTED = "disconnected"
    REGISTERING = "registering"
    CONFIGURED = "configured"
    """Known to the runtime; Synchronize may wait for a long container stop."""
    ACTIVE = "active"
    STOPPED = "stopped"


class RuntimeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Name, version and settings that the runtime reports.

    Attributes:
        name: ``containerd``, ``cri-o`` or another.
        version: the runtime's version as it wrote it.
        nri_version: NRI release inside the runtime; empty before NRI 0.12, and over CRI.
        registration_timeout: seconds; 0 if not reported (before NRI 0.7).
        request_timeout: seconds for the answer to any request; 0 if not reported.
        config: the drop-in file of a pre-installed plugin, as text; empty for others.
    """

    name: str
    version: str
    nri_version: str = ""
    registration_timeout: float = 0.0
    request_timeout: float = 0.0
    config: str = ""


class RequestRejected(Exception):
    """A handler's rejection, which fails the runtime's operation with this message."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class PermanentlyRejected(AgentError):
    """A runtime that will never accept this plugin as it is; raised by `RuntimeLink.run`."""

    reason = "RegistrationRefused"


Planner = Callable[[PodTable, Sequence[Container]], Sequence[ContainerUpdate]]
"""Function from all pods and containers of a runtime to its updates, at most one for each."""


class RuntimeHandler(Protocol):
    """Callbacks of a link. All methods are synchronous and quick.

    Those for a request of the runtime may raise `RequestRejected`; the link decides what fails
    then. Any other exception is passed to `on_internal_error`.
    """

    @property
    def reads_mentions(self) -> bool:
        """True if ``mentions`` and ``network_namespace`` are used; reading them takes time."""

    def on_runtime_configured(self, info: RuntimeInfo) -> None:
        """Handle the runtime's Configure. A rejection here ends `RuntimeLink.run`."""

    def synchronize(
        self, pods: PodTable, containers: Sequence[Container]
    ) -> Sequence[ContainerUpdate]:
        """Synchronize with all pods and live containers; return at most one update for each."""

    def create_container(
        self, pod: PodSandbox, container: Container
    ) -> tuple[ContainerAdjustment, Sequence[ContainerUpdate]]:
        """Place a container that is about to be created; updates are for others."""

    def update_container(
        self, pod: PodSandbox, container: Container, requested: Resources
    ) -> Sequence[ContainerUpdate]:
        """Evaluate a change of resources; return the updates that replace the request.

        The container's own update comes first; without one the request is applied unchanged.
        """

    def post_update_container(self, container_id: str) -> None:
        """Handle the end of an update of a container, successful or not."""

    def stop_container(self, container_id: str) -> Sequence[ContainerUpdate]:
        """Release a container that ends; return updates for others. The id may be unknown."""

    def remove_container(self, container_id: str) -> None:
        """Handle the removal of a container; the id may be unknown."""

    def start_container(self, pod: PodSandbox, container: Container) -> None:
        """Handle a container whose cgroup exists and whose program does not run yet."""

    def post_start_container(self, pod: PodSandbox, container: Container) -> None:
        """Handle a container whose program runs."""

    def run_pod(self, pod: PodSandbox) -> None:
        """Handle a started pod sandbox. A rejection here leaks sandboxes on older runtimes."""

    def update_pod(self, pod: PodSandbox, total: Resources) -> None:
        """Handle a new sum of a pod's resources; ``pod`` may still have the previous one."""

    def stop_pod(self, pod: PodSandbox) -> None:
        """Handle a stopped pod sandbox; only its id may be known."""

    def remove_pod(self, pod: PodSandbox) -> None:
        """Handle the removal of a pod sandbox; only its id may be known."""

    def on_request_answered(self, event_name: str, seconds: float) -> None:
        """Do slow work such as logging, after the answer to a request.

        ``seconds`` are those from the parsed request to the written answer.
        """

    def on_link_changed(self, state: LinkState, detail: str) -> None:
        """Handle a new state of the link."""

    def on_protocol_broken(self) -> None:
        """Handle a connection that was closed because the runtime broke the protocol."""

    def on_internal_error(self, event_name: str, error: Exception) -> None:
        """Handle a method's exception; the answer is empty, or this raises `RequestRejected`."""


class CallTimer:
    """Calls that wait for the runtime, and their start times: a hanging runtime shows nothing else.

    containerd (2.1.9, 2.4.2) hangs permanently if a plugin registers while a sandbox is removed
    together with containers in it (tests/README.md). No pod starts from then on, and no request
    arrives, as on a quiet node. Only an unanswered call of the plugin shows it, its registration.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start_times: dict[str, float] = {}

    def start_call(self, call: str) -> None:
        """Record the start of a call; a pending one keeps its time, also over a new connection."""
        self._start_times.setdefault(call, self._clock())

    def end_call(self, call: str) -> None:
        """Record the end of a call: the runtime answered, disconnected or is missing."""
        self._start_times.pop(call, None)

    def longest_pending(self) -> tuple[str, float]:
        """Return the longest pending call and its seconds; empty and 0 without one."""
        if not self._start_times:
            return "", 0.0
        call, start_time = min(self._start_times.items(), key=lambda item: item[1])
        return call, self._clock() - start_time


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
    """A connection to a runtime that is restored whenever it breaks.

    Attributes:
        runtime: the last information from the runtime; None before.
        watch: the plugin's calls that the runtime has not answered.
        state: state of the link.
    """

    def __init__(self, handler: RuntimeHandler, clock: Callable[[], float]) -> None:
        self._handler = handler
        self.runtime: RuntimeInfo | None = None
        self.watch = CallTimer(clock)
        self.state = LinkState.DISCONNECTED
        self._reported: tuple[LinkState, str] | None = None

    @abstractmethod
    async def run(self) -> None:
        """Keep the link up until cancelled, or until a runtime that launched the plugin ends it.

        Raises:
            PermanentlyRejected: the runtime will never accept this plugin.
        """

    @abstractmethod
    async def push_updates(self, updates: Sequence[ContainerUpdate]) -> str:
        """Send updates that answer no request, at most one for each container.

        Returns the reason why the runtime refused them; empty if it did not. Over NRI it does not
        name the updates without effect.
        """

    @abstractmethod
    async def ensure_containers_reported(self) -> str:
        """Have all pods and containers reported to the handler now; return why that failed."""

    def _set_link_state(self, state: LinkState, detail: str) -> None:
        if (state, detail) == self._reported:
            return  # a repeated failure is reported once
        self._reported = (state, detail)
        self.state = state
        try:
            self._handler.on_link_changed(state, detail)
        except Exception as error:
            with suppress(RequestRejected):
                self._handler.on_internal_error("link_changed", error)


def backoff_delays(random_number: Callable[[], float]) -> Iterator[float]:
    """Yield the pauses between attempts: 1, 2, 4, 8, 16, 30, 30 … seconds.

    Up to a tenth is added to each, by a random number from 0 to 1, so the plugins of many nodes do
    not retry at the same time.
    """
    delay = 1.0
    while True:
        yield delay * (1 + 0.1 * random_number())
        delay = min(delay * 2, 30.0)


# --- values that the kubelet sends to every runtime, over NRI and CRI -------------------------

EMPTY_RESOURCES: Final = Resources()

_GUARANTEED_OOM_SCORE: Final = -997
_BEST_EFFORT_OOM_SCORE: Final = 1000
# The kubelet never writes a quota below 1 ms in 100 ms, so small requests and limits differ.
_MILLI_TOLERANCE: Final = 10

_PAGE_SIZE_PATTERN: Final = re.compile(r"([0-9]{1,12})([KMGT]?)i?B?", re.ASCII | re.IGNORECASE)
_SHIFT_BY_UNIT: Final[Mapping[str, int]] = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def parse_page_bytes(text: str) -> int:
    """Parse a huge page size such as ``2MB`` (units of 1024) to bytes; 0 if it is none."""
    match = _PAGE_SIZE_PATTERN.fullmatch(text)
    return 0 if match is None else int(match[1]) << _SHIFT_BY_UNIT[match[2].upper()]


def allows_all_devices(allow: bool, kind: str, *numbers: int | None) -> bool:
    """True if a device rule makes a container privileged: its device files then mean nothing."""
    return allow and kind in ("", "a") and all(number is None or number < 0 for number in numbers)


def inferred_qos(pod_resources: Resources, container: Container | None) -> QoSClass:
    """Infer the QoS class of a pod outside the kubelet's cgroups, from it or one container.

    The OOM score, which the kubelet derives from the class, counts first. Then come resources:
    limits that equal the requests make a Guaranteed pod, any other number a Burstable one.
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
