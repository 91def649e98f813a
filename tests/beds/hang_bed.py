"""A runtime that hangs: how to bring it about on purpose, how to notice, how to look for it.

containerd 2.1 takes a read lock in RemovePodSandbox and once more for each container that is still
in the sandbox. A plugin that registers meanwhile waits to write, and Go gives no second read lock
while somebody waits to write: the removal waits for the registration, the registration for the
removal, and every later call for both, until the daemon is killed. Free of pytest.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc

from nri_numa.cri.pb import cri_pb2
from nri_numa.nri.wire import events as ev
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.session import PluginSession
from nri_numa.nri.wire.versions import Event
from tests.beds import cgroups
from tests.beds.containerd import Containerd
from tests.beds.cri import BEST_EFFORT, CRI, CRIError, Pod, QoS, burstable, guaranteed, poll
from tests.beds.plugin_process import PluginProcess
from tests.machines.cpus import FIRST, LAST, MACHINE

CALL_LIMIT_S: Final = 30.0
"""A call of the runtime that takes longer never comes back: none here waits for a grace period."""
INTERVAL_S: Final = 0.1
STRESS_CONFIG: Final = {"reconcile": {"interval": "1s", "maxRepairs": 1_000_000}}
SLEEP: Final = ("/bin/sleep", "1000000")
SYNCHRONISING: Final = "Synchronizing NRI (plugin) with current runtime state"
"""What the daemon writes for each plugin that registers."""
PREFIX: Final = "numa.kubernetes.io/"


def register_once(socket_path: Path, *, name: str = "hang", timeout_s: float = 5.0) -> str:
    """Register a plugin of our own, answer what is asked, and leave once synchronised.

    Args:
        socket_path: the runtime's NRI socket.
        name: of the plugin.
        timeout_s: limit of the whole.

    Returns:
        How far it came: ``connected``, ``registered``, ``configured`` or ``synchronised``.
    """
    stage, end = "connected", time.monotonic() + timeout_s
    session = PluginSession()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(socket_path))
        session.register(name, "99")
        connection.sendall(session.data_to_send())
        while stage != "synchronised" and (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            try:
                data = connection.recv(1 << 16)
            except TimeoutError:
                break
            if not data:
                break
            session.receive_data(data)
            while (event := session.next_event()) is not None:
                match event:
                    case ev.Registered():
                        stage = "registered" if stage == "connected" else stage
                    case ev.ConfigureRequested():
                        # One harmless bit: zero would mean all events.
                        mask = Event.REMOVE_POD_SANDBOX.bit
                        session.reply(event.stream, pb.ConfigureResponse(events=mask))
                        stage = "configured"
                    case ev.SynchronizeRequested():
                        session.reply(event.stream, pb.SynchronizeResponse())
                        stage = "synchronised"
                    case _:
                        pass
                connection.sendall(session.data_to_send())
    return stage


def provoke_hang(
    containerd: Containerd, *, containers: int = 4, attempts: int = 5, wait_s: float = 8.0
) -> bool:
    """Hang a running containerd: register while a sandbox with containers is removed.

    A daemon that hangs must be killed (`Containerd.kill`, `Containerd.close`): nothing else ends
    it. One that does not is left without the pods of this function.

    Args:
        containerd: running.
        containers: in the sandbox; the removal takes longer with more.
        attempts: sandboxes to try it with.
        wait_s: a removal that takes so long hangs.

    Returns:
        Whether it hangs now.
    """
    for attempt in range(attempts):
        with (
            containerd.client(timeout_s=wait_s) as cri,
            ThreadPoolExecutor(1) as pool,
        ):
            pod = cri.run_pod(f"hang{attempt}", qos=QoS.BEST_EFFORT)
            for number in range(containers):
                cri.run(pod, f"c{number}", command=SLEEP)
            removal = pool.submit(remove_sandbox, cri, pod)
            # From the first moments of the removal to its end: it holds the lock all the while.
            while not removal.done():
                register_once(containerd.nri_socket, timeout_s=wait_s)
            if hangs(removal.exception()):
                return True
    return False


def remove_sandbox(cri: CRI, pod: Pod) -> None:
    """RemovePodSandbox alone, which stops and removes the containers too."""
    request = cri_pb2.RemovePodSandboxRequest(pod_sandbox_id=pod.id)
    cri.call("RemovePodSandbox", request, cri_pb2.RemovePodSandboxResponse)


def hangs(error: BaseException | None) -> bool:
    """Whether a call came to nothing because no answer came within its limit."""
    # Which of the two sides notices the limit first decides between the codes.
    given_up = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
    return isinstance(error, CRIError) and error.code in given_up


def keep_stacks(containerd: Containerd, target: Path) -> str:
    """Have the daemon write the stacks of all its goroutines, and keep its log, which has them too.

    Args:
        containerd: running, hanging or not.
        target: where the log goes.

    Returns:
        The stacks; empty when the daemon wrote none within 10 s.
    """
    # Where containerd writes them besides its log; fixed in its code.
    written = Path(tempfile.gettempdir()) / f"containerd.{containerd.pid}.stacks.log"
    begin = containerd.log_file.stat().st_size

    def told() -> bool | None:
        with containerd.log_file.open("rb") as log:
            log.seek(begin)
            return b"goroutine stack dump written" in log.read() or None

    os.kill(containerd.pid, signal.SIGUSR1)
    stacks = ""
    with contextlib.suppress(TimeoutError):
        poll(told, "stacks of the goroutines", timeout_s=10)
        stacks = written.read_text(encoding="utf-8", errors="replace")
    written.unlink(missing_ok=True)
    shutil.copyfile(containerd.log_file, target)
    return stacks


@dataclass(slots=True)
class HangReport:
    """What a stress run showed.

    Attributes:
        pods: pods made and removed.
        hung: the call that never returned; empty without a hang.
        hung_after: pods until then.
        seconds: duration.
        kills: times the plugin was killed.
        registrations: plugins that registered, as the daemon's log tells: links and pushes.
        slowest: for each method, its longest call in seconds.
        errors: calls that failed, by the beginning of their words.
        broken: why the bed itself gave up; empty where it did not.
        log: the daemon's log with the stacks of all goroutines, where it hung.
    """

    pods: int = 0
    hung: str = ""
    hung_after: int = 0
    seconds: float = 0.0
    kills: int = 0
    registrations: int = 0
    slowest: dict[str, float] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    broken: str = ""
    log: Path | None = None


class HangStress:
    """Pods removed by force while the plugin has reasons to register.

    Args:
        containerd: running, without pods.
        plugin: running on it with `STRESS_CONFIG`.
        keep: where the daemon's log goes if it hangs.
        kills: seconds between two ends of the plugin by SIGKILL; 0 is none.
        workers: threads.
    """

    def __init__(
        self,
        containerd: Containerd,
        plugin: PluginProcess,
        keep: Path,
        *,
        kills: float = 0.0,
        workers: int = 3,
    ) -> None:
        self.report = HangReport()
        self._containerd = containerd
        self._plugin = plugin
        self._keep = keep
        self._kill_every_s = kills
        self._workers = workers
        self._lock = threading.Lock()
        self._process = threading.Lock()
        self._over = threading.Event()

    def run(self, seconds: float) -> HangReport:
        """Go on for so long, or until a call does not return."""
        began = time.monotonic()
        cri = self._client()
        pod = cri.run_pod("listed", annotations={PREFIX + "numacpu": LAST})
        listed = cri.run(pod, command=SLEEP)
        drifting = f"{pod.cgroup_parent}/{listed.id}"
        works: list[Callable[[], None]] = [
            *(lambda seed=number: self._churn(seed) for number in range(self._workers)),  # type: ignore[misc]  # bound per turn
            lambda: self._drift(drifting),
            self._reload,
        ]
        if self._kill_every_s:
            works.append(self._kill)
        with ThreadPoolExecutor(len(works)) as pool:
            running = [pool.submit(work) for work in works]
            while time.monotonic() - began < seconds and not self._over.is_set():
                self._over.wait(1)
                if any(one.done() for one in running):
                    break
            self._over.set()
            for one in running:
                if (error := one.exception()) is not None:
                    self.report.broken = f"{type(error).__name__}: {error}"
        self.report.seconds = time.monotonic() - began
        self.report.registrations = self._containerd.log().count(SYNCHRONISING)
        cri.close()
        return self.report

    def _client(self) -> CRI:
        return self._containerd.client(timeout_s=CALL_LIMIT_S)

    def _timed(self, name: str, call: Callable[[], object]) -> bool:
        """Make one call; whether it was answered, be it with an error."""
        began = time.monotonic()
        try:
            call()
        except CRIError as error:
            if hangs(error):
                self._hung(error.method)
                return False
            self._note(str(error))
        took = time.monotonic() - began
        with self._lock:
            self.report.slowest[name] = max(took, self.report.slowest.get(name, 0.0))
        return True

    def _note(self, text: str) -> None:
        # A refusal names the pod; all of a reason count together.
        refused = re.search(r"desc = (\w+): pod ", text)
        with self._lock:
            self.report.errors[f"refused: {refused.group(1)}" if refused else text[:300]] += 1

    def _hung(self, method: str) -> None:
        with self._lock:
            if not self.report.hung:
                self.report.hung, self.report.hung_after = method, self.report.pods
                keep_stacks(self._containerd, self._keep)
                self.report.log = self._keep
        self._over.set()

    def _churn(self, seed: int) -> None:
        rng = random.Random(seed)
        with self._client() as cri:
            number = 0
            while not self._over.is_set():
                number += 1
                if not self._pod(cri, rng, f"w{seed}-{number}"):
                    return
                self._over.wait(INTERVAL_S)

    def _pod(self, cri: CRI, rng: random.Random, name: str) -> bool:
        """One pod comes and is removed with its containers in it; whether all was answered."""
        owner = rng.random() < 0.3
        annotations = {PREFIX + "cpus": "exclusive"} if owner else {}
        resources = guaranteed(1) if owner else rng.choice((BEST_EFFORT, burstable(0.1)))
        made: list[Pod] = []

        def create() -> None:
            qos = QoS.GUARANTEED if owner else QoS.BURSTABLE
            made.append(cri.run_pod(name, annotations=annotations, qos=qos))

        if not self._timed("RunPodSandbox", create) or not made:
            return not self._over.is_set()
        pod = made[0]
        for number in range(1 if owner else rng.randint(1, 3)):

            def run(number: int = number) -> None:
                cri.run(pod, f"c{number}", resources=resources, command=SLEEP)

            if not self._timed("CreateContainer+StartContainer", run):
                return False
        self._over.wait(rng.random() * 2 * INTERVAL_S)
        # As crictl rmp -f does, or the removal alone: containers are in the sandbox either way.
        stopped = rng.random() < 0.5 and not self._timed(
            "StopPodSandbox", lambda: cri.stop_pod(pod)
        )
        if stopped or not self._timed("RemovePodSandbox", lambda: remove_sandbox(cri, pod)):
            return False
        with self._lock:
            self.report.pods += 1
        return True

    def _drift(self, cgroup: str) -> None:
        """Somebody else writes a cgroup file again and again: each repair is a push."""
        while not self._over.wait(0.5):
            with contextlib.suppress(OSError):
                cgroups.write_cpus(cgroup, str(MACHINE))

    def _reload(self) -> None:
        """The pool changes without a request that could carry it: what follows is pushed."""
        narrow = False
        while not self._over.wait(1.0):
            narrow = not narrow
            reserved = {"reservedCPUs": FIRST, "strictReserved": True} if narrow else {}
            with self._process, contextlib.suppress(AssertionError):  # it may not run just now
                self._plugin.reload({**STRESS_CONFIG, **reserved})

    def _kill(self) -> None:
        rng = random.Random(99)
        while not self._over.wait(self._kill_every_s * (0.5 + rng.random())):
            with self._process:
                self._plugin.kill()
                self.report.kills += 1
                self._over.wait(rng.random() * 0.5)
                try:
                    self._plugin.start()
                except RuntimeError as error:  # not ready in half a minute; a hang shows in calls
                    self._note(str(error).partition("\n")[0])
