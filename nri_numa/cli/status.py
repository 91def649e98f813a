"""``nri-numa status``: who has which CPUs and memory nodes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn

import click

from nri_numa.cli.agent_client import (
    AgentClient,
    complete_namespaces,
    complete_pods,
    new_agent_client,
    quote_path_segment,
)
from nri_numa.cli.common import Failure, api_options, config_option, output_option, show_progress
from nri_numa.cli.output import (
    CellWrapping,
    Column,
    fit_table,
    human_age,
    human_duration,
    max_table_width,
    wrap_text,
    write_document,
)
from nri_numa.engine.explain.sentences import displaced_text, drift_text
from nri_numa.model.machine import count_text, cpus_text, human_cpu_number
from nri_numa.text import escape_unprintable, human_bytes

Object = dict[str, Any]

_MAX_REFUSALS_SHOWN: Final = 10
"""On a terminal; a pipe gets them all."""
_MAX_DRIFT_LINES: Final = 20
DRIFT_MARK: Final = "!"
"""Stands behind CPUs or memory nodes that are meant and not there."""


@click.command()
@click.option(
    "-n",
    "--namespace",
    metavar="NAME",
    shell_complete=complete_namespaces,
    help="Only containers and refusals of this namespace.  [default: all namespaces]",
)
@click.option(
    "-A", "--all-namespaces", is_flag=True, help="Those of all namespaces, which is the default."
)
@click.option(
    "--pod",
    metavar="NAME",
    shell_complete=complete_pods,
    help="Only containers and refusals of pods of this name.",
)
@click.option("-w", "--watch", is_flag=True, help="Show it again whenever it changes.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.2, max=3600),
    default=2.0,
    show_default=True,
    help="With --watch: seconds between two looks.",
)
@output_option("table", "wide", "name", "json", "yaml")
@config_option
@api_options
@click.pass_context
def status(
    ctx: click.Context,
    namespace: str | None,
    all_namespaces: bool,
    pod: str | None,
    watch: bool,
    interval: float,
    output: str,
    config_path: str | None,
    api: str | None,
    token_file: str | None,
    ca_file: str | None,
) -> None:
    """Show the agent, the NUMA nodes, and every container with what it has.

    -o wide shows every column, however long the lines get. -o name prints NAMESPACE/POD of each
    pod that runs here, as explain takes it. With --watch, -o json prints one document a line.

    Exit code 0 when the agent places containers, 1 when it answers but is not ready, 3 when it
    cannot be reached.
    """
    if all_namespaces and namespace is not None:
        raise click.UsageError(
            f"-A and --namespace {escape_unprintable(namespace)} contradict each other; "
            "expected one of them"
        )
    for option, value in (("--namespace", namespace), ("--pod", pod)):
        if value is not None and (not value or "/" in value):
            raise click.UsageError(f"{option} is {value!r}; expected a name without a slash")
    if watch and output not in ("table", "wide", "json"):
        raise click.UsageError(f"--watch goes with -o table, wide or json, not with -o {output}")
    agent = new_agent_client(api, token_file, ca_file, config_path)
    only = f" of pod {pod}" if pod is not None else ""
    only += f" in namespace {namespace}" if namespace is not None else ""

    def render_status(document: dict[str, Any]) -> str:
        wide = output == "wide"
        return "\n".join(
            status_lines(document, time.time(), wide=wide, only=escape_unprintable(only))
        )

    if watch:
        # In ASCII nothing in a document ends a line.
        form = json.dumps if output == "json" else render_status
        _reprint_text_on_change(
            lambda: form(fetch_status_document(agent, namespace, pod)),
            interval,
            documents=output == "json",
        )
    with show_progress(f"asking {agent.address}"):
        document = fetch_status_document(agent, namespace, pod)
    if output in ("table", "wide"):
        click.echo(render_status(document))
    elif output == "name":
        for name in dict.fromkeys(f"{c['namespace']}/{c['pod']}" for c in document["containers"]):
            click.echo(escape_unprintable(name))
    else:
        write_document(document, output)
    if not document["status"]["ready"]:
        ctx.exit(1)


def fetch_status_document(
    agent: AgentClient, namespace: str | None = None, pod: str | None = None
) -> Any:
    """Status, assignments and refusals in one document, of one namespace or pod where given."""
    query = "&".join(
        f"{name}={quote_path_segment(value)}"
        for name, value in (("namespace", namespace), ("pod", pod))
        if value is not None
    )
    document = {
        "status": agent.get_document("/v1/status"),
        **agent.get_document(f"/v1/assignments{'?' if query else ''}{query}"),
        **agent.get_document("/v1/refusals"),
    }
    document["refusals"] = [
        one
        for one in document["refusals"]
        if namespace in (None, one["namespace"]) and pod in (None, one["pod"])
    ]
    return document


def _reprint_text_on_change(
    look: Callable[[], str], interval: float, *, documents: bool
) -> NoReturn:
    """Show the text whenever it changes; what reads documents expects one a line, nothing else."""
    shown = ""
    try:
        while True:
            trouble = False
            try:
                text = look()
            except Failure as error:
                trouble, text = True, f"nri-numa: {error.message}\n(trying again)"
            if text != shown:
                if not documents:
                    click.clear()
                click.echo(text, err=trouble and documents)
                shown = text
            time.sleep(interval)
    except KeyboardInterrupt:
        raise SystemExit(0) from None


def status_lines(
    document: dict[str, Any], now: float, *, wide: bool = False, only: str = ""
) -> Iterator[str]:
    """The tables of a document of `fetch_status_document`, which was narrowed to ``only``."""
    yield from _agent_lines(document["status"], now)
    yield ""
    yield from numa_node_table_lines(document["numaNodes"], wide=wide)
    yield ""
    containers = document["containers"]
    if containers:
        yield from _status_table_lines(_CONTAINER_COLUMNS, containers, now, wide=wide)
        yield from _drift_lines(containers, now)
    else:
        yield f"No containers{only}."
    refusals = document["refusals"]
    if refusals:
        shown = refusals[:_MAX_REFUSALS_SHOWN] if sys.stdout.isatty() and not wide else refusals
        yield ""
        yield f"Refused lately{only} ({len(refusals)}); see `nri-numa explain NAMESPACE/POD`:"
        yield from _status_table_lines(_REJECTION_COLUMNS, shown, now, wide=wide)
        if len(shown) < len(refusals):
            yield f"  and {len(refusals) - len(shown)} more; -o wide shows all"


def numa_node_table_lines(nodes: Sequence[Object], *, wide: bool = False) -> Iterator[str]:
    """NUMA nodes and what is free on each, of ``/v1/assignments``."""
    return _status_table_lines(_NUMA_NODE_COLUMNS, nodes, 0.0, wide=wide)


def _agent_lines(status: dict[str, Any], now: float) -> Iterator[str]:
    link = status["link"]
    runtime = f" to {link['runtime']} {link['runtimeVersion']}" if link["runtime"] else ""
    over = f" over {link['over'].upper()}" if link.get("over") else ""
    state = "ready" if status["ready"] else "NOT READY"
    mode = ", observing only" if status["observe"] else ""
    node = f" on {status['nodeName']}" if status.get("nodeName") else ""
    yield escape_unprintable(
        f"nri-numa {status['version']}{node}: {state}{mode}, link{runtime}{over} {link['state']}, "
        f"up {human_age(status['startedAt'], now)}"
    )
    if link.get("problem"):
        yield from wrap_text(link["problem"], "  ")
    elif not status["ready"] and link["detail"]:
        yield f"  {escape_unprintable(link['detail'])}"
    if link.get("unanswered"):
        yield from wrap_text(link["unanswered"], "  ")
    problem = status["checkpoint"]["problem"]
    if problem:
        yield f"  the state cannot be saved: {escape_unprintable(problem)}"
    counts = [f"{count} {kind}" for kind, count in status["containers"].items() if count]
    total = sum(status["containers"].values())
    yield count_text(total, "container") + (f": {', '.join(counts)}" if counts else "")
    if theirs := status.get("kubeletCPUs"):
        yield f"exclusive by the kubelet's static policy: {cpus_text(theirs)}"
    if contested := status.get("contested"):
        yield (
            f"{count_text(contested, 'container')} whose cpuset the kubelet writes too; "
            "see /v1/kubelet and docs/kubelet.md"
        )
    if differing := status.get("differing"):
        on_exclusive = status.get("intruders")
        yield f"{differing} not as meant" + (
            f", {on_exclusive} of them on exclusive CPUs of others" if on_exclusive else ""
        )


# --- The tables ---------------------------------------------------------------------------------


class _StatusColumn(NamedTuple):
    """A column, its cell of an object at a time, and whether these objects have it at all."""

    column: Column
    cell: Callable[[Object, float], object]
    condition: Callable[[Sequence[Object]], bool] = lambda _: True
    wide_output_only: bool = False


def _status_table_lines(
    shown: Sequence[_StatusColumn], objects: Sequence[Object], now: float, *, wide: bool
) -> Iterator[str]:
    """A table that fits the terminal; columns that had to be left out are named below it."""
    chosen = [one for one in shown if (wide or not one.wide_output_only) and one.condition(objects)]
    made = fit_table(
        [one.column for one in chosen],
        [[one.cell(each, now) for one in chosen] for each in objects],
        None if wide else max_table_width(),
    )
    yield from made.lines
    if made.dropped_columns:
        yield f"(no room for {', '.join(made.dropped_columns)}; -o wide shows all columns)"


def _cell_getter(key: str, text: Callable[[Any], str] = str) -> Callable[[Object, float], object]:
    return lambda one, _: text(one[key]) if one.get(key) else "-"


def _any_row_has(key: str) -> Callable[[Sequence[Object]], bool]:
    return lambda objects: any(one.get(key) not in (None, "") for one in objects)


def _percent_text(percent: float | None) -> str:
    """A question mark where it is not known."""
    return "?" if percent is None else f"{percent:g} %"


def _late_pinning_text(container: Object) -> str:
    """By how much it started before its CPUs were set; over CRI only."""
    late = container.get("late")
    return "?" if late is None else "no" if late <= 0 else f"{late * 1000:.0f} ms"


def _waiting_threads_text(container: Object) -> str:
    tasks = container.get("waiting", {}).get("waitingTasks")
    return "?" if tasks is None else f"{tasks:g}"


def _free_of_capacity_getter(
    available: str, capacity: str, text: Callable[[int], str]
) -> Callable[..., object]:
    """Free of all; a NUMA node without CPUs or without memory is not one that is used up."""
    return lambda n, _: f"{text(n[available])} of {text(n[capacity])}" if n[capacity] else "-"


_NAME_COLUMNS: Final = tuple(
    _StatusColumn(Column(title, CellWrapping.NAME), _cell_getter(title.lower()))
    for title in ("NAMESPACE", "POD", "CONTAINER")
)
_CONTAINER_COLUMNS: Final = (
    *_NAME_COLUMNS,
    _StatusColumn(
        Column("KIND"),
        lambda c, _: (
            " ".join(filter(None, (c["kind"], c.get("reservation"))))
            + ("" if c["preferred"] else "*")
        ),
    ),
    _StatusColumn(
        Column("CPUS", CellWrapping.LIST),
        lambda c, _: (c["cpus"] or c.get("pinned") or "any") + _drift_mark(c, "CPUs"),
    ),
    _StatusColumn(
        Column("MEMS", CellWrapping.LIST, drop_rank=1),
        lambda c, _: (c["mems"] or "any") + _drift_mark(c, "Mems"),
    ),
    _StatusColumn(Column("POLICY", drop_rank=2), lambda c, _: c["policy"]),
    _StatusColumn(Column("AGE", drop_rank=3), lambda c, now: human_age(c["since"], now)),
    _StatusColumn(Column("MEMPOLICY"), _cell_getter("mempolicy"), _any_row_has("mempolicy")),
    _StatusColumn(
        Column("NOW RESERVED", CellWrapping.LIST),
        _cell_getter("reserved"),
        _any_row_has("reserved"),
    ),
    _StatusColumn(Column("LATE"), lambda c, _: _late_pinning_text(c), _any_row_has("late")),
    _StatusColumn(
        Column("LOCAL MEMORY"),
        lambda c, _: _percent_text(c.get("memory", {}).get("localPercent")),
        _any_row_has("memory"),
        wide_output_only=True,
    ),
    _StatusColumn(
        Column("CPU PRESSURE"),
        lambda c, _: _percent_text(c.get("waiting", {}).get("pressurePercent")),
        _any_row_has("waiting"),
        wide_output_only=True,
    ),
    _StatusColumn(
        Column("TASKS WAITING"),
        lambda c, _: _waiting_threads_text(c),
        _any_row_has("waiting"),
        wide_output_only=True,
    ),
    _StatusColumn(Column("NUMA NODES"), _cell_getter("numaNodes"), wide_output_only=True),
    _StatusColumn(Column("QOS"), _cell_getter("qos"), wide_output_only=True),
    _StatusColumn(Column("SMT"), _cell_getter("smt"), wide_output_only=True),
    _StatusColumn(Column("IDLE"), _cell_getter("idle"), wide_output_only=True),
    _StatusColumn(
        Column("CPU ALLOCATED"), _cell_getter("cpuMilli", human_cpu_number), wide_output_only=True
    ),
    _StatusColumn(
        Column("MEMORY ALLOCATED"), _cell_getter("memoryBytes", human_bytes), wide_output_only=True
    ),
    _StatusColumn(Column("REASON"), _cell_getter("reason"), wide_output_only=True),
    _StatusColumn(Column("CONTAINER ID"), _cell_getter("id"), wide_output_only=True),
)
_REJECTION_COLUMNS: Final = (
    *_NAME_COLUMNS,
    _StatusColumn(Column("REASON"), _cell_getter("reason")),
    _StatusColumn(Column("TIMES"), lambda r, _: r.get("count", 1)),
    _StatusColumn(Column("AGO", drop_rank=1), lambda r, now: human_age(r["at"], now)),
)
_NUMA_NODE_COLUMNS: Final = (
    _StatusColumn(Column("NUMA"), lambda n, _: n["id"]),
    _StatusColumn(Column("EXCLUSIVE", CellWrapping.LIST), _cell_getter("exclusive")),
    _StatusColumn(
        Column("KUBELET", CellWrapping.LIST), _cell_getter("kubelet"), _any_row_has("kubelet")
    ),
    _StatusColumn(Column("SHARED", CellWrapping.LIST), _cell_getter("shared")),
    _StatusColumn(Column("RESERVED", CellWrapping.LIST, drop_rank=1), _cell_getter("reserved")),
    _StatusColumn(Column("IDLE", CellWrapping.LIST), _cell_getter("idle"), _any_row_has("idle")),
    _StatusColumn(
        Column("FREE EXCLUSIVE"),
        lambda n, _: n.get("freeExclusiveCPUs", "?") if n["cpuCapacityMilli"] else "-",
    ),
    _StatusColumn(
        Column("CPU FREE"),
        _free_of_capacity_getter("cpuAvailableMilli", "cpuCapacityMilli", human_cpu_number),
    ),
    _StatusColumn(
        Column("FACTOR"),
        lambda n, _: f"{n.get('capacityFactor', 1):g}",
        lambda nodes: any(n.get("capacityFactor", 1) != 1 for n in nodes),
    ),
    _StatusColumn(
        Column("MEMORY FREE"),
        _free_of_capacity_getter(
            "memoryAvailableBytes", "memoryBytes", partial(human_bytes, free=True)
        ),
    ),
)


# --- Containers that have something else than meant ----------------------------------------------


def actual_cpuset_text(actual: Mapping[str, Any], now: float) -> str:
    """``meant 4-7, has 0-7 since 12 s, on exclusive CPUs of shop/db/server``."""
    seconds = max(0.0, now - actual["since"])
    since = f"{int(seconds)} s" if seconds < 60 else human_duration(seconds)
    return escape_unprintable(
        drift_text(actual["text"], since, actual["owners"], given_up=actual["givenUp"])
    )


def _drift_mark(one: Mapping[str, Any], key: str) -> str:
    """Behind ``CPUs`` or ``Mems``: a mark where the container has others, or is not on its own."""
    if key == "CPUs" and one.get("displaced"):
        return DRIFT_MARK
    actual = one.get("actual") or {f"meant{key}": "", "intruder": False}
    return DRIFT_MARK if actual[f"meant{key}"] or (key == "CPUs" and actual["intruder"]) else ""


def _drift_lines(containers: Sequence[Mapping[str, Any]], now: float) -> Iterator[str]:
    """Below the table: what is moving, and each container that differs, the worst first."""
    moving = [one for one in containers if one.get("moving")]
    if moving:
        yield ""
    for one in moving:
        name = f"{one['namespace']}/{one['pod']}/{one['container']}"
        yield from wrap_text(f"{name}: its memory moves {one['moving']}", "", "    ")
    differing = [one for one in containers if one.get("actual") or one.get("displaced")]
    if not differing:
        return
    differing.sort(key=lambda one: not (one.get("actual") or {}).get("intruder"))
    count = len(differing)
    have = "has" if count == 1 else "have"
    yield ""
    yield from wrap_text(
        f"{DRIFT_MARK} {count_text(count, 'container')} {have} something else than meant:",
        "",
        "    ",
    )
    shown = _MAX_DRIFT_LINES if sys.stdout.isatty() else count
    for one in differing[:shown]:
        parts = [displaced_text(one["displaced"])] if one.get("displaced") else []
        parts += [actual_cpuset_text(one["actual"], now)] if one.get("actual") else []
        name = f"{one['namespace']}/{one['pod']}/{one['container']}"
        yield from wrap_text(f"{name}: {'; '.join(parts)}", "  ", "    ")
    if count > shown:
        yield f"  and {count - shown} more"
