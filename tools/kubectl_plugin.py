"""Packs ``kubectl numa``, one file, for krew: ``python -m tools.kubectl_plugin -o build/kubectl``.

There are an archive of it with the licence, and the manifest with the archive's checksum.
The same tree gives the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from nri_numa.model.reasons import RejectionReason, RetryCondition
from tools.build_image import EPOCH, REPOSITORY, Rootfs, version

SOURCES: Final = REPOSITORY / "config" / "kubectl"
PROGRAM: Final = "kubectl-numa"
_REASONS: Final = re.compile(
    r"(# generated: python -m tools.docs_regions\n).*?(# end of generated\n)", re.DOTALL
)
_REASON_COLUMNS: Final = 92
_CHECKSUM: Final = "0" * 64
_VERSION: Final = "v0.0.0"


def program_with_reasons(text: str) -> str:
    """The program with the reasons of rejections by what their containers wait for.

    Raises:
        ValueError: it has no place for them.
    """
    lines = ["REASONS = {"]
    for condition in RetryCondition:
        words = " ".join(one for one in RejectionReason if one.retry is condition)
        pieces = textwrap.wrap(words, _REASON_COLUMNS, initial_indent=" " * (len(condition) + 4))
        quoted = [json.dumps(f"{piece.strip()} ") for piece in pieces[:-1]]
        quoted.append(json.dumps(pieces[-1].strip()))
        lines.append(f'    "{condition}": {quoted[0]}')
        lines += [f"    {piece}" for piece in quoted[1:]]
        lines[-1] += ","
    region = "\n".join([*lines, "}\n"])
    made, count = _REASONS.subn(lambda match: match[1] + region + match[2], text)
    if count != 1:
        raise ValueError(f"{PROGRAM} has {count} regions for reasons, expected one")
    return made


def program() -> bytes:
    """The program."""
    return (SOURCES / PROGRAM).read_bytes()


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
