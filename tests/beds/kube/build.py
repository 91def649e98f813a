"""Kubernetes and etcd from source as one program, and Helm; built once and kept in the cache.

Nobody packages the API server, the scheduler, the kubelet or Helm where the beds get their parts
from, but their sources are Go modules. ``go.mod`` and ``go.sum`` pin them; ``main.go`` picks the
part of Kubernetes by the name it is called by. Go's own environment variables say where modules
come from, and where its two caches are: unless ``GOCACHE`` and ``GOMODCACHE`` are set, they are
made for this build and thrown away, and so is Go itself where the machine has none (`toolchain`).
Helm comes second because it shares most of its libraries with Kubernetes.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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
_BUILD_TIMEOUT_S = 2400  # 17 minutes on two cores that others used as well
_NEEDED_BYTES = 6 << 30  # modules 0.8 GB, build cache 3.2 GB, what the linker writes
# What was downloaded and compiled is kept for the next attempt, so one that was not the network's
# fault fails again at once.
_ATTEMPTS = 3
_PAUSE_S = 15.0
_SCRATCH = ".build-"


@dataclass(frozen=True)
class Recipe:
    """What is built of one ``go.mod``.

    Attributes:
        what: its name for people, ``Kubernetes``.
        module: the Go module whose version is the release.
        files: what the build depends on, below `SOURCES`; the first is its ``go.mod``.
        package: what ``go build`` is told.
        binary: the file that comes of it.
        names: links to it, for a program that looks at the name it is called by.
        prefix: of its folders in the cache.
        takes: how long the build takes on two cores.
    """

    what: str
    module: str
    files: tuple[str, ...]
    package: str
    binary: str
    names: tuple[str, ...]
    prefix: str
    takes: str

    @property
    def sources(self) -> Path:
        """The folder with its ``go.mod``."""
        return (SOURCES / self.files[0]).parent

    def release(self) -> str:
        """The version that go.mod requires, ``v1.36.3``."""
        text = (SOURCES / self.files[0]).read_text(encoding="utf-8")
        pattern = rf"^\s*(?:require )?{re.escape(self.module)} (v\S+)(?: // indirect)?$"
        match = re.search(pattern, text, re.MULTILINE)
        assert match is not None, f"{self.files[0]} requires no {self.module}"
        return match.group(1)

    def key(self) -> str:
        """What a build depends on besides the release and the Go version."""
        digest = hashlib.sha256()
        for name in self.files:
            digest.update((SOURCES / name).read_bytes())
        return digest.hexdigest()[:16]

    def cached(self, folder: Path, go: Path | None) -> Path | None:
        """Where it is; None where it was not built. Without a Go any build of it will do."""
        if go is None:
            pattern = f"{self.prefix}{self.release()}-*-{self.key()}"
            return next(iter(sorted(folder.glob(pattern))), None)
        target = self.target(folder, go)
        return target if target.is_dir() else None

    def target(self, folder: Path, go: Path) -> Path:
        """Where this Go's build belongs."""
        return folder / f"{self.prefix}{self.release()}-{go_version(go)}-{self.key()}"

    def version_flags(self) -> str:
        """What a release build tells the linker; else every part says v0.0.0-master."""
        major, minor = self.release().lstrip("v").split(".")[:2]
        values = {"gitVersion": self.release(), "gitMajor": major, "gitMinor": minor}
        return " ".join(
            f"-X {package}.{name}={value}"
            for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
            for name, value in values.items()
        )


KUBERNETES: Final = Recipe(
    what="Kubernetes",
    module="k8s.io/kubernetes",
    files=("go.mod", "go.sum", "main.go"),
    package=".",
    binary="k8s",
    names=NAMES,
    prefix="",
    takes="about a quarter of an hour",
)
HELM: Final = Recipe(
    what="Helm",
    module="helm.sh/helm/v3",
    files=("helm/go.mod", "helm/go.sum"),
    package="helm.sh/helm/v3/cmd/helm",
    binary="helm",
    names=(),
    prefix="helm-",
    takes="two minutes",
)


def release() -> str:
    """The Kubernetes release of the beds, ``v1.36.3``."""
    return KUBERNETES.release()


def find_programs(*, build: bool = True) -> Path:
    """The folder with a link for each of `NAMES`, from the cache where it has them.

    Args:
        build: build what is not there; needs a quarter of an hour and 6 GB for that time, and Go
            from PyPI where the machine has none.

    Raises:
        TestbedUnavailable: it is not in the cache, and cannot or shall not be built.
    """
    return _find(KUBERNETES, build=build)


def find_helm(*, build: bool = True) -> Path:
    """The folder with ``helm``; otherwise like `find_programs`."""
    return _find(HELM, build=build)


def _find(recipe: Recipe, *, build: bool) -> Path:
    folder = cache_dir() / "kube"
    if (found := recipe.cached(folder, installed_go())) is not None:
        return found
    if not build:
        raise TestbedUnavailable(
            f"{recipe.what} {recipe.release()} is not in {folder}",
            f"python -m tests.beds.kube.build builds it, in {recipe.takes}",
        )
    return _built(folder, recipe)[0]


def _built(folder: Path, *recipes: Recipe) -> list[Path]:
    """The folders of these, built one after the other with the same two caches of Go."""
    with _lock(folder):
        go = installed_go()
        # Somebody else may have been at it.
        if all(found := [each.cached(folder, go) for each in recipes]):
            return [each for each in found if each is not None]
        for left in folder.glob(f"{_SCRATCH}*"):  # of a build that was killed: we have the lock
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder) as scratch:
            own = _own_caches(Path(scratch))
            go = go or fetch_go(Path(scratch) / "toolchain")
            return [
                each.cached(folder, go) or _build(each, folder, go, Path(scratch), own)
                for each in recipes
            ]


def _own_caches(scratch: Path) -> dict[str, str]:
    own = {
        name: f"{scratch}/{name.lower()}"
        for name in ("GOCACHE", "GOMODCACHE")
        if not os.environ.get(name)
    }
    if own and (free := shutil.disk_usage(scratch).free) < _NEEDED_BYTES:
        raise TestbedUnavailable(
            f"{scratch.parent} has {free >> 20} MiB left, the build needs 6 GiB for a while",
            "free some space or set NRI_NUMA_CACHE to another disk",
        )
    return own


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


def _build(recipe: Recipe, folder: Path, go: Path, scratch: Path, own: dict[str, str]) -> Path:
    target = recipe.target(folder, go)
    tree = scratch / recipe.what
    tree.mkdir()
    _say(f"building {recipe.what} {recipe.release()} with {go_version(go)}: {recipe.takes}")
    _compile(
        go,
        "build",
        "-modcacherw",  # who may make the module cache may remove it
        "-buildvcs=false",  # git may refuse to say anything of somebody else's checkout
        "-trimpath",
        f"-ldflags=-s -w {recipe.version_flags()}",
        "-o",
        str(tree / recipe.binary),
        recipe.package,
        directory=recipe.sources,
        environment=own,
    )
    for name in recipe.names:
        (tree / name).symlink_to(recipe.binary)
    tree.rename(target)
    return target


def _compile(go: Path, *arguments: str, directory: Path, environment: dict[str, str]) -> None:
    deadline = time.monotonic() + _BUILD_TIMEOUT_S
    own = {"GOWORK": "off", "CGO_ENABLED": "0", "GOTOOLCHAIN": "local"}
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            done = subprocess.run(
                [go, *arguments],
                cwd=directory,
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
        if options.offline:
            found = [find_programs(build=False), find_helm(build=False)]
        else:
            found = _built(cache_dir() / "kube", KUBERNETES, HELM)
        print(*found, sep="\n")
    except TestbedUnavailable as error:
        print(f"error: {error.what}\nremedy: {error.remedy}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
