"""How much of a pod's annotations is read: whoever may create pods decides how long they are.

Kubernetes lets the annotations of one pod be 256 KiB long together, in any number of pieces. Every
container of the pod reads them, on the way of a request that the runtime waits two seconds for. So
what no machine and no pod can need is refused before it is looked at.
"""

from __future__ import annotations

from typing import Final

MOST_NAMES: Final = 512
"""Annotations of one pod that may name our prefix: nine keys each for more than 50 containers."""

MOST_GUESSES: Final = 8
"""Unknown names in a domain below the prefix that are compared with our keys; see `MOST_NAMES`.

Comparing two words takes longer than everything else about a name.
"""

LONGEST_WORD: Final = 24
"""Characters of a word that may resemble one of our keys, of which the longest has ten.

`difflib.get_close_matches` calls two texts close from a ratio of 0.6 on, which is twice the
characters in common by those of both: 2 * 10 / (10 + 24) is below.
"""

LONGEST_VALUE: Final = 2048
"""Characters of a value that is no list: peak hours may be many, 96 quarters of an hour at most."""

LONGEST_LIST: Final = 4096
"""Characters of a list where the machine is not known: every one of 1024 CPUs by itself."""

_SHORTEST_LIMIT: Final = 1024
"""A list that is longer than the machine needs is clumsy, not hostile, up to here."""


def longest_list(count: int) -> int:
    """Characters of the longest list that ids below ``count`` can need: each one by itself.

    The kernel prints ranges, so that what it prints is at most half as long.
    """
    characters, digits, first = 0, 1, 0
    while first < count:
        end = min(count, 10**digits)
        characters += (end - first) * (digits + 1)
        digits, first = digits + 1, end
    return max(_SHORTEST_LIMIT, characters)


def too_long(key: str, value: str, list_limit: int) -> str | None:
    """What was expected of a value that is too long to be read; None when it is not."""
    limit = list_limit if key in ("numacpu", "numamem") else LONGEST_VALUE
    if len(value) <= limit:
        return None
    return f"at most {limit} characters" + (
        ", which is room for every id of this machine" if key in ("numacpu", "numamem") else ""
    )
