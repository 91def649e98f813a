"""Find decisions that read our own sentences back: ``python -m tools.text_reads``.

A reason, message or note is made from values and shown. Whoever needs to know what it says looks
at these values: a text is reworded without anybody's leave. So no product code searches, splits or
compares a part of one. A line that does so with the text of another program, or to show less of
one, says it in a comment that begins with ``read:``.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PACKAGE: Final = Path("nri_numa")
TEXT_NAMES: Final = frozenset(
    ("reason", "message", "note", "detail", "summary", "caption", "finding", "rule", "sentence")
)
SEARCH_METHODS: Final = frozenset(
    [
        "startswith",
        "endswith",
        "removeprefix",
        "removesuffix",
        "partition",
        "rpartition",
        "split",
        "rsplit",
        "find",
        "rfind",
        "index",
        "rindex",
        "count",
        "replace",
    ]
)
READERS: Final = frozenset(
    (
        # Reads a rejection out of what kubelet and runtime wrap around it; and captions that were
        # written before the fields.
        "nri_numa/model/reasons.py",
        "nri_numa/engine/captions.py",
    )
)


def main() -> int:
    """Print each place that looks into a text."""
    places = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.as_posix() in READERS or "pb" in path.parts:
            continue
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        places += [
            f"{path}:{line}: looks into a text of ours, {name}"
            for line, name in text_reads(ast.parse(source))
            if "# read: " not in lines[line - 1]
        ]
    sys.stdout.writelines(f"{place}\n" for place in places)
    return 1 if places else 0


def text_reads(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of each text that is searched or taken apart."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for operator, text in zip(node.ops, node.comparators, strict=True):
                if isinstance(operator, ast.In | ast.NotIn) and (name := _text_name(text)):
                    yield node.lineno, name
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in SEARCH_METHODS and (name := _text_name(node.func.value)):
                yield node.lineno, name
            elif isinstance(node.func.value, ast.Name) and node.func.value.id == "re":
                yield from ((node.lineno, n) for one in node.args if (n := _text_name(one)))


def _text_name(node: ast.expr) -> str:
    """The name of a text of ours that an expression stands for; empty for any other."""
    name = ""
    if isinstance(node, ast.Name):
        name = node.id
    elif isinstance(node, ast.Attribute):
        name = node.attr
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        name = str(node.slice.value)
    return name if name in TEXT_NAMES else ""


if __name__ == "__main__":
    sys.exit(main())
