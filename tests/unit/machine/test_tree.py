"""Files of a machine come from directories and archives, and archives are not trusted."""

import bz2
import gzip
import io
import lzma
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from nri_numa.errors import TopologyError
from nri_numa.machine import tree
from nri_numa.machine.synthetic import synthetic_sysfs_files
from nri_numa.machine.sysfs import discover_topology, read_memory, read_online
from nri_numa.machine.tree import CPU_DIR, open_tree
from tests.machines import named as machines
from tests.machines.named import write_sysfs, write_tree


def _tar(files: Mapping[str, str | tarfile.TarInfo], prefix: str = "") -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, text in files.items():
            if isinstance(text, tarfile.TarInfo):
                text.name = prefix + name
                archive.addfile(text)
                continue
            info = tarfile.TarInfo(prefix + name)
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return data.getvalue()


def _link(target: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo()
    info.type = tarfile.SYMTYPE
    info.linkname = target
    return info


def _directory() -> tarfile.TarInfo:
    info = tarfile.TarInfo()
    info.type = tarfile.DIRTYPE
    return info


COMPRESSIONS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("machine.tar", bytes),
    ("machine.tar.gz", gzip.compress),
    ("machine.tar.bz2", bz2.compress),
    ("machine.tar.xz", lzma.compress),
    ("no-suffix-at-all", gzip.compress),
]


@pytest.mark.parametrize(("name", "compress"), COMPRESSIONS, ids=[c[0] for c in COMPRESSIONS])
@pytest.mark.parametrize("prefix", ["", "./", "captured/"])
def test_an_archive_is_read_as_the_directory_it_came_from(
    name: str, compress: Callable[[bytes], bytes], prefix: str, tmp_path: Path
) -> None:
    machine = machines.sparse_ids()
    (tmp_path / name).write_bytes(compress(_tar(synthetic_sysfs_files(machine), prefix)))
    assert discover_topology(tmp_path / name) == machine
    assert read_online(str(tmp_path / name)) == machine.online
    (tmp_path / "unpacked").mkdir()
    write_sysfs(tmp_path / "unpacked", machine)
    assert read_memory(tmp_path / name, machine) == read_memory(tmp_path / "unpacked", machine)


def test_a_replaced_archive_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "machine.tar"
    path.write_bytes(_tar(synthetic_sysfs_files(machines.single_smt())))
    assert discover_topology(path) == machines.single_smt()
    path.write_bytes(_tar(synthetic_sysfs_files(machines.dual_smt())))
    assert discover_topology(path) == machines.dual_smt()


def test_links_in_an_archive_decide_between_overlapping_numa_nodes(tmp_path: Path) -> None:
    files: dict[str, str | tarfile.TarInfo] = {**synthetic_sysfs_files(machines.dual_no_smt())}
    files["sys/devices/system/node/node1/cpulist"] = "0-15\n"
    files["sys/devices/system/cpu"] = _directory()
    for i in range(16):
        files[f"sys/devices/system/cpu/cpu{i}/node{i // 8}"] = _link(f"../../node/node{i // 8}")
    path = tmp_path / "machine.tar"
    path.write_bytes(_tar(files))
    machine = discover_topology(path)
    assert machine.numa_nodes == machines.dual_no_smt().numa_nodes


def test_a_capture_may_be_unpacked_one_directory_down(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    write_sysfs(tmp_path / "captured", machines.single_smt())
    assert discover_topology(tmp_path) == machines.single_smt()


def test_two_machines_in_one_place_are_rejected(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_sysfs(tmp_path / name, machines.one_cpu())
    with pytest.raises(TopologyError, match="holds 2 machines; expected one, such as a"):
        open_tree(tmp_path)
    files = synthetic_sysfs_files(machines.one_cpu())
    both = {f"a/{n}": t for n, t in files.items()} | {f"b/{n}": t for n, t in files.items()}
    (tmp_path / "both.tar").write_bytes(_tar(both))
    with pytest.raises(TopologyError, match=r"holds 2 machines \(a, b\); expected one"):
        open_tree(tmp_path / "both.tar")


def test_what_is_no_machine_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"does not exist; expected a directory holding sys/"):
        open_tree(tmp_path / "absent")
    with pytest.raises(TopologyError, match=r"there is no sys/devices/system/cpu in it$"):
        open_tree(tmp_path)
    write_sysfs(tmp_path, machines.one_cpu())
    with pytest.raises(TopologyError, match="give the directory that holds sys/, not sys/ itself"):
        open_tree(tmp_path / "sys")
    with pytest.raises(TopologyError, match="is neither a directory nor a file"):
        open_tree("/dev/null")
    with pytest.raises(TopologyError) as caught:
        open_tree("nul\0byte")
    assert "cannot be read" in str(caught.value) or "does not exist" in str(caught.value)


GOOD = _tar(synthetic_sysfs_files(machines.one_cpu()))
DAMAGED = {
    "empty": b"",
    "text": b"this is a text, and no archive\n" * 40,
    "gzip header": b"\x1f\x8b",
    "gzip of text": gzip.compress(b"text" * 1000),
    "cut gzip": gzip.compress(GOOD)[:200],
    "broken gzip": gzip.compress(GOOD)[:100] + b"\xff" * 200,
    "cut bzip2": bz2.compress(GOOD)[:100],
    "broken bzip2": b"BZh9" + b"\xff" * 200,
    "cut xz": lzma.compress(GOOD)[:100],
    "broken xz": b"\xfd7zXZ\0" + b"\xff" * 200,
    "cut tar": GOOD[:300],
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_archives_are_errors_that_name_the_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.tar.gz"
    path.write_bytes(DAMAGED[name])
    with pytest.raises(TopologyError) as caught:
        discover_topology(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_an_archive_of_something_else_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "home.tar"
    path.write_bytes(_tar({"home/notes.txt": "hello"}))
    with pytest.raises(TopologyError, match="there is no sys/devices/system/cpu in the archive"):
        discover_topology(path)


def test_members_that_point_outside_are_ignored(tmp_path: Path) -> None:
    files: dict[str, str | tarfile.TarInfo] = {
        **synthetic_sysfs_files(machines.one_cpu()),
        f"../{CPU_DIR}/online": "5",
        f"/{CPU_DIR}/present": "0-5",
        f"a/../{CPU_DIR}/possible": "0-5",
        "sys/devices/system/node/online": _link("/etc/passwd"),
        ".": _directory(),
    }
    path = tmp_path / "machine.tar"
    path.write_bytes(_tar(files))
    machine = discover_topology(path)
    assert str(machine.possible) == "0"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["machine.tar"]  # nothing was unpacked


def test_too_large_archives_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "machine.tar.gz"
    files = synthetic_sysfs_files(machines.dual_smt())
    for limit, value, found in (
        ("MAX_ARCHIVE_MEMBERS", 10, "has more than 10 members"),
        ("MAX_ARCHIVE_KEPT_BYTES", 100, "describes a machine in more than 0 MiB"),
        ("MAX_ARCHIVE_UNPACKED_BYTES", 1 << 20, "unpacks to more than 1 MiB"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(tree, limit, value)
            # A name of its own each time: what was read once is remembered.
            path = tmp_path / f"{limit}.tar.gz"
            path.write_bytes(gzip.compress(_tar({**files, "sys/bomb": "\0" * (4 << 20)})))
            with pytest.raises(TopologyError, match=found):
                discover_topology(path)


def test_a_file_larger_than_any_of_the_kernel_is_cut(tmp_path: Path) -> None:
    long = "0\n" + "\0" * tree.MAX_TREE_FILE_BYTES + "x"
    path = tmp_path / "machine.tar"
    path.write_bytes(
        _tar({**synthetic_sysfs_files(machines.one_cpu()), f"{CPU_DIR}/present": long})
    )
    assert discover_topology(path) == machines.one_cpu()
    root = write_sysfs(tmp_path / "unpacked", machines.one_cpu())
    (root / CPU_DIR / "present").write_text("0," * tree.MAX_TREE_FILE_BYTES)
    assert (
        len(open_tree(root).read_file(f"{CPU_DIR}/present") or "") <= 2 * tree.MAX_TREE_FILE_BYTES
    )


def test_files_longer_than_a_page_are_read_whole(tmp_path: Path) -> None:
    text = ",".join(str(i) for i in range(0, 8192, 2))
    root = write_tree(tmp_path, {f"{CPU_DIR}/online": text + "\n"})
    assert len(text) > 4 * 4096
    assert open_tree(root).read_file(f"{CPU_DIR}/online") == text
    exact = ("0," * 4096)[:4096]
    (root / CPU_DIR / "online").write_text(exact)
    assert open_tree(root).read_file(f"{CPU_DIR}/online") == exact
    # Of a file of many records the kernel gives at once what fits into a page.
    assert "[stack]" in (open_tree("/").read_file("proc/self/maps") or "")


def test_a_directory_in_place_of_a_file_is_no_file(tmp_path: Path) -> None:
    root = write_sysfs(tmp_path, machines.one_cpu())
    (root / "proc/self/status").mkdir(parents=True)
    assert open_tree(root).read_file("proc/self/status") is None
    assert open_tree(root).list_directory("proc/absent") == []
    assert discover_topology(root) == machines.one_cpu()


def test_an_archive_lists_and_finds_directories(tmp_path: Path) -> None:
    path = tmp_path / "machine.tar"
    path.write_bytes(_tar(synthetic_sysfs_files(machines.hybrid())))
    found = open_tree(path)
    assert found.source == str(path)
    assert found.list_directory(f"{CPU_DIR}/cpu7") == ["cache", "topology"]
    assert found.list_directory("absent") == []
    assert found.exists(f"{CPU_DIR}/cpu7")
    assert found.exists(f"{CPU_DIR}/cpu7/topology/core_id")
    assert not found.exists(f"{CPU_DIR}/cpu77")
    assert f"{CPU_DIR}/offline" in list(found.walk_files())  # seen, although not kept
    assert found.read_file(f"{CPU_DIR}/offline") is None


def test_every_written_file_that_discovery_reads_is_on_the_list() -> None:
    written = {name for f in machines.MACHINES.values() for name in synthetic_sysfs_files(f())}
    extra = {name for name in written if not tree.CAPTURED_PATHS.fullmatch(name)}
    assert extra == {
        f"{CPU_DIR}/offline",
        "sys/devices/system/node/has_memory",
        "sys/devices/system/node/has_cpu",
        "proc/self/status",
    }
