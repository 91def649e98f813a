"""How many requests of each event there were, and how long they took.

Every request is counted, so counting is an addition to one of a few numbers: the library's own
counters take twenty calls for what takes three here. They become metrics when somebody scrapes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString


class RequestTimes:
    """Counts requests by event.

    Args:
        buckets: upper limits in seconds, ascending; a time that equals one is in it.
    """

    def __init__(self, buckets: Sequence[float]) -> None:
        self.buckets = tuple(map(float, buckets))
        # By event, the sum of the seconds and then how many were in each bucket and in none.
        self._times: dict[str, list[float]] = {}

    def add(self, event: str, seconds: float) -> None:
        """Count one request."""
        try:
            times = self._times[event]
        except KeyError:
            times = self._times[event] = [0.0] * (len(self.buckets) + 2)
        times[0] += seconds
        times[1 + bisect_left(self.buckets, seconds)] += 1

    def items(self) -> list[tuple[str, list[float]]]:
        """A copy; whoever scrapes is in another thread."""
        return [(event, times[:]) for event, times in list(self._times.items())]


class _ByEvent:
    """A metric with a label for the event; the underscored names are those of the library's own."""

    def __init__(self, times: RequestTimes, name: str, text: str) -> None:
        self._times = times
        self._name = name
        self._text = text
        self._labelnames = ("event",)


class RequestCounter(_ByEvent):
    """The counter of requests by event."""

    def collect(self) -> Iterator[Metric]:
        """As the library wants it."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labelnames)
        for event, times in self._times.items():
            family.add_metric((event,), sum(times[1:]))
        yield family


class RequestDurations(_ByEvent):
    """The histogram of their times."""

    def collect(self) -> Iterator[Metric]:
        """As the library wants it."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labelnames)
        limits = [*map(floatToGoString, self._times.buckets), "+Inf"]
        for event, times in self._times.items():
            so_far, buckets = 0.0, []
            for limit, number in zip(limits, times[1:], strict=True):
                so_far += number
                buckets.append((limit, so_far))
            family.add_metric((event,), buckets, times[0])
        yield family
