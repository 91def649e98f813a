"""The section ``publish`` and the socket: what is wrong with them is said, all at once."""

from __future__ import annotations

import pytest

from nri_numa import config as configuration
from nri_numa.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("publish: {rate: 0}", "publish.rate: 0, expected more than 0"),
        ("publish: {rate: 101}", "publish.rate: 101, expected at most 100"),
        ("publish: {burst: 0}", "publish.burst: 0, expected at least 1"),
        ("publish: {resync: 100ms}", "publish.resync: 100ms, expected 1s or more"),
        ("publish: {resync: soon}", "publish.resync: 'soon' is no duration"),
        (
            "publish: {nodeResourceTopologyValidity: 10m}",
            "nodeResourceTopologyValidity: 10m, expected 0, or three times publish.resync",
        ),
        ("publish: {nodeResourceTopologyValidity: soon}", "'soon' is no duration"),
        ("publish: {address: '0.0.0.0:9892'}", "expected one on loopback, or off"),
        ("publish: {address: nowhere}", "publish.address: 'nowhere' is no address"),
        ("publish: {credentials: ''}", "publish.credentials: is empty"),
        ("publish: {event: true}", "did you mean events?"),
        ("http: {socket: agent.sock}", "http.socket: 'agent.sock', expected an absolute path"),
        (f"http: {{socket: /{'x' * 120}}}", "expected an absolute path of at most 107 bytes"),
    ],
)
def test_a_mistake_is_named_with_what_was_expected(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configuration.load(text=text)
    assert any(words in problem for problem in caught.value.problems), caught.value.problems


def test_a_sound_one() -> None:
    config = configuration.load(
        text="http: {socket: /run/x/agent.sock}\npublish: {rate: 0.5, resync: 90, address: 'off'}"
    )
    assert config.publish.rate == 0.5
    assert configuration.problems(config) == []
