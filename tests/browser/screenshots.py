"""Take the pictures of docs/img: ``python -m tests.browser.screenshots [DIRECTORY]``.

Every picture shows the real agent's process on a modelled machine, with pods that an embedded
runtime starts; nothing is drawn for the picture. How busy CPUs are is made up, in the modelled
machine's /proc/stat.
"""

import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import Topology
from tests.beds.browser import LIVE, STEPS, TITLE, Page, browser, press_button, tick
from tests.beds.page_node import PageNode, page_node
from tests.machines import named as machines

GIB = 1 << 30
TRAIN = "train-{}-7d4b9c6f5d-x2x1q"
SINGLE = "single-numa-node"


def one(node: PageNode) -> None:
    node.create("cache-0", cpus=2, memory_gib=4, policy=SINGLE, smt="full-core")
    node.create("web-0", namespace="front", cpus=0.5, memory_gib=1, policy="best-effort")
    node.create("coredns-5d78c9869d-k2j4m", namespace="kube-system", qos="burstable")


def four(node: PageNode) -> None:
    node.create("router-0", cpus=2, memory_gib=4, numacpu="14-15", numamem="1")
    node.create(TRAIN.format(0), cpus=4, memory_gib=8, policy=SINGLE)
    node.create("solver-0", cpus=4, memory_gib=8, policy=SINGLE, smt="full-core")
    node.create("latency-0", cpus=3, memory_gib=8, policy=SINGLE, smt="isolate")
    for n in range(6):
        node.create(f"db-{n}", cpus=2, memory_gib=4, policy=SINGLE)
    for n in range(5):
        node.create(f"web-{n}", namespace="front", cpus=0.5, memory_gib=1, policy="best-effort")
    node.create("coredns-5d78c9869d-k2j4m", namespace="kube-system", qos="burstable")
    node.create("greedy", cpus=40, memory_gib=1, policy=SINGLE)
    node.create("typo", numacpu="3-1")


def sixteen(node: PageNode) -> None:
    """Many owners, one of them over several NUMA nodes."""
    smt = ("spread", "full-core", "isolate")
    for n in range(22):
        node.create(
            TRAIN.format(n), cpus=(2, 4, 6)[n % 3], memory_gib=8, policy=SINGLE, smt=smt[n % 3]
        )
    node.create("hpc-0", namespace="science", cpus=40, memory_gib=60, policy="best-effort")
    for n in range(25):
        node.create(f"web-{n}", namespace="front", cpus=0.5, memory_gib=1, policy="best-effort")
    node.create("greedy", cpus=40, memory_gib=1, policy=SINGLE)


def sixty_four(node: PageNode) -> None:
    for n in range(900):
        pod = f"web-{n}-6d5f7c9b8-abcde"
        node.create(pod, namespace=f"front-{n % 7}", cpus=0.2, memory_gib=0.1, policy="best-effort")
    for n in range(100):
        smt = ("spread", "full-core")[n % 2]
        node.create(TRAIN.format(n), cpus=(2, 4, 6, 8)[n % 4], memory_gib=2, policy=SINGLE, smt=smt)
    node.create("greedy", cpus=40, memory_gib=1, policy=SINGLE)


@contextmanager
def working(node: PageNode, samples: int = 9) -> Iterator[None]:
    """CPUs are busy meanwhile, exclusive ones most; begins when the agent has read it often."""
    exclusive = CPUSet()
    for use in node.get("v1/assignments")["numaNodes"]:
        exclusive |= CPUSet.parse(use["exclusive"])
    ticks = dict.fromkeys(node.topology.online, 0)
    over = threading.Event()

    def work() -> None:
        for number in count(1):
            for cpu in ticks:
                swing = (cpu * 7 + number * 5) % 24
                ticks[cpu] += 62 + swing if cpu in exclusive else 8 + swing
            tick(node.machine, ticks, 100 * number)
            if over.wait(1):
                return

    thread = threading.Thread(target=work)
    thread.start()
    try:
        while sum(n is not None for n in known(node)) < samples:
            time.sleep(1)
        yield
    finally:
        over.set()
        thread.join()


def known(node: PageNode) -> list[int | None]:
    """How busy the first NUMA node was, as far as the agent has read it."""
    use = node.get("v1/use")["numaNodes"]
    return list(use[0]["cpuHistory"]) if use else []


def row(pod: str) -> Callable[[Page], None]:
    """Choose a container by the name of its pod."""

    def choose(page: Page) -> None:
        page.run(press_button("#list tbody button", pod))
        page.wait(f"{STEPS} > 3")

    return choose


def numa(numa_node: int) -> Callable[[Page], None]:
    return lambda page: page.click(f'[data-numa="{numa_node}"] h4 button')


def nothing(page: Page) -> None:
    """Choose nothing."""


def smaller(file: Path) -> None:
    """Reduce a picture to 256 colours, where Debian's pngquant is installed."""
    if pngquant := shutil.which("pngquant"):
        subprocess.run(
            [pngquant, "--force", "--skip-if-larger", "--strip", "--output", file, "256", file],
            check=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenshotBed:
    """A machine, its pods, and the pictures: name, width, dark or not, what is chosen.

    With ``busy`` the machine says how busy its CPUs are, which takes most of a minute.
    """

    topology: Topology
    reserved: str
    populate: Callable[[PageNode], None]
    pictures: tuple[tuple[str, int, bool, Callable[[Page], None]], ...]
    busy: bool = False


PAGES = {2 << 20: 4 * GIB}
BEDS = (
    ScreenshotBed(
        topology=machines.single_smt(memory_gib=32),
        reserved="0",
        populate=one,
        pictures=(("page-1", 1280, False, nothing), ("page-1-narrow", 375, False, nothing)),
    ),
    ScreenshotBed(
        topology=machines.snc_smt(
            cores_per_numa=8, cores_per_l3=4, memory_gib=64, hugepages=PAGES, offline=CPUSet([31])
        ),
        reserved="0-1",
        populate=four,
        pictures=(
            ("page-4", 1440, False, nothing),
            ("page-4-dark", 1440, True, nothing),
            ("page-4-narrow", 375, True, nothing),
        ),
        busy=True,
    ),
    ScreenshotBed(
        topology=build_synthetic_topology(
            numa_per_socket=8,
            cores_per_numa=8,
            memory_gib=48,
            hugepages=PAGES,
            memory_only_gib=(128,),
        ),
        reserved="0-1,128-129",
        populate=sixteen,
        pictures=(("page-16", 1440, False, numa(3)), ("page-16-dark", 1440, True, row("hpc-0"))),
    ),
    ScreenshotBed(
        topology=build_synthetic_topology(
            sockets=8, numa_per_socket=8, cores_per_numa=8, memory_gib=32
        ),
        reserved="0-3",
        populate=sixty_four,
        pictures=(("page-64", 1440, False, nothing), ("page-64-dark", 1440, True, numa(9))),
    ),
)


def main(directory: Path) -> None:
    """Take all pictures."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as page:
        for bed in BEDS:
            config = {
                "nodeName": "worker-7",
                "reservedCPUs": bed.reserved,
                "capacityFactor": {max(bed.topology.cpu_nodes): 0.8},
            }
            with page_node(bed.topology, config) as node:
                node.start_agent()
                bed.populate(node)
                total = f"{len(node.get('v1/assignments')['containers']):,}"
                with working(node) if bed.busy else nullcontext():
                    for name, width, dark, choose in bed.pictures:
                        page.size(width, 900, dark=dark)
                        page.open(node.url)
                        page.wait(f"{LIVE} && {TITLE} === 'Containers ({total})'")
                        if bed.busy:
                            page.wait("document.querySelector('.use .spark') !== null")
                        choose(page)
                        page.run("scrollTo(0, 0)")
                        file = directory / f"{name}.png"
                        page.screenshot(file)
                        smaller(file)
                        print(f"{file}: {file.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/img"))
