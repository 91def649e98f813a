"""The HTTP side: kube-scheduler's verbs, metrics and probes."""

from __future__ import annotations

import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from nri_numa.observe.logs import get_logger
from nri_numa.scheduler import protocol
from nri_numa.scheduler.metrics import SchedulerMetrics

log = get_logger("scheduler")

LARGEST: Final = 4 << 20
"""Bytes of a question: a pod has at most 1.5 MiB (etcd's limit), 5,000 names a quarter of one."""
_METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"

Verb = Callable[[bytes], Awaitable[bytes]]


def application(
    verbs: dict[str, Verb],
    metrics: SchedulerMetrics,
    not_ready: Callable[[], str],
    *,
    certified: bool = False,
    refresh: Callable[[], object] = lambda: None,
) -> web.Application:
    """The routes.

    Args:
        verbs: by path, without the slash; they raise `protocol.BadRequest`.
        metrics: counts calls.
        not_ready: why questions cannot be answered, as a sentence; empty when they can.
        certified: who asks must have shown a certificate.
        refresh: called before metrics are written.
    """
    app = web.Application(client_max_size=LARGEST)

    def verb(name: str, answer: Verb) -> Callable[[web.Request], Awaitable[web.Response]]:
        # Looked up once: a look-up takes longer than counting.
        answered, seconds = metrics.calls.labels(name, "answered"), metrics.seconds.labels(name)

        async def handle(request: web.Request) -> web.Response:
            began = time.perf_counter()
            status, body = await _answer(request, answer, certified)
            (answered if status == 200 else metrics.calls.labels(name, str(status))).inc()
            seconds.observe(time.perf_counter() - began)
            # With its length, or the scheduler opens a connection for each call.
            return web.Response(status=status, body=body, content_type="application/json")

        return handle

    async def read_metrics(_: web.Request) -> web.Response:
        refresh()
        return web.Response(body=metrics.text(), headers={"Content-Type": _METRICS})

    async def alive(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        problem = not_ready()
        return web.Response(status=503 if problem else 200, text=f"{problem or 'ok'}\n")

    for name, answer in verbs.items():
        app.router.add_post(f"/{name}", verb(name, answer))
    app.router.add_get("/metrics", read_metrics)
    app.router.add_get("/healthz", alive)
    app.router.add_get("/readyz", ready)
    return app


async def _answer(request: web.Request, answer: Verb, certified: bool) -> tuple[int, bytes]:
    if certified:
        transport = request.transport
        if transport is None or not transport.get_extra_info("peercert"):
            return 403, protocol.error("a client certificate is expected (scheduler.clientCA)")
    try:
        return 200, await answer(await request.read())
    except protocol.BadRequest as error:
        return 400, protocol.error(str(error))
    except web.HTTPRequestEntityTooLarge:
        return 413, protocol.error(f"the body is larger than {LARGEST} bytes")
    except Exception as error:
        log.error("a call failed by a mistake of ours", path=request.path, error=repr(error),
                  exc_info=error)  # fmt: skip
        return 500, protocol.error("a mistake of nri-numa's: its log has the details")


def tls(certificate: str, key: str, client_ca: str) -> ssl.SSLContext | None:
    """The server's side of TLS; None without a certificate.

    Args:
        certificate: file with the chain; empty for none.
        key: file with its key.
        client_ca: file with the authority of clients; empty when none is asked for.

    Raises:
        OSError: a file cannot be read, or is none of that kind (`ssl.SSLError`).
    """
    if not certificate:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    if client_ca:
        context.load_verify_locations(client_ca)
        # Probes and scrapers have none; who asks is looked at again.
        context.verify_mode = ssl.CERT_OPTIONAL
    return context
