"""``python -m bench``: measure everything in about twenty minutes, print it, write it down.

The result is printed and written to ``artifacts/performance-DATE.md``, ready for
docs/performance.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import (
    attacks,
    containerd_cycles,
    density,
    devices,
    engine,
    extender,
    gaps,
    interference,
    latency,
    machine,
    resources,
    room,
    rounds,
    synchronize,
    told,
    watches,
)
from bench.beds import MACHINES

ARTIFACTS = Path(__file__).resolve().parents[1] / "artifacts"


def _latency(quick: bool) -> str:
    if quick:
        found = latency.measure(rounds=60, machines=tuple(MACHINES)[:1], residents=(0, 100))
        return latency.report(asyncio.run(found))
    return latency.report(asyncio.run(latency.measure(rounds=200)))


PARTS: dict[str, tuple[str, Callable[[bool], str]]] = {
    "latency": ("A request through a real socket, beside an empty plugin", _latency),
    "gaps": (
        "CreateContainer back to back and every 20 ms",
        lambda quick: gaps.report(asyncio.run(gaps.measure(rounds=40 if quick else 150))),
    ),
    "told": (
        "Exclusive CPUs with many to tell, beside an empty plugin that names the same containers",
        lambda quick: told.report(asyncio.run(told.measure(rounds=40 if quick else 150))),
    ),
    "plan": (
        "CreateContainer for which one container moves, against one that fits",
        lambda quick: latency.with_plan(20 if quick else 100),
    ),
    "room": ("Refusals that look for room", lambda quick: room.measure(quick=quick)),
    "large": (
        "The largest creations, on 512 CPUs with 1,000 containers",
        lambda quick: room.measure_large(rounds=5 if quick else 30),
    ),
    "devices": (
        "CreateContainer with devices looked for, on against off",
        lambda quick: devices.report(asyncio.run(devices.measure(rounds=40 if quick else 120))),
    ),
    "containerd": (
        "Real containerd, plugin on against off",
        lambda quick: containerd_cycles.measure(batches=2 if quick else 4),
    ),
    "synchronize": (
        "Synchronize",
        lambda quick: asyncio.run(synchronize.measure(rounds=2 if quick else 5)),
    ),
    "merge": ("Merging the hints of four resources", lambda quick: engine.merges()),
    "admit": (
        "The decision alone",
        lambda quick: engine.admits(100 if quick else 400),
    ),
    "density": ("Density", lambda quick: density.measure(seeds=8 if quick else 40)),
    "resources": ("Start, memory, CPU", lambda quick: asyncio.run(resources.measure(quick=quick))),
    "rounds": (
        "Looking at every container all the time",
        lambda quick: rounds.measure(quick=quick),
    ),
    "attacks": (
        "Attacks on the HTTP side",
        lambda quick: asyncio.run(attacks.measure(rounds=150 if quick else 400)),
    ),
    "probes": (
        "Probes while hundreds of clients ask",
        lambda quick: asyncio.run(attacks.measure_probes(rounds=150 if quick else 400)),
    ),
    "extender": (
        "The scheduler's extender: 5,000 nodes with 4 NUMA nodes and 20 pods each",
        lambda quick: extender.measure(quick=quick),
    ),
    "watches": (
        "Watches of the extender, the controller and the publisher, over TLS",
        lambda quick: watches.measure(quick=quick),
    ),
    "interference": (
        "Interference",
        lambda quick: asyncio.run(interference.measure(rounds=60 if quick else 150)),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a minute or two")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="may be repeated")
    options = parser.parse_args(arguments)
    # A service finds bytecode where it was installed; without it, each start here would compile.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    begun = time.time()
    date = time.strftime("%Y-%m-%d", time.gmtime(begun))
    pieces = [f"Measured on {date}.\n\n{machine.describe()}"]
    print(pieces[0], flush=True)
    for name, (title, run) in PARTS.items():
        if options.only and name not in options.only:
            continue
        started, before = time.monotonic(), machine.load()
        body = run(options.quick)
        pieces.append(
            f"### {title}\n\n{body}\n\n"
            f"({name}: {time.monotonic() - started:.0f} s, load average {before} before, "
            f"{machine.load()} after)"
        )
        print(f"\n{pieces[-1]}", flush=True)
    ARTIFACTS.mkdir(exist_ok=True)
    target = ARTIFACTS / f"performance-{date}.md"
    target.write_text("\n\n".join(pieces) + "\n", encoding="utf-8")
    print(f"\nwritten to {target.relative_to(ARTIFACTS.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
