"""What goes wrong while the stream flows: processes killed, and two schedulers at once."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from bench.cluster.fleet import Agent
from tests.beds.cri import poll
from tests.beds.kube.client import PATIENCE_S
from tests.beds.kube.control_plane import ControlPlane
from tests.beds.kube.extender import SCHEDULER, Extender
from tests.beds.processes import Daemon

SECOND: Final = "numa-scheduler-2"
"""Profile of the scheduler that races."""
KINDS: Final = ("two-schedulers", "extender", "agents", "api-server")
_WHEN: Final = {"extender": 0.25, "agents": 0.5, "api-server": 0.75}
"""At which share of the stream, and again in the second half of what is left."""
EXTENDER_AWAY_S: Final = 3.0
AGENTS_AWAY_S: Final = 12.0
SILENT_AFTER_S: Final = 3.0
"""A publisher says that its agent does not answer."""
API_SERVER_AWAY_S: Final = 6.0


@dataclass(slots=True)
class Chaos:
    """Does what was asked for, each once, when its time has come.

    Args:
        kinds: of `KINDS`.
        control: the control plane.
        extender: ours.
        agents: by node; every tenth is killed.
        silence: writes that a node's agent does not answer.
        publish: writes what a node has.
        span: seconds that the stream flows.

    Attributes:
        said: what happened, with seconds since the begin.
    """

    kinds: Sequence[str]
    control: ControlPlane
    extender: Extender
    agents: Mapping[str, Agent]
    silence: Callable[[str], object]
    publish: Callable[[str], object]
    span: float
    said: list[str] = field(default_factory=list)
    _begun: float = field(default_factory=time.monotonic)
    _later: list[tuple[float, Callable[[], object]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        what = {"extender": self._kill_extender, "agents": self._kill_agents,
                "api-server": self._kill_api_server}  # fmt: skip
        for kind, do in what.items():
            if kind in self.kinds:
                self._later.append((_WHEN[kind] * self.span, do))

    @property
    def now(self) -> float:
        """Seconds since the begin."""
        return time.monotonic() - self._begun

    def tick(self) -> None:
        """Do what is due."""
        due = [one for one in self._later if one[0] <= self.now]
        for one in due:
            self._later.remove(one)
            one[1]()

    def _say(self, text: str) -> None:
        self.said.append(f"{self.now:.0f} s: {text}")

    def _in(self, seconds: float, do: Callable[[], object]) -> None:
        self._later.append((self.now + seconds, do))

    def _kill_extender(self) -> None:
        self._say("the extender is killed")
        self.extender.process.end(signal.SIGKILL)
        self._in(EXTENDER_AWAY_S, self._start_extender)

    def _start_extender(self) -> None:
        self.extender.process.start()
        self._say("the extender is started")

    def _kill_agents(self) -> None:
        chosen = sorted(self.agents)[::10]
        self._say(f"the agents of {len(chosen)} nodes are killed")
        for name in chosen:
            self.agents[name].away = True
            self._in(SILENT_AFTER_S, lambda name=name: self.silence(name))  # type: ignore[misc]
            self._in(AGENTS_AWAY_S, lambda name=name: self._back(name))  # type: ignore[misc]

    def _back(self, name: str) -> None:
        self.agents[name].away = False
        self.publish(name)
        self._say(f"the agent of {name} is back")

    def _kill_api_server(self) -> None:
        """Nodes do nothing meanwhile, as their kubelets and publishers cannot either."""
        server = self.control.daemons["kube-apiserver"]
        self._say("the API server is killed")
        server.end(signal.SIGKILL)
        time.sleep(API_SERVER_AWAY_S)
        server.start()

        def answers() -> bool | None:
            try:
                return self.control.client.request("GET", "/readyz")[0] == 200 or None
            except OSError:
                return None

        poll(answers, "the API server", timeout_s=PATIENCE_S, every_s=0.1)
        self._say("the API server answers again")


def scheduler(
    extender: Extender,
    control: ControlPlane,
    name: str,
    *,
    port: int,
    asks: bool = True,
    qps: int = 0,
) -> Daemon:
    """Another kube-scheduler with a profile of its own.

    Args:
        extender: whose kube-scheduler's configuration it gets.
        control: the control plane.
        name: of the profile.
        port: of its own, on which it serves.
        asks: the same extender; else none.
        qps: requests to the API server in a second, where kube-scheduler's 50 are too few.
    """
    document = json.loads((extender.directory / "scheduler.json").read_text(encoding="utf-8"))
    document["profiles"] = [{"schedulerName": name}]
    if not asks:
        del document["extenders"]
    if qps:
        document["clientConnection"] |= {"qps": qps, "burst": qps}
    file = extender.directory / f"{name}.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    return Daemon(
        name,
        [
            *control.namespaces.enter(),
            str(control.programs / "kube-scheduler"),
            f"--config={file}",
            f"--secure-port={port}",
        ],
        extender.directory,
        control.environment,
    )


def names(kinds: Sequence[str]) -> tuple[str, ...]:
    """Profiles among which pods are shared out."""
    return (SCHEDULER, SECOND) if "two-schedulers" in kinds else (SCHEDULER,)
