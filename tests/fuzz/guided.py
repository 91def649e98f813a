"""Fuzz by coverage: inputs that reach new code are kept and damaged further.

    python -m tests.fuzz.guided TARGET [--seconds S] [--work DIRECTORY] [OPTIONS]

It needs atheris (`make fuzz-guided` gets it), begins with what is in ``corpus/TARGET`` and in
``corpus/TARGET.base64``, keeps what it finds in ``DIRECTORY/TARGET``, and ends at the first
finding, whose input it keeps beside that. Further options are libFuzzer's: ``-merge=1 FOLDER``
keeps the fewest inputs that reach as much; in ``corpus/TARGET`` every other run begins with them.
"""

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import Any

LONGEST = 4096
"""Bytes of an input."""
CASE_SECONDS = 1.0


def main() -> None:
    """Fuzz one target from the command line; atheris ends the process."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.guided", description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("build/fuzz"))
    options, more = parser.parse_known_args()
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["nri_numa"], enable_loader_override=False):
        every = importlib.import_module("tests.fuzz.every")
    importlib.import_module("tests.fuzz.targets").quiet()
    target = next(kind for kind in every.EVERY if kind.name == options.target)()
    found = options.work / options.target
    found.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate((*target.corpus, *target.found)):
        (found / f"seed-{number}").write_bytes(data)

    def one(data: bytes) -> None:
        started = time.process_time()
        target.feed(data)
        spent = time.process_time() - started
        assert spent < CASE_SECONDS, f"took {spent:.1f} s"

    words = [f"-max_len={LONGEST}", "-print_final_stats=1", "-rss_limit_mb=0", "-verbosity=1"]
    words += [f"-max_total_time={options.seconds}", f"-artifact_prefix={found}-"]
    # What begins a merge's processes, by a shell.
    program = f"{sys.executable} -m tests.fuzz.guided {options.target}"
    atheris.Setup([program, *words, *more, str(found)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
