"""Brings the HTTP side up when it is nobody's turn, and keeps it from harming anybody.

Containers come first: the server is imported (30 ms, 4 MiB) after the link to the runtime stands,
or when it is clear that this takes a while. Whatever goes wrong here is logged and tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nri_numa import __version__
from nri_numa.agent import Agent
from nri_numa.config import HTTP
from nri_numa.engine.decision import Reading
from nri_numa.errors import ConfigError
from nri_numa.logs import get_logger
from nri_numa.metrics import Metrics

if TYPE_CHECKING:
    from nri_numa.http.server import HTTPServer
    from nri_numa.view import LinkFacts, LiveView

log = get_logger("http")

WAIT = 2.0
"""Seconds to wait for the link; a busy runtime may take a minute, and somebody asks why."""
RETRY = 10.0
"""Seconds between two attempts after something went wrong."""

_Parts = tuple[type["HTTPServer"], type["LiveView"], Callable[..., dict[str, Any]]]


class Serving:
    """The HTTP server's life.

    Args:
        config: the ``http`` section; the address is not ``off``.
        agent: whose state is served.
        metrics: exposed; its snapshot is set to the view's.
        started: Unix time of the start.
        now: Unix time in seconds.
        link: state, detail, whether active, runtime and its version, as `LinkFacts` has them.
        reading: what the kernel had left when it was last asked.
    """

    def __init__(
        self,
        config: HTTP,
        agent: Agent,
        metrics: Metrics,
        *,
        started: float,
        now: Callable[[], float],
        link: Callable[[], LinkFacts],
        reading: Callable[[], Reading | None],
    ) -> None:
        self._config = config
        self._agent = agent
        self._metrics = metrics
        self._started = started
        self._now = now
        self._link = link
        self._reading = reading
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
            # In a thread: importing takes tens of milliseconds, and requests may come in.
            self._parts = await asyncio.to_thread(_import)
            gc.freeze()  # what was imported stays for ever
        server_type, view_type, describe = self._parts
        view = view_type(
            self._agent,
            version=__version__,
            started=self._started,
            now=self._now,
            link=self._link,
            reading=self._reading,
            describe=lambda m: describe(m.topology, reserved=m.settings.reserved_cpus),
        )
        server = server_type(self._config, view, self._metrics, version=__version__)
        self._metrics.snapshot = view.snapshot
        await server.run()


def _import() -> _Parts:
    from nri_numa.http.server import HTTPServer
    from nri_numa.topology.document import topology_document
    from nri_numa.view import LiveView

    return HTTPServer, LiveView, topology_document
