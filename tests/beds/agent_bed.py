"""An agent as the outside meets it: behind its handler, shown by its view, with its log."""

import io
import re
from collections.abc import Callable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from nri_numa.agent.agent import Agent
from nri_numa.agent.handler import AgentHandler, PodObserver
from nri_numa.agent.view import LiveView
from nri_numa.engine.decision import Admitted, Rejected
from nri_numa.engine.node_model import NodeModel
from nri_numa.model.machine import Topology
from nri_numa.model.settings import Settings
from nri_numa.observe import logs
from nri_numa.web.responses import RuntimeLinkStatus
from tests.beds.views import ACTIVE, live_view
from tests.beds.world import World, container, pod, resources
from tests.machines import named as machines


class AgentBed(World):
    """A world of two NUMA nodes whose agent is asked and shown as in a process.

    Its clock stands still until `pass_time`; nothing starts by itself.

    Attributes:
        link: what the view says of the link to the runtime.
        timers: what waits for its time, in the order of arrival.
    """

    view: LiveView
    handler: AgentHandler

    def __init__(
        self, topology: Topology | None = None, settings: Settings | None = None, **more: Any
    ) -> None:
        self.link: RuntimeLinkStatus = ACTIVE
        self.seconds = 0.0
        self.timers: list[Callable[[], object]] = []
        self._output = io.StringIO()
        logs.setup_logging("info", stream=self._output)
        more.setdefault("clock", lambda: self.seconds)
        super().__init__(topology or machines.dual_smt(), settings, **more)
        self.starts = self.ends_whole = False

    def boot(self) -> Agent:
        agent = super().boot()
        self.timing.call_later = lambda seconds, function: self.timers.append(function)  # type: ignore[method-assign]
        self.observe_with()
        self.show()
        return agent

    def observe_with(self, *observers: PodObserver) -> None:
        """Put a handler with these observers in front of the agent."""
        self.handler = AgentHandler(self.agent, observers=observers)

    def show(self, **parts: Any) -> None:
        """Make a view of the agent and these optional parts."""
        self.view = live_view(self.agent, link=self, **parts)
        self.metrics.snapshot = self.view.metrics_snapshot

    def link_document(self) -> RuntimeLinkStatus:
        return self.link

    @property
    def machine(self) -> NodeModel:
        return self.agent.current.machine

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.seconds += seconds

    def create_pod(
        self, name: str, *, cpu_limit: float = 2, memory_gib: float = 0.25, **annotations: str
    ) -> Admitted | Rejected | None:
        """Create shop/NAME with one container, ``main``, whose id is ``c-NAME``."""
        asks = {key.replace("_", "-"): value for key, value in annotations.items()}
        of, wants = pod(name, asks, namespace="shop"), resources(cpu_limit, memory_gib)
        return self.create(of, container(of, "main", wants, id=f"c-{name}"))

    def log(self, words: str = "") -> list[str]:
        """Lines of the log that have these words."""
        return [line for line in self._output.getvalue().splitlines() if words in line]

    def events(self) -> list[str]:
        """What each line of the log says."""
        return re.findall(r'msg=(?:"(.*?)"|\S+)', self._output.getvalue())

    def samples(self, name: str, label: str) -> dict[str, float]:
        """Values of a series in a scrape, without ``nri_numa_``, by the value of a label."""
        return {
            sample.labels[label]: sample.value
            for family in text_string_to_metric_families(self.metrics.render_metrics())
            for sample in family.samples
            if sample.name == f"nri_numa_{name}"
        }
