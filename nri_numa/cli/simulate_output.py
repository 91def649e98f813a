"""Output of ``nri-numa simulate``: lines for people, a document for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from msgspec import to_builtins

from nri_numa.cli.output import (
    CellWrapping,
    Column,
    max_table_width,
    render_table,
    terminal_width,
    wrap_text,
)
from nri_numa.cluster.pods import ContainerRole
from nri_numa.engine.explain import explanation as explaining
from nri_numa.engine.explain import sentences
from nri_numa.engine.state import ContainerKind as Placement
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.machine import Topology, count_text, human_cpu_number, numa_text
from nri_numa.model.workload import Device
from nri_numa.simulate.simulator import (
    ContainerOutcome,
    NUMANodeFill,
    PodAction,
    SimulatedEvent,
    SimulatedOutcome,
    Simulation,
)
from nri_numa.text import human_bytes

MAX_NAMED_CONTAINERS: Final = 3
"""Maximum number of changed containers that are named; the others are counted."""
_CPUS_COLUMN: Final = Column("CPUS", CellWrapping.LIST)
_FILL_COLUMNS: Final = (
    Column("NUMA NODE"),
    Column("CPUS", drop_rank=3),
    Column("BEFORE", drop_rank=4),
    Column("AFTER", CellWrapping.LIST, drop_rank=1),
    Column("CPUS FREE"),
    Column("MEMORY", drop_rank=2),
    Column("ALLOCATED", drop_rank=5),
    Column("MEMORY FREE"),
)
_COMPARISON_COLUMNS: Final = (
    *(Column("A CPUS", CellWrapping.LIST), Column("A MEMS", CellWrapping.LIST, drop_rank=1)),
    *(Column("B CPUS", CellWrapping.LIST), Column("B MEMS", CellWrapping.LIST, drop_rank=2)),
)
_FINAL_FILL_COMPARISON_COLUMNS: Final = (
    Column("NUMA NODE"),
    Column("A AFTER", drop_rank=3),
    Column("A CPUS FREE"),
    Column("A MEMORY FREE", drop_rank=1),
    Column("B AFTER", drop_rank=4),
    Column("B CPUS FREE"),
    Column("B MEMORY FREE", drop_rank=2),
)
MIN_WIDE_TERMINAL_COLUMNS: Final = 72
"""Terminal width below which reasons are listed below the table, not in a column."""


def report_lines(
    machine: str, result: Simulation, notes: Sequence[str], *, verbose: bool = False
) -> Iterator[str]:
    """Yield all events, in lines that fit the terminal."""
    yield from _machine_summary_lines(machine, result.machine.topology)
    yield ""
    namespaced = _several_namespaces(result)
    rows = [row for event in result.events for row in _event_rows(event, namespaced=namespaced)]
    if rows:
        yield from _decision_lines(rows)
        yield ""
    for heading, about in (
        ("Devices assigned by the kubelet", _device_lines),
        ("Other containers whose CPUs changed", _changed_cpus_lines),
    ):
        if lines := [line for event in result.events for line in about(event)]:
            yield from (heading, *lines, "")
    yield "How full"
    yield from render_table(_FILL_COLUMNS, _node_fill_rows(result))
    yield ""
    yield from _verdict_lines(result)
    yield from _note_lines(notes)
    if verbose:
        for event in result.events:
            for outcome in event.outcomes:
                if outcome.verdict is not SimulatedOutcome.REJECTED:
                    yield ""
                    yield from _explanation_lines(outcome)


def simulation_comparison_lines(
    machine: str,
    base_run: Simulation,
    changed_run: Simulation,
    changed: Sequence[str],
    notes: Sequence[str],
) -> Iterator[str]:
    """Yield two runs side by side."""
    yield from _machine_summary_lines(machine, base_run.machine.topology)
    yield ""
    yield "A: as configured"
    yield from wrap_text(f"B: {', '.join(changed)}")
    yield ""
    yield from render_table(
        (
            Column(""),
            "POD",
            Column("CONTAINER", CellWrapping.NAME, drop_rank=3),
            *_COMPARISON_COLUMNS,
        ),
        _comparison_rows(base_run, changed_run),
    )
    yield ""
    yield "Allocations at the end"
    rows = [
        [i, *_usage_cells(base_run.final_fill[i]), *_usage_cells(changed_run.final_fill[i])]
        for i in base_run.final_fill
    ]
    yield from render_table(_FINAL_FILL_COMPARISON_COLUMNS, rows)
    yield ""
    for label, result in (("A", base_run), ("B", changed_run)):
        total, *other_lines = _verdict_lines(result, trace=False)
        yield from wrap_text(f"{label}: {total}")
        yield from filter(None, other_lines)
    yield from _note_lines(notes)


def simulation_document(
    machine: str,
    result: Simulation,
    changed_run: Simulation | None,
    changed: Sequence[str],
    notes: Sequence[str],
) -> dict[str, Any]:
    """Return the document for programs; field names stay the same over versions."""
    document: dict[str, Any] = {
        "machine": machine,
        "notes": list(notes),
        **_simulated_run_document(result),
    }
    if changed_run is not None:
        run_document = _simulated_run_document(changed_run)
        document["comparedWith"] = {"settings": list(changed), **run_document}
    return document


# --- parts of the lines ---------------------------------------------------------------------------


def _machine_summary_lines(machine: str, topology: Topology) -> Iterator[str]:
    total = sum(n.memory_bytes for n in topology.numa_nodes.values())
    yield from wrap_text(f"Machine: {machine}")
    allowed = "" if topology.allowed == topology.online else f" ({len(topology.allowed)} usable)"
    yield from wrap_text(
        f"{count_text(len(topology.sockets), 'socket')}, "
        f"{count_text(len(topology.numa_nodes), 'NUMA node')}, "
        f"{count_text(len(topology.cores), 'core')}, "
        f"{count_text(len(topology.online), 'CPU')}{allowed}, {human_bytes(total)}",
        "  ",
    )


def _decision_lines(rows: list[list[str]]) -> Iterator[str]:
    """Yield a table of placements with their reasons, which a narrow terminal has below it."""
    head = (
        Column(""),
        "POD",
        "CONTAINER",
        _CPUS_COLUMN,
        Column("MEMORY", CellWrapping.LIST, drop_rank=1),
    )
    if (max_table_width() or MIN_WIDE_TERMINAL_COLUMNS) >= MIN_WIDE_TERMINAL_COLUMNS:
        yield from render_table((*head, Column("REASON", CellWrapping.TEXT)), rows)
        return
    yield from render_table(head, [row[:-1] for row in rows])
    yield ""
    number = ""
    for row in rows:
        number = row[0] or number
        yield from wrap_text(f"{number} {row[2]}: {row[-1]}", "  ", "    ")


def _event_rows(event: SimulatedEvent, *, namespaced: bool) -> Iterator[list[str]]:
    name = event.pod.full_name if namespaced else event.pod.name
    if event.action is PodAction.REMOVE:
        yield [str(event.number), name, "", "", "", "removed"]
    for number, outcome in enumerate(event.outcomes):
        yield [
            *(("", "") if number else (str(event.number), name)),
            outcome.container,
            _cpu_change_text(outcome),
            outcome.mems or ("" if outcome.verdict is SimulatedOutcome.REJECTED else "any"),
            _container_outcome_text(event, outcome),
        ]


def _several_namespaces(*results: Simulation) -> bool:
    """Return True if a pod's name alone may be ambiguous."""
    return len({event.pod.namespace for r in results for event in r.events}) > 1


def _cpu_change_text(outcome: ContainerOutcome) -> str:
    if outcome.verdict is SimulatedOutcome.REJECTED:
        return outcome.previous_cpus
    cpus = outcome.cpus or "any"
    is_changed = outcome.previous_cpus not in ("", cpus)
    return f"{outcome.previous_cpus} -> {cpus}" if is_changed else cpus


def _container_outcome_text(event: SimulatedEvent, outcome: ContainerOutcome) -> str:
    if outcome.verdict is SimulatedOutcome.REJECTED:
        return f"REJECTED: {outcome.reason}"
    action = "resized: " if event.action is PodAction.RESIZE else ""
    role = f"{outcome.role}: " if outcome.role is not ContainerRole.APP else ""
    because = ""
    if outcome.allocation is not None and outcome.allocation.kind is Placement.SHARED:
        because = explaining.shared_cpu_reason(explaining.explanation_input_of(outcome.trace))
    return f"{action}{role}{outcome.reason}{because and f', because {because}'}"


def _device_lines(event: SimulatedEvent) -> Iterator[str]:
    for outcome in event.outcomes:
        for resource, devices in outcome.devices.items():
            text = ", ".join(f"{d.id} ({_device_nodes_text(d)})" for d in devices)
            head = f"{event.number}: {event.pod.full_name}/{outcome.container}"
            yield from wrap_text(f"{head}: {resource} {text}", "  ", "     ")


def _device_nodes_text(device: Device) -> str:
    return numa_text(NUMASet(device.numa_nodes)) if device.numa_nodes else "no NUMA node"


def _changed_cpus_lines(event: SimulatedEvent) -> Iterator[str]:
    names = sorted(event.changed_cpus.items())
    for name, cpus in names[:MAX_NAMED_CONTAINERS]:
        yield from wrap_text(f"{event.number}: {name} -> {cpus}", "  ", "     ")
    if len(names) > MAX_NAMED_CONTAINERS:
        yield f"  {event.number}: and {len(names) - MAX_NAMED_CONTAINERS} more"


def _node_fill_rows(result: Simulation) -> Iterator[list[object]]:
    for i, final in result.final_fill.items():
        initial = result.initial_fill[i]
        siblings_text = f" (+{final.idle_siblings} idle)" if final.idle_siblings else ""
        yield [
            i,
            *_dashes_if_no_total(
                final.cpus,
                str(final.cpus),
                human_cpu_number(initial.cpu_allocated_milli),
                human_cpu_number(final.cpu_allocated_milli) + siblings_text,
                human_cpu_number(final.cpu_free_milli),
            ),
            *_dashes_if_no_total(
                final.memory_bytes,
                human_bytes(final.memory_bytes),
                human_bytes(final.memory_allocated_bytes),
                human_bytes(final.memory_free_bytes, free=True),
            ),
        ]


def _usage_cells(fill: NUMANodeFill) -> Sequence[str]:
    cpus = human_cpu_number(fill.cpu_allocated_milli), human_cpu_number(fill.cpu_free_milli)
    memory = human_bytes(fill.memory_free_bytes, free=True)
    return [*_dashes_if_no_total(fill.cpus, *cpus), *_dashes_if_no_total(fill.memory_bytes, memory)]


def _dashes_if_no_total(total: int, *texts: str) -> Sequence[str]:
    """Return dashes instead of the texts if the NUMA node has none of the resource."""
    return texts if total else ["-"] * len(texts)


def _verdict_lines(result: Simulation, *, trace: bool = True) -> Iterator[str]:
    rejected = result.first_rejected
    created = [e for e in result.events if e.action is PodAction.CREATE]
    pods = len({e.pod.uid for e in created if not e.first_rejected_container})
    extra = "".join(
        f", {count_text(result.count_by_outcome[verdict], 'container')} {label}"
        for verdict, label in (
            (SimulatedOutcome.MISALIGNED, "misaligned"),
            (SimulatedOutcome.SHORTFALL, "with less than requested"),
            (SimulatedOutcome.UNPINNED, "unpinned"),
        )
        if result.count_by_outcome[verdict]
    )
    if rejected is None:
        yield f"{count_text(pods, 'pod')} placed{extra}."
        return
    total = sum(1 for e in result.events if e.first_rejected_container is not None)
    note = f", {count_text(result.skipped_pods, 'step')} not tried" if result.skipped_pods else ""
    verdict = f"{count_text(pods, 'pod')} placed{extra}, {count_text(total, 'rejection')}{note}."
    yield from wrap_text(verdict) if trace else [verdict]
    outcome = rejected.first_rejected_container
    assert outcome is not None  # noqa: S101  # first_refused has one
    yield ""
    yield from wrap_text(
        f"{'First rejected' if total > 1 else 'Rejected'}: {rejected.pod.source}", "", "  "
    )
    if trace:
        yield from _explanation_lines(outcome)
    else:
        yield from wrap_text(f"{outcome.reason}: {outcome.message}", "  ")


def explain_outcome(outcome: ContainerOutcome) -> dict[str, Any]:
    """Explain a decision in the same form as the running agent."""
    stored = explaining.stored_explanation(outcome.trace)
    if outcome.allocation is None:
        return explaining.explain_rejection(stored, outcome.reason, outcome.message)
    return explaining.explain_allocation(outcome.allocation, stored, outcome.cpus)


def _explanation_lines(outcome: ContainerOutcome) -> list[str]:
    return sentences.render_text(explain_outcome(outcome), terminal_width()).splitlines()


def _comparison_rows(base_run: Simulation, changed_run: Simulation) -> Iterator[list[str]]:
    a, b = _outcomes_by_container(base_run), _outcomes_by_container(changed_run)
    namespaced = _several_namespaces(base_run, changed_run)
    previous = None
    for key in {**a, **b}:
        number, pod, container = key
        row = [str(number), pod if namespaced else pod.partition("/")[2], container]
        if previous == (number, pod):
            row[:2] = ["", ""]
        previous = number, pod
        for outcomes in (a, b):
            outcome = outcomes.get(key)
            if outcome is None:
                row += ["not tried", ""]
            elif outcome.verdict is SimulatedOutcome.REJECTED:
                row += ["REJECTED", ""]
            else:
                row += [_cpu_change_text(outcome), outcome.mems or "any"]
        yield row


def _outcomes_by_container(result: Simulation) -> dict[tuple[int, str, str], ContainerOutcome]:
    return {
        (event.number, event.pod.full_name, outcome.container): outcome
        for event in result.events
        for outcome in event.outcomes
    }


def _note_lines(notes: Sequence[str]) -> Iterator[str]:
    if notes:
        yield ""
        yield "Notes"
    for note in notes:
        yield from wrap_text(f"- {note}", "  ", "    ")


# --- parts of the document ------------------------------------------------------------------------


def _simulated_run_document(result: Simulation) -> dict[str, Any]:
    return {
        "rejected": sum(1 for e in result.events if e.first_rejected_container is not None),
        "skippedPods": result.skipped_pods,
        "counts": {verdict.value: count for verdict, count in result.count_by_outcome.items()},
        "events": [_event_document(event) for event in result.events],
        "running": [
            {name: getattr(a, name) for name in ("namespace", "pod", "container")}
            | {"cpus": cpus, "mems": str(a.mems)}
            for a, cpus in result.running_containers
        ],
        "numaNodes": [
            {"id": i, "before": to_builtins(result.initial_fill[i]), "after": to_builtins(fill)}
            for i, fill in result.final_fill.items()
        ],
    }


def _event_document(event: SimulatedEvent) -> dict[str, Any]:
    return {
        "number": event.number,
        "action": event.action.value,
        "source": event.pod.source,
        "namespace": event.pod.namespace,
        "pod": event.pod.name,
        "qos": event.pod.qos.value,
        "containers": [_outcome_document(outcome) for outcome in event.outcomes],
        "changedCPUs": dict(event.changed_cpus),
    }


def _outcome_document(outcome: ContainerOutcome) -> dict[str, Any]:
    explanation = explain_outcome(outcome)
    document: dict[str, Any] = {
        "container": outcome.container,
        "role": outcome.role.value,
        "verdict": outcome.verdict.value,
        "reason": str(outcome.reason),
        "message": outcome.message,
        "previousCPUs": outcome.previous_cpus,
        "cpus": outcome.cpus,
        "mems": outcome.mems,
        "explanation": explanation,
    }
    if outcome.devices:
        document["devices"] = [
            {"resource": resource, "id": d.id, "numaNodes": str(NUMASet(d.numa_nodes))}
            for resource, devices in outcome.devices.items()
            for d in devices
        ]
    if (a := outcome.allocation) is not None:
        names = ("kind", "policy", "numaNodes", "idleSiblings", "aligned")
        document |= {name: explanation["result"][name] for name in names}
        document |= {"cpuMilli": a.cpu_milli, "memoryBytes": a.memory_bytes}
    return document
