"""Pods that want more than they pay for, or than they may have, and what that comes to."""

from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from nri_numa.config.values import parse_cpu_count_or_percent
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.state import ContainerKind
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import Topology, count_text
from nri_numa.model.settings import (
    AnnotationPermission,
    CPUAmount,
    CPUWithholdingQuota,
    IsolatedCPUs,
    NamespacePatternQuota,
    OnDenied,
    QuotasAndPoolFloor,
    Rule,
    Settings,
)
from nri_numa.model.workload import Container, PodSandbox, QoSClass, Resources
from tests.beds.world import GIB, OWN, SINGLE, World, container, pod, resources, says
from tests.machines import named as machines

BEST_EFFORT, BURSTABLE, GUARANTEED = QoSClass.BEST_EFFORT, QoSClass.BURSTABLE, QoSClass.GUARANTEED
ISOLATED = {**OWN, "smt": "isolate"}

usual = partial(World, machines.snc_smt())


def burst(request: float, limit: float) -> Resources:
    """What the kubelet writes for a Burstable container."""
    return replace(resources(limit), cpu_shares=max(2, int(request * 1024)))


def want(
    name: str,
    annotations: dict[str, str],
    wants: Resources | None = None,
    *,
    qos: QoSClass = GUARANTEED,
    namespace: str = "default",
    labels: dict[str, str] | None = None,
    score: int | None = None,
) -> tuple[PodSandbox, Container]:
    of = pod(name, annotations, qos=qos, namespace=namespace, labels=labels)
    return of, container(of, wants=wants, oom_score_adj=score)


def limited(topology: Topology, **limits: Any) -> World:
    return World(topology, Settings(limits=QuotasAndPoolFloor(**limits)))


def rule_of(world: World) -> str:
    return world.history.explanation_of_rejection(world.history.rejections[-1]).basis.rule


# --- exclusive CPUs are paid for ------------------------------------------------------------------


def test_a_best_effort_list_owns_nothing(world: World) -> None:
    rejected = world.reject(*want("greedy", {"numacpu": "2-31", **OWN}, qos=BEST_EFFORT))
    assert rejected.reason == "CPUsNotRequested"
    assert "numacpu is '2-31'" in rejected.message
    assert "the container requests 0 of 30 CPUs" in rejected.message
    assert "the built-in permission does not have it" in rejected.message
    assert rule_of(world) == "the CPU request must cover all exclusive CPUs"


def test_a_burstable_limit_owns_nothing_and_keeps_its_quota(world: World) -> None:
    rejected = world.reject(*want("greedy", OWN, burst(0.001, 28), qos=BURSTABLE))
    says(rejected, "CPUsNotRequested", "cpu request is not set, expected 28 CPUs")
    world.place(*want("paid", OWN, burst(2, 2), qos=BURSTABLE))
    assert len(world.cpus("paid-app")) == 2


def test_a_list_must_be_paid_for_as_a_whole_in_a_guaranteed_pod_too(world: World) -> None:
    annotations = {"numacpu": "2-31", **OWN}
    assert world.reject(*want("greedy", annotations, resources(2))).reason == "CPUsNotRequested"
    assert world.place(*want("paid", annotations, resources(30)))[0] == "2-31"


def test_a_rule_and_a_default_do_not_make_tenants_owners_of_what_they_do_not_pay_for() -> None:
    ruled = World(machines.snc_smt(), Settings(rules=(Rule(values=OWN),)))
    ruled.place(*want("a", {}, burst(0.5, 28), qos=BURSTABLE))
    assert ruled.allocation("a-app").kind is ContainerKind.SHARED
    assert (
        ruled.reject(*want("b", {"numacpu": "2-31"}, qos=BEST_EFFORT)).reason == "CPUsNotRequested"
    )
    default = World(machines.snc_smt(), Settings(defaults={**OWN, "policy": "best-effort"}))
    default.place(*want("a", {}, burst(0.5, 28), qos=BURSTABLE))
    assert default.allocation("a-app").kind is ContainerKind.SHARED


def test_what_a_rule_lists_and_owns_is_the_operators_own_wish() -> None:
    rule = Rule(namespaces=("system",), values={"numacpu": "1", **OWN})
    world = World(machines.snc_smt(), Settings(rules=(rule,)))
    of, agent = want("agent", {}, qos=BEST_EFFORT, namespace="system")
    assert world.place(of, agent)[0] == "1"
    assert world.place(of, container(of, "beside"))[0] == "1"


def test_a_permission_lets_unpaid_cpus_be_owned() -> None:
    permission = AnnotationPermission(
        name="permissions[0]", namespaces=("lab-*",), allow_unrequested_cpus=True
    )
    world = World(machines.snc_smt(), Settings(permissions=(permission,)))
    given = want("a", {"numacpu": "2-3", **OWN}, qos=BEST_EFFORT, namespace="lab-1")
    assert world.place(*given)[0] == "2-3"
    world.place(*want("b", OWN, burst(0, 4), qos=BURSTABLE, namespace="lab-1"))
    says(world.reject(*want("c", {"numacpu": "30", **OWN}, qos=BEST_EFFORT)), "CPUsNotRequested")


def test_where_the_permission_says_ignore_an_unpaid_owner_shares() -> None:
    permission = AnnotationPermission(name="permissions[0]", on_denied=OnDenied.IGNORE)
    world = World(machines.snc_smt(), Settings(permissions=(permission,)))
    assert world.place(*want("a", {"numacpu": "2-3", **OWN}, qos=BEST_EFFORT))[0] == "2-3"
    world.place(*want("b", OWN, burst(0, 4), qos=BURSTABLE))
    assert not world.agent.current.state.exclusive
    for name, paid in (("a-app", "0 of 2 CPUs"), ("b-app", "0 of 4 CPUs")):
        assert f"cpus: exclusive is ignored, because the container requests {paid}" in world.steps(
            name
        )


# --- permissions ----------------------------------------------------------------------------------

STRICT = AnnotationPermission(
    name="permissions[1]",
    allowed_keys=("policy", "cpus", "numacpu", "load"),
    allowed_values={"cpus": ("shared",), "numacpu": ("0-7", "16-23")},
)
TRUSTED = AnnotationPermission(
    name="permissions[0]", namespaces=("db-*",), labels={"tier": "gold"}, qos=(GUARANTEED,)
)


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        ({"smt": "isolate"}, "one of the keys policy, cpus, numacpu, load"),
        ({"cpus": "exclusive"}, "expected one of shared"),
        ({"numacpu": "6-8"}, "expected no others than 0-7,16-23"),
    ],
)
def test_what_is_not_permitted_is_rejected_by_name(annotations: dict[str, str], words: str) -> None:
    world = World(machines.dual_smt(), Settings(permissions=(TRUSTED, STRICT)))
    rejected = world.reject(*want("web", annotations, resources(2), namespace="shop"))
    assert rejected.reason == "NotPermitted"
    for text in (*annotations, *annotations.values(), words, "permissions[1]"):
        assert text in rejected.message
    assert rule_of(world) == "permissions[1] allows pods of namespace shop no more"


def test_the_first_entry_that_matches_in_everything_decides() -> None:
    world = World(machines.dual_smt(), Settings(permissions=(TRUSTED, STRICT)))
    gold = {"tier": "gold"}
    world.place(*want("yes", OWN, resources(2), namespace="db-1", labels=gold))
    for n, other in enumerate(
        (
            want("a", OWN, resources(2), namespace="web", labels=gold),
            want("b", OWN, resources(2), namespace="db-1"),
            want("c", OWN, burst(2, 2), namespace="db-1", labels=gold, qos=BURSTABLE),
        )
    ):
        assert world.reject(*other).reason == "NotPermitted", n


def test_what_is_permitted_works_as_ever() -> None:
    world = World(machines.dual_smt(), Settings(permissions=(STRICT,)))
    assert world.place(*want("a", {"numacpu": "1-3,17", "load": "high"}))[0] == "1-3,17"
    assert world.place(*want("b", {**SINGLE, "cpus": "shared"}, resources(2)))[0]
    for bad in ({"numacpu": "1-"}, {"numacpu": "1," * 2000}):  # form is somebody else's business
        assert world.reject(*want("c", bad)).reason == "InvalidAnnotation"


def test_nothing_at_all_may_be_permitted() -> None:
    nothing = AnnotationPermission(name="permissions[0]", allowed_keys=())
    world = World(machines.dual_smt(), Settings(permissions=(nothing,)))
    rejected = world.reject(*want("a", SINGLE, resources(2)))
    assert "expected no annotation of nri-numa, because permissions[0] allows no more" in (
        rejected.message
    )
    assert world.place(*want("b", {}, resources(2))) == ("", "")


def test_what_is_ignored_is_said_and_the_rest_counts(caplog: pytest.LogCaptureFixture) -> None:
    lenient = replace(STRICT, on_denied=OnDenied.IGNORE)
    rules = (Rule(values={"smt": "any"}),)
    world = World(machines.dual_smt(), Settings(permissions=(lenient,), rules=rules))
    world.place(*want("web", {**SINGLE, "cpus": "exclusive", "smt": "isolate"}, resources(1.5)))
    allocation = world.allocation("web-app")
    assert allocation.kind is ContainerKind.SHARED
    known = world.grounds("web-app")
    assert known.basis.decision_steps[0].startswith(
        "cpus 'exclusive' (annotation numa.kubernetes.io/cpus) is ig"
    )
    assert known.basis.decision_steps[1].startswith("smt 'isolate'")
    assert known.basis.requested is not None
    assert known.basis.requested["smt"][1] == "rule 1", "the next weaker source gets its chance"
    lines = [r for r in caplog.records if r.getMessage() == "annotation ignored"]
    assert {r.levelname for r in lines} == {"WARNING"}


def test_adopted_containers_keep_what_they_have_and_are_not_asked_again() -> None:
    world = World(
        machines.snc_smt(),
        Settings(permissions=(AnnotationPermission(name="p", allow_unrequested_cpus=True),)),
    )
    world.place(*want("old", {"numacpu": "2-31", **OWN}, qos=BEST_EFFORT))
    world.settings = Settings(permissions=(STRICT,))
    assert world.restart() == ()
    assert world.has("old-app")[0] == "2-31"
    assert world.update("old-app", resources(0, 1)) is None
    assert world.has("old-app")[0] == "2-31"


# --- reserved CPUs --------------------------------------------------------------------------------


def test_lists_do_not_land_on_reserved_cpus_unless_permitted() -> None:
    reserved = Settings(reserved_cpus=CPUSet.parse("0-1"))
    world = World(machines.snc_smt(), reserved)
    rejected = world.reject(*want("a", {"numacpu": "1-3"}))
    says(rejected, "CPUReserved", "CPU 1 is reserved for the system; expected CPUs among 2-31")
    allowed = AnnotationPermission(name="permissions[0]", allow_reserved_cpus=True)
    for strict in (False, True):
        settings = replace(reserved, permissions=(allowed,), strict_cpu_reservation=strict)
        world = World(machines.snc_smt(), settings)
        assert world.place(*want("a", {"numacpu": "1-3"}))[0] == "1-3"


# --- lists that nothing pays for ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listed", "asked", "cpus"),
    [
        ("0,4,8,12", SINGLE, 8),
        ("0-15", {**OWN, "smt": "full-core"}, 2),
        ("0-15", {**OWN, "smt": "isolate"}, 2),
        ("0-31", SINGLE, 8),
    ],
)
def test_an_unpaid_list_keeps_no_cpu_from_owners(
    world: World, listed: str, asked: dict[str, str], cpus: int
) -> None:
    assert world.place(*want("free", {"numacpu": listed}, qos=BEST_EFFORT))[0] == listed
    own = CPUSet.parse(world.place(*want("db", asked, resources(cpus)))[0])
    state = world.agent.current.state
    assert world.cpus("free-app") == CPUSet.parse(listed) - own - state.idle_siblings
    assert not state.listed_cpus
    world.check()
    world.stop("db-app")
    world.remove_pod(world.pods["sandbox-db"])
    assert world.has("free-app")[0] == listed


def test_owners_get_cpus_that_no_list_names_while_there_are_some(world: World) -> None:
    world.place(*want("free", {"numacpu": "0-3,16-19"}, qos=BEST_EFFORT))
    world.place(*want("db", SINGLE, resources(8)))
    assert world.has("db-app")[0] == "4-7,20-23"  # NUMA node 0 would have been first
    world.place(*want("some", {"numacpu": "8-9,24"}, qos=BEST_EFFORT))
    assert world.place(*want("two", {**SINGLE, "numamem": "2"}, resources(2)))[0] == "10-11"
    for name, has in (("free", "0-3,16-19"), ("some", "8-9,24")):
        assert world.has(f"{name}-app")[0] == has


def test_a_list_is_hard_where_the_request_pays_or_the_operator_says_so() -> None:
    ruled = Settings(rules=(Rule(values={"numacpu": "0-3"}, namespaces=("ops",)),))
    for settings, wants, namespace in (
        (Settings(), resources(4), "default"),
        (KEEPS, None, "default"),
        (ruled, None, "ops"),
    ):
        world = World(machines.snc_smt(), settings)
        asked = {} if namespace == "ops" else {"numacpu": "0-3"}
        world.place(*want("list", asked, wants, namespace=namespace))
        rejected = world.reject(*want("db", {"numacpu": "2-5", **OWN}, resources(4)))
        says(rejected, "CPUListed", f"{namespace}/list/app")
        assert world.agent.current.state.listed_cpus == CPUSet.parse("0-3")


def test_a_new_list_of_owned_cpus_is_rejected_and_one_that_gave_way_starts_again() -> None:
    world = World(machines.snc_smt())
    free = want("free", {"numacpu": "0-3"}, qos=BEST_EFFORT)
    world.place(*free)
    world.place(*want("db", {"numacpu": "2-3", **OWN}, resources(2)))
    assert world.has("free-app")[0] == "0-1"
    rejected = world.reject(*want("late", {"numacpu": "0-3"}, qos=BEST_EFFORT))
    says(rejected, "CPUExclusive", "default/db/app")
    world.stop("free-app")
    assert world.place(free[0], replace(free[1], id="free-again"))[0] == "0-1"
    world.check()
    world.stop("db-app")
    assert world.has("free-again")[0] == "0-3"


def test_a_list_that_gave_way_is_known_after_every_restart(world: World) -> None:
    world.place(*want("free", {"numacpu": "0-3"}, qos=BEST_EFFORT))
    world.place(*want("gone", {"numacpu": "2"}, qos=BEST_EFFORT))
    world.place(*want("db", {"numacpu": "2-3", **OWN}, resources(2)))
    before = world.allocation("free-app")
    for lost in (False, True):
        assert world.restart(lost=lost) == ()
        found = world.allocation("free-app")
        assert (found.cpus, found.yields_to_exclusive) == (before.cpus, True)
        assert world.has("free-app")[0] == "0-1"
        assert world.has("gone-app")[0] == "0-1,4-31"
        world.check()
    world.stop("db-app")
    assert world.has("free-app")[0] == "0-3"
    assert world.has("gone-app")[0] == "2"


def test_lists_that_started_while_we_were_away_and_are_paid_for_stay(world: World) -> None:
    for name, cpus in (("one", "0-1"), ("two", "2-3")):
        of, made = want(name, {"numacpu": cpus}, resources(2))
        world.pods[of.id], world.live[made.id] = of, made
    world.synchronize()
    assert (world.has("one-app")[0], world.has("two-app")[0]) == ("0-1", "2-3")
    says(world.reject(*want("db", {"numacpu": "3", **OWN}, resources(1))), "", "default/two/app")


def test_a_forged_list_that_keeps_its_cpus_is_not_believed(world: World) -> None:
    of, made = want("free", {"numacpu": "0-3"}, qos=BEST_EFFORT)
    text = (
        '{"cpus":"0-3","mems":"","policy":"none","kind":"listed","format":2,'
        '"numaNodes":"0","aligned":true,"reason":"listed: numacpu 0-3"}'
    )
    forged = {"numa.kubernetes.io/assigned": text}
    has = replace(made.resources, cpus="0-3")
    world.meet(of, replace(made, annotations=forged, resources=has))
    world.synchronize()
    assert world.allocation("free-app").yields_to_exclusive
    assert not world.agent.current.state.listed_cpus


def test_a_resize_makes_a_list_hard_and_soft_again(world: World) -> None:
    of = want("list", {"numacpu": "0-3"}, resources(1))
    world.place(*of)

    def soft() -> bool:
        world.check()
        assert world.synchronize() == ()
        return world.allocation("list-app").yields_to_exclusive

    assert soft()
    assert world.update("list-app", resources(4)) is None
    assert not soft()
    assert world.reject(*want("db", {"numacpu": "3", **OWN}, resources(1))).reason == "CPUListed"
    assert world.update("list-app", resources(2)) is None
    assert soft()
    world.place(*want("db", {"numacpu": "3", **OWN}, resources(1)))
    assert world.has("list-app")[0] == "0-2"
    assert world.update("list-app", resources(4)) is None
    assert soft()  # CPU 3 has an owner by now
    assert world.has("list-app")[0] == "0-2"


def test_what_a_pod_keeps_for_its_owner_is_not_taken_by_its_own_list() -> None:
    world = World(machines.snc_smt(), Settings(reservation_seconds=600))
    of = pod("a", {"numacpu.side": "0-3", "numacpu.db": "2-3", "cpus.db": "exclusive"})
    world.add(of, "db", 2)
    world.live.pop("a-db")
    world.apply(world.agent.stop_container("a-db"))
    world.add(of, "side", 1)
    assert world.has("a-side")[0] == "0-1"
    assert world.place(of, container(of, "db", resources(2), id="a-db2"))[0] == "2-3"


def test_a_list_of_isolated_cpus_stands_on_them_until_they_are_owned() -> None:
    world = World(machines.isolated_cpus(), Settings(isolated=IsolatedCPUs.PREFER))
    apart = world.topology.isolated
    own = CPUSet([apart.first_id])
    world.place(*want("free", {"numacpu": str(apart)}, qos=BEST_EFFORT))
    assert world.cpus("free-app") == apart
    world.place(*want("db", {"numacpu": str(own), **OWN}, resources(1)))
    assert world.cpus("free-app") == apart - own
    world.check()
    world.stop("db-app")
    assert world.cpus("free-app") == apart


# --- quotas ---------------------------------------------------------------------------------------


KEEPS = Settings(
    permissions=(AnnotationPermission(name="permissions[0]", allow_unrequested_cpus=True),)
)
"""Lists that nothing pays for keep their CPUs."""


@pytest.mark.parametrize(
    ("cores", "threads", "quota", "most"),
    [
        (2, 1, None, 2),  # of the default, half, one CPU would be left
        (1, 2, None, 2),
        (1, 8, None, 8),
        (3, 1, None, 2),
        (8, 1, None, 4),
        (8, 2, "1%", 2),
        (8, 1, "0%", 0),
        (8, 1, "1", 1),
    ],
)
def test_a_part_of_a_small_machine_lets_lists_have_a_core_and_two_cpus(
    cores: int, threads: int, quota: str | None, most: int
) -> None:
    limits = QuotasAndPoolFloor()
    if quota is not None:
        limits = QuotasAndPoolFloor(
            quota=CPUWithholdingQuota(listed=parse_cpu_count_or_percent(quota))
        )
    small = build_synthetic_topology(
        sockets=1, numa_per_socket=1, cores_per_numa=cores, threads=threads
    )
    world = World(small, Settings(limits=limits, permissions=KEEPS.permissions))
    if most < cores * threads:
        rejected = world.reject(*want("more", {"numacpu": f"0-{most}"}, qos=BEST_EFFORT))
        assert f"exceed the quota of {count_text(most, 'listed CPU')}" in rejected.message
    if most:
        cpus = str(CPUSet(range(most)))
        assert world.place(*want("all", {"numacpu": cpus}, qos=BEST_EFFORT))[0] == cpus


def test_a_list_of_everything_does_not_keep_others_from_owning() -> None:
    world = World(machines.snc_smt(), KEEPS)
    rejected = world.reject(*want("block", {"numacpu": "0-31"}, qos=BEST_EFFORT))
    assert rejected.reason == "QuotaExceeded"
    for words in ("16 listed CPUs (quotas.listedCPUs)", "0 used, 32 requested"):
        assert words in rejected.message
    world.place(*want("half", {"numacpu": "0-15"}, qos=BEST_EFFORT))
    world.place(*want("same", {"numacpu": "0-3"}, qos=BEST_EFFORT))
    rejected = world.reject(*want("more", {"numacpu": "15-16"}, qos=BEST_EFFORT))
    assert "16 used, 1 requested; expected at most 0 more" in rejected.message
    assert "default/half/app lists CPUs 0-15" in rejected.message
    world.place(*want("paid", {"numacpu": "16-17"}, resources(2)))


def test_reserved_cpus_do_not_count_for_the_quota_of_lists() -> None:
    permission = AnnotationPermission(
        name="permissions[0]", allow_reserved_cpus=True, allow_unrequested_cpus=True
    )
    settings = Settings(reserved_cpus=CPUSet.parse("0-3"), permissions=(permission,))
    world = World(machines.snc_smt(), settings)
    assert world.place(*want("a", {"numacpu": "0-19"}, qos=BEST_EFFORT))[0] == "0-19"


def test_who_lists_the_cpus_that_are_missing_is_named() -> None:
    limits = QuotasAndPoolFloor(quota=CPUWithholdingQuota())
    for asked, reason in (
        (OWN, "NotEnoughCPUs"),
        (SINGLE, "TopologyAffinityError"),
        ({"numacpu": "3", **OWN}, "CPUListed"),
    ):
        world = World(machines.snc_smt(), replace(KEEPS, limits=limits))
        world.place(*want("block", {"numacpu": "0-31"}, qos=BEST_EFFORT, namespace="evil"))
        says(world.reject(*want("db", asked, resources(1))), reason, "evil/block/app")


def test_only_the_largest_holders_are_named_and_long_lists_are_cut() -> None:
    limits = QuotasAndPoolFloor(quota=CPUWithholdingQuota(), pool=CPUAmount(1))
    world = World(machines.dual_smt(), replace(KEEPS, limits=limits))
    odd = ",".join(str(i) for i in range(1, 63, 2))
    world.place(*want("odd", {"numacpu": odd}))
    for n in range(0, 12, 2):
        world.place(*want(f"p{n}", {"numacpu": f"{n}", **OWN}, resources(1)))
    world.place(*want("alone", {**OWN, "smt": "isolate", "numacpu.other": "1"}, resources(1)))
    rejected = world.reject(*want("big", OWN, resources(60)))
    assert "; held: default/odd/app lists CPUs 1,3,5," in rejected.message
    assert "… (31 CPUs), default/alone/app has exclusive CPU 12 and" in rejected.message
    assert "idle, default/p0/app has exclusive CPU 0," in rejected.message
    assert rejected.message.endswith("and 4 more")


def test_quotas_of_exclusive_cpus_count_idle_siblings() -> None:
    team = NamespacePatternQuota(
        name="quotas.namespaces[0]",
        namespaces=("team-*",),
        quota=CPUWithholdingQuota(exclusive=CPUAmount(6)),
    )
    world = limited(
        machines.dual_smt(),
        quota=CPUWithholdingQuota(exclusive=CPUAmount(percent=25)),
        namespaces=(team,),
    )  # 64 CPUs
    world.place(*want("a", ISOLATED, resources(2), namespace="team-1"))
    says(
        world.reject(*want("b", ISOLATED, resources(2), namespace="team-1")),
        "QuotaExceeded",
        "6 exclusive CPUs of namespace team-1 (quotas.namespaces[0].exclusiveCPUs)",
        "4 used, 4 requested; expected at most 2 more",
        "team-1/a/app has exclusive CPUs",
    )
    assert rule_of(world).startswith("quotas.namespaces[0].exclusiveCPUs allows 6")
    world.place(*want("b", OWN, resources(2), namespace="team-1"))
    world.place(*want("c", OWN, resources(6), namespace="team-2"))  # each by itself
    rejected = world.reject(*want("d", OWN, resources(5), namespace="other"))
    assert "16 exclusive CPUs (quotas.exclusiveCPUs): 12 used, 5 requested" in rejected.message
    world.place(*want("d", OWN, resources(4), namespace="other"))
    assert len(world.agent.current.state.exclusive | world.agent.current.state.idle_siblings) == 16


def test_quotas_of_a_namespaces_lists() -> None:
    team = NamespacePatternQuota(
        name="quotas.namespaces[0]",
        namespaces=("team",),
        quota=CPUWithholdingQuota(listed=CPUAmount(4)),
    )
    world = World(
        machines.dual_smt(), replace(KEEPS, limits=QuotasAndPoolFloor(namespaces=(team,)))
    )
    world.place(*want("a", {"numacpu": "0-2"}, namespace="team"))
    world.place(*want("x", {"numacpu": "8-20"}, namespace="other"))
    rejected = world.reject(*want("b", {"numacpu": "2-5"}, namespace="team"))
    assert "4 listed CPUs of namespace team (quotas.namespaces[0].listedCPUs)" in rejected.message
    assert "3 used, 3 requested" in rejected.message
    assert "default" not in rejected.message.partition("held")[2]
    world.place(*want("b", {"numacpu": "2-3"}, namespace="team"))


def test_idle_siblings_are_bounded_for_everybody_together() -> None:
    world = World(machines.dual_smt())
    world.place(*want("a", ISOLATED, resources(12)))
    rejected = world.reject(*want("b", ISOLATED, resources(8)))
    assert "16 idle siblings (quotas.idleSiblings): 12 used, 8 requested" in rejected.message
    world.place(*want("b", ISOLATED, resources(4)))


def test_a_rejected_growth_leaves_the_owner_what_it_has() -> None:
    world = limited(machines.dual_smt(), quota=CPUWithholdingQuota(exclusive=CPUAmount(4)))
    world.place(*want("a", OWN, resources(3)))
    had = world.has("a-app")
    says(world.update_rejected("a-app", resources(5)), "QuotaExceeded")
    assert world.has("a-app") == had
    assert world.update("a-app", resources(4)) is None


# --- the floor of the shared pool -----------------------------------------------------------------


def test_the_pool_keeps_a_twentieth_of_the_machine_unless_something_is_reserved() -> None:
    world = World(machines.dual_smt())  # 64 CPUs
    says(
        world.reject(*want("a", OWN, resources(62))),
        "SharedPoolFloor",
        "would leave 2 of the 64 CPUs in the shared pool for other containers; expected at least 3",
        "(sharedPool.minCPUs)",
    )
    world.place(*want("a", OWN, resources(61)))
    reserved = World(machines.dual_smt(), Settings(reserved_cpus=CPUSet([0])))
    reserved.place(*want("a", OWN, resources(63)))


def test_the_pool_of_a_small_machine_keeps_a_cpu() -> None:
    """A twentieth of eight is none, and a refusal that expects none would help nobody."""
    topology = machines.single_no_smt(cores_per_numa=8)
    rejected = World(topology).reject(*want("a", {"numacpu": "0-7", **OWN}, resources(8)))
    assert rejected.reason == "SharedPoolEmpty"
    assert "would leave 0 of the 8 CPUs in the shared pool" in rejected.message
    assert "expected at least 1 to stay" in rejected.message
    World(topology).place(*want("a", {"numacpu": "1-7", **OWN}, resources(7)))


@pytest.mark.parametrize("annotations", [{"numacpu": "0-1,3-31"}, {}])
def test_a_configured_floor_holds_for_lists_and_numbers(annotations: dict[str, str]) -> None:
    world = limited(machines.snc_smt(), pool=CPUAmount(percent=10))
    rejected = world.reject(
        *want("a", {**OWN, **annotations}, resources(31 if annotations else 30))
    )
    if annotations:
        rejected = world.reject(*want("a", {**OWN, "numacpu": "2-31"}, resources(30)))
    assert rejected.reason == "SharedPoolFloor"
    assert rule_of(world) == "the shared pool of the machine keeps 3 CPUs"


def test_a_numa_nodes_floor_sends_the_next_owner_to_another_one() -> None:
    world = limited(machines.snc_smt(), numa_pool=CPUAmount(2))  # 4 NUMA nodes of 8 CPUs
    places = [world.place(*want(f"p{n}", SINGLE, resources(6)))[1] for n in range(4)]
    assert places == ["0", "1", "2", "3"]
    rejected = world.reject(*want("more", SINGLE, resources(1)))
    assert rejected.reason == "TopologyAffinityError"
    assert "NUMA node 0: 0 CPUs" in rejected.message
    assert "default/p0/app has exclusive CPUs" in rejected.message
    says(world.reject(*want("any", OWN, resources(1))), "NotEnoughCPUs")


def test_a_list_below_a_numa_nodes_floor_is_rejected_by_name() -> None:
    topology = machines.snc_smt()
    world = limited(topology, numa_pool=CPUAmount(percent=25))
    cpus = sorted(topology.numa_nodes[1].cpus)
    listed = str(CPUSet(cpus[:-1]))
    says(
        world.reject(*want("a", {"numacpu": listed, **OWN}, resources(7))),
        "SharedPoolFloor",
        "would leave 1 of the 8 CPUs in the shared pool of NUMA node 1",
        "at least 2 to stay",
        "sharedPool.minCPUsPerNUMANode",
    )


def test_isolate_leaves_a_numa_node_its_floor() -> None:
    isolated = {**SINGLE, "smt": "isolate"}
    topology = machines.snc_single()
    world = limited(topology, numa_pool=CPUAmount(3), idle_siblings=CPUAmount(percent=100))
    assert world.place(*want("a", isolated, resources(2)))[1] == "0"
    assert world.place(*want("b", isolated, resources(1)))[1] == "1"
    assert world.place(*want("c", isolated, resources(1)))[1] == "1"
    assert world.reject(*want("d", isolated, resources(1))).reason == "TopologyAffinityError"
    pool = world.agent.current.desired.pool
    assert all(len(pool & topology.numa_nodes[i].cpus) >= 3 for i in (0, 1))


def test_the_floor_is_kept_where_a_core_is_shared_anyway() -> None:
    """Elsewhere it would cost the next owner a whole core."""
    topology = machines.single_smt()
    world = limited(topology, numa_pool=CPUAmount(1))
    world.place(*want("thread", {"numacpu": "0", **OWN}, resources(1)))
    world.place(*want("cores", {"smt": "full-core", **OWN}, resources(6)))
    pool = world.agent.current.desired.pool
    assert pool == topology.siblings_of(CPUSet([0])) - CPUSet([0])
    assert len(pool) == 1


def test_an_owner_that_grows_stays_above_a_numa_nodes_floor() -> None:
    world = limited(machines.snc_smt(), numa_pool=CPUAmount(2))
    world.place(*want("a", SINGLE, resources(4)))
    assert world.update("a-app", resources(6)) is None
    assert world.update("a-app", resources(7)) is not None
    world.place(*want("wide", {"policy": "best-effort"}, resources(6)))
    assert world.update("wide-app", resources(8)) is None
    assert machines.snc_smt().cpu_count_by_node(world.cpus("wide-app")) == {1: 6, 2: 2}


# --- memory and CPU time are booked as they are paid for ------------------------------------------


def test_an_unpaid_memory_limit_books_nothing_for_others() -> None:
    world = World(machines.dual_smt())  # 64 GiB on each of two NUMA nodes
    for n in range(3):
        wants = replace(burst(0.1, 1), memory_limit=32 << 40)
        world.place(*want(f"huge{n}", {"policy": "best-effort"}, wants, qos=BURSTABLE, score=990))
    left = NodeSnapshot(world.agent.current.machine, world.agent.current.state).free_memory
    assert sum(left.values()) > 120 * GIB
    world.place(*want("honest", SINGLE, resources(2, 40)))


def test_an_unpaid_cpu_limit_books_no_cpu_for_others() -> None:
    world = World(machines.dual_smt())
    for n in range(4):
        greedy = {"policy": "best-effort", "bind": "cpu"}
        world.place(*want(f"hog{n}", greedy, burst(0.001, 64), qos=BURSTABLE))
    world.place(*want("honest", SINGLE, resources(30)))


def test_a_resize_and_a_list_book_what_is_paid_for() -> None:
    world = World(machines.dual_smt())
    wants = replace(burst(1, 20), memory_limit=8 * GIB)
    shared = want("shared", {"policy": "best-effort"}, wants, qos=BURSTABLE, score=990)
    numa_node = int(world.place(*shared)[1])
    world.place(*want("list", {"numacpu": "0-1", "numamem": "1"}, wants, qos=BURSTABLE, score=990))
    paid = world.agent.current.machine.total_memory_bytes * 10 // 1000
    allocated = [world.allocation(f"{name}-app").charges for name in ("shared", "list")]
    assert [sum(c.cpu_milli for c in one.values()) for one in allocated] == [1000, 1000]
    assert [sum(c.memory for c in one.values()) for one in allocated] == [paid, paid]
    assert world.update("shared-app", Resources(cpu_quota=2_500_000, memory_limit=16 * GIB)) is None
    charge = world.allocation("shared-app").charges[numa_node]
    assert (charge.cpu_milli, charge.memory) == (1000, paid)


def test_an_annotation_too_long_to_be_of_our_writing_is_not_read_back(world: World) -> None:
    world.place(*want("a", SINGLE, resources(2)))
    key = "numa.kubernetes.io/assigned"
    made = world.live["a-app"]
    padded = made.annotations[key].replace('"reason":"', '"reason":"' + "y" * 4096)
    world.live["a-app"] = replace(made, annotations={key: padded})
    world.restart(lost=True)
    assert "yy" not in world.allocation("a-app").reason, "decided anew"


def test_a_list_that_a_resize_does_not_pay_for_any_more_is_not_resized(world: World) -> None:
    world.place(*want("owner", {"numacpu": "2-5", **OWN, "on-failure": "unpinned"}, resources(4)))
    says(world.update_rejected("owner-app", resources(1)), "CPUsNotRequested")
    assert world.has("owner-app")[0] == "2-5"


def test_a_rejection_names_the_floor_and_no_list_that_gives_way() -> None:
    """A soft list keeps nobody from anything but by its request, and one CPU is left to share."""
    world = World(machines.single_no_smt())
    world.put("soft", {"numacpu": "0-3"}, 0.5, qos=QoSClass.BURSTABLE)
    for asks in ({"cpus": "exclusive"}, {"policy": "single-numa-node", "cpus": "exclusive"}):
        answer = world.rejected("own", asks, 4)
        assert answer.message.endswith(
            "; the shared pool keeps 1 CPU (sharedPool.minCPUs); held: default/soft/app requests "
            "0.5 CPUs of the shared pool"
        )
    assert "keeps" not in world.rejected("own", {"cpus": "exclusive"}, 5).message
    assert world.put("own", {"cpus": "exclusive"}, 3)[0] == "0-2"
