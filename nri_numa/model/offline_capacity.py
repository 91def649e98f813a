"""Capacity factors from outside the node: their documents, read as hostile input. Pure.

Two annotations of the Node set the usable part of a NUMA node's CPUs. The controller writes
``offline-capacity``, a JSON object::

    {"zones": {"0": 0.5}, "until": "2026-11-22T15:00:00Z", "source": "put"}

and operators write ``drained``, a list of NUMA nodes such as ``0-1``. Each has a key of its own, so
neither overwrites the other. ``nri-numa publish`` passes both texts to the agent in one file, and
every reader of them parses them here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

import msgspec

from nri_numa.model.cpuset import CPUSet

OFFLINE_CAPACITY_ANNOTATION: Final = "offline-capacity"
DRAINED_ANNOTATION: Final = "drained"
NODE_EXISTING_NUMA_IDS_ANNOTATION: Final = "numa-ids"
"""Keys of annotations on the Node, below the prefix. The last one lists the NUMA nodes, and states
that this node honours the other two."""

MAX_CAPACITY_DOCUMENT_BYTES: Final = 65536
"""Maximum size of one document in bytes; 1,024 NUMA nodes take less than half."""
NUMA_NODE_ID_LIMIT: Final = 1024
"""Exclusive upper bound of NUMA node ids, as in the kernel's largest builds."""
CPU_ID_LIMIT: Final = 65536
"""Exclusive upper bound of CPU ids."""
MAX_CAPACITY_VALIDITY_S: Final = 7 * 86400.0
"""Maximum seconds from now to ``until``: a wrong date must not stay in force without limit."""

_ZONE_NAME_PATTERN: Final = re.compile(r"(?:node-)?(0|[1-9][0-9]{0,3})", re.ASCII)
_SOURCE_NAME_PATTERN: Final = re.compile(r"[a-z0-9,-]{0,64}", re.ASCII)
_ID_RANGE_PATTERN: Final = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", re.ASCII)
_UTC_TIMESTAMP_PATTERN: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)
_UTC_TIMESTAMP_FORMAT: Final = "%Y-%m-%dT%H:%M:%SZ"


class BadCapacity(ValueError):
    """An invalid document; the text names the thing, the value and what was expected."""


class OfflineCapacity(msgspec.Struct, frozen=True):
    """Capacity of a node as the controller reports it.

    Attributes:
        zones: usable part of the CPUs by NUMA node, 0 to 1.
        expires_at: Unix time in seconds until which it is valid.
        source: name of the source that measured it.
    """

    zones: Mapping[int, float] = msgspec.field(default_factory=dict)
    expires_at: float = 0.0
    source: str = ""


def parse_zone_id(name: object) -> int:
    """Parse the id of a NUMA node, ``1`` or ``node-1``.

    Raises:
        BadCapacity: the name is neither.
    """
    is_readable = isinstance(name, int | str) and not isinstance(name, bool)
    match = _ZONE_NAME_PATTERN.fullmatch(str(name)) if is_readable else None
    if match is None or int(match[1]) >= NUMA_NODE_ID_LIMIT:
        raise BadCapacity(
            f"{_value_text(name)} names no NUMA node, expected 0 to {NUMA_NODE_ID_LIMIT - 1}, or "
            "node-0 and so on"
        )
    return int(match[1])


def parse_capacity_factor(value: object) -> float:
    """Parse a capacity factor.

    Raises:
        BadCapacity: the value is no number from 0 to 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadCapacity(f"{_value_text(value)} is no number, expected a number from 0 to 1")
    if not 0 <= value <= 1:  # NaN is neither
        raise BadCapacity(f"{_value_text(value)}, expected a number from 0 to 1")
    return float(value)


def parse_zone_factors(value: object) -> dict[int, float]:
    """Parse factors by NUMA node.

    Raises:
        BadCapacity: with the first mistake.
    """
    if not isinstance(value, Mapping):
        raise BadCapacity(
            f"zones: {_value_text(value)}, expected a mapping of NUMA nodes to factors"
        )
    if len(value) > NUMA_NODE_ID_LIMIT:
        raise BadCapacity(f"zones: has {len(value)} entries, expected {NUMA_NODE_ID_LIMIT} at most")
    factors: dict[int, float] = {}
    for name, factor in value.items():
        try:
            i = parse_zone_id(name)
            if i in factors:
                raise BadCapacity(f"NUMA node {i} stands there twice")
            factors[i] = parse_capacity_factor(factor)
        except BadCapacity as error:
            raise BadCapacity(f"zones.{_value_text(name)}: {error}") from None
    return factors


def parse_offline_capacity(text: str) -> OfflineCapacity:
    """Parse the annotation ``offline-capacity``; an empty text sets nothing.

    Raises:
        BadCapacity: the text is invalid.
    """
    if not text:
        return OfflineCapacity()
    document = parse_json_object(text)
    if unknown := sorted(document.keys() - {"zones", "until", "source"}):
        raise BadCapacity(
            f"unknown key {_value_text(unknown[0])}, expected zones, until and source"
        )
    source = document.get("source", "")
    if not isinstance(source, str) or not _SOURCE_NAME_PATTERN.fullmatch(source):
        raise BadCapacity(f"source: {_value_text(source)}, expected a short word")
    return OfflineCapacity(
        parse_zone_factors(document.get("zones")), _parse_expiry(document.get("until")), source
    )


def encode_offline_capacity(capacity: OfflineCapacity) -> str:
    """Return the text of the annotation; the same for the same content."""
    expiry = datetime.fromtimestamp(int(capacity.expires_at), UTC)
    document = {
        "zones": {str(i): capacity.zones[i] for i in sorted(capacity.zones)},
        "until": expiry.strftime(_UTC_TIMESTAMP_FORMAT),
        "source": capacity.source,
    }
    return json.dumps(document, separators=(",", ":"))


def parse_id_list(text: str, limit: int = NUMA_NODE_ID_LIMIT) -> frozenset[int]:
    """Parse a list of NUMA nodes such as ``0-1,4``; an empty text is an empty list.

    Lists of CPUs have the same form and another limit.

    Raises:
        BadCapacity: the text is no such list, or an id is not below ``limit``.
    """
    ids: set[int] = set()
    if len(text) > MAX_CAPACITY_DOCUMENT_BYTES:
        raise BadCapacity(f"has {len(text)} bytes, expected {MAX_CAPACITY_DOCUMENT_BYTES} at most")
    for part in text.split(",") if text.strip() else ():
        match = _ID_RANGE_PATTERN.fullmatch(part.strip())
        low_id, high_id = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if low_id > high_id or high_id >= limit:
            raise BadCapacity(
                f"{_value_text(part)}, expected ids as a list such as 0-1,4, below {limit}"
            )
        ids.update(range(low_id, high_id + 1))
    return frozenset(ids)


def parse_ids_or_empty(text: object, limit: int = NUMA_NODE_ID_LIMIT) -> frozenset[int]:
    """Parse a list as `parse_id_list` does; an invalid one gives no ids."""
    try:
        return parse_id_list(text, limit) if isinstance(text, str) else frozenset()
    except BadCapacity:
        return frozenset()


def format_id_list(ids: frozenset[int] | set[int]) -> str:
    """Return the shortest list of these ids, as `parse_id_list` reads it."""
    return str(CPUSet.from_bits(sum(1 << i for i in ids)))


def parse_json_object(text: str) -> dict[str, object]:
    """Parse a JSON object of another program.

    Raises:
        BadCapacity: the text is too long, no JSON, or no object.
    """
    if len(text) > MAX_CAPACITY_DOCUMENT_BYTES:
        raise BadCapacity(
            f"has {len(text)} characters, expected {MAX_CAPACITY_DOCUMENT_BYTES} at most"
        )
    try:
        document = json.loads(text, parse_constant=_reject_json_constant)
    except BadCapacity:
        raise
    except (ValueError, RecursionError) as error:
        raise BadCapacity(f"is no JSON: {str(error)[:100]}") from None
    if not isinstance(document, dict):
        raise BadCapacity(f"{_value_text(document)}, expected a JSON object")
    return document


def _reject_json_constant(name: str) -> float:
    raise BadCapacity(f"{name}, expected a number from 0 to 1")


def _parse_expiry(value: object) -> float:
    if not isinstance(value, str) or not _UTC_TIMESTAMP_PATTERN.fullmatch(value):
        raise BadCapacity(
            f"until: {_value_text(value)}, expected a time such as 2026-11-22T15:00:00Z"
        )
    try:
        return datetime.strptime(value, _UTC_TIMESTAMP_FORMAT).replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise BadCapacity(f"until: {_value_text(value)} is no day of the calendar") from None


def _value_text(value: object) -> str:
    """Return another program's value for a sentence: short, one line, safe for a terminal."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return ascii(value)[:60]
