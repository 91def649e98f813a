"""The page of the cluster in a real browser."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beds.axe import axe_source, findings
from tests.beds.browser import STICKING_OUT, Page, fill
from tests.beds.cluster_page import ClusterPage, cluster_page
from tests.beds.objects import PREFIX, topology

HOSTILE = '<img src=x onerror="document.title=1">\u202e'
LIVE = "document.getElementById('link')?.textContent === 'controller: live'"
NAMES = "[...document.querySelectorAll('#machines > li')].map(li => li.dataset.node).join(' ')"
WORDS = "document.getElementById('machines').textContent"


@pytest.fixture
def bed() -> Iterator[ClusterPage]:
    with cluster_page() as made:
        made.tell(
            topology(8, 12, name="worker-1", zone={f"{PREFIX}/capacity-factor": "0.75"}),
            topology(3, 16, name="worker-2"),
            topology(1, 1, 1, 1, 1, 1, 1, 1, name="worker-3", of=32),
            {"metadata": {"name": "worker-4"}},
            drained={"worker-1": "0"},
        )
        yield made


def visit(page: Page, bed: ClusterPage, fragment: str = "") -> None:
    page.open(bed.url + fragment)
    page.wait(f"location.href.startsWith('{bed.url}') && {LIVE}")


def test_machines_are_shown_asked_and_kept_up_with(page: Page, bed: ClusterPage) -> None:
    visit(page, bed)
    assert page.run(NAMES) == "worker-1 worker-2 worker-3 worker-4"
    assert page.run("document.querySelectorAll('#machines .node').length") == 12
    words = page.run(WORDS)
    for part in ("drained", "factor 0.75", "no NodeResourceTopology object", "fragmentation 88 %"):
        assert part in words, words
    # A pod is asked about, with a real click.
    page.run("document.getElementById('cpus').value = '12'")
    page.click("#ask .primary")
    page.wait("document.querySelectorAll('.fit').length === 4")
    assert page.run(NAMES) == "worker-2 worker-1 worker-3 worker-4", "the best first"
    assert page.run("document.querySelectorAll('.node.chosen').length") == 2
    assert "needs 12 exclusive CPUs on one NUMA node; at most 1 free for exclusive use" in page.run(
        WORDS
    )
    assert "cpus=12" in page.run("location.hash")
    page.click("#fittingOnly")
    page.wait(f"{NAMES} === 'worker-2 worker-1'")
    # The cluster changes under the page; a name is only ever text.
    bed.tell(topology(2, 2, name="worker-2"), topology(16, name=HOSTILE))
    page.wait(f"{NAMES}.endsWith('worker-1') && {NAMES}.includes('img src')")
    assert page.run("document.title") == "nri-numa: cluster"
    bed.forget(HOSTILE)
    page.wait(f"{NAMES} === 'worker-1'")
    page.run("document.getElementById('memory').value = 'much'")
    page.click("#ask .primary")
    page.wait("document.getElementById('answer').textContent.startsWith('memory is')")
    page.click("#clear")
    page.wait(f"{NAMES} === 'worker-1 worker-2 worker-3 worker-4'")
    # The browser tells of the one answer 400, which was before this.
    page.errors[:] = [one for one in page.errors if "400" not in one]


def test_a_controller_that_goes_and_comes_is_told(page: Page, bed: ClusterPage) -> None:
    visit(page, bed)
    bed.hang_up()
    page.wait("document.body.classList.contains('stale')")
    assert "is lost" in page.run("document.getElementById('banners').textContent")
    bed.serve()
    page.wait(f"{LIVE} && !document.body.classList.contains('stale')")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_everybody_can_use_it(page: Page, bed: ClusterPage, width: int, *, dark: bool) -> None:
    page.size(width, 900, dark=dark)
    visit(page, bed, "#cpus=12&policy=restricted")
    page.wait("document.querySelectorAll('.fit').length === 4")
    assert page.run("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    assert page.run(STICKING_OUT) == 0
    assert page.run("document.documentElement.scrollWidth") <= width
    assert findings(page, axe_source()) == []


def test_five_thousand_nodes_are_one_picture(page: Page, bed: ClusterPage) -> None:
    """Sorted by what is free, fragmented or wrong; each square shows its node."""
    bed.tell(
        *(topology(16 - n % 9, 16, name=f"node-{n:04}", of=32) for n in range(4990)),
        topology(16, name="silent", attributes={f"{PREFIX}/agent-state": "not-ready"}),
        *({"metadata": {"name": f"new-{n}"}} for n in range(5)),
        drained={"worker-1": "0"},
    )
    visit(page, bed)
    squares = "[...document.querySelectorAll('#grid button')].map(s => s.dataset.node)"
    assert page.run(f"{squares}.length") == 5000
    assert page.run("document.querySelectorAll('#machines > li').length") == 24
    page.click("#more")
    page.wait("document.querySelectorAll('#machines > li').length === 48")
    page.run(fill("sort", "problems", "change"))
    page.wait(
        f"{squares}.slice(0, 8).join() === 'new-0,new-1,new-2,new-3,new-4,worker-4,silent,worker-1'"
    )
    page.run(fill("sort", "fragmentation", "change"))
    page.wait(f"{squares}[0] === 'worker-3'")
    page.run(fill("sort", "free", "change"))
    page.wait(f"{squares}[0] === 'node-0000'")
    # By hand: a square shows its node, also one that is far from the first.
    page.run("document.querySelector('[data-node=\"node-4444\"]').scrollIntoView()")
    page.click('[data-node="node-4444"]')
    page.wait(f"{NAMES} === 'node-4444' && {squares}.length === 5000")
    assert "node=node-4444" in page.run("location.hash")
    at = page.run(f"{squares}.indexOf('node-4444')")
    page.press("ArrowRight")
    page.press("Enter")
    page.wait(f"{NAMES} === {squares}[{at + 1}]")
    page.click("#all")
    page.wait("document.querySelectorAll('#machines > li').length === 24")
    page.run(fill("name", "node-0999"))
    page.wait(f"{NAMES} === 'node-0999' && document.getElementById('grid').hidden")


def test_what_is_not_well_is_a_link_to_it(page: Page, bed: ClusterPage) -> None:
    visit(page, bed)
    verdict = "document.getElementById('verdict').textContent"
    assert page.run(verdict) == (
        "Needs attention: no data from 1 node, NUMA nodes drained on 1 node"
    )
    page.click("#figures a")
    page.wait(f"{NAMES} === 'worker-4'")
    page.run(fill("state", "drained", "change"))
    page.wait(f"{NAMES} === 'worker-1'")
    for name in ("worker-1", "worker-3", "worker-4"):
        bed.forget(name)
    page.wait(f"{verdict} === 'All well'")


def test_each_node_leads_to_its_page_and_numbers_say_what_they_are(page: Page) -> None:
    with cluster_page(node_url="http://{address}:9891/#{node}") as bed:
        status = {"addresses": [{"type": "InternalIP", "address": "fd00::7"}]}
        bed.tell(topology(8, 12, name="worker/1"), {"metadata": {"name": "other"}})
        bed.tell({"metadata": {"name": "worker/1"}, "status": status})
        visit(page, bed)
        page.wait("document.querySelectorAll('#machines h3 a').length === 1")
        assert page.run("document.querySelector('#machines h3 a').href") == (
            "http://[fd00::7]:9891/#worker%2F1"
        )
        free = "[...document.querySelectorAll('#machines .free')].map(f => f.textContent)"
        assert page.run(free) == ["8 free", "32 GiB free", "12 free", "32 GiB free"]


def test_who_has_no_token_sees_nothing(page: Page, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    with cluster_page(token) as bed:
        bed.tell(topology(8, name="secret-node"))
        page.open(bed.url)
        page.wait(
            f"location.href === '{bed.url}' && document.getElementById('login')?.hidden === false"
        )
        assert "secret-node" not in page.run("document.documentElement.outerHTML")
        page.run("document.getElementById('token').value = 'another-one-0123456789'")
        page.click("#login .primary")
        problem = "document.getElementById('login-problem').textContent"
        page.wait(f"{problem}.includes('does not accept')")
        for given in ("0123456789abcdef0123456789abcdef", "changed-9876543210fedcba"):
            token.write_text(given)
            page.wait("document.getElementById('login').hidden === false")
            page.run(f"document.getElementById('token').value = '{given}'")
            page.click("#login .primary")
            page.wait(
                f"{LIVE} && {NAMES} === 'secret-node' && !document.getElementById('main').hidden"
            )
        page.open("about:blank")
        page.wait("location.href === 'about:blank'")
