"""The round over all containers: its cost, what it finds, and what is shown of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from nri_numa.agent.usage import MAX_SERIES, MemoryWatch, UsageWatch, Watches
from nri_numa.cli import explain, status
from nri_numa.config.sections import MemoryLocality
from nri_numa.engine.decision import Machine
from nri_numa.engine.state import NodeState
from nri_numa.machine.cgroups import CgroupPlace
from nri_numa.model.settings import Settings
from nri_numa.observe.metrics import Metrics
from tests.beds.views import live_view
from tests.beds.world import StillClock, agent_of, container, pod, resources
from tests.machines import named as machines

NOW = 1_700_000_000.0
ON = MemoryLocality(enabled=True, metric=True)


class Busy(StillClock):
    """Each look at what was used costs something; rests are noted."""

    cost = 0.0
    rests: list[float]

    def cpu_time(self) -> float:
        self.cost += 0.0015
        return self.cost

    async def sleep(self, seconds: float) -> None:
        self.rests.append(seconds)


class Bed:
    """An agent whose containers have cgroups of version 2 in a directory."""

    def __init__(self, root: Path, config: MemoryLocality = ON) -> None:
        self.root = root
        (root / "cgroup.controllers").touch()
        self.metrics = Metrics("0")
        machine = Machine(topology=machines.dual_smt(), settings=Settings())
        self.clock = Busy(lambda: NOW)
        self.agent = agent_of(machine, metrics=self.metrics, clock=self.clock)
        self.watch = MemoryWatch(self.agent, config, str(root), self.clock, proc=str(root))
        self.view = live_view(self.agent, clock=self.clock, watches=Watches(memory=self.watch))
        self.metrics.snapshot = self.view.snapshot

    def create(self, name: str, numa_stat: str, **annotations: str) -> None:
        of = pod(name, annotations, namespace="shop")
        made = container(of, "main", resources(1, 0.25), id=f"c-{name}")
        self.agent.create_container(of, made)
        self.agent.places[made.id] = CgroupPlace(f"/{name}")
        (self.root / name).mkdir()
        if numa_stat:
            (self.root / name / "memory.numa_stat").write_text(numa_stat)

    def round(self) -> list[float]:
        """Go round once; gives the rests that were taken."""
        self.clock.rests = []
        asyncio.run(self.watch.round())
        return self.clock.rests

    def listed(self) -> dict[str, Any]:
        return {one.pod: msgspec.to_builtins(one) for one in self.view.listing().containers}

    def ratios(self) -> dict[str, float]:
        families = {f.name: f for f in text_string_to_metric_families(self.metrics.text())}
        family = families.get("nri_numa_container_local_memory_ratio")
        return {s.labels["pod_name"]: s.value for s in family.samples} if family else {}

    def states(self) -> dict[str, float]:
        families = {f.name: f for f in text_string_to_metric_families(self.metrics.text())}
        samples = families["nri_numa_local_memory_containers"].samples
        return {s.labels["state"]: s.value for s in samples}


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    made = Bed(tmp_path)
    made.create("here", "anon N0=4096 N1=0\n", numacpu="2-3", numamem="0")
    made.create("there", "anon N0=1024 N1=3072\n", numacpu="4-5", numamem="0")
    made.create("unbound", "anon N0=1024 N1=3072\n")
    made.create("silent", "", numacpu="6-7", numamem="0")
    return made


def test_a_share_for_those_with_numa_nodes_and_a_reason_for_the_others(bed: Bed) -> None:
    assert bed.listed()["here"]["memory"]["problem"] == "not read yet"
    assert bed.ratios() == {}
    bed.round()
    memory = {pod: one["memory"] for pod, one in bed.listed().items()}
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
    assert bed.ratios() == {"here": 1.0, "there": 0.25}, "none for those that are not known"
    assert bed.states() == {"known": 2, "unknown": 2, "left out": 0}


def test_series_are_bounded_and_the_worst_are_told(tmp_path: Path) -> None:
    bed = Bed(tmp_path)
    for n in range(MAX_SERIES):
        bed.create(f"here-{n}", "anon N0=4096 N1=0\n", numacpu="2-3", numamem="0")
    bed.create("there", "anon N0=1024 N1=3072\n", numacpu="4-5", numamem="0")
    bed.round()
    assert len(bed.ratios()) == MAX_SERIES
    assert bed.ratios()["there"] == 0.25
    assert bed.states() == {"known": MAX_SERIES + 1, "unknown": 0, "left out": 1}


def test_without_the_metric_a_scrape_is_as_before(tmp_path: Path) -> None:
    bed = Bed(tmp_path, MemoryLocality(enabled=True))
    bed.create("here", "anon N0=4096\n", numacpu="2-3", numamem="0")
    bed.round()
    assert "local_memory" not in bed.metrics.text()
    assert bed.watch.samples(NodeState()) is None


def test_a_container_that_goes_away_is_forgotten_and_one_without_a_place_says_so(bed: Bed) -> None:
    del bed.agent.places["c-here"]
    bed.round()
    assert bed.watch.known["c-here"].problem == "the agent does not know its cgroup"
    bed.agent.stop_container("c-there")
    bed.round()
    assert "c-there" not in bed.watch.known


def test_a_container_with_no_memory_yet_has_no_share(tmp_path: Path) -> None:
    bed = Bed(tmp_path)
    bed.create("new", "anon N0=0 N1=0\n", numacpu="2", numamem="0")
    bed.round()
    assert bed.watch.known["c-new"].problem == "it has no memory yet"
    assert bed.ratios() == {}


def test_explain_and_status_say_it_in_words(bed: Bed) -> None:
    bed.round()
    listed = bed.listed()
    document = {
        "status": msgspec.to_builtins(bed.view.status()),
        "numaNodes": [],
        "containers": [listed["there"], listed["silent"]],
        "refusals": [],
    }
    wide = "\n".join(status.lines(document, NOW, wide=True))
    assert "LOCAL MEMORY" in wide
    assert " 25 %" in wide
    assert " ? " in wide
    assert "LOCAL MEMORY" not in "\n".join(status.lines(document, NOW))
    told = [msgspec.to_builtins(one) for one in bed.view.explain("shop", "there", None)]
    text = " ".join(" ".join(explain.lines(told, NOW)).split())
    assert (
        "Memory: 25 % is on its own NUMA nodes (0): 1 KiB on NUMA node 0, 3 KiB on NUMA node 1"
        in (text)
    )
    told = [msgspec.to_builtins(one) for one in bed.view.explain("shop", "silent", None)]
    text = " ".join(" ".join(explain.lines(told, NOW)).split())
    assert "not known here, because its cgroup has no memory.numa_stat" in text


def test_a_container_that_is_measured_when_asked_says_what_is_not_known(bed: Bed) -> None:
    usage = UsageWatch(bed.agent, str(bed.root), str(bed.root), bed.clock)
    there = asyncio.run(usage.container(bed.agent.state.allocations["c-there"]))
    assert (there.local_percent, there.cpu_milli) == (25, None)
    assert there.problem == "its cgroup does not count CPU time"
    silent = asyncio.run(usage.container(bed.agent.state.allocations["c-silent"]))
    assert silent.local_percent is None
    assert silent.memory_by_numa_node == {}
    assert "its cgroup has no memory.numa_stat, and it has no process" in silent.problem
