"""What the scheduler's plugin filters is what the engine would refuse, for single-numa-node."""

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_numa.agent.view import zones_document
from nri_numa.engine.admit import admit
from nri_numa.engine.decision import Admitted
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.model.settings import Settings
from nri_numa.model.workload import Container
from nri_numa.publisher.topology import build_topology_contents
from tests.beds.placement_steps import MACHINES, Steps, lived, pods, setting
from tests.beds.topology_match import Pod, passes
from tests.beds.world import GIB, World, container, pod, resources
from tests.machines import named as machines

ALL = [*MACHINES, machines.huge_pages, machines.sparse_ids]
HUGE = 2 << 20
POLICY = {"policy": "single-numa-node", "bind": "cpu+mem", "on-failure": "reject"}

asked = st.tuples(
    st.integers(1, 18),
    st.sampled_from([0.01, 0.5, 2, 4, 8, 15, 40]),
    st.sampled_from([0, 0, HUGE, 512 << 20]),
)


def _lived(number: int, settings: Settings, steps: Steps) -> World:
    def change(n: int, made: Container) -> Container:
        memory = int((n % 5 + 0.01) * GIB)
        return replace(made, resources=replace(made.resources, memory_limit=memory))

    return lived(World(ALL[number](), settings), steps, change)


def _placed(world: World, cpus: float, memory: float, pages: int) -> bool:
    of = pod("one-more")
    wants = resources(cpus, memory, hugepages={HUGE: pages} if pages else None)
    machine, state = world.agent.current.machine, world.agent.current.state
    return isinstance(admit(NodeSnapshot(machine, state), of, container(of, wants=wants)), Admitted)


def _let_through(world: World, cpus: float, memory: float, pages: int) -> bool:
    found = build_topology_contents(
        "x", zones_document(NodeSnapshot(world.agent.current.machine, world.agent.current.state))
    )
    needs = {"cpu": round(cpus * 1000), "memory": int(memory * GIB), "hugepages-2Mi": pages}
    return passes(found, Pod(apps=[needs]))


@hypothesis_settings(deadline=None)
@given(
    st.integers(0, len(ALL) - 1),
    setting,
    pods,
    st.lists(asked, min_size=1, max_size=6),
    st.booleans(),
)
def test_containers(
    number: int,
    settings: Settings,
    steps: Steps,
    wishes: list[tuple[int, float, int]],
    shared: bool,
) -> None:
    """Guaranteed with whole CPUs: exclusive, unless the defaults say that they share."""
    defaults = {**POLICY, "cpus": "shared"} if shared else POLICY
    world = _lived(number, replace(settings, defaults=defaults), steps)
    for wish in wishes:
        assert _let_through(world, *wish) == _placed(world, *wish), wish


several = st.lists(
    st.tuples(st.integers(1, 7), st.sampled_from([0.01, 1, 5])), min_size=1, max_size=3
)


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.integers(0, len(ALL) - 1), setting, pods, several)
def test_whole_pods(
    number: int, settings: Settings, steps: Steps, containers: list[tuple[int, float]]
) -> None:
    """With scope pod all containers must fit one NUMA node together."""
    world = _lived(number, replace(settings, defaults={**POLICY, "scope": "pod"}), steps)
    machine, state = world.agent.current.machine, world.agent.current.state
    found = build_topology_contents("x", zones_document(NodeSnapshot(machine, state)))
    needs = [{"cpu": 1000 * cpus, "memory": int(memory * GIB)} for cpus, memory in containers]
    whole = resources(sum(c for c, _ in containers), sum(m for _, m in containers))
    of, placed = pod("one-more", total=whole), True
    for n, (cpus, memory) in enumerate(containers):
        made = container(of, f"c{n}", resources(cpus, memory))
        decision = admit(NodeSnapshot(machine, state), of, made)
        placed = placed and isinstance(decision, Admitted)
        if isinstance(decision, Admitted):
            state = decision.state
    assert passes(found, Pod(apps=needs)) == placed
