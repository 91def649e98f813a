"""The round over all containers that looks how much they wait, and what is shown of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from nri_numa.agent.usage import WaitingWatch, Watches
from nri_numa.agent.view import LiveView
from nri_numa.cli import status
from nri_numa.config.sections import CPUWaiting
from nri_numa.engine.decision import Machine
from nri_numa.machine.cgroups import CgroupPlace
from nri_numa.model.settings import Settings
from nri_numa.observe.metrics import Metrics
from tests.beds.views import live_view
from tests.beds.world import StillClock, agent_of, container, pod, resources
from tests.machines import named as machines

NOW = 1_700_000_000.0


class Bed:
    """An agent whose containers have cgroups of version 2 and one thread each."""

    def __init__(self, root: Path, config: CPUWaiting) -> None:
        self.root = root
        (root / "cgroup.controllers").touch()
        self.metrics = Metrics("0")
        machine = Machine(topology=machines.dual_smt(), settings=Settings())
        self.clock = 100.0
        self.timing = StillClock(lambda: NOW, lambda: self.clock)
        self.agent = agent_of(machine, metrics=self.metrics, clock=self.timing)
        proc = str(root / "proc")
        self.watch = WaitingWatch(self.agent, config, str(root), self.timing, proc=proc)
        self.view = self.looking(self.watch)
        self.metrics.snapshot = self.view.snapshot

    def looking(self, watch: WaitingWatch | None) -> LiveView:
        return live_view(self.agent, clock=self.timing, watches=Watches(waiting=watch))

    def create(self, name: str, pid: int, pressure: float | None) -> None:
        of = pod(name, namespace="shop")
        made = container(of, "main", resources(1, 0.25), id=f"c-{name}")
        self.agent.create_container(of, made)
        self.agent.places[made.id] = CgroupPlace(f"/{name}")
        (self.root / name).mkdir()
        (self.root / name / "cgroup.procs").write_text(f"{pid}\n")
        (self.root / f"proc/{pid}/task/{pid}").mkdir(parents=True)
        self.waited(pid, 1.0)
        if pressure is not None:
            (self.root / name / "cpu.pressure").write_text(
                f"some avg10=0.00 avg60={pressure:.2f} avg300=0.00 total=0\n"
            )

    def waited(self, pid: int, seconds: float) -> None:
        """How long its thread has waited by now."""
        file = self.root / f"proc/{pid}/task/{pid}/schedstat"
        file.write_text(f"1 {int(seconds * 1e9)} 1\n")

    def round(self, seconds: float = 30.0) -> None:
        self.clock += seconds
        asyncio.run(self.watch.round())

    def listed(self) -> dict[str, Any]:
        return {one.pod: msgspec.to_builtins(one) for one in self.view.listing().containers}

    def samples(self, name: str, label: str = "pod_name") -> dict[str, float]:
        families = {f.name: f for f in text_string_to_metric_families(self.metrics.text())}
        family = families.get(f"nri_numa_{name}")
        return {s.labels[label]: s.value for s in family.samples} if family else {}


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    made = Bed(tmp_path, CPUWaiting(enabled=True, metric=True))
    made.create("busy", 10, 62.5)
    made.create("calm", 11, 0.0)
    made.create("old", 12, None)
    return made


def test_pressure_at_once_and_tasks_after_the_second_round(bed: Bed) -> None:
    assert bed.listed()["busy"]["waiting"]["problem"] == "not read yet"
    bed.round()
    first = {pod: one["waiting"] for pod, one in bed.listed().items()}
    assert first["busy"] == {
        "pressurePercent": 62.5,
        "waitingTasks": None,
        "at": NOW,
        "problem": "threads were read once so far",
    }
    bed.waited(10, 16.0)
    bed.round()
    second = {pod: one["waiting"] for pod, one in bed.listed().items()}
    assert second["busy"]["waitingTasks"] == 0.5
    assert second["busy"]["problem"] == ""
    assert (second["calm"]["pressurePercent"], second["calm"]["waitingTasks"]) == (0, 0)
    assert second["old"]["pressurePercent"] is None
    assert second["old"]["waitingTasks"] == 0
    assert "no pressure stall information" in second["old"]["problem"]


def test_a_scrape_has_series_of_what_is_known_only(bed: Bed) -> None:
    bed.round()
    bed.waited(10, 16.0)
    del bed.agent.places["c-calm"]
    bed.round()
    assert bed.samples("container_cpu_pressure_ratio") == {"busy": 0.625}
    assert bed.samples("container_waiting_tasks") == {"busy": 0.5, "old": 0}
    assert bed.samples("cpu_waiting_containers", "state") == {
        "known": 2,
        "unknown": 1,
        "left out": 0,
    }


def test_a_container_that_ended_is_forgotten(bed: Bed) -> None:
    bed.round()
    bed.agent.stop_container("c-busy")
    bed.round()
    assert "c-busy" not in bed.watch.known
    again = replace(bed.agent.state.allocations["c-calm"], container_id="c-busy")
    state = replace(bed.agent.state, allocations={"c-busy": again})
    told = bed.watch.samples(state)
    assert told is not None
    assert told.states["unknown"] == 1


def test_status_shows_both_or_a_question_mark(bed: Bed) -> None:
    bed.round()
    document = {
        "status": msgspec.to_builtins(bed.view.status()),
        "numaNodes": [],
        "containers": list(bed.listed().values()),
        "refusals": [],
    }
    wide = list(status.lines(document, NOW, wide=True))
    (head,) = [line for line in wide if "CPU PRESSURE" in line]
    assert "TASKS WAITING" in head
    (busy,) = [line for line in wide if " busy " in line]
    assert " 62.5 % " in busy
    assert " ? " in busy, "threads were read once so far"
    assert "CPU PRESSURE" not in "\n".join(status.lines(document, NOW))
    assert bed.view.explain("shop", "busy", None)
