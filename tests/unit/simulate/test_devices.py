"""Pods that ask for devices of an inventory, and where that puts them."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from nri_numa.cluster.manifests import ManifestError
from nri_numa.engine.node_model import NodeModel
from nri_numa.model.settings import Settings
from nri_numa.model.workload import Device
from nri_numa.simulate.devices import DeviceInventory
from nri_numa.simulate.manifests import read_manifests_from_text
from nri_numa.simulate.simulator import SimulatedOutcome, Simulation, plan_actions, simulate_plan
from tests.machines import named as machines
from tests.machines.pods import container, document, outcomes, pod, replicated, the

GPU, NIC = "nvidia.com/gpu", "example.com/nic"
SINGLE = {"policy": "single-numa-node"}


def devices(**at: tuple[int, ...]) -> tuple[Device, ...]:
    return tuple(Device(id=id, numa_nodes=frozenset(nodes)) for id, nodes in at.items())


FOUR: DeviceInventory = {GPU: devices(g0=(1,), g1=(1,), g2=(0,), g3=(0,)), NIC: devices(n0=(0,))}


def needs(name: str = "app", **amounts: Any) -> dict[str, Any]:
    """A container that asks for a CPU, and for devices by the last word of their resource."""
    names = {"gpu": GPU, "nic": NIC}
    limits = {"cpu": 1, "memory": "64Mi"} | {names.get(k, k): v for k, v in amounts.items()}
    return container(name, {"limits": limits})


def wants(
    name: str, *containers: Mapping[str, Any], wishes: Mapping[str, str] | None = None, **more: Any
) -> str:
    return document("Pod", name, {"containers": list(containers), **more}, wishes or SINGLE)


def run(*documents: str, inventory: DeviceInventory = FOUR, keep_going: bool = False) -> Simulation:
    topology = machines.dual_no_smt(cores_per_numa=4, memory_gib=4, memory_only_gib=(2,))
    manifests = read_manifests_from_text("\n---\n".join(documents), "pods.yaml", "", inventory)
    machine = NodeModel(topology=topology, settings=Settings())
    planned = plan_actions(manifests.workloads)
    return simulate_plan(machine, planned, inventory=inventory, keep_going=keep_going)


def had(result: Simulation, name: str) -> list[str]:
    return [one.id for given in outcomes(result)[name].devices.values() for one in given]


def test_a_container_is_placed_beside_the_devices_it_is_given() -> None:
    result = run(wants("a", needs(gpu=2)), wants("b", needs(gpu=1)), wants("c", needs()))
    found = outcomes(result)
    assert (found["a/app"].mems, found["b/app"].mems) == ("1", "0")
    assert had(result, "a/app") == ["g0", "g1"]
    assert had(result, "b/app") == ["g2"]
    assert had(result, "c/app") == []
    assert "because its nvidia.com/gpu g0, g1 are there" in str(found["a/app"].trace.decision_steps)


def test_another_order_of_the_inventory_is_another_choice() -> None:
    turned = {GPU: tuple(reversed(FOUR[GPU]))}
    assert the(run(wants("a", needs(gpu=1)), inventory=turned)).mems == "0"


def test_devices_of_two_numa_nodes_have_no_single_one() -> None:
    result = run(wants("a", needs(gpu=1, nic=1)))
    assert the(result).verdict is SimulatedOutcome.REJECTED
    assert the(result).reason == "DeviceAffinityError"
    assert had(result, "a/app") == ["n0", "g0"]
    # Of a refused pod nothing stays given away.
    again = run(wants("a", needs(gpu=1, nic=1)), wants("b", needs(nic=1)), keep_going=True)
    assert had(again, "b/app") == ["n0"]


def test_too_few_reject_the_pod_before_anything_of_it_is_placed() -> None:
    result = run(wants("a", needs("one"), needs("two", gpu=5)), wants("b", needs(gpu=4)))
    (outcome,) = result.events[0].outcomes
    assert (outcome.container, outcome.reason) == ("two", "UnexpectedAdmissionError")
    assert "5 nvidia.com/gpu needed, 4 of the inventory's 4 are free" in outcome.message
    assert result.running_containers == ()
    assert result.skipped_pods == 1


def test_pods_that_are_gone_give_their_devices_back() -> None:
    spec = {"containers": [needs(gpu=4)]}
    result = run(
        replicated("StatefulSet", "s", 1, spec, {"policy": "best-effort"}),
        replicated("StatefulSet", "s", 0, spec, {"policy": "best-effort"}),
        wants("b", needs(gpu=2)),
    )
    assert result.first_rejected is None
    assert had(result, "b/app") == ["g0", "g1"]


def test_what_an_init_container_had_is_for_those_after_it() -> None:
    init = [needs("i", gpu=2), {**needs("s", gpu=1), "restartPolicy": "Always"}]
    result = run(wants("a", needs(gpu=3), initContainers=init, wishes={"policy": "best-effort"}))
    assert had(result, "a/i") == ["g0", "g1"]
    assert had(result, "a/s") == ["g0"]
    assert had(result, "a/app") == ["g1", "g2", "g3"]


def test_devices_that_are_nowhere_give_no_hint_and_that_is_said() -> None:
    inventory = {GPU: devices(m=(2,), n=())}
    result = run(wants("a", needs(gpu=2)), inventory=inventory)
    assert the(result).mems == "0"
    assert (
        "its nvidia.com/gpu m is on NUMA node 2, which has no CPUs: no hint"
        in the(result).trace.decision_steps
    )
    assert (
        "its nvidia.com/gpu n has no known NUMA node: no hint" in the(result).trace.decision_steps
    )


def test_cpus_are_in_proportion_to_the_devices_that_are_beside_cpus() -> None:
    """Of 65 none counts; else not those on a NUMA node without CPUs, nor those of none."""
    inventory = {GPU: devices(a=(0,), b=(1,), m=(2,), n=())}
    wishes = {"policy": "best-effort"}
    result = run(wants("a", needs(gpu=4, cpu=4), wishes=wishes), inventory=inventory)
    assert the(result).cpus == "0-1,4-5"
    many = {GPU: devices(**{f"g{n}": (n % 2,) for n in range(65)})}
    result = run(wants("a", needs(gpu=65, cpu=4), wishes=wishes), inventory=many)
    assert the(result).cpus in ("0-3", "4-7")


def test_more_devices_than_anybody_can_be_beside_give_no_hint() -> None:
    inventory = {GPU: devices(**{f"g{n}": (1,) for n in range(65)})}
    result = run(wants("a", needs(gpu=65)), inventory=inventory)
    assert the(result).mems == "0"
    assert "it has 65 devices, more than 64: no hint" in the(result).trace.decision_steps


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"nvidia.com/gpus": 1}, "is not in the inventory of devices, expected one of it (did you"),
        ({"else.where/x": 1}, "is not in the inventory of devices, expected one of it"),
        ({GPU: "500m"}, "expected a whole number of devices"),
        ({GPU: -1}, "expected"),
        ({GPU: "x"}, "expected"),
    ],
)
def test_what_cannot_be_asked_for_is_a_mistake(limits: Mapping[str, Any], words: str) -> None:
    with pytest.raises(ManifestError) as raised:
        run(wants("a", container("app", {"limits": limits})))
    assert words in str(raised.value)
    assert "spec.containers[0].resources.limits" in str(raised.value)


def test_devices_are_asked_for_as_limits_by_containers_and_never_changed() -> None:
    more = container("app", {"limits": {GPU: 1}, "requests": {GPU: 2}})
    with pytest.raises(ManifestError, match="cannot be overcommitted"):
        run(wants("a", more))
    whole = json.loads(pod("a", 1, "64Mi"))
    whole["spec"]["resources"] = {"limits": {"cpu": 1, GPU: 1}}
    with pytest.raises(ManifestError, match="by the pod as a whole, expected in a container"):
        run(json.dumps(whole))
    with pytest.raises(ManifestError, match="extended resources cannot be resized"):
        run(wants("a", needs(gpu=1)), wants("a", needs(gpu=2)))


def test_without_an_inventory_they_are_passed_over_as_before() -> None:
    manifests = read_manifests_from_text(wants("a", needs(gpu=1)), "pods.yaml")
    (note,) = manifests.notes
    assert "is placed without nvidia.com/gpu" in note
    assert manifests.workloads[0].pods[0].containers[0].devices == {}
