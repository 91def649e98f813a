"""sd_notify: what systemd is told, over a real datagram socket."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_numa.observe.notify import SystemdNotifier


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """A service manager's socket and the value of NOTIFY_SOCKET."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.settimeout(1)
        if request.param == "path":
            name = str(tmp_path / "notify")
            sock.bind(name)
            yield name, sock
        else:
            name = f"nri-numa-test-{os.getpid()}-{id(sock)}"
            sock.bind(f"\0{name}")
            yield f"@{name}", sock


def test_every_state_is_told(manager: tuple[str, socket.socket]) -> None:
    address, sock = manager
    notifier = SystemdNotifier({"NOTIFY_SOCKET": address})
    assert notifier.is_enabled
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    notifier.notify_ready("link active")
    notifier.notify_ready()
    notifier.notify_reloading()
    notifier.notify_status("two\nlines")
    notifier.notify_watchdog()
    notifier.notify_stopping()
    told = [sock.recv(4096).decode() for _ in range(6)]
    assert told[0] == "READY=1\nSTATUS=link active"
    assert told[1] == "READY=1"
    state, stamp = told[2].split("\n")
    assert state == "RELOADING=1"
    name, _, value = stamp.partition("=")
    assert name == "MONOTONIC_USEC"
    assert before <= int(value) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    assert told[3:] == ["STATUS=two lines", "WATCHDOG=1", "STOPPING=1"]


@pytest.mark.parametrize(
    "environ", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1"}, {"WATCHDOG_USEC": "1"}]
)
def test_without_a_manager_nothing_happens(environ: dict[str, str]) -> None:
    notifier = SystemdNotifier(environ)
    assert not notifier.is_enabled
    notifier.notify_ready("x")
    notifier.notify_stopping()


def test_a_manager_that_went_away_is_no_reason_to_fail(tmp_path: Path) -> None:
    SystemdNotifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).notify_ready()
