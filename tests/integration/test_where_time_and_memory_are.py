"""The real process looks where memory is and what the host takes, once it is told to."""

import os
from pathlib import Path
from typing import Any

from tests.beds.embedded_node import EmbeddedNode, until
from tests.machines import named as machines

ON = {
    "containerUsage": {"memory": "metric", "cpuPressure": "metric", "interval": "1s"},
    "measuredCapacity": {"mode": "enforce", "interval": "1s", "halfLife": "1s"},
}


def test_memory_elsewhere_waiting_and_a_reason_where_nothing_is_known(tmp_path: Path) -> None:
    with EmbeddedNode(tmp_path, config=ON, version=2) as node:
        node.start()
        one, silent = node.listed("one"), node.listed("silent", cpus="2")

        cgroup = node.cgroups.directory(node.cgroup(one.id))
        until(cgroup.is_dir, "it has a cgroup")
        for name, text in (
            ("memory.numa_stat", "anon N0=1024 N1=3072\n"),
            ("cpu.pressure", "some avg10=0.00 avg60=40.00 avg300=0.00 total=0\n"),
        ):
            new = cgroup / f"{name}.new"
            new.write_text(text)
            new.rename(cgroup / name)

        def seen() -> dict[str, dict[str, Any]] | None:
            told = node.assignments()
            known = (
                told[one.id]["memory"]["localPercent"] is not None
                and told[one.id]["cpuPressure"]["pressurePercent"] is not None
            )
            # Whoever looks before its cgroup is made says so, and looks again.
            why = told[silent.id]
            said = "no memory.numa_stat" in (why["memory"]["problem"] or "") and "cpu.pressure" in (
                why["cpuPressure"]["problem"] or ""
            )
            return told if known and said else None

        told = until(seen, "both were read")
        assert told[one.id]["memory"]["localPercent"] == 25
        assert told[one.id]["cpuPressure"]["pressurePercent"] == 40
        assert told[silent.id]["cpuPressure"]["pressurePercent"] is None
        names = {"namespace": "default", "pod": "one", "container": "app"}
        assert node.metric("nri_numa_container_local_memory_ratio", **names) == 0.25
        assert node.metric("nri_numa_container_cpu_pressure_ratio", **names) == 0.4
        assert node.metric("nri_numa_local_memory_containers", state="unknown") == 1
        wide = node.says("status", "-o", "wide", status=0)
        assert "LOCAL MEMORY" in wide
        assert "CPU PRESSURE" in wide
        explained = node.says("explain", "-v", "default/one", "--no-kubelet")
        assert "Memory: 25 % is on its own NUMA nodes (0)" in explained


def test_what_the_host_takes_is_taken_from_new_containers(tmp_path: Path) -> None:
    topology = machines.dual_no_smt(cores_per_numa=4, memory_gib=64)
    with EmbeddedNode(tmp_path, topology=topology, config=ON) as node:
        (node.sysfs_root / "proc").mkdir(exist_ok=True)
        ticks = 0

        def time_passes() -> None:
            """Of NUMA node 0 the host takes 40 %; the file is there whole, as the kernel's is."""
            nonlocal ticks
            ticks += 10
            lines = [
                f"cpu{cpu} 0 0 0 {10 * ticks - stolen} 0 0 0 {stolen}"
                for cpu in topology.online
                for stolen in (4 * ticks if cpu in topology.numa_nodes[0].cpus else 0,)
            ]
            new = node.sysfs_root / "proc/stat.new"
            new.write_text("\n".join([*lines, ""]))
            os.replace(new, node.sysfs_root / "proc/stat")

        time_passes()
        node.start()

        def lowered() -> bool:
            time_passes()
            factor = node.metric("nri_numa_capacity_factor", numa_node="0")
            return 0 < factor <= 0.7

        until(lowered, "the capacity factor follows")
        assert node.metric("nri_numa_capacity_factor", numa_node="1") == 1
        owner = node.owner("three", cpus=3)
        assert node.assignments()[owner.id]["numaNodes"] == "1"
