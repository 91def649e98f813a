"""What changes on a machine that runs is seen; what does not costs nothing."""

import asyncio
import errno
import io
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nri_numa.agent.reload import report_polling
from nri_numa.machine import hotplug
from nri_numa.machine.hotplug import changed_texts_by_field, concerns_cpus, rediscover_topology
from nri_numa.machine.synthetic import synthetic_sysfs_files
from nri_numa.machine.sysfs import discover_topology
from nri_numa.model.cpuset import CPUSet
from nri_numa.observe import logs
from tests.machines import named as machines
from tests.machines.named import GIB, write_sysfs, write_tree

NODE = "sys/devices/system/node"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two NUMA nodes of 8 GiB."""
    return write_sysfs(tmp_path, machines.dual_smt_16(memory_gib=8))


def test_nothing_changed_is_the_same_object(root: Path) -> None:
    machine = discover_topology(root)
    assert rediscover_topology(root, machine) is machine


PAGES = f"{NODE}/node1/hugepages/hugepages-2048kB"
PODS = "sys/fs/cgroup/kubepods.slice"


@pytest.mark.parametrize(
    ("files", "changed", "back"),
    [
        (
            {f"{PAGES}/nr_hugepages": "512\n", f"{PAGES}/free_hugepages": "512\n"},
            {"hugepages": "1=none -> 512x2048Ki"},
            {"hugepages": "1=512x2048Ki -> none"},
        ),
        (
            {f"{NODE}/node1/meminfo": "Node 1 MemTotal: 12582912 kB\n"},
            {"memory": "1=8 GiB -> 12 GiB"},
            {"memory": "1=12 GiB -> 8 GiB"},
        ),
        (
            {"sys/devices/system/cpu/online": "0-14\n"},
            {"offline_cpus": "15"},
            {"online_cpus": "15"},
        ),
        (
            {f"{PODS}/cpuset.cpus.effective": "0-7\n"},
            {"allowed_cpus": "0-7"},
            {"allowed_cpus": "0-15"},
        ),
        ({f"{PODS}/cpuset.cpus.effective": "99\n"}, {}, {}),
        ({f"{PODS}/cpuset.mems.effective": "0\n"}, {"withheld_mems": "1"}, {"withheld_mems": ""}),
    ],
)
def test_case_16_what_comes_and_goes_is_seen(
    root: Path, files: dict[str, str], changed: dict[str, str], back: dict[str, str]
) -> None:
    pods = {f"{PODS}/cpuset.{name}.effective": "0-31\n" for name in ("cpus", "mems")}
    none = {f"{PAGES}/{name}_hugepages": "0\n" for name in ("nr", "free")}
    machine = discover_topology(write_tree(root, pods | none))
    before = {name: (root / name).read_text() for name in files}
    after = rediscover_topology(write_tree(root, files), machine)
    assert changed_texts_by_field(machine, after) == changed
    assert (after is machine) is (not changed)
    assert rediscover_topology(root, after) is after
    assert (
        changed_texts_by_field(after, rediscover_topology(write_tree(root, before), after)) == back
    )


def test_case_16_a_numa_node_that_gets_its_first_memory_is_discovered(tmp_path: Path) -> None:
    root = write_sysfs(tmp_path, machines.cpu_only())
    machine = discover_topology(root)
    write_tree(root, {f"{NODE}/node0/meminfo": "Node 0 MemTotal: 1048576 kB\n"})
    assert rediscover_topology(root, machine).numa_nodes[0].memory_bytes == GIB


def test_case_16_a_numa_node_that_comes_online_is_discovered(tmp_path: Path) -> None:
    both = machines.dual_smt_16(memory_gib=8)
    files = synthetic_sysfs_files(both)
    files[f"{NODE}/online"] = "0\n"
    files[f"{NODE}/node0/distance"] = "10\n"
    machine = discover_topology(write_tree(tmp_path, files))
    assert str(machine.numa_ids) == "0"
    write_sysfs(tmp_path, both)
    after = rediscover_topology(tmp_path, machine)
    assert changed_texts_by_field(machine, after) == {"numa_nodes": "0-1"}


@pytest.mark.parametrize("text", ["", "x\n"])
def test_a_machine_without_numa_nodes_stays_as_it_is(tmp_path: Path, text: str) -> None:
    files = {
        n: t
        for n, t in synthetic_sysfs_files(machines.single_smt()).items()
        if not n.startswith(NODE)
    }
    root = write_tree(tmp_path, files)
    machine = discover_topology(root)
    assert rediscover_topology(root, machine) is machine
    if text:
        write_tree(root, {f"{NODE}/online": text})
        assert rediscover_topology(root, machine).numa_ids == machine.numa_ids


def test_what_discovery_would_read_the_same_way_is_no_change(root: Path) -> None:
    """Somebody else's idea of the machine: discovered anew, and found to be equal."""
    machine = replace(discover_topology(root), isolated=CPUSet())
    write_tree(root, {f"{NODE}/online": "0-1,7\n"})
    assert rediscover_topology(root, machine) is machine


def uevent(action: str = "offline", subsystem: str = "cpu", path: str = "/devices/cpu3") -> bytes:
    return (
        f"{action}@{path}\0ACTION={action}\0DEVPATH={path}\0SUBSYSTEM={subsystem}\0SEQNUM=1\0"
    ).encode()


@pytest.mark.parametrize("action", ["add", "remove", "online", "offline"])
def test_events_of_cpus_are_recognised(action: str) -> None:
    assert concerns_cpus(uevent(action))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        b"offline@",
        b"libudev\0\xfe\xed\xca\xfe\0\0",
        uevent(subsystem="block"),
        uevent("change"),
        uevent().replace(b"offline@", b"offline "),
        b"x@y\0\xff=\xff\0SUBSYSTEM\0",
    ],
)
def test_other_events_and_rubbish_are_passed_over(data: bytes) -> None:
    assert not concerns_cpus(data)


class FakeKernel:
    """The two ends of a socket pair; what is written to one comes out as events of the kernel."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.theirs.setblocking(False)
        self.error: OSError | None = None
        self.sender: object = (0, 1)
        self.closed = False

    def fileno(self) -> int:
        return self.theirs.fileno()

    def recvfrom(self, size: int, /) -> tuple[bytes, object]:
        data, _ = self.theirs.recvfrom(size)
        if self.error is not None:
            raise self.error
        return data, self.sender

    def close(self) -> None:
        self.closed = True
        self.theirs.close()

    def say(self, data: bytes) -> None:
        self.ours.send(data)


@asynccontextmanager
async def watched(open_: Callable[[], Any]) -> AsyncIterator[asyncio.Queue[None]]:
    """While a watch goes on; each look puts an item into the queue."""
    looks: asyncio.Queue[None] = asyncio.Queue()

    async def changed() -> None:
        looks.put_nowait(None)

    task = asyncio.create_task(hotplug.watch_cpu_events(changed, report_polling, open_))
    await asyncio.sleep(0)
    try:
        yield looks
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def kernel() -> Iterator[FakeKernel]:
    made = FakeKernel()
    yield made
    made.ours.close()
    assert made.closed


async def test_a_burst_of_events_is_one_look(kernel: FakeKernel) -> None:
    async with watched(lambda: kernel) as looks:
        kernel.say(uevent("add", "block"))
        for _ in range(20):
            kernel.say(uevent())
        await asyncio.wait_for(looks.get(), 180)
        assert looks.empty()
        kernel.say(uevent("online"))
        await asyncio.wait_for(looks.get(), 180)


async def test_lost_events_are_a_reason_to_look_and_forged_ones_are_not(kernel: FakeKernel) -> None:
    async with watched(lambda: kernel) as looks:
        kernel.sender = (4711, 1)
        kernel.say(uevent())
        await asyncio.sleep(0.05)
        kernel.sender = (0, 1)
        kernel.error = OSError(errno.ENOBUFS, "lost")
        kernel.say(b"x")
        await asyncio.wait_for(looks.get(), 180)
        assert looks.empty()


@pytest.mark.parametrize("breaks", [True, False])
async def test_without_a_socket_it_is_said_and_polls_on(kernel: FakeKernel, breaks: bool) -> None:
    stream = io.StringIO()
    logs.setup_logging("info", stream=stream)

    def opened() -> FakeKernel:
        if not breaks:
            kernel.close()
            raise PermissionError(errno.EPERM, "not here")
        kernel.error = OSError(errno.EIO, "broken")
        kernel.say(uevent())
        return kernel

    async with watched(opened) as looks, asyncio.timeout(180):
        while "CPU hotplug events " not in stream.getvalue():
            await asyncio.sleep(0.01)
        assert looks.empty()


def test_the_kernel_lets_us_listen_or_says_why_not() -> None:
    try:
        source = hotplug.open_uevent_socket()
    except OSError as error:
        pytest.skip(f"no uevents here: {error}")
    with pytest.raises(BlockingIOError):
        source.recvfrom(1)
    source.close()
