"""The section ``controller``, where it moves pods: what is wrong is said, and nothing is on."""

from __future__ import annotations

import pytest

from nri_numa import config as configuration
from nri_numa.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stuck: {after: 0s}", "controller.stuck.after: 0s, expected 1s to 86400s"),
        ("stuck: {per: 10s}", "controller.stuck.per: 10s, expected 60s to 604800s"),
        ("stuck: {perMinute: 0}", "controller.stuck.perMinute: 0"),
        ("stuck: {perWorkload: 0}", "controller.stuck.perWorkload: 0"),
        ("stuck: {perWorkload: many}", "controller.stuck.perWorkload"),
        ("stuck: {evicts: true}", "did you mean evict?"),
        ("steal: {after: never}", "controller.steal.after: 'never' is no duration"),
        ("steal: {per: -1}", "controller.steal.per"),
        ("steal: {below: 0.8, well: 0.7}", "controller.steal.well: 0.7, expected a number from"),
        ("steal: {below: .nan}", "controller.steal"),
        ("steal: {below: 0}", "controller.steal.below: 0"),
        ("steal: {well: 1.5}", "controller.steal.well: 1.5"),
        ("steal: {atMost: -0.1}", "controller.steal.atMost: -0.1"),
        ("steal: {atMost: .nan}", 'controller.steal.atMost: ".nan", expected a number'),
    ],
)
def test_a_mistake_is_named_with_what_was_expected(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configuration.load(text=f"controller: {{{text}}}")
    assert any(words in problem for problem in caught.value.problems), caught.value.problems


def test_nobody_is_moved_by_default() -> None:
    controller = configuration.load(text="").controller
    assert not any(one.evict for one in (controller.drain, controller.stuck, controller.steal))
