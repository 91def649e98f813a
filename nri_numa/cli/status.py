"""``nri-numa status``: CPUs and memory nodes of all containers."""

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

_MAX_REJECTIONS_SHOWN: Final = 10
"""Maximum on a terminal; a pipe gets all rejections."""
_MAX_DRIFT_LINES: Final = 20
DRIFT_MARK: Final = "!"
"""Mark after desired CPUs or memory nodes that differ from the actual ones."""


@click.command("status")
@click.option(
    "-n",
    "--namespace",
    metavar="NAME",
    shell_complete=complete_namespaces,
    help="Show only this namespace.  [default: all namespaces]",
)
@click.option("-A", "--all-namespaces", is_flag=True, help="Show all namespaces (the default).")
@click.option(
    "--pod", metavar="NAME", shell_complete=complete_pods, help="Show only pods of this name."
)
@click.option("-w", "--watch", is_flag=True, help="Show it again at each change.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.2, max=3600),
    default=2.0,
    show_default=True,
    help="With --watch: seconds between two updates.",
)
@output_option("table", "wide", "name", "json", "yaml")
@config_option
@api_options
@click.pass_context
def show_status(
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
    """Show the agent, the NUMA nodes, and the CPUs and memory nodes of each container.

    -o wide shows every column, however long the lines are. -o name prints NAMESPACE/POD of each pod
    on this node, as explain takes it. With --watch, -o json prints one document per line.

    Exit code 0 if the agent places containers, 1 if it answers but is not ready, 3 if it cannot be
    reached.
    """
    if all_namespaces and namespace is not None:
        text = f"-A and --namespace {namespace} contradict each other; expected one of them"
        raise click.UsageError(escape_unprintable(text))
    for option, value in (("--namespace", namespace), ("--pod", pod)):
        if value is not None and (not value or "/" in value):
            raise click.UsageError(f"{option} is {value!r}; expected a name without a slash")
    if watch and output not in ("table", "wide", "json"):
        raise click.UsageError(f"--watch goes with -o table, wide or json, not with -o {output}")
    agent = new_agent_client(api, token_file, ca_file, config_path)
    filter_text = f" of pod {pod}" if pod is not None else ""
    filter_text += f" in namespace {namespace}" if namespace is not None else ""
    filter_text = escape_unprintable(filter_text)

    def render_status(document: dict[str, Any]) -> str:
        lines = status_lines(document, time.time(), output=output, filter_text=filter_text)
        return "\n".join(lines)

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
    """Fetch status, assignments and rejections in one document, of one namespace or pod if set."""
    query = "&".join(
        f"{name}={quote_path_segment(value)}"
        for name, value in (("namespace", namespace), ("pod", pod))
        if value is not None
    )
    document = {
        "status": agent.get_document("/v1/status"),
        **agent.get_document(f"/v1/assignments{'?' if query else ''}{query}"),
        **agent.get_document("/v1/rejections"),
    }
    document["rejections"] = [
        r
        for r in document["rejections"]
        if namespace in (None, r["namespace"]) and pod in (None, r["pod"])
    ]
    return document


def _reprint_text_on_change(
    render: Callable[[], str], interval: float, *, documents: bool
) -> NoReturn:
    """Print the text whenever it changes; a reader of documents gets only one document a line."""
    previous = ""
    try:
        while True:
            is_failure = False
            try:
                text = render()
            except Failure as error:
                is_failure, text = True, f"nri-numa: {error.message}\n(retrying)"
            if text != previous:
                if not documents:
                    click.clear()
                click.echo(text, err=is_failure and documents)
                previous = text
            time.sleep(interval)
    except KeyboardInterrupt:
        raise SystemExit(0) from None


def status_lines(
    document: dict[str, Any], current_time: float, *, output: str = "table", filter_text: str = ""
) -> Iterator[str]:
    """Yield the tables of `fetch_status_document`; ``filter_text`` is the clause of its filter."""
    yield from _agent_lines(document["status"], current_time)
    yield ""
    yield from numa_node_table_lines(document["numaNodes"], output=output)
    yield ""
    containers = document["containers"]
    if containers:
        yield from _status_table_lines(_CONTAINER_COLUMNS, containers, current_time, output=output)
        yield from _drift_lines(containers, current_time)
    else:
        yield f"No containers{filter_text}."
    rejections = document["rejections"]
    if rejections:
        is_limited = sys.stdout.isatty() and output != "wide"
        rows = rejections[:_MAX_REJECTIONS_SHOWN] if is_limited else rejections
        yield ""
        heading = f"Recent rejections{filter_text} ({len(rejections)})"
        yield f"{heading}; see `nri-numa explain NAMESPACE/POD`:"
        yield from _status_table_lines(_REJECTION_COLUMNS, rows, current_time, output)
        if len(rows) < len(rejections):
            yield f"  and {len(rejections) - len(rows)} more; -o wide shows all"


def numa_node_table_lines(nodes: Sequence[Object], *, output: str = "table") -> Iterator[str]:
    """Return the table of NUMA nodes with their free resources, of ``/v1/assignments``."""
    return _status_table_lines(_NUMA_NODE_COLUMNS, nodes, 0.0, output)


def _agent_lines(status: dict[str, Any], current_time: float) -> Iterator[str]:
    link = status["link"]
    runtime = f" to {link['runtime']} {link['runtimeVersion']}" if link["runtime"] else ""
    runtime += f" over {link['interface'].upper()}" if link.get("interface") else ""
    state = "ready" if status["ready"] else "NOT READY"
    mode = ", observing only" if status["observe"] else ""
    node = f" on {status['nodeName']}" if status.get("nodeName") else ""
    yield escape_unprintable(
        f"nri-numa {status['version']}{node}: {state}{mode}, link{runtime} {link['state']}, "
        f"up {human_age(status['startedAt'], current_time)}"
    )
    if link.get("problem"):
        yield from wrap_text(link["problem"], "  ")
    elif not status["ready"] and link["detail"]:
        yield f"  {escape_unprintable(link['detail'])}"
    if link.get("pendingRegistration"):
        yield from wrap_text(link["pendingRegistration"], "  ")
    problem = status["checkpoint"]["problem"]
    if problem:
        yield f"  the state cannot be saved: {escape_unprintable(problem)}"
    counts = [f"{count} {kind}" for kind, count in status["containers"].items() if count]
    total = sum(status["containers"].values())
    yield count_text(total, "container") + (f": {', '.join(counts)}" if counts else "")
    if kubelet_cpus := status.get("kubeletCPUs"):
        yield f"exclusive by the kubelet's static policy: {cpus_text(kubelet_cpus)}"
    if conflicts := status.get("kubeletConflicts"):
        yield (
            f"{count_text(conflicts, 'container')} whose cpuset the kubelet also writes; "
            "see /v1/kubelet and docs/kubelet.md"
        )
    if drifted := status.get("drifted"):
        on_exclusive = status.get("onExclusiveCPUs")
        suffix = f", {on_exclusive} of them on exclusive CPUs of others" if on_exclusive else ""
        yield f"{count_text(drifted, 'container')} drifted{suffix}"


# --- The tables ---------------------------------------------------------------------------------


class _StatusColumn(NamedTuple):
    """A column, its cell for an object at a time, and the condition for showing the column."""

    column: Column
    cell: Callable[[Object, float], object]
    condition: Callable[[Sequence[Object]], bool] = lambda _: True
    wide_output_only: bool = False


def _status_table_lines(
    definitions: Sequence[_StatusColumn],
    objects: Sequence[Object],
    current_time: float,
    output: str,
) -> Iterator[str]:
    """Yield a table that fits the terminal; the dropped columns are named below it."""
    columns, width = [c for c in definitions if c.condition(objects)], None
    if output != "wide":
        columns, width = [c for c in columns if not c.wide_output_only], max_table_width()
    rows = [[c.cell(document, current_time) for c in columns] for document in objects]
    table = fit_table([c.column for c in columns], rows, width)
    yield from table.lines
    if table.dropped_columns:
        yield f"(columns not shown: {', '.join(table.dropped_columns)}; -o wide shows all)"


def _cell_getter(key: str, text: Callable[[Any], str] = str) -> Callable[[Object, float], object]:
    return lambda c, _: text(c[key]) if c.get(key) else "-"


def _any_row_has(key: str) -> Callable[[Sequence[Object]], bool]:
    return lambda objects: any(o.get(key) not in (None, "") for o in objects)


def _percent_text(percent: float | None) -> str:
    """Format a percentage; a question mark if it is not known."""
    return "?" if percent is None else f"{percent:g} %"


def _start_delay_text(container: Object) -> str:
    """Return the delay between a container's start and its pinning; over CRI only."""
    delay_s = container.get("startDelay")
    return "?" if delay_s is None else "no" if delay_s <= 0 else f"{delay_s * 1000:.0f} ms"


def _waiting_threads_text(container: Object) -> str:
    tasks = container.get("cpuPressure", {}).get("waitingTasks")
    return "?" if tasks is None else f"{tasks:g}"


def _free_of_capacity_getter(
    available: str, capacity: str, text: Callable[[int], str]
) -> Callable[..., object]:
    """Return the getter of a cell: free of capacity, or a dash if the NUMA node has none."""
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
            " ".join(filter(None, (c["kind"], c.get("reservation")))) + "*" * (not c["aligned"])
        ),
    ),
    _StatusColumn(
        Column("CPUS", CellWrapping.LIST),
        lambda c, _: (c["cpus"] or c.get("foreignCPUs") or "any") + _drift_mark(c, "CPUs"),
    ),
    _StatusColumn(
        Column("MEMS", CellWrapping.LIST, drop_rank=1),
        lambda c, _: (c["mems"] or "any") + _drift_mark(c, "Mems"),
    ),
    _StatusColumn(Column("POLICY", drop_rank=2), lambda c, _: c["policy"]),
    _StatusColumn(Column("AGE", drop_rank=3), lambda c, t: human_age(c["assignedAt"], t)),
    _StatusColumn(Column("MEMPOLICY"), _cell_getter("mempolicy"), _any_row_has("mempolicy")),
    _StatusColumn(
        Column("NOW RESERVED", CellWrapping.LIST),
        _cell_getter("reserved"),
        _any_row_has("reserved"),
    ),
    _StatusColumn(
        Column("START DELAY"), lambda c, _: _start_delay_text(c), _any_row_has("startDelay")
    ),
    _StatusColumn(
        Column("LOCAL MEMORY"),
        lambda c, _: _percent_text(c.get("memory", {}).get("localPercent")),
        _any_row_has("memory"),
        wide_output_only=True,
    ),
    _StatusColumn(
        Column("CPU PRESSURE"),
        lambda c, _: _percent_text(c.get("cpuPressure", {}).get("pressurePercent")),
        _any_row_has("cpuPressure"),
        wide_output_only=True,
    ),
    _StatusColumn(
        Column("WAITING TASKS"),
        lambda c, _: _waiting_threads_text(c),
        _any_row_has("cpuPressure"),
        wide_output_only=True,
    ),
    _StatusColumn(Column("NUMA NODES"), _cell_getter("numaNodes"), wide_output_only=True),
    _StatusColumn(Column("QOS"), _cell_getter("qos"), wide_output_only=True),
    _StatusColumn(Column("SMT"), _cell_getter("smt"), wide_output_only=True),
    _StatusColumn(Column("IDLE SIBLINGS"), _cell_getter("idleSiblings"), wide_output_only=True),
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
    _StatusColumn(Column("COUNT"), lambda r, _: r.get("count", 1)),
    _StatusColumn(Column("LAST SEEN", drop_rank=1), lambda r, t: human_age(r["lastTime"], t)),
)
_NUMA_NODE_COLUMNS: Final = (
    _StatusColumn(Column("NUMA NODE"), lambda n, _: n["id"]),
    _StatusColumn(Column("EXCLUSIVE", CellWrapping.LIST), _cell_getter("exclusive")),
    _StatusColumn(
        Column("KUBELET", CellWrapping.LIST), _cell_getter("kubelet"), _any_row_has("kubelet")
    ),
    _StatusColumn(Column("SHARED", CellWrapping.LIST), _cell_getter("shared")),
    _StatusColumn(Column("RESERVED", CellWrapping.LIST, drop_rank=1), _cell_getter("reserved")),
    _StatusColumn(
        Column("IDLE SIBLINGS", CellWrapping.LIST),
        _cell_getter("idleSiblings"),
        _any_row_has("idleSiblings"),
    ),
    _StatusColumn(
        Column("FREE EXCLUSIVE"),
        lambda n, _: n.get("freeExclusiveCPUs", "?") if n["cpuCapacityMilli"] else "-",
    ),
    _StatusColumn(
        Column("CPU FREE"),
        _free_of_capacity_getter("cpuFreeMilli", "cpuCapacityMilli", human_cpu_number),
    ),
    _StatusColumn(
        Column("CAPACITY FACTOR"),
        lambda n, _: f"{n.get('capacityFactor', 1):g}",
        lambda nodes: any(n.get("capacityFactor", 1) != 1 for n in nodes),
    ),
    _StatusColumn(
        Column("MEMORY FREE"),
        _free_of_capacity_getter("memoryFreeBytes", "memoryBytes", partial(human_bytes, free=True)),
    ),
)


# --- Containers whose actual cpuset differs from the desired one ---------------------------------


def actual_cpuset_text(actual: Mapping[str, Any], current_time: float) -> str:
    """Return ``desired 4-7, actual 0-7 since 12 s, on exclusive CPUs of shop/db/server``."""
    seconds = max(0.0, current_time - actual["observedAt"])
    duration = f"{int(seconds)} s" if seconds < 60 else human_duration(seconds)
    is_abandoned = actual["repairsAbandoned"]
    text = drift_text(actual["text"], duration, actual["holders"], is_abandoned=is_abandoned)
    return escape_unprintable(text)


def _drift_mark(container: Mapping[str, Any], key: str) -> str:
    """Return the mark for ``CPUs`` or ``Mems`` if they differ, or if the CPUs are displaced."""
    if key == "CPUs" and container.get("displaced"):
        return DRIFT_MARK
    actual = container.get("actual") or {f"desired{key}": "", "onExclusiveCPUs": False}
    is_on_exclusive = key == "CPUs" and actual["onExclusiveCPUs"]
    return DRIFT_MARK if actual[f"desired{key}"] or is_on_exclusive else ""


def _drift_lines(containers: Sequence[Mapping[str, Any]], current_time: float) -> Iterator[str]:
    """Yield migrations and drifted containers, those on exclusive CPUs of others first."""
    migrations = [c for c in containers if c.get("migration")]
    if migrations:
        yield ""
    for c in migrations:
        name = f"{c['namespace']}/{c['pod']}/{c['container']}"
        yield from wrap_text(f"{name}: its memory migrates {c['migration']}", "", "    ")
    drifted = [c for c in containers if c.get("actual") or c.get("displaced")]
    if not drifted:
        return
    drifted.sort(key=lambda c: not (c.get("actual") or {}).get("onExclusiveCPUs"))
    count = len(drifted)
    yield ""
    yield from wrap_text(f"{DRIFT_MARK} {count_text(count, 'container')} drifted:", "", "    ")
    max_lines = _MAX_DRIFT_LINES if sys.stdout.isatty() else count
    for c in drifted[:max_lines]:
        parts = [displaced_text(c["displaced"])] if c.get("displaced") else []
        parts += [actual_cpuset_text(c["actual"], current_time)] if c.get("actual") else []
        name = f"{c['namespace']}/{c['pod']}/{c['container']}"
        yield from wrap_text(f"{name}: {'; '.join(parts)}", "  ", "    ")
    if count > max_lines:
        yield f"  and {count - max_lines} more"
