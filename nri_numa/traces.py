"""Traces of decisions in little memory.

A trace as the engine makes it holds a few dozen objects, four to eight kilobytes; a node that
hosts a thousand containers cannot keep that for an explanation that hardly anybody asks for. Here
it is packed into one bytes object of a few hundred: what can be worked out again is left out, what
is the same for many containers (the capacities of the NUMA nodes) is kept once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final
from zlib import compress, decompress

import msgspec

from nri_numa.engine.decision import Trace
from nri_numa.engine.demand import Demand
from nri_numa.engine.explain import asked_values
from nri_numa.engine.hint_reasons import Problem
from nri_numa.engine.hints import Demand as AnyDemand
from nri_numa.engine.hints import ResourceDemand
from nri_numa.engine.load import parse_load
from nri_numa.engine.merge import EXACT_UPTO, STEP_LIMIT
from nri_numa.engine.policies import Alignment
from nri_numa.engine.workload import (
    SMT,
    Bind,
    Container,
    CPUMode,
    OnFailure,
    PodSandbox,
    Policy,
    QoSClass,
    Resources,
    Scope,
    Wishes,
)
from nri_numa.topology.cpuset import CPUSet, NUMASet

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

    ``available`` is 1 for the trace's ``cpu_left`` and 2 for its ``memory_left``.
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


class _Demand(msgspec.Struct, array_like=True, frozen=True):
    milli: int
    request: int
    exclusive: int
    memory: int
    pages: dict[int, int]
    cpu_source: str
    memory_source: str
    notes: tuple[str, ...]


class _Packed(msgspec.Struct, array_like=True, frozen=True):
    qos: str
    quota: int | None
    period: int | None
    shares: int | None
    oom_score: int | None
    asked: dict[str, tuple[str, str]] | None
    demand: _Demand | None
    alignment: _Alignment | None
    cpu_left: list[int]
    memory_left: list[int]
    before: str
    taken: str
    given: str
    steps: tuple[str, ...]
    rule: str


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Packed).decode
_ZLIB: Final = b"x"


@dataclass(frozen=True, slots=True, eq=False)
class KeptTrace:
    """A packed trace; equal to itself only, so that it can stand for its decision.

    Attributes:
        data: what is its own.
        shape: what it shares with others: NUMA nodes, capacities, sockets.
        aside: demands that have no packed form (devices, groups), as they are.
    """

    data: bytes
    shape: Shape
    aside: tuple[AnyDemand, ...] = ()


class TraceKeeper:
    """Packs and unpacks; remembers the shapes that traces share."""

    def __init__(self) -> None:
        self._shapes: dict[Shape, Shape] = {}

    def keep(self, trace: Trace) -> KeptTrace:
        """Pack a trace; names, ids, labels and annotations are not kept."""
        resources = trace.container.resources
        alignment = trace.alignment
        packed_alignment = None
        shapes: list[object] = [tuple(trace.cpu_left), tuple(trace.memory_left), None]
        aside: list[AnyDemand] = []
        if alignment is not None:
            shapes[2] = tuple(alignment.problem.numa_ids)
            packed_alignment = _packed_alignment(trace, alignment, shapes, aside)
        before = trace.pool_before
        packed = _Packed(
            qos=trace.pod.qos.value,
            quota=resources.cpu_quota,
            period=resources.cpu_period,
            shares=resources.cpu_shares,
            oom_score=trace.container.oom_score_adj,
            asked=None if trace.wishes is None else _asked(trace.wishes),
            demand=None if trace.demand is None else _packed_demand(trace.demand),
            alignment=packed_alignment,
            cpu_left=list(trace.cpu_left.values()),
            memory_left=list(trace.memory_left.values()),
            before=str(before),
            # The differences are short, and most often empty.
            taken=str(before - trace.pool_after),
            given=str(trace.pool_after - before),
            steps=tuple(_cut(step, LONGEST_STEP) for step in trace.steps),
            rule=trace.rule,
        )
        data = _encode(packed)
        if len(data) > _LARGE:
            data = compress(data, 1)
        return KeptTrace(data, self._shared(tuple(shapes)), tuple(aside))

    def _shared(self, shape: Shape) -> Shape:
        known = self._shapes.get(shape)
        if known is None:
            if len(self._shapes) >= _SHAPES:
                self._shapes.clear()  # those in use live on in their traces
            known = self._shapes[shape] = shape
        return known


def unpack(
    kept: KeptTrace,
    *,
    namespace: str,
    pod: str,
    container: str,
    distance: Callable[[int, int], int],
) -> Trace:
    """A trace as good as the one that was kept, for `nri_numa.engine.explain`.

    Args:
        kept: the packed trace.
        namespace: of the pod.
        pod: its name.
        container: its name.
        distance: SLIT distance between two NUMA nodes.
    """
    # An array of msgpack never begins as a zlib stream does.
    packed = _decode(decompress(kept.data) if kept.data[:1] == _ZLIB else kept.data)
    cpu_nodes, memory_nodes, _ = kept.shape[:3]
    cpu_left = dict(zip(_ids(cpu_nodes), packed.cpu_left, strict=True))
    memory_left = dict(zip(_ids(memory_nodes), packed.memory_left, strict=True))
    before = CPUSet.parse(packed.before)
    d = packed.demand
    return Trace(
        pod=PodSandbox(id="", uid="", namespace=namespace, name=pod, qos=QoSClass(packed.qos)),
        container=Container(
            id="",
            pod_id="",
            name=container,
            resources=Resources(
                cpu_shares=packed.shares, cpu_quota=packed.quota, cpu_period=packed.period
            ),
            oom_score_adj=packed.oom_score,
        ),
        wishes=None if packed.asked is None else _wishes(packed.asked),
        demand=None
        if d is None
        else Demand(
            cpu_milli=d.milli,
            cpu_request_milli=d.request,
            exclusive_cpus=d.exclusive,
            memory_bytes=d.memory,
            hugepages=d.pages,
            cpu_source=d.cpu_source,
            memory_source=d.memory_source,
            notes=d.notes,
        ),
        alignment=None
        if packed.alignment is None
        else _alignment(packed.alignment, kept, cpu_left, memory_left, distance),
        steps=packed.steps,
        cpu_left=cpu_left,
        memory_left=memory_left,
        pool_before=before,
        pool_after=(before - CPUSet.parse(packed.taken)) | CPUSet.parse(packed.given),
        rule=packed.rule,
    )


# --- packing ----------------------------------------------------------------------------------


def _cut(text: str, longest: int = LONGEST) -> str:
    return text if len(text) <= longest else f"{text[:longest]}…"


def _asked(wishes: Wishes) -> dict[str, tuple[str, str]]:
    values = asked_values(wishes)
    if len(values.get("load", "")) > LONGEST:  # it is read again: whole intervals only
        values["load"] = values["load"][:LONGEST].rpartition(",")[0]
    return {key: (_cut(value), _cut(wishes.sources[key])) for key, value in values.items()}


def _packed_demand(d: Demand) -> _Demand:
    return _Demand(
        milli=d.cpu_milli,
        request=d.cpu_request_milli,
        exclusive=d.exclusive_cpus,
        memory=d.memory_bytes,
        pages=dict(d.hugepages),
        cpu_source=d.cpu_source,
        memory_source=d.memory_source,
        notes=d.notes,
    )


def _packed_alignment(
    trace: Trace, alignment: Alignment, shapes: list[object], aside: list[AnyDemand]
) -> _Alignment:
    problem = alignment.problem
    needs: list[_Need | None] = []
    for demand in problem.demands:
        if not isinstance(demand, ResourceDemand) or demand.groups or demand.reusable:
            needs.append(None)
            aside.append(demand)
            continue
        shapes.append(tuple(demand.capacity.items()))
        shapes.append(None if demand.sockets is None else tuple(demand.sockets.items()))
        needs.append(
            _Need(
                resource=demand.resource,
                need=demand.need,
                available=_available(trace, demand),
                required=str(demand.required),
                share=demand.share,
                no_wish=demand.nothing_is_no_wish,
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
        policy=problem.policy.value,
        prefer_closest=problem.prefer_closest,
        rank=None if rank is None else [rank.get(i, len(rank)) for i in problem.numa_ids],
        needs=needs,
    )


def _available(trace: Trace, demand: ResourceDemand) -> list[int] | int:
    available = demand.available
    for number, left in ((1, trace.cpu_left), (2, trace.memory_left)):
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
    cpu_left: Mapping[int, int],
    memory_left: Mapping[int, int],
    distance: Callable[[int, int], int],
) -> Alignment:
    numa_ids = NUMASet(_ids(kept.shape[2]))
    shapes, aside = iter(kept.shape[3:]), iter(kept.aside)
    demands: list[AnyDemand] = []
    for need in packed.needs:
        if need is None:
            demands.append(next(aside))
            continue
        capacity: dict[int, int] = dict(_ids(next(shapes)))  # type: ignore[arg-type]
        sockets = next(shapes)
        if isinstance(need.available, int):
            available = cpu_left if need.available == 1 else memory_left
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
                share=need.share,
                nothing_is_no_wish=need.no_wish,
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
            rank=None if rank is None else dict(zip(numa_ids, rank, strict=True)),
            exact_upto=EXACT_UPTO,
            step_limit=STEP_LIMIT,
        ),
    )


def _wishes(asked: Mapping[str, tuple[str, str]]) -> Wishes:
    values = {key: value for key, (value, _) in asked.items()}
    sources = {key: source for key, (_, source) in asked.items()}
    load, cpus, on_failure = values.get("load"), values.get("cpus"), values.get("on-failure")
    return Wishes(
        numacpu=values.get("numacpu"),
        numamem=values.get("numamem"),
        bind=Bind(values.get("bind", Bind.CPU_MEM)),
        policy=Policy(values.get("policy", Policy.NONE)),
        scope=Scope(values.get("scope", Scope.CONTAINER)),
        cpus=None if cpus is None else CPUMode(cpus),
        smt=SMT(values.get("smt", SMT.SPREAD)),
        load=None if load is None else parse_load(load),
        on_failure=None if on_failure is None else OnFailure(on_failure),
        given=frozenset(key for key, source in sources.items() if source != "default"),
        sources=sources,
    )
