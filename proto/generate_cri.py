"""Generate nri_numa/runtime/pb (CRI and PodResources) from the .proto files of this directory.

Usage: ``python proto/generate_cri.py [--check]``. With ``--check`` nothing is written; the exit
status is 1 when a checked-in file differs from what the compiler makes of the sources.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The compiler derives the Python imports in *_pb2_grpc.py from the path it knows a source by, so
# the sources are mapped to where their output lives.
PACKAGE = "nri_numa/runtime/pb"
TARGET = HERE.parent / PACKAGE
SOURCES = ("cri.proto", "podresources.proto")


def generate(root: Path) -> None:
    """Write messages, type stubs and gRPC stubs below ``root/nri_numa/runtime/pb``."""
    from grpc_tools import protoc

    status = protoc.main(
        [
            "protoc",
            f"--proto_path={PACKAGE}={HERE}",
            f"--python_out={root}",
            f"--pyi_out={root}",
            f"--grpc_python_out={root}",
            *(f"{PACKAGE}/{source}" for source in SOURCES),
        ]
    )
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}")


def stale(target: Path = TARGET) -> list[str]:
    """Return the names of generated files that are missing or differ from the sources."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        return sorted(
            file.name
            for file in (Path(scratch) / PACKAGE).iterdir()
            if not (target / file.name).exists()
            or (target / file.name).read_bytes() != file.read_bytes()
        )


def main(arguments: list[str]) -> int:
    """Run the command line; returns the exit status."""
    if arguments == ["--check"]:
        names = stale()
        for name in names:
            print(f"{TARGET / name}: not what proto/ says; run proto/generate_cri.py")
        return 1 if names else 0
    if arguments:
        print(__doc__)
        return 2
    generate(HERE.parent)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
