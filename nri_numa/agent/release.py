"""Release: every container gets the CPUs and memory nodes it would have without the agent.

The agent must be stopped, since it would pin everything again. The state directory's lock shows if
one runs, and keeps one from starting meanwhile; an agent with another state directory is found by
its lock on the runtime (`nri_numa.agent.runtime_lock`). The updates are in the answer to a
Synchronize of a registration that lives for this one answer (`nri_numa.nri.link`), so the runtime's
records are corrected together with the cgroups; with ``runtime.link: cri`` they are calls of CRI.

A container without a cpuset of its own may use what its parent cgroup may. The protocol cannot take
a cpuset away, so all CPUs and memory nodes that containers of this machine can have are written
instead, which is the same until CPUs are plugged in.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Final

import msgspec
from msgspec.structs import replace

from nri_numa import config as configuration
from nri_numa.agent.assigned_files import remove_assigned_files
from nri_numa.agent.interrupts import InterruptSteering
from nri_numa.agent.links import is_reached_over_cri, runtime_lock_socket
from nri_numa.agent.runtime_lock import RuntimeLock
from nri_numa.config import AgentConfig
from nri_numa.engine.assigned import ASSIGNED_KEY, decode_assignment_fields
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.request.demand import DEFAULT_CFS_PERIOD_US, cpu_request_milli
from nri_numa.engine.resync import rebuild_node_state
from nri_numa.engine.state import Allocation, ContainerKind, NodeState, build_node_state
from nri_numa.errors import CheckpointError, RuntimeUnavailable, StateDirectoryBusy
from nri_numa.kubelet.state_files import KubeletStateFiles
from nri_numa.machine.cgroups import CgroupPlace, CgroupReader, read_actual_cgroups
from nri_numa.machine.sysfs import discover_topology
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.machine import NO_CFS_QUOTA
from nri_numa.model.workload import Container, ContainerUpdate, PodSandbox, PodTable, QoSClass
from nri_numa.nri.link import push_one_shot
from nri_numa.store import checkpoint
from nri_numa.store.checkpoint import CheckpointStore
from nri_numa.store.files import read_key
from nri_numa.store.journal import Document, state_from

RELEASED_CHECKPOINT_NAME: Final = "checkpoint.released"
"""Name of the archived checkpoint after a complete release."""

READ_BACK_STALL_S: Final = 10.0
"""Seconds without a written cgroup after which the remaining ones count as not written.

Under the systemd driver each write is slow."""


class ReleaseResult(StrEnum):
    """Result for one container."""

    RELEASED = "released"
    """Its cgroup was read back and has the new values."""
    RECORDED = "recorded"
    """It has no cgroup yet (it does not run): the runtime has the new values."""
    FAILED = "failed"
    """Its cgroup still has the old values."""
    PLANNED = "planned"
    """A dry run: it would be released."""
    FREE = "free"
    """It was placed by the agent, and has all CPUs and memory nodes already."""
    FOREIGN = "foreign"
    """It was not placed by the agent."""


class ReleasedContainer(msgspec.Struct, frozen=True, kw_only=True):
    """One container.

    Attributes:
        had_cpus, had_mems: CPU and memory node lists in the runtime's record; empty without one.
        cpus, mems: lists that are written; empty if unchanged.
        quota, period: the CFS quota that is restored, in microseconds per period; None if none is.
        is_quota_read: True if the cgroup was read, and has the quota.
        note: sentence for the operator; may be empty.
    """

    container_id: str
    namespace: str
    pod: str
    container: str
    result: ReleaseResult
    had_cpus: str = ""
    had_mems: str = ""
    cpus: str = ""
    mems: str = ""
    quota: int | None = None
    period: int | None = None
    is_quota_read: bool = False
    note: str = ""
    cgroup: CgroupPlace = msgspec.field(default_factory=CgroupPlace)

    @property
    def has_changes(self) -> bool:
        """True if anything is written."""
        return bool(self.cpus or self.mems or self.quota is not None)

    @property
    def release_update(self) -> ContainerUpdate:
        """Update for the runtime."""
        return ContainerUpdate(
            container_id=self.container_id,
            cpus=self.cpus,
            mems=self.mems,
            cpu_quota=self.quota,
            cpu_period=self.period,
        )


class ReleaseReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a release.

    Attributes:
        containers: every container of the node, in the order of `plan_release`.
        checkpoint: path of the archived checkpoint; empty if there was none.
        problems: sentences about problems.
    """

    containers: tuple[ReleasedContainer, ...]
    checkpoint: str = ""
    problems: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """True if no container failed."""
        return all(c.result is not ReleaseResult.FAILED for c in self.containers)


class AgentIsRunning(CheckpointError):
    """An agent uses the state directory: it would pin everything again."""

    def __init__(self, path: str, owner: str) -> None:
        subject = f"an agent ({owner})" if owner else "an agent"
        super().__init__(
            path,
            f"{subject} runs on this state directory and would pin everything again; stop it "
            "first, for instance: systemctl stop nri-numa",
        )


# --- plan, without I/O ------------------------------------------------------------------------


def plan_release(
    machine: NodeModel,
    prior: NodeState,
    pods: PodTable,
    containers: Iterable[Container],
) -> tuple[ReleasedContainer, ...]:
    """Plan the release of each container, by namespace, pod, container and id.

    Containers of the agent are those in the checkpoint (``prior``), those with an ``assigned``
    annotation, and those with exactly the shared pool, since unpinned containers that were created
    without the agent have no annotation. All others are left alone.
    """
    live = [container for container in containers if container.pod_id in pods.uids]
    node = NodeSnapshot(machine, prior)
    outcome = rebuild_node_state(node, pods, live)
    allocations = [outcome.state.allocations[i] for i in outcome.adopted]
    pool = node.with_state(build_node_state(allocations, kubelet=prior.kubelet)).pool
    placed = outcome.state.allocations
    entries = [
        _plan_container_release(machine, prior, pool, pods[c.pod_id], c, placed.get(c.id))
        for c in live
    ]
    return tuple(sorted(entries, key=lambda r: (r.namespace, r.pod, r.container, r.container_id)))


def _plan_container_release(
    machine: NodeModel,
    prior: NodeState,
    pool: CPUSet,
    pod: PodSandbox,
    container: Container,
    placed: Allocation | None,
) -> ReleasedContainer:
    everything = machine.topology
    allocation = prior.allocations.get(container.id)
    resources = container.resources
    entry = ReleasedContainer(
        container_id=container.id,
        namespace=pod.namespace,
        pod=pod.name,
        container=container.name,
        result=ReleaseResult.FOREIGN,
        had_cpus=resources.cpus,
        had_mems=resources.mems,
        cgroup=CgroupPlace(container.cgroups_path, container.pid),
    )
    kind, lifted = (
        _kind_from_annotation(machine, pool, container, placed)
        if allocation is None
        else (allocation.kind, allocation.lifted_quota)
    )
    if kind is ContainerKind.FOREIGN:
        return entry
    cpus = CPUSet.parse_or_none(resources.cpus)
    mems = NUMASet.parse_or_none(resources.mems)
    quota, note = None, ""
    if lifted is not None and (resources.cpu_quota or 0) <= 0:
        milli = cpu_request_milli(resources, []) if pod.qos is QoSClass.GUARANTEED else 0
        if lifted > 0:
            quota = lifted
        elif milli:  # the limit is the request
            quota = milli * (resources.cpu_period or DEFAULT_CFS_PERIOD_US) // 1000
        else:
            note = "its CPU limit stays lifted: the checkpoint that knew it was lost"
    # The kubelet does not repeat its cpuset: the grant, or all CPUs that are not granted.
    grants = prior.kubelet
    granted = grants.cpus_of(pod.uid, container.name, container.id)
    allowed_cpus = granted or everything.allowed - grants.granted_cpus or everything.allowed
    # An empty text is no cpuset, and an unreadable one was not written by the agent.
    entry = replace(
        entry,
        cpus=str(allowed_cpus) if cpus and cpus != allowed_cpus else "",
        mems=str(everything.memory_nodes) if mems and mems != everything.memory_nodes else "",
        quota=quota,
        period=None if quota is None else resources.cpu_period,
        note=note,
    )
    return replace(entry, result=ReleaseResult.PLANNED if entry.has_changes else ReleaseResult.FREE)


def _kind_from_annotation(
    machine: NodeModel, pool: CPUSet, container: Container, placed: Allocation | None
) -> tuple[ContainerKind, int | None]:
    """Return kind and lifted quota of a container that is not in the checkpoint.

    Only the checkpoint has the quota itself, so it is 0 if one was lifted. Over CRI no container
    has an annotation: the agent placed it if its pod requests CPUs and it has those that it would
    get (``placed``).
    """
    marker = container.annotations.get(f"{machine.settings.prefix}/{ASSIGNED_KEY}")
    if marker is None:
        cpus = CPUSet.parse_or_none(container.resources.cpus)
        if placed is not None and placed.cpus and cpus is not None:
            is_subset = placed.yields_to_exclusive and cpus <= placed.cpus
            if is_subset or placed.cpus == cpus:
                lifted = placed.exclusive and container.resources.cpu_quota == NO_CFS_QUOTA
                return placed.kind, 0 if lifted else None
        return (ContainerKind.UNPINNED if cpus == pool else ContainerKind.FOREIGN), None
    try:
        document = decode_assignment_fields(marker)
        kind = ContainerKind(document["kind"])
        owned = kind is ContainerKind.EXCLUSIVE or bool(document.get("exclusive"))
    except (ValueError, KeyError, msgspec.DecodeError, RecursionError):
        return ContainerKind.UNPINNED, None  # damaged, but only the agent writes this key
    return kind, 0 if owned and container.resources.cpu_quota == NO_CFS_QUOTA else None


# --- execution --------------------------------------------------------------------------------


async def release_all_containers(
    config: AgentConfig,
    *,
    identity: Mapping[str, str],
    dry_run: bool = False,
    timeout: float = 60.0,  # noqa: ASYNC109 - the time limit is part of what is asked for
    on_delay: Callable[[], object] = lambda: None,
) -> ReleaseReport:
    """Release all containers, and read back the result.

    The runtime has ``timeout`` seconds to accept the registration; ``on_delay`` is called if that
    takes longer than one. A dry run changes nothing, and is possible while an agent runs.

    Raises:
        AgentIsRunning: an agent uses the state directory.
        RuntimeUnavailable: the runtime cannot be reached or did not answer; nothing was changed.
        TopologyError: the machine cannot be read.
    """
    topology = await asyncio.to_thread(discover_topology, config.sysfs_root)
    machine = NodeModel(
        topology=topology,
        settings=configuration.derive_settings(config),
        key=read_key(config.state_dir),
    )
    problems: list[str] = []
    with contextlib.ExitStack() as cleanup:
        if dry_run:
            store, entries = None, _read_checkpoint_entries(config, problems)
        else:
            store = CheckpointStore(config.state_dir, identity=identity, clock=time.time)
            cleanup.callback(store.close)
            claim = RuntimeLock(runtime_lock_socket(config))
            cleanup.callback(claim.close)
            try:
                loaded = store.load()
            except StateDirectoryBusy as error:
                raise AgentIsRunning(config.state_dir, error.owner) from error
            claim.acquire()
            problems += loaded.problems
            entries = loaded.entries
        prior, damaged = state_from(entries)
        problems += damaged
        kubelet = KubeletStateFiles(config.kubelet_root)
        kubelet.refresh_and_report_change(topology.possible, topology.numa_ids)
        problems += kubelet.problems
        prior = prior.with_kubelet(kubelet.grants)
        reader = CgroupReader(config.cgroup_root)
        planned = await _send_release(config, machine, prior, reader, dry_run, timeout, on_delay)
        if dry_run:
            return ReleaseReport(containers=planned, problems=tuple(problems))
        await asyncio.to_thread(InterruptSteering(config.state_dir).restore_affinity)
        remove_assigned_files(config.state_dir)
        containers = await _await_released_cgroups(reader, planned)
        report = ReleaseReport(containers=containers, problems=tuple(problems))
        if store is not None and report.is_complete:
            report = replace(report, checkpoint=_archive_checkpoint(store, bool(entries)))
        return report


def _read_checkpoint_entries(config: AgentConfig, problems: list[str]) -> Mapping[str, Document]:
    path = os.path.join(config.state_dir, checkpoint.CHECKPOINT_FILE_NAME)
    if not os.path.exists(path):
        return {}
    try:
        loaded = checkpoint.read_checkpoint(path)
    except CheckpointError as error:
        problems.append(f"{error}; it is not used")
        return {}
    problems += loaded.problems
    return loaded.entries


async def _send_release(
    config: AgentConfig,
    machine: NodeModel,
    prior: NodeState,
    reader: CgroupReader,
    dry_run: bool,
    seconds: float,
    on_delay: Callable[[], object],
) -> tuple[ReleasedContainer, ...]:
    planned: tuple[ReleasedContainer, ...] = ()

    def on_synchronize(
        pods: PodTable, containers: Sequence[Container]
    ) -> Sequence[ContainerUpdate]:
        nonlocal planned
        actual = [_with_actual_cgroup(reader, machine.topology.allowed, c) for c in containers]
        planned = plan_release(machine, prior, pods, actual)
        return [] if dry_run else [c.release_update for c in planned if c.has_changes]

    over_cri = is_reached_over_cri(config)
    timer = asyncio.get_running_loop().call_later(1.0, on_delay)
    try:
        async with asyncio.timeout(seconds):
            if over_cri:
                from nri_numa.cri.link import plan_and_send_updates_once

                detail = await plan_and_send_updates_once(
                    on_synchronize, socket_path=config.runtime.cri_socket
                )
            else:
                detail = await push_one_shot(
                    on_synchronize,
                    socket_path=config.runtime.nri_socket,
                    name=f"{config.runtime.plugin_name}-release",
                    index=configuration.parse_plugin_index(config.runtime.plugin_index),
                )
    except TimeoutError:
        missing = "answer" if over_cri else "synchronise the second registration"
        detail = f"the runtime did not {missing} within {seconds:g} s"
    finally:
        timer.cancel()
    if detail:
        raise RuntimeUnavailable(f"nothing was released: {detail}")
    return planned


def _with_actual_cgroup(reader: CgroupReader, allowed: CPUSet, container: Container) -> Container:
    """Replace CPUs and a lifted quota in the runtime's record, which may be old (docs/adr/0012)."""
    cgroup = CgroupPlace(container.cgroups_path, container.pid)
    resources, observed = container.resources, reader.read_actual_cgroup(cgroup)
    if observed is None:
        return container
    if reader.read_cfs_limit(cgroup)[0] == NO_CFS_QUOTA and (resources.cpu_quota or 0) > 0:
        resources = replace(resources, cpu_quota=NO_CFS_QUOTA)
    if not allowed <= observed.cpus:
        resources = replace(resources, cpus=str(observed.cpus))
    return replace(container, resources=resources)


async def _await_released_cgroups(
    reader: CgroupReader, planned: Sequence[ReleasedContainer]
) -> tuple[ReleasedContainer, ...]:
    """Wait until the cgroups have what was sent; the runtime does not report it."""
    open_entries = {c.container_id: c for c in planned if c.has_changes}
    results: dict[str, ReleaseResult] = dict.fromkeys(open_entries, ReleaseResult.RECORDED)
    read_quotas = set[str]()
    deadline = time.monotonic() + READ_BACK_STALL_S
    while open_entries and reader.detect_hierarchy():
        cgroups = [(i, c.cgroup) for i, c in open_entries.items()]
        actual_by_id = await asyncio.to_thread(read_actual_cgroups, reader, cgroups)
        for container_id, observed in actual_by_id.items():
            entry = open_entries[container_id]
            quota = None
            if entry.quota is not None:
                quota, _period = await asyncio.to_thread(reader.read_cfs_limit, entry.cgroup)
            is_written = (
                (not entry.cpus or observed.cpus == CPUSet.parse(entry.cpus))
                and (not entry.mems or observed.mems == NUMASet.parse(entry.mems))
                and quota in (None, entry.quota)
            )
            results[container_id] = ReleaseResult.RELEASED if is_written else ReleaseResult.FAILED
            if quota is not None and quota == entry.quota:
                read_quotas.add(container_id)
            if is_written:
                del open_entries[container_id]
                deadline = time.monotonic() + READ_BACK_STALL_S
        if not actual_by_id or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.05)
    return tuple(
        replace(
            c,
            result=results.get(c.container_id, c.result),
            is_quota_read=c.container_id in read_quotas,
        )
        for c in planned
    )


def _archive_checkpoint(store: CheckpointStore, has_entries: bool) -> str:
    """Archive or remove the journal, so a later agent starts anew; returns its new path."""
    archive_path = os.path.join(store.directory, RELEASED_CHECKPOINT_NAME)
    try:
        if has_entries:
            os.replace(store.path, archive_path)
            return archive_path
        os.unlink(store.path)
    except OSError:
        pass  # missing, or in a read-only directory: then there is nothing to forget
    return ""
