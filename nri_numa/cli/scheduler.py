"""``nri-numa scheduler``: an extender of kube-scheduler."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from nri_numa.cli.common import config_option, log_options, serve

if TYPE_CHECKING:
    from nri_numa.config import AgentConfig


@click.command()
@config_option
@click.option("--address", metavar="HOST:PORT", help="Where kube-scheduler asks.")
@log_options
def scheduler(
    config_path: str | None, address: str | None, log_level: str | None, log_format: str | None
) -> None:
    """Answer a stock kube-scheduler as an extender, until it is told to stop.

    Nodes are judged by what they publish as NodeResourceTopology, by the rules that place
    containers on the node. The chosen NUMA nodes are held, and written with the binding.

    Give it the configuration of the nodes: annotationPrefix, defaults, rules, permissions and
    strategy are read as they read them. In a pod the API server and the credentials are found as
    usual: KUBERNETES_SERVICE_HOST, KUBERNETES_SERVICE_PORT, and the directory of
    scheduler.credentials.
    """
    flags: dict[str, object] = {
        "scheduler.address": address,
        "log.level": log_level,
        "log.format": log_format,
    }
    sys.exit(serve(config_path, flags, _run))


def _run(config: AgentConfig) -> int:
    from nri_numa.scheduler import extender

    return extender.run(config)
