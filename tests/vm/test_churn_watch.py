"""The churn's watcher sees each container's words and when they change, and nobody else's."""

from __future__ import annotations

import io
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vm.churn_report import read_spans
from tests.vm.churn_watch import Watcher


@pytest.fixture
def program() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000000", "17"]) as process:
        # Its arguments are there a moment after the start is reported.
        while not Path(f"/proc/{process.pid}/cmdline").read_bytes():
            pass
        yield process
        process.kill()


def container(top: Path, name: str, pid: int) -> Path:
    directory = top / "burstable" / "pod1" / (name * 64)
    directory.mkdir(parents=True)
    (directory / "cgroup.procs").write_text(f"{pid}\n")
    (directory / "cpuset.cpus.effective").write_text("0-3\n")
    return directory


def test_spans_begin_and_end_with_the_words(
    tmp_path: Path, program: subprocess.Popen[bytes]
) -> None:
    mine = container(tmp_path, "a", program.pid)
    container(tmp_path, "b", os.getpid())  # a sandbox, or a runtime's own process
    out = io.StringIO()
    watcher = Watcher(str(tmp_path), out)
    for _ in range(3):
        watcher.sweep()
    (mine / "cpuset.cpus.effective").write_text("0-1\n")
    watcher.sweep()
    program.kill()
    program.wait()
    watcher.sweep()
    watcher.close()
    file = tmp_path / "spans"
    file.write_text(out.getvalue() + '[17, "half')
    (wide, narrow), summary = read_spans(file)
    assert summary == {}
    assert (wide.serial, wide.group, wide.samples) == (17, {0, 1, 2, 3}, 3)
    assert wide.cpus == os.sched_getaffinity(0)
    assert (narrow.serial, narrow.group, narrow.samples) == (17, {0, 1}, 1)
    assert wide.start <= wide.end <= wide.after <= narrow.start == narrow.end <= narrow.after
