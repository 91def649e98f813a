"""What an operator sees at once: the node, who is not aligned, what was refused, what to do."""

import json
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from nri_numa.model.cpuset import CPUSet
from nri_numa.model.settings import Settings
from tests.beds.browser import (
    DETAILS,
    DETAILS_TITLE,
    MARKED,
    MORE,
    PODS,
    REJECTIONS,
    STEPS,
    Page,
    fill,
    label,
    press_button,
    visit,
)
from tests.beds.page_bed import PageBed, page_bed
from tests.machines import named as machines

FIGURES = "document.getElementById('figures').textContent"
SHOWN = "getComputedStyle(document.getElementById('details')).display !== 'none'"


@pytest.fixture
def bed() -> Iterator[PageBed]:
    """Two sockets, four NUMA nodes of eight CPUs; pods keep those of containers that end."""
    settings = Settings(reserved_cpus=CPUSet([0]), reservation_seconds=600.0)
    with page_bed(machines.snc_smt(), settings) as made:
        yield made


def test_the_node_is_named_first(page: Page, bed: PageBed) -> None:
    visit(page, bed)
    page.wait("document.getElementById('node').textContent === 'worker-7.example.org'")
    assert page.run("document.title") == "worker-7.example.org – nri-numa"
    assert page.run("document.getElementById('address').textContent") in bed.url


def test_exclusive_cpus_that_became_reserved_are_marked(page: Page, bed: PageBed) -> None:
    bed.create("own", cpus=2, policy="single-numa-node")
    visit(page, bed)
    page.wait(f"{PODS}.length === 1")
    assert not page.run("document.querySelector('#list tbody .wide')")
    (own,) = (a for a in bed.agent.current.state.allocations.values() if a.pod == "own")
    machine = bed.agent.current.machine
    bed.agent.current.machine = replace(
        machine, settings=replace(machine.settings, reserved_cpus=own.cpus)
    )
    bed.do(bed.agent.current.notify)
    page.wait("document.querySelector('#list tbody .wide')?.textContent === 'reserved'")
    for cpu in own.cpus:
        assert "became reserved later" in page.run(label(cpu))


def test_who_is_not_aligned(page: Page, bed: PageBed) -> None:
    """On a card, in the drawing, in the table, by a filter; and gone with the container."""
    bed.create("narrow", cpus=2, policy="single-numa-node")
    visit(page, bed)
    assert "Misaligned0" in page.run(FIGURES)
    for n in range(4):
        bed.create(f"full-{n}", cpus=4, policy="single-numa-node")
    bed.create("wide-0", cpus=6, policy="best-effort")
    (wide,) = (a for a in bed.agent.current.state.allocations.values() if a.pod == "wide-0")
    assert not wide.aligned
    page.wait(f"{FIGURES}.includes('Misaligned1')")
    for cpu in wide.cpus:
        assert "misaligned" in page.run(label(cpu))
    page.run(press_button("#figures button", "Show"))
    assert page.run(PODS) == [wide.pod]
    assert page.run("document.getElementById('filter').value") == "is:misaligned"
    assert page.run("document.querySelector('#list tbody .wide').textContent") == "misaligned"
    for numa_node in wide.numa_nodes:
        shown = f"document.querySelector('[data-numa=\"{numa_node}\"] button.wide')"
        assert page.run(f"{shown}.textContent") == "1 misaligned"
        assert not page.run(f"{shown}.hidden")
    page.run(fill("filter", "is:wider"))
    assert (page.run(PODS), page.run(MORE)) == ([], "is:wider is gone, expected is:misaligned.")
    page.run(fill("filter", ""))
    bed.do(lambda: bed.agent.stop_container(wide.container_id))
    page.wait(f"{FIGURES}.includes('Misaligned0')")
    assert "Containers5" in page.run(FIGURES), "as nri-numa status counts them"
    for cpu in wide.cpus:  # which are kept for its pod
        assert page.run(label(cpu)).endswith("exclusive to shop/wide-0, server")


def test_room_for_details_is_taken_when_something_is_chosen(page: Page, bed: PageBed) -> None:
    """At 1,280 px the table keeps all its columns, and what was clicked stays under the mouse."""
    bed.populate()
    page.size(1280, 900)
    visit(page, bed)
    assert not page.run(SHOWN)
    cut = (
        "[...document.querySelectorAll('#list thead th, #list td')]"
        ".filter(c => ['Namespace', 'Policy', 'CPUs', 'CPU list'].includes(c.dataset.label))"
        ".filter(c => c.scrollWidth > c.clientWidth).map(c => c.textContent)"
    )
    assert page.run(cut) == []
    where = "document.querySelector('[data-numa=\"2\"] h4 button').getBoundingClientRect().top"
    page.click('[data-numa="2"] h4 button')
    page.wait(f"{DETAILS_TITLE} === 'NUMA node 2'")
    assert page.run(SHOWN)
    assert 0 <= page.run(where) <= page.run("innerHeight")
    widths = page.run(
        "Object.fromEntries([...document.querySelectorAll('#list thead th')]"
        ".map(h => [h.dataset.name, h.offsetWidth]))"
    )
    assert [name for name, width in widths.items() if 0 < width < 50] == []
    assert {name for name, width in widths.items() if width == 0} <= {"Container", "Mems"}
    assert page.run("document.querySelector('#list thead').offsetHeight") < 50
    page.press("Escape")
    page.wait(f"!({SHOWN})")


@pytest.mark.parametrize("width", [760, 900, 1024, 1100, 1200, 1440, 1600, 1920, 2560])
def test_a_column_is_readable_or_not_there(page: Page, bed: PageBed, width: int) -> None:
    """Fixed widths of some columns leave nothing to the others, unless those go whole."""
    bed.populate()
    page.size(width, 900)
    visit(page, bed)
    shown = (
        "Object.fromEntries([...document.querySelectorAll('#list thead th')]"
        ".filter(h => h.offsetWidth).map(h => [h.dataset.name, h.offsetWidth]))"
    )
    for chosen in (False, True):
        if chosen:
            page.click('[data-numa="0"] h4 button')
            page.wait(SHOWN)
        widths = page.run(shown)
        assert {"Pod", "Namespace", "Kind", "CPUs", "CPU list"} <= widths.keys(), chosen
        assert widths["Pod"] >= 130, (chosen, widths)
        assert widths["CPU list"] >= 100, (chosen, widths)
        assert min(widths.values()) >= 50, (chosen, widths)


def test_what_somebody_else_pinned_is_found_by_its_cpus(page: Page, bed: PageBed) -> None:
    """It has no CPUs of ours, and still runs on some: the filter, the CPU and the drawing know."""
    bed.create("theirs", cpus=0.5, pinned="1-2")
    bed.create("anywhere", cpus=0.5)
    visit(page, bed)
    page.run(fill("filter", "cpu:1"))
    page.wait(f"{PODS}.join() === 'anywhere,theirs'")
    page.run(fill("filter", "cpu:3"))
    page.wait(f"{PODS}.join() === 'anywhere'")
    page.run(fill("filter", ""))
    page.click('[data-cpu="1"]')
    page.wait(f"{DETAILS}.includes('Containers that may run here (2)')")
    page.run(press_button("#list tbody button", "theirs"))
    page.wait(f"{MARKED}.join() === '1,2'")


def test_one_number_for_one_thing(page: Page, bed: PageBed) -> None:
    bed.populate()
    visit(page, bed)
    told = {
        page.run(
            f"[...document.querySelectorAll('{places}')].find(d => /shared pool/i"
            ".test(d.textContent)).querySelector('b').textContent"
        )
        for places in ("#figures div", "#legend li")
    }
    assert told == {str(len(bed.agent.current.desired.pool))}


def test_equal_rejections_are_one_and_lead_to_the_remedy(page: Page, bed: PageBed) -> None:
    for _ in range(3):
        bed.create("greedy", cpus=500, policy="restricted")
    bed.create("greedy-2", cpus=500, policy="restricted")
    bed.create("typo", numacpu="3-1")
    visit(page, bed)
    rows = page.run("[...document.querySelectorAll('#refusals li')].map(r => r.textContent)")
    assert len(rows) == 2
    (many,) = (row for row in rows if "greedy" in row)
    assert "×4, last" in many
    assert "and 1 more pod" in many
    page.run(press_button("#refusals a:not(.reason)", "typo"))
    page.wait(f"{DETAILS}.includes('Why it was rejected')")
    assert page.run("location.hash") == "#refused-shop/typo/server"
    remedy = page.run("document.querySelector('#details a.reason').href")
    assert remedy == f"{bed.url}remedies.html#invalidannotation"
    page.open(remedy)
    page.wait("document.querySelector('section:target h2')?.textContent === 'InvalidAnnotation'")
    text = page.run("document.querySelector('section:target').textContent")
    assert "What to do: correct what the message names" in text


def test_the_address_of_a_rejection_shows_it(page: Page, bed: PageBed) -> None:
    bed.create("greedy", cpus=500, policy="restricted")
    visit(page, bed, "#refused-shop/greedy/server")
    page.wait(f"{DETAILS}.includes('Why it was rejected')")
    page.wait(f"{STEPS} > 1")


@pytest.mark.parametrize(
    "fragment", ["refused-", "refused-a", "refused-%E0%A4%A", "refused-a/b/c/d"]
)
def test_an_address_of_nothing_shows_nothing(page: Page, bed: PageBed, fragment: str) -> None:
    visit(page, bed, f"#{fragment}")
    assert not page.run(SHOWN)


def test_an_agent_that_observes_would_have_rejected(page: Page, bed: PageBed) -> None:
    bed.agent.current.observe = True
    bed.create("greedy", cpus=500, policy="restricted")
    visit(page, bed)
    page.wait(f"{REJECTIONS}.includes('would have been rejected')")
    title = "document.getElementById('refused-title').textContent"
    assert page.run(title) == "Recently would have been rejected"
    page.run("document.querySelector('#refusals a:not(.reason)').click()")
    page.wait(f"{DETAILS}.includes('Why it would have been rejected')")
    bed.do(lambda: setattr(bed.agent.current, "observe", False))
    bed.do(bed.agent.current.notify)
    page.wait(f"{title} === 'Recent rejections'")
    assert "would have been rejected" in page.run(REJECTIONS), "it was not then, whatever is now"


def test_what_is_new_is_announced_politely(page: Page, bed: PageBed) -> None:
    visit(page, bed)
    said = "document.getElementById('said')"
    assert page.run(f"{said}.getAttribute('role')") == "status"
    bed.create("newcomer", policy="single-numa-node")
    bed.create("greedy", cpus=500, policy="restricted")
    page.wait(f"{said}.textContent.includes('New: shop/newcomer.')")
    assert "Rejected: shop/greedy, " in page.run(f"{said}.textContent")
    assert json.loads(page.run(f"JSON.stringify({said}.textContent)"))
