"""``nri-numa run``: the plugin itself."""

from __future__ import annotations

import asyncio
import os
import sys

import click

from nri_numa.cli.common import (
    Mistake,
    config_option,
    config_path,
    describe,
    friendly,
    sysfs_option,
)
from nri_numa.errors import ConfigError


@click.command()
@config_option
@click.option("--nri-socket", metavar="PATH", help="Unix socket of the runtime's NRI.")
@click.option("--plugin-name", metavar="NAME", help="Name to register under.")
@click.option("--plugin-index", metavar="NN", help="Two digits that order a node's plugins.")
@click.option("--state-dir", metavar="DIR", help="Directory of the checkpoint.")
@click.option("--http", "http", metavar="HOST:PORT", help="Where to serve the API, or off.")
@sysfs_option
@click.option(
    "--observe/--no-observe", default=None, help="Decide, log and count, but change nothing."
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Least severe line that is written.",
)
@click.option("--log-format", type=click.Choice(["logfmt", "json"]), help="How lines are written.")
def run(
    config_path: str | None,
    nri_socket: str | None,
    plugin_name: str | None,
    plugin_index: str | None,
    state_dir: str | None,
    http: str | None,
    sysfs_root: str | None,
    observe: bool | None,
    log_level: str | None,
    log_format: str | None,
) -> None:
    """Run the plugin until it is told to stop.

    It dials the runtime's NRI socket, for ever when need be, and decides about every container
    before it starts. Launched by the runtime itself (as NN-nri-numa in its plugin directory) it
    uses the socket it inherits.

    Flags beat the environment (NRI_NUMA_HTTP_ADDRESS for http.address, and so on), which beats
    the configuration file. SIGHUP reads the file again; SIGTERM ends the plugin and moves nothing.
    """
    flags: dict[str, object] = {
        "runtime.nriSocket": nri_socket,
        "runtime.pluginName": plugin_name,
        "runtime.pluginIndex": plugin_index,
        "stateDir": state_dir,
        "http.address": http,
        "sysfsRoot": sysfs_root,
        "observe": observe,
        "log.level": log_level,
        "log.format": log_format,
    }
    sys.exit(start(config_path, flags))


def start(given: str | None, flags: dict[str, object]) -> int:
    """Load the configuration and run the daemon; the result is the exit code."""
    from nri_numa import config as configuration
    from nri_numa import logs

    path = config_path(given)
    env = dict(os.environ)

    def load(text: str = "") -> configuration.AgentConfig:
        """Read everything again, with the text of NRI's Configure request where it belongs."""
        return configuration.load(path, env, flags, text=text)

    try:
        config = load()
        logs.setup(config.log.level, config.log.format, file=config.log.file)
    except ConfigError as error:
        if "NRI_PLUGIN_SOCKET" in env:  # nobody sees standard error: the journal must do
            logs.setup()
            logs.get_logger("daemon").error(describe(error))
        with friendly():
            raise
    except OSError as error:
        raise Mistake(f"log.file: {error.filename}: {error.strerror or error}") from error

    from nri_numa import daemon

    try:
        return asyncio.run(daemon.run(config, load=load))
    except ConfigError:
        with friendly():
            raise
    finally:
        logs.flush()
