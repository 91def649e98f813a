"""CreateContainer where devices are looked for, and where not: three plugins take turns.

One of them looks for devices and two do not, with the same settings: what one of these differs from
the other is the noise of the bench, and stands beside the result. The order of each turn is drawn
anew, so that none always comes after the same one.

The runtime has one CPU and the plugins another one. Left to the kernel, an answer stays on one CPU
or wakes another one that sleeps, which takes a virtual machine 240 µs longer; the threads that look
for devices change which of the two it is. The kubelet is a process of its own, as on a node, on the
runtime's CPU: within the runtime its answers throw out of the caches what the runtime needs next,
and only the plugins that ask it would wait for that.

Three containers: one without devices, one whose message has a device file (a GPU's, looked up in
sysfs by its number), and one to which the kubelet gave a device, of which the plugin asks when the
pod's sandbox is made. All plugins are sent the same, and all wait between the sandbox and the
container, as long as the kubelet has for its answer and more; so what is timed finds its devices
known. How many containers were beside their device tells that this was so.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.beds import MACHINES, SHARED, Bed, bed, container_of, fill, pod_of, scratch
from bench.stats import Summary, summary, table, us
from nri_numa.nri.wire.pb import nri_pb2 as pb

BUDGET = 50e-6
"""Seconds at p50 that looking for devices may cost a container."""
PAUSE = 0.08
"""Seconds between the sandbox and the container; the kubelet has 0.05 for its answer."""
RESIDENTS = 100
GPU = "0000:3b:00.0"
NUMA_NODE = 1
"""Where the devices are; a shared container without devices goes to NUMA node 0 or 1."""
_NUMBER = 226, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds of CreateContainer with the sources off and on, and how many were beside.

    Attributes:
        control: of another plugin with the sources off.
    """

    case: str
    off: Summary
    control: Summary
    on: Summary
    beside: float

    @property
    def more(self) -> float:
        """Seconds more at p50 than both without the sources together."""
        return self.on.p50 - (self.off.p50 + self.control.p50) / 2

    @property
    def noise(self) -> float:
        """Seconds at p50 between two plugins with the same settings."""
        return abs(self.control.p50 - self.off.p50)


def _plain(container: pb.Container) -> None:
    """A container without devices."""


def _with_file(container: pb.Container) -> None:
    major, minor = _NUMBER
    container.linux.devices.add(path="/dev/dri/renderD128", type="c", major=major, minor=minor)


KINDS = ("off", "control", "on")
"""The plugins; only the one called ``on`` looks for devices."""

CASES: tuple[tuple[str, str, Callable[[pb.Container], None]], ...] = (
    # Name, how its pods are called, what is done to the container.
    ("no devices", "plain", _plain),
    ("a device file", "file", _with_file),
    ("a device of the kubelet's, asked for ahead", "given", _plain),
)


def _get(request: Any, context: Any) -> Any:
    """The kubelet's answer: pods of one name have a device."""
    from nri_numa.kubelet.pb import podresources_pb2

    answer = podresources_pb2.GetPodResourcesResponse()
    if request.pod_name.startswith("given"):
        devices = answer.pod_resources.containers.add(name="app").devices
        device = devices.add(resource_name="example.com/gpu", device_ids=[GPU])
        device.topology.nodes.add(ID=NUMA_NODE)
    return answer


def _serve(directory: Path, wanted: Connection) -> None:
    """A process's life as the kubelet; until the other end of ``wanted`` closes."""
    from tests.beds.fake_kubelet import pod_resources

    with pod_resources(directory, _get, lambda request, context: None):
        wanted.send("serves")
        with contextlib.suppress(EOFError):
            wanted.recv()


@contextlib.contextmanager
def _kubelet(directory: Path) -> Iterator[int]:
    """A kubelet with this root; its process id."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(directory, theirs), daemon=True)
    process.start()
    theirs.close()
    mine.recv()
    try:
        yield process.pid or 0
    finally:
        mine.close()
        process.join()


def _config(directory: Path, name: str, *, enabled: bool) -> list[str]:
    file = directory / f"{name}.yaml"
    document = {
        "apiVersion": "nri-numa/v1",
        "kind": "AgentConfig",
        "kubeletRoot": str(directory / "kubelet"),
        "devices": {"enabled": enabled},
    }
    file.write_text(json.dumps(document), encoding="utf-8")  # JSON is YAML
    return [f"--config={file}"]


async def _one(one: Bed, name: str, change: Callable[[pb.Container], None]) -> tuple[float, bool]:
    """One life of a pod: seconds of its creation, and whether it is beside the devices."""
    pod = await one.runtime.run_pod(pod_of(SHARED, name))
    await asyncio.sleep(PAUSE)
    message = container_of(SHARED)
    change(message)
    made = await one.runtime.create_container(pod.id, message)
    seconds = one.last("CreateContainer")
    beside = made.message.linux.resources.cpu.mems == str(NUMA_NODE)
    await one.runtime.start_container(made.id)
    await one.runtime.stop_container(made.id)
    await one.runtime.remove_pod(pod.id)
    return seconds, beside


def _apart(kubelet: int, beds: list[Bed]) -> None:
    """Give us and the kubelet the first CPU that we may use, and the plugins the last one."""
    cpus = sorted(os.sched_getaffinity(0))
    ours = [(pid, cpus[0]) for pid in (os.getpid(), kubelet)]
    for pid, cpu in (*ours, *((one.pid, cpus[-1]) for one in beds)):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {cpu})  # those made later inherit it


async def measure(*, rounds: int = 120) -> list[Measured]:
    from tests.beds.device_tree import GPU_CLASS, DeviceTree

    topology = MACHINES[next(iter(MACHINES))]()
    order = random.Random(17)  # the same orders in every run
    found: list[Measured] = []
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(scratch()))
        kubelet = directory / "kubelet"
        kubelet_pid = stack.enter_context(_kubelet(kubelet))
        beds: list[Bed] = []
        for name in KINDS:
            tree = DeviceTree(directory / name / "machine")
            card = tree.child(tree.pci(GPU, NUMA_NODE, GPU_CLASS), "drm", "renderD128")
            tree.number("char", ":".join(map(str, _NUMBER)), card)
            more = _config(directory, name, enabled=name == "on")
            beds.append(await stack.enter_async_context(bed(directory / name, topology, more=more)))
            await fill(beds[-1], RESIDENTS, SHARED)
        before = os.sched_getaffinity(0)
        stack.callback(os.sched_setaffinity, 0, before)
        _apart(kubelet_pid, beds)
        for case, name, change in CASES:
            times: list[list[float]] = [[] for _ in KINDS]
            beside = [0] * len(KINDS)
            gc.collect()
            gc.disable()
            try:
                for n in range(-10, rounds):
                    for k in order.sample(range(len(beds)), len(beds)):
                        seconds, there = await _one(beds[k], f"{name}-{n}", change)
                        if n >= 0:
                            times[k].append(seconds)
                            beside[k] += there
            finally:
                gc.enable()
            off, control, on = map(summary, times)
            share = beside[-1] / rounds
            found.append(Measured(case=case, off=off, control=control, on=on, beside=share))
    return found


def report(found: list[Measured]) -> str:
    """As a table, and what comes of the budget."""
    rows = [
        (
            m.case,
            *(us(s.p50) for s in (m.off, m.control, m.on)),
            *(us(s.p99) for s in (m.off, m.control, m.on)),
            f"{m.more * 1e6:+.0f}",
            us(m.noise),
            f"{m.beside:.0%}",
        )
        for m in found
    ]
    worst = max(found, key=lambda m: m.more)
    word = "kept" if worst.more <= BUDGET else "missed"
    return (
        table(
            (
                "container", "p50 off µs", "off again", "on", "p99 off", "off again", "on",
                "p50 more µs", "noise", "beside",
            ),
            rows,
        )
        + f"\n\nBudget of +{us(BUDGET)} µs at p50 {word}: {worst.more * 1e6:+.0f} µs at most "
        f"({worst.case}), where two with the same settings differ "
        f"by {us(max(m.noise for m in found))} µs at most."
    )  # fmt: skip
