"""CPUs that another cgroup took for itself are not for containers, and come back when it ends."""

from pathlib import Path

import pytest

from nri_numa.machine.allowed import is_partition, partition_sentence
from nri_numa.machine.hotplug import changed_texts_by_field, rediscover_topology
from nri_numa.machine.sysfs import discover_topology
from nri_numa.machine.tree import open_tree
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import CgroupPartitionKind, Partition, Topology
from tests.machines import named as machines
from tests.machines.named import write_sysfs, write_tree

V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/cpuset"
PODS = f"{V2}/kubepods.slice"


def _v2(root: Path, name: str, cpus: str, state: str = "member", **more: str) -> None:
    """One cgroup of version 2, with the files that every one has."""
    directory = f"{V2}/{name}".rstrip("/")
    files = {
        "cgroup.procs": "",
        "cpu.max": "max 100000\n",
        "cpuset.cpus.effective": f"{cpus}\n",
        "cpuset.mems.effective": "0-1\n",
        **({"cpuset.cpus.partition": f"{state}\n"} if name else {}),
        **{f"cpuset.cpus.{key}": f"{text}\n" for key, text in more.items()},
    }
    write_tree(root, {f"{directory}/{file}": text for file, text in files.items()})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """16 CPUs, cgroup v2, pods and others beside them."""
    write_sysfs(tmp_path, machines.dual_smt_16())
    _v2(tmp_path, "", "0-15")
    _v2(tmp_path, "kubepods.slice", "0-15")
    _v2(tmp_path, "system.slice", "0-15")
    # The controller is not on for what is below.
    write_tree(tmp_path, {f"{V2}/system.slice/sshd.service/cgroup.procs": ""})
    return tmp_path


def _told(machine: Topology) -> list[str]:
    return [one for one in machine.warnings if "partition" in one]


def test_nobody_took_anything(root: Path) -> None:
    machine = discover_topology(root)
    assert machine == machines.dual_smt_16()
    assert machine.partitions == ()


@pytest.mark.parametrize("kind", ["root", "isolated"])
def test_a_partition_is_seen_when_it_begins_and_when_it_ends(root: Path, kind: str) -> None:
    before = discover_topology(root)
    _v2(root, "rt.slice", "6-7", kind)
    _v2(root, "kubepods.slice", "0-5,8-15")
    during = rediscover_topology(root, before)
    assert str(during.allowed) == "0-5,8-15"
    assert during.partitions == (
        Partition(cgroup="rt.slice", kind=CgroupPartitionKind(kind), cpus=CPUSet.parse("6-7")),
    )
    assert _told(during) == [
        f"CPUs 6-7 belong to the cpuset partition rt.slice ({kind}), containers cannot have them"
    ]
    assert changed_texts_by_field(before, during) == {
        "allowed_cpus": "0-5,8-15",
        "partitions": "rt.slice",
    }
    assert rediscover_topology(root, during) is during
    _v2(root, "rt.slice", "0-15")
    _v2(root, "kubepods.slice", "0-15")
    after = rediscover_topology(root, during)
    assert after == before
    assert changed_texts_by_field(during, after) == {"allowed_cpus": "0-15", "partitions": "none"}


def test_a_partition_in_a_partition_is_named_and_its_cpus_are_exclusive(root: Path) -> None:
    """From kernel 6.7 on a partition tells what it has with those below it (cgroup-v2.rst)."""
    _v2(root, "machine.slice", "4-5", "root", **{"exclusive.effective": "4-7"})
    _v2(root, "machine.slice/vm.scope", "6-7", "isolated", **{"exclusive.effective": "6-7"})
    _v2(root, "kubepods.slice", "0-3,8-15")
    assert [(p.cgroup, p.kind.value, str(p.cpus)) for p in discover_topology(root).partitions] == [
        ("machine.slice", "root", "4-7"),
        ("machine.slice/vm.scope", "isolated", "6-7"),
    ]


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("isolated invalid (Cpu list in cpuset.cpus not exclusive)", "Cpu list in cpuset.cpus not"),
        ("isolated invalid", "the kernel gives no reason"),
    ],
)
def test_an_invalid_partition_takes_nothing_and_is_told(root: Path, state: str, why: str) -> None:
    _v2(root, "rt.slice", "0-15", state)
    write_tree(root, {f"{V2}/rt.slice/cpuset.cpus": "6-7\n"})
    machine = discover_topology(root)
    assert machine.allowed == machine.online
    assert str(machine.partitions[0].cpus) == "6-7"
    (told,) = _told(machine)
    assert told.startswith(
        f"the cgroup rt.slice should be a partition (isolated) and is not: {why}"
    )
    assert changed_texts_by_field(machines.dual_smt_16(), machine) == {"partitions": "none"}


def test_one_cpu_is_one_cpu() -> None:
    one = Partition(cgroup="rt", kind=CgroupPartitionKind.EXCLUSIVE, cpus=CPUSet([3]))
    assert partition_sentence(one) == (
        "CPU 3 belongs to the cpuset partition rt (cpu_exclusive), containers cannot have them"
    )


def test_a_pod_that_is_a_partition_is_found_where_nobody_else_explains_it(root: Path) -> None:
    inner = "kubepods.slice/kubepods-pod1.slice/cri-1.scope"
    _v2(root, "kubepods.slice/kubepods-pod1.slice", "0-3,6-15")
    _v2(root, inner, "4-5", "isolated")
    assert discover_topology(root).partitions == (), "nothing is missing, so nobody looks there"
    _v2(root, "kubepods.slice", "0-3,6-15")
    machine = discover_topology(root)
    assert [one.cgroup for one in machine.partitions] == [inner]
    assert str(machine.allowed) == "0-3,6-15"


def test_pods_that_are_a_partition_have_its_cpus(root: Path) -> None:
    _v2(root, "kubepods.slice", "4-15", "root")
    machine = discover_topology(root)
    assert (str(machine.allowed), machine.partitions) == ("4-15", ())


def test_files_that_make_no_sense_are_no_partition(root: Path) -> None:
    _v2(root, "odd.slice", "x", "rooty")
    _v2(root, "odder.slice", "x", "root")
    machine = discover_topology(root)
    assert [(p.cgroup, str(p.cpus)) for p in machine.partitions] == [("odder.slice", "")]


def test_a_tree_without_end_is_left(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nri_numa.machine.allowed.MAX_SEARCHED_CGROUPS", 3)
    for n in range(9):
        _v2(root, f"a{n}.slice", f"{n}", "root")
    assert len(discover_topology(root).partitions) == 3


# -- without a cgroup of the pods -----------------------------------------------------------------


def _without_pods(root: Path, own: str) -> None:
    (root / PODS / "cpuset.cpus.effective").unlink()
    write_tree(root, {"proc/self/cpuset": f"{own}\n"})


def test_our_own_partition_is_not_what_pods_will_have(root: Path) -> None:
    _v2(root, "", "4-15")
    _v2(root, "agents.slice", "0-3", "root")
    _v2(root, "agents.slice/nri-numa.service", "0-3")
    _without_pods(root, "/agents.slice/nri-numa.service")
    machine = discover_topology(root)
    assert str(machine.allowed) == "4-15"
    assert machine.warnings[0] == (
        "the cgroup / (ours, /agents.slice/nri-numa.service, is in a partition) allows only "
        "CPUs 4-15 of 0-15"
    )


def test_isolated_cpus_that_a_partition_has_are_not_added_to_our_affinity(tmp_path: Path) -> None:
    write_sysfs(tmp_path, machines.isolated_cpus())
    _v2(tmp_path, "", "0-2,4-9,11-15")
    _v2(tmp_path, "rt.slice", "3,10", "isolated")
    write_tree(tmp_path, {"proc/self/status": "Cpus_allowed_list:\t0-1,4-9,12-15\n"})
    assert str(discover_topology(tmp_path).allowed) == "0-2,4-9,11-15"


# -- version 1 ------------------------------------------------------------------------------------


def _v1(root: Path, name: str, cpus: str, exclusive: str = "0", prefix: str = "cpuset.") -> None:
    directory = f"{V1}/{name}".rstrip("/")
    files = {"cpu_exclusive": exclusive, "cpus": cpus, "mems": "0-1"}
    write_tree(root, {f"{directory}/{prefix}{file}": f"{text}\n" for file, text in files.items()})
    write_tree(root, {f"{directory}/tasks": "", f"{directory}/notify_on_release": "0\n"})


@pytest.mark.parametrize("prefix", ["cpuset.", ""])
def test_version_1_lets_nobody_have_exclusive_cpus_of_another(tmp_path: Path, prefix: str) -> None:
    write_sysfs(tmp_path, machines.dual_smt_16())
    _v1(tmp_path, "", "0-15", "1", prefix)
    _v1(tmp_path, "rt", "6-7", "1", prefix)
    _v1(tmp_path, "system.slice", "0-5", "0", prefix)
    write_tree(tmp_path, {"proc/self/cpuset": "/\n"})
    machine = discover_topology(tmp_path)
    assert str(machine.allowed) == "0-5,8-15"
    assert _told(machine) == [
        "CPUs 6-7 belong to the cpuset partition rt (cpu_exclusive), containers cannot have them"
    ]
    assert rediscover_topology(tmp_path, machine) is machine
    _v1(tmp_path, "rt", "6-7", "0", prefix)
    assert rediscover_topology(tmp_path, machine).allowed == machine.online


@pytest.mark.parametrize(
    ("name", "cpus", "own", "allowed"),
    [
        ("agents", "0-3", "/agents", "4-15"),
        ("kubepods.slice", "4-15", "", "4-15"),
        ("everything", "0-15", "/", "0-15"),
        ("odd", "x", "/", "0-15"),
    ],
    ids=["our own is not what pods have", "the pods' is theirs", "all of them", "makes no sense"],
)
def test_version_1_what_an_exclusive_cpuset_leaves(
    tmp_path: Path, name: str, cpus: str, own: str, allowed: str
) -> None:
    write_sysfs(tmp_path, machines.dual_smt_16())
    _v1(tmp_path, "", "0-15", "1")
    _v1(tmp_path, name, cpus, "1")
    if own:
        write_tree(tmp_path, {"proc/self/cpuset": f"{own}\n"})
    machine = discover_topology(tmp_path)
    assert str(machine.allowed) == allowed
    assert "kubepods.slice" not in [one.cgroup for one in machine.partitions]


def test_what_is_no_cgroup_is_no_partition(tmp_path: Path) -> None:
    write_sysfs(tmp_path, machines.dual_smt_16())
    assert not is_partition(open_tree(tmp_path), V1)


# -- nohz_full ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found", "warned"),
    [
        ("1-3,9-11\n", "1-3,9-11", False),
        ("\n", "", False),
        (" (null)\n", "", False),  # kernels that can and were not told to
        ("1-\n", "", True),
        ("14-20\n", "14-15", False),
    ],
)
def test_cpus_without_a_tick_are_known(tmp_path: Path, text: str, found: str, warned: bool) -> None:
    write_sysfs(tmp_path, machines.dual_smt_16())
    write_tree(tmp_path, {"sys/devices/system/cpu/nohz_full": text})
    machine = discover_topology(tmp_path)
    assert str(machine.nohz_full) == found
    assert any("nohz_full is ignored" in one for one in machine.warnings) is warned


def test_a_kernel_that_cannot_stop_the_tick_has_no_file(tmp_path: Path) -> None:
    write_sysfs(tmp_path, machines.nohz_full_cpus())
    (tmp_path / "sys/devices/system/cpu/nohz_full").unlink()
    assert str(discover_topology(tmp_path).nohz_full) == ""
