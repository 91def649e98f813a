"""Packs ``kubectl numa`` for krew: ``python -m tools.kubectl_plugin -o build/kubectl``.

The archive with the program, what stands beside it and the licence, and the manifest with the
archive's checksum. The same tree gives the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tools.build_image import EPOCH, REPOSITORY, Rootfs, version

SOURCES: Final = REPOSITORY / "config" / "kubectl"
PROGRAM: Final = "kubectl-numa"
MODULES: Final = (
    "kubectl_numa_cluster.py",
    "kubectl_numa_commands.py",
    "kubectl_numa_why.py",
)
"""What stands beside it."""
_CHECKSUM: Final = "0" * 64
_VERSION: Final = "v0.0.0"


def archive() -> bytes:
    """The archive that krew unpacks."""
    files = Rootfs()
    files.add(PROGRAM, (SOURCES / PROGRAM).read_bytes(), 0o755)
    for name in MODULES:
        files.add(name, (SOURCES / name).read_bytes())
    files.add("LICENSE", (REPOSITORY / "LICENSE").read_bytes())
    return gzip.compress(files.tar(), 9, mtime=EPOCH)


def manifest(packed: bytes) -> str:
    """The manifest for an archive.

    Raises:
        ValueError: the template has no place for version or checksum.
    """
    text = (SOURCES / "numa.yaml").read_text(encoding="utf-8")
    for place, value in (
        (_CHECKSUM, hashlib.sha256(packed).hexdigest()),
        (_VERSION, f"v{version()}"),
    ):
        if text.count(place) != 1:
            raise ValueError(f"numa.yaml has {place} {text.count(place)} times; expected it once")
        text = text.replace(place, value)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both files."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.kubectl_plugin", description=main.__doc__
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="a folder")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    packed = archive()
    (options.output / f"{PROGRAM}.tar.gz").write_bytes(packed)
    (options.output / "numa.yaml").write_text(manifest(packed), encoding="utf-8")
    print(f"{options.output}: {PROGRAM}.tar.gz and numa.yaml")
    return 0


if __name__ == "__main__":
    sys.exit(main())
