"""Real cpusets: where a container's cgroup is, both versions, and cgroups that come and go."""

from __future__ import annotations

from pathlib import Path

import pytest

from nri_numa.machine import cgroups
from nri_numa.machine.cgroups import (
    NO_CGROUP,
    CgroupPlace,
    CgroupReader,
    CgroupWriter,
    Wanted,
    Written,
    observe_all,
    relative_path,
)
from nri_numa.model.cpuset import CPUSet, NUMASet
from tests.beds.cgroup_bed import blocked
from tests.beds.cgroup_tree import CgroupTree

CPUS, MEMS = CPUSet.parse("0-7"), NUMASet.parse("0-1")
POD = "/kubepods/burstable/pod1234/abcdef"


@pytest.fixture(params=[1, 2])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> CgroupTree:
    """Of both versions."""
    return CgroupTree(tmp_path / "cgroup", request.param, CPUS, MEMS)


@pytest.mark.parametrize(
    ("told", "path"),
    [
        (POD, "kubepods/burstable/pod1234/abcdef"),
        (
            "kubepods-burstable-pod12_34.slice:cri-containerd:abcdef",
            "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod12_34.slice/"
            "cri-containerd-abcdef.scope",
        ),
        ("kubepods.slice:crio:abc", "kubepods.slice/crio-abc.scope"),
        ("system.slice::abc", "system.slice/abc.scope"),
        (":crio:abc", "system.slice/crio-abc.scope"),
        ("-.slice:crio:abc", "crio-abc.scope"),
        ("a.slice:x:b.slice", "a.slice/b.slice"),
    ],
)
def test_both_forms_of_the_path_are_understood(told: str, path: str) -> None:
    assert relative_path(told) == path


@pytest.mark.parametrize(
    "told",
    [
        "",
        "relative/to/the/runtime",
        "/kubepods/../../etc",
        "a.slice:b",
        "a.slice:b:",
        "a.slice:b:c:d",
        "noslice:b:c",
        "a--b.slice:b:c",
        "x/a.slice:b:c",
        "a.slice:b:c/d",
        "/kube\0pods",
    ],
)
def test_what_is_no_path_below_the_root_is_not_guessed(told: str) -> None:
    assert relative_path(told) == ""


def test_a_container_without_a_cgroup_is_left_out(tree: CgroupTree) -> None:
    tree.write(POD, "1")
    reader = CgroupReader(str(tree.root))
    places = [
        ("here", CgroupPlace(POD)),
        ("gone", CgroupPlace(POD + "x")),
        ("unknown", CgroupPlace()),
    ]
    assert list(observe_all(reader, places)) == ["here"]
    (tree.directory(POD) / "cpuset.mems").unlink()  # it goes away while it is being read
    assert observe_all(reader, places) == {}


@pytest.mark.parametrize(
    ("version", "lines"),
    [
        (1, "5:cpu,cpuacct:/wrong\n4:cpuset,cpu:/found\n0::/unified\n"),
        (2, "4:cpuset:/wrong\n0::/found\n"),
    ],
)
def test_a_path_nobody_told_is_asked_of_the_kernel(
    tmp_path: Path, version: int, lines: str
) -> None:
    tree = CgroupTree(tmp_path / "cgroup", version, CPUS, MEMS)
    tree.write("/found", "3")
    process = tmp_path / "proc" / "42"
    process.mkdir(parents=True)
    (process / "cgroup").write_text(lines)
    reader = CgroupReader(str(tree.root), proc=str(tmp_path / "proc"))
    # As with a runtime whose cgroup namespace is another than ours.
    for place in (CgroupPlace("", 42), CgroupPlace("/kubepods/elsewhere", 42)):
        found = reader.observe(place)
        assert found is not None
        assert str(found.cpus) == "3"
    assert reader.observe(CgroupPlace("", 43)) is None
    (process / "cgroup").write_text(lines.replace("/found", "/../../found"))
    assert reader.observe(CgroupPlace("", 42)) is None, "outside of our cgroup namespace"
    (process / "cgroup").write_text(lines.replace("/found", "/"))
    assert reader.observe(CgroupPlace("", 42)) is None, "the root is nobody's container"


def test_no_cgroup_file_system_is_told_apart_from_no_containers(tmp_path: Path) -> None:
    reader = CgroupReader(str(tmp_path / "nowhere"))
    assert not reader.available()
    tree = CgroupTree(tmp_path / "nowhere", 2, CPUS, MEMS)
    assert reader.available(), "mounted later"
    assert reader.unified
    tree.write(POD, "5")
    assert reader.observe(CgroupPlace(POD)) is not None


def test_files_that_are_no_cpusets_are_not_believed(tree: CgroupTree) -> None:
    tree.write(POD, "1")
    (tree.directory(POD) / "cpuset.cpus").write_text("rubbish\n")
    assert CgroupReader(str(tree.root)).observe(CgroupPlace(POD)) is None


def test_another_error_is_not_taken_for_a_container_that_is_gone(tmp_path: Path) -> None:
    tree = CgroupTree(tmp_path / "cgroup", 2, CPUS, MEMS)
    tree.write(POD, "1")
    (tree.directory(POD) / "cpuset.cpus").unlink()
    (tree.directory(POD) / "cpuset.cpus").mkdir()
    with pytest.raises(IsADirectoryError):
        CgroupReader(str(tree.root)).observe(CgroupPlace(POD))


def put(writer: CgroupWriter, place: CgroupPlace, cpus: str, mems: str = "") -> Written:
    return writer.write({"one": Wanted(place, cpus, mems)})["one"]


def test_a_cpuset_is_written_where_it_differs(tree: CgroupTree) -> None:
    tree.write(POD, "0-7", "0-1")
    writer = CgroupWriter(CgroupReader(str(tree.root)))
    assert put(writer, CgroupPlace(POD), "1-3") == Written(changed=True)
    assert (tree.cpus_of(POD), tree.mems_of(POD)) == ("1-3", "0-1")
    assert put(writer, CgroupPlace(POD), "1-3", "0") == Written(changed=True)
    assert tree.mems_of(POD) == "0"
    assert put(writer, CgroupPlace(POD), "1-3", "0") == Written()
    assert put(writer, CgroupPlace(POD), "") == Written()


def test_a_write_that_the_kernel_holds_up_is_not_waited_for(tree: CgroupTree) -> None:
    for path in ("/pods/a", "/pods/b"):
        tree.write(path, "0-7", "0-1")
    held: list[list[str]] = []
    writer = CgroupWriter(CgroupReader(str(tree.root)))
    writer.held_up = held.append
    a, b = CgroupPlace("/pods/a"), CgroupPlace("/pods/b")
    with blocked(tree.directory("/pods/a") / "cpuset.mems"):
        assert "the kernel holds up writes of cpusets" in put(writer, a, "2", "1").problem
        assert tree.cpus_of("/pods/a") == "2", "CPUs first"
        assert tree.mems_of("/pods/a") == "0-1"
        assert writer.busy
        assert put(writer, b, "0-7", "0-1").problem, "nobody looks meanwhile"
        assert put(writer, b, "3").problem
        assert tree.cpus_of("/pods/b") == "0-7"
        assert held == [["one"], ["one"], ["one"]]
    while writer.busy:
        pass
    assert tree.mems_of("/pods/a") == "1"
    assert put(writer, b, "3") == Written(changed=True)


def test_a_container_without_a_cgroup_is_not_written(tree: CgroupTree) -> None:
    writer = CgroupWriter(CgroupReader(str(tree.root)))
    assert put(writer, CgroupPlace(POD), "1") == NO_CGROUP
    tree.directory(POD).mkdir(parents=True)  # and its files are not there yet
    assert put(writer, CgroupPlace(POD), "1") == NO_CGROUP


def test_a_file_that_cannot_be_written_is_named(
    tree: CgroupTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root nothing is unwritable by its mode: the kernel's refusal is played by a device."""
    tree.write(POD, "0-7", "0-1")
    path = tree.directory(POD) / "cpuset.cpus"
    path.unlink()
    path.symlink_to("/dev/full")
    writer = CgroupWriter(CgroupReader(str(tree.root)))
    monkeypatch.setattr(cgroups, "text", lambda path: "0-7")
    written = put(writer, CgroupPlace(POD), "1")
    assert written.problem == f"{path}: No space left on device"


def test_a_scope_of_systemd_is_told_by_its_path() -> None:
    assert CgroupPlace("kubepods.slice:cri-containerd:abc").by_systemd
    assert not CgroupPlace(POD).by_systemd


def test_a_quota_is_read_where_there_is_one(tree: CgroupTree) -> None:
    reader = CgroupReader(str(tree.root))
    assert reader.quota(CgroupPlace(POD)) is None
    tree.write(POD, "1")
    reader.available()
    assert reader.quota(CgroupPlace(POD)) is None  # without the cpu controller
    tree.limit(POD, 150_000)
    assert reader.quota(CgroupPlace(POD)) == 150_000
    tree.limit(POD, -1)
    assert reader.quota(CgroupPlace(POD)) == -1


@pytest.mark.parametrize(("of_root", "left"), [("1", "0"), ("0", "1")])
def test_scheduling_domains_are_not_built_anew_where_the_root_has_one(
    tmp_path: Path, of_root: str, left: str
) -> None:
    tree = CgroupTree(tmp_path / "cgroup", 1, CPUS, MEMS)
    tree.write(POD, "0-7", "0-1")
    writer = CgroupWriter(CgroupReader(str(tree.root)))
    flag = Path(writer.reader.directory_of(CgroupPlace(POD)), "cpuset.sched_load_balance")
    flag.write_text("1")
    Path(writer.reader.hierarchy, flag.name).write_text(of_root)
    assert writer.put(Wanted(CgroupPlace(POD), "1-2")).changed
    assert flag.read_text() == left
