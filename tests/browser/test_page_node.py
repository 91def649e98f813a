"""The page over the real agent's process, a real socket and an embedded runtime."""

import asyncio

from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.cpuset import CPUSet
from tests.beds.browser import (
    BANNERS,
    CPUS,
    LIST,
    LIVE,
    NUMA_NODES,
    REJECTIONS,
    ROWS,
    STEPS,
    TITLE,
    Page,
    fill,
    visit,
)
from tests.beds.page_node import page_node
from tests.machines import named as machines

OLD = "[...document.querySelectorAll('{}')].filter(e => e.old).length"


def test_a_day_of_a_node(page: Page) -> None:
    """Pods come and go, one is refused, the runtime restarts, the agent restarts."""
    machine = machines.snc_smt(cores_per_numa=8, cores_per_l3=4, offline=CPUSet([31]))
    with page_node(machine, {"reservedCPUs": "0-1"}) as node:
        node.start_agent()
        visit(page, node)
        assert len(page.run(CPUS)) == 64
        assert page.run("document.querySelectorAll('#map .cpu.offline').length") == 1
        assert page.run("document.querySelectorAll('#map .cpu.reserved').length") == 2

        node.create("own", cpus=3, memory_gib=2, policy="single-numa-node", smt="isolate")
        page.wait("document.querySelectorAll('#map .cpu.exclusive').length === 3")
        page.wait("document.querySelectorAll('#map .cpu.idle').length === 3")
        node.create("web", cpus=0.5, memory_gib=1, policy="best-effort")
        node.create("greedy", cpus=500, policy="restricted")
        page.wait(f"{TITLE} === 'Containers (2)'")
        page.wait(f"{REJECTIONS}.includes('shop/greedy')")
        page.click("#map .cpu.exclusive")
        page.wait(f"{STEPS} > 3")

        node.do(node.runtime.stop())
        page.wait(f"{BANNERS}.includes('no link to the container runtime')")
        assert page.run(LIVE)
        node.do(node.runtime.start())
        page.wait(f"{BANNERS} === ''")

        node.plugin.terminate()
        page.wait(f"{BANNERS}.includes('link to the agent is lost')")
        node.start_agent()
        page.wait(f"{LIVE} && {BANNERS} === ''")
        page.wait("document.querySelectorAll('#map .cpu.exclusive').length === 3")
        assert page.run(TITLE) == "Containers (2)"


def test_sixty_four_numa_nodes_with_a_thousand_containers(page: Page) -> None:
    machine = build_synthetic_topology(
        sockets=8, numa_per_socket=8, cores_per_numa=8, memory_gib=32
    )
    with page_node(machine, {"reservedCPUs": "0-3"}) as node:

        async def crowd() -> None:
            for n in range(950):
                await node.start(f"web-{n}", cpus=0.2, memory_gib=0.1, policy="best-effort")

        node.do(crowd())
        node.start_agent()
        for n in range(50):
            node.create(f"train-{n}", cpus=4, memory_gib=1, policy="single-numa-node")
        page.open(node.url)
        page.wait(f"{LIVE} && {TITLE} === 'Containers (1,000)'")
        assert len(page.run(NUMA_NODES)) == 64
        assert len(page.run(CPUS)) == 1024
        assert page.run("document.querySelectorAll('#map .cpu.exclusive').length") == 200
        assert page.run("document.querySelectorAll('#map .cpu.reserved').length") == 4

        # Not all rows at once, and all of them in the end.
        assert page.run(ROWS) == 100
        page.run("(b => { b.scrollTop = b.scrollHeight; })(document.querySelector('.rows'))")
        page.wait(f"{ROWS} > 100")
        page.wait(
            f"(b => {{ b.scrollTop = b.scrollHeight; return {ROWS} === 1000; }})"
            "(document.querySelector('.rows'))"
        )
        # One more container touches what changed and leaves the rest standing.
        page.run(
            "for (const e of document.querySelectorAll('[data-cpu], #list tbody tr')) e.old = 1"
        )
        node.create("late", cpus=2, memory_gib=1, policy="single-numa-node")
        page.wait("document.querySelectorAll('#map .cpu.exclusive').length === 202")
        assert page.run(OLD.format("[data-cpu]")) == 1024
        page.wait(f"{TITLE} === 'Containers (1,001)'")
        # Those of the NUMA node that got smaller are made anew.
        assert page.run(OLD.format("#list tbody tr")) >= 900

        page.run(fill("filter", "train-49"))
        page.wait(f"{ROWS} === 1")
        page.size(375, 800)
        page.wait("document.documentElement.scrollWidth <= 375")


def test_a_storm_of_changes_is_drawn_to_its_end(page: Page) -> None:
    with page_node(machines.snc_smt(cores_per_numa=8)) as node:
        node.start_agent()
        visit(page, node)

        async def storm() -> None:
            for n in range(150):
                made = await node.start(f"brief-{n}", cpus=2, memory_gib=1, policy="best-effort")
                await asyncio.sleep(0)
                of = node.runtime.containers[made].message.pod_sandbox_id
                await node.runtime.remove_pod(of)
            await node.start("last", cpus=2, memory_gib=1, policy="best-effort")

        node.do(storm())
        page.wait(f"{TITLE} === 'Containers (1)'")
        page.wait(f"{LIST}.includes('last')")
        page.wait("document.querySelectorAll('#map .cpu.exclusive').length === 2")
