"""The list of docs/http-api.md, from the OpenAPI description.

``python -m tools.docs_api`` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tools.docs_regions import cell, code, table, write
from tools.openapi import describe

_ROOTS = (
    "Status",
    "Readiness",
    "Assignments",
    "PodExplanations",
    "Refusals",
    "Kubelet",
    "MachineNUMAInfo",
    "Error",
)


def text() -> str:
    """The paths, then the fields of every document they answer with."""
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
                "yes" if len(operation["security"]) > 1 else "no",
                " ".join([cell(operation["summary"]), *query]),
            )
        )
    lines = ["## Paths", ""]
    lines += table(("path", "answer", "status", "token", "what"), rows)
    lines += ["", "## Documents", ""]
    schemas = document["components"]["schemas"]
    for name in sorted(schemas, key=lambda n: (n not in _ROOTS, n)):
        lines += [f"### {name}", "", *_schema(schemas[name]), ""]
    return "\n".join(lines)


def _answer(response: Mapping[str, Any]) -> str:
    (media, content), *_ = response["content"].items()
    reference = content["schema"].get("$ref", "")
    name = reference.rpartition("/")[2]
    return f"[{name}](#{name.lower()})" if name else code(media)


def _schema(schema: Mapping[str, Any]) -> Iterator[str]:
    if schema.get("description"):
        yield cell(" ".join(str(schema["description"]).split()))
        yield ""
    if "enum" in schema:
        yield "One of " + ", ".join(code(str(value)) for value in schema["enum"]) + "."
        return
    rows = [
        (code(name), _kind(item), cell(" ".join(str(item.get("description", "")).split())))
        for name, item in schema.get("properties", {}).items()
    ]
    if any(row[2] for row in rows):
        yield from table(("field", "type", "meaning"), rows)
    else:
        yield from table(("field", "type"), [row[:2] for row in rows])


def _kind(item: Mapping[str, Any]) -> str:
    if "$ref" in item:
        name = item["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in item:
        return " or ".join(_kind(one) for one in item["anyOf"])
    if item.get("type") == "array":
        return f"list of {_kind(item['items'])}" if "items" in item else "list"
    if item.get("type") == "object":
        inner = item.get("additionalProperties")
        return f"mapping to {_kind(inner)}" if isinstance(inner, dict) else "mapping"
    if "enum" in item:
        return ", ".join(code(str(value)) for value in item["enum"])
    return str(item.get("type", "any"))


if __name__ == "__main__":
    write("http-api.md", "tools.docs_api", text())
