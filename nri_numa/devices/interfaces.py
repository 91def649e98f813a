"""The network interfaces in a pod's namespace, and which devices they are.

A network card that was moved into a pod is not in the host's sysfs any more, but the kernel still
names its device (``IFLA_PARENT_DEV_NAME``, Linux 5.14). The namespace is entered by a thread that
ends with the question: a thread that came back from elsewhere is of no use, one that stayed
would keep the namespace, and the card in it, after the pod has gone; and nothing is forked. Within
its thread pyroute2 is used as in any program.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any, Final, NamedTuple

from nri_numa.model.workload import MAX_CONTAINER_DEVICES

CLONE_NEWNET: Final = 0x40000000
INTERFACE_QUERY_TIMEOUT_S: Final = 1.0
"""For an answer of the kernel, which is a matter of milliseconds."""


class ParentDevice(NamedTuple):
    """The device of a network interface: its bus, and its name there."""

    bus: str
    name: str


def list_interface_parents(
    namespace: str, seconds: float = INTERFACE_QUERY_TIMEOUT_S
) -> tuple[ParentDevice, ...] | str:
    """The interfaces with a device in a network namespace, or why they are not known. Blocks.

    ``namespace`` is a path such as ``/run/netns/cni-…`` or ``/proc/1234/ns/net``; our own gives
    none.
    """
    answer: list[tuple[ParentDevice, ...] | str] = []

    def list_interfaces() -> None:
        try:
            if os.stat(namespace).st_ino == os.stat("/proc/self/ns/net").st_ino:
                answer.append(())  # it is on the host's network, whose cards belong to no pod
                return
            _enter_namespace(namespace)
            answer.append(_list_parent_devices())
        except OSError as error:
            answer.append(f"{namespace}: {error.strerror or error}")
        except Exception as error:  # pyroute2 has exceptions of many families
            answer.append(f"{namespace}: {error!r}")

    thread = threading.Thread(target=list_interfaces, name="network namespace", daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else f"{namespace}: the kernel did not answer within {seconds:g} s"


def preload_pyroute2() -> None:
    """Import what a question needs, so that the first one is quick."""
    import pyroute2  # noqa: F401


def _enter_namespace(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    # Whatever is in the namespace's place must not make anybody wait.
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if libc.setns(descriptor, CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(descriptor)


def _list_parent_devices() -> tuple[ParentDevice, ...]:
    import pyroute2

    found: list[ParentDevice] = []
    route: Any = pyroute2.IPRoute()
    with route:
        for link in route.get_links():
            bus = link.get_attr("IFLA_PARENT_DEV_BUS_NAME")
            name = link.get_attr("IFLA_PARENT_DEV_NAME")
            if bus and name and len(found) < MAX_CONTAINER_DEVICES:
                found.append(ParentDevice(bus, name))
    return tuple(found)
