"""The ``memoryLocality`` and ``cpuWaiting`` sections."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_numa import config as configuration
from nri_numa.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("memoryLocality: {enabled: true, interval: 10ms}", "interval: 10ms, expected 1s or more"),
        ("memoryLocality: {interval: soon}", "memoryLocality.interval: 'soon' is no duration"),
        ("memoryLocality: {budget: 0}", "memoryLocality.budget: 0, expected more than 0"),
        ("memoryLocality: {budget: 101}", "memoryLocality.budget: 101, expected at most 100"),
        ("memoryLocality: {maxSeries: 0}", "memoryLocality.maxSeries: 0, expected at least 1"),
        ("memoryLocality: {metric: true}", "memoryLocality.enabled is not; nothing is read"),
        (
            "memoryLocality: {enabled: true}\nhttp: {address: 'off'}",
            "there is nobody to tell",
        ),
        ("cpuWaiting: {enabled: true, interval: 10ms}", "cpuWaiting.interval: 10ms, expected 1s"),
        ("cpuWaiting: {interval: soon}", "cpuWaiting.interval: 'soon' is no duration"),
        ("cpuWaiting: {budget: 0}", "cpuWaiting.budget: 0, expected more than 0"),
        ("cpuWaiting: {maxSeries: 10001}", "cpuWaiting.maxSeries: 10001, expected at most 10000"),
        ("cpuWaiting: {metric: true}", "cpuWaiting.enabled is not; nothing is read"),
        ("cpuWaiting: {enabled: true}\nhttp: {address: 'off'}", "cpuWaiting.enabled: is true, but"),
    ],
)
def test_a_mistake_is_named_with_what_was_expected(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configuration.load(text=text)
    assert any(words in problem for problem in caught.value.problems), caught.value.problems


def test_it_is_off_unless_asked_for_and_waits_for_a_restart() -> None:
    old = configuration.load(text="")
    assert not old.memory_locality.enabled
    assert not old.cpu_waiting.enabled
    for section in ("memoryLocality", "cpuWaiting"):
        new = configuration.load(text=f"{section}: {{enabled: true, metric: true, interval: 5}}")
        live, restart = configuration.changes(old, new)
        assert live == ()
        assert f"{section}.enabled" in restart


def test_a_budget_that_is_no_number_is_a_mistake() -> None:
    config = configuration.load(text="")
    wrong = replace(config, memory_locality=replace(config.memory_locality, budget=float("nan")))
    assert configuration.problems(wrong) == [
        "memoryLocality.budget: nan, expected per cent above 0, at most 100"
    ]
