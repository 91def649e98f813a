"""The core of the tests on other interpreters than the one that `make setup` took (root).

    python -m tests.interpreters trixie [sid python3.12 arm64 …]

A suite is one of Debian, whose root file system the beds keep: 3.13 is in trixie, which image and
bundle carry, 3.14 in sid. arm64 is the bundle of that architecture, run by QEMU: so slow that it
does model and wire only. Anything else is the name of an interpreter in PATH.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.beds.debs import SUITES
from tests.beds.vm_system import REPOSITORY, bootstrapped, inside
from tools.build_image import programs, unpack
from tools.interpreter import PYTHON, packages, platforms
from tools.packages import bundle

_CORE: Final = (
    "tests/unit/config tests/unit/nri tests/unit/cli tests/unit/store tests/unit/model "
    "tests/scenarios tests/integration/test_link_launched.py tests/integration/test_report.py"
)
"""What an interpreter may change: imports, docstrings, sockets, the loop, files."""
_ON_ARM64: Final = "-n 0 -p no:schemathesis -p no:randomly tests/unit/model tests/unit/nri/wire"
"""Plugins and workers take longer to start than these tests to run."""


def run(name: str) -> int:
    """Install what is pinned for one of them, and run the core; 0 when it passed."""
    root, core, foreign = Path("/"), _CORE, list[str]()
    program = shutil.which(name)
    if name in SUITES:
        root, program = bootstrapped(name), "/usr/bin/python3"
    if name == "arm64":
        core, foreign, program = _ON_ARM64, platforms(name), _runs_foreign()
    if program is None:
        why = "neither in PATH nor a suite of Debian, and arm64 needs qemu-user-static"
        print(f"left out: {name} is {why}", flush=True)
        return 0
    version = PYTHON
    if not foreign:
        said = subprocess.run(
            [*inside(root), program, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        version = said.stdout.strip()
    venv = REPOSITORY / "build" / "interpreters" / (name if foreign else version)
    site = venv / f"lib/python{version}/site-packages"
    if foreign:
        site = venv / "usr/lib/python3/dist-packages"
    lock = REPOSITORY / "requirements" / "lock.txt"
    ours = site / "checkout.pth"
    if not ours.exists() or ours.stat().st_mtime < lock.stat().st_mtime:
        shutil.rmtree(venv, ignore_errors=True)
        if foreign:
            unpack(bundle(programs(name), name).tar(), venv)
            for member, data in (each for package in packages(name) for each in package.members()):
                if "/_sysconfigdata" in member.name and member.isreg():
                    (venv / member.name).write_bytes(data)  # for hypothesis; the bundle needs none
        else:
            subprocess.run(
                [*inside(root), program, "-m", "venv", "--without-pip", venv], check=True
            )
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
                *("--no-deps", "--require-hashes", "--no-build-isolation"),
                *("--ignore-requires-python", "--only-binary=:all:", "--no-binary=cgroupspy"),
                *("--python-version", version, *foreign, "--target", str(site)),
                *("--requirement", str(_pinned(version, lock, venv))),
            ],
            check=True,
        )
        ours.write_text(f"{REPOSITORY}\n")
    test = [f"{venv}/bin/python3", "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider"]
    results = f"--junitxml=artifacts/tests/python-{venv.name}.xml"
    return subprocess.run([*inside(root), *test, *core.split(), results], check=False).returncode


def _runs_foreign() -> str | None:
    """Have the kernel start programs of arm64 with QEMU, as the package has systemd do."""
    known, rule = Path("/proc/sys/fs/binfmt_misc"), Path("/usr/lib/binfmt.d/qemu-aarch64.conf")
    if not (known / "register").exists():
        subprocess.run(["mount", "-t", "binfmt_misc", "none", known], check=True)
    if rule.exists() and not (known / "qemu-aarch64").exists():
        (known / "register").write_text(rule.read_text())
    return "qemu" if (known / "qemu-aarch64").exists() else None


def _pinned(version: str, lock: Path, folder: Path) -> Path:
    """The lines of the lock for that version: pip judges markers by the interpreter it runs on."""
    from packaging.requirements import Requirement

    kept = []
    for line in lock.read_text().replace("\\\n", " ").splitlines():
        words, _, hashes = line.partition(" --hash=")
        marker = Requirement(words).marker
        where = {"python_version": version, "python_full_version": f"{version}.0"}
        if marker is None or marker.evaluate(where):
            kept.append(f"{words.partition(';')[0]} --hash={hashes}\n")
    found = folder / "pinned.txt"
    found.write_text("".join(kept))
    return found


if __name__ == "__main__":
    sys.exit(max(map(run, sys.argv[1:]), default=0))
