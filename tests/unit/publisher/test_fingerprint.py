"""The fingerprint of pods is the one that the scheduler works out; the numbers are upstream's."""

from itertools import permutations

import pytest

from nri_numa.publisher.topology import pods_fingerprint, xxh64


@pytest.mark.parametrize(
    ("pods", "text"),
    [
        ([], "pfp0v001ef46db3751d8e999"),
        ([("default", "a")], "pfp0v00173ac1f6debaedf3d"),
        ([("ns-1", "pod-1"), ("ns-2", "pod-2"), ("ns-2", "pod-3")], "pfp0v0013b68d754c0817837"),
    ],
)
def test_the_vectors_in_any_order(pods: list[tuple[str, str]], text: str) -> None:
    for order in permutations(pods):
        assert pods_fingerprint(order) == text


@pytest.mark.parametrize(
    ("data", "seed", "hashed"),
    [
        (b"", 0, 0xEF46DB3751D8E999),
        (b"a", 0, 0xD24EC4F1A98C6E5B),
        (b"xxhash", 20141025, 0xB559B98D844E0635),
        (b"Nobody inspects the spammish repetition", 0, 0xFBCEA83C8A378BF1),
        (b"Call me Ishmael. Some years ago--never mind how long precisely-", 0, 0x2A2E85470D6FD96),
    ],
)
def test_the_hash_is_xxhash(data: bytes, seed: int, hashed: int) -> None:
    assert xxh64(data, seed) == hashed


def test_every_length_is_another_number() -> None:
    """Names of pods have up to 253 characters."""
    assert len({xxh64(b"x" * n, 1) for n in range(254)}) == 254
