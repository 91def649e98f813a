"""``nri-numa release``: give every container back what it would have without us."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from nri_numa.cli.common import (
    Mistake,
    config_option,
    config_path,
    describe,
    emit,
    friendly,
    output_option,
    progress,
    sysfs_option,
    table,
)
from nri_numa.errors import ConfigError
from nri_numa.text import harmless

if TYPE_CHECKING:
    from nri_numa.config import AgentConfig
    from nri_numa.node.give_back import GivenBack, Report


@click.command()
@config_option
@click.option("--nri-socket", metavar="PATH", help="Unix socket of the runtime's NRI.")
@click.option("--state-dir", metavar="DIR", help="Directory of the checkpoint.")
@sysfs_option
@click.option("--dry-run", is_flag=True, help="Say what would be done, and change nothing.")
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    help="How long the runtime may take to let us in.",
)
@click.option("--stay", is_flag=True, help="Then wait to be stopped, as a DaemonSet's pod must.")
@output_option()
@click.pass_context
def release(
    ctx: click.Context,
    config_path: str | None,
    nri_socket: str | None,
    state_dir: str | None,
    sysfs_root: str | None,
    dry_run: bool,
    timeout: float,
    stay: bool,
    output: str,
) -> None:
    """Give every container back what it would have without nri-numa.

    That is all CPUs and all memory nodes of the machine, and the CPU limit that was lifted for
    containers with exclusive CPUs. Containers that somebody else pinned are left alone.

    Stop the agent first: a running one is named, whatever its state directory, and nothing is
    done. Running it again does no harm. Exit code 1 when an agent runs or a container could not be
    released, 3 when the runtime cannot be reached.
    """
    import asyncio
    import signal

    from nri_numa.node import daemon
    from nri_numa.node import give_back as releasing

    flags: dict[str, object] = {
        "runtime.nriSocket": nri_socket,
        "stateDir": state_dir,
        "sysfsRoot": sysfs_root,
    }
    config = _load(config_path, flags)
    ends = (signal.SIGTERM, signal.SIGINT)
    if stay and dry_run:
        raise click.UsageError("--stay goes with a real release, not with --dry-run")
    with friendly(), progress("asking the runtime") as at:
        report = asyncio.run(
            releasing.release(
                config,
                identity=daemon.identity(config),
                dry_run=dry_run,
                timeout=timeout,
                waiting=lambda: at("waiting for the runtime, which first lets containers end"),
            )
        )
    document = _document(report, dry_run)
    if output == "table":
        _print(report, dry_run)
    else:
        emit(document, output)
    for problem in report.problems:
        click.echo(f"nri-numa: {harmless(problem)}", err=True)
    if not report.ok:
        ctx.exit(1)
    if stay:
        click.echo("Waiting to be stopped.", err=True)
        # Blocked first: process 1 of a container does not get a signal that it has no handler for.
        signal.pthread_sigmask(signal.SIG_BLOCK, ends)
        signal.sigwait(ends)


def _load(given: str | None, flags: dict[str, object]) -> AgentConfig:
    from nri_numa import config as configuration

    try:
        return configuration.load(config_path(given), os.environ, flags)
    except ConfigError as error:
        raise Mistake(describe(error)) from error


def _document(report: Report, dry_run: bool) -> dict[str, Any]:
    return {
        "dryRun": dry_run,
        "released": report.ok and not dry_run,
        "checkpoint": report.checkpoint,
        "containers": [
            {
                "id": c.container_id,
                "namespace": c.namespace,
                "pod": c.pod,
                "container": c.container,
                "result": c.result.value,
                "before": {"cpus": c.had_cpus, "mems": c.had_mems},
                "after": {"cpus": c.cpus, "mems": c.mems, "quota": c.quota},
                "note": c.note,
            }
            for c in report.containers
        ],
        "problems": list(report.problems),
    }


def _print(report: Report, dry_run: bool) -> None:
    from nri_numa.node.give_back import Result

    changed = [c for c in report.containers if c.changed]
    if changed:
        head = ("NAMESPACE", "POD", "CONTAINER", "CPUS", "MEMS", "LIMIT", "RESULT")
        click.echo("\n".join(table(head, [_row(c) for c in changed])))
        click.echo()
    count = Counter(c.result for c in report.containers)
    done = count[Result.RELEASED] + count[Result.RECORDED]
    parts = [f"{count[Result.PLANNED]} would be released" if dry_run else f"{done} released"]
    if count[Result.FAILED]:
        parts.append(f"{count[Result.FAILED]} failed, run it again")
    parts.append(f"{count[Result.FREE]} of ours had everything already")
    parts.append(f"{count[Result.FOREIGN]} not ours and left alone")
    click.echo(f"{'; '.join(parts)}.")
    if report.checkpoint:
        click.echo(f"The checkpoint is kept as {harmless(report.checkpoint)}.")
    for c in report.containers:
        if c.note:
            name = harmless(f"{c.namespace}/{c.pod}/{c.container}")
            click.echo(f"nri-numa: {name}: {c.note}", err=True)


def _row(c: GivenBack) -> tuple[str, ...]:
    return (
        c.namespace,
        c.pod,
        c.container,
        f"{c.had_cpus} → {c.cpus}" if c.cpus else "-",
        f"{c.had_mems} → {c.mems}" if c.mems else "-",
        "back" if c.quota is not None else "-",
        c.result.value,
    )
