"""YAML is read as Kubernetes reads it, and never to the harm of the reader."""

import re

import pytest
import yaml

from nri_numa.cluster.manifests import value_text
from nri_numa.safe_yaml import MAX_YAML_DEPTH, yaml_problem_text
from nri_numa.simulate.manifests import MAX_MANIFEST_DOCUMENTS, load_yaml_documents


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("1.5", 1.5),
        ("yes", True),
        ("off", False),
        ("y", "y"),
        ("~", None),
        ("1e3", "1e3"),
        ("0-3,8", "0-3,8"),
        ("10:30", "10:30"),  # not 630
        ("2024-01-31", "2024-01-31"),  # not a date
        ("010", "010"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        (".inf", ".inf"),
        ('"1"', "1"),
        ("'yes'", "yes"),
        ('{"kind": "Pod", "n": [1, true, null]}', {"kind": "Pod", "n": [1, True, None]}),
        ("{b: {<<: {x: 1, y: 2}, y: 3}}", {"b": {"x": 1, "y": 3}}),
    ],
)
def test_a_value_is_what_kubernetes_takes_it_for(text: str, value: object) -> None:
    (document,) = load_yaml_documents(text)
    assert (document, type(document)) == (value, type(value))


def test_several_documents_come_in_order() -> None:
    assert list(load_yaml_documents("a: 1\n---\n---\nb: 2\n")) == [{"a": 1}, None, {"b": 2}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: {b: 1, b: 2}", "the key 'b' stands here a second time"),
        ("a: [1", "line 2, column 1"),
        ("a: *nobody", "undefined alias"),
        ("a: !!int x", "invalid literal"),
        ("a: !!float x", "could not convert"),
        ("a: &a [*a]", "recursive"),
        ("a: \t- b", ""),
        ("a: \x00", ""),
    ],
)
def test_what_is_no_manifest_is_told_in_one_line(text: str, words: str) -> None:
    with pytest.raises(yaml.YAMLError) as caught:
        list(load_yaml_documents(text))
    problem = yaml_problem_text(caught.value, text)
    assert words in problem
    assert "\n" not in problem


def test_depth_and_number_of_documents_are_bounded() -> None:
    with pytest.raises(yaml.YAMLError, match="levels deep"):
        list(load_yaml_documents("[" * (MAX_YAML_DEPTH + 1)))
    with pytest.raises(yaml.YAMLError, match="documents"):
        list(load_yaml_documents("--- a\n" * (MAX_MANIFEST_DOCUMENTS + 1)))


def levels(count: int, text: str = "{l%d: &a%d [%s]}") -> str:
    """A list of mappings: each has ten aliases of the one before, the first ten words."""
    return "\n".join(
        "- " + text % (n, n, ", ".join([f"*a{n - 1}" if n else "x"] * 10)) for n in range(count)
    )


@pytest.mark.parametrize(
    "text",
    [
        levels(9),
        "kind: List\nitems:\n" + levels(9),
        levels(9, "{l%d: &a%d {<<: [%s]}}").replace("x", "{x: 1}"),
        "- &a x\n" + "- *a\n" * 100_001,
        "--- &a x\n"
        + "---\n- &a x\n- ["
        + "*a," * 60_000
        + "]\n---\n- &a x\n- ["
        + "*a," * 60_000
        + "]",
    ],
)
def test_what_aliases_stand_for_is_bounded(text: str) -> None:
    with pytest.raises(yaml.YAMLError) as caught:
        for _ in load_yaml_documents(text):
            pass
    assert re.fullmatch(
        r"line \d+, column \d+: aliases stand for 1\d{5} nodes, expected at most 100000",
        yaml_problem_text(caught.value, text),
    )


def test_aliases_below_the_bound_and_large_texts_without_any_are_read() -> None:
    (document,) = load_yaml_documents(levels(4))
    assert document[3]["l3"][9][9][9] == ["x"] * 10
    (document,) = load_yaml_documents("- x\n" * 100_001)
    assert len(document) == 100_001


@pytest.mark.parametrize(
    ("value", "text"),
    [(False, "false"), ({}, "a mapping"), ("x" * 100, "'" + "x" * 49 + "… (102 characters)")],
)
def test_a_value_is_shown_short(value: object, text: str) -> None:
    assert value_text(value) == text
