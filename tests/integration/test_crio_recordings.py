"""What a real CRI-O said to the plugin, said again: the same answers, and the same cpusets.

tests/golden/recordings has the exchanges, with a README of how CRI-O differs from containerd.
"""

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from nri_numa.nri.wire.versions import Event
from tests.beds.nri_recording import Answer, Line, Part, RecordedRuntime, Recording, recordings
from tests.beds.recorded_node import (
    AllEventsPlugin,
    RecordedAgent,
    RecordedCgroups,
    recorded_config,
    release,
)

ALL: Final = recordings()
ASSIGNED: Final = "numa.kubernetes.io/assigned"
TIMEOUT_S: Final = 60.0


def without_subscription(document: dict[str, Any]) -> None:
    if document.get("events", 0) > Event.REMOVE_POD_SANDBOX.mask_bit:
        del document["events"]


def without_words_of_assigned(document: dict[str, Any]) -> None:
    annotations = document.get("adjust", {}).get("annotations", {})
    if ASSIGNED in annotations:
        assigned = json.loads(annotations[ASSIGNED])
        annotations[ASSIGNED] = {key: assigned[key] for key in ("cpus", "mems", "policy")}


def without_period_of_quota(document: dict[str, Any]) -> None:
    linux = [document.get("adjust", {}).get("linux", {})]
    linux += [update.get("linux", {}) for update in document.get("update", ())]
    for each in linux:
        cpu = each.get("resources", {}).get("cpu", {})
        if "quota" in cpu:
            cpu.pop("period", None)


DIFFERENCES: Final[dict[str, Callable[[dict[str, Any]], None]]] = {
    "the agent has since subscribed to UpdatePodSandbox; the subscription has a test of its own": (
        without_subscription
    ),
    "the annotation has another format since, words of the glossary, and a key of each node": (
        without_words_of_assigned
    ),
    "crun ignores a quota without a period, so it has one since": (without_period_of_quota),
}
"""Why an answer may differ from the recorded one, and what is then left out of both."""


def comparable(answer: Message | str) -> Any:
    if isinstance(answer, str):
        return answer
    document = MessageToDict(answer)
    for remove in DIFFERENCES.values():
        remove(document)
    return document


NAMES: Final = {
    "create in the same pod": ("second",),
    "RunPodSandbox, CreateContainer": ("owner", "allowed"),
}
"""Names that steps use for containers of other steps without a pod's name."""


def container_ids(recording: Recording) -> dict[str, str]:
    """IDs of containers, by the name that steps use."""
    ids: dict[str, str] = {}
    for step in recording.steps:
        for created in step.get("containers", [step]):
            for name in NAMES.get(step["call"], (created.get("pod", ""),)):
                ids[name] = created.get("id") or created.get("container_id") or ids.get(name, "")
    return ids


class Replay:
    """One recording against the agent of today; `run` fails where anything differs."""

    def __init__(self, recording: Recording, directory: Path) -> None:
        self._recording, self._steps = recording, list(recording.steps)
        self._config = recorded_config(directory, recording.folder)
        fails = any("error" in step for step in recording.steps)
        self._cgroups = RecordedCgroups(directory / "cgroup", recording.folder, fails=fails)
        self._id_by_name = container_ids(recording)
        self._plugin: RecordedAgent | AllEventsPlugin | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
        self._open: list[tuple[RecordedRuntime, asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.checked = 0
        self.unexpected: list[Part] = []

    async def run(self, then: Callable[[RecordedAgent], None] | None = None) -> None:
        """Play all connections; call ``then`` with the agent before it ends."""
        self._accepted = asyncio.Queue()
        server = await asyncio.start_unix_server(
            lambda *streams: self._accepted.put_nowait(streams), self._config.runtime.nri_socket
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                for lines in self._recording.connections:
                    await self._do_steps(lines[0].seconds)
                    await self._play(lines)
                await self._do_steps(math.inf)
                await asyncio.gather(*self._tasks)
                if then is not None and isinstance(self._plugin, RecordedAgent):
                    then(self._plugin)
        finally:
            for task in self._tasks:  # done, unless something failed
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._end_plugin()
            server.close()
            await server.wait_closed()
        assert self._accepted.empty()

    async def _play(self, lines: list[Line]) -> None:
        """Play the next connection of the plugin."""
        runtime = RecordedRuntime(
            lines, self._check_steps, self._cgroups.on_request, self._on_answer
        )
        if isinstance(self._plugin, RecordedAgent) and runtime.is_push:
            self._tasks.append(asyncio.create_task(self._plugin.reconciler.reconcile()))
        streams = await self._accepted.get()
        self._open.append((runtime, *streams))
        await runtime.play(*streams)

    async def _do_steps(self, seconds: float) -> None:
        """Do what was done from outside until then."""
        while self._steps and self._steps[0]["t"] < seconds:
            match self._steps[0]["call"]:
                case "plugin starts" if self._recording.plugin == "nri-numa":
                    self._plugin = RecordedAgent(self._config, self._cgroups.topology)
                case "plugin starts":
                    self._plugin = AllEventsPlugin(self._config.runtime.nri_socket)
                case "plugin killed" | "plugin stops":
                    await self._end_plugin()
                case "nri-numa release":
                    self._tasks.append(asyncio.create_task(release(self._config)))
                case "CRI-O restarted":
                    self._open[-1][2].close()
                case _:
                    self._check_step()
            self._steps.pop(0)

    def _check_steps(self, seconds: float) -> None:
        """Check what was seen from outside until then."""
        while self._steps and self._steps[0]["t"] < seconds:
            self._check_step()
            self._steps.pop(0)

    def _check_step(self) -> None:
        step = self._steps[0]
        self._cgroups.settle()
        if isinstance(self._plugin, RecordedAgent):
            self._plugin.agent.reservations.release_expired()
        if step["call"] in ("allowed", "first instruction"):
            seen = {name: lists for name, lists in step.items() if name not in ("t", "call")}
            ids = self._id_by_name
            assert {name: self._cgroups.allowed(ids[name]) for name in seen} == seen, step
            self.checked += 1

    def _on_answer(self, answer: Answer) -> None:
        assert comparable(answer.actual) == comparable(answer.recorded), answer.method
        self._cgroups.on_answer(answer)
        self._cgroups.settle()

    async def _end_plugin(self) -> None:
        if self._plugin is not None:
            await self._plugin.stop()
            self._plugin = None
        for runtime, reader, writer in self._open:
            self.unexpected += await runtime.read_unexpected(reader)
            writer.close()
        self._open.clear()


@pytest.mark.parametrize("recording", ALL, ids=str)
def test_answers_and_cpusets_are_as_recorded(recording: Recording, tmp_path: Path) -> None:
    replay = Replay(recording, tmp_path)
    asyncio.run(replay.run())
    assert replay.unexpected == []
    calls = [step["call"] for step in recording.steps]
    assert replay.checked == calls.count("allowed") + calls.count("first instruction")


@pytest.mark.parametrize("recording", [one for one in ALL if "failed" in one.name], ids=str)
def test_a_failed_creation_releases_its_cpus_in_time(recording: Recording, tmp_path: Path) -> None:
    """CRI-O reports neither Stop nor Remove of it."""
    exclusive = []

    def wait(agent: RecordedAgent) -> None:
        for seconds in (0, 30, 90):
            agent.seconds += seconds
            agent.agent.reservations.release_expired()
            current = agent.agent.current
            exclusive.append(
                (str(current.state.exclusive), str(current.schedulable.state.exclusive))
            )

    asyncio.run(Replay(recording, tmp_path).run(wait))
    assert exclusive == [("0", "0"), ("0", ""), ("", "")]
