"""Captions: the reason of an assignment in one line, made from values.

No decision reads captions: the facts are fields of the allocation. Only this module parses them, of
records that were written before those fields existed.
"""

from __future__ import annotations

from typing import Final, TypedDict

from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import cpus_text
from nri_numa.model.reasons import FORMER_REASONS, RejectionReason

_UNPINNED: Final = "unpinned: "
_RUNNING: Final = ", and it was running already"
_MISALIGNED: Final = ", misaligned"
SHORTFALL_TEXT: Final = "less than requested"
_SHORTFALL: Final = f", {SHORTFALL_TEXT}"
_MOVED: Final = "; moved to "

RESERVATION_CAPTION: Final = "reserved for its pod, because the container ended"
PENDING_RESERVATION_CAPTION: Final = "reserved for its pod, because containers are pending"
UNDECIDED_CAPTION: Final = f"{_UNPINNED}not decided yet{_RUNNING}"


def unpinned_caption(cause: str) -> str:
    """Caption of a container that is not pinned."""
    return f"{_UNPINNED}{cause}"


def rejected_running_caption(reason: RejectionReason) -> str:
    """Caption of a container that would have been rejected if it did not run."""
    return f"{_UNPINNED}{reason}{_RUNNING}"


def foreign_caption(cpus: CPUSet | str) -> str:
    """Caption of a container that another program pinned."""
    return f"pinned by another program to {cpus_text(cpus)}"


def with_outcome(caption: str, *, is_misaligned: bool, has_shortfall: bool = False) -> str:
    """Replace the outcome at the end of a caption."""
    caption = caption.removesuffix(_SHORTFALL)
    return caption + _MISALIGNED * is_misaligned + _SHORTFALL * has_shortfall


def moved_caption(caption: str, purpose: str) -> str:
    """Append the purpose of a move to a caption; unchanged if it is empty."""
    return f"{caption}{_MOVED}{purpose}" if purpose else caption


class CaptionFacts(TypedDict, total=False):
    """Fields of an allocation that older versions stored only in its caption."""

    has_shortfall: bool
    is_misaligned: bool
    is_undecided: bool
    moved_for: str
    unpinned_for: RejectionReason


def facts_of_caption(caption: str) -> CaptionFacts:
    """Parse the facts in a caption of an older version; absent facts are left out."""
    facts = CaptionFacts()
    if _SHORTFALL in caption:
        facts["has_shortfall"] = True
    if _MISALIGNED in caption:
        facts["is_misaligned"] = True
    if caption == UNDECIDED_CAPTION:
        facts["is_undecided"] = True
    caption, _, purpose = caption.partition(_MOVED)
    if purpose:
        facts["moved_for"] = purpose
    text = caption.removeprefix(_UNPINNED).removesuffix(_RUNNING)
    if caption != text and text in (*RejectionReason, *FORMER_REASONS):
        facts["unpinned_for"] = RejectionReason(text)  # type: ignore[call-arg]
    return facts
