"""The answers of the API, field by field. Names here are a promise to whoever reads them.

Keys are camelCase as in ``nri-numa topology -o json``; id sets are texts in the kernel's list
format, sizes are bytes, times are seconds since the epoch, CPU amounts are thousandths of a CPU.
The OpenAPI file is generated from these records (`nri_numa.http.openapi`).
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from nri_numa.config.model import camel_case

IdList = Annotated[str, Meta(description="Ids in the kernel's list format, such as 0-3,8.")]
Seconds = Annotated[float, Meta(description="Seconds since the epoch.")]


class Document(Struct, frozen=True, rename=camel_case, kw_only=True):
    """Base of all answers."""


class HugePages(Document, frozen=True, kw_only=True):
    """Huge pages of one size on one NUMA node, in bytes."""

    size_bytes: int
    total_bytes: int
    allocated_bytes: int


class NUMANodeUse(Document, frozen=True, kw_only=True):
    """One NUMA node: who has its CPUs, and what the accounting has left."""

    id: int
    cpus: IdList
    exclusive: Annotated[str, Meta(description="CPUs that belong to one container alone.")]
    idle: Annotated[str, Meta(description="Thread siblings kept idle for their neighbour.")]
    shared: Annotated[str, Meta(description="CPUs of the shared pool.")]
    reserved: Annotated[str, Meta(description="CPUs that are never given exclusively.")]
    cpu_capacity_milli: int
    cpu_allocated_milli: int
    cpu_available_milli: int
    memory_bytes: int
    memory_allocated_bytes: int
    memory_available_bytes: int
    huge_pages: tuple[HugePages, ...] = ()
    capacity_factor: float = 1.0


class Assignment(Document, frozen=True, kw_only=True):
    """One container and what it has."""

    id: str
    pod_uid: str
    namespace: str
    pod: str
    container: str
    kind: Annotated[
        str, Meta(description="exclusive, shared, explicit, unbound or foreign (pinned by others).")
    ]
    policy: str
    qos: str
    smt: str
    cpus: Annotated[str, Meta(description="CPUs it runs on; empty when they are left alone.")]
    mems: Annotated[str, Meta(description="Its memory nodes; empty when they are left alone.")]
    numa_nodes: Annotated[str, Meta(description="NUMA nodes that its CPUs belong to.")]
    idle: Annotated[str, Meta(description="Thread siblings kept idle for it.")]
    preferred: Annotated[bool, Meta(description="False when a wider set had to be taken.")]
    reason: str
    cpu_milli: int
    memory_bytes: int
    since: Seconds


class NodeUse(Document, frozen=True, kw_only=True):
    """The node as a whole; the head of the list of assignments."""

    serial: Annotated[int, Meta(description="Grows with every change of the state.")]
    shared_pool: IdList
    numa_nodes: tuple[NUMANodeUse, ...]


class Assignments(NodeUse, frozen=True, kw_only=True):
    """Every container on the node."""

    containers: tuple[Assignment, ...]


class Refusal(Document, frozen=True, kw_only=True):
    """A container that was refused."""

    namespace: str
    pod: str
    container: str
    reason: str
    message: str
    at: Seconds


class Refusals(Document, frozen=True, kw_only=True):
    """The latest refusals, newest first."""

    refusals: tuple[Refusal, ...]


class Explanation(Document, frozen=True, kw_only=True):
    """Why one container is where it is, or why it was refused."""

    namespace: str
    pod: str
    container: str
    outcome: Annotated[str, Meta(description="admitted or refused.")]
    summary: str
    steps: Annotated[
        tuple[str, ...], Meta(description="How the decision came about; empty when not kept.")
    ]
    assignment: Assignment | None = None
    refusal: Refusal | None = None
    details: Annotated[
        dict[str, Any] | None,
        Meta(
            description="What the steps are made from: inputs with their sources, what each "
            "resource could have had, what the losers lacked. Fields may be added."
        ),
    ] = None


class Explanations(Document, frozen=True, kw_only=True):
    """What is known about the containers of a pod, or about one of them."""

    explanations: tuple[Explanation, ...]


class Link(Document, frozen=True, kw_only=True):
    """The link to the container runtime."""

    state: str
    detail: str
    runtime: str
    runtime_version: str


class Checkpoint(Document, frozen=True, kw_only=True):
    """The saved state."""

    written_at: Seconds | None
    problem: str


class Status(Document, frozen=True, kw_only=True):
    """The agent itself."""

    version: str
    started_at: Seconds
    observe: Annotated[bool, Meta(description="Decides and reports, but changes nothing.")]
    ready: bool
    serial: int
    containers: Annotated[dict[str, int], Meta(description="Number of containers by kind.")]
    link: Link
    checkpoint: Checkpoint


class Readiness(Document, frozen=True, kw_only=True):
    """Whether containers are being placed."""

    ready: bool
    reason: Annotated[str, Meta(description="Why not; empty when ready.")]


class ErrorBody(Document, frozen=True, kw_only=True):
    """What went wrong."""

    reason: Annotated[str, Meta(description="A short CamelCase name.")]
    message: str


class Error(Document, frozen=True, kw_only=True):
    """Every answer with a status of 400 and above."""

    error: ErrorBody


class NUMAInfoData(Struct, frozen=True, kw_only=True):
    """One entry for each NUMA node, in the order of their ids."""

    nodenums: int
    cpulist: Annotated[tuple[str, ...], Meta(description="Online CPUs, each by its number: 0,2,4.")]
    memsize: Annotated[tuple[str, ...], Meta(description="Bytes of memory, as texts.")]


class NUMAInfo(Struct, frozen=True, kw_only=True):
    """The machine in the form of the numacpu and numamem node annotations."""

    code: int
    message: str
    data: NUMAInfoData


TopologyDocument = dict[str, Any]
"""As `nri_numa.topology.document.topology_document` makes it."""
