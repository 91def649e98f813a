"""Real cpusets: where a container's cgroup is, both versions, and cgroups that come and go."""

from pathlib import Path

import pytest

from nri_numa.machine import cgroups
from nri_numa.machine.cgroups import (
    CRUN_INNER_CGROUP_NAME,
    NO_CGROUP_OUTCOME,
    CgroupPlace,
    CgroupReader,
    CgroupWrite,
    CgroupWriter,
    WriteOutcome,
    blocking_cgroup_text,
    cgroup_relative_path,
    read_actual_cgroups,
)
from nri_numa.model.cpuset import CPUSet, NUMASet
from tests.beds.cgroup_bed import blocked
from tests.beds.cgroup_tree import CgroupTree

CPUS, MEMS = CPUSet.parse("0-7"), NUMASet.parse("0-1")
POD = "/kubepods/burstable/pod1234/abcdef"


def seen(reader: CgroupReader, place: CgroupPlace) -> tuple[str, str, str, str]:
    """What is observed of a container: its CPUs, those in effect, memory nodes, those in effect."""
    found = reader.read_actual_cgroup(place)
    assert found is not None
    return (
        str(found.cpus), str(found.effective_cpus), str(found.mems), str(found.effective_mems),
    )  # fmt: skip


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
    assert cgroup_relative_path(told) == path
    assert CgroupPlace(told).is_systemd_managed is path.endswith((".scope", ".slice"))


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
    assert cgroup_relative_path(told) == ""


def test_a_container_without_a_cgroup_or_a_sound_cpuset_is_left_out(tree: CgroupTree) -> None:
    tree.write(POD, "1")
    reader = CgroupReader(str(tree.root))
    places = [
        ("here", CgroupPlace(POD)),
        ("gone", CgroupPlace(POD + "x")),
        ("unknown", CgroupPlace()),
    ]
    assert list(read_actual_cgroups(reader, places)) == ["here"]
    (tree.directory(POD) / "cpuset.cpus").write_text("rubbish\n")
    assert read_actual_cgroups(reader, places) == {}
    tree.write(POD, "1")
    (tree.directory(POD) / "cpuset.mems").unlink()  # it goes away while it is being read
    assert read_actual_cgroups(reader, places) == {}


@pytest.mark.parametrize(
    ("version", "lines"),
    [
        (1, "5:cpu,cpuacct:/wrong\n4:cpuset,cpu:/found\n0::/unified\n"),
        (2, "4:cpuset:/wrong\n0::/found\n"),
    ],
)
def test_an_unknown_path_comes_from_the_kernel(tmp_path: Path, version: int, lines: str) -> None:
    tree = CgroupTree(tmp_path / "cgroup", version, CPUS, MEMS)
    tree.write("/found", "3")
    process = tmp_path / "proc" / "42"
    process.mkdir(parents=True)
    (process / "cgroup").write_text(lines)
    reader = CgroupReader(str(tree.root), proc=str(tmp_path / "proc"))
    # As with a runtime whose cgroup namespace is another than ours.
    for place in (CgroupPlace("", 42), CgroupPlace("/kubepods/elsewhere", 42)):
        assert seen(reader, place)[0] == "3"
    assert reader.read_actual_cgroup(CgroupPlace("", 43)) is None
    (process / "cgroup").write_text(lines.replace("/found", "/../../found"))
    assert reader.read_actual_cgroup(CgroupPlace("", 42)) is None, "outside of our cgroup namespace"
    (process / "cgroup").write_text(lines.replace("/found", "/"))
    assert reader.read_actual_cgroup(CgroupPlace("", 42)) is None, "the root is nobody's container"


def test_no_cgroup_file_system_is_told_apart_from_no_containers(tmp_path: Path) -> None:
    reader = CgroupReader(str(tmp_path / "nowhere"))
    assert not reader.detect_hierarchy()
    tree = CgroupTree(tmp_path / "nowhere", 2, CPUS, MEMS)
    assert reader.detect_hierarchy(), "mounted later"
    assert reader.unified
    tree.write(POD, "5")
    assert reader.read_actual_cgroup(CgroupPlace(POD)) is not None


def test_another_error_is_not_taken_for_a_container_that_is_gone(tmp_path: Path) -> None:
    tree = CgroupTree(tmp_path / "cgroup", 2, CPUS, MEMS)
    tree.write(POD, "1")
    (tree.directory(POD) / "cpuset.cpus").unlink()
    (tree.directory(POD) / "cpuset.cpus").mkdir()
    with pytest.raises(IsADirectoryError):
        CgroupReader(str(tree.root)).read_actual_cgroup(CgroupPlace(POD))


def put(writer: CgroupWriter, place: CgroupPlace, cpus: str, mems: str = "") -> WriteOutcome:
    return writer.write_cpusets({"one": CgroupWrite(place, cpus, mems)})["one"]


def test_a_cpuset_is_written_where_it_differs(tree: CgroupTree) -> None:
    tree.write(POD, "0-7", "0-1")
    writer = CgroupWriter(CgroupReader(str(tree.root)))
    assert put(writer, CgroupPlace(POD), "1-3") == WriteOutcome(changed=True)
    assert (tree.cpus_of(POD), tree.mems_of(POD)) == ("1-3", "0-1")
    assert put(writer, CgroupPlace(POD), "1-3", "0") == WriteOutcome(changed=True)
    assert tree.mems_of(POD) == "0"
    assert put(writer, CgroupPlace(POD), "1-3", "0") == WriteOutcome()
    assert put(writer, CgroupPlace(POD), "") == WriteOutcome()


def test_a_write_that_the_kernel_holds_up_is_not_waited_for(tree: CgroupTree) -> None:
    for path in ("/pods/a", "/pods/b"):
        tree.write(path, "0-7", "0-1")
    writer = CgroupWriter(CgroupReader(str(tree.root)))
    a, b = CgroupPlace("/pods/a"), CgroupPlace("/pods/b")
    with blocked(tree.directory("/pods/a") / "cpuset.mems"):
        assert put(writer, a, "2", "1").problem == "a write of cpusets takes longer than 0.5 s"
        assert tree.cpus_of("/pods/a") == "2", "CPUs first"
        assert tree.mems_of("/pods/a") == "0-1"
        assert writer.is_write_held_up
        assert put(writer, b, "0-7", "0-1").is_held_up, "nobody looks meanwhile"
        assert put(writer, b, "3").is_held_up
        assert tree.cpus_of("/pods/b") == "0-7"
        assert not writer.is_blocked_in_kernel(), "who waits for a lease sleeps"
    while writer.is_write_held_up:
        pass
    assert tree.mems_of("/pods/a") == "1"
    assert put(writer, b, "3") == WriteOutcome(changed=True)


def test_a_container_without_a_cgroup_is_not_written(tree: CgroupTree) -> None:
    writer = CgroupWriter(CgroupReader(str(tree.root)))
    assert put(writer, CgroupPlace(POD), "1") == NO_CGROUP_OUTCOME
    tree.directory(POD).mkdir(parents=True)  # and its files are not there yet
    assert put(writer, CgroupPlace(POD), "1") == NO_CGROUP_OUTCOME


def test_an_unwritable_file_is_named(tree: CgroupTree, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root nothing is unwritable by its mode: the kernel's refusal is played by a device."""
    tree.write(POD, "0-7", "0-1")
    path = tree.directory(POD) / "cpuset.cpus"
    path.unlink()
    path.symlink_to("/dev/full")
    writer = CgroupWriter(CgroupReader(str(tree.root)))
    monkeypatch.setattr(cgroups, "read_text", lambda path: "0-7")
    written = put(writer, CgroupPlace(POD), "1")
    assert written.problem == f"{path}: No space left on device"


def test_a_quota_is_read_where_there_is_one(tree: CgroupTree) -> None:
    reader = CgroupReader(str(tree.root))
    assert reader.read_cfs_limit(CgroupPlace(POD)) == (None, None)
    tree.write(POD, "1")
    reader.detect_hierarchy()
    assert reader.read_cfs_limit(CgroupPlace(POD)) == (None, None)  # without the cpu controller
    tree.limit(POD, 150_000)
    assert reader.read_cfs_limit(CgroupPlace(POD)) == (150_000, 100_000)
    tree.limit(POD, -1)
    assert reader.read_cfs_limit(CgroupPlace(POD)) == (-1, 100_000)


@pytest.mark.parametrize(
    ("of_scope", "of_child", "limit"),
    [
        ("100000 100000", "max 100000", (100_000, 100_000)),  # crun after a quota of -1
        ("max 100000", "50000 50000", (50_000, 50_000)),
        ("200000 100000", "30000 20000", (30_000, 20_000)),
        ("max 100000", "max 50000", (-1, 50_000)),
        ("max", "?", (None, None)),
    ],
)
def test_of_a_scope_and_cruns_cgroup_in_it_the_lower_limit_counts(
    tmp_path: Path, of_scope: str, of_child: str, limit: tuple[int | None, int | None]
) -> None:
    tree = CgroupTree(tmp_path / "cgroup", 2, CPUSet.parse("0-7"), NUMASet.parse("0"))
    scope = "kubepods.slice/crio-a.scope"
    for path, text in ((scope, of_scope), (f"{scope}/container", of_child)):
        tree.write(path)
        (tree.directory(path) / "cpu.max").write_text(f"{text}\n")
    reader = CgroupReader(str(tree.root))
    assert reader.read_cfs_limit(CgroupPlace("kubepods.slice:crio:a")) == limit


@pytest.mark.parametrize(("of_root", "left"), [("1", "0"), ("0", "1")])
def test_the_root_keeps_its_scheduling_domains(tmp_path: Path, of_root: str, left: str) -> None:
    tree = CgroupTree(tmp_path / "cgroup", 1, CPUS, MEMS)
    tree.write(POD, "0-7", "0-1")
    writer = CgroupWriter(CgroupReader(str(tree.root)))
    flag = Path(writer.reader.directory_of(CgroupPlace(POD)), "cpuset.sched_load_balance")
    flag.write_text("1")
    Path(writer.reader.hierarchy, flag.name).write_text(of_root)
    assert writer.write_cgroup(CgroupWrite(CgroupPlace(POD), "1-2")).changed
    assert flag.read_text() == left


SLICE = "kubepods-burstable-pod12.slice"
SCOPE = f"kubepods.slice/kubepods-burstable.slice/{SLICE}/crio-abc.scope"
SYSTEMD = CgroupPlace(f"{SLICE}:crio:abc")
CGROUPFS = CgroupPlace("/kubepods/burstable/pod12/abc")


def made(directory: Path, **files: str) -> Path:
    """A cgroup; ``cpus_effective`` is the file ``cpuset.cpus.effective``."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / f"cpuset.{name.replace('_', '.')}").write_text(f"{text}\n")
    return directory


def v2(directory: Path, cpus: str, effective: str, state: str = "", **more: str) -> Path:
    """``state`` is the one of a partition, which the root has not."""
    mems = {"mems": "", "mems_effective": "0-1"} | ({"cpus_partition": state} if state else {})
    return made(directory, cpus=cpus, cpus_effective=effective, **{**mems, **more})


# --- hierarchies ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "path", "unified"),
    [
        (["cgroup.controllers:cpuset cpu"], ".", True),
        (["cpuset/cpuset.cpus:0", "unified/cgroup.controllers:"], "cpuset", False),
        (["cpuset/cpuset.cpus:0", "unified/cgroup.controllers:cpuset"], "cpuset", False),
        (["cpu/tasks:", "unified/cgroup.controllers:cpu cpuset"], "unified", True),
        (["cpu,cpuset/cpuset.cpus:0"], "cpu,cpuset", False),
        (["memory/tasks:", "unified/cgroup.controllers:memory"], "cpuset", False),
        ([], "cpuset", False),
    ],
    ids=["v2", "hybrid", "both", "hybrid with v2 cpusets", "mounted together", "none", "empty"],
)
def test_the_cpuset_hierarchy(tmp_path: Path, files: list[str], path: str, unified: bool) -> None:
    for one in files:
        name, _, text = one.partition(":")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    found = CgroupReader(str(tmp_path))
    assert (Path(found.hierarchy), found.unified) == ((tmp_path / path), unified)


def test_version_1_with_an_effective_set_of_its_own(tmp_path: Path) -> None:
    """Mounted with cpuset_v2_mode, as Android and some containers' hosts do."""
    cgroup = made(tmp_path / "cpuset/kubepods/burstable/pod12/abc", cpus="0-3", mems="0-1")
    (cgroup / "cpuset.effective_cpus").write_text("0-1\n")
    (cgroup / "cpuset.effective_mems").write_text("0\n")
    mounts = tmp_path / "proc/self/mounts"
    mounts.parent.mkdir(parents=True)
    line = f"cgroup {tmp_path}/cpuset cgroup rw,cpuset,cpuset_v2_mode 0 0\n"
    for text, effective in ((line, "0-1"), (line.replace(",cpuset_v2_mode", ""), "0-3")):
        mounts.write_text(f"short\nproc /proc proc rw 0 0\n{text}")
        reader = CgroupReader(str(tmp_path), proc=str(tmp_path / "proc"))
        assert seen(reader, CGROUPFS)[:2] == ("0-3", effective)


# --- OCI runtimes ---------------------------------------------------------------------------------


@pytest.fixture
def unified(tmp_path: Path) -> Path:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu\n")
    v2(tmp_path, "0-7", "0-7")
    return tmp_path


def test_of_crun_the_cgroup_with_the_programs_counts(unified: Path) -> None:
    scope = v2(unified / SCOPE, "2-3", "2-3", mems="1")
    reader = CgroupReader(str(unified))
    assert reader.read_actual_cgroup(SYSTEMD) is not None
    child = v2(scope / "container", "", "2-3")
    assert seen(reader, SYSTEMD)[::2] == ("2-3", "1"), "it has the scope's"
    v2(child, "3", "3", mems="0", mems_effective="0")  # somebody rewrote it
    assert seen(reader, SYSTEMD)[:3] == ("3", "3", "0")
    assert put(CgroupWriter(reader), SYSTEMD, "2-3", "1") == WriteOutcome(changed=True)
    assert (child / "cpuset.cpus").read_text() == "2-3"
    assert (child / "cpuset.mems").read_text() == "1"
    assert (scope / "cpuset.cpus").read_text().strip() == "2-3"


def test_of_runc_the_scope_counts_whatever_its_programs_make_below(unified: Path) -> None:
    scope = v2(unified / SCOPE, "2-3", "2-3")
    v2(scope / "init.scope", "3", "3")
    (scope / "container").mkdir()  # without the controller: no cgroup of crun's
    assert seen(CgroupReader(str(unified)), SYSTEMD)[0] == "2-3"


# --- all of them together -------------------------------------------------------------------------


def kernel_tree(root: Path, layout: str, driver: str, runtime: str) -> tuple[Path, list[Path]]:
    """What the kernel, the driver and the runtime make of one container.

    Returns:
        The cgroup that its programs are in, and all that must have the list for them to have it.
    """
    below = SCOPE if driver == "systemd" else CGROUPFS.cgroups_path.strip("/")
    top = root
    if layout == "v2":
        (root / "cgroup.controllers").write_text("cpuset cpu memory\n")
    else:
        # Version 1 has a tree for each controller, and each has the container's cgroup.
        tops = {"hybrid with v2 cpusets": "unified", "together": "cpuset,cpu"}
        top = root / tops.get(layout, "cpuset")
        for controller in ("cpu,cpuacct", "memory", "systemd"):
            (root / controller / below).mkdir(parents=True)
            (root / controller / below / "tasks").touch()
        if layout.startswith("hybrid"):
            (root / "unified" / below).mkdir(parents=True)
            controllers = "cpuset\n" if top.name == "unified" else "\n"
            (root / "unified/cgroup.controllers").write_text(controllers)
    places = [top / below]
    unified = layout in ("v2", "hybrid with v2 cpusets")
    if unified and driver == "systemd" and runtime == "crun":
        places.append(places[0] / CRUN_INNER_CGROUP_NAME)
    above = [top / one for one in reversed(Path(below).parents)]
    for directory in (*above, *places):
        if unified:
            v2(directory, "0-3" if directory in places else "", "0-3", mems="")
        else:
            made(directory, cpus="0-3", mems="0-1")
            for name in ("effective_cpus", "effective_mems"):
                (directory / f"cpuset.{name}").write_text("0-3\n" if "cpus" in name else "0-1\n")
    return places[-1], places


@pytest.mark.parametrize("runtime", ["runc", "crun"])
@pytest.mark.parametrize("driver", ["systemd", "cgroupfs"])
@pytest.mark.parametrize("layout", ["v1", "together", "v2", "hybrid", "hybrid with v2 cpusets"])
def test_what_somebody_wrote_is_read_and_repaired_where_the_programs_are(
    tmp_path: Path, layout: str, driver: str, runtime: str
) -> None:
    place = SYSTEMD if driver == "systemd" else CGROUPFS
    programs, must_have = kernel_tree(tmp_path, layout, driver, runtime)
    (programs / "cpuset.cpus").write_text("3\n")
    effective = programs / "cpuset.cpus.effective"  # of version 2, which the kernel follows up
    if effective.exists():
        effective.write_text("3\n")
    before = {file: file.read_text() for file in tmp_path.rglob("*") if file.is_file()}
    reader = CgroupReader(str(tmp_path))
    cpus, effective_cpus, _, effective_mems = seen(reader, place)
    assert (cpus, effective_cpus, effective_mems) == ("3", "3", "0-1")
    writer = CgroupWriter(reader)
    assert put(writer, place, "0-1", "0") == WriteOutcome(changed=True)
    assert put(writer, place, "0-1", "0") == WriteOutcome(changed=False)
    written = {file for file, text in before.items() if file.read_text() != text}
    assert written == {one / f"cpuset.{name}" for one in must_have for name in ("cpus", "mems")}
    for one in must_have:
        assert (one / "cpuset.cpus").read_text().strip() == "0-1"
        assert (one / "cpuset.mems").read_text().strip() == "0"


# --- effective against configured -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("root", "top", "between", "state", "gone", "said"),
    [
        ("0-7", ("0-3", "0-3"), "0-3", "member", "", "kubepods.slice has 0-3"),
        (
            "0-7",
            ("0-5", "0-3", "root"),
            "0-3",
            "member",
            "",
            "kubepods.slice has 0-3 of its 0-5; the rest belongs to a partition, "
            "kubepods.slice is a partition: root",
        ),
        ("0-7", ("", "0-7"), "0-7", "root invalid", "", "it is a partition: root invalid"),
        # Offline CPUs are nobody's fault.
        ("0-3", ("", "0-3"), "0-3", "member", "", ""),
        # Of what cannot be read the rest is told.
        ("0-7", (), "", "member", "", ""),
        ("0-7", ("", "0-3"), "0-3", "", "kubepods.slice/cpuset.cpus", "kubepods.slice has 0-3"),
        ("0-7", ("", "0-3"), "0-3", "", "cpuset.cpus.effective", "kubepods.slice has 0-3"),
    ],
)
def test_why_a_container_has_less_than_was_written_is_said(
    unified: Path, root: str, top: tuple[str, ...], between: str, state: str, gone: str, said: str
) -> None:
    """Its scope was given 2-5 and has 2-3."""
    v2(unified, "", root)
    for parent in reversed(Path(SCOPE).parents[:-1] if top else ()):
        v2(unified / parent, "", between)
    if top:
        v2(unified / "kubepods.slice", *top)
    v2(unified / SCOPE, "2-5", "2-3", state)
    if gone:
        (unified / gone).unlink()
    found = CgroupReader(str(unified)).read_actual_cgroup(SYSTEMD)
    assert found is not None
    assert found.above == said


def test_what_keeps_a_list_out_on_version_1_is_named(tmp_path: Path) -> None:
    for path, cpus in (("", "0-7"), ("pods", "0-3"), ("pods/a", "0-1"), ("pods/a/app", "0")):
        made(tmp_path / path, cpus=cpus, mems="0")
    made(tmp_path / "pods/a/app/new", cpus="", mems="")
    made(tmp_path / "pods/a/app/nested", cpus="0", mems="0")

    def way(wanted: str, name: str = "cpuset.cpus") -> str:
        return blocking_cgroup_text(str(tmp_path), str(tmp_path / "pods/a/app"), name, wanted)

    assert way("0-1") == ""
    assert way("0,2") == "the cgroup above, pods/a, has cpuset.cpus 0-1"
    assert way("0,5") == "the cgroup above, pods, has cpuset.cpus 0-3"
    assert way("1") == "the cgroup below, pods/a/app/nested, has cpuset.cpus 0"
    assert way("1", "cpuset.mems") == "the cgroup above, pods, has cpuset.mems 0"
    (tmp_path / "pods/cpuset.cpus").write_text("\n")
    (tmp_path / "pods/a/cpuset.cpus").write_text("\n")
    assert way("0") == "the cgroup above, pods, has cpuset.cpus empty"
    (tmp_path / "pods/a/cpuset.cpus").unlink()
    assert way("0") == "", "what cannot be read gives no reason"


# --- the kernel itself ----------------------------------------------------------------------------


def several(cgroup: Path) -> CPUSet:
    cpus = CPUSet.parse((cgroup / "cpuset.cpus").read_text().strip())
    if len(cpus) < 2:
        pytest.skip("one CPU cannot be narrowed")
    return cpus


def test_the_kernel_s_own_cpusets_are_read_and_repaired(real: Path) -> None:
    cpus = several(real)
    place = CgroupPlace(f"/{real.relative_to('/sys/fs/cgroup/cpuset')}")
    reader = CgroupReader()
    last = str(max(cpus))
    (real / "cpuset.cpus").write_text(last)
    assert seen(reader, place)[:2] == (last, last)
    assert put(CgroupWriter(reader), place, str(cpus)) == WriteOutcome(changed=True)
    assert (real / "cpuset.cpus").read_text().strip() == str(cpus)


def test_the_kernel_s_refusals_are_told_with_their_reason(real: Path) -> None:
    cpus = several(real)
    first, last = str(min(cpus)), str(max(cpus))
    writer = CgroupWriter(CgroupReader())
    outer = CgroupPlace(f"/{real.parent.relative_to('/sys/fs/cgroup/cpuset')}")
    inner = CgroupPlace(f"{outer.cgroups_path}/container")
    assert put(writer, outer, first).problem == (
        f"{real.parent}/cpuset.cpus: Device or resource busy (the cgroup below, "
        f"{real.parent.name}/container, has cpuset.cpus {cpus})"
    )
    assert not put(writer, inner, first).problem
    assert not put(writer, outer, first).problem
    assert put(writer, inner, last).problem == (
        f"{real}/cpuset.cpus: Permission denied (the cgroup above, "
        f"{real.parent.name}, has cpuset.cpus {first})"
    )
