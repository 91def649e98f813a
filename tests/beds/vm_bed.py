"""Boots machines of `tests.machines.vm_machine` with virtme-ng and runs cases in them.

The guest sees the host's file system read-only, so the virtual environment, the repository and the
unpacked containerd are simply there; what it writes goes to one shared directory, which the host
keeps as the artifacts of the run:

=====================  =====================================================
``console.log``        the kernel's messages, and those of virtme-ng and QEMU
``guest.log``          output of the program that runs the cases
``plugin.log``         output of ``nri-numa run``
``containerd.log``     the runtime's log
``records.jsonl``      results, one per line
=====================  =====================================================
"""

import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tests.beds import vm_system
from tests.beds.containerd import find_binaries, find_crun
from tests.beds.debs import CNI_PLUGINS, DebCache, Wanted
from tests.beds.processes import group_alive, prioritize
from tests.beds.testbed import TestbedUnavailable, cache_dir, locked, run
from tests.beds.vm_kernel import Kernel, KernelCache
from tests.beds.vm_records import (
    ROOM_SECONDS,
    Answer,
    Ask,
    Begin,
    Broken,
    End,
    Outcome,
    Reader,
    Record,
    Result,
    Started,
)
from tests.machines.vm_machine import CACHED_ROOT_TAG, Machine, virtme_arguments

_SUITES = ("bookworm-backports",)
_QEMU = Wanted(label="qemu-system-x86", package="qemu-system-x86", suites=_SUITES)
_DATA = Wanted(label="qemu-system-data", package="qemu-system-data", suites=_SUITES)
_BIOS = Wanted(label="seabios", package="seabios", suites=_SUITES)

_LEAST = (8, 1)

CLOCK = ("-icount", "shift=0,sleep=on,align=off")
"""The guest's clock counts instructions, a nanosecond for each; QEMU 7.2 does not boot with it.

By the host's clock a guest on a busy host gets a fraction of the work done, and what goes by time
(ticks, watchdogs, programs that look around) takes what there is. Here it is a machine of ordinary
speed in slow motion, and no limit runs out because others needed the host.
"""
COUNTED_KERNEL = (
    # Both are known: the kernel need not measure for them, which takes minutes of reading a port.
    "tsc_early_khz=1000000",
    "lpj=4000000",
)
"""Kernel parameters that such a guest needs."""


class _Backports(DebCache):
    """Apart from the other packages: the suite goes when its release is old, and they stay."""

    archive_suites = _SUITES


def write_counted_emulator(file: Path) -> None:
    """Have the emulator in the cache, and write a program that starts it with its clock."""
    packages = _Backports(cache_dir() / "backports")
    qemu, data, bios = packages.fetch(_QEMU, _DATA, _BIOS)
    if tuple(int(part) for part in qemu.upstream_version.split(".")[:2]) < _LEAST:
        raise TestbedUnavailable(
            f"QEMU {qemu.upstream_version} is too old for a clock that counts instructions",
            "use a Debian archive that has bookworm-backports",
        )
    program = qemu.root / "usr/bin/qemu-system-x86_64"
    if not program.is_file():
        raise TestbedUnavailable(
            f"{program} is not there", f"remove {qemu.root} from the cache and start again"
        )
    command = [
        str(program),
        *("-L", str(data.root / "usr/share/qemu")),
        *("-L", str(bios.root / "usr/share/seabios")),
        *CLOCK,
    ]
    file.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
    file.chmod(0o755)


REPOSITORY = Path(__file__).resolve().parents[2]
ARTIFACTS = REPOSITORY / "artifacts" / "vm"
# Short, because it stands on the kernel's command line, of which virtme-ng needs most.
GUEST_SHARED = Path("/run/out")

# Emulated machines on a busy host: a boot takes 10 to 60 s, of arm64 minutes, a pod 2 to 10 s.
BOOT_LIMIT_S = 900.0
CASE_LIMIT_S = 900.0

_THIS_THREAD = threading.local()

# program -> Debian packages that have it
PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "depmod": "kmod",
    "file": "file",
    "debootstrap": "debootstrap",
    "mke2fs": "e2fsprogs",
}


class QMPError(RuntimeError):
    """QEMU refused a command, or its control socket did not behave."""


def _execute(path: Path, command: str, arguments: Mapping[str, object]) -> None:
    """Run one command of QEMU's machine protocol, as much of it as that takes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(30)
        try:
            connection.connect(str(path))
            with connection.makefile("rwb") as stream:
                stream.readline()  # the greeting
                for asked in (("qmp_capabilities", {}), (command, arguments)):
                    document = dict(zip(("execute", "arguments"), asked, strict=True))
                    stream.write(msgspec.json.encode(document) + b"\n")
                    stream.flush()
                    answer: dict[str, Any] = {}
                    while "return" not in answer:  # anything else is an event
                        answer = msgspec.json.decode(stream.readline())  # empty when it hung up
                        if "error" in answer:
                            raise QMPError(str(answer["error"].get("desc", answer["error"])))
        except OSError as error:
            raise QMPError(f"{command}: {error}") from error


class GuestDidNotBoot(TestbedUnavailable):
    """The machine ended or hung before our program in it said anything."""


def _find_program(name: str) -> str | None:
    # Users who are not root often have no sbin in their PATH.
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/bin:/bin"
    return shutil.which(name, path=path)


def missing_packages(programs: Mapping[str, str] = PROGRAMS) -> list[str]:
    """Debian packages to install before a machine can be booted, sorted."""
    return sorted({package for name, package in programs.items() if _find_program(name) is None})


def _install(packages: Sequence[str]) -> None:
    what = f"{', '.join(packages)} not installed"
    remedy = f"as root: apt-get install --no-install-recommends {' '.join(packages)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise TestbedUnavailable(what, remedy)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    script = 'apt-get -q update; apt-get -q install -y --no-install-recommends "$@" </dev/null'
    # "update" may fail for a source that has nothing to do with us.
    run("sh", "-c", script, "sh", *packages, env=environment, timeout_s=900, remedy=remedy)


def _virtme() -> Path:
    beside = Path(sys.executable).parent / "vng"
    found = str(beside) if beside.exists() else shutil.which("vng")
    if found is None:
        raise TestbedUnavailable(
            "virtme-ng (command vng) is not installed", f"{sys.executable} -m pip install virtme-ng"
        )
    return Path(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything that is needed to boot."""

    kernel: Kernel
    virtme: Path
    qemu: str
    systems: Mapping[str, vm_system.System] = field(default_factory=dict)


def prepare(
    *, containerd: Sequence[str] = ("1.7", "2.3"), cni: bool = False, systems: Collection[str] = ()
) -> Parts:
    """Install and download what is missing; a second call takes no download."""
    arm64 = {"qemu-system-aarch64": "qemu-system-arm"} if "arm64-trixie" in systems else {}
    programs = PROGRAMS | arm64
    if missing := missing_packages(programs):
        _install(missing)
        if still := missing_packages(programs):
            raise TestbedUnavailable(
                f"{', '.join(still)} installed, but the programs are not in PATH",
                "add /usr/sbin and /usr/bin to PATH",
            )
    virtme = _virtme()
    debs = KernelCache()
    try:
        for label in containerd:
            find_binaries(label, debs)
        find_crun(debs)
        if cni:
            debs.fetch(CNI_PLUGINS)
        kernel = debs.kernel()
        images = {release: vm_system.system(release) for release in systems if release}
    except OSError as error:
        raise TestbedUnavailable(
            f"cannot write the cache {debs.directory}: {error}",
            "free some space or set NRI_NUMA_CACHE to a writable directory",
        ) from error
    qemu = _find_program("qemu-system-x86_64")
    assert qemu is not None
    return Parts(kernel=kernel, virtme=virtme, qemu=qemu, systems=images)


def available() -> str:
    """Empty when machines can be booted without installing anything, else the reason."""
    if missing := missing_packages():
        return f"{', '.join(missing)} not installed; run python -m tests.vm prepare as root"
    try:
        _virtme()
    except TestbedUnavailable as error:
        return str(error)
    return ""


class Run:
    """One boot of one machine; iterate over it to get the results as they come.

    Args:
        directory: the artifacts; emptied first.
    """

    def __init__(
        self,
        parts: Parts,
        machine: Machine,
        cases: Sequence[str],
        *,
        directory: Path | None = None,
        boot_limit_s: float = BOOT_LIMIT_S,
        case_limit_s: float = CASE_LIMIT_S,
        environment: Mapping[str, str] | None = None,
        counted: bool = False,
    ) -> None:
        self.machine = machine
        self.cases = list(cases)
        self.directory = directory or ARTIFACTS / machine.name
        self.begin: Begin | None = None
        self._parts = parts
        self._boot_limit_s = boot_limit_s
        self._case_limit_s = case_limit_s + float(os.environ.get(ROOM_SECONDS) or 0)
        self._environment = dict(environment or {})
        self._counted = counted
        self._asked: set[str] = set()

    def __iter__(self) -> Iterator[Result]:
        """Boot, hand out one result for each case, in order, and end the machine.

        A case that the guest did not get to, because it hung or died, has failed.

        Raises:
            GuestDidNotBoot: no case was even started, and not because of a case.
        """
        left = list(self.cases)
        with (
            one_machine_at_a_time() as lock,
            tempfile.TemporaryDirectory(prefix="nri-vm-") as control,
        ):
            # Not before it is our turn: the one before us may be the same machine.
            self._make_directory()
            for result in self._results(Path(control) / "qmp", lock):
                left = [case for case in left if case != result.case]
                yield result
        for case in left:
            yield Result(
                case=case,
                outcome=Outcome.FAILED,
                seconds=0.0,
                detail=f"not run: the guest ended before; see {self.directory}/console.log",
            )

    # -- steps -----------------------------------------------------------------------------

    def _make_directory(self) -> None:
        if "," in str(self.directory) or " " in str(self.directory):
            raise TestbedUnavailable(
                f"{self.directory} holds a comma or a blank, which QEMU's options cannot carry",
                "move the repository",
            )
        try:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.directory)
            self.directory.mkdir(parents=True)
            # A disk without room says so here, not by strange failures in the guest.
            (self.directory / "room").write_bytes(b"\0" * 16_000_000)
            (self.directory / "room").unlink()
            variables = {**guest_variables(), **self._environment}
            arguments = [self.machine.name, str(GUEST_SHARED), *self.cases]
            script = start_script(self.machine, variables, arguments)
            (self.directory / "start").write_text(script, encoding="utf-8")
        except OSError as error:
            raise TestbedUnavailable(
                f"cannot write {self.directory}: {error.strerror}",
                "free some space or make the directory writable",
            ) from error

    def _results(self, control: Path, lock: int) -> Iterator[Result]:
        emulator = self.directory / "emulator" if self._counted else None
        if emulator is not None:
            write_counted_emulator(emulator)
        with booted(
            self._parts,
            self.machine,
            self.directory,
            lock,
            control=control,
            emulator=emulator,
            parameters=COUNTED_KERNEL if self._counted else (),
        ) as process:
            yield from self._follow(process, control)

    def _follow(self, process: subprocess.Popen[bytes], control: Path) -> Iterator[Result]:
        reader = Reader(self.directory)
        deadline = time.monotonic() + self._boot_limit_s
        running: str | None = None
        while True:
            ended = process.poll() is not None
            records = reader.read()
            for record in records:
                deadline = time.monotonic() + self._case_limit_s
                running = record.case if isinstance(record, Started) else None
                yield from self._take(record)
                if isinstance(record, End):
                    # It powers off by itself; there is nothing more to learn from waiting.
                    return
            if ended and not records:
                how = f"ended with exit code {process.returncode}", "the guest ended"
                break
            if time.monotonic() > deadline:
                limits = self._boot_limit_s, self._case_limit_s
                early, late = (f"said nothing within {limit:.0f} s" for limit in limits)
                how = early, f"the guest {late}"
                break
            self._serve(control)
            time.sleep(0.1)
        if self.begin is None:
            raise GuestDidNotBoot(
                f"machine {self.machine.name} did not boot: it {how[0]}",
                f"read {self.directory}/console.log",
            )
        if running is not None:
            detail = f"{how[1]} during this case; see {self.directory}/console.log"
            yield Result(case=running, outcome=Outcome.FAILED, seconds=0.0, detail=detail)

    def _take(self, record: Record) -> Iterator[Result]:
        match record:
            case Begin():
                self.begin = record
            case Result():
                yield record
            case Broken(detail=detail):
                # The runtime did not start in the guest: as bad as no guest at all.
                raise GuestDidNotBoot(
                    f"machine {self.machine.name} booted, but its runtime did not start: {detail}",
                    f"read {self.directory}/guest.log and containerd.log beside it",
                )
            case Started() | End():
                pass

    def _serve(self, control: Path) -> None:
        for ask in sorted(self.directory.glob("ask-*.json")):
            if ask.name in self._asked:
                continue
            self._asked.add(ask.name)
            try:
                question = msgspec.json.decode(ask.read_bytes(), type=Ask)
                _execute(control, question.execute, question.arguments)
                answer = Answer()
            except (QMPError, msgspec.MsgspecError) as error:
                answer = Answer(error=str(error))
            scratch = ask.with_suffix(".tmp")
            scratch.write_bytes(msgspec.json.encode(answer))
            scratch.replace(ask.with_name(ask.name.replace("ask-", "answer-")))


def kvm_works() -> bool:
    """Whether a processor of KVM runs: in a nested machine /dev/kvm may be there and fail then."""
    create_machine, create_cpu, run = 0xAE01, 0xAE41, 0xAE80  # linux/kvm.h
    with contextlib.ExitStack() as stack:
        try:
            device = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
            stack.callback(os.close, device)
            machine = fcntl.ioctl(device, create_machine, 0)
            stack.callback(os.close, machine)
            processor = fcntl.ioctl(machine, create_cpu, 0)
            stack.callback(os.close, processor)
            # It has no memory, so it comes back at once with the reason for that.
            fcntl.ioctl(processor, run, 0)
        except OSError:
            return False
    return True


@contextlib.contextmanager
def booted(
    parts: Parts,
    machine: Machine,
    directory: Path,
    lock: int,
    *,
    control: Path | None = None,
    more: Sequence[str] = (),
    enter: Sequence[str] = (),
    emulator: Path | None = None,
    parameters: Iterable[str] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """A machine that runs the ``start`` of a directory; ends with the context.

    `directory`: what the guest may write; with ``start`` in it.
    `emulator`: QEMU's program; default: the one that is installed.

    Yields:
        The process of virtme-ng, which ends when the machine is off.
    """
    # Through a pipe: QEMU opens its standard error anew for the console, which would cut off
    # a file and write over what others have written there.
    with (directory / "console.log").open("ab") as log:
        writer = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=log)
    assert writer.stdin is not None
    try:
        with writer.stdin:
            if machine.system:
                system = parts.systems[machine.system]
                arguments = vm_system.command(
                    machine, system, qemu=parts.qemu, shared=directory, control=control, more=more
                )
                command = [*enter, *arguments]
            else:
                arguments = virtme_arguments(
                    machine,
                    kernel=parts.kernel.image,
                    shared=directory,
                    guest_shared=GUEST_SHARED,
                    command=f"sh {GUEST_SHARED}/start >>{GUEST_SHARED}/guest.log 2>&1",
                    control=control,
                    more=more,
                    emulator=emulator,
                    kvm=emulator is None and kvm_works(),
                    parameters=parameters,
                )
                command = [*enter, str(parts.virtme), *arguments]
            (directory / "command").write_text(shlex.join(command) + "\n", encoding="utf-8")
            environment = dict(os.environ)
            # vng calls its own parts, and depmod, by name.
            path = environment.get("PATH", "")
            environment["PATH"] = f"{parts.virtme.parent}:{path}:/usr/sbin:/sbin:/usr/bin:/bin"
            process = subprocess.Popen(
                command,
                cwd="/",
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=writer.stdin,
                stderr=writer.stdin,
                # A machine that outlives us (we were killed) keeps the next one waiting.
                pass_fds=(lock,),
                # One group, so that QEMU ends with it; not ours, which gets the Ctrl-C.
                start_new_session=True,
            )
        prioritize(process.pid, -5)  # it has one thread, which all cases of a machine wait for
        try:
            yield process
        finally:
            _end_group(process)
    finally:
        # The last writer is gone, so it ends by itself.
        writer.wait(30)


def guest_variables() -> dict[str, str]:
    """What every program in a guest has in its environment."""
    return {
        "NRI_NUMA_CACHE": str(cache_dir()),
        ROOM_SECONDS: os.environ.get(ROOM_SECONDS, ""),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "HOME": "/run",
    }


def start_script(
    machine: Machine,
    variables: Mapping[str, str],
    arguments: Sequence[str],
    module: str = "tests.vm.guest",
) -> str:
    """The first program in the guest: mount the host's root with a cache, start Python from it.

    Programs and libraries come through that cache as well. Without it each program that starts
    reads its dozen libraries from the host once more, and a container starts ten programs. A whole
    Debian has its own.
    """
    if machine.system:
        return vm_system.start_script(variables, arguments, module)
    root = "/run/host"
    options = "version=9p2000.L,trans=virtio,access=any,msize=512000,cache=loose,ro"
    stdlib = sysconfig.get_path("stdlib")
    exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in variables.items())
    python = f"{root}{sys.executable}"
    command = [python, "-ISE", "tests/vm/reaper.py", python, "-m", module, *arguments]
    return f"""set -e
cat /proc/uptime
mkdir -p {root}
mount -t 9p -o {options} {CACHED_ROOT_TAG} {root}
for directory in {shlex.quote(stdlib)} /usr/lib/x86_64-linux-gnu /usr/bin /usr/sbin; do
  [ ! -d "$directory" ] || mount --bind "{root}$directory" "$directory"
done
{exports}cd {shlex.quote(root + str(REPOSITORY))}
exec {shlex.join(command)}
"""


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End vng with its QEMU, gently first: QEMU writes its files on SIGTERM."""
    for number, limit in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 30.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            if process.poll() is not None and not group_alive(process.pid):
                return
            time.sleep(0.05)


@contextlib.contextmanager
def one_machine_at_a_time() -> Iterator[int]:
    """Emulation takes all the cores there are: two machines at once only run into limits.

    Waits for the machines of other processes and threads.

    Yields:
        The descriptor that holds the lock.
    """
    if getattr(_THIS_THREAD, "runs_a_machine", False):
        raise RuntimeError("a virtual machine of this thread still runs; end it before the next")
    with locked(cache_dir() / "vm.lock") as descriptor:
        _THIS_THREAD.runs_a_machine = True
        try:
            yield descriptor
        finally:
            _THIS_THREAD.runs_a_machine = False
