"""The product's own CRI client against a real containerd."""

from __future__ import annotations

import asyncio

import pytest

from nri_numa.cri.client import CRIClient, container_from
from nri_numa.cri.pb import cri_pb2
from nri_numa.model.workload import ContainerUpdate
from tests.beds.containerd import Containerd
from tests.beds.cri import CRI, Seen
from tests.machines.cpus import LAST

pytestmark = pytest.mark.e2e


def test_reads_and_moves_a_container(containerd: Containerd, cri: CRI) -> None:
    pod = cri.run_pod("client", namespace="tests", annotations={"a": "b"})
    container = cri.run(pod)

    async def use() -> None:
        async with CRIClient(str(containerd.socket)) as client:
            version = await client.version()
            assert version.name == "containerd"
            assert version.version.startswith(containerd.binaries.version)
            assert await client.pod_sandbox_ids() == [pod.id]
            sandbox = await client.pod_sandbox(pod.id)
            assert sandbox is not None
            assert (sandbox.id, sandbox.namespace) == (pod.id, "tests")
            assert sandbox.annotations["a"] == "b"
            (listed,) = await client.list_containers()
            assert (listed.id, listed.state) == (container.id, cri_pb2.CONTAINER_RUNNING)
            status = await client.container_status(container.id)
            assert status is not None
            read = container_from(status)
            assert (read.name, read.pid) == ("main", cri.pid(container))
            assert await client.update(ContainerUpdate(container.id, LAST, "0")) is None
            status = await client.container_status(container.id)
            assert status is not None
            resources = container_from(status).resources
            assert (resources.cpus, resources.mems) == (LAST, "0")
            failed = await client.update(ContainerUpdate(container.id, "4000"))
            assert failed is not None
            assert not failed.unknown
            absent = "f" * 64
            failed = await client.update(ContainerUpdate(absent, "1"))
            assert failed is not None
            assert failed.unknown
            assert await client.container_status(absent) is None

    asyncio.run(use())
    assert cri.allowed(container) == Seen(cpus=LAST, mems="0")
