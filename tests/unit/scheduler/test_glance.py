"""The cheap look says what the engine says, or nothing."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from nri_numa.engine.values.settings import Settings
from nri_numa.engine.values.workload import Strategy
from nri_numa.scheduler.glance import glance_of
from nri_numa.scheduler.judge import judge
from nri_numa.scheduler.pods import Reader
from nri_numa.scheduler.published import Table, read
from nri_numa.scheduler.scoring import graded
from nri_numa.scheduler.verdict import Fits, Short
from nri_numa.scheduler.wish import Wish
from tests.unit.scheduler.objects import PREFIX, container, pod, single, table, topology

_ZONE = {
    f"{PREFIX}/threads-per-core": "2",
    f"{PREFIX}/capacity-factor": "0.7",
}


def wish(document: object) -> Wish:
    assert isinstance(document, dict)
    return Reader(Settings()).wish(document)


@settings(max_examples=500)
@given(
    free=st.lists(st.integers(0, 16), min_size=1, max_size=4),
    memory=st.lists(st.integers(0, 32), min_size=4, max_size=4),
    cpu=st.sampled_from(["1", "3", "4", "8", "17", "500m", "2500m", ""]),
    gib=st.sampled_from(["", "1Gi", "8Gi", "40Gi"]),
    pages=st.booleans(),
    asks=st.fixed_dictionaries(
        {"policy": st.sampled_from(["single-numa-node", "restricted", "best-effort"])},
        optional={
            "cpus": st.just("exclusive"),
            "smt": st.sampled_from(["isolate", "full-core", "any"]),
            "on-failure": st.sampled_from(["reject", "widen", "unpinned"]),
            "bind": st.just("cpu"),
        },
    ),
    strategy=st.sampled_from(Strategy),
    kubelet=st.sampled_from(["none", "single-numa-node", "best-effort"]),
)
def test_it_says_what_the_engine_says(
    free: list[int], memory: list[int], cpu: str, gib: str, pages: bool, asks: dict[str, str],
    strategy: Strategy, kubelet: str,
) -> None:  # fmt: skip
    one = container(cpu=cpu, memory=gib)
    if pages:
        for amounts in one["resources"].values():
            amounts["hugepages-2Mi"] = "4Mi"
    document = wish(pod(one, **asks))
    room = table(*free, memory=memory, zone=_ZONE, attributes={"topologyManagerPolicy": kubelet})
    if document.nothing or document.wrong:
        return
    glance = glance_of(document, strategy)
    if glance is None:
        return
    verdict = judge(room, document, strategy)
    expected = verdict if isinstance(verdict, Short) else graded(verdict, strategy)
    assert glance.look(room) in (None, expected)
    assert glance.grades([room, room]) in ([None, None], [expected, expected])


@settings(max_examples=500)
@given(
    nodes=st.lists(
        st.tuples(
            st.integers(0, 16), st.integers(0, 3), st.integers(0, 3), st.sampled_from((3, 4)),
            st.integers(0, 4), st.integers(0, 1 << 34),
        ),
        min_size=1, max_size=4,
    ),
    cpus=st.integers(1, 17),
    mib=st.sampled_from((1, 100, 1024, 3 << 10, 5 << 10)),
    exclusive=st.booleans(),
    smt=st.sampled_from(("any", "isolate", "full-core")),
    strategy=st.sampled_from(Strategy),
)  # fmt: skip
def test_what_is_prepared_says_what_the_engine_says(
    nodes: list[tuple[int, int, int, int, int, int]], cpus: int, mib: int, exclusive: bool,
    smt: str, strategy: Strategy,
) -> None:  # fmt: skip
    """NUMA nodes of other sizes, and as near to each other as there are bytes."""
    document = topology(*[n for n, *_ in nodes], zone=_ZONE)
    for zone, (free, idle, rounds, gib, quarters, odd) in zip(
        document["zones"], nodes, strict=True
    ):
        there = gib << 30 if rounds else (gib << 30) - odd % (1 << 28)
        left = there * quarters // 4 if rounds > 1 else odd % (there + 1)
        zone["resources"] = [
            {"name": "cpu", "allocatable": str(16 + idle), "available": str(free)},
            {"name": "memory", "allocatable": str(there), "available": str(left)},
        ]
    room = read(document, PREFIX)
    assert isinstance(room, Table)
    asks = {"policy": "best-effort", **({"cpus": "exclusive", "smt": smt} if exclusive else {})}
    found = wish(pod(container(cpu=str(cpus), memory=f"{mib}Mi"), **asks))
    if found.wrong:
        return
    glance = glance_of(found, strategy)
    assert glance is not None
    (grade,) = glance.grades([room])
    if grade is not None:
        verdict = judge(room, found, strategy)
        assert isinstance(verdict, Fits)
        assert grade == graded(verdict, strategy)


def test_it_decides_what_most_pods_ask_for() -> None:
    """Or the engine would be asked about every node."""
    document = wish(single(6, memory="4Gi"))
    glance = glance_of(document, Strategy.SPREAD)
    assert glance is not None
    assert isinstance(glance.look(table(8, 4)), int)
    # Of several with room one is clearly the emptier, and with equal ones it is the first.
    for free in ((8, 4), (16, 12), (9, 9), (12, 16, 16)):
        assert glance.grades([table(*free)]) == [glance.look(table(*free))]
    found = glance.look(table(4, 4))
    assert isinstance(found, Short)
    assert found.text(4) == "needs 6 exclusive CPUs on one NUMA node; most free: 4"
    apart = glance.look(table(8, 4, memory=(1, 32)))
    assert isinstance(apart, Short)
    assert apart.apart
