"""``nri-numa topology`` and ``capture``: commands that read a machine; and synthetic machines.

Tables fit a width: for many NUMA nodes, distances are lists of the nodes at each distance instead
of a matrix. In a pipe lists are not wrapped and nothing is left out.
"""

from __future__ import annotations

import difflib
import gzip
import io
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from nri_numa.cli.common import (
    Failure,
    listing_option,
    machine_option,
    show_progress,
    sysfs_option,
    translate_errors,
)
from nri_numa.cli.output import (
    DEFAULT_WIDTH_COLUMNS,
    CellWrapping,
    Column,
    fit_table,
    max_table_width,
    wrap_list,
    wrap_text,
    write_document_or_lines,
)
from nri_numa.machine.pci import list_pci_devices
from nri_numa.machine.sysfs import discover_topology, discover_tree
from nri_numa.machine.tree import CAPTURED_PATHS, LINK_PATHS, Tree, open_tree
from nri_numa.model.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.model.machine import (
    CoreKind,
    NUMANode,
    PCIDevice,
    Topology,
    count_text,
    cpus_text,
    inflect_for_ids,
    topology_document,
)
from nri_numa.store.files import replace_file
from nri_numa.text import (
    HUGEPAGES_PREFIX,
    BadQuantity,
    escape_unprintable,
    human_bytes,
    parse_hugepages,
    whole_bytes,
)

_MAX_DISTANCE_COLUMNS: Final = 16  # columns of four characters that fit beside the row's head
_MAX_LISTED_L3_GROUPS: Final = 16  # L3 groups that are listed one by one


@click.command("topology")
@machine_option
@sysfs_option
@listing_option
def show_topology(machine: str | None, sysfs_root: str | None, output: str) -> None:
    """Show sockets, NUMA nodes, memory, distances, caches, cores, threads and PCI devices.

    Warnings about the machine are at the end, or under "warnings". -o wide omits nothing, however
    long the lines are.
    """
    source = choose_machine_source(machine, sysfs_root)
    with translate_errors(), show_progress(f"reading {source or 'this machine'}"):
        model, tree = read_machine(source)
        devices = () if tree is None else list_pci_devices(tree)
    width = max_table_width()
    write_document_or_lines(
        topology_document(model, devices=devices),
        output,
        topology_lines(model, devices=devices, width=width and max(width, DEFAULT_WIDTH_COLUMNS)),
    )


def topology_lines(
    topology: Topology,
    *,
    devices: Sequence[PCIDevice] = (),
    width: int | None = DEFAULT_WIDTH_COLUMNS,
) -> Iterator[str]:
    """Yield the tables of a machine."""
    blocks = [
        _machine_summary_lines(topology, width),
        _numa_table(topology, width),
        _distance_lines(topology, width),
    ]
    if len(topology.sockets) > 1:
        sockets = [
            (s.id, str(s.numa_nodes) or "-", s.cpus) for _, s in sorted(topology.sockets.items())
        ]
        blocks.append(_cpu_group_table("SOCKET", sockets, width))
    blocks.append(_l3_table(topology, width))
    blocks.append(_device_table(devices, width))
    if topology.warnings:
        lines = [
            line
            for warning in topology.warnings
            for line in wrap_text(warning, "  - ", "    ", width=width or DEFAULT_WIDTH_COLUMNS)
        ]
        blocks.append(["Warnings about this machine:", *lines])
    for number, block in enumerate(filter(None, blocks)):
        if number:
            yield ""
        yield from block


def _machine_summary_lines(topology: Topology, width: int | None) -> list[str]:
    threads = Counter(len(core.cpus) for core in topology.cores.values())
    smt = ", ".join(
        f"{count_text(count, 'thread')} each"
        if len(threads) == 1
        else f"{cores} with {count_text(count, 'thread')}"
        for count, cores in sorted(threads.items(), reverse=True)
    )
    memory = sum(n.memory_bytes for n in topology.numa_nodes.values())
    lines = wrap_text(
        f"{count_text(len(topology.sockets), 'socket')}, "
        f"{count_text(len(topology.numa_nodes), 'NUMA node')}, "
        f"{count_text(len(topology.cores), 'core')} ({smt}), "
        f"{count_text(len(topology.online), 'CPU')}, {human_bytes(memory)} of memory",
        width=width or DEFAULT_WIDTH_COLUMNS,
    )
    cpus_by_kind = {
        kind: CPUSet(i for c in topology.cores.values() if c.kind is kind for i in c.cpus)
        for kind in (CoreKind.PERFORMANCE, CoreKind.EFFICIENT)
    }
    facts = [
        ("online", topology.online),
        ("offline", topology.present - topology.online),
        ("isolated", topology.isolated),
        ("nohz_full", topology.nohz_full),
        ("for containers", topology.allowed if topology.allowed != topology.online else NO_CPUS),
        *((kind.value, cpus) for kind, cpus in cpus_by_kind.items()),
    ]
    for name, cpus in facts:
        if cpus:
            lines += _hanging_indent_lines(f"  {name}: ", str(cpus), width)
    siblings = [str(c.cpus) for _, c in sorted(topology.cores.items()) if len(c.cpus) > 1]
    if siblings:
        line, *other_lines = _hanging_indent_lines("  siblings: ", " ".join(siblings), width)
        if width is not None and other_lines:
            limit = width - len(" …")
            line = line if len(line.rstrip()) <= limit else line.rstrip().rpartition(" ")[0]
            line = f"{line.rstrip()} …"
        lines.append(line.rstrip())
    return lines


def _numa_table(topology: Topology, width: int | None) -> list[str]:
    hugepages = any(n.hugepages for n in topology.numa_nodes.values())
    head = [
        Column("NUMA NODE"),
        Column("MEMORY", CellWrapping.LIST),
        Column("HUGE PAGES", CellWrapping.LIST),
    ]
    rows: list[list[object]] = []
    for _, n in sorted(topology.numa_nodes.items()):
        memory = human_bytes(n.memory_bytes) if n.memory_bytes else "none"
        if n.id in topology.withheld_memory:
            memory += " (not for containers)"
        rows.append([n.id, memory, _hugepages_text(n), len(n.cpus), str(n.cpus) or "none"])
    homeless = topology.online - topology.cpus_of(topology.numa_ids)
    if homeless:
        rows.append(["none", "-", "-", len(homeless), homeless])
    if not hugepages:
        head, rows = head[:2], [[*row[:2], *row[3:]] for row in rows]
    return fit_table([*head, *_CPU_COUNT_AND_LIST_COLUMNS], rows, width).lines


def _device_table(devices: Sequence[PCIDevice], width: int | None) -> list[str]:
    """Return one row for each kind on each NUMA node: a card may have 100 virtual functions."""
    groups: dict[tuple[str, str], list[str]] = {}
    # Order: by kind, NUMA node (devices without one last), address.
    for pci in sorted(devices, key=lambda d: (d.kind, d.numa_node is None, d.numa_node, d.address)):
        node = "unknown" if pci.numa_node is None else str(pci.numa_node)
        groups.setdefault((pci.kind, node), []).append(pci.address)
    if not groups:
        return []
    rows = [
        (kind, node, len(addresses), ",".join(addresses))
        for (kind, node), addresses in groups.items()
    ]
    head = [
        *map(Column, ("DEVICES", "NUMA NODE", "COUNT")),
        Column("PCI ADDRESSES", CellWrapping.LIST),
    ]
    return fit_table(head, rows, width).lines


def _hugepages_text(numa_node: NUMANode) -> str:
    pages = numa_node.hugepages.items()
    return ", ".join(f"{total // size} x {human_bytes(size)}" for size, total in pages) or "none"


def _distance_lines(topology: Topology, width: int | None) -> list[str]:
    ids = list(topology.numa_ids)
    if len(ids) == 1:
        return []
    if len(ids) <= _MAX_DISTANCE_COLUMNS:
        return ["DISTANCE    " + "".join(f"{i:>4}" for i in ids)] + [
            f"  from {a:>4} " + "".join(f"{topology.distance(a, b):>4}" for b in ids) for a in ids
        ]
    rows = []
    for a in ids:
        nodes_by_distance: dict[int, list[int]] = {}
        for b in ids:
            nodes_by_distance.setdefault(topology.distance(a, b), []).append(b)
        text = "  ".join(f"{d}: {NUMASet(nodes)}" for d, nodes in sorted(nodes_by_distance.items()))
        rows.append((a, text))
    head = [Column("FROM"), Column("DISTANCE: NUMA NODES", CellWrapping.LIST)]
    return fit_table(head, rows, width).lines


def _l3_table(topology: Topology, width: int | None) -> list[str]:
    groups = [g for _, g in sorted(topology.l3_groups.items())]
    if not groups:
        return ["L3 caches: the kernel reports none"]
    sizes = Counter(len(g.cpus) for g in groups)
    sizes_text = " and ".join(
        f"{count} of {count_text(size, 'CPU')}"
        for size, count in sorted(sizes.items(), reverse=True)
    )
    caption = f"L3 caches: {sizes_text}"
    limit = len(groups) if width is None else _MAX_LISTED_L3_GROUPS
    rows = [(g.id, str(topology.numa_of(g.cpus)) or "-", g.cpus) for g in groups[:limit]]
    if len(groups) > limit:
        caption += f"; the first {_MAX_LISTED_L3_GROUPS} (-o json shows all):"
    return [
        *wrap_text(caption, width=width or DEFAULT_WIDTH_COLUMNS),
        *_cpu_group_table("L3 GROUP", rows, width),
    ]


def _hanging_indent_lines(head: str, text: str, width: int | None) -> list[str]:
    lines = [text] if width is None else wrap_list(text, width - len(head))
    return [head + lines[0], *(" " * len(head) + line for line in lines[1:])]


_CPU_COUNT_AND_LIST_COLUMNS: Final = (Column("CPUS"), Column("CPU LIST", CellWrapping.LIST))


def _cpu_group_table(
    title: str, rows: Iterable[tuple[int, str, CPUSet]], width: int | None
) -> list[str]:
    head = [Column(title), Column("NUMA NODES", CellWrapping.LIST), *_CPU_COUNT_AND_LIST_COLUMNS]
    cells = [(id, numa_nodes, len(cpus), str(cpus) or "none") for id, numa_nodes, cpus in rows]
    return fit_table(head, cells, width).lines


# --- A capture ----------------------------------------------------------------------------------


@click.command("capture")
@click.argument("target", metavar="FILE.tar.gz", type=click.Path(dir_okay=False))
@sysfs_option
def capture_machine(target: str, sysfs_root: str | None) -> None:
    """Pack the files that describe this machine's topology, for a bug report.

    It reads only files on an allow-list, and the archive has no names of pods or hosts. topology
    and simulate take the archive as --machine.
    """
    with translate_errors():
        try:
            with show_progress(f"packing {sysfs_root or 'this machine'}"):
                report = write_capture(Path(sysfs_root or "/"), Path(target))
        except OSError as error:
            raise Failure(f"cannot write {target}: {error.strerror or error}") from error
    click.echo(f"{target}: {len(report.files)} files, {human_bytes(len(report.data))}")
    for name in report.unreadable:
        click.echo(f"  cannot be read: {escape_unprintable(name)}", err=True)
    if report.skipped_count:
        # The sender of the archive can check that only topology is in it.
        files_text = count_text(report.skipped_count, "file")
        click.echo(f"  {files_text} skipped (not part of the topology)")


_CAPTURED_FILE_TEXT_PATTERN = re.compile(r"[\w\s:,()/.+-]*", re.ASCII)
"""Contents of the files on the allow-list; a file with anything else is left out."""


class CaptureReport(NamedTuple):
    """Contents of a capture.

    Attributes:
        data: a ``.tar.gz`` that `discover` reads.
        skipped_count: number of files that were left out.
        unreadable: names on the list that could not be read or have unexpected contents.
    """

    data: bytes
    files: tuple[str, ...]
    skipped_count: int
    unreadable: tuple[str, ...]


def write_capture(root: Path, target: Path) -> CaptureReport:
    """Pack the machine below ``root`` into a file, which stays unchanged on a failure.

    Raises:
        TopologyError: there is no machine below ``root``.
        OSError: ``target`` cannot be written.
    """
    report = build_capture(root)
    os.close(replace_file(str(target), report.data, sync=True, mode=0o644))
    return report


def build_capture(root: Path) -> CaptureReport:
    """Pack the machine below ``root``.

    The capture contains nothing that names the machine or its owner: only files on an allow-list
    (`nri_numa.machine.tree.CAPTURED_PATHS`) are read, and the CPUs and memory that containers may
    use are in their shortest form. Two captures of an unchanged machine differ only in the free
    memory. An archive is packed again, without files that are not on the list.

    Raises:
        TopologyError: there is no machine below ``root``.
    """
    tree = open_tree(root)
    topology = discover_topology(root)
    contents: dict[str, bytes] = {}
    links: dict[str, str] = {}
    skipped_count = 0
    unreadable: list[str] = []
    for name in tree.walk_files():
        if link := LINK_PATHS.fullmatch(name):
            to_cpu = link[1].startswith("cpu")
            links[name] = f"../../{'node/' if to_cpu else '../'}node{link[2]}"
        elif not CAPTURED_PATHS.fullmatch(name):
            skipped_count += 1
        elif (text := tree.read_file(name)) is None or not _CAPTURED_FILE_TEXT_PATTERN.fullmatch(
            text
        ):
            unreadable.append(name)
        else:
            contents[name] = f"{text}\n".encode()
    allowed_memory = NUMASet(topology.numa_nodes) - topology.withheld_memory
    allowed = f"Cpus_allowed_list:\t{topology.allowed}\nMems_allowed_list:\t{allowed_memory}\n"
    contents["proc/self/status"] = allowed.encode()
    files = tuple(sorted({*links, *contents}))
    data = io.BytesIO()
    # mtime and owner of files in /sys are the time of the boot and root: noise or a trace.
    with (
        gzip.GzipFile(fileobj=data, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for name in files:
            info, content = tarfile.TarInfo(name), contents.get(name, b"")
            info.size = len(content)
            if name in links:
                info.type, info.linkname = tarfile.SYMTYPE, links[name]
            archive.addfile(info, io.BytesIO(content))
    return CaptureReport(data.getvalue(), files, skipped_count, tuple(unreadable))


# --- ``synthetic:KEY=VALUE,…``: a machine in one argument ----------------------------------------

SYNTHETIC_PREFIX: Final = "synthetic:"
MAX_SYNTHETIC_CPUS: Final = 4096
"""Limit of a synthetic machine; more CPUs take seconds to build and exist in no machine."""


def choose_machine_source(machine: str | None, sysfs_root: str | None) -> str | None:
    """Return the value of ``--machine`` or ``--sysfs-root``; None for this machine."""
    if machine is not None and sysfs_root is not None:
        raise click.UsageError("--machine and --sysfs-root name the machine twice; expected one")
    return machine or sysfs_root


def read_machine(source: str | None) -> tuple[Topology, Tree | None]:
    """Read a machine and its files; a synthetic one has no files.

    Raises:
        click.UsageError: a synthetic machine is invalid.
        TopologyError: the machine cannot be read.
    """
    source = source or "/"
    kind, colon, _ = source.partition(":")
    if source.startswith(SYNTHETIC_PREFIX):
        try:
            return parse_synthetic(source.removeprefix(SYNTHETIC_PREFIX)), None
        except ValueError as error:
            raise click.UsageError(f"--machine {source}: {error}") from error
    if (
        colon
        and difflib.get_close_matches(f"{kind}:", [SYNTHETIC_PREFIX])
        and not os.path.exists(source)
    ):
        raise click.UsageError(
            f"--machine {source}: there is no such file and no kind of machine {kind!r}; "
            f"did you mean {SYNTHETIC_PREFIX}?"
        )
    tree = open_tree(source)
    return discover_tree(tree), tree


def parse_synthetic(text: str) -> Topology:
    """Build the machine of ``sockets=2,numa=2,cores=8,threads=2`` and other `SYNTHETIC_KEYS`.

    The defaults are those of `nri_numa.machine.synthetic.build_synthetic_topology`.

    Raises:
        ValueError: the text is invalid; the message says what was expected.
    """
    from nri_numa.machine.synthetic import build_synthetic_topology

    args: dict[str, Any] = {}
    hugepages: dict[int, int] = {}
    pairs = [part.partition("=") for part in text.split(",") if part]
    for number, (key, equals, value) in enumerate(pairs):
        if not equals:
            raise ValueError(f"{key!r} is not KEY=VALUE; the keys are {_SYNTHETIC_KEYS_TEXT}")
        if any(key == k for k, _, _ in pairs[:number]):
            raise ValueError(f"{key} is given twice; expected it once")
        try:
            if key.startswith(HUGEPAGES_PREFIX):
                size, hugepages[size] = parse_hugepages(key, value)
                continue
            if key not in SYNTHETIC_KEYS:
                matches = difflib.get_close_matches(key, SYNTHETIC_KEYS, n=1)
                hint = f", did you mean {matches[0]}?" if matches else ""
                raise ValueError(f"there is no key {key!r}{hint}; keys are {_SYNTHETIC_KEYS_TEXT}")
            name, read = SYNTHETIC_KEYS[key]
            args[name] = read(value)
        except BadQuantity as error:
            raise ValueError(f"{key} is {value!r}, expected {error}") from error
    cpus = args.get("sockets", 2) * args.get("numa_per_socket", 2) * args.get("threads", 2)
    cores = args.get("cores_per_numa", 4) + args.get("efficient_cores_per_numa", 0)
    if cpus * cores > MAX_SYNTHETIC_CPUS:
        raise ValueError(f"has {cpus * cores} CPUs, expected at most {MAX_SYNTHETIC_CPUS}")
    if args.get("sockets_per_numa", 1) > 1:
        args.setdefault("numa_per_socket", 1)
    machine = build_synthetic_topology(**args, hugepages=hugepages)
    for key in ("offline", "isolated", "nohz-full"):
        missing = args.get(SYNTHETIC_KEYS[key][0], NO_CPUS) - machine.present
        if missing:
            verb = inflect_for_ids(missing, "does", "do")
            raise ValueError(
                f"{key} names {cpus_text(missing)}, which {verb} not exist; expected CPUs among "
                f"{machine.present}"
            )
    if not machine.online:
        raise ValueError(f"offline is all of {machine.present}; expected one CPU to be left")
    return machine


def _parse_count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:9]) <= MAX_SYNTHETIC_CPUS):
        raise BadQuantity(f"a whole number from 0 to {MAX_SYNTHETIC_CPUS}")
    return int(text)


def _parse_memory_to_gib(text: str) -> float:
    """Parse memory as a quantity; a plain number below a million is GiB."""
    amount = whole_bytes(text)
    if text.isdigit() and amount < 1_000_000:
        return float(amount)
    return amount / (1 << 30)


def _parse_gib_list(text: str) -> list[float]:
    return [_parse_memory_to_gib(part) for part in text.split("+")]


def _parse_cpus(text: str) -> CPUSet:
    try:
        return CPUSet.parse(text.replace("+", ","))
    except ValueError as error:
        raise BadQuantity(f"a list of CPUs such as 0-3+8 ({error})") from error


def _parse_numbering(text: str) -> str:
    if text not in ("split", "adjacent", "alternating"):
        raise BadQuantity("split, adjacent or alternating")
    return text


SYNTHETIC_KEYS: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "sockets": ("sockets", _parse_count),
    "numa": ("numa_per_socket", _parse_count),
    "sockets-per-numa": ("sockets_per_numa", _parse_count),
    "cores": ("cores_per_numa", _parse_count),
    "threads": ("threads", _parse_count),
    "memory": ("memory_gib", _parse_memory_to_gib),
    "memory-only": ("memory_only_gib", _parse_gib_list),
    "efficient-cores": ("efficient_cores_per_numa", _parse_count),
    "l3-cores": ("cores_per_l3", _parse_count),
    "numbering": ("numbering", _parse_numbering),
    "offline": ("offline", _parse_cpus),
    "isolated": ("isolated", _parse_cpus),
    "nohz-full": ("nohz_full", _parse_cpus),
}
"""Parameter of `synthetic` and its parser, by key; ``hugepages-<size>`` are further keys."""
_SYNTHETIC_KEYS_TEXT: Final = ", ".join([*SYNTHETIC_KEYS, f"{HUGEPAGES_PREFIX}<size>"])
