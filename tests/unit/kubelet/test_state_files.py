"""The kubelet's state files on disk: read when they change, and never waited for."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nri_numa.kubelet import state_files
from nri_numa.kubelet.state_files import (
    STATE_DECODE_ERRORS,
    KubeletStateFiles,
    combine_manager_grants,
    decode_cpu_grants,
    decode_memory_grants,
)
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.workload import MAX_REMEMBERED_SHARED_CPUSETS, NO_GRANTS, KubeletGrants

MACHINE = CPUSet.parse("0-7"), NUMASet([0])


def write(directory: Path, text: str, name: str = "cpu_manager_state") -> None:
    """As the kubelet does: another file, renamed over the old one."""
    made = directory / ".new"
    made.write_text(text, encoding="utf-8")
    made.rename(directory / name)


def static(**entries: str) -> str:
    documents = {uid: {"app": cpus} for uid, cpus in entries.items()}
    return json.dumps({"policyName": "static", "defaultCpuSet": "0", "entries": documents})


def test_only_a_replaced_file_is_reread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    whole = state_files.read_kubelet_file
    monkeypatch.setattr(
        state_files, "read_kubelet_file", lambda path: (reads.append(path), whole(path))[1]
    )
    files = KubeletStateFiles(str(tmp_path))
    assert not files.refresh_and_report_change(*MACHINE)
    assert (str(files.grants.granted_cpus), files.problems) == ("", ())
    write(tmp_path, static(a="1-2"))
    reads.clear()
    assert files.refresh_and_report_change(*MACHINE)
    assert str(files.grants.granted_cpus) == "1-2"
    before = files.grants
    assert not files.refresh_and_report_change(*MACHINE)
    assert files.grants is before
    assert reads.count(str(tmp_path / "cpu_manager_state")) == 1
    write(tmp_path, static(a="1-2", b="3"))
    assert files.refresh_and_report_change(*MACHINE)
    assert str(files.grants.granted_cpus) == "1-3"


def test_a_file_that_goes_grants_nothing(tmp_path: Path) -> None:
    """An operator who changes the kubelet's policy removes it."""
    files = KubeletStateFiles(str(tmp_path))
    write(tmp_path, static(a="1"))
    files.refresh_and_report_change(*MACHINE)
    (tmp_path / "cpu_manager_state").unlink()
    assert files.refresh_and_report_change(*MACHINE)
    assert (str(files.grants.granted_cpus), files.grants.cpu_policy) == ("", "")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"policyName":"dynamic"}', "x" * (2 << 20)])
def test_a_damaged_file_changes_nothing_and_is_told_once(tmp_path: Path, text: str) -> None:
    files = KubeletStateFiles(str(tmp_path))
    write(tmp_path, static(a="1"))
    files.refresh_and_report_change(*MACHINE)
    write(tmp_path, text)
    assert files.refresh_and_report_change(*MACHINE)
    (problem,) = files.problems
    assert "cpu_manager_state" in problem
    assert "its previous content still applies" in problem
    assert str(files.grants.granted_cpus) == "1"
    assert not files.refresh_and_report_change(*MACHINE)
    write(tmp_path, static(b="2"))
    assert files.refresh_and_report_change(*MACHINE)
    assert (str(files.grants.granted_cpus), files.problems) == ("2", ())


def test_nobody_waits_for_a_pipe_in_its_place(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cpu_manager_state")
    (tmp_path / "memory_manager_state").mkdir()
    files = KubeletStateFiles(str(tmp_path))
    assert files.refresh_and_report_change(*MACHINE)
    assert len(files.problems) == 2
    assert "is not a regular file" in files.problems[0]


def test_a_file_that_cannot_be_reached_is_told_until_it_can(tmp_path: Path) -> None:
    directory = tmp_path / "kubelet"
    directory.write_text("no directory")
    files = KubeletStateFiles(str(directory))
    assert files.refresh_and_report_change(*MACHINE)
    assert "cannot be read: Not a directory" in files.problems[0]
    directory.unlink()
    directory.mkdir()
    write(directory, static(a="1"))
    assert files.refresh_and_report_change(*MACHINE)
    assert (str(files.grants.granted_cpus), files.problems) == ("1", ())


def test_another_machine_judges_the_same_file_anew(tmp_path: Path) -> None:
    """CPUs can be plugged in while the agent runs."""
    files = KubeletStateFiles(str(tmp_path))
    write(tmp_path, static(a="7"))
    files.refresh_and_report_change(CPUSet.parse("0-3"), NUMASet([0]))
    assert "does not have" in files.problems[0]
    assert files.refresh_and_report_change(*MACHINE)
    assert (str(files.grants.granted_cpus), files.problems) == ("7", ())


V2 = {
    "policyName": "static",
    "defaultCpuSet": "0,4-7",
    "entries": {"uid-a": {"app": "1-3"}},
    "checksum": 3,
}
BLOCK = {"numaAffinity": [0], "type": "memory", "size": 1024}


def cpu(**document: Any) -> bytes:
    return json.dumps({"policyName": "static", "defaultCpuSet": "0", **document}).encode()


def memory(**document: Any) -> bytes:
    return json.dumps({"policyName": "Static", **document}).encode()


def sets(found: Mapping[Any, Any]) -> dict[Any, str]:
    return {key: str(ids) for key, ids in found.items()}


def test_cpus_of_all_versions() -> None:
    of_ids = decode_cpu_grants(cpu(entries={"c0ffee": "1-3"}))
    assert sets(of_ids.cpus) == {("", "c0ffee"): "1-3"}
    second = decode_cpu_grants(json.dumps(V2).encode())
    assert (second.cpu_policy, list(map(str, second.shared))) == ("static", ["0,4-7"])
    assert sets(second.cpus) == {("uid-a", "app"): "1-3"}
    third = decode_cpu_grants(cpu(podEntries={"uid-p": {"cpuSet": "2-3"}, "uid-q": {}}))
    assert (sets(third.pods), third.cpus) == ({"uid-p": "2-3", "uid-q": ""}, {})
    # The fourth wraps the document, and the outer copy does not count.
    inner = json.dumps({**V2, "entries": {"uid-b": {"web": "2"}}, "new": 1})
    fourth = decode_cpu_grants(json.dumps({**V2, "data": inner, "dataChecksum": 1}).encode())
    assert sets(fourth.cpus) == {("uid-b", "web"): "2"}


def test_policy_none_has_no_cpusets() -> None:
    document = b'{"policyName":"none","defaultCpuSet":"","checksum":1353318690}'
    found, problems = combine_manager_grants(
        decode_cpu_grants(document), NO_GRANTS, CPUSet.parse("0-7"), NUMASet(), NO_GRANTS
    )
    assert (found.cpu_policy, found.shared, found.granted_cpus, problems) == (
        "none",
        (),
        CPUSet(),
        (),
    )


def test_memory_of_all_versions() -> None:
    table = {"memory": {"reserved": 1024}, "hugepages-2Mi": {"reserved": 4096}, "x": {}}
    state = {"0": {"memoryMap": table}, "1": {"memoryMap": {"memory": {"reserved": 0}}}}
    entries = {"uid": {"app": [BLOCK, {"numaAffinity": [1]}], "none": None}}
    document = {"policyName": "Static", "machineState": state, "entries": entries}
    found = decode_memory_grants(json.dumps(document).encode())
    assert sets(found.mems) == {("uid", "app"): "0-1", ("uid", "none"): ""}
    assert (found.memory, found.hugepages[0]) == ({0: 1024}, {2 << 20: 4096})
    document["podEntries"] = {"uid-p": {"memoryBlocks": [BLOCK]}}
    for text in (document, {"data": json.dumps(document), "dataChecksum": 1, "policyName": "None"}):
        assert sets(decode_memory_grants(json.dumps(text).encode()).pod_mems) == {"uid-p": "0"}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "truncated"),
        (b"\xff\xfe\xfd", "malformed"),
        (json.dumps(V2).encode()[:40], "truncated"),
        (b'{"policyName":' + b"[" * 100_000, "recursion"),
        (b"[]", "Expected `object`, got `array`"),
        (b"{}", "missing required field `policyName`"),
        (cpu(policyName="weird"), "Invalid enum value 'weird' - at `$.policyName`"),
        (cpu(defaultCpuSet=3), "Expected `str`, got `int`"),
        (cpu(entries=[]), "Expected `object | null`, got `array` - at `$.entries`"),
        (cpu(entries={"u": {"c": "1-"}}), "'1-'"),
        (cpu(entries={"u": {"c": "0-4000000000"}}), "4000000000"),
        (cpu(podEntries={"u": "1"}), "`$.podEntries[...]`"),
        (cpu(data="{}"), "has data or dataChecksum alone, expected both"),
        (cpu(dataChecksum=3), "has data or dataChecksum alone, expected both"),
        (cpu(data="x", dataChecksum=3), "malformed"),
        (cpu(entries={"a\nb": {"app": "1"}}), "`key` in `$.entries`"),
        (cpu(entries={"uid": {"\x1b[2J": "1"}}), "`key` in `$.entries[...]`"),
        (cpu(podEntries={"\u202e": {"cpuSet": "1"}}), "`key` in `$.podEntries`"),
        (cpu(podEntries={"a\ud800": {"cpuSet": "1"}}), "hex escape"),
        (memory(policyName="Static "), "Invalid enum value 'Static '"),
        (memory(entries={"u": {"c": {}}}), "Expected `array | null`, got `object`"),
        (memory(entries={"u": {"c": [{"numaAffinity": [-1]}]}}), "Expected `int` >= 0"),
        (memory(entries={"u": {"c": [{"numaAffinity": [True]}]}}), "got `bool`"),
        (memory(entries={"u": {"c": [{"numaAffinity": [99999]}]}}), "99999"),
        (memory(entries={"a\nb": {"app": [BLOCK]}}), "`key` in `$.entries`"),
        (memory(machineState={"x": {}}), "`key` in `$.machineState`"),
        (memory(machineState={"0": {"memoryMap": {"memory": {"reserved": "1k"}}}}), "got `str`"),
    ],
)
def test_what_is_no_state_is_told(data: bytes, words: str) -> None:
    """Names that no kubelet writes would go into log lines and documents."""
    with pytest.raises(STATE_DECODE_ERRORS) as caught:
        (decode_memory_grants if b'"Static' in data else decode_cpu_grants)(data)
    assert words in str(caught.value)
    assert str(caught.value).isprintable()


def test_what_another_machine_has_is_passed_over_and_told() -> None:
    both = (
        decode_cpu_grants(cpu(entries={"u": {"here": "1,9", "there": "8-9"}})),
        decode_memory_grants(
            memory(
                entries={
                    "u": {"here": [{"numaAffinity": [0, 7]}], "there": [{"numaAffinity": [7]}]}
                }
            )
        ),
    )
    found, problems = combine_manager_grants(*both, CPUSet.parse("0-3"), NUMASet([0]), NO_GRANTS)
    assert sets(found.cpus) == {("u", "here"): "1"}
    assert sets(found.mems) == {("u", "here"): "0"}
    assert problems == (
        "cpu_manager_state names CPUs 8-9, which this machine does not have",
        "memory_manager_state names NUMA node 7, which this machine does not have",
    )


def test_the_last_shared_sets_are_remembered() -> None:
    found = NO_GRANTS
    for number in [*range(1, 20), 18]:
        state = decode_cpu_grants(cpu(defaultCpuSet=f"0,{number}"))
        found, _ = combine_manager_grants(state, NO_GRANTS, CPUSet.parse("0-31"), NUMASet(), found)
    assert len(found.shared) == MAX_REMEMBERED_SHARED_CPUSETS
    assert list(map(str, found.shared[:3])) == ["0,18", "0,19", "0,17"]
    nothing, _ = combine_manager_grants(NO_GRANTS, NO_GRANTS, CPUSet(), NUMASet(), found)
    assert nothing == KubeletGrants()
