"""Updates that no request asked for: the cgroup is written where a call could hang the runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_numa.agent.reconcile import Reconciler
from nri_numa.machine.cgroups import CgroupPlace, CgroupReader, CgroupWriter, Scopes, Written
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.workload import ContainerUpdate
from nri_numa.runtime import PushResult
from tests.beds.cgroup_tree import CgroupTree
from tests.beds.world import StillClock, World, container, pod, resources
from tests.machines import named as machines


class Bed:
    """A world with two ordinary containers and an owner, whose sets the cgroups do not have."""

    active = True
    answered = 0

    def __init__(self, directory: Path) -> None:
        self.tree = CgroupTree(directory, 2, CPUSet.parse("0-3"), NUMASet.parse("0"))
        self.world = World(machines.single_no_smt())
        self.world.synchronize()
        for name in ("one", "two"):
            of = pod(name)
            self.world.place(of, replace(container(of), cgroups_path=f"/pods/{name}"))
            self.tree.write(f"/pods/{name}", "0-3")
        of = pod("own", {"cpus": "exclusive"})
        self.world.place(of, container(of, wants=resources(2)))
        self.calls: list[list[str]] = []
        self.takes_updates = False
        self.writer = CgroupWriter(CgroupReader(str(directory)))
        self.reconciler = Reconciler(
            self.world.agent,
            self.world.metrics,
            self,
            writer=self.writer,
            scopes=Scopes("/nowhere", "/nowhere"),
            clock=StillClock(),
        )

    async def push(self, updates: Sequence[ContainerUpdate]) -> PushResult:
        self.calls.append([update.container_id for update in updates])
        return PushResult()

    def send(self, *updates: ContainerUpdate) -> bool:
        return asyncio.run(self.reconciler.send(updates)).ok

    def waiting(self) -> dict[str, str]:
        """What the next reply carries, by container."""
        return {u.container_id: u.cpus for u in self.world.agent._pending.values()}


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    return Bed(tmp_path / "cgroup")


def test_the_cgroup_is_written_and_the_runtime_told_with_the_next_reply(bed: Bed) -> None:
    assert bed.send(ContainerUpdate("one-app", cpus="2-3"))
    assert bed.tree.cpus_of("/pods/one") == "2-3"
    assert bed.calls == []
    assert not bed.world.agent.has_pending  # nobody has to hurry
    assert bed.waiting() == {"one-app": "2-3"}


def test_a_runtime_that_can_be_called_at_any_moment_is_called(bed: Bed) -> None:
    bed.takes_updates = True
    bed.send(ContainerUpdate("one-app", cpus="2-3"))
    assert bed.calls == [["one-app"]]
    assert bed.tree.cpus_of("/pods/one") == "0-3"


def test_what_is_not_meant_any_more_is_not_written(bed: Bed) -> None:
    bed.send(ContainerUpdate("one-app", cpus="1-3"), ContainerUpdate("gone", cpus="1"))
    assert bed.tree.cpus_of("/pods/one") == "0-3"
    assert (bed.calls, bed.waiting()) == ([], {})


def test_only_what_cannot_be_written_asks_the_runtime(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = bed.writer.write

    def sometimes(place: CgroupPlace, cpus: str, mems: str = "") -> Written:
        if place.cgroups_path == "/pods/two":
            return Written(problem="Read-only file system")
        return write(place, cpus, mems)

    monkeypatch.setattr(bed.writer, "write", sometimes)
    bed.send(ContainerUpdate("one-app", cpus="2-3"), ContainerUpdate("two-app", cpus="2-3"))
    assert bed.calls == [["two-app"]]
    assert bed.waiting() == {"one-app": "2-3"}


@pytest.mark.parametrize("field", ["cpu_quota", "cpu_shares", "memory_limit"])
def test_other_resources_are_the_runtimes_business(bed: Bed, field: str) -> None:
    bed.send(ContainerUpdate("one-app", cpus="2-3")._replace(**{field: 1000}))
    assert bed.calls == [["one-app"]]


def test_a_set_that_changes_again_does_not_only_ride(bed: Bed) -> None:
    """A change that no reply carried has to be sent, also for one that is told later anyway."""
    agent = bed.world.agent
    bed.send(ContainerUpdate("one-app", cpus="2-3"))
    agent.remove_container("own-app")
    assert agent.is_pending("one-app")
    assert {u.container_id: u.cpus for u in agent.take_pending()} == {
        "one-app": "0-3",
        "two-app": "0-3",
    }


def test_a_container_that_stops_takes_what_was_riding_with_it(bed: Bed) -> None:
    bed.send(ContainerUpdate("one-app", cpus="2-3"))
    bed.world.stop("one-app")
    assert "one-app" not in bed.waiting()
    bed.world.agent.ride(ContainerUpdate("one-app", cpus="2-3"))
    assert "one-app" not in bed.waiting()


def test_many_are_written_in_turns(bed: Bed) -> None:
    for n in range(60):
        of = pod(f"p{n}")
        bed.world.place(of, replace(container(of), cgroups_path=f"/pods/p{n}"))
        bed.tree.write(f"/pods/p{n}", "0-3")
    bed.send(*(ContainerUpdate(f"p{n}-app", cpus="2-3") for n in range(60)))
    assert {bed.tree.cpus_of(f"/pods/p{n}") for n in range(60)} == {"2-3"}
