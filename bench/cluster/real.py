"""One real node beside those that are objects: kubelet, containerd, nri-numa and its publisher.

It is this machine. Its pods name it, ask for one exclusive CPU each and end by themselves; the
kubelet says what becomes of them, and which CPUs they have is read from the kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Final, cast

from nri_numa.machine.sysfs import discover_topology
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import Topology
from nri_numa.text import parse_exact_quantity
from tests.beds.cri import CRIError, poll
from tests.beds.kube.bed import MANIFESTS, KubeBed, Publisher, install, token
from tests.beds.kube.client import PATIENCE_S, Client, JsonObject
from tests.beds.kube.control_plane import ControlPlane
from tests.beds.kube.manifests import container, pod
from tests.beds.kube.node import KubeNode

NAME: Final = "bed"
EVERY: Final = 30
"""One of so many pods goes there: the machine has few CPUs."""
_SECONDS: Final = 4
_TOPOLOGY: Final = MANIFESTS / "publish-topology"
_NRT: Final = f"/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies/{NAME}"


def document(name: str, scheduler: str, annotations: Mapping[str, str]) -> JsonObject:
    """A pod for this node that runs for some seconds."""
    return pod(
        name,
        container(cpus="1", memory="64Mi", command=("/bin/sleep", str(_SECONDS))),
        annotations=annotations,
        schedulerName=scheduler,
        nodeSelector={"kubernetes.io/hostname": NAME},
        restartPolicy="Never",
    )


def topology() -> Topology:
    """The machine that it is."""
    return discover_topology(Path("/"))


class _Lonely(KubeNode):
    """A node whose taint is taken off by hand: the other ones never report, so nobody else does."""

    def _takes_pods(self) -> bool:
        found = self.control.client.get(f"/api/v1/nodes/{self.name}")
        if found is not None and found["spec"].get("taints"):
            self.control.client.ask(
                "PATCH", f"/api/v1/nodes/{self.name}", {"spec": {"taints": None}},
                content_type="application/merge-patch+json",
            )  # fmt: skip
        return super()._takes_pods()


class RealNode:
    """What is known of it from outside.

    Args:
        node: that runs.
    """

    def __init__(self, node: KubeNode) -> None:
        self._node = node

    def granted(self, pods: Iterable[JsonObject]) -> dict[str, Sequence[int]]:
        """Which CPUs each of its pods has that runs now, by UID, as the kernel says it."""
        found: dict[str, Sequence[int]] = {}
        for one in pods:
            if one["spec"]["nodeName"] != NAME or one["status"]["phase"] != "Running":
                continue
            # One that ended a moment ago has no process, and no CPUs.
            with contextlib.suppress(OSError, LookupError, CRIError):
                found[one["metadata"]["uid"]] = list(CPUSet.parse(self._node.allowed(one).cpus))
        return found

    def zones(self) -> list[dict[str, int]]:
        """What is left on each NUMA node, as its object says it: whole CPUs, bytes of memory."""
        return [
            {
                each["name"]: int(parse_exact_quantity(each["available"]))
                for each in zone["resources"]
                if each["name"] in ("cpu", "memory")
            }
            for zone in self._node.control.client.ask("GET", _NRT)["zones"]
            if zone["type"] == "Node"
        ]


@contextlib.contextmanager
def running(control: ControlPlane) -> Iterator[RealNode]:
    """The node while it runs and publishes.

    Args:
        control: a control plane that knows a node `NAME`.
    """
    client: Client = control.client
    install(client)
    names = ("role.yaml", "policies.yaml", "crd.yaml")
    client.kubectl("apply", *(f"--filename={_TOPOLOGY / name}" for name in names))
    with _Lonely(control, name=NAME) as node:
        bed = cast(
            KubeBed,
            SimpleNamespace(
                control=control, client=client, directory=control.namespaces.directory, node=node
            ),
        )
        publish = {"nodeResourceTopology": True, "events": False}
        credentials = token(client, NAME)
        with Publisher(bed, credentials, config=publish) as process:

            def there() -> bool | None:
                process.check()
                return client.request("GET", _NRT)[0] == 200 or None

            poll(there, "the object of the real node", timeout_s=PATIENCE_S, every_s=0.1)
            yield RealNode(node)
