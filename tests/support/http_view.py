"""An agent's view with made-up contents, and a tiny client for servers under test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from nri_numa.http.documents import (
    Assignment,
    Checkpoint,
    Explanation,
    HugePages,
    Link,
    NodeUse,
    NUMAInfo,
    NUMAInfoData,
    NUMANodeUse,
    Readiness,
    Refusal,
    Status,
)
from nri_numa.http.view import Listing

HOSTILE = "<script>alert(1)</script>\x1b[31m\n‮"


def assignment(n: int, name: str = "server") -> Assignment:
    """The n-th container."""
    return Assignment(
        id=f"{n:064x}",
        pod_uid=f"uid-{n}",
        namespace="shop" if n % 2 else "infra",
        pod=f"pod-{n}",
        container=name,
        kind="shared",
        policy="best-effort",
        qos="Burstable",
        smt="any",
        cpus="0-3",
        mems="0",
        numa_nodes="0",
        idle="",
        preferred=True,
        reason="emptiest NUMA node",
        cpu_milli=500,
        memory_bytes=1 << 28,
        since=1_700_000_000.0,
    )


@dataclass
class FakeView:
    """Answers with ``containers``; ``changed()`` tells subscribers."""

    containers: list[Assignment] = field(default_factory=lambda: [assignment(1), assignment(2)])
    ready: bool = True
    serial: int = 7
    broken: bool = False
    listeners: list[Callable[[], None]] = field(default_factory=list)

    def status(self) -> Status:
        return Status(
            version="0.1.0",
            started_at=1_700_000_000.0,
            observe=False,
            ready=self.ready,
            serial=self.serial,
            containers={"shared": len(self.containers)},
            link=Link(state="active", detail="", runtime="containerd", runtime_version="v2.1.9"),
            checkpoint=Checkpoint(written_at=None, problem=""),
        )

    def readiness(self) -> Readiness:
        return Readiness(ready=self.ready, reason="" if self.ready else "not synchronized")

    def topology(self) -> dict[str, Any]:
        return {
            "id": "x",
            "cpus": {"online": "0-3"},
            "counts": {"cpus": 4},
            "sockets": [],
            "numaNodes": [],
            "l3Groups": [],
            "cores": [],
            "warnings": [],
        }

    def topology_key(self) -> object:
        return "x"

    def numa_info(self) -> NUMAInfo:
        if self.broken:
            raise RuntimeError("a bug")
        return NUMAInfo(
            code=200,
            message="OK",
            data=NUMAInfoData(
                nodenums=2,
                cpulist=("0,2,4", "1,3,5"),
                memsize=("67257405440", "67614638080"),
            ),
        )

    def listing(self) -> Listing:
        node = NUMANodeUse(
            id=0,
            cpus="0-3",
            exclusive="",
            idle="",
            shared="0-3",
            reserved="0",
            cpu_capacity_milli=4000,
            cpu_allocated_milli=1000,
            cpu_available_milli=3000,
            memory_bytes=1 << 34,
            memory_allocated_bytes=1 << 29,
            memory_available_bytes=1 << 33,
            huge_pages=(HugePages(size_bytes=2 << 20, total_bytes=4 << 20, allocated_bytes=0),),
        )
        return Listing(
            head=NodeUse(serial=self.serial, shared_pool="0-3", numa_nodes=(node,)),
            containers=iter(self.containers),
        )

    def explain(self, namespace: str, pod: str, container: str | None) -> list[Explanation]:
        return [
            Explanation(
                namespace=one.namespace,
                pod=one.pod,
                container=one.container,
                outcome="admitted",
                summary=one.reason,
                steps=("looked", "found"),
                assignment=one,
            )
            for one in self.containers
            if one.namespace == namespace and one.pod == pod and container in (None, one.container)
        ]

    def refusals(self) -> list[Refusal]:
        return [
            Refusal(
                namespace="shop",
                pod="greedy",
                container=HOSTILE,
                reason="NotEnoughCPUs",
                message=f"needs 9 CPUs, {HOSTILE}",
                at=1_700_000_000.0,
            )
        ]

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    def changed(self) -> None:
        self.serial += 1
        for listener in self.listeners:
            listener()


@dataclass(frozen=True)
class Reply:
    """What a server answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def read_reply(reader: asyncio.StreamReader, *, head: bool = False) -> Reply:
    """One whole answer, with a length or chunked."""
    raw = await reader.readuntil(b"\r\n\r\n")
    first, *lines = raw.decode("latin-1").strip().split("\r\n")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    body = b""
    if not head:
        if headers.get("transfer-encoding") == "chunked":
            while size := int((await reader.readline()).strip(), 16):
                body += await reader.readexactly(size)
                await reader.readexactly(2)
            await reader.readline()
        else:
            body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Reply(int(first.split()[1]), headers, body)


@asynccontextmanager
async def connected(
    address: tuple[str, int],
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that is gone afterwards."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def exchange(address: tuple[str, int], raw: bytes, *, head: bool = False) -> Reply:
    """Send bytes, read one answer, leave."""
    async with connected(address) as (reader, writer):
        writer.write(raw)
        return await read_reply(reader, head=head)


async def get(address: tuple[str, int], target: str, **headers: str) -> Reply:
    """GET ``target``; header names are given with ``_`` for ``-``."""
    given = {"Host": f"{address[0]}:{address[1]}"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return await exchange(address, f"GET {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1"))
