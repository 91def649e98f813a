"""``nri-numa run --link cri`` against real containerds whose NRI is off, and the way back to NRI.

Over CRI nobody is asked before a start, so what is awaited is the late update: the kernel's own
word, in ``/proc/PID/status``, and that it stays so.
"""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from nri_numa.cri.client import CRIClient
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.workload import ContainerUpdate
from tests.beds.containerd import Containerd
from tests.beds.containerds import ContainerdBeds, start_plugins, without_pods
from tests.beds.cri import CRI, MIB, Container, Seen, guaranteed, poll
from tests.beds.plugin_process import StartPlugin
from tests.machines.cpus import FIRST, LAST, MACHINE, NO_CPU


@pytest.fixture
def bed(request: pytest.FixtureRequest, beds: ContainerdBeds, series: str) -> Iterator[Containerd]:
    """A running containerd without pods, whose NRI is off."""
    yield from without_pods(request, beds, series, nri=False)


@pytest.fixture
def start(request: pytest.FixtureRequest, bed: Containerd) -> Iterator[StartPlugin]:
    yield from start_plugins(request, bed)


def over_cri(containerd: Containerd) -> dict[str, object]:
    return {
        "runtime": {"link": "cri", "criSocket": str(containerd.socket)},
        "quotas": {"listedCPUs": len(MACHINE)},
    }


def owner_of(cri: CRI) -> tuple[Container, CPUSet]:
    """A container with exclusive CPUs, and which it was given."""
    owner = cri.owner()
    poll(lambda: cri.cpus(owner) != MACHINE, "the owner's CPUs")
    return owner, cri.cpus(owner)


def settled(cri: CRI, container: Container, cpus: str) -> None:
    """Wait until the kernel says that the container may use these CPUs."""
    poll(lambda: cri.allowed(container).cpus == cpus, f"{container.pod.name} on CPUs {cpus}")


def test_pods_that_start_together_get_their_cpus(bed: Containerd, start: StartPlugin) -> None:
    assert not bed.nri_socket.exists()
    before = bed.cri.pod("before", numacpu=LAST)
    assert bed.cri.allowed(before).cpus == str(MACHINE)
    plugin = start(over_cri(bed))
    settled(bed.cri, before, LAST)  # found by the listing at the start

    def run(n: int) -> Container:
        return bed.cri.pod(f"together{n}", numacpu=FIRST if n % 2 else LAST)

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
    def measured() -> list[str]:
        found = plugin.json("/v1/assignments")["containers"]
        return [c["pod"] for c in found if c.get("startDelay") is not None]

    names = poll(measured, "lateness")
    assert set(names) <= {f"together{n}" for n in range(6)}
    assert plugin.metric("nri_numa_late_start_seconds_count") >= len(names)
    assert plugin.json("/v1/status")["link"]["interface"] == "cri"
    (told,) = plugin.json(f"/v1/explain/default/{names[0]}")["explanations"]
    assert any("tart delay" in step or "n time" in step for step in told["decisionSteps"]), told[
        "decisionSteps"
    ]


def test_neighbours_leave_exclusive_cpus_and_return(bed: Containerd, start: StartPlugin) -> None:
    plugin = start(over_cri(bed))
    cri = bed.cri
    neighbour = cri.pod("neighbour")
    owner, owned = owner_of(cri)
    cri.settles(neighbour, MACHINE - owned)
    cri.remove_pod(owner.pod)
    cri.settles(neighbour, MACHINE)
    plugin.json("/v1/status")
    assert plugin.metric("nri_numa_internal_errors_total") == 0


def test_updates_of_a_neighbour_take_no_owned_cpu(bed: Containerd, start: StartPlugin) -> None:
    """The runtime remembers a set of before the owner, and writes it with each update of memory."""
    plugin = start(over_cri(bed))
    cri = bed.cri
    first = cri.pod("first", limit=1, cpus="exclusive", numacpu=FIRST)
    settled(cri, first, FIRST)
    neighbour = cri.pod("neighbour", limit=0.5)
    settled(cri, neighbour, LAST)
    cri.remove_pod(first.pod)
    cri.settles(neighbour, MACHINE)
    cri.pod("second", limit=1, cpus="exclusive", numacpu=LAST)
    settled(cri, neighbour, FIRST)
    for mib in range(96, 102):  # more often than drift is put right before it is given up
        cri.update(neighbour, guaranteed(0.5, mib * MIB))
        settled(cri, neighbour, FIRST)
    poll(
        lambda: cri.info(neighbour)["runtimeSpec"]["linux"]["resources"]["cpu"]["cpus"] == FIRST,
        "the runtime's record",
    )
    assert plugin.metric("nri_numa_drift_repairs_abandoned_total") == 0


def test_a_resize_that_nobody_reports_is_decided(bed: Containerd, start: StartPlugin) -> None:
    """As the kubelet resizes in place: the runtime is told, and whoever watches it is not."""
    plugin = start(over_cri(bed))
    cri = bed.cri
    owner = cri.pod("sized-own", limit=1, policy="single-numa-node")
    shared = cri.pod("sized-shared", limit=0.25, policy="single-numa-node")

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


def test_a_rejected_container_runs_and_that_is_said(bed: Containerd, start: StartPlugin) -> None:
    plugin = start(over_cri(bed))
    rejected = bed.cri.pod("refused", numacpu=NO_CPU)
    poll(lambda: plugin.json("/v1/rejections")["rejections"], "the refusal")
    poll(lambda: plugin.metric("nri_numa_rejected_running_total") == 1, "the count")
    assert bed.cri.running(rejected)
    assert bed.cri.allowed(rejected) == Seen(cpus=str(MACHINE), mems=bed.cri.allowed(rejected).mems)
    (one,) = plugin.json("/v1/rejections")["rejections"]
    assert (one["pod"], one["container"]) == ("refused", "main")
    poll(lambda: bool(plugin.records("rejected container started over CRI")), "the log line")


def test_restarts_of_agent_and_runtime_move_nothing(bed: Containerd, start: StartPlugin) -> None:
    plugin = start(over_cri(bed))
    container = bed.cri.pod("stays", numacpu=FIRST)
    settled(bed.cri, container, FIRST)
    plugin.restart(kill=True)
    assert bed.cri.allowed(container).cpus == FIRST
    bed.restart()
    assert bed.cri.allowed(container).cpus == FIRST
    settled(bed.cri, bed.cri.pod("afterwards", numacpu=LAST), LAST)
    assert bed.cri.allowed(container).cpus == FIRST


def test_what_was_placed_over_cri_is_released_over_cri(bed: Containerd, start: StartPlugin) -> None:
    plugin = start(over_cri(bed))
    container = bed.cri.pod("given", numacpu=FIRST)
    settled(bed.cri, container, FIRST)
    plugin.terminate()
    done = plugin.release("-o", "json")
    assert done.returncode == 0, done.stderr
    (one,) = json.loads(done.stdout)["containers"]
    assert (one["pod"], one["result"]) == ("given", "released")
    assert bed.cri.allowed(container).cpus == str(MACHINE)


def test_what_containerd_says_of_what_it_cannot_do(bed: Containerd) -> None:
    container = bed.cri.pod("client")

    async def use() -> None:
        async with CRIClient(str(bed.socket)) as client:
            failed = await client.update_container(ContainerUpdate(container.id, "4000"))
            assert failed is not None
            assert not failed.unknown
            absent = "f" * 64
            failed = await client.update_container(ContainerUpdate(absent, "1"))
            assert failed is not None
            assert failed.unknown
            assert await client.container_status(absent) is None

    asyncio.run(use())


def test_no_link_moves_pods(containerd: Containerd, cri: CRI, start_plugin: StartPlugin) -> None:
    plugin = start_plugin(over_cri(containerd))
    owner, owned = owner_of(cri)
    neighbour, shared = cri.pod("neighbour"), MACHINE - owned
    cri.settles(neighbour, shared)
    plugin.terminate()
    for runtime in ({}, over_cri(containerd)):
        plugin.write_config(runtime)
        plugin.start()
        assert (cri.cpus(owner), cri.cpus(neighbour)) == (owned, shared)
        kinds = {c["pod"]: c["kind"] for c in plugin.json("/v1/assignments")["containers"]}
        assert kinds == {"owner": "exclusive", "neighbour": "unpinned"}
        assert not [r for r in plugin.records() if r.get("missed_start") is True]
        plugin.terminate()
    assert (cri.cpus(owner), cri.cpus(neighbour)) == (owned, shared)
