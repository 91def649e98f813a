"""The keys' table of docs/annotations.md; ``python -m tools.docs_options`` writes it."""

from __future__ import annotations

from nri_numa.engine.request import options
from tools.docs_regions import code, table, write


def text() -> str:
    """A row for each key: what it sets, its values, and what holds without it."""
    nothing_requested = options.TABLE.nothing_requested
    rows = [
        (
            f"[{code(key)}](#{key})",
            option.summary,
            option.values_text or ", ".join(map(code, option.value_by_text)),
            option.without_text or code(option.format(getattr(nothing_requested, option.field))),
        )
        for key, option in options.TABLE.by_key.items()
    ]
    return "\n".join(table(("key", "meaning", "values", "without it"), rows))


if __name__ == "__main__":
    write("annotations.md", "tools.docs_options", text())
