"""``nri-numa publish``: what Kubernetes users see of this node."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from nri_numa.cli.common import config_option, log_options, serve

if TYPE_CHECKING:
    from nri_numa.config import AgentConfig


@click.command()
@config_option
@click.option("--node-name", metavar="NAME", help="Name of the Node object, nodeName.")
@click.option("--socket", metavar="PATH", help="The agent's unix socket, http.socket.")
@click.option("--address", metavar="HOST:PORT", help="Where to serve metrics and probes, or off.")
@log_options
def publish(
    config_path: str | None,
    node_name: str | None,
    socket: str | None,
    address: str | None,
    log_level: str | None,
    log_format: str | None,
) -> None:
    """Write what Kubernetes users look at to the API server, until it is told to stop.

    It needs no rights on the node but to connect to the agent's unix socket (http.socket), and runs
    as another user than root. It writes Events on pods, annotations and labels of the Node, and,
    where publish.podAnnotation says so, an annotation on each pod.

    In a pod the API server and the credentials are found as usual: KUBERNETES_SERVICE_HOST,
    KUBERNETES_SERVICE_PORT, and the directory of publish.credentials.
    """
    flags: dict[str, object] = {
        "nodeName": node_name,
        "http.socket": socket,
        "publish.address": address,
        "log.level": log_level,
        "log.format": log_format,
    }
    sys.exit(serve(config_path, flags, _run))


def _run(config: AgentConfig) -> int:
    from nri_numa.cluster import publisher

    return publisher.run(config)
