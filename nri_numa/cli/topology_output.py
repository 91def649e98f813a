"""How ``nri-numa topology`` shows a machine: as tables for eyes, as JSON or YAML for programs.

Tables keep to a width: long CPU lists are wrapped inside their column, machines with many NUMA
nodes get their distances as "who is near" instead of a matrix. Without a width, which is for pipes,
lists stay in one piece and nothing is left out.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Literal

import yaml

from nri_numa.machine.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.machine.model import CoreKind, NUMANode, Topology, topology_document
from nri_numa.machine.pci import PCIDevice

__all__ = ["WIDTH", "Output", "render_topology", "topology_document"]

WIDTH = 80
Output = Literal["table", "json", "yaml"]

_MATRIX_LIMIT = 16  # columns of four characters that fit beside the row's head
_GROUP_LIMIT = 16  # L3 groups that are listed one by one
_CELL_LIMIT = 22  # of columns but the last; three of them leave room for a list


def render_topology(
    topology: Topology,
    output: Output = "table",
    *,
    reserved: CPUSet = NO_CPUS,
    devices: Sequence[PCIDevice] | None = None,
    width: int | None = WIDTH,
) -> str:
    """Show a machine.

    Args:
        topology: the machine.
        output: the form.
        reserved: CPUs that the configuration keeps for the system.
        devices: its PCI devices; None where nobody looked.
        width: characters of a table's line, `WIDTH` at least; None for as many as it takes.

    Returns:
        Text that ends with a line feed.
    """
    match output:
        case "json":
            document = topology_document(topology, reserved=reserved, devices=devices)
            return json.dumps(document, indent=2) + "\n"
        case "yaml":
            document = topology_document(topology, reserved=reserved, devices=devices)
            return str(yaml.safe_dump(document, sort_keys=False))
        case "table":
            return _table(
                topology, reserved, devices or (), None if width is None else max(width, WIDTH)
            )


def _table(
    topology: Topology, reserved: CPUSet, devices: Sequence[PCIDevice], width: int | None
) -> str:
    blocks = [
        _summary(topology, reserved, width),
        _numa_table(topology, width),
        _distances(topology, width),
    ]
    if len(topology.sockets) > 1:
        rows = [
            (str(s.id), str(s.numa_nodes) or "-", str(len(s.cpus)), str(s.cpus))
            for _, s in sorted(topology.sockets.items())
        ]
        blocks.append(_columns(("SOCKET", "NUMA NODES", "CPUS", "CPU LIST"), rows, width))
    blocks.append(_l3_table(topology, width))
    blocks.append(_device_table(devices, width))
    if topology.warnings:
        lines = [
            line
            for warning in topology.warnings
            for line in textwrap.wrap(
                warning, width or WIDTH, initial_indent="  - ", subsequent_indent="    "
            )
        ]
        blocks.append(["Odd about this machine:", *lines])
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _summary(topology: Topology, reserved: CPUSet, width: int | None) -> list[str]:
    threads = Counter(len(core.cpus) for core in topology.cores.values())
    if len(threads) == 1:
        (count,) = threads
        smt = f"{_many(count, 'thread')} each"
    else:
        smt = ", ".join(
            f"{cores} with {_many(count, 'thread')}"
            for count, cores in sorted(threads.items(), reverse=True)
        )
    memory = sum(n.memory_bytes for n in topology.numa_nodes.values())
    lines = [
        f"{_many(len(topology.sockets), 'socket')}, "
        f"{_many(len(topology.numa_nodes), 'NUMA node')}, "
        f"{_many(len(topology.cores), 'core')} ({smt}), "
        f"{_many(len(topology.online), 'CPU')}, {_size(memory)} of memory"
    ]
    facts = [
        ("online", topology.online),
        ("offline", topology.present - topology.online),
        ("isolated", topology.isolated),
        ("nohz_full", topology.nohz_full),
        ("reserved", reserved),
        ("for containers", topology.allowed if topology.allowed != topology.online else NO_CPUS),
    ]
    for kind in (CoreKind.PERFORMANCE, CoreKind.EFFICIENT):
        cpus = CPUSet(i for c in topology.cores.values() if c.kind is kind for i in c.cpus)
        facts.append((kind.value, cpus))
    wrapped = [line for text in lines for line in textwrap.wrap(text, width or WIDTH)]
    for name, cpus in facts:
        if cpus:
            wrapped += _hanging(f"  {name}: ", str(cpus), width)
    siblings = [str(c.cpus) for _, c in sorted(topology.cores.items()) if len(c.cpus) > 1]
    if siblings:
        shown = [line.rstrip() for line in _hanging("  siblings: ", " ".join(siblings), width)]
        cut = width is not None and len(shown) > 1
        wrapped.append(f"{shown[0][: (width or WIDTH) - 2].rstrip()} …" if cut else shown[0])
    return wrapped


def _numa_table(topology: Topology, width: int | None) -> list[str]:
    hugepages = any(n.hugepages for n in topology.numa_nodes.values())
    head = ("NUMA NODE", "MEMORY", *(("HUGE PAGES",) if hugepages else ()), "CPUS", "CPU LIST")
    rows = []
    for _, n in sorted(topology.numa_nodes.items()):
        memory = _size(n.memory_bytes) if n.memory_bytes else "none"
        if n.id in topology.withheld_memory:
            memory += " (not for us)"
        pages = _hugepages(n) if hugepages else None
        rows.append(
            (str(n.id), memory, *(() if pages is None else (pages,)), str(len(n.cpus)), str(n.cpus))
        )
    homeless = topology.online - topology.cpus_of(topology.numa_ids)
    if homeless:
        blank = ("-",) if hugepages else ()
        rows.append(("none", "-", *blank, str(len(homeless)), str(homeless)))
    return _columns(head, rows, width)


def _device_table(devices: Sequence[PCIDevice], width: int | None) -> list[str]:
    """One row for each kind on each NUMA node: a card may have a hundred virtual functions."""
    groups: dict[tuple[str, str], list[str]] = {}
    # Order: by kind, NUMA node (those of none last), address.
    for one in sorted(devices, key=lambda d: (d.kind, d.numa_node is None, d.numa_node, d.address)):
        where = "unknown" if one.numa_node is None else str(one.numa_node)
        groups.setdefault((one.kind, where), []).append(one.address)
    if not groups:
        return []
    rows = [
        (kind, where, str(len(addresses)), ",".join(addresses))
        for (kind, where), addresses in groups.items()
    ]
    return _columns(("DEVICES", "NUMA NODE", "COUNT", "PCI ADDRESSES"), rows, width)


def _hugepages(numa_node: NUMANode) -> str:
    return (
        (
            " ".join(
                f"{total // size}x{_size(size)}" for size, total in numa_node.hugepages.items()
            )
            or "none"
        )
        .replace(" GiB", "Gi")
        .replace(" MiB", "Mi")
        .replace(" KiB", "Ki")
    )


def _distances(topology: Topology, width: int | None) -> list[str]:
    ids = list(topology.numa_ids)
    if len(ids) == 1:
        return []
    if len(ids) <= _MATRIX_LIMIT:
        lines = ["DISTANCE    " + "".join(f"{i:>4}" for i in ids)]
        lines += [
            f"  from {a:>4} " + "".join(f"{topology.distance(a, b):>4}" for b in ids) for a in ids
        ]
        return lines
    rows = []
    for a in ids:
        near: dict[int, list[int]] = {}
        for b in ids:
            near.setdefault(topology.distance(a, b), []).append(b)
        text = "  ".join(f"{d}: {NUMASet(nodes)}" for d, nodes in sorted(near.items()))
        rows.append((str(a), text))
    return _columns(("FROM", "DISTANCE: NUMA NODES"), rows, width)


def _l3_table(topology: Topology, width: int | None) -> list[str]:
    groups = [g for _, g in sorted(topology.l3_groups.items())]
    if not groups:
        return ["L3 caches: the kernel tells none"]
    sizes = Counter(len(g.cpus) for g in groups)
    of = " and ".join(
        f"{count} of {_many(size, 'CPU')}" for size, count in sorted(sizes.items(), reverse=True)
    )
    first = f"L3 caches: {of}"
    limit = len(groups) if width is None else _GROUP_LIMIT
    rows = [
        (str(g.id), str(topology.numa_of(g.cpus)) or "-", str(len(g.cpus)), str(g.cpus))
        for g in groups[:limit]
    ]
    if len(groups) > limit:
        first += f"; the first {_GROUP_LIMIT} (-o json shows all):"
    return [
        *textwrap.wrap(first, width or WIDTH),
        *_columns(("L3 GROUP", "NUMA NODES", "CPUS", "CPU LIST"), rows, width),
    ]


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _size(count: int) -> str:
    """Show bytes in the largest binary unit of which there is at least one."""
    for unit, shift in (("TiB", 40), ("GiB", 30), ("MiB", 20)):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.1f}".removesuffix(".0") + f" {unit}"
    return f"{count >> 10} KiB"


def _wrap_list(text: str, width: int) -> list[str]:
    """Break a list at commas, or blanks, so that no line is longer than ``width``."""
    lines: list[str] = []
    for word in text.replace(",", ",\0").replace(" ", " \0").split("\0"):
        if lines and len(lines[-1]) + len(word.rstrip()) <= width:
            lines[-1] += word
        else:
            lines.append(word)
    return [line.rstrip() for line in lines]


def _hanging(head: str, text: str, width: int | None) -> list[str]:
    lines = [text] if width is None else _wrap_list(text, width - len(head))
    return [head + lines[0], *(" " * len(head) + line for line in lines[1:])]


def _columns(head: Sequence[str], rows: Iterable[Sequence[str]], width: int | None) -> list[str]:
    """Lay rows out in columns; cells that are too long are wrapped in their place."""
    table = [tuple(head), *(tuple(cell or "none" for cell in row) for row in rows)]
    widths = [max(len(c) for c in col) for col in zip(*table, strict=True)]
    if width is not None:
        widths = [min(w, _CELL_LIMIT) for w in widths]
        widths[-1] = width - sum(widths[:-1]) - 2 * (len(widths) - 1)
    lines: list[str] = []
    for row in table:
        cells = [_wrap_list(cell, width) for cell, width in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            line = "  ".join(f"{part:<{width}}" for part, width in zip(parts, widths, strict=True))
            lines.append(line.rstrip())
    return lines
