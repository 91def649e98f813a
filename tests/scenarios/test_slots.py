"""Containers that hold slots of the device plugin own as many CPUs, and nobody can make them up."""

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from nri_numa.engine.accounting import slot_capacity
from nri_numa.engine.request.demand import MAX_SLOTS, parse_slots
from nri_numa.engine.state import ContainerKind
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import human_milli
from nri_numa.model.settings import (
    AnnotationPermission,
    CPUAmount,
    CPUWithholdingQuota,
    KubeletRules,
    OnDenied,
    QuotasAndPoolFloor,
    Rule,
    Settings,
)
from nri_numa.model.workload import SMT, Container, PodSandbox, QoSClass, Resources
from tests.beds.world import PREFIX, World, container, pod, resources, says, two_by_four
from tests.machines import named as machines


def usual(settings: Settings | None = None, threads: int = 1) -> World:
    """Two NUMA nodes, without hyperthreads 0-3 and 4-7."""
    return World(two_by_four(threads=threads), settings)


def holding(
    name: str,
    slots: str,
    cpus: float = 1,
    asks: Mapping[str, str] | None = None,
    *,
    wants: Resources | None = None,
    qos: QoSClass = QoSClass.GUARANTEED,
) -> tuple[PodSandbox, Container]:
    of = pod(name, asks, qos=qos)
    made = container(of, wants=wants or resources(cpus, 0.1))
    return of, replace(made, annotations={f"{PREFIX}slots": slots})


@pytest.mark.parametrize("asks", [{}, {"scope": "pod"}])
def test_no_annotation_of_the_pod_is_needed(world: World, asks: dict[str, str]) -> None:
    world.put("neighbour")
    cpus, mems = world.place(*holding("a", "slot-4,slot-9", 2, asks))
    assert len(CPUSet.parse(cpus)) == 2
    assert mems in ("0", "1")
    allocation = world.allocation("a-app")
    assert allocation.kind is ContainerKind.EXCLUSIVE
    assert allocation.slots == "slot-4,slot-9"
    assert world.live["a-app"].resources.cpu_quota == -1


def test_the_device_plugin_is_told_which_annotation() -> None:
    world = usual(Settings(prefix="numa.example.org"))
    assert world.agent.current.machine.slots_annotation_key == "numa.example.org/slots"
    of, made = holding("a", "")
    key = world.agent.current.machine.slots_annotation_key
    cpus, _ = world.place(of, replace(made, annotations={key: "slot-0"}))
    assert len(CPUSet.parse(cpus)) == 1


def test_without_slots_the_same_pod_shares(world: World) -> None:
    of, made = holding("a", "")
    assert world.place(of, made) == ("", "")


def test_a_burstable_pod_owns_what_its_request_pays_for(world: World) -> None:
    request = Resources(cpu_shares=2048)
    cpus, _ = world.place(*holding("a", "slot-0,slot-1", wants=request, qos=QoSClass.BURSTABLE))
    assert len(CPUSet.parse(cpus)) == 2
    limit = replace(request, cpu_quota=300_000, cpu_period=100_000)
    three = holding("b", "slot-2,slot-3,slot-4", wants=limit, qos=QoSClass.BURSTABLE)
    assert world.reject(*three).reason == "CPUsNotRequested"


def test_nobody_can_claim_slots_by_an_annotation_of_the_pod(world: World) -> None:
    """Not even where the runtime copies annotations of pods to their containers."""
    of, made = holding("forger", "slot-0", 1, {"slots": "slot-0"})
    for each in (made, replace(made, annotations={})):
        rejected = world.reject(of, each)
        assert rejected.reason == "InvalidAnnotation"
        assert "slots is 'slot-0' (annotation numa.kubernetes.io/slots)" in rejected.message
    lenient = AnnotationPermission(
        name="permissions[1]", allowed_keys=(), on_denied=OnDenied.IGNORE
    )
    assert usual(Settings(permissions=(lenient,))).reject(of, made).reason == "InvalidAnnotation"


def test_annotations_say_where_and_how() -> None:
    world = usual(threads=2)
    asks = {"policy": "single-numa-node", "smt": "isolate"}
    world.place(*holding("a", "slot-0,slot-1", 2, asks))
    allocation = world.allocation("a-app")
    assert (len(allocation.cpus), len(allocation.idle_siblings)) == (2, 2)
    assert len(allocation.numa_nodes) == 1


@pytest.mark.parametrize(
    ("asks", "slots", "words"),
    [
        ({"numacpu": "0"}, "slot-0", "numacpu is '0' (annotation numa.kubernetes.io/numacpu)"),
        ({"cpus": "shared"}, "slot-0", "cpus is 'shared'"),
        ({"bind": "none"}, "slot-0", "bind is 'none'"),
        ({"scope": "pod"}, "numa0-slot-0", "scope is 'pod'"),
    ],
)
def test_contradictions_are_rejected(asks: dict[str, str], slots: str, words: str) -> None:
    rejected = usual().reject(*holding("a", slots, 1, asks))
    says(rejected, "SlotsConflict", words, "1 slot of the device plugin")


def test_rules_contradict_and_defaults_give_way() -> None:
    defaults = Settings(defaults={"bind": "none", "cpus": "shared"})
    assert usual(defaults).place(*holding("a", "slot-0"))[0] in [str(i) for i in range(8)]
    ruled = Settings(rules=(Rule(values={"cpus": "shared"}),))
    assert "(rule 1)" in usual(ruled).reject(*holding("a", "slot-0")).message


@pytest.mark.parametrize("cpus", [0, 0.5, 1.5, 1, 3])
def test_as_many_cpus_as_slots(cpus: float) -> None:
    rejected = usual().reject(*holding("a", "slot-0,slot-1", cpus))
    assert rejected.reason == "SlotsMismatch"
    value = human_milli(int(1000 * cpus)) if cpus else "not set"
    assert f"cpu is {value} and it holds 2 slots of the device plugin, expected 2 CPUs" in (
        rejected.message
    )


def test_a_permission_lets_the_request_be_smaller() -> None:
    """Where the operator took exclusive CPUs out of what the scheduler counts as cpu."""
    carved = Settings(
        permissions=(AnnotationPermission(name="permissions[0]", allow_unrequested_cpus=True),)
    )
    for cpus in (0, 0.5):
        world = usual(carved)
        assert len(CPUSet.parse(world.place(*holding("a", "slot-0,slot-1", cpus))[0])) == 2
    assert usual(carved).reject(*holding("a", "slot-0", 2)).reason == "SlotsMismatch"


def test_more_cpus_than_shares_can_tell() -> None:
    topology = machines.dual_no_smt(cores_per_numa=160)
    slots = ",".join(f"slot-{n}" for n in range(300))
    most = Resources(cpu_shares=262_144)
    world = World(topology)
    cpus, _ = world.place(*holding("a", slots, wants=most, qos=QoSClass.BURSTABLE))
    assert len(CPUSet.parse(cpus)) == 300


@pytest.mark.parametrize(
    "text",
    [
        "cpu-1", "slot-", "slot-1,", "slot-1,slot-1", "slot-1 ", "numa-slot-1", "slot-١",
        "x" * 200_000, ",".join(f"slot-{n}" for n in range(5000)),
    ],
)  # fmt: skip
def test_ids_that_cannot_be_read_are_rejected(text: str) -> None:
    rejected = usual().reject(*holding("a", text))
    assert rejected.reason == "InvalidSlots"
    assert len(rejected.message) < 600


def test_the_numa_node_that_the_kubelet_chose_binds(world: World) -> None:
    for name, slots, cpus in (
        ("a", "numa1-slot-0,numa1-slot-1", "4-5"),
        ("b", "numa0-slot-3,numa1-slot-7", "0,6"),
    ):
        assert world.place(*holding(name, slots, 2))[0] == cpus
    # One is left there, and the others would do if they had not been chosen.
    says(world.reject(*holding("c", "numa1-slot-2,numa1-slot-3", 2)), "NotEnoughCPUs")
    # What two NUMA nodes were chosen for cannot be on one.
    single = {"policy": "single-numa-node"}
    rejected = world.reject(*holding("d", "numa0-slot-0,numa1-slot-2", 2, single))
    assert rejected.reason == "TopologyAffinityError"


def test_ids_of_both_sorts_bind_nothing() -> None:
    read = parse_slots("slot-1,numa1-slot-2")
    assert not isinstance(read, str)
    assert (read.count, read.by_node) == (2, {})


def test_slots_have_a_limit() -> None:
    ids = [f"slot-{number}" for number in range(MAX_SLOTS + 1)]
    read = parse_slots(",".join(ids[1:]))
    assert not isinstance(read, str)
    assert read.count == MAX_SLOTS
    assert isinstance(parse_slots(",".join(ids)), str)


def test_slots_outlive_the_agent_and_the_checkpoint(world: World) -> None:
    world.place(*holding("a", "slot-0"))
    world.put("b", {"cpus": "exclusive"}, 1)
    before = {id: world.has(id) for id in ("a-app", "b-app")}
    for key in (world.key, b"made anew"):
        world.restart()
        allocations = world.agent.current.state.allocations
        assert (allocations["a-app"].slots, allocations["b-app"].slots) == ("slot-0", "")
        assert {id: world.has(id) for id in before} == before
        world.store.documents.clear()
        world.key = key


def test_a_container_of_a_gap_gets_its_slots(world: World) -> None:
    of, made = holding("late", "slot-0,slot-1", 2)
    world.meet(of, made)
    world.synchronize()
    assert len(world.allocation("late-app").cpus) == 2


def test_a_forged_decision_is_not_more_than_its_slots(world: World) -> None:
    of, made = holding("forger", "slot-0")
    claim = (
        '{"format":2,"cpus":"0-3","mems":"0","policy":"none","kind":"exclusive",'
        '"numaNodes":"0","reason":"x"}'
    )
    wide = replace(made.resources, cpus="0-3")
    marked = {**made.annotations, f"{PREFIX}assigned": claim}
    world.meet(of, replace(made, resources=wide, annotations=marked))
    world.synchronize()
    assert len(world.allocation("forger-app").cpus) <= 1


def test_a_resize_would_part_cpus_from_slots(world: World) -> None:
    world.place(*holding("a", "slot-0,slot-1", 2))
    before = world.has("a-app")
    for cpus in (1, 3):
        rejected = world.update_rejected("a-app", resources(cpus, 0.1))
        assert rejected.message.startswith("resize rejected: pod default/a, container app: cpu is")
        assert rejected.reason == "SlotsMismatch"
    assert world.update("a-app", resources(2, 0.2)) is None  # memory alone
    assert world.has("a-app") == before
    assert world.allocation("a-app").slots == "slot-0,slot-1"


def counts(world: World) -> tuple[dict[int, int], dict[int, int]]:
    found = slot_capacity(world.agent.current.desired)
    return found.allocated, found.free


def test_what_is_offered() -> None:
    """The sum stays while slots are taken; what others own is no part of it."""
    world = usual(Settings(reserved_cpus=CPUSet([0])))
    assert counts(world) == ({0: 0, 1: 0}, {0: 3, 1: 4})
    world.place(*holding("a", "slot-0,slot-1", 2))
    assert slot_capacity(world.agent.current.desired).total_slots == 7
    world.put("b", {"cpus": "exclusive"}, 3)
    assert slot_capacity(world.agent.current.desired).total_slots == 4
    world.stop("a-app")
    assert slot_capacity(world.agent.current.desired).total_slots == 4


def test_the_floor_of_the_machine_is_taken_where_most_is_free(world: World) -> None:
    assert counts(world) == ({0: 0, 1: 0}, {0: 4, 1: 3})
    floor = Settings(limits=QuotasAndPoolFloor(pool=CPUAmount(3)))
    assert counts(usual(floor))[1] == {0: 3, 1: 2}


def test_quotas_and_the_default_for_siblings_count() -> None:
    quota = QuotasAndPoolFloor(quota=CPUWithholdingQuota(exclusive=CPUAmount(2)))
    assert sum(counts(usual(Settings(limits=quota)))[1].values()) == 2
    isolate = Settings(defaults={"smt": SMT.ISOLATE.value})
    assert sum(counts(usual(isolate, threads=2))[1].values()) == 4  # a quarter may be idle
    assert sum(counts(usual(isolate))[1].values()) == 7
    kubelet = Settings(kubelet=KubeletRules(cpu_order=True))
    assert sum(counts(usual(kubelet))[1].values()) == 7
