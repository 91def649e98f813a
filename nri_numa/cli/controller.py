"""``nri-numa controller``: capacity from outside, told to the Nodes of a cluster."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from nri_numa.cli.common import config_option, log_options, serve

if TYPE_CHECKING:
    from nri_numa.config import AgentConfig


@click.command()
@config_option
@click.option("--address", metavar="HOST:PORT", help="Where to serve, controller.address, or off.")
@click.option("--capacity-file", metavar="PATH", help="File with capacities of nodes.")
@log_options
def controller(
    config_path: str | None,
    address: str | None,
    capacity_file: str | None,
    log_level: str | None,
    log_format: str | None,
) -> None:
    """Tell Nodes how much of each NUMA node's CPUs is there, until it is told to stop.

    One for the cluster, or several of which one works (a Lease). It takes capacity factors by PUT,
    from a file and from a query of Prometheus, and writes the annotation offline-capacity of Nodes;
    nri-numa publish hands it to the agent there where offlineCapacity.file is set.
    """
    flags: dict[str, object] = {
        "controller.address": address,
        "controller.capacityFile": capacity_file,
        "log.level": log_level,
        "log.format": log_format,
    }
    sys.exit(serve(config_path, flags, _run))


def _run(config: AgentConfig) -> int:
    from nri_numa.controller import service

    return service.run(config)
