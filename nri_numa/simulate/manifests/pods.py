"""Pods and their containers as manifests describe them, after the API server's defaulting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec

from nri_numa.engine.request.annotations import Missing, addressees
from nri_numa.engine.values.workload import QoSClass


class Role(StrEnum):
    """What a container is in its pod: one that runs and ends before others, beside, or itself."""

    INIT = "init"
    SIDECAR = "sidecar"
    """An init container with ``restartPolicy: Always``: it starts in its turn and stays."""
    APP = "app"


class Amounts(msgspec.Struct, frozen=True, kw_only=True):
    """Requests or limits; None is *not given*.

    Attributes:
        cpu_milli: thousandths of a CPU.
        memory: bytes.
        hugepages: bytes by page size in bytes.
    """

    cpu_milli: int | None = None
    memory: int | None = None
    hugepages: Mapping[int, int] = msgspec.field(default_factory=dict)


NO_AMOUNTS = Amounts()


class ContainerManifest(msgspec.Struct, frozen=True, kw_only=True):
    """One container.

    Attributes:
        requests: with the limits where no request was given, as the API server fills in.
        slots: exclusive CPUs that it asks for by the extended resource that counts them.
        devices: how many it asks for of each resource that an inventory knows.
        claims: names of the pod's ResourceClaims that it uses, as the pod calls them.
    """

    name: str
    role: Role = Role.APP
    requests: Amounts = NO_AMOUNTS
    limits: Amounts = NO_AMOUNTS
    slots: int = 0
    devices: Mapping[str, int] = msgspec.field(default_factory=dict)
    claims: tuple[str, ...] = ()


class PodManifest(msgspec.Struct, frozen=True, kw_only=True):
    """One pod.

    Attributes:
        source: file and document it comes from.
        containers: in the order in which the kubelet creates them.
        pod_requests, pod_limits: pod-level resources (KEP-2837); None where there are none.
        critical: node-critical by its priority class.
        runtime_handler: name of its runtime class, which ordinarily is the handler's too.
    """

    source: str
    namespace: str
    name: str
    uid: str
    qos: QoSClass
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    containers: tuple[ContainerManifest, ...]
    pod_requests: Amounts | None = None
    pod_limits: Amounts | None = None
    critical: bool = False
    runtime_handler: str = ""

    @property
    def full_name(self) -> str:
        """``namespace/name``."""
        return f"{self.namespace}/{self.name}"


def unmatched(pods: Iterable[PodManifest], prefix: str) -> list[str]:
    """A sentence for each annotation that names a container which its pod does not have.

    Args:
        pods: replicas are told of once.
        prefix: of our annotations, without its slash.
    """
    found: dict[str, None] = {}
    for pod in pods:
        had = tuple(one.name for one in pod.containers)
        for name, annotation in addressees(pod.annotations, prefix).items():
            if name not in had:
                missing = Missing(annotation=annotation, name=name, had=had)
                found[f"{pod.source}: {missing.sentence}"] = None
    return list(found)


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """One document: a pod, or something that makes pods.

    Attributes:
        source: file and document.
        kind: ``Pod``, ``Deployment`` and so on.
        pods: as many as it asks for on one machine.
    """

    source: str
    kind: str
    namespace: str
    name: str
    pods: tuple[PodManifest, ...]

    @property
    def key(self) -> tuple[str, str, str]:
        """What another document must share to be a later version of this one."""
        return self.kind, self.namespace, self.name
