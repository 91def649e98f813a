"""The paths of docs/http-api.md, from the OpenAPI description.

``python -m tools.docs_api`` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.docs_regions import cell, code, table, write
from tools.openapi import describe


def text() -> str:
    """The paths, with the schema of each answer."""
    document = describe()
    rows = []
    for path, item in document["paths"].items():
        operation = item["get"]
        codes = [name for name in operation["responses"] if name not in ("400", "401")]
        query = [
            f"{code(one['name'])}: {cell(one['description'])}"
            for one in operation.get("parameters", ())
            if one["in"] == "query"
        ]
        rows.append(
            (
                code(path),
                _answer(operation["responses"]["200"]),
                ", ".join(codes),
                " ".join([cell(operation["summary"]), *query]),
            )
        )
    lines = ["## Paths", ""]
    lines += table(("path", "answer", "status", "what"), rows)
    return "\n".join(lines)


def _answer(response: Mapping[str, Any]) -> str:
    (media, content), *_ = response["content"].items()
    reference = content["schema"].get("$ref", "")
    name = reference.rpartition("/")[2]
    return code(name or media)


if __name__ == "__main__":
    write("http-api.md", "tools.docs_api", text())
