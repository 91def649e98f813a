"""A decision that is ready, taken by the container that comes."""

from __future__ import annotations

from dataclasses import replace

from nri_numa.engine.admit import admit
from nri_numa.engine.ahead import Moment, Names, Prepared, prepare, take
from nri_numa.engine.decision import Admitted, Machine
from nri_numa.engine.invariants import violations
from nri_numa.engine.state import NodeState
from nri_numa.engine.values.settings import Settings
from nri_numa.engine.values.workload import Container, PodSandbox, QoSClass, Resources
from nri_numa.machine.cpuset import CPUSet
from tests.beds.world import PREFIX
from tests.machines import named as machines

MACHINE = Machine(topology=machines.dual_smt(), settings=Settings())
COMES = Names(container_id="c1", pod_id="s1", pod_uid="u1", pod="one", container="app")


def _asked(**annotations: str) -> tuple[PodSandbox, Container]:
    pod = PodSandbox(
        id="s", uid="u", name="p", namespace="shop", qos=QoSClass.GUARANTEED,
        annotations={PREFIX + key: value for key, value in annotations.items()},
    )  # fmt: skip
    resources = Resources(cpu_shares=2048, cpu_quota=200_000, cpu_period=100_000)
    return pod, Container(id="c", pod_id="s", name="app", resources=resources)


def _prepared(state: NodeState, **annotations: str) -> Prepared:
    made = prepare(Moment(machine=MACHINE, state=state, reading=None), *_asked(**annotations))
    assert made is not None
    return made


def test_the_state_is_the_one_of_a_decision_made_when_asked() -> None:
    """For each kind: owned CPUs, a list, a share of NUMA nodes, and one decision for a pod."""
    for asked in (
        {"policy": "single-numa-node"},
        {"numacpu": "0-1", "cpus": "shared"},
        {"policy": "best-effort", "cpus": "shared"},
        {"policy": "single-numa-node", "scope": "pod"},
    ):
        state = NodeState()
        for number in range(3):
            pod, container = _asked(**asked)
            names = replace(COMES, container_id=f"c{number}", pod_uid=f"u{number}")
            usual = admit(
                MACHINE,
                state,
                replace(pod, id=names.pod_id, uid=names.pod_uid, name=names.pod),
                replace(container, id=names.container_id, pod_id=names.pod_id),
                None,
                1.0,
            )
            taken = take(_prepared(state, **asked), state, names, 1.0)
            assert isinstance(usual, Admitted), usual
            assert taken is not None
            assert taken.state == usual.state
            assert list(taken.state.allocations) == list(usual.state.allocations)
            assert not violations(taken.state, MACHINE.topology, MACHINE.settings)
            state = taken.state
        assert state.listed == ({} if "numacpu" not in asked else dict.fromkeys(
            ("c0", "c1", "c2"), CPUSet.parse("0-1")
        ))  # fmt: skip
