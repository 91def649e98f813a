"""The page for those who listen, use a keyboard, or hold a telephone."""

from collections.abc import Callable, Iterator

import pytest

from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.machine import Topology
from tests.beds.axe import axe_source, findings
from tests.beds.browser import DETAILS_TITLE, ROWS, STEPS, STICKING_OUT, Page, visit
from tests.beds.page_bed import PageBed, page_bed
from tests.machines import named as machines


@pytest.fixture(scope="session")
def axe() -> str:
    return axe_source()


@pytest.fixture
def bed() -> Iterator[PageBed]:
    """Two sockets, four NUMA nodes, and one of everything."""
    with page_bed(machines.snc_smt()) as made:
        made.populate()
        for n in range(4):
            made.create(f"full-{n}", cpus=2, policy="single-numa-node")
        made.create("wide-0", cpus=3, policy="best-effort")
        yield made


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_axe_finds_nothing(page: Page, bed: PageBed, axe: str, width: int, *, dark: bool) -> None:
    page.size(width, 900, dark=dark)
    visit(page, bed)
    page.run("document.getElementById('distances').open = true")
    assert findings(page, axe) == []
    page.run("document.querySelector('#list tbody button').click()")
    page.wait(f"{STEPS} >= 1 || document.querySelector('#details .summary')")
    assert findings(page, axe) == [], "with the details open"


def test_axe_finds_nothing_on_the_other_pages(page: Page, bed: PageBed, axe: str) -> None:
    page.open(f"{bed.url}remedies.html")
    page.wait("document.querySelectorAll('section').length > 10")
    assert findings(page, axe) == []


def test_single_node_sockets_stand_several_to_a_row(page: Page) -> None:
    """64 of them were 11,011 px tall."""
    with page_bed(build_synthetic_topology(sockets=64, numa_per_socket=1, cores_per_numa=4)) as bed:
        page.size(1280, 900)
        visit(page, bed)
        height = page.run("document.getElementById('map').offsetHeight")
        tops = page.run(
            "[...new Set([...document.querySelectorAll('.socket')].map(s => s.offsetTop))].length"
        )
        assert tops <= 13
        assert height < 2600
        page.size(360, 740)
        page.wait("document.getElementById('map').clientWidth < 360")
        assert page.run(STICKING_OUT) == 0
        assert page.run("document.documentElement.scrollWidth") <= 360
        lefts = "new Set([...document.querySelectorAll('.socket')].map(s => s.offsetLeft)).size"
        assert page.run(lefts) == 2


@pytest.mark.parametrize(
    "machine", [machines.snc_smt, machines.sixty_four_nodes], ids=lambda made: made.__name__
)
def test_fingers_hit_what_they_mean(page: Page, machine: Callable[[], Topology]) -> None:
    """24 by 24 px, as WCAG 2.2 asks (2.5.8); and nothing is hidden by the sheet that was tapped."""
    with page_bed(machine()) as bed:
        bed.populate()
        page.size(360, 740)
        visit(page, bed)
        small = page.run(
            "[...document.querySelectorAll('button, a, select, input, summary')]"
            ".filter(e => e.checkVisibility() && !e.closest('.hidden') && !e.matches('.skip'))"
            ".map(e => [e.getBoundingClientRect(), e])"
            ".filter(([r]) => r.width < 24 || r.height < 24)"
            ".map(([r, e]) => `${e.outerHTML.slice(0, 90)} ${r.width}x${r.height}`)"
        )
        assert small == []
        last = max(bed.agent.current.machine.topology.online)
        page.click(f'[data-cpu="{last}"]')
        page.wait(f"{DETAILS_TITLE} === 'CPU {last}'")
        below = page.run(
            f"document.querySelector('[data-cpu=\"{last}\"]').getBoundingClientRect().bottom"
        )
        sheet = page.run("document.getElementById('details').getBoundingClientRect().top")
        assert 0 < below <= sheet


def test_on_a_telephone_the_table_scrolls_with_the_page(page: Page) -> None:
    with page_bed(machines.snc_smt()) as bed:
        for n in range(150):
            bed.create(f"web-{n}", namespace="front", cpus=0.01)
        page.size(360, 740)
        visit(page, bed)
        rows = "document.querySelector('#containers .rows')"
        assert page.run(f"{rows}.scrollHeight <= {rows}.clientHeight + 1")
        assert page.run(ROWS) == 100
        page.run("scrollTo(0, document.documentElement.scrollHeight)")
        page.wait(f"{ROWS} === 150")


def test_a_screen_reader_has_names_for_the_parts(page: Page, bed: PageBed) -> None:
    visit(page, bed)
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    names = {
        (n["role"]["value"], n["name"]["value"])
        for n in tree
        if not n.get("ignored") and n.get("name", {}).get("value")
    }
    count = len(bed.agent.current.state.allocations)
    assert ("table", f"Containers ({count})") in names
    for numa_node in range(4):
        assert ("article", f"NUMA node {numa_node}") in names
    rows = {name for role, name in names if role == "rowheader"}
    assert any(name.endswith("wide-0") for name in rows)


def test_the_drawing_can_be_skipped(page: Page, bed: PageBed) -> None:
    visit(page, bed)
    for _ in range(12):
        page.press("Tab")
        if page.run("document.activeElement.textContent") == "Skip the drawing":
            break
    assert page.run("document.activeElement.className") == "skip"
    box = "document.activeElement.getBoundingClientRect()"
    assert page.run(f"{box}.left") >= 0, "it is seen while it has the focus"
    page.press("Enter")
    page.press("Tab")
    assert page.run("document.activeElement.closest('#refused, #containers') !== null")
