"""``nri-numa device-plugin``: exclusive CPUs as an extended resource of the node."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any

import click

from nri_numa.cli.agent_client import AgentClient, api_options, client
from nri_numa.cli.common import Mistake, config_option, config_path, describe, friendly
from nri_numa.config import AgentConfig
from nri_numa.errors import ConfigError, RuntimeUnavailable


@click.command("device-plugin")
@config_option
@click.option("--resource-name", metavar="NAME", help="Name of the extended resource.")
@click.option("--directory", metavar="DIR", help="The kubelet's directory for device plugins.")
@api_options
def device_plugin(
    config_path: str | None,
    resource_name: str | None,
    directory: str | None,
    api: str | None,
    token_file: str | None,
    ca_file: str | None,
) -> None:
    """Let the stock scheduler count exclusive CPUs, until told to stop.

    Runs beside the agent, as root for the kubelet's directory, and needs no right of Kubernetes:
    it asks the agent how many exclusive CPUs there are, and offers as many slots to the kubelet.
    A pod that requests the resource gets exclusive CPUs without an annotation.
    """
    from nri_numa.observe import logs

    config = _configured(config_path, resource_name, directory)
    logs.setup(config.log.level, config.log.format, file=config.log.file)
    asked = client(api, token_file, ca_file, config_path)
    try:
        with friendly():
            asyncio.run(_run(config, asked))
    finally:
        logs.flush()


def _configured(given: str | None, name: str | None, directory: str | None) -> AgentConfig:
    from nri_numa import config as configuration

    flags: dict[str, object] = {
        "devicePlugin.resourceName": name,
        "devicePlugin.directory": directory,
    }
    try:
        return configuration.load(config_path(given), os.environ, flags)
    except ConfigError as error:
        raise Mistake(describe(error)) from error


async def _run(config: AgentConfig, asked: AgentClient) -> None:
    from nri_numa.cri.pod_resources import device_ids
    from nri_numa.device_plugin.plugin import DevicePlugin
    from nri_numa.device_plugin.slots import SlotList
    from nri_numa.engine.values.workload import Strategy

    section = config.device_plugin

    def ask() -> Any:
        try:
            return asked.get("/v1/slots")
        except click.ClickException as error:
            raise RuntimeUnavailable(error.message) from error

    def taken() -> set[str]:
        return device_ids(config.kubelet_root, section.resource_name)

    os.umask(0o077)  # the kubelet is root as well
    plugin = DevicePlugin(
        section.directory,
        section.resource_name,
        ask,
        SlotList(topology=section.topology, pack=config.strategy is Strategy.PACK),
        allocated=taken,
    )
    task = asyncio.ensure_future(plugin.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
