"""Starts plugins by forking a process that has imported everything: ``python -m tests.vm.nursery``.

Python needs half a second of processor time to import the plugin, which an emulation makes half a
minute. A child of this process is a plugin like any other, with its own process id, memory and log;
`kill -9` takes it as it takes any other. What is left out is only the importing.
"""

import contextlib
import importlib
import json
import os
import pkgutil
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nri_numa
from tests.beds.plugin_process import REPOSITORY
from tests.vm.plugin import GuestPlugin

# They end or start something when imported, or the plugin has no use for them.
_NOT = ("__main__", ".demo", ".pb", ".embedded", ".simulate")


class Forked:
    """A process that is not our child, as `subprocess.Popen` would show it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._descriptor = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """0 when it has ended (the status is not ours to know), else None."""
        if self.returncode is None and select.select([self._descriptor], [], [], 0)[0]:
            self.returncode = 0
            os.close(self._descriptor)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self.returncode is None:
            select.select([self._descriptor], [], [], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("plugin", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class NurseryPlugin(GuestPlugin):
    """A plugin of the nursery."""

    def __init__(self, directory: Path, nri_socket: Path, log: Path) -> None:
        super().__init__(directory, nri_socket, log)
        self._nursery: subprocess.Popen[bytes] | None = None

    def _spawn(self) -> Any:
        if self._nursery is None:
            self._nursery = subprocess.Popen(
                [sys.executable, "-m", "tests.vm.nursery"],
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        order = {
            "arguments": self.command[3:],
            "environment": self.environment,
            "directory": str(self.directory),
            "log": str(self.log_file),
        }
        self._nursery.stdin.write(json.dumps(order).encode() + b"\n")
        self._nursery.stdin.flush()
        return Forked(int(self._nursery.stdout.readline()))

    def close(self) -> None:
        super().close()
        if self._nursery is not None:
            self._nursery.kill()
            self._nursery.communicate()
            self._nursery = None


def _live(order: Mapping[str, Any]) -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["directory"])
    from nri_numa.cli import main as plugin

    plugin(order["arguments"])
    return 0


def main(arguments: Sequence[str]) -> int:
    """Import, then fork one plugin for each line of standard input."""
    for module in pkgutil.walk_packages(nri_numa.__path__, "nri_numa."):
        if not any(part in module.name for part in _NOT):
            importlib.import_module(module.name)
    for library in ("h11", "cgroupspy", "pyroute2", "prometheus_client", "yaml", "click"):
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets children that ended
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                code = _live(order)
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            finally:
                sys.stdout.flush()
                os._exit(code)
        print(pid, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
