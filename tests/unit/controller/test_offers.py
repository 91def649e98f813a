"""What a file and a query may say, and the sentence for what they may not."""

import pytest

from nri_numa.controller.capacity import CapacityReport, parse_capacity_file, parse_query_answer
from nri_numa.model.offline_capacity import BadCapacity


def test_a_file_is_used_as_far_as_it_is_sound() -> None:
    offers, problems = parse_capacity_file({"nodes": {"a": {0: 0.5}, "b": {0: 2}, "c": 1}})
    assert offers == [CapacityReport("a", {0: 0.5})]
    assert len(problems) == 2
    assert problems[0].startswith("nodes.'b': zones.0: 2, expected")


@pytest.mark.parametrize("document", [None, [], {}, {"nodes": []}, {"nodes": {}, "other": 1}])
def test_no_such_file(document: object) -> None:
    with pytest.raises(BadCapacity, match="nodes"):
        parse_capacity_file(document)


def test_many_problems_are_counted() -> None:
    _, problems = parse_capacity_file({"nodes": {f"n{i}": {0: 9} for i in range(100)}})
    assert len(problems) == 21
    assert problems[-1] == "and 80 more"


def sample(value: str, **labels: str) -> dict[str, object]:
    return {"metric": labels, "value": [1.0, value]}


def answer(*samples: object) -> dict[str, object]:
    return {"status": "success", "data": {"resultType": "vector", "result": list(samples)}}


def ask(document: object) -> tuple[list[CapacityReport], list[str]]:
    return parse_query_answer(document, node_label="node", numa_node_label="numa_node")


def test_a_query() -> None:
    offers, problems = ask(
        answer(
            sample("0.5", node="b", numa_node="0"),
            sample("1", node="a", numa_node="node-1"),
            sample("0", node="a", numa_node="0"),
        )
    )
    assert offers == [CapacityReport("a", {0: 0.0, 1: 1.0}), CapacityReport("b", {0: 0.5})]
    assert problems == []


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (sample("NaN", node="b", numa_node="0"), "nan, expected a number from 0 to 1"),
        (sample("+Inf", node="b", numa_node="0"), "inf, expected a number from 0 to 1"),
        (sample("-1", node="b", numa_node="0"), "-1.0, expected a number from 0 to 1"),
        (sample("x", node="b", numa_node="0"), "'x' is no number"),
        (sample("1", node="b"), "None names no NUMA node"),
        (sample("1", numa_node="0"), "has no label node"),
        (sample("1", node="a", numa_node="0"), "has more than one sample"),
        ("x", "is not valid"),
        ({"metric": {}, "value": 1}, "is not valid"),
    ],
)
def test_a_bad_sample_spoils_no_other(bad: object, said: str) -> None:
    offers, problems = ask(answer(sample("0.5", node="a", numa_node="0"), bad))
    assert offers == [CapacityReport("a", {0: 0.5})]
    assert len(problems) == 1
    assert said in problems[0]


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"status": "error", "error": "parse error"}, "parse error"),
        ([], "the query failed"),
        ({"status": "success", "data": {"resultType": "matrix", "result": []}}, "not an instant"),
        (
            {"status": "success", "data": {"resultType": "scalar", "result": [1, "1"]}},
            "not an instant",
        ),
        ({"status": "success"}, "not an instant vector"),
    ],
)
def test_no_such_answer(document: object, said: str) -> None:
    with pytest.raises(BadCapacity, match=said):
        ask(document)
