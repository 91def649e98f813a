"""Who works on a runtime is seen across state directories, and by nobody's file."""

import os
import sys
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from nri_numa.agent.preflight import FindingLevel, check_other_agents
from nri_numa.agent.runtime_lock import RuntimeLock, find_lock_holder
from nri_numa.config import AgentConfig
from nri_numa.config.sections import RuntimeLinkSection
from nri_numa.errors import RuntimeBusy
from nri_numa.store.checkpoint import LOCK_FILE_NAME


def claim(directory: Path) -> RuntimeLock:
    """A claim on the runtime whose socket lies in a directory."""
    return RuntimeLock(str(directory / "nri.sock"))


def test_a_runtime_is_held_by_one_until_it_ends(tmp_path: Path) -> None:
    first, second = claim(tmp_path), claim(tmp_path)
    first.acquire()
    first.acquire()  # again changes nothing
    with pytest.raises(RuntimeBusy, match="stop it first"):
        second.acquire()
    first.close()
    second.acquire()
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_comes_later_or_anew_is_held_when_it_is_there(tmp_path: Path) -> None:
    """A runtime makes its directory when it starts for the first time; others have their own."""
    directory = tmp_path / "nri"
    agent, release, other = claim(directory), claim(directory), claim(tmp_path)
    other.acquire()
    agent.acquire()
    release.acquire()  # nothing there to hold
    directory.mkdir()
    agent.acquire()
    directory.rename(tmp_path / "old")
    agent.acquire()
    directory.mkdir()
    agent.acquire()
    with pytest.raises(RuntimeBusy):
        release.acquire()
    agent.close()
    other.close()


def test_check_names_another_agent_of_the_runtime(tmp_path: Path) -> None:
    """With its process and pod; the agent of the same state directory is no other one."""
    (tmp_path / "state").mkdir()
    sockets = RuntimeLinkSection(nri_socket=str(tmp_path / "nri.sock"))
    beside = AgentConfig(runtime=sockets, state_dir=str(tmp_path / "state"))
    assert list(check_other_agents(beside)) == []
    agent = (
        "import fcntl, os, sys\n"
        "for path in sys.argv[1:]: fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)\n"
        "print(flush=True)\ninput()"
    )
    pod = {"POD_NAMESPACE": "kube-system", "POD_NAME": "nri-numa-7x2kq"}
    (lock := tmp_path / "state" / LOCK_FILE_NAME).touch()
    for also, level, text in (
        (
            [],
            FindingLevel.FAIL,
            ", pod kube-system/nri-numa-7x2kq) works on the runtime of this socket",
        ),
        ([lock], FindingLevel.OK, " already serves this runtime"),
    ):
        command = [sys.executable, "-c", agent, tmp_path, *also]
        with Popen(command, env=pod, stdin=PIPE, stdout=PIPE) as process:
            assert process.stdout
            process.stdout.readline()
            (found,) = check_other_agents(beside)
            (tmp_path / "state").chmod(0o777)
            assert list(check_other_agents(beside)) == [], "its own agent has no lock there either"
            (tmp_path / "state").chmod(0o700)
            process.communicate(b"\n")
        assert (found.level, f"process {process.pid}{text}" in found.message) == (level, True), (
            found
        )


def test_the_holder_is_named_where_the_kernel_tells(tmp_path: Path) -> None:
    status = tmp_path.stat()
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    locks = tmp_path / "locks"
    locks.write_text(
        "1: POSIX  ADVISORY  WRITE 7 00:19:5 0 EOF\n"
        f"2: FLOCK  ADVISORY  READ 0 {device}:{status.st_ino} 0 EOF\n"
        f"3: FLOCK  ADVISORY  READ 4711 {device}:{status.st_ino} 0 EOF\n"
    )
    assert find_lock_holder(str(tmp_path), str(locks)) == 4711
    locks.write_text("nonsense\n")
    assert find_lock_holder(str(tmp_path), str(locks)) is None
    assert find_lock_holder(str(tmp_path), str(tmp_path / "absent")) is None
    assert find_lock_holder(str(tmp_path / "absent"), str(locks)) is None
