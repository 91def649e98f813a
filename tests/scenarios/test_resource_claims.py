"""Containers of a ResourceClaim own its CPUs, on its NUMA node and nowhere else."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_numa.agent.handler import AgentHandler
from nri_numa.dra.claims import claim_variable_name
from nri_numa.engine.accounting import slot_capacity
from nri_numa.engine.request.demand import claim_result_text, parse_slots
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.settings import Settings
from nri_numa.model.workload import Container, KubeletGrantOverriders, PodSandbox, Resources
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.versions import Event
from nri_numa.runtime import RequestRejected
from tests.beds.claim_bed import ClaimBed
from tests.beds.nri_requests import NRIRequests
from tests.beds.resource_claims import UID, config, result
from tests.beds.world import PREFIX, World, container, pod, resources, says, two_by_four, two_nodes

OTHER = "0a1b2c3d-0000-4000-8000-00000000000b"

usual = two_nodes


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
    world = two_nodes()
    world.place(*claiming("other", claim_result_text(numa_node, OTHER, 0, 1), cpus=1))
    cpus, mems = world.place(*claiming("a", claim_result_text(numa_node, UID, 0, 2)))
    assert CPUSet.parse(cpus) <= world.topology.numa_nodes[numa_node].cpus
    assert len(CPUSet.parse(cpus)) == 2
    assert mems == str(numa_node)


def test_results_on_two_numa_nodes_are_taken_as_they_are(world: World) -> None:
    both = (claim_result_text(0, UID, 0, 1), claim_result_text(1, UID, 1, 2))
    cpus, mems = world.place(*claiming("a", *both, cpus=3))
    per_node = [len(CPUSet.parse(cpus) & node.cpus) for node in world.topology.numa_nodes.values()]
    assert per_node == [1, 2]
    assert mems == "0-1"


def test_one_result_is_for_one_container_at_a_time(world: World) -> None:
    text = claim_result_text(1, UID, 0, 2)
    first = claiming("a", text)
    world.place(*first)
    rejected = world.reject(*claiming("a", text, part="helper"))
    says(rejected, "ClaimInUse", "pod default/a, container app")
    # Another request of the same claim is something else.
    world.place(*claiming("a", claim_result_text(0, UID, 1, 2), part="helper"))
    world.stop("a-app")
    world.place(*claiming("a", text, part="third"))


def test_a_container_that_starts_again_has_its_claim_again(world: World) -> None:
    world.ends_whole = False
    text = claim_result_text(1, UID, 0, 2)
    before = world.place(*claiming("a", text))
    of, made = claiming("a", text)
    assert world.place(of, replace(made, id="a-app-again")) == before


def test_a_new_process_finds_it_and_says_who_has_it(world: World) -> None:
    text = claim_result_text(1, UID, 0, 2)
    world.place(*claiming("a", text))
    world.boot()
    assert world.allocation("a-app").slots == text
    assert world.reject(*claiming("b", text)).reason == "ClaimInUse"


LIMIT = "2 CPUs of a ResourceClaim, expected 2 CPUs, as in the claim"


@pytest.mark.parametrize(
    ("text", "cpus", "asks", "reason", "said"),
    [
        (claim_result_text(0, UID, 0, 2), 1, {}, "SlotsMismatch", LIMIT),
        (
            claim_result_text(0, UID, 0, 1),
            1,
            {"numacpu": "1"},
            "SlotsConflict",
            "1 CPU of a ResourceClaim",
        ),
        (claim_result_text(0, UID, 0, 5), 5, {}, "NotEnoughCPUs", "5 exclusive CPUs needed"),
    ],
)
def test_what_does_not_fit_a_claim_is_rejected(
    world: World, text: str, cpus: float, asks: dict[str, str], reason: str, said: str
) -> None:
    says(world.reject(*claiming("a", text, cpus=cpus, asks=asks)), reason, said)


def test_a_claim_that_is_not_prepared_is_rejected_with_its_problem(world: World) -> None:
    of, made = claiming("a", "")
    made = replace(made, claim_problem="its claim is gone")
    says(world.reject(of, made), "ClaimNotPrepared", "app: its claim is gone")


@pytest.mark.parametrize(
    "text",
    [
        f"numa0-claim-{UID}-0",
        f"numa0-claim-{UID}-0x",
        "numa0-claim-0x2",
        f"{claim_result_text(0, UID, 0, 1)},{claim_result_text(1, UID, 0, 1)}",
        f"{claim_result_text(0, UID, 0, 1)},slot-1",
        ",".join(claim_result_text(0, UID, n, 1) for n in range(33)),
    ],
)
def test_texts_that_name_no_results(text: str) -> None:
    assert isinstance(parse_slots(text), str)
    assert two_nodes().reject(*claiming("a", text)).reason == "InvalidSlots"


def test_slots_of_the_device_plugin_stay_what_they_are(world: World) -> None:
    world.place(*claiming("plugin", "slot-0,slot-1"))
    world.place(*claiming("claim", claim_result_text(0, UID, 0, 1), cpus=1))


def granted(world: World, of: PodSandbox, made: Container, cpus: str) -> Container:
    """The container as the kubelet's static policy sends it; its pod is Guaranteed."""
    world.kubelet({(of.name, made.name): cpus})
    return replace(made, resources=replace(made.resources, cpus=cpus))


def test_a_grant_of_the_kubelet_that_fits_the_claim_is_what_it_gets(world: World) -> None:
    """With the static policy each Guaranteed pod with whole CPUs has a grant, claims or not."""
    of, made = claiming("a", claim_result_text(1, UID, 0, 2))
    assert world.place(of, granted(world, of, made, "5,7")) == ("5,7", "1")
    assert world.allocation("a-app").slots
    world.check()
    # The scheduler counts it once, as held by a claim.
    made_offer = slot_capacity(world.agent.current.desired)
    assert made_offer.allocated == {0: 0, 1: 2}
    other, plain = claiming("b", claim_result_text(1, OTHER, 0, 2))
    assert world.place(other, plain) == ("4,6", "1")
    # The kubelet's loop comes round.
    assert world.update("a-app", Resources(cpus="5,7")) is None
    assert world.has("a-app") == ("5,7", "1")
    assert world.allocation("a-app").slots


def test_a_grant_elsewhere_is_rejected_with_what_to_do(world: World) -> None:
    """Run there it would have CPUs of a NUMA node that the scheduler counts for others."""
    of, made = claiming("a", claim_result_text(1, UID, 0, 2))
    rejected = world.reject(of, granted(world, of, made, "2-3"))
    assert rejected.reason == "KubeletPinned"
    assert "has 2 CPUs, 2 on NUMA node 1, but the kubelet granted it CPUs 2-3" in rejected.message
    assert "expected cpuManagerPolicy none, a pod that is not Guaranteed" in rejected.message
    of, made = claiming("one", claim_result_text(1, OTHER, 0, 1), cpus=1)
    rejected = world.reject(of, granted(world, of, made, "1"))
    assert "has 1 CPU, 1 on NUMA node 1, but the kubelet granted it CPU 1 by" in rejected.message


def test_a_grant_elsewhere_can_be_overridden_or_let_be() -> None:
    text = claim_result_text(1, UID, 0, 2)
    world = two_nodes()
    of, made = claiming("a", text, asks={"on-failure": "unpinned"})
    assert world.place(of, granted(world, of, made, "2-3")) == ("2-3", "")
    world = World(two_by_four(), Settings(kubelet_override=KubeletGrantOverriders.ANNOTATED))
    of, made = claiming("a", text)
    cpus, mems = world.place(of, granted(world, of, made, "2-3"))
    assert CPUSet.parse(cpus) <= world.topology.numa_nodes[1].cpus
    assert mems == "1"


POD = pb.PodSandbox(id="s-web", uid="uid-web", namespace="default", name="web")


def message(id: str = "c-web", *, claim: str = UID, cpus: int = 4) -> pb.Container:
    made = pb.Container(id=id, pod_sandbox_id="s-web", name="app")
    made.env.extend(["PATH=/bin", f"{claim_variable_name(claim, 0)}=cpus"])
    cpu = made.linux.resources.cpu
    cpu.shares.value, cpu.quota.value, cpu.period.value = 1024 * cpus, 100_000 * cpus, 100_000
    return made


@pytest.fixture
def bed(tmp_path: Path) -> ClaimBed:
    made = ClaimBed(tmp_path)
    made.world.ends_whole = False
    made.objects[UID] = made.claim(result(), configs=[config({"smt": "isolate"})])
    made.prepare()
    return made


def link(bed: ClaimBed) -> NRIRequests:
    return NRIRequests(AgentHandler(bed.world.agent, sources=[bed.book], extensions=[bed.book]))


def cpus_of(bed: ClaimBed, id: str = "c-web") -> CPUSet:
    allocation = bed.world.allocation(id)
    assert "claim" in allocation.slots
    return allocation.cpus


def test_when_it_is_created_resized_and_met_again(bed: ClaimBed) -> None:
    requests = link(bed)
    request = pb.CreateContainerRequest(pod=POD, container=message())
    answer = pb.CreateContainerResponse.FromString(requests.create_container(request))
    own = cpus_of(bed)
    assert answer.adjust.linux.resources.cpu.cpus == str(own)
    assert (len(own), own <= CPUSet.parse("9-15")) == (4, True)
    variables = {one.key: one.value for one in answer.adjust.env}
    assert variables[f"DRA_CPUSET_{UID}"] == str(own)

    update = pb.UpdateContainerRequest(pod=POD, container=message())
    update.linux_resources.cpu.shares.value = 4096
    requests.update_container(update)
    for event in (Event.START_CONTAINER, Event.POST_START_CONTAINER):
        requests.container_event(event, POD, message())
    assert cpus_of(bed) == own

    # Agent and book are new processes, which know what is on disk.
    bed.world.boot()
    bed.boot()
    running = message()
    running.linux.resources.cpu.cpus = str(own)
    other = pb.Container(id="c-other", pod_sandbox_id="s-gone", name="app")
    link(bed).synchronize([POD], [running, other])
    assert cpus_of(bed) == own


def test_a_container_that_started_while_nobody_was_there(bed: ClaimBed) -> None:
    running = message()
    running.linux.resources.cpu.cpus = "0-15"
    link(bed).synchronize([POD], [running])
    assert len(cpus_of(bed)) == 4


def test_what_does_not_count_is_rejected(bed: ClaimBed) -> None:
    made = message(claim=UID[:-1] + "f")
    with pytest.raises(RequestRejected, match="ClaimNotPrepared"):
        link(bed).create_container(pb.CreateContainerRequest(pod=POD, container=made))
