"""CPUs of their own without a policy, for ``staticCPUs: true``.

The kubelet's static CPU Manager with the Topology Manager's policy none: each container of a
Guaranteed pod with a whole number of CPUs owns them, wherever they are.
"""

from __future__ import annotations

from msgspec.structs import replace

from nri_numa.engine.request.demand import limit_milli, request_milli
from nri_numa.engine.values.refusal import Refusal
from nri_numa.engine.values.settings import Settings
from nri_numa.engine.values.workload import (
    Bind,
    Container,
    CPUMode,
    PodSandbox,
    Policy,
    QoSClass,
    Requested,
)

SOURCE = "staticCPUs"


def with_static_cpus(
    settings: Settings, pod: PodSandbox, container: Container, requested: Requested | Refusal
) -> Requested | Refusal:
    """Add what the setting asks for to what a container requests that says nothing about its CPUs.

    A policy, ``cpus``, ``numacpu`` and ``bind: none`` speak for themselves, and a container that
    somebody else pinned stays theirs. Memory is left alone, unless ``bind`` is given or the
    kubelet's Memory Manager is followed as well.
    """
    if (
        not settings.static_cpus
        or isinstance(requested, Refusal)
        or pod.qos is not QoSClass.GUARANTEED
        or requested.policy is not Policy.NONE
        or requested.cpus is not None
        or requested.numacpu is not None
        or requested.bind is Bind.NONE
        or container.resources.cpus
    ):
        return requested
    milli = limit_milli(container.resources, []) or request_milli(container.resources, [])
    if not milli or milli % 1000:
        return requested
    alone = (
        requested.numamem is None
        and "bind" not in requested.sources
        and not settings.kubelet_memory
    )
    return replace(
        requested,
        cpus=CPUMode.EXCLUSIVE,
        bind=Bind.CPU if alone else requested.bind,
        sources={**requested.sources, "cpus": SOURCE},
    )
