"""The ``assigned`` annotation: a decision in short, written on the container and signed.

Every container that is seen while it is created gets it, also one that nothing asks to pin: the
runtime keeps it for as long as the container lives, so it tells ours from somebody else's when the
checkpoint is lost.

A runtime may be set up to copy annotations of pods to their containers, and other plugins write
annotations too, so the text alone proves nothing. It ends with a signature over the container's id
and the text before it (HMAC-SHA-256, RFC 2104, cut to 128 bits). Nobody else has the key, and the
signature of one container is worth nothing on another.
"""

from __future__ import annotations

import hmac
import json
from typing import Final

from nri_numa.engine.state import Allocation, Kind
from nri_numa.engine.values.workload import SMT

ASSIGNED: Final = "assigned"
"""Annotation key, below the prefix, that carries the decision on the container."""

_SIGNATURE: Final = ',"signature":"'
_DIGITS: Final = 32
"""Hexadecimal digits of a signature: 128 bits, what RFC 2104 calls half of the hash."""
_encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def assigned(allocation: Allocation, cpus: str, key: bytes) -> str:
    """The annotation of one container: a short JSON object, enough to adopt the container again.

    Args:
        allocation: what was decided.
        cpus: kernel list of the CPUs it starts with; empty when it is left alone.
        key: signs it; without one the text is not signed.
    """
    document: dict[str, object] = {
        "cpus": cpus,
        "mems": str(allocation.mems),
        "policy": allocation.policy,
        "kind": allocation.kind,
        "numa": str(allocation.numa_nodes),
        "preferred": allocation.preferred,
        "reason": allocation.reason,
    }
    if allocation.idle:
        document["idle"] = str(allocation.idle)
    if allocation.smt is not SMT.ANY:
        document["smt"] = allocation.smt.value
    if allocation.owned and allocation.kind is Kind.EXPLICIT:
        document["owned"] = True
    if allocation.soft:
        document["soft"] = str(allocation.cpus)  # it may start with fewer of them
    text = _encode(document)
    return signed(text[:-1], allocation.container_id, key) if key else text


def signed(text: str, container_id: str, key: bytes) -> str:
    """Finish a JSON object, given without its closing brace, with the signature of its text."""
    return f'{text}{_SIGNATURE}{signature(key, container_id, text)}"}}'


def is_signed(text: str, container_id: str, key: bytes) -> bool:
    """Whether the annotation on this very container is what the holder of the key wrote."""
    body, found, rest = text.rpartition(_SIGNATURE)
    if not (key and found and len(rest) == _DIGITS + 2 and rest.isascii()):
        return False
    return hmac.compare_digest(rest, signature(key, container_id, body) + '"}')


def signature(key: bytes, container_id: str, text: str) -> str:
    """The signature of a text on this very container: `_DIGITS` hexadecimal digits."""
    # No id holds a zero byte, so no two pairs of id and text give the same message.
    message = f"{container_id}\0{text}".encode(errors="surrogatepass")
    return hmac.digest(key, message, "sha256").hex()[:_DIGITS]
