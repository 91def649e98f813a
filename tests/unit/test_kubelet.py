"""The kubelet's own managers: noticed, said once, and shown."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest

from nri_numa import logs
from nri_numa.kubelet import INTERVAL, KubeletWatch, read_policies
from nri_numa.metrics import Metrics


def gauge(metrics: Metrics, manager: str) -> float | None:
    return metrics.registry.get_sample_value("nri_numa_kubelet_static", {"manager": manager})


def state(directory: Path, name: str, policy: object) -> None:
    (directory / name).write_text(json.dumps({"policyName": policy, "checksum": 1}))


def test_policies_are_read_from_the_state_files(tmp_path: Path) -> None:
    assert read_policies(str(tmp_path / "nowhere")) == {}
    state(tmp_path, "cpu_manager_state", "static")
    assert read_policies(str(tmp_path)) == {"cpu": "static"}
    state(tmp_path, "memory_manager_state", "None")
    assert read_policies(str(tmp_path)) == {"cpu": "static", "memory": "None"}


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"policyName": 3}', "[" * 100_000, "\0"])
def test_a_damaged_state_file_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "cpu_manager_state").write_text(text)
    assert read_policies(str(tmp_path)) == {}


def test_a_static_policy_is_said_once_and_its_end_too() -> None:
    stream, metrics = io.StringIO(), Metrics("test")
    logs.setup("info", stream=stream)
    watch = KubeletWatch(metrics, "/var/lib/kubelet")
    watch.judge({})
    assert (gauge(metrics, "cpu"), gauge(metrics, "memory")) == (0, 0)
    assert stream.getvalue() == ""
    for _ in range(3):
        watch.judge({"cpu": "static", "memory": "None"})
    assert (gauge(metrics, "cpu"), gauge(metrics, "memory")) == (1, 0)
    (line,) = stream.getvalue().splitlines()
    assert "level=warning" in line
    assert "/var/lib/kubelet/cpu_manager_state" in line
    assert "cpuManagerPolicy: none" in line
    watch.judge({"cpu": "none", "memory": "Static"})
    assert (gauge(metrics, "cpu"), gauge(metrics, "memory")) == (0, 1)
    assert "memoryManagerPolicy: None" in stream.getvalue()
    assert "does not pin" in stream.getvalue()


def test_it_looks_at_once_and_every_minute(tmp_path: Path) -> None:
    metrics = Metrics("test")
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        state(tmp_path, "cpu_manager_state", "static")
        if len(waits) == 2:
            raise asyncio.CancelledError

    watch = KubeletWatch(metrics, str(tmp_path), sleep=sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(watch.run())
    assert waits == [INTERVAL, INTERVAL]
    assert gauge(metrics, "cpu") == 1
