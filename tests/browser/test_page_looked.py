"""What the agent looks for all the time, in the details of a container: its memory, its waiting."""

from typing import Any

from tests.beds.browser import DETAILS, LIVE, TITLE, Page, visit
from tests.beds.page_node import page_node
from tests.machines import named as machines

ON: dict[str, Any] = {"containerUsage": {"memory": "read", "cpuPressure": "read", "interval": "1s"}}


def details_anew(page: Page, url: str) -> None:
    """Load the page again, whatever it shows, and choose its only container."""
    page.open("about:blank")
    page.wait("location.href === 'about:blank'")
    page.open(url)
    page.wait(f"{LIVE} && {TITLE} === 'Containers (1)'")
    page.run("document.querySelector('#list tbody button').click()")


def read_by_the_agent(page: Page, url: str, condition: str) -> None:
    """Until the agent's API says so of its only container, ``c``."""
    page.wait(
        f"fetch('{url}v1/assignments').then(r => r.json())"
        f".then(a => a.containers.length === 1 && (c => {condition})(a.containers[0]))"
    )


def test_where_its_memory_is_and_how_much_it_waits(page: Page) -> None:
    """Numbers where they are known, the reason in words where they are not, and never a zero."""
    with page_node(machines.snc_single(), config=ON) as node:
        node.start_agent()
        node.create("looked", cpus=2, memory_gib=1, policy="single-numa-node")
        visit(page, node)
        read_by_the_agent(page, node.url, "c.memory.readAt > 0 && c.cpuPressure.readAt > 0")
        details_anew(page, node.url)
        page.wait(f"{DETAILS}.includes('location unknown: it has no cgroup')")
        page.wait(f"{DETAILS}.includes('unknown: it has no cgroup that can be read')")
        text = page.run(DETAILS)
        assert "% on its own NUMA nodes" not in text
        assert "of the last minute" not in text

        (one,) = node.get("v1/assignments")["containers"]
        home, away = (0, 1) if one["numaNodes"] == "0" else (1, 0)
        node.make_cgroup(
            one["id"],
            {
                "memory.numa_stat": f"anon N{home}={3 << 20} N{away}={1 << 20}\nfile N0=0\n",
                "cpu.pressure": "some avg10=0.00 avg60=12.50 avg300=0.00 total=0\n",
            },
        )
        read_by_the_agent(
            page, node.url, "c.memory.localPercent === 75 && c.cpuPressure.pressurePercent === 12.5"
        )
        details_anew(page, node.url)
        page.wait(f"{DETAILS}.includes('75 % on its own NUMA nodes')")
        text = page.run(DETAILS)
        assert "12.5 % of the last minute" in text
        assert "unknown: it has no process" in text, "of its threads nothing is known"


def test_without_being_asked_to_look_the_details_say_nothing_of_it(page: Page) -> None:
    with page_node(machines.snc_single()) as node:
        node.start_agent()
        node.create("looked", cpus=2, memory_gib=1, policy="single-numa-node")
        details_anew(page, node.url)
        page.wait(f"{DETAILS}.includes('Allocated')")
        text = page.run(DETAILS)
        assert "CPU pressure" not in text
        assert "on its own NUMA nodes" not in text
