"""The page in a real browser, over a real agent and its server on modelled machines."""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_numa.engine.desired import Drift, recorded_actual
from nri_numa.engine.state import Allocation
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import Topology
from nri_numa.model.settings import Settings
from tests.beds.browser import (
    BANNERS,
    CPUS,
    DETAILS,
    DETAILS_TITLE,
    LETTERS,
    LIST,
    LIVE,
    MARKED,
    NUMA_NODES,
    PODS,
    REJECTIONS,
    ROWS,
    SHAPES,
    STEPS,
    STICKING_OUT,
    Page,
    cell,
    fill,
    label,
    look,
    press_button,
    visit,
)
from tests.beds.page_bed import PageBed, page_bed
from tests.machines import named as machines

HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script>\x1b[31m\u202e'


@pytest.fixture
def bed() -> Iterator[PageBed]:
    """Two sockets, four NUMA nodes, 32 CPUs, and pods."""
    with page_bed(machines.snc_smt()) as made:
        made.populate()
        yield made


def of_pod(bed: PageBed, start: str) -> Allocation:
    """What the only container has of the pod whose name starts like that."""
    (one,) = [a for a in bed.agent.current.state.allocations.values() if a.pod.startswith(start)]
    return one


def reload(page: Page) -> None:
    page.run("window.isOld = true; location.reload()")
    page.wait(f"!window.isOld && {LIVE}")


# --- the drawing ------------------------------------------------------------------------------


def test_every_thread_is_drawn_and_tells_its_owner(page: Page, bed: PageBed) -> None:
    visit(page, bed)
    assert page.run("document.querySelectorAll('#map .socket').length") == 2
    assert page.run("document.querySelectorAll('#map .node').length") == 4
    assert page.run("document.querySelectorAll('#map .core').length") == 16
    assert page.run("document.querySelectorAll('#map .cpu').length") == 32
    exclusive = [a for a in bed.agent.current.state.allocations.values() if a.kind == "exclusive"]
    assert exclusive
    for allocation in exclusive:
        for cpu in allocation.cpus:
            assert f"exclusive to {allocation.namespace}/{allocation.pod}," in page.run(label(cpu))
    assert "reserved for the system" in page.run(label(0))


def test_threads_of_one_owner_look_alike_and_like_its_row(page: Page, bed: PageBed) -> None:
    visit(page, bed)
    looks = {}
    for allocation in bed.agent.current.state.allocations.values():
        if allocation.kind != "exclusive":
            continue
        key = f"document.querySelector('tr[data-id=\"{allocation.container_id}\"] .key')"
        seen = {page.run(look(cell(cpu))) for cpu in allocation.cpus} | {page.run(look(key))}
        assert len(seen) == 1
        looks[allocation.container_id] = seen.pop()
    assert len(set(looks.values())) == len(looks)


@pytest.mark.parametrize("size", ["large", "medium", "small"])
def test_states_differ_without_colour(page: Page, size: str) -> None:
    """What is left when every colour is taken away: textures, outlines and letters."""
    topology = machines.offline_cpus()
    first, *_, last = topology.online
    with page_bed(topology, Settings(reserved_cpus=CPUSet([first]))) as bed:
        bed.create("own", cpus=1, policy="single-numa-node", smt="isolate")
        bed.create("listed", cpus=0.5, numacpu=str(last), numamem="0")
        visit(page, bed)
        page.run(fill("density", size, "change"))
        shapes = page.run(SHAPES)
        page.run("localStorage.clear()")
        assert set(shapes) >= {"shared", "exclusive", "idle", "reserved", "offline", "listed"}
        assert len(set(shapes.values())) == len(shapes), shapes


def test_bars_tell_what_is_free_and_factors_and_distances_stand_there(page: Page) -> None:
    with page_bed(machines.huge_pages(), Settings(capacity_factor={0: 0.5})) as bed:
        visit(page, bed)
        bars = page.run(
            "[...document.querySelectorAll('[data-numa=\"0\"] .bar')]"
            ".map(b => b.getAttribute('aria-label'))"
        )
        text = page.run("document.querySelector('[data-numa=\"0\"]').textContent")
        assert [bar.partition(":")[0] for bar in bars][:2] == ["CPU", "Mem"]
        assert len(bars) > 2  # and every size of huge pages
        assert "capacity factor 0.5" in text
        rows = page.run(
            "[...document.querySelectorAll('.distances tr')].slice(1)"
            ".map(r => [...r.querySelectorAll('td')].map(c => +c.textContent))"
        )
        topology = bed.agent.current.machine.topology
        ids = list(topology.numa_ids)
        assert rows == [[topology.distance(a, b) for b in ids] for a in ids]


@pytest.mark.parametrize("width", [1440, 375])
@pytest.mark.parametrize(
    "machine",
    [
        machines.one_cpu,
        machines.sixteen_nodes,
        machines.sixty_four_nodes,
        machines.hybrid,
        machines.memory_only,
        machines.sparse_ids,
        machines.offline_cpus,
        machines.joined_sockets,
        machines.no_caches,
    ],
    ids=lambda made: made.__name__,
)
def test_each_sort_of_machine_fits(page: Page, machine: Callable[[], Topology], width: int) -> None:
    """No sideways scrolling, every CPU drawn once, every NUMA node there."""
    topology = machine()
    with page_bed(topology) as bed:
        bed.create("one", policy="single-numa-node")
        page.size(width, 900)
        visit(page, bed)
        assert page.run("document.documentElement.scrollWidth") <= width
        drawn = page.run(CPUS)
        assert sorted(drawn) == sorted(topology.online | (topology.present - topology.online))
        nodes = page.run(NUMA_NODES)
        assert sorted(nodes) == sorted(topology.numa_nodes)
        assert page.run(STICKING_OUT) == 0  # of its NUMA node


# --- keeping up -------------------------------------------------------------------------------


def test_others_keep_their_colour_when_somebody_comes_and_goes(page: Page, bed: PageBed) -> None:
    visit(page, bed)
    before = set(page.run(LETTERS))
    bed.create("aaa-first-in-order", policy="single-numa-node")
    page.wait(f"{LIST}.includes('aaa-first')")
    assert before <= set(page.run(LETTERS))


def test_a_lost_agent_is_said_and_found_again(page: Page, bed: PageBed) -> None:
    visit(page, bed)
    bed.hang_up()
    page.wait(f"{BANNERS}.includes('link to the agent is lost')")
    assert page.run("document.getElementById('link-agent').textContent") == "agent: link lost"
    assert "What you see is from" in page.run(BANNERS)
    page.size(1440, 300)
    page.run("scrollTo(0, document.body.scrollHeight)")
    assert page.run(
        "scrollY > 0 && document.getElementById('banners').getBoundingClientRect().top === 0"
    )
    bed.serve()
    page.run(press_button("#banners button", "Try now"))
    page.wait(f"{LIVE} && {BANNERS} === ''")
    bed.create("after", policy="single-numa-node")
    page.wait(f"{LIST}.includes('after')")


def test_a_runtime_that_does_not_answer_is_said(page: Page, bed: PageBed) -> None:
    visit(page, bed)
    bed.link = replace(
        bed.link, pending_registration="the runtime has not answered a call for 60 s"
    )
    bed.do(bed.agent.current.notify)
    page.wait(
        f"{BANNERS}.includes('The runtime has not answered a call for 60 s. If no container')"
    )
    assert "does not answer" in page.run("document.getElementById('link-runtime').textContent")
    bed.link = replace(bed.link, pending_registration="")
    bed.do(bed.agent.current.notify)
    page.wait(f"{BANNERS} === ''")


def differ(bed: PageBed, pod: str, cpus: CPUSet, *, given_up: bool = False) -> str:
    """The kernel says that a container has other CPUs; returns its id."""
    agent, one = bed.agent, of_pod(bed, pod)
    meant = CPUSet.parse(agent.current.cpus_of(one)) or agent.current.machine.topology.online
    others = agent.current.state.exclusive - (one.cpus if one.exclusive else CPUSet())
    wrong = Drift(
        container_id=one.container_id,
        pod=f"{one.namespace}/{one.pod}",
        container=one.container,
        cpus=meant,
        desired_cpus=meant,
        actual=recorded_actual(str(cpus), "", None),
        rank=0 if cpus & others else 2,
    )
    ids = [one.container_id]
    since = {one.container_id: time.time() - 12}
    bed.do(lambda: agent.drift.update_drift(ids, [wrong], since, ids if given_up else ()))
    return one.container_id


def test_what_is_not_as_meant_is_marked_in_words(page: Page, bed: PageBed) -> None:
    """In the drawing, in the table, in the details and on top; and gone when it is right again."""
    visit(page, bed)
    assert "is:drifted" in page.run("document.getElementById('filter').placeholder")
    agent = bed.agent
    owner = next(a for a in agent.current.state.allocations.values() if a.exclusive)
    web = of_pod(bed, "web-0")
    cpu = min(owner.cpus)
    meant = CPUSet.parse(agent.current.cpus_of(web))
    intruder = differ(bed, "web-0", meant | CPUSet([cpu]), given_up=True)
    page.wait(f"{BANNERS}.includes('1 container can run on exclusive CPUs of another one')")

    said = page.run(label(cpu))
    assert f"exclusive to {owner.namespace}/{owner.pod}, {owner.container}" in said
    assert "DRIFT: can be used by front/web-0, server" in said
    assert page.run(f"{cell(cpu)}.textContent").endswith("!")
    marked = page.run("document.querySelectorAll('#map .wrong').length")
    assert marked == 1

    assert page.run(
        "document.querySelector('#figures').textContent.includes('1 on exclusive CPUs of others')"
    )
    page.run(press_button("#banners button", "Show"))
    assert page.run(PODS) == ["web-0"]
    row = page.run(f"document.querySelector('tr[data-id=\"{intruder}\"]').textContent")
    assert f"! desired {meant}, actual {meant | CPUSet([cpu])}" in row

    page.run(press_button("#list tbody button", "web-0"))
    told = page.run("document.getElementById('differs').textContent")
    assert f"desired {meant}, actual {meant | CPUSet([cpu])} since 1" in told
    assert f"on exclusive CPUs of {owner.full_name}" in told
    assert "because another program rewrites it" in told
    page.wait(f"{DETAILS}.includes('At present')")

    page.run(f"{cell(cpu)}.click()")
    assert "Can run here and should not (1)" in page.run(DETAILS)
    page.run(fill("filter", f"cpu:{cpu}"))
    assert {"web-0", owner.pod} <= set(page.run(PODS)), "who can run there, not who should"
    page.run(fill("filter", ""))

    bed.do(lambda: agent.drift.remove_repaired(intruder))
    page.wait(f"{BANNERS} === '' && !document.querySelector('#map .wrong')")
    assert "DRIFT" not in page.run(label(cpu))
    assert "meant" not in page.run(LIST)


def test_an_owner_that_lacks_a_cpu_is_marked_there(page: Page, bed: PageBed) -> None:
    visit(page, bed)
    owner = next(
        a for a in bed.agent.current.state.allocations.values() if a.exclusive and len(a.cpus) > 1
    )
    cpu = max(owner.cpus)
    differ(bed, owner.pod, owner.cpus - CPUSet([cpu]))
    page.wait("document.querySelectorAll('#map .wrong').length === 1")
    assert f"cannot be used by {owner.namespace}/{owner.pod}" in page.run(label(cpu))
    assert page.run(BANNERS) == "", "nobody is disturbed"
    page.run(fill("filter", "is:drifted"))
    assert page.run(PODS) == [owner.pod]


def test_a_tab_that_is_older_than_the_agent_offers_to_reload(page: Page, bed: PageBed) -> None:
    visit(page, bed)
    bed.hang_up()
    bed.version = "0.2.0"
    bed.serve()
    page.wait(f"{BANNERS}.includes('The agent was upgraded')")
    page.run(f"setTimeout(() => {press_button('#banners button', 'Reload')})")
    page.wait(
        f"{LIVE} && {BANNERS} === '' && document.getElementById('version').textContent === '0.2.0'"
    )


def test_an_answer_the_page_does_not_know_is_said_and_not_silent(page: Page, bed: PageBed) -> None:
    """A page of another version than the agent's must not stand there half drawn."""
    visit(page, bed)
    page.run(
        "(f => { window.fetch = (path, o) =>"
        " f(String(path).endsWith('assignments') ? 'v1/rejections' : path, o); })(fetch)"
    )
    bed.create("next", policy="single-numa-node")
    page.wait(f"{BANNERS}.includes('does not understand')")
    page.errors.clear()


def test_a_guarded_agent_asks_for_its_token(page: Page, tmp_path: Path) -> None:
    """And asks again where it was changed."""
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    with page_bed(machines.dual_no_smt(), token_file=str(token)) as bed:
        page.open(bed.url)
        page.wait("document.getElementById('login')?.hidden === false")
        page.wait("document.activeElement?.id === 'token'")
        page.type("wrong-token-entirely")
        page.press("Enter")
        page.wait(
            "document.getElementById('login-problem').textContent.includes('does not accept')"
        )
        page.wait("document.activeElement?.id === 'token'")
        page.type("0123456789abcdef")
        page.press("Enter")
        page.wait(LIVE)
        assert page.run("document.cookie + JSON.stringify(localStorage)") == "{}"
        reload(page)
        assert page.run("document.getElementById('login').hidden")
        token.write_text("another token of length")
        bed.create("next", policy="single-numa-node")
        page.wait("document.getElementById('login').hidden === false")
        assert page.run("document.getElementById('main').hidden")


# --- why --------------------------------------------------------------------------------------


def test_a_click_on_a_cpu_a_numa_node_or_a_container_explains_it(page: Page, bed: PageBed) -> None:
    visit(page, bed)
    train = of_pod(bed, "train-0-")
    page.click(f"#list tr[data-id='{train.container_id}'] button")
    page.wait(f"{DETAILS}.includes({json.dumps(train.reason)})")
    page.wait(f"{STEPS} > 3")
    marked = page.run(MARKED)
    assert sorted(marked) == list(train.cpus)
    page.run("document.getElementById('close').click()")
    page.click(f'[data-cpu="{train.cpus.first_id}"]')
    page.wait(f"{DETAILS_TITLE} === 'CPU {train.cpus.first_id}'")
    page.wait(f"{STEPS} > 3")
    assert "train-0-" in page.run(DETAILS)
    page.click('[data-numa="1"] h4 button')
    page.wait(f"{DETAILS_TITLE} === 'NUMA node 1'")
    assert page.run(
        "document.querySelector('[data-numa=\"2\"] .badge').textContent"
    ) == "distance " + str(bed.agent.current.machine.topology.distance(1, 2))


def test_an_explanation_follows_its_container_and_outlives_it(page: Page, bed: PageBed) -> None:
    visit(page, bed)
    train = of_pod(bed, "train-0-")
    page.click(f"#list tr[data-id='{train.container_id}'] button")
    page.wait(f"{STEPS} > 3")
    bed.do(lambda: bed.agent.stop_container(train.container_id))
    page.wait(f"{DETAILS}.includes('It is gone')")
    assert train.pod in page.run(f"{DETAILS_TITLE}")


def test_rejections_stand_there_with_their_reasons(page: Page, bed: PageBed) -> None:
    visit(page, bed)
    text = page.run(REJECTIONS)
    assert bed.agent.history.rejections
    for rejection in bed.agent.history.rejections:
        assert rejection.reason in text
        assert rejection.message in text
    page.click("#refusals li a:not(.reason)")
    page.wait(f"{DETAILS}.includes('Why it was rejected')")
    page.wait(f"{STEPS} > 1")


def test_the_address_remembers_what_was_chosen(page: Page, bed: PageBed) -> None:
    visit(page, bed, "#cpu-2")
    page.wait(f"{DETAILS_TITLE} === 'CPU 2'")


# --- hands ------------------------------------------------------------------------------------


def test_everything_can_be_reached_by_keyboard(page: Page, bed: PageBed) -> None:
    visit(page, bed)
    focused = "document.activeElement.dataset.cpu"
    page.press("Tab")
    assert page.run("document.activeElement.className") == "skip"
    for _ in range(30):
        page.press("Tab")
        if page.run(focused) is not None:
            break
    begin = page.run(focused)
    assert begin is not None
    page.press("ArrowRight")
    page.press("ArrowDown")
    below = page.run(focused)
    assert below not in (None, begin)
    outline = page.run("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.press("Enter")
    page.wait(f"{DETAILS_TITLE} === 'CPU {below}'")
    assert page.run(focused) == below  # focus stays where the hands are
    page.press("Escape")
    page.wait(f"{DETAILS_TITLE} === 'Details'")
    page.press("ArrowUp")
    page.press("ArrowLeft")
    assert page.run(focused) == begin
    page.press("End")
    page.press("Tab")  # all CPUs are one stop: the next one is beyond them
    assert page.run(focused) is None


def test_the_table_is_one_stop_and_enter_explains_a_row(page: Page, bed: PageBed) -> None:
    visit(page, bed)
    page.run("document.getElementById('filter').focus()")
    page.press("Tab")
    for _ in range(12):  # past the head's buttons
        if page.run("document.activeElement.closest('tbody') !== null"):
            break
        page.press("Tab")
    page.press("ArrowDown")
    row = page.run("document.activeElement.closest('tr').dataset.id")
    chosen = bed.agent.current.state.allocations[row]
    page.press("Enter")
    page.wait(f"{DETAILS_TITLE}.includes('{chosen.pod}')")
    bed.create("another", policy="single-numa-node")
    page.wait(f"{LIST}.includes('another')")
    assert page.run("document.activeElement.closest('tr').dataset.id") == row


SORT = "document.querySelector('th[data-name={}]').getAttribute('aria-sort')"


def test_rows_are_sorted_and_filtered(page: Page, bed: PageBed) -> None:
    visit(page, bed)
    by_pod = page.run(PODS)
    assert [p for p in by_pod if p.startswith("train")] == [
        f"train-{n}-7d4b9c6f5d-x2x1{n}" for n in range(8)
    ]
    page.run(press_button("#list th button", "Pod"))
    assert page.run(PODS) == by_pod[::-1]
    assert page.run(SORT.format("Pod")) == "descending"
    page.run(press_button("#list th button", "CPUs"))
    assert page.run(SORT.format("CPUs")) == "ascending"
    page.run("document.getElementById('filter').focus()")
    page.type("train-3 single")
    page.wait(f"{ROWS} === 1")
    page.run(fill("filter", "cpu:1"))
    expected = {
        a.pod
        for a in bed.agent.current.state.allocations.values()
        if a.kind in ("exclusive", "listed") and 1 in a.cpus
    }
    assert expected <= set(page.run(PODS))
    page.run(fill("filter", ""))
    page.run(press_button("#kinds button", "shared"))
    assert set(page.run(PODS)) == {f"web-{n}" for n in range(6)}
    page.run(fill("filter", "nobody"))
    assert "No container matches" in page.run("document.getElementById('more').textContent")


def test_light_and_dark_follow_the_browser_until_told(page: Page, bed: PageBed) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    page.size(1440, 900, dark=True)
    visit(page, bed)
    dark = page.run(colour)
    page.size(1440, 900, dark=False)
    page.wait(f"{colour} !== '{dark}'")
    light = page.run(colour)
    page.run("theme.click()")
    page.run("theme.click()")
    assert page.run("theme.textContent") == "Theme: dark"
    assert page.run(colour) == dark
    reload(page)
    assert page.run(colour) == dark
    page.run("theme.click()")
    assert page.run(colour) == light
    assert page.run("localStorage.length") == 0


# --- bad input --------------------------------------------------------------------------------


STRANGE = HOSTILE + "\n\0\ufffe\u200b&amp;]]>'\"--></title>"
SEEN = """(() => {
  const said = [document.title, document.body.innerText];
  for (const one of document.querySelectorAll("*")) {
    for (const at of one.attributes) said.push(at.value);
  }
  return said.join(" ");
})()"""
KEPT = """(async () => {
  const { picture } = await import("./picture.js");
  const file = picture(document.querySelector("#map"), NAME);
  const made = new DOMParser().parseFromString(file, "image/svg+xml");
  const names = [...made.querySelectorAll("*")].flatMap((one) => one.getAttributeNames());
  return [made.querySelectorAll("parsererror, script, img, b").length,
    names.filter((name) => /^on|href/.test(name)).length,
    made.querySelectorAll("title").length];
})()"""


@pytest.mark.parametrize("width", [1440, 375])
def test_hostile_names_stay_text_in_all_that_opens(page: Page, bed: PageBed, width: int) -> None:
    """Details, remedies, tooltips, the title and the drawing that is kept as a file."""
    bed.create(STRANGE, STRANGE, namespace=STRANGE, policy="single-numa-node")
    bed.create("x" * 253, STRANGE, policy="single-numa-node")
    bed.create("wide " + STRANGE, STRANGE, cpus=500, policy="restricted")
    for key in ("numacpu", "policy", STRANGE):
        bed.create(f"{key} {STRANGE}", STRANGE, **{key: STRANGE})
    page.size(width, 900)
    visit(page, bed)
    page.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    for row in range(int(page.run("document.querySelectorAll('#list tbody button').length"))):
        page.run(f"document.querySelectorAll('#list tbody button')[{row}]?.click()")
        page.wait(f"{STEPS} > 0")
        page.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        seen = page.run(SEEN)
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e]", seen)
        assert "\\u{1b}" in seen
        assert "\\u{202e}" in seen
        assert page.run("document.documentElement.scrollWidth") <= width
    bed.create("..", "..", namespace="..", policy="single-numa-node")
    page.wait(f"{PODS}.includes('..')")
    page.run(press_button("#list tbody button", ".."))
    page.wait(f"{DETAILS}.includes('exclusive CPU')")
    assert page.run("document.title").endswith("– nri-numa")
    assert page.run("document.querySelectorAll('img, #main script').length") == 0
    errors, active, titles = page.run(KEPT.replace("NAME", json.dumps(STRANGE)))
    assert (errors, active) == (0, 0)
    assert titles > 1


def test_nothing_foreign_is_loaded_and_no_code_can_be_injected(page: Page, bed: PageBed) -> None:
    visit(page, bed)
    page.click('[data-cpu="2"]')
    page.wait(f"{STEPS} > 3")
    assert len(page.requests) > 6
    assert [u for u in page.requests if not u.startswith(bed.url)] == []
    entries = page.run("performance.getEntriesByType('resource').map(r => r.name)")
    assert [u for u in entries if not u.startswith(bed.url)] == []
    page.run(
        "(s => { s.textContent = 'document.title = 1'; document.body.append(s); })"
        "(document.createElement('script'))"
    )
    page.run("document.body.setAttribute('onclick', 'document.title = 2'); document.body.click()")
    assert page.run("document.title").endswith("– nri-numa")
    rejected = [e for e in page.errors if "Content Security Policy" in e]
    assert rejected
    page.errors.clear()
