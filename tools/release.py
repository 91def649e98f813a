"""Builds all that is handed out, with checksums: ``python -m tools.release -o build/release``.

The wheel, bundle and packages, the image, the chart, kubectl's plugin, bills of materials,
provenance, release notes, and ``SHA256SUMS`` over them in the form of sha256sum(1). The same tree
gives the same bytes, wherever and whenever it is done, so that whoever does not trust a file makes
it again. Nothing is signed here: the key is whoever's who hands it out (docs/security.md).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import yaml

from tools import build_image, kubectl_plugin, packages, sbom
from tools.addresses import addresses
from tools.build_image import REPOSITORY, Rootfs, version
from tools.interpreter import ARCHITECTURES

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


def _write(into: Path, name: str, data: bytes) -> Path:
    path = into / name
    path.write_bytes(data)
    return path


def chart(into: Path) -> list[Path]:
    """Pack the chart as ``helm package`` names it, and as the OCI artifact that registries have."""
    files = Rootfs()
    for source in sorted(CHART.rglob("*")):
        if source.is_file():
            files.add(f"nri-numa/{source.relative_to(CHART)}", source.read_bytes())
    packed = gzip.compress(files.tar(), 9, mtime=build_image.EPOCH)
    about = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    config = json.dumps(about, sort_keys=True).encode()
    media = "application/vnd.cncf.helm"
    manifest = build_image.oci_manifest(
        build_image.descriptor(f"{media}.config.v1+json", config),
        build_image.descriptor(f"{media}.chart.content.v1.tar+gzip", packed),
    )
    entry = build_image.descriptor("application/vnd.oci.image.manifest.v1+json", manifest)
    layout = build_image.oci_layout([config, packed, manifest], entry, f"nri-numa:{version()}")
    name = f"nri-numa-{version()}"
    return [_write(into, f"{name}.tgz", packed), _write(into, f"{name}-chart.oci.tar", layout)]


def programs(into: Path, architectures: Sequence[str]) -> list[Path]:
    """Bundle, packages and image.

    Raises:
        SystemExit: the bill of materials does not name the package of a file.
    """
    named = {each["bom-ref"] for each in sbom.document()["components"]}
    made, layers = [], {}
    for each in architectures:
        both = build_image.programs(each)
        image = build_image.assemble(both)
        layers[each] = image.tar()
        bundle = packages.bundle(both, each)
        for files in (image, bundle):
            for path, origin in files.origins.items():
                if origin not in named | {f"pkg:generic/nri-numa@{version()}"}:
                    raise SystemExit(f"{path} is of {origin!r}, which the bill does not name")
        name = f"nri-numa-{version()}"
        rpm = f"{name}-1.{ARCHITECTURES[each]}.rpm"
        made += [
            _write(into, f"{name}-linux-{each}.tar.gz", packages.archive(bundle)),
            _write(into, f"nri-numa_{version()}_{each}.deb", packages.deb(bundle, each)),
            _write(into, rpm, packages.rpm(bundle, each)),
        ]
    archive = build_image.archive(layers, f"{addresses()['image']}:{version()}")
    return [*made, _write(into, f"nri-numa-{version()}-image.tar", archive)]


def texts(into: Path) -> list[Path]:
    """Bills of materials, and the release notes: the version's part of CHANGELOG.md.

    Raises:
        SystemExit: CHANGELOG.md has nothing of this version.
    """
    changes = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(version())}\b.*?$(.*?)(?=^## |\Z)", changes, re.M | re.S)
    if found is None:
        raise SystemExit(f"CHANGELOG.md has no ## {version()}")
    return [
        _write(into, f"nri-numa-{version()}.cdx.json", sbom.rendered()),
        _write(into, f"nri-numa-{version()}.spdx.json", sbom.spdx()),
        _write(into, "RELEASE_NOTES.md", found[1].strip().encode() + b"\n"),
    ]


def provenance(files: Sequence[Path]) -> bytes:
    """What was made of what, as a statement of in-toto in the form of SLSA 1.0; not signed."""
    pinned = [
        (each, REPOSITORY / "requirements" / each) for each in ("runtime.txt", "interpreter.txt")
    ]
    needed = [{"name": name, "digest": {"sha256": _digest(path)}} for name, path in pinned]
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"]
    if (REPOSITORY / ".git").exists():
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603
        needed.append({"name": "nri-numa", "digest": {"gitCommit": commit}})
    homepage = addresses()["homepage"]
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": path.name, "digest": {"sha256": _digest(path)}} for path in files],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": f"{homepage}/make-release/v1",
                "externalParameters": {"command": "make release", "version": version()},
                "resolvedDependencies": needed,
            },
            "runDetails": {"builder": {"id": homepage}},
        },
    }
    return (json.dumps(statement, indent=2, sort_keys=True) + "\n").encode()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sums(files: Sequence[Path]) -> str:
    """The lines of SHA256SUMS, by name."""
    lines = [
        f"{_digest(path)}  {path.name}\n" for path in sorted(files, key=lambda path: path.name)
    ]
    return "".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="release", description=__doc__.split("\n")[0])
    parser.add_argument("-o", "--output", metavar="DIRECTORY", required=True)
    parser.add_argument(
        "--architecture",
        metavar="LIST",
        default=",".join(ARCHITECTURES),
        help="default: %(default)s",
    )
    options = parser.parse_args(arguments)
    into = Path(options.output)
    into.mkdir(parents=True, exist_ok=True)
    if not (into / SUMS).exists() and any(into.iterdir()):
        parser.error(f"{into}: holds other files, expected an empty directory or an earlier output")
    for old in into.iterdir():
        old.unlink()  # so that nothing lies there without a sum
    made = [
        wheel(into),
        *chart(into),
        *programs(into, options.architecture.split(",")),
        *texts(into),
    ]
    packed = kubectl_plugin.archive()
    made.append(_write(into, f"{kubectl_plugin.PROGRAM}.tar.gz", packed))
    made.append(_write(into, "numa.yaml", kubectl_plugin.manifest(packed).encode()))
    made.sort(key=lambda path: path.name)
    made.append(_write(into, f"nri-numa-{version()}.intoto.json", provenance(made)))
    text = sums(made)
    (into / SUMS).write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
