"""The kubelet's configuration: file, drop-ins, flags; found, merged, and put beside ours."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nri_numa.config.layers import LayeredDocument, build_config
from nri_numa.kubelet.configuration import (
    DiscoveredConfig,
    KubeletFacts,
    KubeletFlags,
    decode_kubelet_facts,
    merge_file_and_drop_ins,
    parse_command_line,
    read_kubelet_config,
    registered_node_name,
)
from nri_numa.kubelet.inherited_settings import AdoptedSettings, adopt_kubelet_settings
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import Topology
from nri_numa.model.settings import Settings
from tests.machines import named as machines

HEAD = {"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration"}
GIB = 1 << 30


def document(**keys: Any) -> dict[str, Any]:
    return {**HEAD, **keys}


# --- merging and reading --------------------------------------------------------------------------


def test_drop_ins_are_merge_patches() -> None:
    """Lists are replaced, maps are merged, null removes."""
    base = document(
        systemReserved={"cpu": "1", "memory": "1Gi"},
        reservedMemory=[{"numaNode": 0, "limits": {"memory": "1Gi"}}],
        reservedSystemCPUs="0",
        cpuManagerPolicyOptions={"full-pcpus-only": "true"},
    )
    drop_in = document(
        systemReserved={"cpu": "2"},
        reservedMemory=[{"numaNode": 1, "limits": {"memory": "2Gi"}}],
        reservedSystemCPUs=None,
        cpuManagerPolicyOptions={"align-by-socket": "true"},
    )
    whole, problems = merge_file_and_drop_ins([("a", base), ("b", drop_in)])
    assert problems == ()
    assert whole["systemReserved"] == {"cpu": "2", "memory": "1Gi"}
    assert whole["reservedMemory"] == [{"numaNode": 1, "limits": {"memory": "2Gi"}}]
    assert "reservedSystemCPUs" not in whole
    assert set(whole["cpuManagerPolicyOptions"]) == {"full-pcpus-only", "align-by-socket"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "b: is empty, expected a KubeletConfiguration"),
        ([], "b: is a list"),
        ({}, "b: apiVersion is missing"),
        ({**HEAD, "kind": "Pod"}, "b: kind is 'Pod', expected KubeletConfiguration"),
    ],
)
def test_what_is_no_configuration_is_left_out_and_told(content: object, words: str) -> None:
    whole, (problem,) = merge_file_and_drop_ins(
        [("a", document(reservedSystemCPUs="0")), ("b", content)]
    )
    assert words in problem
    assert whole["reservedSystemCPUs"] == "0"


def test_facts_have_the_kubelets_defaults() -> None:
    assert decode_kubelet_facts({}, {}) == KubeletFacts()


def test_facts_of_a_whole_document() -> None:
    found = decode_kubelet_facts(
        document(
            cpuManagerPolicy="static",
            cpuManagerPolicyOptions={"strict-cpu-reservation": "true"},
            memoryManagerPolicy="Static",
            topologyManagerPolicy="single-numa-node",
            topologyManagerScope="pod",
            reservedSystemCPUs="0,4",
            systemReserved={"cpu": "500m", "memory": "1Gi", "ephemeral-storage": "1Gi"},
            kubeReserved={"cpu": 1, "memory": "512Mi"},
            reservedMemory=[{"numaNode": 0, "limits": {"memory": "1Gi", "hugepages-2Mi": "4Mi"}}],
        ),
        {},
    )
    assert (found.cpu_policy, found.memory_policy) == ("static", "Static")
    assert found.topology_policy == "single-numa-node"
    assert found.cpu_options == {"strict-cpu-reservation": "true"}
    assert str(found.reserved_cpus) == "0,4"
    assert (found.reserved_milli, found.reserved_bytes) == (1500, 3 * GIB // 2)
    assert found.reserved_memory == {0: {0: GIB, 2 << 20: 4 << 20}}


def test_flags_beat_the_file() -> None:
    words = [
        "/usr/bin/kubelet", "--config=/etc/k.yaml", "--config-dir", "/etc/k.d", "-v", "--v=2",
        "--reserved-cpus=1", "--system-reserved=cpu=2,memory=1Gi", "--root-dir", "/data",
        "--cpu-manager-policy=static", "--cpu-manager-policy-options=full-pcpus-only=true",
        "--cpu-manager-policy-options=strict-cpu-reservation=true", "--reserved-memory",
        "0:memory=1Gi,hugepages-2Mi=2Mi;1:memory=2Gi", "--reserved-memory=2:memory=1Gi", "--last",
    ]  # fmt: skip
    flags = parse_command_line(words)
    assert (flags.config, flags.config_dir, flags.root_dir) == ("/etc/k.yaml", "/etc/k.d", "/data")
    found = decode_kubelet_facts(
        document(reservedSystemCPUs="0", systemReserved={"cpu": "1"}), flags.values
    )
    assert (str(found.reserved_cpus), found.reserved_milli) == ("1", 2000)
    assert found.cpu_options == {"full-pcpus-only": "true", "strict-cpu-reservation": "true"}
    assert found.reserved_memory == {0: {0: GIB, 2 << 20: 2 << 20}, 1: {0: 2 * GIB}, 2: {0: GIB}}
    assert parse_command_line([]) == KubeletFlags()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"reservedSystemCPUs": "1-"}, "'1-'"),
        ({"systemReserved": "all"}, "Expected `object | null`, got `str` - at `$.systemReserved`"),
        ({"kubeReserved": {"cpu": "many"}}, "reserved CPUs: is 'many', expected"),
        ({"kubeReserved": {"memory": -1}}, "reserved memory: is -1, expected"),
        ({"reservedMemory": "x"}, "Expected `array | null`, got `str` - at `$.reservedMemory`"),
        ({"reservedMemory": [{"numaNode": "y"}]}, "numaNode`"),
        ({"reservedMemory": [{"numaNode": "²"}]}, "numaNode`"),
        ({"reservedMemory": [{"limits": {"disk": "1"}}]}, "disk: is 'disk', expected hugepages"),
    ],
)
def test_what_no_kubelet_starts_with_is_told(keys: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, msgspec.ValidationError)) as caught:
        decode_kubelet_facts(document(**keys), {})
    assert words in str(caught.value)


def test_what_no_kubelet_starts_with_says_nothing(tmp_path: Path) -> None:
    write(tmp_path / "kubelet.yaml", reservedSystemCPUs="0", systemReserved="all")
    found = read_kubelet_config(str(tmp_path / "kubelet.yaml"), "", str(tmp_path))
    assert found.facts is None
    assert "kubelet.yaml: Expected" in found.problems[0]
    write(tmp_path / "kubelet.yaml", reservedSystemCPUs="0")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "10.conf").write_text("half: [")
    found = read_kubelet_config(str(tmp_path / "kubelet.yaml"), str(tmp_path / "d"), str(tmp_path))
    assert found.facts is None
    assert "10.conf: " in found.problems[0]


def test_a_misspelt_key_is_told_and_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "kubelet.yaml", reservedCpus="0", cpumanagerPolicy="static", kubeReserved={})
    (tmp_path / "d").mkdir()
    write(tmp_path / "d" / "10.conf", **{"system-reserved": {"cpu": "1"}, "maxPods": 10})
    found = read_kubelet_config(str(tmp_path / "kubelet.yaml"), str(tmp_path / "d"), str(tmp_path))
    assert found.facts == KubeletFacts()
    assert [problem.partition(": ")[2] for problem in found.problems] == [
        "reservedCpus is no key of a KubeletConfiguration, expected reservedSystemCPUs",
        "cpumanagerPolicy is no key of a KubeletConfiguration, expected cpuManagerPolicy",
        "system-reserved is no key of a KubeletConfiguration, expected systemReserved",
    ]


# --- beside ours ----------------------------------------------------------------------------------


def beside(
    ours: dict[str, Any], theirs: KubeletFacts, topology: Topology | None = None
) -> AdoptedSettings:
    topology = topology or machines.dual_smt()
    config = build_config(LayeredDocument(document=ours), "test")
    return adopt_kubelet_settings(config, theirs, topology)


def test_reserved_cpus_become_ours_unless_set() -> None:
    theirs = KubeletFacts(cpu_policy="static", reserved_cpus=CPUSet.parse("0-1"))
    found = beside({}, theirs)
    assert str(found.settings.reserved_cpus) == str(found.settings.kubelet_reserved) == "0-1"
    assert found.adopted == ("reservedCPUs 0-1 (the kubelet's reservedSystemCPUs)",)
    found = beside({"reservedCPUs": "0"}, theirs)
    assert str(found.settings.reserved_cpus) == "0"
    assert str(found.settings.kubelet_reserved) == "0-1"
    (difference,) = found.differences
    assert "reservedCPUs is 0, and the kubelet's reservedSystemCPUs reserves 0-1" in difference
    assert beside({"reservedCPUs": "0,1"}, theirs).differences == ()


def test_amounts_reserve_what_the_kubelet_would_take() -> None:
    """Packed, out of the whole machine: here two threads of the first core."""
    topology = machines.dual_smt()
    found = beside({}, KubeletFacts(reserved_milli=1500), topology)
    assert found.settings.reserved_cpus == topology.cores[topology.cpus[0].core].cpus
    assert "systemReserved and kubeReserved" in found.adopted[0]
    assert not found.settings.kubelet_reserved
    every = beside({}, KubeletFacts(reserved_milli=1_000_000), topology)
    assert every.settings.reserved_cpus == topology.online
    assert beside({}, KubeletFacts(), topology).settings == Settings(
        reservation_seconds=600.0, rebalance_moves=2
    )


def test_strict_reservation_is_taken_over_as_far_as_anything_is_left() -> None:
    strict = {"strict-cpu-reservation": "True"}
    found = beside({}, KubeletFacts(reserved_cpus=CPUSet.parse("0"), cpu_options=strict))
    assert found.settings.strict_cpu_reservation
    everything = KubeletFacts(reserved_milli=1_000_000, cpu_options=strict)
    assert not beside({}, everything).settings.strict_cpu_reservation


def test_reserved_cpus_of_another_machine_are_passed_over() -> None:
    found = beside({}, KubeletFacts(reserved_cpus=CPUSet.parse("0,500")))
    assert str(found.settings.reserved_cpus) == "0"
    assert "CPU 500, which this machine does not have" in found.differences[0]


def test_reserved_memory_becomes_ours_unless_set() -> None:
    theirs = KubeletFacts(reserved_memory={0: {0: GIB, 2 << 20: 4 << 20}, 9: {0: GIB}})
    found = beside({}, theirs)
    assert found.settings.reserved_memory == {0: GIB}
    assert found.settings.reserved_hugepages == {0: {2 << 20: 4 << 20}}
    assert "reservedMemory names NUMA node 9" in found.differences[0]
    found = beside({"reservedMemory": {"0": "2Gi"}}, theirs)
    assert found.settings.reserved_memory == {0: 2 * GIB}
    assert "reservedMemory is 2147483648 bytes in all" in found.differences[1]
    pages = beside({}, KubeletFacts(reserved_memory={0: {2 << 20: 4 << 20}}))
    assert "of huge pages" in pages.adopted[0]


def test_reserved_memory_without_numa_nodes_is_spread_by_their_size() -> None:
    found = beside({}, KubeletFacts(reserved_bytes=2 * GIB), machines.dual_smt())
    assert found.settings.reserved_memory == {0: GIB, 1: GIB}


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (
            {"kubeletCompatibility": {"mode": "full"}},
            KubeletFacts(cpu_policy="static"),
            "both give exclusive CPUs",
        ),
        (
            {"kubeletCompatibility": {"mode": "policies"}},
            KubeletFacts(memory_policy="Static"),
            "both place the memory",
        ),
        ({}, KubeletFacts(topology_policy="restricted"), "before nri-numa and whatever"),
    ],
)
def test_two_managers_of_the_same_thing_are_a_difference(
    ours: dict[str, Any], theirs: KubeletFacts, words: str
) -> None:
    assert words in beside(ours, theirs).differences[0]


# --- files ----------------------------------------------------------------------------------------


def write(path: Path, **keys: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document(**keys)), encoding="utf-8")


def reserved(found: DiscoveredConfig) -> str:
    assert found.facts is not None
    return str(found.facts.reserved_cpus)


def test_drop_ins_are_read_in_lexical_order(tmp_path: Path) -> None:
    write(tmp_path / "kubelet.yaml", reservedSystemCPUs="0")
    write(tmp_path / "d" / "10-a.conf", reservedSystemCPUs="1")
    write(tmp_path / "d" / "20-b" / "x.conf", reservedSystemCPUs="3")
    write(tmp_path / "d" / "20-b.conf", reservedSystemCPUs="2")
    write(tmp_path / "d" / "99-d.yaml", reservedSystemCPUs="4")  # not a .conf file
    found = read_kubelet_config(str(tmp_path / "kubelet.yaml"), str(tmp_path / "d"), str(tmp_path))
    assert reserved(found) == "2"
    again = read_kubelet_config(str(tmp_path / "kubelet.yaml"), str(tmp_path / "d"), str(tmp_path))
    assert again.signature == found.signature
    write(tmp_path / "d" / "30.conf", reservedSystemCPUs="5")
    changed = read_kubelet_config(
        str(tmp_path / "kubelet.yaml"), str(tmp_path / "d"), str(tmp_path)
    )
    assert changed.signature != found.signature
    assert reserved(changed) == "5"


def test_off_reads_nothing_and_auto_finds_the_file_of_kubeadm(tmp_path: Path) -> None:
    nobody = str(tmp_path / "proc")
    assert read_kubelet_config("auto", "", str(tmp_path), nobody) == DiscoveredConfig()
    write(tmp_path / "config.yaml", reservedSystemCPUs="1")
    assert reserved(read_kubelet_config("auto", "", str(tmp_path), nobody)) == "1"
    assert read_kubelet_config("off", "", str(tmp_path), nobody) == DiscoveredConfig()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff", "cannot be read"),
        (b"a: [", "kubelet.yaml: "),
        (b"a: 1\na: 2\n", "kubelet.yaml: "),
        (b"x" * (2 << 20), "expected at most"),
        (b"", "is empty, expected a KubeletConfiguration"),
    ],
)
def test_a_file_that_says_nothing_is_told(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "kubelet.yaml"
    file.write_bytes(content)
    found = read_kubelet_config(str(file), "", str(tmp_path))
    assert words in found.problems[0]
    assert found.facts is None or found.facts.reserved_cpus is None


def test_files_that_are_not_there_and_too_many_are_told(tmp_path: Path) -> None:
    found = read_kubelet_config(str(tmp_path / "no"), str(tmp_path / "none"), str(tmp_path))
    assert len(found.problems) == 2
    os.mkfifo(tmp_path / "pipe")
    assert (
        "is not a regular file"
        in read_kubelet_config(str(tmp_path / "pipe"), "", str(tmp_path)).problems[0]
    )
    for number in range(200):
        write(tmp_path / "d" / f"{number:03}.conf")
    write(tmp_path / "kubelet.yaml")
    found = read_kubelet_config(str(tmp_path / "kubelet.yaml"), str(tmp_path / "d"), str(tmp_path))
    assert found.problems == ()
    write(tmp_path / "d" / "200.conf")
    found = read_kubelet_config(str(tmp_path / "kubelet.yaml"), str(tmp_path / "d"), str(tmp_path))
    assert "has 201 drop-ins, expected at most 200" in found.problems[0]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Something called kubelet, with flags and a directory."""
    # Its command line is in /proc a moment after `Popen` is back: it says itself that it runs.
    program = "import sys; print(flush=True); sys.stdin.read()"
    words = ["kubelet", "-c", program, f"--config={tmp_path / 'k.yaml'}", "--reserved-cpus=3"]
    words += [f"--root-dir={tmp_path}", "--hostname-override= Kube-Node "]
    made = subprocess.Popen(
        words, executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert made.stdout is not None
    made.stdout.readline()
    yield made
    made.communicate()


def test_the_command_line_of_our_kubelet(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    """Others on the machine (nested clusters) have another directory."""
    write(tmp_path / "k.yaml", reservedSystemCPUs="1", cpuManagerPolicy="static")
    found = read_kubelet_config("auto", "", str(tmp_path))
    assert reserved(found) == "3"
    assert found.path == str(tmp_path / "k.yaml")
    (tmp_path / "other").mkdir()
    assert read_kubelet_config("auto", "", str(tmp_path / "other")) == DiscoveredConfig()
    assert read_kubelet_config("auto", "", str(tmp_path / "nowhere")) == DiscoveredConfig()
    # A container's program may call itself kubelet, and have a link to what looks like ours.
    root = tmp_path / "proc" / "7" / "root"
    root.mkdir(parents=True)
    (root / "x").symlink_to(tmp_path)
    for directory in ("x", "x/"):
        (root / "../cmdline").write_bytes(f"kubelet\0--root-dir=/{directory}\0".encode())
        assert (
            read_kubelet_config("auto", "", str(tmp_path), str(tmp_path / "proc"))
            == DiscoveredConfig()
        )
    # The Node is called what that kubelet was told to call it.
    assert registered_node_name(str(tmp_path)) == "kube-node"
    assert registered_node_name(str(tmp_path / "other")) == socket.gethostname().lower()
