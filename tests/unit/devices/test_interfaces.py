"""Network interfaces in a namespace of their own, asked of the real kernel."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nri_numa.devices import watch

PATIENCE_S = 180.0

_INSIDE = (
    "import os, sys\nlibc = __import__('ctypes').CDLL(None, use_errno=True)\n"
    "sys.exit(3) if libc.unshare(0x40000000) else print('there', flush=True)\n"
    "sys.stdin.read()\n"
)


@pytest.fixture
def namespace() -> Iterator[str]:
    """Path of a network namespace that a process of ours made."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to make a network namespace")
    with subprocess.Popen(
        [sys.executable, "-c", _INSIDE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != b"there\n":
            pytest.skip("needs network namespaces, which this kernel or container refuses")
        yield f"/proc/{process.pid}/ns/net"
        process.stdin.close()


def _moved_in(namespace: str, name: str) -> None:
    """Make a virtual card and move it into the namespace."""
    import pyroute2

    with pyroute2.IPRoute() as route:
        try:
            route.link("add", ifname=name, kind="veth", peer={"ifname": f"{name}p"})
        except Exception as error:
            pytest.skip(f"needs veth interfaces, which this kernel refuses: {error}")
        try:
            route.link("set", index=route.link_lookup(ifname=f"{name}p")[0], net_ns_fd=namespace)
        finally:
            if left := route.link_lookup(ifname=f"{name}p"):
                route.link("del", index=left[0])


def test_the_cards_of_a_namespace_are_told_and_ours_are_not(namespace: str) -> None:
    """A veth has no device behind it; that it is seen at all shows where we were."""
    name = f"nn{os.getpid() % 100_000}"
    _moved_in(namespace, name)
    seen: list[str] = []

    def look() -> None:
        import pyroute2

        watch._enter_namespace(namespace)
        with pyroute2.IPRoute() as route:
            seen.extend(link.get_attr("IFLA_IFNAME") for link in route.get_links())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert sorted(seen) == ["lo", f"{name}p"]
    assert watch.list_interface_parents(namespace, PATIENCE_S) == ()


def test_looking_leaves_us_where_we_are_and_keeps_nothing(namespace: str) -> None:
    before = os.stat("/proc/self/ns/net").st_ino
    for _ in range(3):
        assert watch.list_interface_parents(namespace, PATIENCE_S) == ()
    assert os.stat("/proc/self/ns/net").st_ino == before
    there = os.stat(namespace).st_ino
    end = time.monotonic() + PATIENCE_S
    while kept := _kept(there):  # a thread that has ended for us may still be ending for the kernel
        assert time.monotonic() < end, kept
        time.sleep(0.01)


def _kept(namespace: int) -> list[str]:
    """What of this process keeps a network namespace: open files, and threads in it."""
    found: list[str] = []
    for kind, below in (("fd", ""), ("task", "ns/net")):
        for one in sorted(Path("/proc/self", kind).iterdir()):
            link = one / below
            with contextlib.suppress(OSError):  # it ended meanwhile
                if os.readlink(link) == f"net:[{namespace}]":
                    found.append(str(link))
    return found


def test_our_own_namespace_is_the_hosts_whose_cards_are_nobodys() -> None:
    assert watch.list_interface_parents("/proc/self/ns/net", PATIENCE_S) == ()


def test_a_card_with_a_device_is_told_by_its_name_on_the_bus() -> None:
    """Where this machine has a card: what sysfs says of it is what the kernel's answer says."""
    visible = {name for _, name in socket.if_nameindex()}
    expected = set()
    for interface in sorted(Path("/sys/class/net").iterdir()):
        device = interface / "device"
        if device.exists() and interface.name in visible:
            bus = os.path.basename(os.path.realpath(device / "subsystem"))
            expected.add((bus, os.path.basename(os.path.realpath(device))))
    if not expected:
        pytest.skip("needs a network card with a device, which this machine has none of")
    if tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < (5, 14):
        pytest.skip("needs Linux 5.14, where the kernel tells the device of an interface")
    assert {tuple(parent) for parent in watch._list_parent_devices()} == expected


WHAT = ["gone", "a file", "a pipe", "a directory"]


@pytest.mark.parametrize("make", [Path.exists, Path.touch, os.mkfifo, Path.mkdir], ids=WHAT)
def test_what_is_no_namespace_is_said_soon(tmp_path: Path, make: Callable[[Path], object]) -> None:
    path = tmp_path / "ns"
    make(path)
    answer = watch.list_interface_parents(str(path), PATIENCE_S)
    assert isinstance(answer, str)
    assert answer.startswith(f"{path}: ")
