"""``kubectl numa`` through the real API server and kubelet, into a pod of the image.

The bed's plugin is no pod. So a second agent runs beside it as one, in observe mode: it decides
about the same containers and changes nothing.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beds.cri import poll
from tests.beds.images import AGENT_IMAGE
from tests.beds.kube.bed import KubeBed, Numa
from tests.beds.kube.client import Client, JsonObject, is_ready
from tests.beds.kube.control_plane import ADDRESS
from tests.beds.kube.manifests import asks, container, pod
from tests.machines.cpus import LAST


def agent(bed: KubeBed) -> JsonObject:
    """The agent's pod, with what it needs of the DaemonSet's template."""
    paths = {
        "nri": bed.node.containerd.nri_socket.parent,
        "state": bed.directory / "observer",
        "cgroup": Path("/sys/fs/cgroup"),
    }
    mounts = {"nri": "/var/run/nri", "state": "/run/nri-numa", "cgroup": "/sys/fs/cgroup"}
    settings = {
        "NRI_NUMA_HTTP_ADDRESS": f"{ADDRESS}:9891",
        "NRI_NUMA_HTTP_ALLOW_ANONYMOUS": "true",
        "NRI_NUMA_OBSERVE": "true",
        "NRI_NUMA_RUNTIME_NRI_SOCKET": f"/var/run/nri/{bed.node.containerd.nri_socket.name}",
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "nri-numa-x2x1z",
            "namespace": "numa-system",
            "labels": {"app.kubernetes.io/name": "nri-numa"},
        },
        "spec": {
            "hostNetwork": True,
            "terminationGracePeriodSeconds": 5,
            "containers": [
                {
                    "name": "nri-numa",
                    "image": AGENT_IMAGE,
                    "imagePullPolicy": "Never",
                    "args": ["run", "--plugin-name", "observer", "--plugin-index", "05"],
                    "env": [{"name": key, "value": text} for key, text in settings.items()],
                    "readinessProbe": {
                        "httpGet": {"port": 9891, "path": "/readyz"},
                        "periodSeconds": 1,
                    },
                    "volumeMounts": [
                        {"name": name, "mountPath": path, "readOnly": name != "state"}
                        for name, path in mounts.items()
                    ],
                }
            ],
            "volumes": [
                {"name": name, "hostPath": {"path": str(path), "type": "DirectoryOrCreate"}}
                for name, path in paths.items()
            ],
        },
    }


@pytest.fixture
def observer(bed: KubeBed, client: Client, image: Path) -> Iterator[JsonObject]:
    document = agent(bed)
    name, space = document["metadata"]["name"], document["metadata"]["namespace"]
    client.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": space}})
    # Its service account is made a moment after the namespace.
    poll(lambda: client.get(f"/api/v1/namespaces/{space}/serviceaccounts/default"), "account")
    client.apply(document)

    def ready() -> JsonObject | None:
        found = client.pod(name, space)
        return found if found is not None and is_ready(found) else None

    try:
        try:
            running = poll(ready, "the agent's pod is Ready")
        except TimeoutError:
            print(client.kubectl("describe", "pod", name, f"--namespace={space}"))
            print(client.kubectl("logs", name, f"--namespace={space}"))
            raise
        yield running
    finally:
        client.kubectl("delete", "namespace", space)  # and its pods; the next test makes it anew


def test_explain_is_the_same_from_afar(client: Client, observer: JsonObject, numa: Numa) -> None:
    client.run(pod("listed", annotations=asks(numacpu=LAST, numamem="0")))
    done = numa("explain", "listed")
    assert done.returncode == 0, done.stderr
    assert f"It runs on CPU {LAST}" in done.stdout
    there = client.kubectl(
        *("exec", "--namespace=numa-system", observer["metadata"]["name"]),
        *("--", "nri-numa", "explain", "default/listed"),
    )
    assert done.stdout == there
    through_proxy = numa("explain", "listed", "--proxy")
    assert through_proxy.returncode == 0, through_proxy.stderr
    assert f"It runs on CPU {LAST}" in through_proxy.stdout

    document = json.loads(numa("status", "listed", "-o", "json").stdout)
    assert [c["pod"] for c in document["containers"]] == ["listed"]
    assert document["status"]["observe"] is True
    assert "default/listed" in numa("status", "--node", "bed", "-o", "name").stdout.split()
    assert "NUMA NODE" in numa("topology", "listed").stdout


def test_pods_without_a_node_or_rejected(client: Client, observer: JsonObject, numa: Numa) -> None:
    client.apply(pod("hungry", container(cpus="1000")))
    client.wait_pod("hungry", lambda it: bool(it["status"].get("conditions")), "judged")
    done = numa("explain", "hungry")
    assert done.returncode == 1
    assert "pod default/hungry has no node yet: 0/1 nodes are available" in done.stderr
    done = numa("status")
    assert (done.returncode, "nri-numa runs on bed" in done.stderr) == (2, True)
    client.apply(pod("refused", annotations=asks(numacpu="63")))
    client.wait_pod("refused", lambda it: "nodeName" in it["spec"], "bound")
    done = poll(
        lambda: told if "UnknownCPU" in (told := numa("explain", "refused")).stdout else None,
        "the refusal",
    )
    assert done.returncode == 1
    for name, words in (("refused", "UnknownCPU"), ("hungry", "Insufficient cpu")):
        done = poll(
            lambda name=name, words=words: (
                told if words in (told := numa("why", name)).stdout else None
            ),
            f"why {name}",
        )
        assert done.returncode == 1, done.stderr
