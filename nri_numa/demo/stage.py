"""What the demo plays on: a modelled machine, the plugin process, and the runtime in memory."""

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
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import Topology
from nri_numa.model.workload import Container, PodSandbox, Resources
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.simulate.manifests import read_manifests_from_text
from nri_numa.text import human_bytes

ANNOTATION_PREFIX = "numa.kubernetes.io/"


class DemoFailure(Exception):
    """Something came out differently from what the demo says; the text says what."""


SYNTHETIC_MACHINE_TEXT = "synthetic:memory=16Gi,hugepages-2Mi=1Gi"
"""As ``nri-numa simulate --machine`` takes it: two sockets with two NUMA nodes each, and on each of
them four cores with two threads."""


def examples_directory() -> Path:
    """The folder of example manifests that is installed with the package."""
    return Path(str(importlib.resources.files("nri_numa.demo") / "examples"))


def read_example_pods(name: str) -> list[PodManifest]:
    """The pods of one example file."""
    text = (examples_directory() / name).read_text(encoding="utf-8")
    return [
        pod for workload in read_manifests_from_text(text, name).workloads for pod in workload.pods
    ]


class Stage:
    """The plugin and the runtime on a modelled machine; a context manager that ends both."""

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
        # A file of its own, or the plugin would read this node's; and nothing else of this node.
        config = {
            "apiVersion": "nri-numa/v1",
            "kind": "AgentConfig",
            "kubeletRoot": str(self._directory / "kubelet"),
            "cgroupRoot": str(self._directory / "cgroup"),
        }
        (self._directory / "agent.yaml").write_text(json.dumps(config))
        await self.runtime.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill_plugin()
        await self.runtime.stop()

    # --- the plugin -------------------------------------------------------------------------------

    async def start_plugin(self) -> int:
        """Start it as a service would, and wait until it is synchronized; returns its pid."""
        with (self._directory / "plugin.log").open("ab") as log:
            self._logged = log.tell()  # by those that were killed
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
        ready = asyncio.create_task(self.runtime.connected.wait())
        ended = asyncio.create_task(plugin.wait())
        await asyncio.wait({ready, ended}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not ready.cancel():
            return plugin.pid
        if plugin.returncode is not None:
            raise DemoFailure(f"the plugin ended at once, with status {plugin.returncode}")
        raise DemoFailure("the plugin was not ready within 30 seconds")

    async def kill_plugin(self) -> None:
        """Kill it with SIGKILL: nothing that it has in memory survives."""
        plugin, self._plugin = self._plugin, None
        if plugin is None:
            return
        with contextlib.suppress(ProcessLookupError):
            plugin.kill()
        await plugin.wait()
        for _ in range(500):  # until the runtime has seen the link break
            if not self.runtime.connected.is_set():
                return
            await asyncio.sleep(0.01)
        raise DemoFailure("the runtime did not notice that the plugin ended")

    async def get_document(self, path: str) -> dict[str, Any]:
        """What the plugin's API answers."""
        address = await self.wait_for_address()
        try:
            document: dict[str, Any] = await asyncio.to_thread(
                AgentClient(address).get_document, path
            )
        except click.ClickException as error:
            raise DemoFailure(f"{path}: {error.message}") from None
        return document

    async def wait_for_address(self) -> str:
        """Where the plugin serves its page and API."""
        for _ in range(500):  # it serves HTTP when containers are served
            if address := self._find_listen_address():
                return address
            await asyncio.sleep(0.01)
        raise DemoFailure("the plugin does not serve its API")

    def _find_listen_address(self) -> str:
        found = ""
        for line in (self._directory / "plugin.log").read_bytes()[self._logged :].splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if record.get("msg") == "http listening":
                    found = record["address"]
        return found

    # --- pods -------------------------------------------------------------------------------------

    async def run_pod(self, pod: PodManifest) -> list[DemoContainer]:
        """Run a pod as a kubelet would; its containers in order, those that ended included.

        Raises:
            CRIError: one was refused; the pod is removed again.
        """
        sandbox = pod_message(pod_sandbox(pod))
        await self.runtime.run_pod_sandbox(sandbox)
        started: list[DemoContainer] = []
        for manifest in pod.containers:
            message = container_message(container_of(pod, manifest, self._memory))
            try:
                made = await self.runtime.create_container(message)
            except PodOperationFailed:
                await self.runtime.remove_pod(sandbox.id)
                raise
            await self.runtime.start_container(made)
            started.append(made)
            if manifest.role is ContainerRole.INIT:
                await self.runtime.exit_container(made)
        return started

    async def remove_pod(self, pod: PodManifest) -> None:
        """Stop a pod and remove it."""
        await self.runtime.remove_pod(pod_sandbox(pod).id)

    def pod_and_container_name(self, container: DemoContainer) -> str:
        """``pod/container``."""
        return f"{self.runtime.pods[container.message.pod_sandbox_id].name}/{container.name_in_pod}"

    def running_containers(self) -> list[DemoContainer]:
        """The running containers, in the order of creation."""
        return [
            c for c in self.runtime.containers.values() if c.state is DemoContainerState.RUNNING
        ]

    def cpus_and_mems_by_container(self) -> dict[str, tuple[str, str]]:
        """CPUs and memory nodes of every running container, by name."""
        return {self.pod_and_container_name(c): (c.cpus, c.mems) for c in self.running_containers()}


def read_assigned_annotation(container: DemoContainer) -> dict[str, Any]:
    """What the plugin wrote on the container about its decision."""
    text = container.message.annotations.get(f"{ANNOTATION_PREFIX}assigned", "")
    if not text:
        raise DemoFailure(
            f"container {container.name_in_pod} does not carry the annotation "
            f"{ANNOTATION_PREFIX}assigned"
        )
    document: dict[str, Any] = json.loads(text)
    return document


def union_of_container_cpus(containers: Iterable[DemoContainer]) -> CPUSet:
    """The CPUs that any of these may run on."""
    bits = 0
    for container in containers:
        bits |= CPUSet.parse(container.cpus).bits
    return CPUSet.from_bits(bits)


def _environment_without_plugin_settings() -> dict[str, str]:
    """Ours, without what would configure the plugin or make it talk to another service manager."""
    strange = ("NRI_NUMA_", "NRI_PLUGIN_", "NOTIFY_SOCKET", "WATCHDOG_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(strange)}
    package = str(Path(nri_numa.__file__).resolve().parents[1])
    paths = [package, *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}


# --- pods and containers as the NRI messages a runtime sends --------------------------------------


def pod_message(pod: PodSandbox) -> pb.PodSandbox:
    """A pod sandbox as the runtime sends it."""
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
    """A container that is about to be created, as the runtime sends it."""
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
    """Linux resources; what is not given is left out, as a runtime does with zeros."""
    for field, value in (
        (message.cpu.shares, resources.cpu_shares),
        (message.cpu.quota, resources.cpu_quota),
        (message.cpu.period, resources.cpu_period),
        (message.memory.limit, resources.memory_limit),
    ):
        if value:
            field.value = value
    for size, amount in sorted(resources.hugepages.items()):
        # ``2MB``: the kubelet's units are 1024 all the same.
        page = human_bytes(size).replace(" ", "").replace("i", "")
        message.hugepage_limits.add(page_size=page, limit=amount)
