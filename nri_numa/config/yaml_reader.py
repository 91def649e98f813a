"""Reads YAML as people mean it: the core schema of YAML 1.2, and no key twice.

Infinity and *not a number* are no settings of anything, so ``.inf`` and ``.nan`` stay texts.

PyYAML follows YAML 1.1, where ``on`` is true, ``010`` is eight and ``10:30`` is 630, and keeps the
last of two equal keys without a word. Each of these turns a typing slip into another setting.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from nri_numa import safe_yaml

_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_MAX_INT_DIGITS = 18


class YAMLProblem(ValueError):
    """The text is no YAML document; the message says where and why."""


class _Loader(safe_yaml.Loader):
    """With the scalars of YAML 1.2."""


def _int(loader: Any, node: Any) -> int | str:
    text = loader.construct_scalar(node)
    return int(text, 10) if len(text) <= _MAX_INT_DIGITS else str(text)


def _float(loader: Any, node: Any) -> float:
    return float(loader.construct_scalar(node))


for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:bool", _BOOL, list("tTfF")),
    ("tag:yaml.org,2002:int", _INT, list("-+0123456789")),
    ("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern.pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _int)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)


def parse(text: str) -> Any:
    """The one document of ``text``; None when it is empty.

    Raises:
        YAMLProblem: when it is not YAML, has a key twice, or holds several documents.
    """
    try:
        safe_yaml.limit_depth(text)
        return yaml.load(text, Loader=_Loader)  # noqa: S506  # derived from the safe loader
    except yaml.YAMLError as error:
        raise YAMLProblem(safe_yaml.problem_of(error)) from error
