"""Which pods a NodeResourceTopology counts, as one short text. Pure.

The scheduler's plugin NodeResourceTopologyMatch drops what it has set aside for pods of a node when
the text in the object is the one that it works out of the pods it knows there. The rule is that of
k8stopologyawareschedwg/podfingerprint v0.2: of each pod xxh64(name, seed xxh64(namespace)), the
numbers in ascending order, and xxh64 of their bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

NAME: Final = "nodeTopologyPodsFingerprint"
METHOD: Final = "nodeTopologyPodsFingerprintMethod"
EXCLUSIVE: Final = "with-exclusive-resources"
"""The method that counts Guaranteed pods only, whose requests are taken from one NUMA node."""
_VERSION: Final = "pfp0v001"


def fingerprint(pods: Iterable[tuple[str, str]]) -> str:
    """The text for pods, each by namespace and name, in any order."""
    hashes = sorted(xxh64(name.encode(), xxh64(namespace.encode(), 0)) for namespace, name in pods)
    return f"{_VERSION}{xxh64(b''.join(one.to_bytes(8, 'little') for one in hashes), 0):016x}"


# --- xxHash, 64 bits: github.com/Cyan4973/xxHash, doc/xxhash_spec.md -----------------------------

_MASK: Final = (1 << 64) - 1
_P1: Final = 0x9E3779B185EBCA87
_P2: Final = 0xC2B2AE3D27D4EB4F
_P3: Final = 0x165667B19E3779F9
_P4: Final = 0x85EBCA77C2B2AE63
_P5: Final = 0x27D4EB2F165667C5


def xxh64(data: bytes, seed: int) -> int:
    """The hash of 64 bits, as xxHash works it out."""
    at = 0
    if len(data) >= 32:
        lanes = [seed + _P1 + _P2, seed + _P2, seed, seed - _P1]
        for at in range(0, len(data) - 31, 32):
            lanes = [_round(lane, _word(data, at + 8 * n)) for n, lane in enumerate(lanes)]
        at += 32
        found = sum(_rotate(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True))
        for lane in lanes:
            found = ((found ^ _round(0, lane)) * _P1 + _P4) & _MASK
    else:
        found = seed + _P5
    found += len(data)
    while at + 8 <= len(data):
        found = _rotate(found ^ _round(0, _word(data, at)), 27) * _P1 + _P4
        at += 8
    if at + 4 <= len(data):
        found = _rotate(found ^ (_word(data, at, 4) * _P1), 23) * _P2 + _P3
        at += 4
    for byte in data[at:]:
        found = _rotate(found ^ (byte * _P5), 11) * _P1
    found &= _MASK
    found = ((found ^ (found >> 33)) * _P2) & _MASK
    found = ((found ^ (found >> 29)) * _P3) & _MASK
    return found ^ (found >> 32)


def _word(data: bytes, at: int, size: int = 8) -> int:
    return int.from_bytes(data[at : at + size], "little")


def _rotate(number: int, by: int) -> int:
    number &= _MASK
    return (number << by | number >> (64 - by)) & _MASK


def _round(lane: int, word: int) -> int:
    return _rotate(lane + word * _P2, 31) * _P1 & _MASK
