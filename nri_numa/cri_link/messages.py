"""What CRI tells of pods and containers, as the messages that NRI would have sent.

So everything behind `nri_numa.nri.handler.PluginHandler` sees one form, whichever way it came. Most
stands in the OCI spec that containerd and CRI-O show in a verbose status; where there is none, the
few resources that CRI itself has must do. A spec is JSON of the runtime, read leniently: what has
another form than the OCI runtime specification says is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nri_numa.cri.client import (
    CRIContainerState,
    CRIContainerStatus,
    CRIPodSandboxStatus,
    CRIResources,
)
from nri_numa.nri.wire.pb import nri_pb2 as pb

Json = Mapping[str, Any]

_STATES = {
    CRIContainerState.CREATED: pb.CONTAINER_CREATED,
    CRIContainerState.RUNNING: pb.CONTAINER_RUNNING,
    CRIContainerState.EXITED: pb.CONTAINER_STOPPED,
}


def pod_message(status: CRIPodSandboxStatus) -> pb.PodSandbox:
    """A pod, with the resources that the kubelet told the runtime of it."""
    pod = status.pod
    message = pb.PodSandbox(
        id=pod.id,
        name=pod.name,
        uid=pod.uid,
        namespace=pod.namespace,
        labels=pod.labels,
        annotations=pod.annotations,
        runtime_handler=pod.runtime_handler,
    )
    config = _object(status.config, "linux")
    message.linux.cgroup_parent = _text(config, "cgroup_parent")
    if resources := _object(config, "resources"):
        _fill(
            message.linux.pod_resources,
            shares=_number(resources, "cpu_shares"),
            quota=_number(resources, "cpu_quota"),
            period=_number(resources, "cpu_period"),
            limit=_number(resources, "memory_limit_in_bytes"),
        )
    for namespace in _objects(_object(status.spec, "linux"), "namespaces"):
        message.linux.namespaces.add(type=_text(namespace, "type"), path=_text(namespace, "path"))
    return message


def container_message(status: CRIContainerStatus, pod_sandbox_id: str) -> pb.Container:
    """A container as it is now."""
    spec = status.spec
    message = pb.Container(
        id=status.id,
        pod_sandbox_id=pod_sandbox_id,
        name=status.name,
        state=_STATES.get(status.state, pb.CONTAINER_UNKNOWN),
        labels=status.labels,
        annotations={**status.annotations, **_texts(_object(spec, "annotations"))},
        pid=status.pid,
    )
    process, linux = _object(spec, "process"), _object(spec, "linux")
    environment = process.get("env")
    if isinstance(environment, list):
        message.env.extend(item for item in environment if isinstance(item, str))
    message.linux.cgroups_path = _text(linux, "cgroupsPath")
    if (score := _number(process, "oomScoreAdj")) is not None:
        message.linux.oom_score_adj.value = score
    for device in _objects(linux, "devices"):
        message.linux.devices.add(
            path=_text(device, "path"),
            type=_text(device, "type"),
            major=_number(device, "major") or 0,
            minor=_number(device, "minor") or 0,
        )
    if resources := _object(linux, "resources"):
        _from_spec(message.linux.resources, resources)
    elif status.resources is not None:
        _from_cri(message.linux, status.resources)
    return message


def cri_resources(update: pb.ContainerUpdate | pb.ContainerAdjustment) -> CRIResources:
    """What an answer changes, as UpdateContainerResources takes it; 0 and empty change nothing."""
    resources = update.linux.resources
    return CRIResources(
        cpu_shares=resources.cpu.shares.value,
        cpu_quota=resources.cpu.quota.value,
        cpu_period=resources.cpu.period.value,
        memory_limit_bytes=resources.memory.limit.value,
        cpus=resources.cpu.cpus,
        mems=resources.cpu.mems,
    )


def _from_spec(message: pb.LinuxResources, resources: Json) -> None:
    cpu, memory = _object(resources, "cpu"), _object(resources, "memory")
    _fill(
        message,
        shares=_number(cpu, "shares"),
        quota=_number(cpu, "quota"),
        period=_number(cpu, "period"),
        limit=_number(memory, "limit"),
        cpus=_text(cpu, "cpus"),
        mems=_text(cpu, "mems"),
    )
    for limit in _objects(resources, "hugepageLimits"):
        size, many = _text(limit, "pageSize"), _number(limit, "limit")
        if size and many is not None and many >= 0:
            message.hugepage_limits.add(page_size=size, limit=many)
    for rule in _objects(resources, "devices"):
        added = message.devices.add(allow=rule.get("allow") is True, type=_text(rule, "type"))
        for name, number in (("major", added.major), ("minor", added.minor)):
            if (value := _number(rule, name)) is not None:
                number.value = value


def _from_cri(message: pb.LinuxContainer, resources: CRIResources) -> None:
    _fill(
        message.resources,
        shares=resources.cpu_shares or None,
        quota=resources.cpu_quota or None,
        period=resources.cpu_period or None,
        limit=resources.memory_limit_bytes or None,
        cpus=resources.cpus,
        mems=resources.mems,
    )
    for size, limit in sorted(resources.hugepage_limits.items()):
        message.resources.hugepage_limits.add(page_size=size, limit=limit)
    if resources.oom_score_adj:
        message.oom_score_adj.value = resources.oom_score_adj


def _fill(
    message: pb.LinuxResources,
    *,
    shares: int | None,
    quota: int | None,
    period: int | None,
    limit: int | None,
    cpus: str = "",
    mems: str = "",
) -> None:
    cpu = message.cpu
    cpu.cpus, cpu.mems = cpus, mems
    if shares is not None and shares >= 0:
        cpu.shares.value = shares
    if quota is not None:
        cpu.quota.value = quota
    if period is not None and period >= 0:
        cpu.period.value = period
    if limit is not None:
        message.memory.limit.value = limit


def _object(document: Json, key: str) -> Json:
    value = document.get(key)
    return value if isinstance(value, dict) else {}


def _objects(document: Json, key: str) -> Iterator[Json]:
    value = document.get(key)
    if isinstance(value, list):
        yield from (item for item in value if isinstance(item, dict))


def _text(document: Json, key: str) -> str:
    value = document.get(key)
    return value if isinstance(value, str) else ""


def _texts(document: Json) -> dict[str, str]:
    return {key: value for key, value in document.items() if isinstance(value, str)}


def _number(document: Json, key: str) -> int | None:
    """A number of 64 bits; JSON has others too."""
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if -(2**63) <= value < 2**63 else None
