"""Pods on machines that somebody captured.

The expectations come from what the captured files say (see ``test_captured_machines.py``), by
thought: which NUMA node has how many CPUs and how much memory, and what therefore fits.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nri_numa.cli import cli
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.settings import PreferredCores, Settings
from nri_numa.model.workload import Strategy
from nri_numa.simulate.simulator import Simulation, Verdict
from tests.integration.test_captured_machines import MACHINES, captured, discovered
from tests.machines.pods import container, outcomes, pod, replicated, run, the

pytestmark = pytest.mark.slow

SINGLE = {"policy": "single-numa-node"}
RESTRICTED = {"policy": "restricted"}
BEST_EFFORT = {"policy": "best-effort"}
PACK = Settings(strategy=Strategy.PACK)
# name: CPUs that containers may use of the NUMA node with the most, and a NUMA node that has them.
WHOLE_NODE = {
    "128arm-2pa2n8cluster4co": 32,
    "16amd64-8n2c": 2,
    "40intel64-2g2n4c+pcilocality": 10,
    "64amd64-4s2n4ca2co": 8,
    "8em64t-2s2ca2c-buggynuma": 1,
    "96em64t-4no4pa3ca2co": 24,
    "fakeheteromemtiers": 2,
    # Of CPUs 0-5 that our cgroup allows, NUMA node 0 has four and NUMA node 1 two.
    "32amd64-4s2n4c-cgroup2": 4,
}
# One NUMA node, or CPUs of one only: somebody must be left a CPU.
ONE_NODE = {
    "16em64t-4s2c2t-offlines": 12,
    "20em64t-hybrid-1p6c2t+2ca4co1t": 20,
    "2arm-2c": 2,
    "16amd64-4n4c-cgroup-distance-merge": 4,
}


def _placed(result: Simulation) -> tuple[str, str]:
    """CPUs and memory nodes of the only container."""
    outcome = the(result)
    assert outcome.verdict is Verdict.PLACED, outcome.message or outcome.reason
    return outcome.cpus, outcome.mems


def _refused(result: Simulation) -> str:
    outcome = the(result)
    assert outcome.verdict is Verdict.REFUSED, outcome.reason
    assert outcome.reason in outcome.trace.rule or outcome.message
    return outcome.reason


@pytest.mark.parametrize("name", WHOLE_NODE)
def test_a_pod_as_large_as_a_numa_node_fits_and_one_cpu_more_does_not(name: str) -> None:
    machine, count = discovered(name), WHOLE_NODE[name]
    cpus, mems = _placed(run(machine, pod("p", count, "64Mi", SINGLE)))
    assert len(CPUSet.parse(cpus)) == count
    assert str(machine.numa_of(CPUSet.parse(cpus))) == mems
    assert len(NUMASet.parse(mems)) == 1
    assert _refused(run(machine, pod("p", count + 1, "64Mi", SINGLE))) == "TopologyAffinityError"


@pytest.mark.parametrize("name", ONE_NODE)
def test_on_one_numa_node_all_cpus_but_one_can_be_owned(name: str) -> None:
    machine, count = discovered(name), ONE_NODE[name]
    wishes = {**SINGLE, "bind": "cpu"}
    cpus, mems = _placed(run(machine, pod("p", count - 1, "64Mi", wishes)))
    assert len(CPUSet.parse(cpus)) == count - 1
    assert CPUSet.parse(cpus) <= machine.allowed
    assert mems == ""
    assert _refused(run(machine, pod("p", count, "64Mi", wishes))) == "SharedPoolEmpty"


@pytest.mark.parametrize("name", MACHINES)
def test_memory_that_no_numa_node_has_is_refused_and_spread_by_best_effort(name: str) -> None:
    """And a pod that asks for nothing is left alone."""
    machine = discovered(name)
    outcome = the(run(machine, pod("p")))
    assert (outcome.verdict, outcome.cpus, outcome.mems) == (Verdict.UNTOUCHED, "", "")
    total = sum(machine.numa_nodes[i].memory_bytes for i in machine.numa_ids)
    more = str(max(n.memory_bytes for n in machine.numa_nodes.values()) + (1 << 20))
    assert _refused(run(machine, pod("p", 1, more, SINGLE))) == "TopologyAffinityError"
    outcome = the(run(machine, pod("p", 1, more, BEST_EFFORT)))
    assert outcome.verdict in (Verdict.PLACED, Verdict.WIDENED)
    assert NUMASet.parse(outcome.mems) <= machine.memory_nodes
    if len(machine.cpu_nodes) > 1 and int(more) < total // 4:
        assert len(NUMASet.parse(outcome.mems)) == 2


@pytest.mark.parametrize("name", MACHINES)
def test_the_command_tells_it_within_80_columns(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


# --- one by one -----------------------------------------------------------------------------------

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
FAST = Settings(cores=PreferredCores.PERFORMANCE)
EFFICIENT = Settings(cores=PreferredCores.EFFICIENT)
LET_IN = Settings(memory_only_nodes=NUMASet.parse("4,6,8-9"))
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
        # Every CPU is a NUMA node, of 2 GiB each.
        (BUGGY, (1, "1Gi", SINGLE), None, r"(\d) \1"),
        (BUGGY, (2, "1Gi", SINGLE), None, NO_NODE),
        # 126 GiB on each NUMA node; node 0 has 22 MiB less in all.
        (FOUR, (24, "100Gi", SINGLE), None, "24-47 1"),
        (FOUR, (24, "100Gi", SINGLE), PACK, "0-23 0"),
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
    refused = outcome.verdict is Verdict.REFUSED
    told = outcome.reason if refused else f"{outcome.cpus} {outcome.mems}"
    assert re.fullmatch(expected, told)


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
    had = [o.mems for o in outcomes(result).values() if o.verdict is Verdict.PLACED]
    assert len(set(had)) == len(had) == 7
    assert without not in had
    assert _refused(result) in ("SharedPoolEmpty", "TopologyAffinityError", "NotEnoughCPUs")
    assert result.events[-1].pod.name == "db-7"


def test_one_thread_of_each_of_the_six_cores_that_have_two() -> None:
    machine = discovered(HYBRID)
    own = CPUSet.parse(_placed(run(machine, pod("p", 6, "1Gi", SINGLE), settings=FAST))[0])
    assert own <= CPUSet.parse("0-11")
    assert len({machine.cpus[i].core for i in own}) == 6


@pytest.mark.parametrize(
    ("name", "cpus", "memory", "distances"),
    [(MODULES, 9, "20Gi", {16}), (BUGGY, 3, "5Gi", {10})],
)
def test_what_needs_several_numa_nodes_gets_near_ones_and_no_more(
    name: str, cpus: int, memory: str, distances: set[int]
) -> None:
    """Nine CPUs and 20 GiB need two NUMA nodes; three CPUs and 5 of 2 GiB each, three."""
    machine = discovered(name)
    wide = the(run(machine, pod("p", cpus, memory, RESTRICTED)))
    assert wide.allocation is not None
    nodes = wide.allocation.numa_nodes
    assert len(nodes) == (2 if name == MODULES else 3)
    assert {machine.distance(a, b) for a, b in pairwise(nodes)} == distances
