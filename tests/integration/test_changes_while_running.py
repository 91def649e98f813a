"""The machine changes under a running plugin: the next container sees it, without a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from nri_numa.machine.synthetic import synthetic
from tests.beds.embedded_node import CRIError, Node, until


def test_case_16_memory_that_was_added_counts_after_a_refusal(tmp_path: Path) -> None:
    """The first is refused; what it missed is looked for at once, and the next one gets it."""
    small = synthetic(sockets=1, numa_per_socket=1, cores_per_numa=8, memory_gib=0.125)
    with Node(tmp_path, topology=small) as node:
        node.start()
        wish = {"policy": "single-numa-node"}
        with pytest.raises(CRIError, match=r"256 MiB memory"):
            node.run("first", wish, cpus=0.5)
        node.write_machine(synthetic(sockets=1, numa_per_socket=1, cores_per_numa=8, memory_gib=8))
        tries = iter(range(10_000))

        def placed() -> bool:
            try:
                node.run(f"next-{next(tries)}", wish, cpus=0.5)
            except CRIError:
                return False
            return True

        until(placed, "the memory is seen")
        node.logged("machine changed")
