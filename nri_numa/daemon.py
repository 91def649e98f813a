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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nri_numa import __version__, hotplug, logs, statedoc
from nri_numa import config as configuration
from nri_numa.agent import Agent
from nri_numa.cgroups import CgroupReader
from nri_numa.checkpoint import CheckpointStore
from nri_numa.config import AgentConfig, InternalErrorAnswer
from nri_numa.engine.answers import ContainerUpdate
from nri_numa.engine.decision import Machine, Reading
from nri_numa.errors import CheckpointError, ConfigError, StateDirectoryBusy, TopologyError
from nri_numa.kubelet import KubeletWatch
from nri_numa.loop import GapWatch, watched_loop
from nri_numa.metrics import Metrics
from nri_numa.notify import Notifier
from nri_numa.protocol.versions import RuntimeInfo, synchronizes_launched_plugins
from nri_numa.reconcile import Reconciler
from nri_numa.runtime import convert
from nri_numa.runtime.adapter import Adapter
from nri_numa.runtime.handler import LinkState, RegistrationRefused
from nri_numa.runtime.nri import NRILink
from nri_numa.runtime.preinstalled import preinstalled_from_environment
from nri_numa.runtime.push import PushResult
from nri_numa.serving import Serving
from nri_numa.topology.model import MemoryReading, Topology
from nri_numa.topology.sysfs import discover, read_memory, read_online

if TYPE_CHECKING:
    from nri_numa.view import LinkFacts

log = logs.get_logger("daemon")

TICK = 1.0
"""Seconds between two rounds of housekeeping."""
MEMORY_EVERY = 5
HOTPLUG_EVERY = 5
"""Rounds of housekeeping between two looks at memory and at the online CPUs."""
GAPS = 120
"""Rounds that the recent longest gap of the event loop is taken over."""
BLIND_EVERY = 15
"""Rounds between two pictures of the node on runtimes that tell launched plugins nothing."""
PENDING_WAIT = 2
"""Rounds an update waits for a reply to ride on before it is pushed by itself."""

EXIT_OK, EXIT_FAILED, EXIT_UNAVAILABLE = 0, 1, 3


class Daemon:
    """One running agent: its parts, and the loops around them."""

    def __init__(
        self, config: AgentConfig, load: Callable[[str], AgentConfig] | None, watch: GapWatch
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
        self._stop = asyncio.Event()
        self._reading: Reading | None = None
        self._pending_rounds = 0
        self._watch = watch
        self._gaps: deque[float] = deque(maxlen=GAPS)

        self.topology = discover(config.sysfs_root)
        for warning in self.topology.warnings:
            log.warning("odd machine", warning=warning)
        problems = configuration.problems(config, self.topology)
        if problems:
            raise ConfigError("configuration", problems)
        machine = Machine(topology=self.topology, settings=configuration.settings(config))
        # The first container must not wait for tables that every decision needs.
        _ = machine.index, machine.cpu_total, machine.memory_capacity, machine.cpu_capacity

        self.store = CheckpointStore(config.state_dir, identity=identity(config), clock=time.time)
        loaded = self.store.load()
        for problem in loaded.problems:
            self.metrics.checkpoint_errors.inc()
            log.warning("checkpoint", problem=problem)
        state, damaged = statedoc.state_from(loaded.entries)
        for problem in damaged:
            self.metrics.checkpoint_errors.inc()
            log.warning("checkpoint", problem=problem)

        self.agent = Agent(
            machine,
            metrics=self.metrics,
            store=_TimedStore(self.store, self.metrics),
            now=time.time,
            reading=lambda: self._reading,
            observe=config.observe,
            history=config.history.refusals,
            later=lambda function: asyncio.get_running_loop().call_soon(function),
        )
        self.agent.restore(state)
        self.adapter = Adapter(
            self.agent,
            self.metrics,
            reject_on_error=config.on_internal_error is InternalErrorAnswer.REJECT,
            configure=self._configured,
            changed=self._link_changed,
        )
        launched = preinstalled_from_environment(os.environ)
        self._launched = launched is not None
        self._blind = False
        self._look_in = 0
        self.link = NRILink(
            self.adapter,
            name=launched.name if launched else config.runtime.plugin_name,
            index=launched.index if launched else f"{config.runtime.plugin_index}",
            socket_path=config.runtime.nri_socket,
            descriptor=launched.descriptor if launched else None,
            protocol_broken=self.metrics.protocol_errors.inc,
        )
        self.reconciler = Reconciler(
            self.agent,
            self.metrics,
            self._push,
            reader=CgroupReader(config.cgroup_root),
            active=lambda: self.link_state[0] is LinkState.ACTIVE,
        )
        self.serving: Serving | None = None
        if configuration.split_address(config.http.address) is not None:
            self.serving = Serving(
                config.http,
                self.agent,
                self.metrics,
                started=self.started,
                now=time.time,
                link=self.link_facts,
                reading=lambda: self._reading,
            )
        log.info(
            "starting",
            version=__version__,
            launched=launched is not None,
            observe=config.observe,
            sysfs_root=config.sysfs_root,
            cpus=str(self.topology.online),
            numa_nodes=str(self.topology.numa_ids),
            remembered=len(state.allocations),
        )

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
        await self._read_memory()
        link = asyncio.create_task(self.link.run(), name="link")
        others = [
            asyncio.create_task(self._housekeeping(), name="housekeeping"),
            asyncio.create_task(self.reconciler.run(lambda: self.config), name="reconcile"),
            asyncio.create_task(
                KubeletWatch(self.metrics, self.config.kubelet_root).run(), name="kubelet"
            ),
            asyncio.create_task(hotplug.watch(self._look_for_hotplug), name="hotplug"),
        ]
        if self.serving is not None:
            others.append(asyncio.create_task(self.serving.run(), name="http"))
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
            self.store.close()
            gc.enable()
            log.info("stopped")
            logs.defer(None)

    def _ended(self, link: asyncio.Task[None], others: list[asyncio.Task[None]]) -> int:
        for task in others:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        if link.done() and not link.cancelled():
            error = link.exception()
            if isinstance(error, RegistrationRefused):
                log.error("the runtime refuses this plugin for good", error=str(error))
                return EXIT_FAILED
            if error is not None:
                raise error
            log.info("the runtime that launched us closed the link")
        return EXIT_OK

    def link_facts(self) -> LinkFacts:
        """The link at this moment, for the view."""
        from nri_numa.view import LinkFacts

        state, detail = self.link_state
        return LinkFacts(
            state=state.value,
            detail=detail,
            active=state is LinkState.ACTIVE,
            runtime=self.runtime.name if self.runtime is not None else "",
            runtime_version=self.runtime.version if self.runtime is not None else "",
        )

    async def _housekeeping(self) -> None:
        round_number = 0
        while True:
            await asyncio.sleep(TICK)
            round_number += 1
            if round_number % MEMORY_EVERY == 0:
                await self._read_memory()
            if round_number % HOTPLUG_EVERY == 0:
                await self._look_for_hotplug()
            self._compact()
            _collect(round_number)
            await self._look_around()
            await self._push_pending()
            self.notifier.watchdog()
            self._gaps.append(self._watch.take())
            self.metrics.loop_lag(max(self._gaps))

    def _compact(self) -> None:
        try:
            self.agent.flush_store()
            self.store.compact_if_needed()
        except CheckpointError as error:
            # Said once when the write failed; here the retry failed too.
            log.debug("checkpoint not compacted", error=str(error))

    async def _look_around(self) -> None:
        """Learn what runs from a runtime that does not tell the plugins it launched.

        Such a runtime (NRI before 0.7) sends no stop for containers older than itself either, so
        looking once is not enough.
        """
        if not self._blind or self.link_state[0] is not LinkState.ACTIVE:
            return
        self._look_in -= 1
        if self._look_in > 0:
            return
        # The runtime opens its socket only after its plugins are up, so the first tries may fail.
        detail = await self.link.look()
        if detail:
            log.debug("picture of the node not read yet", detail=detail)
        else:
            self._look_in = BLIND_EVERY

    async def _push_pending(self) -> None:
        if not self.agent.has_pending or self.link_state[0] is not LinkState.ACTIVE:
            self._pending_rounds = 0
            return
        self._pending_rounds += 1
        if self._pending_rounds < PENDING_WAIT:
            return
        self._pending_rounds = 0
        updates = self.agent.take_pending()
        result = await self._push(updates)
        if result.ok:
            self.agent.overtaken(updates)
        else:
            log.warning("updates not pushed", count=len(updates), detail=result.detail)
            self.agent.put_back(updates)

    async def _push(self, updates: Sequence[ContainerUpdate]) -> PushResult:
        return await self.link.push(convert.updates(updates))

    async def _read_memory(self) -> None:
        try:
            reading = await asyncio.to_thread(
                read_memory, self.config.sysfs_root, self.agent.machine.topology
            )
        except (TopologyError, OSError) as error:
            if self._reading is not None:
                log.warning("memory cannot be read any more", error=str(error))
            self._reading = None
            return
        self._reading = as_reading(reading)

    async def _look_for_hotplug(self) -> None:
        root = self.config.sysfs_root
        try:
            online = await asyncio.to_thread(read_online, root)
            if online == self.agent.machine.topology.online:
                return
            topology = await asyncio.to_thread(discover, root)
        except (TopologyError, OSError) as error:
            log.warning("machine cannot be read any more", error=str(error))
            return
        self.follow(topology)

    def follow(self, topology: Topology) -> None:
        """CPUs went on- or offline: go on with the machine as it is now."""
        before = self.agent.machine.topology
        log.warning(
            "CPUs changed",
            gone=str(before.online - topology.online),
            new=str(topology.online - before.online),
        )
        self.topology = topology
        self.agent.retopology(Machine(topology=topology, settings=self.agent.machine.settings))

    # --- told by the link -------------------------------------------------------------------------

    def _configured(self, info: RuntimeInfo) -> None:
        self.runtime = info
        self._blind = self._launched and not synchronizes_launched_plugins(info)
        if info.config and info.config != self._drop_in:
            self._drop_in = info.config
            self._apply_drop_in(info.config)

    def _apply_drop_in(self, text: str) -> None:
        """The runtime handed us a configuration: it overrides the file."""
        try:
            self._apply(self._loaded(text), late="the runtime's drop-in came too late for this key")
        except ConfigError as error:
            for problem in error.problems:
                log.error("drop-in configuration not used", problem=problem)

    def _loaded(self, text: str) -> AgentConfig:
        if self._load is not None:
            return self._load(text)
        return configuration.merge_text(self.config, text) if text else self.config

    def _link_changed(self, state: LinkState, detail: str) -> None:
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
            if not self._ready:
                log.info("ready", seconds=round(time.time() - self.started, 3))
            self._ready = True
        else:
            self.notifier.status(f"link {state.value} {detail}".strip())

    # --- signals ----------------------------------------------------------------------------------

    def _hangup(self) -> None:
        self.notifier.reloading()
        try:
            self._apply(self._loaded(self._drop_in))
        except ConfigError as error:
            for problem in error.problems:
                log.error("configuration not reloaded", problem=problem)
        self.notifier.ready("reloaded")

    def _apply(self, new: AgentConfig, late: str = "this change needs a restart") -> None:
        problems = configuration.problems(new, self.agent.machine.topology)
        if problems:
            raise ConfigError("configuration", problems)
        live, restart = configuration.changes(self.config, new)
        for key in restart:
            log.warning(late, key=key)
        if not live:
            log.info("configuration reloaded", changed="")
            return
        # What waits for a restart keeps its old value, so that the next reload names it again.
        new = self.config = configuration.reloaded(self.config, new)
        logs.set_level(new.log.level.value)
        self.agent.observe = new.observe
        self.adapter.reject_on_error = new.on_internal_error is InternalErrorAnswer.REJECT
        self.agent.retopology(
            Machine(topology=self.agent.machine.topology, settings=configuration.settings(new))
        )
        log.info("configuration reloaded", changed=", ".join(live))


class _TimedStore:
    """A checkpoint store whose writes show in the metrics."""

    def __init__(self, store: CheckpointStore, metrics: Metrics) -> None:
        self._store = store
        self._observe = metrics.checkpoint_write.observe

    def record(self, changes: Mapping[str, dict[str, Any] | None]) -> None:
        """Write, and measure it."""
        started = time.perf_counter()
        self._store.record(changes)
        self._observe(time.perf_counter() - started)


def _collect(round_number: int) -> None:
    """Look for garbage between requests; the older it is, the more seldom, as the collector does.

    The youngest objects are those of one second. Everything takes 20 ms with 1,000 containers.
    """
    gc.collect(2 if round_number % 600 == 0 else 1 if round_number % 10 == 0 else 0)


def as_reading(memory: MemoryReading) -> Reading:
    """Reduce what sysfs says to what decisions use."""
    return Reading(
        memory={i: n.available_bytes for i, n in memory.numa_nodes.items()},
        hugepages={i: dict(n.free_hugepages) for i, n in memory.numa_nodes.items()},
    )


def identity(config: AgentConfig) -> dict[str, str]:
    """What a checkpoint must agree on to be ours: this boot of this machine."""
    boot = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return {"version": __version__, "machine": config.sysfs_root, "boot": boot}


def run(config: AgentConfig, load: Callable[[str], AgentConfig] | None = None) -> int:
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


async def _run(
    config: AgentConfig, load: Callable[[str], AgentConfig] | None, watch: GapWatch
) -> int:
    try:
        daemon = Daemon(config, load, watch)
    except StateDirectoryBusy as error:
        log.error("another instance is running", error=str(error))
        return EXIT_UNAVAILABLE
    except TopologyError as error:
        log.error("the machine cannot be read", error=str(error))
        return EXIT_UNAVAILABLE
    return await daemon.run()
