"""A container's memory policy, for real: in force from the first instruction, or refused.

Which of the two it is depends on the runtime: containerd 1.7 is older than the protocol's memory
policies.
"""

from pathlib import Path

import pytest

from tests.beds.containerd import Containerd
from tests.beds.cri import CRI, CRIError, asks, guaranteed
from tests.beds.plugin_process import PluginProcess

SHOWN = {
    "bind": "bind:0",
    "preferred": "prefer:0",
    "preferred-many": "prefer (many):0",
    "interleave": "interleave:0",
    "weighted-interleave": "weighted interleave:0",
    "local": "local",
}
"""What numa_maps(5) says of memory under a policy on NUMA node 0."""


def hands_on(containerd: Containerd) -> bool:
    """Whether this containerd knows memory policies: those of NRI 0.12."""
    major, minor = containerd.binaries.version.split(".")[:2]
    return (int(major), int(minor)) >= (2, 3)


@pytest.mark.parametrize("mode", SHOWN)
def test_a_memory_policy_is_in_force_or_rejected(
    containerd: Containerd, cri: CRI, plugin: PluginProcess, mode: str
) -> None:
    pod = cri.run_pod(f"policy-{mode}", annotations=asks(numamem="0", mempolicy=mode))
    if not hands_on(containerd):
        with pytest.raises(CRIError) as caught:
            cri.create(pod, resources=guaranteed(1))
        said = caught.value.message
        assert f"MemoryPolicyUnsupported: pod {pod.namespace}/{pod.name}" in said
        assert f"mempolicy is '{mode}'" in said
        assert f"containerd {containerd.binaries.version}" in said
        assert "expected containerd 2.3, CRI-O 1.37" in said
        return
    container = cri.run(pod, resources=guaranteed(1))
    # Its stack was there before its first instruction.
    maps = Path(f"/proc/{cri.pid(container)}/numa_maps").read_text(encoding="ascii")
    (stack,) = [line for line in maps.splitlines() if " stack" in line]
    assert f" {SHOWN[mode]} " in stack


def test_without_the_key_the_kernel_has_its_own(cri: CRI, plugin: PluginProcess) -> None:
    container = cri.pod("policy-none", numamem="0")
    maps = Path(f"/proc/{cri.pid(container)}/numa_maps").read_text(encoding="ascii")
    assert {line.split()[1] for line in maps.splitlines()} == {"default"}
