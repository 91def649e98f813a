"""What the outside sees of a real agent: documents and samples agree with its state."""

from types import SimpleNamespace

import pytest
from msgspec import UNSET, to_builtins
from msgspec.structs import replace

from nri_numa.agent.view import zones_document
from nri_numa.engine.desired import Drift, NodeSnapshot, recorded_actual
from nri_numa.engine.explain import sentences
from nri_numa.engine.node_model import MeasuredFree
from nri_numa.engine.resync import rebuild_node_state
from nri_numa.engine.state import NodeState
from nri_numa.errors import CheckpointError
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.settings import Settings
from nri_numa.model.workload import KubeletGrants, PodTable, QoSClass
from nri_numa.observe.notices import NoticeMessageReason
from nri_numa.web.responses import Assignment
from tests.beds.agent_bed import AgentBed
from tests.beds.world import container, pod, resources
from tests.machines import named as machines

NOW = 1_700_000_100.0


@pytest.fixture
def bed() -> AgentBed:
    made = AgentBed(reading=MeasuredFree(memory={0: 1 << 20}))
    made.now = NOW
    made.agent.current.synchronized = True
    made.create_pod("own", policy="restricted", cpus="exclusive")
    made.create_pod("plain")
    made.create_pod("greedy", numacpu="9999")
    return made


def test_every_container_is_listed_with_what_it_really_has(bed: AgentBed) -> None:
    listing = bed.view.list_assignments()
    containers = {one.pod: one for one in listing.containers}
    assert set(containers) == {"own", "plain"}
    own = containers["own"]
    assert (own.kind, own.policy, own.memory_bytes) == ("exclusive", "restricted", 1 << 28)
    cpus = CPUSet.parse(own.cpus)
    assert len(cpus) == 2
    shared = CPUSet.parse(listing.head.shared_pool)
    assert not cpus & shared
    assert cpus | shared == bed.machine.topology.allowed
    assert CPUSet.parse(containers["plain"].cpus) == shared


def test_those_with_less_than_what_is_ideal_are_counted(bed: AgentBed) -> None:
    assert bed.view.status_document().misaligned == 0
    unpinned = {"policy": "single-numa-node", "on-failure": "unpinned"}
    bed.create_pod("left", cpu_limit=40, **unpinned)
    assert bed.view.status_document().misaligned == 1
    assert [one.pod for one in bed.view.list_assignments().containers if not one.aligned] == [
        "left"
    ]


def test_numa_nodes_add_up(bed: AgentBed) -> None:
    head = bed.view.list_assignments().head
    nodes = head.numa_nodes
    for node in nodes:
        parts = [CPUSet.parse(p) for p in (node.exclusive, node.idle_siblings, node.shared)]
        assert parts[0] | parts[1] | parts[2] == CPUSet.parse(node.cpus)
        assert node.cpu_allocated_milli + node.cpu_free_milli == node.cpu_capacity_milli
    assert sum(node.cpu_allocated_milli for node in nodes) == 2000
    # The kernel has less left on NUMA node 0 than the accounting would promise.
    assert nodes[0].memory_free_bytes == 1 << 20
    bed.create_pod("alone", smt="isolate")
    nodes = bed.view.list_assignments().head.numa_nodes
    assert [bool(node.idle_siblings) for node in nodes].count(True) == 1
    assert {node.kubelet for node in nodes} == {""}


def test_a_listing_stays_what_it_was_while_the_agent_goes_on(bed: AgentBed) -> None:
    """It is made piece by piece; a container that stops meanwhile must not tear it."""
    listing = bed.view.list_assignments()
    bed.agent.stop_container("c-own")
    assert {one.pod for one in listing.containers} == {"own", "plain"}
    assert {one.pod for one in bed.view.list_assignments().containers} == {"plain"}


def test_explanations_cover_the_placed_and_the_rejected(bed: AgentBed) -> None:
    (own,) = bed.view.explain_pod("shop", "own", None)
    assert own.outcome == "admitted"
    assert own.assignment is not None
    assert own.summary == own.assignment.reason != ""
    (greedy,) = bed.view.explain_pod("shop", "greedy", "main")
    assert greedy.outcome == "rejected"
    assert greedy.rejection is not None
    assert "9999" in greedy.summary
    assert bed.view.explain_pod("shop", "own", "other") == []
    assert bed.view.explain_pod("other", "own", None) == []


def test_a_container_that_was_rejected_and_then_placed_is_explained_once(bed: AgentBed) -> None:
    bed.create_pod("own2", numacpu="9999")
    bed.create_pod("own2")
    (one,) = bed.view.explain_pod("shop", "own2", None)
    assert one.outcome == "admitted"


def test_the_kubelets_attempts_are_one_rejection_until_their_pod_goes(bed: AgentBed) -> None:
    for _ in range(3):
        bed.create_pod("again", numacpu="9998")
    bed.create_pod("greedy", numacpu="9999")
    found = [(r.pod, r.reason, r.count) for r in bed.view.list_rejections()]
    assert found == [("greedy", "InvalidAnnotation", 2), ("again", "InvalidAnnotation", 3)]
    rejection = bed.agent.history.rejections[0]
    bed.agent.remove_pod("uid-again", rejection.pod_id)
    assert [r.pod for r in bed.view.list_rejections()] == ["greedy"]
    assert bed.view.explain_pod("shop", "again", None) == []
    # The runtime reports the pods that are left, after the agent was away.
    bed.agent.synchronize(PodTable.from_pods(()), ())
    assert bed.view.list_rejections() == []


def test_readiness_needs_the_link_the_runtimes_word_and_a_disk(bed: AgentBed) -> None:
    assert bed.view.readiness().ready
    active = bed.link
    bed.link = replace(active, state="disconnected", detail="dialled 3 times")
    why = "the link to the runtime is disconnected: dialled 3 times"
    assert (bed.view.readiness().ready, bed.view.readiness().reason) == (False, why)
    assert not bed.view.status_document().ready
    bed.link = replace(active, pending_registration="the runtime hangs")
    assert bed.view.status_document().link.pending_registration == "the runtime hangs"
    assert bed.view.readiness().reason == "the runtime hangs"
    bed.link = active
    bed.agent.current.store.error = CheckpointError("checkpoint", "no space left on device")
    why = "the state cannot be saved: checkpoint: no space left on device"
    assert (bed.view.readiness().ready, bed.view.readiness().reason) == (False, why)
    bed.agent.current.store.error = None
    bed.agent.current.synchronized = False
    assert not bed.view.readiness().ready


def test_numa_info_names_cpus_one_by_one() -> None:
    info = AgentBed().view.numa_info()
    topology = machines.dual_smt()
    assert info.data.nodenums == len(topology.numa_nodes)
    for cpus, memory, (_, node) in zip(
        info.data.cpulist, info.data.memsize, sorted(topology.numa_nodes.items()), strict=True
    ):
        assert "-" not in cpus
        assert CPUSet.parse(cpus) == node.cpus
        assert int(memory) == node.memory_bytes


def test_a_scrape_tells_the_same_as_the_list(bed: AgentBed) -> None:
    text = bed.metrics.render_metrics()
    assert 'nri_numa_containers{kind="exclusive",aligned="true"} 1\n' in text
    assert 'nri_numa_containers{kind="shared",aligned="true"} 0\n' in text
    assert 'nri_numa_containers{kind="kubelet",aligned="false"} 0\n' in text
    assert 'pod="own",container="main",kind="exclusive",policy="restricted"' in text
    pool = len(CPUSet.parse(bed.view.list_assignments().head.shared_pool))
    assert f"nri_numa_shared_pool_cpus {pool}\n" in text


def test_every_online_cpu_of_a_node_is_in_one_state() -> None:
    """So that a dashboard can stack them, reserved or not."""
    for strict in (False, True):
        made = AgentBed(
            settings=Settings(reserved_cpus=CPUSet([0, 1]), strict_cpu_reservation=strict)
        )
        made.create_pod("own", policy="restricted", cpus="exclusive", smt="isolate")
        for sample in made.view.metrics_snapshot().numa_nodes:
            node = made.machine.topology.numa_nodes[sample.numa_node]
            assert sum(sample.cpus.values()) == len(node.cpus)


def test_zones_are_counted_and_name_whose_pods_are_charged(bed: AgentBed) -> None:
    found = bed.view.scheduler_zones_document()
    assert (found.ready, found.policy, found.scope, found.defaults_to_shared) == (
        True, "none", "container", False,
    )  # fmt: skip
    assert found.devices_problem is None, "nobody counts any"
    assert [(pod.namespace, pod.name, pod.qos) for pod in found.pods] == [
        ("shop", "own", "Guaranteed"), ("shop", "plain", "Guaranteed"),
    ]  # fmt: skip
    first, second = found.zones
    assert (first.cpus, first.socket, second.socket) == (32, 0, 1)
    assert (first.capacity_factor, second.capacity_factor) == (1, 1)
    # What the kernel has left counts too.
    assert first.memory_available_bytes == 1 << 20
    taken = [zone for zone in found.zones if zone.free_exclusive_cpus < zone.exclusive_cpus]
    assert [(z.free_exclusive_cpus, z.cpu_available_milli) for z in taken] == [(30, 30_000)]
    bed.link = replace(bed.link, state="connecting", detail="nobody there")
    assert (
        bed.view.scheduler_zones_document().reason
        == "the link to the runtime is connecting: nobody there"
    )
    bed.link = replace(bed.link, state="active", detail="")
    bed.agent.current.observe = True
    assert not bed.view.scheduler_zones_document().ready


def test_who_asked_is_named_as_counted_also_with_nothing() -> None:
    """Who waits for that gives its NUMA nodes to others; one not decided about may need them."""
    made = AgentBed()
    made.create_pod("plain")
    made.create_pod(
        "left", cpu_limit=400, **{"policy": "single-numa-node", "on-failure": "unpinned"}
    )
    nothing = pod("nothing", {"policy": "restricted"}, qos=QoSClass.BEST_EFFORT)
    made.agent.create_container(nothing, container(nothing, "main"))
    counted = {one.pod_uid for one in made.view.scheduler_zones_document().counted_containers or ()}
    assert counted == {"uid-left", "uid-nothing"}
    strangers = [pod("stranger", {"policy": "restricted"})]
    waiting = rebuild_node_state(
        NodeSnapshot(made.machine, NodeState()), PodTable.from_pods(strangers),
        [container(strangers[0], "main", resources(2, 0.25))], in_time=lambda: False,
    )  # fmt: skip
    assert zones_document(NodeSnapshot(made.machine, waiting.state)).counted_containers == ()


def test_changes_are_told_until_the_listener_leaves(bed: AgentBed) -> None:
    seen: list[int] = []
    end = bed.view.subscribe_to_changes(lambda: seen.append(bed.agent.current.state.serial))
    bed.create_pod("one")
    assert seen
    end()
    count = len(seen)
    bed.create_pod("two")
    assert len(seen) == count


def test_another_topology_is_shown_at_once(bed: AgentBed) -> None:
    assert bed.view.machine_topology_document()["id"] == bed.machine.topology.fingerprint
    other = replace(bed.machine, topology=machines.one_cpu())
    bed.agent.apply_node_model(other)
    assert bed.view.machine_topology_document()["id"] == other.topology.fingerprint


def test_a_placed_container_is_explained_in_sentences_and_as_a_document(bed: AgentBed) -> None:
    (own,) = bed.view.explain_pod("shop", "own", None)
    assert own.details is not None
    assert any(
        "It requests 2 exclusive CPUs and 256 MiB of memory on no more NUMA nodes" in step
        for step in own.decision_steps
    )
    assert own.details["result"]["cpus"] == own.assignment.cpus if own.assignment else False
    (plain,) = bed.view.explain_pod("shop", "plain", None)
    assert plain.decision_steps[0] == "It is unpinned: no annotation or rule requests a placement."
    (greedy,) = bed.view.explain_pod("shop", "greedy", None)
    assert greedy.details is not None
    assert greedy.decision_steps[0] == (
        "The rule: annotations must be valid and must not contradict each other."
    )
    assert greedy.details["outcome"] == "rejected"


def test_an_explanation_follows_the_shared_cpus(bed: AgentBed) -> None:
    bed.create_pod("shared", policy="restricted", cpus="shared")
    (first,) = bed.view.explain_pod("shop", "shared", None)
    assert first.details is not None
    bed.create_pod("another", policy="restricted", cpus="exclusive")
    bed.create_pod("third", policy="restricted", cpus="exclusive")
    (changed,) = bed.view.explain_pod("shop", "shared", None)
    assert changed.details is not None
    assert changed.assignment is not None
    assert changed.details["result"]["cpus"] == changed.assignment.cpus
    assert changed.details["result"]["cpus"] != first.details["result"]["cpus"]


def differ(bed: AgentBed, *, given_up: bool = False) -> None:
    """The container that shares runs on CPUs of the one that owns some."""
    state = bed.agent.current.state
    (own,) = (a for a in state.allocations.values() if a.exclusive)
    online = bed.machine.topology.online
    wrong = Drift(
        container_id="c-plain",
        pod="shop/plain",
        container="main",
        cpus=online - own.cpus,
        desired_cpus=online - own.cpus,
        actual=recorded_actual(str(online), "", None),
        rank=0,
    )
    bed.agent.drift.update_drift(
        ["c-plain"], [wrong], {"c-plain": NOW - 12}, ["c-plain"] if given_up else ()
    )


def test_a_list_that_gave_way_says_where_it_stands_and_to_whom() -> None:
    bed = AgentBed()
    bed.agent.current.synchronized = True
    bed.create_pod("list", numacpu="0-3")
    bed.create_pod("some", numacpu="2-4")
    bed.create_pod("own", numacpu="2-3", cpus="exclusive")

    def reason(pod: str) -> str:
        (one,) = (one for one in bed.view.list_assignments().containers if one.pod == pod)
        return one.reason

    gave = "CPUs 2-3 are exclusive to shop/own/main"
    assert reason("list") == f"listed: numacpu 0-3, runs on 0-1, because {gave}"
    (explained,) = bed.view.explain_pod("shop", "list", None)
    assert explained.summary == reason("list")
    assert f"Listed 0-3, runs on 0-1, because {gave}." in explained.decision_steps
    assert "It runs on CPUs 0-1." in explained.decision_steps
    assert any("yields CPUs that become exclusive" in step for step in explained.decision_steps)
    bed.agent.apply_grants(KubeletGrants(cpus={("uid-kube", "app"): CPUSet([4])}))
    assert reason("some") == (
        "listed: numacpu 2-4, runs on the shared pool 0-1,5-63, because CPUs 2-4 are exclusive to "
        "shop/own/main and container app of pod UID uid-kube (by the kubelet)"
    )
    bed.agent.stop_container("c-own")
    bed.agent.remove_container("c-own")
    assert reason("list") == "listed: numacpu 0-3"
    (explained,) = bed.view.explain_pod("shop", "list", None)
    assert not any("stands on" in step for step in explained.decision_steps)


def test_what_a_container_really_has_stands_beside_what_is_meant(bed: AgentBed) -> None:
    assert all(one.actual is None for one in bed.view.list_assignments().containers)
    told: list[None] = []
    bed.view.subscribe_to_changes(lambda: told.append(None))
    differ(bed)
    assert told, "the page is told"
    actual = {one.pod: one.actual for one in bed.view.list_assignments().containers}
    assert actual["own"] is None
    real = actual["plain"]
    assert real is not None
    online = bed.machine.topology.online
    assert real.text == f"desired {real.desired_cpus}, actual {online}"
    assert (real.observed_at, real.holders, real.on_exclusive_cpus) == (
        NOW - 12,
        ("shop/own/main",),
        True,
    )
    status = bed.view.status_document()
    assert (status.drifted, status.on_exclusive_cpus) == (1, 1)
    (plain,) = bed.view.explain_pod("shop", "plain", None)
    assert plain.decision_steps[0] == (
        f"At present: {real.text} since 2023-11-14 22:14:48 UTC, on exclusive CPUs of "
        "shop/own/main."
    )
    assert plain.assignment is not None
    assert plain.assignment.actual == real
    differ(bed, given_up=True)
    (plain,) = bed.view.explain_pod("shop", "plain", None)
    assert plain.decision_steps[0].endswith("because another program rewrites it.")
    bed.agent.drift.remove_repaired("c-plain")
    (plain,) = bed.view.explain_pod("shop", "plain", None)
    assert plain.decision_steps[0].startswith("It is unpinned")


def test_who_is_on_the_pool_because_its_own_cpus_are_offline_is_said(bed: AgentBed) -> None:
    def own() -> Assignment:
        return next(one for one in bed.view.list_assignments().containers if one.pod == "own")

    cpus, topology = own().cpus, bed.machine.topology
    assert own().displaced == ""
    offline = replace(topology, online=topology.online - CPUSet.parse(cpus))
    bed.agent.apply_node_model(replace(bed.machine, topology=offline))
    assert (own().displaced, own().kind) == (cpus, "exclusive")
    (explained,) = bed.view.explain_pod("shop", "own", None)
    assert any(
        f"isplaced, because CPUs {cpus} are offline" in step for step in explained.decision_steps
    )


@pytest.mark.parametrize(
    ("asks", "numa_nodes"),
    [({"numamem": "1"}, "1"), ({"numacpu": "8", "numamem": "1"}, "0"), ({}, "")],
)
def test_the_metrics_have_the_numa_nodes_of_memory_where_no_cpus_are_pinned(
    bed: AgentBed, asks: dict[str, str], numa_nodes: str
) -> None:
    bed.create_pod("near", **asks)
    (line,) = (one for one in bed.metrics.render_metrics().splitlines() if '"near"' in one)
    assert f'numa_nodes="{numa_nodes}"' in line


def test_exclusive_cpus_that_became_reserved_are_marked(bed: AgentBed) -> None:
    def reserved() -> dict[str, str]:
        return {one.pod: one.reserved for one in bed.view.list_assignments().containers}

    (own,) = [one.cpus for one in bed.view.list_assignments().containers if one.pod == "own"]
    assert not any(reserved().values())
    settings = replace(bed.machine.settings, reserved_cpus=bed.machine.topology.online)
    bed.agent.current.machine = replace(bed.machine, settings=settings)
    assert {pod: cpus for pod, cpus in reserved().items() if cpus} == {"own": own}
    (explained,) = bed.view.explain_pod("shop", "own", None)
    assert any(f"CPUs {own} became reserved later" in step for step in explained.decision_steps)


def test_a_memory_policy_is_shown_of_containers_that_have_one(bed: AgentBed) -> None:
    bed.create_pod("banded", numamem="1", mempolicy="interleave")
    shown = {one.pod: to_builtins(one) for one in bed.view.list_assignments().containers}
    assert shown.pop("banded")["mempolicy"] == "interleave"
    assert all("mempolicy" not in one for one in shown.values())
    (told,) = bed.view.explain_pod("shop", "banded", None)
    assert told.assignment is not None
    assert told.assignment.mempolicy == "interleave"


def test_over_cri_it_is_shown_how_late_containers_were(bed: AgentBed) -> None:
    assert "interface" not in to_builtins(bed.view.status_document().link)
    before = bed.view.list_assignments()
    assert all("startDelay" not in to_builtins(one) for one in before.containers)
    bed.link = replace(bed.link, interface="cri")
    bed.show(late_starts=SimpleNamespace(start_delays={"c-own": 0.0124}))
    assert bed.view.status_document().link.interface == "cri"
    listing = bed.view.list_assignments()
    assert {one.pod: one.start_delay for one in listing.containers} == {
        "own": 0.0124,
        "plain": UNSET,
    }
    (told,) = bed.view.explain_pod("shop", "own", None)
    assert any(step.startswith("Start delay at most 12 ms") for step in told.decision_steps)
    (told,) = bed.view.explain_pod("shop", "plain", None)
    assert not any("tart delay" in step for step in told.decision_steps)


def test_a_rejected_resize_is_told_with_what_the_container_has() -> None:
    made = AgentBed()
    made.create_pod("own", policy="single-numa-node")
    made.pass_time(60)
    of = pod("own", {"policy": "single-numa-node"}, namespace="shop")
    made.agent.update_container(of, container(of, "main", id="c-own"), resources(60))
    (one,) = made.view.explain_pod("shop", "own", None)
    assert one.outcome == "admitted"
    assert one.decision_steps[-1].startswith("Since then rejected: resize rejected:")


def test_an_annotation_that_no_container_hears_is_in_the_explanation() -> None:
    """And gone from it when its container comes."""
    bed = AgentBed()
    bed.create_pod("web", policy="best-effort")
    before = bed.view.explain_pod("shop", "web", None)[0].decision_steps
    of, reason = pod("web", namespace="shop"), NoticeMessageReason.UNKNOWN_CONTAINER
    sentence = "annotation x is ignored, because it names a container 'y'"
    bed.agent.history.reporter.report_unmatched_annotations(of, reason, [sentence])
    (one,) = bed.view.explain_pod("shop", "web", None)
    for said in (
        one.decision_steps[-1],
        sentences.render_text(one.details, 200, brief=True).split("  ")[-1],
    ):
        assert said.startswith("Annotation x is ignored, because it names a container 'y'")
    bed.agent.history.reporter.withdraw_unknown_containers(of)
    assert bed.view.explain_pod("shop", "web", None)[0].decision_steps == before
