"""A whole node for fault tests: the embedded runtime, the plugin as a process, and cgroup files.

The runtime lives on a loop in a thread, so that tests read as plain steps. Whatever it decides is
written into the files of a cgroup tree, which the plugin looks for drift in. `Node.check` is what
must hold after every fault: nobody moved, no CPU is owned twice, nothing of a live container is
lost. Free of pytest.
"""

import asyncio
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from click.testing import CliRunner

from nri_numa.cli import cli
from nri_numa.demo.runtime import DemoContainer, DemoContainerState, PodOperationFailed
from nri_numa.machine.cgroups import cgroup_relative_path
from nri_numa.model.cpuset import NO_CPUS, CPUSet
from nri_numa.model.machine import Topology
from nri_numa.nri.wire.pb import nri_pb2 as pb
from tests.beds import fault_prelude
from tests.beds.cgroup_tree import CgroupTree
from tests.beds.cri import poll as until
from tests.beds.embedded_runtime import CONTAINERD_2_4, CRI_O_1_37, EmbeddedProfile, EmbeddedRuntime
from tests.beds.loop_thread import LoopThread
from tests.beds.plugin_process import PluginProcess
from tests.machines import named as machines
from tests.machines.named import write_sysfs

PREFIX = "numa.kubernetes.io/"
RUNTIMES: Mapping[str, Mapping[str, Any]] = {
    "containerd": {},
    "cri-o": {"profile": CRI_O_1_37, "version": 2},
}
"""Arguments of a node, by what its runtime behaves like."""


def limits(cpus: float, memory: int = 1 << 28) -> pb.LinuxResources:
    """What a container with limits of CPUs and bytes has; 0 for none."""
    resources = pb.LinuxResources()
    if cpus:
        resources.cpu.quota.value = int(cpus * 100_000)
        resources.cpu.period.value = 100_000
        resources.cpu.shares.value = int(cpus * 1024)
    if memory:
        resources.memory.limit.value = memory
    return resources


def pod_message(
    name: str, annotations: Mapping[str, str], qos: str = "", namespace: str = "default"
) -> pb.PodSandbox:
    """A pod; annotation keys without the prefix.

    `qos`: ``burstable/``, ``besteffort/`` or empty for Guaranteed.
    """
    message = pb.PodSandbox(
        name=name,
        namespace=namespace,
        uid=f"uid-{name}",
        annotations={PREFIX + key: value for key, value in annotations.items()},
    )
    message.linux.cgroup_parent = f"/kubepods/{qos}pod{name}"
    return message


# What a process imports is most of what its start costs: these are forks of one that has.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["nri_numa.cli.processes", *(f"nri_numa.agent.{n}" for n in ("daemon", "http_api", "view"))]
)


class Forked:
    """A process of the fork server's, as far as `subprocess.Popen` would show it."""

    def __init__(self, *given: Any) -> None:
        self._process = _FORKS.Process(target=fault_prelude.forked, args=given, daemon=True)
        self._process.start()
        self.pid = self._process.pid or 0

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("nri-numa", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class FaultyPlugin(PluginProcess):
    """A plugin whose process begins with a prelude that breaks something (see `fault_prelude.py`).

    Attributes:
        fault: what to break at the next start; empty for nothing.
    """

    fault: str = ""

    def words(self) -> list[str]:
        if not self.fault:
            return super().words()
        python, _, _, *rest = super().words()
        return [python, fault_prelude.__file__, self.fault, *rest]

    def _spawn(self) -> Any:
        # A clock has to jump, and rights to be missing, before anything is imported.
        if self.python != sys.executable or self.fault.startswith(("clock", "confined")):
            return super()._spawn()
        words = [self.fault, *super().words()[3:]]
        return Forked(words, self.environment, str(self.directory), str(self.log_file))


@dataclass(frozen=True, slots=True)
class Pinned:
    """What a container was seen to have, once it was right."""

    kind: str
    cpus: CPUSet
    mems: str


class EmbeddedNode(LoopThread):
    """One node; a context manager that ends everything it started.

    Args:
        directory: for the plugin, the machine's files and the cgroups; short.
        topology: the machine; 2 sockets with 2 NUMA nodes of 8 CPUs each when None.
        request_timeout: seconds the runtime waits.
        state_directory: of the plugin, below ``directory`` when None.
        mirrored: whether containers have cgroups, which follow the runtime.
        version: of the cgroups; what comes of a list follows a moment after it on version 2.
        profile: CRI-O has systemd's cgroups, its default.
    """

    def __init__(
        self,
        directory: Path,
        *,
        topology: Topology | None = None,
        config: Mapping[str, Any] | None = None,
        request_timeout: float = 2.0,
        state_directory: Path | None = None,
        mirrored: bool = True,
        version: int = 1,
        profile: EmbeddedProfile = CONTAINERD_2_4,
    ) -> None:
        self.directory = directory
        self.topology = topology or machines.snc_smt(memory_gib=64)
        self.cgroups = CgroupTree(
            directory / "cgroup", version, self.topology.online, self.topology.memory_nodes
        )
        self.sysfs_root = directory / "machine"
        self.write_machine(self.topology)
        self.socket = directory / "nri.sock"
        self.runtime = EmbeddedRuntime(
            str(self.socket),
            profile=profile,
            topology=self.topology,
            cgroups=self.cgroups if mirrored else None,
            request_timeout=request_timeout,
        )
        self.config = {
            "cgroupRoot": str(self.cgroups.root),
            "kubeletRoot": str(directory / "kubelet"),
            **(config or {}),
        }
        self.plugin = FaultyPlugin(
            directory / "plugin", self.socket, config=self.config, sysfs_root=self.sysfs_root
        )
        if state_directory is not None:
            self.plugin.state_directory = state_directory
        self.others: list[PluginProcess] = []
        self.pinned: dict[str, Pinned] = {}
        self._numbers = itertools.count()
        super().__init__()

    # --- life -------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.call(self.runtime.start())
        self._settle_task = self.submit(self._settle_for_ever())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            print(self.plugin.log()[-6000:])
        for plugin in (self.plugin, *self.others):
            plugin.close()
        self._settle_task.cancel()
        self.call(self.runtime.stop())
        self.end()

    def write_machine(self, topology: Topology) -> None:
        write_sysfs(self.sysfs_root, topology)

    def start(self, fault: str = "", *, wait: bool = True) -> None:
        """Start the plugin.

        `fault`: see `FaultyPlugin`.
        """
        self.plugin.fault = fault
        self.plugin.start(wait=wait)

    @property
    def connections(self) -> int:
        """How often any plugin process of this node became active."""
        records = self.plugin.records()
        return sum(r.get("msg") == "link changed" and r.get("state") == "active" for r in records)

    def reconnected(self, before: int) -> None:
        """Wait until the plugin is active once more than ``before``, and the runtime knows it."""
        until(lambda: self.connections > before, "the plugin is back")
        self.call(self.runtime.wait_for_plugin())

    def restart_runtime(self) -> None:
        """The runtime dies and comes back with the containers it had, on a new socket."""

        async def again() -> None:
            await self.runtime.stop()
            await asyncio.sleep(0.05)
            await self.runtime.start()

        self.call(again())

    def new_socket(self) -> None:
        """Listen on a new socket under the old name, connections untouched."""

        async def again() -> None:
            if self.runtime._server is not None:
                self.runtime._server.close()
            await self.runtime.start()

        self.call(again())

    # --- cgroups ----------------------------------------------------------------------------------

    async def _settle_for_ever(self) -> None:
        """Do what the kernel does with what the plugin has written."""
        while True:
            for container in self.live:
                self.cgroups.settle(self.cgroup(container.id))
            await asyncio.sleep(0.02)

    def cgroups_path(self, container_id: str) -> str:
        """Return the cgroupsPath of a container or sandbox as the runtime tells it."""
        if self.runtime.profile.is_crio:
            return f"kubepods.slice:crio:{container_id}"
        return f"/kubepods/{container_id}"

    def cgroup(self, container_id: str) -> str:
        """Return the path of a container's cgroup below the hierarchy's root."""
        return f"/{cgroup_relative_path(self.cgroups_path(container_id))}"

    def tamper(self, container: DemoContainer, cpus: str, mems: str = "") -> None:
        """Write into a container's cgroup behind everybody's back."""
        self.do(lambda: self.cgroups.write(self.cgroup(container.id), cpus, mems))

    # --- pods -------------------------------------------------------------------------------------

    def pod(
        self,
        name: str,
        annotations: Mapping[str, str],
        qos: str = "",
        given: pb.LinuxResources | None = None,
    ) -> pb.PodSandbox:
        message = pod_message(name, annotations, qos)
        if given is not None:
            message.linux.pod_resources.CopyFrom(given)
        message.id = f"sandbox-{name}-{next(self._numbers)}"
        message.linux.cgroups_path = self.cgroups_path(message.id)
        return self.call(self.runtime.run_pod(message))

    def create(
        self, pod: pb.PodSandbox, *, cpus: float = 0, memory: int = 1 << 28, name: str = "app"
    ) -> DemoContainer:
        message = pb.Container(name=name)
        message.linux.resources.CopyFrom(limits(cpus, memory))
        message.id = f"{pod.name}-{name}-{len(self.runtime.calls)}"
        message.linux.cgroups_path = self.cgroups_path(message.id)
        return self.call(self.runtime.create_container(pod.id, message))

    def run(
        self, name: str, annotations: Mapping[str, str], *, cpus: float = 0, qos: str = ""
    ) -> DemoContainer:
        container = self.create(self.pod(name, annotations, qos), cpus=cpus)
        self.begin(container)
        return container

    def begin(self, container: DemoContainer) -> None:
        """Start a created container; it has its cgroup when this returns."""
        self.call(self.runtime.start_container(container.id))

    def owner(self, name: str = "owner", cpus: int = 2) -> DemoContainer:
        return self.run(name, {"policy": "single-numa-node"}, cpus=cpus)

    def listed(self, name: str = "listed", cpus: str = "1", mems: str = "0") -> DemoContainer:
        return self.run(name, {"numacpu": cpus, "numamem": mems})

    def shared(self, name: str = "shared") -> DemoContainer:
        asks = {"policy": "best-effort", "cpus": "shared"}
        return self.run(name, asks, cpus=0.5, qos="burstable/")

    def free(self, name: str = "free") -> DemoContainer:
        return self.run(name, {}, qos="besteffort/")

    def four(self) -> list[DemoContainer]:
        """One of each sort; what they have is kept for `check`."""
        made = [self.free(), self.listed(), self.shared(), self.owner()]
        self.keep()
        return made

    def remove(self, container: DemoContainer) -> None:
        self.call(self.runtime.remove_pod(container.message.pod_sandbox_id))
        self.pinned.pop(container.id, None)

    # --- what must hold ---------------------------------------------------------------------------

    @property
    def live(self) -> list[DemoContainer]:
        containers = list(self.runtime.containers.values())
        return [c for c in containers if c.state is DemoContainerState.RUNNING]

    def metric(self, name: str, **labels: str) -> float:
        """A metric of the plugin, as soon as it can be asked."""
        return self.plugin.metric(name, **labels)

    def says(self, *command: str, status: int | None = None) -> str:
        """What a command of ours that asks the plugin prints, in one line."""
        done = CliRunner().invoke(cli, [*command, f"--api=http://{self.plugin.address}"])
        assert status in (None, done.exit_code), done.output
        return " ".join(done.output.split())

    def assignments(self) -> dict[str, dict[str, Any]]:
        """What the plugin says that each container has."""
        found = self.plugin.json("/v1/assignments")["containers"]
        return {one["id"]: one for one in found}

    def note(self, container: DemoContainer, kind: str) -> None:
        """Remember what a container was given, if the plugin lived to give it something."""
        cpu = container.message.linux.resources.cpu
        if cpu.cpus:
            self.pinned[container.id] = Pinned(kind, CPUSet.parse(cpu.cpus), cpu.mems)

    def keep(self) -> None:
        kinds = self.assignments()
        for container in self.live:
            cpu = container.message.linux.resources.cpu
            kind = kinds[container.id]["kind"]
            self.pinned[container.id] = Pinned(kind, CPUSet.parse(container.cpus), cpu.mems)

    def problem(self) -> str:
        """What does not hold now; empty when all does."""
        told = self.assignments()
        live = {c.id: c for c in self.live}
        # CPUs kept for a pod belong to a container that has ended, or to none yet.
        told = {i: one for i, one in told.items() if one["kind"] != "reservation"}
        if missing := live.keys() - told.keys():
            return f"the plugin lost {sorted(missing)}"
        containers = list(self.runtime.containers.values())
        present = {c.id for c in containers if c.state is not DemoContainerState.EXITED}
        if stale := told.keys() - present:
            return f"the plugin remembers {sorted(stale)}, which are gone"
        owned = NO_CPUS
        for container_id, container in live.items():
            if told[container_id]["kind"] != "exclusive":
                continue
            cpus = CPUSet.parse(container.cpus)
            if cpus & owned:
                return f"CPUs {cpus & owned} are owned twice"
            if str(cpus) != told[container_id]["cpus"]:
                return f"{container_id} has {cpus}, the plugin means {told[container_id]['cpus']}"
            owned = owned | cpus
        for container_id, container in live.items():
            cpus = CPUSet.parse(container.cpus)
            kind = told[container_id]["kind"]
            if kind != "exclusive" and cpus & owned:
                return f"{container_id} ({kind}) runs on owned CPUs {cpus & owned}"
            before = self.pinned.get(container_id)
            if before is None or kind in ("shared", "unpinned"):
                continue
            mems = container.message.linux.resources.cpu.mems
            if (kind, cpus, mems) != (before.kind, before.cpus, before.mems):
                return f"{container_id} moved from {before} to {kind} {cpus} {mems}"
        value = self.metric("nri_numa_invariant_violations_total")
        if value:
            return f"{value:g} invariant violations"
        return ""

    def check(self, timeout_s: float = 180.0) -> None:
        """Nobody moved, nothing is owned twice, nothing is lost; waits for updates on their way."""
        said = ""

        def holds() -> bool:
            nonlocal said
            said = self.problem()
            return not said

        try:
            until(holds, "the node is right", timeout_s=timeout_s)
        except TimeoutError:
            raise AssertionError(f"{said}\n{self.plugin.log()[-4000:]}") from None
        # Of those with CPUs of their own nobody may have moved, not even for a moment.
        for container_id, before in self.pinned.items():
            container = self.runtime.containers.get(container_id)
            if container is not None and before.kind in ("exclusive", "listed"):
                assert CPUSet.parse(container.cpus) == before.cpus

    def usable(self) -> None:
        """New containers are placed, on CPUs that nobody owns, and what they had comes back."""
        late = self.owner("late")
        self.check()
        self.remove(late)
        self.check()

    def logged(self, text: str) -> None:
        until(lambda: text in self.plugin.log(), f"a log line with {text!r}")


__all__ = ["EmbeddedNode", "FaultyPlugin", "Pinned", "PodOperationFailed", "until"]


THOROUGH = os.environ.get("NRI_NUMA_FAULTS") == "all"
"""Every step and every byte, instead of a selection that takes a minute."""
