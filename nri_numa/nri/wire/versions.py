"""What the version of the other side means for us.

A runtime names itself, its version, and from NRI 0.12 on the NRI release inside it. From these
three words follows the way in which updates may be pushed to it without risking that it hangs
(containerd#13733).

Versions are read leniently: ``v2.1.9``, ``2.1.9+unknown``, ``1.7.24~ds1`` and ``2.2.0-rc.1`` are
all in use.
"""

from __future__ import annotations

import enum
import re
from typing import Final

from nri_numa.runtime import RuntimeInfo

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


class PushPath(enum.StrEnum):
    """How an update may be sent that answers no request."""

    UPDATE_CONTAINERS = "update-containers"
    """The plain call; safe from NRI 0.12.1 on."""

    ONE_SHOT = "one-shot"
    """A second registration that answers Synchronize with the updates; safe from NRI 0.6.1 on."""

    NONE = "none"
    """No way is known to be safe: registrations and events deadlock (containerd#10085)."""


_VERSION_PATTERN: Final = re.compile(r"\s*v?([0-9]{1,9})\.([0-9]{1,9})(?:\.([0-9]{1,9}))?")
_UNKNOWN_VERSION: Final = (0, 0, 0)


def parse_version(text: str) -> tuple[int, int, int] | None:
    """Return (major, minor, patch) of a version, or None where there is none to see.

    A missing patch level counts as 0, suffixes are ignored.
    """
    match = _VERSION_PATTERN.match(text)
    if match is None:
        return None
    return int(match[1]), int(match[2]), int(match[3] or 0)


def push_path(info: RuntimeInfo) -> PushPath:
    """Return how updates may be pushed to this runtime.

    Sources of the limits: containerd#13733 and nri#301 (fixed in NRI 0.12.1) for the plain call,
    containerd#10085 and nri#79 (fixed in NRI 0.6.1) for a registration while events are served.
    """
    # Builds outside a release say ``0.0.0-unknown`` or ``(devel)``.
    nri = parse_version(info.nri_version) or _UNKNOWN_VERSION
    # v0.12.1-0.20260101… is a build *before* v0.12.1.
    if nri > (0, 12, 1) or (nri == (0, 12, 1) and "-" not in info.nri_version):
        return PushPath.UPDATE_CONTAINERS
    if info.registration_timeout or info.nri_version:
        return PushPath.ONE_SHOT  # timeouts are given from NRI 0.7 on
    release = parse_version(info.version) or _UNKNOWN_VERSION
    since = {"containerd": (1, 7, 16), "cri-o": (1, 31, 0)}.get(info.name.lower())
    if since is not None and release >= since:
        return PushPath.ONE_SHOT
    return PushPath.NONE


def synchronizes_launched_plugins(info: RuntimeInfo) -> bool:
    """Tell whether a pre-installed plugin gets Synchronize; NRI before 0.7 never sends it."""
    return bool(info.registration_timeout or info.nri_version)


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
