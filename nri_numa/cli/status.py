"""``nri-numa status``: who has which CPUs and memory nodes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn

import click

from nri_numa.cli import common
from nri_numa.cli.agent_client import AgentClient, client, segment
from nri_numa.cli.common import Failure, api_options, config_option, output_option, progress
from nri_numa.cli.output import (
    Column,
    Kind,
    emit,
    fit,
    human_age,
    human_duration,
    table_width,
    wrapped,
)
from nri_numa.engine.explain.sentences import actual_text, displaced_text
from nri_numa.model.machine import counted, cpus_text, human_cpus
from nri_numa.text import harmless, human_bytes

Object = dict[str, Any]

_REFUSALS_SHOWN: Final = 10
"""On a terminal; a pipe gets them all."""
_DIFFERING_SHOWN: Final = 20
MARK: Final = "!"
"""Stands behind CPUs or memory nodes that are meant and not there."""


@click.command()
@click.option(
    "-n",
    "--namespace",
    metavar="NAME",
    shell_complete=common.namespaces,
    help="Only containers and refusals of this namespace.  [default: all namespaces]",
)
@click.option(
    "-A", "--all-namespaces", is_flag=True, help="Those of all namespaces, which is the default."
)
@click.option(
    "--pod",
    metavar="NAME",
    shell_complete=common.pods,
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
            f"-A and --namespace {harmless(namespace)} contradict each other; expected one of them"
        )
    for option, value in (("--namespace", namespace), ("--pod", pod)):
        if value is not None and (not value or "/" in value):
            raise click.UsageError(f"{option} is {value!r}; expected a name without a slash")
    if watch and output not in ("table", "wide", "json"):
        raise click.UsageError(f"--watch goes with -o table, wide or json, not with -o {output}")
    agent = client(api, token_file, ca_file, config_path)
    only = f" of pod {pod}" if pod is not None else ""
    only += f" in namespace {namespace}" if namespace is not None else ""

    def tables(document: dict[str, Any]) -> str:
        wide = output == "wide"
        return "\n".join(lines(document, time.time(), wide=wide, only=harmless(only)))

    if watch:
        # In ASCII nothing in a document ends a line.
        form = json.dumps if output == "json" else tables
        _watch(lambda: form(fetch(agent, namespace, pod)), interval, documents=output == "json")
    with progress(f"asking {agent.address}"):
        document = fetch(agent, namespace, pod)
    if output in ("table", "wide"):
        click.echo(tables(document))
    elif output == "name":
        for name in dict.fromkeys(f"{c['namespace']}/{c['pod']}" for c in document["containers"]):
            click.echo(harmless(name))
    else:
        emit(document, output)
    if not document["status"]["ready"]:
        ctx.exit(1)


def fetch(agent: AgentClient, namespace: str | None = None, pod: str | None = None) -> Any:
    """Status, assignments and refusals in one document, of one namespace or pod where given."""
    query = "&".join(
        f"{name}={segment(value)}"
        for name, value in (("namespace", namespace), ("pod", pod))
        if value is not None
    )
    document = {
        "status": agent.get("/v1/status"),
        **agent.get(f"/v1/assignments{'?' if query else ''}{query}"),
        **agent.get("/v1/refusals"),
    }
    document["refusals"] = [
        one
        for one in document["refusals"]
        if namespace in (None, one["namespace"]) and pod in (None, one["pod"])
    ]
    return document


def _watch(look: Callable[[], str], interval: float, *, documents: bool) -> NoReturn:
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


def lines(
    document: dict[str, Any], now: float, *, wide: bool = False, only: str = ""
) -> Iterator[str]:
    """The tables of a document of `fetch`, which was narrowed to ``only``."""
    yield from _head(document["status"], now)
    yield ""
    yield from nodes_table(document["numaNodes"], wide=wide)
    yield ""
    containers = document["containers"]
    if containers:
        yield from _table(_CONTAINERS, containers, now, wide=wide)
        yield from _legend(containers, now)
    else:
        yield f"No containers{only}."
    refusals = document["refusals"]
    if refusals:
        shown = refusals[:_REFUSALS_SHOWN] if sys.stdout.isatty() and not wide else refusals
        yield ""
        yield f"Refused lately{only} ({len(refusals)}); see `nri-numa explain NAMESPACE/POD`:"
        yield from _table(_REFUSALS, shown, now, wide=wide)
        if len(shown) < len(refusals):
            yield f"  and {len(refusals) - len(shown)} more; -o wide shows all"


def nodes_table(nodes: Sequence[Object], *, wide: bool = False) -> Iterator[str]:
    """NUMA nodes and what is free on each, of ``/v1/assignments``."""
    return _table(_NUMA_NODES, nodes, 0.0, wide=wide)


def _head(status: dict[str, Any], now: float) -> Iterator[str]:
    link = status["link"]
    runtime = f" to {link['runtime']} {link['runtimeVersion']}" if link["runtime"] else ""
    over = f" over {link['over'].upper()}" if link.get("over") else ""
    state = "ready" if status["ready"] else "NOT READY"
    mode = ", observing only" if status["observe"] else ""
    node = f" on {status['nodeName']}" if status.get("nodeName") else ""
    yield harmless(
        f"nri-numa {status['version']}{node}: {state}{mode}, link{runtime}{over} {link['state']}, "
        f"up {human_age(status['startedAt'], now)}"
    )
    if link.get("problem"):
        yield from wrapped(link["problem"], "  ")
    elif not status["ready"] and link["detail"]:
        yield f"  {harmless(link['detail'])}"
    if link.get("unanswered"):
        yield from wrapped(link["unanswered"], "  ")
    problem = status["checkpoint"]["problem"]
    if problem:
        yield f"  the state cannot be saved: {harmless(problem)}"
    counts = [f"{count} {kind}" for kind, count in status["containers"].items() if count]
    total = sum(status["containers"].values())
    yield counted(total, "container") + (f": {', '.join(counts)}" if counts else "")
    if theirs := status.get("kubeletCPUs"):
        yield f"exclusive by the kubelet's static policy: {cpus_text(theirs)}"
    if contested := status.get("contested"):
        yield (
            f"{counted(contested, 'container')} whose cpuset the kubelet writes too; "
            "see /v1/kubelet and docs/kubelet.md"
        )
    if differing := status.get("differing"):
        on_exclusive = status.get("intruders")
        yield f"{differing} not as meant" + (
            f", {on_exclusive} of them on exclusive CPUs of others" if on_exclusive else ""
        )


# --- The tables ---------------------------------------------------------------------------------


class _Shown(NamedTuple):
    """A column, its cell of an object at a time, and whether these objects have it at all."""

    column: Column
    cell: Callable[[Object, float], object]
    when: Callable[[Sequence[Object]], bool] = lambda _: True
    wide: bool = False


def _table(
    shown: Sequence[_Shown], objects: Sequence[Object], now: float, *, wide: bool
) -> Iterator[str]:
    """A table that fits the terminal; columns that had to be left out are named below it."""
    chosen = [one for one in shown if (wide or not one.wide) and one.when(objects)]
    made = fit(
        [one.column for one in chosen],
        [[one.cell(each, now) for one in chosen] for each in objects],
        None if wide else table_width(),
    )
    yield from made.lines
    if made.left_out:
        yield f"(no room for {', '.join(made.left_out)}; -o wide shows all columns)"


def _key(key: str, text: Callable[[Any], str] = str) -> Callable[[Object, float], object]:
    return lambda one, _: text(one[key]) if one.get(key) else "-"


def _have(key: str) -> Callable[[Sequence[Object]], bool]:
    return lambda objects: any(one.get(key) not in (None, "") for one in objects)


def _per_cent(percent: float | None) -> str:
    """A question mark where it is not known."""
    return "?" if percent is None else f"{percent:g} %"


def _late(container: Object) -> str:
    """By how much it started before its CPUs were set; over CRI only."""
    late = container.get("late")
    return "?" if late is None else "no" if late <= 0 else f"{late * 1000:.0f} ms"


def _tasks(container: Object) -> str:
    tasks = container.get("waiting", {}).get("waitingTasks")
    return "?" if tasks is None else f"{tasks:g}"


def _free(available: str, capacity: str, text: Callable[[int], str]) -> Callable[..., object]:
    """Free of all; a NUMA node without CPUs or without memory is not one that is used up."""
    return lambda n, _: f"{text(n[available])} of {text(n[capacity])}" if n[capacity] else "-"


_NAMES: Final = tuple(
    _Shown(Column(title, Kind.NAME), _key(title.lower()))
    for title in ("NAMESPACE", "POD", "CONTAINER")
)
_CONTAINERS: Final = (
    *_NAMES,
    _Shown(Column("KIND"), lambda c, _: c["kind"] + ("" if c["preferred"] else "*")),
    _Shown(
        Column("CPUS", Kind.LIST),
        lambda c, _: (c["cpus"] or c.get("pinned") or "any") + _mark(c, "CPUs"),
    ),
    _Shown(
        Column("MEMS", Kind.LIST, spare=1), lambda c, _: (c["mems"] or "any") + _mark(c, "Mems")
    ),
    _Shown(Column("POLICY", spare=2), lambda c, _: c["policy"]),
    _Shown(Column("AGE", spare=3), lambda c, now: human_age(c["since"], now)),
    _Shown(Column("MEMPOLICY"), _key("mempolicy"), _have("mempolicy")),
    _Shown(Column("LATE"), lambda c, _: _late(c), _have("late")),
    _Shown(
        Column("LOCAL MEMORY"),
        lambda c, _: _per_cent(c.get("memory", {}).get("localPercent")),
        _have("memory"),
        wide=True,
    ),
    _Shown(
        Column("CPU PRESSURE"),
        lambda c, _: _per_cent(c.get("waiting", {}).get("pressurePercent")),
        _have("waiting"),
        wide=True,
    ),
    _Shown(Column("TASKS WAITING"), lambda c, _: _tasks(c), _have("waiting"), wide=True),
    _Shown(Column("NUMA NODES"), _key("numaNodes"), wide=True),
    _Shown(Column("QOS"), _key("qos"), wide=True),
    _Shown(Column("SMT"), _key("smt"), wide=True),
    _Shown(Column("IDLE"), _key("idle"), wide=True),
    _Shown(Column("CPU ALLOCATED"), _key("cpuMilli", human_cpus), wide=True),
    _Shown(Column("MEMORY ALLOCATED"), _key("memoryBytes", human_bytes), wide=True),
    _Shown(Column("REASON"), _key("reason"), wide=True),
    _Shown(Column("CONTAINER ID"), _key("id"), wide=True),
)
_REFUSALS: Final = (
    *_NAMES,
    _Shown(Column("REASON"), _key("reason")),
    _Shown(Column("TIMES"), lambda r, _: r.get("count", 1)),
    _Shown(Column("AGO", spare=1), lambda r, now: human_age(r["at"], now)),
)
_NUMA_NODES: Final = (
    _Shown(Column("NUMA"), lambda n, _: n["id"]),
    _Shown(Column("EXCLUSIVE", Kind.LIST), _key("exclusive")),
    _Shown(Column("KUBELET", Kind.LIST), _key("kubelet"), _have("kubelet")),
    _Shown(Column("SHARED", Kind.LIST), _key("shared")),
    _Shown(Column("RESERVED", Kind.LIST, spare=1), _key("reserved")),
    _Shown(Column("IDLE", Kind.LIST), _key("idle"), _have("idle")),
    _Shown(
        Column("FREE EXCLUSIVE"),
        lambda n, _: n.get("freeExclusiveCPUs", "?") if n["cpuCapacityMilli"] else "-",
    ),
    _Shown(Column("CPU FREE"), _free("cpuAvailableMilli", "cpuCapacityMilli", human_cpus)),
    _Shown(
        Column("FACTOR"),
        lambda n, _: f"{n.get('capacityFactor', 1):g}",
        lambda nodes: any(n.get("capacityFactor", 1) != 1 for n in nodes),
    ),
    _Shown(
        Column("MEMORY FREE"),
        _free("memoryAvailableBytes", "memoryBytes", partial(human_bytes, free=True)),
    ),
)


# --- Containers that have something else than meant ----------------------------------------------


def actual_since(actual: Mapping[str, Any], now: float) -> str:
    """``meant 4-7, has 0-7 since 12 s, on exclusive CPUs of shop/db/server``."""
    seconds = max(0.0, now - actual["since"])
    since = f"{int(seconds)} s" if seconds < 60 else human_duration(seconds)
    return harmless(
        actual_text(actual["text"], since, actual["owners"], given_up=actual["givenUp"])
    )


def _mark(one: Mapping[str, Any], key: str) -> str:
    """Behind ``CPUs`` or ``Mems``: a mark where the container has others, or is not on its own."""
    if key == "CPUs" and one.get("displaced"):
        return MARK
    actual = one.get("actual") or {f"meant{key}": "", "intruder": False}
    return MARK if actual[f"meant{key}"] or (key == "CPUs" and actual["intruder"]) else ""


def _legend(containers: Sequence[Mapping[str, Any]], now: float) -> Iterator[str]:
    """Below the table: what is moving, and each container that differs, the worst first."""
    moving = [one for one in containers if one.get("moving")]
    if moving:
        yield ""
    for one in moving:
        name = f"{one['namespace']}/{one['pod']}/{one['container']}"
        yield from wrapped(f"{name}: its memory moves {one['moving']}", "", "    ")
    differing = [one for one in containers if one.get("actual") or one.get("displaced")]
    if not differing:
        return
    differing.sort(key=lambda one: not (one.get("actual") or {}).get("intruder"))
    count = len(differing)
    have = "has" if count == 1 else "have"
    yield ""
    yield from wrapped(
        f"{MARK} {counted(count, 'container')} {have} something else than meant:", "", "    "
    )
    shown = _DIFFERING_SHOWN if sys.stdout.isatty() else count
    for one in differing[:shown]:
        parts = [displaced_text(one["displaced"])] if one.get("displaced") else []
        parts += [actual_since(one["actual"], now)] if one.get("actual") else []
        name = f"{one['namespace']}/{one['pod']}/{one['container']}"
        yield from wrapped(f"{name}: {'; '.join(parts)}", "  ", "    ")
    if count > shown:
        yield f"  and {count - shown} more"
