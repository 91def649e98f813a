"""CPUs that come and go: the kernel's own word for it, uevents over netlink(7).

An event only says *look now*: what is online is always read from sysfs, and without events (no
permission, a network namespace the kernel does not tell) that is done every few seconds anyway.

One socket and twenty lines: pyroute2 would do the same, for 13 MiB of memory and a sixth of a
second with the interpreter held while requests wait.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

from nri_numa.machine.allowed import read_usable_ids
from nri_numa.machine.sysfs import discover_tree, read_memory_totals, read_online
from nri_numa.machine.tree import NODE_DIR, Tree, open_tree
from nri_numa.model.cpuset import ListFormatError, NUMASet
from nri_numa.model.machine import Topology
from nri_numa.text import human_bytes

NETLINK_KOBJECT_UEVENT: Final = 15
KERNEL_UEVENT_GROUP: Final = 1
"""Multicast group of the kernel's own messages; udev's processed ones are in group 2."""
UEVENT_RECEIVE_BYTES: Final = 16_384
UEVENT_DEBOUNCE_S: Final = 0.1
"""A package of CPUs goes in a burst of events; one look after it is enough."""
CPU_UEVENT_ACTIONS: Final = frozenset(
    (b"ACTION=add", b"ACTION=remove", b"ACTION=online", b"ACTION=offline")
)


def concerns_cpus(uevent: bytes) -> bool:
    """Whether a kernel uevent says that a CPU came, went, or was switched on or off.

    It is ``action@devpath`` and ``KEY=value`` fields, ended by NUL each; anything else, such as
    udev's binary form, is none.
    """
    head, _, rest = uevent.partition(b"\0")
    fields = rest.split(b"\0")
    return b"@" in head and b"SUBSYSTEM=cpu" in fields and not CPU_UEVENT_ACTIONS.isdisjoint(fields)


def open_uevent_socket() -> socket.socket:
    """Open the kernel's socket of uevents.

    Raises:
        OSError: not here.
    """
    source = socket.socket(
        socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, NETLINK_KOBJECT_UEVENT
    )
    try:
        source.setblocking(False)
        source.bind((0, KERNEL_UEVENT_GROUP))
    except OSError:
        source.close()
        raise
    return source


async def watch_cpu_events(
    changed: Callable[[], Awaitable[None]],
    no_events: Callable[[OSError, bool], None],
    open_source: Callable[[], socket.socket] = open_uevent_socket,
) -> None:
    """Call ``changed`` after each burst of events about CPUs, until cancelled.

    Where there are no events this waits for ever; polling goes on without it. ``no_events`` is
    called with the reason, and whether there were some before.
    """
    try:
        source = open_source()
    except OSError as error:
        no_events(error, False)
        await asyncio.get_running_loop().create_future()
        return
    loop = asyncio.get_running_loop()
    burst = asyncio.Event()

    def on_socket_readable() -> None:
        try:
            data, sender = source.recvfrom(UEVENT_RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                burst.set()  # events were lost, so anything may have changed
                return
            loop.remove_reader(source.fileno())
            no_events(error, True)
            return
        # Only the kernel has port 0; a process that got hold of the group is not believed.
        if (not isinstance(sender, tuple) or sender[:1] == (0,)) and concerns_cpus(data):
            burst.set()

    loop.add_reader(source.fileno(), on_socket_readable)
    try:
        while True:
            await burst.wait()
            await asyncio.sleep(UEVENT_DEBOUNCE_S)
            burst.clear()
            await changed()
    finally:
        loop.remove_reader(source.fileno())
        source.close()


# --- What changes on a machine that runs, read again without discovering everything anew ----------
# CPUs and NUMA nodes come and go; memory is added, or a balloon takes it; an administrator
# allocates huge pages; the pods' cgroup gets another cpuset. Which CPUs share a core or a cache
# does not change without CPUs coming or going. Reading takes a few files for each NUMA node.


def rediscover_topology(root: Path | str, topology: Topology) -> Topology:
    """Read the machine as it is now; the same object when nothing changed.

    Raises:
        TopologyError: when the machine cannot be read any more.
    """
    tree = open_tree(root)
    limits = read_usable_ids(tree, topology.isolated)
    with_memory = NUMASet(i for i, n in topology.numa_nodes.items() if n.memory_bytes)
    amounts = {
        i: (node.memory_bytes, dict(node.hugepages)) for i, node in topology.numa_nodes.items()
    }
    if (
        read_online(root) == topology.online
        and _read_online_numa_nodes(tree, topology) == topology.numa_ids
        and limits.allowed_cpus(topology.online) == topology.allowed
        and limits.withheld_memory_nodes(with_memory) == topology.withheld_memory
        and read_memory_totals(tree, topology) == amounts
    ):
        return topology
    found = discover_tree(tree)
    return topology if found == topology else found


def _read_online_numa_nodes(tree: Tree, topology: Topology) -> NUMASet:
    """NUMA nodes that are online; those that are known where the kernel tells none."""
    try:
        listed = NUMASet.parse(tree.read_file(f"{NODE_DIR}/online") or "")
    except ListFormatError:
        return topology.numa_ids
    there = set(tree.list_directory(NODE_DIR))
    return NUMASet(i for i in listed if f"node{i}" in there) or topology.numa_ids


def changed_texts_by_field(before: Topology, after: Topology) -> dict[str, str]:
    """What is different, for a line in the log: short name to what it is now.

    Of memory also what it was, as people read it: what differs by less than that is not named.
    """
    both = [(i, before.numa_nodes[i], n) for i, n in sorted(after.numa_nodes.items())
            if i in before.numa_nodes]  # fmt: skip
    memory = {i: (human_bytes(was.memory_bytes), human_bytes(n.memory_bytes)) for i, was, n in both}
    pages = {
        i: (_hugepages_text(was.hugepages), _hugepages_text(n.hugepages)) for i, was, n in both
    }
    valid = [one.cgroup for one in after.partitions if not one.problem]
    allowed = before.allowed & after.online != after.allowed & before.online
    found = {
        "gone": str(before.online - after.online),
        "new": str(after.online - before.online),
        "allowed": str(after.allowed) if allowed else "",
        "partitions": (",".join(valid) or "none") if before.partitions != after.partitions else "",
        "memory_withheld": str(after.withheld_memory),
        "numa_nodes": str(after.numa_ids) if before.numa_ids != after.numa_ids else "",
        "memory": _changes_by_node_text(memory),
        "hugepages": _changes_by_node_text(pages),
    }
    if before.withheld_memory == after.withheld_memory:
        del found["memory_withheld"]
    return {name: text for name, text in found.items() if text or name == "memory_withheld"}


def _changes_by_node_text(numa_nodes: Mapping[int, tuple[str, str]]) -> str:
    """``0=7.9 GiB -> 8 GiB``, for each NUMA node that has something else."""
    return ", ".join(f"{i}={was} -> {now}" for i, (was, now) in numa_nodes.items() if was != now)


def _hugepages_text(hugepages: Mapping[int, int]) -> str:
    return "+".join(f"{n // size}x{size >> 10}Ki" for size, n in hugepages.items()) or "none"
