"""The command line: ``nri-numa COMMAND``.

A command's module is imported when the command is used, so ``--help`` and ``run`` start fast. All
commands have the same exit codes, `EXIT_CODES_HELP_TEXT`.
"""

from __future__ import annotations

import difflib
import io
import os
import pkgutil
import sys
from collections.abc import Sequence

import click

from nri_numa import __version__

INTERRUPTED_EXIT_CODE = 130
"""Exit code after Ctrl-C: 128 and the number of SIGINT."""
EXIT_CODES_HELP_TEXT = """\b
Exit codes:
  0  done
  1  failed, or rejected
  2  wrong usage, or a configuration with mistakes
  3  the agent, the runtime or the machine's files cannot be reached
  130  interrupted (Ctrl-C)"""

# name: (module below nri_numa and attribute, one line for the list of commands)
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("cli.processes:run_plugin", "Run the plugin: place containers before they start."),
    "publish": (
        "cli.processes:run_publisher",
        "Write Events, annotations and labels to the API server, without root.",
    ),
    "withdraw": (
        "cli.processes:withdraw_published_values",
        "Remove from all Nodes what publish wrote there.",
    ),
    "controller": (
        "cli.processes:run_controller",
        "Set the capacity of NUMA nodes and evict pods, once for a cluster.",
    ),
    "scheduler": (
        "cli.processes:run_scheduler_extender",
        "Filter and rank nodes for a stock kube-scheduler.",
    ),
    "demo": (
        "demo.command:show_demo",
        "Show nri-numa at work on a modelled machine, without Kubernetes.",
    ),
    "topology": ("cli.machine:show_topology", "Show sockets, NUMA nodes, caches and CPUs."),
    "status": ("cli.status:show_status", "Show CPUs and memory nodes of each container."),
    "explain": ("cli.explain:explain_placements", "Explain why a container is where it is."),
    "simulate": ("cli.simulate:simulate_pods", "Simulate what pods would get on a machine."),
    "check": ("cli.node:check_node", "Check if this machine is ready, and show what to do."),
    "measure": ("cli.measure:measure_placement", "Measure what placement gains on this machine."),
    "capture": ("cli.machine:capture_machine", "Pack the files that describe this machine."),
    "report": ("cli.report:pack_report", "Pack what a bug report needs into one archive."),
    "checkpoint": ("cli.node:show_checkpoint", "Show the saved state."),
    "release": (
        "cli.node:release_containers",
        "Give every container back what it would have without nri-numa.",
    ),
    "device-plugin": (
        "cli.processes:run_device_plugin",
        "Let the stock scheduler count exclusive CPUs.",
    ),
    "completion": ("cli.common:print_completion_script", "Print the shell's completion script."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported on use, with suggestions for misspelt names."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Accept ``help COMMAND`` and ``version``, as kubectl does, for the options."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, ["--version"] if args == ["version"] else args)

    def invoke(self, ctx: click.Context) -> object:
        """Run a command; an interrupted one ends with the exit code that shells expect."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, click.Abort):
            click.echo(err=True)
            ctx.exit(INTERRUPTED_EXIT_CODE)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of their table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = pkgutil.resolve_name(f"nri_numa.{COMMANDS[cmd_name][0]}")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or fail with the nearest names."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            suggestions = difflib.get_close_matches(name, COMMANDS, n=2, cutoff=0.5)
            hint = f" Did you mean {' or '.join(suggestions)}?" if suggestions else ""
            ctx.fail(f"There is no command {name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    epilog=EXIT_CODES_HELP_TEXT,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 79},
)
@click.version_option(__version__, message="nri-numa %(version)s", help="Show the version.")
def cli() -> None:
    """NUMA placement for Kubernetes nodes.

    An NRI plugin that pins containers to CPUs and memory nodes before their first instruction.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the ``nri-numa`` program.

    The runtime launches a pre-installed plugin without arguments and with a connected socket; this
    means ``run``.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack characters of a table
        sys.stdout.reconfigure(errors="replace")
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if not argv and "NRI_PLUGIN_SOCKET" in os.environ:
        argv = ["run"]
    cli.main(argv, prog_name="nri-numa")
