"""The composition root: builds every object once, runs them, and takes them down.

Start-up is one line: configuration → topology → checkpoint → dial → register → configure →
synchronize → ``READY=1``; a lost link re-enters at *dial*.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nri_numa import __version__
from nri_numa import config as configuration
from nri_numa.agent.assigned_files import AssignedFiles
from nri_numa.agent.build import build_agent
from nri_numa.agent.capacity import CapacityFactors, ExternalCapacity, StealWatch
from nri_numa.agent.claims import build_claim_store, serve_claims_to_kubelet
from nri_numa.agent.current_state import CurrentState
from nri_numa.agent.drift_table import DriftTable
from nri_numa.agent.handler import AgentHandler, ContainerDevices, LinkObserver, PendingPods
from nri_numa.agent.interrupts import InterruptSteering
from nri_numa.agent.kubelet_sync import KubeletConfigWatch, KubeletSync
from nri_numa.agent.links import (
    NodeDevices,
    RuntimeConnection,
    is_reached_over_cri,
    runtime_lock_socket,
    supported_memory_policies,
)
from nri_numa.agent.loop import (
    Clock,
    HeapReleaser,
    LoopMonitor,
    collect_generation,
    new_monitored_loop,
)
from nri_numa.agent.memory_migration import MemoryMigrator, can_move_memory
from nri_numa.agent.reconcile import Reconciler
from nri_numa.agent.reload import (
    MachineReloader,
    PreparedConfig,
    build_tables,
    prepare_config,
    prepare_in_thread,
    report_polling,
)
from nri_numa.agent.runtime_lock import RuntimeLock
from nri_numa.agent.serving import HTTPThread
from nri_numa.agent.systemd_sync import SystemdSync
from nri_numa.agent.unmatched_annotations import UnmatchedAnnotations
from nri_numa.config import (
    AgentConfig,
    InternalErrorAnswer,
    parse_duration,
    parse_plugin_index,
)
from nri_numa.config.sections import StealTimeMode
from nri_numa.engine.node_model import NodeModel
from nri_numa.errors import ConfigError, RuntimeBusy, StateDirectoryBusy, TopologyError
from nri_numa.kubelet.configuration import registered_node_name
from nri_numa.kubelet.state_files import KubeletStateFiles
from nri_numa.machine import hotplug
from nri_numa.machine.cgroups import CgroupReader, CgroupWriter, SystemdScopes
from nri_numa.machine.sysfs import discover_topology
from nri_numa.nri.link import LinkSettings, NRILink, preinstalled_from_environment
from nri_numa.observe import logs
from nri_numa.observe.metrics import Metrics
from nri_numa.observe.notify import SystemdNotifier
from nri_numa.runtime import LinkState, PermanentlyRejected, RuntimeInfo, RuntimeLink
from nri_numa.runtime_profile import profile_of
from nri_numa.store.checkpoint import CheckpointStore
from nri_numa.store.files import load_or_create_signing_key
from nri_numa.store.history_file import HistoryFile
from nri_numa.store.journal import state_from

if TYPE_CHECKING:
    from nri_numa.agent.late_starts import LateStarts
    from nri_numa.agent.usage import UsageWatches
    from nri_numa.agent.view import LiveView

log = logs.get_logger("daemon")

EXIT_OK, EXIT_FAILED, EXIT_UNAVAILABLE = 0, 1, 3
PERIODIC_INTERVAL_S: Final = 1.0
"""Seconds between two rounds of what is done beside requests."""
ROUNDS_BETWEEN_MEMORY_READS: Final = 5
"""Rounds between two looks at memory and at what changes on a machine."""
ROUNDS_BETWEEN_HISTORY_SAVES: Final = 10
"""Rounds between two looks at whether there is new history to save."""
LOOP_GAP_SAMPLES: Final = 120
"""Rounds that the recent longest gap of the event loop is taken over."""
MAX_DECIDED_REQUESTS: Final = 1024
"""Requests kept for spans, about a megabyte: `nri-numa publish` reads them within two seconds."""
ROUNDS_BETWEEN_RESYNCHRONIZES: Final = 15
"""Rounds between two pictures of the node where the runtime gives launched plugins none."""


class Daemon(LinkObserver):
    """One running agent: its parts, and the loops around them.

    Attributes:
        config: in force.
    """

    def __init__(
        self, config: AgentConfig, load: Callable[[str], AgentConfig], gaps: LoopMonitor
    ) -> None:
        """Build the parts that need no event loop.

        ``load`` reads the configuration again, given the text of NRI's Configure request; ``gaps``
        are those of the loop that this will run in.

        Raises:
            ConfigError: the configuration does not go with this machine.
            TopologyError: the machine cannot be read.
            StateDirectoryBusy: another agent uses the state directory.
        """
        self.config = config
        self._load = load
        self._gaps = gaps
        self._drop_in = self._contest = ""
        self._ready = self._reload_requested = self._blind = False
        self._reloading: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._heap = HeapReleaser()
        self.notifier = SystemdNotifier()
        self.metrics = metrics = Metrics(__version__)
        self.clock = clock = Clock()
        started = clock.time()
        metrics.record_config_reload(at=started)
        name = config.node_name or registered_node_name(config.kubelet_root)

        topology = discover_topology(config.sysfs_root)
        for warning in topology.warnings:
            log.warning("odd machine", warning=warning)
        if problems := configuration.validate_config(config, topology):
            raise ConfigError("configuration", problems)
        who = checkpoint_identity(config)
        self.store = CheckpointStore(
            config.state_dir, identity=who, clock=clock.time, metrics=metrics
        )
        loaded = self.store.load()
        key, doubts = load_or_create_signing_key(
            config.state_dir, trusted=self.store.trusted, writable=self.store.has_lock
        )
        state, damaged = state_from(loaded.entries)
        for problem in (*loaded.problems, *doubts, *damaged):
            metrics.checkpoint_errors.inc()
            log.warning("checkpoint", problem=problem)

        self._devices = NodeDevices(config)
        self._outside = ExternalCapacity(config.offline_capacity.file, clock)
        if config.offline_capacity.file:
            self._outside.refresh_capacity(topology)
        self._steal = StealWatch(config.measured_capacity, config.sysfs_root, metrics, clock)
        capacity = CapacityFactors(self._outside, self._steal)
        self._kubelet = KubeletConfigWatch(config.kubelet_root, capacity)
        self._kubelet.read_config(config)
        settings = self._kubelet.settings_with_kubelet_config(config, topology)
        self._kubelet.report_config()

        current = CurrentState(
            build_tables(NodeModel(topology=topology, settings=settings, key=key)),
            self.store,
            clock,
            observe=config.observe,
        )
        current.restore_state(state)
        self._rereading = MachineReloader(
            config.sysfs_root, current, self._devices.device_counts, clock
        )
        writer = CgroupWriter(CgroupReader(config.cgroup_root))
        drift = DriftTable(metrics, clock, current.notify)
        launched = preinstalled_from_environment(os.environ)
        self._launched = launched is not None
        by_cri = is_reached_over_cri(config, launched=self._launched)
        self._beside = KubeletSync(
            current,
            drift,
            metrics,
            KubeletStateFiles(config.kubelet_root),
            self._kubelet,
            clock,
        )
        self.agent = agent = build_agent(
            current,
            drift,
            writer,
            metrics,
            clock,
            kubelet=self._beside,
            moves_memory=can_move_memory(writer.reader),
            sees_starts=not by_cri,
            max_decided_requests=MAX_DECIDED_REQUESTS if config.publish.otlp_endpoint else 0,
        )
        self._history_file = HistoryFile(config.state_dir, identity=who, history=agent.history)
        if problem := self._history_file.restore_and_open(
            state.allocations, writable=self.store.has_lock
        ):
            log.warning("history", problem=problem)
        self._unmatched = UnmatchedAnnotations(agent, clock)
        self._device_watch = self._devices.new_device_watch(current)
        self._claims = build_claim_store(config, name, current)
        if self._claims is not None:
            self._claims.load()
        publishes = config.publish.node_resource_topology
        self._pending_pods = PendingPods(agent, clock) if publishes else None

        devices = [ContainerDevices(self._device_watch)] if self._device_watch else []
        claims = [self._claims] if self._claims else []
        files = (
            [AssignedFiles(config.state_dir, current, clock)]
            if config.assigned_files and self.store.trusted
            else []
        )
        self.handler = AgentHandler(
            agent,
            metrics,
            self,
            rejects_on_error=lambda: self.config.on_internal_error is InternalErrorAnswer.REJECT,
            observers=[
                *([self._pending_pods] if self._pending_pods else []),
                self._unmatched,
                *devices,
            ],
            sources=[*devices, *claims],
            extensions=[*claims, *files],
        )
        self._late: LateStarts | None = None
        self.link: RuntimeLink
        if by_cri:
            from nri_numa.agent.late_starts import LateStarts
            from nri_numa.cri.link import CRILink

            self._late = LateStarts(agent, metrics, writer.reader, clock)
            socket_path = config.runtime.cri_socket
            self.link = CRILink(self.handler, self._late, socket_path=socket_path)
        else:
            link_settings = LinkSettings(
                name=launched.name if launched else config.runtime.plugin_name,
                index=launched.index
                if launched
                else parse_plugin_index(config.runtime.plugin_index),
                socket_path=config.runtime.nri_socket,
                descriptor=launched.descriptor if launched else None,
            )
            self.link = NRILink(self.handler, link_settings)
        self.runtime = RuntimeConnection(
            current, metrics, self.handler, self.link, over_cri=by_cri, clock=clock
        )
        self._lock = RuntimeLock(runtime_lock_socket(config, launched=self._launched))
        self._systemd = SystemdSync(current, agent.cgroups, SystemdScopes(), clock)
        self.reconciler = Reconciler(
            current,
            agent.cgroups,
            self._systemd,
            drift,
            self.runtime,
            notices=agent.history.notices,
            metrics=metrics,
            clock=clock,
        )
        self._mover = MemoryMigrator(agent, metrics, clock)
        self.serving: HTTPThread | None = None
        if configuration.split_address(config.http.address) or config.http.socket:
            self.serving = HTTPThread(
                config, agent, metrics, partial(self._new_view, name), clock=clock, gaps=gaps
            )
        log.info(
            "starting",
            version=__version__,
            node=name,
            **({"node_group": config.node_group} if config.node_group else {}),
            launched=self._launched,
            observe=config.observe,
            sysfs_root=config.sysfs_root,
            cpus=str(topology.online),
            numa_nodes=str(topology.numa_ids),
            remembered=len(state.allocations),
        )
        self._started = started

    # --- running ----------------------------------------------------------------------------------

    async def run(self) -> int:
        """Run until a signal, or until the runtime that launched us goes away; gives the exit code.

        Everything that runs is in `_loops`.
        """
        loop = asyncio.get_running_loop()
        logs.defer_formatting(loop)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._on_sighup)
        await self._rereading.read_memory()
        self.agent.apply_grants(self._beside.refresh_kubelet_grants())
        devices = self._device_watch
        if devices is not None:
            devices.start()
        link = asyncio.create_task(self._run_link(), name="link")
        others = [
            asyncio.create_task(run, name=name) for name, run in self._background_loops().items()
        ]
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        # Start-up made the objects that live for ever; the collector need not visit them again.
        gc.collect()
        gc.freeze()
        # Nor may it run within a request, where it took more than half of a large Synchronize.
        gc.disable()
        # All of this is no gap yet: the link is dialled when it is done.
        loop.call_soon(self._gaps.pop_longest_gap)
        try:
            await asyncio.wait({link, stop, *others}, return_when=asyncio.FIRST_COMPLETED)
            return self._exit_code(link, others)
        finally:
            self.notifier.notify_stopping()
            for task in (link, stop, *others):
                task.cancel()
            await asyncio.gather(link, stop, *others, return_exceptions=True)
            if devices is not None:
                devices.close()
            if self._late is not None:
                await self._late.close()
            await self._history_file.save_last_changes()
            self._history_file.close()
            self.store.close()
            self._lock.close()
            gc.enable()
            log.info("stopped")
            logs.defer_formatting(None)

    async def _run_link(self) -> None:
        """Run the link, once no other agent works on the runtime."""
        while problem := self._lock_runtime():
            if problem != self.runtime.status[1]:
                self.handler.on_link_changed(LinkState.DISCONNECTED, problem)
            await self.clock.sleep(PERIODIC_INTERVAL_S)
        await self.link.run()

    def _lock_runtime(self) -> str:
        """Who else works on the runtime, as a sentence; empty while it is ours or only observed.

        What was only observed is put right once it need not be any more.
        """
        problem = ""
        if self.config.observe:
            self._lock.close()
        else:
            try:
                self._lock.acquire()
            except RuntimeBusy as error:
                problem = str(error)
        if problem and problem != self._contest:
            log.error("another agent works on this runtime", problem=problem)
        self._contest = problem
        current = self.agent.current
        before = current.observe
        current.set_observe(self.config.observe or bool(problem))
        if before and not current.observe:
            self.agent.cgroups.request_check(self.agent.containers.cgroup_places)
        return problem

    def _background_loops(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What runs beside the link, by name, until it is cancelled."""
        agent, config, reread = self.agent, self.config, self._rereading
        loops: dict[str, Coroutine[Any, Any, None]] = {
            "every second": self._run_periodic(),
            "reconcile": self.reconciler.run_periodic_rounds(self),
            "looks": self.reconciler.run_checks(self),
            "systemd": self._systemd.run_systemd_sync(),
            "mover": self._mover.run(),
            "kubelet's configuration": self._kubelet.watch_config(self),
            "hotplug": hotplug.watch_cpu_events(
                partial(reread.read_machine, agent), report_polling
            ),
        }
        if self.serving is not None:
            loops["http"] = self.serving.run()
        interrupts, keep_off = (
            InterruptSteering(config.state_dir),
            config.interrupts_off_exclusive_cpus,
        )
        if keep_off or interrupts.needs_restore:
            loops["interrupts"] = interrupts.run_steering(
                agent.current, self.clock, wanted=keep_off
            )
        if config.offline_capacity.file:
            loops["capacity from outside"] = self._outside.run(self, self._kubelet)
        if self._claims is not None:
            loops["DRA"] = serve_claims_to_kubelet(config, self._claims)
        if config.measured_capacity.mode is not StealTimeMode.OFF:
            loops["steal"] = self._steal.run(self, self._kubelet)
        return loops

    def _exit_code(self, link: asyncio.Task[None], others: list[asyncio.Task[None]]) -> int:
        for task in others:
            if task.done():
                task.result()  # raises what it failed with, also that it was cancelled
        if link.done() and not link.cancelled():
            error = link.exception()
            if isinstance(error, PermanentlyRejected):
                log.error("the runtime refuses this plugin for good", error=str(error))
                return EXIT_FAILED
            if error is not None:
                raise error
            log.info("the runtime that launched us closed the link")
        return EXIT_OK

    async def _run_periodic(self) -> None:
        """What is done beside requests: each part is short, or happens in a thread."""
        agent, gaps = self.agent, deque[float](maxlen=LOOP_GAP_SAMPLES)
        number = look_in = refused = 0
        while True:
            await self.clock.sleep(PERIODIC_INTERVAL_S)
            number += 1
            if number % ROUNDS_BETWEEN_MEMORY_READS == 0 or agent.history.rejected_count != refused:
                # One that was refused is not helped, but the kubelet tries again, and then what was
                # freed or added in the meantime counts.
                refused = agent.history.rejected_count
                await self._rereading.read_memory()
                await self._rereading.read_machine(agent)
                agent.reservations.release_expired()
            agent.apply_grants(self._beside.refresh_kubelet_grants())
            self._beside.check_conflicts()
            self.store.retry_or_compact()
            self._lock_runtime()
            if number % ROUNDS_BETWEEN_HISTORY_SAVES == 0:
                self._history_file.save_soon()
                self._unmatched.report_settled()
            collect_generation(number)
            self._heap.release_if_grown()
            if self._blind and self.runtime.is_synchronized:
                # NRI before 0.7 gives the plugins that it launched no picture of what runs, and no
                # stop of what is older than they are either. It opens its socket only after its
                # plugins are up, so the first tries may fail.
                look_in -= 1
                if look_in <= 0 and not await self.link.ensure_containers_reported():
                    look_in = ROUNDS_BETWEEN_RESYNCHRONIZES
            self.runtime.report_unanswered_calls(parse_duration(self.config.runtime.hung_after))
            self.notifier.notify_watchdog()
            gaps.append(self._gaps.pop_longest_gap())
            self.metrics.record_loop_lag(max(gaps))

    # --- called by the link -----------------------------------------------------------------------

    def _new_view(self, node: str, watches: UsageWatches) -> LiveView:
        from nri_numa.agent import view

        more = view.OptionalParts(
            kubelet=self._beside,
            devices=self._devices,
            measured=self._steal,
            late_starts=self._late,
            pods=self._pending_pods,
        )
        about = view.ProcessInfo(__version__, node, self._started)
        return view.LiveView(self.agent, about, self.runtime, more, watches, self.clock)

    def on_runtime_configured(self, info: RuntimeInfo) -> None:
        """Take what the runtime says of itself into account."""
        self.runtime.record_runtime(info)
        policies = supported_memory_policies(
            info,
            os.uname().release,
            over_cri=self.runtime.over_cri,
            sysfs_root=Path(self.config.sysfs_root),
        )
        self.agent.current.set_runtime(policies, info.request_timeout)
        self._blind = self._launched and not profile_of(info).synchronizes_launched
        if info.config and info.config != self._drop_in:
            self._drop_in = info.config
            self._apply_drop_in(info.config)

    def _apply_drop_in(self, text: str) -> None:
        """The runtime handed us a configuration: it overrides the file."""
        try:
            # At once: the containers that the runtime names next are decided by it.
            machine = self.agent.current.machine
            prepared = prepare_config(lambda: self._load(text), self.config, machine, self._kubelet)
            self._apply_config(prepared, late="the runtime's drop-in came too late for this key")
        except ConfigError as error:
            self._report_bad_drop_in(error, "drop-in configuration not used")

    def _report_bad_drop_in(self, error: ConfigError, event: str) -> None:
        self.metrics.record_config_reload(at=None)
        for problem in error.problems:
            log.error(event, file=error.source, problem=problem)

    def on_link_changed(self, state: LinkState, detail: str) -> None:
        """Say where the link stands, and when we are ready."""
        self.runtime.record_link_state(state, detail)
        level = log.info if state in (LinkState.ACTIVE, LinkState.CONFIGURED) else log.warning
        if state in (LinkState.REGISTERING, LinkState.STOPPED):
            level = log.info
        level("link", state=state.value, detail=detail)
        if self.serving is not None and state not in (LinkState.REGISTERING, LinkState.CONFIGURED):
            self.serving.allow_start()
        self.agent.current.notify()
        if state is LinkState.ACTIVE or (state is LinkState.DISCONNECTED and not self._ready):
            # Without the runtime there is nothing to wait for at start: dialling goes on for ever,
            # and systemd would kill a service that never gets ready.
            self.notifier.notify_ready(f"link {state.value}")
            if not self._ready and state is LinkState.ACTIVE:
                log.info("ready", seconds=round(self.clock.time() - self._started, 3))
            elif not self._ready:
                log.info("waiting for the runtime")
            self._ready = True
        else:
            self.notifier.notify_status(f"link {state.value} {detail}".strip())

    # --- signals ----------------------------------------------------------------------------------

    def _on_sighup(self) -> None:
        self._reload_requested = True
        if self._reloading is None or self._reloading.done():
            self._reloading = asyncio.create_task(self._reload_config(), name="reload")

    async def _reload_config(self) -> None:
        """Read the configuration again, once more when it was requested meanwhile."""
        self.notifier.notify_reloading()
        while self._reload_requested:
            self._reload_requested = False
            load = partial(self._load, self._drop_in)
            machine = self.agent.current.machine
            try:
                prepared = await prepare_in_thread(load, self.config, machine, self._kubelet)
            except ConfigError as error:
                self._report_bad_drop_in(error, "configuration not reloaded")
            except Exception:
                self.metrics.record_config_reload(at=None)
                self.metrics.internal_errors.inc()
                log.exception("configuration not reloaded")
            else:
                # Of a machine that has changed since, capacity factors may have, too.
                if self.agent.current.machine is machine:
                    self._apply_config(prepared)
                else:
                    self._reload_requested = True
        self.notifier.notify_ready("reloaded")

    def _apply_config(self, new: PreparedConfig, late: str = "this change needs a restart") -> None:
        self.metrics.record_config_reload(at=self.clock.time())
        for key in new.restart:
            log.warning(late, key=key)
        if not new.live:
            log.info("configuration reloaded", changed="")
            return
        config = self.config = new.config
        logs.set_level(config.log.level.value)
        self._lock_runtime()
        self.agent.apply_node_model(new.machine)
        log.info("configuration reloaded", changed=", ".join(new.live))


def checkpoint_identity(config: AgentConfig) -> dict[str, str]:
    """What a checkpoint must agree on to be ours: this boot of this machine."""
    boot = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return {"version": __version__, "machine": config.sysfs_root, "boot": boot}


def run_daemon(config: AgentConfig, load: Callable[[str], AgentConfig]) -> int:
    """Run the plugin in an event loop of its own; arguments and errors as of `Daemon`.

    Gives the exit code: 0 stopped, 1 failed, 3 the state directory or the machine is not available.
    """
    loop, gaps = new_monitored_loop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(_run_new_daemon(config, load, gaps))


async def _run_new_daemon(
    config: AgentConfig, load: Callable[[str], AgentConfig], gaps: LoopMonitor
) -> int:
    try:
        daemon = Daemon(config, load, gaps)
    except StateDirectoryBusy as error:
        log.error("another instance is running", error=str(error))
        return EXIT_UNAVAILABLE
    except TopologyError as error:
        log.error("the machine cannot be read", error=str(error))
        return EXIT_UNAVAILABLE
    return await daemon.run()
