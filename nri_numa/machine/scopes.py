"""What systemd has for the scopes of containers, read and set.

systemd writes all properties of a scope again whenever one of them is set, by the OCI runtime's
memory update as well as by an administrator: a cpuset that only the cgroup has is gone then. It
keeps the properties of a scope in files (systemd.unit(5)) and takes others over D-Bus.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Final

from nri_numa.machine.cgroups import CgroupPlace, relative_path
from nri_numa.machine.cpuset import CPUSet, ListFormatError, NUMASet
from nri_numa.machine.cpuset_files import text

SECONDS: Final = 5.0
"""How long systemd may take for one answer."""
_MANAGER: Final = (
    "/org/freedesktop/systemd1",
    "org.freedesktop.systemd1",
    "org.freedesktop.systemd1.Manager",
)


class Scopes:
    """systemd's view of containers; every method blocks, and may be called in any thread.

    Args:
        transient: where systemd keeps the properties of scopes.
        bus: socket of the system's D-Bus.
    """

    def __init__(
        self,
        transient: str = "/run/systemd/transient",
        bus: str = "/run/dbus/system_bus_socket",
    ) -> None:
        self._transient = transient
        self._bus = bus

    def agree(
        self,
        place: CgroupPlace,
        cpus: CPUSet,
        mems: NUMASet,
        still: Callable[[], bool] = lambda: True,
    ) -> str:
        """Let systemd have the same for a scope as its cgroup has.

        Args:
            place: of the container.
            cpus: of its cgroup.
            mems: the same of memory nodes; empty leaves that property.
            still: whether that is still meant; asked right before anything is changed.

        Returns:
            Why systemd has something else; empty where it has the same, or has no such scope.

        Raises:
            OSError: systemd does not answer.
        """
        unit = os.path.basename(relative_path(place.cgroups_path))
        if not (unit and os.path.exists(os.path.join(self._transient, unit))):
            return ""
        wanted = {"AllowedCPUs": cpus.bits, "AllowedMemoryNodes": mems.bits}
        wanted = {name: bits for name, bits in wanted.items() if bits}
        if not self._differing(unit, wanted):
            return ""
        if not still():
            return "something else is meant by now"
        if refused := self._set(unit, wanted):
            return f"{unit}: {refused}"
        other = self._differing(unit, wanted)
        return f"{unit}: systemd took {', '.join(other)} and has another one" if other else ""

    def _differing(self, unit: str, wanted: dict[str, int]) -> list[str]:
        return [name for name, bits in wanted.items() if self._bits(unit, name) != bits]

    def _bits(self, unit: str, name: str) -> int:
        """A property, ``AllowedCPUs=0-2 5``: of the drop-in where there is one, or of the unit."""
        for file in (f"{unit}.d/50-{name}.conf", unit):
            with contextlib.suppress(OSError):
                for line in reversed(text(os.path.join(self._transient, file)).splitlines()):
                    key, _, value = line.partition("=")
                    if key == name:
                        with contextlib.suppress(ListFormatError):
                            return CPUSet.parse(",".join(value.split())).bits
                        return 0
        return 0

    def _set(self, unit: str, wanted: dict[str, int]) -> str:
        """SetUnitProperties(unit, runtime, properties), with CPU 0 as the lowest bit of a mask.

        Returns:
            Why it was refused; empty where it was not.
        """
        # Imported here: few agents ever need it.
        from jeepney import DBusAddress, MessageType, new_method_call
        from jeepney.io.blocking import open_dbus_connection

        masks = [
            (name, ("ay", bits.to_bytes(-(-bits.bit_length() // 8), "little")))
            for name, bits in wanted.items()
        ]
        call = new_method_call(
            DBusAddress(*_MANAGER), "SetUnitProperties", "sba(sv)", (unit, True, masks)
        )
        with open_dbus_connection(f"unix:path={self._bus}", auth_timeout=SECONDS) as connection:
            answer = connection.send_and_get_reply(call, timeout=SECONDS)
        if answer.header.message_type is MessageType.error:
            return str(answer.body[0]) if answer.body else "refused"
        return ""
