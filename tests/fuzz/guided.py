"""Fuzz by coverage: inputs that reach new code are kept and damaged further.

    python -m tests.fuzz.guided TARGET [--runs N] [--seconds S] [--work DIRECTORY]
    python -m tests.fuzz.guided TARGET --keep [--work DIRECTORY]

The first needs atheris (`make fuzz-guided` gets it). It begins with what is in ``corpus/TARGET``,
keeps what it finds in ``DIRECTORY/TARGET``, and does not stop at a finding: each different one is
printed, and its input is written to ``DIRECTORY/TARGET.findings``: look there, the exit status is
atheris' own.

The second needs nothing: of the inputs found it keeps the shortest that together go all ways that
all of them go, in ``corpus/TARGET.base64``, which every other run of the target begins with too.
"""

from __future__ import annotations

import argparse
import base64
import importlib
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

CORPUS = Path(__file__).with_name("corpus")
LONGEST = 4096
"""Bytes of an input."""
CASE_SECONDS = 1.0
KEEP_BYTES = 40_000
"""Of one target's inputs, so that all of them together are a small part of the repository."""


class Findings:
    """What went wrong, each place once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.seen: set[tuple[str, str]] = set()

    def add(self, error: BaseException, data: bytes) -> None:
        """Note one, if nothing like it was seen."""
        last = traceback.extract_tb(error.__traceback__)[-1]
        key = (type(error).__name__, f"{Path(last.filename).name}:{last.lineno}")
        if key in self.seen:
            return
        self.seen.add(key)
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"{key[0]}-{key[1].replace(':', '-')}"
        path.write_bytes(data)
        print(f"FINDING {path}", file=sys.stderr)
        traceback.print_exception(error)


def fuzz(name: str, work: Path, runs: int, seconds: int) -> int:
    """Fuzz one target; the exit status."""
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["nri_numa"], enable_loader_override=False):
        every = importlib.import_module("tests.fuzz.every")
    importlib.import_module("tests.fuzz.targets").quiet()
    target = next(kind for kind in every.EVERY if kind.name == name)()
    found = work / name
    found.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate((*target.corpus, *target.found)):
        (found / f"seed-{number}").write_bytes(data)
    findings = Findings(work / f"{name}.findings")

    def one(data: bytes) -> None:
        started = time.process_time()
        try:
            target.feed(data)
            spent = time.process_time() - started
            assert spent < CASE_SECONDS, f"took {spent:.1f} s"
        except Exception as error:
            findings.add(error, data)

    options = [f"-max_len={LONGEST}", "-print_final_stats=1", "-rss_limit_mb=0", "-verbosity=1"]
    options += [f"-runs={runs}"] if runs else []
    options += [f"-max_total_time={seconds}"] if seconds else []
    atheris.Setup([sys.argv[0], *options, str(found)], one)
    atheris.Fuzz()  # ends the process itself, mostly
    return 1 if findings.seen else 0


def ways(target: Any, data: bytes) -> set[tuple[str, int, int]]:
    """From which line to which our code went for one input, by file."""
    gone: set[tuple[str, int, int]] = set()

    def entered(frame: FrameType, event: str, argument: object) -> Any:
        file, last = frame.f_code.co_filename, 0
        if "/nri_numa/" not in file:
            return None

        def went(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal last
            if event == "line":
                gone.add((file, last, frame.f_lineno))
                last = frame.f_lineno
            return went

        return went

    sys.settrace(entered)
    try:
        target.feed(data)
    finally:
        sys.settrace(None)
    return gone


def keep(name: str, work: Path) -> int:
    """Keep the shortest inputs that go every way; the exit status."""
    every = importlib.import_module("tests.fuzz.every")
    importlib.import_module("tests.fuzz.targets").quiet()
    target = next(kind for kind in every.EVERY if kind.name == name)()
    files = [path.read_bytes() for path in sorted((work / name).iterdir())]
    inputs = sorted({*files, *target.corpus, *target.found}, key=lambda data: (len(data), data))
    gone: set[tuple[str, int, int]] = set()
    kept: list[bytes] = []
    for data in inputs:
        new = ways(target, data) - gone
        if new and sum(map(len, kept)) + len(data) <= KEEP_BYTES:
            gone |= new
            kept.append(data)
    target.close()
    lines = [base64.b64encode(data) for data in kept if data]
    (CORPUS / f"{name}.base64").write_bytes(b"".join(line + b"\n" for line in lines))
    print(f"{name}: {len(inputs)} inputs, {len(lines)} kept, {sum(map(len, kept))} bytes")
    return 0


def main() -> int:
    """Fuzz from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.guided", description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    if options.keep:
        return keep(options.target, options.work)
    return fuzz(options.target, options.work, options.runs, options.seconds)


if __name__ == "__main__":
    sys.exit(main())
