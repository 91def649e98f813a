"""Nobody else on an owned CPU while everything comes, goes and is killed."""

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tests.beds.containerd import copy_crun, find_binaries
from tests.machines.vm_machine import Machine
from tests.vm.churn import Churn
from tests.vm.churn_report import OPTIONS, Options
from tests.vm.guest import Guest, near
from tests.vm.registry import case
from tests.vm.standstill import NeverAgain

_DIRECTORY = Path("/run/churn")
# What fits into a few minutes of CI; `python -m tests.vm churn` does a hundred times as much.
SHORT = Options(pods=24, kills=8, restarts=1, minutes=4, workers=3)


def _options() -> Options:
    text = os.environ.get(OPTIONS, "")
    return msgspec.json.decode(text, type=Options) if text else SHORT


def _limit_s() -> int:
    """Boot of a second runtime, the churn, and what follows it."""
    minutes = _options().minutes
    return int(minutes * 60) + 1200 if minutes else 6 * 3600


def _room(machine: Machine) -> bool:
    """Whether several owners have room beside each other on several NUMA nodes."""
    return len(machine.online) >= 16 and len(machine.numa) <= 4


@contextlib.contextmanager
def processors(count: int) -> Iterator[None]:
    """Keep the bed's programs, runtime and plugin among them, to a few CPUs; 0: to none.

    The emulator gives each processor that has work a tenth of a second in turn, so the fewer there
    are the sooner each program gets its turn. A cgroup does it, not an affinity: containers would
    inherit that, and their cgroups would not take it away again.
    """
    root = Path("/sys/fs/cgroup")
    bed = root / "bed"
    if count:
        bed.mkdir(exist_ok=True)
        (bed / "cpuset.cpus").write_text(f"0-{count - 1}")
        (bed / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (root / "cgroup.procs").write_text(str(os.getpid()))


@case(applies=_room, runtime=False, plugin=False, limit_s=_limit_s())
def churn(guest: Guest) -> None:
    """No CPU is owned twice while all is killed, and who lives in the end is right."""
    options = _options()
    if guest.plugin.running:
        guest.plugin.terminate(60)
    if guest.containerd.running:
        guest.containerd.stop()
    # Nothing of an earlier try is counted again; its logs stay to be read.
    shutil.rmtree(_DIRECTORY, ignore_errors=True)
    for log in guest.shared.glob("churn-*.log"):
        log.rename(log.with_suffix(".before"))
    binaries = near(find_binaries(guest.machine.containerd), _DIRECTORY / "bin")
    if options.runtime == "crun":
        binaries = dataclasses.replace(binaries, runc=copy_crun(_DIRECTORY / "bin"))
    with processors(options.processors):
        run = Churn(options, guest.machine.name, binaries, guest.shared, _DIRECTORY)
        try:
            report = run.run()
            guest.notes += report.lines()
        finally:
            run.close()
    if report.owned_twice:
        raise NeverAgain(report.problems)
    assert not report.problems, report.problems
