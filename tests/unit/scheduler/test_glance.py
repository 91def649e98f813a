"""The cheap look says what the engine says, or nothing."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from nri_numa.engine.values.settings import Settings
from nri_numa.engine.values.workload import Strategy
from nri_numa.scheduler.glance import glance_of
from nri_numa.scheduler.judge import judge
from nri_numa.scheduler.pods import Reader
from nri_numa.scheduler.scoring import score
from nri_numa.scheduler.verdict import Short
from nri_numa.scheduler.wish import Wish
from tests.unit.scheduler.objects import PREFIX, container, pod, single, table

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
    found = glance.look(room) if glance is not None else None
    if found is None:
        return
    verdict = judge(room, document, strategy)
    assert found == (verdict if isinstance(verdict, Short) else score(verdict, strategy))


def test_it_decides_what_most_pods_ask_for() -> None:
    """Or the engine would be asked about every node."""
    document = wish(single(6, memory="4Gi"))
    glance = glance_of(document, Strategy.SPREAD)
    assert glance is not None
    assert isinstance(glance.look(table(8, 4)), int)
    found = glance.look(table(4, 4))
    assert isinstance(found, Short)
    assert found.text(4) == "needs 6 exclusive CPUs on one NUMA node; most free: 4"
    apart = glance.look(table(8, 4, memory=(1, 32)))
    assert isinstance(apart, Short)
    assert apart.apart


def test_containers_that_are_placed_one_after_another_are_the_engines() -> None:
    document = wish(
        pod(container("a", cpu="1"), container("b", cpu="2"), policy="single-numa-node")
    )
    assert glance_of(document, Strategy.SPREAD) is None
    wide = wish(single(12, policy="restricted"))
    glance = glance_of(wide, Strategy.SPREAD)
    assert glance is not None
    assert glance.look(table(8, 8)) is None
