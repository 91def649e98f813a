"""What is measured against: synthetic machines, plugin processes, and the embedded runtime.

The runtime lives in the measuring process, every plugin in a process of its own, with a real unix
socket in between. Times are those the runtime sees: from the request it writes to the whole answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket as socket_module
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nri_numa.cluster.pods import PERIOD, cfs_quota_of, cpu_shares_of
from nri_numa.demo.runtime import DemoContainer
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.machine import Topology
from nri_numa.nri.wire.pb import nri_pb2 as pb
from tests.beds.embedded_runtime import EmbeddedRuntime
from tests.machines.named import write_sysfs

REPOSITORY = Path(__file__).resolve().parents[1]
PREFIX = "numa.kubernetes.io/"

MACHINES: dict[str, Callable[[], Topology]] = {
    "64 CPUs, 2 NUMA nodes": lambda: build_synthetic_topology(
        sockets=2, numa_per_socket=1, cores_per_numa=16, cores_per_l3=8, memory_gib=256
    ),
    "256 CPUs, 8 NUMA nodes": lambda: build_synthetic_topology(
        sockets=2, numa_per_socket=4, cores_per_numa=16, cores_per_l3=8, memory_gib=128
    ),
}


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A directory on tmpfs where there is one: the checkpoint belongs on /run."""
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="nri-numa-bench-", dir=where)


@dataclass(slots=True, kw_only=True)
class Bed:
    """One plugin process and the runtime it talks to."""

    runtime: EmbeddedRuntime
    process: asyncio.subprocess.Process
    log: Path
    state: Path
    seconds_to_active: float
    port: int = 0
    residents: list[DemoContainer] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    def last(self, method: str) -> float:
        """Seconds of the latest request of this method."""
        for record in reversed(self.runtime.calls):
            if record.method == method:
                if record.outcome != "ok":
                    raise RuntimeError(f"{method}: {record.outcome}; see {self.log}")
                return record.seconds
        raise RuntimeError(f"{method} was never called")


def free_port() -> int:
    """A TCP port on loopback that nobody listens on at this moment."""
    with socket_module.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(checkout: Path = REPOSITORY) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("NRI_NUMA_")}
    return {**kept, "PYTHONPATH": str(checkout)}


def real_command(socket: Path, state: Path, sysfs: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "nri_numa", "run", f"--nri-socket={socket}", f"--state-dir={state}",
        f"--sysfs-root={sysfs}", *more,
    ]  # fmt: skip


def empty_command(socket: Path, *more: str) -> list[str]:
    """The floor: ours in Python, or the program of ``BENCH_EMPTY`` (``bench/empty_go``)."""
    program = os.environ.get("BENCH_EMPTY")
    words = [program] if program else [sys.executable, "-m", "bench.empty_plugin"]
    return [*words, str(socket), *more]


@contextlib.asynccontextmanager
async def bed(
    directory: Path,
    topology: Topology,
    *,
    empty: bool = False,
    more: Sequence[str] = (),
    http: bool = False,
    before: Callable[[EmbeddedRuntime], Awaitable[None]] | None = None,
    request_timeout: float = 30,  # a busy machine must not end the measurement
    checkout: Path = REPOSITORY,
) -> AsyncIterator[Bed]:
    """Start a runtime and one plugin; the plugin is active when this yields.

    Args:
        directory: for the socket, the machine, the state and the log.
        topology: the machine.
        empty: the floor instead of the real plugin.
        more: further flags of the plugin.
        http: serve the API, on a port that was free a moment ago.
        before: puts something onto the node before the plugin starts.
        request_timeout: seconds the runtime waits for an answer.
        checkout: where the plugin's code is.
    """
    directory.mkdir(parents=True, exist_ok=True)
    sysfs = directory / "machine"
    write_sysfs(sysfs, topology)
    socket, log = directory / "nri.sock", directory / "log"
    port = free_port() if http else 0
    address = f"127.0.0.1:{port}" if http else "off"
    command = (
        empty_command(socket, *more)
        if empty
        else real_command(socket, directory / "state", sysfs, f"--http={address}", *more)
    )
    runtime = EmbeddedRuntime(
        str(socket),
        topology=topology,
        request_timeout=request_timeout,
    )
    async with runtime:
        if before is not None:
            await before(runtime)
        started = time.perf_counter()
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command, cwd=checkout, env=environment(checkout), stdout=output, stderr=output
            )
        try:
            active = asyncio.ensure_future(runtime.wait_for_plugin(limit=60))
            ended = asyncio.ensure_future(process.wait())
            await asyncio.wait({active, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not active.done():
                active.cancel()
                raise RuntimeError(f"the plugin ended:\n{log.read_text()[-2000:]}")
            await active
            yield Bed(
                runtime=runtime,
                process=process,
                log=log,
                state=directory / "state",
                seconds_to_active=time.perf_counter() - started,
                port=port,
            )
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


# --- what is put onto the node ------------------------------------------------------------------


def typical_container(name: str = "app") -> pb.Container:
    """A container with what a kubelet and containerd really send along: about five kilobytes."""
    container = pb.Container(name=name)
    container.args.extend(["/usr/bin/service", "--config=/etc/service/config.yaml", "--verbose"])
    container.env.extend(
        f"{service}_SERVICE_{key}={value}"
        for service in ("KUBERNETES", "CART", "SHOP", "PAYMENT", "MAIL")
        for key, value in (
            ("HOST", "10.96.0.1"),
            ("PORT", "443"),
            ("PORT_HTTPS", "443"),
            ("PORT_443_TCP", "tcp://10.96.0.1:443"),
            ("PORT_443_TCP_PROTO", "tcp"),
            ("PORT_443_TCP_ADDR", "10.96.0.1"),
        )
    )
    for target in (
        "/proc", "/dev", "/dev/pts", "/dev/mqueue", "/sys", "/sys/fs/cgroup", "/etc/hosts",
        "/dev/termination-log", "/etc/hostname", "/etc/resolv.conf", "/dev/shm", "/data",
        "/var/run/secrets/kubernetes.io/serviceaccount",
    ):  # fmt: skip
        container.mounts.add(
            destination=target,
            source=f"/var/lib/kubelet/pods/0a1b2c3d-1111-2222-3333-444455556666{target}",
            type="bind",
            options=["rbind", "rprivate", "rw"],
        )
    for kind in ("pid", "ipc", "uts", "mount", "network", "cgroup"):
        container.linux.namespaces.add(type=kind, path=f"/proc/4711/ns/{kind}")
    container.annotations.update(
        {
            "io.kubernetes.cri.container-type": "container",
            "io.kubernetes.cri.container-name": name,
            "io.kubernetes.cri.image-name": "registry.example/shop/service:1.2.3",
            "io.kubernetes.cri.sandbox-id": "f" * 64,
            "io.kubernetes.cri.sandbox-name": "cart-0",
            "io.kubernetes.cri.sandbox-namespace": "shop",
            "io.kubernetes.cri.sandbox-uid": "0a1b2c3d-1111-2222-3333-444455556666",
            "io.kubernetes.container.hash": "1a2b3c4d",
            "io.kubernetes.container.restartCount": "0",
            "io.kubernetes.container.terminationMessagePath": "/dev/termination-log",
        }
    )
    return container


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A kind of pod: what it asks for.

    Attributes:
        annotations: keys without prefix.
        milli: CPU limit in thousandths, 0 for none.
        memory: limit in bytes, 0 for none.
        cgroup: below which the kubelet puts it, which tells the QoS class.
    """

    annotations: tuple[tuple[str, str], ...] = ()
    milli: int = 0
    memory: int = 0
    cgroup: str = "/kubepods"


EXCLUSIVE = Shape(annotations=(("policy", "single-numa-node"),), milli=4000, memory=4 << 30)
SHARED = Shape(
    annotations=(("policy", "best-effort"),), milli=50, memory=64 << 20,
    cgroup="/kubepods/burstable",
)  # fmt: skip
PLAIN = Shape(milli=100, memory=128 << 20, cgroup="/kubepods/burstable")
# Bound to a list of CPUs: what others own does not change theirs.
LISTED = Shape(
    annotations=(("numacpu", "0-1"), ("numamem", "0")), milli=100, memory=64 << 20,
    cgroup="/kubepods/burstable",
)  # fmt: skip


SMALLER_BYTES = 512 << 30
"""Memory of the smaller of the machines."""


def oom_score(shape: Shape) -> int:
    """The OOM score that the kubelet gives: of Burstable pods it tells the memory request.

    The request is the limit. All shapes here ask for so little of a machine that the score is the
    same on the smaller and on the larger one.
    """
    if shape.cgroup == "/kubepods":
        return -997
    if shape.cgroup.endswith("/besteffort"):
        return 1000
    return min(999, max(3, 1000 - 1000 * shape.memory // SMALLER_BYTES))


def pod_of(shape: Shape, name: str) -> pb.PodSandbox:
    """A pod with one container, as containerd tells a kubelet's.

    The sandbox carries the sum of what containers ask for, and what the pod costs by itself; each
    number is wrapped, also where it is 0.
    """
    pod = pb.PodSandbox(
        name=name,
        namespace="shop",
        uid=f"uid-{name}",
        labels={"app": "cart", "pod-template-hash": "5d8f6b7c9"},
        annotations={
            "kubernetes.io/config.seen": "2026-01-01T00:00:00Z",
            "kubernetes.io/config.source": "api",
            **{PREFIX + key: value for key, value in shape.annotations},
        },
    )
    pod.linux.cgroup_parent = f"{shape.cgroup}/pod{name}"
    shares, quota, period = _cpu(shape)
    for given, amounts in (
        (pod.linux.pod_resources, (shares, quota, period, shape.memory)),
        (pod.linux.pod_overhead, (0, 0, 0, 0)),
    ):
        given.cpu.shares.value, given.cpu.quota.value, given.cpu.period.value = amounts[:3]
        given.memory.limit.value = amounts[3]
    return pod


def _cpu(shape: Shape) -> tuple[int, int, int]:
    """Shares, quota and period."""
    return cpu_shares_of(shape.milli), cfs_quota_of(shape.milli) or 0, PERIOD


def container_of(shape: Shape, name: str = "app") -> pb.Container:
    """The container of such a pod; what nobody asked for is not there."""
    container = typical_container(name)
    resources = container.linux.resources
    shares, quota, period = _cpu(shape)
    resources.cpu.shares.value, resources.cpu.period.value = shares, period
    if quota:
        resources.cpu.quota.value = quota
    if shape.memory:
        resources.memory.limit.value = shape.memory
    # The kubelet limits pages of every size that the machine has.
    for size in ("2MB", "1GB"):
        resources.hugepage_limits.add(page_size=size, limit=0)
    container.linux.oom_score_adj.value = oom_score(shape)
    return container


async def fill(bed: Bed, count: int, shape: Shape) -> None:
    """Add residents that stay."""
    for n in range(len(bed.residents), count):
        pod = await bed.runtime.run_pod(pod_of(shape, f"resident-{n}"))
        made = await bed.runtime.create_container(pod.id, container_of(shape))
        await bed.runtime.start_container(made.id)
        bed.residents.append(made)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, to the nanosecond where the kernel tells it."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0
