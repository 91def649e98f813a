"""All tests, in lanes that run side by side: what CI runs, and `make test-all`.

    python -m tests.lanes [--thorough] [--seed SEED]

Each lane is a list of commands that run one after the other; lanes share the CPUs, and nothing
else: cgroups, network namespaces, ports and folders are made for each process. What a lane prints
stands behind its name. The JUnit files of all test runs are in ``artifacts/tests``.
"""

from __future__ import annotations

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass
class Lane:
    """Commands in order, and how they ended.

    Attributes:
        commands: of a shell; the next one starts when the one before has ended, well or not.
        failed: the commands that did not end with 0.
    """

    name: str
    commands: Sequence[str]
    nice: int = 0
    failed: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def run(self, environment: Mapping[str, str], processes: set[subprocess.Popen[str]]) -> None:
        """Run all commands, and print what they print line by line."""
        for command in self.commands:
            began = time.monotonic()
            self._say(f"$ {command}")
            process = subprocess.Popen(
                ["bash", "-c", command],
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
            self.seconds[command] = time.monotonic() - began
            if process.returncode != 0:
                self.failed.append(command)
                self._say(f"exit code {process.returncode}: {command}")

    def _say_all(self, output: IO[str]) -> None:
        for line in output:
            self._say(line.rstrip("\n"))

    def _say(self, line: str) -> None:
        print(f"{self.name:10} | {line}", flush=True)


def pytest(name: str, what: str, *, seed: str) -> str:
    """The command of one test run whose results are ``artifacts/tests/NAME.xml``."""
    return (
        f"{BIN}/pytest -q --randomly-seed={seed} -p no:cacheprovider "
        f"--junitxml={slow.FOLDER}/{name}.xml {what}"
    )


def built(what: str) -> str:
    """The command that waits for a part of the lane ``build``."""
    return f"while [ ! -e artifacts/{what} ]; do sleep 1; done"


def build(what: str) -> str:
    """The command that builds a part; who waits for it goes on where it fails, and says so."""
    command = f"{BIN}/python -m tests.beds.kube.build {what}"
    return f"{command}; ended=$?; touch artifacts/{what}; exit $ended"


def lanes(seed: str, *, thorough: bool = False) -> list[Lane]:
    """What runs side by side, with tests in the order of a seed."""
    run = f"PYTEST='{BIN}/pytest --randomly-seed={seed}'"
    beside = [f"tests/kube/test_{name}.py" for name in KUBERNETES_BESIDE]
    others = " ".join(f"--ignore={file}" for file in beside)
    return [
        Lane(
            "machines",
            [
                pytest("machine-packaged", "-m vm tests/vm -k 'test_case[systemd-'", seed=seed),
                built("containerd"),
                pytest("machines", "-m vm tests/vm -k 'not test_case[systemd-'", seed=seed),
                built("kubernetes"),
                pytest("machine-kubelet", "-m vm tests/kube", seed=seed),
                pytest("kubernetes-beside", " ".join(beside), seed=seed),
                pytest("browser", "tests/browser", seed=seed),
            ],
        ),
        Lane(
            "containerd",
            [
                built("containerd"),
                pytest("containerd", "tests/e2e", seed=seed),
                built("kubernetes"),
                pytest("kubernetes", f"-m 'kube and not vm' tests/kube {others}", seed=seed),
            ],
        ),
        Lane(
            "python",
            [
                "make lint",
                "make lint-workflows",
                "make docs",
                "make coverage",
                built("kubernetes"),  # and Helm with it
                f'make test {run} WITHOUT="$(make --silent covered)"',
                pytest("release", "-m release tests/shipped", seed=seed),
                # Image and bundle carry it; of others only the thorough run has time.
                f"make interpreters{'' if thorough else ' INTERPRETERS=trixie'}",
            ],
        ),
        Lane("build", [build("containerd"), build("kubernetes")], nice=15),
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
            HYPOTHESIS_PROFILE="ci", NRI_NUMA_SERIES="all", NRI_NUMA_ROOM_SECONDS="240"
        )
    elif options.seed.isdecimal():  # a day
        environment["NRI_NUMA_TURN"] = str(int(options.seed) % 2)
    chosen = lanes(options.seed, thorough=options.thorough)
    processes: set[subprocess.Popen[str]] = set()
    threads = [
        threading.Thread(target=lane.run, args=(environment, processes), daemon=True)
        for lane in chosen
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
    return _summed_up(chosen, time.monotonic() - began)


def _summed_up(chosen: Sequence[Lane], seconds: float) -> int:
    results = slow.read()
    print(slow.report(results))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    for lane in chosen:
        for command, took in lane.seconds.items():
            print(f"{took / 60:6.1f} min  {lane.name:10} {command[-90:]}")
    cpu = (used.ru_utime + used.ru_stime) / 60
    print(f"{seconds / 60:6.1f} min in all, {cpu:.1f} min of CPU")
    for lane in chosen:
        for command in lane.failed:
            print(f"FAILED: {lane.name}: {command}")
    for each in results:
        if each.outcome == "failed":
            print(f"FAILED: {each.name}: {each.why}")
    print(f"tried again: {slow.tried_again(results)}")
    count = slow.counted(results)
    # A command that failed without a failed test (lint, a crash) must show in the closing line too.
    failed = count["failed"] or sum(len(lane.failed) for lane in chosen)
    print(f"{count['passed']} passed, {failed} failed, {count['skipped']} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
