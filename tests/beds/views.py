"""A view over an agent, for tests of what it shows."""

from typing import Any

from nri_numa.agent.agent import Agent
from nri_numa.agent.capacity import StealWatch
from nri_numa.agent.kubelet_sync import KubeletConfigWatch, KubeletSync
from nri_numa.agent.links import NodeDevices
from nri_numa.agent.usage import UsageWatch, UsageWatches
from nri_numa.agent.view import LiveView, ProcessInfo, ShownParts
from nri_numa.config import AgentConfig
from nri_numa.engine.node_model import MeasuredFree
from nri_numa.kubelet.state_files import KubeletStateFiles
from nri_numa.web.responses import RuntimeLinkStatus

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
    watches: UsageWatches | None = None,
    **more: Any,
) -> LiveView:
    """A view; ``more`` stands for collaborators."""
    config, kubelet = AgentConfig(), KubeletConfigWatch("/nowhere")
    files = KubeletStateFiles("/nowhere")
    parts = {
        "kubelet": KubeletSync(agent.current, agent.metrics, files, kubelet),
        "devices": NodeDevices(config),
        "measured": StealWatch(
            config.measured_capacity, "/nowhere", agent.metrics, agent.current.clock
        ),
    }
    collaborators = ShownParts(**{**parts, **more})
    if memory is not None:
        agent.current.set_memory(memory)
    watches = watches or UsageWatches(UsageWatch(agent, config))
    return LiveView(agent, about, link or Linked(), collaborators, watches)
