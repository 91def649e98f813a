"""A changed configuration, made ready away from the event loop.

Reading a file may wait for a disk, the first YAML document imports its parser, and a mistake
imports the library that lists all of them: together up to a quarter of a second in which no
container could start. So all of that happens in a thread, down to the tables that decisions need;
what is left for the loop is to put the result in.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Final

import msgspec
from msgspec.structs import replace

from nri_numa import config as configuration
from nri_numa.config import AgentConfig
from nri_numa.engine.decision import Machine
from nri_numa.engine.values.settings import Settings
from nri_numa.errors import ConfigError
from nri_numa.machine.model import Topology

MakeSettings = Callable[[AgentConfig, Topology], Settings]

_TURN: Final = 0.0005
"""Seconds after which the thread lets the loop go on. A request asks for its turn at each of its
system calls, and with Python's 5 ms these added up to twice as long a wait."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration that can be put in force.

    Attributes:
        base: what was in force when it was made.
        config: what is in force then; keys that need a restart have the values of ``base``.
        live: paths that change at once.
        restart: paths that differ and need a restart.
        machine: the topology of then with the new settings.
    """

    base: AgentConfig
    config: AgentConfig
    live: tuple[str, ...]
    restart: tuple[str, ...]
    machine: Machine

    def fits(self, config: AgentConfig, topology: Topology) -> bool:
        """Whether nothing that this was made from has changed since."""
        return self.base is config and self.machine.topology is topology


def _ours(config: AgentConfig, topology: Topology) -> Settings:
    return configuration.settings(config)


def prepare(
    load: Callable[[], AgentConfig],
    base: AgentConfig,
    machine: Machine,
    settings: MakeSettings = _ours,
) -> Prepared:
    """Read a configuration and make everything ready; touches nothing that others use.

    Args:
        load: reads and checks it.
        base: what is in force now.
        machine: in force now.
        settings: makes the engine's settings of it.

    Raises:
        ConfigError: with every mistake.
    """
    new = load()
    problems = configuration.problems(new, machine.topology)
    if problems:
        raise ConfigError("configuration", problems)
    live, restart = configuration.changes(base, new)
    # What waits for a restart keeps its old value, so that the next reload names it again.
    config = configuration.reloaded(base, new) if live else base
    return Prepared(
        base=base,
        config=config,
        live=live,
        restart=restart,
        machine=with_tables(replace(machine, settings=settings(config, machine.topology))),
    )


async def prepare_aside(
    load: Callable[[], AgentConfig],
    base: AgentConfig,
    machine: Machine,
    settings: MakeSettings = _ours,
) -> Prepared:
    """`prepare` in a thread that gives way to the loop."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(_TURN)
    try:
        return await asyncio.to_thread(prepare, load, base, machine, settings)
    finally:
        sys.setswitchinterval(usual)


def with_tables(machine: Machine) -> Machine:
    """The machine with its tables made, so that no container waits for those that all need."""
    _ = machine.index, machine.cpu_total, machine.memory_capacity, machine.cpu_milli
    return machine
