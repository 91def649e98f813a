"""How many devices the kubelet can still give on each NUMA node, for schedulers.

The kubelet alone knows. A thread asks it when the figures are read, at most once in
`COUNTS_REFRESH_AFTER_S`
seconds: a reader gets the answer to the question before, and reads again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from nri_numa.kubelet import pod_resources
from nri_numa.kubelet.pod_resources import DeviceCount
from nri_numa.observe.logs import get_logger
from nri_numa.observe.reports import ReportOnce

log = get_logger("devices")

COUNTS_REFRESH_AFTER_S: Final = 4.0
"""Seconds for which an answer is taken; the publisher reads every five."""
COUNTS_EXPIRE_AFTER_S: Final = 30.0
"""Seconds after which an answer is worth nothing any more."""
NO_KUBELET_ANSWER_TEXT: Final = "the kubelet has not answered yet"

CountsOrReason = tuple[DeviceCount, ...] | str
"""Devices, or why they are not known, as a sentence."""


class DeviceCounts:
    """Asks one kubelet; devices of ``own_resource`` are CPUs, and counted as such."""

    def __init__(
        self,
        kubelet_root: str,
        own_resource: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root, self._own, self._clock = kubelet_root, own_resource, clock
        self._known: CountsOrReason = NO_KUBELET_ANSWER_TEXT
        self._asked = self._answered = float("-inf")
        self._under_way = False
        self._problems = ReportOnce(log)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device counts")

    def known_counts(self) -> CountsOrReason:
        """What is known now; asks anew, without waiting, when that is some seconds old."""
        now = self._clock()
        if not self._under_way and now - self._asked >= COUNTS_REFRESH_AFTER_S:
            self._under_way, self._asked = True, now
            self._thread.submit(self._query_kubelet)
        return (
            self._known if now - self._answered < COUNTS_EXPIRE_AFTER_S else NO_KUBELET_ANSWER_TEXT
        )

    def wait_for_query(self) -> None:
        """Wait for the answer that is under way."""
        self._thread.submit(lambda: None).result()

    def _query_kubelet(self) -> None:
        try:
            found = pod_resources.query_device_counts(self._root)
            if not isinstance(found, str):
                found = tuple(one for one in found if one.resource != self._own)
            self._known, self._answered = found, self._clock()
            problem = found if isinstance(found, str) else ""
            self._problems.report("devices are not counted", problem)
        finally:
            self._under_way = False
