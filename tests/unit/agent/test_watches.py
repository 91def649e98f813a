"""Rounds over all containers, for far memory and for waiting: what they find and show."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from nri_numa.agent.usage import (
    MAX_SERIES_PER_METRIC,
    MemoryWatch,
    UsageWatch,
    UsageWatches,
    WaitingWatch,
)
from nri_numa.cli import explain, status
from nri_numa.config.sections import UsageReadMode
from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.state import NodeState
from nri_numa.machine.cgroups import CgroupPlace
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.settings import Settings
from nri_numa.observe.metrics import Metrics
from tests.beds.views import live_view
from tests.beds.world import StillClock, agent_of, container, pod, resources
from tests.machines import named as machines

NOW = 1_700_000_000.0
HERE, THERE = "anon N0=4096 N1=0\n", "anon N0=1024 N1=3072\n"


class Bed:
    """An agent whose containers have cgroups of version 2 in a directory."""

    def __init__(self, root: Path, *, metric: bool = True) -> None:
        self.root = root
        (root / "cgroup.controllers").touch()
        self.metrics = Metrics("0")
        self.seconds = 100.0
        self.clock = StillClock(lambda: NOW, lambda: self.seconds)
        machine = NodeModel(topology=machines.dual_smt(), settings=Settings())
        self.agent = agent_of(machine, metrics=self.metrics, clock=self.clock)
        mode = UsageReadMode.METRIC if metric else UsageReadMode.READ
        self.memory = MemoryWatch(self.agent, mode, 30, str(root), self.clock, proc=str(root))
        proc = str(root / "proc")
        self.waiting = WaitingWatch(self.agent, mode, 30, str(root), self.clock, proc=proc)
        watches = UsageWatches(memory=self.memory, cpu_waiting=self.waiting)
        self.view = live_view(self.agent, clock=self.clock, watches=watches)
        self.metrics.snapshot = self.view.metrics_snapshot

    def create(self, name: str, numa_stat: str = "", **annotations: str) -> Path:
        """A container; gives its cgroup."""
        of = pod(name, annotations, namespace="shop")
        made = container(of, "main", resources(1, 0.25), id=f"c-{name}")
        self.agent.create_container(of, made)
        self.agent.containers.cgroup_places[made.id] = CgroupPlace(f"/{name}")
        (self.root / name).mkdir()
        if numa_stat:
            (self.root / name / "memory.numa_stat").write_text(numa_stat)
        return self.root / name

    def threaded(self, name: str, pid: int, pressure: float | None) -> None:
        """A container with one thread."""
        cgroup = self.create(name)
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
        self.seconds += 30
        asyncio.run(self.memory.read_all_containers())
        asyncio.run(self.waiting.read_all_containers())

    def listed(self, what: str) -> dict[str, Any]:
        """One column, by pod."""
        return {
            one.pod: msgspec.to_builtins(one)[what]
            for one in self.view.list_assignments().containers
        }

    def samples(self, name: str, label: str = "pod_name") -> dict[str, float]:
        families = {
            f.name: f for f in text_string_to_metric_families(self.metrics.render_metrics())
        }
        family = families.get(f"nri_numa_{name}")
        return {s.labels[label]: s.value for s in family.samples} if family else {}

    def status(self, *, wide: bool) -> list[str]:
        document = {
            "status": msgspec.to_builtins(self.view.status_document()),
            "numaNodes": [],
            "containers": [
                msgspec.to_builtins(one) for one in self.view.list_assignments().containers
            ],
            "refusals": [],
        }
        return list(status.status_lines(document, NOW, wide=wide))

    def explained(self, name: str) -> str:
        told = [msgspec.to_builtins(one) for one in self.view.explain_pod("shop", name, None)]
        return " ".join(" ".join(explain.explanation_lines(told, NOW)).split())


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    made = Bed(tmp_path)
    made.create("here", HERE, numacpu="2-3", numamem="0")
    made.create("there", THERE, numacpu="16-17", numamem="0")
    made.create("unbound", THERE)
    made.create("silent", numacpu="6-7", numamem="0")
    return made


def test_a_share_for_those_with_numa_nodes_and_a_reason_for_the_others(bed: Bed) -> None:
    assert bed.listed("memory")["here"]["problem"] == "not read yet"
    assert bed.samples("container_local_memory_ratio") == {}
    bed.round()
    memory = bed.listed("memory")
    assert memory["here"]["localPercent"] == 100
    assert memory["there"] == {
        "localPercent": 25.0,
        "byNUMANode": {"0": 1024, "1": 3072},
        "source": "memory.numa_stat",
        "at": NOW,
        "problem": "",
    }
    assert memory["unbound"]["problem"] == "it is on no particular NUMA nodes"
    assert memory["silent"]["localPercent"] is None
    assert "no memory.numa_stat" in memory["silent"]["problem"]
    ratios = bed.samples("container_local_memory_ratio")
    assert ratios == {"here": 1.0, "there": 0.25}, "none for those that are not known"
    states = bed.samples("local_memory_containers", "state")
    assert states == {"known": 2, "unknown": 2, "left out": 0}


def test_series_are_bounded_and_the_worst_are_told(tmp_path: Path) -> None:
    bed = Bed(tmp_path)
    for n in range(MAX_SERIES_PER_METRIC):
        bed.create(f"here-{n}", HERE, numacpu="2-3", numamem="0")
    bed.create("there", THERE, numacpu="4-5", numamem="0")
    bed.round()
    ratios = bed.samples("container_local_memory_ratio")
    assert (len(ratios), ratios["there"]) == (MAX_SERIES_PER_METRIC, 0.25)
    states = bed.samples("local_memory_containers", "state")
    assert states == {"known": MAX_SERIES_PER_METRIC + 1, "unknown": 0, "left out": 1}


@pytest.mark.parametrize(
    ("cost", "rests"),
    [(0.0015, [0.597, 0.597, 28.806]), (0.15, [29.85] * 4 + [1.0])],
    ids=["two a turn", "longer than the interval"],
)
def test_a_round_rests_for_what_it_costs_and_keeps_its_interval(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, cost: float, rests: list[float]
) -> None:
    """Half a per cent of one CPU, whatever it finds."""
    taken, looks = list[float](), itertools.count()

    async def sleep(seconds: float) -> None:
        taken.append(seconds)
        bed.seconds += seconds
        if len(taken) == len(rests):
            raise asyncio.CancelledError

    monkeypatch.setattr(bed.clock, "sleep", sleep)
    monkeypatch.setattr(bed.clock, "cpu_time", lambda: next(looks) * cost)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(bed.memory.run())
    assert taken == pytest.approx(rests)


def test_without_the_metric_a_scrape_is_as_before(tmp_path: Path) -> None:
    bed = Bed(tmp_path, metric=False)
    bed.create("here", HERE, numacpu="2-3", numamem="0")
    bed.round()
    assert "local_memory" not in bed.metrics.render_metrics()
    assert bed.memory.container_series(NodeState()) is None


def test_a_container_without_a_place_or_memory_says_so(bed: Bed) -> None:
    del bed.agent.containers.cgroup_places["c-here"]
    bed.create("new", "anon N0=0 N1=0\n", numacpu="2", numamem="0")
    bed.create("third", "anon N0=1024 N1=2048\n", numacpu="2", numamem="1")
    bed.round()
    assert bed.memory.known["c-here"].problem == "the agent does not know its cgroup"
    assert bed.memory.known["c-new"].problem == "it has no memory yet"
    ratios = bed.samples("container_local_memory_ratio")
    assert ratios == {"there": 0.25, "third": pytest.approx(0.667)}


def test_explain_and_status_say_it_in_words(bed: Bed) -> None:
    bed.round()
    wide = "\n".join(bed.status(wide=True))
    assert "LOCAL MEMORY" in wide
    assert " 25 %" in wide
    assert " ? " in wide
    assert "LOCAL MEMORY" not in "\n".join(bed.status(wide=False))
    words = "Memory: 25 % is on its own NUMA nodes (0): 1 KiB on NUMA node 0, 3 KiB on NUMA node 1"
    assert words in bed.explained("there")
    words = "not known here, because its cgroup has no memory.numa_stat"
    assert words in bed.explained("silent")


def test_a_container_that_is_measured_when_asked_says_what_is_not_known(bed: Bed) -> None:
    usage = UsageWatch(bed.agent, str(bed.root), str(bed.root), bed.clock)
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


def test_a_container_without_cpus_of_its_own_may_use_what_containers_may(bed: Bed) -> None:
    """Not CPUs outside the cgroup of all pods, of which it said to use per cent."""
    usage = UsageWatch(bed.agent, str(bed.root), str(bed.root), bed.clock)
    bed.create("plain", HERE)
    topology = bed.agent.current.machine.topology
    inside = replace(topology, allowed=topology.allowed - CPUSet([0]))
    bed.agent.current.machine = replace(bed.agent.current.machine, topology=inside)
    plain = asyncio.run(usage.measure_container(bed.agent.current.state.allocations["c-plain"]))
    assert plain.cpu_set_milli == 1000 * (len(topology.online) - 1)


# --- waiting --------------------------------------------------------------------------------------


@pytest.fixture
def waits(tmp_path: Path) -> Bed:
    made = Bed(tmp_path)
    made.threaded("busy", 10, 62.5)
    made.threaded("calm", 11, 0.0)
    made.threaded("old", 12, None)
    return made


def test_pressure_at_once_and_tasks_after_the_second_round(waits: Bed) -> None:
    assert waits.listed("waiting")["busy"]["problem"] == "not read yet"
    waits.round()
    assert waits.listed("waiting")["busy"] == {
        "pressurePercent": 62.5,
        "waitingTasks": None,
        "at": NOW,
        "problem": "threads were read once so far",
    }
    wide = waits.status(wide=True)
    (head,) = [line for line in wide if "CPU PRESSURE" in line]
    assert "TASKS WAITING" in head
    (line,) = [line for line in wide if " busy " in line]
    assert " 62.5 % " in line
    assert " ? " in line, "threads were read once so far"
    assert "CPU PRESSURE" not in "\n".join(waits.status(wide=False))
    assert waits.explained("busy")
    waits.waited(10, 16.0)
    waits.round()
    second = waits.listed("waiting")
    assert (second["busy"]["waitingTasks"], second["busy"]["problem"]) == (0.5, "")
    assert (second["calm"]["pressurePercent"], second["calm"]["waitingTasks"]) == (0, 0)
    assert (second["old"]["pressurePercent"], second["old"]["waitingTasks"]) == (None, 0)
    assert "no pressure stall information" in second["old"]["problem"]


def test_a_scrape_has_series_of_what_is_known_only(waits: Bed) -> None:
    waits.round()
    waits.waited(10, 16.0)
    del waits.agent.containers.cgroup_places["c-calm"]
    waits.round()
    assert waits.samples("container_cpu_pressure_ratio") == {"busy": 0.625}
    assert waits.samples("container_waiting_tasks") == {"busy": 0.5, "old": 0}
    states = waits.samples("cpu_waiting_containers", "state")
    assert states == {"known": 2, "unknown": 1, "left out": 0}


def test_a_container_that_ended_is_forgotten(waits: Bed) -> None:
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
