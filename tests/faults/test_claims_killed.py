"""A claim's life, ended at each step that changes a file.

A step is a call through which the modules of claims change files. ``before`` each of them, with
``half`` of a file written, and ``after`` the last one, an agent that lives through a claim
(prepared, prepared again, forgotten) is dead: not even its ``finally`` changes a file any more.
Then another one starts and does what the kubelet would ask for again.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nri_numa.agent.claims import ClaimStore
from nri_numa.dra.handover import ClaimFileRequester, ClaimFileResponder
from nri_numa.engine.node_model import NodeModel
from nri_numa.model.settings import Settings
from tests.beds.claim_bed import claim_config
from tests.beds.fault_prelude import BrokenOS
from tests.beds.resource_claims import DRIVER, UID, claim, result
from tests.beds.world import agent_of
from tests.machines import named as machines

STEPS = ("open", "fsync", "replace", "unlink", "makedirs")
LIFE = ("load", "prepare", "prepare", "unprepare")
GPU = "gpu.example.com.json"
EMPTY: tuple[list[str], ...] = ([], [GPU], [])
PREPARED = ([f"{UID}.json"], [f"{DRIVER}-claim_{UID}.json", GPU], [])


class Dead(BaseException):
    """The process has been killed."""


def killing(number: int, moment: str, seen: list[str]) -> Callable[..., Any]:
    """A hook after which nothing changes from a step on; number 0 only counts."""

    def hook(real: Any, arguments: Any, options: Any) -> Any:
        if number and len(seen) >= number:
            raise Dead
        seen.append(real.__name__)
        if len(seen) != number:
            return real(*arguments, **options)
        if moment == "half" and real is os.fsync:
            # What was written is not all there yet.
            os.truncate(arguments[0], os.fstat(arguments[0]).st_size // 2)
        elif moment == "after":
            real(*arguments, **options)
        raise Dead

    return hook


def patched(module: Any) -> pytest.MonkeyPatch:
    """The modules of claims have this ``os`` until it is undone."""
    patch = pytest.MonkeyPatch()
    for name in ("nri_numa.dra.handover", "nri_numa.agent.claims"):
        patch.setattr(f"{name}.os", module)
    return patch


class Place:
    """The directories of one node, which outlive its agents."""

    def __init__(self, directory: Path) -> None:
        self.folders = [directory / name for name in ("state/claims", "cdi", "handover")]
        for folder in self.folders[1:]:
            folder.mkdir(parents=True)
        # Of somebody else, and never to be touched.
        (self.folders[1] / GPU).write_text("{}")
        self.teller = ClaimFileResponder(str(self.folders[2]))
        self.document = claim(result(), result(device="numa0", shareID="s-2"))

    def answer(self, _seconds: float) -> None:
        """What the publisher, a process that lives on, does while the agent waits."""
        patch = patched(os)
        for id, _ in self.teller.pending_requests():
            self.teller.write_answer_if_still_asked(id, {"claim": self.document})
        patch.undo()

    def files(self) -> tuple[list[str], ...]:
        """Records, CDI files and the handover's files."""
        return tuple(
            sorted(one.name for one in where.iterdir()) if where.is_dir() else []
            for where in self.folders
        )

    def live(self, *steps: str, number: int = 0, moment: str = "") -> tuple[list[Any], list[str]]:
        """A new agent: what each step gave until its death, and the changes of files."""
        machine = NodeModel(
            topology=machines.dual_no_smt(), settings=Settings(), key=b"signs annotations"
        )
        records, cdi, handover = self.folders
        asker = ClaimFileRequester(str(handover), sleep=self.answer)
        book = ClaimStore(claim_config(records.parent, cdi), "n1", asker, agent_of(machine).current)
        told: list[Any] = []
        seen: list[str] = []
        patch = patched(BrokenOS(killing(number, moment, seen), STEPS))
        try:
            for step in steps:
                if step == "load":
                    book.load_records()
                    told.append(sorted(book.claims))
                elif step == "unprepare":
                    book.unprepare_claim(UID)
                    told.append(None)
                else:
                    found = book.prepare_claim("shop", "four", UID)
                    told.append([[one.request, one.device, one.cdi] for one in found])
        except Dead:
            pass
        finally:
            patch.undo()
        return told, seen


@pytest.fixture
def directory() -> Iterator[Path]:
    """On a tmpfs where there is one, like /run: syncing costs nothing there."""
    shm = "/dev/shm"
    where = shm if os.access(shm, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="nri-numa-claims-", dir=where) as made:
        yield Path(made)


def test_at_every_change_of_a_file(directory: Path) -> None:
    """No claim is half prepared for a new agent, and what the kubelet asks again is the same."""
    place = Place(directory / "alive")
    (_, answer, *_), steps = place.live(*LIFE)
    assert place.files() == EMPTY
    # Question, record and CDI file are written and renamed, and taken away in the end.
    assert set(STEPS) == set(steps)
    assert len(steps) >= 15
    cases = [(number, "before") for number in range(1, len(steps) + 1)]
    cases += [(number, "half") for number, name in enumerate(steps, 1) if name == "fsync"]
    cases.append((len(steps), "after"))
    for number, moment in cases:
        place = Place(directory / f"{moment}-{number}")
        reached = len(place.live(*LIFE, number=number, moment=moment)[0])
        where = f"killed {moment} change {number}, in {LIFE[reached]}"
        ((known,), _), files = place.live("load"), place.files()
        assert known in ([], [UID]), where
        assert files == (PREPARED if known else EMPTY), where
        assert known or reached != 2, f"{where}: what the kubelet was told is prepared is forgotten"
        if reached < 3:  # the kubelet asks for the preparation again
            assert place.live("load", "prepare")[0][1] == answer, where
            assert place.files() == PREPARED, where
        place.live("load", "unprepare", "unprepare")
        assert place.files() == EMPTY, where
        assert place.live("load")[0] == [[]], where
        assert place.files() == EMPTY, where
