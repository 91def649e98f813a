"""Annotations of any length and number cost little, and what is too much is said."""

from __future__ import annotations

import pytest

from nri_numa.engine.decision import Machine
from nri_numa.engine.request.annotations import MOST_GUESSES, MOST_NAMES, longest_list, resolve
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.settings import EVERYTHING, CPUAmount, Settings
from nri_numa.model.workload import Container, PodSandbox, Policy, Refusal, Requested
from tests.machines import named as machines

PREFIX = "numa.kubernetes.io"
APP = Container(id="c", pod_id="p", name="app")


def asking(annotations: dict[str, str]) -> PodSandbox:
    return PodSandbox(id="p", uid="u", namespace="shop", name="web", annotations=annotations)


@pytest.mark.parametrize("count", [1, 10, 11, 512, 1024, 8192])
def test_every_id_by_itself_is_read(count: int) -> None:
    text = ",".join(map(str, range(count)))
    assert len(text) <= longest_list(count)
    if count >= 512:
        assert longest_list(count) == len(text) + 1


def test_the_limit_of_a_list_is_the_machines() -> None:
    machine = Machine(topology=machines.dual_smt(), settings=Settings())
    fits = ",".join(map(str, range(64)))
    found = machine.resolve(asking({f"{PREFIX}/numacpu": fits}), APP)
    assert isinstance(found, Requested)
    assert CPUSet.parse(found.numacpu or "") == CPUSet(range(64))
    found = machine.resolve(asking({f"{PREFIX}/numacpu": "0," * 125_000 + "0"}), APP)
    assert isinstance(found, Refusal)
    assert "expected at most 1024 characters, which is room for every id" in found.message
    assert "(250001 characters)" in found.message


@pytest.mark.parametrize("longer", [False, True])
@pytest.mark.parametrize(("key", "limit"), [("load", 2048), ("numacpu", 4096), ("numamem", 4096)])
def test_a_value_is_read_up_to_its_limit(key: str, limit: int, longer: bool) -> None:
    """The limits are those of docs/annotations.md; the machine of a list is not known here."""
    found = resolve(Settings(), asking({f"{PREFIX}/{key}": "x" * (limit + longer)}), APP)
    assert isinstance(found, Refusal)
    assert (f"expected at most {limit} characters" in found.message) is longer


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a" * 363, f"({{source}}{'a' * 363})"),
        ("a" * 364, f"('{{source}}{'a' * 43}'… (401 characters))"),
        ("line\nbreak", "('{source}line\\nbreak')"),
    ],
)
def test_a_name_in_a_message_breaks_no_line_and_fills_no_event(name: str, shown: str) -> None:
    """Only Kubernetes checks names; other clients of a runtime do not."""
    app = Container(id="c", pod_id="p", name=name)
    found = resolve(Settings(), asking({f"{PREFIX}/policy.{name}": "x"}), app)
    assert isinstance(found, Refusal)
    assert shown.format(source=f"annotation {PREFIX}/policy.") in found.message


def test_more_annotations_than_any_pod_needs_are_refused_as_a_whole() -> None:
    names = {f"{PREFIX}/load.c{n}": "high" for n in range(MOST_NAMES)}
    assert isinstance(resolve(Settings(), asking(names), APP), Requested)
    found = resolve(Settings(), asking(names | {f"{PREFIX}/load": "high"}), APP)
    assert isinstance(found, Refusal)
    assert f"at most {MOST_NAMES} annotations" in found.message
    assert f"not {MOST_NAMES + 1}" in found.message


def test_a_near_miss_below_the_prefix_is_found_among_few_and_let_be_among_many() -> None:
    """Beyond that they are somebody's names, and comparing is what costs."""
    miss = {f"polcy.{PREFIX}/pod": "restricted"}
    assert isinstance(resolve(Settings(), asking(miss), APP), Refusal)
    other = {f"n{n:03}.{PREFIX}/pod": "x" for n in range(MOST_GUESSES)}
    exact = {f"policy.{PREFIX}/pod": "restricted"}
    assert resolve(Settings(), asking(other | miss), APP) == Requested()
    found = resolve(Settings(), asking(other | exact), APP)
    assert isinstance(found, Requested)
    assert found.policy is Policy.RESTRICTED


@pytest.mark.parametrize(
    ("amount", "text", "of_64"),
    [(CPUAmount(6), "6", 6), (CPUAmount(percent=12.5), "12.5%", 8), (EVERYTHING, "100%", 64)],
)
def test_amounts_of_cpus_are_said_as_they_were_written(
    amount: CPUAmount, text: str, of_64: int
) -> None:
    assert (str(amount), amount.of(64)) == (text, of_64)


@pytest.mark.parametrize(("length", "shown"), [(80, "'{}'"), (81, "'{}'… (81 characters)")])
def test_a_value_in_a_message_is_shown_up_to_eighty_characters(length: int, shown: str) -> None:
    found = resolve(Settings(), asking({f"{PREFIX}/policy": "x" * length}), APP)
    assert isinstance(found, Refusal)
    assert f"policy is {shown.format('x' * 80)} (annotation" in found.message


@pytest.mark.parametrize(("more", "cut"), [(0, ""), (1, "…")])
def test_what_is_wrong_with_a_list_is_shown_up_to_120_characters(more: int, cut: str) -> None:
    """Characters that nobody can see are shown as ten each."""
    value = "x" * (9 + more) + "\U000e0001" * 7
    found = resolve(Settings(), asking({f"{PREFIX}/numacpu": value}), APP)
    assert isinstance(found, Refusal)
    problem = f"{value!r} is not a number or a range such as 0-3"
    assert len(problem) == 120 + more
    assert found.message.endswith(f" such as 0-3,8: {problem[:120]}{cut}")
