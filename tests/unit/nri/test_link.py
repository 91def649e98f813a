"""The parts of the link that need no connection."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path

import pytest

from nri_numa.errors import ConfigError
from nri_numa.nri.link import LinkSettings, NRILink
from nri_numa.runtime import backoff_delays
from tests.beds.link_bed import eventually, running
from tests.beds.recording_plugin import RecordingPlugin


def test_the_pauses_double_up_to_thirty_seconds() -> None:
    delays = backoff_delays(random.random, jitter=0.0)
    assert list(itertools.islice(delays, 8)) == [1, 2, 4, 8, 16, 30, 30, 30]


def test_jitter_adds_up_to_its_share_and_repeats_with_its_seed() -> None:
    plain = [1, 2, 4, 8, 16, 30, 30]
    first = list(itertools.islice(backoff_delays(random.Random(7).random), 7))
    again = list(itertools.islice(backoff_delays(random.Random(7).random), 7))
    other = list(itertools.islice(backoff_delays(random.Random(8).random), 7))
    assert first == again != other
    for got, base in zip(first, plain, strict=True):
        assert base <= got <= base * 1.1


@pytest.mark.parametrize(("name", "index"), [("", "10"), ("a b", "10"), ("x", "1"), ("x", "1x")])
def test_a_name_no_runtime_takes_is_refused_before_anything_is_dialled(
    name: str, index: str
) -> None:
    with pytest.raises(ConfigError, match="plugin identity"):
        NRILink(RecordingPlugin(), LinkSettings(name=name, index=index))


@pytest.mark.asyncio
async def test_without_any_settings_a_runtime_that_is_not_there_is_waited_for(
    tmp_path: Path,
) -> None:
    plugin = RecordingPlugin()
    link = NRILink(
        plugin,
        LinkSettings(name="numapin", index="10", socket_path=str(tmp_path / "nri.sock")),
    )
    async with running(link) as task:
        await eventually(lambda: bool(plugin.states))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not task.done()
