"""Traces of decisions in little memory.

A trace as the engine makes it has a few dozen objects, four to eight kilobytes; for a thousand
containers that is too much for explanations that are seldom read. Here it is packed into one bytes
object of a few hundred: what can be worked out again is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from zlib import compress, decompress
from zlib import error as zlib_error

import msgspec
from msgspec.structs import replace

from nri_numa.engine.align.hints import DeviceDemand, HintProvider, ResourceDemand
from nri_numa.engine.align.policies import Alignment
from nri_numa.engine.decision import DecisionTrace
from nri_numa.engine.explain.explanation import (
    ExplanationInput,
    StoredExplanation,
    explanation_input_of,
)
from nri_numa.model.cpuset import NUMASet

MAX_TRACE_VALUE_CHARS: Final = 300
"""Characters kept of a value that comes from a pod; a list of CPUs may be much longer."""
MAX_TRACE_STEP_CHARS: Final = 1000


class _StoredTraceFields(msgspec.Struct, array_like=True, frozen=True):
    basis: ExplanationInput
    alignment: Alignment | None


# Fields of `ExplanationInput` and `DemandSource` are added at their end, those of `Alignment` and
# what is in it anywhere, all with a default, and none goes: so every version reads the traces of
# every other one, without the fields that it does not know.


def _encode_set(value: object) -> str | None:
    # What is no set is the distance of a request, which the machine knows.
    return str(value) if isinstance(value, NUMASet) else None


_encode_trace = msgspec.msgpack.Encoder(enc_hook=_encode_set).encode


@dataclass(frozen=True, slots=True, eq=False)
class PackedTrace:
    """A packed trace; equal to itself only, so that it can stand for its decision."""

    data: bytes


def pack_trace(trace: DecisionTrace) -> PackedTrace:
    """Pack a trace; names, ids, labels and annotations are not kept."""
    packed = _StoredTraceFields(_truncate_basis(explanation_input_of(trace)), trace.alignment)
    return PackedTrace(compress(_encode_trace(packed), 1))


def unpack_explanation(
    kept: PackedTrace, who: tuple[str, str, str], distance: Callable[[int, int], int]
) -> StoredExplanation:
    """What was kept of a decision about ``who``: namespace, pod and container.

    ``distance`` is the SLIT distance between two NUMA nodes. The basis is None where another
    version wrote the trace, and this one does not know its form.
    """

    def decode_value(kind: type, value: Any) -> object:
        if kind is HintProvider:
            return msgspec.convert(value, ResourceDemand | DeviceDemand, dec_hook=decode_value)
        return NUMASet.parse(value) if kind is NUMASet else distance

    try:
        packed = msgspec.msgpack.decode(
            decompress(kept.data), type=_StoredTraceFields, dec_hook=decode_value
        )
    except (msgspec.MsgspecError, zlib_error):
        return StoredExplanation(*who, None, None)
    return StoredExplanation(*who, packed.basis, packed.alignment)


def _truncate_text(text: str, longest: int = MAX_TRACE_VALUE_CHARS) -> str:
    return text if len(text) <= longest else f"{text[:longest]}…"


def _truncate_basis(basis: ExplanationInput) -> ExplanationInput:
    asked = basis.requested
    return replace(
        basis,
        requested=None
        if asked is None
        else {
            key: (_truncate_text(value), _truncate_text(source))
            for key, (value, source) in asked.items()
        },
        decision_steps=tuple(
            [_truncate_text(step, MAX_TRACE_STEP_CHARS) for step in basis.decision_steps]
        ),
    )
