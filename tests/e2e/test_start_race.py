"""Nobody else on an owned CPU while containers start: rounds of ordinary pods and an owner at once.

``NRI_NUMA_RACE_ROUNDS`` sets how many rounds each combination has; ``-rP`` shows the figures.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.beds.containerd import Containerd
from tests.beds.cri import QoS, Resources, guaranteed
from tests.beds.plugin_process import PluginProcess
from tests.beds.process_sampler import Sampler
from tests.beds.race_bed import (
    COMMAND,
    MODES,
    NEIGHBOURS,
    OWNER_ANNOTATIONS,
    RaceBed,
    first_instruction,
    granted,
)
from tests.checks.race_figures import table

pytestmark = [pytest.mark.e2e, pytest.mark.every_series]

ROUNDS = int(os.environ.get("NRI_NUMA_RACE_ROUNDS", "25"))
OWNERS = 12
LIMIT_MS = 100
"""The aim of the product, and what a person would call a moment; not a limit of this machine."""


@pytest.mark.core
@pytest.mark.timeout(120 + 5 * ROUNDS)
@pytest.mark.parametrize("mode", MODES)
def test_no_neighbour_stays_on_an_owned_cpu(
    containerd: Containerd, plugin: PluginProcess, mode: str
) -> None:
    """A container between its creation and its start has the CPUs it may have, soon or at once."""
    with RaceBed(containerd) as bed:
        rounds = list(bed.rounds(mode, ROUNDS))
    print(table(rounds))
    assert [one.error for one in rounds if one.error] == []
    # Created after the grant: nothing was in flight, so the first instruction is already right.
    assert [one.detail for one in rounds if one.first_lines_created_after] == []
    assert [one.detail for one in rounds if one.owner_wrong] == []
    assert [one.detail for one in rounds if one.sure_ms > LIMIT_MS] == []


@pytest.mark.core
@pytest.mark.timeout(300)
def test_no_update_of_a_neighbour_brings_an_owned_cpu_back(
    containerd: Containerd, plugin: PluginProcess
) -> None:
    """The runtime sends the cpuset that it remembers with any update; owners come and go."""
    cri, stop = containerd.cri, threading.Event()
    pods = [cri.run_pod(f"neighbour{n}", qos=QoS.BEST_EFFORT) for n in range(NEIGHBOURS)]
    neighbours = [cri.run(pod, command=COMMAND) for pod in pods]

    def updates() -> int:
        with containerd.client() as client:
            for number in itertools.count():
                if stop.is_set():
                    return number
                more = Resources(memory=(64 + number % 64) << 20)
                client.update(neighbours[number % NEIGHBOURS], more)
        raise AssertionError

    late: list[float] = []
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(updates)
        try:
            for _ in range(OWNERS):
                owner = cri.run_pod("owner", annotations=OWNER_ANNOTATIONS)
                with Sampler() as sampler:
                    watched = [sampler.watch(one) for one in neighbours]
                    made = cri.create(owner, resources=guaranteed(1), command=COMMAND)
                    owned = granted(cri, made)
                    cri.start(made)
                    began = first_instruction(cri, made).at
                    time.sleep(0.3)
                    end = time.time()
                late += [
                    1000 * (seen.at - began)
                    for one in watched
                    for seen in one.track
                    if began < seen.at < end and seen.cpus & owned
                ]
                cri.remove_pod(owner)
        finally:
            stop.set()
        count = stream.result()
    for pod in pods:
        cri.remove_pod(pod)
    print(f"{count} updates, {OWNERS} owners; ms after an owner's first instruction: {late}")
    assert count > OWNERS
    assert [ms for ms in late if ms > LIMIT_MS] == []
    assert plugin.metric("nri_numa_late_repairs_total") == 0
    assert plugin.metric("nri_numa_drift_fights_total") == 0
