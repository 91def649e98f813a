"""``nri-numa check``: is this machine ready, is the configuration sound."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from nri_numa.cli.common import (
    Mistake,
    config_option,
    config_path,
    describe,
    emit,
    output_option,
    progress,
    sysfs_option,
    terminal_width,
)
from nri_numa.errors import ConfigError
from nri_numa.text import harmless

if TYPE_CHECKING:
    from nri_numa.node.preflight import Finding

_MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}


@click.command()
@config_option
@click.option("--nri-socket", metavar="PATH", help="Unix socket of the runtime's NRI.")
@click.option("--state-dir", metavar="DIR", help="Directory of the checkpoint.")
@sysfs_option
@click.option(
    "--fix-containerd",
    is_flag=True,
    help="Show how to turn NRI on in containerd's configuration.",
)
@click.option("--write", is_flag=True, help="With --fix-containerd: write it, keeping a backup.")
@click.option(
    "--containerd-config",
    metavar="FILE",
    default="/etc/containerd/config.toml",
    show_default=True,
    help="With --fix-containerd: containerd's configuration.",
)
@output_option()
@click.pass_context
def check(
    ctx: click.Context,
    config_path: str | None,
    nri_socket: str | None,
    state_dir: str | None,
    sysfs_root: str | None,
    fix_containerd: bool,
    write: bool,
    containerd_config: str,
    output: str,
) -> None:
    """Say whether this machine is ready, and what to do where it is not.

    Each line is ok, warn or FAIL. The exit code is 0 when nothing failed, 1 when something did,
    and 2 when the configuration has mistakes. The effective configuration is printed at the end.
    """
    if fix_containerd:
        from nri_numa.cli.containerd import fix

        fix(containerd_config, write=write)
        return
    if write:
        raise click.UsageError("--write goes with --fix-containerd")
    flags: dict[str, object] = {
        "runtime.nriSocket": nri_socket,
        "stateDir": state_dir,
        "sysfsRoot": sysfs_root,
    }
    _check(ctx, config_path, flags, output)


def _check(ctx: click.Context, given: str | None, flags: Mapping[str, object], output: str) -> None:
    from nri_numa import config as configuration
    from nri_numa.node import preflight as checks

    path = config_path(given)
    try:
        config = configuration.load(path, os.environ, flags)
    except ConfigError as error:
        if output == "table":
            raise Mistake(describe(error)) from error
        findings = [
            {"subject": "configuration", "level": "fail", "message": problem, "remedy": ""}
            for problem in error.problems
        ]
        emit({"ready": False, "findings": findings, "config": None}, output)
        ctx.exit(2)
    with progress("looking at this node"):
        found = list(checks.examine(config))
    worst = checks.worst(found)
    if output == "table":
        _print(found)
        click.echo()
        source = path or "built-in defaults"
        click.echo(f"Effective configuration ({source}, environment and flags):")
        click.echo()
        emit(configuration.effective(config), "yaml")
    else:
        emit(
            {
                "ready": worst is not checks.Level.FAIL,
                "findings": [
                    {
                        "subject": f.subject,
                        "level": str(f.level),
                        "message": f.message,
                        "remedy": f.remedy,
                    }
                    for f in found
                ],
                "config": configuration.effective(config),
            },
            output,
        )
    if worst is checks.Level.FAIL:
        ctx.exit(2 if any(_misconfigured(f) for f in found) else 1)


def _misconfigured(finding: Finding) -> bool:
    return finding.subject == "configuration" and finding.level == "fail"


def _print(found: list[Finding]) -> None:
    width = terminal_width()
    for finding in found:
        mark, colour = _MARKS[finding.level]
        head = f"{mark}  {finding.subject}: "
        text = textwrap.wrap(head + harmless(finding.message), width, subsequent_indent=" " * 6)
        text[0] = click.style(text[0][:4], fg=colour) + text[0][4:]
        if finding.remedy:
            text += textwrap.wrap(
                "→ " + harmless(finding.remedy),
                width,
                initial_indent=" " * 6,
                subsequent_indent=" " * 8,
            )
        click.echo("\n".join(text))
