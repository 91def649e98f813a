"""``nri-numa status``: who has which CPUs and memory nodes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import click

from nri_numa.cli.client import Client, api_options, client, segment
from nri_numa.cli.common import (
    Failure,
    emit,
    harmless,
    human_duration,
    human_size,
    output_option,
    table,
)


@click.command()
@click.option("-n", "--namespace", metavar="NAME", help="Only containers of this namespace.")
@click.option("--pod", metavar="NAME", help="Only containers of pods of this name.")
@click.option("-w", "--watch", is_flag=True, help="Show it again whenever it changes.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.2, max=3600),
    default=2.0,
    show_default=True,
    help="With --watch: seconds between two looks.",
)
@output_option()
@api_options
@click.pass_context
def status(
    ctx: click.Context,
    namespace: str | None,
    pod: str | None,
    watch: bool,
    interval: float,
    output: str,
    api: str | None,
    token_file: str | None,
    ca_file: str | None,
) -> None:
    """Show the agent, the NUMA nodes, and every container with what it has.

    Exit code 0 when the agent places containers, 1 when it answers but is not ready, 3 when it
    cannot be reached.
    """
    asked = client(api, token_file, ca_file)
    query = "&".join(
        f"{name}={segment(value)}"
        for name, value in (("namespace", namespace), ("pod", pod))
        if value is not None
    )
    if watch:
        if output != "table":
            raise click.UsageError("--watch goes with -o table")
        _watch(asked, query, interval)
    document = fetch(asked, query)
    if output == "table":
        click.echo("\n".join(lines(document, time.time())))
    else:
        emit(document, output)
    if not document["status"]["ready"]:
        ctx.exit(1)


def fetch(asked: Client, query: str = "") -> dict[str, Any]:
    """Status, assignments and refusals in one document."""
    suffix = f"?{query}" if query else ""
    return {
        "status": asked.get("/v1/status"),
        **asked.get(f"/v1/assignments{suffix}"),
        **asked.get("/v1/refusals"),
    }


def _watch(asked: Client, query: str, interval: float) -> None:
    shown = ""
    try:
        while True:
            try:
                text = "\n".join(lines(fetch(asked, query), time.time()))
            except Failure as error:
                text = f"nri-numa: {error.message}\n(trying again)"
            if text != shown:
                click.clear()
                click.echo(text)
                shown = text
            time.sleep(interval)
    except KeyboardInterrupt:
        raise SystemExit(0) from None


def lines(document: dict[str, Any], now: float) -> Iterator[str]:
    """The tables; every line fits the terminal."""
    yield from _head(document["status"], now)
    yield ""
    yield from _nodes(document["numaNodes"])
    yield ""
    containers = document["containers"]
    if containers:
        yield from table(
            ("NAMESPACE", "POD", "CONTAINER", "KIND", "CPUS", "MEMS", "POLICY", "AGE"),
            (_container(one, now) for one in containers),
        )
    else:
        yield "No containers."
    refusals = document["refusals"]
    if refusals:
        yield ""
        yield f"Refused lately ({len(refusals)}); see `nri-numa explain NAMESPACE/POD`:"
        yield from table(
            ("NAMESPACE", "POD", "CONTAINER", "REASON", "AGO"),
            (
                (r["namespace"], r["pod"], r["container"], r["reason"], _age(r["at"], now))
                for r in refusals[:10]
            ),
        )


def _head(status: dict[str, Any], now: float) -> Iterator[str]:
    link = status["link"]
    runtime = f" to {link['runtime']} {link['runtimeVersion']}" if link["runtime"] else ""
    state = "ready" if status["ready"] else "NOT READY"
    mode = ", observing only" if status["observe"] else ""
    yield harmless(
        f"nri-numa {status['version']}: {state}{mode}, link{runtime} {link['state']}, "
        f"up {_age(status['startedAt'], now)}"
    )
    if not status["ready"] and link["detail"]:
        yield f"  {harmless(link['detail'])}"
    problem = status["checkpoint"]["problem"]
    if problem:
        yield f"  the state cannot be saved: {harmless(problem)}"
    counts = [f"{count} {kind}" for kind, count in status["containers"].items() if count]
    total = sum(status["containers"].values())
    yield f"{total} container{'s' if total != 1 else ''}" + (
        f": {', '.join(counts)}" if counts else ""
    )


def _nodes(nodes: list[dict[str, Any]]) -> list[str]:
    return table(
        ("NUMA", "EXCLUSIVE", "SHARED", "RESERVED", "CPU LEFT", "MEMORY LEFT"),
        (
            (
                n["id"],
                n["exclusive"] or "-",
                n["shared"] or "-",
                n["reserved"] or "-",
                f"{_cpus(n['cpuAvailableMilli'])} of {_cpus(n['cpuCapacityMilli'])}",
                f"{human_size(n['memoryAvailableBytes'])} of {human_size(n['memoryBytes'])}",
            )
            for n in nodes
        ),
    )


def _container(one: dict[str, Any], now: float) -> tuple[str, ...]:
    return (
        one["namespace"],
        one["pod"],
        one["container"],
        one["kind"] + ("" if one["preferred"] else "*"),
        one["cpus"] or "any",
        one["mems"] or "any",
        one["policy"],
        _age(one["since"], now),
    )


def _cpus(milli: int) -> str:
    return f"{milli / 1000:.3f}".rstrip("0").rstrip(".")


def _age(moment: float, now: float) -> str:
    return human_duration(now - moment) if moment else "-"
