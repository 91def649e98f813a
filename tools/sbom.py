"""Writes what a node gets as CycloneDX 1.5: ``python -m tools.sbom -o build/nri-numa.cdx.json``.

Names, versions and hashes are those of requirements/runtime.txt, licences and edges those of the
installed metadata. No times, no addresses: the same inputs give the same bytes.

https://cyclonedx.org/docs/1.5/json/ has the form.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import re
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.build_image import RUNTIME_LOCK, requirements, version
from tools.licences import licence

_HASH: Final = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def hashes() -> dict[str, list[str]]:
    """By name, the SHA-256 of each file that pip may take: wheels of all platforms, the source."""
    text = RUNTIME_LOCK.read_text(encoding="utf-8").replace("\\\n", " ")
    return {line.partition("==")[0]: _HASH.findall(line) for line in text.splitlines()}


def document() -> dict[str, Any]:
    """The bill of materials of this tree."""
    distributions = requirements()
    files = hashes()
    names = {canonicalize_name(each.name): _reference(each) for each in distributions}
    root = f"pkg:generic/nri-numa@{version()}"
    body: dict[str, Any] = {
        "metadata": {
            "component": {
                "bom-ref": root,
                "type": "application",
                "name": "nri-numa",
                "version": version(),
                "licenses": [{"expression": "Apache-2.0"}],
                "purl": root,
            }
        },
        "components": [
            {
                "bom-ref": _reference(each),
                "type": "library",
                "name": canonicalize_name(each.name),
                "version": each.version,
                "scope": "required",
                "hashes": [
                    {"alg": "SHA-256", "content": content}
                    for content in files[canonicalize_name(each.name)]
                ],
                "licenses": [{"expression": licence(each)}],
                "purl": _reference(each),
            }
            for each in distributions
        ],
        "dependencies": [
            {"ref": root, "dependsOn": _needs(importlib.metadata.distribution("nri-numa"), names)},
            *(
                {"ref": _reference(each), "dependsOn": _needs(each, names)}
                for each in distributions
            ),
        ],
    }
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).digest()
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        # Of the contents, where usually a random number stands.
        "serialNumber": f"urn:uuid:{uuid.UUID(bytes=digest[:16], version=5)}",
        "version": 1,
        **body,
    }


def rendered() -> bytes:
    """The document as a file."""
    return (json.dumps(document(), indent=2, sort_keys=True) + "\n").encode()


def _reference(distribution: importlib.metadata.Distribution) -> str:
    return f"pkg:pypi/{canonicalize_name(distribution.name)}@{distribution.version}"


def _needs(distribution: importlib.metadata.Distribution, names: dict[str, str]) -> list[str]:
    """References of what it needs here, sorted; with the extras that anybody here asks for."""
    asked = [Requirement(text) for text in distribution.requires or ()]
    name = canonicalize_name(distribution.name)
    extras = {
        "",
        *(
            extra
            for other in names
            for text in importlib.metadata.requires(other) or ()
            if canonicalize_name((needed := Requirement(text)).name) == name
            for extra in needed.extras
        ),
    }
    return sorted(
        {
            names[canonicalize_name(each.name)]
            for each in asked
            if each.marker is None or any(each.marker.evaluate({"extra": one}) for one in extras)
        }
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="sbom", description=__doc__.split("\n")[0])
    parser.add_argument("-o", "--output", metavar="FILE", required=True)
    options = parser.parse_args(arguments)
    path = Path(options.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(rendered())
    sys.stdout.write(f"{path}: {len(requirements())} packages\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
