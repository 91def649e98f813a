"""The link by the configuration's ``runtime.link``: NRI, or CRI where the runtime has no NRI."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nri_numa.config import AgentConfig, LinkKind
from nri_numa.machine.cgroups import CgroupReader, CgroupWriter
from nri_numa.node.agent import Agent
from nri_numa.nri.adapter import Adapter
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import Metrics

if TYPE_CHECKING:
    from nri_numa.cri_link.link import CRILink
    from nri_numa.node.late import LateStarts

log = get_logger("daemon")


def over_cri(config: AgentConfig, *, launched: bool = False) -> bool:
    """Whether the runtime is reached over CRI; never where it launched us over NRI itself."""
    if config.runtime.link is not LinkKind.CRI:
        return False
    if launched:
        log.warning("runtime.link: cri is not used", because="the runtime launched us over NRI")
    return not launched


def claimed_socket(config: AgentConfig, *, launched: bool = False) -> str:
    """The socket whose directory says that an agent works on this runtime."""
    if over_cri(config, launched=launched):
        return config.runtime.cri_socket.removeprefix("unix://")
    return config.runtime.nri_socket


def late_starts(
    agent: Agent, metrics: Metrics, reader: CgroupReader, writer: CgroupWriter
) -> LateStarts:
    """Who puts late containers right; only where they can be late."""
    from nri_numa.node.late import LateStarts

    return LateStarts(agent, metrics, reader, writer)


def cri_link(config: AgentConfig, adapter: Adapter, late: LateStarts) -> CRILink:
    """The link over CRI; grpc is imported here and not before."""
    from nri_numa.cri_link.connection import Ears
    from nri_numa.cri_link.link import CRILink

    return CRILink(
        adapter,
        socket_path=config.runtime.cri_socket,
        ears=Ears(
            refused=late.refused,
            begun=late.begun,
            started=late.started,
            resize_refused=late.resize_refused,
            gone=late.gone,
        ),
    )
