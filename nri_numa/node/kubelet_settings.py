"""The kubelet's configuration, watched, and the settings that follow from it and from ours."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from nri_numa import config as configuration
from nri_numa.config import AgentConfig
from nri_numa.engine.cpus.index import index
from nri_numa.engine.values.settings import Settings
from nri_numa.kubelet.adoption import Adopted, adopt
from nri_numa.kubelet.configuration import AUTO, Found, read
from nri_numa.machine.model import Topology
from nri_numa.node.agent import Agent
from nri_numa.node.reload import with_tables
from nri_numa.observe.logs import get_logger

log = get_logger("kubelet")

EVERY: Final = 5.0
"""Seconds between two looks at the kubelet's command line and files."""


class KubeletSettings:
    """What the kubelet's configuration says, and what became ours of it.

    Attributes:
        found: the kubelet's configuration when it was last read.
        adopted: what became ours of it.
    """

    def __init__(
        self,
        kubelet_root: str,
        *,
        read: Callable[[str, str, str], Found] = read,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        over: Callable[[Settings, Topology], Settings] = lambda settings, topology: settings,
    ) -> None:
        """Know nothing yet.

        Args:
            kubelet_root: the kubelet's directory.
            read: reads its configuration: ``kubelet.config``, ``kubelet.configDir``, directory.
            sleep: waits.
            over: lays over the settings what comes from neither configuration.
        """
        self._root = kubelet_root
        self._read = read
        self._sleep = sleep
        self._over = over
        self._said: frozenset[str] = frozenset()
        self.found = Found()
        self.adopted: Adopted | None = None

    def read(self, config: AgentConfig) -> bool:
        """Read the kubelet's configuration; whether it is another one than before.

        A kubelet that is being restarted, and a file that cannot be read, change nothing.
        """
        section, before = config.kubelet, self.found
        found = self._read(section.config, section.config_dir, self._root)
        if before.running and not found.running and section.config == AUTO:
            return False
        if found.facts is None and found.problems:
            found = replace(found, facts=before.facts)
        self.found = found
        return found.signature != before.signature

    def settings(self, config: AgentConfig, topology: Topology) -> Settings:
        """Ours, with what the kubelet's configuration adds; any thread may ask."""
        ours = configuration.settings(config)
        if self.found.facts is None:
            self.adopted = None
            return self._over(ours, topology)
        self.adopted = adopt(ours, config, self.found.facts, topology, index(topology))
        return self._over(self.adopted.settings, topology)

    def tell(self) -> None:
        """Log once what became ours, what differs, and what cannot be read."""
        adopted = self.adopted
        lines = {
            **dict.fromkeys(adopted.adopted if adopted else (), log.info),
            **dict.fromkeys(adopted.differences if adopted else (), log.warning),
            **dict.fromkeys(self.found.problems, log.warning),
        }
        for sentence, level in lines.items():
            if sentence not in self._said:
                level("the kubelet's configuration", says=sentence, file=self.found.path)
        self._said = frozenset(lines)

    async def run(self, agent: Agent, config: Callable[[], AgentConfig]) -> None:
        """Look every few seconds, and put in force what changed, until cancelled."""
        while True:
            await self._sleep(EVERY)
            await self.look(agent, config())

    async def look(self, agent: Agent, config: AgentConfig) -> None:
        """Read it in a thread; where something changed, containers get what follows."""
        if not await asyncio.to_thread(self.read, config):
            return
        before = agent.machine
        settings = await asyncio.to_thread(self.settings, config, before.topology)
        self.tell()
        if settings == before.settings:
            return
        machine = await asyncio.to_thread(with_tables, replace(before, settings=settings))
        if agent.machine is before:
            agent.retopology(machine)
        else:
            self.found = Found()  # somebody else changed the machine meanwhile: once more
