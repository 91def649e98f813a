"""What every real test bed shares: the error that says it cannot be had, and where its cache is."""

import contextlib
import fcntl
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn


class TestbedUnavailable(RuntimeError):
    """A real component cannot be had on this machine; a reason to skip, never a test failure."""

    __test__ = False  # pytest collects classes by their name

    def __init__(self, what: str, remedy: str) -> None:
        self.what = what
        self.remedy = remedy
        super().__init__(f"{what}; {remedy}")


def skip_or_fail(error: object, *beds: str) -> NoReturn:
    """Skip a test, or fail it where ``NRI_NUMA_REQUIRE_`` one of the beds is set."""
    import pytest  # guests have none

    for name in (f"NRI_NUMA_REQUIRE_{bed}" for bed in beds):
        if os.environ.get(name) == "1":
            pytest.fail(f"{name}=1, but {error}", pytrace=False)
    pytest.skip(str(error))


def cache_dir() -> Path:
    """The folder for downloaded parts: ``$NRI_NUMA_CACHE``, else ``~/.cache/nri-numa``."""
    configured = os.environ.get("NRI_NUMA_CACHE", "")
    return Path(configured) if configured else Path.home() / ".cache" / "nri-numa"


@contextlib.contextmanager
def locked(file: Path) -> Iterator[int]:
    """Have a file of the cache to ourselves, among all processes; waits for the others.

    Yields:
        The descriptor that holds the lock.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = file.open("w")
    except OSError as error:
        raise TestbedUnavailable(
            f"cannot write the cache {file.parent}: {error.strerror}",
            "set NRI_NUMA_CACHE to a writable directory",
        ) from error
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle.fileno()


def run(*command: str | Path, remedy: str, timeout_s: float | None = None, **more: Any) -> str:
    """The output of a program that a bed needs.

    Raises:
        TestbedUnavailable: it is not here, fails, or does not end; with its last words.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=timeout_s, check=False, **more
        )
        problem = (done.stderr or done.stdout).strip()[-1000:] if done.returncode else ""
        if not done.returncode:
            return str(done.stdout)
    except FileNotFoundError:
        problem = "it is not on this machine"
    except subprocess.TimeoutExpired:
        problem = f"no end after {timeout_s:g} s"
    raise TestbedUnavailable(f"{shlex.join(words)}: {problem}", remedy)


def require_root(what_for: str) -> None:
    if os.geteuid() != 0:
        raise TestbedUnavailable(
            f"{what_for} needs root, this is uid {os.geteuid()}", "run the tests as root"
        )
