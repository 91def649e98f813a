"""Which containers the numbers of a node count, as one short text. Pure.

A scheduler that holds room for a pod counts it until its node does. From which moment that is, the
node says in the same write as its numbers: it names each container that they count, by a short
hash, because there may be hundreds, and by the pod's UID, because a name may be that of an earlier
pod.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final

COUNTED_CONTAINERS_NRT_ATTRIBUTE: Final = "charged"
"""Attribute of a NodeResourceTopology, below the prefix; empty where nothing is counted yet."""
_MARK_BYTES: Final = 8


def counted_container_hash(uid: str, container: str) -> str:
    """Eleven characters for one container of a pod.

    A container of another pod that had the same ones would end a hold early, and tenants choose
    names of containers: so it is a cryptographic hash, and 64 bits of it.
    """
    text = f"{uid}/{container}".encode(errors="surrogatepass")
    return urlsafe_b64encode(blake2b(text, digest_size=_MARK_BYTES).digest()).decode().rstrip("=")


def encode_counted_container_hashes(containers: Iterable[tuple[str, str]]) -> str:
    """One text for containers, each by UID of its pod and name, in any order."""
    return " ".join(
        sorted({counted_container_hash(uid, container) for uid, container in containers})
    )
