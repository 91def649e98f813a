"""A model of a cluster whose kubelets choose devices, around the real agent, extender and evictor.

The kubelet allocates devices when it admits a pod, keeps them as long as the pod lives, and retries
a rejected container with the same ones. What the node publishes, the extender's filter, the agent's
decision and the evictor are the product's own. A clock that is set goes from event to event.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from nri_numa.agent.view import zones_document
from nri_numa.cluster.cluster_state import ClusterState
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.config import AgentConfig
from nri_numa.config.sections import EvictionSection
from nri_numa.controller.evictor import EvictionBudget
from nri_numa.controller.stuck_pods import StuckPodEvictor
from nri_numa.engine.admit import admit, forget_pod, release_container
from nri_numa.engine.decision import Admitted
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.state import NodeState
from nri_numa.kube.requests import Outcome, OutcomeKind, Resource
from nri_numa.kubelet.pod_resources import NodeDevice, count_devices
from nri_numa.model.settings import Settings
from nri_numa.model.workload import Device, DeviceRequest, DeviceStock
from nri_numa.publisher.topology import build_topology_contents
from nri_numa.scheduler.candidates import VerdictCache
from tests.beds import objects, world

GPU, NIC = "example.com/gpu", "example.com/nic"
RETRY_S: Final = 15.0
"""Seconds between two attempts of the kubelet, or of the scheduler."""
QUIET_STEP_S: Final = 60.0
"""The same where an attempt changed nothing."""
ASKS: Final = {"policy": "single-numa-node", "cpus": "exclusive"}


@dataclass(kw_only=True)
class PodOnDevices:
    """A pod; of a workload of its own, and without a policy where it takes devices alone."""

    name: str
    workload: str
    wants: dict[str, int]
    strict: bool = True
    cpus: int = 1
    node: str = ""
    devices: list[NodeDevice] = field(default_factory=list)
    rejection: str = ""
    is_running: bool = False

    def document(self) -> dict[str, Any]:
        """The pod as the API server has it."""
        made = objects.single(self.cpus, name=self.name, node=self.node)
        limits = made["spec"]["containers"][0]["resources"]["limits"]
        limits |= {resource: str(count) for resource, count in self.wants.items()}
        made["metadata"]["ownerReferences"] = [
            {"kind": "ReplicaSet", "uid": self.workload, "controller": True}
        ]
        if self.rejection:
            waiting = {"reason": "CreateContainerError", "message": f"failed: {self.rejection}"}
            made["status"]["containerStatuses"] = [{"name": "main", "state": {"waiting": waiting}}]
        return made


class NodeWithDevices:
    """A node of two NUMA nodes: its kubelet's device manager, and the agent's decisions."""

    def __init__(self, name: str, devices: list[NodeDevice], random: Random, **kubelet: bool):
        self.name, self.devices, self._random = name, devices, random
        self._aligns, self._prefers = kubelet.get("aligns", False), kubelet.get("prefers", False)
        self._holders: dict[tuple[str, str], str] = {}
        self._machine = NodeModel(topology=world.two_by_four(), settings=Settings())
        self._state = NodeState()

    def free_devices(self, without: str = "") -> list[NodeDevice]:
        """Devices that no pod has, except that one."""
        return [d for d in self.devices if self._holders.get((d.resource, d.id)) in (None, without)]

    def has_aligned_choice(self, pod: PodOnDevices) -> bool:
        """Whether one NUMA node would do for a pod, with the devices that it has itself."""
        for numa_node in (0, 1):
            free = [d for d in self.free_devices(pod.name) if d.numa_nodes == {numa_node}]
            chosen = [d for r, n in pod.wants.items() for d in _of(free, r)[:n]]
            if len(chosen) == sum(pod.wants.values()) and self._decide(pod, chosen) is not None:
                return True
        return False

    def admit(self, pod: PodOnDevices) -> bool:
        """Allocate a pod's devices, as the kubelet does; False where it has too few."""
        chosen: list[NodeDevice] = []
        free = self.free_devices()
        if not self._prefers:
            self._random.shuffle(free)
        if self._aligns:
            aligned_node = self._aligned_node(pod, free)
            free.sort(key=lambda d: d.numa_nodes != {aligned_node})
        for resource, count in pod.wants.items():
            listed = _of(free, resource)[:count]
            chosen += listed
            if len(listed) < count:
                return False
        pod.node, pod.devices = self.name, chosen
        self._holders |= {(d.resource, d.id): pod.name for d in chosen}
        return True

    def _aligned_node(self, pod: PodOnDevices, free: list[NodeDevice]) -> int:
        """The first NUMA node with enough of all devices: the kubelet's best-effort."""
        for numa_node in (0, 1):
            near = [d for d in free if d.numa_nodes == {numa_node}]
            if all(len(_of(near, resource)) >= n for resource, n in pod.wants.items()):
                return numa_node
        return 0

    def create_container(self, pod: PodOnDevices) -> None:
        """Ask the agent, as every retry of the kubelet does."""
        if not pod.strict:
            pod.is_running = True
            return
        decision = self._decide(pod, pod.devices)
        if decision is not None:
            self._state, pod.is_running, pod.rejection = decision.state, True, ""

    def _decide(self, pod: PodOnDevices, devices: list[NodeDevice]) -> Admitted | None:
        sandbox = world.pod(pod.name, ASKS)
        made = world.container(sandbox, "main", world.resources(pod.cpus, 1))
        requests = [self._request(pod, r, _of(devices, r)) for r in pod.wants]
        made = world.replace(made, devices=tuple(requests))
        decision = admit(NodeSnapshot(self._machine, self._state), sandbox, made)
        if isinstance(decision, Admitted):
            return decision
        if devices is pod.devices:
            pod.rejection = f"{decision.reason}: {decision.message}"
        return None

    def _request(
        self, pod: PodOnDevices, resource: str, devices: list[NodeDevice]
    ) -> DeviceRequest:
        def read(listed: list[NodeDevice]) -> tuple[Device, ...]:
            return tuple(Device(id=d.id, numa_nodes=d.numa_nodes) for d in listed)

        stock = DeviceStock(choices=read(_of(self.free_devices(pod.name), resource)))
        return DeviceRequest(
            resource=resource, count=len(devices), devices=read(devices), stock=stock
        )

    def remove(self, pod: PodOnDevices) -> None:
        """Forget a pod that is gone."""
        self._holders = {key: name for key, name in self._holders.items() if name != pod.name}
        if pod.is_running and pod.strict:
            node, uid = NodeSnapshot(self._machine, self._state), f"uid-{pod.name}"
            self._state = release_container(node, f"{pod.name}-main").state
            self._state = forget_pod(NodeSnapshot(self._machine, self._state), uid).state

    def document(self) -> dict[str, Any]:
        """The NodeResourceTopology that the node publishes."""
        free = {(d.resource, d.id) for d in self.free_devices()}
        devices = [
            world.replace(d, is_allocated=(d.resource, d.id) not in free) for d in self.devices
        ]
        zones = zones_document(
            NodeSnapshot(self._machine, self._state), devices=count_devices(devices)
        )
        return {"metadata": {"name": self.name}, **build_topology_contents(objects.PREFIX, zones)}


def _of(devices: list[NodeDevice], resource: str) -> list[NodeDevice]:
    return [device for device in devices if device.resource == resource]


class DeviceCluster:
    """Nodes, pods that controllers recreate, kube-scheduler with the extender, and the evictor.

    Attributes:
        evicted: name of each evicted pod and when.
        events: reason of each Event of the evictor.
    """

    def __init__(self, *nodes: NodeWithDevices, uses_extender: bool = True) -> None:
        config = AgentConfig()
        self.now, self.nodes = 0.0, {node.name: node for node in nodes}
        self.pods: dict[str, PodOnDevices] = {}
        self.evicted: list[tuple[str, float]] = []
        self.events: list[str] = []
        self._uses_extender, self._count = uses_extender, 0
        self._reader, self._state = PodReader(config), ClusterState(objects.PREFIX)
        # The extender is another program, with a state of its own.
        self._extender_state = ClusterState(objects.PREFIX)
        self._extender = VerdictCache(self._extender_state, config.strategy)
        self.evictor = StuckPodEvictor(
            objects.PREFIX,
            EvictionBudget(EvictionSection(max_per_workload_per_hour=60), 0.0),
            60.0,
            self._state,
            VerdictCache(self._state, config.strategy),
            self._reader,
            0.0,
        )
        for node in nodes:
            self._state.update_node(node.name, {"metadata": {"name": node.name}})
            self._publish(node.name)

    def add(self, workload: str, wants: dict[str, int], **more: Any) -> PodOnDevices:
        """A controller makes a pod."""
        self._count += 1
        name = f"{workload}-{self._count}"
        pod = PodOnDevices(name=name, workload=workload, wants=wants, **more)
        self.pods[pod.name] = pod
        return pod

    def remove(self, pod: PodOnDevices) -> None:
        """It is gone, and so are its claims on devices."""
        del self.pods[pod.name]
        self.evictor.on_pod_removed(f"uid-{pod.name}")
        if pod.node:
            self.nodes[pod.node].remove(pod)
            self._publish(pod.node)

    def run(self, until_s: float) -> None:
        """Let time pass, from one event to the next."""
        while self.now < until_s:
            before = [(p.node, p.is_running) for p in self.pods.values()], len(self.evicted)
            for pod in list(self.pods.values()):
                self._advance(pod)
            self._evict()
            after = [(p.node, p.is_running) for p in self.pods.values()], len(self.evicted)
            step_s, due = RETRY_S, self.now
            if before == after:
                step_s, due = QUIET_STEP_S, min(self.evictor.next_due_at(), until_s)
            self.now = max(self.now + step_s, due)

    def _advance(self, pod: PodOnDevices) -> None:
        if not pod.node:
            self._schedule(pod)
        if pod.node and not pod.is_running:
            self.nodes[pod.node].create_container(pod)
            self._publish(pod.node)
            if not pod.is_running:
                self.evictor.on_pod(pod.document(), self.now)
            else:
                self.evictor.on_pod_removed(f"uid-{pod.name}")

    def _schedule(self, pod: PodOnDevices) -> None:
        names = sorted(self.nodes)
        if pod.strict and self._uses_extender:
            request = self._reader.read_pod_request(pod.document())
            names = self._extender.filter_nodes(request, names).feasible
        next((name for name in names if self.nodes[name].admit(pod)), "")

    def _evict(self) -> None:
        self.evictor.on_tick(self.now, self.now)
        while (request := self.evictor.next_request(self.now)) is not None:
            if request.resource is Resource.EVICTIONS:
                pod = self.pods[request.name]
                self.evicted.append((pod.name, self.now))
                self.remove(pod)
                self.add(pod.workload, pod.wants, cpus=pod.cpus)
            else:
                self.events.append(request.body["reason"])
            done = Outcome(result=OutcomeKind.SUCCEEDED)
            self.evictor.on_outcome(request, done, self.now, 0.5)

    def _publish(self, name: str) -> None:
        document = self.nodes[name].document()
        for state in (self._state, self._extender_state):
            state.update_topology(name, document, self.now)

    def stuck_pods(self) -> Iterator[PodOnDevices]:
        """Strict pods that do not run although some node has an aligned choice."""
        for pod in self.pods.values():
            nodes = [self.nodes[pod.node]] if pod.node else self.nodes.values()
            is_waiting = pod.strict and not pod.is_running
            if is_waiting and any(node.has_aligned_choice(pod) for node in nodes):
                yield pod


def devices_of(counts: dict[str, tuple[int, int]]) -> list[NodeDevice]:
    """So many devices on the NUMA nodes 0 and 1: ``gpu-0``, ``gpu-1`` and so on."""
    made: list[NodeDevice] = []
    for resource, numbers in counts.items():
        nodes = [0] * numbers[0] + [1] * numbers[1]
        kind = resource.rpartition("/")[2]
        made += [
            NodeDevice(resource=resource, id=f"{kind}-{n}", numa_nodes=frozenset([i]))
            for n, i in enumerate(nodes)
        ]
    return made
