"""The real agent as a process, a modelled machine, an embedded runtime: something to look at."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from nri_numa.model.machine import Topology
from nri_numa.nri.wire.pb import nri_pb2 as pb
from tests.beds.embedded.runtime import CRIError, EmbeddedRuntime
from tests.beds.embedded_node import limits
from tests.beds.plugin_process import PluginProcess, free_port
from tests.machines.named import write_sysfs

Result = TypeVar("Result")
PREFIX = "numa.kubernetes.io/"


class PageNode:
    """A node with an agent; the runtime lives in a thread of its own.

    Args:
        directory: for everything; short, since a socket's path is limited to 107 bytes.

    Attributes:
        url: of the page; the same after the agent was started again.
    """

    def __init__(
        self, directory: Path, topology: Topology, config: Mapping[str, Any] | None = None
    ) -> None:
        self.topology = topology
        self.machine = write_sysfs(directory / "machine", topology)
        self._cgroup_root = directory / "cgroup"
        self._cgroups: dict[str, str] = {}
        for name in ("cgroup", "kubelet"):
            (directory / name).mkdir()
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.runtime = EmbeddedRuntime(
            str(directory / "nri.sock"), cpus=str(topology.online), mems=str(topology.memory_nodes)
        )
        self.do(self.runtime.start())
        self.plugin = PluginProcess(
            directory / "agent",
            directory / "nri.sock",
            config={
                "cgroupRoot": str(directory / "cgroup"),
                "kubeletRoot": str(directory / "kubelet"),
                **(config or {}),
            },
            sysfs_root=directory / "machine",
            # The last one counts; the same port after a restart, so that a tab finds it again.
            arguments=[f"--http=127.0.0.1:{self.port}"],
        )

    def do(self, action: Coroutine[Any, Any, Result]) -> Result:
        """Run something in the runtime's thread."""
        return asyncio.run_coroutine_threadsafe(action, self._loop).result(60)

    def start_agent(self) -> None:
        """Start the agent and wait until it places containers and serves the page."""
        self.plugin.start()
        self.do(self.runtime.wait_for_plugin())
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
            except OSError:
                assert time.monotonic() < deadline, self.plugin.log()[-2000:]
                time.sleep(0.02)
            else:
                return

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return json.load(answer)

    def create(self, pod: str, container: str = "server", **wishes: Any) -> str:
        """As `start`, from any thread."""
        return self.do(self.start(pod, container, **wishes))

    async def start(
        self,
        pod: str,
        container: str = "server",
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
        sandbox = pb.PodSandbox(
            name=pod,
            namespace=namespace,
            uid=f"uid-{namespace}-{pod}"[:60],
            annotations={PREFIX + key.replace("_", "-"): text for key, text in annotations.items()},
        )
        sandbox.linux.cgroup_parent = f"/kubepods/{qos + '/' if qos else ''}pod{sandbox.uid}"
        running = await self.runtime.run_pod(sandbox)
        made = pb.Container(name=container)
        made.linux.cgroups_path = f"/kubepods/{abs(hash((namespace, pod, container))):x}"
        made.linux.resources.CopyFrom(limits(cpus, int(memory_gib * (1 << 30))))
        try:
            created = await self.runtime.create_container(running.id, made)
        except CRIError:
            return ""
        self._cgroups[created.id] = made.linux.cgroups_path
        await self.runtime.start_container(created.id)
        return created.id

    def make_cgroup(self, container_id: str, files: Mapping[str, str]) -> None:
        """Give a container a version 2 cgroup with these files."""
        (self._cgroup_root / "cgroup.controllers").touch()
        directory = self._cgroup_root / self._cgroups[container_id].strip("/")
        directory.mkdir(parents=True)
        for name, text in files.items():
            (directory / name).write_text(text)

    def remove(self, container_id: str) -> None:
        self.do(self.runtime.remove_container(container_id))

    def close(self) -> None:
        self.plugin.close()
        self.do(self.runtime.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def page_node(topology: Topology, config: Mapping[str, Any] | None = None) -> Iterator[PageNode]:
    """A node whose agent is not started yet; gone afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="nri-numa-page-"))
    os.chmod(directory, 0o755)
    node = PageNode(directory, topology, config)
    try:
        yield node
    finally:
        with suppress(Exception):
            node.close()
        shutil.rmtree(directory, ignore_errors=True)
