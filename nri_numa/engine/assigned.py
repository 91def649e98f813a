"""Annotation ``assigned``: written and signed, read back and verified.

Every container whose creation is seen gets it, also an unpinned one: the runtime keeps it while the
container lives, so decisions are known when the checkpoint is lost. Runtimes may copy annotations
of pods to their containers, and other plugins write annotations too, so it ends with a signature
over the container's id and the text before it (HMAC-SHA-256, RFC 2104, cut to 128 bits).

A signed one was decided, and the runtime says what has changed since. Without a valid signature
(the key was lost with the state directory, or it was forged) it counts only as far as the pod could
have been given the same today: the pod must ask for it, the runtime must have it, and reserved CPUs
are never owned.
"""

from __future__ import annotations

import hmac
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from nri_numa.engine.captions import facts_of_caption
from nri_numa.engine.foreign_pins import parse_foreign_cpuset
from nri_numa.engine.node_model import NodeModel, uses_kubelet_rules
from nri_numa.engine.old_records import OLD_FORMAT, with_new_names
from nri_numa.engine.place.listed_cpus import is_yielding_list, may_be_exclusive
from nri_numa.engine.place.memory import cpu_and_memory_charges
from nri_numa.engine.place.needs import exclusive_cpu_count_text
from nri_numa.engine.request.demand import (
    Demand,
    allocated_slots,
    complete_options,
    compute_demand,
    cpu_size_milli,
    hugepage_demand,
    own_request_milli,
    requested_memory,
    share_of_first_container,
    unpinned_memory_request,
)
from nri_numa.engine.request.options import PlacementOptions
from nri_numa.engine.state import (
    COMPUTED_KINDS,
    NO_CHARGE,
    Allocation,
    ContainerKind,
    container_identity,
    find_allocation_contradiction,
)
from nri_numa.model.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet
from nri_numa.model.machine import (
    NO_CFS_QUOTA,
    count_text,
    cpus_text,
    human_milli,
    inflect_for_ids,
    numa_text,
)
from nri_numa.model.reasons import Rejection
from nri_numa.model.workload import SMT, Container, CPUMode, PodSandbox, Policy, Resources

ASSIGNED_KEY: Final = "assigned"
"""Annotation key, below the prefix, that carries the decision on the container."""

ASSIGNED_FORMAT: Final = 2

_SIGNATURE_FIELD: Final = ',"signature":"'
_SIGNATURE_HEX_DIGITS: Final = 32
"""Hexadecimal digits of a signature: 128 bits, what RFC 2104 calls half of the hash."""


class _Document(msgspec.Struct, frozen=True, omit_defaults=True):
    """The annotation, in the order in which it is written.

    Attributes:
        format: number of the format; the first one, which is still read, has no number.
        cpus: the kernel list that the container starts with; empty when it is left alone.
        exclusive: the CPUs of a list are exclusive.
        migrating_from: memory nodes that its memory migrates from.
        yielding_cpus: a list that yields to exclusive CPUs; the container may start with fewer of
            them.
        sum, pool: it has its pod's sum, and shares the pod pool.
    """

    format: int
    cpus: str
    mems: NUMASet
    policy: Policy
    kind: ContainerKind
    numa_nodes: NUMASet = msgspec.field(name="numaNodes")
    aligned: bool
    reason: str
    idle_siblings: str = msgspec.field(name="idleSiblings", default="")
    smt: SMT = SMT.ANY
    exclusive: bool = False
    movable: bool = False
    migrating_from: NUMASet = msgspec.field(name="migratingFrom", default=NO_NUMA_NODES)
    yielding_cpus: str = msgspec.field(name="yieldingCPUs", default="")
    sum: bool = False
    pool: bool = False

    @property
    def current_smt(self) -> SMT:
        """Before it was recorded, only isolation kept siblings idle."""
        return SMT.ISOLATE if self.idle_siblings and self.smt is SMT.ANY else self.smt


def _decode_numa_set(_: type, value: object) -> NUMASet:
    return NUMASet.parse(msgspec.convert(value, str))


_encode_document: Final = msgspec.json.Encoder(enc_hook=str).encode
_decode_fields: Final = msgspec.json.Decoder(dict[str, Any]).decode


def decode_assignment_fields(text: str) -> dict[str, Any]:
    """Decode the fields of an annotation, with their current names.

    Raises:
        ValueError, msgspec.DecodeError, RecursionError: it cannot be read.
    """
    fields = _decode_fields(text)
    if fields.get("format", OLD_FORMAT) == OLD_FORMAT:
        return with_new_names(fields) | {"format": ASSIGNED_FORMAT}
    return fields


def _decode_document(text: str) -> _Document | str:
    """Decode an annotation; return a text if a newer version wrote it."""
    fields = decode_assignment_fields(text)
    if fields["format"] != ASSIGNED_FORMAT:
        number = str(fields["format"])[:20]
        return f"is in format {number}, expected at most {ASSIGNED_FORMAT}"
    return msgspec.convert(fields, _Document, dec_hook=_decode_numa_set)


def encode_assignment(allocation: Allocation, cpus: str, key: bytes) -> str:
    """The annotation of a container that starts with ``cpus``, which are empty if left alone."""
    is_migrating = allocation.movable and bool(allocation.migrating_from)
    document = _Document(
        format=ASSIGNED_FORMAT,
        cpus=cpus,
        mems=allocation.mems,
        policy=allocation.policy,
        kind=allocation.kind,
        numa_nodes=allocation.numa_nodes,
        aligned=allocation.aligned,
        reason=allocation.reason,
        idle_siblings=str(allocation.idle_siblings),
        smt=allocation.smt,
        exclusive=allocation.exclusive and allocation.kind is ContainerKind.LISTED,
        movable=allocation.movable,
        migrating_from=allocation.migrating_from if is_migrating else NO_NUMA_NODES,
        yielding_cpus=str(allocation.cpus) if allocation.yields_to_exclusive else "",
        sum=allocation.uses_pod_resources,
        pool=allocation.is_in_pod_pool,
    )
    text = _encode_document(document).decode()
    return sign_document(text[:-1], allocation.container_id, key) if key else text


def sign_document(text: str, container_id: str, key: bytes) -> str:
    """Complete a JSON object without its closing brace by the signature of its text."""
    return f'{text}{_SIGNATURE_FIELD}{assignment_signature(key, container_id, text)}"}}'


def is_signed(text: str, container_id: str, key: bytes) -> bool:
    """True if the annotation on this very container is what the holder of the key wrote."""
    body, field, signature = text.rpartition(_SIGNATURE_FIELD)
    if not (key and field and len(signature) == _SIGNATURE_HEX_DIGITS + 2 and signature.isascii()):
        return False
    return hmac.compare_digest(signature, assignment_signature(key, container_id, body) + '"}')


def assignment_signature(key: bytes, container_id: str, text: str) -> str:
    """The signature of a text on this very container, `_SIGNATURE_HEX_DIGITS` long."""
    # No id holds a zero byte, so no two pairs of id and text give the same message.
    message = f"{container_id}\0{text}".encode(errors="surrogatepass")
    return hmac.digest(key, message, "sha256").hex()[:_SIGNATURE_HEX_DIGITS]


def adopt_assignment(
    machine: NodeModel, text: str, pod: PodSandbox, container: Container
) -> Allocation | str:
    """Read an annotation: what the container has, or why it does not count, as a sentence's end."""
    decoded = _decode_allocation(machine, text, pod, container)
    if isinstance(decoded, str):
        return decoded
    allocation, has_same_cpus = decoded
    if beyond := _cpus_beyond_lists_text(machine, pod, container, allocation):
        # Given back by `release`, or widened by another program.
        return f"is out of date: the runtime has {beyond} for it, which its pod did not request"
    if is_signed(text, container.id, machine.key):
        allocation = replace(allocation, **facts_of_caption(allocation.reason))
    else:
        checked = _check_unsigned(machine, pod, container, allocation)
        if isinstance(checked, str):
            return f"is not signed by this agent, and {checked}"
        allocation = checked
    size_milli = cpu_size_milli(container.resources)
    has_milli = 1000 * len(allocation.cpus)
    is_size = has_milli == size_milli
    if allocation.is_in_pod_pool:
        is_size = has_milli <= size_milli and size_milli % 1000 == 0
    if allocation.exclusive and not (has_same_cpus or is_size):
        # Resized since, and perhaps no owner any more: its present size must say the same.
        count = count_text(len(allocation.cpus), "CPU")
        size_text = f"its size is {human_milli(size_milli)}"
        return f"is out of date: the runtime has {count} for it, and {size_text}"
    idle_bits = 0
    if allocation.smt is SMT.ISOLATE:
        # Which siblings are kept idle follows from the CPUs it has now, not from those of then.
        index, bits = machine.allocator_index, allocation.cpus.bits
        idle_bits = index.threads_of(index.cores_touched(bits)) & ~bits
    allocation = replace(allocation, idle_siblings=CPUSet.from_bits(idle_bits))
    return _self_contradiction_text(allocation) or allocation


def _check_unsigned(
    machine: NodeModel, pod: PodSandbox, container: Container, claim: Allocation
) -> Allocation | str:
    """Check a claim against what the pod could be given today; or say what contradicts it."""
    # Its cpuset is the one in question, so no other program's.
    bare = replace(container, resources=replace(container.resources, cpus=""))
    requested = machine.options_resolver(pod, container)
    requested = complete_options(machine.settings, pod, bare, requested)
    if isinstance(requested, Rejection):
        return "the options of its pod are invalid"
    problem = _implausible_text(machine, pod, container, requested, claim)
    return problem or replace(claim, smt=requested.smt if claim.exclusive else SMT.ANY)


def _cpus_beyond_lists_text(
    machine: NodeModel, pod: PodSandbox, container: Container, claim: Allocation
) -> str:
    """CPUs or memory nodes beyond the pod's lists, or a shared container's NUMA nodes, in words."""
    options = machine.options_resolver(pod, container)
    listed = PlacementOptions() if isinstance(options, Rejection) else options
    cpus = claim.cpus
    limit = listed.listed_cpus if claim.kind is ContainerKind.LISTED else NO_CPUS
    if claim.kind is ContainerKind.SHARED:
        cpus = parse_foreign_cpuset(container.resources.cpus)
        limit = machine.topology.cpus_of(claim.numa_nodes)
    if limit and cpus - limit:
        return cpus_text(cpus - limit)
    if listed.listed_mems and claim.mems - listed.listed_mems:
        return numa_text(claim.mems - listed.listed_mems)
    return ""


def _self_contradiction_text(allocation: Allocation) -> str:
    contradiction = find_allocation_contradiction(allocation)
    return f"contradicts itself: {contradiction}" if contradiction else ""


def _decode_allocation(
    machine: NodeModel, text: str, pod: PodSandbox, container: Container
) -> tuple[Allocation, bool] | str:
    """Read the allocation, and whether the runtime still has the CPUs it names."""
    resources, cpus = container.resources, NO_CPUS
    try:
        document = _decode_document(text)
        if isinstance(document, str):
            return document
        mems = document.mems
        # The runtime is the truth for what is.
        if mems and resources.mems:
            mems = NUMASet.parse(resources.mems)
        if document.kind in (ContainerKind.EXCLUSIVE, ContainerKind.LISTED):
            cpus = CPUSet.parse(document.yielding_cpus or resources.cpus or document.cpus)
        elif document.kind is ContainerKind.FOREIGN:
            cpus = CPUSet.parse(resources.cpus)
    except (ValueError, msgspec.DecodeError, RecursionError):
        return "cannot be read"
    migrating_from = document.migrating_from & mems
    mems = mems - migrating_from or mems
    missing = (document.numa_nodes | mems) - machine.topology.numa_ids
    if missing:
        return f"names {numa_text(missing)}, which the machine does not have"
    has_same_cpus = str(cpus) == document.cpus
    if document.kind is ContainerKind.EXCLUSIVE and not has_same_cpus:
        nodes_text = numa_text(machine.topology.numa_of(cpus))
        reason = f"{exclusive_cpu_count_text(len(cpus))} on {nodes_text}"
        document = replace(document, reason=reason)
    allocation = _allocation_from(machine, pod, container, document, cpus, mems)
    if migrating_from - mems:
        charges = dict.fromkeys(migrating_from, next(iter(allocation.charges.values()), NO_CHARGE))
        allocation = allocation.with_migration_started(
            replace(allocation, mems=migrating_from, charges=charges)
        )
    return _self_contradiction_text(allocation) or (allocation, has_same_cpus)


def _size_milli(document: _Document, resources: Resources, owned_cpus: int) -> int:
    """Size in thousandths of a CPU: the exclusive CPUs, outside of the pod pool."""
    if owned_cpus and not document.pool:
        return 1000 * owned_cpus
    return max(1000 * owned_cpus, cpu_size_milli(resources))


def _allocation_from(
    machine: NodeModel,
    pod: PodSandbox,
    container: Container,
    document: _Document,
    cpus: CPUSet,
    mems: NUMASet,
) -> Allocation:
    """Build the allocation of a container with its current CPUs and memory nodes."""
    resources, kind = container.resources, document.kind
    is_owner = kind is ContainerKind.EXCLUSIVE or (
        kind is ContainerKind.LISTED and document.exclusive
    )
    numa_nodes = document.numa_nodes
    slots = ""
    if kind is ContainerKind.EXCLUSIVE:
        numa_nodes = machine.topology.numa_of(cpus)
        slots = allocated_slots(machine.settings, container)
    cpu_milli = _size_milli(document, resources, len(cpus) if is_owner else 0)
    if kind in (ContainerKind.UNPINNED, ContainerKind.FOREIGN) and not mems:
        cpu_milli, numa_nodes = 0, NO_NUMA_NODES
    # Exclusive CPUs, or the request in equal parts.
    pod_share = share_of_first_container(pod, resources)
    requested_milli = min(cpu_milli, pod_share.limit_milli(own_request_milli(pod.qos, resources)))
    milli_by_node = dict.fromkeys(numa_nodes, requested_milli // max(1, len(numa_nodes)))
    if is_owner:
        counts = machine.topology.cpu_count_by_node(cpus)
        milli_by_node = {i: 1000 * count for i, count in counts.items()}
    memory_bytes = max(0, resources.memory_limit or 0) if mems else 0
    hugepages = hugepage_demand(resources, []) if mems else {}
    total_memory, unpinned_memory = machine.total_memory_bytes, 0
    if not mems and kind is not ContainerKind.FOREIGN:  # the kubelet may grant that one's
        unpinned_memory = unpinned_memory_request(pod, container, total_memory, NO_CHARGE)
    return Allocation(
        **container_identity(pod, container),
        kind=kind,
        cpus=NO_CPUS if kind is ContainerKind.FOREIGN else cpus,
        foreign_cpus=cpus if kind is ContainerKind.FOREIGN else NO_CPUS,
        exclusive=is_owner,
        yields_to_exclusive=kind is ContainerKind.LISTED and bool(document.yielding_cpus),
        numa_nodes=numa_nodes,
        mems=mems,
        charges=cpu_and_memory_charges(
            numa_nodes,
            milli_by_node,
            mems,
            requested_memory(pod, container, total_memory, memory_bytes, pod_share),
            machine.memory_capacity,
            hugepages,
            {size: machine.hugepages_capacity(size) for size in hugepages},
            kubelet_memory=machine.settings.kubelet.memory,
        ),
        cpu_milli=cpu_milli,
        memory_bytes=memory_bytes,
        hugepages=hugepages,
        policy=document.policy,
        smt=document.current_smt if is_owner else SMT.ANY,
        aligned=document.aligned,
        reason=document.reason,
        unpinned_memory=unpinned_memory,
        movable=document.movable and kind in COMPUTED_KINDS,
        uses_pod_resources=document.sum,
        is_in_pod_pool=document.pool,
        lifted_quota=0 if resources.cpu_quota == NO_CFS_QUOTA and is_owner else None,
        slots=slots,
    )


def _implausible_text(
    machine: NodeModel,
    pod: PodSandbox,
    container: Container,
    requested: PlacementOptions,
    claim: Allocation,
) -> str:
    """Say what is implausible of a claim, as the end of a sentence; empty if nothing is."""
    if claim.kind is ContainerKind.UNPINNED:
        if uses_kubelet_rules(machine, requested) and not requested.is_unpinned:
            return ""  # it shares all CPUs, as under the kubelet, whatever its memory
        if claim.mems:
            listed = requested.listed_mems
            if claim.mems <= listed:
                return ""
            return _unlisted_cpus_text(numa_text(claim.mems), listed)
    if claim.kind not in (ContainerKind.EXCLUSIVE, ContainerKind.LISTED):
        if requested.is_unpinned is not (claim.kind is ContainerKind.SHARED):
            return ""
        demand_text = "nothing" if requested.is_unpinned else "CPUs or memory nodes"
        return f"says {claim.kind}, but its pod requests {demand_text}"
    reserved = claim.cpus & machine.settings.reserved_cpus
    if claim.exclusive and reserved:
        verb = inflect_for_ids(reserved, "is", "are")
        return f"names {cpus_text(reserved)}, which {verb} reserved"
    if not container.resources.cpus:
        return f"names {cpus_text(claim.cpus)}, which the runtime did not set"
    demand = compute_demand(pod, container, requested, machine.total_memory_bytes)
    if claim.kind is ContainerKind.LISTED:
        return _implausible_list_text(requested, claim, demand)
    count = 0 if isinstance(demand, Rejection) else demand.exclusive_cpus
    if len(claim.cpus) > count:
        return f"names {count_text(len(claim.cpus), 'exclusive CPU')}, but its pod requests {count}"
    return ""


def _implausible_list_text(
    requested: PlacementOptions, claim: Allocation, demand: Demand | Rejection
) -> str:
    """Say what is implausible of a claimed list, as the end of a sentence."""
    if not claim.cpus <= requested.listed_cpus:
        return _unlisted_cpus_text(cpus_text(claim.cpus), requested.listed_cpus)
    if claim.exclusive:
        text = f"names exclusive {cpus_text(claim.cpus)}"
        if requested.cpus is not CPUMode.EXCLUSIVE:
            return f"{text}, but its pod only lists them"
        if isinstance(demand, Rejection) or not may_be_exclusive(requested, claim.cpus, demand):
            return f"{text}, which its pod does not request"
    elif not (claim.yields_to_exclusive or isinstance(demand, Rejection)) and is_yielding_list(
        requested, claim.cpus, demand
    ):
        return f"says that it keeps {cpus_text(claim.cpus)}, which its pod does not request"
    return ""


def _unlisted_cpus_text(claimed: str, listed: CPUSet | NUMASet) -> str:
    return f"names {claimed}, but its pod lists {listed or 'none'}"
