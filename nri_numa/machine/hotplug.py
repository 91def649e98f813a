"""Hot-plug of CPUs, from the kernel's uevents over netlink(7), and rediscovery of the machine.

An event is only a trigger: the online CPUs are always read from sysfs. Without events (no
permission, a network namespace without them) they are polled every few seconds.

One socket and twenty lines: pyroute2 would do the same, with 13 MiB of memory and a sixth of a
second in which the interpreter blocks requests.
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
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.machine import Topology
from nri_numa.text import human_bytes

NETLINK_KOBJECT_UEVENT: Final = 15
KERNEL_UEVENT_GROUP: Final = 1
"""Multicast group of the kernel's own messages; those of udev are in group 2."""
UEVENT_RECEIVE_BYTES: Final = 16_384
UEVENT_DEBOUNCE_S: Final = 0.1
"""Seconds to collect a burst of events, such as those of a package of CPUs."""
CPU_UEVENT_ACTIONS: Final = frozenset(
    (b"ACTION=add", b"ACTION=remove", b"ACTION=online", b"ACTION=offline")
)


def concerns_cpus(uevent: bytes) -> bool:
    """True if a kernel uevent reports that a CPU was added, removed, or set online or offline.

    A uevent is ``action@devpath`` and ``KEY=value`` fields, each ended by NUL. Other messages, such
    as udev's binary form, never match.
    """
    head, _, body = uevent.partition(b"\0")
    fields = body.split(b"\0")
    return b"@" in head and b"SUBSYSTEM=cpu" in fields and not CPU_UEVENT_ACTIONS.isdisjoint(fields)


def open_uevent_socket() -> socket.socket:
    """Open the kernel's socket of uevents.

    Raises:
        OSError: uevents are not available here.
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

    Without events this waits until cancelled, and polling goes on. ``no_events`` is called with the
    reason, and True if there were events before.
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
        # Only the kernel has port 0; messages of processes in the group are ignored.
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


# --- Changes of a running machine, read without a complete discovery ------------------------------
# CPUs and NUMA nodes are added and removed; memory is added, or a balloon takes it; an
# administrator allocates huge pages; the pods' cgroup gets another cpuset. Cores and caches change
# only together with CPUs. The check reads a few files for each NUMA node.


def rediscover_topology(root: Path | str, topology: Topology) -> Topology:
    """Read the machine again; return the same object if nothing changed.

    Raises:
        TopologyError: the machine is no longer readable.
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
    new_topology = discover_tree(tree)
    return topology if new_topology == topology else new_topology


def _read_online_numa_nodes(tree: Tree, topology: Topology) -> NUMASet:
    """Read the online NUMA nodes; those of the topology if the kernel reports none."""
    listed = NUMASet.parse_or_none(tree.read_file(f"{NODE_DIR}/online") or "") or ()
    present = set(tree.list_directory(NODE_DIR))
    return NUMASet(i for i in listed if f"node{i}" in present) or topology.numa_ids


def changed_texts_by_field(prior: Topology, current: Topology) -> dict[str, str]:
    """List the changed fields for a log line: the current value by short name.

    Memory also has its prior value. Values are rounded for people; smaller changes are left out.
    """
    pairs = [(i, prior.numa_nodes[i], n) for i, n in sorted(current.numa_nodes.items())
            if i in prior.numa_nodes]  # fmt: skip
    memory = {i: (human_bytes(p.memory_bytes), human_bytes(n.memory_bytes)) for i, p, n in pairs}
    pages = {i: (_hugepages_text(p.hugepages), _hugepages_text(n.hugepages)) for i, p, n in pairs}
    valid = [partition.cgroup for partition in current.partitions if not partition.problem]
    allowed = prior.allowed & current.online != current.allowed & prior.online
    texts = {
        "offline_cpus": str(prior.online - current.online),
        "online_cpus": str(current.online - prior.online),
        "allowed_cpus": str(current.allowed) if allowed else "",
        "partitions": (",".join(valid) or "none") if prior.partitions != current.partitions else "",
        "withheld_mems": str(current.withheld_memory),
        "numa_nodes": str(current.numa_ids) if prior.numa_ids != current.numa_ids else "",
        "memory": _changes_by_node_text(memory),
        "hugepages": _changes_by_node_text(pages),
    }
    if prior.withheld_memory == current.withheld_memory:
        del texts["withheld_mems"]
    return {name: text for name, text in texts.items() if text or name == "withheld_mems"}


def _changes_by_node_text(numa_nodes: Mapping[int, tuple[str, str]]) -> str:
    """List changed NUMA nodes, such as ``0=7.9 GiB -> 8 GiB``."""
    return ", ".join(f"{i}={a} -> {b}" for i, (a, b) in numa_nodes.items() if a != b)


def _hugepages_text(hugepages: Mapping[int, int]) -> str:
    return "+".join(f"{n // size}x{size >> 10}Ki" for size, n in hugepages.items()) or "none"
