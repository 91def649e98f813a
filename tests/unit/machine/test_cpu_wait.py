"""How much a container waits for CPUs: a number, or why there is none."""

import os
import shutil
from pathlib import Path

import pytest

from nri_numa.machine.cgroups import CgroupPlace, CgroupReader
from nri_numa.machine.cpu_wait import (
    MAX_FREQUENCY_CPUS_PER_NODE,
    PRESSURE_FILE,
    SCHEDSTAT_FILE,
    CPUStealAndWaitTimes,
    CPUWaits,
    SmoothedStealFactors,
    parse_cpu_pressure_avg60,
    parse_steal_and_wait_times,
    read_cpu_waits,
    read_frequency_by_node,
    runqueue_by_node,
    steal_by_node,
    tasks_waiting,
)
from nri_numa.machine.tree import DirectoryTree
from tests.beds.cgroup_tree import ContainerTree
from tests.machines import named as machines

PLACE = CgroupPlace("/pods/a")
TEXT = (
    "some avg10=9.99 avg60=12.34 avg300=0.10 total=123456\n"
    "full avg10=0.00 avg60=0.50 avg300=0.00 total=0\n"
)


class Tree(ContainerTree):
    """With the threads of the container."""

    def thread(self, pid: int, tid: int, text: str | None) -> Path:
        task = self.proc / str(pid) / "task" / str(tid)
        task.mkdir(parents=True)
        (task / "stat").touch()
        if text is not None:
            (task / SCHEDSTAT_FILE).write_text(text)
        return task

    def look(self, limit: float = 10**6) -> CPUWaits:
        reader = CgroupReader(str(self.root), proc=str(self.proc))
        ticks = iter(range(10**9))
        return read_cpu_waits(reader, PLACE, limit=limit, clock=lambda: float(next(ticks)))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_pressure_is_the_part_of_the_last_minute_in_which_something_waited(tree: Tree) -> None:
    (tree.home / PRESSURE_FILE).write_text(TEXT)
    found = tree.look()
    assert (found.pressure, found.no_pressure) == (0.1234, "")


def test_a_pressure_of_nothing_is_a_zero_that_is_known(tree: Tree) -> None:
    (tree.home / PRESSURE_FILE).write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n")
    assert tree.look().pressure == 0


@pytest.mark.parametrize("text", ["", "some", "full avg10=1 avg60=1 avg300=1 total=0", "\x00"])
def test_what_is_no_pressure_tells_none(tree: Tree, text: str) -> None:
    assert parse_cpu_pressure_avg60(text) is None
    (tree.home / PRESSURE_FILE).write_text(text)
    assert tree.look().no_pressure == "cpu.pressure has no pressure of the last minute"


def test_version_1_has_none_and_a_hybrid_may_have_it_in_the_unified_one(tmp_path: Path) -> None:
    tree = Tree(tmp_path, 1)
    assert tree.look().no_pressure == "cgroup v1 has no cpu.pressure"
    (tree.root / "unified/pods/a").mkdir(parents=True)
    (tree.root / "unified/pods/a" / PRESSURE_FILE).write_text(TEXT)
    assert tree.look().pressure == 0.1234


def test_a_kernel_without_pressure_and_one_that_withholds_it_are_told_apart(tree: Tree) -> None:
    assert "this kernel has no pressure stall information" in tree.look().no_pressure
    (tree.home / PRESSURE_FILE).mkdir()  # cannot be read as a file
    assert tree.look().no_pressure == "cpu.pressure cannot be read: Is a directory"


def test_threads_of_inner_cgroups_are_the_containers_too(tree: Tree) -> None:
    tree.processes(10)
    (tree.home / "inner").mkdir()
    (tree.home / "inner/cgroup.procs").write_text("11\n")
    tree.thread(10, 10, "5 1500000000 7\n")
    tree.thread(10, 12, "5 0 7\n")
    tree.thread(11, 11, "5 2000000000 1\n")
    assert tree.look().threads == {10: 1.5, 12: 0.0, 11: 2.0}


def test_two_readings_tell_how_many_waited() -> None:
    assert tasks_waiting({1: 1.0, 2: 5.0, 9: 1.0}, {1: 6.0, 2: 5.0, 3: 70.0}, 10) == 0.5
    assert tasks_waiting({1: 1.0}, {2: 9.0}, 10) is None, "no thread was there at both"
    assert tasks_waiting({1: 5.0}, {1: 1.0}, 10) is None, "another thread of its number"
    assert tasks_waiting({1: 5.0}, {1: 5.0}, 0) is None


def test_threads_that_end_meanwhile_are_left_out(tree: Tree) -> None:
    tree.processes(10, 11)
    tree.thread(10, 10, "5 1000000000 7\n")
    ended = tree.thread(10, 12, "5 1000000000 7\n")
    shutil.rmtree(ended)
    ended.mkdir()  # its directory is still there, and empty
    assert tree.look().threads == {10: 1.0}
    tree.processes(11)
    found = tree.look()
    assert found.threads is None
    assert "its processes ended" in found.no_threads


def test_each_reason_is_told_and_no_zero(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tree.look().no_threads == "it has no process"
    tree.processes(0, 10)
    assert "a PID namespace" in tree.look().no_threads
    tree.processes(10)
    task = tree.thread(10, 10, None)
    assert tree.look().no_threads == "this kernel has no schedstat of threads"
    (task / SCHEDSTAT_FILE).write_text("0 0 0\n")
    assert tree.look().no_threads == "schedstat of its threads counts nothing"
    (task / SCHEDSTAT_FILE).write_text("words\n")
    assert tree.look().threads is None
    (task / SCHEDSTAT_FILE).unlink()
    (task / SCHEDSTAT_FILE).mkdir()
    assert "schedstat of a thread cannot be read: Is a directory" in tree.look().no_threads
    shutil.rmtree(tree.proc / "10")
    (tree.proc / "10").mkdir()
    (tree.proc / "10/task").touch()
    assert "threads of process 10 cannot be listed: Not a dir" in tree.look().no_threads
    shutil.rmtree(tree.proc / "10")
    for tid in range(20, 24):
        tree.thread(10, tid, "1 1 1\n")
    assert "took too long" in tree.look(limit=2).no_threads
    monkeypatch.setattr("nri_numa.machine.cpu_wait.MAX_THREADS_READ", 3)
    assert tree.look().no_threads == "it has more than the 3 threads that are read"
    gone = read_cpu_waits(CgroupReader(str(tree.root)), CgroupPlace("/pods/b"))
    assert gone.no_threads == gone.no_pressure == "it has no cgroup that can be read"


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel has no schedstat of tasks"
)
def test_a_real_process(tree: Tree) -> None:
    tree.processes(os.getpid())
    found = read_cpu_waits(CgroupReader(str(tree.root)), PLACE, limit=60)
    assert found.threads is not None
    assert os.getpid() in found.threads


def cpufreq(root: Path, cpu: int, text: str) -> None:
    directory = root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq"
    directory.mkdir(parents=True)
    (directory / "scaling_cur_freq").write_text(text)


def test_the_mean_of_those_that_tell_it(tmp_path: Path) -> None:
    """CPUs that are away, or whose driver does not know, count for nothing; there is no zero."""
    for cpu, text in {0: "1000000\n", 1: "3000000\n", 2: "<unknown>\n", 8: "", 9: "-1"}.items():
        cpufreq(tmp_path, cpu, text)
    (tmp_path / "sys/devices/system/cpu/cpu10/cpufreq/scaling_cur_freq").mkdir(parents=True)
    assert read_frequency_by_node(DirectoryTree(tmp_path), machines.dual_no_smt()) == {0: 2e9}


def test_a_number_that_no_cpu_runs_at_is_none(tmp_path: Path) -> None:
    cpufreq(tmp_path, 0, "9" * 5000)
    cpufreq(tmp_path, 1, "٣٤\n")
    assert read_frequency_by_node(DirectoryTree(tmp_path), machines.dual_no_smt()) == {}


def test_of_many_cpus_some_are_read() -> None:
    class Asked:
        where = "/"

        def __init__(self) -> None:
            self.names: list[str] = []

        def read_file(self, name: str) -> str:
            self.names.append(name)
            return "2000000"

    asked, big = Asked(), machines.eight_by_32()
    assert read_frequency_by_node(asked, big) == dict.fromkeys(big.numa_nodes, 2e9)
    assert len(asked.names) <= MAX_FREQUENCY_CPUS_PER_NODE * len(big.numa_nodes) < len(big.online)


STAT = """cpu  1 1 1 1 1 1 1 1 0 0
cpu0 10 0 10 60 0 0 0 20 5 0
cpu1 0 0 0 100 0 0 0 0
cpu2 1 2 3 4
"""
SCHEDULED = """version 15
timestamp 4294
cpu0 0 0 0 0 0 0 5000000000 2500000000 9
domain0 00000003 1 2 3
cpu1 0 0 0
"""


def test_the_kernels_texts() -> None:
    times = parse_steal_and_wait_times(STAT, SCHEDULED)
    assert times.steal == {0: (20, 100), 1: (0, 100)}, "cpu2 is of a kernel without steal"
    assert times.waited == {0: 2.5}
    assert parse_steal_and_wait_times("", "") == CPUStealAndWaitTimes()


def test_a_numa_node_of_which_nothing_is_known_is_left_out() -> None:
    topology = machines.dual_no_smt()  # node 0 is 0-7, node 1 is 8-15
    before = CPUStealAndWaitTimes(
        {0: (0, 0), 1: (0, 0), 2: (50, 100), 3: (0, 100), 8: (0, 100)}, {0: 1.0, 1: 9.0, 8: 5.0}
    )
    after = CPUStealAndWaitTimes(
        {0: (50, 100), 1: (0, 100), 2: (40, 200), 3: (0, 100), 8: (0, 100), 9: (0, 1)},
        {0: 2.0, 1: 8.0, 2: 1.0, 9: 1.0},
    )
    assert steal_by_node(before, after, topology) == {0: 0.25}, "2 went back, 3 and 8 stood still"
    assert runqueue_by_node(before, after, topology, 2.0) == {0: 0.5}
    assert runqueue_by_node(before, after, topology, 0.0) == {}


def smoothed(floor: float = 0.5) -> SmoothedStealFactors:
    return SmoothedStealFactors(half_life=10, step=0.1, floor=floor)


def test_a_factor_follows_slowly_and_in_steps() -> None:
    made = smoothed()
    assert not made.update_steal({0: 0.16, 1: 0.0}, 10), "half of it has arrived: 0.08"
    assert made.update_steal({0: 0.16, 1: 0.0}, 10)
    assert made.factors == {0: 0.88}
    assert not made.update_steal({0: 0.16}, 1000), "0.84 is no step from 0.88"
    assert not made.update_steal({}, 10), "not known is not whole"
    assert not made.update_steal({0: 0.07}, 1000)
    assert made.update_steal({0: 0.0}, 1000)
    assert made.factors == {}


def test_no_factor_is_lower_than_the_floor() -> None:
    made = smoothed()
    assert made.update_steal({0: 1.0}, 1000)
    assert made.factors == {0: 0.5}
    assert not made.update_steal({0: 1.0}, 1000)
    drained = smoothed(floor=0)
    assert drained.update_steal({0: 1.0}, 10_000)
    assert drained.factors == {0: 0}


def test_one_bad_moment_is_no_reason() -> None:
    made = smoothed()
    for _ in range(20):
        assert not made.update_steal({0: 0.5}, 1)
        assert not made.update_steal({0: 0.0}, 9)


def test_steal_that_goes_up_and_down_around_a_step_changes_nothing_again_and_again() -> None:
    made = smoothed()
    changes = sum(made.update_steal({0: 0.14 if n % 2 else 0.07}, 5) for n in range(200))
    assert changes <= 1


@pytest.mark.parametrize("gone", [{0}, {0, 1}])
def test_numa_nodes_that_go_are_forgotten(gone: set[int]) -> None:
    made = smoothed()
    made.update_steal({0: 0.4, 1: 0.4}, 1000)
    made.retain_nodes({0, 1} - gone)
    assert set(made.factors) == {0, 1} - gone
