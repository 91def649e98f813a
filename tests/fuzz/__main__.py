"""Fuzz every parser that reads what others wrote.

    python -m tests.fuzz [--seconds 60] [--seed 0] [--target NAME] [--count N]

The targets take turns until the time is over. A finding prints the command that plays it again,
with the exception; the exit status is 1. Bounds: no case may take longer than a second, and the
process may not grow by more than 128 MiB.
"""

import argparse
import itertools
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.every import EVERY
from tests.fuzz.targets import Target, quiet

CASE_SECONDS = 1.0
GROWTH_KIB = 128 << 10


def rss_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4


def case(target: Target, seed: int) -> str:
    # CPU time: a busy machine is no finding.
    started = time.process_time()
    outcome = target.one(random.Random(f"{target.name}:{seed}"))
    spent = time.process_time() - started
    assert spent < CASE_SECONDS, f"took {spent:.1f} s"
    return outcome


def campaign(
    targets: Sequence[Target], *, seed: int = 0, seconds: float | None, count: int | None = None
) -> int:
    """Play cases until the time is over or each target has had its count; the exit status."""
    for target in targets:
        target.replay()
    start, memory = time.monotonic(), rss_kib()
    outcomes: dict[str, Counter[str]] = {target.name: Counter() for target in targets}
    for number in itertools.count(seed) if count is None else range(seed, seed + count):
        if seconds is not None and time.monotonic() - start > seconds:
            break
        for target in targets:
            try:
                outcomes[target.name][case(target, number)] += 1
                assert rss_kib() < memory + GROWTH_KIB, f"grew by {GROWTH_KIB >> 10} MiB or more"
            except Exception:
                traceback.print_exc()
                print(f"python -m tests.fuzz --target {target.name} --seed {number} --count 1")
                return 1
    for name, counter in outcomes.items():
        common = ", ".join(f"{outcome}: {n}" for outcome, n in counter.most_common(6))
        print(f"{name}: {counter.total()} cases, {len(counter)} outcomes ({common})")
    print(f"grew by {max(0, rss_kib() - memory)} KiB")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz from the command line."""
    names = [target.name for target in EVERY]
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=None, help="60 when no count is given")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--target", choices=names, action="append", help="default: all")
    parser.add_argument("--count", type=int, help="cases of each target")
    options = parser.parse_args(arguments)
    seconds = options.seconds
    if seconds is None and options.count is None:
        seconds = 60.0
    quiet()
    targets = [kind() for kind in EVERY if not options.target or kind.name in options.target]
    try:
        return campaign(targets, seed=options.seed, seconds=seconds, count=options.count)
    finally:
        for target in targets:
            target.close()


if __name__ == "__main__":
    sys.exit(main())
