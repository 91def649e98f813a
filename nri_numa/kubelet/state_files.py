"""Kubelet state files ``cpu_manager_state`` and ``memory_manager_state``, read when they changed.

The kubelet writes a pod's grants before it creates the pod's first container. So a decision about a
container first checks the files, with two ``stat`` calls; their contents are valid until a file is
replaced.

Source: kubernetes ``pkg/kubelet/cm/cpumanager/state`` and ``…/memorymanager/state``. There is no
version field; the keys show the version (v1 before 1.18, v2 to 1.35, v3 in 1.36, v4 in 1.37).
Checksums are not verified: the kubelet replaces the files by rename, and nothing else writes them.
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

# --- Reading a file of the kubelet, without blocking on a pipe or device in its place -------------


MAX_STATE_FILE_BYTES: Final = 1 << 20
"""Enough for ten thousand containers, at 60 bytes for each and 150 for a block of memory. A
configuration has some thousand bytes."""

FileSignature = tuple[int, int, int, int]


def signature_of_stat(file_stat: os.stat_result) -> FileSignature:
    """Return the part of a stat that changes when a file is written or replaced."""
    return file_stat.st_ino, file_stat.st_size, file_stat.st_mtime_ns, file_stat.st_ctime_ns


def read_kubelet_file(path: str) -> tuple[bytes, FileSignature]:
    """Read a whole file, with its signature.

    Raises:
        OSError: it cannot be read, is not a regular file, or is longer than `MAX_STATE_FILE_BYTES`.
    """
    # A pipe or a device in place of the file must not block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        file_stat = os.fstat(descriptor)
        if not stat.S_ISREG(file_stat.st_mode):
            raise OSError("is not a regular file")
        if file_stat.st_size > MAX_STATE_FILE_BYTES:
            raise OSError(f"has {file_stat.st_size} bytes, expected at most {MAX_STATE_FILE_BYTES}")
        return file.read(MAX_STATE_FILE_BYTES), signature_of_stat(file_stat)


# --- grants in the files --------------------------------------------------------------------------

STATE_FILE_NAMES: Final = {"cpu": "cpu_manager_state", "memory": "memory_manager_state"}
"""Name of the state file by manager."""

STATIC_POLICIES: Final = {"cpu": "static", "memory": "Static"}
"""Policy with which a manager sets cpusets, by manager."""


class KubeletStateFiles:
    """Grants of the kubelet, as in the state files of its root directory.

    A missing file grants nothing: an operator who changes a policy removes it. A file that is
    unreadable or invalid changes nothing: its last valid contents still count.

    Attributes:
        grants: as last read; another object after a change.
        problems: sentences about problems of the files, by file or subject.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.grants: KubeletGrants = NO_GRANTS
        self.problems: tuple[str, ...] = ()
        self._signatures: dict[str, FileSignature | None] = {}
        self._file_grants: dict[str, KubeletGrants] = {}
        self._machine: tuple[CPUSet, NUMASet] | None = None
        self._read_problems: dict[str, str] = {}

    def state_file_path(self, manager: str) -> str:
        """Path of the state file of the ``cpu`` or ``memory`` manager."""
        return os.path.join(self.directory, STATE_FILE_NAMES[manager])

    def refresh_and_report_change(self, cpus: CPUSet, numa_nodes: NUMASet) -> bool:
        """Read changed files; return True if `grants` or `problems` changed.

        Only CPUs and NUMA nodes that the machine can have are granted.
        """
        changed = self._machine != (cpus, numa_nodes)
        for manager in STATE_FILE_NAMES:
            changed |= self._refresh_manager_grants(manager)
        if not changed:
            return False
        self._machine = cpus, numa_nodes
        old_values = self.grants, self.problems
        cpu, memory = (self._file_grants.get(manager, NO_GRANTS) for manager in STATE_FILE_NAMES)
        grants, problems = combine_manager_grants(cpu, memory, cpus, numa_nodes, self.grants)
        if grants != self.grants:
            self.grants = grants
        self.problems = (*self._read_problems.values(), *problems)
        return old_values != (self.grants, self.problems)

    def _refresh_manager_grants(self, manager: str) -> bool:
        """Read one file if it changed; return True if it did."""
        path = self.state_file_path(manager)
        old_signature = self._signatures.get(manager, ())
        try:
            if signature_of_stat(os.stat(path)) == old_signature:
                return False
            data, self._signatures[manager] = read_kubelet_file(path)
            self._file_grants[manager] = (
                decode_cpu_grants(data) if manager == "cpu" else decode_memory_grants(data)
            )
        except FileNotFoundError:
            self._signatures[manager] = None
            self._file_grants[manager] = NO_GRANTS
            self._read_problems.pop(manager, None)
            return old_signature is not None
        except OSError as error:
            self._signatures.pop(manager, None)  # the same file may be readable later
            return self._record_unreadable(manager, f"cannot be read: {error.strerror or error}")
        except STATE_DECODE_ERRORS as error:
            return self._record_unreadable(manager, str(error)[:200])
        self._read_problems.pop(manager, None)
        return True

    def _record_unreadable(self, manager: str, problem: str) -> bool:
        sentence = f"{self.state_file_path(manager)}: {problem}; its previous content still applies"
        if self._read_problems.get(manager) == sentence:
            return False
        self._read_problems[manager] = sentence
        return True


# --- decoding of the files, in each of their versions ---------------------------------------------

STATE_DECODE_ERRORS: Final = (msgspec.MsgspecError, ValueError, RecursionError)
"""Errors for a file that is no state file; the message says what was expected."""

# Names appear in log lines and documents.
_PrintableName = Annotated[str, msgspec.Meta(pattern=r"\A[ -~]*\Z")]
_NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]


class _WrappedState(msgspec.Struct, frozen=True, rename="camel"):
    """Outer document of version 4, which has the state as a text."""

    data: str | None = None
    data_checksum: int | None = None


class _WholePodCPUs(msgspec.Struct, frozen=True, rename="camel"):
    cpu_set: CPUSet = NO_CPUS


class _CPUState(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """State of the CPU manager; version 1 has CPUs by container id, version 3 also by pod."""

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
    """State of the memory manager; version 2 also has the memory of whole pods."""

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
        # The kubelet rejects such a file, and does not fall back to the outer keys.
        raise ValueError("has data or dataChecksum alone, expected both")
    return msgspec.json.decode(
        data if outer.data is None else outer.data,
        type=kind,
        dec_hook=lambda _, value: CPUSet.parse(msgspec.convert(value, str)),
    )


def decode_cpu_grants(data: bytes) -> KubeletGrants:
    """Decode the grants of ``cpu_manager_state``; raises `STATE_DECODE_ERRORS`."""
    state = _decode_state(data, _CPUState)
    if state.policy_name != STATIC_POLICIES["cpu"]:
        return KubeletGrants(cpu_policy=state.policy_name)
    cpus: dict[GrantHolder, CPUSet] = {}
    for name, value in (state.entries or {}).items():
        if isinstance(value, str):
            cpus["", name] = CPUSet.parse(value)
        else:
            cpus |= {(name, container): cpu_set for container, cpu_set in value.items()}
    return KubeletGrants(
        cpu_policy=state.policy_name,
        shared=(state.default_cpu_set,),
        cpus=cpus,
        pods={uid: pod.cpu_set for uid, pod in (state.pod_entries or {}).items()},
    )


def decode_memory_grants(data: bytes) -> KubeletGrants:
    """Decode the grants of ``memory_manager_state``; raises `STATE_DECODE_ERRORS`."""
    state = _decode_state(data, _MemoryState)
    if state.policy_name != STATIC_POLICIES["memory"]:
        return KubeletGrants(memory_policy=state.policy_name)
    memory: dict[int, int] = {}
    hugepages: dict[int, dict[int, int]] = {}
    for numa_node, node_state in (state.machine_state or {}).items():
        for kind, table in (node_state.memory_map or {}).items():
            if kind == "memory":
                memory[numa_node] = table.reserved
                continue
            try:
                hugepages.setdefault(numa_node, {})[page_bytes_of_resource(kind)] = table.reserved
            except BadQuantity:
                continue  # a type of memory that the agent does not manage
    return KubeletGrants(
        memory_policy=state.policy_name,
        mems={
            (uid, container): _affinity_of_blocks(blocks)
            for uid, containers in (state.entries or {}).items()
            for container, blocks in containers.items()
        },
        pod_mems={
            uid: _affinity_of_blocks(pod.memory_blocks)
            for uid, pod in (state.pod_entries or {}).items()
        },
        memory={i: amount for i, amount in memory.items() if amount},
        hugepages={i: {s: n for s, n in sizes.items() if n} for i, sizes in hugepages.items()},
    )


def _affinity_of_blocks(blocks: tuple[_MemoryBlock, ...] | None) -> NUMASet:
    """NUMA nodes of all blocks of one holder, which the kubelet writes as its memory nodes."""
    return NUMASet(i for block in blocks or () for i in block.numa_affinity or ())


def combine_manager_grants(
    cpu: KubeletGrants,
    memory: KubeletGrants,
    cpus: CPUSet,
    numa_nodes: NUMASet,
    old_grants: KubeletGrants,
) -> tuple[KubeletGrants, tuple[str, ...]]:
    """Combine the grants of both managers, restricted to the CPUs and NUMA nodes of this machine.

    ``old_grants`` has the earlier shared pools. Returns the grants, and sentences about CPUs and
    NUMA nodes that this machine does not have.
    """
    problems: list[str] = []
    pool = cpu.shared[0] if cpu.shared else NO_CPUS
    if missing := (cpu.granted_cpus | pool) - cpus:
        text = cpus_text(missing)
        problems.append(f"cpu_manager_state names {text}, which this machine does not have")
    nodes = NUMASet(i for mems in (*memory.mems.values(), *memory.pod_mems.values()) for i in mems)
    if nodes - numa_nodes:
        text = numa_text(nodes - numa_nodes)
        problems.append(f"memory_manager_state names {text}, which this machine does not have")
    pool &= cpus
    pools = (pool, *(p for p in old_grants.shared if p != pool))
    shared = pools[:MAX_REMEMBERED_SHARED_CPUSETS] if pool else ()
    grants = replace(
        memory,
        cpu_policy=cpu.cpu_policy,
        shared=shared,
        cpus=_restrict_to(cpu.cpus, cpus),
        pods=_restrict_to(cpu.pods, cpus),
        mems=_restrict_to(memory.mems, numa_nodes),
        pod_mems=_restrict_to(memory.pod_mems, numa_nodes),
    )
    return grants, tuple(problems)


def _restrict_to(
    sets: Mapping[_Key, _CPUOrNUMASet], present_ids: _CPUOrNUMASet
) -> dict[_Key, _CPUOrNUMASet]:
    return {key: ids & present_ids for key, ids in sets.items() if ids & present_ids}
