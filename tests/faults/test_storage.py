"""The state directory fails: full, read-only, taken away, damaged at any byte."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beds.embedded_node import THOROUGH, EmbeddedNode, until


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB; needs root."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    path = tmp_path / "tiny"
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def remount(path: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(path)], check=True)


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)


def churn(node: EmbeddedNode, count: int) -> None:
    for number in range(count):
        node.remove(node.owner(f"churn{number}"))


@pytest.mark.parametrize("room", [True, False])
def test_a_full_disk(tmp_path: Path, tiny: Path, *, room: bool) -> None:
    """Containers are placed as before; it is said and counted, and made good when there is room.

    Without room until a kill, the containers themselves tell what was not written.
    """
    with EmbeddedNode(tmp_path, state_directory=tiny) as node:
        node.start()
        node.four()
        fill(tiny / "filler")
        churn(node, 12)
        node.note(node.owner("kept"), "exclusive")
        node.note(node.listed("kept-list", "17", "3"), "listed")
        node.logged("checkpoint not written")
        assert node.metric("nri_numa_checkpoint_errors_total") > 0
        assert "No space left" in node.plugin.log()
        node.check()
        if room:
            (tiny / "filler").unlink()
            node.logged("checkpoint written again")
        node.plugin.restart(kill=True)
        node.check()
        node.usable()


def test_a_read_only_directory(tmp_path: Path, tiny: Path) -> None:
    """Without a lock, without a checkpoint: containers are placed, and it says so."""
    with EmbeddedNode(tmp_path, state_directory=tiny) as node:
        node.start()
        node.four()
        node.plugin.kill()
        remount(tiny, "ro")
        node.start()
        node.logged("Read-only file system")
        assert node.metric("nri_numa_checkpoint_errors_total") > 0
        assert node.metric("nri_numa_checkpoint_failing") == 1, "before the first record"
        status, answer = node.plugin.get("/readyz")
        assert (status, "Read-only file system" in answer) == (503, True)
        node.check()
        churn(node, 2)
        node.note(node.owner("kept"), "exclusive")
        node.plugin.restart(kill=True)
        node.check()
        remount(tiny, "rw")
        node.note(node.owner("later"), "exclusive")
        until(lambda: "later" in node.plugin.checkpoint.read_text(), "it is written again")
        until(lambda: node.plugin.get("/readyz")[0] == 200, "ready again")
        node.plugin.restart(kill=True)
        node.check()
        node.usable()


@pytest.mark.parametrize("what", ["file", "directory"])
def test_the_checkpoint_is_taken_away(node: EmbeddedNode, what: str) -> None:
    """It is noticed and written anew, before anybody has to rely on it."""
    if what == "file":
        node.plugin.checkpoint.unlink()
    else:
        shutil.rmtree(node.plugin.state_directory)
    node.note(node.owner("after"), "exclusive")
    until(node.plugin.checkpoint.exists, "a new checkpoint")
    node.plugin.restart(kill=True)
    node.check()
    node.usable()


RUBBISH = [b"\0" * 4096, b"", b"{}", b"\xff\xfe", b"1 1 1 0 x\n" * 99]
DAMAGES = [0.0, 0.3, 0.7, 0.99, *RUBBISH] if THOROUGH else [0.7, RUBBISH[0]]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint(node: EmbeddedNode, damage: float | bytes) -> None:
    """What is left is used, the file is kept, it is said and counted, and nobody moves."""
    node.plugin.kill()
    data = node.plugin.checkpoint.read_bytes()
    left = damage if isinstance(damage, bytes) else data[: int(len(data) * damage)]
    node.plugin.checkpoint.write_bytes(left)
    node.start()
    node.check()
    node.logged("checkpoint problem found")
    assert node.metric("nri_numa_checkpoint_errors_total") >= 1
    node.usable()


@pytest.mark.parametrize("what", ["fifo", "open to all"])
def test_a_state_directory_that_others_have_been_at(node: EmbeddedNode, what: str) -> None:
    """Nobody waits for a FIFO, and what anybody may have written is not believed."""
    node.plugin.kill()
    if what == "fifo":
        node.plugin.checkpoint.unlink()
        os.mkfifo(node.plugin.checkpoint)
        said = "is a FIFO, expected a regular file"
    else:
        node.plugin.state_directory.chmod(0o777)
        said = "has mode 0777, expected one that only its owner may write"
    node.start()
    node.logged(said)
    assert node.metric("nri_numa_checkpoint_errors_total") >= 1
    node.check()
    node.plugin.state_directory.chmod(0o700)
    churn(node, 2)
    node.note(node.owner("kept"), "exclusive")
    until(lambda: "kept" in node.plugin.checkpoint.read_text(), "the state is durable again")
    node.plugin.restart(kill=True)
    node.check()
    node.usable()
