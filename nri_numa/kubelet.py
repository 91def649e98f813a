"""Living beside the kubelet: notice when its own managers pin containers.

With ``cpuManagerPolicy: static`` the kubelet sends a cpuset for every container, at its creation
and again whenever its own wish changes; it never reads a cgroup. Such containers come to us with a
cpuset that somebody set, and are left alone. All that remains to do is to say so, clearly and once.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from nri_numa.logs import get_logger
from nri_numa.metrics import Metrics

log = get_logger("kubelet")

INTERVAL: Final = 60.0
MAX_BYTES: Final = 8 << 20

STATE_FILES: Final[Mapping[str, tuple[str, str]]] = {
    "cpu": ("cpu_manager_state", "static"),
    "memory": ("memory_manager_state", "Static"),
}
"""By manager: its state file, and the policy under which it sets cpusets."""


def read_policies(directory: str) -> dict[str, str]:
    """Read the policies that the kubelet's managers run with from their state files.

    Args:
        directory: the kubelet's root directory.

    Returns:
        Policy by manager; a manager whose file is missing or unreadable is left out.
    """
    found: dict[str, str] = {}
    for manager, (name, _) in STATE_FILES.items():
        try:
            with open(os.path.join(directory, name), "rb") as file:
                document = json.loads(file.read(MAX_BYTES))
        except (OSError, ValueError, RecursionError):
            continue
        policy = document.get("policyName") if isinstance(document, dict) else None
        if isinstance(policy, str):
            found[manager] = policy
    return found


class KubeletWatch:
    """Says when the kubelet starts or stops to pin containers itself."""

    def __init__(
        self,
        metrics: Metrics,
        directory: str,
        *,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Make a watch.

        Args:
            metrics: the gauge is set here.
            directory: the kubelet's root directory.
            sleep: waits.
        """
        self._metrics = metrics
        self._directory = directory
        self._sleep = sleep
        self._static: dict[str, bool] = {}

    async def run(self) -> None:
        """Look at once and then every minute, until cancelled."""
        while True:
            self.judge(await asyncio.to_thread(read_policies, self._directory))
            await self._sleep(INTERVAL)

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
                    "the kubelet pins containers itself: those it gave a cpuset are left to it",
                    manager=manager,
                    policy=static,
                    file=os.path.join(self._directory, name),
                    remedy=f"for full control set {manager}ManagerPolicy: "
                    f"{'none' if manager == 'cpu' else 'None'}, delete that file, and restart the "
                    "kubelet",
                )
            else:
                log.info("the kubelet does not pin containers any more", manager=manager)
