"""NodeResourceTopology objects and pods for tests of the extender."""

from collections.abc import Mapping, Sequence
from typing import Any

from nri_numa.cluster.cluster_state import ClusterState
from nri_numa.cluster.node_resources import NodeResources
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.cluster.topology_reader import decode_topology
from nri_numa.config import AgentConfig
from nri_numa.config.sections import Scheduling
from nri_numa.model.counted_containers import (
    COUNTED_CONTAINERS_NRT_ATTRIBUTE,
    encode_counted_container_hashes,
)
from nri_numa.scheduler.watcher import NodeWatcher, PodActivator, PodWatcher
from tests.beds.cluster_objects import ClusterObjects

PREFIX = "numa.kubernetes.io"
GIB = 1 << 30


class Recorder(PodActivator):
    """A activator that writes to no Node."""

    def __init__(self) -> None:
        self.nodes: list[str] = []
        self.pods: list[str] = []

    def on_free_increased(self, node: str) -> None:
        self.nodes.append(node)

    def drop_pod(self, uid: str) -> None:
        self.pods.append(uid)


class Watched:
    """Both watchers with a clock that is set, and an API server that is asked after pods."""

    def __init__(self, *, report_delay: float = 10, api: Any = None, **section: Any) -> None:
        self.now = 0.0
        self.activator = Recorder()
        self.nodes = ClusterState(PREFIX)
        self.reader = PodReader(AgentConfig())
        config = AgentConfig(scheduler=Scheduling(topology_report_delay=report_delay, **section))
        self.cluster = ClusterObjects()
        api = api or self.cluster
        self.topologies = NodeWatcher(self.nodes, self.activator, lambda: self.now)
        self.pods = PodWatcher(
            api, self.nodes, self.reader, self.activator, config, lambda: self.now
        )

    def free(self) -> tuple[int, ...]:
        room = self.nodes.free_resources("n1")
        assert isinstance(room, NodeResources)
        return room.exclusive.free

    def tick(self) -> None:
        self.topologies.expire_topologies()
        self.pods.expire_assumed_pods()

    def at(self, now: float) -> tuple[int, ...]:
        self.now = now
        self.tick()
        return self.free()


def topology(
    *free: int,
    of: int = 16,
    memory: Sequence[int] = (),
    name: str = "n1",
    attributes: Mapping[str, str] | None = None,
    zone: Mapping[str, str] | None = None,
    charged: Sequence[tuple[str, str]] | None = None,
    devices: Mapping[str, Sequence[tuple[int, int]]] | None = None,
) -> dict[str, Any]:
    """An object whose NUMA nodes have so many free exclusive CPUs, and GiB of memory.

    Of ``devices`` each NUMA node has some free and some in all.

    It names the containers that are ``charged``, each by UID of its pod and name; without it says
    nothing of them.
    """
    named_too = (
        {}
        if charged is None
        else {
            f"{PREFIX}/{COUNTED_CONTAINERS_NRT_ATTRIBUTE}": encode_counted_container_hashes(charged)
        }
    )
    left = list(memory) or [32] * len(free)
    return {
        "apiVersion": "topology.node.k8s.io/v1alpha2",
        "metadata": {"name": name},
        "attributes": named({**(attributes or {}), **named_too}),
        "zones": [
            {
                "name": f"node-{i}",
                "type": "Node",
                "costs": [
                    {"name": f"node-{j}", "value": 10 if i == j else 21} for j in range(len(free))
                ],
                "resources": [
                    {"name": "cpu", "capacity": of, "allocatable": str(of), "available": str(n)},
                    {"name": "memory", "allocatable": "32Gi", "available": f"{left[i]}Gi"},
                    *(
                        {"name": name, "allocatable": str(of[i][1]), "available": str(of[i][0])}
                        for name, of in (devices or {}).items()
                    ),
                ],
                "attributes": named(zone or {}),
            }
            for i, n in enumerate(free)
        ],
    }


def named(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in values.items()]


def table(*free: int, **keys: Any) -> NodeResources:
    found = decode_topology(topology(*free, **keys), PREFIX)
    assert isinstance(found, NodeResources), found
    return found


def container(name: str = "main", cpu: str = "", memory: str = "", **more: Any) -> dict[str, Any]:
    """A container whose limits are its requests."""
    amounts = {key: text for key, text in (("cpu", cpu), ("memory", memory)) if text}
    return {"name": name, "resources": {"requests": amounts, "limits": amounts}, **more}


def pod(
    *containers: dict[str, Any],
    name: str = "p",
    init: Sequence[dict[str, Any]] = (),
    node: str = "",
    phase: str = "Pending",
    **asks: str,
) -> dict[str, Any]:
    """A pod as the API server has it; keywords are annotations of ours."""
    annotations = {f"{PREFIX}/{key.replace('_', '-')}": text for key, text in asks.items()}
    return {
        "metadata": {
            "name": name, "namespace": "default", "uid": f"uid-{name}", "annotations": annotations,
        },
        "spec": {
            "containers": list(containers), "initContainers": list(init),
            **({"nodeName": node} if node else {}),
        },
        "status": {"phase": phase},
    }  # fmt: skip


def single(cpus: int, *, name: str = "p", memory: str = "1Gi", **more: Any) -> dict[str, Any]:
    """A pod for exclusive CPUs of one NUMA node."""
    keys = {"policy": "single-numa-node", "cpus": "exclusive", **more}
    return pod(container(cpu=str(cpus), memory=memory), name=name, **keys)
