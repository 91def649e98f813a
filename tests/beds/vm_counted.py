"""An emulator whose guest has a clock that counts instructions: a nanosecond for each.

A guest that is emulated on a busy host gets a fraction of the work done that its clock allows for.
Everything that goes by the clock then takes what little there is: 250 ticks per second and
processor, the scheduler's looks at its domains, watchdogs, programs that look around ten times a
second. Where the clock goes by what was executed, the guest is a machine of ordinary speed that
somebody watches in slow motion: a pod takes tenths of its seconds, and no limit runs out because
others needed the host. While all its processors wait, the clock goes on with the host's.

QEMU has to be 8.1 or later: with 7.2 the kernel does not get through its start. Debian 12 has a
later one in its backports, which runs with the libraries of the installed one.
"""

import shlex
from pathlib import Path

from tests.beds.debs import DebCache, Wanted
from tests.beds.testbed import TestbedUnavailable, cache_dir

_SUITES = ("bookworm-backports",)
_QEMU = Wanted(label="qemu-system-x86", package="qemu-system-x86", suites=_SUITES)
_DATA = Wanted(label="qemu-system-data", package="qemu-system-data", suites=_SUITES)
_BIOS = Wanted(label="seabios", package="seabios", suites=_SUITES)

_LEAST = (8, 1)

CLOCK = ("-icount", "shift=0,sleep=on,align=off")
KERNEL = (
    # Both are known: the kernel need not measure for them, which takes minutes of reading a port.
    "tsc_early_khz=1000000",
    "lpj=4000000",
)
"""Kernel parameters that such a guest needs."""


class _Backports(DebCache):
    """Apart from the other packages: the suite goes when its release is old, and they stay."""

    archive_suites = _SUITES


def write_emulator(file: Path) -> None:
    """Have the emulator in the cache, and write a program that starts it with its clock."""
    packages = _Backports(cache_dir() / "backports")
    qemu, data, bios = packages.fetch(_QEMU, _DATA, _BIOS)
    if tuple(int(part) for part in qemu.upstream_version.split(".")[:2]) < _LEAST:
        raise TestbedUnavailable(
            f"QEMU {qemu.upstream_version} is too old for a clock that counts instructions",
            "use a Debian archive that has bookworm-backports",
        )
    program = qemu.root / "usr/bin/qemu-system-x86_64"
    if not program.is_file():
        raise TestbedUnavailable(
            f"{program} is not there", f"remove {qemu.root} from the cache and start again"
        )
    command = [
        str(program),
        *("-L", str(data.root / "usr/share/qemu")),
        *("-L", str(bios.root / "usr/share/seabios")),
        *CLOCK,
    ]
    file.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
    file.chmod(0o755)
