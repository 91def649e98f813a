"""simulate gives each container the CPUs that it gets from the agent in the kubelet's order."""

from random import Random

import pytest

from nri_numa.cluster.pods import ContainerRole, PodManifest, container_of, pod_sandbox
from nri_numa.engine.decision import Rejected
from nri_numa.engine.node_model import NodeModel
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.settings import Settings
from nri_numa.model.workload import Strategy
from nri_numa.simulate.manifests import read_manifests_from_text
from nri_numa.simulate.simulator import plan_actions, simulate_plan
from tests.beds.world import World
from tests.machines.pods import container, document

KEEP_S = 600.0
NODES = 240


def random_pod(random: Random, name: str) -> str:
    """A Guaranteed pod, most often placed as a whole, with init containers before its others."""

    def some(name: str, most: int, **fields: str) -> dict[str, object]:
        cpu = random.choice(["100m", "500m", 1, 1, 2, 2, 3, 4][:most])
        return container(name, {"limits": {"cpu": cpu, "memory": "64Mi"}}, **fields)

    init = [some(f"i{n}", 8) for n in range(random.choice([0, 0, 1, 2]))]
    if random.random() < 0.2:
        init.insert(0, some("side", 4, restartPolicy="Always"))
    main = [some(f"c{n}", 7) for n in range(random.choice([1, 1, 2, 3]))]
    policy = random.choice(["single-numa-node", "restricted", "best-effort"])
    asks = {"policy": policy, "scope": random.choice(["pod", "pod", "container"])}
    return document("Pod", name, {"initContainers": init, "containers": main}, asks)


def lives(world: World, pod: PodManifest) -> None:
    """What the kubelet and the runtime do with a pod; it is deleted once a container is refused."""
    sandbox, memory = pod_sandbox(pod), world.agent.current.machine.total_memory_bytes
    world.pods[sandbox.id] = sandbox
    world.agent.run_pod(sandbox)
    for one in pod.containers:
        made = container_of(pod, one, memory)
        if isinstance(world.create(sandbox, made), Rejected):
            for i in [i for i, c in reversed(world.live.items()) if c.pod_id == sandbox.id]:
                world.stop(i)
            world.agent.stop_pod(sandbox.uid, sandbox.id)
            world.remove_pod(sandbox)
            break
        if one.role is ContainerRole.INIT:
            world.stop(made.id)
    world.now += KEEP_S
    world.agent.reservations.release_expired()


@pytest.mark.parametrize("part", range(4))
def test_simulated_pods_have_the_cpus_of_real_ones(part: int) -> None:
    for seed in range(part, NODES, 4):
        random = Random(seed)
        topology = build_synthetic_topology(
            sockets=random.choice([1, 2]),
            numa_per_socket=random.choice([1, 2]),
            cores_per_numa=random.choice([4, 6, 8]),
            threads=random.choice([1, 2]),
            memory_gib=32,
        )
        strategy = random.choice([Strategy.SPREAD, Strategy.PACK])
        settings = Settings(reservation_seconds=KEEP_S, strategy=strategy)
        text = "\n---\n".join(random_pod(random, f"p{n}") for n in range(random.randint(3, 8)))
        workloads = read_manifests_from_text(text, "pods.yaml").workloads
        plan = plan_actions(workloads)
        found = simulate_plan(
            NodeModel(topology=topology, settings=settings), plan, keep_going=True
        )
        world = World(topology, settings)
        for step in plan:
            lives(world, step.pod)
        assert {a.container_id: cpus for a, cpus in found.running_containers} == {
            i: world.agent.current.cpus_of(world.allocation(i)) for i in world.live
        }, seed
