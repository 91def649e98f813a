"""The life of one NRI connection, as a table.

Two rules. Every change of phase is in this file. This file does not know which side we are: the
same table serves the plugin and the runtime, since both see the same steps.

A connection begins `CONNECTED`. The plugin registers; the runtime configures it, synchronises it in
one or more slices, and then sends events for ever. The *answer* to RegisterPlugin is not in the
table: containerd sends it from another thread, and it was seen to arrive after Configure.

Events are legal from `CONFIGURED` on, because NRI before 0.7 never synchronises the plugins it
launches itself. A second Synchronize is legal too; it replaces the picture.

Any error, local or remote, ends in `DEAD`, and the end of the socket in `CLOSED`; nothing leads out
of either.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final


class Phase(enum.Enum):
    """Where a connection stands."""

    CONNECTED = "connected"
    REGISTERING = "registering"
    CONFIGURING = "configuring"
    CONFIGURED = "configured"
    SYNCHRONIZING = "synchronizing"
    ACTIVE = "active"
    CLOSED = "closed"
    DEAD = "dead"


class Step(enum.Enum):
    """What moves a connection on."""

    REGISTER = "RegisterPlugin"
    CONFIGURE = "Configure"
    CONFIGURE_ANSWERED = "the answer to Configure"
    SYNCHRONIZE = "Synchronize"
    SYNCHRONIZE_ANSWERED = "the answer to Synchronize"
    EVENT = "an event"
    UPDATE_CONTAINERS = "UpdateContainers"
    SHUTDOWN = "Shutdown"


_TABLE: Final = {
    Phase.CONNECTED: {
        Step.REGISTER: Phase.REGISTERING,
    },
    Phase.REGISTERING: {
        # Real runtimes accept a second registration and ignore it.
        Step.REGISTER: Phase.REGISTERING,
        Step.CONFIGURE: Phase.CONFIGURING,
        Step.SHUTDOWN: Phase.REGISTERING,
    },
    Phase.CONFIGURING: {
        Step.REGISTER: Phase.CONFIGURING,
        Step.CONFIGURE_ANSWERED: Phase.CONFIGURED,
        Step.SHUTDOWN: Phase.CONFIGURING,
    },
    Phase.CONFIGURED: {
        Step.REGISTER: Phase.CONFIGURED,
        Step.SYNCHRONIZE: Phase.SYNCHRONIZING,
        Step.EVENT: Phase.CONFIGURED,
        Step.UPDATE_CONTAINERS: Phase.CONFIGURED,
        Step.SHUTDOWN: Phase.CONFIGURED,
    },
    Phase.SYNCHRONIZING: {
        Step.REGISTER: Phase.SYNCHRONIZING,
        Step.SYNCHRONIZE: Phase.SYNCHRONIZING,
        Step.SYNCHRONIZE_ANSWERED: Phase.ACTIVE,
        # The update and the first slice may cross on the wire.
        Step.UPDATE_CONTAINERS: Phase.SYNCHRONIZING,
        Step.SHUTDOWN: Phase.SYNCHRONIZING,
    },
    Phase.ACTIVE: {
        Step.REGISTER: Phase.ACTIVE,
        Step.SYNCHRONIZE: Phase.SYNCHRONIZING,
        Step.EVENT: Phase.ACTIVE,
        Step.UPDATE_CONTAINERS: Phase.ACTIVE,
        Step.SHUTDOWN: Phase.ACTIVE,
    },
    Phase.CLOSED: {},
    Phase.DEAD: {},
}

TRANSITIONS: Final[Mapping[Phase, Mapping[Step, Phase]]] = MappingProxyType(_TABLE)
"""Phase and step to the next phase; what is missing is illegal."""
