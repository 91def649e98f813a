"""Beside the kubelet's static managers: what they granted is theirs, and nobody else gets it.

A pod that the kubelet granted CPUs to comes with a cpuset, as through a real kubelet; every other
one comes with the kubelet's shared set.
"""

from functools import partial

import pytest
from msgspec.structs import replace

from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.explain import sentences
from nri_numa.engine.explain.explanation import explain_allocation
from nri_numa.engine.foreign_pins import shown_kind
from nri_numa.engine.state import ContainerKind
from nri_numa.model.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.model.settings import Rule, Settings
from nri_numa.model.workload import (
    KubeletGrantOverriders,
    KubeletGrants,
    PodSandbox,
    QoSClass,
    Resources,
)
from tests.beds.world import OWN, World, container, pod, resources, says
from tests.machines import named as machines

ANNOTATED = Settings(kubelet_override=KubeletGrantOverriders.ANNOTATED)
APP = "app"

usual = partial(World, machines.single_no_smt())


def kubelets(
    world: World, name: str, cpus: str, annotations: dict[str, str] | None = None
) -> PodSandbox:
    """A pod that the kubelet granted CPUs to, before its container is created."""
    known = {
        (uid.removeprefix("uid-"), c): str(granted)
        for (uid, c), granted in world.agent.current.state.kubelet.cpus.items()
    }
    world.kubelet({**known, (name, APP): cpus})
    return pod(name, annotations)


def sent(cpus: str, wants: Resources | None = None) -> Resources:
    """Resources with the cpuset that the kubelet sends."""
    return replace(wants or resources(2, 1), cpus=cpus)


def shared(world: World, name: str = "plain", annotations: dict[str, str] | None = None) -> str:
    """A container without a grant, with the kubelet's shared set of now."""
    of = pod(name, annotations, qos=QoSClass.BURSTABLE)
    now = str(world.agent.current.state.kubelet.shared[0])
    world.place(of, wants=sent(now, resources(1, 1)))
    return f"{name}-{APP}"


def shown(world: World, container_id: str) -> str:
    state = world.agent.current.state
    return shown_kind(state, state.allocations[container_id])


def test_a_grant_stays_the_kubelets_and_leaves_the_shared_pool(world: World) -> None:
    world.kubelet()
    plain = shared(world)
    of = kubelets(world, "g", "2-3")
    assert world.has(plain)[0] == "0-1"
    assert world.place(of, wants=sent("2-3")) == ("2-3", "")
    assert shown(world, "g-app") == "kubelet"
    assert "the kubelet granted it CPUs 2-3" in world.allocation("g-app").reason
    assert world.has(shared(world, "later"))[0] == "0-1"


def test_granted_cpus_come_back_when_the_kubelet_says_so(world: World) -> None:
    """Not when the container ends: the kubelet may start it again on the same CPUs."""
    world.kubelet()
    plain = shared(world)
    of = kubelets(world, "g", "2-3")
    world.place(of, wants=sent("2-3"))
    world.stop("g-app")
    assert world.has(plain)[0] == "0-1"
    world.kubelet({})
    assert world.has(plain)[0] == "0-3"


def test_granted_cpus_cannot_be_listed_and_the_rejection_says_whose_they_are(world: World) -> None:
    of = kubelets(world, "g", "2-3")
    world.place(of, wants=sent("2-3"))
    asks = pod("asks", {"numacpu": "1-2"})
    says(world.reject(asks), "CPUExclusive", "CPU 2 is exclusive to default/g/app (by the kubelet)")
    world.kubelet({("g", APP): "2-3", ("soon", APP): "1"})
    rejected = world.reject(asks)
    assert "default/g/app (by the kubelet)" in rejected.message
    assert "container app of pod UID uid-soon (by the kubelet)" in rejected.message


RULED = Settings(
    kubelet_override=KubeletGrantOverriders.ANNOTATED, rules=(Rule(values={"numacpu": "1"}),)
)


@pytest.mark.parametrize(
    ("settings", "asks", "warned"),
    [
        (ANNOTATED, {}, ""),
        (ANNOTATED, {"bind": "none"}, ""),
        (Settings(), {"numacpu": "2,3"}, ""),  # the same as the kubelet
        (Settings(), {"numacpu": "1", "on-failure": "unpinned"}, "kubelet.overrideGrants is never"),
        (RULED, {}, "annotation numacpu of the pod itself"),
        (ANNOTATED, OWN, "ignored, because"),
        (ANNOTATED, {"policy": "single-numa-node"}, "ignored, because"),
        (ANNOTATED, {"smt": "isolate"}, "ignored, because"),
    ],
)
def test_what_does_not_take_it_away_is_left_to_the_kubelet(
    settings: Settings, asks: dict[str, str], warned: str
) -> None:
    world = World(machines.single_no_smt(), settings)
    of = kubelets(world, "g", "2-3", asks)
    warnings = world.admit(of, wants=sent("2-3")).warnings
    assert warned in "".join(warnings)
    assert len(warnings) == bool(warned)
    assert (world.has("g-app")[0], shown(world, "g-app")) == ("2-3", "kubelet")


def test_a_list_of_the_pod_is_rejected_unless_overriding_is_allowed(world: World) -> None:
    of = kubelets(world, "g", "2-3", {"numacpu": "1"})
    says(
        world.reject(of, wants=sent("2-3")),
        "KubeletPinned",
        "default/g",
        "numacpu is '1'",
        "CPUs 2-3",
        "kubelet.overrideGrants is never",
        "expected",
    )
    world = World(machines.single_no_smt(), ANNOTATED)
    of = kubelets(world, "g", "2-3", {"numacpu": "1"})
    assert world.place(of, wants=sent("2-3"))[0] == "1"
    assert world.allocation("g-app").kind is ContainerKind.LISTED
    assert shown(world, "g-app") == "listed"
    # The kubelet goes on believing: nobody else gets what it granted.
    assert world.has(shared(world))[0] == "0-1"


def test_who_has_no_grant_is_ours_when_annotated(world: World) -> None:
    """The kubelet keeps its static policy, and nri-numa manages what is annotated."""
    world.kubelet({("g", APP): "3"})
    assert world.has(shared(world, "listed", {"numacpu": "1"}))[0] == "1"
    own = world.place(pod("own", OWN), wants=sent("0-2", resources(1, 1)))[0]
    assert own in {"0", "2"}
    # The kubelet's reconcile loop sends its shared set; the answer keeps ours.
    world.update("own-app", Resources(cpus="0-2"))
    world.update("listed-app", Resources(cpus="0-2"))
    assert (world.has("own-app")[0], world.has("listed-app")[0]) == (own, "1")


def test_memory_nodes_alone_are_added_to_granted_cpus() -> None:
    """The kubelet manages CPUs only: a list of memory nodes takes nothing from it."""
    world = World(machines.dual_smt())
    of = kubelets(world, "g", "2-3", {"numamem": "1"})
    assert world.place(of, wants=sent("2-3")) == ("2-3", "1")


@pytest.mark.parametrize(
    ("asks", "has"), [({"numamem": "1"}, ("2-3", "1")), ({"numacpu": "1-2"}, ("1-2", ""))]
)
def test_resizes_move_no_container_with_a_grant(asks: dict[str, str], has: tuple[str, str]) -> None:
    world = World(machines.dual_smt(), ANNOTATED)
    of = kubelets(world, "g", "2-3", asks)
    assert world.place(of, wants=sent("2-3")) == has
    rejected = world.update("g-app", resources(3, 2))
    assert rejected is None, rejected
    assert world.has("g-app") == has
    assert world.agent.current.state.kubelet.cpus


def test_granted_memory_is_the_kubelets_too() -> None:
    world = World(machines.dual_smt())
    world.kubelet(mems={("m", APP): "0"})
    rejected = world.rejected("m", {"numamem": "1"}, 0.5, 1, qos=QoSClass.GUARANTEED)
    says(rejected, "KubeletPinned", "memory of NUMA node 0")
    cpus, mems = world.put("m", {"policy": "best-effort"}, 0.5, 1)
    assert (bool(cpus), mems) == (True, "")
    assert world.put("m", {}, 0.5, 1)[1] == ""
    assert world.put("m", {"policy": "best-effort", "bind": "cpu"}, 0.5, 1)[1] == ""
    assert world.put("m", {"numamem": "0"}, 0.5, 1)[1] == "0"


def test_granted_memory_is_not_promised_again() -> None:
    world = World(machines.dual_smt())
    machine, state = world.agent.current.machine, world.agent.current.state
    before = NodeSnapshot(machine, state).free_memory
    granted = KubeletGrants(memory={0: 1 << 30, 9: 1}, hugepages={0: {2 << 20: 4 << 20}})
    world.agent.apply_grants(granted)
    after = NodeSnapshot(machine, world.agent.current.state).free_memory
    assert before[0] - after[0] == 1 << 30
    assert before[1] == after[1]
    assert NodeSnapshot(machine, world.agent.current.state).free_hugepages(2 << 20)[0] == 0


def test_the_kubelets_shared_set_of_a_moment_ago_pins_nobody(world: World) -> None:
    world.kubelet({("g", APP): "3"})
    of = pod("plain", qos=QoSClass.BURSTABLE)
    made = container(of, wants=sent("0-2"))
    world.kubelet({})  # its pod is gone before the request arrives
    assert world.place(of, made)[0] in {"0-2", "0-3"}
    assert world.allocation("plain-app").kind is ContainerKind.UNPINNED
    world.kubelet({("g", APP): "2"})
    world.update("plain-app", Resources(cpus="0-2"))
    assert world.has("plain-app")[0] == "0-1,3"


def test_a_kubelet_that_becomes_static_takes_its_containers_back() -> None:
    """It knows the pod is Guaranteed, and grants; by default that side wins, once."""
    world = World(machines.dual_smt())
    cpus, mems = world.put("own", {"cpus": "exclusive", "policy": "single-numa-node"}, 2, 1)
    assert mems
    world.put("plain", qos=QoSClass.BEST_EFFORT)
    world.kubelet({("own", APP): "2-3"})
    world.update("own-app", Resources(cpus="2-3"))
    assert world.has("own-app") == ("2-3", "0-1")
    assert shown(world, "own-app") == "kubelet"
    assert not CPUSet.parse(cpus) - CPUSet.parse("2-3") - world.cpus("plain-app")
    before = world.agent.current.state
    world.update("own-app", Resources(cpus="2-3"))
    assert world.agent.current.state is before
    world.update("own-app", Resources(cpus="2"))
    assert world.allocation("own-app").foreign_cpus == CPUSet.parse("2")


def test_an_unbound_container_becomes_the_kubelets_even_on_cpus_of_an_owner(world: World) -> None:
    world.put("plain", {}, 1, 1)
    owned = world.put("own", OWN, 1, 1)[0]
    world.kubelet({("plain", APP): owned})
    world.update("plain-app", Resources(cpus=owned))
    assert world.has("plain-app")[0] == owned  # said and counted; docs/kubelet.md
    assert shown(world, "plain-app") == "kubelet"


def test_what_overrides_the_kubelet_goes_on_doing_so() -> None:
    world = World(machines.single_no_smt(), ANNOTATED)
    of = kubelets(world, "g", "2-3", {"numacpu": "1"})
    world.place(of, wants=sent("2-3"))
    world.update("g-app", Resources(cpus="2-3"))
    assert world.has("g-app")[0] == "1"
    # Somebody else's set on a container with a grant is not the kubelet's wish.
    world.update("g-app", Resources(cpus="0"))
    assert world.has("g-app")[0] == "1"


def test_an_annotation_that_cannot_be_read_any_more_leaves_it_to_the_kubelet() -> None:
    world = World(machines.single_no_smt(), ANNOTATED)
    of = kubelets(world, "g", "2-3", {"numacpu": "1"})
    world.place(of, wants=sent("2-3"))
    world.pods[of.id] = pod("g", {"numacpu": "x"})
    world.update("g-app", Resources(cpus="2-3"))
    assert world.has("g-app")[0] == "2-3"


@pytest.mark.parametrize("restart", [False, True])
def test_after_a_gap_the_kubelets_are_still_the_kubelets(world: World, restart: bool) -> None:
    world.kubelet()
    plain = shared(world)
    of = kubelets(world, "g", "2-3")
    world.place(of, wants=sent("2-3"))
    if restart:
        world.boot()
        assert world.agent.current.state.kubelet.granted_cpus == NO_CPUS
        world.kubelet({("g", APP): "2-3"})
    world.synchronize()
    assert shown(world, "g-app") == "kubelet"
    assert (world.has("g-app")[0], world.has(plain)[0]) == ("2-3", "0-1")


def test_strangers_with_a_grant_are_the_kubelets(world: World) -> None:
    """They started while we were away; one of them has not got its cpuset yet."""
    world.kubelet({("g", APP): "2", ("h", APP): "3"})
    for name, cpus in (("g", "2"), ("h", ""), ("plain", "0-1")):
        of = pod(name)
        made = container(of, wants=sent(cpus))
        world.pods[of.id], world.live[made.id] = of, made
    world.synchronize()
    assert [shown(world, f"{n}-app") for n in ("g", "h", "plain")] == ["kubelet"] * 2 + ["unpinned"]
    assert world.allocation("h-app").foreign_cpus == CPUSet.parse("3")


def test_a_pod_with_a_grant_of_its_own_shares_it_among_its_containers(world: World) -> None:
    """Pod-level resources: ``podEntries`` of the state file."""
    of = pod("p")
    world.agent.apply_grants(
        KubeletGrants(
            cpu_policy="static",
            pods={of.uid: CPUSet.parse("2-3")},
            cpus={(of.uid, "first"): CPUSet.parse("2")},
            pod_mems={of.uid: NUMASet([0])},
        )
    )
    world.place(of, container(of, "first", sent("2")))
    world.place(of, container(of, "second", sent("3")))
    assert [shown(world, f"p-{n}") for n in ("first", "second")] == ["kubelet"] * 2
    assert "pod default/p (by the kubelet)" in world.rejected("asks", {"numacpu": "3"}).message
    assert "default/p/first (by the kubelet)" in world.rejected("asks", {"numacpu": "2"}).message


def test_a_kubelet_before_1_18_names_containers_by_id(world: World) -> None:
    world.agent.apply_grants(
        KubeletGrants(cpu_policy="static", cpus={("", "g-app"): CPUSet.parse("3")})
    )
    world.place(pod("g"), wants=sent("3"))
    assert shown(world, "g-app") == "kubelet"
    assert "container g-app (by the kubelet)" in world.rejected("asks", {"numacpu": "3"}).message


def test_owners_get_first_what_the_kubelet_never_grants(world: World) -> None:
    """Its reserved CPUs, where they are not reserved for us as well."""
    world.kubelet(reserved="2-3")
    of = pod("own", OWN)
    assert world.place(of, wants=resources(1, 1))[0] in {"2", "3"}
    other = World(machines.single_no_smt(), Settings(kubelet_reserved=CPUSet.parse("2-3")))
    assert other.place(of, wants=resources(1, 1))[0] == "0"


def test_the_shared_pool_is_never_empty_whatever_the_kubelet_grants(world: World) -> None:
    """It knows nothing of owners. Those who share then run beside the kubelet's, not ours."""
    world.ends_whole = False
    world.kubelet()
    plain = shared(world)
    world.put("own", OWN, 3, 1)
    world.kubelet({("g", APP): "3"})
    assert world.has(plain)[0] == "3"


@pytest.mark.parametrize(("mems", "after"), [("", "0-1"), ("1", "1")])
def test_what_the_kubelet_takes_over_loses_our_pin_of_memory_unless_it_sets_its_own(
    mems: str, after: str
) -> None:
    """Its policy became static after we had placed the container."""
    world = World(machines.dual_smt())
    world.synchronize()
    assert world.put("early", {"policy": "single-numa-node", "cpus": "exclusive"}, 2, 1) == (
        "0-1",
        "0",
    )
    world.kubelet({("early", APP): "4-5"})
    assert world.update("early-app", Resources(cpus="4-5", mems=mems)) is None
    assert world.has("early-app") == ("4-5", after)
    assert world.allocation("early-app").kind is ContainerKind.FOREIGN


def test_other_cpus_than_were_granted_are_no_sign_of_the_kubelet() -> None:
    """Somebody else writes there, so the container stays as it was placed."""
    world = World(machines.dual_smt())
    world.synchronize()
    before = world.put("early", {"policy": "single-numa-node", "cpus": "exclusive"}, 2, 1)
    world.kubelet({("early", APP): "4-5"})
    assert world.update("early-app", Resources(cpus="6-7")) is None
    assert world.has("early-app") == before
    assert world.allocation("early-app").kind is ContainerKind.EXCLUSIVE


@pytest.mark.parametrize("how", ["synchronize", "start"])
def test_a_list_of_granted_cpus_that_started_without_us_is_said_to_stay_unpinned(how: str) -> None:
    """It runs on other CPUs than its pod asks for: an Event and an explanation say so, and why."""
    world = World(machines.dual_smt())
    granted = kubelets(world, "granted", "2-3")
    world.place(granted, wants=sent("2-3"))
    of = pod("late", {"numacpu": "2"}, qos=QoSClass.BURSTABLE)
    late = container(
        of, wants=sent(str(world.agent.current.state.kubelet.shared[0]), resources(1, 1))
    )
    world.meet(of, late)
    if how == "start":
        world.agent.start_container(of, late)
        world.agent.post_start_container(of, late)
    else:
        world.synchronize()
    (notice,) = world.history.notices.notices_after()
    assert (notice.notice_kind, notice.reason, notice.pod) == ("unpinned", "CPUExclusive", "late")
    text = explained(world, late.id)
    for said in (notice.message, text):
        assert "CPU 2 is exclusive to default/granted/app (by the kubelet)" in said
        assert "t was running already, so it stays unpinned until its pod is recreated" in said
    assert "It requests CPU 2 (annotation numa.kubernetes.io/numacpu)." in text


def explained(world: World, container_id: str) -> str:
    """What ``explain`` says of a container, on one line."""
    allocation = world.allocation(container_id)
    document = explain_allocation(allocation, world.history.explanation_of(container_id), "")
    return " ".join(sentences.render_text(document, 400).split())
