"""The page on large machines, on wide and narrow windows: nothing vanishes, nothing jumps."""

import re
from collections.abc import Iterator

import pytest

from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.cpuset import CPUSet
from tests.beds.browser import DETAILS, DETAILS_TITLE, PODS, STEPS, Page, cell, fill, visit
from tests.beds.page_bed import PageBed, page_bed
from tests.machines import named as machines

SINGLE = "single-numa-node"
LAYOUT = (
    "(m => JSON.stringify([...m.querySelectorAll('.cpu')].map(c => c.getBoundingClientRect())"
    ".map(r => [r.left - m.offsetLeft, r.top - m.getBoundingClientRect().top, r.width]"
    ".map(n => Math.round(4 * n)))))(document.getElementById('map'))"
)
HOT = "[...document.querySelectorAll('#list tr.hot')].map(r => r.querySelector('bdi').textContent)"
VERDICT = "document.getElementById('verdict').textContent"


@pytest.fixture(scope="module")
def crowded() -> Iterator[PageBed]:
    """64 NUMA nodes with 100 exclusive pods, and others that share."""
    with page_bed(
        build_synthetic_topology(sockets=8, numa_per_socket=8, cores_per_numa=8, memory_gib=32)
    ) as bed:
        for n in range(100):
            bed.create(f"train-{n}", cpus=(2, 4, 6, 8)[n % 4], policy=SINGLE)
        for n in range(9):
            bed.create(f"web-{n}", namespace="front", cpus=0.5, policy="best-effort")
        yield bed


@pytest.mark.parametrize("width", [1440, 2560])
def test_a_hundred_owners_can_be_told_apart(page: Page, crowded: PageBed, width: int) -> None:
    """Each CPU shows its letter, and on no NUMA node two owners have one look."""
    page.size(width, 1000)
    visit(page, crowded)
    owned = "[...document.querySelectorAll('#map .cpu.exclusive')]"
    assert page.run(
        f"{owned}.every(c => c.lastChild.offsetWidth && c.lastChild.offsetHeight <= c.offsetHeight)"
    )
    alike = (
        "[...document.querySelectorAll('.node')].filter(n => {"
        " const looks = new Map([...n.querySelectorAll('.cpu.exclusive')]"
        "  .map(c => [c.lastChild.textContent, c.dataset.dress]));"
        " return new Set(looks.values()).size < looks.size; }).length"
    )
    assert page.run(alike) == 0


def test_row_and_cpus_show_each_other(page: Page, crowded: PageBed) -> None:
    visit(page, crowded)
    one = next(a for a in crowded.agent.current.state.allocations.values() if a.pod == "train-3")
    first = min(one.cpus)
    at = page.run(f"(r => [r.x + 3, r.y + 3])({cell(first)}.getBoundingClientRect())")
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1])
    page.wait(f"{HOT}.join() === 'train-3'")
    assert "shop/train-3, server" in page.run("document.getElementById('tip').textContent")
    marked = "[...document.querySelectorAll('#map .marked')].map(c => +c.dataset.cpu)"
    assert page.run(f"{marked}.sort((a, b) => a - b)") == list(one.cpus)
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    page.wait(f"{HOT}.length === 0 && {marked}.length === 0")
    page.run(f"document.querySelector('tr[data-id=\"{one.container_id}\"] button').focus()")
    page.wait(f"{marked}.length === {len(one.cpus)}")


def test_a_numa_node_is_seen_large_with_numbers_and_names(page: Page, crowded: PageBed) -> None:
    visit(page, crowded)
    page.click('[data-numa="9"] h4 button')
    page.wait(f"{DETAILS_TITLE} === 'NUMA node 9'")
    node = crowded.agent.current.machine.topology.numa_nodes[9]
    large = "[...document.querySelectorAll('.zoom .cpu')]"
    assert sorted(page.run(f"{large}.map(c => +c.firstChild.textContent)")) == list(node.cpus)
    assert page.run(f"{large}.every(c => c.firstChild.offsetHeight > 8 && c.offsetWidth >= 30)")
    letters = page.run(f"[...new Set({large}.map(c => c.lastChild.textContent).filter(Boolean))]")
    keys = page.run("[...document.querySelectorAll('#details .key')].map(k => k.textContent)")
    assert set(letters) == set(keys)
    assert re.search(r" free, \d+ for exclusive use", page.run(DETAILS))


def test_who_shares_is_in_the_drawing(page: Page, crowded: PageBed) -> None:
    visit(page, crowded)
    sharing = "[...document.querySelectorAll('.sharing')].filter(s => !s.hidden)"
    assert page.run(f"{sharing}.reduce((sum, s) => sum + parseInt(s.textContent), 0)") == 9
    assert page.run(f"{sharing}.every(s => s.textContent.includes('sharing: web-'))")
    count = page.run(f"(s => {{ s.click(); return parseInt(s.textContent); }})({sharing}[0])")
    page.wait(f"{PODS}.length === {count} && {PODS}.every(p => p.startsWith('web-'))")


def test_paper_has_all_rows_and_what_a_screen_unfolds(page: Page, crowded: PageBed) -> None:
    """Rows that scrolling would bring; CPUs, pods and headings are buttons on a screen."""
    page.size(1440, 900, dark=True)
    visit(page, crowded)
    page.run(f"addEventListener('beforeprint', () => {{ window.printed = {PODS}.length; }})")
    page.call("Page.printToPDF")
    assert page.run("window.printed") == 109
    page.call("Emulation.setEmulatedMedia", media="print")
    try:
        for what in ("#map .cpu", "#list tbody .plain", "#list thead .plain", ".node h4 button"):
            assert page.run(f"document.querySelector('{what}').offsetHeight"), what
        assert not page.run("document.getElementById('theme').offsetHeight")
        assert page.run("getComputedStyle(document.body).colorScheme") == "light"
    finally:
        page.call("Emulation.setEmulatedMedia", media="")


@pytest.mark.parametrize("width", [1440, 2560, 375])
def test_choosing_moves_and_hides_nothing(page: Page, crowded: PageBed, width: int) -> None:
    page.size(width, 900)
    visit(page, crowded)
    before = page.run(LAYOUT)
    for numa_node in (9, 15):
        page.click(f'[data-numa="{numa_node}"] h4 button')
        page.wait(f"{DETAILS_TITLE} === 'NUMA node {numa_node}'")
        assert page.run(LAYOUT) == before
        node, details = (
            page.run(f"(r => [r.left, r.top, r.right, r.bottom])({e}.getBoundingClientRect())")
            for e in (
                f"document.querySelector('[data-numa=\"{numa_node}\"] h4')",
                "document.getElementById('details')",
            )
        )
        apart = node[2] <= details[0] or details[2] <= node[0] or node[3] <= details[1]
        assert apart, (node, details)
        page.press("Escape")


def test_the_sheet_of_a_telephone_does_not_cover_the_row(page: Page, crowded: PageBed) -> None:
    page.size(375, 800)
    visit(page, crowded)
    page.run("document.querySelectorAll('#list tbody tr')[3].scrollIntoView({block: 'end'})")
    # On the row, but not on its name.
    page.click("#list tbody tr:nth-child(4) td[data-label='CPU list']")
    page.wait(f"{STEPS} >= 1")
    bottom = page.run("document.querySelector('#list tr.chosen').getBoundingClientRect().bottom")
    assert 0 < bottom <= page.run("document.getElementById('details').getBoundingClientRect().top")


@pytest.mark.parametrize("width", [1440, 2560])
@pytest.mark.parametrize("offline", ["", "31"])
def test_four_numa_nodes_fill_the_window(page: Page, width: int, offline: str) -> None:
    with page_bed(machines.snc_smt(cores_per_numa=8, offline=CPUSet.parse(offline))) as bed:
        page.size(width, 1300)
        visit(page, bed)
        shares = page.run(
            "[...document.querySelectorAll('.node .cores')].map(c => c.offsetWidth"
            " / c.closest('.node').clientWidth)"
        )
        assert min(shares) > 0.6
        nodes = page.run(
            "[...document.querySelectorAll('.node')].reduce((sum, n) => sum + n.clientWidth, 0)"
        )
        assert nodes > 0.8 * width


def test_one_line_says_whether_all_is_well(page: Page) -> None:
    with page_bed(machines.snc_smt()) as bed:
        visit(page, bed)
        assert page.run(VERDICT) == "All well"
        for n in range(4):
            bed.create(f"full-{n}", cpus=4, policy=SINGLE)
        bed.create("wide", cpus=6, policy="best-effort")
        bed.create("greedy", cpus=500, policy="restricted")
        page.wait(f"{VERDICT} === 'Needs attention: 1 rejection, 1 container misaligned'")
        page.run("document.querySelector('#verdict a').click()")
        page.wait("document.activeElement.id === 'refused' || location.hash === '#refused'")
        page.run("[...document.querySelectorAll('#verdict a')][1].click()")
        page.wait(f"{PODS}.join() === 'wide'")


def test_columns_that_say_the_same_are_one_line(page: Page) -> None:
    with page_bed(machines.snc_smt()) as bed:
        for n in range(3):
            bed.create(f"db-{n}", cpus=1 + n, policy=SINGLE)
        visit(page, bed)
        head = "[...document.querySelectorAll('#list thead th')].filter(h => h.offsetWidth)"
        names = f"{head}.map(h => h.dataset.name).join()"
        same = "document.getElementById('same').textContent"
        assert page.run(names) == "Pod,CPUs,CPU list,Mems,Age"
        assert page.run(same) == (
            f"All of these: namespace shop · container server · kind exclusive · policy {SINGLE}"
        )
        bed.create("web", namespace="front", cpus=0.5, policy="best-effort")
        page.wait(f"{same} === 'All of these: container server'")
        page.run(fill("filter", "web"))
        page.wait(f"{PODS}.join() === 'web' && {same} === ''")
