"""What the version of the other side means for us.

A runtime names itself, its version, and from NRI 0.12 on the NRI release inside it. From these
three words follow the event bits it accepts (an unknown bit makes it close the connection, and a
mask of zero means all events, the validator included), and the way in which updates may be pushed
to it without risking that it hangs (containerd#13733).

Versions are read leniently: ``v2.1.9``, ``2.1.9+unknown``, ``1.7.24~ds1`` and ``2.2.0-rc.1`` are
all in use.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
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
    def bit(self) -> int:
        """The mask with this event alone."""
        return 1 << (self.value - 1)

    @property
    def method(self) -> str:
        """The name of the method, ``RunPodSandbox``; used in logs whatever the runtime's style."""
        return _METHOD_NAMES[self]


_METHOD_NAMES: Final = {event: event.name.title().replace("_", "") for event in Event}


EVENTS_OF_0_2: Final = 0x07FF
"""What every runtime knows: the eleven events of NRI 0.2."""

EVENTS_OF_0_10: Final = 0x3FFF
"""With the pod updates and the validation of NRI 0.10."""

PLUGIN_EVENTS: Final = (
    Event.RUN_POD_SANDBOX.bit
    | Event.STOP_POD_SANDBOX.bit
    | Event.REMOVE_POD_SANDBOX.bit
    | Event.CREATE_CONTAINER.bit
    | Event.UPDATE_CONTAINER.bit
    | Event.POST_UPDATE_CONTAINER.bit
    | Event.STOP_CONTAINER.bit
    | Event.REMOVE_CONTAINER.bit
    | Event.UPDATE_POD_SANDBOX.bit
)
"""The events that a plugin that pins CPUs and memory may want to see."""

AGENT_EVENTS: Final = (
    Event.STOP_POD_SANDBOX.bit
    | Event.REMOVE_POD_SANDBOX.bit
    | Event.CREATE_CONTAINER.bit
    | Event.START_CONTAINER.bit
    | Event.POST_START_CONTAINER.bit
    | Event.UPDATE_CONTAINER.bit
    | Event.STOP_CONTAINER.bit
    | Event.REMOVE_CONTAINER.bit
)
"""The events that the agent has a use for.

Each is a round trip under the one lock of the runtime, so no other is asked for.
"""

SANDBOX_EVENTS: Final = Event.RUN_POD_SANDBOX.bit
"""What it has a use for besides where devices place containers or pods are named to schedulers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeInfo:
    """What the runtime says of itself in Configure.

    Attributes:
        name: ``containerd``, ``cri-o`` or another.
        version: the runtime's version as it wrote it.
        nri_version: NRI release inside the runtime; empty before NRI 0.12.
        registration_timeout: seconds; 0 when not told (before NRI 0.7).
        request_timeout: seconds for the answer to any request; 0 when not told.
        config: the drop-in file of a pre-installed plugin, as text; empty for others.
    """

    name: str
    version: str
    nri_version: str
    registration_timeout: float
    request_timeout: float
    config: str


class PushPath(enum.StrEnum):
    """How an update may be sent that no event asked for."""

    UPDATE_CONTAINERS = "update-containers"
    """The plain call; safe from NRI 0.12.1 on."""

    ONE_SHOT = "one-shot"
    """A second registration that answers Synchronize with the updates; safe from NRI 0.6.1 on."""

    NONE = "none"
    """No way is known to be safe: registrations and events deadlock (containerd#10085)."""


_VERSION: Final = re.compile(r"\s*v?([0-9]{1,9})\.([0-9]{1,9})(?:\.([0-9]{1,9}))?(.*)", re.DOTALL)
_NO_RELEASE: Final = (0, 0, 0)


def parse_version(text: str) -> tuple[int, int, int] | None:
    """Return (major, minor, patch) of a version, or None where there is none to see.

    A missing patch level counts as 0, suffixes are ignored.
    """
    match = _VERSION.match(text)
    if match is None:
        return None
    return int(match[1]), int(match[2]), int(match[3] or 0)


def known_nri_version(info: RuntimeInfo) -> tuple[int, int, int] | None:
    """Return the NRI release the runtime tells; None when it tells none or a placeholder.

    Builds outside a release say ``0.0.0-unknown`` or ``(devel)``.
    """
    release = parse_version(info.nri_version)
    return None if release == _NO_RELEASE else release


def allowed_events(info: RuntimeInfo) -> int:
    """Return the mask of all event bits this runtime accepts."""
    if known_nri_version(info) is not None:
        return EVENTS_OF_0_10  # only NRI 0.12 and later tell their version at all
    release = parse_version(info.version) or _NO_RELEASE
    since = {"containerd": (2, 2, 0), "cri-o": (1, 34, 0)}.get(info.name.lower())
    if since is not None and release >= since:
        return EVENTS_OF_0_10
    return EVENTS_OF_0_2


def event_mask(info: RuntimeInfo, wanted: int) -> int:
    """Return the wanted events as far as this runtime knows them; never 0.

    Zero would ask for everything, and on NRI 0.10 and later would make us a validator whose silence
    fails every creation.

    Raises:
        ValueError: nothing of what is wanted exists on this runtime.
    """
    mask = wanted & allowed_events(info)
    if mask == 0:
        raise ValueError(f"none of the events {wanted:#06x} is known to {info.name} {info.version}")
    return mask


def push_path(info: RuntimeInfo) -> PushPath:
    """Return how updates may be pushed to this runtime.

    Sources of the limits: containerd#13733 and nri#301 (fixed in NRI 0.12.1) for the plain call,
    containerd#10085 and nri#79 (fixed in NRI 0.6.1) for a registration while events are served.
    """
    nri = known_nri_version(info)
    if nri is not None and _is_at_least(info.nri_version, nri, (0, 12, 1)):
        return PushPath.UPDATE_CONTAINERS
    if info.registration_timeout or info.nri_version:
        return PushPath.ONE_SHOT  # timeouts are told from NRI 0.7 on
    release = parse_version(info.version) or _NO_RELEASE
    since = {"containerd": (1, 7, 16), "cri-o": (1, 31, 0)}.get(info.name.lower())
    if since is not None and release >= since:
        return PushPath.ONE_SHOT
    return PushPath.NONE


def synchronizes_launched_plugins(info: RuntimeInfo) -> bool:
    """Tell whether a pre-installed plugin gets Synchronize; NRI before 0.7 never sends it."""
    return bool(info.registration_timeout or info.nri_version)


def _is_at_least(text: str, release: tuple[int, int, int], wanted: tuple[int, int, int]) -> bool:
    # v0.12.1-0.20260101… is a build *before* v0.12.1.
    match = _VERSION.match(text)
    before_release = match is not None and match[4].startswith("-")
    return release > wanted or (release == wanted and not before_release)


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
