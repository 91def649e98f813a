"""Resources that were changed while the plugin was away are caught up with at the next picture."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_numa.engine.state import Kind
from nri_numa.machine.synthetic import synthetic
from nri_numa.model.workload import Resources
from tests.beds.world import GIB, World, pod, resources

OWN = {"cpus": "exclusive"}


def node() -> World:
    world = World(
        synthetic(sockets=2, numa_per_socket=1, cores_per_numa=4, threads=1, memory_gib=64)
    )
    world.synchronize()
    return world


def resize_unseen(world: World, container_id: str, wants: Resources) -> None:
    """The runtime changes a container while nobody listens; its cpuset stays."""
    old = world.live[container_id]
    kept = replace(wants, cpus=old.resources.cpus, mems=old.resources.mems)
    world.live[container_id] = replace(old, resources=kept)
    world.restart()


@pytest.mark.parametrize(("cpus", "expected"), [(3, "0-2"), (1, "0")])
def test_an_owner_grows_and_shrinks_around_the_cpus_it_has(cpus: float, expected: str) -> None:
    world = node()
    world.put("owner", OWN, 2, 1)
    world.put("other", {}, 0.5)
    assert world.live["owner-app"].resources.cpus == "0-1"
    resize_unseen(world, "owner-app", resources(cpus, 1))
    assert world.live["owner-app"].resources.cpus == expected
    allowed = {"0-2": "3-7", "0": "1-7"}[expected]
    assert world.live["other-app"].resources.cpus == allowed
    assert world.allocation("owner-app").cpu_milli == cpus * 1000
    assert world.agent.grounds_of("owner-app") is not None
    world.check()


def test_a_shared_container_is_booked_by_its_new_size_where_it_is() -> None:
    world = node()
    world.put("web", {"policy": "best-effort", "cpus": "shared"}, 1, 4)
    before = world.allocation("web-app")
    resize_unseen(world, "web-app", resources(2, 8))
    after = world.allocation("web-app")
    assert (after.numa_nodes, after.mems, after.kind) == (
        before.numa_nodes,
        before.mems,
        Kind.SHARED,
    )
    assert (after.cpu_milli, after.memory_bytes) == (2000, 8 * GIB)
    assert after.since == before.since
    world.check()


def test_a_size_that_does_not_fit_leaves_a_running_container_what_it_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And that is said: nobody else can know that it has less than its pod asks for."""
    world = node()
    world.put("first", {**OWN, "policy": "single-numa-node"}, 3, 1)
    world.put("second", {**OWN, "policy": "single-numa-node"}, 3, 1)
    had = world.live["first-app"].resources.cpus
    resize_unseen(world, "first-app", resources(6, 1))
    assert world.live["first-app"].resources.cpus == had
    assert world.allocation("first-app").cpu_milli == 3000
    (said,) = [vars(r)["fields"]["problem"] for r in caplog.records if r.levelname == "WARNING"]
    assert said.startswith("resized while we were away and keeps what it has: ")
    assert "default/first" in said
    world.check()


def test_what_was_not_changed_stays_and_nothing_is_sent() -> None:
    """A lifted quota, an unbound container and a foreign pin look like changes, and are none."""
    world = node()
    world.put("owner", OWN, 2, 1)
    world.put("web", {}, 0.5)
    foreign = replace(resources(1), cpus="7")
    world.place(pod("kubelet"), wants=foreign)
    assert world.live["owner-app"].resources.cpu_quota == -1
    state = world.agent.state
    assert world.restart() == ()
    assert world.agent.state.allocations == state.allocations
