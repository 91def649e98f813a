"""Nobody else on an owned CPU while containers start: rounds of ordinary pods and an owner at once.

``NRI_NUMA_RACE_ROUNDS`` sets how many rounds each combination has; ``-rP`` shows the figures.
"""

import os

import pytest

from tests.beds.containerd import Containerd
from tests.beds.plugin_process import PluginProcess
from tests.beds.race_bed import MODES, MOMENT_MS, RaceBed, updated_beside_owners

pytestmark = pytest.mark.every_series

ROUNDS = int(os.environ.get("NRI_NUMA_RACE_ROUNDS", "25"))
OWNERS = 12
LIMIT_MS = 100
"""The aim of the product, and what a person would call a moment; not a limit of this machine."""


@pytest.mark.core
@pytest.mark.timeout(120 + 5 * ROUNDS)
@pytest.mark.parametrize("mode", MODES)
def test_owned_cpus_are_left(containerd: Containerd, plugin: PluginProcess, mode: str) -> None:
    """A container between its creation and its start has the CPUs it may have, soon or at once."""
    with RaceBed(containerd) as bed:
        rounds = list(bed.rounds(mode, ROUNDS))
    print(*(f"{one.variant}: {one.wrong_ms:.0f} ms {one.problem}" for one in rounds), sep="\n")
    assert [one.problem for one in rounds if one.problem] == []
    assert [one for one in rounds if one.wrong_ms > LIMIT_MS] == []


@pytest.mark.core
@pytest.mark.timeout(300)
def test_no_update_brings_an_owned_cpu_back(containerd: Containerd, plugin: PluginProcess) -> None:
    """The runtime sends the cpuset that it remembers with any update; owners come and go."""
    count, late = updated_beside_owners(containerd, OWNERS)
    print(f"{count} updates, {OWNERS} owners; ms after an owner's first instruction: {late}")
    assert count > OWNERS
    assert [ms for ms in late if ms > MOMENT_MS] == []
    assert plugin.metric("nri_numa_undelivered_updates_repaired_total") == 0
    assert plugin.metric("nri_numa_drift_repairs_abandoned_total") == 0
