"""The kubelet's ``cpu_manager_state`` and ``memory_manager_state``, read when they changed.

The kubelet writes a pod's grants before it creates the pod's first container. So a decision about a
container looks at the files first, at the cost of two ``stat`` calls; what was read is good until a
file is replaced.

Source: kubernetes ``pkg/kubelet/cm/cpumanager/state`` and ``…/memorymanager/state``. There is no
version field; the shape tells (v1 before 1.18, v2 to 1.35, v3 in 1.36, v4 in 1.37). Checksums are
not verified: the kubelet replaces the files by rename, and nothing else writes them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from nri_numa.model.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.model.machine import cpus_text, numa_text
from nri_numa.model.workload import (
    MAX_REMEMBERED_SHARED_CPUSETS,
    NO_GRANTS,
    GrantHolder,
    KubeletGrants,
)
from nri_numa.text import BadQuantity, page_bytes_of_resource

# --- A file of the kubelet, read whole; nothing else in its place holds us up ---------------------


MAX_STATE_FILE_BYTES: Final = 1 << 20
"""Sixty bytes a container and a hundred and fifty a block of memory: ten thousand containers. A
configuration has some thousand."""

FileSignature = tuple[int, int, int, int]


def signature_of_stat(found: os.stat_result) -> FileSignature:
    """What changes when a file is written, or another one takes its name."""
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def read_kubelet_file(path: str) -> tuple[bytes, FileSignature]:
    """The whole file, and what distinguishes it from another one.

    Raises:
        OSError: it cannot be read, is no regular file, or is longer than `MAX_STATE_FILE_BYTES`.
    """
    # A pipe or a device in its place must not make anybody wait.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("is no regular file")
        if found.st_size > MAX_STATE_FILE_BYTES:
            raise OSError(f"has {found.st_size} bytes, expected at most {MAX_STATE_FILE_BYTES}")
        return file.read(MAX_STATE_FILE_BYTES), signature_of_stat(found)


# --- the files, as they are now -------------------------------------------------------------------

STATE_FILE_NAMES: Final = {"cpu": "cpu_manager_state", "memory": "memory_manager_state"}
"""By manager, its state file."""

STATIC_POLICIES: Final = {"cpu": "static", "memory": "Static"}
"""By manager, the policy under which it sets cpusets."""


class KubeletStateFiles:
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
        self._seen: dict[str, FileSignature | None] = {}
        self._said: dict[str, KubeletGrants] = {}
        self._machine: tuple[CPUSet, NUMASet] | None = None
        self._unread: dict[str, str] = {}

    def state_file_path(self, manager: str) -> str:
        """Of the state file of the ``cpu`` or ``memory`` manager."""
        return os.path.join(self.directory, STATE_FILE_NAMES[manager])

    def refresh_and_report_change(self, cpus: CPUSet, numa_nodes: NUMASet) -> bool:
        """Read what changed; whether anything did: `combine_manager_grants`, or `problems`.

        Only CPUs and NUMA nodes that the machine can have are granted.
        """
        changed = self._machine != (cpus, numa_nodes)
        for manager in STATE_FILE_NAMES:
            changed |= self._refresh_manager_grants(manager)
        if not changed:
            return False
        self._machine = cpus, numa_nodes
        before = self.grants, self.problems
        cpu, memory = (self._said.get(manager, NO_GRANTS) for manager in STATE_FILE_NAMES)
        made, odd = combine_manager_grants(cpu, memory, cpus, numa_nodes, self.grants)
        if made != self.grants:
            self.grants = made
        self.problems = (*self._unread.values(), *odd)
        return before != (self.grants, self.problems)

    def _refresh_manager_grants(self, manager: str) -> bool:
        """Whether one file changed; it is read then."""
        path = self.state_file_path(manager)
        before = self._seen.get(manager, ())
        try:
            if signature_of_stat(os.stat(path)) == before:
                return False
            data, self._seen[manager] = read_kubelet_file(path)
            self._said[manager] = (
                decode_cpu_grants(data) if manager == "cpu" else decode_memory_grants(data)
            )
        except FileNotFoundError:
            self._seen[manager] = None
            self._said[manager] = NO_GRANTS
            self._unread.pop(manager, None)
            return before is not None
        except OSError as error:
            self._seen.pop(manager, None)  # it may be readable as it is, later
            return self._record_unreadable(manager, f"cannot be read: {error.strerror or error}")
        except STATE_DECODE_ERRORS as error:
            return self._record_unreadable(manager, str(error)[:200])
        self._unread.pop(manager, None)
        return True

    def _record_unreadable(self, manager: str, what: str) -> bool:
        sentence = f"{self.state_file_path(manager)}: {what}; what it said before still holds"
        if self._unread.get(manager) == sentence:
            return False
        self._unread[manager] = sentence
        return True


# --- what they say, in every version of theirs ----------------------------------------------------

STATE_DECODE_ERRORS: Final = (msgspec.MsgspecError, ValueError, RecursionError)
"""Raised where a state file is none; the message says what was expected."""

# Names go into log lines and documents.
_PrintableName = Annotated[str, msgspec.Meta(pattern=r"\A[ -~]*\Z")]
_NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]


class _WrappedState(msgspec.Struct, frozen=True, rename="camel"):
    """Version 4 has the document as a text."""

    data: str | None = None
    data_checksum: int | None = None


class _WholePodCPUs(msgspec.Struct, frozen=True, rename="camel"):
    cpu_set: CPUSet = NO_CPUS


class _CPUState(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Version 1 has CPUs by container id, version 3 those of whole pods too."""

    policy_name: Literal["none", "static"]
    default_cpu_set: CPUSet = NO_CPUS
    entries: dict[_PrintableName, str | dict[_PrintableName, CPUSet]] | None = None
    pod_entries: dict[_PrintableName, _WholePodCPUs] | None = None


class _MemoryBlock(msgspec.Struct, frozen=True, rename="camel"):
    numa_affinity: tuple[_NonNegativeInt, ...] | None = None


class _WholePodMemory(msgspec.Struct, frozen=True, rename="camel"):
    memory_blocks: tuple[_MemoryBlock, ...] | None = None


class _MemoryTable(msgspec.Struct, frozen=True):
    reserved: _NonNegativeInt = 0


class _NUMANode(msgspec.Struct, frozen=True, rename="camel"):
    memory_map: dict[_PrintableName, _MemoryTable] | None = None


class _MemoryState(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Version 2 has the memory of whole pods too."""

    policy_name: Literal["None", "Static", "BestEffort"]
    machine_state: dict[_NonNegativeInt, _NUMANode] | None = None
    entries: dict[_PrintableName, dict[_PrintableName, tuple[_MemoryBlock, ...] | None]] | None = (
        None
    )
    pod_entries: dict[_PrintableName, _WholePodMemory] | None = None


_State = TypeVar("_State", _CPUState, _MemoryState)
_Key = TypeVar("_Key")
_CPUOrNUMASet = TypeVar("_CPUOrNUMASet", CPUSet, NUMASet)


def _decode_state(data: bytes, kind: type[_State]) -> _State:
    outer = msgspec.json.decode(data, type=_WrappedState)
    if (outer.data is None) is not (outer.data_checksum is None):
        # The kubelet refuses such a file, and does not fall back to the outer keys.
        raise ValueError("has data or dataChecksum alone, expected both")
    return msgspec.json.decode(
        data if outer.data is None else outer.data,
        type=kind,
        dec_hook=lambda _, value: CPUSet.parse(msgspec.convert(value, str)),
    )


def decode_cpu_grants(data: bytes) -> KubeletGrants:
    """What ``cpu_manager_state`` grants; raises `STATE_DECODE_ERRORS`."""
    state = _decode_state(data, _CPUState)
    if state.policy_name != STATIC_POLICIES["cpu"]:
        return KubeletGrants(cpu_policy=state.policy_name)
    cpus: dict[GrantHolder, CPUSet] = {}
    for name, below in (state.entries or {}).items():
        if isinstance(below, str):
            cpus["", name] = CPUSet.parse(below)
        else:
            cpus |= {(name, container): its for container, its in below.items()}
    return KubeletGrants(
        cpu_policy=state.policy_name,
        shared=(state.default_cpu_set,),
        cpus=cpus,
        pods={uid: pod.cpu_set for uid, pod in (state.pod_entries or {}).items()},
    )


def decode_memory_grants(data: bytes) -> KubeletGrants:
    """What ``memory_manager_state`` grants; raises `STATE_DECODE_ERRORS`."""
    state = _decode_state(data, _MemoryState)
    if state.policy_name != STATIC_POLICIES["memory"]:
        return KubeletGrants(memory_policy=state.policy_name)
    memory: dict[int, int] = {}
    hugepages: dict[int, dict[int, int]] = {}
    for numa_node, has in (state.machine_state or {}).items():
        for kind, table in (has.memory_map or {}).items():
            if kind == "memory":
                memory[numa_node] = table.reserved
                continue
            try:
                hugepages.setdefault(numa_node, {})[page_bytes_of_resource(kind)] = table.reserved
            except BadQuantity:
                continue  # a type of memory that nothing of ours asks for
    return KubeletGrants(
        memory_policy=state.policy_name,
        mems={
            (uid, container): _affinity_of_blocks(blocks)
            for uid, below in (state.entries or {}).items()
            for container, blocks in below.items()
        },
        pod_mems={
            uid: _affinity_of_blocks(pod.memory_blocks)
            for uid, pod in (state.pod_entries or {}).items()
        },
        memory={i: amount for i, amount in memory.items() if amount},
        hugepages={i: {s: n for s, n in by.items() if n} for i, by in hugepages.items()},
    )


def _affinity_of_blocks(blocks: tuple[_MemoryBlock, ...] | None) -> NUMASet:
    """NUMA nodes of all blocks of one holder; the kubelet makes a cpuset of them."""
    return NUMASet(i for block in blocks or () for i in block.numa_affinity or ())


def combine_manager_grants(
    cpu: KubeletGrants,
    memory: KubeletGrants,
    cpus: CPUSet,
    numa_nodes: NUMASet,
    before: KubeletGrants,
) -> tuple[KubeletGrants, tuple[str, ...]]:
    """Put what both managers grant together, as far as it is about this machine.

    ``before`` has the shared sets of before. Returns what is granted, and sentences about what this
    machine does not have.
    """
    problems: list[str] = []
    now = cpu.shared[0] if cpu.shared else NO_CPUS
    if gone := (cpu.granted_cpus | now) - cpus:
        text = cpus_text(gone)
        problems.append(f"cpu_manager_state names {text}, which this machine does not have")
    nodes = NUMASet(i for mems in (*memory.mems.values(), *memory.pod_mems.values()) for i in mems)
    if nodes - numa_nodes:
        text = numa_text(nodes - numa_nodes)
        problems.append(f"memory_manager_state names {text}, which this machine does not have")
    now &= cpus
    shared = (
        (now, *(one for one in before.shared if one != now))[:MAX_REMEMBERED_SHARED_CPUSETS]
        if now
        else ()
    )
    made = replace(
        memory,
        cpu_policy=cpu.cpu_policy,
        shared=shared,
        cpus=_restrict_to(cpu.cpus, cpus),
        pods=_restrict_to(cpu.pods, cpus),
        mems=_restrict_to(memory.mems, numa_nodes),
        pod_mems=_restrict_to(memory.pod_mems, numa_nodes),
    )
    return made, tuple(problems)


def _restrict_to(
    sets: Mapping[_Key, _CPUOrNUMASet], there: _CPUOrNUMASet
) -> dict[_Key, _CPUOrNUMASet]:
    return {key: ids & there for key, ids in sets.items() if ids & there}
