"""Pages of real processes; what is moved from one NUMA node to another is in tests/vm."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_numa.machine import migration
from nri_numa.machine.cgroups import CgroupPlace, CgroupReader
from nri_numa.model.cpuset import NUMASet
from tests.beds.cgroup_tree import ContainerTree

HERE = CgroupPlace("/pods/a")


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[CgroupReader, list[subprocess.Popen[bytes]]]]:
    """A container of two processes."""
    processes = [subprocess.Popen(["sleep", "1000"]) for _ in range(2)]
    tree = ContainerTree(tmp_path)
    tree.processes(*(each.pid for each in processes))
    yield CgroupReader(str(tree.root)), processes
    for each in processes:
        each.kill()
        each.wait()


@pytest.mark.parametrize("ends", [True, False])
def test_a_process_that_ends_meanwhile_stops_nobodys_move(
    two: tuple[CgroupReader, list[subprocess.Popen[bytes]]],
    monkeypatch: pytest.MonkeyPatch,
    ends: bool,
) -> None:
    """The kernel says EINVAL of it, and of a live one where we may not use the target."""
    reader, processes = two
    first = min(each.pid for each in processes)
    asked: list[int] = []

    def move(pid: int, addresses: object, *more: object) -> list[int]:
        asked.append(pid)
        if pid == first:
            if ends:
                os.kill(pid, signal.SIGKILL)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return [0] * len(addresses)  # type: ignore[arg-type]

    monkeypatch.setattr(migration, "_move_pages", move)
    steps = migration.migrate_pages(reader, HERE, NUMASet([1]), 0)
    if ends:
        assert all(step.unmoved_bytes == 0 for step in steps)
        assert {*asked} == {each.pid for each in processes}
    else:
        with pytest.raises(OSError, match="Invalid argument"):
            list(steps)


def test_a_right_that_is_missing_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """Another user's page map is closed to root without CAP_DAC_READ_SEARCH."""
    if problem := migration.find_migration_problem(CgroupReader("/nowhere")):
        pytest.skip(f"no memory moves here: {problem}")
    look = "from nri_numa.machine import migration as m, cgroups as c; "
    look += "print(m.find_migration_problem(c.CgroupReader('/nowhere')))"
    keep = "--bounding-set=-all,+sys_ptrace,+sys_nice"
    subprocess.run(["setpriv", keep, "--inh-caps=-all", sys.executable, "-c", look], check=True)
    assert capfd.readouterr().out == "CAP_DAC_READ_SEARCH missing\n"
