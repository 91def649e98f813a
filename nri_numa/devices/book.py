"""What was found out about one pod ahead of its containers, and what came of it: values alone.

Threads find it out, and the loop looks while a container waits. So whatever a thread tells is
replaced as a whole, and the loop compares objects instead of what is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from nri_numa.devices.found import Found
from nri_numa.devices.given import GivenDevice
from nri_numa.engine.values.mentions import Mentions
from nri_numa.engine.values.workload import KnownDevices
from nri_numa.machine.cpuset import NUMASet

Given = Mapping[str, tuple[GivenDevice, ...]]
"""What the kubelet gave, by container."""


class Told(NamedTuple):
    """What was found out.

    Attributes:
        cards: the devices of its network interfaces.
        given: what the kubelet gave.
        network_note, kubelet_note: why something is not known.
    """

    cards: tuple[Found, ...] = ()
    given: Given = MappingProxyType({})
    network_note: str = ""
    kubelet_note: str = ""


NOTHING_TOLD: Final = Told()
"""Of nearly all pods: no device is known, and nothing is to be said. One look tells, since
`told` makes it this very object."""


def told(what: Told) -> Told:
    """The same; `NOTHING_TOLD` itself where it says nothing."""
    return NOTHING_TOLD if what == NOTHING_TOLD else what


class Ready(NamedTuple):
    """What came of a pod's book and a container's message.

    Attributes:
        answers: what was remembered of all containers then. This and the next four are what it
            depends on, compared by identity but for the name.
        places: the NUMA nodes that containers can be placed on.
        told: what the book said.
        name: the container's.
        mentions: what its message said.
        found: what came of it.
    """

    answers: dict[tuple[object, ...], KnownDevices]
    places: NUMASet
    told: Told
    name: str
    mentions: Mentions
    found: KnownDevices


@dataclass(slots=True)
class Book:
    """What is kept of one pod.

    Attributes:
        pod: its namespace and name.
        told: what was found out; replaced as a whole, by threads that take turns.
        open: how many questions have no answer yet; counted in the loop.
        complete: called when all have one.
        ready: what came of it last, for a message that mentions nothing; looked at in the loop
            only.
    """

    pod: str
    told: Told
    open: int = 0
    complete: Callable[[], object] | None = None
    ready: Ready | None = None
