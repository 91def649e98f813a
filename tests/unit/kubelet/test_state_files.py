"""The kubelet's state files on disk: read when they change, and never waited for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from nri_numa.kubelet import state_files
from nri_numa.kubelet.state_files import StateFiles, UnknownState, cpu_state, grants, memory_state
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.workload import NO_GRANTS, SHARED_SETS, KubeletGrants

MACHINE = CPUSet.parse("0-7"), NUMASet([0])


def write(directory: Path, text: str, name: str = "cpu_manager_state") -> None:
    """As the kubelet does: another file, renamed over the old one."""
    made = directory / ".new"
    made.write_text(text, encoding="utf-8")
    made.rename(directory / name)


def static(**entries: str) -> str:
    documents = {uid: {"app": cpus} for uid, cpus in entries.items()}
    return json.dumps({"policyName": "static", "defaultCpuSet": "0", "entries": documents})


def test_a_file_is_read_when_it_was_replaced_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    whole = state_files.read
    monkeypatch.setattr(state_files, "read", lambda path: (reads.append(path), whole(path))[1])
    files = StateFiles(str(tmp_path))
    assert not files.refresh(*MACHINE)
    assert (str(files.grants.granted), files.problems) == ("", ())
    write(tmp_path, static(a="1-2"))
    reads.clear()
    assert files.refresh(*MACHINE)
    assert str(files.grants.granted) == "1-2"
    before = files.grants
    assert not files.refresh(*MACHINE)
    assert files.grants is before
    assert reads.count(str(tmp_path / "cpu_manager_state")) == 1
    write(tmp_path, static(a="1-2", b="3"))
    assert files.refresh(*MACHINE)
    assert str(files.grants.granted) == "1-3"


def test_a_file_that_goes_grants_nothing(tmp_path: Path) -> None:
    """An operator who changes the kubelet's policy removes it."""
    files = StateFiles(str(tmp_path))
    write(tmp_path, static(a="1"))
    files.refresh(*MACHINE)
    (tmp_path / "cpu_manager_state").unlink()
    assert files.refresh(*MACHINE)
    assert (str(files.grants.granted), files.grants.cpu_policy) == ("", "")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"policyName":"dynamic"}', "x" * (2 << 20)])
def test_a_damaged_file_changes_nothing_and_is_told_once(tmp_path: Path, text: str) -> None:
    files = StateFiles(str(tmp_path))
    write(tmp_path, static(a="1"))
    files.refresh(*MACHINE)
    write(tmp_path, text)
    assert files.refresh(*MACHINE)
    (problem,) = files.problems
    assert "cpu_manager_state" in problem
    assert "what it said before still holds" in problem
    assert str(files.grants.granted) == "1"
    assert not files.refresh(*MACHINE)
    write(tmp_path, static(b="2"))
    assert files.refresh(*MACHINE)
    assert (str(files.grants.granted), files.problems) == ("2", ())


def test_nobody_waits_for_a_pipe_in_its_place(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cpu_manager_state")
    (tmp_path / "memory_manager_state").mkdir()
    files = StateFiles(str(tmp_path))
    assert files.refresh(*MACHINE)
    assert len(files.problems) == 2
    assert "is no regular file" in files.problems[0]


def test_a_file_that_cannot_be_reached_is_told_until_it_can(tmp_path: Path) -> None:
    directory = tmp_path / "kubelet"
    directory.write_text("no directory")
    files = StateFiles(str(directory))
    assert files.refresh(*MACHINE)
    assert "cannot be read: Not a directory" in files.problems[0]
    directory.unlink()
    directory.mkdir()
    write(directory, static(a="1"))
    assert files.refresh(*MACHINE)
    assert (str(files.grants.granted), files.problems) == ("1", ())


def test_another_machine_judges_the_same_file_anew(tmp_path: Path) -> None:
    """CPUs can be plugged in while the agent runs."""
    files = StateFiles(str(tmp_path))
    write(tmp_path, static(a="7"))
    files.refresh(CPUSet.parse("0-3"), NUMASet([0]))
    assert "does not have" in files.problems[0]
    assert files.refresh(*MACHINE)
    assert (str(files.grants.granted), files.problems) == ("7", ())


# --- the kubelet's state files: every version, and everything that is none ------------------------


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


def sets(found: dict[Any, Any]) -> dict[Any, str]:
    return {key: str(ids) for key, ids in found.items()}


def test_version_1_names_containers_by_id() -> None:
    found = cpu_state(cpu(entries={"c0ffee": "1-3"}))
    assert (found.version, sets(dict(found.entries))) == (1, {("", "c0ffee"): "1-3"})


def test_version_2_names_them_by_pod_and_container() -> None:
    found = cpu_state(json.dumps(V2).encode())
    assert (found.version, found.policy, str(found.shared)) == (2, "static", "0,4-7")
    assert sets(dict(found.entries)) == {("uid-a", "app"): "1-3"}


def test_version_3_has_pods_too() -> None:
    found = cpu_state(cpu(podEntries={"uid-p": {"cpuSet": "2-3"}, "uid-q": {}}))
    assert (found.version, sets(dict(found.pods))) == (3, {"uid-p": "2-3"})
    assert found.entries == {}


def test_version_4_wraps_the_document_and_the_outer_copy_does_not_count() -> None:
    inner = json.dumps({**V2, "entries": {"uid-b": {"web": "2"}}, "new": 1})
    found = cpu_state(json.dumps({**V2, "data": inner, "dataChecksum": 1}).encode())
    assert (found.version, sets(dict(found.entries))) == (4, {("uid-b", "web"): "2"})


def test_policy_none_has_no_cpusets() -> None:
    document = b'{"policyName":"none","defaultCpuSet":"","checksum":1353318690}'
    found, problems = grants(cpu_state(document), None, CPUSet.parse("0-7"), NUMASet(), NO_GRANTS)
    assert (found.cpu_policy, found.shared, found.granted, problems) == ("none", (), CPUSet(), ())


def test_keys_are_read_without_regard_to_case() -> None:
    text = b'{"POLICYNAME":"static","defaultcpuset":"0","Entries":{"U":{"C":"1"}}}'
    assert sets(dict(cpu_state(text).entries)) == {("U", "C"): "1"}


def test_memory_of_all_versions() -> None:
    table = {"memory": {"reserved": 1024}, "hugepages-2Mi": {"reserved": 4096}, "x": {}}
    state = {"0": {"memoryMap": table}, "1": {"memoryMap": {"memory": {"reserved": 0}}}}
    entries = {"uid": {"app": [BLOCK, {"numaAffinity": [1]}], "none": None}}
    document = {"policyName": "Static", "machineState": state, "entries": entries}
    found = memory_state(json.dumps(document).encode())
    assert (found.version, sets(dict(found.entries))) == (1, {("uid", "app"): "0-1"})
    assert (found.memory, found.hugepages[0]) == ({0: 1024}, {2 << 20: 4096})
    document["podEntries"] = {"uid-p": {"memoryBlocks": [BLOCK]}}
    found = memory_state(json.dumps(document).encode())
    assert (found.version, sets(dict(found.pods))) == (2, {"uid-p": "0"})
    wrapped = {"data": json.dumps(document), "dataChecksum": 1, "policyName": "None"}
    assert memory_state(json.dumps(wrapped).encode()).version == 3


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "the file is empty, expected a JSON object"),
        (b"\0\0", "no JSON"),
        (b"\xff\xfe\xfd", "no JSON"),
        (json.dumps(V2).encode()[:40], "no JSON"),
        (b"[" * 100_000, "no JSON (RecursionError"),
        (b"[]", "the file is a list, expected an object"),
        (b"{}", "policyName is missing, expected none or static"),
        (cpu(policyName="weird"), "policyName is 'weird', expected none or static"),
        (cpu(defaultCpuSet=3), "defaultCpuSet is a int, expected a list of CPUs as a text"),
        (cpu(entries=[]), "entries is a list, expected an object"),
        (cpu(entries={"u": 3}), "entries.u is a int, expected an object"),
        (cpu(entries={"u": {"c": "1-"}}), "entries.u.c is '1-'"),
        (cpu(entries={"u": {"c": "0-4000000000"}}), "entries.u.c is '0-4000000000'"),
        (cpu(podEntries={"u": "1"}), "podEntries.u is a str, expected an object"),
        (cpu(data="{}"), "has data or dataChecksum alone, expected both"),
        (cpu(dataChecksum=3), "has data or dataChecksum alone, expected both"),
        (cpu(data="x", dataChecksum=3), "data is no JSON"),
        (b'{"policyName":"static","defaultCpuSet":' + b"9" * 5000 + b"}", "no JSON"),
    ],
)
def test_what_is_no_cpu_state_is_told(data: bytes, words: str) -> None:
    with pytest.raises(UnknownState) as caught:
        cpu_state(data)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (memory(policyName="static"), "policyName is 'static', expected None or Static"),
        (memory(entries={"u": {"c": {}}}), "entries.u.c is a dict, expected a list of blocks"),
        (memory(entries={"u": {"c": [3]}}), "entries.u.c is a int, expected an object"),
        (memory(entries={"u": {"c": [{"numaAffinity": 3}]}}), "numaAffinity is a int"),
        (memory(entries={"u": {"c": [{"numaAffinity": [-1]}]}}), "is -1, expected a number"),
        (memory(entries={"u": {"c": [{"numaAffinity": [True]}]}}), "is True, expected a number"),
        (memory(entries={"u": {"c": [{"numaAffinity": [99999]}]}}), "99999"),
        (memory(machineState={"x": {}}), "machineState.x is 'x', expected a number"),
        (memory(machineState={"0": {"memoryMap": {"memory": {"reserved": "1k"}}}}), "'1k'"),
    ],
)
def test_what_is_no_memory_state_is_told(data: bytes, words: str) -> None:
    with pytest.raises(UnknownState) as caught:
        memory_state(data)
    assert words in str(caught.value)


def test_what_another_machine_has_is_passed_over_and_told() -> None:
    both = (
        cpu_state(cpu(entries={"u": {"here": "1,9", "there": "8-9"}})),
        memory_state(
            memory(
                entries={
                    "u": {"here": [{"numaAffinity": [0, 7]}], "there": [{"numaAffinity": [7]}]}
                }
            )
        ),
    )
    found, problems = grants(*both, CPUSet.parse("0-3"), NUMASet([0]), NO_GRANTS)
    assert sets(dict(found.cpus)) == {("u", "here"): "1"}
    assert sets(dict(found.mems)) == {("u", "here"): "0"}
    assert problems == (
        "cpu_manager_state names CPUs 8-9, which this machine does not have",
        "memory_manager_state names NUMA node 7, which this machine does not have",
    )


def test_the_last_shared_sets_are_remembered() -> None:
    found = NO_GRANTS
    for number in [*range(1, 20), 18]:
        state = cpu_state(cpu(defaultCpuSet=f"0,{number}"))
        found, _ = grants(state, None, CPUSet.parse("0-31"), NUMASet(), found)
    assert len(found.shared) == SHARED_SETS
    assert list(map(str, found.shared[:3])) == ["0,18", "0,19", "0,17"]
    nothing, _ = grants(None, None, CPUSet(), NUMASet(), found)
    assert nothing == KubeletGrants()


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "\u202e", "a\ud800"])
def test_names_that_no_kubelet_writes_are_refused(name: str) -> None:
    """They would go into log lines and documents, and half a pair of surrogates into neither."""
    blocks = [{"numaAffinity": [0]}]
    for document in (
        cpu(entries={name: {"app": "1"}}),
        cpu(entries={"uid": {name: "1"}}),
        cpu(podEntries={name: {"cpuSet": "1"}}),
    ):
        with pytest.raises(UnknownState, match="expected a UID") as caught:
            cpu_state(document)
        assert str(caught.value).isprintable()
    for document in (memory(entries={name: {"app": blocks}}), memory(machineState={name: {}})):
        with pytest.raises(UnknownState, match="expected a UID") as caught:
            memory_state(document)
        assert str(caught.value).isprintable()
