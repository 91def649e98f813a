"""The interpreter of image and bundle, with its libraries: packages of Debian 13, pinned by hash.

    python -m tools.interpreter          # pins those that the archive has now (part of `make lock`)

Nothing of them runs while another architecture is put together, so one machine makes both.
"""

from __future__ import annotations

import hashlib
import io
import marshal
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tests.beds.debs import DebCache, machine_mirror
from tests.beds.testbed import cache_dir, locked

REPOSITORY: Final = Path(__file__).resolve().parents[1]
PINNED: Final = REPOSITORY / "requirements" / "interpreter.txt"
PYTHON: Final = "3.13"
SUITE: Final = "trixie"
ARCHITECTURES: Final = {"amd64": "x86_64", "arm64": "aarch64"}
"""Debian's, and the container world's, name to the kernel's."""
_NAMES: Final = (
    *(f"python{PYTHON}-minimal", f"libpython{PYTHON}-minimal", f"libpython{PYTHON}-stdlib"),
    *("libc6", "libgcc-s1", "gcc-14-base", "libstdc++6", "libexpat1", "zlib1g", "libssl3t64"),
    *("libzstd1", "libffi8", "libbz2-1.0", "liblzma5", "libuuid1"),
)


def here() -> str:
    """The architecture of this machine."""
    found = [name for name, kernel in ARCHITECTURES.items() if kernel == platform.machine()]
    if not found:
        raise SystemExit(f"{platform.machine()}: expected {' or '.join(ARCHITECTURES.values())}")
    return found[0]


def platforms(architecture: str) -> list[str]:
    """The words by which pip takes wheels that this interpreter can load there."""
    versions = ("2014", "_2_17", "_2_26", "_2_27", "_2_28", "_2_31", "_2_34")
    machine = ARCHITECTURES[architecture]
    return [f"--platform=manylinux{version}_{machine}" for version in versions]


class Package(NamedTuple):
    """One line of `PINNED`; the path is that in a Debian archive."""

    architecture: str
    name: str
    version: str
    path: str
    sha256: str

    @property
    def purl(self) -> str:
        """Its name for scanners."""
        version = self.version.replace("+", "%2B").replace("~", "%7E").replace(":", "%3A")
        name = self.name.replace("+", "%2B")
        return f"pkg:deb/debian/{name}@{version}?arch={self.architecture}&distro=debian-13"

    def members(self) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
        """Its files and links, in order.

        Raises:
            SystemExit: the archive has it no more, or other bytes.
        """
        file = cache_dir() / "interpreter" / self.path.rpartition("/")[2]
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.parent / ".lock"):
            if not file.exists() or hashlib.sha256(file.read_bytes()).hexdigest() != self.sha256:
                address = f"{machine_mirror().uri.rstrip('/')}/{self.path}"
                try:
                    with urllib.request.urlopen(address, timeout=60) as answer:  # noqa: S310
                        data = answer.read()
                except OSError as error:
                    raise SystemExit(f"{address}: {error}; newer ones: make lock") from error
                if hashlib.sha256(data).hexdigest() != self.sha256:
                    raise SystemExit(f"{address}: is not what {PINNED.name} pins")
                file.write_bytes(data)
        command = ["dpkg-deb", "--fsys-tarfile", str(file)]
        tar = subprocess.run(command, check=True, capture_output=True).stdout  # noqa: S603
        with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
            for member in archive:
                held = archive.extractfile(member) if member.isreg() else None
                yield member, b"" if held is None else held.read()


def packages(architecture: str) -> list[Package]:
    """What is pinned for an architecture."""
    lines = PINNED.read_text(encoding="utf-8").splitlines()
    return [each for each in (Package(*line.split()) for line in lines) if each[0] == architecture]


class _Archive(DebCache):
    """The packages of one suite for one architecture, whatever that of this machine is."""

    archive_suites = (SUITE,)

    def pinned(self) -> Iterator[str]:
        self._update_lists()
        for line in self._apt("apt-get", "--print-uris", "download", *_NAMES).splitlines():
            address, name, _, digest = line.split()
            package, version, _ = name.replace("%3a", ":").split("_")
            path = re.sub("^.*?/(?=pool/)", "", address.strip("'"))
            sha256 = digest.removeprefix("SHA256:")
            yield f"{self.architecture} {package} {version} {path} {sha256}\n"


def compiled(files: Mapping[str, bytes], sources: Mapping[str, bytes]) -> dict[str, bytes]:
    """Compiled form by path of modules, by the interpreter that ``files`` of this machine have.

    Without references: which objects are shared differs from run to run. Flag 1 without the check:
    the source never changes (PEP 552).
    """
    with tempfile.TemporaryDirectory() as root:
        for path, data in files.items():
            file = Path(root, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            file.chmod(0o755)
        done = subprocess.run(  # noqa: S603 - what is pinned
            [*loader(Path(root), files), "-I", "-S", "-c", _COMPILE],
            input=marshal.dumps(dict(sources), 2),
            stdout=subprocess.PIPE,
            check=True,
            env={"PYTHONHASHSEED": "0"},
        )
    found: dict[str, bytes] = marshal.loads(done.stdout)  # noqa: S302 - of the line above
    return found


def loader(root: Path, files: Mapping[str, bytes]) -> list[str]:
    """The words that run the interpreter below ``root`` with its own C library."""
    (linker,) = (name for name in files if re.fullmatch(r".*/ld-linux-[^/]*", name))
    libraries = f"{root}/usr/lib/{ARCHITECTURES[here()]}-linux-gnu"
    program = f"{root}/usr/bin/python{PYTHON}"
    return [f"{root}/{linker}", "--library-path", libraries, "--argv0", program, program]


_COMPILE: Final = """
import importlib.util, marshal, sys
made = {}
for path, data in sorted(marshal.load(sys.stdin.buffer).items()):
    try:
        code = compile(data, f"/{path}", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        continue  # a template or an example, not to be imported
    head = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little")
    made[path] = head + importlib.util.source_hash(data) + marshal.dumps(code, 2)
sys.stdout.buffer.write(marshal.dumps(made, 2))
"""


def main() -> int:
    """Pin what the archive has now."""
    with tempfile.TemporaryDirectory() as directory:
        lines = [
            line
            for each in ARCHITECTURES
            for line in _Archive(Path(directory, each), architecture=each).pinned()
        ]
    PINNED.write_text("".join(lines), encoding="utf-8")
    sys.stdout.write(f"{PINNED}: {len(lines)} packages\n")
    return 0


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
