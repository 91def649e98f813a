"""Reads YAML as people mean it: the core schema of YAML 1.2, and no key twice.

Infinity and *not a number* are no settings of anything, so ``.inf`` and ``.nan`` stay texts.

PyYAML follows YAML 1.1, where ``on`` is true, ``010`` is eight and ``10:30`` is 630, and keeps the
last of two equal keys without a word. Each of these turns a typing slip into another setting.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NULL = re.compile(r"~|null|Null|NULL|")
_MAX_INT_DIGITS = 18
MAX_DEPTH = 64


class YAMLProblem(ValueError):
    """The text is no YAML document; the message says where and why."""


class _Loader(_Base):  # type: ignore[misc]  # the C loader has no type
    """A safe loader with its own scalars."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


def _int(loader: Any, node: Any) -> int | str:
    text = loader.construct_scalar(node)
    return int(text, 10) if len(text) <= _MAX_INT_DIGITS else str(text)


def _float(loader: Any, node: Any) -> float:
    return float(loader.construct_scalar(node))


def _mapping(loader: Any, node: Any) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    result: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if isinstance(key, list | dict):
            raise YAMLProblem(f"line {line}: a key must be a word")
        if key in result:
            raise YAMLProblem(f"line {line}: the key {key!r} stands here a second time")
        result[key] = loader.construct_object(value_node, deep=True)
    return result


for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:bool", _BOOL, list("tTfF")),
    ("tag:yaml.org,2002:int", _INT, list("-+0123456789")),
    ("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789")),
    ("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:merge", re.compile("<<"), ["<"]),
):
    _Loader.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern.pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _int)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse(text: str) -> Any:
    """The one document of ``text``; None when it is empty.

    Raises:
        YAMLProblem: when it is not YAML, has a key twice, or holds several documents.
    """
    try:
        _limit_depth(text)
        return yaml.load(text, Loader=_Loader)  # noqa: S506  # derived from the safe loader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise YAMLProblem(f"{where}{error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise YAMLProblem(" ".join(str(error).split())) from error


def _limit_depth(text: str) -> None:
    """Refuse what would run libyaml's composer, which calls itself, out of its stack."""
    depth = 0
    for event in yaml.parse(text, Loader=_Base):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise YAMLProblem(f"is nested more than {MAX_DEPTH} levels deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
