"""Runs cases inside a virtual machine: ``python -m tests.vm.guest MACHINE SHARED [CASE…]``.

Started by `tests.beds.vm_bed` as root, with the host's file system read-only below it.
"""

import contextlib
import dataclasses
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tests.beds.containerd import Binaries, Containerd, find_binaries
from tests.beds.cri import Container, CRIError, Pod, Resources, guaranteed, poll
from tests.beds.vm_records import Answer, Ask, Begin, Broken, End, Outcome, Result, Started, Writer
from tests.machines.vm_machine import Machine, format_list, parse_list
from tests.vm import pod_cards, words
from tests.vm.plugin import GuestPlugin, UnitPlugin
from tests.vm.registry import CASE_LIMIT_S, Case, SkipCase, all_cases
from tests.vm.scopes import systemd_agrees
from tests.vm.selection import MACHINES
from tests.vm.standstill import NeverAgain, Standstill, insist

_BED = Path("/run/bed")  # a tmpfs, and short enough for socket paths
# Under emulation a plugin written in Python needs tenths of seconds where it needs milliseconds
# outside; the limit is the runtime's, and too short a one would only prove that emulation is slow.
_NRI_TIMEOUT = "30s"
_MIB = 1024 * 1024


class GuestContainerd(Containerd):
    """A containerd that bears emulation."""

    def program_environment(self) -> dict[str, str]:
        # The Go scheduler spins on idle processors, which emulated ones have to pay for in full.
        # The library of an OCI runtime that is not installed lies beside it.
        library = str(self.binaries.runc.parent)
        # Garbage of programs that live for seconds is not worth collecting before there is much.
        return super().program_environment() | {
            "GOMAXPROCS": "2",
            "GOGC": "off",
            "GOMEMLIMIT": "128MiB",
            "LD_LIBRARY_PATH": library,
        }


def near(binaries: Binaries, directory: Path) -> Binaries:
    """The same programs on a tmpfs: runc is started a dozen times per pod, each time over 9p."""
    directory.mkdir(parents=True, exist_ok=True)
    for source in (
        binaries.directory / "containerd",
        binaries.directory / "containerd-shim-runc-v2",
        binaries.directory / "ctr",
        binaries.runc,
        binaries.busybox,
    ):
        shutil.copy(source, directory / source.name)
    return dataclasses.replace(
        binaries,
        directory=directory,
        runc=directory / binaries.runc.name,
        busybox=directory / binaries.busybox.name,
    )


def _binaries(machine: Machine) -> Binaries:
    """The programs of the machine: a whole Debian has its own runc, and containerd 1.7."""
    if not machine.system:
        return near(find_binaries(machine.containerd), _BED / "bin")
    runc, busybox = Path("/usr/sbin/runc"), Path("/usr/bin/busybox")
    if machine.containerd == "1.7":
        return Binaries(
            series="1.7", version="1.7", directory=Path("/usr/bin"), runc=runc, busybox=busybox
        )
    found = dataclasses.replace(find_binaries(machine.containerd), runc=runc, busybox=busybox)
    return near(found, _BED / "bin")


class CaseTimeoutError(Exception):
    """A case took longer than its limit."""


class Guest:
    """What a case works with."""

    def __init__(self, machine: Machine, shared: Path) -> None:
        self.machine = machine
        self.shared = shared
        self.notes: list[str] = []
        self.containerd = GuestContainerd(
            _binaries(machine),
            _BED,
            nri_request_timeout=_NRI_TIMEOUT,
            cni=pod_cards.network(_BED) if pod_cards.moves_cards(machine) else None,
            systemd_cgroup=bool(machine.system),
        )
        # On the host's disk at once: it must survive this guest.
        self.containerd.log_file = shared / "containerd.log"
        self.plugin = (
            UnitPlugin(self.containerd.nri_socket, shared / "plugin.log")
            if machine.system
            else GuestPlugin(_BED / "plugin", self.containerd.nri_socket, shared / "plugin.log")
        )
        self._asked = 0
        self._standstill = Standstill()
        self._standstill.start()

    # -- the machine as it is now ------------------------------------------------------------

    @property
    def online(self) -> frozenset[int]:
        return words.online_cpus()

    @property
    def memory_nodes(self) -> frozenset[int]:
        return frozenset(i for i, node in enumerate(self.machine.numa) if node.memory_mib)

    def cpus_of(self, numa_node: int) -> frozenset[int]:
        return words.numa_cpus(numa_node)

    def cpu_nodes(self) -> list[int]:
        """NUMA nodes that have an online CPU, sorted."""
        return [i for i in range(len(self.machine.numa)) if self.cpus_of(i)]

    def full_nodes(self) -> list[int]:
        """NUMA nodes that have an online CPU and memory, sorted."""
        return [i for i in self.cpu_nodes() if i in self.memory_nodes]

    def sample(self, numa_nodes: Iterable[int]) -> list[int]:
        """All of a few NUMA nodes; of many the first, the middle and the last: a pod takes 15 s."""
        nodes = sorted(numa_nodes)
        return nodes if len(nodes) <= 4 else [nodes[0], nodes[len(nodes) // 2], nodes[-1]]

    def nodes_of(self, cpus: frozenset[int]) -> frozenset[int]:
        return frozenset(self.machine.numa_node_of(cpu) for cpu in cpus)

    def largest_node(self) -> int:
        """Online CPUs of the NUMA node that has the most."""
        return max(len(self.cpus_of(i)) for i in self.cpu_nodes())

    def narrowest_and_closest(self, nodes: frozenset[int], cpus: int) -> None:
        """Insist that no other set of NUMA nodes with so many CPUs is narrower or closer.

        Close means the mean distance over all pairs, each direction and each node to itself
        counted once (KEP-3545, "prefer-closest-numa-nodes").
        """

        def mean(group: Iterable[int]) -> float:
            members = sorted(group)
            row = [self.machine.distances[i][j] for i in members for j in members]
            return sum(row) / len(row)

        rivals = [
            rival
            for size in range(1, len(nodes) + 1)
            for rival in itertools.combinations(self.cpu_nodes(), size)
            if sum(len(self.cpus_of(i)) for i in rival) >= cpus
        ]
        best = min((len(rival), mean(rival), rival) for rival in rivals)
        assert (len(nodes), mean(nodes)) == best[:2], (
            f"NUMA nodes {format_list(nodes)} with mean distance {mean(nodes):g}, "
            f"but {best[2]} have {best[1]:g}"
        )

    # -- pods ------------------------------------------------------------------------------

    def pod(
        self, name: str, annotations: Mapping[str, str] | None = None, **more: Any
    ) -> Container:
        """Start a Guaranteed pod with one container, ``main``; more as for `container`."""
        return self.container(self.sandbox(name, annotations), "main", **more)

    def sandbox(self, name: str, annotations: Mapping[str, str] | None = None, **more: Any) -> Pod:
        """Start a pod without containers; more as for `CRI.run_pod`."""
        asked = {f"numa.kubernetes.io/{k}": v for k, v in (annotations or {}).items()}
        return self.containerd.cri.run_pod(name, annotations=asked, **more)

    def container(
        self,
        pod: Pod,
        name: str,
        *,
        cpus: float = 1,
        memory_mib: int = 64,
        resources: Resources | None = None,
        **more: Any,
    ) -> Container:
        """Start one more container in a pod; more as for `CRI.create`.

        `resources`: instead of `cpus` and `memory_mib`.
        """
        resources = resources or guaranteed(cpus, memory_mib * _MIB)
        return self.containerd.cri.run(pod, name, resources=resources, **more)

    def first(self, container: Container) -> words.Allowed:
        """What the container's first process saw of itself before anything else."""
        seen = self.containerd.cri.first_line(container)
        return words.Allowed(cpus=parse_list(seen.cpus), mems=parse_list(seen.mems))

    def pid(self, container: Container) -> int:
        return self.containerd.cri.pid(container)

    def pinned(
        self,
        container: Container,
        *,
        cpus: frozenset[int] | None = None,
        mems: frozenset[int] | None = None,
    ) -> words.Allowed:
        """Insist that four witnesses agree on a container's CPUs and memory nodes.

        They are the container's first line, its process now, and its cgroup for both.

        `cpus`: what they must be; default: whatever the witnesses agree on.

        Returns:
            What they agree on.
        """
        first = self.first(container)
        pid = self.pid(container)
        now = words.allowed(pid)
        group = words.cgroup_allowed(pid)
        report = (
            f"{container.pod.name}/{container.name}: "
            f"first line cpus={format_list(first.cpus)} mems={format_list(first.mems)}, "
            f"status cpus={format_list(now.cpus)} mems={format_list(now.mems)}, "
            f"cgroup cpus={format_list(group.cpus)} mems={format_list(group.mems)}"
        )
        self.notes.append(report)
        assert first == now == group, f"witnesses differ: {report}"
        if cpus is not None:
            assert now.cpus == cpus, f"{report}, expected cpus={format_list(cpus)}"
        if mems is not None:
            assert now.mems == mems, f"{report}, expected mems={format_list(mems)}"
        return now

    def rejected(self, name: str, annotations: Mapping[str, str], *, cpus: float = 1) -> str:
        """Insist that a pod's container is not created; returns the words of the refusal."""
        pod = self.sandbox(name, annotations)
        try:
            self.containerd.cri.create(pod, "main", resources=guaranteed(cpus))
        except CRIError as error:
            self.notes.append(f"{name} refused: {error.message}")
            return error.message
        raise AssertionError(f"{name} was created although {dict(annotations)} cannot be met")

    @staticmethod
    def mentions(message: str, *parts: str) -> None:
        """Insist that a refusal says all of this."""
        missing = [part for part in parts if part not in message]
        assert not missing, f"{missing} not in {message!r}"

    def now(self, container: Container, *, cpus: frozenset[int]) -> None:
        """Insist on the CPUs that a running container may use at this moment."""
        found = words.allowed(self.pid(container)).cpus
        assert found == cpus, f"{container.pod.name}: {found}, expected {cpus}"

    def settles(
        self, container: Container, *, cpus: frozenset[int], mems: frozenset[int] | None = None
    ) -> None:
        """Wait until a running container may use exactly this."""
        pid = self.pid(container)
        found = words.allowed(pid)

        def look() -> bool | None:
            nonlocal found
            found = words.allowed(pid)
            return (found.cpus == cpus and (mems is None or found.mems == mems)) or None

        try:
            poll(look, "")
        except TimeoutError:
            raise AssertionError(
                f"{container.pod.name}: still cpus={format_list(found.cpus)} "
                f"mems={format_list(found.mems)}, expected "
                f"cpus={format_list(cpus)} mems={'any' if mems is None else format_list(mems)}"
            ) from None

    # -- the machine -----------------------------------------------------------------------

    def qemu(self, command: str, **arguments: object) -> None:
        """Have the host run one command of QEMU's machine protocol."""
        self._asked += 1
        name = f"{self._asked:03}.json"
        scratch = self.shared / "ask.tmp"
        scratch.write_bytes(msgspec.json.encode(Ask(execute=command, arguments=dict(arguments))))
        scratch.replace(self.shared / f"ask-{name}")
        file = self.shared / f"answer-{name}"
        poll(lambda: file.exists(), f"answer of the host to {command}")
        answer = msgspec.json.decode(file.read_bytes(), type=Answer)
        if answer.error:
            raise RuntimeError(f"QEMU refused {command}: {answer.error}")

    def reset(self) -> None:
        if self.containerd.running:
            self.containerd.cri.remove_all()

    def _nothing_kept(self) -> bool | None:
        return not self.plugin.json("/v1/assignments")["containers"] or None

    def reconfigure(self, config: Mapping[str, object]) -> None:
        """Have the plugin take another configuration while it runs."""

        def count() -> int:
            return sum(1 for r in self.plugin.records() if r["msg"] == "configuration reloaded")

        before = count()
        self.plugin.reload(config)
        poll(lambda: count() > before, "the configuration reloaded")

    # -- running ---------------------------------------------------------------------------

    def run(self, case: Case, begins: Callable[[], object] = lambda: None) -> Result:
        """Run one case and clean up after it; again if it failed while the machine stood still."""

        def attempt() -> Result:
            begins()
            return self._try(case)

        return insist(attempt, self._standstill, say)

    def _try(self, case: Case) -> Result:
        self.notes = []
        start = time.monotonic()
        outcome, detail, final = Outcome.PASSED, "", False
        try:
            with _limit(case.limit_s):
                if case.runtime and not self.containerd.running:
                    self.containerd.start(timeout_s=150)
                if case.plugin:
                    self.plugin.ensure_ready()
                    # Of a sandbox that is older than the runtime's last start no stop is reported:
                    # the agent finds its cgroup gone some seconds later.
                    poll(self._nothing_kept, "the CPUs of pods that are gone")
                case.run(self)
                if self.machine.system and case.plugin:
                    systemd_agrees(self)
        except SkipCase as reason:
            outcome, detail = Outcome.SKIPPED, str(reason)
        except Exception as error:
            outcome, detail = Outcome.FAILED, traceback.format_exc()
            final = isinstance(error, NeverAgain)
        try:
            with _limit(CASE_LIMIT_S):
                self.reset()
        except Exception:
            if outcome is not Outcome.FAILED:
                outcome, detail = Outcome.FAILED, "after the case:\n" + traceback.format_exc()
        return Result(
            case=case.name,
            outcome=outcome,
            seconds=round(time.monotonic() - start, 2),
            detail=detail,
            notes=self.notes,
            final=final,
        )


@contextlib.contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def ring(signum: int, frame: object) -> None:
        raise CaseTimeoutError(f"took longer than {seconds} s")

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def _set_up(machine: Machine) -> None:
    _BED.mkdir(parents=True, exist_ok=True)
    # Images and programs stay in memory for good; on the first NUMA node, which has the most, they
    # leave the others to what the cases measure there.
    first = min(i for i, node in enumerate(machine.numa) if node.memory_mib)
    subprocess.run(["mount", "-o", f"remount,mpol=prefer:{first}", "/run"], check=False)
    root = Path("/sys/fs/cgroup")
    have = (root / "cgroup.controllers").read_text(encoding="ascii").split()
    for controller in ("cpuset", "cpu", "memory", "pids"):
        assert controller in have, f"the kernel has no {controller} controller for cgroup v2"
        if not machine.system:  # systemd does it where it is needed
            (root / "cgroup.subtree_control").write_text(f"+{controller}", encoding="ascii")
    for cpu in sorted(machine.offline):
        words.set_online(cpu, online=False)


def say(text: str) -> None:
    print(f"{time.monotonic():8.1f} {text}", flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run the cases; every result goes to the shared directory."""
    say("the program started")
    name, shared_text, *names = arguments
    shared = Path(shared_text)
    records = Writer(shared)
    machine = MACHINES[name]
    cases = [all_cases()[each] for each in names]
    records.write(Begin(machine=name, kernel=os.uname().release, cases=names))
    try:
        _set_up(machine)
        say("the machine is set up")
        guest = Guest(machine, shared)
        if any(case.runtime for case in cases):
            guest.containerd.start(timeout_s=150)
    except Exception:
        records.write(Broken(detail=traceback.format_exc()))
        return 1
    for case in cases:
        say(case.name)
        # The host's limit is between two records, so each try has one of its own.
        records.write(guest.run(case, partial(records.write, Started(case=case.name))))
    with contextlib.suppress(Exception):
        guest.plugin.terminate(60)
    records.write(End())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
