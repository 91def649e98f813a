"""Rows of Prometheus' text format. Pure."""

from __future__ import annotations

from nri_numa.text import harmless


def text(rows: list[str]) -> bytes:
    """The rows as bytes; the list is empty afterwards."""
    data = "".join(rows).encode(errors="backslashreplace")
    rows.clear()
    return data


def head(name: str, text: str) -> list[str]:
    """What stands above the rows of a gauge of ours."""
    return [f"# HELP nri_numa_{name} {text}\n", f"# TYPE nri_numa_{name} gauge\n"]


def label(value: str) -> str:
    """The value of a label, escaped: for the format, and before that for whoever reads it."""
    return harmless(value).replace("\\", "\\\\").replace('"', '\\"')
