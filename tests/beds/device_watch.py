"""A watch over devices whose threads are the test itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from nri_numa.agent.agent import Agent
from nri_numa.config.sections import Devices
from nri_numa.devices.watch import DeviceWatch


class Watch(DeviceWatch):
    """What threads would do is done when the test says so."""

    def __init__(self, root: Path, agent: Agent) -> None:
        super().__init__(
            Devices(network=False, cdi=False),
            root=str(root),
            kubelet_root="",
            places=lambda: agent.machine.places,
        )
        self.jobs: deque[Callable[[], object]] = deque()

    def _do(self, pool: object, function: Callable[..., object], *args: object) -> None:
        self.jobs.append(partial(function, *args))

    def settle(self) -> None:
        while self.jobs:
            self.jobs.popleft()()
