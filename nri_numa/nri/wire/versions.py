"""What NRI numbers and names: its release, its events, and who may be a plugin."""

from __future__ import annotations

import enum
import re
from typing import Final

NRI_VERSION: Final = "v0.12.2"
"""The release of NRI whose messages this package speaks."""


class Event(enum.IntEnum):
    """Events of NRI by their numbers; `bit` is the place in the subscription mask."""

    RUN_POD_SANDBOX = 1
    STOP_POD_SANDBOX = 2
    REMOVE_POD_SANDBOX = 3
    CREATE_CONTAINER = 4
    POST_CREATE_CONTAINER = 5
    START_CONTAINER = 6
    POST_START_CONTAINER = 7
    UPDATE_CONTAINER = 8
    POST_UPDATE_CONTAINER = 9
    STOP_CONTAINER = 10
    REMOVE_CONTAINER = 11
    UPDATE_POD_SANDBOX = 12
    POST_UPDATE_POD_SANDBOX = 13
    VALIDATE_CONTAINER_ADJUSTMENT = 14

    @property
    def mask_bit(self) -> int:
        """The mask with this event alone."""
        return 1 << (self.value - 1)

    @property
    def method_name(self) -> str:
        """The name of the method, ``RunPodSandbox``; used in logs whatever the runtime's style."""
        return _METHOD_NAMES[self]


_METHOD_NAMES: Final = {event: event.name.title().replace("_", "") for event in Event}


AGENT_EVENTS: Final = (
    Event.RUN_POD_SANDBOX.mask_bit
    | Event.STOP_POD_SANDBOX.mask_bit
    | Event.REMOVE_POD_SANDBOX.mask_bit
    | Event.CREATE_CONTAINER.mask_bit
    | Event.START_CONTAINER.mask_bit
    | Event.POST_START_CONTAINER.mask_bit
    | Event.UPDATE_CONTAINER.mask_bit
    | Event.POST_UPDATE_CONTAINER.mask_bit
    | Event.STOP_CONTAINER.mask_bit
    | Event.REMOVE_CONTAINER.mask_bit
)
"""The events that the agent has a use for; every runtime knows them.

Each is a round trip under the one lock of the runtime, so no other is subscribed to. A bit that a
runtime does not know makes it close the connection, and a mask of zero means all events, the
validator included.
"""


ALL_EVENTS: Final = AGENT_EVENTS | Event.UPDATE_POD_SANDBOX.mask_bit
"""With the only event that tells a new sum of a pod; not every runtime knows it."""


def identity_problem(name: str, index: str) -> str | None:
    """Return what is wrong with a plugin's name or index, or None.

    The name rule is that of NRI 0.12; older runtimes accept more, but a name should work on both.
    """
    if len(index) != 2 or any(digit not in "0123456789" for digit in index):
        return f"plugin index {index!r}: expected exactly two digits, 00 to 99"
    if not name:
        return "plugin name is empty: expected letters, digits and _ - . +"
    if not re.fullmatch(r"[A-Za-z0-9_.+-]+", name):
        return f"plugin name {name!r}: expected only letters, digits and _ - . +"
    return None
