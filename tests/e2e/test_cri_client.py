"""The product's own CRI client against a real containerd."""

from __future__ import annotations

import asyncio

import pytest

from nri_numa.cri.client import CRIClient
from nri_numa.model.workload import ContainerUpdate
from tests.beds.containerd import Containerd
from tests.beds.cri import CRI

pytestmark = pytest.mark.e2e


def test_what_containerd_says_of_what_it_cannot_do(containerd: Containerd, cri: CRI) -> None:
    """The rest of the client is what `tests.e2e.test_cri_mode` works with."""
    container = cri.pod("client")

    async def use() -> None:
        async with CRIClient(str(containerd.socket)) as client:
            failed = await client.update(ContainerUpdate(container.id, "4000"))
            assert failed is not None
            assert not failed.unknown
            absent = "f" * 64
            failed = await client.update(ContainerUpdate(absent, "1"))
            assert failed is not None
            assert failed.unknown
            assert await client.container_status(absent) is None

    asyncio.run(use())
