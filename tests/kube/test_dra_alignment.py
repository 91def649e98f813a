"""One claim over three drivers: CPUs, a GPU and a network card beside one another.

The scheduler alone decides, so that a Node is an object here. The control plane has the feature
gate of list attributes on, and its Node NUMA nodes with two PCIe roots each.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_numa import safe_yaml
from tests.beds.kube.bed import MANIFESTS
from tests.beds.kube.build import find_programs
from tests.beds.kube.client import Client, JsonObject, unscheduled
from tests.beds.kube.control_plane import ControlPlane, Namespaces
from tests.beds.kube.dra import (
    CLAIMS,
    DRIVER,
    SLICES,
    claiming,
    delete_claims,
    numa_devices,
    resource_slice,
)
from tests.beds.plugin_process import REPOSITORY
from tests.beds.testbed import TestbedUnavailable, require_root, skip_or_fail

NODE = "big"
EXAMPLE = REPOSITORY / "config/examples/claims/gpu-nic.yaml"
NUMA_NODE = "resource.kubernetes.io/numaNode"
PCIE_ROOT = "resource.kubernetes.io/pcieRoot"
ROOTS = {0: ("pci0000:00", "pci0000:40"), 1: ("pci0000:80", "pci0000:c0")}

# Names of drivers and classes as NVIDIA's and DRANET's have them. First fit would be apart.
GPUS = {"gpu-0": 0, "gpu-1": 1}
CARDS = {"nic-1": 1, "nic-0": 0}
FOREIGN = (("gpu.nvidia.com", "gpu.nvidia.com", GPUS), ("dra.net", "dranet", CARDS))


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    try:
        require_root("a Kubernetes")
        programs = find_programs(build=False)
        with (
            # Not pytest's own directory: socket paths must stay short.
            tempfile.TemporaryDirectory(prefix="nri-numa-kube-") as scratch,
            Namespaces(Path(scratch)) as namespaces,
            ControlPlane(programs, namespaces, gates=["DRAListTypeAttributes"]) as control,
        ):
            control.client.add_node(NODE, ready=True)
            publish(control.client)
            yield control.client
    except TestbedUnavailable as error:
        skip_or_fail(error, "KUBE")


def publish(client: Client) -> None:
    """Write what the three drivers write, and their DeviceClasses."""
    client.kubectl("apply", f"--filename={MANIFESTS / 'publish-dra' / 'deviceclass.yaml'}")
    kept = client.ask("POST", SLICES, resource_slice(DRIVER, NODE, numa_devices(ROOTS)))
    roots = [each["attributes"][PCIE_ROOT]["strings"] for each in kept["spec"]["devices"]]
    assert roots == [list(each) for each in ROOTS.values()]  # without the gate it is refused
    for driver, name, numa_nodes in FOREIGN:
        client.apply(device_class(name, driver))
        devices = [
            # The card is behind the second root of its NUMA node, the GPU behind the first.
            device(each, numa, ROOTS[numa][each.startswith("nic")])
            for each, numa in numa_nodes.items()
        ]
        client.ask("POST", SLICES, resource_slice(driver, NODE, devices))


def device_class(name: str, driver: str) -> JsonObject:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": name},
        "spec": {"selectors": [{"cel": {"expression": f"device.driver == '{driver}'"}}]},
    }


def device(name: str, numa_node: int, root: str) -> JsonObject:
    attributes = {NUMA_NODE: {"int": numa_node}, PCIE_ROOT: {"string": root}}
    return {"name": name, "attributes": attributes}


@pytest.fixture(autouse=True)
def no_claims(client: Client) -> Iterator[None]:
    """Each ends without pods and claims."""
    yield
    client.delete_pods()
    delete_claims(client)


def given(client: Client, name: str) -> list[str]:
    """Devices of a pod's only claim, sorted."""
    pod = client.wait_pod(name, lambda it: bool(it["spec"].get("nodeName")), "scheduled")
    (status,) = pod["status"]["resourceClaimStatuses"]
    claim = client.ask("GET", f"{CLAIMS}/{status['resourceClaimName']}")
    results = claim["status"]["allocation"]["devices"]["results"]
    return sorted(str(one["device"]) for one in results)


def example(constraint: str) -> JsonObject:
    """The template of the example under another name, with a constraint on another attribute."""
    template = safe_yaml.parse_yaml12(EXAMPLE.read_text().partition("\n---\n")[0])
    constraints = template["spec"]["spec"]["devices"]["constraints"]
    constraints[0]["matchAttribute"] = constraint
    if not constraint:
        constraints.clear()
    return {**template, "metadata": {"name": "other"}}


def test_the_example_has_its_devices_on_one_numa_node(client: Client) -> None:
    """Which of them is not said; a pod for which no NUMA node has all three waits."""
    client.kubectl("apply", f"--filename={EXAMPLE}")
    (first,) = {each[-1] for each in given(client, "inference")}
    client.apply(claiming("second", "gpu-nic-cpus", 8))
    (second,) = {each[-1] for each in given(client, "second")}
    assert {first, second} == {"0", "1"}
    client.apply(claiming("third", "gpu-nic-cpus", 8))
    client.wait_pod("third", lambda it: "cannot allocate all claims" in unscheduled(it), "waits")


def test_without_the_constraint_they_are_apart(client: Client) -> None:
    """So it is the constraint, and not the order of the slices."""
    client.apply(example(""), claiming("apart", "other", 8))
    assert given(client, "apart") == ["gpu-0", "nic-1", "numa0"]


def test_lists_of_pcie_roots_are_kept_and_match_nothing_in_1_36(client: Client) -> None:
    """Its scheduler has the gate for CEL only (kubernetes #139332, in 1.37): a pod waits for ever.

    With 1.37 this fails, and the pod is to have ``gpu-0`` and ``numa0``.
    """
    template = example(PCIE_ROOT)
    template["spec"]["spec"]["devices"]["constraints"][0]["requests"] = ["gpu", "cpus"]
    client.apply(template, claiming("root", "other", 8))
    client.wait_pod("root", lambda it: "cannot allocate all claims" in unscheduled(it), "waits")
