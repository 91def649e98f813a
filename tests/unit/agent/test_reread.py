"""What the log says of a machine that changes while the agent runs."""

import logging
from pathlib import Path

import pytest

from nri_numa.agent.links import NodeDevices
from nri_numa.agent.reload import MachineReloader
from nri_numa.config import AgentConfig
from nri_numa.engine.node_model import NodeModel
from nri_numa.machine.sysfs import discover_topology
from nri_numa.model.settings import Settings
from tests.beds.world import StillClock, agent_of
from tests.machines import named as machines
from tests.machines.named import write_sysfs, write_tree

ONLINE = "sys/devices/system/cpu/online"


async def test_memory_that_breathes_is_said_once_an_hour_and_cpus_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A balloon of a virtual machine: a warning every five seconds, in bytes, hid all others."""
    root, seconds = write_sysfs(tmp_path, machines.dual_no_smt()), [0.0]
    clock = StillClock(seconds=lambda: seconds[0])
    agent = agent_of(NodeModel(topology=discover_topology(root), settings=Settings()), clock=clock)
    counts = NodeDevices(AgentConfig()).device_counts
    rereading = MachineReloader(str(root), agent.current, counts)

    async def after(at: float, gib: int, online: str = "0-15") -> list[tuple[str, str]]:
        seconds[0] = at
        meminfo = f"Node 1 MemTotal: {gib << 20} kB\n"
        files = {"sys/devices/system/node/node1/meminfo": meminfo, ONLINE: online + "\n"}
        write_tree(root, files)
        caplog.clear()
        await rereading.read_machine(agent)
        assert agent.current.machine.topology.numa_nodes[1].memory_bytes == gib << 30
        return [(r.levelname, f"{r.getMessage()} {r.__dict__}") for r in caplog.records]

    with caplog.at_level(logging.INFO):
        ((level, line),) = await after(0, 12)
        assert level == "INFO"
        assert "machine changed" in line
        assert "-> 12 GiB" in line
        assert not await after(5, 11)
        assert not await after(3595, 10)
        ((level, line),) = await after(3600, 10)
        assert "12 GiB -> 10 GiB" in line
        ((level, line),) = await after(3605, 9, online="0-14")
        assert (level, "CPUs changed" in line) == ("WARNING", True)
        assert "10 GiB -> 9 GiB" in line
        assert not await after(3610, 9, online="0-14")


async def test_a_machine_that_cannot_be_read_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = write_sysfs(tmp_path, machines.dual_no_smt())
    agent = agent_of(NodeModel(topology=discover_topology(root), settings=Settings()))
    counts = NodeDevices(AgentConfig()).device_counts
    rereading = MachineReloader(str(root), agent.current, counts)
    (root / ONLINE).write_text("nonsense\n")
    for _ in range(3):
        await rereading.read_machine(agent)
    assert len(caplog.records) == 1
