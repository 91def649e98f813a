"""Capacity factors: steal that is measured, and a file of somebody who is not trusted."""

import asyncio
import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nri_numa.agent.capacity import CapacityFactors, ExternalCapacity, StealWatch
from nri_numa.agent.reload import apply_recomputed_settings
from nri_numa.config import AgentConfig
from nri_numa.config.sections import StealCapacity, StealTimeMode
from nri_numa.engine.node_model import NodeModel
from nri_numa.model.machine import Topology
from nri_numa.model.settings import Settings
from tests.beds.agent_bed import AgentBed
from tests.beds.world import container, pod, resources
from tests.machines import named as machines

NOW = 1_795_359_000.0
UNTIL = "2026-11-22T15:00:00Z"
"""Ten minutes after `NOW`."""


class CapacityBed(AgentBed):
    """Two NUMA nodes of eight CPUs, a proc, and a file from outside."""

    def __init__(
        self,
        root: Path,
        mode: StealTimeMode | None = None,
        half_life: str = "1s",
        base: Settings | None = None,
    ) -> None:
        self.base = base or Settings()
        super().__init__(machines.dual_no_smt(), self.base)
        self.root, self.path = root, root / "capacity.json"
        self.now = self.seconds = NOW
        self.config = self.used = AgentConfig()
        (root / "proc").mkdir()
        (root / "sys/devices/system/cpu").mkdir(parents=True)
        self.outside = ExternalCapacity(str(self.path), self.timing)
        section = StealCapacity(mode=mode, half_life=half_life) if mode else StealCapacity()
        self.watch = StealWatch(section, str(root), self.metrics, self.timing)
        self.all = CapacityFactors(self.outside, self.watch)
        self.apply_settings = partial(apply_recomputed_settings, self.agent, self, self)
        self.ticks = dict.fromkeys(range(16), 0)

    def steal(self, steal: Mapping[int, float]) -> None:
        """A hundred seconds pass; so much of each NUMA node's time is stolen."""
        self.pass_time(100)
        for cpu in self.ticks:
            self.ticks[cpu] += round(10_000 * steal.get(cpu // 8, 0.0))
        total = round((self.now - NOW) * 100)
        lines = (f"cpu{cpu} 0 0 0 {total - t} 0 0 0 {t}" for cpu, t in self.ticks.items())
        (self.root / "proc/stat").write_text("\n".join(["cpu 0 0 0 0 0 0 0 0", *lines, ""]))
        asyncio.run(self.watch.apply_capacity(self.agent.current, self.apply_settings))

    def says(self, zones: object = None, drained: object = "", **more: object) -> None:
        capacity = {"zones": zones, "until": UNTIL, "source": "put", **more}
        text = json.dumps(capacity) if zones is not None else ""
        self.path.write_text(json.dumps({"offline-capacity": text, "drained": drained}))

    def look(self) -> Mapping[int, float]:
        asyncio.run(self.outside.apply_capacity(self.agent.current, self.apply_settings))
        return self.factors()

    def settings_with_kubelet_config(self, config: AgentConfig, topology: Topology) -> Settings:
        self.used = config
        return self.all.apply_to_settings(self.base, topology)

    def factors(self) -> Mapping[int, float]:
        return self.agent.current.machine.settings.capacity_factor

    def gauge(self, name: str) -> dict[str, float]:
        return self.samples(name, "numa_node")

    def nodes_for(self, name: str, cpus: int) -> str:
        """NUMA nodes that a container gets; empty when it is refused."""
        self.create(
            of := pod(name, {"policy": "single-numa-node"}),
            container(of, wants=resources(cpus, 0.25)),
        )
        allocation = self.agent.current.state.allocations.get(f"{name}-app")
        return str(allocation.numa_nodes) if allocation else ""


@pytest.fixture
def bed(tmp_path: Path) -> CapacityBed:
    return CapacityBed(tmp_path, StealTimeMode.ENFORCE)


def test_act_gives_new_containers_less_and_moves_none_that_runs(bed: CapacityBed) -> None:
    assert bed.nodes_for("before", 5) == "0"
    bed.steal({})
    bed.steal({0: 0.4, 1: 0.05})
    assert bed.factors() == {0: 0.6}
    assert bed.watch.enforced_factors() == {0: 0.6}
    assert str(bed.agent.current.state.allocations["before-app"].numa_nodes) == "0"
    assert bed.nodes_for("after", 3) == "1", "NUMA node 0 has three CPUs, but 4.8 of 8 are there"
    assert bed.gauge("measured_capacity_factor") == {"0": 0.6, "1": 1.0}
    assert bed.gauge("cpu_steal_ratio") == {"0": pytest.approx(0.4), "1": pytest.approx(0.05)}
    assert bed.gauge("cpu_waiting_tasks") == {}, "this kernel has no schedstat, which is no zero"
    assert bed.gauge("cpu_frequency_hertz") == {}, "nor cpufreq"
    bed.steal({})
    assert bed.factors() == {}


def test_a_reload_meanwhile_counts(bed: CapacityBed, monkeypatch: pytest.MonkeyPatch) -> None:
    real, reloaded = bed.outside.refresh_capacity, AgentConfig(cpu_overcommit=2)

    def refresh(topology: Topology) -> bool:
        bed.config = reloaded
        return real(topology)

    monkeypatch.setattr(bed.outside, "refresh_capacity", refresh)
    bed.says({"0": 0.5})
    bed.look()
    assert bed.used is reloaded


def test_what_is_stolen_counts_half_after_its_half_life(tmp_path: Path) -> None:
    bed = CapacityBed(tmp_path, StealTimeMode.ENFORCE, half_life="100s")
    for steal in (0.0, 0.0, 0.4):
        bed.steal({0: steal})
    assert bed.factors() == {0: 0.8}


def test_observe_tells_and_changes_nothing(tmp_path: Path) -> None:
    """Frequencies too: CPUs that are away, or whose driver does not know, count for nothing."""
    bed = CapacityBed(tmp_path, StealTimeMode.REPORT)
    for cpu, text in {0: "1000000\n", 1: "3000000\n", 2: "<unknown>\n", 8: "", 9: "-1"}.items():
        directory = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cpufreq"
        directory.mkdir(parents=True)
        (directory / "scaling_cur_freq").write_text(text)
    (tmp_path / "sys/devices/system/cpu/cpu10/cpufreq/scaling_cur_freq").mkdir(parents=True)
    machine = bed.agent.current.machine
    bed.steal({})
    bed.steal({0: 0.4})
    assert bed.gauge("cpu_frequency_hertz") == {"0": 2e9}
    assert bed.watch.factors == {0: 0.6}
    assert bed.watch.enforced_factors() == {}, "nobody may evict for what is only looked at"
    assert bed.gauge("measured_capacity_factor")["0"] == 0.6
    assert bed.agent.current.machine is machine


def test_the_lower_of_measured_and_configured_counts_and_outside_first(bed: CapacityBed) -> None:
    bed.watch.factors = {0: 0.6, 1: 0.6, 7: 0.5}
    ours = replace(bed.base, capacity_factor={0: 0.5, 1: 0.9})
    assert bed.all.apply_to_settings(ours, bed.topology).capacity_factor == {0: 0.5, 1: 0.6}
    bed.outside.factors = {1: 0.5, 8: 0.5}
    assert bed.all.apply_to_settings(ours, bed.topology).capacity_factor == {0: 0.5, 1: 0.45}
    bed.watch.factors = bed.outside.factors = {}
    assert bed.all.apply_to_settings(ours, bed.topology) == ours


def test_what_is_not_known_keeps_what_was_and_is_said_once(bed: CapacityBed) -> None:
    bed.steal({})
    bed.steal({0: 0.4})
    (bed.root / "proc/stat").write_text("cpu0 1 2 3 4\n")
    for _ in range(2):
        assert not bed.watch.refresh_capacity(bed.topology)
    bed.steal({0: 0.4})
    assert bed.factors() == {0: 0.6}
    assert len(bed.log("reports no steal")) == 1
    assert len(bed.log("CPU steal measured again")) == 1
    (bed.root / "sys/devices/system/cpu").rmdir()
    assert not bed.watch.refresh_capacity(bed.topology)


def test_cpus_that_moved_are_not_counted_for_their_new_numa_node(bed: CapacityBed) -> None:
    bed.steal({})
    bed.agent.apply_node_model(replace(bed.agent.current.machine, topology=machines.dual_no_smt()))
    bed.steal({0: 0.9})
    assert bed.factors() == {}


@pytest.fixture
def told(tmp_path: Path) -> CapacityBed:
    return CapacityBed(tmp_path)


def test_factors_hold_until_their_time_is_over(told: CapacityBed) -> None:
    assert told.look() == {}
    told.says({"1": 0.5, "0": 1})
    assert told.look() == {1: 0.5}
    assert (
        told.agent.current.machine.cpu_capacity_milli[1] * 2
        == told.agent.current.machine.cpu_capacity_milli[0]
    )
    told.pass_time(599)
    assert told.look() == {1: 0.5}
    told.pass_time(1)
    assert told.look() == {}


def test_a_drained_numa_node_stays_drained(told: CapacityBed) -> None:
    told.says({"1": 0.5}, drained="1")
    assert told.look() == {1: 0.0}
    told.path.unlink()
    told.pass_time(1e7)
    assert told.look() == {1: 0.0}
    told.says()
    assert told.look() == {}


def test_the_configurations_own_factor_counts_besides(tmp_path: Path) -> None:
    bed = CapacityBed(tmp_path, base=Settings(capacity_factor={0: 0.5, 1: 0.8}))
    bed.says({"0": 0.5})
    assert bed.look() == {0: 0.25, 1: 0.8}


def test_numa_nodes_that_are_not_there_are_said_and_left_out(told: CapacityBed) -> None:
    told.says({"7": 0, "1": 0.5}, drained="9")
    assert told.look() == told.look() == {1: 0.5}
    words = "this machine has no NUMA node 7,9; it has 0-1"
    assert len(told.log(words)) == 1


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"{", b"\xff", b"[" * 50_000, b"x" * 70_000, b'{"drained": 1}',
        b'{"drained": "a"}', b'{"offline-capacity": "{}"}', b'{"offline-capacity": "NaN"}',
        b'{"drained": "", "offline-capacity": "[]"}', b'{"drained": "", "offline-capacity": 1}',
    ],
)  # fmt: skip
def test_nonsense_changes_nothing(told: CapacityBed, text: bytes) -> None:
    told.says({"1": 0.5})
    assert told.look() == {1: 0.5}
    told.path.write_bytes(text)
    assert told.look() == {1: 0.5}


@pytest.mark.parametrize(
    ("says", "factors"),
    [
        ({"zones": {"1": 2}, "drained": "0"}, {0: 0.0}),
        ({"zones": {"1": 0.5}, "until": "2036-11-22T15:00:00Z"}, {}),
    ],
    ids=["half a document", "a time that is far away"],
)
def test_what_cannot_be_is_left_out(
    told: CapacityBed, says: dict[str, Any], factors: dict[int, float]
) -> None:
    told.says(**says)
    assert told.look() == factors


def _link(path: Path) -> None:
    (path.parent / "other").write_text(json.dumps({"drained": "0"}))
    path.symlink_to("other")


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, _link])
def test_something_else_than_a_file_is_not_read(told: CapacityBed, make: Any) -> None:
    make(told.path)
    assert told.look() == {}


def test_no_change_meanwhile_is_lost(told: CapacityBed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reload that comes between is not overwritten; the factor follows a second later."""
    told.says(drained="0")
    other = NodeModel(topology=told.topology, settings=Settings(cpu_overcommit=2.0))

    def settings(config: AgentConfig, topology: Topology) -> Settings:
        made = told.all.apply_to_settings(told.base, topology)
        told.agent.apply_node_model(other)
        return made

    with monkeypatch.context() as patch:
        patch.setattr(told, "settings_with_kubelet_config", settings)
        assert told.look() == {}
    told.base = other.settings
    assert told.look() == {0: 0.0}
    assert told.agent.current.machine.settings.cpu_overcommit == 2.0
