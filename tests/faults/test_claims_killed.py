"""A claim's life, killed with SIGKILL at each step that changes a file.

A step is a call through which the modules of claims change files. ``before`` each of them, with
``half`` of a file written, and ``after`` the last one, a process that lives through a claim
(prepared, prepared again, forgotten) kills itself; then another one starts, as a new agent would,
and does what the kubelet would ask for again. In between the publisher's side answers from here.

Processes are forks, since hundreds of starts would take minutes; and of a process that has no
threads: the test starts this module as a program.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nri_numa.agent.claims
import nri_numa.dra.handover
from nri_numa.agent.claims import ClaimBook
from nri_numa.dra.handover import HandoverClient, HandoverServer
from nri_numa.engine.decision import Machine
from nri_numa.machine.synthetic import synthetic
from nri_numa.model.settings import Settings
from tests.beds.world import agent_of
from tests.faults.prelude import BrokenOS
from tests.unit.dra.test_claims import DRIVER, UID, claim, result

STEPS = ("open", "fsync", "replace", "unlink", "makedirs")
LIFE = ("load", "prepare", "prepare", "unprepare")
PATIENCE_S = 180.0
ROOT = Path(__file__).resolve().parents[2]
FORKS = multiprocessing.get_context("fork")
Tell = Callable[[Any], None]


def killing(number: int, moment: str, seen: list[str]) -> Callable[..., Any]:
    """A hook that ends this process at a step; number 0 only counts."""

    def hook(real: Any, arguments: Any, options: Any) -> Any:
        seen.append(real.__name__)
        if len(seen) != number:
            return real(*arguments, **options)
        if moment == "half" and real is os.fsync:
            # What was written is not all there yet.
            os.truncate(arguments[0], os.fstat(arguments[0]).st_size // 2)
        elif moment == "after":
            real(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still here")

    return hook


class Place:
    """The directories of one node, which outlive its processes."""

    def __init__(self, directory: Path) -> None:
        self.records, self.cdi = directory / "state/claims", directory / "cdi"
        self.handover = directory / "handover"
        self.handover.mkdir()
        self.cdi.mkdir()
        # Of somebody else, and never to be touched.
        (self.cdi / "gpu.example.com.json").write_text("{}")
        self.teller = HandoverServer(str(self.handover))
        self.document = claim(result(), result(device="numa0", shareID="s-2"))

    def book(self) -> ClaimBook:
        machine = Machine(
            topology=synthetic(sockets=2, numa_per_socket=1, cores_per_numa=8, threads=1),
            settings=Settings(),
            key=b"signs annotations",
        )
        asker = HandoverClient(
            str(self.handover), patience=PATIENCE_S, sleep=lambda seconds: time.sleep(0.001)
        )
        return ClaimBook(
            DRIVER, "n1",
            records=str(self.records), cdi=str(self.cdi), asker=asker, agent=agent_of(machine),
        )  # fmt: skip

    def answer(self) -> None:
        """What the publisher does whenever it looks."""
        for id, _ in self.teller.questions():
            self.teller.answer(id, {"claim": self.document})

    def files(self) -> tuple[list[str], list[str], list[str]]:
        """Records, CDI files and the handover's files."""
        names = [
            sorted(one.name for one in where.iterdir()) if where.is_dir() else []
            for where in (self.records, self.cdi, self.handover)
        ]
        return names[0], names[1], names[2]


GPU = "gpu.example.com.json"
EMPTY: tuple[list[str], list[str], list[str]] = ([], [GPU], [])
PREPARED = ([f"{UID}.json"], [f"{DRIVER}-claim_{UID}.json", GPU], [])


def forked(place: Place, run: Callable[[Tell], None]) -> tuple[bool, list[Any]]:
    """Run in a process of its own; whether it was killed, and what it told before."""
    reading, writing = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=run, args=(writing.send,))
    process.start()
    writing.close()
    end = time.monotonic() + PATIENCE_S
    while process.is_alive():
        place.answer()
        assert time.monotonic() < end, f"a process did not end in {PATIENCE_S:g} s"
        process.join(0.0005)
    told = []
    with contextlib.suppress(EOFError):
        while True:
            told.append(reading.recv())
    assert process.exitcode in (0, -signal.SIGKILL), f"a process ended with {process.exitcode}"
    return process.exitcode != 0, told


def _do(book: ClaimBook, step: str) -> Any:
    if step == "load":
        book.load()
        return sorted(book.claims)
    if step == "unprepare":
        book.unprepare(UID)
        return None
    return [[one.request, one.device, one.cdi] for one in book.prepare("shop", "four", UID)]


def live(place: Place, number: int, moment: str) -> tuple[bool, list[Any]]:
    """Live through `LIFE`; what each step gave, and last the changes of files."""

    def run(tell: Tell) -> None:
        seen: list[str] = []
        hooked = BrokenOS(killing(number, moment, seen), STEPS)
        for module in (nri_numa.dra.handover, nri_numa.agent.claims):
            vars(module)["os"] = hooked
        book = place.book()
        for step in LIFE:
            tell(_do(book, step))
        tell(seen)

    return forked(place, run)


def look(place: Place) -> tuple[list[str], tuple[list[str], list[str], list[str]]]:
    """Start anew: the claims that are known then, and the files that are there."""
    killed, told = forked(place, lambda tell: tell(_do(place.book(), "load")))
    assert not killed
    return told[0], place.files()


def again(place: Place, *steps: str) -> list[Any]:
    """A new process, and what the kubelet asks of it."""

    def run(tell: Tell) -> None:
        book = place.book()
        for step in ("load", *steps):
            tell(_do(book, step))

    killed, told = forked(place, run)
    assert not killed
    return told[1:]


def problem(number: int, moment: str, answer: Any) -> str:
    """What is wrong after a kill; empty when nothing is."""
    with directory() as at:
        place = Place(Path(at))
        killed, told = live(place, number, moment)
        if not killed:
            return f"{number} {moment}: was not killed"
        reached = len(told)  # so many steps of LIFE had been answered
        where = f"killed {moment} change {number}, in {LIFE[reached]}"
        known, files = look(place)
        if known not in ([], [UID]) or files != (PREPARED if known else EMPTY):
            return f"{where}: a new process knows {known} and has {files}"
        if reached == 2 and not known:
            return f"{where}: what the kubelet was told is prepared is forgotten"
        if reached < 3:  # the kubelet asks for the preparation again
            if (found := again(place, "prepare")) != [answer]:
                return f"{where}: the preparation gives {found}"
            if place.files() != PREPARED:
                return f"{where}: prepared, and there is {place.files()}"
        again(place, "unprepare", "unprepare")
        if place.files() != EMPTY:
            return f"{where}: forgotten, and there is {place.files()}"
        if (found := look(place)) != ([], EMPTY):
            return f"{where}: forgotten, and a new process finds {found}"
        return ""


def directory() -> tempfile.TemporaryDirectory[str]:
    """On a tmpfs where there is one, like /run: syncing costs nothing there."""
    shm = "/dev/shm"
    return tempfile.TemporaryDirectory(
        prefix="nri-numa-claims-", dir=shm if os.access(shm, os.W_OK) else None
    )


def main() -> None:
    """All kills; prints the steps, their number, and what went wrong."""
    with directory() as at:
        place = Place(Path(at))
        killed, told = live(place, 0, "")
        assert not killed
        assert place.files() == EMPTY
        steps, answer = told[-1], told[1]
    cases = [(number, "before") for number in range(1, len(steps) + 1)]
    cases += [(number, "half") for number, name in enumerate(steps, 1) if name == "fsync"]
    cases.append((len(steps), "after"))
    problems = [found for case in cases if (found := problem(*case, answer))]
    print(json.dumps({"steps": steps, "kills": len(cases), "problems": problems}))


def test_at_every_change_of_a_file() -> None:
    """No claim is half prepared for a new process, and what the kubelet asks again is the same."""
    command = [sys.executable, "-m", "tests.faults.test_claims_killed"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["problems"] == []
    # Question, record and CDI file are written and renamed, and taken away in the end.
    assert {"open", "fsync", "replace", "unlink", "makedirs"} == set(found["steps"])
    assert found["kills"] > len(found["steps"]) >= 15


if __name__ == "__main__":
    main()
