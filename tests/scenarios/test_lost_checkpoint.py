"""The checkpoint is lost or of an older version: what runs, and what we wrote into it, counts."""

import io
import itertools
import json
import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from nri_numa.agent import release
from nri_numa.engine.assigned import is_signed, sign_document
from nri_numa.engine.old_records import with_new_names, with_old_names
from nri_numa.engine.state import Allocation, ContainerKind
from nri_numa.machine.cgroups import CgroupReader
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.settings import KubeletRules, Rule, Settings
from nri_numa.model.workload import (
    Container,
    ContainerUpdate,
    PodSandbox,
    PodTable,
    QoSClass,
    Resources,
)
from nri_numa.observe import logs
from nri_numa.store.checkpoint import CheckpointStore
from tests.beds.cgroup_tree import CgroupTree
from tests.beds.world import OWN, PREFIX, World, container, pod, resources
from tests.machines import named as machines

ISOLATED = {"cpus": "exclusive", "smt": "isolate"}
MARK = PREFIX + "assigned"

usual = partial(World, machines.single_no_smt())


def met_in_a_gap(
    world: World, name: str, note: Mapping[str, object] | str | None = None, cpus: str = "",
    wishes: dict[str, str] | None = None, wants: Resources | None = None,
    qos: QoSClass = QoSClass.BEST_EFFORT,
) -> Container:  # fmt: skip
    """A container that was created without us, and carries what somebody wrote."""
    of = pod(name, wishes, qos=qos)
    text = note if isinstance(note, str) or note is None else json.dumps(note)
    made = replace(
        container(of, wants=replace(wants or Resources(), cpus=cpus)),
        annotations={} if text is None else {MARK: text},
        cgroups_path=f"/pods/{name}",
    )
    world.meet(of, made)
    return made


@pytest.mark.parametrize("key", [False, True])
def test_an_owner_that_ended_meanwhile_leaves_nobody_outside_the_pool(key: bool) -> None:
    """Its neighbours have a cpuset that is not the pool any more, and are ours all the same."""
    world = World(machines.snc_single(cores_per_numa=8, memory_gib=64))
    neighbours = [f"n{i}-app" for i in range(3)]
    for i in range(3):
        world.put(f"n{i}", {}, 0.5, 1)
    world.put("own", OWN, 8, 1)
    narrowed = world.cpus(neighbours[0])
    assert len(narrowed) == 24
    del world.live["own-app"]
    world.restart(lost=True, key=b"made anew" if key else None)
    kinds = {world.allocation(i).kind for i in neighbours}
    assert kinds == {ContainerKind.UNPINNED}
    assert all(world.cpus(i) == world.topology.allowed for i in neighbours)
    world.put("later", OWN, 16, 1)
    assert not any(world.cpus(i) & world.cpus("later-app") for i in neighbours)
    world.check()
    assert world.count("assigned_annotations_rejected_total") == 0
    assert world.count("unknown_cpusets_total") == 0


def marking(directory: Path, settings: Settings | None = None) -> tuple[World, CgroupTree]:
    """Sixteen CPUs; cgroups of containers carry extended attributes, as the kernel's do."""
    topology = machines.single_no_smt(cores_per_numa=16)
    tree = CgroupTree(directory / "cgroup", 2, topology.online, NUMASet.parse("0"))
    return World(topology, settings, cgroups=CgroupReader(str(tree.root))), tree


@pytest.mark.parametrize("key", [False, True])
def test_a_gap_container_that_we_narrowed_stays_ours(tmp_path: Path, key: bool) -> None:
    """It started while we were away, so it has no annotation of ours; its cgroup carries it."""
    world, tree = marking(tmp_path)
    world.put("own", OWN, 4, 1)
    plain = met_in_a_gap(world, "plain")
    tree.write("/pods/plain")
    world.restart()
    assert world.has(plain.id)[0] == "4-15"
    del world.live["own-app"]
    world.restart(lost=True, key=b"made anew" if key else None)
    assert world.allocation(plain.id).kind is ContainerKind.UNPINNED
    world.put("later", OWN, 6, 1)
    assert not world.cpus(plain.id) & world.cpus("later-app")
    world.check()
    assert world.count("unknown_cpusets_total") == 0


def test_one_that_lost_its_cpus_in_a_resize_stays_where_it_shares(tmp_path: Path) -> None:
    """Its annotation is of its creation; its cgroup carries what it has since."""
    topology = machines.dual_no_smt()
    tree = CgroupTree(tmp_path / "cgroup", 2, topology.online, NUMASet.parse("0-1"))
    world = World(topology, cgroups=CgroupReader(str(tree.root)))
    for name in ("first", "second"):
        of = pod(name, {"policy": "single-numa-node"})
        made = replace(container(of, wants=resources(4, 1)), cgroups_path=f"/pods/{name}")
        world.place(of, made)
        tree.write(f"/pods/{name}", world.has(made.id)[0])
    assert world.update("second-app", resources(3.5, 1)) is None
    world.agent.post_update_container("second-app")
    before = world.has("second-app")
    assert before == ("8-15", "1")
    world.stop("first-app")
    world.restart(lost=True)
    assert world.has("second-app") == before
    world.check()


def test_what_an_earlier_start_could_not_decide_in_time_is_marked_later(tmp_path: Path) -> None:
    world, tree = marking(tmp_path)
    world.put("own", OWN, 4, 1)
    plain = met_in_a_gap(world, "plain", cpus="0-15")
    tree.write("/pods/plain", "0-15")
    ticks = itertools.count(1.0, 10.0)
    world.clock = lambda: next(ticks)
    world.restart()
    world.clock = lambda: 0.0
    del world.live["own-app"]
    world.restart(lost=True)
    assert world.allocation(plain.id).kind is ContainerKind.UNPINNED


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_leaves_nobody_on_cpus_of_another(tmp_path: Path, seed: int) -> None:
    """Twenty-four restarts; meanwhile pods come and go, and parts of the state are lost."""
    rng = random.Random(seed)
    world, tree = marking(tmp_path)
    names = (f"p{number}" for number in itertools.count())

    def away() -> None:
        name = next(names)
        wants = resources(rng.choice((1, 2, 3)), 1)
        exclusive = rng.random() < 0.4
        met_in_a_gap(
            world, name, wishes=OWN if exclusive else {}, wants=wants if exclusive else None,
            qos=QoSClass.GUARANTEED if exclusive else QoSClass.BEST_EFFORT,
        )  # fmt: skip
        tree.write(f"/pods/{name}")

    for _ in range(24):
        for _ in range(rng.randrange(4)):
            of = pod(next(names), OWN if rng.random() < 0.5 else {})
            made = container(of, wants=resources(rng.choice((1, 2, 3)), 1))
            world.create(of, replace(made, cgroups_path=f"/pods/{of.name}"))
            if made.id in world.live:
                tree.write(f"/pods/{of.name}", *world.has(made.id))
        for _ in range(rng.randrange(3)):
            if world.live:
                world.stop(rng.choice(sorted(world.live)))
        for _ in range(rng.randrange(3)):
            away()
        for _ in range(rng.randrange(3)):
            if world.live:
                del world.live[rng.choice(sorted(world.live))]
        lost = rng.choice(("nothing", "some", "all", "key"))
        if lost == "some":
            for name in sorted(world.store.documents):
                if rng.random() < 0.5:
                    del world.store.documents[name]
        elif lost != "nothing":
            world.store.documents.clear()
        if lost == "key":
            world.key = rng.randbytes(8)
        world.restart()
        state = world.agent.current.state
        assert ContainerKind.FOREIGN not in {a.kind for a in state.allocations.values()}
        world.check()


def test_an_owner_of_another_size_is_out_of_date(caplog: pytest.LogCaptureFixture) -> None:
    """Resized by us, and once more while we were away: nothing says how many CPUs are still its."""
    world = World(machines.single_no_smt(cores_per_numa=8))
    world.put("own", OWN, 2, 1)
    assert world.update("own-app", resources(4, 1)) is None
    has = world.live["own-app"].resources
    world.live["own-app"] = replace(
        world.live["own-app"], resources=replace(resources(3, 1), cpus=has.cpus, mems=has.mems)
    )
    world.restart(lost=True)
    assert world.count("assigned_annotations_rejected_total") == 1
    assert "the runtime has 4 CPUs for it, and its size is 3 CPUs" in caplog.text + str(
        [vars(record).get("fields") for record in caplog.records]
    )


def test_after_release_everybody_is_decided_anew() -> None:
    """The runtime has every CPU and memory node for all of them, which nobody asked for."""
    world = World(machines.snc_single_no_smt())
    world.put("a-listed", {"numacpu": "1", "numamem": "1"}, 1, 1)
    world.put("memory", {"numamem": "1"}, 0.5, 1)
    world.put("shared", {"policy": "single-numa-node", "cpus": "shared"}, 0.5, 1)
    world.put("own", {"policy": "single-numa-node"}, 2, 1)
    given = release.plan_release(
        world.agent.current.machine,
        world.agent.current.state,
        PodTable.from_pods(world.pods.values()),
        world.live.values(),
    )
    world.apply(one.release_update for one in given if one.has_changes)
    assert {world.has(i) for i in world.live} == {("0-7", "0-1")}
    world.restart(lost=True)
    assert world.has("a-listed-app") == ("1", "1")
    assert world.allocation("own-app").kind is ContainerKind.EXCLUSIVE
    assert not world.cpus("own-app") & world.cpus("a-listed-app")
    assert world.has("memory-app")[1] == "1"
    assert world.has("shared-app")[1] in ("0", "1")
    world.put("later", OWN, 1, 1)


def test_a_listed_cpu_that_came_online_since_is_kept() -> None:
    """The annotation is from before, and the runtime has it by our update."""
    whole = machines.snc_single_no_smt()
    world = World(machines.snc_single_no_smt(offline=CPUSet.parse("5")))
    world.put("listed", {"numacpu": "1"}, 1, 1)
    of = world.pods["sandbox-listed"]
    world.pods[of.id] = replace(of, annotations={PREFIX + "numacpu": "1,5"})
    world.topology = whole
    world.apply([ContainerUpdate("listed-app", cpus="1,5")])
    world.restart(lost=True)
    assert world.has("listed-app")[0] == "1,5"
    assert world.count("assigned_annotations_rejected_total") == 0


def test_what_was_decided_is_kept_where_the_pod_s_annotations_cannot_be_read_any_more() -> None:
    world = World(machines.snc_single_no_smt())
    world.put("listed", {"numacpu": "1", "numamem": "0"}, 1, 1)
    of = world.pods["sandbox-listed"]
    world.pods[of.id] = replace(of, annotations={PREFIX + "numacpu": "nothing"})
    world.restart(lost=True)
    assert world.has("listed-app") == ("1", "0")
    assert world.count("assigned_annotations_rejected_total") == 0


def test_every_container_that_is_created_is_marked(world: World) -> None:
    """Unbound ones too: nothing else tells them from somebody else's pins later on."""
    world.synchronize()
    answer = world.admit(pod("plain", qos=QoSClass.BEST_EFFORT))
    assert json.loads(answer.adjustment.annotations[MARK])["kind"] == "unpinned"
    assert (answer.adjustment.cpus, answer.adjustment.mems) == ("", "")
    assert answer.adjustment.env == {}


def test_a_container_that_somebody_else_pinned_stays_foreign(world: World) -> None:
    """It came with its cpuset, and its mark says so."""
    world.place(pod("kubelet"), wants=replace(resources(1), cpus="2"))
    world.restart(lost=True)
    assert world.allocation("kubelet-app").kind is ContainerKind.FOREIGN
    assert world.has("kubelet-app")[0] == "2"
    assert world.count("unknown_cpusets_total") == 0


def test_a_pin_that_is_not_the_pool_is_somebody_elses(world: World) -> None:
    """Nothing tells who set it: it is left alone, said and counted."""
    world.put("first", OWN, 1, 1)
    made = met_in_a_gap(world, "kubelet", cpus="2", wants=resources(1))
    world.restart(lost=True)
    assert world.allocation(made.id).kind is ContainerKind.FOREIGN
    assert world.live[made.id].resources.cpus == "2"
    assert world.count("unknown_cpusets_total") == 1
    # Once: from now on it is known.
    world.synchronize()
    world.restart()
    assert world.count("unknown_cpusets_total") == 0


def test_an_owner_on_a_foreign_containers_cpus_is_said_and_counted(world: World) -> None:
    world.synchronize()
    for name in ("a", "b"):
        world.place(pod(name), wants=replace(resources(1), cpus="0-2"))  # wide: not kept for last
    assert world.count("foreign_containers_on_exclusive_cpus") == 0
    world.put("own", OWN, 1, 1)
    assert world.has("own-app")[0] == "0"
    assert world.count("foreign_containers_on_exclusive_cpus") == 2
    assert world.count("foreign_overlaps_total") == 2
    world.put("other", OWN, 1, 1)
    assert world.count("foreign_overlaps_total") == 4
    world.stop("other-app")
    assert world.count("foreign_overlaps_total") == 4
    world.stop("own-app")
    assert world.count("foreign_containers_on_exclusive_cpus") == 0


def test_idle_siblings_follow_from_the_cpus_that_an_owner_has_now() -> None:
    """The annotation is as old as the container, and a resize changed both."""
    world = World(machines.dual_smt())
    world.put("own", ISOLATED, 2, 1)
    assert world.update("own-app", resources(4, 1)) is None
    before = world.allocation("own-app")
    assert len(before.idle_siblings) == 4
    world.restart(lost=True)
    after = world.allocation("own-app")
    assert (after.cpus, after.idle_siblings, after.smt) == (
        before.cpus,
        before.idle_siblings,
        before.smt,
    )
    assert after.reason == before.reason
    for name in ("thief", "other"):
        world.put(name, OWN, 8, 1)
        assert not world.cpus(f"{name}-app") & (before.cpus | before.idle_siblings)


def test_annotations_of_versions_that_did_not_tell_the_mode_keep_their_siblings() -> None:
    world = World(machines.dual_smt(), key=b"")
    world.put("own", ISOLATED, 2, 1)
    before = world.allocation("own-app")
    note = json.loads(world.live["own-app"].annotations[MARK])
    del note["smt"]
    world.live["own-app"] = replace(world.live["own-app"], annotations={MARK: json.dumps(note)})
    world.restart(lost=True)
    assert world.allocation("own-app").idle_siblings == before.idle_siblings


def claim(**fields: object) -> dict[str, object]:
    """What an owner of CPU 1 would carry."""
    return {
        "cpus": "1",
        "mems": "",
        "policy": "none",
        "kind": "exclusive",
        "format": 2,
        "numaNodes": "0",
        "aligned": True,
        "reason": "x",
    } | fields


FORGED = {
    "thirty-one CPUs for nothing": (claim(cpus="1-31"), {}, 0.0, "1-31"),
    "more than it pays for": (claim(cpus="1-4"), OWN, 2.0, "1-4"),
    "reserved ones": (claim(cpus="0"), OWN, 1.0, "0"),
    "what the runtime did not give": (claim(), OWN, 1.0, ""),
    "ownership of a list": (
        claim(kind="listed", exclusive=True), {"numacpu": "1"}, 1.0, "1"
    ),
    "a list it does not pay for": (
        claim(kind="listed", cpus="3-5", exclusive=True), {"numacpu": "3-5", **OWN}, 1.0, "3-5"
    ),
    "NUMA nodes that are not there": (
        claim(kind="shared", cpus="", mems="9", numa="9"), {"policy": "best-effort"}, 0.5, ""
    ),
    "a list it has not": (claim(kind="listed", cpus="1-9"), {"numacpu": "1"}, 1.0, "1-9"),
    "a list where its pod has none": (claim(kind="listed"), {}, 1.0, "1"),
    "a size that cannot be owned": (claim(), OWN, 0.5, "1"),
    "memory nodes it does not list": (
        claim(kind="unpinned", cpus="", mems="1"), {"numamem": "0"}, 1.0, ""
    ),
    "memory nodes where its pod lists none": (
        claim(kind="unpinned", cpus="", mems="1"), {}, 1.0, ""
    ),
    "to be somebody else's": (claim(kind="foreign"), OWN, 1.0, "1"),
    "to be let alone": (claim(kind="unpinned", cpus=""), OWN, 1.0, ""),
    "to be bound": (claim(kind="shared", cpus="", numa="1"), {}, 1.0, ""),
    "what nobody can read": (claim(), {"policy": "x"}, 1.0, "1"),
}  # fmt: skip


FORGED_BEYOND_LISTS = {
    "a list it has not": "the runtime has CPUs 2-9 for it",
    "memory nodes it does not list": "the runtime has NUMA node 1 for it",
}


@pytest.mark.parametrize("name", FORGED)
@pytest.mark.parametrize("signed", [False, True])
def test_no_forgery_is_adopted(name: str, signed: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Also with the signature of another container of the same node on it."""
    note, wishes, cpus, has = FORGED[name]
    world = World(
        machines.snc_single(cores_per_numa=8, memory_gib=64),
        Settings(reserved_cpus=CPUSet.parse("0")),
    )
    world.put("neighbour", {}, 0.5, 1)
    text = json.dumps(note)
    if signed:
        real = json.loads(world.live["neighbour-app"].annotations[MARK])["signature"]
        text = f'{text[:-1]},"signature":"{real}"}}'
    made = met_in_a_gap(
        world, "mallory", text, has, wishes, resources(cpus, 1) if cpus else None,
        QoSClass.GUARANTEED if cpus else QoSClass.BEST_EFFORT,
    )  # fmt: skip
    world.synchronize()
    assert world.count("assigned_annotations_rejected_total") == 1
    log = str([vars(record).get("fields") for record in caplog.records])
    assert FORGED_BEYOND_LISTS.get(name, "") in log
    allocation = world.allocation(made.id)
    assert allocation.reason != "x"
    assert len(world.agent.current.state.exclusive) <= cpus
    assert not world.agent.current.state.exclusive & CPUSet.parse("0")


def test_nobody_is_adopted_as_the_owner_of_the_last_cpus(world: World) -> None:
    met_in_a_gap(world, "a", claim(cpus="0-3"), "0-3", OWN, resources(4), QoSClass.GUARANTEED)
    world.synchronize()
    assert world.allocation("a-app").kind is ContainerKind.UNPINNED


def test_the_signature_of_one_container_is_worth_nothing_on_another() -> None:
    """A copy names CPUs that belong to somebody; its bearer is decided anew."""
    world = World(machines.dual_smt())
    world.put("own", OWN, 4, 1)
    text, has = world.live["own-app"].annotations[MARK], world.has("own-app")[0]
    del world.live["own-app"]
    copy = met_in_a_gap(world, "copy", text, has, wants=resources(0.5))
    world.restart(lost=True)
    assert not world.agent.current.state.exclusive
    assert world.allocation(copy.id).kind is not ContainerKind.EXCLUSIVE
    assert world.count("assigned_annotations_rejected_total") == 1


def test_what_was_signed_is_believed_whatever_the_rules_say_by_now() -> None:
    """A running container does not move because somebody changed a rule meanwhile."""
    rule = Rule(namespaces=("default",), values={"cpus": "exclusive"})
    world = World(machines.dual_smt(), Settings(rules=(rule,)))
    world.put("own", {}, 4, 1)
    before = world.has("own-app")
    world.settings = Settings()
    world.restart(lost=True)
    assert world.has("own-app") == before
    assert world.agent.current.state.exclusive == CPUSet.parse(before[0])
    assert world.count("assigned_annotations_rejected_total") == 0


STATIC = {"kubelet": KubeletRules(static_cpus=True, cpus=True)}


@pytest.mark.parametrize(
    ("settings", "wishes", "cpus"),
    [
        ({}, OWN, 4),
        ({}, ISOLATED, 4),
        ({}, {"policy": "single-numa-node"}, 2),
        ({}, {"policy": "restricted"}, 0.5),
        ({}, {"numacpu": "3-5", "numamem": "0"}, 1),
        ({}, {"numacpu": "3-5", "cpus": "exclusive"}, 3),
        ({}, {"numamem": "1"}, 1),
        ({}, {"numamem": "1", "policy": "best-effort", "cpus": "exclusive"}, 2),
        ({}, {"numamem": "1", "policy": "single-numa-node"}, 0.5),
        ({}, {}, 1),
        (STATIC, {}, 2),  # CPUs of its own without a policy
        (STATIC, {}, 0.5),
        (STATIC, {"policy": "single-numa-node"}, 2),
        (STATIC, {"policy": "single-numa-node"}, 0.5),  # all shared ones beside memory of a node
    ],
)
def test_without_the_key_too_honest_containers_are_adopted(
    settings: dict[str, bool], wishes: dict[str, str], cpus: float
) -> None:
    """The state directory is lost whole, or an older version wrote the annotations."""
    world = World(machines.dual_smt(), Settings(**settings))  # type: ignore[arg-type]
    has = world.put("honest", wishes, cpus, 1)
    before = world.allocation("honest-app")
    world.restart(lost=True, key=b"made anew")
    assert world.has("honest-app") == has
    after = world.allocation("honest-app")
    assert (after.kind, after.mems) == (before.kind, before.mems)
    assert (after.cpus, after.idle_siblings, after.exclusive) == (
        before.cpus,
        before.idle_siblings,
        before.exclusive,
    )
    assert world.count("assigned_annotations_rejected_total") == 0


def test_many_doubts_are_said_in_a_few_lines() -> None:
    output = io.StringIO()
    logs.setup_logging("info", stream=output)
    world = World(machines.dual_smt())
    for number in range(30):
        met_in_a_gap(world, f"m{number}", "{}", cpus="1")
    world.synchronize()
    world.put("own", OWN, 4, 1)
    assert world.count("assigned_annotations_rejected_total") == 30
    assert world.count("unknown_cpusets_total") == 30
    said = [line for line in output.getvalue().splitlines() if "WARN" in line.upper()]
    assert 12 <= len(said) <= 13
    assert any("default/m0/app" in line and "and 25 more" in line for line in said)


def test_an_owner_whose_shares_say_little_keeps_its_cpus_at_every_later_start() -> None:
    """Its limit was lifted and is lost with the checkpoint; the shares are no measure of it."""
    world = World(machines.single_smt(), Settings(kubelet=KubeletRules(static_cpus=True)))
    world.put("db", {}, 1, 1)
    assert world.update("db-app", Resources(cpu_shares=2)) is None  # a limit cannot be taken away
    world.restart(lost=True)
    had = world.has("db-app")
    assert len(CPUSet.parse(had[0])) == 1
    world.restart()
    assert world.has("db-app") == had
    assert world.allocation("db-app").kind is ContainerKind.EXCLUSIVE


def test_what_we_signed_comes_before_what_anybody_may_have_written(world: World) -> None:
    """A claim without a signature takes the last CPU of the pool, and the true owner's is next."""
    world.put("db", OWN, 3, 1)
    made = met_in_a_gap(world, "a", claim(cpus=""), "3", OWN, resources(1, 1), QoSClass.GUARANTEED)
    had = world.has("db-app")
    world.restart(lost=True)
    assert world.has("db-app") == had
    assert world.allocation("db-app").kind is ContainerKind.EXCLUSIVE
    assert world.allocation(made.id).kind is not ContainerKind.EXCLUSIVE


@pytest.mark.parametrize(("reason", "believed"), [("as \U0001f600", True), ("\ud800", False)])
def test_half_a_pair_of_surrogates_is_not_believed(reason: str, believed: bool) -> None:
    """JSON can spell it, UTF-8 cannot: neither checkpoint nor API could be written with it."""
    world = World(machines.single_no_smt())
    note = claim(cpus="3", mems="0", reason=reason)
    made = met_in_a_gap(world, "a", note, "3", OWN, resources(1, 1), QoSClass.GUARANTEED)
    world.synchronize()
    found = world.allocation(made.id).reason
    assert (found == reason) is believed
    found.encode()


def test_one_that_claims_what_another_has_is_decided_anew_and_nobody_else() -> None:
    """A checkpoint that was damaged in a way that still reads."""
    world = World(machines.dual_no_smt())
    world.synchronize()
    assert [world.put(name, OWN, 2, 1)[0] for name in "abcd"] == ["0-1", "2-3", "4-5", "6-7"]
    ids = [f"{name}-app" for name in "abcd"]
    world.store.documents["c/" + ids[1]]["cpus"] = "0-1"
    world.restart()
    world.check()
    assert [world.has(i)[0] for i in (ids[0], ids[2], ids[3])] == ["0-1", "4-5", "6-7"]
    assert all(world.allocation(i).exclusive for i in (ids[0], ids[2], ids[3]))
    assert len(world.cpus(ids[1])) == 2


def test_without_a_key_nothing_is_signed() -> None:
    """An empty key is one that everybody knows."""
    assert is_signed(sign_document("{", "c", b"key"), "c", b"key")
    assert not is_signed(sign_document("{", "c", b""), "c", b"")


@pytest.mark.parametrize("spoiled", ["é", "𝟘", "\udc80"])
def test_a_signature_of_other_letters_is_a_wrong_one(spoiled: str) -> None:
    """Anybody may write the annotation; it must not stop the synchronisation."""
    text = sign_document("{", "c", b"key")
    assert not is_signed(text[:-3] + spoiled + text[-2:], "c", b"key")


GOLDEN = Path(__file__).parents[1] / "golden"
CHECKPOINT = GOLDEN / "checkpoints" / "v1" / "containers.checkpoint"
RUNTIME = GOLDEN / "upgrade" / "containers.json"
"""Pods and containers as the runtime had them, each with the annotation of that version."""
IDENTITY = {"version": "0.1.0", "machine": "two sockets", "boot": "b1"}


class Runtime(msgspec.Struct):
    """Pods and containers of the fixture."""

    pods: list[PodSandbox]
    containers: list[Container]


def old_documents() -> dict[str, Any]:
    """What the version before wrote, by container."""
    (_, line) = CHECKPOINT.read_text().splitlines()
    documents = json.loads(line.split(" ", 4)[4])["set"]
    return {key[2:]: document for key, document in documents.items() if key.startswith("c/")}


def node(documents: dict[str, Any]) -> World:
    """The node with those containers, before the agent starts."""
    world = World(machines.dual_smt(cores_per_numa=8), Settings(reservation_seconds=600.0))
    world.store.documents = documents
    runtime = msgspec.json.decode(RUNTIME.read_bytes(), type=Runtime)
    world.pods = {of.id: of for of in runtime.pods}
    world.live = {made.id: made for made in runtime.containers}
    return world


def facts(a: Allocation) -> dict[str, Any]:
    """What an allocation says under the old names, for comparison."""
    return {
        "kind": a.kind, "cpus": a.cpus, "mems": a.mems, "numa": a.numa_nodes,
        "idle": a.idle_siblings, "owned": a.exclusive, "soft": a.yields_to_exclusive,
        "preferred": a.aligned, "leaves": a.migrating_from, "cpu_milli": a.cpu_milli,
    }  # fmt: skip


def old_facts(document: dict[str, Any]) -> dict[str, Any]:
    texts = {key: CPUSet.parse(document.get(key, "")) for key in ("cpus", "idle")}
    nodes = {key: NUMASet.parse(document.get(key, "")) for key in ("mems", "numa", "leaves")}
    flags = {key: document.get(key, False) for key in ("owned", "soft")}
    return {
        **texts, **nodes, **flags, "kind": ContainerKind(document["kind"]),
        "preferred": document.get("preferred", True), "cpu_milli": document.get("cpu_milli", 0),
    }  # fmt: skip


def test_a_checkpoint_of_the_version_before_moves_nobody(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.write_bytes(CHECKPOINT.read_bytes())
    store = CheckpointStore(str(tmp_path), identity=IDENTITY, clock=lambda: 0.0)
    loaded = store.load()
    store.close()
    assert loaded.problems == []
    written = path.read_text()
    assert all(line.startswith("2 ") for line in written.splitlines())
    for old in ("numa", "preferred", "idle", "owned", "soft", "leaves", "fixed", "former"):
        # A pod's affinity is the one thing that is still called preferred.
        assert f'"{old}":' not in written or old == "preferred"
    world = node(loaded.entries)
    assert world.restart() == ()
    state = world.agent.current.state
    documents = old_documents()
    assert {i: facts(a) for i, a in state.allocations.items()} == {
        i: old_facts(document) for i, document in documents.items()
    }
    assert {i for i, a in state.allocations.items() if a.immovable} == {"policy-app"}
    assert str(state.pods["uid-two"].affinity) == "1"
    assert str(state.pods["uid-ended"].previous["init"].cpus) == documents["ended-init"]["cpus"]
    world.check()
    assert world.restart() == (), "nor does the next start"


def test_annotations_of_the_version_before_move_nobody() -> None:
    """The checkpoint is lost, so they are all that says whose the CPUs are."""
    world = node({})
    before = {i: world.cpus(i) for i in world.live}
    updates = world.restart()
    # The reservation for a pod whose container ended is lost with the checkpoint.
    given_back = CPUSet.parse(old_documents()["ended-init"]["cpus"])
    assert {one.container_id for one in updates} == {"mems-app", "plain-app", "yielding-app"}
    assert {world.cpus(i) - cpus for i, cpus in before.items()} == {CPUSet(), given_back}
    state = world.agent.current.state
    expected = {i: old_facts(d) for i, d in old_documents().items() if i in world.live}
    assert {i: facts(a) for i, a in state.allocations.items()} == expected
    world.check()


def test_an_annotation_of_a_newer_version_is_not_adopted() -> None:
    world = node({})
    made = world.live["own-app"]
    (name, text) = next(iter(made.annotations.items()))
    newer = json.dumps(json.loads(text) | {"format": 3})
    world.live = {"own-app": replace(made, annotations={name: newer})}
    output = io.StringIO()
    logs.setup_logging("debug", stream=output)
    world.restart()
    assert "is in format 3, expected at most 2: decided anew" in output.getvalue()


def test_a_document_has_the_names_of_either_format() -> None:
    document = {"podUID": "u", "numaNodes": "0", "exclusive": True, "cpus": "1"}
    assert with_new_names(with_old_names(document)) == document
    assert with_old_names(document) == {"pod_uid": "u", "numa": "0", "owned": True, "cpus": "1"}
