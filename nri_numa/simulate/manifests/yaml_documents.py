"""YAML documents, read the way Kubernetes reads them, and places in them for complaints.

Kubernetes reads YAML 1.1 and makes JSON of it: ``yes`` and ``on`` are booleans, a date stays text,
and a key that stands twice is refused. Files are untrusted input: their size, depth and number of
documents are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec
import yaml

from nri_numa import safe_yaml
from nri_numa.errors import AgentError

MAX_BYTES: Final = 8 << 20
MAX_DOCUMENTS: Final = 10_000


class ManifestError(AgentError):
    """Manifests with mistakes.

    Attributes:
        problems: every mistake found, each naming file, document, path, value and expectation.
    """

    reason = "ManifestError"

    def __init__(self, problems: tuple[str, ...]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


class _Loader(safe_yaml.Loader):
    """With the scalars that Kubernetes knows."""


def _scalar(make: Callable[[str], Any]) -> Callable[[Any, Any], Any]:
    def construct(loader: Any, node: Any) -> Any:
        text = loader.construct_scalar(node)
        try:
            return make(text)
        except ValueError as error:
            raise safe_yaml.BadValue(problem=str(error), problem_mark=node.start_mark) from error

    return construct


def _bool(text: str) -> bool:
    return text.lower() in ("yes", "true", "on")


for _tag, _pattern, _first, _construct in (
    ("bool", r"(?i:yes|no|true|false|on|off)", "yYnNtTfFoO", _scalar(_bool)),
    ("int", r"[-+]?(0|[1-9][0-9]{0,17})", "-+0123456789", _scalar(int)),
    ("float", r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", "-+.0123456789", _scalar(float)),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first)
    )
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _construct)


def parse_all(text: str) -> Iterator[object]:
    """The documents of a text, one after another; empty ones are left out.

    Raises:
        yaml.YAMLError: from here on the text is no YAML.
    """
    safe_yaml.limit_depth(text)
    for number, document in enumerate(yaml.load_all(text, Loader=_Loader)):
        if number >= MAX_DOCUMENTS:
            raise yaml.YAMLError(f"has more than {MAX_DOCUMENTS} documents")
        yield document


def shown(value: object) -> str:
    """A value as a message shows it: short, and on one line."""
    if value is None:
        return "not set"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value) if isinstance(value, int | float) else repr(str(value))
    return text if len(text) <= 60 else f"{text[:50]}… ({len(text)} characters)"


class Spot(msgspec.Struct, frozen=True):
    """A place in a document.

    Attributes:
        where: file and document.
        path: from the document's top, such as ``spec.containers[0].name``.
        value: what stands there; None when nothing does.
        problems: where complaints are gathered, in the order of the documents.
    """

    where: str
    path: str
    value: object
    problems: list[str]

    def complain(self, what: str) -> None:
        """Note a mistake at this place."""
        self.problems.append(f"{self.where}: {f'{self.path} ' if self.path else ''}{what}")

    def expected(self, expectation: str) -> None:
        """Note that the value is not what was expected."""
        self.complain(f"is {shown(self.value)}, expected {expectation}")

    def __getitem__(self, key: str) -> Spot:
        """The place below; without a value when this is no mapping or has no such key."""
        below = self.value.get(key) if isinstance(self.value, Mapping) else None
        path = f"{self.path}.{key}" if "." not in key and "/" not in key else f"{self.path}[{key}]"
        return Spot(self.where, path.removeprefix("."), below, self.problems)

    def mapping(self, *, required: bool = False) -> dict[str, Spot]:
        """The places below by key; empty, after a complaint, when this is no mapping."""
        if self.value is None and not required:
            return {}
        if not isinstance(self.value, Mapping):
            self.expected("a mapping")
            return {}
        strange = [key for key in self.value if not isinstance(key, str)]
        for key in strange:
            self.complain(f"has the key {shown(key)}, expected text: quote it")
        return {key: self[key] for key in self.value if isinstance(key, str)}

    def items(self, what: str, *, required: bool = False) -> list[Spot]:
        """The places below in a list; empty, after a complaint, when this is none.

        Args:
            what: one of them in words, such as ``one container``.
            required: an empty list is a mistake.
        """
        if self.value is None and not required:
            return []
        if not isinstance(self.value, list) or (required and not self.value):
            self.expected(f"a list of at least {what}" if required else "a list")
            return []
        return [
            Spot(self.where, f"{self.path}[{number}]", item, self.problems)
            for number, item in enumerate(self.value)
        ]

    def text(self, default: str = "") -> str:
        """The text that stands here; the default, after a complaint, when it is none."""
        if self.value is None:
            return default
        if not isinstance(self.value, str):
            self.expected(f"text: put {shown(self.value)} in quotes")
            return default
        return self.value

    def number(self, default: int, most: int) -> int:
        """The whole number that stands here, between 0 and ``most``."""
        if self.value is None:
            return default
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            self.expected("a whole number")
            return default
        if not 0 <= self.value <= most:
            self.expected(f"0 to {most}")
            return default
        return self.value
