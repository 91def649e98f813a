"""What containers really have, wherever the agent says that it is not what they should have."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nri_numa.cli.common import human_duration
from nri_numa.engine.explain.sentences import actual_text, displaced_text
from nri_numa.text import harmless

MARK = "!"
"""Stands behind CPUs or memory nodes that are meant and not there."""
_LINES = 20
"""Containers told of one by one."""


def said(actual: Mapping[str, Any], now: float) -> str:
    """``meant 4-7, has 0-7 since 12 s, on exclusive CPUs of shop/db/server``."""
    seconds = max(0.0, now - actual["since"])
    since = f"{int(seconds)} s" if seconds < 60 else human_duration(seconds)
    text = actual_text(actual["text"], since, actual["owners"], given_up=actual["givenUp"])
    return harmless(text)


def mark(one: Mapping[str, Any], key: str) -> str:
    """Behind ``CPUs`` or ``Mems``: a mark where the container has others, or is not on its own."""
    if key == "CPUs" and one.get("displaced"):
        return MARK
    actual = one.get("actual") or {f"meant{key}": "", "intruder": False}
    return MARK if actual[f"meant{key}"] or (key == "CPUs" and actual["intruder"]) else ""


def legend(
    containers: Sequence[Mapping[str, Any]], now: float, width: int, *, whole: bool = False
) -> Iterator[str]:
    """Below the table: one paragraph for each container that differs, the worst first.

    Args:
        containers: as ``/v1/assignments`` tells them.
        now: Unix time.
        width: columns to wrap at.
        whole: all of them, however many.
    """
    differing = [one for one in containers if one.get("actual") or one.get("displaced")]
    if not differing:
        return
    differing.sort(key=lambda one: not (one.get("actual") or {}).get("intruder"))
    count = len(differing)
    yield ""
    yield from _wrapped(
        f"{MARK} {count} container{' has' if count == 1 else 's have'} something else than meant:",
        width,
        "",
    )
    shown = count if whole else _LINES
    for one in differing[:shown]:
        name = harmless(f"{one['namespace']}/{one['pod']}/{one['container']}")
        parts = [displaced_text(one["displaced"])] if one.get("displaced") else []
        parts += [said(one["actual"], now)] if one.get("actual") else []
        yield from _wrapped(f"{name}: {'; '.join(parts)}", width, "  ")
    if count > shown:
        yield f"  and {count - shown} more"


def _wrapped(text: str, width: int, first: str) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent="    ")
