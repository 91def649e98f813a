"""``nri-numa topology`` and ``nri-numa capture``: commands that read a machine."""

from __future__ import annotations

from pathlib import Path

import click

from nri_numa.cli.common import (
    Failure,
    friendly,
    human_size,
    output_option,
    progress,
    sysfs_option,
    table_width,
)
from nri_numa.text import harmless


@click.command()
@sysfs_option
@output_option()
def topology(sysfs_root: str | None, output: str) -> None:
    """Show sockets, NUMA nodes, memory, distances, caches, cores, threads and PCI devices.

    What was odd about the machine stands at the end, or under "warnings".
    """
    from nri_numa.cli.topology_output import render_topology
    from nri_numa.machine.pci import pci_devices
    from nri_numa.machine.sysfs import discover
    from nri_numa.machine.tree import open_tree

    with friendly(), progress(f"reading {sysfs_root or 'this machine'}"):
        machine = discover(sysfs_root or "/")
        devices = pci_devices(open_tree(sysfs_root or "/"))
    text = render_topology(machine, output, devices=devices, width=table_width())  # type: ignore[arg-type]  # a Choice
    click.echo(text, nl=False)


@click.command()
@click.argument("target", metavar="FILE.tar.gz", type=click.Path(dir_okay=False))
@sysfs_option
def capture(target: str, sysfs_root: str | None) -> None:
    """Pack the files that describe this machine's topology, for a bug report.

    Only files of an allow-list are read; the archive holds no names of pods or hosts. It can be
    unpacked anywhere and given to every command as --sysfs-root.
    """
    from nri_numa.cli.capture import capture as pack

    with friendly():
        try:
            with progress(f"packing {sysfs_root or 'this machine'}"):
                report = pack(Path(sysfs_root or "/"), Path(target))
        except OSError as error:
            raise Failure(f"cannot write {target}: {error.strerror or error}") from error
    click.echo(f"{report.target}: {len(report.files)} files, {human_size(report.size_bytes)}B")
    for name in report.unreadable:
        click.echo(f"  could not be read: {harmless(name)}", err=True)
    count = sum(report.left_out.values())
    if count:
        # The archive goes to somebody else: its sender can see that nothing but topology is in it.
        files = "1 file" if count == 1 else f"{count} files"
        click.echo(f"  left out, because they say nothing of the topology: {files}")
