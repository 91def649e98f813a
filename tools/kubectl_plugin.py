"""Packs ``kubectl numa`` into one file: ``python -m tools.kubectl_plugin -o build/kubectl``.

For krew there are an archive of it with the licence, and the manifest with the archive's checksum.
The same tree gives the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from nri_numa.model.reasons import RejectionReason
from tools.build_image import EPOCH, REPOSITORY, Rootfs, version

SOURCES: Final = REPOSITORY / "config" / "kubectl"
PROGRAM: Final = "kubectl-numa"
MODULES: Final = (
    "kubectl_numa_cluster.py",
    "kubectl_numa_commands.py",
    "kubectl_numa_reasons.py",
    "kubectl_numa_why.py",
)
"""What stands beside it, and is packed into it."""
REASONS: Final = SOURCES / "kubectl_numa_reasons.py"
_CHECKSUM: Final = "0" * 64
_VERSION: Final = "v0.0.0"


def reasons() -> str:
    """The module that says of each reason what its container waits for."""
    rows = "".join(f'    "{one}": "{one.retry}",\n' for one in RejectionReason)
    return (
        '"""Reasons of rejections, and when the kubelet\'s next attempt can succeed.\n\n'
        'Generated from nri_numa/model/reasons.py: ``python -m tools.docs_regions``.\n"""\n\n'
        f"RETRY_CONDITIONS = {{\n{rows}}}\n"
    )


def program() -> bytes:
    """The program in one file, in the form of zipapp."""
    packed = io.BytesIO(b"#!/usr/bin/env python3\n")
    packed.seek(0, io.SEEK_END)
    with zipfile.ZipFile(packed, "a") as files:
        for name, source in (("__main__.py", PROGRAM), *((name, name) for name in MODULES)):
            files.writestr(zipfile.ZipInfo(name), (SOURCES / source).read_bytes())
    return packed.getvalue()


def archive() -> bytes:
    """The archive that krew unpacks."""
    files = Rootfs()
    files.add(PROGRAM, program(), 0o755)
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
    (options.output / PROGRAM).write_bytes(program())
    (options.output / PROGRAM).chmod(0o755)
    print(f"{options.output}: {PROGRAM}, {PROGRAM}.tar.gz and numa.yaml")
    return 0


if __name__ == "__main__":
    sys.exit(main())
