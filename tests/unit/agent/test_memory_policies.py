"""Which memory policies can be set, from what the runtime and the kernel say of themselves."""

from pathlib import Path

import pytest

from nri_numa.agent.links import supported_memory_policies
from nri_numa.model.workload import MemoryPolicies, MemoryPolicy
from nri_numa.runtime import RuntimeInfo
from tests.machines.named import write_tree


def policies(
    nri: str = "v0.12.0",
    kernel: str = "6.12.0-amd64",
    *,
    over_cri: bool = False,
    sysfs: Path = Path("/nothing/here"),
) -> MemoryPolicies:
    told = RuntimeInfo(
        name="containerd",
        version="2.3.7",
        nri_version=nri,
        registration_timeout=5.0,
        request_timeout=2.0,
        config="",
    )
    return supported_memory_policies(told, kernel, over_cri=over_cri, sysfs_root=sysfs)


@pytest.mark.parametrize("nri", ["v0.12.0", "v0.12.5", "0.13.0", "v0.12.1-0.20260101", "(devel)"])
def test_who_tells_its_nri_hands_all_on(nri: str) -> None:
    """The first release that tells its own version is the first with memory policies."""
    assert policies(nri) == MemoryPolicies()


def test_the_kernels_weights_are_read(tmp_path: Path) -> None:
    files = {"node0": "3\n", "node12": "1\n", "node2": "0\n", "node3": "x", "auto": "1"}
    write_tree(tmp_path / "sys/kernel/mm/mempolicy/weighted_interleave", files)
    found = policies(sysfs=tmp_path)
    assert found == MemoryPolicies(weights={0: 3, 12: 1})
    assert found.interleave_weight(MemoryPolicy.WEIGHTED_INTERLEAVE, 0) == 3
    assert found.interleave_weight(MemoryPolicy.INTERLEAVE, 0) == 1


def test_over_cri_there_is_none() -> None:
    found = policies("", over_cri=True).refused
    assert set(found) == set(MemoryPolicy)
    assert "containerd 2.3.7 is used over CRI" in found[MemoryPolicy.LOCAL]


MANY, WEIGHTED = MemoryPolicy.PREFERRED_MANY, MemoryPolicy.WEIGHTED_INTERLEAVE


@pytest.mark.parametrize(
    ("kernel", "missing"),
    [
        ("5.14.21-150500", {MANY, WEIGHTED}),
        ("5.15.0", {WEIGHTED}),
        ("6.8.0-31-generic", {WEIGHTED}),
        ("6.9.0", set()),
        ("7.0.1", set()),
        ("unreadable", set()),
    ],
)
def test_an_older_kernel_lacks_the_newer_ones(kernel: str, missing: set[MemoryPolicy]) -> None:
    found = policies(kernel=kernel).refused
    assert set(found) == missing
    if WEIGHTED in missing:
        assert found[WEIGHTED] == (
            f"Linux {kernel} does not have it; expected Linux 6.9 or newer, or interleave"
        )
