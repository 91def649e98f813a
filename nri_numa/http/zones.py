"""The document of /v1/zones: each NUMA node as who schedules counts it, all of one moment.

The names of its fields are a promise, as those of `nri_numa.http.responses` are.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from nri_numa.http.responses import Document


class ZoneHugePages(Document, frozen=True, kw_only=True):
    """Huge pages of one size on one NUMA node, in bytes."""

    size_bytes: int
    capacity_bytes: int
    allocatable_bytes: int
    available_bytes: int


class ZoneDevices(Document, frozen=True, kw_only=True):
    """Devices of one extended resource on one NUMA node, as the kubelet counts them."""

    resource: str
    allocatable: Annotated[int, Meta(description="Healthy ones.")]
    available: Annotated[int, Meta(description="Those that no pod has.")]


class Distance(Document, frozen=True, kw_only=True):
    """How far a NUMA node is, in the firmware's measure; 10 is itself."""

    id: int
    value: int


class Zone(Document, frozen=True, kw_only=True):
    """One NUMA node: what it has, what containers may have of it, and what is left."""

    id: int
    socket: Annotated[
        int | None, Meta(description="Socket of its CPUs; null without CPUs, or with several.")
    ]
    distances: tuple[Distance, ...]
    cpus: Annotated[int, Meta(description="CPUs that are online.")]
    cpu_allocatable_milli: Annotated[
        int, Meta(description="Oversale and capacity factor are in it.")
    ]
    cpu_available_milli: int
    exclusive_cpus: Annotated[
        int, Meta(description="CPUs that one container could have exclusively, were it alone.")
    ]
    free_exclusive_cpus: Annotated[
        int, Meta(description="CPUs that one more container could have exclusively.")
    ]
    shared_cpus: Annotated[int, Meta(description="CPUs of the shared pool.")]
    memory_bytes: int
    memory_allocatable_bytes: int
    memory_available_bytes: int
    huge_pages: tuple[ZoneHugePages, ...]
    capacity_factor: float
    measured_factor: Annotated[
        float,
        Meta(
            description="What of its CPUs' time the host leaves, as measured, where "
            "measuredCapacity.mode is act; capacityFactor has it too, unless something else counts."
        ),
    ] = 1.0
    devices: tuple[ZoneDevices, ...] = ()
    core_kind: Annotated[
        str,
        Meta(
            description="Of a hybrid machine: performance, efficient, or mixed where the NUMA node "
            "has both; empty elsewhere."
        ),
    ] = ""
    pcie_roots: Annotated[
        tuple[str, ...],
        Meta(description="PCIe root complexes next to it, such as pci0000:00, with dra.enabled."),
    ] = ()


class ZonePod(Document, frozen=True, kw_only=True):
    """A pod with containers on the node."""

    namespace: str
    name: str
    qos: str


class ZoneContainer(Document, frozen=True, kw_only=True):
    """A container whose CPUs or memory are taken from the numbers."""

    pod_uid: str
    name: str


class Zones(Document, frozen=True, kw_only=True):
    """Every NUMA node as who schedules counts it, and the pods that are there."""

    serial: Annotated[int, Meta(description="Grows with every change of the state.")]
    ready: Annotated[bool, Meta(description="Containers are being placed, and really pinned.")]
    reason: Annotated[str, Meta(description="Why not; empty when ready.")]
    policy: Annotated[str, Meta(description="Policy of pods that ask for none.")]
    scope: Annotated[str, Meta(description="Scope of pods that ask for none.")]
    shares: Annotated[
        bool, Meta(description="Pods that ask for nothing share CPUs, by the defaults.")
    ]
    threads_per_core: int
    free_exclusive_cpus: Annotated[
        int | None,
        Meta(description="CPUs that containers could still have exclusively on the whole machine."),
    ] = None
    zones: tuple[Zone, ...]
    pods: Annotated[
        tuple[ZonePod, ...],
        Meta(
            description="Ordered by namespace and name, each once; Guaranteed ones from their "
            "sandbox on, before anything of them is charged."
        ),
    ]
    charged: Annotated[
        tuple[ZoneContainer, ...],
        Meta(description="Containers whose CPUs or memory are not left, ordered."),
    ] = ()
    devices_problem: Annotated[
        str | None,
        Meta(
            description="Why the kubelet's devices are not known, as a sentence; empty when they "
            "are; null where nobody asks (devices.count)."
        ),
    ] = None
