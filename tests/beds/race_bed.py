"""The race bed: ordinary pods and an owner created at the same time on a real containerd.

An owner's CPUs leave everybody else's set in the answer to its creation. A container that is
between its own creation and its start can miss that. Each round makes three ordinary containers and
one exclusive one, looks at what the kernel lets their processes use from the first instruction on,
and says for how long a neighbour could run on the owner's CPU.

Works on two CPUs. Free of pytest.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from nri_numa.model.cpuset import NO_CPUS, CPUSet
from tests.beds import cgroups
from tests.beds.containerd import Containerd
from tests.beds.cri import (
    BEST_EFFORT,
    CRI,
    Container,
    CRIError,
    Pod,
    QoS,
    Resources,
    guaranteed,
    poll,
)
from tests.beds.images import FIRST_LINE_SCRIPT

MODES: Final = ("aligned", "free")
NEIGHBOURS: Final = 3
SETTLE_S: Final = 0.25
"""Sets that stay right for so long after the last start end a round."""
LIMIT_S: Final = 1.5
"""A round whose sets do not get right ends so long after the last start."""
MOMENT_MS: Final = 20
"""From so long after an owner's first instruction on, no neighbour is on its CPUs."""

OWNER_ANNOTATIONS: Final = {
    "numa.kubernetes.io/policy": "best-effort",
    "numa.kubernetes.io/cpus": "exclusive",
}

# The very first act of process 1: the time, then what it may use. Shell built-ins only, so that
# nothing comes first.
COMMAND: Final = (
    "/bin/sh",
    "-c",
    "began=$EPOCHREALTIME; "
    + FIRST_LINE_SCRIPT.replace(" numa_cpus=", " began=$began read=$EPOCHREALTIME numa_cpus="),
)
_FIRST_LINE = re.compile(r"cpus=(\S*) mems=\S* began=([\d.]+) read=([\d.]+)")


EVERY_S: Final = 0.005

_NAME = re.compile(rb"^Name:\s*(.*)$", re.MULTILINE)
_CPUS = re.compile(rb"^Cpus_allowed_list:\s*(\S*)$", re.MULTILINE)


class Sighting(NamedTuple):
    """What a process was allowed to run on at a moment, in seconds of the epoch."""

    at: float
    cpus: CPUSet


@dataclass(slots=True)
class Watched:
    """One container under observation."""

    procs: Path
    stage: str = ""
    track: list[Sighting] = field(default_factory=list)
    descriptor: int = -1


class Sampler:
    """Looks at the processes of containers every 5 ms, in a thread; a context manager.

    A process is found by its cgroup, because no call of the runtime tells the process id before
    the program runs. What runs before the program is the runtime's own and is not counted.
    """

    def __init__(self) -> None:
        self._watched: dict[str, Watched] = {}
        self._stop = threading.Event()
        # Two threads: the list of a cgroup's processes waits for whoever changes cgroups, and the
        # looks at processes shall not wait with it.
        self._threads = [
            threading.Thread(target=self._repeat, args=(each,), name="sampler", daemon=True)
            for each in (self._find, self._look)
        ]

    def __enter__(self) -> Sampler:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for watched in self._watched.values():
            if watched.descriptor >= 0:
                os.close(watched.descriptor)

    def watch(self, container: Container) -> Watched:
        base = cgroups.CGROUP_ROOT if cgroups.unified() else cgroups.CGROUP_ROOT / "cpuset"
        parent, name = container.pod.cgroup_parent.lstrip("/"), container.id
        if parent.endswith(".slice"):
            name = f"cri-containerd-{name}.scope"
        watched = Watched(base / parent / name / "cgroup.procs")
        self._watched[container.id] = watched
        return watched

    def _repeat(self, each: Callable[[Watched], None]) -> None:
        due = time.monotonic()
        while not self._stop.is_set():
            for watched in list(self._watched.values()):
                with contextlib.suppress(OSError):  # not there yet, or gone
                    each(watched)
            due = max(due + EVERY_S, time.monotonic())
            self._stop.wait(due - time.monotonic())

    def _look(self, watched: Watched) -> None:
        if watched.descriptor >= 0:
            at = time.time()
            text = os.pread(watched.descriptor, 8192, 0)
            if match := _CPUS.search(text):
                watched.track.append(Sighting(at, CPUSet.parse(match.group(1).decode())))

    def _find(self, watched: Watched) -> None:
        if watched.descriptor >= 0:
            return
        pids = watched.procs.read_text(encoding="ascii").split()
        watched.stage = watched.stage or "cgroup"
        for pid in pids:
            descriptor = os.open(f"/proc/{pid}/status", os.O_RDONLY | os.O_CLOEXEC)
            name = _NAME.search(os.pread(descriptor, 8192, 0))
            if name is not None and not name.group(1).startswith((b"runc", b"exe")):
                watched.descriptor, watched.stage = descriptor, "program"
                return
            if name is not None and name.group(1) == b"runc:[2:INIT]":
                watched.stage = "init"
            os.close(descriptor)


@dataclass(slots=True)
class Part:
    """One pod's container in one round, with the times of its calls (seconds of the epoch)."""

    name: str
    owner: bool = False
    container: Container | None = None
    watched: Watched | None = None
    create_called: float = 0.0
    created: float = 0.0
    started: float = 0.0
    first: First = field(default_factory=lambda: First(NO_CPUS, 0.0, 0.0))

    @property
    def tracked(self) -> list[Sighting]:
        """Its own first line, then what was seen from outside."""
        assert self.watched is not None
        later = (each for each in self.watched.track if each.at > self.first.read)
        return [Sighting(self.first.read, self.first.cpus), *later]

    def at_fault(self, owned: CPUSet) -> bool:
        """Whether it was on owned CPUs when last seen, or was never seen."""
        assert self.watched is not None
        return not self.watched.track or bool(self.watched.track[-1].cpus & owned)


@dataclass(slots=True)
class Round:
    """What one round showed.

    Attributes:
        wrong_ms: how long, since the owner's first instruction, a neighbour was seen on its CPU.
        problem: what was wrong whatever the time.
    """

    variant: str
    parts: Sequence[Part]
    wrong_ms: float = 0.0
    problem: str = ""


class RaceBed:
    """Runs rounds on one containerd without pods that a plugin serves; a context manager."""

    def __init__(self, containerd: Containerd) -> None:
        self._containerd = containerd
        self._cri: CRI = containerd.cri
        self._pool = ThreadPoolExecutor(NEIGHBOURS + 1, thread_name_prefix="pod")
        self._pods: dict[str, Pod] = {}
        self._count = 0
        self._priority = os.getpriority(os.PRIO_PROCESS, 0)

    def __enter__(self) -> RaceBed:
        # A busy machine shall not blind us: threads made from here on inherit it, the runtime and
        # the plugin run already. Where we may not, the gaps are longer, and reported.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, -15)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, self._priority)
        self._pool.shutdown()
        for pod in self._pods.values():
            with contextlib.suppress(CRIError):
                self._cri.remove_pod(pod)

    def rounds(self, mode: str, count: int) -> Iterator[Round]:
        """Run rounds one after the other.

        `mode`: ``aligned`` puts the owner's creation between a neighbour's creation and the end
        of its start; ``free`` starts the calls of all pods together, sandboxes included.
        """
        assert mode in MODES, f"mode {mode!r}: one of {', '.join(MODES)}"
        for number in range(count):
            yield self._aligned(number) if mode == "aligned" else self._free()

    # -- one round -------------------------------------------------------------------------

    def _aligned(self, number: int) -> Round:
        variant, when = _alignments(number)
        parts = _parts()
        neighbours, owner = parts[:-1], parts[-1]
        pods = [self._prepared(part) for part in parts]

        def play(sampler: Sampler) -> None:
            for part, pod in zip(neighbours, pods, strict=False):
                self._create(part, pod, sampler)
            calls = []
            if variant == "created":
                self._create(owner, pods[-1], sampler)
                calls = [self._pool.submit(self._start, part) for part in parts]
            else:
                calls = [self._pool.submit(self._start, part) for part in neighbours]
                when(neighbours[0])
                self._create(owner, pods[-1], sampler)
                self._start(owner)
            for call in calls:
                call.result()

        return self._round(variant, parts, play)

    def _free(self) -> Round:
        self._count += 1
        parts, barrier = _parts(), threading.Barrier(NEIGHBOURS + 1)
        pods: list[Pod] = []

        def one(part: Part, sampler: Sampler) -> None:
            barrier.wait(60)
            pod = self._run_pod(part, f"{part.name}-{self._count}")
            pods.append(pod)
            self._create(part, pod, sampler)
            self._start(part)

        def play(sampler: Sampler) -> None:
            calls = [self._pool.submit(one, part, sampler) for part in parts]
            for call in calls:
                call.exception()
            for call in calls:
                call.result()

        try:
            return self._round("threads", parts, play)
        finally:
            list(self._pool.map(self._cri.remove_pod, pods))

    def _round(self, variant: str, parts: Sequence[Part], play: Callable[[Sampler], None]) -> Round:
        result = Round(variant, parts)
        try:
            with Sampler() as sampler:
                play(sampler)
                owned = granted(self._cri, parts[-1].container)
                self._settle(parts, owned)
                end = time.time()
            for part in parts:
                assert part.container is not None
                part.first = first_instruction(self._cri, part.container)
            judge(result, owned, end)
        except CRIError as error:
            result.problem = str(error)
        finally:
            made = [part.container for part in parts if part.container is not None]
            list(self._pool.map(self._cri.remove, made))
        return result

    def _settle(self, parts: Sequence[Part], owned: CPUSet) -> None:
        last = max(part.started for part in parts)
        right_since = 0.0
        while True:
            now = time.time()
            right = not any(part.at_fault(owned) for part in parts if not part.owner)
            right_since = (right_since or now) if right else 0.0
            if right and now - max(right_since, last) >= SETTLE_S:
                return
            if now - last >= LIMIT_S:
                return
            time.sleep(0.01)

    # -- calls -----------------------------------------------------------------------------

    def _run_pod(self, part: Part, name: str) -> Pod:
        qos = QoS.GUARANTEED if part.owner else QoS.BEST_EFFORT
        annotations = OWNER_ANNOTATIONS if part.owner else {}
        return self._cri.run_pod(name, annotations=annotations, qos=qos)

    def _prepared(self, part: Part) -> Pod:
        if part.name not in self._pods:
            self._pods[part.name] = self._run_pod(part, part.name)
        return self._pods[part.name]

    def _create(self, part: Part, pod: Pod, sampler: Sampler) -> None:
        resources: Resources = guaranteed(1) if part.owner else BEST_EFFORT
        self._count += 1
        part.create_called = time.time()
        part.container = self._cri.create(
            pod, resources=resources, command=COMMAND, attempt=self._count
        )
        part.created = time.time()
        part.watched = sampler.watch(part.container)

    def _start(self, part: Part) -> None:
        assert part.container is not None
        self._cri.start(part.container)
        part.started = time.time()


def updated_beside_owners(containerd: Containerd, owners: int) -> tuple[int, list[float]]:
    """Owners come and go while the memory of neighbours is updated all the time.

    Returns how many updates there were, and of each look that saw a neighbour on an owner's CPU how
    many ms that was after the owner's first instruction.
    """
    cri, stop = containerd.cri, threading.Event()
    pods = [cri.run_pod(f"neighbour{n}", qos=QoS.BEST_EFFORT) for n in range(NEIGHBOURS)]
    neighbours = [cri.run(pod, command=COMMAND) for pod in pods]

    def updates() -> int:
        with containerd.client() as client:
            for number in itertools.count():
                if stop.is_set():
                    return number
                more = Resources(memory=(64 + number % 64) << 20)
                client.update(neighbours[number % NEIGHBOURS], more)
        raise AssertionError

    late: list[float] = []
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(updates)
        try:
            for _ in range(owners):
                owner = cri.run_pod("owner", annotations=OWNER_ANNOTATIONS)
                with Sampler() as sampler:
                    watched = [sampler.watch(one) for one in neighbours]
                    made = cri.create(owner, resources=guaranteed(1), command=COMMAND)
                    owned = granted(cri, made)
                    cri.start(made)
                    began = first_instruction(cri, made).at
                    time.sleep(0.3)
                    end = time.time()
                assert all(one.track for one in watched), "no neighbour was seen"
                late += [
                    1000 * (seen.at - began)
                    for one in watched
                    for seen in one.track
                    if began < seen.at < end and seen.cpus & owned
                ]
                cri.remove_pod(owner)
        finally:
            stop.set()
        count = stream.result()
    for pod in pods:
        cri.remove_pod(pod)
    return count, late


class First(NamedTuple):
    """What a program may use at its first instruction, when that was, and when it had read it."""

    cpus: CPUSet
    at: float
    read: float


def first_instruction(cri: CRI, container: Container) -> First:
    line = poll(lambda: next(iter(cri.logs(container)), None), "the first line of a container")
    match = _FIRST_LINE.match(line)
    assert match is not None, f"the first line is {line!r}"
    return First(CPUSet.parse(match.group(1)), float(match.group(2)), float(match.group(3)))


def granted(cri: CRI, container: Container | None) -> CPUSet:
    assert container is not None
    spec = cri.info(container)["runtimeSpec"]
    return CPUSet.parse(spec["linux"]["resources"]["cpu"]["cpus"])


def _parts() -> list[Part]:
    """The neighbours and, last, the owner."""
    neighbours = [Part(f"neighbour{number}") for number in range(NEIGHBOURS)]
    return [*neighbours, Part("owner", owner=True)]


def _alignments(number: int) -> tuple[str, Callable[[Part], None]]:
    """Where the owner's creation falls in the round with this number, and how to wait for it.

    Every other round sweeps the time after the neighbours' StartContainer was called, because what
    happens inside it shows from outside only in part.
    """

    def after(delay_s: float) -> Callable[[Part], None]:
        return lambda _: time.sleep(delay_s)

    def stage(*names: str) -> Callable[[Part], None]:
        def wait(part: Part) -> None:
            def there() -> bool | None:
                return (part.watched is not None and part.watched.stage in names) or None

            poll(there, f"{part.name}: {names[0]}", every_s=0.001)

        return wait

    def returned(part: Part) -> None:
        poll(lambda: part.started, f"{part.name} started", every_s=0.001)

    if number % 2:
        delay_ms = number // 2 * 10 % 200
        return f"{delay_ms // 50 * 50}-{delay_ms // 50 * 50 + 40} ms after the call", after(
            delay_ms / 1000
        )
    fixed: list[tuple[str, Callable[[Part], None]]] = [
        ("created", lambda _: None),
        ("cgroup", stage("cgroup", "init", "program")),
        ("init", stage("init", "program")),
        ("program", stage("program")),
        ("returned", returned),
    ]
    return fixed[number // 2 % len(fixed)]


def judge(result: Round, owned: CPUSet, end: float) -> None:
    *neighbours, owner = result.parts
    if owner.first.cpus != owned:
        result.problem = f"the owner has {owner.first.cpus}, and was granted {owned}"
    for part in neighbours:
        # Created after the grant: nothing was in flight, so the first instruction is right.
        if part.create_called > owner.created and part.first.cpus & owned:
            result.problem = f"{part.name} began on {part.first.cpus}, {owned} are owned"
        began = max(owner.first.at, part.first.at)
        wrong = [each.at for each in part.tracked if each.cpus & owned and began < each.at < end]
        result.wrong_ms = max([result.wrong_ms, *(1000 * (at - began) for at in wrong)])
