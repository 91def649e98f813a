"""What the runtime's message about a container says of its devices, before anything is looked up.

All of it but the device nodes may come from the pod's author: it is a hint where to look, and never
a grant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

MOST_DEVICES: Final = 64
"""Devices of one container that are looked at. Whoever has more has the machine's, not some."""


class DeviceNode(NamedTuple):
    """A device file: its OCI type (``c``, ``u``, ``b``, ``p``) and its number."""

    type: str
    major: int
    minor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mentions:
    """The devices that a message mentions.

    Attributes:
        nodes: device files; empty for a privileged container, which gets those of the host.
        variables: environment variables that device plugins set, by name.
        cdi: names of the Container Device Interface, ``vendor/class=device``.
        unread: how many device files and names there were beyond `MOST_DEVICES`.
    """

    nodes: tuple[DeviceNode, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    cdi: tuple[str, ...] = ()
    unread: int = 0


NO_MENTIONS: Final = Mentions()
