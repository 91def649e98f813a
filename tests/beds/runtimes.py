"""containerd and runc of a version that no package has, built from their Go modules, by hand.

The packaged series are what the end-to-end tests run on. Another release takes their place with
the folder that this makes, named by ``NRI_NUMA_CONTAINERD``:

    .venv/bin/python -m tests.beds.runtimes ~/bed-2.3.7 --containerd 2.3.7 --runc 1.4.3
    NRI_NUMA_CONTAINERD=~/bed-2.3.7 .venv/bin/pytest tests/e2e -k "not 1.7"

Needs Go as new as the release asks for, and for runc a C compiler. runc is built without seccomp,
which would need its library: pods that ask for a seccomp profile fail. Go's own variables say where
modules come from and where they are kept. It takes some ten minutes of one CPU, so CI does not.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.beds.kube.toolchain import installed_go
from tests.beds.testbed import TestbedUnavailable

CONTAINERD = "github.com/containerd/containerd/v2"
RUNC = "github.com/opencontainers/runc"
PROGRAMS = ("containerd", "ctr", "containerd-shim-runc-v2")


def build_containerd(version: str, target: Path) -> None:
    """Build the three programs of one containerd 2."""
    packages = {name: f"{CONTAINERD}/cmd/{name}" for name in PROGRAMS}
    flags = f"-s -w -X {CONTAINERD}/version.Version={version}"
    tags = "no_btrfs no_devmapper no_zfs no_aufs"
    _build(packages, version, target, "-tags", tags, "-ldflags", flags, cgo=False)


def build_runc(version: str, target: Path) -> None:
    flags = f"-s -w -X main.version={version}"
    _build({"runc": RUNC}, version, target, "-ldflags", flags, cgo=True)


def _build(packages: dict[str, str], version: str, target: Path, *flags: str, cgo: bool) -> None:
    go = installed_go()
    if go is None:
        raise TestbedUnavailable("there is no Go, or an old one", "put a new Go into PATH")
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="nri-numa-build-") as directory:
        # A module of our own: theirs may replace others, which only the main module may.
        _go(go, directory, cgo, "mod", "init", "bed.invalid/runtimes")
        for package in packages.values():
            _go(go, directory, cgo, "get", "-tool", f"{package}@v{version}")
        for name, package in packages.items():
            output = str(target / name)
            _go(go, directory, cgo, "build", "-trimpath", *flags, "-o", output, package)


def _go(go: Path, directory: str, cgo: bool, *arguments: str) -> None:
    own = {"GOWORK": "off", "GOTOOLCHAIN": "local", "CGO_ENABLED": str(int(cgo))}
    done = subprocess.run(
        [go, *arguments],
        cwd=directory,
        env={**os.environ, **own},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise TestbedUnavailable(
            f"go {' '.join(arguments)} failed: {done.stderr.strip()[-1500:]}",
            "check the version, the network, and go env GOPROXY",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Build what is named into a folder."""
    parser = argparse.ArgumentParser(prog="python -m tests.beds.runtimes", description=main.__doc__)
    parser.add_argument("directory", type=Path, help="for the programs")
    parser.add_argument("--containerd", metavar="VERSION", help="of series 2, such as 2.3.7")
    parser.add_argument("--runc", metavar="VERSION", help="such as 1.4.3")
    options = parser.parse_args(arguments)
    try:
        if options.containerd:
            build_containerd(options.containerd, options.directory.absolute())
        if options.runc:
            build_runc(options.runc, options.directory.absolute())
    except TestbedUnavailable as error:
        print(f"error: {error.what}\nremedy: {error.remedy}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
