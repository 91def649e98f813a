"""Pods that come and go while plugin and runtime are killed, in a guest with CPUs enough.

Workers (`tests.vm.churn_pods`) create, replace and remove pods of all kinds from several threads;
one more thread kills the plugin and restarts containerd; `tests.vm.churn_watch` reads all the time
what every container may use, and `tests.checks.churn_figures` makes figures of it.
"""

import contextlib
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from tests.beds.containerd import Binaries
from tests.beds.cri import CRI, poll
from tests.checks.churn_figures import (
    KINDS,
    LIST,
    UNOWNED,
    Fact,
    Ground,
    Interval,
    Span,
    away,
    episodes,
    figure,
)
from tests.vm import words
from tests.vm.churn_pods import Workers
from tests.vm.churn_report import Options, Report, read_spans, told, write_episodes
from tests.vm.churn_signs import LinkLog
from tests.vm.churn_watch import serial_of
from tests.vm.nursery import NurseryPlugin

_KUBEPODS = Path("/sys/fs/cgroup/kubepods")
# Under emulation a call takes seconds; one that takes this long does not come back any more.
_CALL_LIMIT_S = 120.0
_START_LIMIT_S = 240.0
_SWEEP_S = 0.1
# A registration that hangs is said after a minute at most: nothing is killed before.
_BACK_LIMIT_S = 120.0
_SAY_EVERY_S = 15.0
# Seconds of a guest that counts instructions are minutes outside.
_REPORT_EVERY_S = 30.0


class Churn:
    """One run."""

    def __init__(
        self, options: Options, machine: str, binaries: Binaries, shared: Path, directory: Path
    ) -> None:
        from tests.vm.guest import GuestContainerd

        self.options = options
        self._machine = machine
        self._shared = shared
        self._directory = directory
        self.containerd = GuestContainerd(
            binaries, directory, nri_request_timeout="30s", log_level="info"
        )
        self.containerd.log_file = shared / "churn-containerd.log"
        self.containerd.end_limit_s = _START_LIMIT_S
        self.plugin = NurseryPlugin(
            directory / "plugin", self.containerd.nri_socket, shared / "churn-plugin.log"
        )
        self.ground = Ground(
            siblings={cpu: words.siblings(cpu) for cpu in words.online_cpus()},
            numa_node={cpu: node for node in words.numa_nodes() for cpu in words.numa_cpus(node)},
            memory_nodes=frozenset(
                node for node in words.numa_nodes() if words.numa_memory(node) > 0
            ),
        )
        self._spans = directory / "spans.jsonl"
        self._link = LinkLog(self.plugin.log_file)
        self.workers = Workers(
            options.seed,
            options.rounds,
            options.keep,
            _CALL_LIMIT_S * 0.9,
            self.ground,
            self._client,
            self._over,
        )
        self._kills = self._restarts = 0
        self._moments: list[tuple[float, bool]] = []
        self._begin = self._end = 0.0
        self._broken: list[BaseException] = []

    # -- all of it -------------------------------------------------------------------------

    def run(self) -> Report:
        self._directory.mkdir(parents=True, exist_ok=True)
        self.containerd.start(timeout_s=_START_LIMIT_S)
        self.plugin.directory.mkdir(parents=True, exist_ok=True)
        self.plugin.write_config({"log": {"format": "json", "level": "info"}})
        self.plugin.start()
        self._moments.append((time.time(), True))
        _KUBEPODS.mkdir(exist_ok=True)
        watch = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.vm.churn_watch",
                str(_KUBEPODS),
                str(self._spans),
                str(_SWEEP_S),
            ]
        )
        try:
            self._begin = time.time()
            self._churn()
            self._end = time.time()
            unsettled = self._settle()
        finally:
            watch.send_signal(signal.SIGTERM)
            watch.wait(60)
        return self._report(unsettled)

    def close(self) -> None:
        self.plugin.close()
        self.containerd.close()

    def _over(self) -> bool:
        late = self.options.minutes and time.time() > self._begin + self.options.minutes * 60
        return bool(late or self.workers.pods >= self.options.pods or self._broken)

    def _done(self) -> float:
        """The part that is done, by pods or by time."""
        pods = self.workers.pods / self.options.pods
        minutes = self.options.minutes
        return max(pods, (time.time() - self._begin) / (minutes * 60) if minutes else 0.0)

    def _churn(self) -> None:
        threads = [
            threading.Thread(target=self._guard, args=(number,), daemon=True)
            for number in range(self.options.workers)
        ]
        for thread in threads:
            thread.start()
        self._trouble()
        for thread in threads:
            thread.join(_CALL_LIMIT_S * 4)
        if self._broken:
            # The daemon writes the stacks of all its goroutines to its log.
            subprocess.run(["kill", "-USR1", str(self.containerd.pid)], check=False)
            time.sleep(1)
            raise self._broken[0]

    def _client(self) -> CRI:
        return self.containerd.client(timeout_s=_CALL_LIMIT_S)

    def _guard(self, number: int) -> None:
        try:
            self.workers.work(number)
        except BaseException as error:
            self._broken.append(error)

    # -- trouble ---------------------------------------------------------------------------

    def _trouble(self) -> None:
        """Kill and restart in step with the pods, until these are done."""
        rng = random.Random(self.options.seed)
        said = reported = time.time()
        while not self._over():
            done = self._done()
            if self._restarts < int(done * (self.options.restarts + 1)):
                self._restart_containerd()
            elif self._kills < int(done * (self.options.kills + 1)):
                self._kill_plugin(rng)
            time.sleep(rng.random() * 0.5)
            if time.time() > said + _SAY_EVERY_S:
                said = time.time()
                self._say()
            if time.time() > reported + _REPORT_EVERY_S:
                # Whoever ends a long run before its time has figures all the same.
                self._end = time.time()
                self._report([], ended=False)
                reported = time.time()
        self._wait_active(self._moments[-1][0], _START_LIMIT_S)

    def _say(self) -> None:
        workers = self.workers
        print(
            f"{time.monotonic():8.1f} {workers.pods} pods, {workers.containers} containers, "
            f"{self._kills} kills, {self._restarts} restarts, {workers.rejected} refused, "
            f"{sum(workers.failed.values())} calls failed",
            flush=True,
        )

    def _kill_plugin(self, rng: random.Random) -> None:
        when = time.time()
        self._moments.append((when, False))
        self.plugin.kill()
        # Sometimes it is away for a while, so that pods start and end without it.
        time.sleep(rng.choice((0, 0, 0, rng.random() * 3)))
        self.plugin.start(wait=False)
        self._kills += 1
        if rng.random() < 0.15 and self._kills < self.options.kills:
            # Once more: inside its start, inside Synchronize, or a moment after it got into use.
            time.sleep(rng.random() * 2)
            when = time.time()
            self._moments.append((when, False))
            self.plugin.kill()
            self.plugin.start(wait=False)
            self._kills += 1
        self._wait_active(when, _BACK_LIMIT_S)

    def _restart_containerd(self) -> None:
        when = time.time()
        self._moments.append((when, False))
        if self._restarts % 2:
            self.containerd.kill()
        else:
            with contextlib.suppress(RuntimeError):  # it did not end in time, and was killed
                self.containerd.stop()
        self.containerd.start(timeout_s=_START_LIMIT_S, keep_configuration=True)
        self._restarts += 1
        self._wait_active(when, _BACK_LIMIT_S)

    def _wait_active(self, since: float, limit_s: float) -> None:
        deadline = time.time() + limit_s
        while not self._link.active_since(since) and time.time() < deadline:
            if not self.plugin.running:
                raise RuntimeError(f"the plugin ended by itself:\n{self.plugin.log()[-3000:]}")
            if self._broken:
                return
            time.sleep(0.1)

    # -- the end ---------------------------------------------------------------------------

    def _settle(self) -> list[str]:
        """Leave the plugin alone; who lives then must be right. Returns who is not."""
        self._wait_active(max(when for when, up in self._moments), _START_LIMIT_S)
        wrong: list[str] = ["nobody looked"]

        def right() -> bool | None:
            nonlocal wrong
            wrong = self._wrong_now()
            return None if wrong else True

        with contextlib.suppress(TimeoutError):
            poll(right, "everybody right", every_s=1)
        return wrong

    def _wrong_now(self) -> list[str]:
        now = time.time()
        spans = []
        for directory in (each for each in _KUBEPODS.rglob("*") if len(each.name) == 64):
            with contextlib.suppress(OSError, ValueError):
                pid = int((directory / "cgroup.procs").read_text().split()[0])
                serial = serial_of(Path(f"/proc/{pid}/cmdline").read_bytes())
                seen, group = words.allowed(pid), words.cgroup_allowed(pid)
                spans.append(
                    Span(
                        serial=serial,
                        cpus=seen.cpus,
                        mems=seen.mems,
                        group=group.cpus,
                        before=now,
                        start=now,
                        end=now,
                        after=now,
                        samples=1,
                    )
                )
        facts = self._facts()
        return [
            told(each, facts, self._begin)
            for each in episodes(self.ground, facts, spans)
            # Whoever started while nobody was there to refuse it stays, even where its CPUs or its
            # list cannot be had.
            if each.kind not in (UNOWNED, LIST)
        ]

    def _facts(self) -> dict[int, Fact]:
        self._link.read()
        unpinned = self._link.unpinned(time.time())
        return {
            serial: msgspec.structs.replace(fact, unpinned=tuple(unpinned.get(fact.pod, ())))
            for serial, fact in dict(self.workers.facts).items()
        }

    def _away(self, end: float) -> list[Interval]:
        moments = list(self._moments)
        for when, state in self._link.read():
            if state == "active":
                moments.append((when, True))
            elif state in ("disconnected", "stopped"):
                moments.append((when, False))
        return away(moments, end)

    def _report(self, unsettled: list[str], *, ended: bool = True) -> Report:
        facts = self._facts()
        spans, summary = read_spans(self._spans)
        found = episodes(self.ground, facts, spans)
        absent = self._away(self._end)
        write_episodes(self._shared / "churn-episodes.jsonl", found, facts, absent, self._begin)
        workers = self.workers
        report = Report(
            options=self.options,
            runtime=f"{self.containerd.cri.version()} with {self.options.runtime}",
            machine=self._machine,
            seconds=round(self._end - self._begin, 1),
            pods=workers.pods,
            containers=workers.containers,
            kills=self._kills,
            restarts=self._restarts,
            rejected=workers.rejected,
            away_seconds=round(sum(b - a for a, b in absent), 1),
            watched=summary,
            figures=[figure(kind, found, absent) for kind in KINDS],
            kinds=dict(workers.kinds),
            calls_failed=dict(workers.failed),
            rejections=[f"{kind}: {text}" for kind, text in sorted(workers.rejections.items())],
            unsettled=unsettled,
            ended=ended,
        )
        (self._shared / "churn.json").write_bytes(
            msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"
        )
        return report
