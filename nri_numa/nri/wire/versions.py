"""Numbers and names of NRI: its release, its events, and valid plugin identities."""

from __future__ import annotations

import enum
import re
from typing import Final

NRI_VERSION: Final = "v0.12.2"
"""Release of NRI whose messages this package implements."""


class Event(enum.IntEnum):
    """Events of NRI, by number; `mask_bit` is an event's bit of the subscription mask."""

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
        """Subscription mask of this event alone."""
        return 1 << (self.value - 1)

    @property
    def method_name(self) -> str:
        """Name of the method, such as ``RunPodSandbox``; in logs for every runtime."""
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
"""Events that the agent uses; every runtime knows them.

Each is a round trip under the one lock of the runtime, so no other is subscribed to. A runtime
closes the connection for a bit that it does not know, and a mask of zero means all events, the
validator's included.
"""


ALL_EVENTS: Final = AGENT_EVENTS | Event.UPDATE_POD_SANDBOX.mask_bit
"""`AGENT_EVENTS` and the only event with new resources of a pod; not every runtime knows it."""


def identity_problem(name: str, index: str) -> str | None:
    """Return the problem of a plugin's name or index, or None.

    The rule for names is that of NRI 0.12. Older runtimes accept more, but a name should work on
    all.
    """
    if len(index) != 2 or any(digit not in "0123456789" for digit in index):
        return f"plugin index {index!r}: expected exactly two digits, 00 to 99"
    if not name:
        return "plugin name is empty: expected letters, digits and _ - . +"
    if not re.fullmatch(r"[A-Za-z0-9_.+-]+", name):
        return f"plugin name {name!r}: expected only letters, digits and _ - . +"
    return None
