"""``nri-numa demo``: the main job, seen to happen, on a modelled machine.

The plugin is the real one: a process of its own, started like a service, which reads the machine
from a ``sys/`` tree and talks NRI over a unix socket. The runtime at the other end is
`nri_numa.demo.runtime`, which has no processes, only books. Everything that is told is checked,
so the demo is a test too: it ends with 1 and says what was not as told.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from pathlib import Path

import click


@click.command()
@click.option(
    "--keep", is_flag=True, help="Leave the plugin's files, log included, where they are."
)
def main(keep: bool) -> None:
    """See it work on a modelled machine, without Kubernetes.

    Starts the real plugin and a container runtime that exists in memory only, creates the example
    pods, and shows what each gets and why: lists, shared and exclusive CPUs, a refusal, CPUs given
    back, and a plugin killed and restarted. Takes seconds, needs no privileges, leaves nothing.
    """
    from nri_numa.demo.story import NotAsExpected, tell

    directory = Path(tempfile.mkdtemp(prefix="nri-numa-demo-", dir=_short_directory()))
    told = False
    try:
        asyncio.run(tell(directory))
        told = True
    except NotAsExpected as problem:
        raise click.ClickException(
            f"the demo did not go as told: {problem}{_log(directory)}"
        ) from None
    except KeyboardInterrupt:
        told = not keep
        raise click.Abort from None
    finally:
        if keep:
            click.echo(f"\nThe files are in {directory}", err=True)
        elif told:
            shutil.rmtree(directory, ignore_errors=True)


def _short_directory() -> str | None:
    """Where a unix socket's path stays below the kernel's 108 bytes; None for the usual place."""
    usual = Path(tempfile.gettempdir())
    return None if len(bytes(usual)) < 72 else "/tmp"  # noqa: S108  # a private directory in it


def _log(directory: Path) -> str:
    """The end of the plugin's log, for somebody who must find out why."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (directory / "plugin.log").read_text(errors="replace").splitlines()[-15:]
    return "\n".join([f"\nThe files are in {directory}; the plugin's log ends:", *lines])
