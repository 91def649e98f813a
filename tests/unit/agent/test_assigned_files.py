"""Files of what containers have: true after a resize and a restart, and gone with the container."""

from __future__ import annotations

from pathlib import Path

import pytest

from nri_numa.agent.assigned_files import CONTAINER_MOUNT_PATH, AssignedFiles, remove_assigned_files
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.workload import NO_ADJUSTMENT
from tests.beds.world import StillClock, World, container, pod, resources

OWN = {"cpus": "exclusive", "policy": "single-numa-node"}


@pytest.fixture
def world() -> World:
    return World(
        build_synthetic_topology(
            sockets=1, numa_per_socket=1, cores_per_numa=8, threads=1, memory_gib=8
        )
    )


def texts(directory: Path) -> list[str]:
    return [(directory / f"assigned.{name}").read_text() for name in ("cpuset", "memset")]


def test_files_follow_resizes_and_survive_processes(world: World, tmp_path: Path) -> None:
    agent = world.agent
    agent.current.synchronized = True
    files = AssignedFiles(str(tmp_path), agent.current, StillClock())
    world.place(pod("own", OWN), wants=resources(2, 1))
    own = world.allocation("own-app")
    mounts = files.extend(own, world.live["own-app"], NO_ADJUSTMENT).mounts
    directory = Path(dict(mounts)[CONTAINER_MOUNT_PATH])
    assert texts(directory) == ["0-1\n", "0\n"]
    assert directory.stat().st_mode & 0o777 == 0o755, "any user of the container may look"
    assert world.update("own-app", resources(3, 1)) is None
    assert texts(directory) == [world.has("own-app")[0] + "\n", "0\n"]

    agent.current.synchronized = False  # as in a process that has just begun
    again = AssignedFiles(str(tmp_path), agent.current, StillClock())
    (directory / "assigned.cpuset").write_text("stale")
    again.refresh()
    assert texts(directory)[0] == "stale"
    agent.current.synchronized = True
    again.refresh()
    assert texts(directory) == [world.has("own-app")[0] + "\n", "0\n"]
    remove_assigned_files(str(tmp_path))
    assert [*directory.iterdir()] == []
    world.stop("own-app")
    assert not directory.exists()


def test_who_is_not_pinned_or_has_no_place_starts_without(world: World, tmp_path: Path) -> None:
    (tmp_path / "assigned").write_text("in the way")
    files = AssignedFiles(str(tmp_path), world.agent.current, StillClock())
    world.place(pod("free"), wants=resources(0.5, 1))
    world.place(pod("own", OWN), wants=resources(2, 1))
    outside = pod("odd", OWN)
    world.place(outside, container(outside, wants=resources(1, 1), id="../odd"))
    for allocation in world.agent.current.state.allocations.values():
        made = world.live[allocation.container_id]
        assert files.extend(allocation, made, NO_ADJUSTMENT) is NO_ADJUSTMENT
