"""A claim object is read as hostile input: what is not as expected is said, nothing guessed."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nri_numa.dra.claims import (
    InvalidClaim,
    claim_variable_name,
    decode_record,
    encode_record,
    parse_claim,
    parse_claim_variable_names,
    prune_claim,
)
from tests.beds.resource_claims import DRIVER, UID, claim, config, result


def read(document: object) -> Any:
    return parse_claim(document, driver=DRIVER, pool="n1")


def test_what_a_claim_says() -> None:
    found = read(prune_claim(claim(result(request="cpus/small"), result(driver="gpu.example.com"))))
    assert (found.full_name, found.uid, found.pods) == ("shop/four", UID, frozenset({"pod-1"}))
    (one,) = found.results
    assert (one.request, one.numa_node, one.cpus, one.share_id) == ("cpus", 1, 4, "s-1")
    assert one.capacity == {"cpu": 4, "memory": 1 << 30}


def test_what_the_claim_says_beats_its_class() -> None:
    configs = [
        config({"smt": "isolate"}, "FromClaim", "cpus"),
        config({"smt": "spread", "load": "low"}, "FromClass"),
        config({"smt": "pair"}, "FromClaim", "others"),
        config({"bind": "cpu"}, "FromClaim", "others", "cpus/small"),
        config({"bind": "none"}, "FromClaim", "cpus/large"),
        {"source": "FromClaim", "opaque": {"driver": "gpu.example.com", "parameters": {"x": 1}}},
        {"source": "FromClaim"},
    ]
    (one,) = read(claim(result(request="cpus/small"), configs=configs)).results
    assert one.parameters == {"smt": "isolate", "load": "low", "bind": "cpu"}


WRONG: list[tuple[Any, str]] = [
    (None, "the document is 'None', expected a mapping"),
    ({"metadata": [], "status": {}}, "metadata is '[]'"),
    ({"metadata": {"uid": "../../x", "namespace": "a", "name": "b"}, "status": {}}, "UID"),
    ({"metadata": {"uid": UID, "namespace": "", "name": "b"}, "status": {}}, "metadata.namespace"),
    ({**claim(), "status": {"allocation": None}}, "claim shop/four is not allocated"),
    (claim(result(driver="gpu.example.com")), f"has no device of driver {DRIVER}"),
    (
        claim(result(pool="n2")),
        "is of pool 'n2', expected 'n1': it is allocated on another node, or agent and",
    ),
    (claim(result(device="gpu0")), "device 'gpu0', expected that of a NUMA node"),
    (claim(result(adminAccess=True)), "adminAccess is set"),
    (claim(result(consumedCapacity=None)), "consumes 0 of dra.example.com/cpu"),
    (claim(result(consumedCapacity={f"{DRIVER}/cpu": "9k"})), "consumes 9000"),
    (claim(result(consumedCapacity={f"{DRIVER}/cpu": "500m"})), "cpu is '500m', expected a whole"),
    (claim(result(consumedCapacity={f"{DRIVER}/cpu": "-1"})), "cpu is '-1', expected 0 or more"),
    (claim(result(consumedCapacity={f"{DRIVER}/cpu": "four"})), "cpu is 'four', expected"),
    (claim(result(consumedCapacity=[])), "consumes 0"),
    (claim(result(request=None)), "request is 'None', expected a text"),
    (claim(configs=[config({"polcy": "x"})]), "parameter 'polcy' is unknown, expected one of"),
    (
        claim(configs=[config({"numacpu": "0-3"})]),
        "parameter 'numacpu' is not for claims, because the scheduler counted CPUs, and the agent "
        "chooses which; expected one of bind, devices, load, mempolicy, numamem, policy, smt",
    ),
    (claim(configs=[config({"scope": "pod"})]), "each request of a claim is for one container"),
    (claim(configs=[config({"smt": True})]), "parameter smt is 'True', expected a text"),
    (claim(configs=[config("smt")]), "parameters is 'smt', expected a mapping"),
    (claim(configs=["x"]), "config is 'x', expected a mapping"),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("document", "words"), WRONG, ids=[words for _, words in WRONG])
def test_what_is_wrong_is_said(document: Any, words: str) -> None:
    with pytest.raises(InvalidClaim) as caught:
        read(document)
    assert words in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
PLACES = (
    ("metadata", "uid"),
    ("status", "reservedFor"),
    ("status", "allocation"),
    ("status", "allocation", "devices"),
    ("status", "allocation", "devices", "results"),
    ("status", "allocation", "devices", "config"),
    ("status", "allocation", "devices", "results", 0),
    ("status", "allocation", "devices", "results", 0, "consumedCapacity"),
    ("status", "allocation", "devices", "results", 0, "shareID"),
    ("status", "allocation", "devices", "config", 0),
    ("status", "allocation", "devices", "config", 0, "opaque"),
    ("status", "allocation", "devices", "config", 0, "requests"),
    ("status", "allocation", "devices", "config", 0, "opaque", "parameters"),
)


@given(st.sampled_from(PLACES), JSON)
def test_whatever_is_there_it_is_read_or_rejected(place: tuple[Any, ...], value: object) -> None:
    document = copy.deepcopy(claim(configs=[config({"smt": "any"})]))
    at: Any = document
    for step in place[:-1]:
        at = at[step]
    at[place[-1]] = value
    try:
        found = read(document)
    except InvalidClaim:
        return
    assert decode_record(encode_record(found)) == found


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version":2}', "[" * 100_000, '{"version":1}'])
def test_records_of_others_are_rejected(text: str) -> None:
    with pytest.raises(InvalidClaim):
        decode_record(text)


@pytest.mark.parametrize(
    "item",
    [
        "NRI_NUMA_CLAIM_",
        "NRI_NUMA_CLAIM_0_X=1",
        f"NRI_NUMA_CLAIM_999_{UID.upper().replace('-', '_')}=1",
        f"X{claim_variable_name(UID, 0)}=1",
    ],
)
def test_other_variables_name_nothing(item: str) -> None:
    assert parse_claim_variable_names([item]) == []


def test_no_more_results_are_looked_for_than_a_claim_can_have() -> None:
    names = [claim_variable_name(UID, number) for number in range(99)]
    assert len(parse_claim_variable_names(names)) == 32
