"""Machines as the kernel shows them, ordinary, odd and broken."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_numa.cli.machine import write_capture as capture
from nri_numa.errors import TopologyError
from nri_numa.machine.synthetic import synthetic_sysfs_files
from nri_numa.machine.sysfs import discover_topology, read_memory, read_online
from nri_numa.model.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.model.machine import NUMAMemoryReading, Topology
from tests.machines import named as machines
from tests.machines.named import GIB, MIB, write_sysfs, write_tree

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"

Files = dict[str, str]
Change = Callable[[Files], None]

# What discovery says about made-up machines that are odd on purpose.
SAID = {
    "snc_asymmetric": (
        "the distance from NUMA node 0 to 2 is 20 and back 21, and 1 more pairs differ",
    ),
    "cpu_only": ("NUMA nodes 0-1 have CPUs but no memory",),
    "inside_cpuset": ("/proc/self/status allows only CPUs 0-1,4-5,8-9,12-13 of 0-15",),
}


@pytest.mark.parametrize("name", machines.MACHINES)
def test_what_was_written_is_read_back(name: str, tmp_path: Path) -> None:
    machine = machines.MACHINES[name]()
    found = discover_topology(write_sysfs(tmp_path, machine))
    assert replace(found, warnings=()) == machine
    assert found.warnings == SAID.get(name, ())


def _discover(tmp_path: Path, machine: Topology, change: Change) -> Topology:
    files = synthetic_sysfs_files(machine)
    change(files)
    return discover_topology(write_tree(tmp_path, files))


def _without(*parts: str) -> Change:
    def change(files: Files) -> None:
        for name in [n for n in files if any(part in n for part in parts)]:
            del files[name]

    return change


def _with(**texts: str) -> Change:
    """Replace files; in the names ``__`` stands for a slash below the system directory."""

    def change(files: Files) -> None:
        for name, text in texts.items():
            files["sys/devices/system/" + name.replace("__", "/")] = text

    return change


def _of_each(name: str, *texts: str) -> Change:
    """A file of each CPU."""

    def change(files: Files) -> None:
        files.update({f"{CPU}/cpu{i}/{name}": f"{text}\n" for i, text in enumerate(texts)})

    return change


def _renamed(end: str, other: str) -> Change:
    def change(files: Files) -> None:
        for name in [n for n in files if n.endswith(end)]:
            files[name.removesuffix(end) + other] = files.pop(name)

    return change


# What kernels before leave out or call otherwise; the machine is the same.
SAME: dict[str, tuple[Callable[[], Topology], Change]] = {
    "NUMA nodes are listed from directories": (machines.sparse_ids, _without("node/online")),
    "offline CPUs have directories": (machines.offline_cpus, _without("cpu/online", "cpu/present")),
    "siblings are called core_cpus": (
        machines.dual_smt,
        _renamed("thread_siblings_list", "core_cpus_list"),
    ),
    "equal capacity is a uniform machine": (
        machines.single_no_smt,
        _of_each("cpu_capacity", *["1024"] * 4),
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_the_same_machine_told_otherwise(case: str, tmp_path: Path) -> None:
    build, change = SAME[case]
    assert _discover(tmp_path, build(), change) == build()


# -- NUMA nodes -----------------------------------------------------------------------------------


def test_without_numa_everything_belongs_to_node_0(tmp_path: Path) -> None:
    def change(files: Files) -> None:
        _without(NODE)(files)
        files["sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"] = "3\n"
        files["sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages"] = "0\n"

    machine = _discover(tmp_path, machines.dual_smt(), change)
    (numa_node,) = machine.numa_nodes.values()
    assert (numa_node.id, str(numa_node.cpus), numa_node.memory_bytes) == (0, "0-63", 128 * GIB)
    assert (numa_node.distances, numa_node.hugepages) == ({0: 10}, {2 * MIB: 6 * MIB})
    assert (machine.cpus[63].numa_node, len(machine.sockets)) == (0, 2)
    (said,) = machine.warnings
    assert said == "the kernel reports no NUMA nodes; everything belongs to NUMA node 0"


def test_without_numa_and_meminfo_the_size_of_memory_is_not_known(tmp_path: Path) -> None:
    machine = _discover(tmp_path, machines.one_cpu(), _without(NODE, "proc/meminfo"))
    assert machine.numa_nodes[0].memory_bytes == 0
    assert "the size of the memory is not known: proc/meminfo has no MemTotal" in machine.warnings


def _empty_numa_node(files: Files) -> None:
    files[f"{NODE}/online"] = "0-2\n"
    files[f"{NODE}/node2/cpulist"] = "\n"
    files[f"{NODE}/node2/meminfo"] = "Node 2 MemTotal:              0 kB\n"
    files[f"{NODE}/node2/distance"] = "20 20 10\n"
    files[f"{NODE}/node0/distance"] = "10 21 20\n"
    files[f"{NODE}/node1/distance"] = "21 10 20\n"


def _one_offline(files: Files) -> None:
    files[f"{NODE}/online"] = "0\n"
    files[f"{NODE}/node0/distance"] = "10\n"
    files[f"{CPU}/online"] = "0-7\n"


def _old_mask(files: Files) -> None:
    del files[f"{CPU}/cpu0/topology/thread_siblings_list"]
    files[f"{CPU}/cpu0/topology/thread_siblings"] = "0xff\n"


# What is odd, with the machine, what is changed of it, what is read of it then, and what is said.
ODD: dict[str, tuple[Callable[[], Topology], Change, Callable[[Topology], object], object, str]] = {
    "CPUs without a NUMA node stay without": (
        machines.dual_adjacent,
        _with(node__node1__cpulist="10-15\n"),
        lambda m: (m.cpus[8].numa_node, m.cores[8].numa_node, m.cpus[10].numa_node),
        (None, None, 1),
        "CPUs 8-9 belong to no NUMA node",
    ),
    "the only NUMA node takes CPUs that belong to none": (
        machines.single_smt,
        _with(node__node0__cpulist="0-5\n"),
        lambda m: str(m.numa_nodes[0].cpus),
        "0-7",
        "CPUs 6-7 belong to no NUMA node; the only one, 0, is assumed",
    ),
    "a NUMA node without anything is kept": (
        machines.dual_adjacent,
        _empty_numa_node,
        lambda m: (m.numa_ids, m.memory_nodes),
        (NUMASet([0, 1, 2]), NUMASet([0, 1])),
        "NUMA node 2 has neither CPUs nor memory",
    ),
    "files of a NUMA node may be missing": (
        machines.dual_adjacent,
        _without("node1/cpulist", "node0/meminfo"),
        lambda m: (m.numa_nodes[0].memory_bytes, m.numa_nodes[1].cpus),
        (0, NO_CPUS),
        "NUMA node 0 has no readable memory size; 0 is assumed\n"
        "NUMA node 1 has no readable list of CPUs\n"
        "NUMA node 0 has CPUs but no memory\n"
        "CPUs 8-15 belong to no NUMA node",
    ),
    "NUMA nodes that overlap give each CPU to one owner; without links the lowest": (
        machines.dual_adjacent,
        _with(node__node1__cpulist="4-15\n"),
        lambda m: [str(node.cpus) for node in m.numa_nodes.values()],
        ["0-7", "8-15"],
        "NUMA nodes 0-1 all claim CPUs 4-7; each CPU is counted for the one that its own "
        "directory links to, else the lowest",
    ),
    "an online NUMA node without directory is ignored": (
        machines.dual_adjacent,
        _with(node__online="0-1,5\n"),
        lambda m: m.numa_ids,
        NUMASet([0, 1]),
        "NUMA node 5 is online but has no directory; ignored",
    ),
    "an offline NUMA node is not part of the machine": (
        machines.dual_adjacent,
        _one_offline,
        lambda m: (m.numa_ids, str(m.present)),
        (NUMASet([0]), "0-15"),
        "",
    ),
    "distances that tell nothing": (
        machines.dual_adjacent,
        _with(node__node0__distance="10 10\n", node__node1__distance="10 10\n"),
        lambda m: m.distance(0, 1),
        10,
        "the firmware says that some NUMA nodes are no farther away than the local one",
    ),
    "CPUs without topology are cores of socket 0": (
        machines.dual_adjacent,
        _without("/topology/", "/cache/"),
        lambda m: (len(m.cores), list(m.sockets), m.l3_groups),
        (16, [0], {}),
        "CPUs 0-15 report no siblings; each is taken for a core\n"
        "CPUs 0-15 report no socket; socket 0 is assumed",
    ),
    "sockets are numbered within a book": (
        machines.dual_no_smt,
        lambda files: [
            _of_each(f"topology/{level}_id", *texts)(files)
            for level, texts in (
                *(("physical_package", "0" * 16), ("drawer", "0" * 16)),
                ("book", "0" * 8 + "1" * 8),
            )
        ],
        lambda m: len(m.sockets),
        2,
        "",
    ),
    "a socket of minus one is not known": (
        machines.dual_no_smt,
        _with(cpu__cpu3__topology__physical_package_id="-1\n"),
        lambda m: m.cpus[3].socket,
        0,
        "CPU 3 reports no socket; socket 0 is assumed",
    ),
    "contradicting siblings leave each CPU in one core": (
        machines.dual_adjacent,
        _with(cpu__cpu2__topology__thread_siblings_list="1-3\n"),
        lambda m: (str(m.cores[0].cpus), str(m.cores[2].cpus)),
        ("0-1", "2-3"),
        "the siblings of CPU 2 contradict those of lower CPUs",
    ),
    "contradicting caches leave each CPU in one group": (
        machines.dual_adjacent,
        _with(cpu__cpu8__cache__index3__shared_cpu_list="0-15\n"),
        lambda m: {str(group.cpus) for group in m.l3_groups.values()},
        {"0-7", "8-15"},
        "the L3 caches of CPU 8 contradict those of lower CPUs",
    ),
    "a damaged mask is ignored": (
        machines.one_cpu,
        _old_mask,
        lambda m: len(m.cores),
        1,
        f"{CPU}/cpu0/topology/thread_siblings is ignored: it is not a mask of hexadecimal digits\n"
        "CPU 0 reports no siblings; each is taken for a core",
    ),
}


@pytest.mark.parametrize("case", ODD)
def test_what_is_odd_is_read_as_well_as_it_can_be_and_said(case: str, tmp_path: Path) -> None:
    build, change, facts, expected, said = ODD[case]
    machine = _discover(tmp_path, build(), change)
    assert facts(machine) == expected
    assert "\n".join(machine.warnings) == said


def test_the_kernels_own_link_decides_between_empty_numa_nodes(tmp_path: Path) -> None:
    write_sysfs(tmp_path, machines.dual_adjacent())
    (tmp_path / NODE / "node1/cpulist").write_text("4-15\n")
    for i in (4, 5, 6):
        (tmp_path / CPU / f"cpu{i}/node1").symlink_to("../../node/node1")
    machine = discover_topology(tmp_path)
    assert str(machine.numa_nodes[0].cpus) == "0-3,7"
    assert str(machine.numa_nodes[1].cpus) == "4-6,8-15"
    assert "the core of CPU 6 has threads on several NUMA nodes" in machine.warnings[-1]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, "no distances"),
        ("10\n", "the distances '10'"),
        ("10 x\n", "the distances '10 x'"),
        ("0 0\n", "the distances '0 0'"),
        ("10 256\n", "the distances '10 256'"),
        ("10 ٢٠\n", "the distances '10 ٢٠'"),
    ],
)
def test_unusable_distances_become_defaults(text: str | None, found: str, tmp_path: Path) -> None:
    def change(files: Files) -> None:
        if text is None:
            del files[f"{NODE}/node0/distance"]
        else:
            files[f"{NODE}/node0/distance"] = text

    machine = _discover(tmp_path, machines.dual_adjacent(), change)
    assert machine.numa_nodes[0].distances == {0: 10, 1: 20}
    assert machine.numa_nodes[1].distances == {0: 21, 1: 10}
    assert machine.warnings == (
        f"NUMA node 0 reports {found}, not 2 numbers from 10 to 255; "
        "10 to itself and 20 to others are assumed",
        "the distance from NUMA node 0 to 1 is 20 and back 21",
    )


def test_distances_are_columns_of_online_numa_nodes_in_order(tmp_path: Path) -> None:
    machine = _discover(tmp_path, machines.sparse_ids(), _with(node__node8__distance="21 10 17\n"))
    assert machine.numa_nodes[8].distances == {0: 21, 8: 10, 252: 17}


# -- CPUs, cores, caches --------------------------------------------------------------------------


def test_masks_serve_where_lists_are_missing(tmp_path: Path) -> None:
    """Kernels before 2.6.37 have masks only, in words of 32 bits."""

    def change(files: Files) -> None:
        for name in list(files):
            old = None
            if name.endswith("thread_siblings_list"):
                old = name.removesuffix("_list")
            elif name.endswith(("shared_cpu_list", "cpulist")):
                old = name.removesuffix("list") + "map"
            if old:
                digits = f"{CPUSet.parse(files.pop(name).strip()).bits:016x}"
                files[old] = f"{digits[:8]},{digits[8:]}\n\0\0"
        _without("cpu/online", "cpu/present", "cpu/possible", "cpu/isolated")(files)

    assert _discover(tmp_path, machines.dual_smt(), change) == machines.dual_smt()


def test_level_3_may_be_under_any_index(tmp_path: Path) -> None:
    """Where a level counts as one cache, or there are two of level 1, the numbers differ."""

    def change(files: Files) -> None:
        for name in [n for n in files if "/cache/index3/" in n]:
            files[name.replace("index3", "index2")] = files.pop(name)
            files[name] = {"level": "4\n"}.get(name.rpartition("/")[2], "0-15\n")
            files[name.replace("index3/", "index0/")] = "1\n"

    assert _discover(tmp_path, machines.dual_adjacent(), change) == machines.dual_adjacent()


def test_a_cache_that_does_not_tell_its_cpus_is_left_out(tmp_path: Path) -> None:
    machine = _discover(tmp_path, machines.one_cpu(), _without("shared_cpu_list"))
    assert machine.l3_groups == {}


@pytest.mark.parametrize("name", ["cpu__present", "cpu__possible", "cpu__isolated", "node__online"])
def test_a_damaged_list_is_said_and_ignored(name: str, tmp_path: Path) -> None:
    machine = _discover(tmp_path, machines.dual_adjacent(), _with(**{name: "0-x\n"}))
    assert replace(machine, warnings=()) == machines.dual_adjacent()
    path = "sys/devices/system/" + name.replace("__", "/")
    assert machine.warnings == (f"{path} is ignored: '0-x' is not a number or a range such as 0-3",)


# -- hybrid ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "change", "kinds"),
    [
        # Arm cores of lower capacity are efficient; what cannot be read calls no core slow.
        (machines.single_no_smt, _of_each("cpu_capacity", "1024", "1010", "768", "446"), "ppee"),
        (machines.single_no_smt, _of_each("cpu_capacity", "fast", *["1024"] * 3), "ssss"),
        # Nor does a thread that is offline.
        (machines.offline_cpus, _of_each("acpi_cppc/highest_perf", *["64"] * 16), "s" * 7),
    ],
)
def test_cores_have_a_kind(
    tmp_path: Path, build: Callable[[], Topology], change: Change, kinds: str
) -> None:
    found = _discover(tmp_path, build(), change)
    assert "".join(core.kind.value[0] for core in found.cores.values()) == kinds


@pytest.mark.parametrize("speed", ["acpi_cppc/highest_perf", "cpufreq/cpuinfo_max_freq"])
def test_slower_cores_with_one_thread_are_efficient(speed: str, tmp_path: Path) -> None:
    def change(files: Files) -> None:
        _without("cpu_core", "cpu_atom")(files)
        _of_each(speed, *["64"] * 12, *["39"] * 8)(files)

    assert _discover(tmp_path, machines.hybrid(), change) == machines.hybrid()


# -- what containers may have ---------------------------------------------------------------------


def _allowed(tmp_path: Path, files: Files, machine: Topology | None = None) -> Topology:
    return _discover(tmp_path, machine or machines.dual_adjacent(), lambda all: all.update(files))


STATUS = "Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t0-3\nMems_allowed_list:\t1\n"


def test_our_own_status_counts_where_no_cgroup_is_seen(tmp_path: Path) -> None:
    machine = _allowed(tmp_path, {"proc/self/status": STATUS})
    assert str(machine.allowed) == "0-3"
    assert machine.withheld_memory == NUMASet([0])
    assert machine.memory_nodes == NUMASet([1])
    assert machine.warnings == (
        "/proc/self/status allows only CPUs 0-3 of 0-15",
        "/proc/self/status does not allow memory of NUMA node 0",
    )


# Files, the machine, and the CPUs and NUMA nodes without memory for containers that follow.
ALLOWED: dict[str, tuple[Files, str, str]] = {
    **{
        f"the pods' cgroup counts before our own: {name}": (
            {name: "4-15\n", "proc/self/status": STATUS, "proc/self/cpuset": "/x\n"},
            "4-15",
            "",
        )
        for name in (
            "sys/fs/cgroup/kubepods.slice/cpuset.cpus.effective",
            "sys/fs/cgroup/kubepods/cpuset.cpus.effective",
            "sys/fs/cgroup/cpuset/kubepods.slice/cpuset.effective_cpus",
            "sys/fs/cgroup/cpuset/kubepods/cpuset.cpus",
            "sys/fs/cgroup/kubelet.slice/kubelet-kubepods.slice/cpuset.cpus.effective",
        )
    },
    **{
        f"in a pod of a kubelet with another cgroupRoot the pods' cgroup counts: {name}": (
            {
                "proc/self/cpuset": f"/{name}/burstable/pod1/abc\n",
                f"sys/fs/cgroup/cpuset/{name}/cpuset.cpus": "4-15\n",
                f"sys/fs/cgroup/cpuset/{name}/burstable/pod1/abc/cpuset.cpus": "5\n",
            },
            "4-15",
            "",
        )
        for name in ("nodes/one/kubepods", "nodes.slice/nodes-kubepods.slice")
    },
    "the nearest ancestor with a cpuset counts": (
        {
            "proc/self/cpuset": "/system.slice/nri-numa.service\n",
            "sys/fs/cgroup/system.slice/cpuset.cpus.effective": "0-11\n",
            "sys/fs/cgroup/system.slice/cpuset.mems.effective": "0\n",
            "sys/fs/cgroup/cpuset.cpus.effective": "0-15\n",
            "proc/self/status": STATUS,
        },
        "0-11",
        "1",
    ),
    "our affinity does not narrow what containers may have": (
        {
            "proc/self/cpuset": "/\n",
            "sys/fs/cgroup/cpuset.cpus.effective": "0-15\n",
            "proc/self/status": STATUS,
        },
        "0-15",
        "",
    ),
    "cpusets are found where they are mounted": (
        {
            "proc/mounts": "short\nx relative cgroup2 rw 0 0\nproc /proc proc rw 0 0\n"
            "cgroup /cg/memory cgroup rw,memory 0 0\nnone /dev/cpuset cgroup rw,cpuset 0 0\n",
            "proc/self/cpuset": "/job\n",
            "dev/cpuset/job/cpus": "2-5\n",
        },
        "2-5",
        "",
    ),
    **{
        f"our own status counts where the cgroups have no cpusets: {mounts!r}": (
            {"proc/mounts": mounts, "proc/self/cpuset": "/x\n", "proc/self/status": STATUS},
            "0-3",
            "0",
        )
        for mounts in ("", "none /sys/fs/cgroup cgroup2 rw 0 0\n")
    },
    "a cgroup outside of our view tells nothing": (
        {"proc/self/cpuset": "/../other\n", "sys/fs/cgroup/other/cpuset.cpus.effective": "1\n"},
        "0-15",
        "",
    ),
    **{
        f"a cpuset without CPUs is not counted: {text!r}": (
            {"sys/fs/cgroup/kubepods.slice/cpuset.cpus.effective": text},
            "0-15",
            "",
        )
        for text in ("\n", "0-x\n")
    },
}


@pytest.mark.parametrize("case", ALLOWED)
def test_what_containers_may_have(case: str, tmp_path: Path) -> None:
    files, cpus, withheld = ALLOWED[case]
    machine = _allowed(tmp_path, files)
    assert (str(machine.allowed), str(machine.withheld_memory)) == (cpus, withheld)
    assert all("allows only" in said or "does not allow" in said for said in machine.warnings)


def test_isolated_cpus_are_not_lost_to_our_affinity(tmp_path: Path) -> None:
    status = "Cpus_allowed_list:\t0-1,4-9,12-15\n"
    machine = _allowed(tmp_path, {"proc/self/status": status}, machines.isolated_cpus())
    assert machine.allowed == machine.online


def test_limits_without_any_online_cpu_are_ignored_and_said(tmp_path: Path) -> None:
    machine = _allowed(
        tmp_path, {"proc/self/status": "Cpus_allowed_list:\t100\nMems_allowed_list:\t9\n"}
    )
    assert machine.allowed == machine.online
    assert machine.withheld_memory == NUMASet()
    assert machine.warnings == ("/proc/self/status allows CPU 100, none of them online; ignored",)


# -- what cannot be read --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\n", "cpu/online: lists no CPU"),
        ("0-x\n", "cpu/online: is not a list of CPUs: '0-x' is not"),
        ("0-99999\n", "cpu/online: is not a list of CPUs: CPU 99999 is above 8191"),
    ],
)
def test_without_online_cpus_there_is_no_machine(text: str, found: str, tmp_path: Path) -> None:
    write_tree(tmp_path, {f"{CPU}/online": text})
    with pytest.raises(TopologyError) as caught:
        discover_topology(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))
    assert found in str(caught.value)
    with pytest.raises(TopologyError):
        read_online(tmp_path)


def test_a_cpu_directory_without_cpus_is_no_machine(tmp_path: Path) -> None:
    (tmp_path / CPU).mkdir(parents=True)
    with pytest.raises(TopologyError, match="no CPU is listed in it"):
        discover_topology(tmp_path)


def test_only_the_list_of_online_cpus_is_needed(tmp_path: Path) -> None:
    machine = discover_topology(write_tree(tmp_path, {f"{CPU}/online": "0-1,4\n"}))
    assert str(machine.numa_nodes[0].cpus) == "0-1,4"
    assert str(machine.present) == "0-1,4"
    assert len(machine.cores) == 3
    assert len(machine.warnings) == 4


def test_names_that_only_look_like_cpus_are_not(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {f"{CPU}/{name}/x": "" for name in ("cpu0", "cpufreq", "cpuidle", "cpu99999", "cpu٣")},
    )
    assert str(read_online(tmp_path)) == "0"


# -- hot-plug and memory --------------------------------------------------------------------------


def _reading(
    tmp_path: Path, memory: Mapping[int, NUMAMemoryReading] = {}
) -> Mapping[int, NUMAMemoryReading]:
    machine = machines.huge_pages()
    return read_memory(write_sysfs(tmp_path, machine, memory), machine)


def test_memory_of_an_idle_machine_is_free(tmp_path: Path) -> None:
    reading = _reading(tmp_path)
    assert reading[1] == NUMAMemoryReading(
        total_bytes=16 * GIB,
        free_bytes=11 * GIB,
        reclaimable_bytes=0,
        free_hugepages={2 * MIB: GIB, GIB: 4 * GIB},
    )


@pytest.mark.parametrize(
    ("reserve", "low"),
    [
        # No vm.min_free_kbytes: sqrt(32 GiB in KiB x 16) KiB, 5/4 of it, half for each node.
        (None, 23170 * 1024 * 5 // 4 // 2),
        (65536, 40 * MIB),  # 64 MiB x 5/4 for two nodes
    ],
)
def test_page_cache_is_mostly_reclaimable(tmp_path: Path, reserve: int | None, low: int) -> None:
    """Once out of the cache and once to stay free."""
    if reserve:
        write_tree(tmp_path, {"proc/sys/vm/min_free_kbytes": f"{reserve}\n"})
    used = NUMAMemoryReading(total_bytes=16 * GIB, free_bytes=GIB, reclaimable_bytes=2 * GIB)
    numa_node = _reading(tmp_path, {0: used})[0]
    assert numa_node == replace(used, reclaimable_bytes=2 * GIB - 2 * low)


@pytest.mark.parametrize(
    ("pages", "reserve", "kib"),
    [
        # Slab counts as the page cache does.
        (
            "Active(file): 300000|Inactive(file): 200000|SReclaimable: 100",
            "8000",
            (500_000 - 10_000) + (100 - 50) - 10_000,
        ),
        # Kernels without split lists tell their file pages; sqrt(1 GiB in KiB x 16) KiB stay.
        ("FilePages: 900000|Shmem: 300000", "garbage", 600_000 - 2 * (4096 * 5 // 4)),
    ],
)
def test_what_else_is_reclaimable(tmp_path: Path, pages: str, reserve: str, kib: int) -> None:
    machine = machines.one_cpu()
    lines = [f"Node 0 {one} kB\n" for one in ("MemTotal: 1048576", *pages.split("|"))]
    files = {f"{NODE}/node0/meminfo": "".join(lines), "proc/sys/vm/min_free_kbytes": reserve}
    write_tree(write_sysfs(tmp_path, machine), files)
    assert read_memory(tmp_path, machine)[0].reclaimable_bytes == kib * 1024


def test_a_numa_node_that_went_away_has_no_memory(tmp_path: Path) -> None:
    machine = machines.dual_adjacent()
    write_tree(
        tmp_path, {n: t for n, t in synthetic_sysfs_files(machine).items() if "node1" not in n}
    )
    reading = read_memory(tmp_path, machine)
    assert reading[1] == NUMAMemoryReading(total_bytes=0, free_bytes=0, reclaimable_bytes=0)
    assert reading[0].free_bytes == 16 * GIB


def test_memory_without_numa_is_the_machines(tmp_path: Path) -> None:
    files = synthetic_sysfs_files(machines.single_smt())
    _without(NODE)(files)
    files["sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"] = "5\n"
    machine = discover_topology(write_tree(tmp_path, files))
    reading = read_memory(tmp_path, machine)
    assert reading[0].free_bytes == 16 * GIB
    assert reading[0].free_hugepages == {2 * MIB: 10 * MIB}


def test_this_machine_can_be_read() -> None:
    """Whatever runs the tests has CPUs and memory."""
    machine = discover_topology("/")
    assert machine.online == read_online("/")
    assert machine.memory_nodes
    reading = read_memory("/", machine)
    for node in reading.values():
        assert 0 <= node.available_bytes <= node.total_bytes


# --- initiators and memory tiers: what the kernel tells of memory without CPUs --------------------


def test_initiators_and_tiers_are_read_and_survive_a_capture(tmp_path: Path) -> None:
    base = machines.memory_only()
    nodes = {
        i: replace(n, initiators=NUMASet([i % 2]), tier=4 if n.cpus else 22)
        for i, n in base.numa_nodes.items()
    }
    root = write_sysfs(tmp_path / "root", replace(base, numa_nodes=nodes))
    assert discover_topology(root).numa_nodes == nodes
    # As the kernel has it: a link to the NUMA node's directory.
    link = root / "sys/devices/system/node/node2/access1/initiators/node0"
    link.unlink()
    link.symlink_to("../../../node0")
    assert discover_topology(root).numa_nodes == nodes
    report = capture(root, tmp_path / "machine.tar.gz")
    assert "sys/devices/system/node/node2/access1/initiators/node0" in report.files
    packed = discover_topology(tmp_path / "machine.tar.gz")
    assert packed.numa_nodes[2].initiators == NUMASet([0])
    assert packed.numa_nodes[2].tier == 22


def test_access0_is_believed_where_there_is_no_access1(tmp_path: Path) -> None:
    files = synthetic_sysfs_files(machines.memory_only())
    files["sys/devices/system/node/node2/access0/initiators/node1"] = ""
    files["sys/devices/virtual/memory_tiering/uevent"] = ""
    read = discover_topology(write_tree(tmp_path, files))
    assert read.numa_nodes[2].initiators == NUMASet([1])
    assert read.numa_nodes[2].tier is None
