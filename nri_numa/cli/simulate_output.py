"""How ``nri-numa simulate`` shows what happened: to eyes as a story, to programs as a document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from msgspec import to_builtins

from nri_numa.cli.output import Column, Kind, table, table_width, terminal_width, wrapped
from nri_numa.engine.explain import explanation as explaining
from nri_numa.engine.explain import sentences
from nri_numa.engine.state import Kind as Placement
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.machine import Topology, counted, human_cpus, numa_text
from nri_numa.model.workload import Device
from nri_numa.simulate.pods import Role
from nri_numa.simulate.simulator import Action, Outcome, Room, SimulatedEvent, Simulation, Verdict
from nri_numa.text import human_bytes

NAMED: Final = 3
"""Containers that moved along with another are named up to this many, then counted."""
_CPUS: Final = Column("CPUS", Kind.LIST)
_MEMORY_FREE: Final = Column("MEMORY FREE", spare=1)
_FILL: Final = (
    Column("NUMA NODE"),
    Column("CPUS", spare=3),
    Column("BEFORE", spare=4),
    Column("AFTER", Kind.LIST, spare=1),
    Column("CPUS FREE"),
    Column("MEMORY", spare=2),
    Column("ALLOCATED", spare=5),
    Column("MEMORY FREE"),
)
_SIDES: Final = (
    *(Column("A CPUS", Kind.LIST), Column("MEM", Kind.LIST, spare=1)),
    *(Column("B CPUS", Kind.LIST), Column("MEM", Kind.LIST, spare=2)),
)
_FILL_AT_END: Final = (
    *(Column("NUMA NODE"), Column("A AFTER", spare=3), Column("CPUS FREE"), _MEMORY_FREE),
    *(Column("B AFTER", spare=4), Column("CPUS FREE"), _MEMORY_FREE),
)
NARROW_COLUMNS: Final = 72
"""Width of a terminal below which reasons stand under the table, not beside the CPUs."""


def story(
    machine: str, result: Simulation, notes: Sequence[str], *, verbose: bool = False
) -> Iterator[str]:
    """Everything that happened, in lines that fit the terminal."""
    yield from _head(machine, result.machine.topology)
    yield ""
    several = _several_namespaces(result)
    rows = [row for event in result.events for row in _rows(event, several=several)]
    if rows:
        yield from _decisions(rows)
        yield ""
    for heading, about in (
        ("Devices that the kubelet gave", _given),
        ("Other containers whose CPUs changed", _changed_cpus),
    ):
        if lines := [line for event in result.events for line in about(event)]:
            yield from (heading, *lines, "")
    yield "How full"
    yield from table(_FILL, _fill(result))
    yield ""
    yield from _verdict(result)
    yield from _notes(notes)
    if verbose:
        for event in result.events:
            for outcome in event.outcomes:
                if outcome.verdict is not Verdict.REFUSED:
                    yield ""
                    yield from _in_words(outcome)


def comparison(
    machine: str,
    first: Simulation,
    second: Simulation,
    changed: Sequence[str],
    notes: Sequence[str],
) -> Iterator[str]:
    """Two runs side by side."""
    yield from _head(machine, first.machine.topology)
    yield ""
    yield "A: as configured"
    yield from wrapped(f"B: {', '.join(changed)}")
    yield ""
    yield from table(
        (Column(""), "POD", Column("CONTAINER", Kind.NAME, spare=3), *_SIDES),
        _pairs(first, second),
    )
    yield ""
    yield "How full at the end"
    rows = [[i, *_left(first.after[i]), *_left(second.after[i])] for i in first.after]
    yield from table(_FILL_AT_END, rows)
    yield ""
    for label, result in (("A", first), ("B", second)):
        total, *rest = _verdict(result, trace=False)
        yield from wrapped(f"{label}: {total}")
        yield from filter(None, rest)
    yield from _notes(notes)


def document(
    machine: str,
    result: Simulation,
    other: Simulation | None,
    changed: Sequence[str],
    notes: Sequence[str],
) -> dict[str, Any]:
    """The same for programs; field names stay as they are over versions."""
    found: dict[str, Any] = {"machine": machine, "notes": list(notes), **_run(result)}
    if other is not None:
        found["comparedWith"] = {"settings": list(changed), **_run(other)}
    return found


# --- parts of the story ---------------------------------------------------------------------------


def _head(machine: str, topology: Topology) -> Iterator[str]:
    total = sum(n.memory_bytes for n in topology.numa_nodes.values())
    yield from wrapped(f"Machine: {machine}")
    allowed = "" if topology.allowed == topology.online else f" ({len(topology.allowed)} usable)"
    yield from wrapped(
        f"{counted(len(topology.sockets), 'socket')}, "
        f"{counted(len(topology.numa_nodes), 'NUMA node')}, "
        f"{counted(len(topology.cores), 'core')}, "
        f"{counted(len(topology.online), 'CPU')}{allowed}, {human_bytes(total)}",
        "  ",
    )


def _decisions(rows: list[list[str]]) -> Iterator[str]:
    """What each container got and why, in a table or, on a narrow terminal, below one."""
    head = (Column(""), "POD", "CONTAINER", _CPUS, Column("MEMORY", Kind.LIST, spare=1))
    if (table_width() or NARROW_COLUMNS) >= NARROW_COLUMNS:
        yield from table((*head, Column("WHY", Kind.TEXT)), rows)
        return
    yield from table(head, [row[:-1] for row in rows])
    yield ""
    number = ""
    for row in rows:
        number = row[0] or number
        yield from wrapped(f"{number} {row[2]}: {row[-1]}", "  ", "    ")


def _rows(event: SimulatedEvent, *, several: bool) -> Iterator[list[str]]:
    name = event.pod.full_name if several else event.pod.name
    if event.action is Action.REMOVE:
        yield [str(event.number), name, "", "", "", "removed"]
    for number, outcome in enumerate(event.outcomes):
        yield [
            *(("", "") if number else (str(event.number), name)),
            outcome.container,
            _arrow(outcome),
            outcome.mems or ("" if outcome.verdict is Verdict.REFUSED else "any"),
            _why(event, outcome),
        ]


def _several_namespaces(*results: Simulation) -> bool:
    """Whether a pod's name alone may not be enough."""
    return len({event.pod.namespace for one in results for event in one.events}) > 1


def _arrow(outcome: Outcome) -> str:
    if outcome.verdict is Verdict.REFUSED:
        return outcome.before
    now = outcome.cpus or "any"
    return f"{outcome.before} -> {now}" if outcome.before and outcome.before != now else now


def _why(event: SimulatedEvent, outcome: Outcome) -> str:
    if outcome.verdict is Verdict.REFUSED:
        return f"REFUSED: {outcome.reason}"
    what = "resized: " if event.action is Action.RESIZE else ""
    role = f"{outcome.role}: " if outcome.role is not Role.APP else ""
    because = ""
    if outcome.allocation is not None and outcome.allocation.kind is Placement.SHARED:
        because = explaining.shares_because(explaining.basis_of(outcome.trace))
    return f"{what}{role}{outcome.reason}{because and f', because {because}'}"


def _given(event: SimulatedEvent) -> Iterator[str]:
    for outcome in event.outcomes:
        for resource, devices in outcome.devices.items():
            at = ", ".join(f"{one.id} ({_where(one)})" for one in devices)
            head = f"{event.number}: {event.pod.full_name}/{outcome.container}"
            yield from wrapped(f"{head}: {resource} {at}", "  ", "     ")


def _where(device: Device) -> str:
    return numa_text(NUMASet(device.numa_nodes)) if device.numa_nodes else "no NUMA node"


def _changed_cpus(event: SimulatedEvent) -> Iterator[str]:
    names = sorted(event.moved.items())
    for name, cpus in names[:NAMED]:
        yield from wrapped(f"{event.number}: {name} -> {cpus}", "  ", "     ")
    if len(names) > NAMED:
        yield f"  {event.number}: and {len(names) - NAMED} more"


def _fill(result: Simulation) -> Iterator[list[object]]:
    for i, after in result.after.items():
        before = result.before[i]
        idle = f" (+{after.idle} idle)" if after.idle else ""
        yield [
            i,
            *_where_any(
                after.cpus,
                str(after.cpus),
                human_cpus(before.cpu_bound_milli),
                human_cpus(after.cpu_bound_milli) + idle,
                human_cpus(after.cpu_left_milli),
            ),
            *_where_any(
                after.memory_bytes,
                human_bytes(after.memory_bytes),
                human_bytes(after.memory_bound_bytes),
                human_bytes(after.memory_left_bytes, free=True),
            ),
        ]


def _left(room: Room) -> Sequence[str]:
    cpus = human_cpus(room.cpu_bound_milli), human_cpus(room.cpu_left_milli)
    memory = human_bytes(room.memory_left_bytes, free=True)
    return [*_where_any(room.cpus, *cpus), *_where_any(room.memory_bytes, memory)]


def _where_any(total: int, *texts: str) -> Sequence[str]:
    """Nothing is free, and nothing used up, of what a NUMA node never had."""
    return texts if total else ["-"] * len(texts)


def _verdict(result: Simulation, *, trace: bool = True) -> Iterator[str]:
    refused = result.first_refused
    pods = len({e.pod.uid for e in result.events if e.action is Action.CREATE and not e.refused})
    extra = "".join(
        f", {counted(result.counts[verdict], 'container')} {how}"
        for verdict, how in (
            (Verdict.WIDENED, "wider than ideal"),
            (Verdict.LESS, "with less than asked for"),
            (Verdict.UNPINNED, "not pinned"),
        )
        if result.counts[verdict]
    )
    if refused is None:
        yield f"All {counted(pods, 'pod')} placed{extra}." if pods != 1 else f"1 pod placed{extra}."
        return
    total = sum(1 for e in result.events if e.refused is not None)
    left = f", {counted(result.untried, 'step')} not tried" if result.untried else ""
    verdict = f"{counted(pods, 'pod')} placed{extra}, {counted(total, 'refusal')}{left}."
    yield from wrapped(verdict) if trace else [verdict]
    outcome = refused.refused
    assert outcome is not None  # noqa: S101  # first_refused has one
    yield ""
    yield from wrapped(
        f"{'First refused' if total > 1 else 'Refused'}: {refused.pod.source}", "", "  "
    )
    if trace:
        yield from _in_words(outcome)
    else:
        yield from wrapped(f"{outcome.reason}: {outcome.message}", "  ")


def explained(outcome: Outcome) -> dict[str, Any]:
    """How a decision came about, as the running agent would explain it."""
    known = explaining.grounds(outcome.trace)
    if outcome.allocation is None:
        return explaining.of_refusal(known, outcome.reason, outcome.message)
    return explaining.of_allocation(outcome.allocation, known, outcome.cpus)


def _in_words(outcome: Outcome) -> list[str]:
    return sentences.text(explained(outcome), terminal_width()).splitlines()


def _pairs(first: Simulation, second: Simulation) -> Iterator[list[str]]:
    a, b = _by_place(first), _by_place(second)
    several = _several_namespaces(first, second)
    last = None
    for place in {**a, **b}:
        number, pod, container = place
        row = [str(number), pod if several else pod.partition("/")[2], container]
        if last == (number, pod):
            row[:2] = ["", ""]
        last = number, pod
        for outcomes in (a, b):
            outcome = outcomes.get(place)
            if outcome is None:
                row += ["not tried", ""]
            elif outcome.verdict is Verdict.REFUSED:
                row += ["REFUSED", ""]
            else:
                row += [_arrow(outcome), outcome.mems or "any"]
        yield row


def _by_place(result: Simulation) -> dict[tuple[int, str, str], Outcome]:
    return {
        (event.number, event.pod.full_name, outcome.container): outcome
        for event in result.events
        for outcome in event.outcomes
    }


def _notes(notes: Sequence[str]) -> Iterator[str]:
    if notes:
        yield ""
        yield "Notes"
    for note in notes:
        yield from wrapped(f"- {note}", "  ", "    ")


# --- parts of the document ------------------------------------------------------------------------


def _run(result: Simulation) -> dict[str, Any]:
    return {
        "refused": sum(1 for e in result.events if e.refused is not None),
        "untried": result.untried,
        "counts": {verdict.value: count for verdict, count in result.counts.items()},
        "events": [_event(event) for event in result.events],
        "standing": [
            {
                "namespace": a.namespace,
                "pod": a.pod,
                "container": a.container,
                "cpus": cpus,
                "mems": str(a.mems),
            }
            for a, cpus in result.standing
        ],
        "numaNodes": [
            {"id": i, "before": to_builtins(result.before[i]), "after": to_builtins(room)}
            for i, room in result.after.items()
        ],
    }


def _event(event: SimulatedEvent) -> dict[str, Any]:
    return {
        "number": event.number,
        "action": event.action.value,
        "source": event.pod.source,
        "namespace": event.pod.namespace,
        "pod": event.pod.name,
        "qos": event.pod.qos.value,
        "containers": [_outcome(outcome) for outcome in event.outcomes],
        "moved": dict(event.moved),
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    explanation = explained(outcome)
    found: dict[str, Any] = {
        "container": outcome.container,
        "role": outcome.role.value,
        "verdict": outcome.verdict.value,
        "reason": outcome.reason,
        "message": outcome.message,
        "cpusBefore": outcome.before,
        "cpus": outcome.cpus,
        "mems": outcome.mems,
        "explanation": explanation,
    }
    if outcome.devices:
        found["devices"] = [
            {"resource": resource, "id": one.id, "numaNodes": str(NUMASet(one.numa_nodes))}
            for resource, devices in outcome.devices.items()
            for one in devices
        ]
    if (a := outcome.allocation) is not None:
        names = ("kind", "policy", "numaNodes", "idle", "preferred")
        found |= {name: explanation["result"][name] for name in names}
        found |= {"cpuMilli": a.cpu_milli, "memoryBytes": a.memory_bytes}
    return found
