"""All tests, in lanes that run side by side: what CI runs, and `make test-all`.

    python -m tests.lanes [--thorough] [--seed SEED]

Each lane takes the next command of one list as soon as its last one has ended; one more lane builds
what the cache lacks. Commands share the CPUs, and nothing else: cgroups, network namespaces, ports
and folders are made for each process. Output stands behind the name of its command. The JUnit files
of all test runs are in ``artifacts/tests``.
"""

import argparse
import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from tests import slow
from tests.beds.processes import prioritize

BIN = os.path.dirname(sys.executable)
# More than eight NUMA nodes on containerd 2.3, the everyday node (systemd and its cgroup driver,
# hyperthreads) on 1.7, and a kubelet on two NUMA nodes.
MACHINES = "ten-nodes,systemd,kube-node"
# Of the tests of Kubernetes, those that run beside the others; about a third of their time.
KUBERNETES_BESIDE = ("publish", "dra", "counting")
# How long output may come after a command has ended.
LEFTOVER_S = 10
# Commands at a time; some wait more than they compute.
LANES = 3


@dataclass
class Command:
    """A command of a shell, and how it ended.

    Attributes:
        needs: builds that must have ended before it starts.
        seconds: that it took; 0 until it has ended.
    """

    name: str
    line: str
    needs: Sequence[str] = ()
    nice: int = 0
    has_failed: bool = False
    seconds: float = 0

    def run(self, environment: Mapping[str, str], processes: set[subprocess.Popen[str]]) -> None:
        """Run the command, and print what it prints line by line."""
        began = time.monotonic()
        self._say(f"$ {self.line}")
        process = subprocess.Popen(
            ["bash", "-c", self.line],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        prioritize(process.pid, self.nice)
        processes.add(process)
        reader = threading.Thread(target=self._say_all, args=(process.stdout,), daemon=True)
        reader.start()
        process.wait()
        # A process that a test has left behind keeps the pipe open; the lane goes on.
        reader.join(LEFTOVER_S)
        processes.discard(process)
        self.seconds = time.monotonic() - began
        if process.returncode != 0:
            self.has_failed = True
            self._say(f"exit code {process.returncode}: {self.line}")

    def _say_all(self, output: IO[str]) -> None:
        for line in output:
            self._say(line.rstrip("\n"))

    def _say(self, line: str) -> None:
        print(f"{self.name:17} | {line}\n", end="", flush=True)


class Queue:
    """Commands in the order in which lanes take them."""

    def __init__(self, commands: Iterable[Command], builds: Iterable[Command]) -> None:
        self._commands = list(commands)
        self._unbuilt = {build.name for build in builds}
        self._changed = threading.Condition()

    def take(self) -> Command | None:
        """The first command whose builds have ended, waiting for one; None if none is left."""
        with self._changed:
            while self._commands:
                for command in self._commands:
                    if self._unbuilt.isdisjoint(command.needs):
                        self._commands.remove(command)
                        return command
                self._changed.wait()
        return None

    def finish_build(self, name: str) -> None:
        """Let commands start that need this build; those that need a failed one say so."""
        with self._changed:
            self._unbuilt.discard(name)
            self._changed.notify_all()


def pytest(name: str, what: str, *needs: str, seed: str) -> Command:
    """The command of one test run whose results are ``artifacts/tests/NAME.xml``."""
    return Command(
        name,
        f"{BIN}/pytest -q --randomly-seed={seed} -p no:cacheprovider "
        f"--junitxml={slow.FOLDER}/{name}.xml {what}",
        needs,
    )


def build(what: str) -> Command:
    """The command that builds a part, at the lowest priority."""
    return Command(what, f"{BIN}/python -m tests.beds.kube.build {what}", nice=15)


def commands(seed: str, *, thorough: bool = False) -> list[Command]:
    """What lanes run, with tests in the order of a seed: the longest first.

    An emulated machine uses one CPU for all its processors, so two of them start first.
    """
    run = f"PYTEST='{BIN}/pytest --randomly-seed={seed}'"
    beside = [f"tests/kube/test_{name}.py" for name in KUBERNETES_BESIDE]
    others = " ".join(f"--ignore={file}" for file in beside)
    kube = ("kubernetes",)
    return [
        pytest("machine-packaged", "-m vm tests/vm -k 'test_case[systemd-'", seed=seed),
        Command("lint", "make lint && make lint-workflows && make docs"),
        pytest("machines", "-m vm tests/vm -k 'not test_case[systemd-'", "containerd", seed=seed),
        pytest("containerd", "tests/e2e", "containerd", seed=seed),
        pytest("machine-kubelet", "-m vm tests/kube", *kube, seed=seed),
        pytest("kubernetes", f"-m 'kube and not vm' tests/kube {others}", *kube, seed=seed),
        Command("coverage", "make coverage"),
        # Helm is built with Kubernetes.
        Command("python", f'make test {run} WITHOUT="$(make --silent covered)"', kube),
        pytest("release", "-m release tests/shipped", seed=seed),
        pytest("kubernetes-beside", " ".join(beside), *kube, seed=seed),
        # Image and bundle carry it; of others only the thorough run has time.
        Command("interpreters", f"make interpreters{'' if thorough else ' INTERPRETERS=trixie'}"),
        pytest("browser", "tests/browser", seed=seed),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all lanes and sum up."""
    parser = argparse.ArgumentParser(prog="python -m tests.lanes", description=main.__doc__)
    parser.add_argument("--thorough", action="store_true", help="every series, machine and example")
    parser.add_argument("--seed", default="default", help="of the order of tests")
    options = parser.parse_args(arguments)
    shutil.rmtree("artifacts", ignore_errors=True)
    os.makedirs(slow.FOLDER)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment.setdefault("HYPOTHESIS_PROFILE", "dev")  # make test alone takes fewer examples
    environment["NRI_NUMA_VM"] = "all" if options.thorough else MACHINES
    if options.thorough:
        environment.update(
            HYPOTHESIS_PROFILE="ci", NRI_NUMA_SERIES="all", NRI_NUMA_REBALANCING_SECONDS="240"
        )
    elif options.seed.isdecimal():  # a day
        environment["NRI_NUMA_TURN"] = str(int(options.seed) % 2)
    chosen = commands(options.seed, thorough=options.thorough)
    builds = [build("containerd"), build("kubernetes")]
    queue = Queue(chosen, builds)
    processes: set[subprocess.Popen[str]] = set()

    def run_commands() -> None:
        while command := queue.take():
            command.run(environment, processes)

    def run_builds() -> None:
        for each in builds:
            each.run(environment, processes)
            queue.finish_build(each.name)

    threads = [
        threading.Thread(target=target, daemon=True)
        for target in (run_builds, *[run_commands] * LANES)
    ]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        # pytest cleans up after SIGINT: containers, namespaces and machines end with it.
        for process in list(processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
        for process in list(processes):
            process.wait()
        raise
    return _summed_up([*builds, *chosen], time.monotonic() - began)


def _summed_up(chosen: Sequence[Command], seconds: float) -> int:
    results = slow.read()
    print(slow.report(results))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    for command in chosen:
        print(f"{command.seconds / 60:6.1f} min  {command.name:17} {command.line[-90:]}")
    cpu = (used.ru_utime + used.ru_stime) / 60
    print(f"{seconds / 60:6.1f} min in all, {cpu:.1f} min of CPU")
    for command in chosen:
        if command.has_failed:
            print(f"FAILED: {command.name}: {command.line}")
    for each in results:
        if each.outcome == "failed":
            print(f"FAILED: {each.name}: {each.why}")
    print(f"tried again: {slow.tried_again(results)}")
    count = slow.counted(results)
    # A command that failed without a failed test (lint, a crash) must show in the closing line too.
    failed = count["failed"] or sum(command.has_failed for command in chosen)
    print(f"{count['passed']} passed, {failed} failed, {count['skipped']} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
