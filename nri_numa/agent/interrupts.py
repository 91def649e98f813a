"""Steering of device interrupts off exclusive CPUs, if configured.

``/proc/irq/*/smp_affinity_list`` has the CPUs that an interrupt may go to. The kernel refuses to
move managed interrupts, one for each queue and CPU of NVMe and the like: they are reported.
irqbalance overrides within seconds what others write; if it runs, its socket gets the CPUs as
banned ones instead (``settings cpus``, irqbalance.c). The original lists are in a file of the state
directory, so an agent that was killed restores them after its next start.
"""

from __future__ import annotations

import asyncio
import glob
import os
import socket
import struct
import threading
from typing import Final

import msgspec
from msgspec.structs import replace

from nri_numa.agent.current_state import CurrentState
from nri_numa.machine.cgroups import read_text
from nri_numa.model.cpuset import NO_CPUS, CPUSet, ListFormatError
from nri_numa.observe.logs import get_logger
from nri_numa.observe.reports import ReportOnce
from nri_numa.store.files import read_file, replace_file

log = get_logger("interrupts")

SCAN_INTERVAL_S: Final = 30
"""Seconds between two scans for new interrupts, or a new irqbalance."""
HOST_IRQ_DIRECTORY: Final = "/host/proc/irq"
"""Mount of the host's directory in a container, whose own ``/proc/irq`` is read-only."""
IRQBALANCE_SOCKETS: Final = "/run/irqbalance/irqbalance*.sock"
_SAVED_AFFINITY_FILE_NAME: Final = "interrupts"
_MAX_SAVED_AFFINITY_BYTES: Final = 4 << 20
_MAX_SENT_BAN_LIST_BYTES: Final = 480
"""Bytes of a list for irqbalance, which reads 500 of a message."""
_CLEAR_BAN_LIST_WORD: Final = "NULL"
_IRQBALANCE_TIMEOUT_S: Final = 2.0


class _OriginalAffinity(msgspec.Struct):
    """Lists before the agent changed them.

    Attributes:
        irqs: by number of the interrupt, its original CPU list and the written one.
        banned: by socket of irqbalance, its original banned CPUs.
    """

    irqs: dict[str, tuple[str, str]] = {}
    banned: dict[str, str] = {}


class InterruptSteering:
    """The interrupts of this machine; all methods but `run` do I/O, and are called in a thread."""

    def __init__(
        self, state_dir: str, root: str = "/", balancers: str = IRQBALANCE_SOCKETS
    ) -> None:
        self._file = os.path.join(state_dir, _SAVED_AFFINITY_FILE_NAME)
        host = os.path.join(root, HOST_IRQ_DIRECTORY[1:])
        self._irqs = host if os.path.isdir(host) else os.path.join(root, "proc/irq")
        self._balancers = balancers
        self._problems = ReportOnce(log)
        self._kept = _OriginalAffinity()
        self._lock = threading.Lock()
        try:
            self._kept = msgspec.json.decode(
                read_file(self._file, _MAX_SAVED_AFFINITY_BYTES), type=_OriginalAffinity
            )
        except FileNotFoundError:
            pass
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("saved interrupt affinity unreadable", file=self._file, problem=str(error))
        self._saved = msgspec.json.encode(self._kept)

    @property
    def needs_restore(self) -> bool:
        """True if any list has to be restored."""
        return bool(self._kept.irqs or self._kept.banned)

    async def run_steering(self, current: CurrentState, *, active: bool) -> None:
        """Steer interrupts while ``active``, and restore them when cancelled."""
        applied_sets, rounds = None, 0
        try:
            while True:
                exclusive = (
                    current.state.unavailable_cpus if active and not current.observe else NO_CPUS
                )
                cpu_sets = exclusive, current.machine.topology.online
                if cpu_sets != applied_sets or rounds >= SCAN_INTERVAL_S:
                    await asyncio.to_thread(self.steer_from, *cpu_sets)
                    applied_sets, rounds = cpu_sets, 0
                await current.clock.sleep(1.0)
                rounds += 1
        finally:
            self.restore_affinity()

    def restore_affinity(self) -> None:
        """Restore all original lists."""
        self.steer_from(NO_CPUS, NO_CPUS)

    def steer_from(self, exclusive: CPUSet, online: CPUSet) -> None:
        """Steer all interrupts that the kernel can move off these CPUs."""
        with self._lock:
            if exclusive or self.needs_restore:
                self._steer_from(exclusive, online)

    def _steer_from(self, exclusive: CPUSet, online: CPUSet) -> None:
        problems = []
        balancers = sorted(glob.glob(self._balancers))
        banned = {p: cpus for p, cpus in self._kept.banned.items() if p in balancers}
        self._kept = replace(self._kept, banned=banned)
        for path in tuple(balancers):
            try:
                self._ban_exclusive_cpus(path, exclusive)
            except ConnectionRefusedError:  # the socket of one that was killed
                balancers.remove(path)
                self._kept.banned.pop(path, None)
            except (OSError, ValueError) as error:
                problems.append(f"irqbalance at {path}: {error}")
        # irqbalance moves them itself; lists written before it started are restored.
        problems += self._write_affinity_lists(NO_CPUS if balancers else exclusive, online)
        self._save_original_lists()
        problem, event = "; ".join(problems), "interrupts not kept off exclusive CPUs"
        self._problems.report(event, problem, cpus=str(exclusive), problem=problem[:900])

    def _ban_exclusive_cpus(self, path: str, exclusive: CPUSet) -> None:
        if path not in self._kept.banned:
            if not exclusive:
                return
            mask = _query_irqbalance(path, "setup").rpartition("BANNED ")[2].replace(",", "")
            self._kept.banned[path] = str(CPUSet.from_bits(int(mask, 16)))
            self._save_original_lists()
        text = _CLEAR_BAN_LIST_WORD
        if exclusive:
            text = str(CPUSet.parse(self._kept.banned[path]) | exclusive)
        if len(text) > _MAX_SENT_BAN_LIST_BYTES:
            raise ValueError(
                f"takes no list of {len(text)} bytes, expected at most {_MAX_SENT_BAN_LIST_BYTES}"
            )
        _query_irqbalance(path, f"settings cpus {text}")
        if not exclusive:
            del self._kept.banned[path]

    def _write_affinity_lists(self, exclusive: CPUSet, online: CPUSet) -> list[str]:
        """Write the lists that have to change; returns a sentence for each failed write."""
        originals, problems, target_by_irq = self._kept.irqs, [], dict[str, str]()
        try:
            irqs = sorted((n for n in os.listdir(self._irqs) if n.isdigit()), key=int)
        except OSError as error:  # for example of a /proc mounted with subset=pid
            return [f"{self._irqs}: {error.strerror}"]
        originals = {n: originals[n] for n in irqs if n in originals}
        self._kept = replace(self._kept, irqs=originals)
        for number in irqs:
            try:
                current = read_text(self._affinity_path(number))
                original, written = originals.get(number, (current, current))
                if current != written:
                    original = current  # another program decided meanwhile
                allowed = CPUSet.parse(original) - exclusive
                target = str(allowed if allowed & online or not exclusive else online - exclusive)
            except (OSError, ListFormatError):
                continue  # gone, or without a valid list
            if target in (original, ""):
                originals.pop(number, None)
            else:
                originals[number] = original, target
            if target not in (current, ""):
                target_by_irq[number] = target
        self._save_original_lists()
        for number, target in target_by_irq.items():
            try:
                with open(self._affinity_path(number), "w", encoding="ascii") as file:
                    file.write(target)
            except OSError as error:
                originals.pop(number, None)
                if exclusive & self._affinity_in_force(number):
                    problems.append(f"{self._interrupt_label(number)}: {error.strerror}")
        return problems

    def _affinity_path(self, number: str) -> str:
        return os.path.join(self._irqs, number, "smp_affinity_list")

    def _affinity_in_force(self, number: str) -> CPUSet:
        """Read the CPUs that an interrupt really goes to."""
        try:
            return CPUSet.parse(
                read_text(os.path.join(self._irqs, number, "effective_affinity_list"))
            )
        except (OSError, ListFormatError):
            return NO_CPUS

    def _interrupt_label(self, number: str) -> str:
        """Return ``36 (nvme0q1)``, with the name of its driver's directory."""
        folder = os.path.join(self._irqs, number)
        names = [e.name for e in os.scandir(folder) if e.is_dir()]
        return f"{number} ({', '.join(sorted(names))})" if names else number

    def _save_original_lists(self) -> None:
        data = msgspec.json.encode(self._kept)
        if data != self._saved:
            self._saved = data
            try:
                os.close(replace_file(self._file, data))
            except OSError as error:
                log.warning("interrupt affinity not saved", file=self._file, problem=str(error))


def _query_irqbalance(path: str, question: str) -> str:
    """Return irqbalance's answer; it checks for root, and closes the connection."""
    cred = struct.pack("3i", os.getpid(), os.getuid(), os.getgid())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_IRQBALANCE_TIMEOUT_S)
        connection.connect(path)
        connection.sendmsg([question.encode()], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, cred)])
        return b"".join(iter(lambda: connection.recv(4096), b"")).decode(errors="replace")
