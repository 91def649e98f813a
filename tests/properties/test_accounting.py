"""What is said to be free, or offered to the scheduler, is admitted, and never more."""

import itertools
from collections.abc import Callable

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_numa.engine.accounting import max_exclusive_by_node, slot_capacity
from nri_numa.engine.admit import admit
from nri_numa.engine.decision import Admitted, PlacementRequest
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.place.needs import free_resources, free_resources_text
from nri_numa.engine.request.demand import Demand
from nri_numa.engine.request.options import PlacementOptions
from nri_numa.engine.state import NodeState
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.machine import Topology
from nri_numa.model.settings import IsolatedCPUs, Settings
from nri_numa.model.workload import SMT, Container, PodSandbox, QoSClass, Resources, Strategy
from tests.beds.placement_steps import MACHINES, Steps, lived, pods, setting
from tests.beds.world import PREFIX, World, container, pod, resources
from tests.machines import named as machines


def _asks(milli: int, annotations: dict[str, str]) -> tuple[PodSandbox, Container]:
    of = pod("one-more", annotations)
    return of, container(of, wants=Resources(cpu_quota=milli * 100, cpu_period=100_000))


def _drained_but(world: World, numa_node: int) -> NodeModel:
    """The machine with nothing to give but on one NUMA node."""
    machine = world.agent.current.machine
    factors = dict.fromkeys(machine.assignable_numa_nodes - NUMASet([numa_node]), 0.0)
    return NodeModel(
        topology=machine.topology, settings=replace(machine.settings, capacity_factor=factors)
    )


def never_overcommitted(machine: NodeModel, state: NodeState) -> None:
    """Nobody was let in by force here, so all promises can be kept."""
    pool = NodeSnapshot(machine, state).pool
    for i, cpus in machine.allowed_cpus_by_node.items():
        shared = state.allocated_on(i).cpu_milli - 1000 * len(cpus & state.exclusive)
        assert shared <= machine.shared_milli_of(len(cpus & pool)), i


strict = pods.map(lambda steps: [s for s in steps if s[0] != "best-effort"])


@given(st.integers(0, len(MACHINES) - 1), setting, strict)
def test_shared_free_is_admitted_never_more(machine: int, settings: Settings, steps: Steps) -> None:
    world = lived(World(MACHINES[machine](), settings), steps)
    requested = {"policy": "single-numa-node", "cpus": "shared"}
    never_overcommitted(world.agent.current.machine, world.agent.current.state)
    left = world.agent.current.desired.free_cpu_milli
    for i, milli in left.items():
        only = _drained_but(world, i)
        assert NodeSnapshot(only, world.agent.current.state).free_cpu_milli[i] == milli
        if milli:
            of, made = _asks(milli, requested)
            decision = admit(NodeSnapshot(only, world.agent.current.state), of, made)
            assert isinstance(decision, Admitted)
            assert NodeSnapshot(only, decision.state).free_cpu_milli[i] == 0
        of, made = _asks(milli + 1, requested)
        assert not isinstance(
            admit(NodeSnapshot(only, world.agent.current.state), of, made), Admitted
        )


@given(
    st.integers(0, len(MACHINES) - 1),
    setting,
    strict,
    st.sampled_from([SMT.ANY, SMT.SPREAD, SMT.FULL_CORE, SMT.ISOLATE]),
)
def test_exclusive_what_is_said_to_be_free_is_admitted_and_never_more(
    machine: int, settings: Settings, steps: Steps, smt: SMT
) -> None:
    world = lived(World(MACHINES[machine](), settings), steps)
    requested = {"policy": "single-numa-node", "cpus": "exclusive", "smt": smt.value}
    told = _told(world, smt)
    for i, count in told.items():
        only = _drained_but(world, i)
        sizes = {len(c.cpus) for c in world.topology.cores.values()}
        # Where cores differ, what whole cores make depends on which are taken.
        exact = smt in (SMT.ANY, SMT.SPREAD) or len(sizes) == 1
        if count and (exact or smt is SMT.ISOLATE):
            of, made = _asks(1000 * count, requested)
            decision = admit(NodeSnapshot(only, world.agent.current.state), of, made)
            assert isinstance(decision, Admitted), (i, count)
            never_overcommitted(only, decision.state)
        of, made = _asks(1000 * (count + 1), requested)
        more = admit(NodeSnapshot(only, world.agent.current.state), of, made)
        assert not (exact and isinstance(more, Admitted))
        if isinstance(more, Admitted):
            never_overcommitted(only, more.state)


@given(setting, st.sampled_from(IsolatedCPUs), strict)
def test_what_is_published_beside_isolated_cpus_is_admitted(
    settings: Settings, isolated: IsolatedCPUs, steps: Steps
) -> None:
    """Under ``avoid`` several exclusive CPUs are never isolated ones, which nobody counts."""
    world = lived(World(machines.isolated_cpus(), replace(settings, isolated=isolated)), steps)
    avoided = world.agent.current.machine.avoided_isolated_cpus(2)
    for a in world.agent.current.state.allocations.values():
        assert not (len(a.cpus) > 1 and a.exclusive and a.cpus & avoided), a
    for i, count in max_exclusive_by_node(world.agent.current.desired).items():
        of, made = _asks(1000 * count, {"policy": "single-numa-node", "cpus": "exclusive"})
        if count:
            decision = admit(
                NodeSnapshot(_drained_but(world, i), world.agent.current.state), of, made
            )
            assert isinstance(decision, Admitted), (i, count)


def _told(world: World, smt: SMT) -> dict[int, int]:
    """The numbers that a refusal names."""
    of, made = _asks(1000, {"smt": smt.value})
    machine, state = world.agent.current.machine, world.agent.current.state
    requested = machine.options_resolver(of, made)
    assert isinstance(requested, PlacementOptions)
    case = PlacementRequest(
        NodeSnapshot(machine, state), of, made, requested, Demand(exclusive_cpus=1)
    )
    text = free_resources_text(case, free_resources(case))
    found: dict[int, int] = {}
    for part in text.split("; "):
        head, _, rest = part.partition(": ")
        found[int(head.removeprefix("NUMA node "))] = int(rest.split()[0])
    return found


@given(st.integers(0, len(MACHINES) - 1), setting, strict, st.integers(1, 12))
def test_wide_owners_leave_what_was_promised(
    machine: int, settings: Settings, steps: Steps, count: int
) -> None:
    """Wherever the CPUs of one that spans NUMA nodes come from."""
    world = lived(World(MACHINES[machine](), settings), steps)
    of, made = _asks(1000 * count, {"policy": "best-effort", "cpus": "exclusive"})
    decision = admit(NodeSnapshot(world.agent.current.machine, world.agent.current.state), of, made)
    if isinstance(decision, Admitted):
        never_overcommitted(world.agent.current.machine, decision.state)


smts = st.sampled_from(["", "any", "spread", "isolate"])


def _lived(number: int, settings: Settings, steps: Steps, *, slots: bool) -> World:
    """Some of those with CPUs of their own have slots for them."""

    def change(n: int, made: Container) -> Container:
        _, cpus, _, milli, _ = steps[n]
        return with_slots(made, milli / 1000) if slots and cpus == "exclusive" else made

    return lived(World(MACHINES[number](), settings), steps, change)


def with_slots(made: Container, cpus: float, on: int | None = None) -> Container:
    if cpus != int(cpus):
        return made
    node = "" if on is None else f"numa{on}-"
    ids = ",".join(f"{node}slot-{n}" for n in range(int(cpus)))
    return replace(made, annotations={f"{PREFIX}slots": ids})


def _one(name: str, cpus: float, on: int | None = None) -> tuple[PodSandbox, Container]:
    of = pod(name, {})
    return of, with_slots(container(of, wants=resources(cpus, 0.01)), cpus, on)


@hypothesis_settings(deadline=None)
@given(st.integers(0, len(MACHINES) - 1), setting, pods, smts, st.booleans())
def test_every_slot_that_is_offered_is_given_one_by_one(
    number: int, settings: Settings, steps: Steps, smt: str, slots: bool
) -> None:
    settings = replace(settings, defaults={"smt": smt, "bind": "cpu"} if smt else {"bind": "cpu"})
    world = _lived(number, settings, steps, slots=slots)
    machine, state = world.agent.current.machine, world.agent.current.state
    before = slot_capacity(NodeSnapshot(machine, state))
    assert all(n >= 0 for n in (*before.free.values(), *before.allocated.values()))
    for n in range(sum(before.free.values())):
        decision = admit(NodeSnapshot(machine, state), *_one(f"slot{n}", 1))
        assert isinstance(decision, Admitted), (n, before)
        state = decision.state
        if smt != "isolate":
            assert slot_capacity(NodeSnapshot(machine, state)).total_slots == before.total_slots


@hypothesis_settings(deadline=None)
@given(st.integers(0, len(MACHINES) - 1), setting, pods)
def test_numa_node_of_the_kubelets_choice(number: int, settings: Settings, steps: Steps) -> None:
    settings = replace(settings, defaults={"bind": "cpu"})
    world = _lived(number, settings, steps, slots=True)
    machine, state = world.agent.current.machine, world.agent.current.state
    for i, count in slot_capacity(NodeSnapshot(machine, state)).free.items():
        if not count:
            continue
        decision = admit(NodeSnapshot(machine, state), *_one("one-more", count, i))
        assert isinstance(decision, Admitted), (i, count)
        assert decision.allocation.cpus <= machine.allowed_cpus_by_node[i]
        assert len(decision.allocation.cpus) == count


@given(
    machine=st.sampled_from(MACHINES),
    setting=setting,
    strategy=st.sampled_from([Strategy.SPREAD, Strategy.MOST_MEMORY]),
    steps=pods,
    count=st.integers(2, 12),
    policy=st.sampled_from(["best-effort", "restricted", "single-numa-node"]),
)
def test_containers_that_request_nothing_are_as_many_for_each_cpu_of_a_numa_node(
    machine: Callable[[], Topology], setting: Settings, strategy: Strategy, steps: Steps,
    count: int, policy: str,
) -> None:  # fmt: skip
    """Moving one of them elsewhere would not make the most crowded NUMA node less crowded."""
    world = lived(World(machine(), replace(setting, strategy=strategy)), steps)
    desired = NodeSnapshot(world.agent.current.machine, world.agent.current.state)
    usable = {
        i: len(cpus & desired.pool)
        for i, cpus in desired.machine.allowed_cpus_by_node.items()
        if desired.free_shared_milli[i]
    }
    counts = dict.fromkeys(usable, 0)
    for n in range(count if usable else 0):
        world.put(f"idle{n}", {"policy": policy}, qos=QoSClass.BEST_EFFORT)
        counts[world.allocation(f"idle{n}-app").numa_nodes.first_id] += 1
    for i, j in itertools.permutations(usable, 2):
        assert counts[i] * usable[j] <= (counts[j] + 1) * usable[i], (counts, usable)
