"""Events by number and name, and who may be a plugin."""

import pytest

from nri_numa.nri.wire import versions
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.versions import Event


def test_events_have_the_protocols_numbers_and_names() -> None:
    for event in Event:
        assert pb.Event.Value(event.name) == event.value
        assert event.method_name in {
            m.name for m in pb.DESCRIPTOR.services_by_name["Plugin"].methods
        }
    assert Event.VALIDATE_CONTAINER_ADJUSTMENT.mask_bit == 0x2000
    # The eleven events of NRI 0.2, which every runtime knows; one bit more and older ones hang up.
    assert 0 < versions.AGENT_EVENTS <= 0x07FF
    assert versions.ALL_EVENTS - versions.AGENT_EVENTS == 0x0800


@pytest.mark.parametrize(
    ("name", "index", "problem"),
    [
        ("nri-numa", "10", None),
        ("a.b+c_D-9", "00", None),
        ("", "10", "is empty"),
        ("naïve", "10", "expected only"),
        ("x\n", "10", "expected only"),
        ("x", "1", "two digits"),
        ("x", "100", "two digits"),
        ("x", "a1", "two digits"),
        ("x", "١٢", "two digits"),
    ],
)
def test_a_name_or_index_of_no_use_is_named(name: str, index: str, problem: str | None) -> None:
    found = versions.identity_problem(name, index)
    assert (found is None) if problem is None else (found is not None and problem in found)
