"""The controller's page on made-up nodes, served in a thread; no API server is asked."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from nri_numa.cluster.cluster_state import ClusterState
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.config import AgentConfig
from nri_numa.config.sections import ClusterPageSection as Section
from nri_numa.config.sections import Controller
from nri_numa.controller.overview import ClusterPage as ServedPage
from nri_numa.controller.overview import Overview
from nri_numa.controller.service import TOPOLOGIES_PATH
from nri_numa.kube.api import Watch
from nri_numa.scheduler.candidates import VerdictCache
from nri_numa.web.server import MetricsAndProbeServer
from tests.beds.cluster_objects import ClusterObjects
from tests.beds.loop_thread import LoopThread

PREFIX = "numa.kubernetes.io"


class _Unwatched:
    """No API server is asked: documents come by `ClusterPage.tell`."""

    def on_update(self, document: dict[str, Any]) -> None:
        raise AssertionError(document)

    def on_delete(self, document: dict[str, Any]) -> None:
        raise AssertionError(document)

    def on_list(self, keys: frozenset[str]) -> None:
        raise AssertionError(keys)


class ClusterPage(LoopThread):
    """The served page."""

    def __init__(self, token_file: Path | None = None, node_url: str = "") -> None:
        section = Section(enabled=True, token_file=str(token_file or ""), node_url=node_url)
        config = AgentConfig(controller=Controller(address="127.0.0.1:0", page=section))
        self._nodes = ClusterState(PREFIX)
        candidates = VerdictCache(self._nodes, config.strategy)
        self._overview = Overview(config, self._nodes, candidates, PodReader(config))
        self._watch = Watch(ClusterObjects(), TOPOLOGIES_PATH, _Unwatched())
        page = ServedPage(config, self._overview, self._watch)
        super().__init__()
        self._server = MetricsAndProbeServer(
            "127.0.0.1",
            metrics=lambda: b"",
            unready_reason=lambda: "this replica does not lead",
            routes=[*page.http_routes()],
        )
        self.serve()
        self.url = f"http://127.0.0.1:{self._server.listening_port}/cluster/"

    def serve(self) -> None:
        """Listen; on the same port as before after a stop."""
        self.do(lambda: self._server.listen_on_port(self._server.listening_port))

    def hang_up(self) -> None:
        self.call(self._server.stop())

    def tell(self, *documents: Mapping[str, Any], drained: Mapping[str, str] | None = None) -> None:
        """Nodes with what they publish; the first time says that these are all."""

        def told() -> None:
            for one in documents:
                name = one["metadata"]["name"]
                text = (drained or {}).get(name, "")
                drained_by = {f"{PREFIX}/drained": text} if text else {}
                node = {"metadata": {"annotations": drained_by}, "status": one.get("status")}
                self._nodes.update_node(name, node)
                if "zones" in one:
                    self._nodes.update_topology(name, one, 0.0)
            self._watch.synced.set()

        self.do(told)

    def lose(self, problem: str) -> None:
        self._watch.problem = problem

    def forget(self, name: str) -> None:
        self.do(lambda: self._nodes.remove_node(name))
        self.do(lambda: self._nodes.remove_topology(name))

    def close(self) -> None:
        self.hang_up()
        self.end()


def cluster_page(token_file: Path | None = None, node_url: str = "") -> closing[ClusterPage]:
    return closing(ClusterPage(token_file, node_url))
