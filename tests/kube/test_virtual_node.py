"""A kubelet on two NUMA nodes, in an emulated machine: pods, claims, devices, and a reboot.

Takes minutes. ``NRI_NUMA_VM`` with ``kube-node`` in it runs it, as CI does; with ``kube-systemd``
the node has systemd as its first process and the systemd cgroup driver; ``all`` has both.
"""

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_numa.model.cpuset import CPUSet
from tests.beds.cri import poll
from tests.beds.images import FIRST_LINE_SCRIPT
from tests.beds.kube.build import find_programs
from tests.beds.kube.client import Client, JsonObject, is_ready, unscheduled, waiting_reason
from tests.beds.kube.control_plane import ControlPlane, Namespaces
from tests.beds.kube.dra import (
    CLAIMS,
    claiming,
    counted,
    delete_claims,
    install_driver,
    publisher_files,
    sections,
    template,
)
from tests.beds.kube.manifests import asks, container, pod
from tests.beds.kube.numa_devices import CARD, GPU, NUMA_NODE_BY_DEVICE
from tests.beds.kube.virtual_node import Look, VirtualNode, container_id
from tests.beds.testbed import TestbedUnavailable, require_root, skip_or_fail
from tests.beds.vm_bed import one_machine_at_a_time, prepare
from tests.vm.selection import MACHINES, booted

NODES = [CPUSet(node.cpus) for node in MACHINES["kube-node"].numa]  # of both
DEVICE_PODS = int(os.environ.get("NRI_NUMA_DEVICE_PODS", "3"))
PAIRS = 4  # of a GPU and a card, which the node has
LIMIT_S = 900.0  # a pod takes a quarter of a minute there, and ten times as long on a busy host

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(3600)]

# What a container may use at its first instruction, and a second later.
_LOOK, _STAY = FIRST_LINE_SCRIPT.rsplit("; ", 1)
TWICE = ("/bin/sh", "-c", f"{_LOOK}; sleep 1; {_LOOK}; {_STAY}")

# Not the network is under test: a pod in the node's costs half as much. And nobody takes the pods
# away while the node is off.
FOR_THE_BED = {"hostNetwork": True, "tolerations": [{"operator": "Exists", "effect": "NoExecute"}]}

PODS = [
    pod("listed", container(command=TWICE), annotations=asks(numacpu="3", numamem="1")),
    pod("memory", container(command=TWICE), annotations=asks(numamem="1")),
    pod(
        "aligned",
        container(cpus="500m", command=TWICE),
        annotations=asks(policy="single-numa-node", cpus="shared"),
    ),
    pod(
        "owner",
        container(cpus="1", command=TWICE),
        annotations=asks(policy="single-numa-node", cpus="exclusive"),
    ),
    pod("ordinary", container(command=TWICE)),
]


@pytest.fixture(scope="module", params=["kube-node", "kube-systemd"])
def node(request: pytest.FixtureRequest) -> Iterator[VirtualNode]:
    machine = MACHINES[request.param]
    if machine not in booted():
        pytest.skip(f"takes minutes; NRI_NUMA_VM={machine.name} runs it")
    try:
        require_root("a Kubernetes")
        programs = find_programs(build=False)
        parts = prepare(containerd=[machine.containerd], systems=[machine.system])
        # Not pytest's own directory: socket paths must stay short.
        with (
            one_machine_at_a_time() as lock,
            tempfile.TemporaryDirectory(prefix="nri-numa-kube-") as scratch,
            Namespaces(Path(scratch)) as namespaces,
            ControlPlane(programs, namespaces, nodes=["virtual"], heartbeats=True) as control,
            VirtualNode(
                control, parts, machine, lock, agent={"nodeName": "virtual", **_agent_sections()}
            ) as node,
        ):
            yield node
    except TestbedUnavailable as error:
        skip_or_fail(error, "KUBE", "VM")  # it was asked for by name


def _agent_sections() -> JsonObject:
    both = sections()
    here = {"enabled": True, "networkInterfaces": False}
    return {**both, "devices": {**both["devices"], **here}}


@pytest.fixture
def client(node: VirtualNode) -> Client:
    """Calls the API server of `node`, where `PODS` run."""
    control = node.control.client
    if not control.pods():
        # All at once, so that they start beside each other.
        control.apply(*map(_in_the_bed, PODS))
    for each in PODS:
        control.wait_ready(each["metadata"]["name"], timeout_s=LIMIT_S)
    return control


def _in_the_bed(document: JsonObject) -> JsonObject:
    return {**document, "spec": {**document["spec"], **FOR_THE_BED}}


@pytest.fixture
def claims(node: VirtualNode) -> Iterator[Client]:
    """Calls the API server of `node`, which publishes its NUMA nodes and has no pods."""
    client = node.control.client
    client.delete_pods()
    install_driver(client)
    node.publish(publisher_files(client, node.control, node.name))
    poll(
        # Of four CPUs one stays shared; what the pods before had is given back.
        lambda: sorted(counted(client).values()) == [1, 2] or None,
        "a ResourceSlice of two NUMA nodes",
        timeout_s=LIMIT_S,
        every_s=0.2,
    )
    yield client
    client.delete_pods()
    delete_claims(client)


@pytest.fixture
def devices(node: VirtualNode) -> Iterator[Client]:
    """Calls the API server of `node`, which has no pods; a test starts its kubelet anew."""
    client = node.control.client
    client.delete_pods()
    yield client
    client.delete_pods()


def own_words(client: Client, name: str) -> list[tuple[str, str]]:
    """(CPUs, memory nodes) as the container read them of itself: at once, and a second later."""

    def ask() -> list[tuple[str, str]] | None:
        found = re.findall(r"^cpus=(\S*) mems=(\S*) ", client.kubectl("logs", name), re.MULTILINE)
        return found if len(found) == 2 else None

    return poll(ask, f"two lines of {name}", timeout_s=LIMIT_S)


def insist(client: Client, node: VirtualNode) -> dict[str, Look]:
    """Each pod is where its annotations say: at its first instruction, later, and now."""
    looks = node.look()
    now = {
        name: looks[container_id(client.wait_ready(name, timeout_s=LIMIT_S))]
        for name in (each["metadata"]["name"] for each in PODS)
    }
    for look in now.values():
        assert (look.cpus, look.mems) == (look.cgroup_cpus, look.cgroup_mems)
    own = {name: [*own_words(client, name), (look.cpus, look.mems)] for name, look in now.items()}
    assert own["listed"] == [("3", "1")] * 3
    assert {mems for _, mems in own["memory"]} == {"1"}
    # Of a shared one the CPUs change as owners come; its NUMA node does not.
    (numa,) = {int(mems) for _, mems in own["aligned"]}
    assert all(CPUSet.parse(cpus) <= NODES[numa] for cpus, _ in own["aligned"])
    ((cpus, mems),) = set(own["owner"])
    owned = CPUSet.parse(cpus)
    assert len(owned) == 1
    assert owned <= NODES[int(mems)]
    for name in ("memory", "aligned", "ordinary"):
        assert not CPUSet.parse(now[name].cpus) & owned
    assert {mems for _, mems in own["ordinary"]} == {"0-1"}
    if node.machine.system:
        node.agree()
    return now


def test_pods_of_one_moment_are_placed_from_the_start(client: Client, node: VirtualNode) -> None:
    """Three witnesses: the program itself, its cgroup, and the guest's ``/proc/PID/status``."""
    now = insist(client, node)
    # The same through the API server and the kubelet.
    status = client.kubectl("exec", "listed", "--", "cat", "/proc/1/status")
    assert re.search(rf"^Cpus_allowed_list:\s*{now['listed'].cpus}$", status, re.MULTILINE)


def test_each_claim_has_cpus_and_memory_of_its_numa_node(claims: Client, node: VirtualNode) -> None:
    """The stock scheduler chooses; what does not fit waits until somebody gives back."""
    ((small, _), (large, _)) = sorted(counted(claims).items(), key=lambda each: each[1])

    def here(numa: int) -> str:
        return f"device.attributes['resource.kubernetes.io'].numaNode == {numa}"

    claims.apply(
        template("claim-2", 2),
        template("claim-1", 1, cel=here(small)),
        template("claim-more", 1, cel=here(large)),
    )
    pods = {"pair": 2, "single": 1}
    claims.apply(
        *(_in_the_bed(claiming(name, f"claim-{count}", count)) for name, count in pods.items())
    )
    first = {name: claimed(claims, node, name, count) for name, count in pods.items()}
    assert {name: look.mems for name, look in first.items()} == {
        "pair": str(large),  # only there are two
        "single": str(small),
    }

    claims.apply(_in_the_bed(claiming("late", "claim-more", 1)))
    # The Node has a CPU for it, and its NUMA node has none.
    claims.wait_pod("late", lambda it: "cannot allocate all claims" in unscheduled(it), "kept back")

    node.kill_agent()
    assert {name: claimed(claims, node, name, count) for name, count in pods.items()} == first

    claims.kubectl("delete", "pod", "pair")
    late = claimed(claims, node, "late", 1)
    assert late.mems == str(large)
    assert claimed(claims, node, "single", 1) == first["single"]


def claimed(client: Client, node: VirtualNode, name: str, count: int) -> Look:
    """What a pod may use: so many CPUs of the device that its claim was given, and its memory."""
    ready = client.wait_ready(name, timeout_s=LIMIT_S)
    (status,) = ready["status"]["resourceClaimStatuses"]
    claim = client.ask("GET", f"{CLAIMS}/{status['resourceClaimName']}")
    (given,) = claim["status"]["allocation"]["devices"]["results"]
    numa = int(given["device"].removeprefix("numa"))
    look = node.look()[container_id(ready)]
    assert (look.cpus, look.mems) == (look.cgroup_cpus, look.cgroup_mems)
    cpus = CPUSet.parse(look.cpus)
    assert len(cpus) == count
    assert cpus <= NODES[numa]
    assert look.mems == str(numa)
    # Of itself, at its first instruction.
    said = poll(lambda: client.kubectl("logs", name), f"words of {name}", timeout_s=LIMIT_S)
    assert said.startswith(f"cpus={look.cpus} mems={look.mems} ")
    return look


def with_devices(name: str = "main", *, gpus: int = 0, cards: int = 0) -> JsonObject:
    """A container that requests so many devices of the bed's plugins."""
    made = container(name)
    wanted = {key: str(count) for key, count in ((GPU, gpus), (CARD, cards)) if count}
    made["resources"] = {key: {**amounts, **wanted} for key, amounts in made["resources"].items()}
    return made


def strict(name: str, *containers: JsonObject) -> JsonObject:
    keys = asks(policy="single-numa-node", cpus="shared", scope="pod")
    return _in_the_bed(pod(name, *containers, annotations=keys))


def test_without_a_topology_policy_devices_are_apart(devices: Client, node: VirtualNode) -> None:
    """As both plugins prefer; the strict pod is refused, though two pairs are free together."""
    node.restart_kubelet({"topologyManagerPolicy": "none"})
    devices.apply(strict("apart", with_devices(gpus=1, cards=1)))
    refused = devices.wait_pod(
        "apart",
        lambda it: waiting_reason(it)[0] == "CreateContainerError",
        "refused",
        timeout_s=LIMIT_S,
    )
    assert node.devices(refused) == ["gpu-0", "nic-3"]
    assert "DeviceAffinityError" in waiting_reason(refused)[1]


def test_with_best_effort_a_pod_has_all_together(devices: Client, node: VirtualNode) -> None:
    """The recipe of docs/devices.md; the containers of a pod too, by the kubelet's scope."""
    keys = {"topologyManagerPolicy": "best-effort", "topologyManagerScope": "pod"}
    node.restart_kubelet(keys)
    # Two GPUs of NUMA node 0 are taken, so that a pair cannot be there.
    devices.apply(strict("taken", with_devices(gpus=2)))
    beside(node, devices.wait_ready("taken", timeout_s=LIMIT_S), 0)
    devices.apply(strict("pair", with_devices(gpus=1), with_devices("side", cards=1)))
    beside(node, devices.wait_ready("pair", timeout_s=LIMIT_S), 1)


def test_no_pod_of_many_is_stuck_with_devices_apart(devices: Client, node: VirtualNode) -> None:
    """As many at once as there are pairs; ``NRI_NUMA_DEVICE_PODS`` says how many in all."""
    keys = {"topologyManagerPolicy": "best-effort", "topologyManagerScope": "pod"}
    node.restart_kubelet(keys)
    names = [f"pair-{number}" for number in range(DEVICE_PODS)]
    for first in range(0, DEVICE_PODS, PAIRS):
        wave = names[first : first + PAIRS]
        pair = with_devices(gpus=1), with_devices("side", cards=1)
        devices.apply(*(strict(name, *pair) for name in wave))
        for name in wave:
            ready = devices.wait_ready(name, timeout_s=LIMIT_S)
            (gpu,) = node.devices(ready, "main")
            beside(node, ready, NUMA_NODE_BY_DEVICE[gpu])
        devices.delete_pods()


def beside(node: VirtualNode, ready: JsonObject, numa: int) -> None:
    """Insist that devices, CPUs and memory of each container of a pod are on one NUMA node."""
    looks = node.look()
    for status in ready["status"]["containerStatuses"]:
        given = node.devices(ready, status["name"])
        assert given
        assert {NUMA_NODE_BY_DEVICE[each] for each in given} == {numa}
        look = looks[status["containerID"].removeprefix("containerd://")]
        assert CPUSet.parse(look.cpus) <= NODES[numa]
        assert look.mems == str(numa)


def test_with_restricted_a_pod_of_devices_apart_fails(devices: Client, node: VirtualNode) -> None:
    """For ever: a controller makes another one at once, and three of them in each second."""
    node.restart_kubelet({"topologyManagerPolicy": "restricted"})
    devices.apply(strict("apart", with_devices(gpus=1, cards=3)))
    failed = devices.wait_pod(
        "apart", lambda it: it["status"]["phase"] == "Failed", "failed", timeout_s=LIMIT_S
    )
    assert failed["status"]["reason"] == "TopologyAffinityError"


def test_after_a_reboot_all_are_placed_again(client: Client, node: VirtualNode) -> None:
    """New containers, and a checkpoint on the disk that speaks of processes that are gone."""
    before = {each["metadata"]["name"]: container_id(each) for each in client.pods()}
    records_before = len(node.log())
    node.reboot()

    def back() -> list[JsonObject] | None:
        pods = client.pods()
        new = [each for each in pods if is_ready(each) and _is_new(each, before)]
        return pods if len(new) == len(PODS) else None

    poll(back, "all pods again", timeout_s=LIMIT_S)
    insist(client, node)
    assert "is of another machine or boot" in node.log()[records_before:]


def _is_new(each: JsonObject, before: dict[str, str]) -> bool:
    return container_id(each) != before[each["metadata"]["name"]]
