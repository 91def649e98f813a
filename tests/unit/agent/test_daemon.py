"""What the parts of the running agent tell each other; a life of it within this process."""

import asyncio
import io
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nri_numa.agent.daemon import build_daemon
from nri_numa.agent.loop import LoopMonitor
from nri_numa.agent.runtime_lock import RuntimeLock
from nri_numa.config import AgentConfig, load_config
from nri_numa.demo.runtime import PodOperationFailed
from nri_numa.engine.state import ContainerKind
from nri_numa.model.settings import Settings
from nri_numa.model.workload import PodTable
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.observe import logs
from nri_numa.runtime import RuntimeInfo
from tests.beds.embedded_node import PREFIX, limits
from tests.beds.embedded_runtime import EmbeddedRuntime
from tests.beds.link_bed import eventually
from tests.beds.world import container, pod, resources
from tests.machines import named as machines


class DaemonBed:
    """A daemon on a machine with two NUMA nodes of 32 CPUs, and a file for it."""

    def __init__(self, directory: Path) -> None:
        machines.write_sysfs(directory / "root", machines.dual_smt())
        self.runtime, self.api = str(directory / "nri.sock"), str(directory / "api.sock")
        self.file = {
            "sysfsRoot": str(directory / "root"),
            "stateDir": str(directory / "state"),
            "cgroupRoot": str(directory / "cgroup"),
            "kubeletRoot": str(directory / "kubelet"),
            "runtime": {"nriSocket": self.runtime},
            "http": {"address": "off", "socket": self.api},
        }
        self.switch_intervals: list[float] = []
        self.output = io.StringIO()
        logs.setup_logging("info", stream=self.output)
        self.daemon = build_daemon(self.load(), self.load, LoopMonitor())

    def load(self, drop_in: str = "") -> AgentConfig:
        self.switch_intervals.append(sys.getswitchinterval())
        return load_config(text=json.dumps(self.file))

    async def ask(self, path: str) -> Any:
        await eventually(lambda: os.path.exists(self.api))
        reader, writer = await asyncio.open_unix_connection(self.api)
        writer.write(
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        )
        answer = await reader.read()
        writer.close()
        return json.loads(answer.partition(b"\r\n\r\n")[2])

    async def said(self, words: str, times: int = 1) -> None:
        await eventually(lambda: self.output.getvalue().count(words) >= times)


@pytest.fixture
def bed(tmp_path: Path) -> DaemonBed:
    return DaemonBed(tmp_path)


@pytest.mark.parametrize(("told", "decided"), [(2.0, 3), (0.8, 1)])
async def test_the_time_that_the_runtime_tells_counts_for_its_synchronisation(
    bed: DaemonBed, told: float, decided: int
) -> None:
    """Each look at the clock costs 0.25 s; what is decided later follows after the answer."""
    agent, looks = bed.daemon.agent, itertools.count()
    bed.daemon.node.current.clock.monotonic = lambda: next(looks) / 4  # type: ignore[method-assign]
    bed.daemon.link.handler.on_runtime_configured(
        RuntimeInfo(
            name="containerd",
            version="2.2.0",
            nri_version="0.11.0",
            registration_timeout=5.0,
            request_timeout=told,
            config="",
        )
    )
    pods = [pod(f"p{n}", {"policy": "single-numa-node"}) for n in range(4)]
    agent.synchronize(
        PodTable.from_pods(pods), [container(of, wants=resources(2, 1)) for of in pods]
    )
    kinds = [allocation.kind for allocation in agent.current.state.allocations.values()]
    assert kinds.count(ContainerKind.EXCLUSIVE) == decided
    bed.daemon.node.current.store.close()


async def test_a_life(bed: DaemonBed) -> None:
    """Before there is a runtime, with it, after its end, with another configuration, to a stop."""

    def sandbox(name: str, **annotations: str) -> pb.PodSandbox:
        keys = {PREFIX + key: value for key, value in annotations.items()}
        keys["numa.kubernets.io/numacpu"] = "1"
        made = pb.PodSandbox(name=name, namespace="shop", uid=f"uid-{name}", annotations=keys)
        made.linux.cgroup_parent = f"/kubepods/pod{name}"
        return made

    app = pb.Container(name="app")
    app.linux.resources.CopyFrom(limits(2))
    task = asyncio.create_task(bed.daemon.run())
    await bed.said("runtime awaited")
    topology = machines.dual_smt(memory_gib=16)
    async with EmbeddedRuntime(bed.runtime, topology=topology, request_timeout=60) as runtime:
        await runtime.wait_for_plugin()
        own = await runtime.run_pod(sandbox("own", policy="single-numa-node"))
        made = await runtime.create_container(own.id, app)
        assert (made.cpus, made.mems) == ("0-1", "0")
        await runtime.start_container(made.id)
        none = await runtime.run_pod(sandbox("none", numacpu="9999"))
        with pytest.raises(PodOperationFailed, match="9999"):
            await runtime.create_container(none.id, app)
        # runtime.registrationTimeout: 0, and it owes no answer
        link = bed.daemon.link
        link.status.report_unanswered_calls(link.link.watch, 0.0)
        status = await bed.ask("/v1/status")
        assert (status["ready"], status["link"]["problem"]) == (True, "")
        assert status["link"]["runtimeVersion"]
        assert status["containers"]["exclusive"] == 1
        await bed.said("state=active")
        await bed.said("annotation without effect", times=2)
        (used,) = (await bed.ask("/v1/use/shop/own/app"))["containers"]
        assert "cgroup" in used["problem"]
        assert (await bed.ask("/v1/use"))["cpus"] == {}
    await bed.said("state=disconnected", times=2)
    link = (await bed.ask("/v1/status"))["link"]
    assert (link["state"] != "active", bool(link["problem"])) == (True, True)
    bed.file |= {"reservedCPUs": "1", "stateDir": "/elsewhere"}
    os.kill(os.getpid(), signal.SIGHUP)
    await bed.said("configuration reloaded")
    assert 'msg="restart required"' in bed.output.getvalue()
    assert str(bed.daemon.agent.current.machine.settings.reserved_cpus) == "1"
    bed.file["reservedCPUs"] = "500"
    os.kill(os.getpid(), signal.SIGHUP)
    await bed.said("configuration not reloaded")
    os.kill(os.getpid(), signal.SIGTERM)
    assert await task == 0
    assert bed.output.getvalue().count("runtime awaited") == 1


@pytest.mark.parametrize("error", [MemoryError, asyncio.CancelledError])
async def test_a_part_that_fails_ends_the_agent(
    bed: DaemonBed, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """With its error, so that it is started again; another agent it names once."""
    other = RuntimeLock(bed.runtime)
    other.acquire()
    seconds = itertools.count()

    def maintain() -> None:
        if next(seconds) == 2:
            raise error

    monkeypatch.setattr(bed.daemon.node.current.store, "retry_or_compact", maintain)
    with pytest.raises(error):
        await bed.daemon.run()
    other.close()
    assert bed.output.getvalue().count("runtime locked by another agent") == 1


async def test_a_reload_keeps_the_capacity_that_came_meanwhile(bed: DaemonBed) -> None:
    reloader, agent = bed.daemon.link.reloader, bed.daemon.agent
    source, outside = bed.daemon.node.kubelet.configuration, bed.daemon.node.capacity.outside
    real = source.settings_with_kubelet_config

    def settings(*of: Any) -> Settings:
        made = real(*of)
        if not outside.factors:
            outside.factors = {0: 0.5}
            agent.apply_node_model(replace(agent.current.machine, settings=real(*of)))
        return made

    source.settings_with_kubelet_config = settings  # type: ignore[method-assign]
    bed.file["cpuOvercommit"] = 2
    await reloader.request_reload()
    used = agent.current.machine.settings
    assert (used.capacity_factor, used.cpu_overcommit) == ({0: 0.5}, 2)
    bed.daemon.node.current.store.close()


async def test_a_reload_changes_the_kubelets_rules(bed: DaemonBed) -> None:
    daemon = bed.daemon
    for rules in ({"ties": True}, {"ties": False, "cpuOrder": True}):
        bed.file["kubeletCompatibility"] = {"except": rules}
        await daemon.link.reloader.request_reload()
        used = daemon.agent.current.machine.settings.kubelet
        assert (used.ties, used.cpu_order) == (rules["ties"], "cpuOrder" in rules)
    daemon.node.current.store.close()


async def test_a_reload_gives_way_to_containers(bed: DaemonBed) -> None:
    sys.setswitchinterval(usual := 0.005)
    daemon = bed.daemon
    await daemon.link.reloader.request_reload()
    assert bed.switch_intervals[-1] < usual == sys.getswitchinterval()
    daemon.node.current.store.close()
