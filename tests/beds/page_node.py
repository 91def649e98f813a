"""The real agent as a process, a modelled machine, an embedded runtime: something to look at."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nri_numa.demo.runtime import PodOperationFailed
from nri_numa.model.machine import Topology
from nri_numa.nri.wire.pb import nri_pb2 as pb
from tests.beds.embedded_node import EmbeddedNode, limits, pod_message, until
from tests.beds.plugin_process import free_port


class PageNode:
    """A node without cgroups that is to be looked at.

    Attributes:
        url: of the page; the same after the agent was started again, so that a tab finds it.
    """

    def __init__(self, node: EmbeddedNode) -> None:
        self._node, self.do = node, node.call
        self.runtime, self.plugin = node.runtime, node.plugin
        self.topology, self.machine = node.topology, node.sysfs_root
        self.plugin.port = free_port()
        self.url = f"http://127.0.0.1:{self.plugin.port}/"

    def start_agent(self) -> None:
        """Start the agent and wait until it places containers and serves the page."""
        self.plugin.start()
        self.do(self.runtime.wait_for_plugin())
        until(self.plugin.responsive, "the page")

    def get(self, path: str) -> Any:
        return self.plugin.json(f"/{path}")

    def create(self, pod: str, **wishes: Any) -> str:
        return self.do(self.start(pod, **wishes))

    async def start(
        self,
        pod: str,
        *,
        namespace: str = "shop",
        cpus: float = 0,
        memory_gib: float = 0,
        qos: str = "",
        **annotations: str,
    ) -> str:
        """Run a pod with one container.

        `qos`: ``burstable``, ``besteffort`` or empty for Guaranteed.

        Returns:
            The container's id; empty when it was refused.
        """
        asked = {key.replace("_", "-"): text for key, text in annotations.items()}
        message = pod_message(pod, asked, f"{qos}/" if qos else "", namespace)
        running = await self.runtime.run_pod(message)
        made = pb.Container(name="server", id=f"{namespace}-{pod}")
        made.linux.cgroups_path = self._node.cgroup(made.id)
        made.linux.resources.CopyFrom(limits(cpus, int(memory_gib * (1 << 30))))
        try:
            created = await self.runtime.create_container(running.id, made)
        except PodOperationFailed:
            return ""
        await self.runtime.start_container(created.id)
        return created.id

    def make_cgroup(self, container_id: str, files: Mapping[str, str]) -> None:
        directory = self._node.cgroups.directory(self._node.cgroup(container_id))
        directory.mkdir(parents=True)
        for name, text in files.items():
            (directory / name).write_text(text)


@contextmanager
def page_node(topology: Topology, config: Mapping[str, Any] | None = None) -> Iterator[PageNode]:
    """A node whose agent is not started yet; gone afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="nri-numa-page-") as directory,
        EmbeddedNode(
            Path(directory), topology=topology, config=config, mirrored=False, version=2
        ) as node,
    ):
        yield PageNode(node)
