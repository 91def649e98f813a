"""``nri-numa status``: who has which CPUs and memory nodes."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import Any

import click

from nri_numa.cli import common
from nri_numa.cli import differing as actual
from nri_numa.cli.agent_client import AgentClient, api_options, client, segment
from nri_numa.cli.common import (
    Failure,
    emit,
    human_duration,
    human_size,
    one_line,
    output_option,
    progress,
    table_width,
    terminal_width,
)
from nri_numa.cli.fitting import Column, Kind, fit
from nri_numa.machine.model import counted, cpus_text
from nri_numa.text import harmless

_TOLD = 10
"""Refusals that are shown on a terminal; a pipe gets them all."""

_CONTAINERS = (
    Column("NAMESPACE", Kind.NAME),
    Column("POD", Kind.NAME),
    Column("CONTAINER", Kind.NAME),
    Column("KIND"),
    Column("CPUS", Kind.LIST),
    Column("MEMS", Kind.LIST, spare=1),
    Column("POLICY", spare=2),
    Column("AGE", spare=3),
)
_WIDE = (
    Column("NUMA NODES"),
    Column("QOS"),
    Column("SMT"),
    Column("IDLE"),
    Column("CPU ALLOCATED"),
    Column("MEMORY ALLOCATED"),
    Column("REASON"),
    Column("CONTAINER ID"),
)
_MEMPOLICY = Column("MEMPOLICY")
_LATE = Column("LATE")
_LOCAL = Column("LOCAL MEMORY")
_WAITING = (Column("CPU PRESSURE"), Column("TASKS WAITING"))
_REFUSALS = (
    Column("NAMESPACE", Kind.NAME),
    Column("POD", Kind.NAME),
    Column("CONTAINER", Kind.NAME),
    Column("REASON"),
    Column("TIMES"),
    Column("AGO", spare=1),
)
_NUMA_NODES = (
    Column("NUMA"),
    Column("EXCLUSIVE", Kind.LIST),
    Column("KUBELET", Kind.LIST),
    Column("SHARED", Kind.LIST),
    Column("RESERVED", Kind.LIST, spare=1),
    Column("CPU FREE"),
    Column("FACTOR"),
    Column("MEMORY FREE"),
)


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
    asked = client(api, token_file, ca_file)
    if watch:
        _watch(asked, namespace, pod, interval, output)
    with progress(f"asking {asked.address}"):
        document = fetch(asked, namespace, pod)
    if output in ("table", "wide"):
        shown = lines(document, time.time(), wide=output == "wide", only=_only(namespace, pod))
        click.echo("\n".join(shown))
    elif output == "name":
        for name in dict.fromkeys(f"{c['namespace']}/{c['pod']}" for c in document["containers"]):
            click.echo(harmless(name))
    else:
        emit(document, output)
    if not document["status"]["ready"]:
        ctx.exit(1)


def fetch(asked: AgentClient, namespace: str | None = None, pod: str | None = None) -> Any:
    """Status, assignments and refusals in one document, of one namespace or pod where given."""
    query = "&".join(
        f"{name}={segment(value)}"
        for name, value in (("namespace", namespace), ("pod", pod))
        if value is not None
    )
    document = {
        "status": asked.get("/v1/status"),
        **asked.get(f"/v1/assignments{'?' if query else ''}{query}"),
        **asked.get("/v1/refusals"),
    }
    document["refusals"] = [
        one
        for one in document["refusals"]
        if namespace in (None, one["namespace"]) and pod in (None, one["pod"])
    ]
    return document


def _late(container: dict[str, Any]) -> str:
    """By how much it started before its CPUs were set; over CRI only."""
    late = container.get("late")
    return "?" if late is None else "no" if late <= 0 else f"{late * 1000:.0f} ms"


def _only(namespace: str | None, pod: str | None) -> str:
    """What the answer was narrowed to, behind a noun; empty for everything."""
    told = f" of pod {pod}" if pod is not None else ""
    return harmless(told + (f" in namespace {namespace}" if namespace is not None else ""))


def _watch(
    asked: AgentClient, namespace: str | None, pod: str | None, interval: float, output: str
) -> None:
    shown = ""
    try:
        while True:
            trouble = False
            try:
                document = fetch(asked, namespace, pod)
                if output == "json":
                    text = one_line(document)
                else:
                    wide, only = output == "wide", _only(namespace, pod)
                    text = "\n".join(lines(document, time.time(), wide=wide, only=only))
            except Failure as error:
                trouble, text = True, f"nri-numa: {error.message}\n(trying again)"
            if text != shown:
                if output != "json":
                    click.clear()
                # What reads documents expects one on each line, and nothing else.
                click.echo(text, err=trouble and output == "json")
                shown = text
            time.sleep(interval)
    except KeyboardInterrupt:
        raise SystemExit(0) from None


def lines(
    document: dict[str, Any], now: float, *, wide: bool = False, only: str = ""
) -> Iterator[str]:
    """The tables.

    Args:
        document: as `fetch` made it.
        now: Unix time.
        wide: every column, as wide as it gets.
        only: what the document was narrowed to.
    """
    yield from _head(document["status"], now)
    yield ""
    yield from nodes_table(document["numaNodes"], wide=wide)
    yield ""
    containers = document["containers"]
    if containers:
        mempolicies = any("mempolicy" in one for one in containers)
        late = any("late" in one for one in containers)
        looked = wide and any("memory" in one for one in containers)
        waited = wide and any("waiting" in one for one in containers)
        columns = (
            *_CONTAINERS,
            *((_MEMPOLICY,) if mempolicies else ()),
            *((_LATE,) if late else ()),
            *((_LOCAL,) if looked else ()),
            *(_WAITING if waited else ()),
            *(_WIDE if wide else ()),
        )
        yield from _table(
            columns,
            [
                (
                    *_container(c, now),
                    *((c.get("mempolicy", "-"),) if mempolicies else ()),
                    *((_late(c),) if late else ()),
                    *((_local(c),) if looked else ()),
                    *(_waits(c) if waited else ()),
                    *(_more(c) if wide else ()),
                )
                for c in containers
            ],
            wide=wide,
        )
        yield from actual.legend(containers, now, terminal_width(), whole=not sys.stdout.isatty())
    else:
        yield f"No containers{only}."
    refusals = document["refusals"]
    if refusals:
        told = refusals[:_TOLD] if sys.stdout.isatty() and not wide else refusals
        yield ""
        yield f"Refused lately{only} ({len(refusals)}); see `nri-numa explain NAMESPACE/POD`:"
        yield from _table(
            _REFUSALS,
            [
                (
                    *(r[key] for key in ("namespace", "pod", "container", "reason")),
                    r.get("count", 1),
                    _age(r["at"], now),
                )
                for r in told
            ],
            wide=wide,
        )
        if len(told) < len(refusals):
            yield f"  and {len(refusals) - len(told)} more; -o wide shows all"


def _table(
    columns: Sequence[Column], rows: Sequence[Sequence[object]], *, wide: bool
) -> Iterator[str]:
    """A table that fits the terminal; columns that had to be left out are named below it."""
    width = None if wide else table_width()
    made = fit(columns, rows, width, leave_out=sys.stdout.isatty())
    yield from made.lines
    if made.left_out:
        yield f"(no room for {', '.join(made.left_out)}; -o wide shows all columns)"


def _head(status: dict[str, Any], now: float) -> Iterator[str]:
    link = status["link"]
    runtime = f" to {link['runtime']} {link['runtimeVersion']}" if link["runtime"] else ""
    over = f" over {link['over'].upper()}" if link.get("over") else ""
    state = "ready" if status["ready"] else "NOT READY"
    mode = ", observing only" if status["observe"] else ""
    node = f" on {status['nodeName']}" if status.get("nodeName") else ""
    yield harmless(
        f"nri-numa {status['version']}{node}: {state}{mode}, link{runtime}{over} {link['state']}, "
        f"up {_age(status['startedAt'], now)}"
    )
    if not status["ready"] and link["detail"]:
        yield f"  {harmless(link['detail'])}"
    if link.get("unanswered"):
        yield from textwrap.wrap(
            harmless(link["unanswered"]),
            terminal_width(),
            initial_indent="  ",
            subsequent_indent="  ",
        )
    problem = status["checkpoint"]["problem"]
    if problem:
        yield f"  the state cannot be saved: {harmless(problem)}"
    counts = [f"{count} {kind}" for kind, count in status["containers"].items() if count]
    total = sum(status["containers"].values())
    yield f"{total} container{'s' if total != 1 else ''}" + (
        f": {', '.join(counts)}" if counts else ""
    )
    if theirs := status.get("kubeletCPUs"):
        yield f"exclusive by the kubelet's static policy: {cpus_text(theirs)}"
    if contested := status.get("contested"):
        yield (
            f"{counted(contested, 'container')} whose cpuset the kubelet writes too; "
            "see /v1/kubelet and docs/kubelet.md"
        )
    if differing := status.get("differing"):
        intruders = status.get("intruders")
        yield f"{differing} not as meant" + (
            f", {intruders} of them on exclusive CPUs of others" if intruders else ""
        )


def nodes_table(nodes: list[dict[str, Any]], *, wide: bool = False) -> Iterator[str]:
    """NUMA nodes and what is free on each, as ``/v1/assignments`` tells them."""
    theirs = any(n.get("kubelet") for n in nodes)
    lowered = any(n.get("capacityFactor", 1) != 1 for n in nodes)
    without = {*(() if theirs else ("KUBELET",)), *(() if lowered else ("FACTOR",))}
    return _table(
        tuple(one for one in _NUMA_NODES if one.title not in without),
        [
            (
                n["id"],
                n["exclusive"] or "-",
                *((n["kubelet"] or "-",) if theirs else ()),
                n["shared"] or "-",
                n["reserved"] or "-",
                # A NUMA node without CPUs or without memory is not one that is used up.
                f"{_cpus(n['cpuAvailableMilli'])} of {_cpus(n['cpuCapacityMilli'])}"
                if n["cpuCapacityMilli"]
                else "-",
                *((f"{n.get('capacityFactor', 1):g}",) if lowered else ()),
                f"{human_size(n['memoryAvailableBytes'])} of {human_size(n['memoryBytes'])}"
                if n["memoryBytes"]
                else "-",
            )
            for n in nodes
        ],
        wide=wide,
    )


def _container(one: dict[str, Any], now: float) -> tuple[str, ...]:
    return (
        one["namespace"],
        one["pod"],
        one["container"],
        one["kind"] + ("" if one["preferred"] else "*"),
        (one["cpus"] or one.get("pinned") or "any") + actual.mark(one, "CPUs"),
        (one["mems"] or "any") + actual.mark(one, "Mems"),
        one["policy"],
        _age(one["since"], now),
    )


def _more(one: dict[str, Any]) -> tuple[str, ...]:
    """What -o wide adds."""
    return (
        one["numaNodes"] or "-",
        one["qos"] or "-",
        one["smt"] or "-",
        one["idle"] or "-",
        _cpus(one["cpuMilli"]) if one["cpuMilli"] else "-",
        human_size(one["memoryBytes"]) if one["memoryBytes"] else "-",
        one["reason"] or "-",
        one["id"],
    )


def _local(one: dict[str, Any]) -> str:
    """The part of its memory on its own NUMA nodes; a question mark where that is not known."""
    percent = one.get("memory", {}).get("localPercent")
    return "?" if percent is None else f"{percent:g} %"


def _waits(one: dict[str, Any]) -> tuple[str, str]:
    """Its CPU pressure, and how many of its threads wait; question marks where not known."""
    waiting = one.get("waiting", {})
    pressure, tasks = waiting.get("pressurePercent"), waiting.get("waitingTasks")
    return (
        "?" if pressure is None else f"{pressure:g} %",
        "?" if tasks is None else f"{tasks:g}",
    )


def _cpus(milli: int) -> str:
    return f"{milli / 1000:.3f}".rstrip("0").rstrip(".")


def _age(moment: float, now: float) -> str:
    return human_duration(now - moment) if moment else "-"
