"""Files of what containers have: true after a resize and a restart, and gone with the container."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_numa.agent.assigned_files import CONTAINER_MOUNT_PATH, AssignedFiles, remove_assigned_files
from nri_numa.model.workload import NO_ADJUSTMENT, Device, DeviceRequest
from tests.beds.world import World, container, pod, resources, two_nodes
from tests.machines import named as machines

OWN = {"cpus": "exclusive", "policy": "single-numa-node"}


@pytest.fixture
def world() -> World:
    return World(machines.single_no_smt(cores_per_numa=8, memory_gib=8))


def texts(directory: Path) -> list[str]:
    return [(directory / f"assigned.{name}").read_text() for name in ("cpuset", "memset")]


def test_files_follow_resizes_and_survive_processes(world: World, tmp_path: Path) -> None:
    agent = world.agent
    agent.current.synchronized = True
    files = AssignedFiles(str(tmp_path), agent.current)
    world.place(pod("own", OWN), wants=resources(2, 1))
    own = world.allocation("own-app")
    mounts = files.extend_adjustment(own, world.live["own-app"], NO_ADJUSTMENT).mounts
    directory = Path(dict(mounts)[CONTAINER_MOUNT_PATH])
    assert texts(directory) == ["0-1\n", "0\n"]
    assert directory.stat().st_mode & 0o777 == 0o755, "any user of the container may look"
    assert world.update("own-app", resources(3, 1)) is None
    assert texts(directory) == [world.has("own-app")[0] + "\n", "0\n"]

    agent.current.synchronized = False  # as in a process that has just begun
    again = AssignedFiles(str(tmp_path), agent.current)
    (directory / "assigned.cpuset").write_text("stale")
    again.refresh_files()
    assert texts(directory)[0] == "stale"
    agent.current.synchronized = True
    again.refresh_files()
    assert texts(directory) == [world.has("own-app")[0] + "\n", "0\n"]
    remove_assigned_files(str(tmp_path))
    assert [*directory.iterdir()] == []
    world.stop("own-app")
    assert not directory.exists()


def test_a_rank_finds_the_cpus_beside_its_device(tmp_path: Path) -> None:
    """NUMA node to CPUs and devices, also after a resize and in another process of the agent."""
    world = two_nodes()
    world.agent.current.synchronized = True
    of = pod("job", {"policy": "best-effort"})
    gpus = DeviceRequest(
        resource="nvidia.com/gpu",
        count=3,
        devices=(
            Device(id="GPU-a", numa_nodes=frozenset({0})),
            Device(id="GPU-b", numa_nodes=frozenset({1})),
            Device(id="GPU-ä", numa_nodes=frozenset({0, 1})),
        ),
    )
    made = replace(container(of, wants=resources(4, 1)), devices=(gpus,))
    world.place(of, made)
    files = AssignedFiles(str(tmp_path), world.agent.current)
    mounts = files.extend_adjustment(world.allocation("job-app"), made, NO_ADJUSTMENT).mounts
    file = Path(dict(mounts)[CONTAINER_MOUNT_PATH]) / "assigned.json"
    devices = [{"nvidia.com/gpu": ["GPU-a", "GPU-ä"]}, {"nvidia.com/gpu": ["GPU-b", "GPU-ä"]}]
    assert json.loads(file.read_text("utf-8")) == {
        "0": {"cpus": "0-1", "devices": devices[0]},
        "1": {"cpus": "4-5", "devices": devices[1]},
    }
    AssignedFiles(str(tmp_path), world.agent.current)
    assert world.update("job-app", resources(2, 1)) is None
    assert json.loads(file.read_text("utf-8")) == {
        "0": {"cpus": "0", "devices": devices[0]},
        "1": {"cpus": "4", "devices": devices[1]},
    }
    file.write_text("{")
    AssignedFiles(str(tmp_path), world.agent.current).refresh_files()
    assert json.loads(file.read_text("utf-8"))["1"] == {"cpus": "4", "devices": {}}


def test_who_is_not_pinned_or_has_no_place_starts_without(world: World, tmp_path: Path) -> None:
    (tmp_path / "assigned").write_text("in the way")
    files = AssignedFiles(str(tmp_path), world.agent.current)
    world.place(pod("free"), wants=resources(0.5, 1))
    world.place(pod("own", OWN), wants=resources(2, 1))
    outside = pod("odd", OWN)
    world.place(outside, container(outside, wants=resources(1, 1), id="../odd"))
    for allocation in world.agent.current.state.allocations.values():
        made = world.live[allocation.container_id]
        assert files.extend_adjustment(allocation, made, NO_ADJUSTMENT) is NO_ADJUSTMENT
