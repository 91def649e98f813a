"""The kubelet's ``cpu_manager_state`` and ``memory_manager_state``, read when they changed.

The kubelet writes a pod's grants before it creates the pod's first container. So a decision about a
container looks at the files first, at the cost of two ``stat`` calls; what was read is good until a
file is replaced.

Source: kubernetes ``pkg/kubelet/cm/cpumanager/state`` and ``…/memorymanager/state``. There is no
version field; the shape tells (v1 before 1.18, v2 to 1.35, v3 in 1.36, v4 in 1.37). Checksums are
not verified: the kubelet replaces the files by rename, and nothing else writes them.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeVar

import msgspec

from nri_numa.model.cpuset import CPUSet, ListFormatError, NUMASet
from nri_numa.model.machine import cpus_text, numa_text
from nri_numa.model.workload import NO_GRANTS, SHARED_SETS, Holder, KubeletGrants
from nri_numa.text import BadQuantity, page_size

# --- A file of the kubelet, read whole; nothing else in its place holds us up ---------------------


MAX_BYTES: Final = 1 << 20
"""Sixty bytes a container and a hundred and fifty a block of memory: ten thousand containers. A
configuration has some thousand."""

Signature = tuple[int, int, int, int]


def signature(found: os.stat_result) -> Signature:
    """What tells a file from another one of its name, and from itself when it was written."""
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def read(path: str) -> tuple[bytes, Signature]:
    """The whole file, and what tells it from another one.

    Raises:
        OSError: it cannot be read, is no regular file, or is longer than `MAX_BYTES`.
    """
    # A pipe or a device in its place must not make anybody wait.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("is no regular file")
        if found.st_size > MAX_BYTES:
            raise OSError(f"has {found.st_size} bytes, expected at most {MAX_BYTES}")
        return file.read(MAX_BYTES), signature(found)


# --- the files, as they are now -------------------------------------------------------------------

NAMES: Final = {"cpu": "cpu_manager_state", "memory": "memory_manager_state"}
"""By manager, its state file."""

STATIC: Final = {"cpu": "static", "memory": "Static"}
"""By manager, the policy under which it sets cpusets."""

_KNOWN: Final = {"cpu": ("none", "static"), "memory": ("None", "Static", "BestEffort")}


_Key = TypeVar("_Key")
_Ids = TypeVar("_Ids", CPUSet, NUMASet)


class StateFiles:
    """What the kubelet granted, as the files in its root directory say now.

    A file that is not there grants nothing: an operator who changes a policy removes it. One that
    cannot be read or understood changes nothing: what it said before still holds.

    Attributes:
        grants: as last read; another object when something changed.
        problems: sentences about what is wrong with the files, by file or subject.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.grants: KubeletGrants = NO_GRANTS
        self.problems: tuple[str, ...] = ()
        self._seen: dict[str, Signature | None] = {}
        self._cpu: CPUState | None = None
        self._memory: MemoryState | None = None
        self._machine: tuple[CPUSet, NUMASet] | None = None
        self._unread: dict[str, str] = {}

    def path(self, manager: str) -> str:
        """Of the state file of the ``cpu`` or ``memory`` manager."""
        return os.path.join(self.directory, NAMES[manager])

    def refresh(self, cpus: CPUSet, numa_nodes: NUMASet) -> bool:
        """Read what changed since the last look; whether anything did: `grants`, or `problems`.

        Only CPUs and NUMA nodes that the machine can have are granted.
        """
        changed = self._machine != (cpus, numa_nodes)
        for manager in NAMES:
            changed |= self._refresh_one(manager)
        if not changed:
            return False
        self._machine = cpus, numa_nodes
        before = self.grants, self.problems
        made, odd = grants(self._cpu, self._memory, cpus, numa_nodes, self.grants)
        if made != self.grants:
            self.grants = made
        self.problems = (*self._unread.values(), *odd)
        return before != (self.grants, self.problems)

    def _refresh_one(self, manager: str) -> bool:
        """Whether one file changed; it is read then."""
        path = self.path(manager)
        before = self._seen.get(manager, ())
        try:
            if signature(os.stat(path)) == before:
                return False
            data, self._seen[manager] = read(path)
            self._keep(manager, data)
        except FileNotFoundError:
            self._seen[manager] = None
            self._keep(manager, None)
            return before is not None
        except OSError as error:
            self._seen.pop(manager, None)  # it may be readable as it is, later
            return self._unreadable(manager, f"cannot be read: {error.strerror or error}")
        except UnknownState as error:
            return self._unreadable(manager, str(error))
        return True

    def _keep(self, manager: str, data: bytes | None) -> None:
        if manager == "cpu":
            self._cpu = None if data is None else cpu_state(data)
        else:
            self._memory = None if data is None else memory_state(data)
        self._unread.pop(manager, None)

    def _unreadable(self, manager: str, what: str) -> bool:
        sentence = f"{self.path(manager)}: {what}; what it said before still holds"
        if self._unread.get(manager) == sentence:
            return False
        self._unread[manager] = sentence
        return True


# --- what they say, in every version of theirs ----------------------------------------------------


class UnknownState(ValueError):
    """A state file that says nothing we understand; the message says what was expected."""


class CPUState(msgspec.Struct, frozen=True, kw_only=True):
    """What ``cpu_manager_state`` says.

    Attributes:
        version: of the document, 1 to 4.
        shared: CPUs of all without a grant; empty when no cpusets are set.
        entries: granted CPUs by holder.
        pods: CPUs granted to whole pods, by UID.
    """

    version: int
    policy: str
    shared: CPUSet
    entries: Mapping[Holder, CPUSet]
    pods: Mapping[str, CPUSet] = msgspec.field(default_factory=dict)


class MemoryState(msgspec.Struct, frozen=True, kw_only=True):
    """What ``memory_manager_state`` says.

    Attributes:
        version: of the document, 1 to 3.
        entries: NUMA nodes of granted memory by holder.
        pods: NUMA nodes granted to whole pods, by UID.
        memory: granted bytes by NUMA node.
        hugepages: granted bytes by NUMA node and page size.
    """

    version: int
    policy: str
    entries: Mapping[Holder, NUMASet]
    pods: Mapping[str, NUMASet]
    memory: Mapping[int, int]
    hugepages: Mapping[int, Mapping[int, int]]


def cpu_state(data: bytes) -> CPUState:
    """Read ``cpu_manager_state``.

    Raises:
        UnknownState: with what was found and what was expected.
    """
    document, wrapped = _document(data)
    policy = _policy("cpu", document)
    shared = _cpus("defaultCpuSet", document.get("defaultcpuset", ""))
    entries: dict[Holder, CPUSet] = {}
    version = 2
    for name, below in _mapping("entries", document.get("entries")):
        if isinstance(below, str):
            version = 1  # of one container, by its id
            entries["", name] = _cpus(f"entries.{name}", below)
            continue
        for container, cpus in _mapping(f"entries.{name}", below):
            entries[name, container] = _cpus(f"entries.{name}.{container}", cpus)
    pods = {}
    for uid, below in _mapping("podEntries", document.get("podentries")):
        inner = _folded(f"podEntries.{uid}", below)
        pods[uid] = _cpus(f"podEntries.{uid}.cpuSet", inner.get("cpuset", ""))
    if "podentries" in document:
        version = 3
    return CPUState(
        version=4 if wrapped else version,
        policy=policy,
        shared=shared,
        entries={who: cpus for who, cpus in entries.items() if cpus},
        pods={uid: cpus for uid, cpus in pods.items() if cpus},
    )


def memory_state(data: bytes) -> MemoryState:
    """Read ``memory_manager_state``.

    Raises:
        UnknownState: with what was found and what was expected.
    """
    document, wrapped = _document(data)
    policy = _policy("memory", document)
    entries: dict[Holder, NUMASet] = {}
    for uid, below in _mapping("entries", document.get("entries")):
        for container, blocks in _mapping(f"entries.{uid}", below):
            entries[uid, container] = _affinity(f"entries.{uid}.{container}", blocks)
    pods = {}
    for uid, below in _mapping("podEntries", document.get("podentries")):
        inner = _folded(f"podEntries.{uid}", below)
        path = f"podEntries.{uid}.memoryBlocks"
        pods[uid] = _affinity(path, inner.get("memoryblocks"))
    memory: dict[int, int] = {}
    hugepages: dict[int, dict[int, int]] = {}
    for name, below in _mapping("machineState", document.get("machinestate")):
        numa_node = _number(f"machineState.{name}", name)
        table = _folded(f"machineState.{name}", below).get("memorymap")
        for kind, amounts in _mapping(f"machineState.{name}.memoryMap", table):
            path = f"machineState.{name}.memoryMap.{kind}"
            reserved = _number(path, _folded(path, amounts).get("reserved", 0))
            if kind == "memory":
                memory[numa_node] = reserved
                continue
            try:
                hugepages.setdefault(numa_node, {})[page_size(kind)] = reserved
            except BadQuantity:
                continue  # a type of memory that nothing of ours asks for
    version = 2 if "podentries" in document else 1
    return MemoryState(
        version=3 if wrapped else version,
        policy=policy,
        entries={who: mems for who, mems in entries.items() if mems},
        pods={uid: mems for uid, mems in pods.items() if mems},
        memory={i: amount for i, amount in memory.items() if amount},
        hugepages={i: {s: n for s, n in by.items() if n} for i, by in hugepages.items()},
    )


def grants(
    cpu: CPUState | None,
    memory: MemoryState | None,
    cpus: CPUSet,
    numa_nodes: NUMASet,
    before: KubeletGrants,
) -> tuple[KubeletGrants, tuple[str, ...]]:
    """Put both documents together, as far as they are about this machine, its CPUs and NUMA nodes.

    ``before`` has the shared sets of before. Returns what is granted, and sentences about what this
    machine does not have.
    """
    problems: list[str] = []
    static = cpu is not None and cpu.policy == STATIC["cpu"]
    if cpu is not None:
        named = CPUSet.from_bits(
            cpu.shared.bits | _union((*cpu.entries.values(), *cpu.pods.values()))
        )
        if named - cpus:
            gone = cpus_text(named - cpus)
            problems.append(f"cpu_manager_state names {gone}, which this machine does not have")
    if memory is not None:
        nodes = NUMASet.from_bits(_union((*memory.entries.values(), *memory.pods.values())))
        if nodes - numa_nodes:
            gone = numa_text(nodes - numa_nodes)
            problems.append(f"memory_manager_state names {gone}, which this machine does not have")
    shared: tuple[CPUSet, ...] = ()
    if cpu is not None and static:
        now = cpu.shared & cpus
        shared = (now, *(one for one in before.shared if one != now))[:SHARED_SETS] if now else ()
    pinning = memory is not None and memory.policy == STATIC["memory"]
    made = KubeletGrants(
        cpu_policy=cpu.policy if cpu is not None else "",
        memory_policy=memory.policy if memory is not None else "",
        shared=shared,
        cpus=_here(cpu.entries, cpus) if cpu is not None and static else {},
        pods=_here(cpu.pods, cpus) if cpu is not None and static else {},
        mems=_here(memory.entries, numa_nodes) if memory is not None and pinning else {},
        pod_mems=_here(memory.pods, numa_nodes) if memory is not None and pinning else {},
        memory=memory.memory if memory is not None and pinning else {},
        hugepages=memory.hugepages if memory is not None and pinning else {},
    )
    return made, tuple(problems)


def _union(sets: tuple[CPUSet, ...] | tuple[NUMASet, ...]) -> int:
    bits = 0
    for one in sets:
        bits |= one.bits
    return bits


def _here(sets: Mapping[_Key, _Ids], there: _Ids) -> dict[_Key, _Ids]:
    return {key: ids & there for key, ids in sets.items() if ids & there}


# --- reading JSON as Go does: keys without regard to case ---------------------------------------


def _document(data: bytes) -> tuple[Mapping[str, Any], bool]:
    """The keys that count, in lower case, and whether they were wrapped in ``data``."""
    outer = _folded("the file", _json("the file", data))
    if "data" not in outer and "datachecksum" not in outer:
        return outer, False
    inner = outer.get("data")
    if not isinstance(inner, str) or "datachecksum" not in outer:
        # The kubelet refuses such a file, and does not fall back to the outer keys.
        raise UnknownState("has data or dataChecksum alone, expected both")
    return _folded("data", _json("data", inner)), True


def _json(path: str, text: bytes | str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        found = "empty" if not text.strip() else f"no JSON ({type(error).__name__}: {error})"
        raise UnknownState(f"{path} is {found}, expected a JSON object") from error


def _folded(path: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UnknownState(f"{path} is {_kind(value)}, expected an object")
    return {key.lower(): below for key, below in value.items()}


def _mapping(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Entries of an object whose keys are names; missing and null are empty."""
    if value is None:
        return
    if not isinstance(value, dict):
        raise UnknownState(f"{path} is {_kind(value)}, expected an object")
    for name, below in value.items():
        if not name.isprintable():
            found = repr(name)[:60]
            raise UnknownState(f"{path} names {found}, expected a UID, a name or a number")
        yield name, below


def _policy(manager: str, document: Mapping[str, Any]) -> str:
    policy = document.get("policyname")
    if policy not in _KNOWN[manager]:
        found = repr(policy)[:40] if "policyname" in document else "missing"
        raise UnknownState(f"policyName is {found}, expected {' or '.join(_KNOWN[manager])}")
    return str(policy)


def _cpus(path: str, value: Any) -> CPUSet:
    if not isinstance(value, str):
        raise UnknownState(f"{path} is {_kind(value)}, expected a list of CPUs as a text")
    try:
        return CPUSet.parse(value)
    except ListFormatError as error:
        raise UnknownState(f"{path[:120]} is {value[:40]!r}: {error}") from error


def _affinity(path: str, blocks: Any) -> NUMASet:
    """NUMA nodes of all blocks of one holder; the kubelet makes a cpuset of them."""
    if blocks is None:
        return NUMASet()
    if not isinstance(blocks, list):
        raise UnknownState(f"{path} is {_kind(blocks)}, expected a list of blocks")
    ids: list[int] = []
    for block in blocks:
        affinity = _folded(path, block).get("numaaffinity") or []
        if not isinstance(affinity, list):
            raise UnknownState(f"{path}.numaAffinity is {_kind(affinity)}, expected a list")
        ids += [_number(f"{path}.numaAffinity", one) for one in affinity]
    try:
        return NUMASet(ids)
    except ValueError as error:
        raise UnknownState(f"{path[:120]}.numaAffinity: {error}") from error


def _number(path: str, value: Any) -> int:
    text = str(value) if not isinstance(value, bool) else ""
    if not (text.isascii() and text.isdigit()) or len(text) > 20:
        raise UnknownState(f"{path[:120]} is {repr(value)[:40]}, expected a number, 0 or more")
    return int(text)


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
