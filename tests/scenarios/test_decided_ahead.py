"""Decisions made ahead: what is taken, and everything that makes one worthless."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from nri_numa.engine.ahead import labels_read
from nri_numa.engine.decision import Reading
from nri_numa.engine.state import Kind
from nri_numa.engine.values.answers import ContainerUpdate
from nri_numa.engine.values.kubelet import KubeletGrants
from nri_numa.engine.values.limits import Permission
from nri_numa.engine.values.settings import Rule, Settings
from nri_numa.engine.values.workload import Container, PodSandbox
from nri_numa.machine.cpuset import CPUSet
from nri_numa.node.ahead import LONGEST, SHAPES, UNUSED, DecidedAhead
from nri_numa.nri import conversion
from nri_numa.nri.adapter import Adapter
from nri_numa.nri.handler import RequestRefused
from nri_numa.nri.shapes import ReadyAnswer
from nri_numa.nri.wire.pb import nri_pb2 as pb
from tests.beds.world import PREFIX, World
from tests.machines import named as machines

OWN = {"policy": "single-numa-node"}
SHARED = {"policy": "best-effort"}


class Node:
    """A world that decides ahead, and what waits until a reply has left."""

    def __init__(self, settings: Settings | None = None, *, observe: bool = False) -> None:
        self.world = World(machines.dual_smt(), settings, observe=observe)
        self.agent = self.world.agent
        self.waiting: list[Callable[[], object]] = []
        self.time, self.takes = 0.0, 0.0
        self.ahead = DecidedAhead(
            self.agent,
            self.world.metrics,
            now=lambda: 1_000_000.0,
            reading=lambda: self.world.reading,
            later=self.waiting.append,
            clock=self.clock,
        )
        self.adapter = Adapter(self.agent, self.world.metrics, ahead=self.ahead)

    def clock(self) -> float:
        """Time goes on by as much whenever somebody looks."""
        self.time += self.takes
        return self.time

    def rest(self) -> None:
        """No request waits: what may wait is done."""
        while self.waiting:
            self.waiting.pop(0)()

    def request(
        self,
        name: str,
        asks: dict[str, str],
        cpus: int = 0,
        *,
        labels: dict[str, str] | None = None,
    ) -> pb.CreateContainerRequest:
        request = pb.CreateContainerRequest()
        pod, made = request.pod, request.container
        pod.id, pod.uid, pod.name, pod.namespace = f"s-{name}", f"u-{name}", name, "shop"
        pod.annotations.update({PREFIX + key: value for key, value in asks.items()})
        pod.labels.update(labels or {})
        pod.linux.cgroup_parent = "/kubepods/pod" if cpus else "/kubepods/burstable/pod"
        made.id, made.pod_sandbox_id, made.name = f"c-{name}", pod.id, "app"
        cpu = made.linux.resources.cpu
        milli = cpus * 1000 or 50
        cpu.shares.value, cpu.quota.value = milli * 1024 // 1000, milli * 100
        cpu.period.value = 100_000
        return request

    def create(
        self, name: str, asks: dict[str, str] = OWN, cpus: int = 2, **more: dict[str, str]
    ) -> bool:
        """Create a container; whether it was decided ahead."""
        answer = self.adapter.create_container(self.request(name, asks, cpus, **more))
        return isinstance(answer, ReadyAnswer)

    def count(self, result: str) -> float:
        return self.world.metrics.registry.get_sample_value(
            "nri_numa_decided_ahead_total", {"result": result}
        ) or 0.0  # fmt: skip

    def ready(self) -> None:
        """The next container like ``first`` would be a hit."""
        self.create("first")
        self.rest()


def test_the_second_of_two_replicas_is_decided_ahead() -> None:
    node = Node()
    assert not node.create("a")
    node.rest()
    assert node.create("b")
    mine, other = (node.agent.state.allocations[f"c-{name}"] for name in "ba")
    assert (mine.kind, len(mine.cpus), mine.owned) == (Kind.EXCLUSIVE, 2, True)
    assert not mine.cpus & other.cpus
    assert mine.full_name == "shop/b/app"
    assert "c/c-b" in node.world.store.documents
    node.rest()
    grounds = node.agent.grounds_of("c-b")
    assert grounds is not None
    assert (grounds.namespace, grounds.pod, grounds.container) == ("shop", "b", "app")
    assert (node.count("new"), node.count("hit")) == (1, 1)


def test_the_journal_is_written_before_the_answer() -> None:
    node = Node()
    node.ready()
    written: list[bool] = []
    record = node.world.store.record

    def watch(changes: dict[str, dict[str, object] | None]) -> None:
        record(changes)
        written.append("c/c-second" in node.world.store.documents)

    node.world.store.record = watch  # type: ignore[method-assign]
    assert node.create("second")
    assert written == [True]


def test_two_in_one_packet_do_not_get_the_same_cpus() -> None:
    """The second one comes before anything that may wait was done."""
    node = Node()
    node.ready()
    assert node.create("second")
    assert not node.create("third")
    assert node.count("late") == 1
    one, two = (node.agent.state.allocations[f"c-{name}"].cpus for name in ("second", "third"))
    assert not one & two


def _granted(node: Node) -> None:
    node.agent.granted(KubeletGrants(cpus={("u-k", "k"): CPUSet.parse("3")}))


def _granted_unseen(node: Node) -> None:
    """The kubelet's file changed, and nobody has looked yet."""
    node.agent.look_aside = lambda: _granted(node)


def _reloaded(node: Node) -> None:
    machine = node.agent.machine
    node.agent.retopology(replace(machine, settings=replace(machine.settings, oversale=2.0)))


def _drained(node: Node) -> None:
    machine = node.agent.machine
    settings = replace(machine.settings, capacity_factor={0: 0.0})
    node.agent.retopology(replace(machine, settings=settings))


def _hotplug(node: Node) -> None:
    node.agent.retopology(replace(node.agent.machine, topology=machines.dual_no_smt()))


def _released(node: Node) -> None:
    node.agent.stop_container("c-first")


def _removed(node: Node) -> None:
    node.agent.remove_container("c-first")


def _resized(node: Node) -> None:
    request = node.request("first", OWN, 4)
    node.adapter.update_container(
        pb.UpdateContainerRequest(
            pod=request.pod,
            container=request.container,
            linux_resources=request.container.linux.resources,
        )
    )


def _pinned_by_somebody(node: Node) -> None:
    request = node.request("first", OWN, 2)
    of = conversion.pod_from(request.pod)
    node.agent.update_container(
        of, conversion.container_from(request.container), conversion.resources_from(
            pb.LinuxResources(cpu=pb.LinuxCPU(cpus="7", shares=pb.OptionalUInt64(value=4096)))
        ),
    )  # fmt: skip


def _another_came(node: Node) -> None:
    node.create("other", SHARED, 0)


def _met(node: Node) -> None:
    """A container whose creation nobody told us starts."""
    of = PodSandbox(id="s-x", uid="u-x", namespace="shop", name="x")
    node.agent.start_container(of, Container(id="c-x", pod_id="s-x", name="app"))


def _synchronized(node: Node) -> None:
    node.agent.synchronize((), ())


def _restored(node: Node) -> None:
    node.agent.restore(replace(node.agent.state, allocations={}, owned=CPUSet(), pods={}))


def _memory_read(node: Node) -> None:
    node.world.reading = Reading(memory={0: 1 << 20, 1: 1 << 40})


CHANGES = (
    _granted, _granted_unseen, _reloaded, _drained, _hotplug, _released, _removed, _resized,
    _pinned_by_somebody, _another_came, _met, _synchronized, _restored, _memory_read,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_decided_before_a_change_is_worthless(change: Callable[[Node], None]) -> None:
    node = Node()
    node.ready()
    change(node)
    assert not node.create("second")
    assert node.count("hit") == 0


def test_the_end_of_another_pod_changes_nothing() -> None:
    """A stopped container's pod is removed later; what was decided since the stop holds."""
    node = Node()
    node.ready()
    node.agent.stop_container("c-first")
    node.rest()
    node.agent.remove_pod("u-first", "s-first")
    assert node.create("second")


@pytest.mark.parametrize(
    "waits",
    [
        lambda node, update: node.agent.put_back([update]),
        lambda node, update: node.agent.ride(update),
    ],
)
def test_what_waits_for_a_reply_rides_on_one_that_is_made_for_it(
    waits: Callable[[Node, ContainerUpdate], None],
) -> None:
    node = Node()
    node.ready()
    waits(node, ContainerUpdate("c-first", cpus="1", ignore_failure=True))
    answer = node.adapter.create_container(node.request("second", OWN, 2))
    assert not isinstance(answer, ReadyAnswer)
    response = pb.CreateContainerResponse.FromString(answer.SerializeToString())
    assert [update.container_id for update in response.update] == ["c-first"]
    assert node.count("unfit") == 1


def test_a_second_container_of_a_pod_is_decided_by_itself() -> None:
    node = Node()
    node.ready()
    request = node.request("first", OWN, 2)
    request.container.id = "c-more"
    assert isinstance(node.adapter.create_container(request), pb.CreateContainerResponse)
    assert node.count("unfit") == 1


def test_the_same_id_again_is_decided_by_itself() -> None:
    node = Node()
    node.ready()
    request = node.request("second", OWN, 2)
    request.container.id = "c-first"
    assert isinstance(node.adapter.create_container(request), pb.CreateContainerResponse)
    assert node.count("unfit") == 1


def test_nothing_is_decided_ahead_beside_grants_of_the_kubelet() -> None:
    node = Node()
    _granted(node)
    node.ready()
    assert not node.create("second")
    assert node.count("unfit") == 1


def test_a_container_with_slots_is_decided_by_itself() -> None:
    node = Node()
    node.ready()
    request = node.request("second", OWN, 2)
    request.container.annotations[PREFIX + "slots"] = "a,b"
    node.adapter.create_container(request)
    assert sum(node.count(way) for way in ("hit", "late", "unfit")) == 0


@pytest.mark.parametrize(
    "clutter", [{f"x.example/{n}": "" for n in range(70)}, {"load": "1" * 5000}]
)
def test_annotations_without_end_have_no_shape(clutter: dict[str, str]) -> None:
    node = Node()
    for name in ("first", "second"):
        request = node.request(name, SHARED, 0)
        marker = PREFIX if "load" in clutter else ""
        request.pod.annotations.update({marker + key: value for key, value in clutter.items()})
        if "load" in clutter:
            with pytest.raises(RequestRefused, match="load"):
                node.adapter.create_container(request)
        else:
            node.adapter.create_container(request)
        node.rest()
    assert sum(node.count(way) for way in ("hit", "late", "new", "unfit")) == 0


def test_what_names_the_pod_is_said_for_each() -> None:
    """The explanation of one that starts unpinned quotes the refusal, which names the pod."""
    node = Node()
    for name in ("first", "second"):
        assert not node.create(name, OWN | {"on-failure": "unpinned"}, 200)
        node.rest()
        grounds = node.agent.grounds_of(f"c-{name}")
        assert grounds is not None
        assert f"pod shop/{name}," in grounds.basis.steps[0]
    assert node.count("unfit") == 1


def test_a_refused_one_leaves_nothing_behind() -> None:
    node = Node()
    for name in ("first", "second"):
        with pytest.raises(RequestRefused, match="policy"):
            node.create(name, {"policy": "nonsense"})
        node.rest()
    assert node.count("new") == 2


def test_one_that_would_be_refused_by_now_is_refused_as_usual() -> None:
    node = Node()
    node.create("first", OWN, 14)
    node.rest()
    assert node.create("second", OWN, 14)
    node.rest()
    for name in ("third", "fourth"):
        assert node.create(name, OWN, 14)
        node.rest()
    with pytest.raises(RequestRefused, match="pod shop/fifth, container app"):
        node.create("fifth", OWN, 14)
    assert node.count("unfit") == 1


def test_one_pinned_by_somebody_else_is_left_to_them_each_time() -> None:
    node = Node()
    for name in ("first", "second"):
        request = node.request(name, {}, 0)
        request.container.linux.resources.cpu.cpus = "5"
        node.adapter.create_container(request)
        node.rest()
        assert node.agent.state.allocations[f"c-{name}"].kind is Kind.FOREIGN
    assert (node.count("new"), node.count("unfit")) == (1, 1)


def test_labels_that_a_rule_reads_tell_shapes_apart() -> None:
    rule = Rule(labels={"tier": "gold"}, values={"policy": "single-numa-node"})
    node = Node(Settings(rules=(rule,)))
    node.create("first", {}, 2, labels={"tier": "gold", "pod": "1"})
    node.rest()
    assert not node.create("second", {}, 2, labels={"tier": "silver", "pod": "2"})
    node.rest()
    assert node.create("third", {}, 2, labels={"tier": "gold", "pod": "3"})
    kinds = {i: a.kind for i, a in node.agent.state.allocations.items()}
    assert kinds == {
        "c-first": Kind.EXCLUSIVE, "c-second": Kind.UNBOUND, "c-third": Kind.EXCLUSIVE,
    }  # fmt: skip


def test_pods_placed_as_a_whole_keep_their_numa_node() -> None:
    node = Node()
    asks = OWN | {"scope": "pod"}
    node.create("first", asks)
    node.rest()
    assert node.create("second", asks)
    record = node.agent.state.pods["u-second"]
    assert record.affinity == node.agent.state.allocations["c-second"].numa_nodes


def test_nothing_is_decided_ahead_while_only_observing() -> None:
    node = Node(observe=True)
    node.ready()
    assert not node.create("second")
    node.rest()
    node.agent.observe = False
    node.create("third")
    node.rest()
    node.agent.observe = True
    assert not node.create("fourth")
    assert node.count("unfit") == 1


def test_only_the_shapes_that_came_last_are_kept() -> None:
    node = Node()
    for number in range(SHAPES + 1):
        node.create(f"p{number}", {"load": f"0{number}:00-12:00"} | SHARED, 0)
        node.rest()
    assert not node.create("again-0", {"load": "00:00-12:00"} | SHARED, 0)
    node.rest()
    assert node.create(f"again-{SHAPES}", {"load": f"0{SHAPES}:00-12:00"} | SHARED, 0)


def test_a_shape_out_of_use_costs_nothing_any_more() -> None:
    node = Node()
    node.ready()
    for number in range(UNUSED):
        of = PodSandbox(id="s", uid=f"u{number}", namespace="shop", name="x")
        node.agent.create_container(of, Container(id=f"x{number}", pod_id="s", name="app"))
        node.rest()
    assert not node.create("second")
    assert node.count("new") == 2


def test_what_takes_long_to_decide_is_not_made_again_and_again() -> None:
    node = Node()
    node.takes = LONGEST * 2
    node.ready()
    assert node.create("second")
    node.rest()
    node.agent.stop_container("c-second")
    node.rest()
    assert not node.create("third")
    assert (node.count("hit"), node.count("new")) == (1, 2)


def test_a_container_that_is_gone_before_anybody_tells_of_it_leaves_no_trace() -> None:
    node = Node()
    node.ready()
    assert node.create("second")
    node.agent.stop_container("c-second")
    node.rest()
    assert node.agent.packed_traces().keys() == {"c-first"}


def test_a_mistake_of_ours_is_counted_and_hurts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("a mistake")

    node = Node()
    monkeypatch.setattr("nri_numa.node.ahead.prepare", broken)
    node.ready()
    assert not node.create("second")
    assert node.world.metrics.registry.get_sample_value("nri_numa_internal_errors_total") == 1


class NoClaims:
    """Knows of claims on a node where no container has any."""

    def seen(
        self, pod: PodSandbox, container: Container, environment: Sequence[str]
    ) -> tuple[PodSandbox, Container]:
        return pod, container


def test_where_claims_count_nothing_is_decided_ahead() -> None:
    node = Node()
    node.adapter = Adapter(node.agent, node.world.metrics, ahead=node.ahead, claims=NoClaims())
    node.ready()
    assert not node.create("second")
    assert sum(node.count(way) for way in ("hit", "late", "new", "unfit")) == 0


def test_labels_that_rules_and_permissions_look_at_are_told_apart_from_all_others() -> None:
    """Two pods that differ in one of them must not be given the same answer."""
    settings = Settings(
        rules=(Rule(labels={"team": "a"}),),
        permissions=(Permission(name="gold", labels={"tier": "gold"}),),
    )
    assert labels_read(settings) == ("team", "tier")
    assert labels_read(Settings()) == ()
