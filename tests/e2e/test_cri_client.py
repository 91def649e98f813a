"""The product's own CRI client against a real containerd."""

from __future__ import annotations

import asyncio

import pytest

from nri_numa.cri.client import CRIClient, CRIContainerState, CRIResources
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
            (listed_pod,) = await client.list_pod_sandboxes()
            assert (listed_pod.id, listed_pod.namespace) == (pod.id, "tests")
            assert listed_pod.annotations["a"] == "b"
            (listed,) = await client.list_containers()
            assert (listed.id, listed.name) == (container.id, "main")
            assert listed.state is CRIContainerState.RUNNING
            status = await client.container_status(container.id)
            assert status is not None
            assert status.pid == cri.pid(container)
            update = CRIResources(cpus=LAST, mems="0")
            assert await client.update_resources(container.id, update) is None
            status = await client.container_status(container.id)
            assert status is not None
            assert status.resources is not None
            assert (status.resources.cpus, status.resources.mems) == (LAST, "0")
            failed = await client.update_resources(container.id, CRIResources(cpus="4000"))
            assert failed is not None
            assert not failed.gone
            absent = "f" * 64
            failed = await client.update_resources(absent, CRIResources(cpus="1"))
            assert failed is not None
            assert failed.gone
            assert await client.container_status(absent) is None

    asyncio.run(use())
    assert cri.allowed(container) == Seen(cpus=LAST, mems="0")
