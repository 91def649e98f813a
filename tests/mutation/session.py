"""Runs the tests that go through a mutated line until one fails, each mutant in a fork.

The tests are imported and collected once. In the fork the functions that a mutant changes get
their code exchanged; what runs when a module is imported cannot be exchanged, so for such mutants
the fork imports everything anew, with the mutant in place of the module. Nothing on disk is
changed.
"""

import contextlib
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import resource
import select
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import CodeType
from typing import Final

import pytest

from tests.mutation.live import Functions
from tests.mutation.mutants import Mutant
from tests.mutation.reached import OPTIONS
from tests.mutation.rooms import deterministic

QUIET_S: Final = 120
"""Without a test that ends: they hang, or the machine is very busy."""
LOOK_S: Final = 5
"""Between two looks whether a test has ended."""
CPU_S: Final = 60
"""More than the tests that are drawn need; a mutant that does not end is noticed by it."""
SURVIVED, KILLED, TIMEOUT = "survived", "killed", "timeout"

Work = Generator[tuple[Mutant, Sequence[str], bool], tuple[str, str], None]
"""Hands out mutants with the tests to ask, and whether the line runs at import; is sent the outcome
and the test that noticed."""


class _Mutated(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds one module with other code than on disk."""

    def __init__(self, name: str, path: Path, code: str) -> None:
        self._name = name
        self._path = path
        self._code = code

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.util.spec_from_file_location(fullname, self._path, loader=self)

    def get_source(self, fullname: str) -> str:
        return self._code

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._code, str(self._path), "exec", dont_inherit=True)


class Session:
    """Plugin of pytest: where all tests would run, mutants are tried."""

    def __init__(self, repository: Path, work: Work) -> None:
        self._repository = repository
        self._work = work

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        functions = Functions(self._repository / "nri_numa")
        gc.collect()
        gc.freeze()  # what forks share stays shared

        def asked(mutant: Mutant, tests: Sequence[pytest.Item], at_import: bool) -> tuple[str, int]:
            path = self._repository / mutant.module
            before = path.read_text(encoding="utf-8")
            after = mutant.code or before

            def child(tell: Callable[[], object]) -> bool:
                if at_import or not (after == before or functions.replace(path, before, after)):
                    return _anew(path, mutant.module, after, [item.nodeid for item in tests])
                session.items = list(tests)
                for item, following in zip(tests, [*tests[1:], None], strict=True):
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                    if session.testsfailed:
                        return False
                    tell()
                return True

            return forked(child)

        with contextlib.suppress(StopIteration):
            mutant, names, at_import = next(self._work)
            while True:
                tests = [items[name] for name in names if name in items]
                outcome, number = asked(mutant, tests, at_import)
                while (
                    outcome == KILLED and number < len(tests) and not deterministic(mutant.module)
                ):
                    # A test that fails now and then by itself is no witness.
                    # What was tried at import does not say which one it was.
                    again = tests if at_import else [tests[number]]
                    if asked(mutant, again, at_import)[0] != SURVIVED:
                        break
                    tests = tests[number + 1 :]
                    outcome, number = asked(mutant, tests, at_import) if tests else (SURVIVED, 0)
                by = tests[number].nodeid if number < len(tests) else ""
                mutant, names, at_import = self._work.send((outcome, by))
        return True


def _anew(path: Path, module: str, code: str, tests: Sequence[str]) -> bool:
    for name in [name for name in sys.modules if name.split(".")[0] in ("nri_numa", "tests")]:
        del sys.modules[name]
    name = module.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    sys.meta_path.insert(0, _Mutated(name, path, code))
    return int(pytest.main([*OPTIONS, "--hypothesis-seed=1", *tests])) == 0


def forked(child: Callable[[Callable[[], object]], bool]) -> tuple[str, int]:
    """The outcome of what runs in a fork, and how many tests it ended before.

    `child`: is given what tells that a test ended; whether all of them passed.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
            null = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)
            sys.stdout = sys.stderr = open(null, "w", closefd=False)  # noqa: SIM115
            status = 0 if child(lambda: os.write(writing, b".")) else 1
        os._exit(status)
    os.close(writing)
    ended, quiet = 0, 0.0
    while quiet < QUIET_S:
        # In short looks: a run that is stopped for minutes and goes on (somebody measures) has
        # missed one of them, and no test hangs.
        ready, _, _ = select.select([reading], [], [], LOOK_S)
        if not ready:
            quiet += LOOK_S
            continue
        if not (told := os.read(reading, 65536)):
            break
        ended, quiet = ended + len(told), 0
    hangs = quiet >= QUIET_S
    os.close(reading)
    if hangs:
        os.kill(pid, signal.SIGKILL)  # the process: on a busy machine it may have no session yet
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # whatever the tests have left
    if hangs or os.WIFSIGNALED(status):
        return TIMEOUT, ended
    return (SURVIVED if os.waitstatus_to_exitcode(status) == 0 else KILLED), ended


def tried(repository: Path, asked: Sequence[str], work: Work, said: Path) -> int:
    """Try mutants in a process of their own; the exit status of pytest."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            os.chdir(repository)
            log = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            options = [*OPTIONS, "--hypothesis-seed=1", *asked]
            status = int(pytest.main(options, plugins=[Session(repository, work)]))
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
