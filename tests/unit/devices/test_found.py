"""What becomes of devices that were found: hints, and sentences about the rest."""

from __future__ import annotations

from nri_numa.devices.lookup import MOST_NOTES, hints
from nri_numa.devices.sysfs import Found
from nri_numa.engine.values.workload import MOST_DEVICES
from nri_numa.machine.cpuset import NUMASet

PLACES = NUMASet((0, 1))


def test_too_many_are_none_and_notes_are_few() -> None:
    many = [Found("GPU", f"{i:04}", frozenset({0})) for i in range(MOST_DEVICES + 1)]
    assert hints(many, PLACES).requests == ()
    assert "more than" in hints(many, PLACES).notes[0]
    noted = hints([Found("GPU", str(i)) for i in range(100)], PLACES).notes
    assert len(noted) == MOST_NOTES
    assert noted[-1] == "and 93 more such devices"
