"""Traces of decisions in little memory.

A trace as the engine makes it has a few dozen objects, four to eight kilobytes; for a thousand
containers that is too much for explanations that are seldom read. Here it is packed into one bytes
object of a few hundred: what can be worked out again is left out, what is the same for many
containers (the capacities of the NUMA nodes) is kept once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from zlib import compress, decompress
from zlib import error as zlib_error

import msgspec

from nri_numa.engine.align.hints import HintDemand, ResourceDemand
from nri_numa.engine.align.policies import Alignment, Problem
from nri_numa.engine.decision import Trace
from nri_numa.engine.explain.explanation import Basis, Grounds, grounds
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.workload import Policy

LONGEST: Final = 300
"""Characters kept of a value that comes from a pod; a list of CPUs may be much longer."""
LONGEST_STEP: Final = 1000
_LARGE: Final = 512
"""Bytes from which packing harder pays; machines with many NUMA nodes."""
_SHAPES: Final = 512
"""Shapes that are kept for reuse; there are as many as sorts of containers, times reloads."""

Shape = tuple[object, ...]


class _Need(msgspec.Struct, array_like=True, frozen=True, omit_defaults=True):
    """One `ResourceDemand`; the amounts are in the order of the shape's capacities.

    ``available`` is 1 for the basis's ``cpu_left`` and 2 for its ``memory_left``.
    """

    resource: str
    need: int
    available: list[int] | int
    required: str = ""
    share: str | None = None
    no_wish: bool = False
    unit: str | None = None


class _Alignment(msgspec.Struct, array_like=True, frozen=True):
    admitted: bool
    affinity: str | None
    preferred: bool
    exact: bool
    steps: int
    policy: str
    prefer_closest: bool
    rank: list[int] | None
    needs: list[_Need | None]
    one_width: bool = False


class _Packed(msgspec.Struct, array_like=True, frozen=True):
    basis: Basis
    alignment: _Alignment | None


LAYOUT: Final = 0xAE904C1D
"""Another number where packed traces of former versions cannot be read any more.

Fields of the structs above, of `Basis` and `Needs` are added at their end and with a default, and
none goes: so a trace is read by every later version.
"""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Packed).decode
_ZLIB: Final = b"x"


@dataclass(frozen=True, slots=True, eq=False)
class KeptTrace:
    """A packed trace; equal to itself only, so that it can stand for its decision.

    Attributes:
        data: what is its own.
        shape: what it shares with others: NUMA nodes, capacities, sockets; empty without alignment.
        aside: demands that have no packed form (devices, groups), as they are.
    """

    data: bytes
    shape: Shape
    aside: tuple[HintDemand, ...] = ()


class TraceKeeper:
    """Packs and unpacks; remembers the shapes that traces share."""

    def __init__(self) -> None:
        self._shapes: dict[Shape, Shape] = {}

    def keep(self, trace: Trace) -> KeptTrace:
        """Pack a trace; names, ids, labels and annotations are not kept."""
        basis, alignment = grounds(trace)[-2:]
        packed_alignment = None
        shapes: list[object] = []
        aside: list[HintDemand] = []
        if alignment is not None:
            shapes.append(tuple(alignment.problem.numa_ids))
            packed_alignment = _packed_alignment(basis, alignment, shapes, aside)
        packed = _Packed(_shortened(basis), packed_alignment)
        data = _encode(packed)
        if len(data) > _LARGE:
            data = compress(data, 1)
        return KeptTrace(data, self._shared(tuple(shapes)), tuple(aside))

    def again(self, kept: KeptTrace) -> KeptTrace:
        """A packed trace that comes from somewhere else, sharing its shape with the others."""
        return KeptTrace(kept.data, self._shared(kept.shape), kept.aside)

    def _shared(self, shape: Shape) -> Shape:
        known = self._shapes.get(shape)
        if known is None:
            if len(self._shapes) >= _SHAPES:
                self._shapes.clear()  # those in use live on in their traces
            known = self._shapes[shape] = shape
        return known


def savable(kept: KeptTrace) -> KeptTrace:
    """The trace in a form that can be written: without an alignment where that has none."""
    return KeptTrace(_encode(_Packed(_packed(kept.data).basis, None)), ()) if kept.aside else kept


def is_readable(kept: KeptTrace) -> bool:
    """Whether `unpack` understands a trace that was written by another version."""
    try:
        _packed(kept.data)
    except (msgspec.MsgspecError, zlib_error):
        return False
    return True


def _packed(data: bytes) -> _Packed:
    # An array of msgpack never begins as a zlib stream does.
    return _decode(decompress(data) if data[:1] == _ZLIB else data)


def unpack(
    kept: KeptTrace,
    *,
    namespace: str,
    pod: str,
    container: str,
    distance: Callable[[int, int], int],
) -> Grounds:
    """What was kept of a decision, for `nri_numa.engine.explain.explanation`.

    ``distance`` is the SLIT distance between two NUMA nodes.
    """
    packed = _packed(kept.data)
    alignment = None
    if packed.alignment is not None:
        alignment = _alignment(packed.alignment, kept, packed.basis, distance)
    return Grounds(namespace, pod, container, packed.basis, alignment)


# --- packing ----------------------------------------------------------------------------------


def _cut(text: str, longest: int = LONGEST) -> str:
    return text if len(text) <= longest else f"{text[:longest]}…"


def _shortened(basis: Basis) -> Basis:
    asked = basis.requested
    return basis._replace(
        requested=None
        if asked is None
        else {key: (_cut(value), _cut(source)) for key, (value, source) in asked.items()},
        steps=tuple([_cut(step, LONGEST_STEP) for step in basis.steps]),
    )


def _packed_alignment(
    basis: Basis, alignment: Alignment, shapes: list[object], aside: list[HintDemand]
) -> _Alignment:
    problem = alignment.problem
    needs: list[_Need | None] = []
    for demand in problem.demands:
        if not isinstance(demand, ResourceDemand) or demand.groups:
            needs.append(None)
            aside.append(demand)
            continue
        shapes.append(tuple(demand.capacity.items()))
        shapes.append(None if demand.sockets is None else tuple(demand.sockets.items()))
        shapes.append(tuple((i, served.bits) for i, served in demand.near.items()))
        needs.append(
            _Need(
                resource=demand.resource,
                need=demand.need,
                available=_available(basis, demand),
                required=str(demand.required),
                share=demand.share,
                no_wish=demand.empty_is_nil,
                unit=demand.unit,
            )
        )
    rank = problem.rank
    return _Alignment(
        admitted=alignment.admitted,
        affinity=None if alignment.affinity is None else str(alignment.affinity),
        preferred=alignment.preferred,
        exact=alignment.exact,
        steps=alignment.steps,
        policy=str(problem.policy),
        prefer_closest=problem.prefer_closest,
        one_width=problem.one_width,
        rank=None if rank is None else [rank.get(i, len(rank)) for i in problem.numa_ids],
        needs=needs,
    )


def _available(basis: Basis, demand: ResourceDemand) -> list[int] | int:
    available = demand.available
    for number, left in ((1, basis.cpu_left), (2, basis.memory_left)):
        if left and available == left and all(i in left for i in demand.capacity):
            return number
    return [available.get(i, 0) for i in demand.capacity]


# --- unpacking --------------------------------------------------------------------------------


def _ids(part: object) -> tuple[int, ...]:
    assert isinstance(part, tuple)  # noqa: S101  # made by keep()
    return part


def _alignment(
    packed: _Alignment,
    kept: KeptTrace,
    basis: Basis,
    distance: Callable[[int, int], int],
) -> Alignment:
    numa_ids = NUMASet(_ids(kept.shape[0]))
    shapes, aside = iter(kept.shape[1:]), iter(kept.aside)
    demands: list[HintDemand] = []
    for need in packed.needs:
        if need is None:
            demands.append(next(aside))
            continue
        capacity: dict[int, int] = dict(_ids(next(shapes)))  # type: ignore[arg-type]
        sockets = next(shapes)
        near: dict[int, int] = dict(_ids(next(shapes)))  # type: ignore[arg-type]
        if isinstance(need.available, int):
            available = basis.cpu_left if need.available == 1 else basis.memory_left
        else:
            available = dict(zip(capacity, need.available, strict=True))
        demands.append(
            ResourceDemand(
                resource=need.resource,
                need=need.need,
                capacity=capacity,
                available=available,
                required=NUMASet.parse(need.required),
                sockets=None if sockets is None else dict(_ids(sockets)),  # type: ignore[arg-type]
                near={i: NUMASet.from_bits(bits) for i, bits in near.items()},
                share=need.share,
                empty_is_nil=need.no_wish,
                unit=need.unit,
            )
        )
    rank = packed.rank
    return Alignment(
        admitted=packed.admitted,
        affinity=None if packed.affinity is None else NUMASet.parse(packed.affinity),
        preferred=packed.preferred,
        exact=packed.exact,
        steps=packed.steps,
        problem=Problem(
            demands=tuple(demands),
            numa_ids=numa_ids,
            policy=Policy(packed.policy),
            distance=distance,
            prefer_closest=packed.prefer_closest,
            one_width=packed.one_width,
            rank=None if rank is None else dict(zip(numa_ids, rank, strict=True)),
        ),
    )
