"""The shipped unit under a real systemd: started, killed, hung, reloaded, stopped, released.

The guest's first process is not systemd, so systemd runs as the first process of a PID namespace,
as in a container, with the guest's cgroup v2 and its own copy of ``/etc`` and ``/usr/local/bin``.
What it does with the unit (sandbox, notification, watchdog, restarts) is the same.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.beds.cri import Container, poll
from tests.machines.vm_machine import Machine
from tests.vm import words
from tests.vm.guest import Guest
from tests.vm.registry import case, skip

REPOSITORY = Path(__file__).resolve().parents[3]
_ROOT = Path("/run/sd")
_SYSTEMD = Path("/lib/systemd/systemd")
_STATE = Path("/run/nri-numa")

# The shipped unit is started as docs/install.md says, with the paths that stand in it.
_SETUP = """set -e
mount --make-rprivate /
for at in etc usr/local/bin; do
  mkdir -p {root}/up/$at {root}/aside/$at
  mount -t overlay overlay -o lowerdir=/$at,upperdir={root}/up/$at,workdir={root}/aside/$at /$at
done
mount --bind {repository} {root}/checkout
# What else a machine starts has nothing to do with the unit, and takes minutes in an emulation.
for at in /lib/systemd/system/*.target.wants; do mount -t tmpfs tmpfs $at; done
rm -rf /etc/systemd/system/* /etc/machine-id
echo 0123456789abcdef0123456789abcdef > /etc/machine-id
printf '[Unit]\\nDescription=nothing\\n' > /etc/systemd/system/nothing.target
mkdir -p /etc/nri-numa
cp {root}/agent.yaml /etc/nri-numa/agent.yaml
cp {root}/nri-numa /usr/local/bin/nri-numa
chmod 755 /usr/local/bin/nri-numa
echo $$ > {root}/inside
export container=namespace
exec {systemd} --system --unit=nothing.target --log-target=console --show-status=no
"""


class Systemd:
    """One systemd in namespaces of its own; a context manager."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        self._process: subprocess.Popen[bytes] | None = None
        self._first = 0

    def start(self) -> None:
        """Start it and wait until it takes commands."""
        _ROOT.mkdir(parents=True, exist_ok=True)
        (_ROOT / "agent.yaml").write_text(
            f"runtime: {{nriSocket: {self._guest.containerd.nri_socket}}}\n"
        )
        # The unit hides home directories, and a checkout may be in one: it is seen elsewhere too.
        here = _ROOT / "checkout"
        here.mkdir(exist_ok=True)
        python = here / Path(sys.executable).relative_to(REPOSITORY)
        program = (
            f"#!/bin/sh\nexport PYTHONPATH={here}\n"
            f'exec {shlex.quote(str(python))} -m nri_numa "$@"\n'
        )
        (_ROOT / "nri-numa").write_text(program)
        script = _ROOT / "setup"
        script.write_text(_SETUP.format(root=_ROOT, systemd=_SYSTEMD, repository=REPOSITORY))
        cgroup = Path("/sys/fs/cgroup/sd")
        cgroup.mkdir(exist_ok=True)
        enter = f"echo $$ > {cgroup}/cgroup.procs; exec "
        unshare = "unshare --mount --pid --fork --kill-child --mount-proc -- sh "
        with (self._guest.shared / "systemd.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", f"{enter}{unshare}{script}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        self._first = int(poll(lambda: children.read_text().split(), "systemd", timeout_s=60)[0])
        poll(lambda: self.do("is-system-running").stdout.strip() in _UP, "up", timeout_s=240)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command where systemd runs."""
        return subprocess.run(
            ["nsenter", "-t", str(self._first), "-m", "-p", "--", *command],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def do(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``systemctl …``."""
        return self.run("systemctl", *arguments)

    def must(self, *arguments: str) -> str:
        """``systemctl …`` that has to work; returns its output."""
        done = self.do(*arguments)
        assert done.returncode == 0, (
            f"systemctl {' '.join(arguments)}: {done.stderr}\n"
            f"{self.do('status', 'nri-numa').stdout}"
        )
        return done.stdout

    def show(self, key: str) -> str:
        """One property of the service."""
        return self.must("show", "--property", key, "--value", "nri-numa").strip()

    def pid(self) -> int:
        """The plugin's process id in the guest; 0 when there is none."""
        inner = int(self.show("MainPID"))
        if not inner:
            return 0
        for entry in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):
                for line in entry.read_text().splitlines():
                    if line.startswith("NSpid:") and line.split()[2:] == [str(inner)]:
                        return int(entry.parent.name)
        return 0

    def settled(self, previous: int = 0) -> int:
        """Wait until the service runs, is linked, and is another process than before."""

        def look() -> int | None:
            pid = self.pid()
            linked = self.show("StatusText") in ("link active", "reloaded")
            active = self.show("ActiveState") == "active"
            return pid if pid and pid != previous and linked and active else None

        return poll(look, "service linked", timeout_s=240, every_s=0.5)

    def stop(self) -> None:
        """End it with all it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._first, signal.SIGKILL)
            self._process.wait(30)


_UP = ("running", "degraded")


@contextlib.contextmanager
def systemd(guest: Guest) -> Iterator[Systemd]:
    """A systemd without any service."""
    if not _SYSTEMD.exists():
        skip("systemd is not installed on this machine")
    if guest.plugin.running:
        guest.plugin.terminate(60)
    bed = Systemd(guest)
    try:
        bed.start()
        yield bed
    finally:
        bed.stop()
        shutil.rmtree(_STATE, ignore_errors=True)


def _one(machine: Machine) -> bool:
    return machine.name in ("two-sockets-smt", "snc-asymmetric")


def _owner(guest: Guest, name: str) -> Container:
    return guest.pod(name, {"cpus": "exclusive"}, cpus=1)


@case(applies=_one, plugin=False)
def systemd_service(guest: Guest) -> None:
    """The shipped unit starts, survives kill -9 and a hang, reloads, stops and moves nobody."""
    with systemd(guest) as bed:
        shutil.copy(REPOSITORY / "systemd" / "nri-numa.service", _ROOT)
        assert bed.run("cp", f"{_ROOT}/nri-numa.service", "/etc/systemd/system/").returncode == 0
        # An emulated CPU is twenty to fifty times slower than a real one; the unit's are for that.
        slow = "[Service]\nTimeoutStartSec=300\nTimeoutStopSec=60\nWatchdogSec=60\n"
        (_ROOT / "slow.conf").write_text(slow)
        drop_in = "/etc/systemd/system/nri-numa.service.d"
        assert bed.run("mkdir", "-p", drop_in).returncode == 0
        assert bed.run("cp", f"{_ROOT}/slow.conf", drop_in).returncode == 0
        bed.must("daemon-reload")
        bed.must("enable", "--now", "nri-numa")
        first = bed.settled()
        guest.notes.append(f"started as process {first}: {bed.show('StatusText')}")
        caps = [
            line
            for line in Path(f"/proc/{first}/status").read_text().splitlines()
            if line.startswith(("CapEff", "NoNewPrivs", "Seccomp:"))
        ]
        guest.notes.append(" ".join(caps).replace("\t", ""))
        assert caps[0].split()[1].strip("0") == ""

        owner = _owner(guest, "owner")
        own = guest.pinned(owner).cpus
        assert len(own) == 1

        os.kill(first, signal.SIGKILL)
        second = bed.settled(previous=first)
        assert bed.show("NRestarts") == "1"
        assert words.allowed(guest.pid(owner)).cpus == own
        other = guest.pinned(_owner(guest, "second")).cpus
        assert len(other) == 1
        assert not other & own, "the checkpoint outlived the process"

        bed.must("reload", "nri-numa")
        assert bed.settled() == second

        # Hung: systemd notices by the watchdog and starts another one.
        os.kill(second, signal.SIGSTOP)
        third = bed.settled(previous=second)
        assert bed.show("NRestarts") == "2"
        guest.notes.append(f"watchdog replaced {second} by {third}")

        bed.must("stop", "nri-numa")
        assert (_STATE / "checkpoint").exists()
        assert words.allowed(guest.pid(owner)).cpus == own
        done = bed.run("/usr/local/bin/nri-numa", "release")
        guest.notes.append(done.stdout)
        assert done.returncode == 0, done.stderr
        guest.now(owner, cpus=guest.online, mems=guest.memory_nodes)
        bed.must("disable", "nri-numa")
