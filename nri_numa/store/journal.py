r"""Format of a checkpoint: a journal of lines that are checked one by one. Without I/O.

::

    <format> <sequence> <length> <crc32 of all of this line> <JSON>\n

    2 1 93 5b0d2a11 {"head":{"boot":"…","machine":"…","version":"0.1.0"},"at":1763683200.0}
    2 2 61 0f6c33d0 {"set":{"c/3f2a…":{"cpus":"2-3"}}}
    2 3 17 9a01e7bb {"del":["c/3f2a…"]}

A document is one `Allocation` or `PodRecord`, without fields that have their default. Reading is
strict about fields that are present and lenient about missing ones, so older checkpoints load.
Documents of format 1 get the names of format 2. See docs/adr/0006-checkpoint.md.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, Final
from zlib import crc32

import msgspec
from msgspec.structs import replace

from nri_numa.engine.captions import facts_of_caption
from nri_numa.engine.old_records import NEW_FIELDS, NEW_POD_FIELDS, OLD_FORMAT, with_new_names
from nri_numa.engine.state import (
    Allocation,
    Charge,
    ContainerKind,
    NodeState,
    PodRecord,
    PreviousCPUs,
    build_node_state,
    find_allocation_contradiction,
)
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.workload import ChangedStateIds

JOURNAL_FORMAT: Final = 2
_MAX_PROBLEMS_BEFORE_STOPPING: Final = 1000
"""Limit of reported problems: a failing device damages a few lines, and a list of millions would
take more memory than the file."""
MAX_JSON_INTEGER: Final = 1 << 53
"""Largest amount; not every JSON reader has larger integers."""
CONTAINER_KEY_PREFIX: Final = "c/"
POD_KEY_PREFIX: Final = "p/"

Document = dict[str, Any]


class JournalContents(msgspec.Struct, kw_only=True):
    """Intact documents of a journal, and its problems.

    Attributes:
        head: identity of the writer; empty if the first line has none.
        written_at: Unix time of the last compaction.
        format: number of the first line; 0 without one.
        records: number of intact lines.
        raw, entries: document by key, as it was written and as it is read.
        problems: sentences about damage and, if the store loads the journal, what it did about it.
        torn: bytes of an unfinished last line.
        newer: the format, if a newer version wrote it.
    """

    head: dict[str, str] = {}
    written_at: float = 0.0
    format: int = 0
    records: int = 0
    raw: dict[str, msgspec.Raw] = {}
    entries: dict[str, Document] = {}
    problems: list[str] = []
    torn: int = 0
    newer: int = 0


class JournalLine(msgspec.Struct, frozen=True, omit_defaults=True, rename={"delete": "del"}):
    """JSON part of one line: the journal's writer and time, documents to set, keys to delete."""

    head: dict[str, str] | None = None
    written_at: float = msgspec.field(name="at", default=0.0)
    updates: dict[str, msgspec.Raw] = msgspec.field(name="set", default_factory=dict)
    delete: tuple[str, ...] = ()


encode: Final = msgspec.json.Encoder(enc_hook=str).encode
_decode_line: Final = msgspec.json.Decoder(JournalLine).decode
_decode_document: Final = msgspec.json.Decoder(Document).decode
DECODE_ERRORS: Final = (msgspec.MsgspecError, ValueError, RecursionError)
FORMAT_VERSION_PATTERN: Final = re.compile(rb"([0-9]{1,9}) ")
"""Start of the first line, the number of the format; later formats must keep it."""
_FRAME_PATTERN: Final = re.compile(rb"([0-9]{1,9}) ([0-9]{1,18}) ([0-9]{1,9}) ([0-9a-f]{8}) ")


def frame_line(sequence: int, line: JournalLine) -> bytes:
    """Put one record on a line."""
    payload = encode(line)
    front = b"%d %d %d " % (JOURNAL_FORMAT, sequence, len(payload))
    return b"%b%08x %b\n" % (front, crc32(payload, crc32(front)), payload)


def parse_journal(data: bytes) -> JournalContents:
    """Parse a journal; never raises, whatever the bytes.

    An unfinished last line is *torn*: the writer was killed. Any other line that is not intact is
    *damage*; the intact lines after it still count, because each is independent and newer. Nothing
    counts without the first line, and nothing after very much damage. It works line by line, so
    garbage takes no more memory than its bytes.
    """
    contents = JournalContents()
    serial, number, end_offset = 1, 0, -1
    while end_offset < len(data):
        start, number = end_offset + 1, number + 1
        line_end = data.find(b"\n", start)
        is_last_line = line_end < 0
        end_offset = len(data) if is_last_line else line_end
        line = data[start:end_offset]
        if (is_last_line and not line) or (number == 2 and not contents.head):
            break
        if len(contents.problems) >= _MAX_PROBLEMS_BEFORE_STOPPING:
            contents.problems.append(f"everything from line {number} on is not read")
            break
        version = FORMAT_VERSION_PATTERN.match(line) if number == 1 else None
        if version:
            contents.format = int(version[1])
        if contents.format > JOURNAL_FORMAT:
            contents.newer = contents.format
            break
        frame = _check_frame(line)
        if frame is None:
            if is_last_line:
                contents.torn = len(line)
            else:
                contents.problems.append(f"line {number} is damaged")
            continue
        sequence, payload = frame
        try:
            record = _decode_line(payload)
        except DECODE_ERRORS as error:
            contents.problems.append(f"line {number} is intact but not a record: {error}")
            continue
        if sequence != serial and contents.records and not contents.problems:
            contents.problems.append(f"line {number} has number {sequence} instead of {serial}")
        serial = sequence + 1
        contents.records += 1
        if record.head is not None:
            contents.head, contents.written_at = record.head, record.written_at
        contents.raw |= record.updates
        for key in record.delete:
            contents.raw.pop(key, None)
    _decode_raw_documents(contents)
    return contents


def _check_frame(line: bytes) -> tuple[int, bytes] | None:
    """Return number and payload of an intact line."""
    match = _FRAME_PATTERN.match(line)
    if match is None:
        return None
    payload = line[match.end() :]
    if len(payload) != int(match[3]):
        return None
    checksum = crc32(payload, crc32(line[: match.start(4)]))
    return (int(match[2]), payload) if checksum == int(match[4], 16) else None


_NEW_NAMES: Final = {CONTAINER_KEY_PREFIX: NEW_FIELDS, POD_KEY_PREFIX: NEW_POD_FIELDS}


def _decode_raw_documents(contents: JournalContents) -> None:
    for key, raw in contents.raw.items():
        try:
            document = _decode_document(raw)
            new_names = _NEW_NAMES.get(key[:2])
            if contents.format == OLD_FORMAT and new_names is not None:
                document = with_new_names(document, new_names)
                contents.raw[key] = msgspec.Raw(encode(document))
            contents.entries[key] = document
        except DECODE_ERRORS as error:
            contents.problems.append(f"the entry of container {key} is left out: {error}")


# --- Documents of containers and pods ---

_REQUIRED_ALLOCATION_KEYS: Final = frozenset(("kind", "qos", "since", "reason"))
_OMITTED_EMPTY_TYPES: Final = (CPUSet, NUMASet, dict)
"""Types whose empty values are left out too."""
_ALLOCATION_FIELDS: Final = [
    f for f in msgspec.structs.fields(Allocation) if f.name != "container_id"
]
_DEFAULT_BY_KEY: Final = {
    f.encode_name: msgspec.NODEFAULT if f.encode_name in _REQUIRED_ALLOCATION_KEYS else f.default
    for f in _ALLOCATION_FIELDS
}
_KEY_DEFAULTS: Final = tuple(_DEFAULT_BY_KEY.items())
_KEY_BY_FIELD: Final = {f.name: f.encode_name for f in _ALLOCATION_FIELDS}
_allocation_values = attrgetter(*(f.name for f in _ALLOCATION_FIELDS))


def allocation_document(a: Allocation) -> Document:
    """Return the document of one container for `encode`, without fields that have defaults."""
    document = {
        key: value
        for (key, default), value in zip(_KEY_DEFAULTS, _allocation_values(a), strict=True)
        if value is not default and (value or type(value) not in _OMITTED_EMPTY_TYPES)
    }
    if a.load is not None:
        document["load"] = a.load.busy_intervals
    return document


def allocation_from(container_id: str, document: Mapping[str, Any]) -> Allocation:
    """Decode one container.

    Raises:
        ValueError, KeyError, TypeError, msgspec.MsgspecError: the document is damaged.
    """
    fields = {key: document[key] for key in _DEFAULT_BY_KEY if key in document}
    if fields.get("load") is not None:
        fields["load"] = {"busy_intervals": fields["load"]}
    missing = _REQUIRED_ALLOCATION_KEYS - fields.keys()
    if missing:
        raise KeyError(min(missing))
    fields["container_id"] = container_id
    fields = {**_facts_of_old_caption(fields), **fields}
    a = msgspec.convert(fields, Allocation, dec_hook=_decode_kernel_list, str_keys=True)
    for amount in _amounts_to_check(a):
        if not 0 <= amount <= MAX_JSON_INTEGER:
            raise ValueError(f"expected 0 to {MAX_JSON_INTEGER}, not {str(amount)[:40]}")
    if problem := find_allocation_contradiction(a):
        raise ValueError(problem)
    return a


def _facts_of_old_caption(document: Document) -> Document:
    """Return by key the facts that older versions wrote in the caption only."""
    facts = facts_of_caption(document["reason"]) if isinstance(document["reason"], str) else {}
    return {_KEY_BY_FIELD[name]: value for name, value in facts.items()}


def _amounts_to_check(a: Allocation) -> Iterator[int]:
    """Yield all amounts that are summed; sums stay within 64 bits."""
    yield from (a.cpu_milli, a.memory_bytes, *a.hugepages, *a.hugepages.values())
    yield 0 if a.lifted_quota is None else a.lifted_quota + 1
    for charge in a.charges.values():
        yield from (charge.cpu_milli, charge.memory, *charge.hugepages, *charge.hugepages.values())


def _decode_kernel_list(kind: type, value: object) -> object:
    if isinstance(value, str) and kind in (CPUSet, NUMASet):
        return kind.parse(value)
    raise TypeError(f"expected a kernel list, not {value!r}")


_RESERVATION_FIELDS: Final = {
    "pending": "pending_milli",
    "init": "may_be_init",
    "stopped": "stopped_at",
}
"""Field by key; older checkpoints do not have these keys, so no container is pending."""


def pod_document(record: PodRecord) -> Document | None:
    """Return the facts of a pod that its containers do not have; None if there are none."""
    document: Document = {"podID": record.pod_id}
    if record.affinity is not None:
        document["affinity"] = record.affinity
        document["preferred"] = record.affinity_is_preferred
    if record.previous:
        document["previous"] = {n: (f.cpus, f.numa_nodes) for n, f in record.previous.items()}
    if record.sandbox_cgroup:
        document["cgroup"] = record.sandbox_cgroup
    if record.told_sum is not None:
        document["told"], document["total"] = record.told_sum, record.sum_in_force
    if record.grown_container_names:
        document["grown"] = sorted(record.grown_container_names)
    for key, name in _RESERVATION_FIELDS.items():
        if value := getattr(record, name):
            document[key] = value
    # Neither of these is a fact on its own.
    return document if document.keys() - {"podID", "init"} else None


def pod_record_from(uid: str, document: Mapping[str, Any]) -> PodRecord:
    """Decode one pod; damaged documents raise as in `allocation_from`."""
    affinity, cgroup = document.get("affinity"), document.get("cgroup", "")
    for text in (document["podID"], cgroup):
        if not isinstance(text, str):
            raise TypeError(f"expected a text, not {text!r}")
    return PodRecord(
        uid=uid,
        pod_id=document["podID"],
        affinity=None if affinity is None else NUMASet.parse(affinity),
        affinity_is_preferred=bool(document.get("preferred", True)),
        previous={
            name: PreviousCPUs(CPUSet.parse(cpus), NUMASet.parse(numa_nodes))
            for name, (cpus, numa_nodes) in document.get("previous", {}).items()
        },
        sandbox_cgroup=cgroup,
        told_sum=msgspec.convert(document.get("told"), Charge | None),
        sum_in_force=msgspec.convert(document.get("total"), Charge | None),
        grown_container_names=msgspec.convert(document.get("grown", ()), frozenset[str]),
        pending_milli=msgspec.convert(document.get("pending", 0), int),
        may_be_init=msgspec.convert(document.get("init", False), bool),
        stopped_at=msgspec.convert(document.get("stopped", 0.0), float),
    )


def changed_documents(
    previous: NodeState, state: NodeState, change: ChangedStateIds
) -> dict[str, Document | None]:
    """Return by key the documents that one step changed; None for those to delete."""
    documents: dict[str, Document | None] = {}
    for container_id in change.containers:
        allocation = state.allocations.get(container_id)
        if allocation is not previous.allocations.get(container_id):
            documents[CONTAINER_KEY_PREFIX + container_id] = (
                None if allocation is None else allocation_document(allocation)
            )
    for uid in change.pods:
        record, old_record = state.pods.get(uid), previous.pods.get(uid)
        if record is old_record:
            continue
        document = None if record is None else pod_document(record)
        if document != (None if old_record is None else pod_document(old_record)):
            documents[POD_KEY_PREFIX + uid] = document
    return documents


def state_from(documents: Mapping[str, Mapping[str, Any]]) -> tuple[NodeState, list[str]]:
    """Build a state from documents; also return a sentence for each one that was left out."""
    allocations: list[Allocation] = []
    records: list[PodRecord] = []
    problems: list[str] = []
    for key, document in documents.items():
        try:
            if key.startswith(CONTAINER_KEY_PREFIX):
                allocations.append(allocation_from(key[len(CONTAINER_KEY_PREFIX) :], document))
            elif key.startswith(POD_KEY_PREFIX):
                records.append(pod_record_from(key[len(POD_KEY_PREFIX) :], document))
            else:
                problems.append(f"checkpoint entry {key!r} is of no known sort and was left out")
        except (*DECODE_ERRORS, KeyError, TypeError, AttributeError, OverflowError) as error:
            problems.append(f"checkpoint entry {key!r} is damaged and was left out: {error!r}")
    return build_node_state(_with_pod_pools(allocations), records), problems


def _with_pod_pools(allocations: list[Allocation]) -> list[Allocation]:
    """Mark containers in a pod pool, which older checkpoints do not mark.

    A single container with all of its pod's CPUs cannot be distinguished from their holder.
    """
    counts = Counter((a.pod_uid, a.cpus) for a in allocations if a.kind is ContainerKind.EXCLUSIVE)
    return [
        replace(a, uses_pod_resources=True, is_in_pod_pool=True)
        if a.kind is ContainerKind.EXCLUSIVE
        and (counts[a.pod_uid, a.cpus] > 1 or a.cpu_milli > 1000 * len(a.cpus))
        and not a.has_shortfall
        else a
        for a in allocations
    ]
