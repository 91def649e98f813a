"""Life of the parts that `nri_numa.agent.build` makes: start, periodic work, end.

Start-up is one line: configuration → topology → checkpoint → dial → register → configure →
synchronize → ``READY=1``; a lost link re-enters at *dial*.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from nri_numa import __version__
from nri_numa.agent.agent import Agent
from nri_numa.agent.build import (
    LinkParts,
    LoopFunction,
    NodeParts,
    build_link,
    build_loops,
    build_node,
    restore_history,
)
from nri_numa.agent.links import is_reached_over_cri
from nri_numa.agent.loop import (
    Clock,
    HeapReleaser,
    LoopMonitor,
    collect_generation,
    new_monitored_loop,
)
from nri_numa.agent.memory_migration import can_move_memory
from nri_numa.config import AgentConfig, parse_duration
from nri_numa.errors import StateDirectoryBusy, TopologyError
from nri_numa.machine.cgroups import CgroupReader, CgroupWriter
from nri_numa.nri.link import preinstalled_from_environment
from nri_numa.observe import logs
from nri_numa.observe.metrics import Metrics
from nri_numa.runtime import LinkState, PermanentlyRejected
from nri_numa.store.history_file import HistoryFile

log = logs.get_logger("daemon")

EXIT_OK, EXIT_FAILED, EXIT_UNAVAILABLE = 0, 1, 3
PERIODIC_INTERVAL_S: Final = 1.0
"""Seconds between two rounds of periodic work."""
ROUNDS_BETWEEN_MEMORY_READS: Final = 5
"""Rounds between two reads of memory and machine."""
ROUNDS_BETWEEN_HISTORY_SAVES: Final = 10
"""Rounds between two saves of new history."""
LOOP_GAP_SAMPLES: Final = 120
"""Rounds that the recent longest gap of the event loop is taken over."""
MAX_DECIDED_REQUESTS: Final = 1024
"""Requests stored for spans, about a megabyte: `nri-numa publish` reads them within 2 s."""
ROUNDS_BETWEEN_RESYNCHRONIZES: Final = 15
"""Rounds between two one-shot synchronizations if launched plugins get none."""


class Daemon:
    """One running agent: start, signals and end of its parts, and periodic work."""

    def __init__(
        self,
        node: NodeParts,
        agent: Agent,
        history_file: HistoryFile,
        link: LinkParts,
        loops: Mapping[str, LoopFunction],
        gaps: LoopMonitor,
    ) -> None:
        self.node, self.agent, self.link = node, agent, link
        self._history_file, self._loops, self._gaps = history_file, loops, gaps
        self._heap = HeapReleaser()
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Run until a signal or the end of the runtime that launched it; returns the exit code.

        Everything that runs is in `nri_numa.agent.build.build_loops`, except for the link and the
        periodic work.
        """
        loop = asyncio.get_running_loop()
        logs.defer_formatting(loop)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self.link.reloader.request_reload)
        await self.node.machine.read_memory()
        self.agent.apply_grants(self.node.kubelet.refresh_kubelet_grants())
        if self.link.pods.device_watch is not None:
            self.link.pods.device_watch.start()
        link = asyncio.create_task(self._run_link(), name="link")
        loops = {"every second": self._run_periodic, **self._loops}
        tasks = [asyncio.create_task(run(), name=name) for name, run in loops.items()]
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        # Objects made at start-up live until the end; the collector need not visit them again.
        gc.collect()
        gc.freeze()
        # It must not run within a request either, where it took half of a large Synchronize.
        gc.disable()
        # Start-up is not a gap: the link is dialled afterwards.
        loop.call_soon(self._gaps.pop_longest_gap)
        try:
            await asyncio.wait({link, stop, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            return _exit_code(link, tasks)
        finally:
            self.link.notifier.notify_stopping()
            for task in (link, stop, *tasks):
                task.cancel()
            await asyncio.gather(link, stop, *tasks, return_exceptions=True)
            await self._close_parts()
            gc.enable()
            log.info("agent stopped")
            logs.defer_formatting(None)

    async def _close_parts(self) -> None:
        if self.link.pods.device_watch is not None:
            self.link.pods.device_watch.close()
        if self.link.late_starts is not None:
            await self.link.late_starts.close()
        await self._history_file.save_last_changes()
        self._history_file.stop_writing()
        self.node.current.store.close()
        self.link.ownership.close()

    async def _run_link(self) -> None:
        """Run the link, once no other agent works on the runtime."""
        link = self.link
        while problem := link.ownership.update_observe(link.reloader.config.observe):
            if problem != link.status.status[1]:
                link.handler.on_link_changed(LinkState.DISCONNECTED, problem)
            await self.node.current.clock.sleep(PERIODIC_INTERVAL_S)
        await link.link.run()

    async def _run_periodic(self) -> None:
        """Do the periodic work; each part is short, or runs in a thread."""
        node, agent, link = self.node, self.agent, self.link
        gaps = deque[float](maxlen=LOOP_GAP_SAMPLES)
        number = resynchronize_in = rejected_count = 0
        while True:
            await node.current.clock.sleep(PERIODIC_INTERVAL_S)
            number += 1
            if (
                number % ROUNDS_BETWEEN_MEMORY_READS == 0
                or agent.history.rejected_count != rejected_count
            ):
                # This does not help the rejected container, but the kubelet retries, and by then
                # freed or added resources count.
                rejected_count = agent.history.rejected_count
                await node.machine.read_memory()
                await node.machine.read_machine(agent)
                agent.reservations.release_expired()
            agent.apply_grants(node.kubelet.refresh_kubelet_grants())
            node.kubelet.check_conflicts(agent.drift.known)
            node.current.store.retry_or_compact()
            config = link.reloader.config
            link.ownership.update_observe(config.observe)
            if number % ROUNDS_BETWEEN_HISTORY_SAVES == 0:
                self._history_file.save_soon()
                link.pods.unmatched.report_settled()
            collect_generation(number)
            self._heap.release_if_grown()
            if link.status.needs_resynchronize:
                # NRI opens its socket only after its plugins are up, so the first tries may fail.
                resynchronize_in -= 1
                if resynchronize_in <= 0 and not await link.link.ensure_containers_reported():
                    resynchronize_in = ROUNDS_BETWEEN_RESYNCHRONIZES
            link.status.report_unanswered_calls(
                link.link.watch, parse_duration(config.runtime.registration_timeout)
            )
            link.notifier.notify_watchdog()
            gaps.append(self._gaps.pop_longest_gap())
            agent.metrics.record_loop_lag(max(gaps))


def _exit_code(link: asyncio.Task[None], tasks: list[asyncio.Task[None]]) -> int:
    for task in tasks:
        if task.done():
            task.result()  # raises its exception, or that it was cancelled
    if link.done() and not link.cancelled():
        error = link.exception()
        if isinstance(error, PermanentlyRejected):
            log.error("plugin rejected by runtime", problem=str(error))
            return EXIT_FAILED
        if error is not None:
            raise error
        log.info("link closed by runtime")
    return EXIT_OK


def build_daemon(
    config: AgentConfig, load: Callable[[str], AgentConfig], gaps: LoopMonitor
) -> Daemon:
    """Build the parts that need no event loop.

    ``load`` reads the configuration again, given the text of NRI's Configure request; ``gaps``
    monitors the loop that this will run in. Errors are those of `nri_numa.agent.build.build_node`.
    """
    metrics = Metrics(__version__)
    node = build_node(config, metrics, Clock())
    launched = preinstalled_from_environment(os.environ)
    over_cri = is_reached_over_cri(config, launched=launched is not None)
    restored_count = len(node.current.state.allocations)
    writer = CgroupWriter(CgroupReader(config.cgroup_root))
    agent = Agent(
        node.current,
        writer,
        metrics,
        kubelet=node.kubelet,
        moves_memory=can_move_memory(writer.reader),
        sees_starts=not over_cri,
        max_decided_requests=MAX_DECIDED_REQUESTS if config.publish.otlp_endpoint else 0,
    )
    history_file = restore_history(config, node, agent)
    link = build_link(config, load, node, agent, gaps, launched=launched, over_cri=over_cri)
    loops = build_loops(config, node, agent, link)
    topology = node.current.machine.topology
    log.info(
        "agent starting",
        version=__version__,
        node=node.name,
        **({"node_group": config.node_group} if config.node_group else {}),
        launched=launched is not None,
        observe=config.observe,
        sysfs_root=config.sysfs_root,
        cpus=str(topology.online),
        numa_nodes=str(topology.numa_ids),
        numa_node_count=len(topology.numa_ids),
        restored=restored_count,
    )
    return Daemon(node, agent, history_file, link, loops, gaps)


def run_daemon(config: AgentConfig, load: Callable[[str], AgentConfig]) -> int:
    """Run the agent in a new event loop; arguments and errors as of `build_daemon`.

    Returns the exit code: 0 stopped, 1 failed, 3 state directory or machine not available.
    """
    loop, gaps = new_monitored_loop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        try:
            daemon = build_daemon(config, load, gaps)
        except StateDirectoryBusy as error:
            log.error("agent not started", problem=str(error))
            return EXIT_UNAVAILABLE
        except TopologyError as error:
            log.error("machine unreadable", problem=str(error))
            return EXIT_UNAVAILABLE
        return runner.run(daemon.run())
