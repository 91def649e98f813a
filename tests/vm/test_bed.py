"""The bed tells a failed case from a missing machine, and always ends what it started."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beds.testbed import TestbedUnavailable
from tests.beds.vm_bed import (
    REPOSITORY,
    GuestDidNotBoot,
    Parts,
    Run,
    group_alive,
    one_machine_at_a_time,
)
from tests.beds.vm_kernel import Kernel, KernelCache
from tests.beds.vm_qmp import QMPError, execute
from tests.beds.vm_records import Begin, End, Outcome, Reader, Result, Started, Writer
from tests.machines.vm_machine import Machine, parse_machine
from tests.vm.__main__ import main
from tests.vm.conftest import MachineRuns
from tests.vm.registry import all_cases
from tests.vm.words import pages

MACHINE = parse_machine(
    "tiny",
    "description: t\nsockets: 1\ncores: 1\nthreads: 1\nnuma: [{cpus: 0, memory: 2G}]\n",
)
BEGIN = '{"type":"begin","machine":"tiny","kernel":"6","cases":["one","two"]}'
ONE = '{"type":"result","case":"one","outcome":"passed","seconds":1.5,"notes":["64 MiB"]}'
TWO = '{"type":"result","case":"two","outcome":"failed","seconds":2,"detail":"Traceback"}'
START_TWO = '{"type":"started","case":"two"}'
END = '{"type":"end"}'


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits for a machine that really runs, or touches the real cache."""
    monkeypatch.setenv("NRI_NUMA_CACHE", str(tmp_path / "cache"))


def boots(tmp_path: Path, script: str) -> Parts:
    """Parts whose virtme-ng is a shell script; ``$SHARED`` is the shared directory."""
    program = tmp_path / "bin" / "vng"
    program.parent.mkdir(parents=True)
    program.write_text(
        '#!/bin/sh\nfor a; do case "$a" in /run/out=*) SHARED=${a#/run/out=};; esac; done\n'
        f"say() {{ printf '%s\\n' \"$1\" >> $SHARED/records.jsonl; }}\n{script}\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    kernel = Kernel(version="6", image=tmp_path / "vmlinuz", root=tmp_path)
    return Parts(kernel=kernel, virtme=program, qemu="qemu")


def run(tmp_path: Path, script: str, *, boot_limit_s: float = 30, case_limit_s: float = 30) -> Run:
    return Run(
        boots(tmp_path, script),
        MACHINE,
        ["one", "two"],
        directory=tmp_path / "artifacts",
        boot_limit_s=boot_limit_s,
        case_limit_s=case_limit_s,
    )


def outcomes(results: list[Result]) -> list[tuple[str, str]]:
    return [(result.case, result.outcome.value) for result in results]


def test_results_are_handed_out_in_order(tmp_path: Path) -> None:
    bed = run(tmp_path, f"say '{BEGIN}'; say '{ONE}'; say '{START_TWO}'; say '{TWO}'; say '{END}'")
    results = list(bed)
    assert outcomes(results) == [("one", "passed"), ("two", "failed")]
    assert results[0].notes == ["64 MiB"]
    assert results[1].detail == "Traceback"


def test_a_guest_that_dies_fails_its_case_and_all_that_were_to_come(tmp_path: Path) -> None:
    bed = run(tmp_path, f"say '{BEGIN}'; say '{START_TWO}'; exit 1")
    results = {result.case: result for result in bed}
    assert results["two"].outcome is Outcome.FAILED
    assert "the guest ended during this case" in results["two"].detail
    assert "not run" in results["one"].detail


def test_a_guest_that_hangs_is_ended_by_a_limit_with_all_its_children(tmp_path: Path) -> None:
    bed = run(
        tmp_path,
        f"say '{BEGIN}'; say '{START_TWO}'; echo $$ > $SHARED/pid; sleep 1000 & sleep 1000",
        case_limit_s=0.5,
    )
    results = {result.case: result for result in bed}
    assert "said nothing" in results["two"].detail
    assert not group_alive(int((tmp_path / "artifacts" / "pid").read_text()))


def test_a_machine_that_does_not_boot_is_no_test_failure(tmp_path: Path) -> None:
    with pytest.raises(GuestDidNotBoot, match=r"ended with exit code 3.*console\.log"):
        list(run(tmp_path, "echo 'no kernel' >&2; exit 3"))
    assert "no kernel" in (tmp_path / "artifacts" / "console.log").read_text()


def test_a_machine_that_says_nothing_is_no_test_failure(tmp_path: Path) -> None:
    with pytest.raises(GuestDidNotBoot, match=r"said nothing within 0 s"):
        list(run(tmp_path, "sleep 1000", boot_limit_s=0.3))


def test_a_guest_whose_runtime_does_not_start_is_no_test_failure(tmp_path: Path) -> None:
    broken = '{"type":"broken","detail":"no cgroups"}'
    with pytest.raises(GuestDidNotBoot, match="no cgroups"):
        list(run(tmp_path, f"say '{BEGIN}'; say '{broken}'; sleep 1000"))


def test_leaving_early_ends_the_machine(tmp_path: Path) -> None:
    bed = run(tmp_path, f"echo $$ > $SHARED/pid; say '{BEGIN}'; say '{ONE}'; sleep 1000")
    results = iter(bed)
    assert next(results).case == "one"
    results.close()  # type: ignore[attr-defined]  # it is a generator
    assert not group_alive(int((tmp_path / "artifacts" / "pid").read_text()))


def test_a_second_run_of_the_same_machine_waits_before_it_touches_anything(tmp_path: Path) -> None:
    first = run(tmp_path, f"say '{BEGIN}'; say '{ONE}'; say '{TWO}'; say '{END}'")
    results = iter(first)
    assert next(results).case == "one"
    second = Run(first._parts, MACHINE, ["one", "two"], directory=first.directory, boot_limit_s=30)
    outcome: list[tuple[str, str]] = []
    waiting = threading.Thread(target=lambda: outcome.extend(outcomes(list(second))))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    assert (first.directory / "records.jsonl").exists()
    assert next(results).case == "two"
    assert list(results) == []
    waiting.join(30)
    assert outcome == [("one", "passed"), ("two", "failed")]


def test_a_machine_ends_with_its_last_case_so_that_another_test_can_boot_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.beds.vm_bed.ARTIFACTS", tmp_path)
    # It would go on for minutes, as a guest does that powers off slowly.
    script = f"say '{BEGIN}'; say '{ONE}'; say '{TWO}'; say '{END}'; sleep 1000"
    runs = MachineRuns(boots(tmp_path, script), {"tiny": ["one", "two"]})
    assert runs.result(MACHINE, "one").outcome is Outcome.PASSED
    with pytest.raises(RuntimeError, match="still runs"), one_machine_at_a_time():
        pass
    assert runs.result(MACHINE, "two").outcome is Outcome.FAILED
    with one_machine_at_a_time():
        pass
    assert runs.result(MACHINE, "one").outcome is Outcome.PASSED
    runs.close()


def test_what_the_guest_asks_is_answered(tmp_path: Path) -> None:
    """There is no QEMU behind the script, so that the answer is the reason why not."""
    ask = '{"execute":"device_add","arguments":{}}'
    bed = run(
        tmp_path,
        f"say '{BEGIN}'; echo '{ask}' > $SHARED/ask\n"
        # As the guest does it: whole, or not there.
        "mv $SHARED/ask $SHARED/ask-001.json\n"
        "while [ ! -e $SHARED/answer-001.json ]; do sleep 0.05; done\n"
        f"say '{ONE}'; say '{TWO}'; say '{END}'",
    )
    assert len(list(bed)) == 2
    answer = json.loads((tmp_path / "artifacts" / "answer-001.json").read_text())
    assert "device_add" in answer["error"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_artifacts_that_cannot_be_written_name_the_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bed = Run(boots(tmp_path, ""), MACHINE, ["one"], directory=tmp_path / "file" / "x")
    with pytest.raises(TestbedUnavailable, match="cannot write"):
        list(bed)


def test_a_path_that_qemu_cannot_carry_is_refused_early(tmp_path: Path) -> None:
    bed = Run(boots(tmp_path, ""), MACHINE, ["one"], directory=tmp_path / "a,b")
    with pytest.raises(TestbedUnavailable, match="comma"):
        list(bed)


# -- records ---------------------------------------------------------------------------------------


def test_a_half_written_record_waits_for_its_end(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    assert reader.read() == []
    writer = Writer(tmp_path)
    writer.write(Started(case="one"))
    with (tmp_path / "records.jsonl").open("ab") as file:
        file.write(b'{"type":"e')
    assert reader.read() == [Started(case="one")]
    with (tmp_path / "records.jsonl").open("ab") as file:
        file.write(b'nd"}\n')
    assert reader.read() == [End()]
    writer.write(Begin(machine="m", kernel="6", cases=[]))
    assert [type(record) for record in reader.read()] == [Begin]
    writer.close()


# -- the kernel's words ----------------------------------------------------------------------------


def test_only_memory_of_the_process_itself_counts() -> None:
    text = (
        "00400000 default file=/bin/busybox mapped=120 active=0 N0=120 kernelpagesize_kB=4\n"
        "0051c000 default file=/bin/busybox anon=2 dirty=2 mapped=9 N0=7 N1=2 kernelpagesize_kB=4\n"
        "01a3d000 default heap anon=3 dirty=3 N1=3 kernelpagesize_kB=4\n"
        "7f0000000000 bind:1 anon=5 dirty=5 N0=1 N1=4 kernelpagesize_kB=2048\n"
        "7ffd0000 default stack\n"
    )
    assert list(pages(text)) == [(1, 12 * 1024), (0, 2048 * 1024), (1, 4 * 2048 * 1024)]


# -- QEMU's machine protocol -----------------------------------------------------------------------


@pytest.fixture
def qemu(tmp_path: Path) -> Iterator[tuple[Path, list[str]]]:
    """A socket that answers as QEMU does: an event first, and a refusal of ``bad``."""
    path, seen = tmp_path / "qmp", []
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen(1)

    def serve() -> None:
        connection, _ = server.accept()
        with connection, connection.makefile("rwb") as stream:
            stream.write(b'{"QMP": {}}\n')
            stream.flush()
            for line in stream:
                command = json.loads(line)["execute"]
                seen.append(command)
                answer = {"error": {"desc": "no such thing"}} if command == "bad" else {"return": 7}
                stream.write(b'{"event": "RTC_CHANGE"}\n' + json.dumps(answer).encode() + b"\n")
                stream.flush()

    thread = threading.Thread(target=serve)
    thread.start()
    yield path, seen
    thread.join(10)
    server.close()


def test_a_command_gets_its_answer_past_the_events(qemu: tuple[Path, list[str]]) -> None:
    path, seen = qemu
    assert execute(path, "query", {}) == 7
    assert seen == ["qmp_capabilities", "query"]


def test_a_refusal_comes_with_qemus_words(qemu: tuple[Path, list[str]]) -> None:
    with pytest.raises(QMPError, match="no such thing"):
        execute(qemu[0], "bad", {})


# -- the kernel in the cache -----------------------------------------------------------------------


class CountingCache(KernelCache):
    """A cache whose archive is a directory; counts what would be downloads."""

    downloads = 0

    def _update_lists(self) -> None:
        pass

    def _need_space(self) -> None:
        pass

    def _package_name(self, series: str) -> str:
        return "linux-image-6.1.0-1-amd64"

    def _apt(self, *command: str, cwd: Path | None = None) -> str:
        assert command[:2] == ("apt-cache", "madison"), command
        return " linux-image-6.1.0-1-amd64 | 6.1.1-1 | mirror bookworm/main amd64 Packages\n"

    def _unpack(self, package: str, version: str, target: Path) -> None:
        self.downloads += 1
        modules = target / "lib/modules/6.1.0-1-amd64"
        (modules / "kernel/fs").mkdir(parents=True)
        (modules / "kernel/fs/9p.ko").write_bytes(b"")
        (modules / "modules.order").write_text("kernel/fs/9p.ko\n")
        (modules / "modules.builtin").write_text("")
        (target / "boot").mkdir()
        (target / "boot/vmlinuz-6.1.0-1-amd64").write_bytes(b"k" * 1000)


needs_depmod = pytest.mark.skipif(
    shutil.which("depmod", path="/usr/sbin:/sbin") is None, reason="depmod (kmod) not installed"
)


@pytest.fixture
def with_sbin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"] + ":/usr/sbin:/sbin")


@needs_depmod
@pytest.mark.usefixtures("with_sbin")
def test_a_kernel_is_downloaded_once(tmp_path: Path) -> None:
    first = CountingCache(tmp_path)
    kernel = first.kernel()
    assert kernel.version == "6.1.0-1-amd64"
    assert kernel.image.read_bytes() == b"k" * 1000
    second = CountingCache(tmp_path)
    assert second.kernel() == kernel
    assert (first.downloads, second.downloads) == (1, 0)


@needs_depmod
@pytest.mark.usefixtures("with_sbin")
@pytest.mark.parametrize("damage", ["image", "module", "index", "stamp"])
def test_a_half_written_kernel_is_noticed_and_fetched_again(tmp_path: Path, damage: str) -> None:
    kernel = CountingCache(tmp_path).kernel()
    if damage == "image":
        kernel.image.write_bytes(b"k" * 10)
    elif damage == "module":
        next(kernel.root.glob("lib/modules/*/kernel/**/*.ko")).unlink()
    elif damage == "index":
        next(kernel.root.glob("lib/modules/*/modules.dep")).write_text("")
    else:
        (kernel.root / "nri-numa-bed.json").write_text('{"release":')
    again = CountingCache(tmp_path)
    assert again.damaged()
    assert again.kernel().image.stat().st_size == 1000
    assert again.downloads == 1
    assert not again.damaged()


def test_too_little_room_is_said_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5_000_000))
    with pytest.raises(TestbedUnavailable, match=r"5 MB free at .*NRI_NUMA_CACHE"):
        KernelCache(tmp_path).kernel()


# -- the command line ------------------------------------------------------------------------------


def test_list_names_every_machine_and_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    assert "two-sockets-smt" in printed
    assert all(case in printed for case in all_cases())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "nonesuch"], "no machine 'nonesuch', expected one of"),
        (["run", "no-smt", "nonesuch"], "no case nonesuch"),
    ],
)
def test_a_wrong_name_is_wrong_usage(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert expected in capsys.readouterr().err


def test_missing_packages_are_one_message_with_the_remedy_and_a_code_of_their_own(
    tmp_path: Path,
) -> None:
    """In a process that is not root and finds no QEMU, whatever this machine has."""
    program = (
        "import os, sys, tests.beds.vm_bed as bed\n"
        "bed._find_program = lambda name: None\n"
        "os.geteuid = lambda: 1000\n"
        "import tests.vm.__main__ as command\n"
        "sys.exit(command.main(['run', 'no-smt']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env={**os.environ, "NRI_NUMA_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3
    assert "bed unavailable: " in done.stderr
    assert "remedy: as root: apt-get install --no-install-recommends" in done.stderr
    assert "qemu-system-x86" in done.stderr


def test_every_case_says_what_it_proves_in_one_line() -> None:
    for case in all_cases().values():
        assert case.proves.endswith("."), case.name
        assert len(case.proves) < 100, case.name


def test_each_case_makes_sense_on_some_machine() -> None:
    from tests.vm.conftest import MACHINES

    machines: list[Machine] = list(MACHINES.values())
    for case in all_cases().values():
        assert any(case.applies(machine) for machine in machines), case.name
