"""Living beside the kubelet: notice when its own managers pin containers.

With ``cpuManagerPolicy: static`` the kubelet sends a cpuset for every container, at its creation
and again whenever its own wish changes; it never reads a cgroup. What it grants exclusively is read
from its state files (`nri_numa.kubelet.state_files`); here it is said, clearly and once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import Metrics

log = get_logger("kubelet")

STATE_FILES: Final[Mapping[str, tuple[str, str]]] = {
    "cpu": ("cpu_manager_state", "static"),
    "memory": ("memory_manager_state", "Static"),
}
"""By manager: its state file, and the policy under which it sets cpusets."""


class KubeletWatch:
    """Says when the kubelet starts or stops to pin containers itself."""

    def __init__(self, metrics: Metrics, directory: str) -> None:
        """Make a watch.

        Args:
            metrics: the gauge is set here.
            directory: the kubelet's root directory.
        """
        self._metrics = metrics
        self._directory = directory
        self._static: dict[str, bool] = {}
        for manager in STATE_FILES:  # a series that is there from the start, as dashboards ask it
            metrics.kubelet_static(manager, False)

    def judge(self, policies: Mapping[str, str]) -> None:
        """Compare with the last look; set the gauge and say what changed."""
        for manager, (name, static) in STATE_FILES.items():
            pins = policies.get(manager) == static
            self._metrics.kubelet_static(manager, pins)
            if pins == self._static.get(manager, False):
                continue
            self._static[manager] = pins
            if pins:
                log.warning(
                    "the kubelet pins containers itself: what it grants exclusively is left to it",
                    manager=manager,
                    policy=static,
                    file=os.path.join(self._directory, name),
                    remedy=f"for full control set {manager}ManagerPolicy: "
                    f"{'none' if manager == 'cpu' else 'None'}, delete that file, and restart the "
                    "kubelet",
                )
            else:
                log.info("the kubelet does not pin containers any more", manager=manager)
