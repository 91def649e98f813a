"""Pods and containers as the NRI messages a runtime would send; for `nri_numa.embedded.demo`.

Together with `nri_numa.nri.conversion` this is the identity, which a test holds it to.
"""

from __future__ import annotations

from nri_numa.engine.values.workload import Container, PodSandbox, Resources
from nri_numa.nri.wire.pb import nri_pb2 as pb


def pod_message(pod: PodSandbox) -> pb.PodSandbox:
    """A pod sandbox as the runtime tells it."""
    message = pb.PodSandbox(
        id=pod.id,
        uid=pod.uid,
        namespace=pod.namespace,
        name=pod.name,
        labels=dict(pod.labels),
        annotations=dict(pod.annotations),
        runtime_handler=pod.runtime_handler,
    )
    message.linux.cgroup_parent = pod.cgroup_parent
    message.linux.pod_resources.CopyFrom(resources_message(pod.resources))
    return message


def container_message(container: Container) -> pb.Container:
    """A container that is about to be created, as the runtime tells it."""
    message = pb.Container(
        id=container.id,
        pod_sandbox_id=container.pod_id,
        name=container.name,
        labels=dict(container.labels),
        annotations=dict(container.annotations),
    )
    message.linux.resources.CopyFrom(resources_message(container.resources))
    message.linux.cgroups_path = container.cgroups_path
    if container.oom_score_adj is not None:
        message.linux.oom_score_adj.value = container.oom_score_adj
    return message


def resources_message(resources: Resources) -> pb.LinuxResources:
    """Linux resources; what is not given is left out, as a runtime does with zeros."""
    message = pb.LinuxResources()
    cpu = message.cpu
    if resources.cpu_shares:
        cpu.shares.value = resources.cpu_shares
    if resources.cpu_quota:
        cpu.quota.value = resources.cpu_quota
    if resources.cpu_period:
        cpu.period.value = resources.cpu_period
    cpu.cpus, cpu.mems = resources.cpus, resources.mems
    if resources.memory_limit:
        message.memory.limit.value = resources.memory_limit
    for size, amount in sorted(resources.hugepages.items()):
        message.hugepage_limits.add(page_size=_page_size(size), limit=amount)
    return message


def _page_size(size: int) -> str:
    """``2MB``, as the kubelet writes page sizes (its units are 1024 all the same)."""
    for unit, shift in (("TB", 40), ("GB", 30), ("MB", 20), ("KB", 10)):
        if size >> shift and not size % (1 << shift):
            return f"{size >> shift}{unit}"
    return f"{size}B"
