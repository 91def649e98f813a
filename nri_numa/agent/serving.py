"""Start of the HTTP server, in a thread that does not delay requests of the runtime.

Containers come first: the server is imported (30 ms, 4 MiB) after the link to the runtime is up, or
when that takes long. It has a thread and a loop, which pauses while the loop that answers the
runtime is busy: no client, however many requests it sends, delays the creation of a container by
more than one small step. Errors are logged and tried again. docs/adr/0017 has the figures, and
explains why it is not a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from nri_numa.agent.agent import Agent
from nri_numa.agent.loop import CPUBudget, LoopMonitor, YieldingSelector
from nri_numa.config import AgentConfig
from nri_numa.errors import ConfigError
from nri_numa.observe.logs import get_logger

if TYPE_CHECKING:
    from nri_numa.agent.usage import UsageWatches
    from nri_numa.agent.view import LiveView

log = get_logger("http")

LINK_WAIT_S = 2.0
"""Seconds to wait for the link; a busy runtime may take a minute, in which users want status."""
SERVE_RETRY_S = 10.0
"""Seconds between two attempts after something went wrong."""
STOP_TIMEOUT_S = 2.0
"""Seconds to wait for the thread at the end of the process."""
THREAD_SWITCH_INTERVAL_S = 0.0005
"""Seconds after which a thread must hand on the interpreter's lock when another one waits for it:
what a request of the runtime may have to wait when it comes in while HTTP is at work. Python's own
value is ten times that."""


class HTTPThread:
    """Life of the HTTP server; ``new_view`` is called late, because its imports are slow."""

    def __init__(
        self,
        config: AgentConfig,
        agent: Agent,
        new_view: Callable[[UsageWatches], LiveView],
        gaps: LoopMonitor,
    ) -> None:
        self._config, self._agent, self._metrics = config, agent, agent.metrics
        self._new_view, self._watch = new_view, gaps
        self._share = CPUBudget()
        self._settled = asyncio.Event()

    def allow_start(self) -> None:
        """Start without further waiting: the link is up, or cannot be made now."""
        self._settled.set()

    async def run(self) -> None:
        """Serve until cancelled."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINK_WAIT_S):
                await self._settled.wait()
        sys.setswitchinterval(THREAD_SWITCH_INTERVAL_S)
        loop = asyncio.SelectorEventLoop(YieldingSelector(self._watch, self._share))
        stop = asyncio.Event()

        def run_http_loop() -> None:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(self._serve_until(stop))

        # A daemon thread, so no client can keep the process from ending.
        thread = threading.Thread(target=run_http_loop, name="http", daemon=True)
        thread.start()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stop.set)
            await asyncio.to_thread(thread.join, STOP_TIMEOUT_S)

    async def _serve_until(self, stop: asyncio.Event) -> None:
        serving = asyncio.create_task(self._serve_for_ever())
        await stop.wait()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    async def _serve_for_ever(self) -> None:
        reported_problem = ""
        while True:
            try:
                await self._serve_api()
            except ConfigError as error:
                problem = "; ".join(error.problems)
                if problem != reported_problem:  # once, not every ten seconds
                    log.error("http not started", problem=problem)
                reported_problem = problem
            except Exception as error:
                if repr(error) != reported_problem:
                    self._metrics.internal_errors.inc()
                    log.exception("http failed")
                reported_problem = repr(error)
            await asyncio.sleep(SERVE_RETRY_S)

    async def _serve_api(self) -> None:
        from nri_numa.agent.http_api import AgentServer
        from nri_numa.agent.usage import UsageWatches

        watches = UsageWatches.from_config(self._config, self._agent)
        tasks = watches.start_watches()
        try:
            view = self._new_view(watches)
            server = AgentServer(
                self._config.http,
                view,
                self._metrics,
                busy_seconds=self._watch.current_gap,
                crowded=self._share.set_hurry,
            )
            self._metrics.set_snapshot(view.metrics_snapshot)
            await server.run()
        finally:
            for task in tasks:
                task.cancel()
