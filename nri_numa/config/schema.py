"""The JSON Schema of the configuration, and the list of structural errors.

The one that is shipped has the reference as well (`tools.config_schema`).
"""

from __future__ import annotations

import copy
import difflib
import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from nri_numa.config.sections import AgentConfig, config_keys


@functools.cache
def config_json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of the configuration file."""
    made = msgspec.json.schema(AgentConfig)
    definitions = made["$defs"]
    for definition in definitions.values():
        # msgspec puts the class's docstring there; ours speak to developers.
        if "properties" in definition:
            definition.pop("description", None)
        elif text := definition.get("description"):
            definition["description"] = " ".join(text.split())  # Python 3.13 strips the indentation
    for name in ("capacityFactor", "reservedMemory"):
        # JSON has text keys only, and msgspec says nothing about them.
        definitions["AgentConfig"]["properties"][name]["propertyNames"] = {
            "pattern": "^[0-9]{1,4}$"
        }
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:nri-numa:v1:AgentConfig",
        "title": "nri-numa AgentConfig",
    }
    # As a reader of the file sees it: lists, no tuples.
    document: dict[str, Any] = json.loads(json.dumps({**head, **made}))
    return document


def structural_problems(document: Mapping[str, Any]) -> tuple[list[str], AgentConfig | None]:
    """Every error of form, and the configuration without the offending keys, if one remains."""
    # Rare, so the library that lists every error is imported only here.
    from jsonschema import Draft202012Validator

    validator = Draft202012Validator(config_json_schema())
    found: list[str] = []
    rest = copy.deepcopy(dict(document))
    errors = sorted(
        validator.iter_errors(document), key=lambda e: [str(p) for p in e.absolute_path]
    )
    for error in errors:
        path = list(error.absolute_path)
        for where, message in _schema_error_problems(error):
            found.append(f"{dotted_path(where)}: {message}")
            _remove_key(rest, where[: len(path) + 1])
    try:
        config = msgspec.convert(rest, AgentConfig, strict=True, str_keys=True)
    except msgspec.ValidationError as error:
        config = None
        if not found:  # the two must not disagree, but an operator needs a reason in any case
            message, _, at = str(error).partition(" - at `$.")
            found.append(f"{at.rstrip('`') or 'document'}: {message}")
    return found, config


def dotted_path(path: list[Any]) -> str:
    """``rules[0].set.policy`` for the path of a schema error."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "document"


def _schema_error_problems(error: Any) -> Iterator[tuple[list[Any], str]]:
    """One problem for each key that the error is about, in our words."""
    path = list(error.absolute_path)
    value, rule = error.instance, error.validator
    shown = _value_text(value)
    if rule == "additionalProperties" and isinstance(error.schema.get("properties"), dict):
        known = error.schema["properties"]
        for key in (key for key in value if key not in known):
            near = (
                [name for name in known if name.lower() == key.lower()]
                or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
                or [leaf for leaf in config_keys() if key.lower() in _misplaced_key_spellings(leaf)]
            )
            hint = (
                f", did you mean {' or '.join(near[:3])}?"
                if near
                else f", expected one of {', '.join(known)}"
            )
            yield [*path, key], f"unknown key{hint}"
    elif "propertyNames" in error.absolute_schema_path:
        yield [*path, value], "expected the number of a NUMA node as key"
    elif rule in ("enum", "const"):
        allowed = error.validator_value if rule == "enum" else [error.validator_value]
        near = difflib.get_close_matches(str(value), [str(a) for a in allowed], n=1)
        hint = f"; did you mean {near[0]}?" if near and len(allowed) > 1 else ""
        yield path, f"{shown}, expected {_choices_text(allowed)}{hint}"
    elif rule == "type":
        yield (
            path,
            f"{shown}, expected "
            f"{_JSON_TYPE_TEXTS.get(error.validator_value, error.validator_value)}",
        )
    elif rule == "anyOf":
        types = [
            _JSON_TYPE_TEXTS.get(one.get("type", ""), "a value") for one in error.validator_value
        ]
        yield path, f"{shown}, expected {' or '.join(types)}"
    elif rule in _BOUND_TEXTS:
        yield path, f"{shown}, expected {_BOUND_TEXTS[rule]} {error.validator_value}"
    elif rule == "minLength":
        yield path, "is empty, expected a text"
    elif rule == "pattern":
        yield path, f"{shown}, expected a text without slash and white space"
    else:
        yield path, str(error.message)


def _misplaced_key_spellings(path: str) -> tuple[str, str]:
    """``log.level`` as people write it in the wrong place: ``logLevel`` and ``level``."""
    return path.replace(".", "").lower(), path.rpartition(".")[2].lower()


_BOUND_TEXTS = {"exclusiveMinimum": "more than", "minimum": "at least", "maximum": "at most"}
_JSON_TYPE_TEXTS = {
    "string": "a text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "object": "a mapping",
    "array": "a list",
    "null": "nothing",
}


def _value_text(value: object) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return "nothing" if value is None else json.dumps(value)[:80]


def _choices_text(allowed: list[Any]) -> str:
    *most, last = [str(item) for item in allowed]
    return f"{', '.join(most)} or {last}" if most else last


def _remove_key(document: Any, path: list[Any]) -> None:
    """Take the offending key away; a bad list item takes its list along: no index shifts."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    if not path:
        return
    at = document
    for part in path[:-1]:
        try:
            at = at[part]
        except (KeyError, IndexError, TypeError):
            return
    if isinstance(at, dict):
        at.pop(path[-1], None)
