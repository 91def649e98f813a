"""Containers and pods as the checkpoint keeps them: everything that is known, and nothing else."""

from __future__ import annotations

import pytest

from nri_numa.store.documents import (
    state_from,
)

SHORT = {
    "pod_id": "s",
    "pod_uid": "u",
    "namespace": "shop",
    "pod": "web",
    "container": "app",
    "kind": "unbound",
    "qos": "BestEffort",
    "since": 0.0,
    "reason": "",
}


@pytest.mark.parametrize(
    "damage",
    [
        {"kind": "other"},
        {"pod": 3},
        {"slots": 3},
        {"cpus": "x"},
        {"charges": {"0": [1]}},
        {"since": "x"},
        {"kind": "exclusive"},
        {"memory": 10**30},
        {"memory": -1},
        {"cpu_milli": 10**30},
        {"hugepages": {"2097152": 10**30}},
        {"charges": {"0": [0, 10**30, {}]}},
        {"quota": -(10**30)},
    ],
)
def test_a_damaged_document_costs_itself_and_is_said(damage: dict[str, object]) -> None:
    state, problems = state_from(
        {"c/bad": {**SHORT, **damage}, "c/good": SHORT, "p/u": {"pod_id": "s"}, "x/y": SHORT}
    )
    assert set(state.allocations) == {"good"}
    assert state.pods["u"].containers == {"good"}
    assert problems[0].startswith("checkpoint entry 'c/bad' is damaged and was left out: ")
    assert problems[1:] == ["checkpoint entry 'x/y' is of no known sort and was left out"]
