"""Writes config/agent.schema.json: the schema of the configuration, with its reference.

``python -m tools.config_schema``; a test keeps it fresh. The reference is the text below each key
in `nri_numa.config.sections`.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import json
from pathlib import Path
from typing import Any

from msgspec import Struct

from nri_numa.config import sections
from nri_numa.config.layers import config_json_schema
from nri_numa.engine.request import options

TARGET = Path(__file__).resolve().parents[1] / "config" / "agent.schema.json"


@functools.cache
def described() -> dict[str, Any]:
    """The schema with a description of each key."""
    document = copy.deepcopy(config_json_schema())
    texts = _texts()
    for name, definition in document["$defs"].items():
        kind = getattr(sections, name, None)
        if not isinstance(kind, type) or not issubclass(kind, Struct):
            continue
        fields = dict(zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True))
        for key, item in definition.get("properties", {}).items():
            for one in inspect.getmro(kind):
                if text := texts.get((one.__name__, fields[key])):
                    item["description"] = text
    return document


def document() -> dict[str, Any]:
    """The whole schema: in defaults, rules and permissions the keys of annotations too."""
    made = copy.deepcopy(described())
    definitions = made["$defs"]
    keys = {
        key: {
            "description": f"{option.summary[0].upper()}{option.summary[1:]}.",
            **(
                {"enum": list(option.value_by_text)}
                if option.value_by_text
                else {"type": ["string", "integer"]}
            ),
        }
        for key, option in options.TABLE.by_key.items()
    }
    for name, field in (("AgentConfig", "defaults"), ("RuleDocument", "set")):
        definitions[name]["properties"][field] |= {
            "properties": keys,
            "additionalProperties": False,
        }
    definitions["PermissionDocument"]["properties"]["allowedValues"] |= {
        "properties": {key: {"type": "array", "items": item} for key, item in keys.items()},
        "additionalProperties": False,
    }
    return made


def _texts() -> dict[tuple[str, str], str]:
    """By class and field, the text that stands below it."""
    found: dict[tuple[str, str], str] = {}
    for node in ast.parse(inspect.getsource(sections)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, below in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                found[node.name, field.target.id] = " ".join(str(below.value.value).split())
    return found


if __name__ == "__main__":
    TARGET.write_text(json.dumps(document(), indent=2) + "\n", encoding="utf-8")
