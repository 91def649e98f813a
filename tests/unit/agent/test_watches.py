"""Rounds over all containers, for far memory and for waiting: what they find and show."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from nri_numa.agent.usage import (
    MAX_SERIES_PER_METRIC,
    MemoryWatch,
    UsageWatch,
    UsageWatches,
    WaitingWatch,
)
from nri_numa.cli import explain, status
from nri_numa.config import AgentConfig
from nri_numa.config.sections import UsageReadMode
from nri_numa.engine.state import NodeState
from nri_numa.machine.cgroups import CgroupPlace
from nri_numa.model.cpuset import CPUSet
from tests.beds.agent_bed import AgentBed

NOW = 1_700_000_000.0
HERE, THERE = "anon N0=4096 N1=0\n", "anon N0=1024 N1=3072\n"


class UsageBed(AgentBed):
    """With rounds over the containers, which have cgroups of version 2 in a directory."""

    def __init__(self, root: Path, *, metric: bool = True) -> None:
        super().__init__()
        (root / "cgroup.controllers").touch()
        self.root, self.now, self.seconds = root, NOW, 100.0
        mode = UsageReadMode.METRIC if metric else UsageReadMode.READ
        self.config = AgentConfig(sysfs_root=str(root), cgroup_root=str(root))
        self.memory = MemoryWatch(self.agent, self.config, mode, proc=str(root))
        self.waiting = WaitingWatch(self.agent, self.config, mode, proc=str(root / "proc"))
        usage = UsageWatch(self.agent, self.config)
        self.show(watches=UsageWatches(usage, self.memory, self.waiting))

    def measured(self, name: str, numa_stat: str = "", **annotations: str) -> Path:
        """A container; gives its cgroup."""
        self.create_pod(name, cpu_limit=1, **annotations)
        self.agent.containers.cgroup_places[f"c-{name}"] = CgroupPlace(f"/{name}")
        (self.root / name).mkdir()
        if numa_stat:
            (self.root / name / "memory.numa_stat").write_text(numa_stat)
        return self.root / name

    def threaded(self, name: str, pid: int, pressure: float | None) -> None:
        """A container with one thread."""
        cgroup = self.measured(name)
        (cgroup / "cgroup.procs").write_text(f"{pid}\n")
        (self.root / f"proc/{pid}/task/{pid}").mkdir(parents=True)
        self.waited(pid, 1.0)
        if pressure is not None:
            (cgroup / "cpu.pressure").write_text(
                f"some avg10=0.00 avg60={pressure:.2f} avg300=0.00 total=0\n"
            )

    def waited(self, pid: int, seconds: float) -> None:
        """How long its thread has waited by now."""
        file = self.root / f"proc/{pid}/task/{pid}/schedstat"
        file.write_text(f"1 {int(seconds * 1e9)} 1\n")

    def round(self) -> None:
        self.pass_time(30)
        asyncio.run(self.memory.read_all_containers())
        asyncio.run(self.waiting.read_all_containers())

    def listed(self, what: str) -> dict[str, Any]:
        """One column, by pod."""
        return {
            one.pod: msgspec.to_builtins(one)[what]
            for one in self.view.list_assignments().containers
        }

    def status(self, *, wide: bool) -> list[str]:
        document = {
            "status": msgspec.to_builtins(self.view.status_document()),
            "numaNodes": [],
            "containers": [
                msgspec.to_builtins(one) for one in self.view.list_assignments().containers
            ],
            "rejections": [],
        }
        return list(status.status_lines(document, NOW, output="wide" if wide else "table"))

    def explained(self, name: str) -> str:
        told = [msgspec.to_builtins(one) for one in self.view.explain_pod("shop", name, None)]
        return " ".join(" ".join(explain.explanation_lines(told, NOW)).split())


@pytest.fixture
def bed(tmp_path: Path) -> UsageBed:
    made = UsageBed(tmp_path)
    made.measured("here", HERE, numacpu="2-3", numamem="0")
    made.measured("there", THERE, numacpu="16-17", numamem="0")
    made.measured("unbound", THERE)
    made.measured("silent", numacpu="6-7", numamem="0")
    return made


def test_a_share_for_those_with_numa_nodes_and_a_reason_for_the_others(bed: UsageBed) -> None:
    assert bed.listed("memory")["here"]["problem"] == "not read yet"
    assert bed.samples("container_local_memory_ratio", "pod") == {}
    bed.round()
    memory = bed.listed("memory")
    assert memory["here"]["localPercent"] == 100
    assert memory["there"] == {
        "localPercent": 25.0,
        "byNUMANode": {"0": 1024, "1": 3072},
        "source": "memory.numa_stat",
        "readAt": NOW + 30,
        "problem": "",
    }
    assert memory["unbound"]["problem"] == "it is on no particular NUMA nodes"
    assert memory["silent"]["localPercent"] is None
    assert "no memory.numa_stat" in memory["silent"]["problem"]
    ratios = bed.samples("container_local_memory_ratio", "pod")
    assert ratios == {"here": 1.0, "there": 0.25}, "none for those that are not known"
    states = bed.samples("local_memory_containers", "state")
    assert states == {"known": 2, "unknown": 2, "left out": 0}


def test_series_are_bounded_and_the_worst_are_told(tmp_path: Path) -> None:
    bed = UsageBed(tmp_path)
    for n in range(MAX_SERIES_PER_METRIC):
        bed.measured(f"here-{n}", HERE, numacpu="2-3", numamem="0")
    bed.measured("there", THERE, numacpu="4-5", numamem="0")
    bed.round()
    ratios = bed.samples("container_local_memory_ratio", "pod")
    assert (len(ratios), ratios["there"]) == (MAX_SERIES_PER_METRIC, 0.25)
    states = bed.samples("local_memory_containers", "state")
    assert states == {"known": MAX_SERIES_PER_METRIC + 1, "unknown": 0, "left out": 1}


@pytest.mark.parametrize(
    ("cost", "rests"),
    [(0.0015, [0.597, 0.597, 28.806]), (0.15, [29.85] * 4 + [1.0])],
    ids=["two a turn", "longer than the interval"],
)
def test_a_round_rests_for_what_it_costs_and_keeps_its_interval(
    bed: UsageBed, monkeypatch: pytest.MonkeyPatch, cost: float, rests: list[float]
) -> None:
    """Half a per cent of one CPU, whatever it finds."""
    taken, looks = list[float](), itertools.count()

    async def sleep(seconds: float) -> None:
        taken.append(seconds)
        bed.seconds += seconds
        if len(taken) == len(rests):
            raise asyncio.CancelledError

    monkeypatch.setattr(bed.timing, "sleep", sleep)
    monkeypatch.setattr(bed.timing, "cpu_time", lambda: next(looks) * cost)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(bed.memory.run_watch())
    assert taken == pytest.approx(rests)


def test_without_the_metric_a_scrape_is_as_before(tmp_path: Path) -> None:
    bed = UsageBed(tmp_path, metric=False)
    bed.measured("here", HERE, numacpu="2-3", numamem="0")
    bed.round()
    assert "local_memory" not in bed.metrics.render_metrics()
    assert bed.memory.container_series(NodeState()) is None


def test_a_container_without_a_place_or_memory_says_so(bed: UsageBed) -> None:
    del bed.agent.containers.cgroup_places["c-here"]
    bed.measured("new", "anon N0=0 N1=0\n", numacpu="2", numamem="0")
    bed.measured("third", "anon N0=1024 N1=2048\n", numacpu="2", numamem="1")
    bed.round()
    assert bed.memory.known["c-here"].problem == "the agent does not know its cgroup"
    assert bed.memory.known["c-new"].problem == "it has no memory yet"
    ratios = bed.samples("container_local_memory_ratio", "pod")
    assert ratios == {"there": 0.25, "third": pytest.approx(0.667)}


def test_explain_and_status_say_it_in_words(bed: UsageBed) -> None:
    bed.round()
    wide = "\n".join(bed.status(wide=True))
    assert "LOCAL MEMORY" in wide
    assert " 25 %" in wide
    assert " ? " in wide
    assert "LOCAL MEMORY" not in "\n".join(bed.status(wide=False))
    words = "Memory: 25 % is on its own NUMA nodes (0): 1 KiB on NUMA node 0, 3 KiB on NUMA node 1"
    assert words in bed.explained("there")
    words = "not known: its cgroup has no memory.numa_stat"
    assert words in bed.explained("silent")


def test_a_container_that_is_measured_when_asked_says_what_is_not_known(bed: UsageBed) -> None:
    usage = UsageWatch(bed.agent, bed.config)
    there = asyncio.run(usage.measure_container(bed.agent.current.state.allocations["c-there"]))
    assert (there.local_percent, there.cpu_milli) == (25, None)
    assert there.problem == "its cgroup does not count CPU time"
    (bed.root / "there/cpu.stat").write_text("usage_usec 5000000\n")
    there = asyncio.run(usage.measure_container(bed.agent.current.state.allocations["c-there"]))
    assert there.cpu_milli == 0
    silent = asyncio.run(usage.measure_container(bed.agent.current.state.allocations["c-silent"]))
    assert silent.local_percent is None
    assert silent.memory_by_numa_node == {}
    assert "its cgroup has no memory.numa_stat, and it has no process" in silent.problem


def test_a_container_without_cpus_of_its_own_may_use_what_containers_may(bed: UsageBed) -> None:
    """Not CPUs outside the cgroup of all pods, of which it said to use per cent."""
    usage = UsageWatch(bed.agent, bed.config)
    bed.measured("plain", HERE)
    topology = bed.agent.current.machine.topology
    inside = replace(topology, allowed=topology.allowed - CPUSet([0]))
    bed.agent.current.machine = replace(bed.agent.current.machine, topology=inside)
    plain = asyncio.run(usage.measure_container(bed.agent.current.state.allocations["c-plain"]))
    assert plain.cpu_set_milli == 1000 * (len(topology.online) - 1)


@pytest.fixture
def waits(tmp_path: Path) -> UsageBed:
    made = UsageBed(tmp_path)
    made.threaded("busy", 10, 62.5)
    made.threaded("calm", 11, 0.0)
    made.threaded("old", 12, None)
    return made


def test_pressure_at_once_and_tasks_after_the_second_round(waits: UsageBed) -> None:
    assert waits.listed("cpuPressure")["busy"]["problem"] == "not read yet"
    waits.round()
    assert waits.listed("cpuPressure")["busy"] == {
        "pressurePercent": 62.5,
        "waitingTasks": None,
        "readAt": NOW + 30,
        "problem": "threads were read once so far",
    }
    wide = waits.status(wide=True)
    (head,) = [line for line in wide if "CPU PRESSURE" in line]
    assert "WAITING TASKS" in head
    (line,) = [line for line in wide if " busy " in line]
    assert " 62.5 % " in line
    assert " ? " in line, "threads were read once so far"
    assert "CPU PRESSURE" not in "\n".join(waits.status(wide=False))
    assert waits.explained("busy")
    waits.waited(10, 16.0)
    waits.round()
    second = waits.listed("cpuPressure")
    assert (second["busy"]["waitingTasks"], second["busy"]["problem"]) == (0.5, "")
    assert (second["calm"]["pressurePercent"], second["calm"]["waitingTasks"]) == (0, 0)
    assert (second["old"]["pressurePercent"], second["old"]["waitingTasks"]) == (None, 0)
    assert "no pressure stall information" in second["old"]["problem"]


def test_a_scrape_has_series_of_what_is_known_only(waits: UsageBed) -> None:
    waits.round()
    waits.waited(10, 16.0)
    del waits.agent.containers.cgroup_places["c-calm"]
    waits.round()
    assert waits.samples("container_cpu_pressure_ratio", "pod") == {"busy": 0.625}
    assert waits.samples("container_waiting_tasks", "pod") == {"busy": 0.5, "old": 0}
    states = waits.samples("cpu_pressure_containers", "state")
    assert states == {"known": 2, "unknown": 1, "left out": 0}


def test_a_container_that_ended_is_forgotten(waits: UsageBed) -> None:
    waits.round()
    waits.agent.stop_container("c-busy")
    waits.round()
    assert "c-busy" not in waits.waiting.known
    assert "c-busy" not in waits.memory.known
    again = replace(waits.agent.current.state.allocations["c-calm"], container_id="c-busy")
    state = replace(waits.agent.current.state, allocations={"c-busy": again})
    told = waits.waiting.container_series(state)
    assert told is not None
    assert told.states["unknown"] == 1
