"""A watch over devices whose threads are the test itself."""

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
            Devices(network_interfaces=False, cdi=False),
            root=str(root),
            kubelet_root="",
            alignable_nodes=lambda: agent.current.machine.alignable_nodes,
        )
        self.jobs: deque[Callable[[], object]] = deque()

    def _submit_task(self, pool: object, function: Callable[..., object], *args: object) -> None:
        self.jobs.append(partial(function, *args))

    def wait_for_tasks(self) -> None:
        while self.jobs:
            self.jobs.popleft()()
