"""``nri-numa completion``: what a shell needs to complete our commands."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_EXAMPLES = """\b
  nri-numa completion bash > /etc/bash_completion.d/nri-numa
  nri-numa completion zsh > "${fpath[1]}/_nri-numa"
  nri-numa completion fish > ~/.config/fish/completions/nri-numa.fish"""


@click.command(epilog=_EXAMPLES)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of SHELL."""
    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101  # the choices are click's own
    root = ctx.find_root().command
    click.echo(kind(root, {}, "nri-numa", "_NRI_NUMA_COMPLETE").source())
