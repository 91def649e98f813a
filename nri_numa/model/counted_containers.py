"""Containers that the numbers of a node count, as one short text. Pure.

A scheduler counts an assumed pod until its node does. The node states this in the same write as its
numbers: it names each container that they count by a short hash, because there may be hundreds,
and by the pod's UID, because an earlier pod may have had the same name.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final

COUNTED_CONTAINERS_NRT_ATTRIBUTE: Final = "counted-containers"
"""Attribute of a NodeResourceTopology, below the prefix; empty if nothing is counted yet."""
_MARK_BYTES: Final = 8


def counted_container_hash(uid: str, container: str) -> str:
    """Return eleven characters for one container of a pod.

    A collision with a container of another pod would end an assumption early, and tenants choose
    the names of containers: so these are 64 bits of a cryptographic hash.
    """
    text = f"{uid}/{container}".encode(errors="surrogatepass")
    return urlsafe_b64encode(blake2b(text, digest_size=_MARK_BYTES).digest()).decode().rstrip("=")


def encode_counted_container_hashes(containers: Iterable[tuple[str, str]]) -> str:
    """Return one text for containers, each a pod's UID and a name, in any order."""
    return " ".join(sorted({counted_container_hash(*container) for container in containers}))
