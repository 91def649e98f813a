"""Starts the HTTP side after the link to the runtime, and keeps it from delaying anything else.

Containers come first: the server is imported (30 ms, 4 MiB) after the link to the runtime stands,
or when it is clear that this takes a while. It lives in a thread with a loop of its own, which
stands still while the loop that answers the runtime is at work: no client, however many requests it
sends, takes more than one small piece of time from a container that is being created. Whatever goes
wrong here is logged and tried again. docs/adr/0017 has the figures, and why it is no process.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from nri_numa import __version__
from nri_numa.config import AgentConfig
from nri_numa.engine.decision import Reading
from nri_numa.errors import ConfigError
from nri_numa.node.agent import Agent
from nri_numa.node.beside_kubelet import BesideKubelet, KubeletSettings
from nri_numa.node.loop import CourteousSelector, Courtesy, CPUShare, GapWatch
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import Metrics

if TYPE_CHECKING:
    from nri_numa.devices.counts import Counted
    from nri_numa.machine.pci import PCIDevice

log = get_logger("http")

WAIT = 2.0
"""Seconds to wait for the link; a busy runtime may take a minute, and /v1/status says why."""
RETRY = 10.0
"""Seconds between two attempts after something went wrong."""
STOP = 2.0
"""Seconds that the end of the process waits for the thread."""
SWITCH = 0.0005
"""Seconds after which a thread must hand on the interpreter's lock when another one waits for it:
what a request of the runtime may have to wait when it comes in while HTTP is at work. Python's own
value is ten times that."""


class LinkFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the daemon knows about its link; see `nri_numa.runtime.LinkState`.

    Attributes:
        active: registered and synchronized.
        unanswered: what the runtime has not answered for too long, as a sentence.
        over_cri: it is reached over CRI, because it has no NRI.
    """

    state: str
    detail: str
    active: bool
    runtime: str = ""
    runtime_version: str = ""
    unanswered: str = ""
    over_cri: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What is shown beside the agent's own state; read in another thread.

    Attributes:
        node_name: of the node, as Kubernetes has it.
        started: Unix time of the start.
        reading: what the kernel had left when it was last read.
        unheard: sentences about annotations of a pod, by its UID, that apply to no container.
        beside: where the kubelet and we disagree.
        kubelet: its configuration.
        devices: the machine's, to be shown with it; None where devices are not read.
        counted: how many devices the kubelet can give, or why that is not known; None where they
            are not counted.
        roots_of_pcie: by NUMA node.
        measured: by NUMA node, capacity factors that were measured and are acted upon.
        late: seconds by which containers were late, by id, replaced as a whole when that changes;
            None where they cannot be late.
        coming: namespace and name of Guaranteed pods that have no container yet.
    """

    version: str = __version__
    node_name: str = ""
    started: float = 0.0
    now: Callable[[], float] = time.time
    link: Callable[[], LinkFacts]
    reading: Callable[[], Reading | None] = lambda: None
    unheard: Callable[[str], list[str]] = lambda uid: []
    beside: BesideKubelet | None = None
    kubelet: KubeletSettings | None = None
    devices: Sequence[PCIDevice] | None = None
    counted: Callable[[], Counted | None] = lambda: None
    roots_of_pcie: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    measured: Callable[[], Mapping[int, float]] = dict
    late: Callable[[], Mapping[str, float] | None] = lambda: None
    coming: Callable[[], Iterable[tuple[str, str]]] = tuple


class Serving:
    """The HTTP server's life; ``watch`` is that of the loop that answers the runtime."""

    def __init__(
        self,
        config: AgentConfig,
        agent: Agent,
        metrics: Metrics,
        sources: Sources,
        watch: GapWatch,
    ) -> None:
        self._config, self._agent, self._metrics = config, agent, metrics
        self._sources, self._watch = sources, watch
        self._share = CPUShare()
        self._settled = asyncio.Event()

    def link_settled(self) -> None:
        """The link stands, or cannot be made now: nothing is gained by waiting longer."""
        self._settled.set()

    async def run(self) -> None:
        """Serve until cancelled."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT):
                await self._settled.wait()
        sys.setswitchinterval(SWITCH)
        courtesy = Courtesy(self._watch, share=self._share)
        loop = asyncio.SelectorEventLoop(CourteousSelector(courtesy))
        stop = asyncio.Event()
        # A daemon: nothing that a client does can keep the process from ending.
        thread = threading.Thread(target=self._live, args=(loop, stop), name="http", daemon=True)
        thread.start()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stop.set)
            await asyncio.to_thread(thread.join, STOP)

    def _live(self, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
        """The thread."""
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._until(stop))

    async def _until(self, stop: asyncio.Event) -> None:
        serving = asyncio.create_task(self._serve_for_ever())
        await stop.wait()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    async def _serve_for_ever(self) -> None:
        said = ""
        while True:
            try:
                await self._serve()
            except ConfigError as error:
                problem = "; ".join(error.problems)
                if problem != said:  # said once, not every ten seconds
                    log.error("no http: containers are placed as usual", problem=problem)
                said = problem
            except Exception as error:
                if repr(error) != said:
                    self._metrics.internal_errors.inc()
                    log.exception("http failed: containers are placed as usual")
                said = repr(error)
            await asyncio.sleep(RETRY)

    async def _serve(self) -> None:
        from nri_numa.http.api import AgentServer
        from nri_numa.node.usage import UsageWatch
        from nri_numa.node.view import LiveView

        gc.freeze()  # what was imported stays for ever
        config, agent, now = self._config, self._agent, self._sources.now
        usage = UsageWatch(agent, config.sysfs_root, config.cgroup_root, now=now)
        rounds = [usage.run()]
        memory = waiting = None
        if config.memory_locality.enabled:
            from nri_numa.node.usage import MemoryWatch

            memory = MemoryWatch(agent, config.memory_locality, config.cgroup_root, now=now)
            rounds.append(memory.run())
        if config.cpu_waiting.enabled:
            from nri_numa.node.usage import WaitingWatch

            waiting = WaitingWatch(agent, config.cpu_waiting, config.cgroup_root, now=now)
            rounds.append(waiting.run())
        watches = [asyncio.create_task(one) for one in rounds]
        try:
            view = LiveView(agent, self._sources, usage=usage, memory=memory, waiting=waiting)
            server = AgentServer(
                config.http,
                view,
                self._metrics,
                version=__version__,
                busy_for=self._watch.busy_for,
                crowded=self._hurry,
            )
            self._metrics.snapshot = view.snapshot
            await server.run()
        finally:
            for watch in watches:
                watch.cancel()

    def _hurry(self, crowded: bool) -> None:
        self._share.hurry = crowded
