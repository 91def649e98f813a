"""Pods that come and go, drawn by Hypothesis."""

from collections.abc import Callable
from typing import TypeAlias

from hypothesis import strategies as st

from nri_numa.model.cpuset import CPUSet
from nri_numa.model.settings import ALL_CPUS_AMOUNT, CPUAmount, QuotasAndPoolFloor, Settings
from nri_numa.model.workload import Container
from tests.beds.world import World, container, pod, resources
from tests.machines import named as machines

MACHINES = [
    machines.single_smt,
    machines.dual_no_smt,
    machines.dual_adjacent,
    machines.snc_smt,
    machines.offline_cpus,
    machines.hybrid,
    machines.inside_cpuset,
]


pods = st.lists(
    st.tuples(
        st.sampled_from(["best-effort", "restricted", "single-numa-node"]),
        st.sampled_from(["shared", "exclusive"]),
        st.sampled_from(["any", "spread", "full-core", "isolate"]),
        st.sampled_from([500, 1000, 1500, 2000, 3000, 5000]),
        st.booleans(),
    ),
    max_size=14,
)


limits = st.builds(
    QuotasAndPoolFloor,
    # The other quotas are no part of what is free: a refusal says that it is one of them.
    idle_siblings=st.just(ALL_CPUS_AMOUNT),
    pool=st.sampled_from([None, None, CPUAmount(1), CPUAmount(3)]),
    numa_pool=st.sampled_from([CPUAmount(0), CPUAmount(0), CPUAmount(1), CPUAmount(percent=25)]),
)


setting = st.builds(
    Settings,
    limits=limits,
    cpu_overcommit=st.sampled_from([1.0, 1.0, 1.5, 2.0]),
    reserved_cpus=st.sampled_from([CPUSet(), CPUSet([0])]),
    strict_cpu_reservation=st.booleans(),
)


Steps: TypeAlias = list[tuple[str, str, str, int, bool]]


def lived(
    world: World, steps: Steps, change: Callable[[int, Container], Container] = lambda _, made: made
) -> World:
    """A node after some pods came, and some of them went; each may be changed before."""
    for n, (policy, cpus, smt, milli, stays) in enumerate(steps):
        of = pod(f"p{n}", {"policy": policy, "cpus": cpus, "smt": smt, "on-failure": "reject"})
        world.create(of, change(n, container(of, wants=resources(milli / 1000, 0.01))))
        if not stays and f"p{n}-app" in world.live:
            world.stop(f"p{n}-app")
    return world
