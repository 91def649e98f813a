"""The Helm chart on a real API server: every part of it accepted, and the walk of docs/extender.md.

Objects of the Prometheus operator are left out: their kinds are not there.
"""

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.beds.cri import poll
from tests.beds.install_manifests import helm
from tests.beds.kube.bed import MANIFESTS, OTHER_NODES, KubeBed
from tests.beds.kube.client import Client, JsonObject, KubeError, is_ready
from tests.beds.kube.events import wait_event
from tests.beds.kube.manifests import PREFIX, asks, container, pod
from tests.beds.kube.node import KubeNode
from tests.beds.kube.release import Release, ServiceAddress
from tests.beds.kube.topologies import NRT
from tests.beds.plugin_process import free_port
from tests.beds.processes import wait_for

DEFINITION = (
    "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/"
    "noderesourcetopologies.topology.node.k8s.io"
)
EVERYTHING: dict[str, Any] = {
    "publish": {"enabled": True},
    "controller": {"enabled": True, "secretName": "controller"},
    "scheduler": {"enabled": True},
    "admission": {"lists": True, "exclusive": True},
    "monitoring": {"dashboard": {"enabled": True}},
    "hostPaths": {"kubelet": "/var/lib/kubelet"},
    "networkPolicy": {"enabled": True},
    "nodeGroups": [{"name": "gpu", "label": "kind", "values": ["gpu"]}],
    "config": {
        "interruptsOffExclusiveCPUs": True,
        "publish": {"podAnnotation": True, "nodeResourceTopology": True, "numatopology": True},
        "dra": {"enabled": True},
        "controller": {
            "address": ":9893",
            "tokenFile": "/etc/nri-numa-secret/token",
            "tlsCert": "/etc/nri-numa-secret/tls.crt",
            "tlsKey": "/etc/nri-numa-secret/tls.key",
            "page": {"enabled": True, "allowAnonymous": True},
            "verdicts": {"enabled": True},
            "evictions": {
                key: {"evict": True} for key in ("drainedNUMANodes", "stuckPods", "cpuSteal")
            },
        },
    },
}
"""Values that switch everything on that goes together."""
SERVED: dict[str, Any] = {
    "scheduler": {
        "enabled": True, "kubeScheduler": {"enabled": False}, "secretName": "extender",
    },
    "networkPolicy": {
        "enabled": True,
        "scheduler": {"from": [{"ipBlock": {"cidr": "192.0.2.0/24"}}]},
    },
    "config": {
        "scheduler": {
            "address": ":9894",
            "leaseName": "nri-numa-scheduler",
            "tlsCert": "/etc/nri-numa-secret/tls.crt",
            "tlsKey": "/etc/nri-numa-secret/tls.key",
            "clientCA": "/etc/nri-numa-secret/ca.crt",
        },
    },
}  # fmt: skip
"""The extender for the default scheduler; publish.nodeCapacity instead of the device plugin."""


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(EVERYTHING, id="everything"),
        pytest.param(
            SERVED
            | {
                "publish": {"enabled": True},
                "config": {**SERVED["config"], "publish": {"nodeCapacity": True}},
            },
            id="served",
        ),
        pytest.param(
            {"releaseContainers": True, "devicePlugin": {"enabled": True}}, id="releasing"
        ),
    ],
)
def test_the_api_server_accepts_every_object(client: Client, values: dict[str, Any]) -> None:
    """Not one is refused, and none has a field that the API server does not know."""
    client.kubectl("apply", f"--filename={MANIFESTS / 'base/namespace.yaml'}")
    # A name of its own: other tests leave the accounts and policies of the manifests.
    made = helm(
        "--set=fullnameOverride=chart-dry",
        *(f"--set-json={k}={json.dumps(v)}" for k, v in values.items()),
    )
    assert made.returncode == 0, made.stderr
    documents = [d for d in yaml.safe_load_all(made.stdout) if d]
    said = client.kubectl(
        "apply", "--dry-run=server", "--validate=strict", "--filename=-", documents=documents
    )
    lines = said.splitlines()
    assert len(lines) == len(documents), said
    assert all("(server dry run)" in line for line in lines), said


# --- the walk of docs/extender.md ----------------------------------------------------------------

WALK = "numa-walk"


def walk_values(*, definition: bool) -> dict[str, Any]:
    """As in docs/extender.md; the name so that nobody else's scheduler takes the pod."""
    return {
        "publish": {"enabled": True, "topologyCRD": definition},
        "scheduler": {"enabled": True, "name": WALK},
        "config": {"publish": {"nodeResourceTopology": True}},
    }


# One of each binding; the API server takes them up one by one, after they are written.
RIGHTS = (
    ("scheduler", "list", "topology.node.k8s.io", "noderesourcetopologies"),
    ("scheduler", "list", "", "nodes"),
    ("scheduler", "list", "", "persistentvolumes"),
    ("scheduler", "create", "coordination.k8s.io", "leases"),
    ("publish", "patch", "", "nodes"),
    ("publish", "patch", "topology.node.k8s.io", "noderesourcetopologies"),
)


def wait_rights(client: Client) -> None:
    """Until the API server knows what the accounts may do."""
    for account, verb, group, resource in RIGHTS:
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": f"system:serviceaccount:{WALK}:{WALK}-nri-numa-{account}",
                "resourceAttributes": {
                    "namespace": WALK if resource == "leases" else "",
                    "verb": verb, "group": group, "resource": resource,
                },
            },
        }  # fmt: skip

        def allowed(review: JsonObject = review) -> bool | None:
            path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
            return client.ask("POST", path, review)["status"]["allowed"] or None

        what = f"{account} to be allowed to {verb} {resource}"
        poll(allowed, what)


def leave_the_node(client: Client, before: JsonObject) -> None:
    """Take what was written on the Node since then away again."""
    now = client.ask("GET", "/api/v1/nodes/bed")["metadata"]
    new = {
        part: {
            key: None
            for key in now.get(part) or {}
            if key.startswith(PREFIX) and key not in (before["metadata"].get(part) or {})
        }
        for part in ("annotations", "labels")
    }
    client.ask("PATCH", "/api/v1/nodes/bed", {"metadata": new})


def test_from_helm_install_to_a_pod_on_its_numa_node(bed: KubeBed, client: Client) -> None:
    """With the chart's rights, policies and configuration, and no others."""
    own = client.get(DEFINITION) is None
    with contextlib.ExitStack() as stack:
        if own:  # uninstalling leaves it
            stack.callback(
                client.kubectl, "delete", "--ignore-not-found", "crd", DEFINITION.rsplit("/", 1)[1]
            )
        else:
            stack.callback(client.request, "DELETE", f"{NRT}/bed")
        stack.callback(leave_the_node, client, client.ask("GET", "/api/v1/nodes/bed"))
        release = stack.enter_context(Release(bed, WALK, walk_values(definition=own)))
        assert f"schedulerName: {WALK}" in release.said
        wait_rights(client)
        publisher = stack.enter_context(
            release.service(
                "publish",
                release.token(f"{release.fullname}-publish", node="bed"),
                http={"socket": str(bed.node.api_socket)},
                publish={"resyncInterval": "2s"},
            )
        )
        extender = stack.enter_context(
            release.service("scheduler", release.token(f"{release.fullname}-scheduler"))
        )
        scheduler = release.scheduler(port=10271)
        stack.callback(scheduler.end)
        scheduler.start()

        three = [publisher, extender, scheduler]
        document = pod(
            "chart-walk", container(cpus="1"), schedulerName=WALK,
            annotations=asks(policy="single-numa-node", cpus="exclusive"),
        )  # fmt: skip
        client.apply(document)

        def started() -> JsonObject | None:
            found = client.pod("chart-walk")
            return found if found is not None and is_ready(found) else None

        found = wait_for(three, started, "the pod to be Ready")
        assert json.loads(found["metadata"]["annotations"][f"{PREFIX}/scheduled-numa-nodes"]) == {
            "main": "0"
        }
        assert len(bed.node.cpus(found)) == 1
        # Rights that are missing are complained of, and nothing else of them shows.
        for one in three:
            assert "forbidden" not in one.log().lower(), one.log()[-3000:]


# --- the life of a release ------------------------------------------------------------------------

SLOTS = "numa.example.com/exclusive-cpu"
IDS = f"{PREFIX}/numa-ids"


def wait_rollouts(client: Client, said: str) -> None:
    """By the commands that the chart prints."""
    commands = re.findall(r"^ *kubectl (rollout status .*)$", said, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        client.kubectl(*command.split(), "--timeout=300s")


@pytest.mark.parametrize(
    "name",
    [
        "numa",
        pytest.param(
            "nri-numa",
            marks=pytest.mark.skipif(
                os.environ.get("NRI_NUMA_SERIES") != "all", reason="two minutes: make test-all"
            ),
        ),
    ],
)
def test_a_release_is_installed_upgraded_rolled_back_and_uninstalled(
    bed: KubeBed, client: Client, image: Path, name: str
) -> None:
    """On three nodes, one in a group; what stays on the Nodes goes, and the right to take it."""
    paths = {"nri": "/var/lib/nri", "state": f"/var/lib/{name}"}
    values = {
        "image": {"pullPolicy": "Never"},
        "hostPaths": paths,
        "publish": {"enabled": True},
        "config": {"http": {"address": f"127.0.0.1:{free_port()}"}},
        "nodeGroups": [
            {
                "name": "one",
                "label": "kind",
                "values": ["one"],
                "config": {"preferClosestNUMANodes": False},
            }
        ],
    }

    def has_key(node: KubeNode, key: str) -> bool:
        found = client.ask("GET", f"/api/v1/nodes/{node.name}")
        return key in (
            found["status"]["capacity"] if key == SLOTS else found["metadata"]["annotations"]
        )

    def is_written(*, wanted: bool) -> bool:
        return all(has_key(node, key) is wanted for node in nodes for key in (SLOTS, IDS))

    def withdraws() -> list[str]:
        roles = client.ask("GET", "/apis/rbac.authorization.k8s.io/v1/clusterroles")["items"]
        return [r["metadata"]["name"] for r in roles if "withdraw" in r["metadata"]["name"]]

    with contextlib.ExitStack() as stack:
        nodes = [bed.node, *(stack.enter_context(bed.other_node(other)) for other in OTHER_NODES)]
        for node in nodes[1:]:
            node.containerd.import_image(image)
        stack.callback(bed.node.plugin.start)
        for node in nodes:
            node.plugin.terminate()
        stack.callback(leave_the_node, client, client.ask("GET", "/api/v1/nodes/bed"))
        client.kubectl("label", "node", "bed", "kind=one")
        stack.callback(client.kubectl, "label", "node", "bed", "kind-")
        stack.enter_context(ServiceAddress(bed))
        release = stack.enter_context(Release(bed, name, values, pods=20))
        wait_rollouts(client, release.said)
        daemonsets = f"/apis/apps/v1/namespaces/{name}/daemonsets/{release.fullname}"
        desired = [client.ask("GET", f"{daemonsets}{group}")["status"] for group in ("", "-one")]
        assert [one["desiredNumberScheduled"] for one in desired] == [2, 1]
        agent = client.kubectl("logs", f"--namespace={name}", f"daemonset/{release.fullname}-one")
        assert '"one"' in agent or "node_group=one" in agent
        for node in nodes:
            pinned = pod(
                f"life-{node.name}",
                container(cpus="1"),
                annotations=asks(policy="single-numa-node"),
                nodeName=node.name,
            )
            assert len(node.cpus(client.run(pinned))) == 1
        second = Release(bed, f"{name}-again", values)
        stack.callback(second.close)
        with pytest.raises(KubeError, match="state directory of another installation"):
            second.start()

        token = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "controller"}}
        client.kubectl(
            "apply", f"--namespace={name}", "--filename=-",
            documents=[token | {"stringData": {"token": "0123456789abcdef"}}],
        )  # fmt: skip
        listens = {
            "address": ":9893",
            "tokenFile": "/etc/nri-numa-secret/token",
            "allowPlaintextToken": True,
        }
        more = {**values["config"], "publish": {"nodeCapacity": True}, "controller": listens}
        off = {"config": values["config"], "controller": {"enabled": False}}
        on = {"config": more, "controller": {"enabled": True, "secretName": "controller"}}
        release.upgrade(**on)
        controller = f"deployment/{release.fullname}-controller"
        client.kubectl("rollout", "status", f"--namespace={name}", controller, "--timeout=300s")
        wait_rollouts(client, release.said)
        poll(lambda: is_written(wanted=True), "capacity and ids on the Node")

        release.helm("rollback", name, "1")
        wait_rollouts(client, release.said)
        assert is_written(wanted=False)
        release.upgrade(**on)
        poll(lambda: is_written(wanted=True), "capacity and ids on the Node again")
        release.upgrade(**off)
        assert is_written(wanted=False)
        release.upgrade(**on)
        poll(lambda: is_written(wanted=True), "capacity and ids on the Node once more")
        assert withdraws() == []

        release.upgrade(releaseContainers=True)
        wait_rollouts(client, release.said)
        agents = "--selector=app.kubernetes.io/component=agent"
        said = client.kubectl("logs", f"--namespace={name}", agents, "--container=release")
        assert len(re.findall(r"^[1-9]\d* released; ", said, re.MULTILINE)) == len(nodes), said
        release.helm("uninstall", name, "--wait")
        assert is_written(wanted=False)
        assert withdraws() == []


# --- what goes wrong silently -------------------------------------------------------------------


def test_of_two_installations_on_a_node_one_acts(bed: KubeBed, client: Client, image: Path) -> None:
    """The second DaemonSet is not ready and says why; containers start and are pinned."""
    node = bed.node

    def release(name: str) -> Release:
        (bed.directory / name).mkdir()
        paths = {"nri": str(node.containerd.nri_socket.parent), "state": str(bed.directory / name)}
        config = {"http": {"address": f"127.0.0.1:{free_port()}"}}
        image = {"pullPolicy": "Never"}
        return Release(bed, name, {"image": image, "hostPaths": paths, "config": config}, pods=1)

    def ready(name: str) -> bool:
        return [is_ready(one) for one in client.pods(namespace=name)] == [True]

    def complains() -> str | None:
        with contextlib.suppress(KubeError):
            said = client.kubectl("logs", "--namespace=numa-b", "daemonset/numa-b-nri-numa")
            return said if "runtime locked by another agent" in said else None
        return None

    with contextlib.ExitStack() as stack:
        stack.callback(node.plugin.start)
        node.plugin.terminate()
        first = stack.enter_context(release("numa-a"))
        poll(lambda: ready("numa-a"), "the first agent")
        stack.enter_context(release("numa-b"))
        assert "state=active" not in poll(complains, "the second agent's complaint")
        client.run(pod("twice-plain"))
        pinned = pod("twice", container(cpus="1"), annotations=asks(policy="single-numa-node"))
        assert len(node.cpus(client.run(pinned))) == 1
        assert ready("numa-a")
        assert not ready("numa-b")
        first.close()
        poll(lambda: ready("numa-b"), "the second agent alone")


def test_a_pod_started_without_nri_is_told_and_pinned_later(bed: KubeBed, client: Client) -> None:
    node = bed.node
    with Release(bed, "numa-off", {"publish": {"enabled": True}}) as release:
        token = release.token("numa-off-nri-numa-publish", node="bed")
        publisher = release.service("publish", token, http={"socket": str(node.api_socket)})
        node.containerd.nri = False
        try:
            node.containerd.restart()
            node.plugin.wait_ready(ready=False)
            document = pod(
                "nri-off", container(cpus="1"), annotations=asks(policy="single-numa-node")
            )
            found = client.run(document)
            everything = node.cpus(found)
            assert len(everything) > 1
            status, text = node.plugin.get("/v1/explain/default/nri-off")
            assert status == 404
            assert re.search("no link to the runtime since 20.* are pinned when", text)
        finally:
            node.containerd.nri = True
            node.containerd.restart()
            node.plugin.wait_ready()
        with publisher:
            event = wait_event(client, publisher, "nri-off", "PlacedAfterStart")
        assert "started while the agent could not place it" in event["note"]
        assert len(node.cpus(found)) == 1
        assert "nri-off" in node.plugin.get("/v1/assignments")[1]
