"""Untrusted YAML: limits for every reader, whatever scalars it knows; and YAML 1.2.

Each reader defines its numbers and booleans: `parse_yaml12` follows the core schema of YAML 1.2,
manifests follow Kubernetes (`nri_numa.simulate.manifests`). Depth, aliases, repeated keys and the
form of a problem are the same for both.

PyYAML follows YAML 1.1, where ``on`` is true, ``010`` is eight and ``10:30`` is 630, and silently
keeps the last of two equal keys. Each of these turns a typing error into another setting. Infinity
and *not a number* are valid for no setting, so ``.inf`` and ``.nan`` stay texts.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Final, cast

import yaml

MAX_YAML_DEPTH: Final = 64
MAX_YAML_ALIASED_NODES: Final = 100_000
"""Nodes that all aliases stand for: nine levels of ten aliases each are 10⁹ in 700 bytes."""

_SafeLoaderBase: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MERGE_TAG: Final = "tag:yaml.org,2002:merge"


class RefusedYAMLValue(yaml.MarkedYAMLError):
    """Well-formed YAML that is refused anyway."""


class Loader(_SafeLoaderBase):  # type: ignore[misc]  # the C loader has no type
    """A safe loader that only knows ``null`` and ``<<``; readers add their scalars.

    It builds the types of JSON: bytes, dates and sets are refused.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Build the value of a node; refuse one that its tag does not fit, such as ``!!int x``."""
        try:
            return super().construct_object(node, deep=deep)
        except (KeyError, ValueError) as error:
            problem = f"{node.value!r} is no {node.tag.rpartition(':')[2]}"
            raise RefusedYAMLValue(problem=problem, problem_mark=node.start_mark) from error


def _construct_mapping(loader: Any, node: Any) -> dict[Any, Any]:
    if not isinstance(node, yaml.MappingNode):  # although it has the tag
        raise RefusedYAMLValue(problem="expected a mapping", problem_mark=node.start_mark)
    known_keys: set[object] = set()
    for key_node, _ in node.value:
        mark = key_node.start_mark
        if not isinstance(key_node, yaml.ScalarNode):
            raise RefusedYAMLValue(problem="a key must be a word", problem_mark=mark)
        merged = key_node.tag == _MERGE_TAG
        key = _MERGE_TAG if merged else loader.construct_object(key_node, deep=True)
        # 0 and "0" are the same key if keys are texts, as in JSON and in the configuration.
        spellings = {key, key if isinstance(key, str) else str(key).lower()}
        if spellings & known_keys:
            problem = f"the key {key_node.value!r} stands here a second time"
            raise RefusedYAMLValue(problem=problem, problem_mark=mark)
        known_keys |= spellings
    # Merged keys (<<) come first, so the mapping's own keys override them.
    loader.flatten_mapping(node)
    return {
        loader.construct_object(key, deep=True): loader.construct_object(value, deep=True)
        for key, value in node.value
    }


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]
)
Loader.add_implicit_resolver(_MERGE_TAG, re.compile(r"^<<$"), ["<"])
Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
for _tag in ("binary", "timestamp", "set", "omap", "pairs"):
    del Loader.yaml_constructors[f"tag:yaml.org,2002:{_tag}"]


def limit_depth_and_aliases(text: str) -> None:
    """Refuse a text that would exhaust memory, or the stack of libyaml's recursive composer.

    An alias counts the nodes of its anchor, with the aliases in it, because a walk over the
    document visits all of them. The size of a text bounds its other nodes.

    Raises:
        yaml.YAMLError: it is nested too deep, its aliases have too many nodes, or it is no YAML.
    """
    nodes = aliased = 0
    stack: list[tuple[str | None, int]] = []
    sizes: dict[str | None, int] = {}
    for event in yaml.parse(text, Loader=_SafeLoaderBase):
        if isinstance(event, yaml.CollectionStartEvent):
            stack.append((event.anchor, nodes))
            nodes += 1
            if len(stack) > MAX_YAML_DEPTH:
                raise yaml.YAMLError(f"is nested more than {MAX_YAML_DEPTH} levels deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, start = stack.pop()
            sizes[anchor] = nodes - start
        elif isinstance(event, yaml.ScalarEvent):
            nodes += 1
            sizes[event.anchor] = 1
        elif isinstance(event, yaml.AliasEvent):
            size = sizes.get(event.anchor, 0)  # no anchor, or inside its anchor: refused later
            nodes += size
            aliased += size
            if aliased > MAX_YAML_ALIASED_NODES:
                problem = (
                    f"aliases stand for {aliased} nodes, expected at most {MAX_YAML_ALIASED_NODES}"
                )
                raise RefusedYAMLValue(problem=problem, problem_mark=cast(Any, event.start_mark))
        elif isinstance(event, yaml.DocumentStartEvent):
            sizes.clear()


def yaml_problem_text(error: yaml.YAMLError, text: str) -> str:
    """Return the problem of a text that is no YAML, in one line."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        position = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        lines = text.split("\n")
        if mark and mark.line < len(lines) and lines[mark.line][mark.column :].startswith("\t"):
            return f"{position}a tab; YAML allows spaces only"
        return f"{position}{error.problem or error.context}"
    return " ".join(str(error).split())


# --- YAML 1.2 -----------------------------------------------------------------------------------

_BOOL_PATTERN = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT_PATTERN = re.compile(r"[-+]?[0-9]+")
_FLOAT_PATTERN = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_MAX_INT_DIGITS = 18


class YAMLProblem(ValueError):
    """A text that is no YAML document; the message has the position and the reason."""


class _YAML12(Loader):
    """Loader with the scalars of YAML 1.2."""


def _construct_int(loader: Any, node: Any) -> int | str:
    text = loader.construct_scalar(node)
    return int(text, 10) if len(text) <= _MAX_INT_DIGITS else str(text)


def _construct_float(loader: Any, node: Any) -> float:
    return float(loader.construct_scalar(node))


for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:bool", _BOOL_PATTERN, list("tTfF")),
    ("tag:yaml.org,2002:int", _INT_PATTERN, list("-+0123456789")),
    ("tag:yaml.org,2002:float", _FLOAT_PATTERN, list("-+.0123456789")),
):
    _YAML12.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern.pattern})$"), _first)
_YAML12.add_constructor("tag:yaml.org,2002:int", _construct_int)
_YAML12.add_constructor("tag:yaml.org,2002:float", _construct_float)


def parse_yaml12(text: str) -> Any:
    """Parse the only document of ``text``, None if it is empty; `YAMLProblem` for others."""
    try:
        limit_depth_and_aliases(text)
        return yaml.load(text, Loader=_YAML12)  # noqa: S506  # derived from the safe loader
    except yaml.YAMLError as error:
        raise YAMLProblem(yaml_problem_text(error, text)) from error
