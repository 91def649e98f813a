"""Writes what a node gets as CycloneDX 1.5: ``python -m tools.sbom -o build/nri-numa.cdx.json``.

Names, versions and hashes are those of requirements/runtime.txt and interpreter.txt, licences and
edges those of the installed metadata. No times, no addresses: the same inputs give the same bytes.
`spdx` says the same in SPDX 2.3.

https://cyclonedx.org/docs/1.5/json/ and https://spdx.github.io/spdx-spec/v2.3/ have the forms.
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

from tools import interpreter
from tools.build_image import OURS, RUNTIME_LOCK, purl, requirements, version
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
    debian = [p for name in interpreter.ARCHITECTURES for p in interpreter.packages(name)]
    names = {canonicalize_name(each.name): purl(each) for each in distributions}
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
                "bom-ref": purl(each),
                "type": "library",
                "name": canonicalize_name(each.name),
                "version": each.version,
                "scope": "required",
                "hashes": [
                    {"alg": "SHA-256", "content": content}
                    for content in files[canonicalize_name(each.name)]
                ],
                "licenses": [{"expression": licence(each)}],
                "purl": purl(each),
            }
            for each in distributions
        ]
        + [
            {
                "bom-ref": each.purl,
                "type": "library",
                "name": each.name,
                "version": each.version,
                "scope": "required",
                "hashes": [{"alg": "SHA-256", "content": each.sha256}],
                "purl": each.purl,
            }
            for each in debian
        ],
        "dependencies": [
            {
                "ref": root,
                "dependsOn": _needs(importlib.metadata.distribution("nri-numa"), names)
                + [each.purl for each in debian],
            },
            *({"ref": each.purl, "dependsOn": []} for each in debian),
            *({"ref": purl(each), "dependsOn": _needs(each, names)} for each in distributions),
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


def spdx() -> bytes:
    """The same packages and edges as a document of SPDX."""
    made = document()
    components = [made["metadata"]["component"], *made["components"]]
    ids = {each["bom-ref"]: f"SPDXRef-{number}" for number, each in enumerate(components)}
    packages = [
        {
            "SPDXID": ids[each["bom-ref"]],
            "name": each["name"],
            "versionInfo": each["version"],
            "downloadLocation": "NOASSERTION",
            "filesAnalyzed": False,
            "licenseConcluded": "NOASSERTION",
            "licenseDeclared": each.get("licenses", [{"expression": "NOASSERTION"}])[0][
                "expression"
            ],
            "copyrightText": "NOASSERTION",
            "externalRefs": [
                {
                    "referenceCategory": "PACKAGE-MANAGER",
                    "referenceType": "purl",
                    "referenceLocator": each["purl"],
                }
            ],
        }
        for each in components
    ]
    relations = [
        {
            "spdxElementId": ids[edge["ref"]],
            "relationshipType": "DEPENDS_ON",
            "relatedSpdxElement": ids[needed],
        }
        for edge in made["dependencies"]
        for needed in edge["dependsOn"]
    ]
    described = {
        "spdxElementId": "SPDXRef-DOCUMENT",
        "relationshipType": "DESCRIBES",
        "relatedSpdxElement": "SPDXRef-0",
    }
    whole = {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"nri-numa-{version()}",
        "documentNamespace": made["serialNumber"],
        "creationInfo": {"created": "1980-01-01T00:00:00Z", "creators": ["Tool: tools.sbom"]},
        "packages": packages,
        "relationships": [described, *relations],
    }
    return (json.dumps(whole, indent=2, sort_keys=True) + "\n").encode()


def _needs(distribution: importlib.metadata.Distribution, names: dict[str, str]) -> list[str]:
    """References of what it needs here, sorted; with the extras that anybody here asks for."""
    asked = [Requirement(text) for text in distribution.requires or ()]
    name = canonicalize_name(distribution.name)
    requires = importlib.metadata.requires
    extras = {
        "",
        *(
            extra
            for text in (OURS, *(text for other in names for text in requires(other) or ()))
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
