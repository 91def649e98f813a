"""The parts of the link that need no connection."""

import itertools
import os
import random
import socket

import pytest

from nri_numa.errors import ConfigError
from nri_numa.nri.link import (
    LinkSettings,
    NRILink,
    PreinstalledConnection,
    preinstalled_from_environment,
)
from nri_numa.runtime import backoff_delays
from tests.beds.recording_plugin import RecordingPlugin


def test_the_pauses_double_up_to_thirty_seconds_and_jitter_adds_its_share() -> None:
    plain = list(itertools.islice(backoff_delays(lambda: 0.0), 8))
    assert plain == [1, 2, 4, 8, 16, 30, 30, 30]
    first, again, other = (
        list(itertools.islice(backoff_delays(random.Random(seed).random), 8)) for seed in (7, 7, 8)
    )
    assert first == again != other
    assert all(base <= got <= base * 1.1 for got, base in zip(first, plain, strict=True))


def test_a_name_no_runtime_takes_is_refused_before_anything_is_dialled() -> None:
    with pytest.raises(ConfigError, match="plugin identity"):
        NRILink(RecordingPlugin(), LinkSettings(name="a b", index="10", socket_path=""))


def test_an_ordinary_process_was_not_launched() -> None:
    """Name and index may be preset for external plugins; they are left alone then."""
    environ = {"NRI_PLUGIN_NAME": "x", "NRI_PLUGIN_IDX": "10", "PATH": "/bin"}
    assert preinstalled_from_environment(environ) is None
    assert environ == {"NRI_PLUGIN_NAME": "x", "NRI_PLUGIN_IDX": "10", "PATH": "/bin"}


def test_the_descriptor_and_the_variables_do_not_reach_children() -> None:
    one, other = socket.socketpair()
    with one, other:
        os.set_inheritable(one.fileno(), True)
        environ = {
            "NRI_PLUGIN_SOCKET": str(one.fileno()),
            "NRI_PLUGIN_NAME": "numapin",
            "NRI_PLUGIN_IDX": "10",
        }
        assert preinstalled_from_environment(environ) == PreinstalledConnection(
            descriptor=one.fileno(), name="numapin", index="10"
        )
        assert environ == {}
        assert not os.get_inheritable(one.fileno())


@pytest.mark.parametrize(
    "text", ["", "three", "-1", "1.5", " 3", "9" * 5, "9" * 23, "\N{ARABIC-INDIC DIGIT THREE}"]
)
def test_a_descriptor_that_is_none_is_named_with_its_value(text: str) -> None:
    environ = {"NRI_PLUGIN_SOCKET": text, "NRI_PLUGIN_NAME": "x", "NRI_PLUGIN_IDX": "10"}
    with pytest.raises(ConfigError) as caught:
        preinstalled_from_environment(environ)
    (problem,) = caught.value.problems
    assert problem.startswith(f"NRI_PLUGIN_SOCKET: {text!r} is no open file descriptor")
    assert environ == {}


@pytest.mark.parametrize(("name", "index"), [(None, "10"), ("x", None), ("x", "ten"), ("", "10")])
def test_an_unsound_identity_is_named_beside_the_rest(name: str | None, index: str | None) -> None:
    environ = {"NRI_PLUGIN_SOCKET": "nonsense"}
    if name is not None:
        environ["NRI_PLUGIN_NAME"] = name
    if index is not None:
        environ["NRI_PLUGIN_IDX"] = index
    with pytest.raises(ConfigError) as caught:
        preinstalled_from_environment(environ)
    assert len(caught.value.problems) == 2
    assert caught.value.problems[0].startswith("NRI_PLUGIN_NAME, NRI_PLUGIN_IDX: plugin ")
