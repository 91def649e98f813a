"""Parts that depend on configuration and runtime: link, memory policies, devices."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import UNSET

from nri_numa.agent.agent import Agent
from nri_numa.agent.current_state import CurrentState
from nri_numa.agent.handler import LinkObserver
from nri_numa.agent.runtime_lock import RuntimeLock
from nri_numa.config import AgentConfig, RuntimeLinkKind
from nri_numa.errors import RuntimeBusy
from nri_numa.model.workload import (
    MIN_KERNEL_VERSIONS,
    MIN_RUNTIMES_TEXT,
    MemoryPolicies,
    MemoryPolicy,
)
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import Metrics
from nri_numa.observe.notify import SystemdNotifier
from nri_numa.observe.reports import ReportOnce
from nri_numa.runtime import CallTimer, LinkState, RuntimeInfo
from nri_numa.runtime_profile import profile_of
from nri_numa.text import parse_version, utc_text

if TYPE_CHECKING:
    from nri_numa.devices.counts import CountsOrReason, DeviceCounts
    from nri_numa.devices.watch import DeviceWatch
    from nri_numa.model.machine import PCIDevice
    from nri_numa.web.responses import RuntimeLinkStatus

log = get_logger("daemon")


def is_reached_over_cri(config: AgentConfig, *, launched: bool = False) -> bool:
    """True if the runtime is reached over CRI; never if it launched the agent over NRI."""
    if config.runtime.link is not RuntimeLinkKind.CRI:
        return False
    if launched:
        log.warning("CRI link not used", problem="the runtime launched the agent over NRI")
    return not launched


def runtime_lock_socket(config: AgentConfig, *, launched: bool = False) -> str:
    """Return the socket whose directory agents of this runtime lock."""
    if is_reached_over_cri(config, launched=launched):
        return config.runtime.cri_socket.removeprefix("unix://")
    return config.runtime.nri_socket


class LinkStatus(LinkObserver):
    """Status of the runtime and of the link to it.

    Attributes:
        over_cri: the runtime is reached over CRI.
        status: state of the link, and a detail.
        down_since: Unix time of the end of the last link, or of the start; None while there is one.
        info: name, version and abilities of the runtime; None before it registered.
        pending_registration: sentence about a call without an answer for too long; else empty.
    """

    def __init__(
        self,
        current: CurrentState,
        metrics: Metrics,
        sysfs_root: str,
        *,
        over_cri: bool,
        is_launched: bool,
    ) -> None:
        self._current, self._metrics, self._time = current, metrics, current.clock.time
        self._is_launched, self._sysfs_root = is_launched, Path(sysfs_root)
        self.over_cri = over_cri
        self.status: tuple[LinkState, str] = (LinkState.DISCONNECTED, "not dialled yet")
        self.down_since: float | None = self._time()
        self.info: RuntimeInfo | None = None
        self.pending_registration = ""

    def on_runtime_configured(self, info: RuntimeInfo) -> None:
        """Record the runtime's abilities."""
        self.info = info
        policies = supported_memory_policies(
            info, os.uname().release, over_cri=self.over_cri, sysfs_root=self._sysfs_root
        )
        self._current.set_runtime(
            policies,
            info.request_timeout,
            reports_failed_creations=self.over_cri or profile_of(info).reports_failed_creations,
        )

    def on_link_changed(self, state: LinkState, detail: str) -> None:
        """The link stands somewhere else."""
        self.status = state, detail
        if state is LinkState.ACTIVE:
            self.down_since = None
        elif self.down_since is None:
            self.down_since = self._time()

    @property
    def is_synchronized(self) -> bool:
        """Registered and synchronized."""
        return self.status[0] is LinkState.ACTIVE

    @property
    def needs_resynchronize(self) -> bool:
        """True if the runtime launched this plugin and reports no running containers to it.

        NRI before 0.7 sends plugins that it launched neither the running containers nor their stop.
        """
        if not (self._is_launched and self.is_synchronized) or self.info is None:
            return False
        return not profile_of(self.info).synchronizes_launched

    def link_document(self) -> RuntimeLinkStatus:
        """Return the link's status; any thread may call this."""
        from nri_numa.web.responses import RuntimeLinkStatus

        (state, detail), info, down_since = self.status, self.info, self.down_since
        return RuntimeLinkStatus(
            state=state.value,
            detail=detail,
            runtime=info.name if info is not None else "",
            runtime_version=info.version if info is not None else "",
            pending_registration=self.pending_registration,
            problem="" if down_since is None else _link_down_text(down_since, detail),
            interface="cri" if self.over_cri else UNSET,
        )

    def report_unanswered_calls(self, calls: CallTimer, limit_s: float) -> None:
        """Report a call that the runtime has not answered for ``limit_s``, and its end."""
        call, seconds = calls.longest_pending()
        self._metrics.registration_pending.set(seconds)
        hangs = bool(call) and seconds >= limit_s
        if hangs and not self.pending_registration:
            self.pending_registration = (
                f"the runtime has not answered a {call} for {seconds:.0f} s: a container takes "
                "that long to stop, or the runtime hangs and starts no pods"
            )
            log.error(
                "runtime call unanswered",
                call=call,
                duration_s=round(seconds),
                remedy="if no container is in its grace period, restart the runtime: containers "
                "keep running",
            )
            self._current.notify()
        elif self.pending_registration and not hangs:
            self.pending_registration = ""
            log.info("runtime call answered")
            self._current.notify()


def _link_down_text(down_since: float, detail: str) -> str:
    detail_text = f" ({detail})" if detail else ""
    return (
        f"no link to the runtime since {utc_text(down_since)}{detail_text}; containers "
        "that start meanwhile are pinned when the link is back"
    )


class LinkReporter(LinkObserver):
    """Reports the state of the link, and to systemd when the agent is ready.

    Args:
        start: Unix time of the agent's start.
        allow_http: called once the link is up, or cannot be made now.
    """

    def __init__(
        self,
        current: CurrentState,
        notifier: SystemdNotifier,
        start: float,
        allow_http: Callable[[], None],
    ) -> None:
        self._current, self._notifier, self._allow_http = current, notifier, allow_http
        self._start = start
        self._is_ready = False

    def on_link_changed(self, state: LinkState, detail: str) -> None:
        """The link stands somewhere else."""
        level = log.warning if state is LinkState.DISCONNECTED else log.info
        level("link changed", state=state.value, detail=detail)
        if state not in (LinkState.REGISTERING, LinkState.CONFIGURED):
            self._allow_http()
        self._current.notify()
        if state is LinkState.ACTIVE or (state is LinkState.DISCONNECTED and not self._is_ready):
            # Without the runtime there is nothing to wait for at start: dialling has no end, and
            # systemd would kill a service that never gets ready.
            self._notifier.notify_ready(f"link {state.value}")
            if not self._is_ready and state is LinkState.ACTIVE:
                log.info(
                    "agent ready", duration_s=round(self._current.clock.time() - self._start, 3)
                )
            elif not self._is_ready:
                log.info("runtime awaited")
            self._is_ready = True
        else:
            self._notifier.notify_status(f"link {state.value} {detail}".strip())


class RuntimeOwnership:
    """Lock on the runtime: the agent acts if it has the lock, and not with ``observe``."""

    def __init__(self, lock: RuntimeLock, agent: Agent) -> None:
        self._lock, self._agent, self._problems = lock, agent, ReportOnce(log)

    def update_observe(self, observe: bool) -> str:
        """Take or release the lock; returns a sentence if another agent has it, else empty.

        Containers are corrected once observe mode ends.
        """
        problem = ""
        if observe:
            self._lock.close()
        else:
            try:
                self._lock.acquire()
            except RuntimeBusy as error:
                problem = str(error)
        self._problems.report("runtime locked by another agent", problem, log_function=log.error)
        current = self._agent.current
        was_observing = current.observe
        current.set_observe(observe or bool(problem))
        if was_observing and not current.observe:
            self._agent.cgroups.request_check(self._agent.containers.cgroup_places)
        return problem

    def close(self) -> None:
        """Release the lock for another agent."""
        self._lock.close()


# --- Memory policies that this node's runtime and kernel can set ---

_OLDER_MEMORY_POLICY_ALTERNATIVES: Final = {
    MemoryPolicy.PREFERRED_MANY: MemoryPolicy.PREFERRED,
    MemoryPolicy.WEIGHTED_INTERLEAVE: MemoryPolicy.INTERLEAVE,
}


def supported_memory_policies(
    info: RuntimeInfo, kernel: str, *, over_cri: bool, sysfs_root: Path = Path("/")
) -> MemoryPolicies:
    """Return the supported memory policies; an unreadable kernel release counts as new."""
    obstacle = ""
    if over_cri:
        obstacle = "is used over CRI, which has no memory policies; expected NRI"
    elif not profile_of(info).has_memory_policies:
        obstacle = "cannot set memory policies (its NRI is older than 0.12); expected "
        obstacle += MIN_RUNTIMES_TEXT
    if obstacle:
        clause = f"{info.name} {info.version} {obstacle}"
        return MemoryPolicies(dict.fromkeys(MemoryPolicy, clause))
    release = parse_version(kernel)
    return MemoryPolicies(
        {
            mode: f"Linux {kernel} does not have it; expected Linux {min_version[0]}."
            f"{min_version[1]} or newer, or {_OLDER_MEMORY_POLICY_ALTERNATIVES[mode]}"
            for mode, min_version in MIN_KERNEL_VERSIONS.items()
            if release is not None and release[:2] < min_version
        },
        weights=_read_interleave_weights(
            sysfs_root / "sys/kernel/mm/mempolicy/weighted_interleave"
        ),
    )


def _read_interleave_weights(folder: Path) -> dict[int, int]:
    """Read ``node0`` and so on, numbers from 1 to 255; unreadable ones count as 1."""
    weights: dict[int, int] = {}
    for path in sorted(folder.glob("node*")):
        with suppress(OSError, ValueError):
            weight = int(path.read_text(encoding="ascii"))
            if 1 <= weight <= 255:
                weights[int(path.name.removeprefix("node"))] = weight
    return weights


# --- Devices ---


class NodeDevices:
    """The machine's devices, if the configuration switches them on; imported only then.

    Attributes:
        pci: the PCI devices; None if ``devices`` is off.
        roots: PCIe roots by NUMA node, for the devices that claims allocate; empty without ``dra``.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._counts: DeviceCounts | None = None
        self.pci: tuple[PCIDevice, ...] | None = None
        self.roots: dict[int, tuple[str, ...]] = {}
        if config.devices.count_free or (config.devices.enabled and config.devices.pod_resources):
            from nri_numa.devices.counts import DeviceCounts

            resource_name = config.device_plugin.resource_name
            self._counts = DeviceCounts(config.kubelet_root, resource_name)
        if config.devices.enabled or config.dra.enabled:
            from nri_numa.machine.pci import list_pci_devices, list_pcie_roots_by_node
            from nri_numa.machine.tree import open_tree

            tree = open_tree(config.sysfs_root)
            self.pci = list_pci_devices(tree) if config.devices.enabled else None
            self.roots = list_pcie_roots_by_node(tree) if config.dra.enabled else {}

    def device_counts(self) -> CountsOrReason | None:
        """Return the cached counts of free devices, or a sentence if they are unknown."""
        if self._counts is None or not self._config.devices.count_free:
            return None
        return self._counts.known_counts()

    def new_device_watch(self, current: CurrentState) -> DeviceWatch | None:
        """Build the watch over devices of containers; None if ``devices`` is off."""
        if not self._config.devices.enabled:
            return None
        from nri_numa.devices.watch import DeviceWatch

        return DeviceWatch(
            self._config.devices,
            root=self._config.sysfs_root,
            kubelet_root=self._config.kubelet_root,
            alignable_nodes=lambda: current.machine.alignable_nodes,
            own_resource=self._config.device_plugin.resource_name,
            node_devices=(lambda: ()) if self._counts is None else self._counts.known_devices,
        )
