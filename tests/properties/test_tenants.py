"""Whatever pods ask for: owners pay for what they own, and the pool keeps its floor."""

from hypothesis import assume, given
from hypothesis import strategies as st

from nri_numa.engine.admit import admit
from nri_numa.engine.decision import Admitted
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.state import ContainerKind
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import Topology
from nri_numa.model.settings import CPUAmount, QuotasAndPoolFloor, Rule, Settings
from nri_numa.model.workload import Container, PodSandbox, QoSClass, Resources
from tests.beds.world import World, container, pod
from tests.machines import named as machines

SMT = machines.dual_smt(cores_per_numa=6, memory_gib=8)
PLAIN = build_synthetic_topology(
    sockets=1, numa_per_socket=3, cores_per_numa=4, threads=1, memory_gib=8
)

lists = st.sets(st.integers(0, 23), min_size=1).map(lambda ids: str(CPUSet(ids)))
wishes = st.fixed_dictionaries(
    {},
    optional={
        "numacpu": lists,
        "cpus": st.sampled_from(["exclusive", "exclusive", "shared"]),
        "policy": st.sampled_from(["best-effort", "restricted", "single-numa-node"]),
        "smt": st.sampled_from(["any", "isolate", "full-core", "pair"]),
        "on-failure": st.sampled_from(["unpinned", "best-effort"]),
    },
)


@st.composite
def pods(draw: st.DrawFn) -> tuple[QoSClass, int, int, dict[str, str]]:
    """QoS class, requested and limited thousandths of a CPU, annotations."""
    qos = draw(st.sampled_from(QoSClass))
    if qos is QoSClass.BEST_EFFORT:
        return qos, 0, 0, draw(wishes)
    whole = st.integers(1, 24).map(lambda cpus: cpus * 1000)
    limit = draw(st.one_of(whole, st.integers(1, 4000)))
    request = limit if qos is QoSClass.GUARANTEED else draw(st.integers(0, limit))
    return qos, request, limit, draw(wishes)


def made(
    n: int, qos: QoSClass, request: int, limit: int, asks: dict[str, str]
) -> tuple[PodSandbox, Container]:
    of = pod(f"p{n}", asks, qos=qos)
    shares = max(2, request * 1024 // 1000)
    quota = max(1000, limit * 100) if limit else None
    return of, container(
        of, wants=Resources(cpu_shares=shares, cpu_quota=quota, cpu_period=100_000)
    )


@given(
    asked=st.lists(pods(), max_size=12),
    topology=st.sampled_from([SMT, PLAIN]),
    limits=st.builds(
        QuotasAndPoolFloor,
        pool=st.sampled_from([None, CPUAmount(4), CPUAmount(percent=40)]),
        numa_pool=st.sampled_from([CPUAmount(0), CPUAmount(1), CPUAmount(percent=50)]),
        idle_siblings=st.sampled_from([CPUAmount(percent=25), CPUAmount(percent=100)]),
    ),
    rule=st.sampled_from([(), (Rule(values={"cpus": "exclusive", "policy": "best-effort"}),)]),
    grow=st.integers(1, 12),
)
def test_owners_pay_and_the_pool_keeps_its_floor(
    asked: list[tuple[QoSClass, int, int, dict[str, str]]],
    topology: object,
    limits: QuotasAndPoolFloor,
    rule: tuple[Rule, ...],
    grow: int,
) -> None:
    world = World(topology, Settings(limits=limits, rules=rule))  # type: ignore[arg-type]
    machine = world.agent.current.machine
    paid: dict[str, int] = {}

    def look() -> None:
        state = world.agent.current.state
        for container_id, allocation in state.allocations.items():
            if allocation.exclusive:
                assert 1000 * len(allocation.cpus) <= paid[container_id]
        pool = world.agent.current.desired.pool
        if state.exclusive:
            assert len(pool) >= machine.pool_floor
            assert len(state.idle_siblings) <= limits.idle_siblings.cpus_of_total(24)
        for cpus in machine.allowed_cpus_by_node.values():
            keep = limits.numa_pool.cpus_of_total(len(cpus))
            assert len(pool & cpus) >= keep
        world.check()

    for n, (qos, request, limit, asks) in enumerate(asked):
        of, one = made(n, qos, request, limit, asks)
        paid[one.id] = limit if qos is QoSClass.GUARANTEED else request
        world.create(of, one)
        look()
    for n, (qos, *_) in enumerate(asked):
        if f"p{n}-app" in world.live and qos is QoSClass.GUARANTEED:
            _, one = made(n, qos, grow * 1000, grow * 1000, {})
            if world.update(one.id, one.resources) is None:
                paid[one.id] = grow * 1000
            look()


unpaid_lists = st.tuples(
    st.just(QoSClass.BEST_EFFORT), st.just(0), st.just(0), st.builds(dict, numacpu=lists)
)

owners = st.builds(
    lambda cpus, asks: (
        QoSClass.GUARANTEED,
        1000 * cpus,
        1000 * cpus,
        asks | {"cpus": "exclusive"},
    ),
    st.integers(1, 8),
    wishes.map(lambda asks: {key: asks[key] for key in asks.keys() & {"policy", "smt"}}),
)


@given(
    asked=st.lists(st.one_of(unpaid_lists, owners, pods()), max_size=12),
    topology=st.sampled_from([SMT, PLAIN]),
    numa_pool=st.sampled_from([CPUAmount(0), CPUAmount(1)]),
)
def test_no_owner_is_rejected_because_of_an_unpaid_list(
    asked: list[tuple[QoSClass, int, int, dict[str, str]]], topology: Topology, numa_pool: CPUAmount
) -> None:
    world = World(topology, Settings(limits=QuotasAndPoolFloor(numa_pool=numa_pool)))
    machine = world.agent.current.machine
    for n, one in enumerate(asked):
        of, made_of = made(n, *one)
        state = alone = world.agent.current.state
        for container_id, allocation in state.allocations.items():
            if allocation.yields_to_exclusive and not allocation.charges:
                alone = alone.without_allocation(container_id)
        without = admit(NodeSnapshot(machine, alone), of, made_of)
        if isinstance(without, Admitted) and without.allocation.exclusive:
            beside = admit(NodeSnapshot(machine, state), of, made_of)
            assert isinstance(beside, Admitted), beside.message
            assert len(beside.allocation.cpus) == len(without.allocation.cpus)
            assert len(beside.allocation.numa_nodes) == len(without.allocation.numa_nodes)
        world.create(of, made_of)
        world.check()


SIZES = st.sampled_from([(0, 0), (100, 0), (100, 500), (500, 2000), (1000, 1000), (1500, 1500)])


@given(st.lists(SIZES | st.just((2000, 2000)), min_size=1, max_size=4))
def test_exclusive_for_a_pod_is_for_requests_of_whole_cpus(sizes: list[tuple[int, int]]) -> None:
    """Requests and limits in thousandths of a CPU; nobody is refused for its size."""
    world = World(PLAIN)
    total = Resources(cpu_shares=sum(max(2, request * 1024 // 1000) for request, _ in sizes))
    of = pod("p", {"cpus": "exclusive"}, qos=QoSClass.BURSTABLE, total=total)
    assume(total.cpu_shares is not None and total.cpu_shares >= 1024)
    for n, (request, limit) in enumerate(sizes):
        quota = {"cpu_quota": limit * 100, "cpu_period": 100_000} if limit else {}
        wants = Resources(cpu_shares=max(2, request * 1024 // 1000), **quota)
        admitted = world.admit(of, container(of, f"c{n}", wants))
        is_whole = request > 0 and request == (limit or request) and request % 1000 == 0
        assert (admitted.allocation.kind is ContainerKind.EXCLUSIVE) == is_whole
        assert bool(admitted.trace.ignored) != is_whole
