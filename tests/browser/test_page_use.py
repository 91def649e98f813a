"""What is really used, over the real process on a modelled machine; and the drawing as a file."""

from xml.etree import ElementTree

from tests.beds.browser import DETAILS, LIVE, TITLE, Page, tick, visit
from tests.beds.page_bed import page_bed
from tests.beds.page_node import PageNode, page_node
from tests.machines import named as machines

SVG = "{http://www.w3.org/2000/svg}"


def wait_for(node: PageNode, page: Page, problem: str) -> None:
    """Until the agent has taken its first reading, as its API tells."""
    page.wait(f"fetch('{node.url}v1/use').then(r => r.json()).then(u => u.problem === '{problem}')")


def test_the_use_of_cpus_and_memory_is_drawn(page: Page) -> None:
    """A CPU's mark, a NUMA node's line, and the words in the details."""
    machine = machines.snc_single()
    with page_node(machine) as node:
        tick(node.machine, dict.fromkeys(machine.online, 0), 1000)
        node.start_agent()
        visit(page, node)
        wait_for(node, page, "")
        tick(node.machine, dict.fromkeys(machine.online, 340), 2000)
        page.wait("document.querySelector('.use .spark') !== null")
        page.wait("document.querySelector('[data-numa=\"1\"] .use').textContent === 'Use34 %'")
        busy = "document.querySelector('[data-cpu=\"0\"]').style.getPropertyValue('--busy')"
        assert page.run(busy) == "34%"
        page.click('[data-numa="1"] h4 button')
        page.wait(f"{DETAILS}.includes('CPUs 34 % busy')")
        page.click('[data-cpu="0"]')
        page.wait(f"{DETAILS}.includes('34 % busy')")


def test_a_container_is_measured_when_somebody_asks(page: Page) -> None:
    """Where its memory is, and what it uses of its CPUs; or why that is not known."""
    with page_node(machines.snc_single()) as node:
        node.start_agent()
        node.create("own", cpus=2, memory_gib=1, policy="single-numa-node")
        page.open(node.url)
        page.wait(f"{LIVE} && {TITLE} === 'Containers (1)'")
        page.run("document.querySelector('#list tbody button').click()")
        page.wait("document.getElementById('measure') !== null")
        page.run("document.getElementById('measure').click()")
        page.wait(f"{DETAILS}.includes('Not measured: it has no cgroup that can be read')")

        (one,) = node.get("v1/assignments")["containers"]
        home, away = (0, 1) if one["numaNodes"] == "0" else (1, 0)
        node.make_cgroup(
            one["id"],
            {
                "cpu.stat": "usage_usec 1000\n",
                "memory.numa_stat": f"anon N{home}={3 << 20} N{away}={1 << 20}\nfile N0=0\n",
            },
        )
        page.run("document.getElementById('measure').click()")
        page.wait(f"{DETAILS}.includes('75 % on its own NUMA nodes')")
        text = page.run(DETAILS)
        assert f"3 MiB on NUMA {home}" in text
        assert f"1 MiB on NUMA {away}" in text
        assert "0 of 2 CPUs, 0 %" in text


def test_the_drawing_is_a_file_that_other_programs_can_read(page: Page) -> None:
    with page_bed(machines.snc_smt()) as bed:
        bed.populate()
        bed.create("<b>&'\"</b>", cpus=1, policy="single-numa-node")
        visit(page, bed)
        page.run(
            "window.kept = null; URL.createObjectURL = (blob) => { window.blob = blob;"
            " return 'blob:kept'; }; HTMLAnchorElement.prototype.click = function () {"
            " window.kept = this.download; }"
        )
        page.run("document.getElementById('keep').dispatchEvent(new MouseEvent('click'))")
        page.wait("window.kept === 'worker-7.example.org.svg'")
        tree = ElementTree.fromstring(page.run("window.blob.text()"))
        assert tree.tag == f"{SVG}svg"
        titles = [t.text or "" for t in tree.iter(f"{SVG}title")]
        for cpu in bed.agent.current.machine.topology.online:
            assert any(t.startswith(f"CPU {cpu}: ") for t in titles), cpu
        words = {t.text for t in tree.iter(f"{SVG}text")}
        assert {"NUMA 0", "NUMA 3", "Socket 1"} <= words
        assert not any(
            "href" in name or name.startswith("on") for e in tree.iter() for name in e.attrib
        )
