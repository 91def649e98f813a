"""Capacity factors from outside the node: their documents, read as hostile input. Pure.

Two annotations of the Node say how much of a NUMA node's CPUs is there. The controller writes
``offline-capacity``, a JSON object::

    {"zones": {"0": 0.5}, "until": "2026-11-22T15:00:00Z", "source": "put"}

and operators write ``drained``, a list of NUMA nodes such as ``0-1``. They have a key each, so that
neither overwrites the other. ``nri-numa publish`` hands both texts to the agent in one file, and
all that read any of it read it here.
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

OFFLINE_CAPACITY_KEY: Final = "offline-capacity"
DRAINED_ANNOTATION: Final = "drained"
NODE_EXISTING_NUMA_IDS_ANNOTATION: Final = "numa-ids"
"""Keys of annotations on the Node, below the prefix. The last one says which NUMA nodes there are,
and that this node honours the other two."""

MAX_CAPACITY_DOCUMENT_BYTES: Final = 65536
"""Bytes of one document; 1,024 NUMA nodes take less than half."""
NUMA_NODE_ID_LIMIT: Final = 1024
"""NUMA node ids are below it, as in the kernel's largest builds."""
CPU_ID_LIMIT: Final = 65536
"""CPU ids are below it."""
MAX_CAPACITY_VALIDITY_S: Final = 7 * 86400.0
"""Seconds from now to ``until`` at most: a mistake in a date must not last for ever."""

_ZONE_NAME_PATTERN: Final = re.compile(r"(?:node-)?(0|[1-9][0-9]{0,3})", re.ASCII)
_SOURCE_NAME_PATTERN: Final = re.compile(r"[a-z0-9,-]{0,64}", re.ASCII)
_ID_RANGE_PATTERN: Final = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", re.ASCII)
_UTC_TIMESTAMP_PATTERN: Final = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z", re.ASCII
)


class BadCapacity(ValueError):
    """A document is not as expected; the text names the thing, the value and what was expected."""


class OfflineCapacity(msgspec.Struct, frozen=True):
    """What the controller says of a node.

    Attributes:
        zones: by NUMA node, the part of its CPUs that is there, 0 to 1.
        expires_at: Unix time in seconds when it ends to be true.
        source: who measured it.
    """

    zones: Mapping[int, float] = msgspec.field(default_factory=dict)
    expires_at: float = 0.0
    source: str = ""


def parse_zone_id(name: object) -> int:
    """The id of a NUMA node that is named ``1`` or ``node-1``.

    Raises:
        BadCapacity: it is no such name.
    """
    if isinstance(name, int) and not isinstance(name, bool) and 0 <= name < NUMA_NODE_ID_LIMIT:
        return name
    found = (
        _ZONE_NAME_PATTERN.fullmatch(name) if isinstance(name, str) and len(name) <= 16 else None
    )
    if found is None or int(found[1]) >= NUMA_NODE_ID_LIMIT:
        raise BadCapacity(
            f"{_value_text(name)} names no NUMA node, expected 0 to {NUMA_NODE_ID_LIMIT - 1}, or "
            "node-0 and so on"
        )
    return int(found[1])


def parse_capacity_factor(value: object) -> float:
    """A capacity factor.

    Raises:
        BadCapacity: it is no number from 0 to 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadCapacity(f"{_value_text(value)} is no number, expected a number from 0 to 1")
    if not 0 <= value <= 1:  # NaN is neither
        raise BadCapacity(f"{_value_text(value)}, expected a number from 0 to 1")
    return float(value)


def parse_zone_factors(value: object) -> dict[int, float]:
    """Factors by NUMA node.

    Raises:
        BadCapacity: with the first mistake.
    """
    if not isinstance(value, Mapping):
        raise BadCapacity(
            f"zones: {_value_text(value)}, expected a mapping of NUMA nodes to factors"
        )
    if len(value) > NUMA_NODE_ID_LIMIT:
        raise BadCapacity(f"zones: has {len(value)} entries, expected {NUMA_NODE_ID_LIMIT} at most")
    found: dict[int, float] = {}
    for name, one in value.items():
        try:
            i = parse_zone_id(name)
            if i in found:
                raise BadCapacity(f"NUMA node {i} stands there twice")
            found[i] = parse_capacity_factor(one)
        except BadCapacity as error:
            raise BadCapacity(f"zones.{_value_text(name)}: {error}") from None
    return found


def parse_offline_capacity(text: str) -> OfflineCapacity:
    """Read the text of the annotation ``offline-capacity``; an empty one says nothing.

    Raises:
        BadCapacity: it is not as expected.
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
    """The text of the annotation; the same for the same content."""
    return json.dumps(
        {
            "zones": {str(i): capacity.zones[i] for i in sorted(capacity.zones)},
            "until": datetime.fromtimestamp(int(capacity.expires_at), UTC).strftime(
                "%Y-%m-%dT%H:%M:%SZ"
            ),
            "source": capacity.source,
        },
        separators=(",", ":"),
    )


def parse_id_list(text: str, limit: int = NUMA_NODE_ID_LIMIT) -> frozenset[int]:
    """Read a list of NUMA nodes such as ``0-1,4``; an empty one names none.

    Lists of CPUs have the same form and another limit.

    Raises:
        BadCapacity: it is no such list, or an id is not below ``limit``.
    """
    found: set[int] = set()
    if len(text) > MAX_CAPACITY_DOCUMENT_BYTES:
        raise BadCapacity(f"has {len(text)} bytes, expected {MAX_CAPACITY_DOCUMENT_BYTES} at most")
    for part in text.split(",") if text.strip() else ():
        match = _ID_RANGE_PATTERN.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last >= limit:
            raise BadCapacity(
                f"{_value_text(part)}, expected ids as a list such as 0-1,4, below {limit}"
            )
        found.update(range(first, last + 1))
    return frozenset(found)


def parse_ids_or_empty(text: object, limit: int = NUMA_NODE_ID_LIMIT) -> frozenset[int]:
    """Read a list as `parse_id_list` does; one that cannot be read names none."""
    try:
        return parse_id_list(text, limit) if isinstance(text, str) else frozenset()
    except BadCapacity:
        return frozenset()


def format_id_list(ids: frozenset[int] | set[int]) -> str:
    """The shortest list of these NUMA nodes, as `parse_id_list` reads it."""
    return str(CPUSet.from_bits(sum(1 << i for i in ids)))


def parse_json_object(text: str) -> dict[str, object]:
    """Read a JSON object of another program.

    Raises:
        BadCapacity: it is none, too long, or not to be read.
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
        moment = datetime.strptime(value, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        raise BadCapacity(f"until: {_value_text(value)} is no day of the calendar") from None
    return moment.timestamp()


def _value_text(value: object) -> str:
    """A value of another program in a sentence: short, one line, and nothing a terminal obeys."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return ascii(value)[:60]
