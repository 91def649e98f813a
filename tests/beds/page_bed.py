"""A served agent on a modelled machine, in a thread, with pods to look at."""

import asyncio
import time
from contextlib import closing

from msgspec.structs import replace

from nri_numa.agent.http_api import AgentServer
from nri_numa.agent.view import ProcessInfo
from nri_numa.config import HTTP
from nri_numa.engine.node_model import NodeModel
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import PCIDevice, Topology
from nri_numa.model.settings import Settings
from nri_numa.observe.metrics import Metrics
from nri_numa.web.responses import RuntimeLinkStatus
from tests.beds import world
from tests.beds.loop_thread import LoopThread
from tests.beds.views import live_view
from tests.beds.world import StillClock, agent_of


class PageBed(LoopThread):
    """Everything runs in one thread with its own loop; `do` runs something in there."""

    def __init__(
        self, topology: Topology, settings: Settings | None = None, *, token_file: str = ""
    ) -> None:
        self.version = "0.1.0"
        self.pci: tuple[PCIDevice, ...] | None = None
        self.roots: dict[int, tuple[str, ...]] = {}
        settings = settings or Settings(reserved_cpus=CPUSet([0]))
        self.clock = StillClock(time.time)
        self.agent = agent_of(NodeModel(topology=topology, settings=settings), clock=self.clock)
        self.agent.current.synchronized = True
        self.link = RuntimeLinkStatus(
            state="active", detail="", runtime="containerd", runtime_version="v2.1.9"
        )
        self._section = HTTP(address="127.0.0.1:0", token_file=token_file)
        super().__init__()
        self.address: tuple[str, int] = ("127.0.0.1", 0)
        self.serve()

    def link_document(self) -> RuntimeLinkStatus:
        return self.link

    def counted(self) -> None:
        """Nobody counts devices."""

    @property
    def url(self) -> str:
        return f"http://{self.address[0]}:{self.address[1]}/"

    def serve(self) -> None:
        """Listen; on the same port as before after a stop."""
        about = ProcessInfo(self.version, "worker-7.example.org", time.time())
        view = live_view(self.agent, about, link=self, devices=self)
        section = HTTP(address=f"127.0.0.1:{self.address[1]}", token_file=self._section.token_file)
        self._server = AgentServer(section, view, Metrics("0"))
        self.call(self._server.start())
        assert self._server.address is not None
        self.address = self._server.address

    def hang_up(self) -> None:
        self.call(self._server.stop())

    def close(self) -> None:
        self.hang_up()

        async def settle() -> None:
            # A browser may have connected while the listener was closed.
            others = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*others, return_exceptions=True)

        self.call(settle())
        self.end()

    def create(
        self,
        pod: str,
        container: str = "server",
        *,
        namespace: str = "shop",
        cpus: float = 1,
        memory: int = 1 << 28,
        pinned: str = "",
        **annotations: str,
    ) -> None:
        """A Guaranteed container; somebody else set ``pinned`` as its cpuset already."""
        asked = {key.replace("_", "-"): text for key, text in annotations.items()}
        sandbox = replace(
            world.pod(pod, asked, namespace=namespace),
            id=f"sandbox-{namespace}-{pod}",
            uid=f"uid-{namespace}-{pod}",
        )
        made = world.container(
            sandbox,
            container,
            replace(world.resources(cpus, memory / world.GIB), cpus=pinned),
            id=f"{hash((namespace, pod, container)) & (1 << 64) - 1:064x}",
        )
        self.do(lambda: self.agent.create_container(sandbox, made))

    def populate(self) -> None:
        """One of everything, and something on most NUMA nodes."""
        topology = self.agent.current.machine.topology
        largest = min(len(n.cpus) for n in topology.numa_nodes.values() if n.cpus)
        for n in range(min(40, 2 * len(topology.cpu_nodes))):
            self.create(
                f"train-{n}-7d4b9c6f5d-x2x1{n}",
                cpus=max(1, largest // 4),
                memory=1 << 30,
                policy="single-numa-node",
            )
        for n in range(6):
            self.create(f"web-{n}", namespace="front", cpus=0.5, policy="best-effort")
        for n in range(3):
            self.create(f"plain-{n}", namespace="kube-system", cpus=0.25)
        self.create("listed", numacpu="1", numamem="0")
        self.create("greedy", cpus=len(topology.online) + 1, policy="restricted")


def page_bed(
    topology: Topology, settings: Settings | None = None, *, token_file: str = ""
) -> closing[PageBed]:
    return closing(PageBed(topology, settings, token_file=token_file))
