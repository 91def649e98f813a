"""Pods on machines that somebody captured.

The expectations come from what the captured files say (see ``test_captured_machines.py``), by
thought: which NUMA node has how many CPUs and how much memory, and what therefore fits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from nri_numa.cli import cli
from nri_numa.engine.decision import Reading
from nri_numa.engine.state import Kind
from nri_numa.machine.sysfs import read_memory
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


def test_128arm_goes_where_most_memory_is_and_crosses_to_the_near_neighbour() -> None:
    """NUMA node 1 has 4 KiB more than node 2; 0 and 1 are 16 apart, like 2 and 3, others 25 up."""
    machine = discovered("128arm-2pa2n8cluster4co")
    assert _placed(run(machine, pod("p", 32, "64Gi", SINGLE))) == ("32-63", "1")
    assert _placed(run(machine, pod("p", 32, "64Gi", SINGLE), settings=PACK)) == ("96-127", "3")
    wide = the(run(machine, pod("p", 40, "200Gi", RESTRICTED)))
    assert wide.allocation is not None
    assert str(wide.allocation.numa_nodes) == "0-1"
    # CPUs and memory need two NUMA nodes on an empty machine too: as good as it gets.
    assert wide.verdict is Verdict.PLACED
    assert _refused(run(machine, pod("p", 40, "200Gi", SINGLE))) == "TopologyAffinityError"
    # 64 GiB would fit on one, 40 CPUs would not: no wider than the neediest needs.
    for policy in (RESTRICTED, BEST_EFFORT):
        mixed = the(run(machine, pod("p", 40, "64Gi", policy)))
        assert (mixed.verdict, mixed.mems) == (Verdict.PLACED, "0-1")


def test_16amd64_in_a_cpuset_never_gets_what_the_cpuset_withholds() -> None:
    """CPUs 0-3 lie on NUMA node 0, and the memory we may use on 2 and 3."""
    machine = discovered("16amd64-4n4c-cgroup-distance-merge")
    outcome = the(run(machine, pod("p", 2, "1Gi", BEST_EFFORT)))
    assert CPUSet.parse(outcome.cpus) <= CPUSet.parse("0-3")
    assert outcome.mems in ("2", "3")
    assert _refused(run(machine, pod("p", wishes={"numacpu": "4"}))) == "CPUNotAllowed"
    assert _refused(run(machine, pod("p", wishes={"numamem": "0"}))) == "NUMANodeNotAllowed"
    listed = the(run(machine, pod("p", wishes={"numacpu": "3", "numamem": "2"})))
    assert (listed.cpus, listed.mems) == ("3", "2")


def test_16amd64_no_numa_node_has_both_cpus_and_memory_for_us() -> None:
    machine = discovered("16amd64-4n4c-cgroup-distance-merge")
    assert _refused(run(machine, pod("p", 2, "1Gi", SINGLE))) == "TopologyAffinityError"


def test_16amd64_8n2c_owns_seven_numa_nodes_and_leaves_one_to_the_others() -> None:
    machine = discovered("16amd64-8n2c")
    spec = {"containers": [container("app", {"limits": {"cpu": 2, "memory": "4Gi"}})]}
    result = run(machine, replicated("StatefulSet", "db", 8, spec, SINGLE))
    had = [o.mems for o in outcomes(result).values() if o.verdict is Verdict.PLACED]
    assert len(set(had)) == len(had) == 7
    assert _refused(result) in ("SharedPoolEmpty", "TopologyAffinityError", "NotEnoughCPUs")
    assert result.events[-1].pod.name == "db-7"


def test_16em64t_offline_cpus_cannot_be_listed_and_their_siblings_are_cores() -> None:
    machine = discovered("16em64t-4s2c2t-offlines")
    for cpu in ("2", "5", "13", "14"):
        assert _refused(run(machine, pod("p", wishes={"numacpu": cpu}))) == "CPUOffline"
    listed = the(run(machine, pod("p", wishes={"numacpu": "0,6"})))
    assert listed.cpus == "0,6"
    # Five cores have both threads, two have one: nine CPUs that leave siblings idle do not exist.
    isolated = the(run(machine, pod("p", 7, "64Mi", {**SINGLE, "smt": "isolate"})))
    assert isolated.verdict is Verdict.REFUSED  # all seven cores, and nobody else would have a CPU
    isolated = the(run(machine, pod("p", 6, "64Mi", {**SINGLE, "smt": "isolate"})))
    assert isolated.allocation is not None
    own = CPUSet.parse(isolated.cpus)
    assert len({machine.cpus[i].core for i in own}) == 6
    assert isolated.allocation.idle == machine.siblings_of(own) - own


def test_hybrid_cores_are_taken_as_configured() -> None:
    machine = discovered("20em64t-hybrid-1p6c2t+2ca4co1t")
    efficient = Settings(cores=PreferredCores.EFFICIENT)
    assert _placed(run(machine, pod("p", 8, "1Gi", SINGLE), settings=efficient)) == ("12-19", "0")
    fast = Settings(cores=PreferredCores.PERFORMANCE)
    cpus, _ = _placed(run(machine, pod("p", 6, "1Gi", SINGLE), settings=fast))
    assert CPUSet.parse(cpus) <= CPUSet.parse("0-11")
    # One thread of each of the six cores that have two.
    assert len({machine.cpus[i].core for i in CPUSet.parse(cpus)}) == 6


def test_2arm_small_machine_says_what_does_not_fit() -> None:
    """274 MiB of memory in all."""
    machine = discovered("2arm-2c")
    assert _placed(run(machine, pod("p", 1, "100Mi", SINGLE)))[1] == "0"
    assert _refused(run(machine, pod("p", 1, "300Mi", RESTRICTED))) == "TopologyAffinityError"
    assert _refused(run(machine, pod("p", wishes={"numamem": "1"}))) == "UnknownNUMANode"


def test_32amd64_in_a_batch_job_uses_its_six_cpus() -> None:
    machine = discovered("32amd64-4s2n4c-cgroup2")
    assert _placed(run(machine, pod("p", 4, "8Gi", SINGLE))) == ("0-3", "0")
    second = run(machine, pod("p", 4, "8Gi", SINGLE), pod("q", 1, "8Gi", SINGLE))
    assert _placed(second)[1] == "1"
    assert CPUSet.parse(the(second).cpus) <= CPUSet.parse("4-5")
    assert _refused(run(machine, pod("p", wishes={"numacpu": "6"}))) == "CPUNotAllowed"
    assert _refused(run(machine, pod("p", wishes={"numamem": "6-7"}))) == "NUMANodeNotAllowed"


def test_40intel_numa_nodes_are_dealt_out_over_the_cpu_numbers() -> None:
    """NUMA node 0 has 13 MiB less memory than the others."""
    machine = discovered("40intel64-2g2n4c+pcilocality")
    first = ",".join(str(i) for i in range(1, 40, 4))
    assert _placed(run(machine, pod("p", 10, "64Gi", SINGLE))) == (first, "1")
    least = ",".join(str(i) for i in range(0, 40, 4))
    assert _placed(run(machine, pod("p", 10, "64Gi", SINGLE), settings=PACK)) == (least, "0")
    shared = the(run(machine, pod("p", "1500m", "4Gi", BEST_EFFORT, guaranteed=False)))
    assert shared.cpus == first  # a shared container has all CPUs of its NUMA node


def test_64amd64_one_numa_node_has_half_the_memory() -> None:
    """NUMA node 5 has 8 GiB, all others 16."""
    machine = discovered("64amd64-4s2n4ca2co")
    spec = {"containers": [container("app", {"limits": {"cpu": 8, "memory": "12Gi"}})]}
    result = run(machine, replicated("StatefulSet", "db", 8, spec, SINGLE))
    had = {o.mems for o in outcomes(result).values() if o.verdict is Verdict.PLACED}
    assert had == {"0", "1", "2", "3", "4", "6", "7"}
    assert _refused(result) == "TopologyAffinityError"
    assert _refused(run(machine, pod("p", 1, "12Gi", {"numamem": "5"}))) == "NotEnoughMemory"
    assert the(run(machine, pod("p", 1, "4Gi", {"numamem": "5"}))).mems == "5"
    # Nine CPUs and 20 GiB need two NUMA nodes, and the nearest are 16 apart.
    wide = the(run(machine, pod("p", 9, "20Gi", RESTRICTED)))
    assert wide.allocation is not None
    a, b = wide.allocation.numa_nodes
    assert machine.distance(a, b) == 16


def test_8em64t_every_cpu_is_a_numa_node() -> None:
    machine = discovered("8em64t-2s2ca2c-buggynuma")
    cpus, mems = _placed(run(machine, pod("p", 1, "1Gi", SINGLE)))
    assert cpus == mems
    assert _refused(run(machine, pod("p", 2, "1Gi", SINGLE))) == "TopologyAffinityError"
    # Three CPUs and 5 of 2 GiB each.
    wide = the(run(machine, pod("p", 3, "5Gi", RESTRICTED)))
    assert wide.allocation is not None
    assert len(wide.allocation.numa_nodes) == 3


def test_96em64t_counts_what_the_kernel_has_in_use_when_asked() -> None:
    """126 GiB on each NUMA node; on node 0 only 42 GiB are free, and 80 GiB with page cache."""
    machine = discovered("96em64t-4no4pa3ca2co")
    assert _placed(run(machine, pod("p", 24, "100Gi", SINGLE))) == ("24-47", "1")
    # Node 0 has 22 MiB less in all, so that pack takes it while its use does not count.
    wish = pod("p", 24, "100Gi", SINGLE)
    assert _placed(run(machine, wish, settings=PACK)) == ("0-23", "0")
    memory = read_memory(captured("96em64t-4no4pa3ca2co"), machine)
    reading = Reading(memory={i: n.available_bytes for i, n in memory.numa_nodes.items()})
    reading = replace(reading, memory={**reading.memory, 0: memory.numa_nodes[0].free_bytes})
    _, mems = _placed(run(machine, wish, settings=PACK, reading=reading))
    assert mems != "0"


def test_tiers_without_cpus_are_used_only_when_asked_or_let_in() -> None:
    """CPUs on NUMA nodes 0, 1, 2 (2.9 GiB, 979 MiB, 512 MiB), memory alone on 4, 6, 8, 9."""
    machine = discovered("fakeheteromemtiers")
    assert _placed(run(machine, pod("p", 2, "2Gi", SINGLE))) == ("0-1", "0")
    assert _placed(run(machine, pod("p", 2, "700Mi", SINGLE), settings=PACK)) == ("2-3", "1")
    assert _placed(run(machine, pod("p", 2, "500Mi", SINGLE), settings=PACK)) == ("4-5", "2")
    assert _refused(run(machine, pod("p", 2, "4Gi", SINGLE))) == "TopologyAffinityError"
    listed = the(run(machine, pod("p", 1, "100Mi", {"numacpu": "0", "numamem": "4"})))
    assert (listed.cpus, listed.mems) == ("0", "4")
    wide = the(run(machine, pod("p", 1, "4100Mi", BEST_EFFORT)))
    assert NUMASet.parse(wide.mems) == NUMASet.parse("0-2")
    tiers = Settings(memory_only_nodes=NUMASet.parse("4,6,8-9"))
    wide = the(run(machine, pod("p", 1, "4600Mi", BEST_EFFORT), settings=tiers))
    assert NUMASet.parse(wide.mems) & NUMASet.parse("4,6,8-9")
    assert wide.allocation is not None
    assert wide.allocation.kind is Kind.EXCLUSIVE
