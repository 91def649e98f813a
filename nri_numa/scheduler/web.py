"""The HTTP side: kube-scheduler's verbs, metrics and probes."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Final

from nri_numa import __version__
from nri_numa.http.protocol import APIError, Handler, Request, Response, Route
from nri_numa.http.security import Certificate
from nri_numa.http.server import Site
from nri_numa.scheduler import protocol
from nri_numa.scheduler.metrics import SchedulerMetrics

LARGEST: Final = 4 << 20
"""Bytes of a question: a pod has at most 1.5 MiB (etcd's limit), 5,000 names a quarter of one."""

CONNECTIONS: Final = 512
"""kube-scheduler has one for each binding that is under way, and hundreds are after a burst."""

Verb = Callable[[bytes], Awaitable[bytes]]


def site(
    host: str,
    verbs: dict[str, Verb],
    metrics: SchedulerMetrics,
    not_ready: Callable[[], str],
    *,
    certificate: Certificate | None = None,
    certified: bool = False,
    refresh: Callable[[], object] = lambda: None,
) -> Site:
    """The server.

    Args:
        host: that it listens on.
        verbs: by path, without the slash; they raise `protocol.BadRequest`.
        metrics: counts calls.
        not_ready: why questions cannot be answered, as a sentence; empty when they can.
        certificate: of the server; None for no TLS.
        certified: who asks must have shown a certificate.
        refresh: called before metrics are written.
    """

    def admit(request: Request) -> None:
        if certified and not request.certified:
            raise APIError(
                403, "Forbidden", "a client certificate is expected (scheduler.clientCA)"
            )

    def verb(name: str, answer: Verb) -> Handler:
        seconds = metrics.seconds.labels(name)  # looked up once: that takes longer than counting

        async def handle(request: Request) -> Response:
            began = time.perf_counter()
            try:
                return Response(200, await answer(request.body))
            except protocol.BadRequest as error:
                return Response(400, protocol.error(str(error)))
            finally:
                seconds.observe(time.perf_counter() - began)

        return handle

    def counted(path: str, status: int) -> None:
        if (name := path[1:]) in verbs:
            metrics.calls.labels(name, "answered" if status == 200 else str(status)).inc()

    def text() -> bytes:
        refresh()
        return metrics.text()

    return Site(
        host,
        version=__version__,
        metrics=text,
        not_ready=not_ready,
        certificate=certificate,
        routes=[
            Route("POST", f"/{name}", verb(name, answer), LARGEST, admit)
            for name, answer in verbs.items()
        ],
        counted=counted,
        most=CONNECTIONS,
    )
