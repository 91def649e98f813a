"""The node of a recording: its machine, its cgroups as CRI-O and crun make them, and an agent."""

import asyncio
import itertools
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nri_numa.agent.build import build_agent, checkpoint_identity
from nri_numa.agent.current_state import CurrentState
from nri_numa.agent.handler import AgentHandler
from nri_numa.agent.links import LinkStatus
from nri_numa.agent.reconcile import Reconciler
from nri_numa.agent.release import release_all_containers
from nri_numa.agent.systemd_sync import SystemdSync
from nri_numa.config import AgentConfig, derive_settings
from nri_numa.config.sections import CPUWithholdingLimits, RuntimeLinkSection
from nri_numa.engine.node_model import NodeModel
from nri_numa.machine.cgroups import CgroupReader, CgroupWriter, SystemdScopes, cgroup_relative_path
from nri_numa.model.machine import Topology
from nri_numa.nri.link import LinkSettings, NRILink
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.observe.metrics import Metrics
from nri_numa.store.checkpoint import CheckpointStore
from nri_numa.store.files import load_or_create_signing_key
from nri_numa.store.journal import state_from
from tests.beds.cgroup_tree import CgroupTree
from tests.beds.link_bed import link_to
from tests.beds.nri_recording import Answer
from tests.beds.recording_plugin import RecordingPlugin
from tests.beds.world import StillClock
from tests.machines import named as machines
from tests.machines.named import write_sysfs

TOPOLOGIES: Mapping[str, Topology] = {
    "cgroupfs-v1-crun": machines.single_no_smt(cores_per_numa=2, memory_gib=8),
    "systemd-v2-crun": machines.dual_smt(cores_per_numa=2, memory_gib=4),
}
"""The machines of the recordings, by folder, as their README describes them."""


class RecordedCgroups:
    """Cgroups of containers and sandboxes, as CRI-O and crun make them from requests and answers.

    The OCI runtime makes none for a container where ``fails`` is set.

    With the systemd driver a container's program is in crun's own cgroup in the scope, and a
    sandbox is a directory where its path names a scope.
    """

    def __init__(self, root: Path, folder: str, *, fails: bool = False) -> None:
        self.topology, self.by_systemd = TOPOLOGIES[folder], folder.startswith("systemd")
        version = 2 if self.by_systemd else 1
        self.tree = CgroupTree(root, version, self.topology.online, self.topology.memory_nodes)
        self._path_by_id: dict[str, str] = {}
        self._fails = fails

    def on_request(self, method: str, request: Any) -> None:
        """Do what has happened when the runtime sends a request."""
        if method == "RunPodSandbox":
            path = cgroup_relative_path(request.pod.linux.cgroups_path)
            self.tree.write(path.removesuffix(".scope"))
        elif method == "StopPodSandbox":
            path = cgroup_relative_path(request.pod.linux.cgroups_path)
            self.tree.remove(path.removesuffix(".scope"))
        elif method == "StopContainer" and (path := self._path_by_id.pop(request.container.id, "")):
            self.tree.remove(path)
        elif method == "Synchronize":
            for container in request.containers:
                self._create(container)

    def on_answer(self, answer: Answer) -> None:
        """Do what CRI-O does with an answer."""
        request: Any = answer.request
        if request is None or isinstance(answer.actual, str):
            return
        if answer.method == "CreateContainer" and not self._fails:
            container = pb.Container()
            container.CopyFrom(request.container)
            actual: Any = answer.actual
            container.linux.resources.cpu.MergeFrom(actual.adjust.linux.resources.cpu)
            self._create(container)
        if answer.method == "UpdateContainer":
            self._write(request.container.id, request.linux_resources.cpu)
        for update in getattr(answer.actual, "update", ()):
            self._write(update.container_id, update.linux.resources.cpu)

    def allowed(self, container_id: str) -> list[str]:
        """Cpus_allowed_list and Mems_allowed_list of a container.

        All of them for one that the runtime has not mentioned yet.
        """
        cpus = mems = ""
        if path := self._path_by_id.get(container_id, ""):
            paths = [f"{path}/container", path] if self.by_systemd else [path]
            cpus = next(filter(None, map(self.tree.cpus_of, paths)), "")
            mems = next(filter(None, map(self.tree.mems_of, paths)), "")
        return [cpus or str(self.topology.online), mems or str(self.topology.memory_nodes)]

    def settle(self) -> None:
        """Do what the kernel does with what the agent has written."""
        for path in self._path_by_id.values():
            self.tree.settle(path)
            if self.by_systemd:
                self.tree.settle(f"{path}/container")

    def _create(self, container: pb.Container) -> None:
        path = cgroup_relative_path(container.linux.cgroups_path)
        if self._path_by_id.setdefault(container.id, path) and self.tree.directory(path).exists():
            return
        cpu = container.linux.resources.cpu
        self.tree.write(path, cpu.cpus, cpu.mems)
        if self.by_systemd:
            self.tree.write(f"{path}/container")
        self.tree.limit(path, cpu.quota.value or -1)

    def _write(self, container_id: str, cpu: pb.LinuxCPU) -> None:
        path = self._path_by_id.get(container_id, "")
        if not path:
            return
        for each in (path, f"{path}/container") if self.by_systemd else (path,):
            cpus, mems = self.tree.cpus_of(each), self.tree.mems_of(each)
            self.tree.write(each, cpu.cpus or cpus, cpu.mems or mems)
        # With the systemd driver crun leaves the scope's limit.
        if cpu.quota.value and not self.by_systemd:
            self.tree.limit(path, cpu.quota.value)
        elif cpu.quota.value and cpu.period.value:  # crun: a limit for both, no limit for its own
            self.tree.limit(f"{path}/container", cpu.quota.value)
            if cpu.quota.value > 0:
                self.tree.limit(path, cpu.quota.value)


class RecordedAgent:
    """An agent as a process has one, on the node of a recording.

    What it defers is done at once.

    Attributes:
        seconds: how far its clock is ahead.
    """

    def __init__(self, config: AgentConfig, topology: Topology) -> None:
        self.store = CheckpointStore(
            config.state_dir, identity=checkpoint_identity(config), clock=time.time
        )
        loaded = self.store.load()
        key, _ = load_or_create_signing_key(config.state_dir, trusted=True, writable=True)
        self.seconds = 0.0
        metrics, clock = Metrics("test"), StillClock(lambda: time.time() + self.seconds)
        machine = NodeModel(topology=topology, settings=derive_settings(config), key=key)
        current = CurrentState(machine, self.store, clock)
        writer = CgroupWriter(CgroupReader(config.cgroup_root))
        self.agent = build_agent(current, writer, metrics)
        current.restore_state(state_from(loaded.entries)[0])
        status = LinkStatus(current, metrics, config.sysfs_root, over_cri=False, is_launched=False)
        self.link = NRILink(
            AgentHandler(self.agent, (status,)),
            LinkSettings(
                name=config.runtime.plugin_name,
                index="90",
                socket_path=config.runtime.nri_socket,
                delays=lambda: itertools.repeat(0.01),
                push_interval=0.0,
                quiet_seconds=0.0,
            ),
        )
        scopes = SystemdScopes(config.cgroup_root, "/nowhere")
        systemd = SystemdSync(current, self.agent.cgroups, scopes)
        self.reconciler = Reconciler(
            self.agent, systemd, status, self.link.push_updates, SimpleNamespace(config=config)
        )
        self._task = asyncio.create_task(self.link.run())

    async def stop(self) -> None:
        """End it as kill(1) does: nothing more is sent or written."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.store.close()


class AllEventsPlugin:
    """A plugin that would have all events but the validator's, and changes nothing."""

    def __init__(self, socket_path: str) -> None:
        self.handler = RecordingPlugin()
        link = link_to(socket_path, self.handler, name="all-events", index="50", events=0x1FFF)
        self._task = asyncio.create_task(link.run())

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def recorded_config(directory: Path, folder: str) -> AgentConfig:
    """Write the machine of a folder of recordings, and return the configuration of an agent."""
    write_sysfs(directory / "machine", TOPOLOGIES[folder])
    return AgentConfig(
        state_dir=str(directory / "state"),
        sysfs_root=str(directory / "machine"),
        cgroup_root=str(directory / "cgroup"),
        kubelet_root=str(directory / "kubelet"),
        quotas=CPUWithholdingLimits(listed_cpus="100%"),
        runtime=RuntimeLinkSection(nri_socket=str(directory / "nri.sock")),
    )


async def release(config: AgentConfig) -> None:
    """Run ``nri-numa release``; every container gets everything back."""
    report = await release_all_containers(config, identity=checkpoint_identity(config))
    assert (report.is_complete, report.problems) == (True, ()), report
