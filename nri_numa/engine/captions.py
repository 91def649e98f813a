"""Captions: why a container has what it has, in one line, made from values.

An allocation carries its caption for people, and because checkpoints and annotations of older
versions hold nothing else. No decision looks into one: what it says is in the allocation's fields.
This module alone reads captions back, once, for what was written before the fields.
"""

from __future__ import annotations

from typing import Final, TypedDict

from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import cpus_text
from nri_numa.model.reasons import RejectionReason

_UNPINNED: Final = "not pinned: "
_RUNNING: Final = ", and it was running already"
_MISALIGNED: Final = ", wider than ideal"
SHORTFALL_TEXT: Final = "less than asked for"
_SHORTFALL: Final = f", {SHORTFALL_TEXT}"
_MOVED: Final = "; moved to "
_UNDECIDED: Final = "no time was left yet"

RESERVATION_CAPTION: Final = "kept for its pod: the container ended"
PENDING_RESERVATION_CAPTION: Final = "kept for its pod: containers that are still to come"
UNDECIDED_CAPTION: Final = f"{_UNPINNED}{_UNDECIDED}{_RUNNING}"


def unpinned_caption(why: str) -> str:
    """Caption of a container that is not pinned."""
    return f"{_UNPINNED}{why}"


def rejected_running_caption(reason: RejectionReason) -> str:
    """Caption of a container that would have been rejected if it did not run."""
    return f"{_UNPINNED}{reason}{_RUNNING}"


def foreign_caption(cpus: CPUSet | str) -> str:
    """Caption of a container that another program pinned."""
    return f"pinned by another component to {cpus_text(cpus)}"


def with_outcome(caption: str, *, is_misaligned: bool, has_shortfall: bool = False) -> str:
    """The caption with what falls short of the request, in place of what did before."""
    caption = caption.removesuffix(_SHORTFALL)
    return caption + _MISALIGNED * is_misaligned + _SHORTFALL * has_shortfall


def moved_caption(caption: str, moved_for: str) -> str:
    """The caption of a container that moved for something; as it is where that is empty."""
    return f"{caption}{_MOVED}{moved_for}" if moved_for else caption


class CaptionFacts(TypedDict, total=False):
    """Fields of an allocation that only its caption said once."""

    has_shortfall: bool
    is_misaligned: bool
    is_undecided: bool
    moved_for: str
    unpinned_for: RejectionReason


def facts_of_caption(caption: str) -> CaptionFacts:
    """Read the facts that a caption of an older version states; those that it does not are left."""
    facts = CaptionFacts()
    if _SHORTFALL in caption:
        facts["has_shortfall"] = True
    if _MISALIGNED in caption:
        facts["is_misaligned"] = True
    if caption == UNDECIDED_CAPTION:
        facts["is_undecided"] = True
    caption, _, moved_for = caption.partition(_MOVED)
    if moved_for:
        facts["moved_for"] = moved_for
    word = caption.removeprefix(_UNPINNED).removesuffix(_RUNNING)
    if caption != word and word in RejectionReason.__members__.values():
        facts["unpinned_for"] = RejectionReason(word)  # type: ignore[call-arg]
    return facts
