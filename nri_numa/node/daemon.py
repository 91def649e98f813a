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
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nri_numa import __version__
from nri_numa import config as configuration
from nri_numa.config import AgentConfig, InternalErrorAnswer, node_name, two_digits
from nri_numa.config.sections import MeasuredMode
from nri_numa.engine.accounting import largest
from nri_numa.engine.decision import Machine
from nri_numa.errors import ConfigError, StateDirectoryBusy, TopologyError
from nri_numa.kubelet.state_files import StateFiles
from nri_numa.machine import hotplug
from nri_numa.machine.cgroups import CgroupReader, CgroupWriter, Scopes
from nri_numa.machine.sysfs import discover
from nri_numa.node.agent import Agent
from nri_numa.node.beside_kubelet import BesideKubelet, KubeletSettings
from nri_numa.node.capacity import OutsideCapacity, StealWatch
from nri_numa.node.claims import claim_book, serve_kubelet
from nri_numa.node.explanations import ExplanationFile
from nri_numa.node.handler import AgentHandler, PendingPods
from nri_numa.node.housekeeping import Housekeeping, Unanswered
from nri_numa.node.links import (
    claimed_socket,
    counted_devices,
    cri_link,
    device_watch,
    known_roots,
    late_starts,
    memory_policies,
    over_cri,
    shown_devices,
)
from nri_numa.node.loop import GapWatch, watched_loop
from nri_numa.node.reconcile import Reconciler
from nri_numa.node.reload import (
    Prepared,
    Rereading,
    look_after_refusals,
    no_kernel_events,
    prepare,
    prepare_aside,
    with_tables,
)
from nri_numa.node.runtime_lock import RuntimeLock
from nri_numa.node.sending import PendingPush, Sender
from nri_numa.node.serving import LinkFacts, Serving, Sources
from nri_numa.node.unmatched import UnmatchedAnnotations
from nri_numa.node.verify import Verifier
from nri_numa.nri.link import LinkSettings, NRILink, Preinstalled, preinstalled_from_environment
from nri_numa.nri.wire.versions import (
    AGENT_EVENTS,
    push_path,
    synchronizes_launched_plugins,
)
from nri_numa.observe import logs
from nri_numa.observe.metrics import Metrics
from nri_numa.observe.notify import Notifier
from nri_numa.runtime import LinkState, PushPath, RefusedForGood, RuntimeInfo, RuntimeLink
from nri_numa.store.checkpoint import CheckpointStore
from nri_numa.store.files import signing_key
from nri_numa.store.journal import state_from
from nri_numa.store.notices import NoticeFile

if TYPE_CHECKING:
    from nri_numa.engine.values.settings import Settings
    from nri_numa.machine.model import Topology
    from nri_numa.node.late import LateStarts

log = logs.get_logger("daemon")

EXIT_OK, EXIT_FAILED, EXIT_UNAVAILABLE = 0, 1, 3


class Daemon:
    """One running agent: its parts, and the loops around them."""

    def __init__(
        self, config: AgentConfig, load: Callable[[str], AgentConfig], watch: GapWatch
    ) -> None:
        """Build the parts that need no event loop.

        Args:
            config: checked.
            watch: knows the gaps of the loop that this will run in.
            load: reads the configuration again, given the text of NRI's Configure request.

        Raises:
            ConfigError: the configuration does not go with this machine.
            TopologyError: the machine cannot be read.
            StateDirectoryBusy: another agent uses the state directory.
        """
        self.config = config
        self._load = load
        self._drop_in = ""
        self.notifier = Notifier()
        self.metrics = Metrics(__version__)
        self.link_state: tuple[LinkState, str] = (LinkState.DISCONNECTED, "not dialled yet")
        self.runtime: RuntimeInfo | None = None
        self.started = time.time()
        self._ready = False
        self._reload_asked = False
        self._reloading: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._watch = watch
        self._counted = counted_devices(config)
        self._rereading = Rereading(config.sysfs_root, self._counted)

        self.metrics.config_read(at=self.started)
        name = node_name(config)

        self.topology = discover(config.sysfs_root)
        for warning in self.topology.warnings:
            log.warning("odd machine", warning=warning)
        problems = configuration.problems(config, self.topology)
        if problems:
            raise ConfigError("configuration", problems)
        self.store = CheckpointStore(
            config.state_dir, identity=identity(config), clock=time.time, metrics=self.metrics
        )
        loaded = self.store.load()
        key, doubts = signing_key(
            config.state_dir, trusted=self.store.trusted, writable=self.store.locked
        )
        self._outside = OutsideCapacity(config.offline_capacity.file, now=time.time)
        if config.offline_capacity.file:
            self._outside.look(self.topology)
        self._steal = StealWatch(config.measured_capacity, config.sysfs_root, self.metrics)
        self._kubelet = KubeletSettings(config.kubelet_root, over=self._lowered)
        self._kubelet.read(config)
        settings = self._kubelet.settings(config, self.topology)
        self._kubelet.tell()
        machine = with_tables(Machine(topology=self.topology, settings=settings, key=key))
        for problem in (*loaded.problems, *doubts):
            self.metrics.checkpoint_errors.inc()
            log.warning("checkpoint", problem=problem)
        state, damaged = state_from(loaded.entries)
        for problem in damaged:
            self.metrics.checkpoint_errors.inc()
            log.warning("checkpoint", problem=problem)

        reader = CgroupReader(config.cgroup_root)
        writer, scopes = CgroupWriter(reader), Scopes()
        self.agent = Agent(
            machine,
            metrics=self.metrics,
            store=self.store,
            now=time.time,
            reading=lambda: self._rereading.memory,
            observe=config.observe,
            later=lambda function: asyncio.get_running_loop().call_soon(function),
            write=writer.write,
            mark_of=reader.mark,
            mark=writer.mark,
            clock=time.monotonic,
        )
        self.agent.restore(state)
        self._beside = BesideKubelet(
            self.agent,
            self.metrics,
            StateFiles(config.kubelet_root),
            now=time.time,
            later=lambda function: asyncio.get_running_loop().call_soon(function),
        )
        self._explanations = ExplanationFile(
            config.state_dir, identity=identity(config), agent=self.agent
        )
        if problem := self._explanations.load():
            log.warning("explanations", problem=problem)
        self._notices = NoticeFile(
            config.state_dir,
            identity=identity(config),
            notices=self.agent.notices,
            trouble=lambda problem: log.warning("notices not saved", problem=problem),
        )
        if problem := self._notices.open(writable=self.store.locked):
            log.warning("notices", problem=problem)
        self.agent.notices.changed = self.agent.notify
        self.unheard = UnmatchedAnnotations(
            lambda: self.agent.machine.settings.prefix,
            time.monotonic,
            lambda function: asyncio.get_running_loop().call_soon(function),
        )
        launched = preinstalled_from_environment(os.environ)
        self._launched = launched is not None
        self._over_cri = over_cri(config, launched=self._launched)
        self._late: LateStarts | None = None
        if self._over_cri:
            self._late = late_starts(self.agent, self.metrics, reader, writer)
        self._devices = device_watch(config, self.agent)
        self._claims = claim_book(
            config,
            name,
            lambda: self.agent.machine,
            lambda: largest(self.agent.machine, self.agent.state),
        )
        if self._claims is not None:
            self._claims.load()
        self._pending_pods = self._pods_to_come() if config.publish.node_resource_topology else None
        self.handler = AgentHandler(
            self.agent,
            self.metrics,
            self,
            reject_on_error=config.on_internal_error is InternalErrorAnswer.REJECT,
            unmatched=self.unheard,
            devices=self._devices,
            claims=self._claims,
            pending=self._pending_pods,
        )
        self.link: RuntimeLink = (
            self._nri_link(config, launched)
            if self._late is None
            else cri_link(config, self.handler, self._late)
        )
        self._unanswered = Unanswered(self.agent, self.metrics, self.link.watch)
        self.sender = Sender(self.agent, writer, self.link.push, self._callable_at_will)
        self._claim = RuntimeLock(claimed_socket(config, launched=self._launched))
        self._claim.share()
        self.reconciler = Reconciler(
            self.agent,
            self.metrics,
            self.sender.send,
            reader=reader,
            scopes=scopes,
            active=self._is_active,
            awaited=lambda container_id: self.verifier.awaits(container_id),
            alone=self.sender.alone,
        )
        self.verifier = Verifier(
            self.agent,
            self.metrics,
            self.link.push,
            reader=reader,
            scopes=scopes,
            writer=writer,
            # Over CRI an answer says nothing of updates: each is a call of its own.
            handled=lambda: 0 if self._over_cri else self.handler.handled,
        )
        self._housekeeping = Housekeeping(
            self.agent,
            self.metrics,
            self.notifier,
            store=self.store,
            claim=self._claim,
            explanations=self._explanations,
            unmatched=self.unheard,
            gaps=watch,
            look=self.link.look,
            rereading=self._rereading,
            pending=PendingPush(self.agent, self.sender),
            unanswered=self._unanswered,
            reader=reader,
        )
        self.serving: Serving | None = None
        if configuration.split_address(config.http.address) or config.http.socket:
            sources = Sources(
                node_name=name,
                started=self.started,
                link=self.link_facts,
                reading=lambda: self._rereading.memory,
                unheard=self.unheard.sentences,
                beside=self._beside,
                kubelet=self._kubelet,
                devices=shown_devices(config),
                counted=self._counted,
                roots_of_pcie=known_roots(config) or {},
                measured=self._steal.acting,
                late=lambda: None if self._late is None else self._late.known,
                coming=self._pending_pods.names if self._pending_pods else tuple,
            )
            self.serving = Serving(config, self.agent, self.metrics, sources, watch)
        log.info(
            "starting",
            version=__version__,
            node=name,
            launched=launched is not None,
            observe=config.observe,
            sysfs_root=config.sysfs_root,
            cpus=str(self.topology.online),
            numa_nodes=str(self.topology.numa_ids),
            remembered=len(state.allocations),
        )

    def _nri_link(self, config: AgentConfig, launched: Preinstalled | None) -> NRILink:
        return NRILink(
            self.handler,
            LinkSettings(
                name=launched.name if launched else config.runtime.plugin_name,
                index=launched.index if launched else two_digits(config.runtime.plugin_index),
                socket_path=config.runtime.nri_socket,
                descriptor=launched.descriptor if launched else None,
                events=AGENT_EVENTS,
            ),
        )

    def _pods_to_come(self) -> PendingPods:
        def later(seconds: float, tell: Callable[[], object]) -> None:
            asyncio.get_running_loop().call_later(seconds, tell)

        return PendingPods(self.agent.notify, time.monotonic, later)

    # --- running ----------------------------------------------------------------------------------

    async def run(self) -> int:
        """Run until a signal, or until the runtime that launched us goes away.

        Returns:
            The exit code.
        """
        loop = asyncio.get_running_loop()
        logs.defer(loop)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._hangup)
        await self._rereading.read_memory(self.agent)
        self._beside.look()
        if self._devices is not None:
            self._devices.start()
        link = asyncio.create_task(self.link.run(), name="link")
        others = [
            asyncio.create_task(
                self._housekeeping.run(lambda: self.config, self._is_active), name="housekeeping"
            ),
            asyncio.create_task(self.reconciler.run(lambda: self.config), name="reconcile"),
            asyncio.create_task(self.verifier.run(), name="verify"),
            asyncio.create_task(self._beside.run(), name="kubelet"),
            asyncio.create_task(
                self._kubelet.run(self.agent, lambda: self.config), name="kubelet's configuration"
            ),
            asyncio.create_task(
                hotplug.watch(partial(self._rereading.look, self.agent), no_kernel_events),
                name="hotplug",
            ),
            asyncio.create_task(
                look_after_refusals(self.agent, partial(self._rereading.look_at_all, self.agent)),
                name="look again",
            ),
        ]
        if self.serving is not None:
            others.append(asyncio.create_task(self.serving.run(), name="http"))
        if self.config.offline_capacity.file:
            outside = self._outside.run(self.agent, lambda: self.config, self._kubelet.settings)
            others.append(asyncio.create_task(outside, name="capacity from outside"))
        if self._claims is not None:
            serving = serve_kubelet(self.config, self._claims)
            others.append(asyncio.create_task(serving, name="DRA"))
        if self.config.measured_capacity.mode is not MeasuredMode.OFF:
            steal = self._steal.run(self.agent, lambda: self.config, self._kubelet.settings)
            others.append(asyncio.create_task(steal, name="steal"))
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        # Start-up made the objects that live for ever; the collector need not visit them again.
        gc.collect()
        gc.freeze()
        # Nor may it run within a request, where it took more than half of a large Synchronize.
        gc.disable()
        # All of this is no gap yet: the link is dialled when it is done.
        loop.call_soon(self._watch.take)
        try:
            await asyncio.wait({link, stop, *others}, return_when=asyncio.FIRST_COMPLETED)
            return self._ended(link, others)
        finally:
            self.notifier.stopping()
            for task in (link, stop, *others):
                task.cancel()
            await asyncio.gather(link, stop, *others, return_exceptions=True)
            if self._devices is not None:
                self._devices.close()
            if self._late is not None:
                await self._late.close()
            await self._explanations.close()
            self._notices.close()
            self.store.close()
            self._claim.close()
            gc.enable()
            log.info("stopped")
            logs.defer(None)

    def _ended(self, link: asyncio.Task[None], others: list[asyncio.Task[None]]) -> int:
        for task in others:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        if link.done() and not link.cancelled():
            error = link.exception()
            if isinstance(error, RefusedForGood):
                log.error("the runtime refuses this plugin for good", error=str(error))
                return EXIT_FAILED
            if error is not None:
                raise error
            log.info("the runtime that launched us closed the link")
        return EXIT_OK

    def link_facts(self) -> LinkFacts:
        """The link at this moment, for the view."""
        state, detail = self.link_state
        return LinkFacts(
            state=state.value,
            detail=detail,
            active=state is LinkState.ACTIVE,
            runtime=self.runtime.name if self.runtime is not None else "",
            runtime_version=self.runtime.version if self.runtime is not None else "",
            unanswered=self._unanswered.sentence,
            over_cri=self._over_cri,
        )

    def _is_active(self) -> bool:
        return self.link_state[0] is LinkState.ACTIVE

    def _callable_at_will(self) -> bool:
        if self._over_cri:
            return True
        return self.runtime is not None and push_path(self.runtime) is PushPath.UPDATE_CONTAINERS

    def _lowered(self, settings: Settings, topology: Topology) -> Settings:
        """These settings with less capacity: as measured, but where others tell it, as they do."""
        measured = self._steal.over(settings, topology, told=self._outside.factors)
        return self._outside.over(measured, topology)

    # --- called by the link ----------------------------------------------------------------------

    def configured(self, info: RuntimeInfo) -> None:
        """Take what the runtime says of itself into account."""
        self.runtime = info
        self.agent.runtime_waits(info.request_timeout)
        policies = memory_policies(
            info,
            os.uname().release,
            over_cri=self._over_cri,
            sysfs_root=Path(self.config.sysfs_root),
        )
        self.agent.machine = self.agent.machine.with_memory_policies(policies)
        self._housekeeping.blind = self._launched and not synchronizes_launched_plugins(info)
        if info.config and info.config != self._drop_in:
            self._drop_in = info.config
            self._apply_drop_in(info.config)

    def _apply_drop_in(self, text: str) -> None:
        """The runtime handed us a configuration: it overrides the file."""
        try:
            # At once: the containers that the runtime tells of next are decided by it.
            prepared = prepare(
                lambda: self._load(text),
                self.config,
                self.agent.machine,
                self._kubelet.settings,
            )
            self._apply(prepared, late="the runtime's drop-in came too late for this key")
        except ConfigError as error:
            self.metrics.config_read(at=None)
            for problem in error.problems:
                log.error("drop-in configuration not used", problem=problem)

    def link_changed(self, state: LinkState, detail: str) -> None:
        """Say where the link stands, and when we are ready."""
        self.link_state = state, detail
        level = log.info if state in (LinkState.ACTIVE, LinkState.CONFIGURED) else log.warning
        if state in (LinkState.REGISTERING, LinkState.STOPPED):
            level = log.info
        level("link", state=state.value, detail=detail)
        if self.serving is not None and state not in (LinkState.REGISTERING, LinkState.CONFIGURED):
            self.serving.link_settled()
        self.agent.notify()
        if state is LinkState.ACTIVE or (state is LinkState.DISCONNECTED and not self._ready):
            # Without the runtime there is nothing to wait for at start: dialling goes on for ever,
            # and systemd would kill a service that never gets ready.
            self.notifier.ready(f"link {state.value}")
            if not self._ready and state is LinkState.ACTIVE:
                log.info("ready", seconds=round(time.time() - self.started, 3))
            elif not self._ready:
                log.info("waiting for the runtime")
            self._ready = True
        else:
            self.notifier.status(f"link {state.value} {detail}".strip())

    # --- signals ----------------------------------------------------------------------------------

    def _hangup(self) -> None:
        self._reload_asked = True
        if self._reloading is None or self._reloading.done():
            self._reloading = asyncio.create_task(self._reload(), name="reload")

    async def _reload(self) -> None:
        """Read the configuration again, once more when it was asked for meanwhile."""
        self.notifier.reloading()
        while self._reload_asked:
            self._reload_asked = False
            base, machine = self.config, self.agent.machine
            try:
                load = partial(self._load, self._drop_in)
                prepared = await prepare_aside(load, base, machine, self._kubelet.settings)
            except ConfigError as error:
                self.metrics.config_read(at=None)
                for problem in error.problems:
                    log.error("configuration not reloaded", problem=problem)
            except Exception:
                self.metrics.config_read(at=None)
                self.metrics.internal_errors.inc()
                log.exception("configuration not reloaded")
            else:
                if prepared.fits(self.config, self.agent.machine.topology):
                    self._apply(prepared)
                else:
                    self._reload_asked = True
        self.notifier.ready("reloaded")

    def _apply(self, new: Prepared, late: str = "this change needs a restart") -> None:
        self.metrics.config_read(at=time.time())
        for key in new.restart:
            log.warning(late, key=key)
        if not new.live:
            log.info("configuration reloaded", changed="")
            return
        config = self.config = new.config
        logs.set_level(config.log.level.value)
        self.agent.observe = config.observe
        self.handler.reject_on_error = config.on_internal_error is InternalErrorAnswer.REJECT
        self.agent.retopology(new.machine)
        log.info("configuration reloaded", changed=", ".join(new.live))


def identity(config: AgentConfig) -> dict[str, str]:
    """What a checkpoint must agree on to be ours: this boot of this machine."""
    boot = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return {"version": __version__, "machine": config.sysfs_root, "boot": boot}


def run(config: AgentConfig, load: Callable[[str], AgentConfig]) -> int:
    """Run the plugin in an event loop of its own.

    Args:
        config: checked configuration.
        load: reads it again, given the text of NRI's Configure request (may be empty).

    Returns:
        Exit code: 0 stopped, 1 failed, 3 the state directory or the machine is not available.

    Raises:
        ConfigError: the configuration does not go with this machine.
    """
    loop, watch = watched_loop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(_run(config, load, watch))


async def _run(config: AgentConfig, load: Callable[[str], AgentConfig], watch: GapWatch) -> int:
    try:
        daemon = Daemon(config, load, watch)
    except StateDirectoryBusy as error:
        log.error("another instance is running", error=str(error))
        return EXIT_UNAVAILABLE
    except TopologyError as error:
        log.error("the machine cannot be read", error=str(error))
        return EXIT_UNAVAILABLE
    return await daemon.run()
