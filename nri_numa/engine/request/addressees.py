"""Whom the annotations of a pod speak to by name, and who of them never came.

An annotation for a container that the pod does not have is heard by nobody. NRI does not tell
which containers a pod will have, so a name is *missing* only as far as can be seen: the pod got no
container of a new name for a while, or it is over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from nri_numa.engine.request.annotations import KEYS, quoted

MOST: Final = 16
"""Names of one pod that are looked after; nobody has so many by accident."""
_LONGEST: Final = 63  # of a container's name: a DNS label


def addressees(annotations: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Container names in annotations of ours, with the annotation that has it.

    Args:
        annotations: of the pod.
        prefix: of our annotations, without its slash.

    Returns:
        At most `MOST`, in the order of the annotations' names. Names that no container can have
        are left out.
    """
    found: dict[str, str] = {}
    for name in sorted([name for name in annotations if prefix in name]):
        domain, _, tail = name.partition("/")
        if domain == prefix:
            key, _, target = tail.partition(".")
        elif domain.endswith(f".{prefix}") and tail.startswith("container."):
            key, target = domain.removesuffix(f".{prefix}"), tail.removeprefix("container.")
        else:
            continue
        if key in KEYS and 0 < len(target) <= _LONGEST and len(found) < MOST:
            found.setdefault(target, name)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A name that an annotation has and no container.

    Attributes:
        annotation: the first that names it.
        had: names of the containers that the pod has had.
    """

    annotation: str
    name: str
    had: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """For people."""
        close = get_close_matches(self.name, self.had, n=1)
        return (
            f"annotation {self.annotation} is ignored, because it names a container "
            f"{quoted(self.name)}, which this pod does not have; "
            f"it has {', '.join(map(quoted, self.had)) or 'none'}"
            + (f" (did you mean {close[0]}?)" if close else "")
        )
