"""The licences of what the plugin needs to run, from the metadata of what is installed.

The table stands in THIRD_PARTY.md; ``python -m tools.licences`` prints it. A distribution whose
licence nobody has looked at is an error, so that a new dependency is looked at once.
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Final

from tools.build_image import requirements
from tools.docs_regions import table

_EXPRESSIONS: Final = {
    ("aiohappyeyeballs", "PSF-2.0"): "PSF-2.0",
    ("aiosignal", "Apache 2.0"): "Apache-2.0",
    ("certifi", "MPL-2.0"): "MPL-2.0",
    ("cgroupspy", "New BSD"): "BSD-3-Clause",
    ("charset-normalizer", "MIT"): "MIT",
    ("frozenlist", "Apache-2.0"): "Apache-2.0",
    ("h11", "MIT"): "MIT",
    ("hyperframe", "The MIT License (MIT)"): "MIT",
    ("propcache", "Apache-2.0"): "Apache-2.0",
    ("protobuf", "3-Clause BSD License"): "BSD-3-Clause",
    ("pyyaml", "MIT"): "MIT",
    ("requests", "Apache-2.0"): "Apache-2.0",
    ("yarl", "Apache-2.0"): "Apache-2.0",
}
"""SPDX expression by name and what its older metadata say, after a look at the licence itself."""


def licence(distribution: importlib.metadata.Distribution) -> str:
    """Its SPDX licence expression.

    Raises:
        SystemExit: its metadata hold none, and nobody has looked.
    """
    metadata = distribution.metadata.json
    expression = metadata.get("license_expression")
    if expression:
        return str(expression)
    text, *_ = str(distribution.metadata.json.get("license") or "").split(
        "\n"
    )  # some have all of it
    try:
        return _EXPRESSIONS[distribution.name.lower(), text]
    except KeyError:
        raise SystemExit(
            f"{distribution.name} {distribution.version}: its licence is {text[:60]!r}, expected a"
            " License-Expression, or an entry in tools/licences.py after a look at its text"
        ) from None


def texts(distribution: importlib.metadata.Distribution) -> list[str]:
    """The files with the text of its licence, as they stand beside it in the image."""
    return sorted(
        str(file)
        for file in distribution.files or ()
        if ".dist-info/" in str(file)
        and file.name.upper().startswith(("LICENSE", "LICENCE", "COPYING", "NOTICE"))
    )


def text() -> str:
    """The table of THIRD_PARTY.md."""
    rows = [(f"{each.name} {each.version}", licence(each)) for each in requirements()]
    return "\n".join(table(("package", "licence"), rows))


if __name__ == "__main__":
    sys.stdout.write(text() + "\n")
