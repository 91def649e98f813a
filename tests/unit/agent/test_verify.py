"""Right after a reply: what arrived in the cgroups is read back, and what did not is put right."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from nri_numa.agent.reconcile import STILL
from nri_numa.machine.cgroups import CgroupPlace
from nri_numa.model.workload import Container, PodSandbox
from tests.beds.cgroup_bed import ReconcilerBed, blocked, tree
from tests.beds.cgroup_tree import CgroupTree
from tests.beds.systemd_bus import SystemdBus, systemd
from tests.beds.world import container, pod, resources

__all__ = ["systemd", "tree"]  # fixtures

OWN = {"cpus": "exclusive"}


@dataclass
class Bed(ReconcilerBed):
    """Looked at right after a reply."""

    def run(self, of: PodSandbox, made: Container | None = None) -> None:
        """Create a container and start it; the runtime applies nothing to others."""
        made = replace(made or container(of), cgroups_path=f"/pods/{of.name}-app")
        self.world.place(of, made)
        self.settle(made.id)
        self.answered += 1
        self.world.agent.start_container(of, made)
        self.world.agent.post_start_container(of, made)

    def scope(self, systemd: SystemdBus, name: str) -> None:
        """Let systemd have made the cgroup of a container, with every CPU."""
        slice_ = self.tree.directory("/pods.slice")
        slice_.mkdir()
        (slice_ / f"cri-{name}.scope").symlink_to(self.tree.directory(f"/pods/{name}"))
        self.world.agent.places[name] = CgroupPlace(f"pods.slice:cri:{name}")
        systemd.make(f"cri-{name}.scope", AllowedCPUs="0-7")

    def look(self) -> None:
        asyncio.run(self.reconciler.verify())

    def count(self, name: str) -> float:
        value = self.world.metrics.registry.get_sample_value(f"nri_numa_{name}")
        assert value is not None
        return value

    def has(self, container_id: str) -> str:
        return self.tree.cpus_of(f"/pods/{container_id}")

    def lines(self, event: str) -> list[str]:
        return [line for line in self.output.getvalue().splitlines() if event in line]


@pytest.fixture
def bed(tree: CgroupTree) -> Bed:
    bed = Bed(tree)
    bed.run(pod("plain"))
    bed.look()
    return bed


def own(bed: Bed) -> None:
    of = pod("own", OWN)
    bed.run(of, container(of, wants=resources(2, 1)))


def test_an_update_that_did_not_arrive_is_written_and_counted_as_late(bed: Bed) -> None:
    own(bed)
    assert bed.has("plain-app") in ("", "0-7")
    bed.clock += 0.1
    bed.look()
    assert bed.has("plain-app") == bed.world.has("plain-app")[0] == "2-7"
    assert bed.count("late_repairs_total") == 1
    assert bed.count("drift_found_total") == 0
    assert bed.pushes == []
    [line] = bed.lines("late container put right")
    assert "default/plain/app" in line
    assert "on_owned_cpus=true" in line
    assert "meant 2-7" in line


def test_a_write_that_the_kernel_holds_up_is_bounded_said_and_looked_at_when_it_is_through(
    bed: Bed,
) -> None:
    own(bed)
    bed.clock += 0.1
    with blocked(bed.tree.directory("/pods/plain-app") / "cpuset.cpus"):
        bed.look()
        assert bed.writer.busy
        assert bed.has("plain-app") in ("", "0-7")
        bed.look()
    assert bed.count("cgroup_writes_held_up_total") == 1
    assert bed.count("late_repairs_total") == 0
    assert bed.pushes == [], "the runtime would wait as well"
    [line] = bed.lines("the kernel holds up writes of cpusets")
    assert "ids=plain-app" in line
    bed.writer.finish()
    bed.tree.settle("/pods/plain-app")
    bed.look()
    assert bed.has("plain-app") == bed.world.has("plain-app")[0] == "2-7"
    assert not bed.world.agent.differences.known


def test_a_late_container_that_is_pinned_is_noted_for_whoever_looks_at_its_pod(bed: Bed) -> None:
    bed.run(pod("listed", {"numacpu": "1"}))
    bed.tree.write("/pods/listed-app", "0-7", "")
    bed.reconciler.schedule_verification(["listed-app"])
    bed.clock += 0.1
    bed.look()
    assert bed.has("listed-app") == "1"
    (notice,) = bed.world.agent.notices.after()
    assert (notice.what, notice.pod) == ("late", "listed")
    assert "meant 1; put right" in notice.message


def test_a_neighbour_on_owned_cpus_is_counted_with_its_seconds(bed: Bed) -> None:
    own(bed)
    bed.clock += 0.25
    bed.world.timing.wall = lambda: 999_000.0 + bed.clock
    bed.look()
    assert bed.count("neighbours_on_owned_cpus_seen_total") == 1
    assert bed.count("neighbours_on_owned_cpus_seconds_total") == pytest.approx(0.25)
    assert bed.count("neighbours_on_owned_cpus") == 0


def create(bed: Bed, name: str) -> None:
    """The runtime has the answer to a create, and begins to apply the updates in it."""
    of = pod(name, OWN)
    made = replace(container(of, wants=resources(1, 1)), cgroups_path=f"/pods/{name}-app")
    bed.world.place(of, made)


def test_updates_that_the_runtime_is_still_applying_are_not_late(bed: Bed) -> None:
    """However long all of them take: 40 s here."""
    names = ["plain"] + [f"p{n}" for n in range(19)]
    for name in names[1:]:
        bed.run(pod(name))
    bed.look()
    create(bed, "own")
    for name in names:
        for _ in range(4):
            bed.clock += 0.5
            bed.look()
            assert f"{names[-1]}-app" in bed.reconciler._due
        bed.settle(f"{name}-app")
    bed.answered += 1
    bed.look()
    assert f"{names[-1]}-app" not in bed.reconciler._due
    assert bed.count("late_repairs_total") == 0
    assert bed.count("neighbours_on_owned_cpus_seen_total") == 0


def test_a_next_request_tells_that_all_updates_were_applied(bed: Bed) -> None:
    create(bed, "own")
    bed.look()
    assert bed.count("late_repairs_total") == 0
    bed.answered += 1
    bed.look()
    assert bed.count("late_repairs_total") == 1


def test_without_a_next_request_cgroups_that_stay_as_they_are_tell_it(bed: Bed) -> None:
    create(bed, "own")
    for _ in range(2):
        assert bed.count("late_repairs_total") == 0
        bed.clock += STILL
        bed.look()
    assert bed.has("plain-app") == "1-7"
    assert bed.count("late_repairs_total") == 1


def test_systemd_has_what_was_written_late(bed: Bed, systemd: SystemdBus) -> None:
    """Or it would write what it has with the next property of the scope."""
    if bed.tree.version == 1:
        pytest.skip("systemd has no property of cpusets of version 1")
    bed.reconciler._scopes = systemd.scopes
    bed.scope(systemd, "plain-app")
    create(bed, "own")
    bed.answered += 1
    bed.look()
    assert (bed.has("plain-app"), systemd.has("cri-plain-app.scope")) == ("1-7", "0-7")
    bed.look()
    assert systemd.has("cri-plain-app.scope") == "1-7"
    assert bed.count("late_repairs_total") == 1


def test_where_cgroups_cannot_be_written_the_runtime_is_asked(bed: Bed) -> None:
    bed.writer.problem = "/cgroup: Read-only file system"
    own(bed)
    bed.clock += 0.1
    bed.look()
    assert [[u.container_id for u in push] for push in bed.pushes] == [["plain-app"]]
    assert bed.has("plain-app") == "2-7"
    assert bed.count("late_repairs_total") == 1
    assert len(bed.world.agent.differences.known) == 0
    bed.world.stop("own-app")
    own(bed)
    bed.clock += 0.1
    bed.look()
    assert len(bed.lines("Read-only file system")) == 1  # said once


def test_what_cannot_be_put_right_is_shown(bed: Bed) -> None:
    bed.writer.problem, bed.failing = "/cgroup: Read-only file system", "not quiet"
    own(bed)
    bed.clock += 0.1
    bed.look()
    found = bed.world.agent.differences.known["plain-app"]
    assert (found.cpus, found.intruder) == ("0-7", True)
    assert bed.count("neighbours_on_owned_cpus") == 1
    assert bed.count("late_repairs_total") == 0
    assert bed.lines("late containers not put right")
    bed.world.stop("plain-app")
    assert bed.count("neighbours_on_owned_cpus") == 0


def test_a_push_that_changes_nothing_is_no_repair(bed: Bed, tree: CgroupTree) -> None:
    bed.writer.problem = "/cgroup: Read-only file system"
    own(bed)
    bed.on_sleep = lambda: tree.write("/pods/plain-app", "0-7")
    bed.clock += 0.1
    bed.look()
    assert bed.count("late_repairs_total") == 0
    assert "plain-app" in bed.world.agent.differences.known


def test_what_is_meant_changed_during_the_look(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner goes while the cgroups are read: nothing of before is written."""
    own(bed)
    bed.clock += 0.1
    looked = bed.reconciler._observe

    async def then(ids):  # type: ignore[no-untyped-def]
        found = await looked(ids)
        bed.world.stop("own-app")
        return found

    monkeypatch.setattr(bed.reconciler, "_observe", then)
    bed.look()
    assert bed.has("plain-app") in ("", "0-7")
    assert bed.count("late_repairs_total") == 0


def test_a_container_that_goes_meanwhile_is_nobodys_business(bed: Bed, tree: CgroupTree) -> None:
    own(bed)
    bed.clock += 0.1
    tree.remove("/pods/plain-app")
    bed.look()
    bed.reconciler.schedule_verification(["gone"])
    bed.look()
    assert bed.count("late_repairs_total") == 0


def test_containers_being_started_wait_until_they_run(bed: Bed) -> None:
    of = pod("slow")
    made = replace(container(of), cgroups_path="/pods/slow-app")
    bed.world.place(of, made)
    own(bed)
    bed.tree.write("/pods/slow-app", "0-7")
    bed.clock += 0.1
    bed.look()
    assert bed.has("slow-app") == "0-7"
    bed.world.agent.post_start_container(of, made)
    bed.look()
    assert bed.has("slow-app") == "2-7"


def test_after_a_synchronisation_everybody_is_looked_at(bed: Bed) -> None:
    own(bed)
    bed.clock += 0.1
    bed.look()
    bed.tree.write("/pods/plain-app", "0-7")
    bed.world.live["plain-app"] = replace(
        bed.world.live["plain-app"], cgroups_path="/pods/plain-app"
    )
    bed.world.synchronize()
    bed.clock += 0.1
    bed.look()
    assert bed.has("plain-app") == "2-7"


def test_observe_tells_and_writes_nothing(tree: CgroupTree) -> None:
    bed = Bed(tree, observe=True)
    bed.run(pod("plain"))
    bed.run(pod("listed", {"numacpu": "1"}))
    bed.reconciler.schedule_verification(["listed-app"])
    bed.look()
    assert bed.has("listed-app") in ("", "0-7")
    assert bed.count("late_repairs_total") == 0


def test_an_unreadable_file_system_is_no_reason_to_stop(bed: Bed, tree: CgroupTree) -> None:
    own(bed)
    bed.clock += 0.1
    tree.root.rename(tree.root.with_name("away"))
    bed.look()
    assert bed.lines("drift is not looked for")


def test_hundreds_of_late_containers_are_said_in_a_few_lines(bed: Bed) -> None:
    for n in range(30):
        bed.run(pod(f"p{n}"))
    bed.look()
    own(bed)
    bed.clock += 10
    bed.look()
    assert bed.count("late_repairs_total") == 31
    assert len(bed.lines("late container put right")) == 20
    assert "containers=11" in bed.lines("more late containers put right")[0]


def test_the_task_looks_until_nobody_is_due_and_survives_mistakes(bed: Bed) -> None:
    own(bed)
    mistakes = iter([RuntimeError("a mistake")])
    look = bed.reconciler.verify

    async def sometimes() -> None:
        for mistake in mistakes:
            raise mistake
        await look()

    bed.reconciler.verify = sometimes  # type: ignore[method-assign]

    async def scenario() -> None:
        async def sleep(seconds: float) -> None:
            bed.clock += seconds
            await asyncio.sleep(0)

        bed.timing.sleep = sleep  # type: ignore[method-assign]
        task = asyncio.create_task(bed.reconciler.run_verification())
        async with asyncio.timeout(180):
            while bed.has("plain-app") != "2-7":
                await asyncio.sleep(0)
        task.cancel()

    asyncio.run(scenario())
    assert bed.count("internal_errors_total") == 1


def test_an_intruder_that_turns_harmless_is_counted_until_then(bed: Bed) -> None:
    bed.writer.problem, bed.failing = "/cgroup: Read-only file system", "not quiet"
    own(bed)
    bed.clock += 0.1
    bed.look()
    bed.tree.write("/pods/plain-app", "3")  # wrong, and on nobody's CPU
    bed.world.timing.wall = lambda: 999_000.0 + bed.clock
    bed.clock += 2
    bed.reconciler.schedule_verification(["plain-app"])
    bed.look()
    assert not bed.world.agent.differences.known["plain-app"].intruder
    assert bed.count("neighbours_on_owned_cpus") == 0
    assert bed.count("neighbours_on_owned_cpus_seconds_total") > 0
    assert list(bed.world.agent.differences.known) == ["plain-app"]
