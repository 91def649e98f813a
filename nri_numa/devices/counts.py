"""Devices of the kubelet, and their counts on each NUMA node for schedulers.

Only the kubelet knows them. A thread queries it when they are read, at most once in
`COUNTS_REFRESH_AFTER_S` seconds; a reader gets the previous answer, and reads again later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from nri_numa.kubelet import pod_resources
from nri_numa.kubelet.pod_resources import DeviceCount, NodeDevice
from nri_numa.observe.logs import get_logger
from nri_numa.observe.reports import ReportOnce

log = get_logger("devices")

COUNTS_REFRESH_AFTER_S: Final = 4.0
"""Seconds before the kubelet is queried again; the publisher reads every five."""
COUNTS_EXPIRE_AFTER_S: Final = 30.0
"""Seconds after which an answer is no longer used."""
NO_KUBELET_ANSWER_TEXT: Final = "the kubelet has not answered yet"

CountsOrReason = tuple[DeviceCount, ...] | str
"""Device counts, or a sentence saying why they are unknown."""
DevicesOrReason = tuple[NodeDevice, ...] | str
"""Healthy devices of the node, or a sentence saying why they are unknown."""


class DeviceCounts:
    """Queries the kubelet; devices of ``own_resource`` are CPUs, and are left out."""

    def __init__(
        self, kubelet_root: str, own_resource: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._root, self._own, self._clock = kubelet_root, own_resource, clock
        self._known: DevicesOrReason = NO_KUBELET_ANSWER_TEXT
        self._asked = self._answered = float("-inf")
        self._under_way = False
        self._problems = ReportOnce(log)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device counts")

    def known_counts(self) -> CountsOrReason:
        """Return the counts of `known_devices`."""
        devices = self.known_devices()
        return devices if isinstance(devices, str) else pod_resources.count_devices(devices)

    def known_devices(self) -> DevicesOrReason:
        """Return the last devices; start another query, without waiting, if they are old."""
        read_at = self._clock()
        if not self._under_way and read_at - self._asked >= COUNTS_REFRESH_AFTER_S:
            self._under_way, self._asked = True, read_at
            self._thread.submit(self._query_kubelet)
        is_recent = read_at - self._answered < COUNTS_EXPIRE_AFTER_S
        return self._known if is_recent else NO_KUBELET_ANSWER_TEXT

    def wait_for_query(self) -> None:
        """Wait for the running query."""
        self._thread.submit(lambda: None).result()

    def _query_kubelet(self) -> None:
        try:
            answer = pod_resources.query_node_devices(self._root)
            if not isinstance(answer, str):
                answer = tuple(device for device in answer if device.resource != self._own)
            self._known, self._answered = answer, self._clock()
            problem = answer if isinstance(answer, str) else ""
            self._problems.report_problem("devices not counted", problem)
        finally:
            self._under_way = False
