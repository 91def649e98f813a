"""The frequency of the CPUs of a NUMA node, from a tree."""

from __future__ import annotations

from pathlib import Path

from nri_numa.machine.tree import DirectoryTree
from nri_numa.machine.waiting import MOST, frequencies
from tests.machines import named as machines


def cpufreq(root: Path, cpu: int, text: str) -> None:
    directory = root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq"
    directory.mkdir(parents=True)
    (directory / "scaling_cur_freq").write_text(text)


def test_the_mean_of_those_that_tell_it(tmp_path: Path) -> None:
    """CPUs that are away, or whose driver does not know, count for nothing; there is no zero."""
    for cpu, text in {0: "1000000\n", 1: "3000000\n", 2: "<unknown>\n", 8: "", 9: "-1"}.items():
        cpufreq(tmp_path, cpu, text)
    (tmp_path / "sys/devices/system/cpu/cpu10/cpufreq/scaling_cur_freq").mkdir(parents=True)
    assert frequencies(DirectoryTree(tmp_path), machines.dual_no_smt()) == {0: 2e9}


def test_a_number_that_no_cpu_runs_at_is_none(tmp_path: Path) -> None:
    cpufreq(tmp_path, 0, "9" * 5000)
    cpufreq(tmp_path, 1, "٣٤\n")
    assert frequencies(DirectoryTree(tmp_path), machines.dual_no_smt()) == {}


def test_of_many_cpus_some_are_read() -> None:
    class Asked:
        where = "/"

        def __init__(self) -> None:
            self.names: list[str] = []

        def read(self, name: str) -> str:
            self.names.append(name)
            return "2000000"

    asked, big = Asked(), machines.eight_by_32()
    assert frequencies(asked, big) == dict.fromkeys(big.numa_nodes, 2e9)
    assert len(asked.names) <= MOST * len(big.numa_nodes) < len(big.online)
