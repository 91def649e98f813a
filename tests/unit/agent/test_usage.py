"""What was used between two readings."""

import asyncio
from pathlib import Path

from nri_numa.agent.usage import SAMPLE_COUNT, UsageWatch, sample_between
from nri_numa.config import AgentConfig
from nri_numa.engine.node_model import NodeModel
from nri_numa.machine.usage import MachineUsage
from nri_numa.model.machine import NUMAMemoryReading, Topology
from nri_numa.model.settings import Settings
from tests.beds.world import StillClock, agent_of
from tests.machines import named as machines
from tests.machines.named import write_sysfs

MEMORY = NUMAMemoryReading(total_bytes=100, free_bytes=40, reclaimable_bytes=10)


def test_a_sample_is_the_difference_of_two_readings() -> None:
    before = MachineUsage(
        {0: (100, 1000), 1: (0, 1000), 3: (9, 9)},
        {0: MEMORY, 1: MEMORY},
        {0: (10, 0), 1: (5, 5), 2: (7, 0)},
    )
    after = MachineUsage(
        {0: (150, 1100), 1: (100, 1100), 2: (1, 1), 3: (9, 9)},
        dict.fromkeys(range(4), MEMORY),
        {0: (40, 10), 1: (5, 5), 2: (7, 3)},
    )
    sample = sample_between(before, after, sampled_at=7.0, seconds=5.0)
    assert sample.cpus == {0: 0.5, 1: 1.0}, "not those that came, or that did not tick"
    assert sample.remote == {0: 0.25, 1: None, 2: 1.0, 3: None}


def test_counters_that_go_backwards_are_not_believed() -> None:
    before = MachineUsage({0: (100, 1000), 1: (100, 1000)}, {0: MEMORY}, {0: (10, 10)})
    after = MachineUsage({0: (50, 1100), 1: (900, 900)}, {0: MEMORY}, {0: (5, 10)})
    sample = sample_between(before, after, sampled_at=7.0, seconds=5.0)
    assert sample.cpus == {0: 0.0}
    assert sample.remote == {0: None}


def machine_at(root: Path) -> Topology:
    topology = machines.snc_single(cores_per_numa=1)
    write_sysfs(root, topology)
    (root / "proc").mkdir(exist_ok=True)
    return topology


def stat(root: Path, busy: int, total: int, cpus: int) -> None:
    lines = (f"cpu{n} {busy} 0 0 {total - busy} 0 0 0 0 0 0" for n in range(cpus))
    (root / "proc/stat").write_text("\n".join(["cpu  1 1 1 1", *lines, ""]))


def watch(topology: Topology, root: Path) -> UsageWatch:
    clock = StillClock(lambda: 1000.0)
    agent = agent_of(NodeModel(topology=topology, settings=Settings()), clock=clock)
    config = AgentConfig(sysfs_root=str(root), cgroup_root=str(root / "cgroup"))
    return UsageWatch(agent, config)


def test_the_ring_keeps_the_last_minutes(tmp_path: Path) -> None:
    topology = machine_at(tmp_path)
    cpus = len(topology.online)
    made = watch(topology, tmp_path)
    assert made.usage_document().problem == "not read yet"
    assert made.usage_document().numa_nodes == ()

    async def run() -> None:
        for n in range(SAMPLE_COUNT + 5):
            stat(tmp_path, 25 * n, 100 * n, cpus)
            for i in topology.numa_nodes:
                file = tmp_path / f"sys/devices/system/node/node{i}/numastat"
                file.write_text(f"local_node {5 * n}\nother_node {3 * n}\n")
            await made.take_sample()

    asyncio.run(run())
    told = made.usage_document()
    assert (told.problem, told.sampled_at) == ("", 1000.0)
    assert told.cpus == {str(n): 25 for n in range(cpus)}
    for load in told.numa_nodes:
        assert (load.cpu_percent, load.remote_percent) == (25, 37.5)
        assert load.memory_used_bytes < load.memory_bytes
        assert load.cpu_history == (25,) * SAMPLE_COUNT
        assert len(load.memory_history) == SAMPLE_COUNT


def test_what_cannot_be_read_is_said_and_the_past_stays(tmp_path: Path) -> None:
    topology = machine_at(tmp_path)
    made = watch(topology, tmp_path)
    asyncio.run(made.take_sample())
    assert made.usage_document().problem == f"{tmp_path}/proc/stat lists no CPU"
    stat(tmp_path, 10, 100, len(topology.online))
    asyncio.run(made.take_sample())
    stat(tmp_path, 60, 200, len(topology.online))
    asyncio.run(made.take_sample())
    (tmp_path / "proc/stat").unlink()
    asyncio.run(made.take_sample())
    told = made.usage_document()
    assert "lists no CPU" in told.problem
    assert told.cpus["0"] == 50
