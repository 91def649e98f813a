"""The composition root: functions that build and return the parts of the agent.

What a part needs is an argument of its function, so the order is what the types allow: the node,
the history of the agent on it, the link above the agent, and the loops around all of them. Nothing
runs yet; `nri_numa.agent.daemon` does that, and the agent builds its own parts.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from nri_numa import __version__
from nri_numa import config as configuration
from nri_numa.agent.agent import Agent
from nri_numa.agent.assigned_files import AssignedFiles
from nri_numa.agent.capacity import CapacityFactors, ExternalCapacity, StealWatch
from nri_numa.agent.claims import ClaimStore, serve_claims_to_kubelet
from nri_numa.agent.current_state import CurrentState
from nri_numa.agent.handler import AgentHandler
from nri_numa.agent.interrupts import InterruptSteering
from nri_numa.agent.kubelet_sync import KubeletConfigWatch, KubeletSync
from nri_numa.agent.links import (
    LinkReporter,
    LinkStatus,
    NodeDevices,
    RuntimeOwnership,
    runtime_lock_socket,
)
from nri_numa.agent.loop import Clock, LoopMonitor
from nri_numa.agent.memory_migration import MemoryMigrator
from nri_numa.agent.pod_observers import PendingPods, UnmatchedAnnotations
from nri_numa.agent.reconcile import Reconciler
from nri_numa.agent.reload import (
    MachineReloader,
    Reloader,
    apply_recomputed_settings,
    build_tables,
    report_polling,
)
from nri_numa.agent.runtime_lock import RuntimeLock
from nri_numa.agent.serving import HTTPThread
from nri_numa.agent.systemd_sync import SystemdSync
from nri_numa.config import AgentConfig, InternalErrorAnswer, parse_plugin_index
from nri_numa.config.sections import StealTimeMode
from nri_numa.dra.handover import ClaimFileRequester
from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.state import NodeState
from nri_numa.errors import ConfigError
from nri_numa.kubelet.configuration import registered_node_name
from nri_numa.kubelet.state_files import KubeletStateFiles
from nri_numa.machine import hotplug
from nri_numa.machine.cgroups import SystemdScopes, read_text_or_empty
from nri_numa.machine.sysfs import discover_topology
from nri_numa.model.machine import Topology
from nri_numa.nri.link import LinkSettings, NRILink, PreinstalledConnection
from nri_numa.observe import logs
from nri_numa.observe.metrics import Metrics
from nri_numa.observe.notify import SystemdNotifier
from nri_numa.runtime import RuntimeLink
from nri_numa.store.checkpoint import CheckpointStore
from nri_numa.store.files import load_or_create_signing_key
from nri_numa.store.history_file import HistoryFile
from nri_numa.store.journal import state_from

if TYPE_CHECKING:
    from nri_numa.agent.late_starts import LateStarts
    from nri_numa.agent.usage import UsageWatches
    from nri_numa.agent.view import LiveView
    from nri_numa.devices.watch import DeviceWatch

log = logs.get_logger("daemon")

LoopFunction = Callable[[], Coroutine[Any, Any, None]]
"""Function that runs until it is cancelled."""


# --- The node -------------------------------------------------------------------------------------


class NodeParts(msgspec.Struct, frozen=True):
    """The node and its readers; nothing here depends on the runtime.

    Attributes:
        name: name of the Kubernetes Node.
        start: Unix time of the agent's start.
    """

    name: str
    start: float
    current: CurrentState
    devices: NodeDevices
    capacity: CapacityFactors
    kubelet: KubeletSync
    machine: MachineReloader


def build_node(config: AgentConfig, metrics: Metrics, clock: Clock) -> NodeParts:
    """Read the machine, the checkpoint and the kubelet's configuration.

    Raises:
        ConfigError: the configuration does not go with this machine.
        TopologyError: the machine cannot be read.
        StateDirectoryBusy: another agent uses the state directory.
    """
    start = clock.time()
    metrics.record_config_reload(loaded_at=start)
    name = config.node_name or registered_node_name(config.kubelet_root)
    topology = _discover_valid_topology(config)
    store = CheckpointStore(
        config.state_dir, identity=checkpoint_identity(config), clock=clock.time, metrics=metrics
    )
    state, key = _load_checkpoint(config, store, metrics)
    devices = NodeDevices(config)
    outside = ExternalCapacity(config.offline_capacity.file, clock)
    if config.offline_capacity.file:
        outside.refresh_capacity(topology)
    steal = StealWatch(config.measured_capacity, config.sysfs_root, metrics, clock)
    capacity = CapacityFactors(outside, steal)
    kubelet_config = KubeletConfigWatch(config.kubelet_root, capacity)
    kubelet_config.read_config(config)
    settings = kubelet_config.settings_with_kubelet_config(config, topology)
    kubelet_config.report_config()
    machine = build_tables(NodeModel(topology=topology, settings=settings, key=key))
    current = CurrentState(machine, store, clock, observe=config.observe)
    current.restore_state(state)
    files = KubeletStateFiles(config.kubelet_root)
    kubelet = KubeletSync(current, metrics, files, kubelet_config)
    reader = MachineReloader(config.sysfs_root, current, devices.device_counts)
    return NodeParts(name, start, current, devices, capacity, kubelet, reader)


def checkpoint_identity(config: AgentConfig) -> dict[str, str]:
    """Return the fields that identify a valid checkpoint: this boot of this machine."""
    boot = read_text_or_empty("/proc/sys/kernel/random/boot_id")
    return {"version": __version__, "machine": config.sysfs_root, "boot": boot}


def _discover_valid_topology(config: AgentConfig) -> Topology:
    topology = discover_topology(config.sysfs_root)
    for warning in topology.warnings:
        log.warning("unusual topology found", problem=warning)
    if problems := configuration.validate_config(config, topology):
        raise ConfigError("configuration", problems)
    return topology


def _load_checkpoint(
    config: AgentConfig, store: CheckpointStore, metrics: Metrics
) -> tuple[NodeState, bytes]:
    """Load the node state and the signing key; damaged entries are logged."""
    loaded = store.load()
    key, doubts = load_or_create_signing_key(
        config.state_dir, trusted=store.trusted, writable=store.has_lock
    )
    state, damaged = state_from(loaded.entries)
    for problem in (*loaded.problems, *doubts, *damaged):
        metrics.checkpoint_errors.inc()
        log.warning("checkpoint problem found", problem=problem)
    return state, key


def restore_history(config: AgentConfig, node: NodeParts, agent: Agent) -> HistoryFile:
    """Read the history file into the agent's history, and return it."""
    file = HistoryFile(
        config.state_dir, identity=checkpoint_identity(config), history=agent.history
    )
    if problem := file.restore_and_open(
        node.current.state.allocations, writable=node.current.store.has_lock
    ):
        log.warning("history not restored", problem=problem)
    return file


# --- The link -------------------------------------------------------------------------------------


class PodParts(msgspec.Struct, frozen=True):
    """Parts that follow pods and complete their containers; None if switched off."""

    claims: ClaimStore | None
    device_watch: DeviceWatch | None
    files: AssignedFiles | None
    pending: PendingPods | None
    unmatched: UnmatchedAnnotations


class LinkParts(msgspec.Struct, frozen=True):
    """The link to the runtime, and the parts between it and the agent."""

    pods: PodParts
    handler: AgentHandler
    link: RuntimeLink
    status: LinkStatus
    ownership: RuntimeOwnership
    reloader: Reloader
    notifier: SystemdNotifier
    late_starts: LateStarts | None
    http: HTTPThread | None


def build_link(
    config: AgentConfig,
    load: Callable[[str], AgentConfig],
    node: NodeParts,
    agent: Agent,
    gaps: LoopMonitor,
    *,
    launched: PreinstalledConnection | None,
    over_cri: bool,
) -> LinkParts:
    """Build the link to the runtime; the arguments are those of its parts."""
    current = node.current
    pods = _build_pod_parts(config, node, agent)
    is_launched = launched is not None
    status = LinkStatus(
        current, agent.metrics, config.sysfs_root, over_cri=over_cri, is_launched=is_launched
    )
    late_starts: LateStarts | None = None
    if over_cri:
        from nri_numa.agent.late_starts import LateStarts

        late_starts = LateStarts(agent)
    http: HTTPThread | None = None
    if configuration.split_address(config.http.address) or config.http.socket:
        new_view = partial(_build_view, node, agent, pods, status, late_starts)
        http = HTTPThread(config, agent, new_view, gaps)
    notifier = SystemdNotifier()
    lock = RuntimeLock(runtime_lock_socket(config, launched=is_launched))
    ownership = RuntimeOwnership(lock, agent)
    source = node.kubelet.configuration
    reloader = Reloader(config, load, agent, source, ownership, notifier)
    allow_http = http.allow_start if http else lambda: None
    reporter = LinkReporter(current, notifier, node.start, allow_http)
    handler = _build_handler(agent, pods, status, reloader, reporter)
    link = _build_runtime_link(config, handler, late_starts, launched)
    return LinkParts(pods, handler, link, status, ownership, reloader, notifier, late_starts, http)


def _build_pod_parts(config: AgentConfig, node: NodeParts, agent: Agent) -> PodParts:
    current = node.current
    claims = None
    if config.dra.enabled:
        requester = ClaimFileRequester(config.dra.handover_dir)
        claims = ClaimStore(config, node.name, requester, current)
        claims.load_records()
    writes_files = config.assigned_files and current.store.trusted
    return PodParts(
        claims,
        node.devices.new_device_watch(current),
        AssignedFiles(config.state_dir, current) if writes_files else None,
        PendingPods(agent) if config.publish.node_resource_topology else None,
        UnmatchedAnnotations(agent),
    )


def _build_handler(
    agent: Agent,
    pods: PodParts,
    status: LinkStatus,
    reloader: Reloader,
    reporter: LinkReporter,
) -> AgentHandler:
    return AgentHandler(
        agent,
        (status, reloader, reporter),
        rejects_on_error=lambda: reloader.config.on_internal_error is InternalErrorAnswer.REJECT,
        observers=tuple(filter(None, (pods.pending, pods.unmatched, pods.device_watch))),
        sources=tuple(filter(None, (pods.device_watch, pods.claims))),
        extensions=tuple(filter(None, (pods.claims, pods.files))),
    )


def _build_runtime_link(
    config: AgentConfig,
    handler: AgentHandler,
    late_starts: LateStarts | None,
    launched: PreinstalledConnection | None,
) -> RuntimeLink:
    if late_starts is not None:
        from nri_numa.cri.link import CRILink

        return CRILink(handler, late_starts, socket_path=config.runtime.cri_socket)
    settings = LinkSettings(
        name=launched.name if launched else config.runtime.plugin_name,
        index=launched.index if launched else parse_plugin_index(config.runtime.plugin_index),
        socket_path=config.runtime.nri_socket,
        descriptor=launched.descriptor if launched else None,
    )
    return NRILink(handler, settings)


def _build_view(
    node: NodeParts,
    agent: Agent,
    pods: PodParts,
    status: LinkStatus,
    late_starts: LateStarts | None,
    watches: UsageWatches,
) -> LiveView:
    from nri_numa.agent import view

    parts = view.ShownParts(
        kubelet=node.kubelet,
        devices=node.devices,
        measured=node.capacity.measured,
        late_starts=late_starts,
        pods=pods.pending,
    )
    about = view.ProcessInfo(__version__, node.name, node.start)
    return view.LiveView(agent, about, status, parts, watches)


# --- The loops ------------------------------------------------------------------------------------


def build_loops(
    config: AgentConfig, node: NodeParts, agent: Agent, link: LinkParts
) -> Mapping[str, LoopFunction]:
    """Build the loops that run beside the link, by name."""
    current, reloader = node.current, link.reloader
    outside, steal = node.capacity
    apply_settings = partial(apply_recomputed_settings, agent, reloader, node.kubelet.configuration)
    read_machine = partial(node.machine.read_machine, agent)
    systemd = SystemdSync(current, agent.cgroups, SystemdScopes())
    reconciler = Reconciler(agent, systemd, link.status, link.link.push_updates, reloader)
    loops: dict[str, LoopFunction] = {
        "reconcile": reconciler.run_periodic_rounds,
        "looks": reconciler.run_checks,
        "systemd": systemd.run_systemd_sync,
        "mover": MemoryMigrator(agent).run_migrations,
        "kubelet's configuration": partial(
            node.kubelet.configuration.watch_config, reloader, apply_settings
        ),
        "hotplug": partial(hotplug.watch_cpu_events, read_machine, report_polling),
    }
    if link.http is not None:
        loops["http"] = link.http.run
    steering, is_enabled = InterruptSteering(config.state_dir), config.interrupts_off_exclusive_cpus
    if is_enabled or steering.needs_restore:
        loops["interrupts"] = partial(steering.run_steering, current, active=is_enabled)
    if config.offline_capacity.file:
        loops["capacity from outside"] = partial(outside.run_monitor, current, apply_settings)
    if link.pods.claims is not None:
        loops["DRA"] = partial(serve_claims_to_kubelet, config, link.pods.claims)
    if config.measured_capacity.mode is not StealTimeMode.OFF:
        loops["steal"] = partial(steal.run_monitor, current, apply_settings)
    return loops
