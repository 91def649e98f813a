"""`nri-numa run` inside the guest, where everything takes ten times as long."""

import re
import shutil
import signal
import subprocess
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.beds.cri import poll
from tests.beds.plugin_process import REPOSITORY, PluginProcess

START_LIMIT_S = 150.0
# A plugin that did not get ready once need not keep each further case waiting that long.
AGAIN_LIMIT_S = 15.0


class GuestPlugin(PluginProcess):
    """The plugin under test; its log is one file of the artifacts, over all its restarts."""

    def __init__(
        self,
        directory: Path,
        nri_socket: Path,
        log: Path,
        *,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(directory, nri_socket, config=config)
        self.log_file = log
        self._limit_s = START_LIMIT_S

    def ensure_ready(self) -> None:
        """Start it unless it runs, and wait until it is connected."""
        if not self.running:
            self.start(wait=False)
        limit, self._limit_s = self._limit_s, AGAIN_LIMIT_S
        self.wait_ready(timeout_s=limit)
        self._limit_s = START_LIMIT_S


UNIT = Path("/etc/systemd/system/nri-numa.service")
# An emulated CPU is twenty to fifty times slower than a real one; the shipped limits are for that.
_SLOW = "[Service]\nTimeoutStartSec=300\nTimeoutStopSec=60\nWatchdogSec=120\n"


class UnitPlugin(GuestPlugin):
    """The plugin as docs/install-node.md installs it: the unit, under the guest's systemd."""

    def __init__(self, nri_socket: Path, log: Path) -> None:
        super().__init__(Path("/etc/nri-numa"), nri_socket, log)
        self.state_directory = Path("/run/nri-numa")
        self.bound = 9891
        self._installed = False

    @property
    def pid(self) -> int:
        """Process id; 0 while there is none."""
        shown = systemctl("show", "--property=MainPID", "--value", "nri-numa")
        return int(shown or 0)

    @property
    def running(self) -> bool:
        """Whether systemd has a process of it."""
        return self.pid != 0

    def write_config(self, config: Mapping[str, Any] | None = None) -> None:
        """Write the configuration file; where the runtime's socket is belongs to it."""
        if config is not None:
            self.config = dict(config)
        super().write_config({**self.config, "runtime": {"nriSocket": str(self.nri_socket)}})

    def start(self, *, wait: bool = True, timeout_s: float = START_LIMIT_S) -> None:
        """``systemctl start``."""
        self.log_start = len(self.log().encode())
        self.directory.mkdir(parents=True, exist_ok=True)
        self.write_config()
        if not self._installed:
            for unit in (UNIT, UNIT.with_suffix(".socket")):
                shutil.copy(REPOSITORY / "systemd" / unit.name, unit)
            self.slow_down(f"StandardOutput=append:{self.log_file}\nStandardError=inherit\n")
            self._installed = True
        systemctl("start", "nri-numa")
        if wait:
            self.wait_ready(timeout_s=timeout_s)

    def drop_in(self, page: str) -> None:
        """Give the unit more rights, by the drop-in that a page of the documentation has."""
        text = (REPOSITORY / "docs" / page).read_text()
        (found,) = re.findall(r"^ +\[Service\]\n(?: +\w+=.*\n)+", text, re.MULTILINE)
        directory = UNIT.with_name(f"{UNIT.name}.d")
        directory.mkdir(exist_ok=True)
        (directory / page).with_suffix(".conf").write_text(textwrap.dedent(found))
        systemctl("daemon-reload")

    def slow_down(self, more: str = "") -> None:
        """Put the unit's limits where an emulated machine keeps to them; more lines follow."""
        drop_in = UNIT.with_name(f"{UNIT.name}.d")
        drop_in.mkdir(exist_ok=True)
        (drop_in / "bed.conf").write_text(_SLOW + more)
        systemctl("daemon-reload")

    def terminate(self, timeout_s: float = 15.0) -> int:
        """``systemctl stop``."""
        if self._installed:
            systemctl("stop", "nri-numa")
        return 0

    def kill(self) -> int:
        """SIGKILL; systemd starts another one after a second."""
        self.log_start = len(self.log().encode())
        before = self.pid
        systemctl("kill", f"--signal={signal.SIGKILL.name}", "nri-numa")
        poll(lambda: self.pid != before, "another process")
        return -signal.SIGKILL

    def uninstall(self) -> None:
        """Stop it, and leave nothing of its unit."""
        self.terminate()
        for unit in (UNIT, UNIT.with_suffix(".socket")):
            unit.unlink(missing_ok=True)
        shutil.rmtree(UNIT.with_name(f"{UNIT.name}.d"), ignore_errors=True)
        systemctl("daemon-reload")
        self._installed = False

    def close(self) -> None:
        self.terminate()


class PodPlugin(GuestPlugin):
    """The plugin as the chart installs it: in a container of the runtime that it serves."""

    def __init__(self, directory: Path, nri_socket: Path, log: Path) -> None:
        super().__init__(directory, nri_socket, log)
        self.bound = 9891

    @property
    def running(self) -> bool:
        """It runs for as long as a case has this."""
        return True

    def ready(self) -> bool:
        """By its probe: the container has the log."""
        return self.get("/readyz")[0] == 200


def systemctl(*arguments: str) -> str:
    """``systemctl …`` that has to work; returns its output."""
    done = subprocess.run(
        ["systemctl", *arguments], capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode != 0:
        status = subprocess.run(
            ["systemctl", "status", "--no-pager", "nri-numa"],
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        raise RuntimeError(f"systemctl {' '.join(arguments)}: {done.stderr}\n{status.stdout}")
    return done.stdout.strip()
