"""What each container gets back, without a runtime."""

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from nri_numa.agent import release
from nri_numa.agent.release import (
    AgentIsRunning,
    ReleasedContainer,
    ReleaseResult,
    plan_release,
    release_all_containers,
)
from nri_numa.cli import cli
from nri_numa.config import AgentConfig
from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.state import Allocation, ContainerKind, build_node_state
from nri_numa.errors import RuntimeUnavailable
from nri_numa.machine.cgroups import CgroupPlace, CgroupReader
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.settings import Settings
from nri_numa.model.workload import (
    NO_GRANTS,
    Container,
    ContainerUpdate,
    KubeletGrants,
    PodTable,
    QoSClass,
    Resources,
)
from nri_numa.store.checkpoint import CheckpointStore
from tests.beds import world
from tests.beds.allocations import allocation
from tests.beds.cgroup_tree import CgroupTree
from tests.beds.world import PREFIX, pod
from tests.machines import named as machines

MACHINE = NodeModel(topology=machines.dual_no_smt(cores_per_numa=4), settings=Settings())
POD = pod("cart", namespace="shop")


def container(
    cpus: str = "", mems: str = "", *, quota: int | None = None, marker: str = ""
) -> Container:
    """Container c1 of POD with these values."""
    made = world.container(POD, "web", Resources(cpus=cpus, mems=mems, cpu_quota=quota), id="c1")
    return replace(made, annotations={f"{PREFIX}assigned": marker} if marker else {})


def remembered(kind: ContainerKind, *, quota: int | None = None, cpus: str = "") -> Allocation:
    """What the checkpoint has of c1."""
    return allocation(
        "c1",
        kind,
        pod_id=POD.id,
        pod_uid=POD.uid,
        cpus=CPUSet.parse(cpus),
        exclusive=kind is ContainerKind.EXCLUSIVE,
        numa_nodes=NUMASet([0]),
        lifted_quota=quota,
    )


def planned(
    one: Container, *allocations: Allocation, grants: KubeletGrants = NO_GRANTS
) -> ReleasedContainer:
    """The plan for a node with one container."""
    (entry,) = plan_release(
        MACHINE, build_node_state(allocations, kubelet=grants), PodTable.from_pods([POD]), [one]
    )
    return entry


def test_an_owner_gets_the_machine_and_its_limit_back() -> None:
    entry = planned(
        container("2", "0", quota=-1), remembered(ContainerKind.EXCLUSIVE, quota=100_000, cpus="2")
    )
    assert (entry.cpus, entry.mems, entry.quota) == ("0-7", "0-1", 100_000)
    assert entry.result is ReleaseResult.PLANNED


def test_memory_that_was_never_bound_stays_unbound() -> None:
    assert planned(container("2"), remembered(ContainerKind.LISTED, cpus="2")).mems == ""


@pytest.mark.parametrize(("granted", "back"), [("web", "4-5"), ("other", "0-3,6-7")])
def test_beside_a_static_kubelet_it_gets_what_that_one_sent(granted: str, back: str) -> None:
    grants = KubeletGrants(cpus={(POD.uid, granted): CPUSet.parse("4-5")})
    mine = remembered(ContainerKind.LISTED, cpus="2")
    assert planned(container("2"), mine, grants=grants).cpus == back


def test_a_stranger_with_a_cpuset_of_its_own_is_foreign() -> None:
    assert planned(container("4")).result is ReleaseResult.FOREIGN


@pytest.mark.parametrize(
    ("marker", "result"),
    [
        (json.dumps({"kind": "exclusive", "cpus": "4"}), ReleaseResult.PLANNED),
        (json.dumps({"kind": "foreign"}), ReleaseResult.FOREIGN),
        ("{", ReleaseResult.PLANNED),
        ("[" * 100_000, ReleaseResult.PLANNED),
        ("[1]", ReleaseResult.PLANNED),
    ],
)
def test_the_annotation_counts_without_a_checkpoint(marker: str, result: ReleaseResult) -> None:
    entry = planned(container("4", marker=marker))
    assert (entry.result, entry.note) == (result, "")


def test_a_lifted_limit_that_nobody_knows_is_said() -> None:
    marker = json.dumps({"kind": "exclusive", "cpus": "4"})
    entry = planned(container("4", quota=-1, marker=marker))
    assert entry.quota is None
    assert "stays lifted" in entry.note


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "over CRI"])
def test_a_lifted_limit_is_worked_out_again_where_the_limit_is_the_request(marked: bool) -> None:
    """The state is lost, and over CRI nothing was written on the container either."""
    one = container("2-3", "0", quota=-1, marker='{"kind":"exclusive"}' if marked else "")
    one = replace(one, resources=replace(one.resources, cpu_shares=2048, memory_limit=1 << 20))
    of = pod("cart", {"policy": "best-effort"}, namespace="shop")
    (entry,) = plan_release(MACHINE, build_node_state([]), PodTable.from_pods([of]), [one])
    assert (entry.result, entry.cpus, entry.quota) == (ReleaseResult.PLANNED, "0-7", 200_000)
    assert entry.note == ""
    fewer = replace(one, resources=replace(one.resources, cpus="2"))
    (entry,) = plan_release(MACHINE, build_node_state([]), PodTable.from_pods([of]), [fewer])
    assert entry.result is (ReleaseResult.PLANNED if marked else ReleaseResult.FOREIGN)
    (entry,) = plan_release(
        MACHINE,
        build_node_state([]),
        PodTable.from_pods([replace(of, qos=QoSClass.BURSTABLE)]),
        [one],
    )
    assert entry.quota is None


def config(directory: Path) -> AgentConfig:
    """A configuration that finds no runtime."""
    return AgentConfig(state_dir=str(directory), sysfs_root="/")


def test_a_running_agent_is_named(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path), identity={}, clock=lambda: 0.0)
    store.load()
    try:
        with pytest.raises(AgentIsRunning, match=r"process \d+.*stop it first"):
            asyncio.run(release_all_containers(config(tmp_path), identity={}))
    finally:
        store.close()


def test_without_a_runtime_nothing_is_forgotten(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path / "state"), identity={}, clock=lambda: 0.0)
    store.load()
    store.append_documents({"c/c1": {"any": "thing"}})
    store.close()
    arguments = ["release", f"--state-dir={tmp_path}/state", f"--nri-socket={tmp_path}/none"]
    for more in ([], ["--dry-run"]):
        result = CliRunner().invoke(cli, [*arguments, *more])
        assert result.exit_code == 3
        assert f"{tmp_path}/none" in result.output
    assert (tmp_path / "state" / "checkpoint").exists()


def test_a_dry_run_makes_no_directory(tmp_path: Path) -> None:
    wanted = config(tmp_path / "state")
    with pytest.raises(RuntimeUnavailable):
        asyncio.run(release_all_containers(wanted, identity={}, dry_run=True, timeout=1))
    assert not (tmp_path / "state").exists()


def test_a_runtime_that_writes_one_cgroup_after_the_other_gets_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under the systemd driver: not the sum counts, but how long nothing happens."""
    monkeypatch.setattr(release, "READ_BACK_STALL_S", 0.04)
    tree = CgroupTree(tmp_path / "cgroup", 2, CPUSet.parse("0-7"), NUMASet.parse("0"))
    names = [f"one-{number}" for number in range(10)]
    left = [*names, ""]

    class Reader(CgroupReader):
        def detect_hierarchy(self) -> bool:
            """One more is written before each look; the first call is of the constructor."""
            if name := left.pop():
                tree.write(f"/{name}", "0-7", "0")
            return super().detect_hierarchy()

    for name in names:
        tree.write(f"/{name}", "1", "0")
    sent = [
        ReleasedContainer(
            container_id=name, namespace="default", pod=name, container="main",
            result=ReleaseResult.PLANNED, cpus="0-7", cgroup=CgroupPlace(f"/{name}"),
        )
        for name in names
    ]  # fmt: skip
    done = asyncio.run(release._await_released_cgroups(Reader(str(tree.root)), sent))
    assert {one.result for one in done} == {ReleaseResult.RELEASED}


@pytest.mark.parametrize(
    ("limit", "result", "is_read"),
    [
        (100_000, ReleaseResult.RELEASED, True),
        (-1, ReleaseResult.FAILED, False),
        (200_000, ReleaseResult.FAILED, False),
        (None, ReleaseResult.RELEASED, False),
    ],
)
def test_a_cpu_limit_is_back_when_the_cgroup_has_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: int | None,
    result: ReleaseResult,
    is_read: bool,
) -> None:
    """Without the cpu controller there is no limit, and nothing to read."""
    monkeypatch.setattr(release, "READ_BACK_STALL_S", 0.01)
    tree = CgroupTree(tmp_path / "cgroup", 2, CPUSet.parse("0-7"), NUMASet.parse("0"))
    tree.write("/one", "0-7", "0")
    if limit is not None:
        tree.limit("/one", limit)
    sent = ReleasedContainer(
        container_id="one", namespace="default", pod="one", container="main",
        result=ReleaseResult.PLANNED, quota=100_000, cgroup=CgroupPlace("/one"),
    )  # fmt: skip
    reader = CgroupReader(str(tree.root))
    (done,) = asyncio.run(release._await_released_cgroups(reader, [sent]))
    assert (done.result, done.is_quota_read) == (result, is_read)


def test_a_quota_is_restored_with_its_period() -> None:
    one = container("2", "0", quota=-1)
    one = replace(one, resources=replace(one.resources, cpu_period=50_000))
    entry = planned(one, remembered(ContainerKind.EXCLUSIVE, quota=100_000, cpus="2"))
    assert entry.release_update == ContainerUpdate("c1", "0-7", "0-1", 100_000, 50_000)
