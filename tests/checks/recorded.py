"""Write down again what pods get in ``tests/golden``, and say what differs: ``make recorded``."""

import argparse
import logging
from collections.abc import Sequence

from tests.beds.life_record import (
    ChangeClass,
    Difference,
    LifeRecord,
    compare_lives,
    report,
    unintended,
)
from tests.beds.lives import LIVES, RECORDED, record_life
from tests.beds.recorded import write_down
from tests.checks import choices, requested, searches


def _record_lives() -> list[Difference]:
    differences = list[Difference]()
    for name in LIVES:
        before, after = LifeRecord.read(RECORDED / name), record_life(name)
        after.write(RECORDED / name)
        if before.lines:
            differences += compare_lives(name, before, after)
    return differences


def main(arguments: Sequence[str] | None = None) -> int:
    """Record all anew; fail if more than texts differs and nobody said that this is meant."""
    tables = {
        "choices": (choices.RECORDED, choices.MACHINES, choices.told),
        "searches": (searches.RECORDED, searches.KINDS, searches.told),
        "requested": (requested.RECORDED, requested.KINDS, requested.told),
    }
    parser = argparse.ArgumentParser(prog="python -m tests.checks.recorded", description=__doc__)
    parser.add_argument("meant", nargs="*", help=f"of {', '.join([*ChangeClass, *tables])}")
    meant = parser.parse_args(arguments).meant
    logging.disable()
    differences = _record_lives()
    print("\n".join(report(differences)) or "lives: nothing differs")
    unnamed = {str(one) for one in unintended(differences, meant)}
    for name, table in tables.items():
        if different := write_down(*table):
            print(f"{name}: {different} lines differ, read them")
            unnamed |= {name} - {*meant}
    if unnamed:
        print(f"differs, and nobody named it: make recorded MEANT='{' '.join(sorted(unnamed))}'")
    return 1 if unnamed else 0


if __name__ == "__main__":
    raise SystemExit(main())
