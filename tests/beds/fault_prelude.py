"""Starts ``nri-numa`` with something broken inside: ``fault_prelude.py FAULT ARGUMENTS...``.

Faults:

``kill:N:MOMENT``
    SIGKILL to itself at the N-th change of the checkpoint's files: ``before`` it, ``after`` it, or
    ``half`` way through a write.
``call:MODULE:CLASS.METHOD:MOMENT``
    SIGKILL to itself ``before`` the first call of that method is made, or ``after`` it returned.
``count:FILE``
    Write the number of such changes into FILE, whenever there is one more.
``clock:FILE``
    Unix time is off by the seconds that FILE holds.
``confined:FILE``
    No capability, and the system calls of the seccomp profile FILE only.
"""

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = ("open", "write", "rename", "link", "ftruncate")
"""Calls through which the checkpoint is changed."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


class BrokenOS:
    """The ``os`` module as one module sees it, with a hook around every step."""

    def __init__(
        self,
        hook: Callable[[Callable[..., Any], tuple[Any, ...], Any], Any],
        steps: tuple[str, ...] = STEPS,
    ) -> None:
        self._hook, self._steps = hook, steps

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self._steps:
            return real
        hook = self._hook

        def step(*arguments: Any, **options: Any) -> Any:
            if name == "open" and not arguments[1] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
                return real(*arguments, **options)  # only reads
            return hook(real, arguments, options)

        return step


def kill_at(number: int, moment: str) -> Callable[..., Any]:
    """Make the hook of ``kill``."""
    seen = 0

    def hook(real: Callable[..., Any], arguments: tuple[Any, ...], options: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen != number:
            return real(*arguments, **options)
        if moment == "half" and real is os.write:
            real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
        elif moment == "after":
            real(*arguments, **options)
        die()
        raise AssertionError

    return hook


def count_into(path: str) -> Callable[..., Any]:
    """Make the hook of ``count``."""
    seen = 0

    def hook(real: Callable[..., Any], arguments: tuple[Any, ...], options: Any) -> Any:
        nonlocal seen
        seen += 1
        with open(path, "w", encoding="ascii") as file:
            file.write(f"{seen}\n")
        return real(*arguments, **options)

    return hook


def kill_at_call(module: str, method: str, moment: str) -> None:
    """Replace a method by one that ends the process."""
    owner, _, name = method.partition(".")
    cls = vars(importlib.import_module(module))[owner]
    real = vars(cls)[name]

    def last(*arguments: Any, **options: Any) -> None:
        if moment == "after":
            real(*arguments, **options)
        die()

    setattr(cls, name, last)


def jumping_clock(path: str) -> Callable[[], float]:
    """Make a ``time.time`` that jumps."""
    real = time.time

    def now() -> float:
        with open(path, encoding="ascii") as file:
            return real() + float(file.read())

    return now


def forked(words: list[str], environment: dict[str, str], folder: str, log: str) -> None:
    """`main` with these words, in a process that was forked for it."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    with open(log, "ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.argv[1:] = words
    main()


def main() -> None:
    """Break what is to be broken, and run."""
    name, _, rest = sys.argv.pop(1).partition(":")
    if name == "clock":
        time.time = jumping_clock(rest)
    elif name == "confined":
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
        from tests.beds import confinement

        if os.geteuid() == 0:
            confinement.drop_capabilities()
        confinement.load(Path(rest))
    elif name == "call":
        kill_at_call(*rest.split(":"))
    elif name:
        import nri_numa.store.checkpoint
        import nri_numa.store.files

        if name == "kill":
            number, moment = rest.split(":")
            hook = kill_at(int(number), moment)
        else:
            hook = count_into(rest)
        for module in (nri_numa.store.checkpoint, nri_numa.store.files):
            vars(module)["os"] = BrokenOS(hook)
    from nri_numa.cli import main as run

    sys.argv[0] = "nri-numa"
    run()


if __name__ == "__main__":
    main()
