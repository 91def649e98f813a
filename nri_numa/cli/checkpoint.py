"""``nri-numa checkpoint``: what the agent saved, read beside it without changing anything."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import click

from nri_numa.cli.common import (
    Failure,
    Mistake,
    Unreachable,
    config_option,
    config_path,
    describe,
    emit,
    human_duration,
    output_option,
    progress,
    table,
)
from nri_numa.errors import CheckpointCorrupt, CheckpointError, CheckpointTooNew, ConfigError
from nri_numa.text import harmless


@click.command()
@click.argument("file", metavar="[FILE]", required=False, type=click.Path())
@config_option
@click.option("--state-dir", metavar="DIR", help="Directory of the checkpoint.")
@output_option()
@click.pass_context
def checkpoint(
    ctx: click.Context,
    file: str | None,
    config_path: str | None,
    state_dir: str | None,
    output: str,
) -> None:
    """Show the saved state: what was meant for every container when it was last written.

    Works while the agent runs. Exit code 1 when the checkpoint is damaged, 3 when there is none.
    """
    path = Path(file) if file else _path(config_path, state_dir)
    with progress(f"reading {path}"):
        document, problems = _read(path)
    if output == "table":
        _print(path, document)
    else:
        emit(document, output)
    for problem in problems:
        click.echo(f"nri-numa: {harmless(problem)}", err=True)
    if problems:
        ctx.exit(1)


def _path(given: str | None, state_dir: str | None) -> Path:
    from nri_numa import config as configuration
    from nri_numa.store.checkpoint import JOURNAL

    try:
        config = configuration.load(config_path(given), os.environ, {"stateDir": state_dir})
    except ConfigError as error:
        raise Mistake(describe(error)) from error
    return Path(config.state_dir, JOURNAL)


def _read(path: Path) -> tuple[dict[str, Any], list[str]]:
    from nri_numa.store import checkpoint as store
    from nri_numa.store.journal import state_from

    try:
        loaded = store.read(str(path))
    except (CheckpointCorrupt, CheckpointTooNew) as error:
        raise Failure(harmless(str(error))) from error
    except CheckpointError as error:
        raise Unreachable(harmless(str(error))) from error
    state, damaged = state_from(loaded.entries)
    document = {
        "file": str(path),
        "writtenBy": loaded.head,
        "writtenAt": loaded.written_at,
        "records": loaded.records,
        "containers": [
            {
                "id": a.container_id,
                "podUID": a.pod_uid,
                "namespace": a.namespace,
                "pod": a.pod,
                "container": a.container,
                "kind": a.kind.value,
                "cpus": str(a.cpus),
                "mems": str(a.mems),
                "numaNodes": str(a.numa_nodes),
                "policy": a.policy.value,
                "since": a.since,
                "reason": a.reason,
            }
            for a in sorted(
                state.allocations.values(),
                key=lambda a: (a.namespace, a.pod, a.container, a.container_id),
            )
        ],
        "problems": [*loaded.problems, *damaged],
    }
    return document, [*loaded.problems, *damaged]


def _print(path: Path, document: dict[str, Any]) -> None:
    now = time.time()  # a command is the shell
    written = document["writtenAt"]
    age = f", compacted {human_duration(now - written)} ago" if written else ""
    version = document["writtenBy"].get("version", "?")
    click.echo(harmless(f"{path}: {document['records']} records by version {version}{age}"))
    rows = [
        (
            c["namespace"],
            c["pod"],
            c["container"],
            c["kind"],
            c["cpus"] or c["numaNodes"] or "any",
            c["mems"] or "any",
            human_duration(now - c["since"]) if c["since"] else "-",
        )
        for c in document["containers"]
    ]
    if not rows:
        click.echo("No containers.")
        return
    head = ("NAMESPACE", "POD", "CONTAINER", "KIND", "CPUS OR NODES", "MEMS", "AGE")
    click.echo("\n".join(table(head, rows)))
