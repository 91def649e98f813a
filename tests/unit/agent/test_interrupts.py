"""Interrupts beside irqbalance, and what is said where they cannot be moved."""

import asyncio
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_numa.agent import preflight
from nri_numa.agent.interrupts import HOST_IRQ_DIRECTORY, SCAN_INTERVAL_S, InterruptSteering
from nri_numa.config import AgentConfig
from nri_numa.model.cpuset import CPUSet
from tests.beds.world import StillClock, World, pod, resources
from tests.machines import named as machines
from tests.machines.named import write_tree

ALL = CPUSet.parse("0-7")
IRQ = "proc/irq/24/smp_affinity_list"


class IRQBalance:
    """Speaks as irqbalance 1.9 does on its socket; the operator banned CPU 7."""

    def __init__(self, path: Path) -> None:
        self.banned = self.own = CPUSet.parse("7")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(str(path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                data, extra, _, _ = connection.recvmsg(500, 100)
                assert extra, "irqbalance hangs up on questions without credentials"
                text = data.decode()
                if text == "setup":
                    connection.send(f"SLEEP 10 BANNED 00000000,{self.banned.bits:08x}".encode())
                else:
                    cpus = text.removeprefix("settings cpus ")
                    self.banned = self.own if cpus == "NULL" else CPUSet.parse(cpus)

    def close(self) -> None:
        if self._thread.is_alive():
            self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            self._socket.close()


@pytest.fixture
def irqbalance(tmp_path: Path) -> Iterator[IRQBalance]:
    made = IRQBalance(tmp_path / "irqbalance1.sock")
    yield made
    made.close()


def interrupts(tmp_path: Path) -> InterruptSteering:
    """One for a machine with one interrupt, and an irqbalance where its socket is."""
    if not (tmp_path / IRQ).exists():
        write_tree(tmp_path, {IRQ: "0-7\n"})
    return InterruptSteering(str(tmp_path), str(tmp_path), f"{tmp_path}/irqbalance*.sock")


def allowed(tmp_path: Path) -> str:
    return (tmp_path / IRQ).read_text().strip()


def test_irqbalance_bans_exclusive_and_other_cpus(tmp_path: Path, irqbalance: IRQBalance) -> None:
    one = interrupts(tmp_path)
    one.steer_from(CPUSet.parse("2-3"), ALL)
    assert str(irqbalance.banned) == "2-3,7"
    # Killed, and another one since.
    one = interrupts(tmp_path)
    one.steer_from(CPUSet.parse("4"), ALL)
    assert str(irqbalance.banned) == "4,7"
    assert allowed(tmp_path) == "0-7", "irqbalance moves it"
    one.restore_affinity()
    assert irqbalance.banned == irqbalance.own


def test_an_irqbalance_that_was_killed_bans_nothing(tmp_path: Path, irqbalance: IRQBalance) -> None:
    one = interrupts(tmp_path)
    one.steer_from(CPUSet.parse("2-3"), ALL)
    irqbalance.close()
    one.steer_from(CPUSet.parse("2-3"), ALL)
    assert allowed(tmp_path) == "0-1,4-7"
    one.restore_affinity()
    assert allowed(tmp_path) == "0-7"


def test_a_list_that_irqbalance_cannot_take_is_said(
    tmp_path: Path, irqbalance: IRQBalance, caplog: pytest.LogCaptureFixture
) -> None:
    interrupts(tmp_path).steer_from(CPUSet(range(0, 1000, 2)), ALL)
    assert "expected at most 480" in str(vars(caplog.records[-1]))


def test_what_somebody_else_decides_meanwhile_is_what_comes_back(tmp_path: Path) -> None:
    one = interrupts(tmp_path)
    one.steer_from(CPUSet.parse("2-3"), ALL)
    assert allowed(tmp_path) == "0-1,4-7"
    (tmp_path / IRQ).write_text("2-4")
    one.steer_from(CPUSet.parse("2-3"), ALL)
    assert allowed(tmp_path) == "4"
    one.steer_from(CPUSet.parse("2-4"), ALL)
    assert allowed(tmp_path) == "0-1,5-7", "all CPUs of its list are exclusive"
    interrupts(tmp_path).restore_affinity()
    assert allowed(tmp_path) == "2-4"


def test_a_damaged_note_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "interrupts").write_text("{")
    one = interrupts(tmp_path)
    one.steer_from(CPUSet.parse("2"), ALL)
    assert caplog.records[0].getMessage() == "saved interrupt affinity unreadable"
    assert allowed(tmp_path) == "0-1,3-7"
    shutil.rmtree(tmp_path / "proc")  # as a container sees it whose /proc is another one's
    one.steer_from(CPUSet.parse("2-3"), ALL)
    assert "proc/irq: No such file" in str(vars(caplog.records[-1]))


def test_they_follow_owners_and_come_back_at_the_end(tmp_path: Path) -> None:
    world = World(machines.single_no_smt(cores_per_numa=8))
    world.synchronize()
    seen: list[str] = []

    class Seconds(StillClock):
        async def sleep(self, seconds: float) -> None:
            seen.append(allowed(tmp_path))
            if len(seen) == 1:
                world.place(pod("own", {"cpus": "exclusive"}), wants=resources(2, 1))
            elif len(seen) == 2:
                (tmp_path / IRQ).write_text("0-7")  # somebody else
            elif len(seen) == SCAN_INTERVAL_S + 3:
                raise asyncio.CancelledError

    world.agent.current.clock = Seconds()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupts(tmp_path).run_steering(world.agent.current, active=True))
    assert seen == ["0-7", "2-7", *["0-7"] * (SCAN_INTERVAL_S - 1), "2-7", "2-7"]
    assert allowed(tmp_path) == "0-7"
    assert not interrupts(tmp_path).needs_restore


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("", "can be kept off"),
        ("run/irqbalance/irqbalance7.sock", "exclusive CPUs are banned there"),
        ("proc/7/comm", "without a socket at /run/irqbalance"),
        ("etc/systemd/system/nri-numa.service", "/proc/irq cannot be written"),
    ],
)
def test_check_says_whether_they_can_be_kept_off(tmp_path: Path, made: str, words: str) -> None:
    interrupts(tmp_path)
    if made:
        service = made.endswith("service")
        write_tree(tmp_path, {made: "ProtectKernelTunables=yes\n" if service else "irqbalance\n"})
    config = AgentConfig(interrupts_off_exclusive_cpus=True)
    (finding,) = preflight.check_interrupt_steering(config, tmp_path)
    assert words in finding.message
    (tmp_path / HOST_IRQ_DIRECTORY[1:]).parent.mkdir(parents=True)
    (tmp_path / "proc/irq").rename(tmp_path / HOST_IRQ_DIRECTORY[1:])
    (finding,) = preflight.check_interrupt_steering(config, tmp_path)
    assert words in finding.message
    assert not list(preflight.check_interrupt_steering(AgentConfig(), tmp_path))
