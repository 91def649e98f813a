"""Pods of all kinds, created, replaced and removed at random: the workers of the churn."""

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from tests.beds.cri import (
    BEST_EFFORT,
    CRI,
    Container,
    CRIError,
    Pod,
    QoS,
    Resources,
    burstable,
    guaranteed,
)
from tests.checks.churn_figures import Fact, Ground, Memory
from tests.machines.vm_machine import format_list

_PREFIX = "numa.kubernetes.io/"
_MIB = 1024 * 1024
# Ways of removing a pod, and how often; a kubelet does not take the last two.
_WAYS = {"stop, remove, sandbox": 6, "remove, sandbox": 6, "sandbox": 1, "sandbox at once": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A pod to create: its annotations, and what each of its containers will have."""

    kind: str
    annotations: Mapping[str, str]
    containers: tuple[Resources, ...]
    qos: QoS = QoS.GUARANTEED
    owns: tuple[int, ...] = ()
    listed: frozenset[int] | None = None
    isolate: bool = False
    memory: Memory = Memory.ALL
    memory_nodes: frozenset[int] = frozenset()


def _ask(rng: random.Random, ground: Ground) -> Wish:
    kind = rng.choices(
        ("ordinary", "shared", "exclusive", "isolate", "listed", "listed-owner", "scope-pod"),
        (30, 14, 22, 9, 12, 5, 8),
    )[0]
    aligned = {"policy": rng.choice(("best-effort", "restricted", "single-numa-node"))}
    if kind == "ordinary":
        several = rng.choice((1, 1, 2))
        if rng.random() < 0.5:
            return Wish(
                kind=kind, annotations={}, containers=(BEST_EFFORT,) * several, qos=QoS.BEST_EFFORT
            )
        wanted = burstable(0.2, memory_limit=32 * _MIB)
        return Wish(kind=kind, annotations={}, containers=(wanted,) * several, qos=QoS.BURSTABLE)
    if kind == "shared":
        return Wish(
            kind=kind,
            annotations={**aligned, "cpus": "shared"},
            containers=(guaranteed(0.5, 16 * _MIB),),
            memory=Memory.LOCAL,
        )
    if kind == "scope-pod":
        counts = (rng.choice((1, 2)), 1)
        return Wish(
            kind=kind,
            annotations={"policy": "single-numa-node", "scope": "pod", "cpus": "exclusive"},
            containers=tuple(guaranteed(count, 16 * _MIB) for count in counts),
            owns=counts,
            memory=Memory.LOCAL,
        )
    if kind in ("listed", "listed-owner"):
        node = rng.choice(sorted(ground.memory_nodes & frozenset(ground.numa_node.values())))
        near = sorted(cpu for cpu, numa_node in ground.numa_node.items() if numa_node == node)
        cpus = frozenset(rng.sample(near, rng.choice((1, 1, 2))))
        own = kind == "listed-owner"
        return Wish(
            kind=kind,
            annotations={"numacpu": format_list(cpus), "numamem": str(node)}
            | ({"cpus": "exclusive"} if own else {}),
            containers=(guaranteed(len(cpus) if own else 0.5, 16 * _MIB),),
            owns=(len(cpus),) if own else (),
            listed=cpus,
            memory=Memory.LISTED,
            memory_nodes=frozenset({node}),
        )
    if kind == "isolate":
        count = rng.choice((1, 1, 2))
        return Wish(
            kind=kind,
            annotations={"cpus": "exclusive", "smt": "isolate"},
            containers=(guaranteed(count, 16 * _MIB),),
            owns=(count,),
            isolate=True,
            memory=Memory.ANY,
        )
    count = rng.choice((1, 1, 2, 2, 3, 4))
    with_policy = rng.random() < 0.5
    return Wish(
        kind=kind,
        annotations={"cpus": "exclusive"} | (aligned if with_policy else {}),
        containers=(guaranteed(count, 16 * _MIB),),
        owns=(count,),
        memory=Memory.LOCAL if with_policy else Memory.ANY,
    )


@dataclass
class _Live:
    """A pod that was created, with its containers that were."""

    wish: Wish
    pod: Pod
    containers: list[Container] = field(default_factory=list)


class Workers:
    """What threads do with pods, and what they count.

    Args:
        rounds: times that a pod's containers are replaced, at most.
        keep: pods that each thread lets live while it creates the next, at most.
    """

    def __init__(
        self,
        seed: int,
        rounds: int,
        keep: int,
        patience_s: float,
        ground: Ground,
        client: Callable[[], CRI],
        over: Callable[[], bool],
    ) -> None:
        self._seed = seed
        self._rounds = rounds
        self._keep = keep
        self._patience_s = patience_s
        self._answered = time.monotonic()
        self._ground = ground
        self._tried = 0
        self._client = client
        self._over = over
        self._lock = threading.Lock()
        self._doomed: list[str] = []
        self.facts: dict[int, Fact] = {}
        self.pods = self.containers = self.rejected = 0
        self.rejections: dict[str, str] = {}
        self.kinds: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    def work(self, number: int) -> None:
        """Bring pods and take them away until it is over."""
        rng = random.Random(self._seed * 1000 + number)
        kept: list[_Live] = []
        with self._client() as cri:
            while not self._over():
                live = self._bring(cri, rng)
                self._sweep_up(cri)
                if live is not None:
                    time.sleep(rng.choice((0.1, 0.5, 1, 3)) * rng.random())
                    for _ in range(rng.randint(0, self._rounds)):
                        if live.containers:
                            self._again(cri, rng, live)
                    kept.append(live)
                # What is left at the end settles, is looked at, and goes then.
                while len(kept) > rng.randint(0, self._keep) and not self._over():
                    self._take_away(cri, rng, kept.pop(rng.randrange(len(kept))))

    def _failure(self, error: CRIError) -> None:
        # A slow machine lets one call or another run out of time, too: what hangs answers nobody.
        quiet = time.monotonic() - self._answered > self._patience_s
        if error.code is grpc.StatusCode.DEADLINE_EXCEEDED and quiet:
            raise RuntimeError(f"the runtime answers nothing any more: {error}")
        with self._lock:
            self.failed[f"{error.method} {error.code.name}"] += 1

    def _bring(self, cri: CRI, rng: random.Random) -> _Live | None:
        wish = _ask(rng, self._ground)
        with self._lock:
            self._tried += 1
            name = f"{wish.kind}-{self._tried}"
        annotations = {_PREFIX + key: text for key, text in wish.annotations.items()}
        try:
            pod = cri.run_pod(name, annotations=annotations, qos=wish.qos)
            self._answered = time.monotonic()
        except CRIError as error:
            self._failure(error)
            time.sleep(1)  # the runtime is being started, perhaps
            return None
        with self._lock:
            self.pods += 1
            self.kinds[wish.kind] += 1
        live = _Live(wish=wish, pod=pod)
        for place in range(len(wish.containers)):
            if not self._container(cri, live, place, 0):
                break
        if not live.containers:
            self._force(cri, live)
            return None
        return live

    def _container(self, cri: CRI, live: _Live, place: int, attempt: int) -> bool:
        wish = live.wish
        with self._lock:
            serial = len(self.facts) + 1
            self.facts[serial] = Fact(
                serial=serial,
                pod=f"{live.pod.name}/c{place}",
                kind=wish.kind,
                owns=wish.owns[place] if wish.owns else 0,
                listed=wish.listed,
                isolate=wish.isolate,
                memory=wish.memory,
                memory_nodes=wish.memory_nodes,
            )
        try:
            container = cri.create(
                live.pod,
                f"c{place}",
                resources=wish.containers[place],
                command=("/bin/sleep", "1000000", str(serial)),
                attempt=attempt,
            )
        except CRIError as error:
            if error.code is grpc.StatusCode.UNKNOWN and live.pod.name in error.message:
                with self._lock:
                    self.rejected += 1
                    self.rejections.setdefault(wish.kind, error.message[-300:])
            else:
                self._failure(error)
            return False
        live.containers.append(container)
        self._answered = time.monotonic()
        try:
            cri.start(container)
            self._answered = time.monotonic()
        except CRIError as error:
            self._failure(error)
            return False
        with self._lock:
            self.containers += 1
        return True

    def _again(self, cri: CRI, rng: random.Random, live: _Live) -> None:
        """A container ends, by itself or stopped, and the next attempt takes its place."""
        place = rng.randrange(len(live.containers))
        old = live.containers[place]
        try:
            if rng.random() < 0.3:
                pid = cri.pid(old)
                if pid > 1:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            else:
                cri.stop(old)
            cri.remove(old)
            self._answered = time.monotonic()
        except CRIError as error:
            self._failure(error)
            return
        live.containers.remove(old)
        self._container(cri, live, int(old.name[1:]), 1)

    def _take_away(self, cri: CRI, rng: random.Random, live: _Live) -> None:
        (way,) = rng.choices(list(_WAYS), list(_WAYS.values()))
        try:
            if way == "stop, remove, sandbox":
                for container in live.containers:
                    cri.stop(container)
            if way in ("stop, remove, sandbox", "remove, sandbox"):
                for container in live.containers:
                    cri.remove(container, stop=False)
            if way != "sandbox at once":
                cri.stop_pod(live.pod)
            cri.remove_pod(live.pod, stop=False)
            self._answered = time.monotonic()
        except CRIError as error:
            self._failure(error)
            self._force(cri, live)
            return
        self._forget(live)

    def _forget(self, live: _Live) -> None:
        with contextlib.suppress(OSError):
            (Path("/sys/fs/cgroup") / live.pod.cgroup_parent.lstrip("/")).rmdir()

    def _force(self, cri: CRI, live: _Live) -> None:
        try:
            cri.remove_pod(live.pod)
        except CRIError as error:
            self._failure(error)
            with self._lock:
                self._doomed.append(live.pod.id)
        self._forget(live)

    def _sweep_up(self, cri: CRI) -> None:
        """Try again to remove what could not be removed."""
        with self._lock:
            doomed, self._doomed = self._doomed, []
        for pod_id in doomed:
            try:
                cri.remove_pod(pod_id)
            except CRIError as error:
                self._failure(error)
                with self._lock:
                    self._doomed.append(pod_id)
