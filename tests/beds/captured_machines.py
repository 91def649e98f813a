"""Machines that somebody captured."""

from functools import cache
from pathlib import Path

import pytest

from nri_numa.machine.sysfs import discover_topology
from nri_numa.model.machine import Topology

FOLDER = Path(__file__).parents[3] / "shared/machines"


MACHINES = (
    # Two Arm packages with two NUMA nodes each; package ids are firmware offsets.
    "128arm-2pa2n8cluster4co",
    # Captured inside the cpuset /prout, which has CPUs 0-3 and memory of NUMA nodes 2-3.
    "16amd64-4n4c-cgroup-distance-merge",
    "16amd64-8n2c",
    # No lists but masks, no file of online CPUs; 2, 5, 13 and 14 have nothing but online=0.
    "16em64t-4s2c2t-offlines",
    # Six cores with two threads and eight with one; the files that name the kinds were not
    # captured, top performance 64 against 39 tells them apart.
    "20em64t-hybrid-1p6c2t+2ca4co1t",
    "2arm-2c",
    # 16 CPUs more could be plugged in; captured inside a batch system's cgroup.
    "32amd64-4s2n4c-cgroup2",
    # CPU numbers dealt out over the sockets; core ids within a socket have holes.
    "40intel64-2g2n4c+pcilocality",
    # Two integer cores of one module call each other thread siblings, with core ids of their own.
    "64amd64-4s2n4ca2co",
    # Every NUMA node claims every CPU; the links say one each.
    "8em64t-2s2ca2c-buggynuma",
    # Four sockets in each NUMA node; masks only, no file of online CPUs. Sockets 0 and 1 are not
    # in the order of the CPU numbers.
    "96em64t-4no4pa3ca2co",
    # Memory-only NUMA nodes 4, 6, 8, 9 and holes between the numbers.
    "fakeheteromemtiers",
)


def captured(name: str) -> Path:
    path = FOLDER / f"{name}.tar.bz2"
    if not path.exists():
        pytest.skip("the captured machines are not beside this repository")
    return path


@cache
def discovered(name: str) -> Topology:
    """What a captured machine is; thousands of members are unpacked for it."""
    return discover_topology(captured(name))
