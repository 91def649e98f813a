"""Made-up machines have the shape that was asked for."""

from typing import Any

import pytest

from nri_numa.machine.synthetic import build_synthetic_topology
from tests.machines import named as machines


def test_chiplets_share_caches_in_groups_of_cores() -> None:
    machine = machines.chiplets()
    assert len(machine.l3_groups) == 8
    assert str(machine.l3_groups[4].cpus) == "4-7,36-39"
    assert machines.no_caches().l3_groups == {}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sockets": 0}, "at least 1"),
        ({"threads": 0}, "at least 1"),
        ({"cores_per_numa": -1}, "at least 1"),
        ({"sockets": 2, "numa_per_socket": 2, "sockets_per_numa": 2}, "cannot be joined"),
        ({"sockets": 3, "numa_per_socket": 1, "sockets_per_numa": 2}, "cannot be joined"),
        ({"numa_ids": (0, 1)}, "must be 4 different numbers"),
        ({"numa_ids": (0, 1, 2, 2)}, "must be 4 different numbers"),
        ({"distances": [[10]]}, "4 rows of 4 numbers"),
        ({"numbering": "random"}, "random"),
    ],
)
def test_contradicting_numbers_are_rejected(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_synthetic_topology(**wrong)
