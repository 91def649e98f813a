"""Builds all that is handed out, with checksums: ``python -m tools.release -o build/release``.

The wheel, the image, the chart, the bill of materials, and ``SHA256SUMS`` over them in the form of
sha256sum(1). The same tree and interpreter give the same bytes, wherever and whenever it is done,
so that whoever does not trust a file makes it again. Nothing is signed here: the key is whoever's
who hands it out (docs/security.md).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tools import build_image, sbom
from tools.build_image import REPOSITORY, Rootfs, version

CHART: Final = REPOSITORY / "config" / "helm" / "nri-numa"
SUMS: Final = "SHA256SUMS"

_SOURCES: Final = ("pyproject.toml", "README.md", "LICENSE", "nri_numa")
"""What the wheel is made of."""


def wheel(into: Path) -> Path:
    """Build the wheel, from a copy: what lies in build/ from another time would get into it."""
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary, "tree")
        tree.mkdir()
        for name in _SOURCES:
            source = REPOSITORY / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
                shutil.copytree(source, tree / name, ignore=ignored, copy_function=shutil.copyfile)
            else:
                shutil.copyfile(source, tree / name)
        for folder, _, files in os.walk(tree):
            for each in files:  # a wheel keeps modes, and a checkout has them of its umask
                Path(folder, each).chmod(0o644)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
        subprocess.run(  # noqa: S603 - the interpreter that runs this
            [*command, "--no-deps", "--no-build-isolation", "--wheel-dir", temporary, str(tree)],
            check=True,
            umask=0o022,  # for what setuptools writes, likewise
            # The least that a zip file can say.
            env={**os.environ, "SOURCE_DATE_EPOCH": "315532800"},
        )
        (built,) = Path(temporary).glob("*.whl")
        return Path(shutil.copyfile(built, into / built.name))


def chart(into: Path) -> Path:
    """Pack the chart as ``helm package`` names it."""
    files = Rootfs()
    for source in sorted(CHART.rglob("*")):
        if source.is_file():
            files.add(f"nri-numa/{source.relative_to(CHART)}", source.read_bytes())
    path = into / f"nri-numa-{version()}.tgz"
    path.write_bytes(gzip.compress(files.tar(), 9, mtime=build_image.EPOCH))
    return path


def image(into: Path) -> Path:
    """Build the image's archive."""
    path = into / f"nri-numa-{version()}-image.tar"
    layer = build_image.assemble().tar()
    path.write_bytes(build_image.archive(layer, f"localhost/nri-numa:{version()}"))
    return path


def bill(into: Path) -> Path:
    """Write the bill of materials."""
    path = into / f"nri-numa-{version()}.cdx.json"
    path.write_bytes(sbom.rendered())
    return path


def sums(files: Sequence[Path]) -> str:
    """The lines of SHA256SUMS, by name."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(files, key=lambda path: path.name)
    ]
    return "".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="release", description=__doc__.split("\n")[0])
    parser.add_argument("-o", "--output", metavar="DIRECTORY", required=True)
    options = parser.parse_args(arguments)
    into = Path(options.output)
    into.mkdir(parents=True, exist_ok=True)
    if not (into / SUMS).exists() and any(into.iterdir()):
        parser.error(f"{into}: holds other files, expected an empty directory or an earlier output")
    for old in into.iterdir():
        old.unlink()  # so that nothing lies there without a sum
    text = sums([make(into) for make in (wheel, chart, bill, image)])
    (into / SUMS).write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
