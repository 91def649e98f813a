"""The metrics library, without the HTTP servers and clients that its package imports.

``import prometheus_client`` brings two HTTP servers, an HTTP client, e-mail and compressors. An
agent would keep these 2.5 MiB for ever and never use them, since it has an HTTP side of its own.
While the library is imported here, empty modules stand in for those; whoever imports them
afterwards gets the real ones. What the library itself offers to serve or push is not usable then.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Final

UNUSED: Final = (
    "gzip",
    "http.server",
    "socketserver",
    "urllib.error",
    "urllib.request",
    "wsgiref.simple_server",
)
"""Modules that `prometheus_client.exposition` imports for its servers and its push client."""


class _StandIn(ModuleType):
    """Has a class of whatever name is asked for."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@contextmanager
def _standing_in(names: tuple[str, ...]) -> Iterator[None]:
    missing = [name for name in names if name not in sys.modules]
    sys.modules.update({name: _StandIn(name) for name in missing})
    try:
        yield
    finally:
        for name in missing:
            if isinstance(sys.modules.get(name), _StandIn):
                del sys.modules[name]


def _import() -> None:
    """Import the library; as it is where it wants more of those modules than we know of."""
    try:
        with _standing_in(UNUSED):
            import prometheus_client
    except Exception:
        for name in [n for n in sys.modules if n.partition(".")[0] == "prometheus_client"]:
            del sys.modules[name]
        import prometheus_client  # noqa: F401


_import()

from prometheus_client import (  # noqa: E402
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import (  # noqa: E402
    CounterMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import (  # noqa: E402
    CONTENT_TYPE_PLAIN_0_0_4,
    generate_latest,
)
from prometheus_client.utils import floatToGoString  # noqa: E402

__all__ = [
    "CONTENT_TYPE_PLAIN_0_0_4",
    "CollectorRegistry",
    "Counter",
    "CounterMetricFamily",
    "Gauge",
    "Histogram",
    "HistogramMetricFamily",
    "Metric",
    "ProcessCollector",
    "disable_created_metrics",
    "floatToGoString",
    "generate_latest",
]
