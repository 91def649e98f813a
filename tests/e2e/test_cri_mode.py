"""``nri-numa run --link cri`` against real containerds whose NRI is off, and the way back to NRI.

Over CRI nobody is asked before a start, so what is awaited is the late update: the kernel's own
word, in ``/proc/PID/status``, and that it stays so.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.beds.containerd import Containerd, find_binaries
from tests.beds.cri import CRI, MIB, Container, Seen, guaranteed, poll
from tests.beds.plugin_process import PluginProcess, StartPlugin
from tests.beds.reports import attach_if_failed
from tests.beds.testbed import TestbedUnavailable, require_root
from tests.e2e.conftest import unavailable
from tests.machines.cpus import FIRST, LAST, MACHINE, NO_CPU

pytestmark = pytest.mark.e2e

KEY = "numa.kubernetes.io"


@pytest.fixture(scope="module")
def without_nri(series: str) -> Iterator[Containerd]:
    directory = Path(tempfile.mkdtemp(prefix="nri-numa-cri-"))
    try:
        require_root("containerd")
        with Containerd(find_binaries(series), directory / "c", nri=False) as containerd:
            yield containerd
    except TestbedUnavailable as error:
        unavailable(error)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def bed(without_nri: Containerd) -> Iterator[Containerd]:
    """The same, and empty again afterwards."""
    yield without_nri
    if not without_nri.running:
        without_nri.start()
    without_nri.cri.remove_all()


@pytest.fixture
def start(request: pytest.FixtureRequest, bed: Containerd) -> Iterator[StartPlugin]:
    starter = StartPlugin(bed.directory, bed.nri_socket)
    yield starter
    for number, plugin in enumerate(starter.started):
        plugin.close()
        attach_if_failed(request.node, f"plugin-{number}.log", plugin.log)


def over_cri(containerd: Containerd) -> dict[str, object]:
    return {
        "runtime": {"link": "cri", "criSocket": str(containerd.socket)},
        "quotas": {"listedCPUs": len(MACHINE)},
    }


def listed(cri: CRI, name: str, cpus: str) -> Container:
    """A running container that asks for these CPUs."""
    return cri.run(cri.run_pod(name, annotations={f"{KEY}/numacpu": cpus}))


def settled(cri: CRI, container: Container, cpus: str) -> None:
    """Wait until the kernel says that the container may use these CPUs."""
    poll(lambda: cri.allowed(container).cpus == cpus, f"{container.pod.name} on CPUs {cpus}")


def late(plugin: PluginProcess) -> dict[str, float | None]:
    """By pod, the seconds that its container was late."""
    return {c["pod"]: c.get("late") for c in plugin.json("/v1/assignments")["containers"]}


def test_pods_that_start_together_get_their_cpus(bed: Containerd, start: StartPlugin) -> None:
    assert not bed.nri_socket.exists()
    before = listed(bed.cri, "before", LAST)
    assert bed.cri.allowed(before).cpus == str(MACHINE)
    plugin = start(over_cri(bed))
    settled(bed.cri, before, LAST)  # found by the listing at the start

    def run(n: int) -> Container:
        return listed(bed.cri, f"together{n}", FIRST if n % 2 else LAST)

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(run, range(6)))
    for n, container in enumerate(together):
        settled(bed.cri, container, FIRST if n % 2 else LAST)
        # The runtime's own record says the same, or its next update would undo it.
        poll(
            lambda c=container, n=n: (
                bed.cri.info(c)["runtimeSpec"]["linux"]["resources"]["cpu"].get("cpus")
                == (FIRST if n % 2 else LAST)
            ),
            "the runtime's record",
        )
    # What a new listing found running is not measured; where nothing broke off that is "before".
    names = poll(
        lambda: [name for name, seconds in late(plugin).items() if seconds is not None], "lateness"
    )
    assert set(names) <= {f"together{n}" for n in range(6)}
    assert plugin.metric("nri_numa_late_seconds_count") >= len(names)
    assert plugin.json("/v1/status")["link"]["over"] == "cri"
    (told,) = plugin.json(f"/v1/explain/default/{names[0]}")["explanations"]
    assert any("ate by" in step or "n time" in step for step in told["steps"]), told["steps"]


def test_neighbours_leave_exclusive_cpus_and_get_them_back(
    bed: Containerd, start: StartPlugin
) -> None:
    plugin = start(over_cri(bed))
    cri = bed.cri
    neighbour = cri.pod("neighbour")
    pod = cri.run_pod("owner", annotations={f"{KEY}/cpus": "exclusive"})
    owner = cri.run(pod, resources=guaranteed(1))
    poll(lambda: cri.allowed(owner).cpus != str(MACHINE), "the owner's CPUs")
    owned = cri.allowed(owner).cpus
    settled(cri, neighbour, str(MACHINE - type(MACHINE).parse(owned)))
    cri.stop_pod(pod)
    settled(cri, neighbour, str(MACHINE))
    plugin.json("/v1/status")
    assert plugin.metric("nri_numa_internal_errors_total") == 0


def test_updates_of_a_neighbour_bring_no_owned_cpu_back(
    bed: Containerd, start: StartPlugin
) -> None:
    """The runtime remembers a set of before the owner, and writes it with each update of memory."""
    plugin = start(over_cri(bed))
    cri, owns = bed.cri, {f"{KEY}/cpus": "exclusive", f"{KEY}/numacpu": FIRST}
    first = cri.run(cri.run_pod("first", annotations=owns), resources=guaranteed(1))
    settled(cri, first, FIRST)
    neighbour = cri.run(cri.run_pod("neighbour"), resources=guaranteed(0.5))
    settled(cri, neighbour, LAST)
    cri.remove_pod(first.pod)
    settled(cri, neighbour, str(MACHINE))
    owns[f"{KEY}/numacpu"] = LAST
    cri.run(cri.run_pod("second", annotations=owns), resources=guaranteed(1))
    settled(cri, neighbour, FIRST)
    for mib in range(96, 102):  # more often than drift is put right before it is given up
        cri.update(neighbour, guaranteed(0.5, mib * MIB))
        settled(cri, neighbour, FIRST)
    poll(
        lambda: cri.info(neighbour)["runtimeSpec"]["linux"]["resources"]["cpu"]["cpus"] == FIRST,
        "the runtime's record",
    )
    assert plugin.metric("nri_numa_drift_fights_total") == 0


def test_a_resize_that_nobody_tells_of_is_decided_about(
    bed: Containerd, start: StartPlugin
) -> None:
    """As the kubelet resizes in place: the runtime is told, and whoever watches it is not."""
    plugin = start(over_cri(bed))
    cri = bed.cri
    asks = {f"{KEY}/policy": "single-numa-node"}
    owner = cri.run(cri.run_pod("sized-own", annotations=asks), resources=guaranteed(1))
    shared = cri.run(cri.run_pod("sized-shared", annotations=asks), resources=guaranteed(0.25))

    def has() -> dict[str, tuple[int, int]]:
        found = plugin.json("/v1/assignments")["containers"]
        return {c["pod"]: (c["cpuMilli"], c["memoryBytes"] // MIB) for c in found}

    def quota(container: Container) -> int:
        resources = cri.info(container)["runtimeSpec"]["linux"]["resources"]
        return int(resources["cpu"].get("quota", 0))

    before = {"sized-own": (1000, 64), "sized-shared": (250, 64)}
    poll(lambda: has() == before, "both as they were created")
    poll(lambda: quota(owner) == -1, "the owner's quota is lifted")
    poll(lambda: cri.allowed(owner).cpus != str(MACHINE), "the owner's CPUs")
    owned = cri.allowed(owner).cpus
    cri.update(owner, guaranteed(1, 96 * MIB))
    cri.update(shared, guaranteed(0.5, 128 * MIB))
    after = {"sized-own": (1000, 96), "sized-shared": (500, 128)}
    poll(lambda: has() == after, "both as they were resized")
    poll(lambda: quota(owner) == -1, "the owner's quota is lifted again")
    assert cri.allowed(owner).cpus == owned
    assert quota(shared) == 50_000
    assert plugin.metric("nri_numa_internal_errors_total") == 0


def test_a_refused_container_runs_and_that_is_said(bed: Containerd, start: StartPlugin) -> None:
    plugin = start(over_cri(bed))
    refused = listed(bed.cri, "refused", NO_CPU)
    poll(lambda: plugin.json("/v1/refusals")["refusals"], "the refusal")
    poll(lambda: plugin.metric("nri_numa_refused_running_total") == 1, "the count")
    assert bed.cri.running(refused)
    assert bed.cri.allowed(refused) == Seen(cpus=str(MACHINE), mems=bed.cri.allowed(refused).mems)
    (one,) = plugin.json("/v1/refusals")["refusals"]
    assert (one["pod"], one["container"]) == ("refused", "main")
    poll(
        lambda: any("starts nevertheless" in r.get("msg", "") for r in plugin.records()),
        "the log line",
    )


def test_restarts_of_agent_and_runtime_move_nothing(bed: Containerd, start: StartPlugin) -> None:
    plugin = start(over_cri(bed))
    container = listed(bed.cri, "stays", FIRST)
    settled(bed.cri, container, FIRST)
    plugin.restart(kill=True)
    assert bed.cri.allowed(container).cpus == FIRST
    bed.restart()
    assert bed.cri.allowed(container).cpus == FIRST
    settled(bed.cri, listed(bed.cri, "afterwards", LAST), LAST)
    assert bed.cri.allowed(container).cpus == FIRST


def test_what_was_placed_over_cri_is_given_back_over_cri(
    bed: Containerd, start: StartPlugin
) -> None:
    plugin = start(over_cri(bed))
    container = listed(bed.cri, "given", FIRST)
    settled(bed.cri, container, FIRST)
    plugin.terminate()
    done = plugin.release("-o", "json")
    assert done.returncode == 0, done.stderr
    (one,) = json.loads(done.stdout)["containers"]
    assert (one["pod"], one["result"]) == ("given", "released")
    assert bed.cri.allowed(container).cpus == str(MACHINE)


def test_from_cri_to_nri_and_back_nothing_moves(
    containerd: Containerd, cri: CRI, start_plugin: StartPlugin
) -> None:
    plugin = start_plugin(over_cri(containerd))
    pod = cri.run_pod("owner", annotations={f"{KEY}/cpus": "exclusive"})
    owner = cri.run(pod, resources=guaranteed(1))
    neighbour = cri.pod("neighbour")
    poll(lambda: cri.allowed(owner).cpus != str(MACHINE), "the owner's CPUs")
    owned = cri.allowed(owner).cpus
    shared = str(MACHINE - type(MACHINE).parse(owned))
    settled(cri, neighbour, shared)
    plugin.terminate()
    for runtime in ({}, over_cri(containerd)):
        plugin.write_config(runtime)
        plugin.start()
        assert (cri.allowed(owner).cpus, cri.allowed(neighbour).cpus) == (owned, shared)
        kinds = {c["pod"]: c["kind"] for c in plugin.json("/v1/assignments")["containers"]}
        assert kinds == {"owner": "exclusive", "neighbour": "unbound"}
        assert not [r for r in plugin.records() if r.get("gap") is True]
        plugin.terminate()
    assert (cri.allowed(owner).cpus, cri.allowed(neighbour).cpus) == (owned, shared)
