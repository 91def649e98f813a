"""The short text that names the containers which a node's numbers count."""

from nri_numa.model.counted_containers import (
    counted_container_hash,
    encode_counted_container_hashes,
)


def test_a_container_has_one_mark_on_every_machine() -> None:
    """Publisher and scheduler are two processes, perhaps of two versions."""
    assert counted_container_hash("3f0f7c1e-2a55-4f7b-9d3a-6d0f5f1f0c11", "main") == "JylKd6DUriM"


def test_pods_of_one_name_and_containers_of_one_pod_differ() -> None:
    found = {
        counted_container_hash(uid, name)
        for uid in ("a", "b", "ab")
        for name in ("main", "b", "helper", "é\ud800")
    }
    assert len(found) == 12
    assert {len(one) for one in found} == {11}


def test_the_same_containers_make_the_same_text() -> None:
    both = [("a", "main"), ("b", "main")]
    assert encode_counted_container_hashes(both) == encode_counted_container_hashes(
        [*reversed(both), *both]
    )
    assert encode_counted_container_hashes(both).split() == sorted(
        counted_container_hash(*one) for one in both
    )
    assert encode_counted_container_hashes([]) == ""
