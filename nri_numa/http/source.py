"""What the HTTP server needs to know of the agent, as one structural type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from nri_numa.http.responses import (
    Assignment,
    ContainerUse,
    Explanation,
    Kubelet,
    NodeUse,
    Notices,
    NUMAInfo,
    Readiness,
    Refusal,
    Slots,
    Status,
    TopologyDocument,
    Use,
)
from nri_numa.http.zones import Zones


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The assignments at one moment.

    Attributes:
        head: the node.
        containers: made one by one, so that a long list never holds the event loop; it must stay
            valid while the state moves on.
        key: objects that are the same ones while containers of one serial look the same.
    """

    head: NodeUse
    containers: Iterator[Assignment]
    key: tuple[object, ...] = ()


class AgentView(Protocol):
    """Read-only; every method answers from memory, at once."""

    def status(self) -> Status:
        """The agent itself."""
        ...

    def readiness(self) -> Readiness:
        """Whether containers are being placed."""
        ...

    def topology(self) -> TopologyDocument:
        """The machine."""
        ...

    def topology_key(self) -> object:
        """Another object when the machine is another one; for caching."""
        ...

    def numa_info(self) -> NUMAInfo:
        """The machine in the short form of ``/v2/system/numa/info``."""
        ...

    def listing(self) -> Listing:
        """Every container and what it has."""
        ...

    def explain(self, namespace: str, pod: str, container: str | None) -> list[Explanation]:
        """What is known about a pod's containers; empty when nothing is."""
        ...

    def refusals(self) -> list[Refusal]:
        """The latest refusals, newest first."""
        ...

    def slots(self) -> Slots:
        """Exclusive CPUs that the scheduler may count."""
        ...

    def zones(self) -> Zones:
        """Every NUMA node as who schedules counts it."""
        ...

    def kubelet(self) -> Kubelet:
        """The kubelet beside us."""
        ...

    def notices(self, after: int) -> Notices:
        """What happened to containers after a number of the sequence."""
        ...

    def notice_number(self) -> int:
        """The last number of that sequence."""
        ...

    def use(self) -> Use:
        """What is really used on the machine."""
        ...

    async def container_use(self, namespace: str, pod: str, container: str) -> list[ContainerUse]:
        """What a container really uses, measured now; empty when there is none."""
        ...

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` after every change; returns what ends that."""
        ...
