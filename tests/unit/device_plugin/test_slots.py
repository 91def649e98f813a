"""Which ids are offered: as many as the agent counts, and never one less that somebody holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nri_numa.device_plugin.slots import PENDING_SLOT_TIMEOUT_S, SlotList
from nri_numa.errors import UnknownSlots
from nri_numa.web.responses import ExclusiveCPUSlotsDocument, NUMANodeExclusiveCPUSlots


def told(free: dict[int, int], *held: str) -> ExclusiveCPUSlotsDocument:
    counts = tuple(NUMANodeExclusiveCPUSlots(id=i, allocated=0, free=n) for i, n in free.items())
    return ExclusiveCPUSlotsDocument(
        serial=1, ready=True, reason="", annotation="a/slots", total=0, exclusive=0,
        numa_nodes=counts, ids=held,
    )  # fmt: skip


def ids(slots: SlotList) -> list[str]:
    return [slot.id for slot in slots.slots]


def healthy(slots: SlotList) -> list[str]:
    return [slot.id for slot in slots.slots if slot.healthy]


def test_what_is_held_or_on_its_way_is_never_taken_away() -> None:
    slots = SlotList()
    slots.apply_counts(told({0: 4}), 0)
    slots.allocate_slots(["slot-3"], 0)
    assert slots.apply_counts(told({0: 1}, "slot-2"), 1)
    assert ids(slots) == ["slot-2", "slot-3"]
    # Nobody came with it: after a while it is one of those that are free, or not.
    slots.apply_counts(told({0: 1}, "slot-2"), PENDING_SLOT_TIMEOUT_S + 1)
    assert ids(slots) == ["slot-0", "slot-2"]
    slots.apply_counts(told({0: 0}, "slot-2"), PENDING_SLOT_TIMEOUT_S + 2)
    assert ids(slots) == ["slot-2"]
    # Its container ended, and the kubelet has given it to the next before the agent was asked.
    slots.allocate_slots(["slot-2"], PENDING_SLOT_TIMEOUT_S + 3)
    slots.apply_counts(told({0: 1}), PENDING_SLOT_TIMEOUT_S + 4)
    assert ids(slots) == ["slot-2"]


def test_without_the_agent_nothing_new_is_healthy() -> None:
    slots = SlotList()
    slots.apply_counts(told({0: 2}, "slot-5"), 0)
    slots.allocate_slots(["slot-0"], 0)
    assert slots.stop_offering(1)
    assert ids(slots) == ["slot-0", "slot-1", "slot-5"]
    assert healthy(slots) == ["slot-0", "slot-5"]
    assert slots.annotation_key == "a/slots"
    assert slots.apply_counts(told({0: 2}, "slot-5"), 2)
    assert healthy(slots) == ids(slots)


def test_numa_nodes_are_announced_where_that_is_asked_for() -> None:
    slots = SlotList(topology=True)
    slots.apply_counts(told({0: 1, 2: 2}, "numa2-slot-1", "slot-9"), 0)
    assert [(slot.id, slot.numa_node) for slot in slots.slots] == [
        ("slot-9", None),
        ("numa0-slot-0", 0),
        ("numa2-slot-0", 2),
        ("numa2-slot-1", 2),
        ("numa2-slot-2", 2),
    ]
    slots.allocate_slots(["numa2-slot-0"], 1)
    assert not slots.apply_counts(told({0: 1, 2: 2}, "numa2-slot-1", "slot-9"), 2)
    plain = SlotList()
    plain.apply_counts(told({0: 1}, "numa2-slot-1"), 0)
    assert [(slot.id, slot.numa_node) for slot in plain.slots] == [
        ("slot-0", None),
        ("numa2-slot-1", None),
    ]


def test_what_the_kubelet_gave_away_before_we_started() -> None:
    slots = SlotList()
    slots.record_allocated({"slot-7"}, 0)
    slots.apply_counts(told({0: 2}), 0)
    assert ids(slots) == ["slot-0", "slot-7"]
    assert slots.allocate_slots(["slot-7"], 1) == "slot-7"


@pytest.mark.parametrize("wrong", [["slot-4"], ["slot-0", "x" * 999], [], [""], ["numa0-slot-0"]])
def test_ids_that_were_never_offered_are_rejected(wrong: list[str]) -> None:
    slots = SlotList()
    slots.apply_counts(told({0: 2}), 0)
    with pytest.raises(UnknownSlots, match="expected ids that were offered: 2 ids such as slot-0"):
        slots.allocate_slots(wrong, 1)
    with pytest.raises(UnknownSlots, match="none"):
        SlotList().allocate_slots(["slot-0"], 0)


def test_an_id_that_was_offered_a_moment_ago_is_known() -> None:
    """The kubelet chose from the list it had."""
    slots = SlotList()
    slots.apply_counts(told({0: 3}), 0)
    slots.apply_counts(told({0: 1}), 1)
    assert slots.allocate_slots(["slot-2", "slot-0"], 1) == "slot-0,slot-2"


def test_preferred_are_low_numbers() -> None:
    slots = SlotList()
    slots.apply_counts(told({0: 12}), 0)
    assert slots.preferred_ids(["slot-10", "slot-9", "slot-2"], [], 2) == ["slot-2", "slot-9"]
    assert slots.preferred_ids(["slot-10", "slot-9"], ["slot-10"], 2) == ["slot-10", "slot-9"]
    assert slots.preferred_ids(["slot-1"], [], 5) == ["slot-1"]
    assert slots.preferred_ids(["elses-99999999999", "slot-1"], [], 1) == ["elses-99999999999"]


@pytest.mark.parametrize(
    ("pack", "must", "size", "nodes"),
    [
        (False, [], 2, [1, 1]),
        (True, [], 2, [0, 0]),
        (True, [], 3, [1, 1, 1]),
        (False, ["numa0-slot-1"], 2, [0, 0]),
        (False, [], 5, [1, 1, 1, 0, 0]),
        (True, [], 4, [1, 1, 1, 0]),
    ],
)
def test_few_numa_nodes_first(pack: bool, must: list[str], size: int, nodes: list[int]) -> None:
    slots = SlotList(topology=True, pack=pack)
    slots.apply_counts(told({0: 2, 1: 3}), 0)
    chosen = slots.preferred_ids(ids(slots), must, size)
    assert [int(id[4]) for id in chosen] == nodes
    assert chosen[: len(must)] == must
    assert len(set(chosen)) == size


steps = st.lists(
    st.tuples(st.sampled_from(["count", "start", "stop", "silent"]), st.integers(0, 5)), max_size=30
)


@given(st.booleans(), steps)
def test_the_number_is_always_right(topology: bool, happened: list[tuple[str, int]]) -> None:
    """Offered is what is held plus what is free; under way is part of one of them."""
    slots, free, held = SlotList(topology=topology), {0: 3, 1: 2}, set[str]()
    slots.apply_counts(told(free), 0)
    taken: set[str] = set()
    for what, n in happened:
        if what == "start" and (left := [i for i in healthy(slots) if i not in taken | held]):
            slots.allocate_slots([left[n % len(left)]], 0)
            taken.add(left[n % len(left)])
        elif what == "count" and taken:
            id = sorted(taken)[n % len(taken)]
            node = int(id[4]) if topology else max(free, key=lambda i: free[i])
            taken.remove(id)
            held.add(id)
            free[node] -= 1
        elif what == "stop" and held:
            id = sorted(held)[n % len(held)]
            held.remove(id)
            free[int(id[4]) if topology else 0] += 1
        if what == "silent":
            slots.stop_offering(0)
        else:
            slots.apply_counts(told(free, *held), 0)
        assert taken | held <= set(healthy(slots))
        assert len(ids(slots)) == len(set(ids(slots))) == len(held) + sum(free.values())
