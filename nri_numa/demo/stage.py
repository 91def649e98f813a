"""Stage of the demo: a modelled machine, the plugin process and the runtime in memory."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import click

import nri_numa
from nri_numa.cli.agent_client import AgentClient
from nri_numa.cli.machine import parse_synthetic
from nri_numa.cluster.pods import ContainerRole, PodManifest, container_of, pod_sandbox
from nri_numa.demo.runtime import DemoContainer, DemoContainerState, DemoRuntime, PodOperationFailed
from nri_numa.machine.synthetic import synthetic_sysfs_files
from nri_numa.model.cpuset import CPUSet, union_cpus
from nri_numa.model.machine import Topology
from nri_numa.model.workload import Container, PodSandbox, Resources
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.simulate.manifests import read_manifests_from_text
from nri_numa.text import human_bytes

ANNOTATION_PREFIX = "numa.kubernetes.io/"


class DemoFailure(Exception):
    """An expectation of the demo that was not met."""


SYNTHETIC_MACHINE_TEXT = "synthetic:memory=16Gi,hugepages-2Mi=1Gi"
"""Machine as in ``nri-numa simulate --machine``: two sockets with two NUMA nodes each, and on each
NUMA node four cores of two threads."""


def examples_directory() -> Path:
    """Directory of the example manifests that are installed with the package."""
    return Path(str(importlib.resources.files("nri_numa.demo") / "examples"))


def read_example_pods(name: str) -> list[PodManifest]:
    """Read the pods of one example file."""
    text = (examples_directory() / name).read_text(encoding="utf-8")
    return [
        pod for workload in read_manifests_from_text(text, name).workloads for pod in workload.pods
    ]


class Stage:
    """Plugin and runtime on a modelled machine; a context manager that ends both."""

    def __init__(self, directory: Path) -> None:
        self.machine: Topology = parse_synthetic(SYNTHETIC_MACHINE_TEXT.removeprefix("synthetic:"))
        self._memory = sum(n.memory_bytes for n in self.machine.numa_nodes.values())
        self._directory = directory
        self._socket = directory / "nri.sock"
        self._plugin: asyncio.subprocess.Process | None = None
        self._logged = 0
        self.runtime = DemoRuntime(str(self._socket), self.machine, directory / "cgroup")

    async def __aenter__(self) -> Self:
        for name, text in synthetic_sysfs_files(self.machine).items():
            path = self._directory / "root" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        # Otherwise the plugin would read this node's configuration, kubelet and cgroups.
        config = {
            "apiVersion": "nri-numa/v1",
            "kind": "AgentConfig",
            "kubeletRoot": str(self._directory / "kubelet"),
            "cgroupRoot": str(self._directory / "cgroup"),
        }
        (self._directory / "agent.yaml").write_text(json.dumps(config))
        (self._directory / "cgroup" / "cpuset").mkdir(parents=True)
        await self.runtime.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill_plugin()
        await self.runtime.stop()

    # --- the plugin -------------------------------------------------------------------------------

    async def start_plugin(self) -> int:
        """Start the plugin like a service, wait until it is synchronized, and return its pid."""
        with (self._directory / "plugin.log").open("ab") as log:
            self._logged = log.tell()  # by killed plugins
            plugin = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "nri_numa", "run", "--http", "127.0.0.1:0", "--log-format", "json"),
                *("--config", str(self._directory / "agent.yaml")),
                *("--nri-socket", str(self._socket)),
                *("--state-dir", str(self._directory / "state")),
                *("--sysfs-root", str(self._directory / "root")),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment_without_plugin_settings(),
                # Ctrl-C is for the demo, which then ends the plugin.
                start_new_session=True,
            )
        self._plugin = plugin
        link_task = asyncio.create_task(self.runtime.connected.wait())
        exit_task = asyncio.create_task(plugin.wait())
        await asyncio.wait({link_task, exit_task}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        exit_task.cancel()
        if not link_task.cancel():
            return plugin.pid
        if plugin.returncode is not None:
            raise DemoFailure(f"the plugin ended at once, with status {plugin.returncode}")
        raise DemoFailure("the plugin was not ready within 30 seconds")

    async def kill_plugin(self) -> None:
        """Kill the plugin with SIGKILL, so nothing that it has in memory survives."""
        plugin, self._plugin = self._plugin, None
        if plugin is None:
            return
        with contextlib.suppress(ProcessLookupError):
            plugin.kill()
        await plugin.wait()
        for _ in range(500):  # until the runtime has noticed the closed link
            if not self.runtime.connected.is_set():
                return
            await asyncio.sleep(0.01)
        raise DemoFailure("the runtime did not notice that the plugin ended")

    async def get_document(self, path: str) -> dict[str, Any]:
        """Get a document of the plugin's API."""
        address = await self.wait_for_address()
        try:
            document: dict[str, Any] = await asyncio.to_thread(
                AgentClient(address).get_document, path
            )
        except click.ClickException as error:
            raise DemoFailure(f"{path}: {error.message}") from None
        return document

    async def wait_for_address(self) -> str:
        """Wait for the address of the plugin's page and API."""
        for _ in range(500):  # it serves HTTP after the link is up
            if address := self._find_listen_address():
                return address
            await asyncio.sleep(0.01)
        raise DemoFailure("the plugin does not serve its API")

    def _find_listen_address(self) -> str:
        address = ""
        for line in (self._directory / "plugin.log").read_bytes()[self._logged :].splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if record.get("msg") == "http listening":
                    address = record["address"]
        return address

    # --- pods -------------------------------------------------------------------------------------

    async def run_pod(self, pod: PodManifest) -> list[DemoContainer]:
        """Run a pod as a kubelet would; return its containers in order, ended ones included.

        Raises:
            PodOperationFailed: a container was rejected; the pod is removed again.
        """
        sandbox = pod_message(pod_sandbox(pod))
        await self.runtime.run_pod_sandbox(sandbox)
        containers: list[DemoContainer] = []
        for manifest in pod.containers:
            message = container_message(container_of(pod, manifest, self._memory))
            try:
                container = await self.runtime.create_container(sandbox.id, message)
            except PodOperationFailed:
                await self.runtime.remove_pod(sandbox.id)
                raise
            await self.runtime.start_container(container.id)
            containers.append(container)
            if manifest.role is ContainerRole.INIT:
                await self.runtime.stop_container(container.id)
        return containers

    async def remove_pod(self, pod: PodManifest) -> None:
        """Stop a pod and remove it."""
        await self.runtime.remove_pod(pod_sandbox(pod).id)

    def pod_and_container_name(self, container: DemoContainer) -> str:
        """``pod/container``."""
        pod = self.runtime.pods[container.message.pod_sandbox_id]
        return f"{pod.name}/{container.message.name}"

    def running_containers(self) -> list[DemoContainer]:
        """The running containers, in the order of creation."""
        return [
            c for c in self.runtime.containers.values() if c.state is DemoContainerState.RUNNING
        ]

    def cpus_and_mems_by_container(self) -> dict[str, tuple[str, str]]:
        """CPUs and memory nodes of every running container, by name."""
        return {self.pod_and_container_name(c): (c.cpus, c.mems) for c in self.running_containers()}


def read_assigned_annotation(container: DemoContainer) -> dict[str, Any]:
    """Read the annotation in which the plugin records its decision."""
    text = container.message.annotations.get(f"{ANNOTATION_PREFIX}assigned", "")
    if not text:
        raise DemoFailure(
            f"container {container.message.name} does not carry the annotation "
            f"{ANNOTATION_PREFIX}assigned"
        )
    document: dict[str, Any] = json.loads(text)
    return document


def union_of_container_cpus(containers: Iterable[DemoContainer]) -> CPUSet:
    """Union of the CPUs that containers may run on."""
    return union_cpus(CPUSet.parse(container.cpus) for container in containers)


def _environment_without_plugin_settings() -> dict[str, str]:
    """Copy the environment without variables of the plugin and of the service manager."""
    strange = ("NRI_NUMA_", "NRI_PLUGIN_", "NOTIFY_SOCKET", "WATCHDOG_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(strange)}
    package = str(Path(nri_numa.__file__).resolve().parents[1])
    paths = [package, *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


# --- pods and containers as the NRI messages a runtime sends --------------------------------------


def pod_message(pod: PodSandbox) -> pb.PodSandbox:
    """Build the message of a pod sandbox."""
    message = pb.PodSandbox(
        id=pod.id,
        uid=pod.uid,
        namespace=pod.namespace,
        name=pod.name,
        labels=dict(pod.labels),
        annotations=dict(pod.annotations),
        runtime_handler=pod.runtime_handler,
    )
    message.linux.cgroup_parent = pod.cgroup_parent
    _fill_resources(pod.resources, message.linux.pod_resources)
    return message


def container_message(container: Container) -> pb.Container:
    """Build the message of a container that is being created."""
    message = pb.Container(
        id=container.id,
        pod_sandbox_id=container.pod_id,
        name=container.name,
        labels=dict(container.labels),
        annotations=dict(container.annotations),
    )
    _fill_resources(container.resources, message.linux.resources)
    message.linux.cgroups_path = container.cgroups_path
    if container.oom_score_adj is not None:
        message.linux.oom_score_adj.value = container.oom_score_adj
    return message


def _fill_resources(resources: Resources, message: pb.LinuxResources) -> None:
    """Fill in Linux resources; unset ones and zeros are left out, as a runtime does."""
    for field, value in (
        (message.cpu.shares, resources.cpu_shares),
        (message.cpu.quota, resources.cpu_quota),
        (message.cpu.period, resources.cpu_period),
        (message.memory.limit, resources.memory_limit),
    ):
        if value:
            field.value = value
    for size, amount in sorted(resources.hugepages.items()):
        # ``2MB``: the kubelet's units are powers of 1024 despite the name.
        page = human_bytes(size).replace(" ", "").replace("i", "")
        message.hugepage_limits.add(page_size=page, limit=amount)
