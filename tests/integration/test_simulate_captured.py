"""Pods on machines that somebody captured.

The expectations come from what the captured files say (see ``test_captured_machines.py``), by
thought: which NUMA node has how many CPUs and how much memory, and what therefore fits.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nri_numa.cli import cli
from nri_numa.machine.pci import list_pci_devices
from nri_numa.machine.tree import open_tree
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.settings import PreferredCores, Settings
from nri_numa.model.workload import Strategy
from nri_numa.simulate.simulator import SimulatedOutcome
from tests.beds.captured_machines import MACHINES, captured, discovered
from tests.machines.pods import container, outcomes, pod, replicated, run, the

pytestmark = pytest.mark.slow

SINGLE = {"policy": "single-numa-node"}
RESTRICTED = {"policy": "restricted"}
BEST_EFFORT = {"policy": "best-effort"}
PACK = Settings(strategy=Strategy.PACK)


@pytest.mark.parametrize("name", MACHINES)
def test_it_fits_80_columns(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal of so many; a pipe gets every list whole."""
    monkeypatch.setattr(
        "click.testing._NamedTextIOWrapper.isatty", lambda _self: True, raising=False
    )
    monkeypatch.setenv("COLUMNS", "80")
    pods = tmp_path / "pods.yaml"
    pods.write_text(
        "\n---\n".join(
            [pod("small", "500m", "32Mi", BEST_EFFORT), pod("huge", 5000, "1Gi", SINGLE)]
        )
    )
    done = CliRunner().invoke(cli, ["simulate", "--machine", str(captured(name)), str(pods)])
    assert done.exit_code == 1, done.output
    assert "TopologyAffinityError" in done.stdout
    # The path of the machine is as long as it is.
    lines = [line for line in done.stdout.splitlines() if str(captured(name)) not in line]
    assert max(len(line) for line in lines) <= 80


ARM = "128arm-2pa2n8cluster4co"
CPUSET = "16amd64-4n4c-cgroup-distance-merge"
OFFLINES = "16em64t-4s2c2t-offlines"
HYBRID = "20em64t-hybrid-1p6c2t+2ca4co1t"
JOB = "32amd64-4s2n4c-cgroup2"
INTEL = "40intel64-2g2n4c+pcilocality"
MODULES = "64amd64-4s2n4ca2co"
BUGGY = "8em64t-2s2ca2c-buggynuma"
FOUR = "96em64t-4no4pa3ca2co"
TIERS = "fakeheteromemtiers"
FAST = Settings(preferred_cores=PreferredCores.PERFORMANCE)
EFFICIENT = Settings(preferred_cores=PreferredCores.EFFICIENT)
LET_IN = Settings(memory_only_numa_nodes=NUMASet.parse("4,6,8-9"))
NO_NODE = "TopologyAffinityError"


def every(step: int, start: int, stop: int) -> str:
    return ",".join(str(i) for i in range(start, stop, step))


@pytest.mark.parametrize(
    ("name", "asked", "settings", "expected"),
    [
        # NUMA node 1 has 4 KiB more than node 2; 0 and 1 are 16 apart, like 2 and 3, others 25 up.
        (ARM, (32, "64Gi", SINGLE), None, "32-63 1"),
        (ARM, (32, "64Gi", SINGLE), PACK, "96-127 3"),
        # CPUs and memory need two NUMA nodes on an empty machine too: as good as it gets.
        (ARM, (40, "200Gi", RESTRICTED), None, ".* 0-1"),
        (ARM, (40, "200Gi", SINGLE), None, NO_NODE),
        # 64 GiB would fit on one, 40 CPUs would not: no wider than the neediest needs.
        (ARM, (40, "64Gi", RESTRICTED), None, ".* 0-1"),
        (ARM, (40, "64Gi", BEST_EFFORT), None, ".* 0-1"),
        # CPUs 0-3 lie on NUMA node 0, and the memory we may use on 2 and 3.
        (CPUSET, (2, "1Gi", BEST_EFFORT), None, "[0-3],?-?[0-3] [23]"),
        (CPUSET, (2, "1Gi", SINGLE), None, NO_NODE),
        (CPUSET, (None, None, {"numacpu": "4"}), None, "CPUNotAllowed"),
        (CPUSET, (None, None, {"numamem": "0"}), None, "NUMANodeNotAllowed"),
        (CPUSET, (None, None, {"numacpu": "3", "numamem": "2"}), None, "3 2"),
        *((OFFLINES, (None, None, {"numacpu": i}), None, "CPUOffline") for i in ("2", "13", "14")),
        (OFFLINES, (None, None, {"numacpu": "0,6"}), None, "0,6 .*"),
        # All seven cores, and nobody else would have a CPU.
        (OFFLINES, (7, "64Mi", {**SINGLE, "smt": "isolate"}), None, "[A-Z].*"),
        (HYBRID, (8, "1Gi", SINGLE), EFFICIENT, "12-19 0"),
        # One thread of each of the six cores that have two.
        (HYBRID, (6, "1Gi", SINGLE), FAST, "0,2,4,6,8,10 0"),
        # All CPUs but one can be owned.
        (HYBRID, (19, "64Mi", {**SINGLE, "bind": "cpu"}), None, r"\S+ "),
        (HYBRID, (20, "64Mi", {**SINGLE, "bind": "cpu"}), None, "SharedPoolEmpty"),
        # 274 MiB of memory in all.
        ("2arm-2c", (1, "100Mi", SINGLE), None, ". 0"),
        ("2arm-2c", (1, "300Mi", RESTRICTED), None, NO_NODE),
        ("2arm-2c", (None, None, {"numamem": "1"}), None, "UnknownNUMANode"),
        (JOB, (4, "8Gi", SINGLE), None, "0-3 0"),
        (JOB, (None, None, {"numacpu": "6"}), None, "CPUNotAllowed"),
        (JOB, (None, None, {"numamem": "6-7"}), None, "NUMANodeNotAllowed"),
        # NUMA node 0 has 13 MiB less memory than the others.
        (INTEL, (10, "64Gi", SINGLE), None, f"{every(4, 1, 40)} 1"),
        (INTEL, (10, "64Gi", SINGLE), PACK, f"{every(4, 0, 40)} 0"),
        # NUMA node 5 has 8 GiB, all others 16.
        (MODULES, (1, "12Gi", {"numamem": "5"}), None, "NotEnoughMemory"),
        (MODULES, (1, "4Gi", {"numamem": "5"}), None, ".* 5"),
        # Two near ones, at a distance of 16.
        (MODULES, (9, "20Gi", RESTRICTED), None, ".* 1,3"),
        # Every CPU is a NUMA node, of 2 GiB each.
        (BUGGY, (3, "5Gi", RESTRICTED), None, "2-4 2-4"),
        (BUGGY, (1, "1Gi", SINGLE), None, r"(\d) \1"),
        (BUGGY, (2, "1Gi", SINGLE), None, NO_NODE),
        # 126 GiB on each NUMA node; node 0 has 22 MiB less in all.
        (FOUR, (24, "100Gi", SINGLE), None, "24-47 1"),
        (FOUR, (24, "100Gi", SINGLE), PACK, "0-23 0"),
        (FOUR, (25, "100Gi", SINGLE), None, NO_NODE),
        (FOUR, (1, "127Gi", SINGLE), None, NO_NODE),
        (FOUR, (1, "127Gi", BEST_EFFORT), None, "24 1-2"),
        (FOUR, (None, None), None, " "),
        # CPUs on NUMA nodes 0, 1, 2 (2.9 GiB, 979 MiB, 512 MiB), memory alone on 4, 6, 8, 9.
        (TIERS, (2, "2Gi", SINGLE), None, "0-1 0"),
        (TIERS, (2, "700Mi", SINGLE), PACK, "2-3 1"),
        (TIERS, (2, "500Mi", SINGLE), PACK, "4-5 2"),
        (TIERS, (2, "4Gi", SINGLE), None, NO_NODE),
        (TIERS, (1, "100Mi", {"numacpu": "0", "numamem": "4"}), None, "0 4"),
        (TIERS, (1, "4100Mi", BEST_EFFORT), None, ". 0-2"),
        (TIERS, (1, "4600Mi", BEST_EFFORT), LET_IN, r". \S*[4689]\S*"),
    ],
)
def test_what_one_pod_gets(
    name: str, asked: tuple[Any, ...], settings: Settings | None, expected: str
) -> None:
    """CPUs and memory nodes, or the reason for a refusal."""
    outcome = the(run(discovered(name), pod("p", *asked), settings=settings or Settings()))
    rejected = outcome.verdict is SimulatedOutcome.REJECTED
    told = outcome.reason if rejected else f"{outcome.cpus} {outcome.mems}"
    assert re.fullmatch(expected, told)


def test_a_root_without_a_numa_node_has_all_cpus_beside_it(tmp_path: Path) -> None:
    """So neither of the two roots of this machine is nearer to any of its caches."""
    subprocess.run(["tar", "-xjf", captured(INTEL), "-C", tmp_path], check=True)
    (root,) = tmp_path.iterdir()
    cards = list_pci_devices(open_tree(root))
    assert {(card.numa_node, str(card.local_cpus)) for card in cards} == {(None, "0-39")}
    assert {card.address[:7] for card in cards} > {"0000:01", "0000:09"}


@pytest.mark.parametrize(
    ("name", "count", "memory", "without"),
    [("16amd64-8n2c", 2, "4Gi", None), (MODULES, 8, "12Gi", "5")],
)
def test_owners_of_whole_numa_nodes_leave_one_to_the_others(
    name: str, count: int, memory: str, without: str | None
) -> None:
    """Of NUMA node 5, which has half the memory, nobody wants anything."""
    spec = {"containers": [container("app", {"limits": {"cpu": count, "memory": memory}})]}
    result = run(discovered(name), replicated("StatefulSet", "db", 8, spec, SINGLE))
    had = [o.mems for o in outcomes(result).values() if o.verdict is SimulatedOutcome.PLACED]
    assert len(set(had)) == len(had) == 7
    assert without not in had
    assert the(result).reason in ("SharedPoolEmpty", "TopologyAffinityError", "NotEnoughCPUs")
    assert result.events[-1].pod.name == "db-7"
