"""A runtime's world in memory, in the engine's own types, around a real agent.

It does what a runtime does with the agent's answers: writes adjustments and updates into the
stored resources of its containers, and reports them at a synchronisation. No sockets, no loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from nri_numa.agent.agent import Agent, GrantSource
from nri_numa.agent.build import build_agent
from nri_numa.agent.current_state import CurrentState
from nri_numa.agent.loop import Clock
from nri_numa.engine.decision import Admitted, Rejected
from nri_numa.engine.explain.explanation import StoredExplanation
from nri_numa.engine.node_model import MeasuredFree, NodeModel
from nri_numa.engine.state import Allocation, ContainerKind, state_invariant_violations
from nri_numa.errors import CheckpointError
from nri_numa.machine.cgroups import (
    CgroupPlace,
    CgroupReader,
    CgroupWrite,
    CgroupWriter,
    WriteOutcome,
)
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.machine import Topology
from nri_numa.model.settings import Settings
from nri_numa.model.workload import (
    NO_ADJUSTMENT,
    Container,
    ContainerUpdate,
    KubeletGrants,
    PodSandbox,
    PodTable,
    QoSClass,
    Resources,
)
from nri_numa.observe.metrics import Metrics
from nri_numa.store.checkpoint import CheckpointStore
from nri_numa.store.journal import encode, state_from

PREFIX = "numa.kubernetes.io/"
GIB = 1 << 30
SINGLE = {"policy": "single-numa-node"}
OWN = {"cpus": "exclusive"}

two_by_four = partial(
    build_synthetic_topology,
    sockets=2,
    numa_per_socket=1,
    cores_per_numa=4,
    threads=1,
    memory_gib=8,
)
"""CPUs 0-3 and 4-7, 8 GiB each."""


class MemoryStore(CheckpointStore):
    """A store that lives as long as the world; a write can be made to fail.

    Like the real one it writes what failed along with the next changes.
    """

    def __init__(self, clock: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__("/state", identity={}, clock=clock)
        self.documents: dict[str, dict[str, object]] = {}
        self.unwritten: dict[str, dict[str, object] | None] = {}
        self.full = False

    def append_documents(self, changes: Mapping[str, dict[str, object] | None]) -> None:
        """Keep the documents, or fail as a full disk does."""
        self.unwritten.update(msgspec.json.decode(encode(changes)))
        if self.full:
            self.error = CheckpointError("/state/checkpoint", "no space left on device")
            raise self.error
        self.error = None
        changes, self.unwritten = self.unwritten, {}
        for key, document in changes.items():
            if document is None:
                self.documents.pop(key, None)
            else:
                self.documents[key] = document

    def compact_if_needed(self) -> bool:
        self.append_documents({})
        return True


class StillClock(Clock):
    """Stands still; what is deferred is done at once, and waiting takes no time."""

    def __init__(
        self,
        wall: Callable[[], float] = lambda: 0.0,
        seconds: Callable[[], float] = lambda: 0.0,
        later: Callable[[Callable[[], object]], object] = lambda function: function(),
    ) -> None:
        self.wall, self.seconds, self.later = wall, seconds, later

    def time(self) -> float:
        return self.wall()

    def monotonic(self) -> float:
        return self.seconds()

    def call_soon(self, function: Callable[[], object]) -> None:
        """Now, or as `later` says."""
        self.later(function)

    async def sleep(self, seconds: float) -> None:
        """Wait no time."""

    def cpu_time(self) -> float:
        return 0.0


def agent_of(
    machine: NodeModel,
    *,
    metrics: Metrics | None = None,
    clock: Clock | None = None,
    store: CheckpointStore | None = None,
) -> Agent:
    """An agent without cgroups, whose state is kept nowhere else."""
    clock = clock or StillClock()
    current = CurrentState(machine, MemoryStore() if store is None else store, clock)
    writer = CgroupWriter(CgroupReader("/nowhere"))
    return build_agent(current, writer, metrics or Metrics("test"))


class _Cgroups(CgroupWriter):
    """Writes as a test says, or into the runtime's books, which stand for the cgroups too."""

    def __init__(
        self, world: World, write: Callable[[CgroupPlace, str, str], WriteOutcome] | None
    ) -> None:
        super().__init__(world.cgroups)
        self._world, self._as_said = world, write

    def unwritable_cpuset_reason(self, place: CgroupPlace | None = None) -> str:
        return "" if self._as_said is None else "read-only"

    def write_cpusets(self, wanted: Mapping[str, CgroupWrite]) -> dict[str, WriteOutcome]:
        if self._as_said is not None:
            return {i: self._as_said(*one) for i, one in wanted.items()}
        self._world.apply(
            ContainerUpdate(i, cpus=one.cpus, mems=one.mems) for i, one in wanted.items()
        )
        return dict.fromkeys(wanted, WriteOutcome(changed=True))


def resources(
    cpus: float = 0, memory: float = 0, *, hugepages: Mapping[int, int] | None = None
) -> Resources:
    """Limits as the kubelet would write them: CPUs as quota and shares, memory in GiB."""
    milli = round(cpus * 1000)
    return Resources(
        cpu_shares=max(2, milli * 1024 // 1000),
        cpu_quota=milli * 100 if milli else None,
        cpu_period=100_000 if milli else None,
        memory_limit=int(memory * GIB) or None,
        hugepages=dict(hugepages or {}),
    )


def pod(
    name: str,
    annotations: Mapping[str, str] | None = None,
    *,
    qos: QoSClass = QoSClass.GUARANTEED,
    total: Resources | None = None,
    namespace: str = "default",
    labels: Mapping[str, str] | None = None,
) -> PodSandbox:
    """A pod; annotation keys are given without the prefix."""
    return PodSandbox(
        id=f"sandbox-{name}",
        uid=f"uid-{name}",
        namespace=namespace,
        name=name,
        labels=dict(labels or {}),
        annotations={PREFIX + key: value for key, value in (annotations or {}).items()},
        qos=qos,
        resources=total or Resources(),
    )


def container(
    of: PodSandbox,
    name: str = "app",
    wants: Resources | None = None,
    *,
    id: str = "",  # as the runtime calls it
    oom_score_adj: int | None = None,
) -> Container:
    return Container(
        id=id or f"{of.name}-{name}",
        pod_id=of.id,
        name=name,
        resources=wants or Resources(),
        oom_score_adj=oom_score_adj,
    )


class World:
    """The runtime's books and one agent."""

    def __init__(
        self,
        topology: Topology,
        settings: Settings | None = None,
        *,
        observe: bool = False,
        reading: MeasuredFree | None = None,
        write: Callable[[CgroupPlace, str, str], WriteOutcome] | None = None,
        cgroups: CgroupReader | None = None,
        key: bytes = b"a key of this node",
        clock: Callable[[], float] = lambda: 0.0,
        kubelet: Callable[[CurrentState], GrantSource] | None = None,
    ) -> None:
        self._kubelet = kubelet
        self._write = write
        self.starts = write is None
        """Whether what is created runs at once."""
        self.ends_whole = True
        """Whether a scenario leaves it so that `check` finds nothing."""
        self.cgroups = cgroups or CgroupReader("/nowhere")
        self.key = key
        self.clock = clock
        self.topology = topology
        self.settings = settings or Settings()
        self.now = 1_000_000.0
        self.store = MemoryStore()
        self.pods: dict[str, PodSandbox] = {}
        self.live: dict[str, Container] = {}
        self.sent: list[ContainerUpdate] = []
        self._reading = reading
        self._observe = observe
        self._ids = itertools.count(1)
        self.agent = self.boot()

    @property
    def reading(self) -> MeasuredFree | None:
        return self._reading

    @reading.setter
    def reading(self, reading: MeasuredFree | None) -> None:
        self._reading = reading
        self.agent.current.set_memory(reading)

    def boot(self) -> Agent:
        """A fresh agent process over the same store."""
        self.metrics = self.store.metrics = Metrics("test")
        self.timing = StillClock(lambda: self.now, lambda: self.clock())
        machine = NodeModel(topology=self.topology, settings=self.settings, key=self.key)
        current = CurrentState(machine, self.store, self.timing, observe=self._observe)
        writer = _Cgroups(self, self._write)
        kubelet = self._kubelet(current) if self._kubelet else None
        self.agent = build_agent(current, writer, self.metrics, kubelet=kubelet)
        self.history = self.agent.history
        state, problems = state_from(self.store.documents)
        assert problems == []
        current.restore_state(state)
        current.set_memory(self._reading)
        return self.agent

    def restart(
        self, *, lost: bool = False, key: bytes | None = None
    ) -> tuple[ContainerUpdate, ...]:
        """Another process of the agent, perhaps without its checkpoint, or with another key."""
        if lost:
            self.store.documents.clear()
        self.key = self.key if key is None else key
        self.boot()
        return self.synchronize()

    def becomes(self, topology: Topology) -> None:
        self.topology = topology
        self.apply(
            self.agent.apply_node_model(replace(self.agent.current.machine, topology=topology))
        )

    def kubelet(
        self,
        granted: Mapping[tuple[str, str], str] | None = None,
        *,
        reserved: str = "",
        mems: Mapping[tuple[str, str], str] | None = None,
    ) -> None:
        """The kubelet has a static policy and granted this, by pod and container.

        `granted`: CPUs; all others are its shared set.
        """
        cpus = {(f"uid-{p}", c): CPUSet.parse(text) for (p, c), text in (granted or {}).items()}
        before = self.agent.current.state.kubelet
        taken = KubeletGrants(cpus=cpus).granted_cpus
        now = self.topology.online - taken
        nodes = {(f"uid-{p}", c): NUMASet.parse(text) for (p, c), text in (mems or {}).items()}
        if reserved:
            self.settings = replace(self.settings, kubelet_reserved=CPUSet.parse(reserved))
            self.agent.current.machine = replace(self.agent.current.machine, settings=self.settings)
        self.agent.apply_grants(
            KubeletGrants(
                cpu_policy="static",
                memory_policy="Static" if nodes else "None",
                shared=(now, *(one for one in before.shared if one != now)),
                cpus=cpus,
                mems=nodes,
            )
        )

    def synchronize(self) -> tuple[ContainerUpdate, ...]:
        later, after = self.timing.later, list[Callable[[], object]]()
        self.timing.later = after.append
        updates = self.agent.synchronize(
            PodTable.from_pods(self.pods.values()), tuple(self.live.values())
        )
        self.timing.later = later
        self.apply(updates)
        for function in after:
            later(function)
        return updates

    def create(self, of: PodSandbox, made: Container) -> Admitted | Rejected | None:
        """Run CreateContainer through the agent, and keep what comes out."""
        self.pods[of.id] = of
        answer = self.agent.create_container(of, made)
        if isinstance(answer, Rejected):
            assert self.agent.stop_container(made.id) == ()  # as the runtime does after a failure
            self.agent.remove_container(made.id)
            return answer
        adjustment = NO_ADJUSTMENT if answer is None else answer.adjustment
        now = made.resources
        self.live[made.id] = replace(
            made,
            annotations={**made.annotations, **adjustment.annotations},
            resources=replace(
                now,
                cpus=adjustment.cpus or now.cpus,
                mems=adjustment.mems or now.mems,
                cpu_quota=now.cpu_quota if adjustment.quota is None else adjustment.quota,
            ),
        )
        if answer is not None:
            self.apply(answer.updates)
        if self.starts:
            self.agent.start_container(of, self.live[made.id])
            self.agent.post_start_container(of, self.live[made.id])
        return answer

    def place(
        self, of: PodSandbox, made: Container | None = None, wants: Resources | None = None
    ) -> tuple[str, str]:
        """Create, expect success, and say which cpus and mems the container has."""
        made = made or container(of, wants=wants)
        answer = self.create(of, made)
        assert not isinstance(answer, Rejected), answer.message
        return self.has(made.id)

    def reject(
        self, of: PodSandbox, made: Container | None = None, wants: Resources | None = None
    ) -> Rejected:
        answer = self.create(of, made or container(of, wants=wants))
        assert isinstance(answer, Rejected), answer
        return answer

    def admit(
        self, of: PodSandbox, made: Container | None = None, wants: Resources | None = None
    ) -> Admitted:
        answer = self.create(of, made or container(of, wants=wants))
        assert isinstance(answer, Admitted), answer
        return answer

    def put(
        self, name: str, asks: Mapping[str, str] | None = None, cpus: float = 0, memory: float = 0,
        qos: QoSClass = QoSClass.GUARANTEED, *, pages: Mapping[int, int] | None = None,
    ) -> tuple[str, str]:  # fmt: skip
        """Place a pod of that name with one container, NAME-app."""
        return self.place(pod(name, asks, qos=qos), wants=resources(cpus, memory, hugepages=pages))

    def rejected(
        self, name: str, asks: Mapping[str, str] | None = None, cpus: float = 0, memory: float = 0,
        qos: QoSClass = QoSClass.GUARANTEED, *, pages: Mapping[int, int] | None = None,
    ) -> Rejected:  # fmt: skip
        """What `put` would place."""
        return self.reject(pod(name, asks, qos=qos), wants=resources(cpus, memory, hugepages=pages))

    def add(self, of: PodSandbox, name: str, cpus: float, memory: float = 0) -> tuple[str, str]:
        return self.place(of, container(of, name, resources(cpus, memory)))

    def meet(
        self, of: PodSandbox, made: Container | None = None, wants: Resources | None = None
    ) -> Container:
        """A container that was created without us, of which a synchronisation tells."""
        made = made or container(of, wants=wants)
        self.pods[of.id], self.live[made.id] = of, made
        return made

    def unseen(self, container_id: str, **changes: object) -> None:
        """Somebody changes its resources, and nobody tells us."""
        made = self.live[container_id]
        now = replace(made.resources, **changes)  # type: ignore[arg-type]
        self.live[container_id] = replace(made, resources=now)

    def update_rejected(self, container_id: str, asked: Resources) -> Rejected:
        rejected = self.update(container_id, asked)
        assert isinstance(rejected, Rejected), f"{container_id} was resized"
        return rejected

    def update(self, container_id: str, asked: Resources) -> Rejected | None:
        before = self.live[container_id]
        outcome = self.agent.update_container(self.pods[before.pod_id], before, asked)
        if isinstance(outcome, Rejected):
            return outcome
        self.apply(outcome.updates)
        own = outcome.container_update
        now = before.resources
        self.live[container_id] = replace(
            before,
            resources=replace(
                now,
                cpu_shares=asked.cpu_shares or now.cpu_shares,
                cpu_quota=own.cpu_quota
                if own is not None and own.cpu_quota is not None
                else asked.cpu_quota or now.cpu_quota,
                cpu_period=asked.cpu_period or now.cpu_period,
                memory_limit=asked.memory_limit or now.memory_limit,
                cpus=(own.cpus if own else "") or asked.cpus or now.cpus,
                mems=(own.mems if own else "") or asked.mems or now.mems,
            ),
        )
        return None

    def stop(self, container_id: str) -> tuple[ContainerUpdate, ...]:
        self.live.pop(container_id, None)
        updates = self.agent.stop_container(container_id)
        self.apply(updates)
        self.agent.remove_container(container_id)
        return updates

    def remove_pod(self, of: PodSandbox) -> None:
        self.pods.pop(of.id, None)
        self.agent.remove_pod(of.uid, of.id)

    def apply(self, updates: Iterable[ContainerUpdate]) -> None:
        """Do what the runtime does with updates of existing containers."""
        seen: set[str] = set()
        for update in updates:
            assert update.container_id not in seen, "two updates for one container in one reply"
            seen.add(update.container_id)
            self.sent.append(update)
            known = self.live.get(update.container_id)
            if known is None:
                continue
            now = known.resources
            self.live[update.container_id] = replace(
                known,
                resources=replace(
                    now,
                    cpus=update.cpus or now.cpus,
                    mems=update.mems or now.mems,
                    cpu_quota=now.cpu_quota if update.cpu_quota is None else update.cpu_quota,
                ),
            )
            directory = self.cgroups.directory_of(CgroupPlace(known.cgroups_path))
            if directory and update.cpus:
                for name in ("cpuset.cpus", "cpuset.cpus.effective"):
                    Path(directory, name).write_text(f"{update.cpus}\n")

    def has(self, container_id: str) -> tuple[str, str]:
        """``(cpus, mems)`` as the runtime has them; empty is everything."""
        now = self.live[container_id].resources
        return now.cpus, now.mems

    def allocation(self, container_id: str) -> Allocation:
        return self.agent.current.state.allocations[container_id]

    def grounds(self, container_id: str) -> StoredExplanation:
        known = self.agent.history.explanation_of(container_id)
        assert known is not None
        return known

    def steps(self, container_id: str) -> tuple[str, ...]:
        """How it came to be where it is."""
        return self.grounds(container_id).basis.decision_steps

    def count(self, name: str) -> float:
        """A counter or a gauge of the agent, without ``nri_numa_``."""
        value = self.metrics.registry.get_sample_value(f"nri_numa_{name}")
        assert value is not None, name
        return value

    def cpus(self, container_id: str) -> CPUSet:
        """CPUs a container may really run on."""
        text = self.live[container_id].resources.cpus
        return CPUSet.parse(text) if text else self.topology.online

    def check(self) -> None:
        """What must hold after every step, judged by the runtime's books."""
        state = self.agent.current.state
        broken = state_invariant_violations(
            state, self.topology, self.agent.current.machine.settings
        )
        assert broken == [], broken
        value = self.metrics.registry.get_sample_value("nri_numa_invariant_violations_total")
        assert value == 0
        desired = self.agent.current.desired
        assert desired.pool
        for container_id, made in self.live.items():
            allocation = state.allocations.get(container_id)
            assert allocation is not None, f"{container_id} runs and is not in the state"
            if allocation.kind is ContainerKind.FOREIGN:
                continue
            wanted = desired.cpuset_of(allocation)
            if not self._observe:
                has = self.cpus(container_id)
                assert has == (wanted or self.topology.allowed), (container_id, has, wanted)
                if allocation.mems:
                    assert NUMASet.parse(made.resources.mems) == allocation.mems
            for other_id, other in state.allocations.items():
                if (
                    other.exclusive_owners_key is not None
                    and other.exclusive_owners_key == allocation.exclusive_owners_key
                ):
                    continue  # its pod's
                if other.exclusive and other_id != container_id and not self._observe:
                    assert not self.cpus(container_id) & other.cpus, (
                        f"{container_id} may run on CPUs that {other_id} owns"
                    )
            theirs = state.kubelet.granted_cpus - allocation.cpus
            assert self._observe or not self.cpus(container_id) & theirs, (
                f"{container_id} may run on CPUs that the kubelet granted"
            )
        alive = {i for i, a in state.allocations.items() if not a.reserved_at}
        assert alive <= set(self.live), "the state remembers dead containers"


def two_nodes(
    reading: MeasuredFree | None = None,
    *,
    pages: Mapping[int, int] | None = None,
    **settings: object,
) -> World:
    """CPUs 0-3 and 4-7, 8 GiB each, with so many bytes of huge pages."""
    return World(two_by_four(hugepages=pages), Settings(**settings), reading=reading)  # type: ignore[arg-type]


def says(rejected: Rejected, reason: str, *words: str) -> None:
    """It has that reason, if one is given, and its message each of these."""
    assert reason in ("", rejected.reason), rejected.message
    for word in words:
        assert word in rejected.message, rejected.message
