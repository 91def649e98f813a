"""Brings the HTTP side up when it is nobody's turn, and keeps it from harming anybody.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from nri_numa import __version__
from nri_numa.config import HTTP
from nri_numa.engine.decision import Reading
from nri_numa.errors import ConfigError
from nri_numa.node.agent import Agent
from nri_numa.node.beside_kubelet import BesideKubelet
from nri_numa.node.cpu_share import CPUShare
from nri_numa.node.kubelet_settings import KubeletSettings
from nri_numa.node.loop import CourteousSelector, Courtesy, GapWatch
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import Metrics

if TYPE_CHECKING:
    from nri_numa.config.cpu_waiting import CPUWaiting
    from nri_numa.config.locality import MemoryLocality
    from nri_numa.devices.counts import Counted
    from nri_numa.http.api import AgentServer
    from nri_numa.http.responses import Kubelet
    from nri_numa.machine.pci import PCIDevice
    from nri_numa.node.usage import UsageWatch
    from nri_numa.node.view import LinkFacts, LiveView

log = get_logger("http")

WAIT = 2.0
"""Seconds to wait for the link; a busy runtime may take a minute, and somebody asks why."""
RETRY = 10.0
"""Seconds between two attempts after something went wrong."""
STOP = 2.0
"""Seconds that the end of the process waits for the thread."""
SWITCH = 0.0005
"""Seconds after which a thread must hand on the interpreter's lock when another one waits for it:
what a request of the runtime may have to wait when it comes in while HTTP is at work. Python's own
value is ten times that."""

_Parts = tuple[
    type["AgentServer"],
    type["LiveView"],
    type["UsageWatch"],
    Callable[..., dict[str, Any]],
    Callable[[Agent, BesideKubelet, KubeletSettings], "Kubelet"],
]


class Serving:
    """The HTTP server's life.

    Args:
        config: the ``http`` section; the address is not ``off``.
        agent: whose state is served.
        metrics: exposed; its snapshot is set to the view's.
        node_name: of the node, as Kubernetes has it.
        roots: directory with the sys/ and proc/ trees, and of the cgroup file systems.
        started: Unix time of the start.
        now: Unix time in seconds.
        link: state, detail, whether active, runtime and its version, as `LinkFacts` has them.
        reading: what the kernel had left when it was last asked.
        unheard: sentences about annotations of a pod, by its UID, that no container hears.
        memory: the ``memoryLocality`` section.
        waiting: the ``cpuWaiting`` section.
        beside: where the kubelet and we disagree.
        kubelet: its configuration.
        watch: of the loop that answers the runtime.
        devices: the machine's, to be shown with it; None where nobody looks for devices.
        counted: how many devices the kubelet can give; see `LiveView`.
        roots_of_pcie: by NUMA node; empty where nobody asks for them.
        measured: by NUMA node, capacity factors that were measured and are acted upon.
        late: seconds by which containers were late, by id; None where they cannot be.
        coming: namespace and name of Guaranteed pods that have no container yet.
    """

    def __init__(
        self,
        config: HTTP,
        agent: Agent,
        metrics: Metrics,
        *,
        node_name: str = "",
        roots: tuple[str, str] = ("/", "/sys/fs/cgroup"),
        started: float,
        now: Callable[[], float],
        link: Callable[[], LinkFacts],
        reading: Callable[[], Reading | None],
        unheard: Callable[[str], list[str]] = lambda uid: [],
        memory: MemoryLocality | None = None,
        waiting: CPUWaiting | None = None,
        beside: BesideKubelet,
        kubelet: KubeletSettings,
        watch: GapWatch,
        devices: Sequence[PCIDevice] | None = None,
        counted: Callable[[], Counted | None] = lambda: None,
        roots_of_pcie: Mapping[int, tuple[str, ...]] | None = None,
        measured: Callable[[], Mapping[int, float]] = dict,
        late: Callable[[], Mapping[str, float] | None] = lambda: None,
        coming: Callable[[], Iterable[tuple[str, str]]] = tuple,
    ) -> None:
        self._late, self._coming = late, coming
        self._config = config
        self._agent = agent
        self._metrics = metrics
        self._node_name = node_name
        self._roots = roots
        self._devices = devices
        self._measured, self._counted = measured, counted
        self._roots_of_pcie = roots_of_pcie or {}
        self._started = started
        self._now = now
        self._link = link
        self._reading = reading
        self._unheard = unheard
        self._memory = memory
        self._waiting = waiting
        self._beside = beside
        self._kubelet = kubelet
        self._watch = watch
        self._share = CPUShare()
        self._settled = asyncio.Event()
        self._parts: _Parts | None = None

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
        told = ""
        while True:
            try:
                await self._serve()
            except ConfigError as error:
                problem = "; ".join(error.problems)
                if problem != told:  # said once, not every ten seconds
                    log.error("no http: containers are placed as usual", problem=problem)
                told = problem
            except Exception as error:
                if repr(error) != told:
                    self._metrics.internal_errors.inc()
                    log.exception("http failed: containers are placed as usual")
                told = repr(error)
            await asyncio.sleep(RETRY)

    async def _serve(self) -> None:
        if self._parts is None:
            self._parts = _import()
            gc.freeze()  # what was imported stays for ever
        server_type, view_type, usage_type, describe, document = self._parts
        usage = usage_type(self._agent, *self._roots, now=self._now)
        watches: list[asyncio.Task[None]] = []
        memory = None
        if self._memory is not None and self._memory.enabled:
            from nri_numa.node.locality import MemoryWatch

            memory = MemoryWatch(self._agent, self._memory, self._roots[1], now=self._now)
            watches.append(asyncio.create_task(memory.run(), name="memory"))
        waiting = None
        if self._waiting is not None and self._waiting.enabled:
            from nri_numa.node.waiting import WaitingWatch

            waiting = WaitingWatch(self._agent, self._waiting, self._roots[1], now=self._now)
            watches.append(asyncio.create_task(waiting.run(), name="waiting"))
        view = view_type(
            self._agent,
            version=__version__,
            node_name=self._node_name,
            started=self._started,
            now=self._now,
            link=self._link,
            reading=self._reading,
            unheard=self._unheard,
            kubelet=partial(document, self._agent, self._beside, self._kubelet),
            contested=lambda: len(self._beside.contests),
            usage=usage,
            memory=memory,
            measured=self._measured,
            devices=self._counted,
            roots_of_pcie=self._roots_of_pcie,
            late=self._late,
            coming=self._coming,
            waiting=waiting,
            describe=lambda m: describe(
                m.topology, reserved=m.settings.reserved_cpus, devices=self._devices
            ),
        )
        watches.append(asyncio.create_task(usage.run(), name="usage"))
        server = server_type(
            self._config,
            view,
            self._metrics,
            version=__version__,
            busy_for=self._watch.busy_for,
            crowded=self._hurry,
        )
        self._metrics.snapshot = view.snapshot
        try:
            await server.run()
        finally:
            for watch in watches:
                watch.cancel()

    def _hurry(self, crowded: bool) -> None:
        self._share.hurry = crowded


def _import() -> _Parts:
    from nri_numa.http.api import AgentServer
    from nri_numa.machine.report import topology_document
    from nri_numa.node.kubelet_view import kubelet_document
    from nri_numa.node.usage import UsageWatch
    from nri_numa.node.view import LiveView

    return AgentServer, LiveView, UsageWatch, topology_document, kubelet_document
