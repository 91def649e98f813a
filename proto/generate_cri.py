"""Generate what is spoken over gRPC: CRI, PodResources, the device plugin API and DRA.

Usage: ``python proto/generate_cri.py [--check]``. With ``--check`` nothing is written; the exit
status is 1 when a checked-in file differs from what the compiler makes of the sources.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The compiler writes below the path it knows a source by, so the sources are mapped to where their
# output lives. No gRPC stubs: a method is called by its name.
PACKAGES = {
    "nri_numa/cri/pb": ("cri.proto",),
    "nri_numa/kubelet/pb": ("podresources.proto",),
    "nri_numa/device_plugin/pb": ("deviceplugin.proto",),
    "nri_numa/dra/pb": ("dra.proto", "pluginregistration.proto"),
}


def generate(root: Path) -> None:
    """Write messages and type stubs of every package below ``root``."""
    from grpc_tools import protoc

    for package, sources in PACKAGES.items():
        status = protoc.main(
            [
                "protoc",
                f"--proto_path={package}={HERE}",
                f"--python_out={root}",
                f"--pyi_out={root}",
                *(f"{package}/{source}" for source in sources),
            ]
        )
        if status != 0:
            raise SystemExit(f"protoc failed with status {status}")


def stale(root: Path = HERE.parent) -> list[str]:
    """Return the paths of generated files that are missing or differ from the sources."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        made = (file for file in Path(scratch).rglob("*") if file.is_file())
        paths = {file.relative_to(scratch): file.read_bytes() for file in made}
        return sorted(
            str(path)
            for path, data in paths.items()
            if not (root / path).exists() or (root / path).read_bytes() != data
        )


def main(arguments: list[str]) -> int:
    """Run the command line; returns the exit status."""
    if arguments == ["--check"]:
        names = stale()
        for name in names:
            print(f"{name}: not what proto/ says; run proto/generate_cri.py")
        return 1 if names else 0
    if arguments:
        print(__doc__)
        return 2
    generate(HERE.parent)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
