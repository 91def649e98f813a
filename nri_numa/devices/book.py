"""What was found out about one pod ahead of its containers, and what came of it: values alone.

Threads find it out, and the loop looks while a container waits. So whatever a thread tells is
replaced as a whole, and the loop compares objects instead of what is in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from nri_numa.devices.found import Found
from nri_numa.devices.given import GivenDevice

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


@dataclass(slots=True)
class Book:
    """What is kept of one pod.

    Attributes:
        pod: its namespace and name.
        told: what was found out; replaced as a whole, by threads that take turns.
    """

    pod: str
    told: Told
