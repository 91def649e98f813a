"""How far a request travels: the modules that one CreateContainer enters, and the values it makes.

``python -m tools.hops`` sends three requests from bytes to bytes through the session, the handler,
the agent, the engine and the checkpoint, and counts what Python really calls in between:

- *modules*: modules of `nri_numa` with a function that was called, in the order of the first call;
- *crossings*: calls of a function of one module from a function of another;
- *values*: classes of `nri_numa` of which an object was made.

What is done after the reply left is not counted, nor are the two modules that own the socket
(`nri.transport`, `nri.link`); modules that are read only for a constant or a type are not entered.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType

from google.protobuf.message import Message

from nri_numa.agent.agent import Agent
from nri_numa.agent.current_state import CurrentState
from nri_numa.agent.handler import AgentHandler
from nri_numa.agent.loop import Clock
from nri_numa.engine.node_model import NodeModel
from nri_numa.machine.cgroups import CgroupReader, CgroupWriter
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.settings import Settings
from nri_numa.nri import conversion
from nri_numa.nri.wire import events as ev
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.session import PluginSession, RuntimeSession
from nri_numa.nri.wire.versions import AGENT_EVENTS
from nri_numa.observe.metrics import Metrics
from nri_numa.store.checkpoint import CheckpointStore

PACKAGE = "nri_numa."
PREFIX = "numa.kubernetes.io/"
GIB = 1 << 30

REQUESTS: Mapping[str, tuple[Mapping[str, str], int]] = {
    "an explicit list": ({"numacpu": "8-11"}, 4),
    "CPUs of its own under a policy": ({"policy": "single-numa-node", "cpus": "exclusive"}, 4),
    "nothing asked": ({}, 0),
}
"""By what is asked: the annotations, and whole CPUs; a pod with none of these is BestEffort."""


@dataclass(frozen=True)
class Hops:
    """What one request called.

    Attributes:
        modules: entered, in the order of the first entry, without ``nri_numa.``.
        crossings: calls from one of them into another.
        values: classes of which objects were made, in the order of the first.
    """

    modules: tuple[str, ...]
    crossings: int
    values: tuple[str, ...]


class _Clock(Clock):
    """Stands still; what may wait until the reply has left is put in a list."""

    def __init__(self, later: list[Callable[[], object]]) -> None:
        self._later = later

    def time(self) -> float:
        return 1.0

    def monotonic(self) -> float:
        return 0.0

    def call_soon(self, function: Callable[[], object]) -> None:
        self._later.append(function)


class Node:
    """An agent beside a runtime without a socket; one container follows the shared pool.

    Args:
        directory: for the checkpoint.
    """

    def __init__(self, directory: str) -> None:
        topology = build_synthetic_topology(
            sockets=2, numa_per_socket=2, cores_per_numa=8, memory_gib=64
        )
        metrics = Metrics("hops")
        store = CheckpointStore(directory, identity={"machine": "hops"}, clock=lambda: 1.0)
        store.load()
        self._later: list[Callable[[], object]] = []
        clock = _Clock(self._later)
        machine = NodeModel(topology=topology, settings=Settings(), key=b"signs annotations")
        current = CurrentState(machine, store, clock)
        writer = CgroupWriter(CgroupReader("/nowhere"))
        self._handler = AgentHandler(Agent(current, writer, metrics))
        self._plugin, self._runtime = PluginSession(), RuntimeSession()
        self._plugin.register_plugin("hops", "10")
        (registration,) = self._replies()
        self._runtime.reply(registration.stream)
        self._ask("Configure", pb.ConfigureRequest())
        self._ask("Synchronize", pb.SynchronizeRequest())
        # What is read once and remembered is remembered by now.
        for n, asked in enumerate(REQUESTS.values()):
            self._ask("CreateContainer", _request(f"first-{n}", *asked))
            self._ask("StopContainer", pb.StopContainerRequest(container={"id": f"c-first-{n}"}))
        self._ask("CreateContainer", _request("resident", {}, 0))

    def create(self, annotations: Mapping[str, str], cpus: int) -> Hops:
        """Send one CreateContainer; what it asked for is given back.

        Raises:
            RuntimeError: it was refused.
        """
        self._runtime.call_plugin("CreateContainer", _request("new", annotations, cpus))
        data = self._runtime.data_to_send()
        found = counted(lambda: self._answer(data))
        self._finish()
        self._ask("StopContainer", pb.StopContainerRequest(container={"id": "c-new"}))
        return found

    def _ask(self, method: str, request: Message) -> None:
        self._runtime.call_plugin(method, request)
        self._answer(self._runtime.data_to_send())
        self._finish()

    def _answer(self, data: bytes) -> None:
        """From bytes to bytes, as `nri_numa.nri.link` does it."""
        session = self._plugin
        session.receive_data(data)
        while (event := session.next_event()) is not None:
            match event:
                case ev.ConfigureRequested(stream):
                    session.reply(stream, pb.ConfigureResponse(events=AGENT_EVENTS))
                case ev.SynchronizeRequested(stream):
                    session.reply(stream)
                case ev.EventRequested():
                    session.reply(event.stream, conversion.answer_request(self._handler, event))
                case _:
                    pass
        self._sent = session.data_to_send()

    def _finish(self) -> None:
        """Do what waited for the reply, and let the runtime read it."""
        while self._later:
            self._later.pop(0)()
        self._runtime.receive_data(self._sent)
        while (event := self._runtime.next_event()) is not None:
            if isinstance(event, ev.RequestAnswered) and event.status is not None:
                raise RuntimeError(f"{event.method}: {event.status}")

    def _replies(self) -> list[ev.RuntimeSessionEvent]:
        self._runtime.receive_data(self._plugin.data_to_send())
        return list(iter(self._runtime.next_event, None))


def _request(name: str, annotations: Mapping[str, str], cpus: int) -> pb.CreateContainerRequest:
    """What containerd would send about a container that asks for this."""
    request = pb.CreateContainerRequest()
    pod, container = request.pod, request.container
    pod.id, pod.uid, pod.name, pod.namespace = f"s-{name}", f"u-{name}", name, "shop"
    pod.annotations.update({PREFIX + key: value for key, value in annotations.items()})
    pod.linux.cgroup_parent = f"/kubepods/{'' if cpus else 'besteffort/'}pod{pod.uid}"
    container.id, container.pod_sandbox_id, container.name = f"c-{name}", pod.id, "app"
    amounts = container.linux.resources
    amounts.cpu.shares.value = cpus * 1024 or 2
    if cpus:
        amounts.cpu.quota.value, amounts.cpu.period.value = cpus * 100_000, 100_000
        amounts.memory.limit.value = GIB
        pod.linux.pod_resources.CopyFrom(amounts)
    return request


def counted(function: Callable[[], object]) -> Hops:
    """Run ``function`` and see which modules of `nri_numa` it enters."""
    modules: dict[str, None] = {}
    values: dict[str, None] = {}
    crossings = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal crossings
        if event != "call":
            return
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith(PACKAGE) and ".pb." not in name:
            modules.setdefault(name.removeprefix(PACKAGE))
            crossings += _caller(frame) not in ("", name)
        if frame.f_code.co_name in ("__init__", "__new__") and frame.f_code.co_argcount:
            first = frame.f_locals.get(frame.f_code.co_varnames[0])
            kind = first if isinstance(first, type) else type(first)
            if kind.__module__.startswith(PACKAGE):
                values.setdefault(kind.__qualname__)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return Hops(tuple(modules), crossings, tuple(values))


def _caller(frame: FrameType) -> str:
    """The module of `nri_numa` that called, be it through somebody else's function."""
    caller = frame.f_back
    while caller is not None:
        name = str(caller.f_globals.get("__name__", ""))
        if name.startswith(PACKAGE):
            return name
        if caller.f_code is counted.__code__:
            break
        caller = caller.f_back
    return ""


def measure() -> dict[str, Hops]:
    """Every request of `REQUESTS`, each on the same node."""
    with tempfile.TemporaryDirectory() as directory:
        node = Node(directory)
        return {what: node.create(*asked) for what, asked in REQUESTS.items()}


def main() -> None:
    """Print the figures and the ways."""
    found = measure()
    for what, hops in found.items():
        sys.stdout.write(
            f"{what}: {len(hops.modules)} modules, {hops.crossings} crossings,"
            f" {len(hops.values)} kinds of values\n"
        )
    for what, hops in found.items():
        sys.stdout.write(
            f"\n{what}\n  modules: {' > '.join(hops.modules)}\n  values: {', '.join(hops.values)}\n"
        )


if __name__ == "__main__":
    main()
