"""An agent's view with made-up contents, and a tiny client for servers under test."""

import asyncio
import functools
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from msgspec.structs import replace

from nri_numa.agent.http_api import AgentServer
from nri_numa.config import HTTP
from nri_numa.observe.metrics import Metrics
from nri_numa.observe.notices import Notice
from nri_numa.web import responses as shown
from tests.beds.loop_thread import LoopThread

Test = TypeVar("Test", bound=Callable[..., Coroutine[Any, Any, None]])


def in_loop(test: Test) -> Callable[..., None]:
    """A test that runs in a loop of its own, for three minutes at most."""

    @functools.wraps(test)
    def run(*given: object, **named: object) -> None:
        asyncio.run(asyncio.wait_for(test(*given, **named), 180))

    return run


HOSTILE = "<script>alert(1)</script>\x1b[31m\n‮"


def assignment(n: int, name: str = "server") -> shown.Assignment:
    return shown.Assignment(
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
        idle_siblings="",
        aligned=True,
        reason="emptiest NUMA node",
        cpu_milli=500,
        memory_bytes=1 << 28,
        assigned_at=1_700_000_000.0,
    )


def intruder(n: int) -> shown.Assignment:
    """The n-th container, on CPUs that another one owns."""
    return replace(
        assignment(n),
        actual=shown.ActualCpuset(
            cpus="0-7",
            mems="0",
            desired_cpus="0-3",
            desired_mems="",
            observed_at=time.time() - 12,
            text="desired 0-3, actual 0-7",
            finding="cpuset.cpus is 0-7, desired 0-3",
            on_exclusive_cpus=True,
            holders=("shop/db/server", f"shop/{HOSTILE}/server"),
            repairs_abandoned=True,
        ),
    )


@dataclass
class FakeView:
    """Answers with ``containers``; ``changed()`` tells subscribers."""

    containers: list[shown.Assignment] = field(
        default_factory=lambda: [assignment(1), assignment(2)]
    )
    ready: bool = True
    serial: int = 7
    free_cpus: int = 3
    zone_id: int = 0
    broken: bool = False
    pending_registration: str = ""
    noted: list[Notice] = field(default_factory=list)
    instance: str = "0a0b0c0d"
    listeners: list[Callable[[], None]] = field(default_factory=list)

    def status_document(self) -> shown.Status:
        return shown.Status(
            version="0.1.0",
            started_at=1_700_000_000.0,
            observe=False,
            ready=self.ready,
            serial=self.serial,
            containers={"shared": len(self.containers)},
            drifted=sum(one.actual is not None for one in self.containers),
            on_exclusive_cpus=sum(one.actual is not None for one in self.containers),
            link=shown.RuntimeLinkStatus(
                state="active",
                detail="",
                runtime="containerd",
                runtime_version="v2.1.9",
                pending_registration=self.pending_registration,
            ),
            checkpoint=shown.Checkpoint(written_at=None, problem=""),
        )

    def readiness(self) -> shown.Readiness:
        return shown.Readiness(ready=self.ready, reason="" if self.ready else "not synchronized")

    def machine_topology_document(self) -> dict[str, Any]:
        return {
            "id": "x",
            "cpus": {"online": "0-3"},
            "counts": {
                "sockets": 1,
                "numaNodes": 2,
                "l3Groups": 1,
                "cores": 2,
                "cpus": 4,
                "threadsPerCore": 2,
            },
            "sockets": [],
            "numaNodes": [{"id": 0, "cpus": "0-3"}, {"id": 1, "cpus": ""}],
            "l3Groups": [],
            "cores": [],
            "partitions": [],
            "warnings": [],
        }

    def numa_info(self) -> shown.MachineNUMAInfo:
        if self.broken:
            raise RuntimeError("a bug")
        return shown.MachineNUMAInfo(
            code=200,
            message="OK",
            data=shown.NUMAInfoData(
                nodenums=2, cpulist=("0,2,4", "1,3,5"), memsize=("67257405440", "67614638080")
            ),
        )

    def list_assignments(self) -> tuple[shown.WholeNodeAllocation, Iterator[shown.Assignment]]:
        node = shown.NUMANodeAllocation(
            id=0,
            cpus="0-3",
            exclusive="",
            idle_siblings="",
            shared="0-3",
            reserved="0",
            cpu_capacity_milli=4000,
            cpu_allocated_milli=1000,
            cpu_free_milli=3000,
            memory_bytes=1 << 34,
            memory_allocated_bytes=1 << 29,
            memory_free_bytes=1 << 33,
            huge_pages=(
                shown.HugePages(size_bytes=2 << 20, total_bytes=4 << 20, allocated_bytes=0),
            ),
        )
        head = shown.WholeNodeAllocation(serial=self.serial, shared_pool="0-3", numa_nodes=(node,))
        return head, iter(self.containers)

    def explain_pod(
        self, namespace: str, pod: str, container: str | None
    ) -> list[shown.Explanation]:
        return [
            shown.Explanation(
                namespace=one.namespace,
                pod=one.pod,
                container=one.container,
                outcome="admitted",
                summary=one.reason,
                decision_steps=("looked", "found"),
                assignment=one,
                details={
                    "namespace": one.namespace,
                    "pod": one.pod,
                    "container": one.container,
                    "outcome": "placed",
                    "summary": one.reason,
                    "result": {
                        "kind": "listed",
                        "cpus": one.cpus,
                        "mems": one.mems,
                        "idleSiblings": "",
                    },
                    "traced": False,
                    "later": ["looked", "found"],
                },
            )
            for one in self.containers
            if one.namespace == namespace and one.pod == pod and container in (None, one.container)
        ]

    def kubelet_status_document(self) -> shown.KubeletDocument:
        grant = shown.KubeletGrant(
            pod_uid="uid-g", container=HOSTILE, namespace="shop", pod="g", cpus="2-3", mems="",
            overridden=False,
        )  # fmt: skip
        contest = shown.KubeletConflict(
            container_id="c", namespace="shop", pod="g", pod_uid="uid-g", container=HOSTILE,
            requested_cpus="2-3", actual_cpus="1", yields_to="nri-numa",
            detected_in="UpdateContainer",
            first_time=1_700_000_000.0, count=2,
        )  # fmt: skip
        return shown.KubeletDocument(
            cpu_policy="static", granted_cpus="2-3", grants=(grant,), conflicts=(contest,)
        )

    def list_rejections(self) -> list[shown.RejectionRecord]:
        return [
            shown.RejectionRecord(
                namespace="shop",
                pod="greedy",
                container=HOSTILE,
                reason="NotEnoughCPUs",
                message=f"needs 9 CPUs, {HOSTILE}",
                last_time=1_700_000_000.0,
                count=202,
            )
        ]

    def slots_document(self) -> shown.ExclusiveCPUSlotsDocument:
        return shown.ExclusiveCPUSlotsDocument(
            serial=self.serial,
            ready=self.ready,
            reason="" if self.ready else "not synchronized",
            annotation="numa.kubernetes.io/slots",
            total=3,
            exclusive=1,
            numa_nodes=(shown.NUMANodeExclusiveCPUSlots(id=0, allocated=1, free=2),),
            ids=("slot-0",),
        )

    def scheduler_zones_document(self) -> shown.Zones:
        free = self.free_cpus
        zone = shown.Zone(
            id=self.zone_id, socket=0, distances=(shown.Distance(id=0, value=10),), cpus=4,
            cpu_allocatable_milli=4000, cpu_available_milli=1000 * free, exclusive_cpus=3,
            free_exclusive_cpus=free, shared_cpus=free, memory_bytes=1 << 34,
            memory_allocatable_bytes=1 << 34, memory_available_bytes=1 << 33,
            huge_pages=(
                shown.ZoneHugePages(size_bytes=2 << 20, capacity_bytes=4 << 20,
                              allocatable_bytes=4 << 20, available_bytes=2 << 20),
            ),
            capacity_factor=1.0,
        )  # fmt: skip
        return shown.Zones(
            serial=self.serial, ready=self.ready, reason="" if self.ready else "not synchronized",
            policy="single-numa-node", scope="pod", defaults_to_shared=False, threads_per_core=2,
            zones=(zone,),
            pods=tuple(shown.NodePod(namespace=one.namespace, name=one.pod, qos=one.qos)
                       for one in self.containers),
        )  # fmt: skip

    def notices_document(self, after: int) -> shown.Notices:
        found = tuple(one for one in self.noted if one.number > after)
        return shown.Notices(
            instance=self.instance, number=self.notice_number(), evicted=0, notices=found
        )

    def decided_requests_document(self, after: int) -> shown.DecidedRequests:
        return shown.DecidedRequests(instance="1", number=after, requests=())

    def notice_number(self) -> int:
        return max((one.number for one in self.noted), default=0)

    def node_usage(self) -> shown.NodeUsage:
        return shown.NodeUsage(
            sampled_at=None, interval=0.0, problem="not read yet", cpus={"0": 7}, numa_nodes=()
        )

    async def container_use(
        self, namespace: str, pod: str, container: str
    ) -> list[shown.MeasuredContainer]:
        return [
            shown.MeasuredContainer(
                namespace=namespace,
                pod=pod,
                container=container,
                cpu_milli=1500,
                cpu_set_milli=4000,
                memory_by_numa_node={"0": 3 << 20, "1": 1 << 20},
                local_percent=75.0,
                problem="",
            )
            for one in self.containers
            if (one.namespace, one.pod, one.container) == (namespace, pod, container)
        ]

    def subscribe_to_changes(self, listener: Callable[[], None]) -> Callable[[], None]:
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    def changed(self) -> None:
        self.serial += 1
        for listener in self.listeners:
            listener()


@asynccontextmanager
async def serving(
    view: FakeView | None = None, *, more: Any = (), **section: Any
) -> AsyncIterator[tuple[AgentServer, tuple[str, int]]]:
    """The agent's server at its address; ``more`` are other arguments of it."""
    config = HTTP(**{"address": "127.0.0.1:0", **section})
    parts = config, view or FakeView(), Metrics("0.1.0")
    server = AgentServer(*parts, **dict(more))  # type: ignore[arg-type]
    await server.start()
    try:
        yield server, server.address or ("", 0)
    finally:
        await server.stop()


@contextmanager
def served(view: FakeView | None = None, **section: Any) -> Iterator[tuple[str, int]]:
    """`serving` in a thread of its own; its address."""
    thread, server = LoopThread(), serving(view, **section)
    try:
        yield thread.call(server.__aenter__())[1]
        thread.call(server.__aexit__(None, None, None))
    finally:
        thread.end()


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


async def exchange(address: tuple[str, int], raw: bytes) -> Reply:
    async with connected(address) as (reader, writer):
        writer.write(raw)
        return await read_reply(reader)


async def get(address: tuple[str, int], target: str, **headers: str) -> Reply:
    """GET ``target``; header names are given with ``_`` for ``-``."""
    given = {"Host": f"{address[0]}:{address[1]}"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return await exchange(address, f"GET {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1"))
