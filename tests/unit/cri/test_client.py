"""The CRI client against a small runtime on a unix socket, and what CRI says in our types."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from nri_numa.cri.client import CRIClient, UpdateFailure, container_from, pod_from
from nri_numa.cri.pb import cri_pb2
from nri_numa.errors import RuntimeUnavailable
from nri_numa.model.workload import Container, ContainerUpdate, QoSClass
from nri_numa.runtime import RuntimeInfo
from proto.generate_cri import stale
from tests.beds.small_cri import SmallCRI


class Runtime(SmallCRI):
    """Keeps the last update."""

    updated: Any = None

    async def _UpdateContainerResources(self, request: Any, context: Any) -> Any:
        self.updated = request
        return await super()._UpdateContainerResources(request, context)


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[tuple[Runtime, CRIClient]]:
    """A runtime with two containers, and its client."""
    runtime = Runtime(directory / "cri.sock")
    runtime.pod("p1")
    runtime.create("b2", "p1", name="web", milli=2000)
    runtime.create("a1", "p1", name="init")
    runtime.run("b2")
    async with runtime, CRIClient(f"unix://{runtime.socket}", timeout_s=5) as client:
        yield runtime, client


async def test_what_a_runtime_has_is_listed_and_told(directory: Path) -> None:
    async with serving(directory) as (_, client):
        assert await client.query_version() == RuntimeInfo(name="small", version="1.0")
        assert [each.id for each in await client.list_all_containers()] == ["a1", "b2"]
        assert await client.pod_sandbox_ids() == ["p1"]
        status = await client.container_status("b2")
        assert await client.container_status("gone") is None
    assert status is not None
    container = container_from(status)
    assert (container.pid, container.resources.cpu_quota) == (4711, 200_000)


async def test_an_answer_without_meaning_is_an_unavailable_runtime(directory: Path) -> None:
    async with serving(directory) as (runtime, client):
        runtime.refuse_status.add("b2")
        with pytest.raises(RuntimeUnavailable, match="ContainerStatus: UNKNOWN: it is being made"):
            await client.container_status("b2")


async def test_an_update_sends_what_is_set_and_its_refusal_is_a_value(directory: Path) -> None:
    async with serving(directory) as (runtime, client):
        assert (
            await client.update_container(ContainerUpdate("b2", "2-3", "0", cpu_quota=-1)) is None
        )
        assert runtime.updated.linux == cri_pb2.LinuxContainerResources(
            cpuset_cpus="2-3", cpuset_mems="0", cpu_quota=-1, cpu_period=100_000
        )
        runtime.refuse_updates.add("b2")
        narrow = await client.update_container(ContainerUpdate("b2", cpus="9"))
        gone = await client.update_container(ContainerUpdate("gone", cpus="9"))
    assert narrow == UpdateFailure(container_id="b2", unknown=False, message="permission denied")
    assert gone == UpdateFailure(container_id="gone", unknown=True, message="no such container")


async def test_an_absent_socket_is_named(directory: Path) -> None:
    async with CRIClient(str(directory / "none.sock"), timeout_s=5) as client:
        with pytest.raises(RuntimeUnavailable, match=r"none\.sock"):
            await client.query_version()
        with pytest.raises(RuntimeUnavailable, match=r"none\.sock"):
            await client.update_container(ContainerUpdate("x", cpus="1"))


SPEC = {
    "annotations": {"a": "oci"},
    "process": {"env": ["PCIDEVICE_X=0000:3b:00.0"], "oomScoreAdj": -997},
    "linux": {
        "cgroupsPath": "/kubepods/pod1/c1",
        "devices": [{"path": "/dev/x", "type": "c", "major": 10, "minor": 3}],
        "resources": {
            "cpu": {"shares": 2048, "quota": 200_000, "period": 100_000, "cpus": "1", "mems": "0"},
            "memory": {"limit": 4096},
            "hugepageLimits": [{"pageSize": "2MB", "limit": 8192}],
            "devices": [{"allow": False, "access": "rwm"}, {"allow": True, "major": 10}],
        },
    },
}


def converted(
    spec: Any = None, resources: cri_pb2.LinuxContainerResources | None = None
) -> Container:
    status = cri_pb2.ContainerStatus(
        id="c1",
        metadata=cri_pb2.ContainerMetadata(name="main"),
        state=cri_pb2.CONTAINER_CREATED,
        annotations={"a": "cri", "b": "cri"},
    )
    if resources is not None:
        status.resources.linux.CopyFrom(resources)
    info = {"info": json.dumps({"pid": 12, "sandboxID": "p1", "runtimeSpec": spec})}
    return container_from(cri_pb2.ContainerStatusResponse(status=status, info=info))


def test_a_spec_has_everything_that_nri_reports() -> None:
    container = converted(SPEC)
    assert (container.id, container.pod_id, container.name) == ("c1", "p1", "main")
    assert container.annotations == {"a": "oci", "b": "cri"}
    assert (container.pid, container.starting) == (12, True)
    assert (container.cgroups_path, container.oom_score_adj) == ("/kubepods/pod1/c1", -997)
    resources = container.resources
    assert (resources.cpu_shares, resources.cpu_quota, resources.cpu_period) == (
        2048,
        200_000,
        100_000,
    )
    assert (resources.memory_limit, resources.hugepages) == (4096, {2 << 20: 8192})
    assert (resources.cpus, resources.mems) == ("1", "0")
    assert [(d.major, d.minor) for d in container.mentions.nodes] == [(10, 3)]
    assert container.mentions.variables == {"PCIDEVICE_X": "0000:3b:00.0"}


def test_a_privileged_container_has_no_devices_of_its_own() -> None:
    linux = {**SPEC["linux"], "resources": {"devices": [{"allow": True, "access": "rwm"}]}}
    assert converted({"linux": linux}).mentions.nodes == ()


def test_without_a_spec_the_resources_of_cri_must_do() -> None:
    container = converted(
        resources=cri_pb2.LinuxContainerResources(
            cpu_quota=100_000,
            memory_limit_in_bytes=5,
            oom_score_adj=2,
            cpuset_cpus="3",
            hugepage_limits=[cri_pb2.HugepageLimit(page_size="1GB", limit=1 << 30)],
        )
    )
    assert container.resources.cpu_quota == 100_000
    assert container.resources.hugepages == {1 << 30: 1 << 30}
    assert (container.resources.cpus, container.oom_score_adj) == ("3", 2)
    assert converted().resources.cpu_shares is None


@pytest.mark.parametrize(
    "spec",
    [
        {"linux": [], "process": "x", "annotations": 3},
        {"linux": {"resources": {"cpu": {"quota": 2**70}}}},
        {"linux": {"devices": "x", "resources": {"hugepageLimits": [{"pageSize": 1}, 5]}}},
        {"process": {"env": {}, "oomScoreAdj": True}},
        {"linux": {"resources": {"devices": [{"major": "x"}], "cpu": {"period": 5}}}},
    ],
)
def test_a_spec_of_another_form_counts_as_none(spec: Any) -> None:
    resources = converted(spec).resources
    assert (resources.cpu_shares, resources.cpu_quota, resources.cpus) == (None, None, "")
    assert resources.hugepages == {}


def test_info_that_is_no_json_is_no_reason_to_fail() -> None:
    answer = cri_pb2.ContainerStatusResponse(info={"info": "no json"})
    assert container_from(answer).pid == 0


def test_a_pod_has_its_size_its_class_and_its_network() -> None:
    status = cri_pb2.PodSandboxStatus(
        id="p1",
        metadata=cri_pb2.PodSandboxMetadata(name="db", namespace="shop", uid="u"),
        annotations={"k": "v"},
    )
    resources = {"cpu_shares": 512, "memory_limit_in_bytes": 7}
    network = {"type": "network", "path": "/run/netns/x"}
    info = {
        "config": {"linux": {"cgroup_parent": "/kubepods/burstable/podu", "resources": resources}},
        "runtimeSpec": {"linux": {"namespaces": [network]}},
    }
    pod = pod_from(cri_pb2.PodSandboxStatusResponse(status=status, info={"info": json.dumps(info)}))
    assert (pod.id, pod.uid, pod.full_name, pod.annotations) == ("p1", "u", "shop/db", {"k": "v"})
    assert (pod.qos, pod.resources.cpu_shares, pod.resources.memory_limit) == (
        QoSClass.BURSTABLE,
        512,
        7,
    )
    assert pod.network_namespace == "/run/netns/x"


def test_generated_code_is_what_the_sources_say() -> None:
    assert stale() == []
