"""Random lives of pods on several machines: invariants hold after every step.

Create, refuse, stop, stop twice, resize, foreign cpusets, crashes of the agent at either side of a
write, runtime restarts, gap containers, CPUs going away; at the end every CPU is back.
"""

import json

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from nri_numa.engine.assigned import is_signed
from nri_numa.engine.decision import Rejected
from nri_numa.engine.request.demand import cpu_limit_milli, cpu_request_milli
from nri_numa.engine.state import Allocation, ContainerKind, NodeState
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.settings import KubeletRules, Settings
from nri_numa.model.workload import Container, PodSandbox, QoSClass, Resources, Strategy
from tests.beds.world import PREFIX, World, container, pod, resources
from tests.machines import named as machines

MACHINES = [
    machines.single_smt,
    machines.single_no_smt,
    machines.dual_smt,
    machines.dual_no_smt,
    machines.dual_alternating,
    machines.snc_smt,
    machines.snc_asymmetric,
    machines.memory_only,
]

annotations = st.fixed_dictionaries(
    {},
    optional={
        "policy": st.sampled_from(["none", "best-effort", "restricted", "single-numa-node"]),
        "numamem": st.sampled_from(["0", "1"]),
        "scope": st.sampled_from(["container", "pod"]),
        "cpus": st.sampled_from(["shared", "exclusive"]),
        "smt": st.sampled_from(["any", "spread", "full-core", "isolate", "pair"]),
        "bind": st.sampled_from(["cpu", "cpu+mem"]),
        "on-failure": st.sampled_from(["reject", "best-effort", "unpinned"]),
        "load": st.sampled_from(["high", "low", "09:00-18:00"]),
    },
)
lists = st.fixed_dictionaries(
    {"numacpu": st.sampled_from(["0", "1", "2-3", "1,3", "5", "0-40", "x"])},
    optional={
        "numamem": st.sampled_from(["0", "1", "0-1", "9"]),
        "cpus": st.sampled_from(["shared", "exclusive"]),
    },
)
sizes = st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 7.0, 20.0])
memories = st.sampled_from([0.0, 0.5, 1.0, 5.0, 15.0, 200.0])


def stays(before: Allocation, after: Allocation, home: NUMASet, *, widened: bool) -> None:
    """Check the CPUs and NUMA nodes of a container that was resized.

    It may grow on NUMA nodes that were chosen for its whole pod, ``home``, whether it was on them
    lately or not.
    """
    assert after.mems == before.mems
    if before.exclusive and after.exclusive:
        assert before.cpus <= after.cpus or after.cpus <= before.cpus
    if not widened:
        assert after.numa_nodes <= before.numa_nodes | home
    elif before.numa_nodes:
        assert after.numa_nodes & before.numa_nodes


class Lives(RuleBasedStateMachine):
    """One node, its runtime, and everything that can happen to them."""

    world: World

    @initialize(
        machine=st.sampled_from(MACHINES),
        strategy=st.sampled_from(list(Strategy)),
        order=st.booleans(),
        reserved=st.sampled_from(["", "0", "0-1"]),
        strict=st.booleans(),
        kubelet=st.booleans(),
        by_socket=st.booleans(),
    )
    def start(
        self, machine: object, strategy: Strategy, order: bool, reserved: str, strict: bool,
        kubelet: bool, by_socket: bool,
    ) -> None:  # fmt: skip
        assert callable(machine)
        self.world = World(
            machine(),
            Settings(
                strategy=strategy,
                kubelet=KubeletRules(
                    cpu_order=order,
                    align_by_socket=by_socket,
                    ties=kubelet,
                    memory=kubelet,
                    cpus=kubelet and strict,
                    static_cpus=not kubelet and strict,
                ),
                reserved_cpus=CPUSet.parse(reserved),
                strict_cpu_reservation=strict,
            ),
        )
        self.world.synchronize()
        self.number = 0

    @rule(
        wishes=annotations | lists,
        cpus=sizes,
        memory=memories,
        qos=st.sampled_from(list(QoSClass)),
        same_pod=st.booleans(),
        again=st.booleans(),
    )
    def create(
        self, wishes: dict[str, str], cpus: float, memory: float, qos: QoSClass, same_pod: bool,
        again: bool,
    ) -> None:  # fmt: skip
        self.number += 1
        if same_pod and self.world.pods:
            of = sorted(self.world.pods.values(), key=lambda p: p.id)[-1]
        else:
            of = pod(f"p{self.number}", wishes, qos=qos)
        name = "app" if again else f"c{self.number}"
        # A container of the same name runs only once at a time.
        for other in [c for c in self.world.live.values() if (c.pod_id, c.name) == (of.id, name)]:
            self.world.stop(other.id)
        made = container(of, name, resources(cpus, memory), id=f"id{self.number}")
        before = self.world.agent.current.state
        answer = self.world.create(of, made)
        if isinstance(answer, Rejected):
            after = self.world.agent.current.state
            assert after.allocations.keys() == before.allocations.keys()
            assert of.name in answer.message
            assert made.name in answer.message
            assert "\n" not in answer.message

    def has(self) -> dict[str, tuple[str, str]]:
        return {i: self.world.has(i) for i in self.world.live}

    def picked(self, pick: int) -> str:
        return sorted(self.world.live)[pick % len(self.world.live)]

    @precondition(lambda self: self.world.live)
    @rule(pick=st.integers(0, 50), twice=st.booleans())
    def stop(self, pick: int, twice: bool) -> None:
        container_id = self.picked(pick)
        self.world.stop(container_id)
        if twice:
            assert self.world.stop(container_id) == ()

    @precondition(lambda self: self.world.live)
    @rule(resizes=st.lists(st.tuples(st.integers(0, 50), sizes, memories), min_size=1, max_size=6))
    def resize(self, resizes: list[tuple[int, float, float]]) -> None:
        """Whatever runs stays where it is."""
        world = self.world
        for pick, cpus, memory in resizes:
            name = self.picked(pick)
            had, before = self.has(), dict(world.agent.current.state.allocations)
            record = world.agent.current.state.pods.get(before[name].pod_uid)
            home = (record and record.affinity) or NUMASet()
            rejected = world.update(name, resources(cpus, memory))
            world.check()
            after = world.agent.current.state.allocations
            if rejected is not None:
                assert (self.has(), after[name]) == (had, before[name])
            assert [mems for _, mems in self.has().values()] == [mems for _, mems in had.values()]
            assert after | {name: before[name]} == before, "somebody else's allocation changed"
            wishes = world.pods[world.live[name].pod_id].annotations
            default = "best-effort" if wishes.get(f"{PREFIX}policy") == "best-effort" else "reject"
            widened = wishes.get(f"{PREFIX}on-failure", default) == "best-effort"
            stays(before[name], after[name], home, widened=widened)
            for i, allocation in after.items():
                if allocation.kind is ContainerKind.SHARED:
                    mine = world.topology.cpus_of(allocation.numa_nodes)
                    assert CPUSet.parse(world.has(i)[0]) <= mine, "left its NUMA nodes"
            world.synchronize()
            kept = {i for i, a in after.items() if a.kind is not ContainerKind.FOREIGN}
            now = world.agent.current.state.allocations
            assert all(now[i] == after[i] for i in kept), "a Synchronize changed it"

    @precondition(lambda self: self.world.live)
    @rule(pick=st.integers(0, 50), cpus=st.sampled_from(["0", "0-1", "2", "0-3", "0-255"]))
    def somebody_sets_a_cpuset(self, pick: int, cpus: str) -> None:
        container_id = self.picked(pick)
        text = str(CPUSet.parse(cpus) & self.world.topology.allowed)
        assert self.world.update(container_id, Resources(cpus=text)) is None
        if cpus == "0-255":
            kind = self.world.agent.current.state.allocations[container_id].kind
            assert kind is not ContainerKind.FOREIGN, "the whole machine pins nobody"

    @rule(reconnect_only=st.booleans())
    def agent_dies_and_comes_back(self, reconnect_only: bool) -> None:
        """Only a pin of another program that holds the pool by now is none any more (ADR 0018)."""
        before = self.has()
        kinds = {i: a.kind for i, a in self.world.agent.current.state.allocations.items()}
        if not reconnect_only:
            self.world.restart()
        for i, had in before.items():
            now = kinds[i], self.world.agent.current.state.allocations[i].kind
            moved = self.world.has(i) != had
            assert not moved or now == (ContainerKind.FOREIGN, ContainerKind.UNPINNED), (
                "a container moved"
            )

    def fresh(
        self, wishes: dict[str, str], cpus: float, memory: float = 0
    ) -> tuple[PodSandbox, Container]:
        """One more pod, and its only container."""
        self.number += 1
        of = pod(f"p{self.number}", wishes)
        return of, container(of, "app", resources(cpus, memory), id=f"id{self.number}")

    @rule(wishes=annotations, cpus=sizes)
    def agent_dies_before_the_answer(self, wishes: dict[str, str], cpus: float) -> None:
        """It has persisted a grant; the runtime goes on without us and creates it unpinned."""
        of, made = self.fresh(wishes, cpus)
        self.world.pods[of.id] = of
        self.world.agent.create_container(of, made)
        self.world.live[made.id] = made
        self.world.restart()

    @rule(wishes=annotations, cpus=sizes, memory=memories)
    def container_starts_in_a_gap(self, wishes: dict[str, str], cpus: float, memory: float) -> None:
        self.world.meet(*self.fresh(wishes, cpus, memory))
        self.world.synchronize()

    @precondition(lambda self: self.world.live)
    @rule(pick=st.integers(0, 50))
    def container_ends_in_a_gap(self, pick: int) -> None:
        del self.world.live[self.picked(pick)]
        self.world.restart()

    @rule()
    def checkpoint_is_lost(self) -> None:
        """What the containers carry is enough to adopt them where they are."""
        before = self.world.agent.current.state.allocations
        had = {
            i: self.world.has(i) for i, a in before.items() if a.cpus and self.carries(i, a.kind)
        }
        self.world.restart(lost=True)
        assert {i: self.world.has(i) for i in had} == had, "a container moved"
        after = self.world.agent.current.state.allocations
        for i in had:
            assert (after[i].idle_siblings, after[i].smt) == (
                before[i].idle_siblings,
                before[i].smt,
            )
        for i, a in before.items():
            if a.kind is ContainerKind.UNPINNED and self.carries(i, a.kind):
                assert after[i].kind is ContainerKind.UNPINNED, (
                    "ours, and taken for somebody else's"
                )

    @rule()
    def state_directory_is_lost_with_its_key(self) -> None:
        """Nothing is proven any more; what cannot be true is decided anew, and all rules hold."""
        self.world.restart(lost=True, key=self.world.key + b"2")

    @rule(
        kind=st.sampled_from(["exclusive", "listed", "shared", "unpinned", "foreign"]),
        cpus=st.sampled_from(["", "0", "0-1", "1-3", "0-40"]),
        has=st.sampled_from(["", "0", "0-1", "1-3"]),
        size=sizes,
        wishes=annotations,
        owned=st.booleans(),
    )
    def a_forged_container_is_found(
        self, kind: str, cpus: str, has: str, size: float, wishes: dict[str, str], owned: bool
    ) -> None:
        """It owns no more CPUs than its pod pays for, and no reserved ones."""
        of, made = self.fresh(wishes, size)
        note = {
            "cpus": cpus, "mems": "", "policy": "none", "kind": kind, "numaNodes": "0",
            "format": 2, "aligned": True, "reason": "forged", "exclusive": owned,
            "signature": "0" * 32,
        }  # fmt: skip
        made = replace(
            made,
            annotations={PREFIX + "assigned": json.dumps(note, separators=(",", ":"))},
            resources=replace(made.resources, cpus=has),
        )
        self.world.meet(of, made)
        self.world.synchronize()
        found = self.world.agent.current.state.allocations[made.id]
        if found.exclusive:
            assert len(found.cpus) <= size
            assert not found.cpus & self.world.settings.reserved_cpus

    @rule(factor=st.sampled_from([0.0, 0.5, 1.0]), numa_node=st.sampled_from([0, 1]))
    def node_is_drained_or_given_back(self, factor: float, numa_node: int) -> None:
        """New containers go elsewhere; nothing that runs moves."""
        before = self.has()
        self.world.settings = replace(self.world.settings, capacity_factor={numa_node: factor})
        machine = replace(self.world.agent.current.machine, settings=self.world.settings)
        self.world.apply(self.world.agent.apply_node_model(machine))
        assert self.has() == before, "a container moved"

    def carries(self, container_id: str, kind: ContainerKind) -> bool:
        """Whether the container says itself what it has; one found in a gap does not.

        Nor does one that was resized, so that it has other CPUs than are written on it, and then
        kept less than a second resize asked for: nothing but the checkpoint tells that they are
        its own (docs/adr/0025).
        """
        container = self.world.live[container_id]
        text = container.annotations.get(PREFIX + "assigned", "")
        if not is_signed(text, container_id, self.world.key):
            return False
        note, has = json.loads(text), container.resources
        size = cpu_limit_milli(has, []) or cpu_request_milli(has, [])
        stale = note["cpus"] != has.cpus and size != 1000 * len(CPUSet.parse(has.cpus))
        return bool(note["kind"] == kind) and not (kind is ContainerKind.EXCLUSIVE and stale)

    @rule(wishes=annotations, cpus=sizes)
    def disk_is_full_for_a_while(self, wishes: dict[str, str], cpus: float) -> None:
        self.world.store.full = True
        self.create(wishes, cpus, 0.0, QoSClass.GUARANTEED, same_pod=False, again=False)
        self.world.store.full = False
        self.world.agent.current.store.retry_or_compact()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for container_id in sorted(self.world.live):
            self.world.stop(container_id)
        for of in list(self.world.pods.values()):
            self.world.remove_pod(of)
        state = self.world.agent.current.state
        assert state == NodeState(kubelet=state.kubelet, serial=state.serial)
        settings = self.world.settings
        everything = self.world.topology.allowed
        strict = settings.reserved_cpus if settings.strict_cpu_reservation else CPUSet()
        assert self.world.agent.current.desired.pool == everything - strict


TestLives = Lives.TestCase
TestLives.settings = hypothesis_settings(stateful_step_count=30, deadline=None)
