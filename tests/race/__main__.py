"""Who runs on an owned CPU, and for how long: rounds on a real containerd with a real plugin.

    python -m tests.race [--series 1.7|2.3|2.4|all] [--mode aligned|free|both] [--rounds 100]

Each round creates three ordinary pods and one exclusive pod at the same time and reads what the
kernel lets their processes use, from the first instruction on and then every 5 ms. Printed are
tables; the exit status is 1 when a round was surely wrong for longer than ``--limit-ms``, and 3
when the bed could not be had. Needs root and two CPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.beds.containerd import SERIES, Containerd, find_binaries
from tests.beds.plugin_process import PluginProcess
from tests.beds.race_bed import MODES, RaceBed
from tests.beds.testbed import TestbedUnavailable
from tests.checks.race_figures import Round, table


def measure(series: str, modes: Sequence[str], rounds: int) -> list[Round]:
    """Rounds of these modes on one series, with a plugin of the default configuration."""
    binaries = find_binaries(series)
    # Not below the user's temporary directory: socket paths must stay short.
    directory = Path(tempfile.mkdtemp(prefix="nri-numa-race-", dir="/tmp"))
    found = []
    try:
        with (
            Containerd(binaries, directory / "c") as containerd,
            PluginProcess(directory / "plugin", containerd.nri_socket),
        ):
            for mode in modes:
                with RaceBed(containerd) as bed:
                    for number, one in enumerate(bed.rounds(mode, rounds)):
                        found.append(one)
                        print(
                            f"\r{binaries.version} {mode} {number + 1}/{rounds}: "
                            f"{one.wrong_ms:6.0f} ms in {one.seconds:.1f} s {one.variant:30}",
                            end="" if sys.stderr.isatty() else "\n",
                            file=sys.stderr,
                        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rounds that were asked for; the result is the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.race", description=__doc__)
    parser.add_argument("--series", choices=(*SERIES, "all"), default="all")
    parser.add_argument("--mode", choices=(*MODES, "all"), default="all")
    parser.add_argument("--rounds", type=int, default=100, help="of each series and mode")
    parser.add_argument("--limit-ms", type=float, default=100, help="of a round's wrong time")
    parser.add_argument("--json", type=Path, help="write every round to this file")
    options = parser.parse_args(arguments)
    rounds: list[Round] = []
    print(f"{os.cpu_count()} CPUs, load average at the start {os.getloadavg()[0]:.1f}")
    try:
        for series in SERIES if options.series == "all" else (options.series,):
            modes = MODES if options.mode == "all" else (options.mode,)
            rounds += measure(series, modes, options.rounds)
    except TestbedUnavailable as error:
        print(f"not run: {error}", file=sys.stderr)
        return 3
    finally:
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(one) for one in rounds]), encoding="utf-8")
    print(table(rounds))
    print(
        f"load average at the end {os.getloadavg()[0]:.1f}; longest time between two looks "
        f"{max((one.gap_ms for one in rounds), default=0):.0f} ms"
    )
    for message in sorted({one.error for one in rounds if one.error}):
        print(f"failed: {message}", file=sys.stderr)
    wrong = any(one.sure_ms > options.limit_ms or one.error for one in rounds)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
