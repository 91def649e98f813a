"""No annotation makes resolving fail, and the answer depends on nothing but the annotations."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from nri_numa.engine.request.annotations import (
    check_option_level,
    check_value,
    quote_value,
    resolve_placement_options,
)
from nri_numa.engine.request.demand import Demand, compute_demand
from nri_numa.engine.request.options import TABLE, PlacementOptions, parse_load
from nri_numa.model.reasons import Rejection
from nri_numa.model.settings import Settings
from nri_numa.model.workload import (
    BusySchedule,
    Container,
    MemoryPolicy,
    PodSandbox,
    QoSClass,
    Resources,
)
from tests.checks.requested import GOOD

PREFIX = "numa.kubernetes.io"
VALUES = {**GOOD, "mempolicy": tuple(MemoryPolicy)}
pairs = st.sampled_from(TABLE.keys).flatmap(
    lambda key: st.tuples(st.just(key), st.sampled_from(VALUES[key]))
)
levels = st.lists(pairs, max_size=5).map(dict)
texts = st.text(max_size=12)
names = st.one_of(
    st.tuples(
        st.sampled_from(TABLE.keys) | texts, st.sampled_from(["", ".main", ".side", "."])
    ).map(lambda parts: f"{PREFIX}/{parts[0]}{parts[1]}"),
    st.tuples(
        st.sampled_from(TABLE.keys) | texts, st.sampled_from(["pod", "container.main", "x"])
    ).map(lambda parts: f"{parts[0]}.{PREFIX}/{parts[1]}"),
    texts.map(lambda text: f"{text}{PREFIX}/{text}"),
)


def asked(
    annotations: dict[str, str], settings: Settings | None = None, container: str = "main"
) -> PlacementOptions | Rejection:
    pod = PodSandbox(id="p", uid="u", namespace="shop", name="web", annotations=annotations)
    return resolve_placement_options(
        settings or Settings(), pod, Container(id="c", pod_id="p", name=container)
    )


@given(st.lists(st.tuples(names, texts), max_size=4))
def test_no_annotation_makes_it_fail_in_any_order(items: list[tuple[str, str]]) -> None:
    annotations = dict(items)
    found = asked(annotations)
    assert asked(dict(reversed(annotations.items()))) == found
    if isinstance(found, Rejection):
        values = [value.removesuffix("\n") for value in annotations.values()]
        assert any(quote_value(value) in found.detail for value in values)
        assert found.detail.isprintable()


@given(levels, levels, levels.filter(lambda one: not check_option_level(one)))
def test_good_values_are_rejected_only_where_one_level_contradicts_itself(
    mine: dict[str, str], everybodys: dict[str, str], defaults: dict[str, str]
) -> None:
    annotations = {f"{PREFIX}/{key}.main": value for key, value in mine.items()}
    annotations |= {f"{PREFIX}/{key}": value for key, value in everybodys.items()}
    found = asked(annotations, Settings(defaults=defaults))
    if isinstance(found, Rejection):
        assert check_option_level(mine) or check_option_level(everybodys)
        return
    # Of the strongest level everything is heard.
    assert not check_option_level(mine)
    assert found.explicit_keys >= set(mine)
    assert found.explicit_keys <= set(mine) | set(everybodys)
    # What is left does not contradict itself.
    heard = {}
    for key, source in found.sources.items():
        level = mine if source.is_for_container else defaults
        heard[key] = everybodys[key] if source.text == f"annotation {PREFIX}/{key}" else level[key]
    assert check_option_level(heard) == []


@given(st.sampled_from(TABLE.keys), texts)
def test_what_the_check_lets_through_is_understood(key: str, value: str) -> None:
    found = asked({f"{PREFIX}/{key}": value})
    assert isinstance(found, PlacementOptions) is (check_value(key, value) is None)


minutes = st.integers(0, 1439)


@given(st.lists(st.tuples(minutes, minutes).filter(lambda w: w[0] != w[1]), min_size=1, max_size=5))
def test_peak_hours_are_the_minutes_of_their_windows(windows: list[tuple[int, int]]) -> None:
    text = ",".join(f"{a // 60:02}:{a % 60:02}-{b // 60:02}:{b % 60:02}" for a, b in windows)
    busy = parse_load(text).busy_intervals
    expected = {
        minute
        for a, b in windows
        for minute in (range(a, b) if a < b else [*range(a, 1440), *range(b)])
    }
    assert {minute for a, b in busy for minute in range(a, b)} == expected
    assert all(a < b for a, b in busy)
    assert all(earlier[1] < later[0] for earlier, later in pairwise(busy))
    assert parse_load(text).overlaps(BusySchedule(((0, 1440),)))


maybe = st.none() | st.integers(-(2**63), 2**64)

TOLD = st.builds(
    Resources,
    cpu_shares=maybe,
    cpu_quota=maybe,
    cpu_period=maybe,
    memory_limit=maybe,
    hugepages=st.dictionaries(st.integers(), st.integers()),
)


@given(TOLD, maybe, maybe)
def test_no_resources_make_the_demand_fail_and_nothing_negative_is_needed(
    resources: Resources, score: int | None, capacity: int | None
) -> None:
    container = Container(id="c", pod_id="p", name="main", resources=resources, oom_score_adj=score)
    requested = asked({f"{PREFIX}/cpus": "exclusive"})
    assert isinstance(requested, PlacementOptions)
    for qos in QoSClass:
        pod = PodSandbox(id="p", uid="u", namespace="shop", name="web", qos=qos)
        found = compute_demand(pod, container, requested, capacity or 0)
        if isinstance(found, Rejection):
            assert "expected " in found.detail
            continue
        assert isinstance(found, Demand)
        assert found.exclusive_cpus * 1000 == found.cpu_milli > 0
        assert found.memory_bytes >= 0
        assert all(size > 0 and amount > 0 for size, amount in found.hugepages.items())
