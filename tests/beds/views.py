"""A view over an agent, for tests of what it shows."""

from typing import Any

from nri_numa.agent.agent import Agent
from nri_numa.agent.loop import Clock
from nri_numa.agent.usage import UsageWatches
from nri_numa.agent.view import LiveView, OptionalParts, ProcessInfo
from nri_numa.engine.node_model import MeasuredFree
from nri_numa.web.responses import RuntimeLinkStatus
from tests.beds.world import StillClock

ACTIVE = RuntimeLinkStatus(state="active", detail="", runtime="", runtime_version="")


class Linked:
    """A runtime, and where the link to it stands."""

    def link_document(self) -> RuntimeLinkStatus:
        return ACTIVE


def live_view(
    agent: Agent,
    about: ProcessInfo = ProcessInfo("0", "", 0.0),  # noqa: B008 - a value
    *,
    link: Any = None,
    memory: MeasuredFree | None = None,
    watches: UsageWatches = UsageWatches(),  # noqa: B008 - a value
    clock: Clock | None = None,
    **more: Any,
) -> LiveView:
    """A view; ``more`` stands for collaborators."""
    collaborators = OptionalParts(**more)
    if memory is not None:
        agent.current.set_memory(memory)
    link, clock = link or Linked(), clock or StillClock()
    return LiveView(agent, about, link, collaborators, watches, clock)
