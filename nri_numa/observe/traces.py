"""Packed traces of decisions.

A trace of the engine has a few dozen objects, four to eight kilobytes: too much for a thousand
containers whose explanations are seldom read. Here it is packed into one bytes object of a few
hundred bytes, without what can be computed again.
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
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.text import truncate_text

MAX_TRACE_VALUE_CHARS: Final = 300
"""Characters stored of a value from a pod; a CPU list may be much longer."""
MAX_TRACE_STEP_CHARS: Final = 1000


class _StoredTraceFields(msgspec.Struct, array_like=True, frozen=True):
    basis: ExplanationInput
    alignment: Alignment | None


# New fields of `ExplanationInput` and `DemandSource` go to their end, those of `Alignment` and its
# members anywhere, all with a default, and no field is removed: so every version reads the traces
# of every other one, without the fields that it does not know.


def _encode_set(value: object) -> str | None:
    # Anything else is the distance function of a request, which the machine provides.
    return str(value) if isinstance(value, CPUSet | NUMASet) else None


_encode_trace = msgspec.msgpack.Encoder(enc_hook=_encode_set).encode


@dataclass(frozen=True, slots=True, eq=False)
class PackedTrace:
    """A packed trace; equal only to itself, so it can identify its decision."""

    data: bytes


def pack_trace(trace: DecisionTrace) -> PackedTrace:
    """Pack a trace; names, ids, labels and annotations are left out."""
    packed = _StoredTraceFields(_truncate_basis(explanation_input_of(trace)), trace.alignment)
    return PackedTrace(compress(_encode_trace(packed), 1))


def unpack_explanation(
    packed_trace: PackedTrace, subject: tuple[str, str, str], distance: Callable[[int, int], int]
) -> StoredExplanation:
    """Unpack the trace of a decision about ``subject``: namespace, pod and container.

    ``distance`` is the SLIT distance between two NUMA nodes. The basis is None if another version
    wrote the trace in a form that this one cannot read.
    """

    def decode_value(kind: type, value: Any) -> object:
        if kind is HintProvider:
            return msgspec.convert(value, ResourceDemand | DeviceDemand, dec_hook=decode_value)
        if kind is CPUSet:
            return CPUSet.parse(value)
        return NUMASet.parse(value) if kind is NUMASet else distance

    try:
        packed = msgspec.msgpack.decode(
            decompress(packed_trace.data), type=_StoredTraceFields, dec_hook=decode_value
        )
    except (msgspec.MsgspecError, zlib_error):
        return StoredExplanation(*subject, None, None)
    return StoredExplanation(*subject, packed.basis, packed.alignment)


def _truncate_basis(basis: ExplanationInput) -> ExplanationInput:
    steps = tuple([truncate_text(step, MAX_TRACE_STEP_CHARS) for step in basis.decision_steps])
    requested = basis.requested and {
        key: (
            truncate_text(value, MAX_TRACE_VALUE_CHARS),
            truncate_text(source, MAX_TRACE_VALUE_CHARS),
        )
        for key, (value, source) in basis.requested.items()
    }
    return replace(basis, requested=requested, decision_steps=steps)
