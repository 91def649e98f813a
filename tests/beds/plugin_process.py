"""``nri-numa run`` as a process of its own, the way systemd would run it. Free of pytest."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.beds.processes import Daemon

REPOSITORY = Path(__file__).resolve().parents[2]
# An emulated machine takes its time for a document of many small files.
_ANSWER_LIMIT_S = 180.0


def free_port() -> int:
    """A TCP port on loopback that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def plugin_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a plugin: ours without the settings of the test bed.

    ``NRI_NUMA_*`` is where the plugin takes its configuration from, so a variable meant for the
    test bed would be an unknown key there.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith("NRI_NUMA_")}
    return {**kept, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1", **(extra or {})}


class PluginProcess(Daemon):
    """One plugin; a context manager that starts it, waits until it is ready, and ends it.

    Args:
        config: keys of the configuration file, as in ``config/agent.yaml``.
    """

    def __init__(
        self,
        directory: Path,
        nri_socket: Path,
        *,
        config: Mapping[str, Any] | None = None,
        sysfs_root: Path = Path("/"),
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__("plugin", (), directory, plugin_environment(environment))
        self.directory = self.folder = directory
        self.nri_socket = nri_socket
        self.state_directory = directory / "state"
        self.config_file = directory / "agent.yaml"
        self.config = dict(config or {})
        self._sysfs_root = sysfs_root
        self.arguments = list(arguments)
        self.python = sys.executable
        self.port = 0  # 0: another one for each start, for connections of the last may linger
        self.bound = 0
        self.log_start = 0

    # -- life ------------------------------------------------------------------------------

    def words(self) -> list[str]:
        return [
            *(self.python, "-m", "nri_numa", "run"),
            f"--config={self.config_file}",
            f"--nri-socket={self.nri_socket}",
            f"--state-dir={self.state_directory}",
            f"--http={self.address}",
            f"--sysfs-root={self._sysfs_root}",
            *self.arguments,
        ]

    @property
    def address(self) -> str:
        """Where it serves HTTP, host and port."""
        return f"127.0.0.1:{self.bound}"

    @property
    def checkpoint(self) -> Path:
        return self.state_directory / "checkpoint"

    def write_config(self, config: Mapping[str, Any] | None = None) -> None:
        """Write the configuration file; a mapping given replaces the earlier one."""
        if config is not None:
            self.config = dict(config)
        document = {
            "apiVersion": "nri-numa/v1",
            "kind": "AgentConfig",
            "log": {"format": "json", "level": "debug"},
            **self.config,
        }
        # JSON is YAML, and quotes what YAML would take for a number.
        self.config_file.write_text(json.dumps(document, indent=1), encoding="utf-8")

    def start(self, *, wait: bool = True, timeout_s: float = 180.0) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.write_config()
        self.bound = self.port or free_port()
        self.log_start = len(self.log().encode())
        self.command = self.words()
        super().start()
        if wait:
            self.wait_ready(timeout_s=timeout_s)

    def ready(self) -> bool:
        """Whether it says that it is connected and synchronised: the last word in its log."""
        states = [
            record.get("state") for record in self.records("link changed", since=self.log_start)
        ]
        return self.running and states[-1:] == ["active"]

    def wait_ready(self, *, ready: bool = True, timeout_s: float = 180.0) -> None:
        """Wait until the plugin is connected and synchronised (or is not, any more)."""
        deadline = time.monotonic() + timeout_s
        while self.ready() != ready:
            self.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"not {ready=} in {timeout_s} s:\n{self.log()[-4000:]}")
            time.sleep(0.02)

    def terminate(self, timeout_s: float = 180.0) -> int:
        return self.end(timeout_s=timeout_s)

    def wait(self, timeout_s: float = 180.0) -> int:
        """Wait for it to end by itself; returns the exit status."""
        assert self._process is not None
        code = self._process.wait(timeout_s)
        self._process = None
        return code

    def restart(self, *, kill: bool = False) -> None:
        """End and start it, with the same state directory."""
        if kill:
            self.kill()
        else:
            code = self.terminate()
            if code != 0:
                raise RuntimeError(f"status {code} on SIGTERM:\n{self.log()[-4000:]}")
        self.start()

    def reload(self, config: Mapping[str, Any]) -> None:
        self.write_config(config)
        os.kill(self.pid, signal.SIGHUP)

    def close(self) -> None:
        self.kill()

    def release(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``nri-numa release`` with its configuration; of two same options the last counts."""
        options = [
            f"--config={self.config_file}",
            f"--nri-socket={self.nri_socket}",
            f"--state-dir={self.state_directory}",
            f"--sysfs-root={self._sysfs_root}",
        ]
        return subprocess.run(
            [self.python, "-m", "nri_numa", "release", *options, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    # -- seen from outside -----------------------------------------------------------------

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of an HTTP request; HTTP is served a moment after the start."""
        deadline = time.monotonic() + _ANSWER_LIMIT_S
        while True:
            try:
                return self._ask(path, _ANSWER_LIMIT_S)
            except urllib.error.URLError as error:
                early = isinstance(error.reason, ConnectionRefusedError) and self.running
                if not early or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def _ask(self, path: str, timeout_s: float) -> tuple[int, str]:
        url = f"http://{self.address}{path}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(url, timeout=timeout_s) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def responsive(self) -> bool:
        try:
            return self._ask("/healthz", 5)[0] == 200
        except OSError:
            return False

    def json(self, path: str) -> Any:
        status, body = self.get(path)
        assert status == 200, f"GET {path}: {status}: {body}"
        return json.loads(body)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of a metric that have these labels; 0 when there is none."""
        total = 0.0
        for line in self.get("/metrics")[1].splitlines():
            head, _, value = line.rpartition(" ")
            bare, _, rest = head.partition("{")
            if bare == name and all(f'{key}="{text}"' in rest for key, text in labels.items()):
                total += float(value)
        return total


class StartPlugin:
    """Starts plugins beside one runtime; who has it ends them."""

    def __init__(self, directory: Path, nri_socket: Path) -> None:
        self._directory = directory
        self._nri_socket = nri_socket
        self.started: list[PluginProcess] = []

    def __call__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        sysfs_root: Path = Path("/"),
        state_directory: Path | None = None,
        wait: bool = True,
    ) -> PluginProcess:
        """Start one.

        `state_directory`: default one of its own.
        """
        directory = Path(tempfile.mkdtemp(prefix="plugin-", dir=self._directory))
        plugin = PluginProcess(directory, self._nri_socket, config=config, sysfs_root=sysfs_root)
        if state_directory is not None:
            plugin.state_directory = state_directory
        self.started.append(plugin)
        plugin.start(wait=wait)
        return plugin
