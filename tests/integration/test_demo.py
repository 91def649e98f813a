"""The demo is told as it is, as an ordinary user would run it."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_numa.cluster.pods import container_of, pod_sandbox
from nri_numa.demo import stage as demo_stage
from nri_numa.demo.runtime import PodOperationFailed
from nri_numa.demo.stage import (
    DemoFailure,
    Stage,
    container_message,
    examples_directory,
    read_assigned_annotation,
    read_example_pods,
)
from nri_numa.machine.sysfs import discover_topology

pytestmark = pytest.mark.slow


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder whose path is short: where it is long, the demo leaves ``TMPDIR`` for ``/tmp``.

    ``tmp_path`` grows with the user's name, and with the worker's when tests run side by side.
    """
    with tempfile.TemporaryDirectory(prefix="demo-", dir="/tmp") as path:
        yield Path(path)


def environment(home: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("NRI_NUMA_")}
    return {**kept, "TMPDIR": str(home), "PYTHONPATH": os.getcwd(), "PYTHONUNBUFFERED": "1"}


def python(*words: str, home: Path, code: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
    """Run it in a folder that is not the checkout; it ends with this exit code."""
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        cwd=home,
        env={**environment(home), **more},
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGHUP])  # or its terminal is closed
def test_the_page_shows_the_storys_pods_until_interrupted(home: Path, end: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "nri_numa", "demo", "--serve"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=home,
        env=environment(home),
    ) as serving:
        assert serving.stdout is not None
        try:
            found = (re.search(r"http://\S+", line) for line in serving.stdout)
            page = next(one[0] for one in found if one)
            with urllib.request.urlopen(page, timeout=30) as answer:
                assert b"<html" in answer.read()
            with urllib.request.urlopen(f"{page}v1/assignments", timeout=30) as answer:
                pods = {one["pod"] for one in json.load(answer)["containers"]}
        finally:
            serving.send_signal(end)
        assert "Next steps" in serving.stdout.read()
    assert {"pinned", "database-0", "trading"} <= pods
    assert serving.returncode == 0
    assert list(home.iterdir()) == []


def test_the_demo_goes_as_told_and_leaves_nothing(home: Path) -> None:
    """Whatever this node is configured to, whatever its service manager and its proxy are."""
    done = python(
        *("-m", "nri_numa", "demo"),
        home=home,
        NRI_NUMA_STRATEGY="nonsense",
        NRI_NUMA_CONFIG="/nowhere.yaml",
        NOTIFY_SOCKET="/nowhere",
        NRI_PLUGIN_SOCKET="99",
        http_proxy="http://127.0.0.1:9",
    )
    assert done.stderr == ""
    for word in (
        "pinned/app",
        "web/server",
        "database-0/engine",
        "TopologyAffinityError",
        "none of 10 containers",
        "Next steps",
    ):
        assert word in done.stdout
    for path in examples_directory().iterdir():
        assert path.name in done.stdout, "every example is shown"
    assert list(home.iterdir()) == []
    text = done.stdout
    lines = [line for line in text.splitlines() if "simulate /" not in line]  # an absolute path
    assert max(map(len, lines)) <= 80
    assert text.isascii()
    assert "\x1b" not in text
    # The next step names the machine of the demo; only the pod that is too big is refused.
    (words,) = re.findall(r"nri-numa (simulate .*)", text.replace("\\\n", ""))
    assert f"--machine {demo_stage.SYNTHETIC_MACHINE_TEXT}" in words
    done = python("-m", "nri_numa", *words.split(), home=home, code=1)
    assert re.findall(r"(\S+) +\S+ +REJECTED", done.stdout) == ["too-big"]


def test_a_reader_that_leaves_finds_nothing_left(home: Path) -> None:
    shell = f"{sys.executable} -m nri_numa demo | head -1"
    subprocess.run(shell, shell=True, cwd=home, env=environment(home), timeout=120, check=True)
    assert list(home.iterdir()) == []


def test_kept_files_can_be_looked_at(home: Path) -> None:
    done = python("-m", "nri_numa", "demo", "--keep", home=home)
    (folder,) = home.iterdir()
    assert str(folder) in done.stderr
    assert "container placed" in (folder / "plugin.log").read_text()
    assert len(discover_topology(folder / "root").online) == 32


def test_a_plugin_that_does_not_start_is_told(home: Path) -> None:
    """Exit code 1, with the end of the plugin's log."""
    broken = home / "broken"
    broken.mkdir()
    (broken / "msgspec.py").write_text("raise ImportError('broken on purpose')")
    code = (
        "import sys, nri_numa.cli; from nri_numa.demo import stage; "
        "old = stage._environment_without_plugin_settings; "
        "stage._environment_without_plugin_settings = lambda: {**old(), "
        f"'PYTHONPATH': {str(broken)!r}}}; nri_numa.cli.main(['demo'])"
    )
    done = python("-c", code, home=home, code=1)
    assert "the demo failed: the plugin ended at once" in done.stderr
    assert "broken on purpose" in done.stderr
    assert "Traceback" not in done.stderr.partition("log ends:")[0]


@pytest.mark.asyncio
async def test_a_rejected_pod_is_gone_and_a_wrong_word_is_caught(tmp_path: Path) -> None:
    async with Stage(tmp_path) as stage:
        await stage.start_plugin()
        (too_big,) = read_example_pods("07-too-big.yaml")
        with pytest.raises(PodOperationFailed, match="TopologyAffinityError"):
            await stage.run_pod(too_big)
        assert stage.runtime.pods == {}
        (pod,) = read_example_pods("01-explicit-lists.yaml")
        (pinned,) = await stage.run_pod(pod)
        assert read_assigned_annotation(pinned)["cpus"] == "1,17"
        pinned.message.annotations.clear()
        with pytest.raises(DemoFailure, match="does not carry"):
            read_assigned_annotation(pinned)
        with pytest.raises(DemoFailure, match="there is no such path"):
            await stage.get_document("/v1/nothing")
        assert re.fullmatch(r"[0-9,-]+", pinned.cpus)


def test_a_message_carries_what_the_kubelet_says() -> None:
    (pod,) = read_example_pods("05-hugepages.yaml")
    message = container_message(container_of(pod, pod.containers[0], 64 << 30))
    assert [(h.page_size, h.limit) for h in message.linux.resources.hugepage_limits] == [
        ("2MB", 512 << 20)
    ]
    assert message.pod_sandbox_id == pod_sandbox(pod).id
