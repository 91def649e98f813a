"""The DRA driver in the bed: agent and publisher with ``dra.enabled``, and claims for pods."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from nri_numa.publisher.slices import build_slice_devices
from nri_numa.web.responses import NUMANodeExclusiveCPUSlots
from tests.beds.cri import poll
from tests.beds.http_view import FakeView
from tests.beds.kube.bed import MANIFESTS, NAMESPACE, KubeBed, Publisher, install, token
from tests.beds.kube.client import Client, JsonObject
from tests.beds.kube.control_plane import ControlPlane
from tests.beds.kube.manifests import container, pod
from tests.beds.kube.virtual_node import AGENT_SOCKET, CDI_DIRECTORY, HANDOVER, PUBLISHER
from tests.beds.processes import wait_for

DRIVER = "dra.numa.example.com"
CLASS = "numa-node"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"


def sections(handover: Path = HANDOVER, cdi_directory: Path = CDI_DIRECTORY) -> dict[str, Any]:
    """``dra`` and its CDI directory for agent and publisher; by default of a `VirtualNode`."""
    return {
        "dra": {"enabled": True, "driver": DRIVER, "handoverDir": str(handover)},
        "devices": {"cdiSpecDirs": [str(cdi_directory)]},
    }


def configuration(bed: KubeBed) -> dict[str, Any]:
    """`sections` for the bed; its directory is there afterwards."""
    handover = bed.directory / "claims"
    handover.mkdir(exist_ok=True)
    handover.chmod(0o777)  # an emptyDir
    return sections(handover, bed.node.containerd.cdi_directory)


def install_driver(client: Client) -> None:
    """The shipped objects for claims: rights, policies, and the DeviceClass."""
    install(client)
    for name in ("role.yaml", "policies.yaml", "deviceclass.yaml"):
        client.kubectl("apply", f"--filename={MANIFESTS / 'publish-dra' / name}")


def publisher_files(client: Client, control: ControlPlane, node: str) -> dict[str, bytes]:
    """What ``nri-numa publish`` of a `VirtualNode` finds in its directory there."""
    document = {
        "apiVersion": "nri-numa/v1",
        "kind": "AgentConfig",
        "log": {"format": "json", "level": "debug"},
        "nodeName": node,
        "http": {"socket": str(AGENT_SOCKET)},
        "publish": {"credentialsDir": str(PUBLISHER), "address": "off"},
        **sections(),
    }
    return {
        "agent.yaml": json.dumps(document).encode(),
        "token": token(client, node).encode(),
        "ca.crt": control.certificate.read_bytes(),
        "namespace": NAMESPACE.encode(),
    }


@contextlib.contextmanager
def driver(bed: KubeBed) -> Iterator[Publisher]:
    """The bed with a driver whose devices are published; afterwards it is as it was."""
    client, node = bed.client, bed.node
    install_driver(client)
    both = configuration(bed)
    try:
        with (
            node.configured(nodeName=node.name, **both),
            Publisher(
                bed,
                token(client, node.name),
                # Nothing is found out by looking: the kubelet's word must be enough.
                config={"address": "off", "resyncInterval": "1h"},
                more=both,
            ) as publisher,
        ):
            wait_slice(client, publisher)
            yield publisher
    finally:
        for one in slices(client):
            client.request("DELETE", f"{SLICES}/{one['metadata']['name']}")


def slices(client: Client) -> list[JsonObject]:
    items: list[JsonObject] = client.ask("GET", SLICES)["items"]
    return [one for one in items if one["spec"]["driver"] == DRIVER]


def counted(client: Client) -> dict[int, int]:
    """Exclusive CPUs that the slices offer, by NUMA node."""
    return {
        int(one["attributes"]["resource.kubernetes.io/numaNode"]["int"]): int(
            one["capacity"][f"{DRIVER}/cpu"]["value"]
        )
        for each in slices(client)
        for one in each["spec"].get("devices", [])
    }


def resource_slice(driver: str, node: str, devices: Sequence[JsonObject]) -> JsonObject:
    """All devices of a driver on a Node, whose pool has its name."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{node}-{driver}"},
        "spec": {
            "driver": driver,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": list(devices),
        },
    }


def numa_devices(roots: Mapping[int, Sequence[str]]) -> list[JsonObject]:
    """What the publisher offers of NUMA nodes with these PCIe roots, 8 CPUs and 64 GiB each."""
    view = FakeView()
    zones = view.scheduler_zones_document()
    (zone,) = zones.zones
    size = 64 << 30
    zones = replace(
        zones,
        zones=tuple(
            replace(zone, id=i, pcie_roots=tuple(each), memory_allocatable_bytes=size)
            for i, each in roots.items()
        ),
    )
    counts = tuple(NUMANodeExclusiveCPUSlots(id=i, allocated=0, free=8) for i in roots)
    slots = replace(view.slots_document(), numa_nodes=counts)
    return build_slice_devices(zones, slots, DRIVER, lists=True)


def wait_slice(client: Client, publisher: Publisher, *, other_than: str = "") -> JsonObject:
    """The slice, once it has devices; one with another UID than a given one."""

    def ask() -> JsonObject | None:
        for one in slices(client):
            if one["metadata"]["uid"] != other_than and one["spec"].get("devices"):
                return one
        return None

    return wait_for([publisher], ask, "a ResourceSlice")


def delete_claims(client: Client) -> None:
    """Remove every claim of the namespace and wait until all are gone."""
    client.kubectl("delete", "resourceclaims,resourceclaimtemplates", "--all", "--wait=false")
    poll(lambda: not client.ask("GET", CLAIMS)["items"], "end of all claims")


def template(
    name: str, cpus: int, *, parameters: Mapping[str, str] | None = None, cel: str = ""
) -> JsonObject:
    """A ResourceClaimTemplate for so many CPUs of one NUMA node."""
    exactly: JsonObject = {
        "deviceClassName": CLASS,
        "capacity": {"requests": {f"{DRIVER}/cpu": str(cpus), f"{DRIVER}/memory": "64Mi"}},
    }
    if cel:
        exactly["selectors"] = [{"cel": {"expression": cel}}]
    devices: JsonObject = {"requests": [{"name": "cpus", "exactly": exactly}]}
    if parameters is not None:
        opaque = {"driver": DRIVER, "parameters": dict(parameters)}
        devices["config"] = [{"requests": ["cpus"], "opaque": opaque}]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name},
        "spec": {"spec": {"devices": devices}},
    }


def claiming(name: str, claim_template: str, count: int, *, cpus: str = "") -> JsonObject:
    """A pod whose only container has a claim of its own, and requests as many CPUs."""
    main = container(cpus=cpus or str(count))
    main["resources"]["claims"] = [{"name": "numa"}]
    claims = [{"name": "numa", "resourceClaimTemplateName": claim_template}]
    return pod(name, main, resourceClaims=claims)
