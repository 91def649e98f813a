"""The bed tells a failed case from a missing machine, and always ends what it started."""

import stat
from pathlib import Path

import pytest

from tests.beds.processes import group_alive
from tests.beds.vm_bed import GuestDidNotBoot, Parts, Run
from tests.beds.vm_kernel import Kernel
from tests.beds.vm_records import Outcome
from tests.machines.vm_machine import parse_machine

MACHINE = parse_machine(
    "tiny", "description: t\nsockets: 1\ncores: 1\nthreads: 1\nnuma: [{cpus: 0, memory: 2G}]\n"
)
BEGIN = '{"type":"begin","machine":"tiny","kernel":"6","cases":["one","two"]}'
ONE = '{"type":"result","case":"one","outcome":"passed","seconds":1.5,"notes":["64 MiB"]}'
TWO = '{"type":"result","case":"two","outcome":"failed","seconds":2,"detail":"Traceback"}'
START_TWO = '{"type":"started","case":"two"}'
END = '{"type":"end"}'
BROKEN = '{"type":"broken","detail":"no cgroups"}'


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


def test_results_are_handed_out_in_order(tmp_path: Path) -> None:
    bed = run(tmp_path, f"say '{BEGIN}'; say '{ONE}'; say '{START_TWO}'; say '{TWO}'; say '{END}'")
    results = list(bed)
    assert [(r.case, r.outcome.value) for r in results] == [("one", "passed"), ("two", "failed")]
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


@pytest.mark.parametrize(
    ("script", "boot_limit_s", "words"),
    [
        ("exit 3", 30, r"ended with exit code 3.*console\.log"),
        ("sleep 1000", 0.3, "said nothing within 0 s"),
        (f"say '{BEGIN}'; say '{BROKEN}'; sleep 1000", 30, "no cgroups"),
    ],
)
def test_a_machine_that_does_not_boot_is_no_test_failure(
    tmp_path: Path, script: str, boot_limit_s: float, words: str
) -> None:
    with pytest.raises(GuestDidNotBoot, match=words):
        list(run(tmp_path, f"echo kernel; {script}", boot_limit_s=boot_limit_s))
    assert "kernel" in (tmp_path / "artifacts" / "console.log").read_text()


def test_leaving_early_ends_the_machine(tmp_path: Path) -> None:
    bed = run(tmp_path, f"echo $$ > $SHARED/pid; say '{BEGIN}'; say '{ONE}'; sleep 1000")
    results = iter(bed)
    assert next(results).case == "one"
    results.close()  # type: ignore[attr-defined]  # it is a generator
    assert not group_alive(int((tmp_path / "artifacts" / "pid").read_text()))
