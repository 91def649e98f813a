"""A capture has what describes the machine, and nothing that names it or its owner."""

import gzip
import os
import tarfile
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_numa.cli.machine import write_capture as capture
from nri_numa.errors import TopologyError
from nri_numa.machine.sysfs import discover_topology, read_memory
from nri_numa.machine.tree import CPU_DIR, NODE_DIR
from tests.beds.cli import invoke
from tests.machines import named as machines
from tests.machines.named import write_sysfs, write_tree


def _words(path: Path) -> set[str]:
    """Words of all files' contents; the names are on the allow-list."""
    text = ""
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isreg() else None
            text += "" if file is None else file.read().decode()
    return set(text.split())


@pytest.mark.parametrize("name", machines.MACHINES)
def test_a_capture_reads_as_the_machine(name: str, tmp_path: Path) -> None:
    root = write_sysfs(tmp_path / "root", machines.MACHINES[name]())
    report = capture(root, tmp_path / "machine.tar.gz")
    machine = discover_topology(root)
    assert (
        replace(discover_topology(tmp_path / "machine.tar.gz"), warnings=machine.warnings)
        == machine
    )
    assert read_memory(tmp_path / "machine.tar.gz", machine) == read_memory(root, machine)
    assert report.data == (tmp_path / "machine.tar.gz").read_bytes()
    assert report.unreadable == ()


def test_this_machine_can_be_captured(tmp_path: Path) -> None:
    capture(Path("/"), tmp_path / "machine.tar.gz")
    live, packed = discover_topology("/"), discover_topology(tmp_path / "machine.tar.gz")
    assert packed.fingerprint == live.fingerprint
    assert (packed.online, packed.allowed) == (live.online, live.allowed)
    assert packed.numa_nodes == live.numa_nodes
    assert packed.cores == live.cores
    words = _words(tmp_path / "machine.tar.gz")
    assert os.uname().nodename not in words
    assert {"Cpus_allowed_list:", "Mems_allowed_list:", "MemTotal:"} <= words
    assert not {"Name:", "Pid:", "Uid:", "Groups:", "NSpid:"} & words


def test_nothing_that_names_the_machine_goes_in(tmp_path: Path) -> None:
    secrets = {
        f"{CPU_DIR}/cpu0/topology/ppin": "0x2bd1f3a5c0ffee\n",  # a serial number
        f"{CPU_DIR}/cpu0/uevent": "MODALIAS=cpu:secret\n",
        f"{NODE_DIR}/node0/numastat": "secret\n",
        f"{CPU_DIR}/modalias": "secret\n",
        "sys/class/dmi/id/product_serial": "secret\n",
        "sys/class/net/eth0/address": "52:54:00:12:34:56\n",
        "proc/sys/kernel/hostname": "secret\n",
        "proc/cmdline": "root=UUID=secret\n",
        "proc/cpuinfo": "secret\n",
        "proc/mounts": "secret\n",
        "proc/self/cpuset": "/kubepods/pod-secret\n",
        "proc/self/status": "Name:\tsecret\nCpus_allowed_list:\t0-3\n",
        "etc/hostname": "secret\n",
    }
    root = write_tree(write_sysfs(tmp_path / "root", machines.single_smt()), secrets)
    report = capture(root, tmp_path / "machine.tar.gz")
    raw = gzip.decompress(report.data)
    for word in (b"secret", b"c0ffee", b"52:54", b"root", b"eth0"):
        assert word not in raw
    assert str(discover_topology(tmp_path / "machine.tar.gz").allowed) == "0-3"
    assert report.skipped_count > 1
    assert not any("ppin" in name or "numastat" in name for name in report.files)


def test_captures_of_an_unchanged_machine_are_equal(tmp_path: Path) -> None:
    root = write_sysfs(tmp_path / "root", machines.snc_smt())
    first = capture(root, tmp_path / "a.tar.gz")
    os.utime(root / CPU_DIR / "online", (0, 0))
    second = capture(root, tmp_path / "b.tar.gz")
    assert first.data == second.data
    third = capture(tmp_path / "a.tar.gz", tmp_path / "c.tar.gz")
    assert third.data == first.data


def test_links_to_numa_nodes_are_kept(tmp_path: Path) -> None:
    root = write_sysfs(tmp_path / "root", machines.dual_no_smt())
    (root / NODE_DIR / "node1/cpulist").write_text("0-15\n")
    for i in range(16):
        (root / CPU_DIR / f"cpu{i}/node{i // 8}").symlink_to(f"../../node/node{i // 8}")
        (root / CPU_DIR / f"cpu{i}/subsystem").symlink_to("/home/somebody")
    report = capture(root, tmp_path / "machine.tar.gz")
    assert discover_topology(tmp_path / "machine.tar.gz") == discover_topology(root)
    assert b"somebody" not in gzip.decompress(report.data)


def test_files_that_do_not_look_as_they_should_are_left_out(tmp_path: Path) -> None:
    root = write_sysfs(tmp_path / "root", machines.single_smt())
    strange = f"{CPU_DIR}/cpu0/cpufreq/cpuinfo_max_freq"
    write_tree(root, {strange: "owner@example.org\n"})
    (root / CPU_DIR / "cpu1/cpu_capacity").mkdir()
    (root / CPU_DIR / "cpu2/cpu_capacity").symlink_to("nowhere")
    report = capture(root, tmp_path / "machine.tar.gz")
    assert report.unreadable == (strange, f"{CPU_DIR}/cpu2/cpu_capacity")
    assert strange not in report.files


def test_what_cannot_be_captured_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(TopologyError):
        capture(tmp_path / "empty", tmp_path / "machine.tar.gz")
    root = write_sysfs(tmp_path / "root", machines.one_cpu())
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("another-user-s")
    refused = (("absent/a", "absent"), ("directory", ""), ("pipe", "not a r"), ("link", "not a r"))
    for target, words in refused:
        with pytest.raises(OSError, match=words or target):
            capture(root, tmp_path / target)
    left = ["directory", "empty", "link", "pipe", "root"]
    assert sorted(p.name for p in tmp_path.iterdir()) == left


def test_the_command_says_what_it_left_out(tmp_path: Path) -> None:
    """An archive for a bug report goes to strangers, who read the same machine in it.

    Its sender can see what is not in it.
    """
    root = str(write_sysfs(tmp_path / "machine", machines.dual_smt()))
    secret = tmp_path / "machine/sys/devices/system/node/node0/serial"
    secret.write_text("SN-4711")
    target = tmp_path / "m.tar.gz"
    done = invoke("capture", str(target), f"--sysfs-root={root}", code=0)
    assert "skipped (not part of the topology)" in done.output
    assert target.stat().st_mode & 0o777 == 0o644
    direct = invoke("topology", "--sysfs-root", root, "-o", "json").output
    assert invoke("topology", "--sysfs-root", str(target), "-o", "json").output == direct
