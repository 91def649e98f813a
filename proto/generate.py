"""Generate nri_numa/nri/wire/pb from the .proto files of this directory.

Usage: ``python proto/generate.py [--check]``. With ``--check`` nothing is written; the exit
status is 1 when a checked-in file differs from what the compiler makes of the sources.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGET = HERE.parent / "nri_numa" / "nri" / "wire" / "pb"
SOURCES = ("nri.proto", "ttrpc.proto")


def generate(target: Path) -> None:
    """Write ``*_pb2.py`` and ``*_pb2.pyi`` for every source into `target`."""
    from grpc_tools import protoc

    status = protoc.main(
        [
            "protoc",
            f"--proto_path={HERE}",
            f"--python_out={target}",
            f"--pyi_out={target}",
            *SOURCES,
        ]
    )
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}")


def stale(target: Path = TARGET) -> list[str]:
    """Return the names of generated files that are missing or differ from the sources."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch)
        generate(fresh)
        return sorted(
            file.name
            for file in fresh.iterdir()
            if not (target / file.name).exists()
            or (target / file.name).read_bytes() != file.read_bytes()
        )


def main(arguments: list[str]) -> int:
    """Run the command line; returns the exit status."""
    if arguments == ["--check"]:
        names = stale()
        for name in names:
            print(f"{TARGET / name}: not what proto/*.proto says; run proto/generate.py")
        return 1 if names else 0
    if arguments:
        print(__doc__)
        return 2
    generate(TARGET)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
