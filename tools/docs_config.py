"""The configuration reference of docs/configuration.md, from the schema.

``python -m tools.docs_config`` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from nri_numa.config.sections import config_keys
from tools.config_schema import described
from tools.docs_regions import cell, code, table, write


def text() -> str:
    """One table for the top level, one for each section, one for the items of rules."""
    definitions = described()["$defs"]
    lines = [
        "## Top level",
        "",
        *_rows(definitions["AgentConfig"], ""),
        "",
    ]
    for name, item in definitions["AgentConfig"]["properties"].items():
        definition = _definition(item)
        if "properties" in definition:
            lines += [f"## {name}", "", _sentence(item), "", *_rows(definition, f"{name}."), ""]
    lines += ["## Items of rules", ""]
    lines += ["Each item of `rules` is a mapping with `set` and, if you like, `match`.", ""]
    rule, match = definitions["RuleDocument"], definitions["ContainerMatch"]
    rows = [
        *_item_rows(rule, "", skip="match"),
        *_item_rows(match, "match.", skip=""),
    ]
    lines += table(("key", "type", "meaning"), rows)
    lines += ["", "## Items of permissions", ""]
    lines += ["Each item of `permissions` is a mapping; every key may be left out.", ""]
    permission, match = definitions["PermissionDocument"], definitions["PodMatch"]
    rows = [
        *_item_rows(match, "match.", skip=""),
        *_item_rows(permission, "", skip="match"),
    ]
    lines += table(("key", "type", "meaning"), rows)
    lines += ["", "## Items of quotas.namespaces", ""]
    rows = list(_item_rows(definitions["NamespaceQuotaDocument"], "", skip=""))
    lines += table(("key", "type", "meaning"), rows)
    return "\n".join(lines)


def _rows(definition: Mapping[str, Any], prefix: str) -> list[str]:
    rows = _row_texts(definition, prefix)
    return table(("key", "type", "default", "change", "meaning"), rows)


def _row_texts(definition: Mapping[str, Any], prefix: str) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for key, item in definition["properties"].items():
        path = prefix + key
        found = _definition(item)
        if "properties" in found:
            if prefix:  # a section in a section has no heading
                rows += _row_texts(found, f"{path}.")
            continue
        rows.append(
            (
                code(path),
                _kind(item),
                code(_default(config_keys()[path].default)),
                "restart" if config_keys()[path].restart else "",
                cell(_sentence(item)),
            )
        )
    return rows


def _item_rows(
    definition: Mapping[str, Any], prefix: str, *, skip: str
) -> Iterator[tuple[str, str, str]]:
    for key, item in definition["properties"].items():
        if key != skip:
            yield code(prefix + key), _kind(item), cell(_sentence(item))


def _default(value: object) -> str:
    if isinstance(value, str):
        return str(value) or '""'
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _definition(item: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = item.get("$ref")
    if reference is None and len(item.get("allOf", ())) == 1:
        reference = item["allOf"][0].get("$ref")
    if reference is None:
        return item
    found: Mapping[str, Any] = described()["$defs"][reference.rpartition("/")[2]]
    return found


def _sentence(item: Mapping[str, Any]) -> str:
    return str(item.get("description") or _definition(item).get("description", ""))


_WORDS = {"string": "text", "integer": "whole number", "number": "number", "boolean": "bool"}


def _kind(item: Mapping[str, Any]) -> str:
    found = _definition(item)
    if "const" in found:
        return code(str(found["const"]))
    if "enum" in found:
        return ", ".join(code(str(value)) for value in found["enum"])
    if "anyOf" in found:
        kinds = [one for one in found["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(map(_kind, kinds)))
    if found.get("type") == "array":
        inner = _definition(found["items"])
        return "list" if "properties" in inner else f"list of {_kind(found['items'])}"
    if found.get("type") == "object":
        return "mapping"
    words = _WORDS[str(found.get("type"))]
    low, high = found.get("minimum"), found.get("maximum")
    if low is not None and high is not None:
        return f"{words}, {low} to {high}"
    return f"{words}, at least {low}" if low is not None else words


if __name__ == "__main__":
    write("configuration.md", "tools.docs_config", text())
