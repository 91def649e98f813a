"""Commands that run until they are stopped, each in a process of its own.

``run`` is the plugin itself; ``publish``, ``controller``, ``scheduler`` and ``device-plugin`` run
beside it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click

from nri_numa.cli.common import (
    InputError,
    api_options,
    command_line_settings,
    config_error_message,
    config_option,
    find_config_path,
    load_command_config,
    log_settings,
    nri_socket_setting,
    run_service,
    setting_option,
    state_dir_setting,
    sysfs_setting,
)
from nri_numa.errors import ConfigError, RuntimeUnavailable

if TYPE_CHECKING:
    from nri_numa.config import AgentConfig

NRI_CONFIG_DIR: Final = "/etc/nri/conf.d"
"""Default directory of runtimes for the configuration of the plugins that they launch."""


@click.command("run")
@config_option
@nri_socket_setting
@setting_option(
    "runtime.link",
    "--link",
    type=click.Choice(["nri", "cri"]),
    help="Protocol to the runtime.  [default: nri]",
)
@setting_option(
    "runtime.criSocket", "--cri-socket", metavar="PATH", help="Unix socket of the runtime's CRI."
)
@setting_option(
    "runtime.pluginName", "--plugin-name", metavar="NAME", help="Name to register under."
)
@setting_option(
    "runtime.pluginIndex",
    "--plugin-index",
    metavar="NN",
    help="Two digits that order a node's plugins.",
)
@state_dir_setting
@click.option(
    "--nri-config-dir",
    metavar="DIR",
    default=NRI_CONFIG_DIR,
    show_default=True,
    help="The runtime's directory of drop-ins, read at start if the runtime launched the plugin.",
)
@setting_option("http.address", "--http", metavar="HOST:PORT", help="Address of the API, or off.")
@sysfs_setting
@setting_option(
    "observe",
    "--observe/--no-observe",
    default=None,
    help="Decide, log and count, but change nothing.",
)
@log_settings
def run_plugin(config_path: str | None, nri_config_dir: str) -> None:
    """Run the plugin until it is stopped.

    It connects to the runtime's NRI socket, retries until the runtime answers, and decides about
    each container before it starts. If the runtime launched it (as NN-nri-numa in the plugin
    directory), it uses the inherited socket.

    With --link cri it watches a runtime without NRI: containers get their CPUs after their
    creation, usually some milliseconds after their start, and a rejection stops no container.

    Flags take precedence over the environment (NRI_NUMA_HTTP_ADDRESS for http.address, and so on),
    and the environment over the configuration file. SIGHUP reloads the file; SIGTERM ends the
    plugin and moves no container.
    """
    sys.exit(load_and_run_daemon(config_path, nri_config_dir))


def read_drop_in(env: Mapping[str, str], directory: str) -> str:
    """Read the drop-in that the runtime will send, before it does; empty if there is none.

    Its text arrives with NRI's Configure request, too late for the state directory and the HTTP
    address. As the runtime does, this takes ``NN-name.conf`` or else ``name.conf``. ``env`` is the
    environment that the runtime sets for a plugin that it launches.

    Raises:
        ConfigError: it exists and cannot be read.
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


def load_and_run_daemon(config_path: str | None, directory: str) -> int:
    """Load the configuration and run the daemon; return the exit code."""
    from nri_numa import config as configuration
    from nri_numa.observe import logs

    path, flags = find_config_path(config_path), command_line_settings()
    env = dict(os.environ)
    drop_in, unusable = "", None

    def reload_config(text: str = "") -> AgentConfig:
        """Load the configuration again, with the text of NRI's Configure request.

        If the runtime sent the text that was read here, it read the same file. Then the file is
        read again, so a reload applies its changes.
        """
        if not text or text == drop_in:
            text = read_drop_in(env, directory)
        return configuration.load_config(path, env, flags, text=text)

    def log_problems(event: str, error: ConfigError) -> None:
        for problem in error.problems:
            logs.get_logger("daemon").error(event, file=error.source, problem=problem)

    launched = "NRI_PLUGIN_SOCKET" in env
    try:
        try:
            drop_in = read_drop_in(env, directory)
            config = reload_config()
        except ConfigError as error:
            if not launched:
                raise
            # Some runtimes end when a plugin that they launched does. A mistake in the file fails
            # again here; one in the drop-in only disables the drop-in.
            config, unusable = configuration.load_config(path, env, flags), error
    except ConfigError as error:
        if launched:  # nobody sees standard error: write to the journal
            logs.setup_logging()
            log_problems("configuration not loaded", error)
        raise InputError(config_error_message(error)) from error

    def run_daemon(config: AgentConfig) -> int:
        if unusable is not None:
            log_problems("drop-in configuration not applied", unusable)
        from nri_numa.agent import daemon

        return daemon.run_daemon(config, reload_config)

    return run_service(config, run_daemon)


@click.command("publish")
@config_option
@setting_option(
    "nodeName", "--node-name", metavar="NAME", help="Name of the Node object, nodeName."
)
@setting_option(
    "http.socket", "--socket", metavar="PATH", help="The agent's unix socket, http.socket."
)
@setting_option(
    "publish.address",
    "--address",
    metavar="HOST:PORT",
    help="Address of metrics and probes, or off.",
)
@log_settings
def run_publisher(config_path: str | None) -> None:
    """Write Events, annotations and labels to the API server, until it is stopped.

    It only needs to connect to the agent's unix socket (http.socket), and does not run as root. It
    writes Events of pods, annotations and labels of the Node, and the other objects that the keys
    of publish turn on.

    It finds the API server by KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT, and its
    credentials in publish.credentialsDir, as every pod does.
    """
    from nri_numa.kubelet.configuration import registered_node_name
    from nri_numa.publisher import publisher

    config = load_command_config(config_path)
    node = config.node_name or registered_node_name(config.kubelet_root)
    sys.exit(run_service(config, partial(publisher.run_publisher, node=node)))


@click.command("withdraw")
@click.argument("kinds", nargs=-1, required=True, type=click.Choice(["capacity", "numa-ids"]))
@config_option
@log_settings
def withdraw_published_values(kinds: tuple[str, ...], config_path: str | None) -> None:
    """Remove from all Nodes what nri-numa publish wrote there.

    capacity is the extended resource devicePlugin.resourceName: the scheduler counts it as long as
    it is in a Node's status. numa-ids is the annotation for the controller. The account of
    publish.credentialsDir needs the rights to list and patch nodes, and to patch nodes/status.
    """
    import asyncio

    from nri_numa.kube.api import KubeAPI
    from nri_numa.publisher.withdraw import withdraw_from_all_nodes

    def withdraw(config: AgentConfig) -> int:
        api = KubeAPI(config.publish.credentials_dir, "nri-numa-withdraw")
        return 1 if asyncio.run(withdraw_from_all_nodes(config, api, frozenset(kinds))) else 0

    sys.exit(run_service(load_command_config(config_path), withdraw))


@click.command("controller")
@config_option
@setting_option(
    "controller.address",
    "--address",
    metavar="HOST:PORT",
    help="Address to listen on (controller.address), or off.",
)
@setting_option(
    "controller.capacityFile",
    "--capacity-file",
    metavar="PATH",
    help="File with capacity factors of nodes.",
)
@log_settings
def run_controller(config_path: str | None) -> None:
    """Set the capacity of NUMA nodes and evict pods, until it is stopped.

    It runs once for the cluster; of several replicas a Lease elects one. It gets capacity factors
    by PUT, from a file and from Prometheus, and writes them to the annotation offline-capacity of
    Nodes. nri-numa publish hands that to the agent, if offlineCapacity.file is set.
    """
    from nri_numa.controller import service

    sys.exit(run_service(load_command_config(config_path), service.run_controller))


@click.command("scheduler")
@config_option
@setting_option("scheduler.address", "--address", metavar="HOST:PORT", help="Address to listen on.")
@log_settings
def run_scheduler_extender(config_path: str | None) -> None:
    """Answer a stock kube-scheduler as an extender, until it is stopped.

    It evaluates nodes by their NodeResourceTopology, with the rules that place containers on the
    node. It reserves the chosen NUMA nodes, and writes them with the binding.

    Give it the nodes' configuration: annotationPrefix, defaults, rules, permissions and strategy
    must be the same. It finds the API server by KUBERNETES_SERVICE_HOST and
    KUBERNETES_SERVICE_PORT, and its credentials in scheduler.credentialsDir, as every pod does.
    """
    from nri_numa.scheduler import extender

    sys.exit(run_service(load_command_config(config_path), extender.run_extender))


@click.command("device-plugin")
@config_option
@setting_option(
    "devicePlugin.resourceName",
    "--resource-name",
    metavar="NAME",
    help="Name of the extended resource.",
)
@setting_option(
    "devicePlugin.socketDir",
    "--directory",
    metavar="DIR",
    help="The kubelet's directory of device plugin sockets.",
)
@api_options
def run_device_plugin(
    config_path: str | None, api: str | None, token_file: str | None, ca_file: str | None
) -> None:
    """Let the stock scheduler count exclusive CPUs, until it is stopped.

    It runs beside the agent, as root because of the kubelet's directory, and needs no rights in
    Kubernetes. It reads the number of exclusive CPUs from the agent and offers that many slots.
    A pod that requests the resource gets exclusive CPUs without an annotation.
    """
    import asyncio
    import contextlib
    import signal

    from nri_numa.cli.agent_client import new_agent_client
    from nri_numa.device_plugin.plugin import DevicePlugin
    from nri_numa.device_plugin.slots import SlotList
    from nri_numa.kubelet.pod_resources import query_allocated_device_ids
    from nri_numa.model.workload import Strategy

    async def serve_device_plugin(config: AgentConfig) -> int:
        section = config.device_plugin
        agent = new_agent_client(api, token_file, ca_file, config_path)

        def fetch_slots() -> Any:
            try:
                return agent.get_document("/v1/slots")
            except click.ClickException as error:
                raise RuntimeUnavailable(error.message) from error

        os.umask(0o077)  # the kubelet is root as well
        plugin = DevicePlugin(
            section.socket_dir,
            section.resource_name,
            fetch_slots,
            SlotList(topology=section.advertise_topology, pack=config.strategy is Strategy.PACK),
            allocated=lambda: query_allocated_device_ids(
                config.kubelet_root, section.resource_name
            ),
        )
        task = asyncio.ensure_future(plugin.run())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return 0

    run_service(
        load_command_config(config_path), lambda config: asyncio.run(serve_device_plugin(config))
    )
