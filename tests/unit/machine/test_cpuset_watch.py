"""Whose cpuset was written: inotify on files, and on cgroups of the kernel."""

import resource
import subprocess
from pathlib import Path

from nri_numa.machine.cgroups import CgroupPlace, CgroupReader
from nri_numa.machine.cpuset_watch import CpusetWatch
from tests.beds.cgroup_tree import CgroupTree


def written(watch: CpusetWatch, places: dict[str, CgroupPlace]) -> set[str]:
    watch.watch_containers(places)
    return watch.pop_written()


def test_a_write_of_another_process_into_a_cgroup_is_seen(real: Path) -> None:
    places = {
        "one": CgroupPlace(f"/{real.relative_to('/sys/fs/cgroup/cpuset')}"),
        "none": CgroupPlace("/none"),
    }
    with CpusetWatch(CgroupReader()) as watch:
        assert written(watch, places) == set()
        for name in ("cpuset.cpus", "cpuset.mems"):
            subprocess.run(["sh", "-c", f"cat {name} > {name}"], cwd=real, check=True)
            assert written(watch, places) == {"one"}
        (real / "cpuset.cpus").read_text()
        assert written(watch, places) == set()


def test_containers_come_and_go(tree: CgroupTree) -> None:
    with CpusetWatch(CgroupReader(str(tree.root))) as watch:
        assert written(watch, {}) == set()
        tree.write("/late", "0-1", "0")
        places = {"nowhere": CgroupPlace(), "late": CgroupPlace("/late")}
        assert written(watch, places) == set()  # watched from now on
        tree.write("/late", "0", "0")
        assert written(watch, places) == {"late"}
        tree.write("/late", "1", "0")
        assert written(watch, {}) == set()
        tree.write("/late", "2", "0")
        assert written(watch, places) == set()
        assert not watch.problem


def test_without_inotify_it_says_why(tree: CgroupTree) -> None:
    tree.write("/one", "0", "0")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    reader = CgroupReader(str(tree.root))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with CpusetWatch(reader) as watch:
            assert watch.problem == "Too many open files (fs.inotify.max_user_instances)"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    watch.watch_containers({"one": CgroupPlace("/one")})
    assert watch.fd < 0
