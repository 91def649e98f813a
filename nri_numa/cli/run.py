"""``nri-numa run``: the plugin itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Final

import click

from nri_numa.cli.common import (
    Mistake,
    config_option,
    config_path,
    describe,
    friendly,
    log_options,
    sysfs_option,
)
from nri_numa.errors import ConfigError

NRI_CONFIG_DIR: Final = "/etc/nri/conf.d"
"""Where runtimes look for the configuration of the plugins they launch, unless told otherwise."""


@click.command()
@config_option
@click.option("--nri-socket", metavar="PATH", help="Unix socket of the runtime's NRI.")
@click.option(
    "--link", type=click.Choice(["nri", "cri"]), help="How the runtime is reached.  [default: nri]"
)
@click.option("--cri-socket", metavar="PATH", help="Unix socket of the runtime's CRI.")
@click.option("--plugin-name", metavar="NAME", help="Name to register under.")
@click.option("--plugin-index", metavar="NN", help="Two digits that order a node's plugins.")
@click.option("--state-dir", metavar="DIR", help="Directory of the checkpoint.")
@click.option(
    "--nri-config-dir",
    metavar="DIR",
    default=NRI_CONFIG_DIR,
    show_default=True,
    help="The runtime's directory of drop-ins, read at start when it launched us.",
)
@click.option("--http", "http", metavar="HOST:PORT", help="Where to serve the API, or off.")
@sysfs_option
@click.option(
    "--observe/--no-observe", default=None, help="Decide, log and count, but change nothing."
)
@log_options
def run(
    config_path: str | None,
    nri_socket: str | None,
    link: str | None,
    cri_socket: str | None,
    plugin_name: str | None,
    plugin_index: str | None,
    state_dir: str | None,
    nri_config_dir: str,
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

    With --link cri it watches a runtime that has no NRI: containers get their CPUs after they were
    created, mostly some milliseconds after their start, and refusals stop nothing.

    Flags beat the environment (NRI_NUMA_HTTP_ADDRESS for http.address, and so on), which beats
    the configuration file. SIGHUP reads the file again; SIGTERM ends the plugin and moves nothing.
    """
    flags: dict[str, object] = {
        "runtime.nriSocket": nri_socket,
        "runtime.link": link,
        "runtime.criSocket": cri_socket,
        "runtime.pluginName": plugin_name,
        "runtime.pluginIndex": plugin_index,
        "stateDir": state_dir,
        "http.address": http,
        "sysfsRoot": sysfs_root,
        "observe": observe,
        "log.level": log_level,
        "log.format": log_format,
    }
    sys.exit(start(config_path, flags, nri_config_dir))


def drop_in(env: Mapping[str, str], directory: str) -> str:
    """Read the drop-in that the runtime will hand over, before it does.

    Its text arrives with NRI's Configure request, too late for the state directory and the HTTP
    address. The runtime takes ``NN-name.conf`` or else ``name.conf``, and so is done here.

    Args:
        env: as the runtime made it for a plugin that it launches.
        directory: of the drop-ins.

    Returns:
        The text; empty when we were not launched or there is no such file.

    Raises:
        ConfigError: it is there and cannot be read.
    """
    name = env.get("NRI_PLUGIN_NAME", "")
    if "NRI_PLUGIN_SOCKET" not in env or not name or "/" in name:
        return ""
    for file in (f"{env.get('NRI_PLUGIN_IDX', '')}-{name}.conf", f"{name}.conf"):
        path = os.path.join(directory, file)
        try:
            with open(path, encoding="utf-8") as stream:
                return stream.read()
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
            raise ConfigError(path, [f"cannot be read: {reason}"]) from error
    return ""


def start(given: str | None, flags: dict[str, object], directory: str = NRI_CONFIG_DIR) -> int:
    """Load the configuration and run the daemon; the result is the exit code."""
    from nri_numa import config as configuration
    from nri_numa.observe import logs

    path = config_path(given)
    env = dict(os.environ)

    early, unusable = "", None

    def load(text: str = "") -> configuration.AgentConfig:
        """Read everything again, with the text of NRI's Configure request where it belongs.

        Where the runtime has the same text as we read ourselves, it read the same file: then the
        file counts as it is now, so that a reload takes a changed one.
        """
        if not text or text == early:
            text = drop_in(env, directory)
        return configuration.load(path, env, flags, text=text)

    try:
        try:
            early = drop_in(env, directory)
            config = load()
        except ConfigError as error:
            if "NRI_PLUGIN_SOCKET" not in env:
                raise
            # Some runtimes end when a plugin they launched does. A mistake in the file fails again
            # here; one in the drop-in costs no more than the drop-in.
            config, unusable = configuration.load(path, env, flags), error
        logs.setup(config.log.level, config.log.format, file=config.log.file)
        if unusable is not None:
            for problem in unusable.problems:
                logs.get_logger("daemon").error(
                    "drop-in configuration not used", source=unusable.source, problem=problem
                )
    except ConfigError as error:
        if "NRI_PLUGIN_SOCKET" in env:  # nobody sees standard error: the journal must do
            logs.setup()
            logs.get_logger("daemon").error(describe(error))
        with friendly():
            raise
    except OSError as error:
        raise Mistake(f"log.file: {error.filename}: {error.strerror or error}") from error

    from nri_numa.node import daemon

    try:
        return daemon.run(config, load)
    except ConfigError:
        with friendly():
            raise
    finally:
        logs.flush()
