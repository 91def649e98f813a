"""Containers of a ResourceClaim own its CPUs, on its NUMA node and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from nri_numa.engine.accounting import slot_capacity
from nri_numa.engine.request.demand import NOT_PREPARED, read_slots, result_text
from nri_numa.machine.synthetic import synthetic
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.settings import Settings
from nri_numa.model.workload import Container, KubeletOverride, PodSandbox, Resources
from tests.beds.world import PREFIX, World, container, pod, resources

UID = "0a1b2c3d-0000-4000-8000-00000000000a"
OTHER = "0a1b2c3d-0000-4000-8000-00000000000b"


def world_of() -> World:
    """Two NUMA nodes, 0-3 and 4-7."""
    return World(synthetic(sockets=2, numa_per_socket=1, cores_per_numa=4, threads=1))


def claiming(
    name: str,
    *results: str,
    cpus: float = 2,
    asks: Mapping[str, str] | None = None,
    part: str = "app",
) -> tuple[PodSandbox, Container]:
    of = pod(name, asks)
    made = container(of, part, wants=resources(cpus, 0.1))
    return of, replace(made, annotations={f"{PREFIX}slots": ",".join(results)})


@pytest.mark.parametrize("numa_node", [0, 1])
def test_its_cpus_are_on_the_numa_node_that_the_scheduler_chose(numa_node: int) -> None:
    world = world_of()
    world.place(*claiming("other", result_text(numa_node, OTHER, 0, 1), cpus=1))
    cpus, mems = world.place(*claiming("a", result_text(numa_node, UID, 0, 2)))
    assert CPUSet.parse(cpus) <= world.topology.numa_nodes[numa_node].cpus
    assert len(CPUSet.parse(cpus)) == 2
    assert mems == str(numa_node)
    world.check()


def test_results_on_two_numa_nodes_are_taken_as_they_are() -> None:
    world = world_of()
    both = (result_text(0, UID, 0, 1), result_text(1, UID, 1, 2))
    cpus, mems = world.place(*claiming("a", *both, cpus=3))
    per_node = [len(CPUSet.parse(cpus) & node.cpus) for node in world.topology.numa_nodes.values()]
    assert per_node == [1, 2]
    assert mems == "0-1"


def test_one_result_is_for_one_container_at_a_time() -> None:
    world = world_of()
    text = result_text(1, UID, 0, 2)
    first = claiming("a", text)
    world.place(*first)
    refused = world.refuse(*claiming("a", text, part="helper"))
    assert refused.reason == "ClaimInUse"
    assert "pod default/a, container app" in refused.message
    # Another request of the same claim is something else.
    world.place(*claiming("a", result_text(0, UID, 1, 2), part="helper"))
    world.stop("a-app")
    world.place(*claiming("a", text, part="third"))
    world.check()


def test_a_container_that_starts_again_has_its_claim_again() -> None:
    world = world_of()
    text = result_text(1, UID, 0, 2)
    before = world.place(*claiming("a", text))
    of, made = claiming("a", text)
    assert world.place(of, replace(made, id="a-app-again")) == before


def test_a_new_process_finds_it_and_says_who_has_it() -> None:
    world = world_of()
    text = result_text(1, UID, 0, 2)
    world.place(*claiming("a", text))
    world.boot()
    assert world.allocation("a-app").slots == text
    assert world.refuse(*claiming("b", text)).reason == "ClaimInUse"


def test_what_is_said_of_a_claim_that_does_not_count() -> None:
    world = world_of()
    refused = world.refuse(*claiming("a", f"{NOT_PREPARED}its claim is gone"))
    assert (refused.reason, refused.message) == (
        "ClaimNotPrepared",
        "pod default/a, container app: its claim is gone",
    )


def test_the_cpu_limit_must_be_what_the_claim_has() -> None:
    refused = world_of().refuse(*claiming("a", result_text(0, UID, 0, 2), cpus=1))
    assert refused.reason == "SlotsMismatch"
    assert "2 CPUs of a ResourceClaim, expected 2000m: as many as the claim has" in refused.message


def test_lists_of_cpus_contradict_a_claim() -> None:
    text = result_text(0, UID, 0, 1)
    refused = world_of().refuse(*claiming("a", text, cpus=1, asks={"numacpu": "1"}))
    assert refused.reason == "SlotsConflict"
    assert "1 CPU of a ResourceClaim" in refused.message


def test_more_than_the_numa_node_has_is_refused() -> None:
    world = world_of()
    world.refuse(*claiming("a", result_text(0, UID, 0, 5), cpus=5))
    world.check()


@pytest.mark.parametrize(
    "text",
    [
        f"numa0-claim-{UID}-0",
        f"numa0-claim-{UID}-0x",
        "numa0-claim-0x2",
        f"{result_text(0, UID, 0, 1)},{result_text(1, UID, 0, 1)}",
        f"{result_text(0, UID, 0, 1)},slot-1",
        ",".join(result_text(0, UID, n, 1) for n in range(33)),
    ],
)
def test_texts_that_name_no_results(text: str) -> None:
    assert isinstance(read_slots(text), str)
    assert world_of().refuse(*claiming("a", text)).reason == "InvalidSlots"


def test_slots_of_the_device_plugin_stay_what_they_are() -> None:
    world = world_of()
    world.place(*claiming("plugin", "slot-0,slot-1"))
    world.place(*claiming("claim", result_text(0, UID, 0, 1), cpus=1))
    world.check()


def granted(world: World, of: PodSandbox, made: Container, cpus: str) -> Container:
    """The container as the kubelet's static policy sends it; its pod is Guaranteed."""
    world.kubelet({(of.name, made.name): cpus})
    return replace(made, resources=replace(made.resources, cpus=cpus))


def test_a_grant_of_the_kubelet_that_fits_the_claim_is_what_it_gets() -> None:
    """With the static policy each Guaranteed pod with whole CPUs has a grant, claims or not."""
    world = world_of()
    of, made = claiming("a", result_text(1, UID, 0, 2))
    assert world.place(of, granted(world, of, made, "5,7")) == ("5,7", "1")
    assert world.allocation("a-app").slots
    world.check()
    # The scheduler counts it once, as held by a claim.
    made_offer = slot_capacity(world.agent.machine, world.agent.state)
    assert made_offer.held == {0: 0, 1: 2}
    other, plain = claiming("b", result_text(1, OTHER, 0, 2))
    assert world.place(other, plain) == ("4,6", "1")
    # The kubelet's loop comes round.
    assert world.update("a-app", Resources(cpus="5,7")) is None
    assert world.has("a-app") == ("5,7", "1")
    assert world.allocation("a-app").slots
    world.check()


def test_a_grant_elsewhere_is_refused_with_what_to_do() -> None:
    """Run there it would have CPUs of a NUMA node that the scheduler counts for others."""
    world = world_of()
    of, made = claiming("a", result_text(1, UID, 0, 2))
    refused = world.refuse(of, granted(world, of, made, "2-3"))
    assert refused.reason == "KubeletPinned"
    assert "has 2 CPUs, 2 on NUMA node 1, but the kubelet granted it CPUs 2-3" in refused.message
    assert "expected cpuManagerPolicy none, a pod that is not Guaranteed" in refused.message
    of, made = claiming("one", result_text(1, OTHER, 0, 1), cpus=1)
    refused = world.refuse(of, granted(world, of, made, "1"))
    assert "has 1 CPU, 1 on NUMA node 1, but the kubelet granted it CPU 1 by" in refused.message


def test_a_grant_elsewhere_can_be_overridden_or_let_be() -> None:
    text = result_text(1, UID, 0, 2)
    world = world_of()
    of, made = claiming("a", text, asks={"on-failure": "unpinned"})
    assert world.place(of, granted(world, of, made, "2-3")) == ("2-3", "")
    world = World(
        synthetic(sockets=2, numa_per_socket=1, cores_per_numa=4, threads=1),
        Settings(kubelet_override=KubeletOverride.ANNOTATED),
    )
    of, made = claiming("a", text)
    cpus, mems = world.place(of, granted(world, of, made, "2-3"))
    assert CPUSet.parse(cpus) <= world.topology.numa_nodes[1].cpus
    assert mems == "1"
    world.check()
