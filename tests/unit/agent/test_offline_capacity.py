"""Capacity from outside as the agent takes it: from a file of somebody who is not trusted."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from nri_numa import config as configuration
from nri_numa.agent.capacity import CapacityFactors, OutsideCapacity, StealWatch
from nri_numa.config import AgentConfig
from nri_numa.config.sections import MeasuredCapacity
from nri_numa.engine.decision import Machine
from nri_numa.model.machine import Topology
from nri_numa.model.settings import Settings
from nri_numa.observe import logs
from nri_numa.observe.metrics import Metrics
from tests.beds.world import StillClock, agent_of
from tests.machines import named as machines

NOW = 1_795_359_000.0
UNTIL = "2026-11-22T15:00:00Z"
"""Ten minutes after `NOW`."""


class Bed:
    """A machine with two NUMA nodes, a file, and an agent."""

    def __init__(self, directory: Path, settings: Settings | None = None) -> None:
        self.path = directory / "capacity.json"
        self.now = NOW
        self.topology = machines.dual_smt()
        self.clock = StillClock(lambda: self.now)
        self.outside = OutsideCapacity(str(self.path), self.clock)
        measured = StealWatch(MeasuredCapacity(), str(directory), Metrics("0"), self.clock)
        self.all = CapacityFactors(self.outside, measured)
        self.base = settings or Settings()
        machine = Machine(topology=self.topology, settings=self.base)
        self.agent = agent_of(machine, clock=self.clock)

    def says(self, zones: object = None, drained: object = "", **more: object) -> None:
        capacity = {"zones": zones, "until": UNTIL, "source": "put", **more}
        text = json.dumps(capacity) if zones is not None else ""
        self.path.write_text(json.dumps({"offline-capacity": text, "drained": drained}))

    def settings(self, config: AgentConfig, topology: Topology) -> Settings:
        return self.all.over(self.base, topology)

    def look(self) -> dict[int, float]:
        asyncio.run(self.outside.apply(self.agent, configuration.AgentConfig(), self))
        return dict(self.agent.machine.settings.capacity_factor)


def test_factors_hold_until_their_time_is_over(tmp_path: Path) -> None:
    bed = Bed(tmp_path)
    assert bed.look() == {}
    bed.says({"1": 0.5, "0": 1})
    assert bed.look() == {1: 0.5}
    assert bed.agent.machine.cpu_total[1] * 2 == bed.agent.machine.cpu_total[0]
    bed.now += 599
    assert bed.look() == {1: 0.5}
    bed.now += 1
    assert bed.look() == {}


def test_a_drained_numa_node_stays_drained(tmp_path: Path) -> None:
    bed = Bed(tmp_path)
    bed.says({"1": 0.5}, drained="1")
    assert bed.look() == {1: 0.0}
    bed.path.unlink()
    bed.now += 1e7
    assert bed.look() == {1: 0.0}
    bed.says()
    assert bed.look() == {}


def test_the_configurations_own_factor_counts_besides(tmp_path: Path) -> None:
    bed = Bed(tmp_path, Settings(capacity_factor={0: 0.5, 1: 0.8}))
    bed.says({"0": 0.5})
    assert bed.look() == {0: 0.25, 1: 0.8}


def test_numa_nodes_that_are_not_there_are_said_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.setup("warning", stream=sys.stderr)
    bed = Bed(tmp_path)
    bed.says({"7": 0, "1": 0.5}, drained="9")
    assert bed.look() == {1: 0.5}
    assert bed.look() == {1: 0.5}
    said = capsys.readouterr().err
    assert said.count("this machine has no NUMA node 7,9; it has 0-1") == 1


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"{", b"\xff", b"[" * 50_000, b"x" * 70_000, b'{"drained": 1}',
        b'{"drained": "a"}', b'{"offline-capacity": "{}"}', b'{"offline-capacity": "NaN"}',
        b'{"drained": "", "offline-capacity": "[]"}', b'{"drained": "", "offline-capacity": 1}',
    ],
)  # fmt: skip
def test_nonsense_changes_nothing(tmp_path: Path, text: bytes) -> None:
    bed = Bed(tmp_path)
    bed.says({"1": 0.5})
    assert bed.look() == {1: 0.5}
    bed.path.write_bytes(text)
    assert bed.look() == {1: 0.5}


def test_half_a_document_counts_for_its_half(tmp_path: Path) -> None:
    bed = Bed(tmp_path)
    bed.says({"1": 2}, drained="0")
    assert bed.look() == {0: 0.0}


def test_a_time_that_is_far_away_does_not_count(tmp_path: Path) -> None:
    bed = Bed(tmp_path)
    bed.says({"1": 0.5}, until="2036-11-22T15:00:00Z")
    assert bed.look() == {}


def _link(path: Path) -> None:
    (path.parent / "other").write_text(json.dumps({"drained": "0"}))
    path.symlink_to("other")


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, _link])
def test_something_else_than_a_file_is_not_read(tmp_path: Path, make: Any) -> None:
    bed = Bed(tmp_path)
    make(bed.path)
    assert bed.look() == {}


def test_somebody_elses_change_meanwhile_is_not_lost(tmp_path: Path) -> None:
    """A reload that comes between is not overwritten; the factor follows a second later."""
    bed = Bed(tmp_path)
    bed.says(drained="0")

    def settings(config: AgentConfig, topology: Topology) -> Settings:
        made = bed.all.over(bed.base, topology)
        if bed.agent.machine.settings == bed.base:
            other = Machine(topology=bed.topology, settings=Settings(oversale=2.0))
            bed.agent.retopology(other)
        return made

    bed.settings = settings  # type: ignore[method-assign]
    asyncio.run(bed.outside.apply(bed.agent, configuration.AgentConfig(), bed))
    assert bed.agent.machine.settings.oversale == 2.0
    del bed.settings
    bed.base = Settings(oversale=2.0)
    assert bed.look() == {0: 0.0}
    assert bed.agent.machine.settings.oversale == 2.0
