"""A stand-in for systemd on the system's D-Bus: takes properties of scopes, and writes files.

The real one is in the machine ``systemd`` of tests/vm.
"""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from jeepney import MessageType, Parser, new_error, new_method_return

from nri_numa.machine.cgroups import SystemdScopes
from nri_numa.model.cpuset import CPUSet


class SystemdBus:
    """Listens at a socket of its own.

    Attributes:
        refusing: what it answers instead of setting anything; empty when it sets.
        on_call: called with the lists that it was given, before it writes them.
    """

    def __init__(self, directory: Path) -> None:
        self.transient = directory / "transient"
        self.transient.mkdir(parents=True)
        self.refusing = ""
        self.on_call: Callable[[dict[str, str]], object] = lambda lists: None
        self.welcome = b"OK 0123456789abcdef0123456789abcdef\r\n"
        self.deaf = False
        self.calls: list[tuple[str, dict[str, str]]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / "bus"))
        self._listener.listen()
        self.scopes = SystemdScopes(str(self.transient), str(directory / "bus"))
        Thread(target=self._serve, daemon=True).start()

    def make(self, unit: str, **properties: str) -> None:
        (self.transient / unit).write_text("[Scope]\n")
        for name, value in properties.items():
            self.put(unit, name, value)

    def put(self, unit: str, name: str, value: str) -> None:
        """A property, as systemd writes it down."""
        drop_ins = self.transient / f"{unit}.d"
        drop_ins.mkdir(exist_ok=True)
        (drop_ins / f"50-{name}.conf").write_text(f"[Scope]\n{name}=\n{name}={value}\n")

    def has(self, unit: str, name: str = "AllowedCPUs") -> str:
        """The line of a property, without its name."""
        return (self.transient / f"{unit}.d/50-{name}.conf").read_text().rpartition("=")[2].strip()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            Thread(target=self._talk, args=(peer,), daemon=True).start()

    def _talk(self, peer: socket.socket) -> None:
        with peer:
            line = b""
            while not line.endswith(b"BEGIN\r\n"):
                if not (piece := peer.recv(1)):
                    return
                line += piece
                if line.endswith(b"\r\n") and b"AUTH" in line:
                    peer.sendall(self.welcome)
                    line = b""
            parser, serial = Parser(), 0
            while data := peer.recv(4096):
                parser.add_data(data)
                while (message := parser.get_next_message()) is not None:
                    assert message.header.message_type is MessageType.method_call
                    serial += 1
                    peer.sendall(self._answer(message).serialise(serial=serial))

    def _answer(self, message: Any) -> Any:
        if len(message.body) == 0:  # Hello
            return new_method_return(message, "s", (":1.1",))
        unit, runtime, properties = message.body
        if self.refusing:
            return new_error(message, "org.freedesktop.systemd1.Failed", "s", (self.refusing,))
        assert runtime
        values = {name: _value_text(value) for name, (_, value) in properties}
        self.calls.append((unit, values))
        self.on_call(values)
        for name, value in values.items():
            if not self.deaf:
                setting = "CPUQuota" if name == "CPUQuotaPerSecUSec" else name
                self.put(unit, setting, value.replace(",", " "))
        return new_method_return(message)


def _value_text(value: bytes | int) -> str:
    """A list, or the quota as a percentage, which is empty for none: as the files have them."""
    if isinstance(value, bytes):
        return str(CPUSet.from_bits(int.from_bytes(value, "little")))
    return "" if value == 2**64 - 1 else f"{value // 10_000}%"


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[SystemdBus]:
    bus = SystemdBus(tmp_path / "systemd")
    yield bus
    bus.close()
