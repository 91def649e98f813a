"""Pods that something else makes, and what happens to them: each gets what its annotations say."""

import json
import re

from nri_numa.model.cpuset import CPUSet
from tests.beds.cri import Seen, poll
from tests.beds.images import FIRST_LINE_SCRIPT, IMAGE
from tests.beds.kube.client import Client, JsonObject, is_ready
from tests.beds.kube.manifests import (
    EXCLUSIVE,
    asks,
    container,
    definition,
    pod,
    template,
    workload,
)
from tests.beds.kube.node import KubeNode
from tests.beds.plugin_process import REPOSITORY
from tests.machines.cpus import FIRST, LAST, MACHINE, NO_CPU

# What the containers of all other tests do, without staying.
ONCE = ("/bin/sh", "-c", FIRST_LINE_SCRIPT.replace("exec sleep 1000000", "true"))


def test_cpus_and_mems_as_listed(client: Client, node: KubeNode) -> None:
    listed = client.run(pod("listed", annotations=asks(numacpu=LAST, numamem="0")))
    assert node.allowed(listed) == Seen(cpus=LAST, mems="0")
    # Another process of the container, started by the kubelet on request.
    status = client.kubectl("exec", "listed", "--", "cat", "/proc/self/status")
    assert re.search(rf"^Cpus_allowed_list:\s*{LAST}$", status, re.MULTILINE)
    assert re.search(r"^Mems_allowed_list:\s*0$", status, re.MULTILINE)
    # And the container's first instruction, by the kubelet's own log.
    assert client.said("listed").startswith(f"cpus={LAST} mems=0 numa_cpus={LAST} ")


def test_a_rejection_is_told_by_kubectl_describe(client: Client, node: KubeNode) -> None:
    client.apply(pod("refused", annotations=asks(numacpu=NO_CPU)))
    rejected = client.wait_rejected("refused")
    words = ("default/refused", "main", "numacpu", f"'{NO_CPU}'", "does not exist")
    described = client.kubectl("describe", "pod", "refused")
    waiting, _, events = described.partition("\nEvents:")
    assert "Reason:       CreateContainerError" in waiting
    assert all(word in rejected and word in events for word in words)


def test_deployment_and_its_rollout(client: Client, node: KubeNode) -> None:
    old = asks(numamem="0"), Seen(cpus=str(MACHINE), mems="0")
    for asked, has in (old, (asks(numacpu=LAST, numamem="0"), Seen(cpus=LAST, mems="0"))):
        client.apply(workload("Deployment", "web", template(annotations=asked), replicas=2))

        def ask(wanted: dict[str, str] = asked) -> list[JsonObject] | None:
            pods = client.pods("app=web")
            fit = [p for p in pods if wanted.items() <= p["metadata"]["annotations"].items()]
            return pods if len(fit) == len(pods) == sum(map(is_ready, pods)) == 2 else None

        for each in poll(ask, "two Ready pods with these annotations and no others"):
            assert node.allowed(each) == has


def test_job_of_owners_one_after_the_other(client: Client, node: KubeNode) -> None:
    """Each gives its CPU back by its exit, and the next one gets it."""
    owner = container(cpus="1", command=ONCE)
    pods = template(owner, annotations=EXCLUSIVE, restartPolicy="Never")
    client.apply(workload("Job", "batch", pods, completions=2))
    client.kubectl("wait", "job/batch", "--for=condition=complete", "--timeout=170s")
    names = [each["metadata"]["name"] for each in client.pods("app=batch")]
    assert len(names) == 2
    for name in names:
        line = client.said(name)
        assert len(CPUSet.parse(line.removeprefix("cpus=").split()[0])) == 1


def test_init_sidecar_and_main_each_by_its_own_key(client: Client, node: KubeNode) -> None:
    placed = client.run(
        pod(
            "three",
            container("web"),
            initContainers=[
                container("setup", command=ONCE),
                container("proxy", restartPolicy="Always"),
            ],
            annotations=asks(numacpu__setup=FIRST, numacpu__proxy=LAST),
        )
    )
    assert client.said("three", "--container=setup").startswith(f"cpus={FIRST} ")
    assert node.cpus(placed, "proxy") == CPUSet.parse(LAST)
    assert node.cpus(placed, "web") == MACHINE


def test_ephemeral_container_is_bound_like_its_pod(client: Client, node: KubeNode) -> None:
    client.run(pod("looked-at", annotations=asks(numacpu=LAST)))
    command = ("sh", "-c", FIRST_LINE_SCRIPT)
    client.kubectl(
        "debug",
        "looked-at",
        f"--image={IMAGE}",
        "--image-pull-policy=Never",
        "--container=look",
        "--profile=general",
        "--",
        *command,
    )
    running = client.wait_pod(
        "looked-at",
        lambda it: any(
            "running" in each["state"]
            for each in it["status"].get("ephemeralContainerStatuses", [])
        ),
        "with its ephemeral container",
    )
    assert node.cpus(running, "look") == CPUSet.parse(LAST)


def test_static_pod(client: Client, node: KubeNode) -> None:
    file = node.directory / "static" / "static.json"
    file.write_text(json.dumps(pod("static", annotations=asks(numacpu=LAST))), encoding="utf-8")
    try:
        assert node.allowed(client.wait_ready(f"static-{node.name}")).cpus == LAST
    finally:
        file.unlink()
    poll(lambda: client.pod(f"static-{node.name}") is None, "end of the static pod")


def resize(client: Client, name: str, cpu: str, of: str = "main") -> None:
    """Ask for another CPU request and limit of a pod's container, in place."""
    _resize(client, name, {"containers": [{"name": of, "resources": size(cpu=cpu)}]})


def _resize(client: Client, name: str, spec: JsonObject) -> None:
    patch = json.dumps({"spec": spec})
    client.kubectl("patch", "pod", name, "--subresource=resize", "--patch", patch)


def size(**amounts: str) -> JsonObject:
    """Resources with these amounts as requests and as limits."""
    return {"requests": amounts, "limits": amounts}


def quota(node: KubeNode, placed: JsonObject) -> int:
    """The CPU quota that a container's cgroup has now, in microseconds of each 0.1 s."""
    own = node.cgroup_file(placed, "cpu", "cpu.cfs_quota_us", "cpu.max")
    return int(own.split()[0])


def test_resize_in_place_leaves_a_list_as_it_is(client: Client, node: KubeNode) -> None:
    placed = client.run(pod("resized", annotations=asks(numacpu=LAST)))
    before = node.pid(placed)
    assert quota(node, placed) == 5_000
    resize(client, "resized", "100m")
    poll(lambda: quota(node, placed) == 10_000, "resized quota")
    assert node.pid(client.wait_ready("resized")) == before
    assert node.cpus(placed) == CPUSet.parse(LAST)


def test_rejected_resize_is_told_in_the_pods_conditions(client: Client, node: KubeNode) -> None:
    """All CPUs of the machine for one would leave the others none: it keeps what it has."""
    owner = client.run(pod("owner", container(cpus="1"), annotations=EXCLUSIVE))
    own = node.cpus(owner)
    resize(client, "owner", str(len(MACHINE)))

    wait_told(client, "owner", "default/owner")
    assert node.cpus(owner) == own


def wait_told(client: Client, name: str, words: str) -> None:
    """Wait until a pod's conditions have these words."""

    def told(placed: JsonObject) -> bool:
        return any(words in each.get("message", "") for each in placed["status"]["conditions"])

    client.wait_pod(name, told, f"with {words!r} in its conditions")


def run_pool(client: Client, *others: JsonObject) -> JsonObject:
    """A pod of one CPU, which is that of its container without resources."""
    return client.run(
        pod(
            "pool",
            container(cpus="", memory=""),
            *others,
            resources=size(cpu="1", memory="64Mi"),
            annotations=asks(policy="single-numa-node", scope="pod"),
        )
    )


def test_resize_of_spec_resources_leaves_pods_pool_cpus(client: Client, node: KubeNode) -> None:
    placed = run_pool(client)
    shared = client.run(pod("shared"))
    own, before = node.cpus(placed), node.pid(placed)
    assert len(own) == 1
    _resize(client, "pool", {"resources": size(cpu="1", memory="96Mi")})
    name = ("memory", "memory.limit_in_bytes", "memory.max")
    poll(lambda: node.cgroup_file(placed, *name) == str(96 << 20), "resized memory limit")
    assert node.pid(client.wait_ready("pool")) == before
    assert node.cpus(placed) == own
    assert node.cpus(shared) == MACHINE - own


def test_resize_beside_a_pods_pool_that_cannot_give_is_told(client: Client, node: KubeNode) -> None:
    """The pool's last CPU stays: what would get less than its size keeps what it has."""
    placed = run_pool(client, container("beside", cpus="500m"))
    own = node.cpus(placed, "main")
    assert len(own) == 1
    resize(client, "pool", "1", of="beside")
    wait_told(client, "pool", "1 CPU needed, 0 CPUs free in its pod")
    assert node.cpus(placed, "main") == own
    assert node.cpus(placed, "beside") == MACHINE - own


def test_kubelet_restart_moves_nobody(client: Client, node: KubeNode) -> None:
    """And the exclusive CPU is everybody's again when its pod is deleted."""
    shared = client.run(pod("shared"))
    assert node.cpus(shared) == MACHINE
    owner = client.run(pod("owner", container(cpus="1"), annotations=EXCLUSIVE))
    own, pids = node.cpus(owner), [node.pid(owner), node.pid(shared)]
    assert len(own) == 1
    node.restart_kubelet()
    late = client.run(pod("late"))
    assert [node.pid(client.wait_ready(name)) for name in ("owner", "shared")] == pids
    assert node.cpus(owner) == own
    assert node.cpus(shared) == node.cpus(late) == MACHINE - own
    client.kubectl("delete", "pod", "owner")
    poll(lambda: node.cpus(shared) == node.cpus(late) == MACHINE, "the CPU given back")


def test_resources_of_the_pod_pay_for_its_container(client: Client, node: KubeNode) -> None:
    """Pod-level resources, and a container that asks for nothing by itself."""
    room = {"cpu": "1", "memory": "64Mi"}
    alone = container(cpus="", memory="")
    resources = {"requests": room, "limits": room}
    owner = client.run(pod("owner", alone, resources=resources, annotations=EXCLUSIVE))
    shared = client.run(pod("shared"))
    assert len(node.cpus(owner)) == 1
    assert node.cpus(shared) == MACHINE - node.cpus(owner)


_KUBEVIRT = definition("VirtualMachine", "kubevirt.io", "v1", "Namespaced")


def test_the_api_server_takes_every_example(client: Client) -> None:
    """Validated and admitted by the server, unknown fields included; nothing is kept."""
    client.apply(_KUBEVIRT)
    crd = f"crd/{_KUBEVIRT['metadata']['name']}"
    try:
        client.kubectl("wait", "--for=condition=Established", crd)
        for folder in ("", "workloads", "claims"):
            client.kubectl(
                "apply",
                "--dry-run=server",
                "--validate=strict",
                f"--filename={REPOSITORY / 'config/examples' / folder}",
            )
    finally:
        client.kubectl("delete", crd)
