"""Why a container cannot have what it asks for: one value from where it is found to the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from nri_numa.engine.align.policies import Alignment


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """What was found wrong with a request, or what there is too little of.

    Attributes:
        reason: CamelCase, from a bounded set; metric label and first word of the message.
        message: one line for the pod's author, with pod and container: the thing, its value and
            what was expected, or what was needed, what there was, and which rule said no.
        rule: the rule in words.
        key, value, source: the annotation, rule or default that cannot be read or granted, as it
            was given; empty where a number or a shortage is refused.
        widenable: a wider set of NUMA nodes could help.
        alignment: what the policy came to, where it was asked.
    """

    reason: str
    message: str
    rule: str
    key: str = ""
    value: str = ""
    source: str = ""
    widenable: bool = False
    alignment: Alignment | None = None
