"""Steal that is measured becomes capacity factors of new containers, where that is asked for."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from nri_numa.agent.capacity import CapacityFactors, OutsideCapacity, StealWatch
from nri_numa.config import AgentConfig
from nri_numa.config.sections import MeasuredCapacity, MeasuredMode
from nri_numa.engine.decision import Machine
from nri_numa.model.machine import Topology
from nri_numa.model.settings import Settings
from nri_numa.observe import logs
from nri_numa.observe.metrics import Metrics
from tests.beds.world import StillClock, agent_of, container, pod, resources
from tests.machines import named as machines


class Bed:
    """An agent on two NUMA nodes of eight CPUs, and a proc whose time goes on by 100 s a look."""

    def __init__(self, root: Path, mode: MeasuredMode, **more: str) -> None:
        self.root = root
        (root / "proc").mkdir()
        (root / "sys/devices/system/cpu").mkdir(parents=True)
        self.metrics = Metrics("0")
        self.topology = machines.dual_no_smt()
        self.base = Settings()
        machine = Machine(topology=self.topology, settings=self.base)
        self.agent = agent_of(machine, metrics=self.metrics)
        self.now = 0.0
        clock = StillClock(seconds=lambda: self.now)
        section = MeasuredCapacity(mode=mode, **{"half_life": "1s", **more})  # type: ignore[arg-type]
        self.watch = StealWatch(section, str(root), self.metrics, clock)
        self.all = CapacityFactors(OutsideCapacity("", clock), self.watch)
        self.ticks = dict.fromkeys(range(16), 0)

    def pass_time(self, steal: Mapping[int, float]) -> None:
        """A hundred seconds pass; so much of each NUMA node's time is stolen."""
        self.now += 100
        for cpu in self.ticks:
            self.ticks[cpu] += round(10_000 * steal.get(cpu // 8, 0.0))
        total = round(self.now * 100)
        lines = (f"cpu{cpu} 0 0 0 {total - t} 0 0 0 {t}" for cpu, t in self.ticks.items())
        (self.root / "proc/stat").write_text("\n".join(["cpu 0 0 0 0 0 0 0 0", *lines, ""]))
        asyncio.run(self.watch.apply(self.agent, AgentConfig(), self))

    def settings(self, config: AgentConfig, topology: Topology) -> Settings:
        return self.all.over(self.base, topology)

    def factors(self) -> Mapping[int, float]:
        return self.agent.machine.settings.capacity_factor

    def gauge(self, name: str) -> dict[str, float]:
        for family in text_string_to_metric_families(self.metrics.text()):
            if family.name == f"nri_numa_numa_node_{name}":
                return {s.labels["numa_node"]: s.value for s in family.samples}
        return {}

    def place(self, name: str, cpus: int) -> str:
        """NUMA nodes that a container gets; empty when it is refused."""
        of = pod(name, {"policy": "single-numa-node"})
        self.agent.create_container(of, container(of, wants=resources(cpus, 0.25)))
        allocation = self.agent.state.allocations.get(f"{name}-app")
        return str(allocation.numa_nodes) if allocation else ""


def test_act_gives_new_containers_less_and_moves_none_that_runs(tmp_path: Path) -> None:
    bed = Bed(tmp_path, MeasuredMode.ACT)
    before = bed.place("before", 5)
    assert before == "0"
    bed.pass_time({})
    bed.pass_time({0: 0.4, 1: 0.05})
    assert bed.factors() == {0: 0.6}
    assert bed.watch.acting() == {0: 0.6}
    assert str(bed.agent.state.allocations["before-app"].numa_nodes) == "0"
    assert bed.place("after", 3) == "1", "NUMA node 0 has three CPUs, but 4.8 of 8 are there"
    assert bed.gauge("measured_capacity_factor") == {"0": 0.6, "1": 1.0}
    assert bed.gauge("steal_ratio") == {"0": pytest.approx(0.4), "1": pytest.approx(0.05)}
    assert bed.gauge("waiting_tasks") == {}, "this kernel has no schedstat, which is no zero"
    assert bed.gauge("cpu_frequency_hertz") == {}, "nor cpufreq"
    bed.pass_time({})
    assert bed.factors() == {}


def test_what_is_stolen_counts_half_after_its_half_life(tmp_path: Path) -> None:
    bed = Bed(tmp_path, MeasuredMode.ACT, half_life="100s")
    for steal in (0.0, 0.0, 0.4):
        bed.pass_time({0: steal})
    assert bed.factors() == {0: 0.8}


def test_frequencies_are_told_where_they_are_known(tmp_path: Path) -> None:
    """CPUs that are away, or whose driver does not know, count for nothing."""
    bed = Bed(tmp_path, MeasuredMode.OBSERVE)
    for cpu, text in {0: "1000000\n", 1: "3000000\n", 2: "<unknown>\n", 8: "", 9: "-1"}.items():
        directory = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cpufreq"
        directory.mkdir(parents=True)
        (directory / "scaling_cur_freq").write_text(text)
    (tmp_path / "sys/devices/system/cpu/cpu10/cpufreq/scaling_cur_freq").mkdir(parents=True)
    bed.pass_time({})
    bed.pass_time({})
    assert bed.gauge("cpu_frequency_hertz") == {"0": 2e9}


def test_observe_tells_and_changes_nothing(tmp_path: Path) -> None:
    bed = Bed(tmp_path, MeasuredMode.OBSERVE)
    machine = bed.agent.machine
    bed.pass_time({})
    bed.pass_time({0: 0.4})
    assert bed.watch.factors == {0: 0.6}
    assert bed.watch.acting() == {}, "nobody may evict for what is only looked at"
    assert bed.gauge("measured_capacity_factor")["0"] == 0.6
    assert bed.agent.machine is machine


def test_the_lower_of_measured_and_configured_counts_and_outside_instead_of_measured(
    tmp_path: Path,
) -> None:
    bed = Bed(tmp_path, MeasuredMode.ACT)
    bed.watch.factors = {0: 0.6, 1: 0.6, 7: 0.5}
    ours = replace(bed.base, capacity_factor={0: 0.5, 1: 0.9})
    assert bed.all.over(ours, bed.topology).capacity_factor == {0: 0.5, 1: 0.6}
    bed.all.outside.factors = {1: 0.5, 8: 0.5}
    assert bed.all.over(ours, bed.topology).capacity_factor == {0: 0.5, 1: 0.45}
    bed.watch.factors = bed.all.outside.factors = {}
    assert bed.all.over(ours, bed.topology) == ours


def test_what_is_not_known_keeps_what_was_and_is_said_once(tmp_path: Path) -> None:
    shown = io.StringIO()
    logs.setup("info", stream=shown)
    bed = Bed(tmp_path, MeasuredMode.ACT)
    bed.pass_time({})
    bed.pass_time({0: 0.4})
    (tmp_path / "proc/stat").write_text("cpu0 1 2 3 4\n")
    for _ in range(2):
        assert not bed.watch.refresh(bed.topology)
    bed.pass_time({0: 0.4})
    assert bed.factors() == {0: 0.6}
    assert shown.getvalue().count("reports no steal") == 1
    assert shown.getvalue().count("steal is known again") == 1
    (tmp_path / "sys/devices/system/cpu").rmdir()
    assert not bed.watch.refresh(bed.topology)


def test_cpus_that_moved_are_not_counted_for_their_new_numa_node(tmp_path: Path) -> None:
    bed = Bed(tmp_path, MeasuredMode.ACT)
    bed.pass_time({})
    bed.agent.retopology(replace(bed.agent.machine, topology=machines.dual_no_smt()))
    bed.pass_time({0: 0.9})
    assert bed.factors() == {}
