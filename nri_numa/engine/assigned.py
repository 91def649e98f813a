"""Containers that came without us: what they carry, signed, read back and verified.

Every container that is seen while it is created gets the annotation ``assigned``, also one that
nothing asks to pin: the runtime keeps it for as long as the container lives, so it tells ours from
others when the checkpoint is lost. A runtime may be set up to copy annotations of pods to
their containers, and other plugins write annotations too, so the text alone proves nothing. It ends
with a signature over the container's id and the text before it (HMAC-SHA-256, RFC 2104, cut to 128
bits). No other program has the key, and the signature of one container is worth nothing on another.

One with our signature is ours: what it says was decided, and the runtime says what has changed
since. Without it (the key was lost with the state directory, or it was forged) it is believed
only as far as the pod could have been given the same today: the pod must ask for it, the runtime
must have it, and reserved CPUs are never owned.
"""

from __future__ import annotations

import hmac
import json
from typing import Final

from msgspec.structs import replace

from nri_numa.engine.decision import NodeModel, uses_kubelet_rules
from nri_numa.engine.foreign_pins import parse_foreign_cpuset
from nri_numa.engine.place.explicit import is_yielding_list, may_be_exclusive
from nri_numa.engine.place.memory import charge_nodes
from nri_numa.engine.place.needs import exclusive_cpu_count_text
from nri_numa.engine.request.demand import (
    allocated_slots,
    compute_demand,
    cpu_size_milli,
    hugepage_demand,
    requested_cpu_milli,
    requested_memory,
    with_slots,
    with_static_cpus,
)
from nri_numa.engine.state import (
    COMPUTED_KINDS,
    NO_CHARGE,
    Allocation,
    ContainerKind,
    container_identity,
    find_contradiction,
)
from nri_numa.model.cpuset import NO_CPUS, CPUSet, ListFormatError, NUMASet
from nri_numa.model.machine import NO_QUOTA, cpus_text, inflect_for_ids, numa_text
from nri_numa.model.workload import (
    SMT,
    Container,
    CPUMode,
    PlacementOptions,
    PodSandbox,
    Policy,
    Rejection,
)

ASSIGNED_KEY: Final = "assigned"
"""Annotation key, below the prefix, that carries the decision on the container."""

_SIGNATURE_FIELD: Final = ',"signature":"'
_SIGNATURE_HEX_DIGITS: Final = 32
"""Hexadecimal digits of a signature: 128 bits, what RFC 2104 calls half of the hash."""
_encode_json: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def encode_assignment(allocation: Allocation, cpus: str, key: bytes) -> str:
    """The annotation of one container: a short JSON object, enough to adopt the container again.

    ``cpus`` is the kernel list it starts with; empty when it is left alone.
    """
    document: dict[str, object] = {
        "cpus": cpus,
        "mems": str(allocation.mems),
        "policy": allocation.policy,
        "kind": allocation.kind,
        "numa": str(allocation.numa_nodes),
        "preferred": allocation.aligned,
        "reason": allocation.reason,
    }
    if allocation.idle_siblings:
        document["idle"] = str(allocation.idle_siblings)
    if allocation.smt is not SMT.ANY:
        document["smt"] = allocation.smt.value
    if allocation.exclusive and allocation.kind is ContainerKind.LISTED:
        document["owned"] = True
    if allocation.movable:
        document["movable"] = True
        if allocation.migrating_from:
            document |= {
                "leaves": str(allocation.migrating_from),
                "ahead": allocation.moved_proactively,
            }
    if allocation.yields_to_exclusive:
        document["soft"] = str(allocation.cpus)  # it may start with fewer of them
    text = _encode_json(document)
    return sign_document(text[:-1], allocation.container_id, key) if key else text


def sign_document(text: str, container_id: str, key: bytes) -> str:
    """Finish a JSON object, given without its closing brace, with the signature of its text."""
    return f'{text}{_SIGNATURE_FIELD}{sign_assignment(key, container_id, text)}"}}'


def is_signed(text: str, container_id: str, key: bytes) -> bool:
    """Whether the annotation on this very container is what the holder of the key wrote."""
    body, found, rest = text.rpartition(_SIGNATURE_FIELD)
    if not (key and found and len(rest) == _SIGNATURE_HEX_DIGITS + 2 and rest.isascii()):
        return False
    return hmac.compare_digest(rest, sign_assignment(key, container_id, body) + '"}')


def sign_assignment(key: bytes, container_id: str, text: str) -> str:
    """The signature of a text on this very container, `_SIGNATURE_HEX_DIGITS` long."""
    # No id holds a zero byte, so no two pairs of id and text give the same message.
    message = f"{container_id}\0{text}".encode(errors="surrogatepass")
    return hmac.digest(key, message, "sha256").hex()[:_SIGNATURE_HEX_DIGITS]


def adopt_assignment(
    machine: NodeModel, text: str, pod: PodSandbox, container: Container
) -> Allocation | str:
    """Read one annotation.

    Returns what the container has, or why the annotation is not believed, as the end of a sentence.
    """
    read = _decode_assignment(machine, text, pod, container)
    if isinstance(read, str):
        return read
    allocation, same = read
    if outside := _cpus_beyond_lists_text(machine, pod, container, allocation):
        # Given back by `release`, or widened by another program.
        return f"is out of date: the runtime has {outside} for it, which it did not ask for"
    signed = is_signed(text, container.id, machine.key)
    if not signed:
        # Its cpuset is the one in question, so no other program's.
        bare = replace(container, resources=replace(container.resources, cpus=""))
        requested = with_slots(machine.settings, pod, bare, machine.resolve_options(pod, container))
        requested = with_static_cpus(machine.settings, pod, bare, requested)
        if isinstance(requested, Rejection):
            return "carries no signature of ours, and what its pod asks for cannot be read"
        why = _check_plausible(machine, pod, container, requested, allocation)
        if why:
            return f"carries no signature of ours, and {why}"
        allocation = replace(allocation, smt=requested.smt if allocation.exclusive else SMT.ANY)
    if (
        allocation.exclusive
        and not same
        and allocation.cpu_milli != cpu_size_milli(container.resources)
    ):
        # Resized since, and perhaps no owner any more: its present size must say the same.
        return (
            f"is out of date: the runtime has {len(allocation.cpus)} CPUs for it, and it may use "
            f"{cpu_size_milli(container.resources)}m"
        )
    idle = NO_CPUS
    if allocation.smt is SMT.ISOLATE:
        # Which siblings are kept idle follows from the CPUs it has now, not from those of then.
        index = machine.allocator_index
        cpus = allocation.cpus.bits
        idle = CPUSet.from_bits(index.threads_of(index.cores_touched(cpus)) & ~cpus)
    allocation = replace(allocation, idle_siblings=idle)
    return _contradiction_text(allocation) or allocation


def _cpus_beyond_lists_text(
    machine: NodeModel, pod: PodSandbox, container: Container, claim: Allocation
) -> str:
    """What the runtime has beyond the pod's lists, or a shared container's NUMA nodes, in words."""
    asked = machine.resolve_options(pod, container)
    listed = PlacementOptions() if isinstance(asked, Rejection) else asked
    cpus, within = claim.cpus, listed.listed_cpus if claim.kind is ContainerKind.LISTED else NO_CPUS
    if claim.kind is ContainerKind.SHARED:
        cpus = parse_foreign_cpuset(container.resources.cpus)
        within = machine.topology.cpus_of(claim.numa_nodes)
    if within and cpus - within:
        return cpus_text(cpus - within)
    if listed.listed_mems and claim.mems - listed.listed_mems:
        return numa_text(claim.mems - listed.listed_mems)
    return ""


def _contradiction_text(allocation: Allocation) -> str:
    found = find_contradiction(allocation)
    return f"contradicts itself: {found}" if found else ""


def _decode_assignment(
    machine: NodeModel, text: str, pod: PodSandbox, container: Container
) -> tuple[Allocation, bool] | str:
    """What the annotation says, and whether the runtime still has the CPUs it names."""
    resources = container.resources
    try:
        document = json.loads(text)
        kind = ContainerKind(document["kind"])
        mems = NUMASet.parse(document["mems"])
        if mems and resources.mems:
            mems = NUMASet.parse(resources.mems)
        leaves = NUMASet.parse(document.get("leaves", "")) & mems
        mems = mems - leaves or mems
        numa_nodes = NUMASet.parse(document["numa"])
        # Before it was recorded, only isolation kept siblings idle.
        smt = SMT(document.get("smt", SMT.ISOLATE if document.get("idle") else SMT.ANY))
        policy = Policy(document["policy"])
        preferred = bool(document["preferred"])
        reason = str(document["reason"])
        reason.encode()  # half a pair of surrogates could be written nowhere: no checkpoint, no API
        cpus = NO_CPUS
        if kind in (ContainerKind.EXCLUSIVE, ContainerKind.LISTED):
            # The runtime is the truth for what is.
            cpus = CPUSet.parse(document.get("soft") or resources.cpus or document["cpus"])
        same = str(cpus) == document["cpus"]
        pinned = CPUSet.parse(resources.cpus) if kind is ContainerKind.FOREIGN else NO_CPUS
    except (ValueError, KeyError, TypeError, ListFormatError, AttributeError, RecursionError):
        return "cannot be read"
    missing = (numa_nodes | mems) - machine.topology.numa_ids
    if missing:
        return f"names {numa_text(missing)}, which the machine does not have"
    owned = kind is ContainerKind.EXCLUSIVE or (
        kind is ContainerKind.LISTED and bool(document.get("owned"))
    )
    soft = kind is ContainerKind.LISTED and bool(document.get("soft"))
    if kind is ContainerKind.EXCLUSIVE:
        numa_nodes = machine.topology.numa_of(cpus)
        reason = (
            reason if same else f"{exclusive_cpu_count_text(len(cpus))} on {numa_text(numa_nodes)}"
        )
    milli = len(cpus) * 1000 if owned else cpu_size_milli(container.resources)
    if kind in (ContainerKind.UNPINNED, ContainerKind.FOREIGN) and not mems:
        milli, numa_nodes = 0, NUMASet()
    memory = max(0, resources.memory_limit or 0) if mems else 0
    on_node = {i: 1000 * count for i, count in machine.topology.cpu_count_by_node(cpus).items()}
    if not owned:
        paid = min(milli, requested_cpu_milli(pod, resources))
        on_node = dict.fromkeys(numa_nodes, paid // max(1, len(numa_nodes)))
    allocated = requested_memory(pod, container, machine.memory_total, memory)
    pages = hugepage_demand(resources, []) if mems else {}
    allocation = Allocation(
        **container_identity(pod, container),
        kind=kind,
        cpus=cpus,
        exclusive=owned,
        yields_to_exclusive=soft,
        numa_nodes=numa_nodes,
        mems=mems,
        charges=charge_nodes(
            numa_nodes,
            on_node,
            mems,
            allocated,
            machine.memory_capacity,
            pages,
            {size: machine.hugepages_capacity(size) for size in pages},
        ),
        cpu_milli=milli,
        memory_bytes=memory,
        hugepages=pages,
        policy=policy,
        smt=smt if owned else SMT.ANY,
        aligned=preferred,
        reason=reason,
        foreign_cpus=pinned,
        movable=document.get("movable") is True and kind in COMPUTED_KINDS,
        moved_proactively=document.get("ahead") is True,
        lifted_quota=0 if resources.cpu_quota == NO_QUOTA and owned else None,
        slots=allocated_slots(machine.settings, container)
        if kind is ContainerKind.EXCLUSIVE
        else "",
    )
    if leaves - mems:
        still = dict.fromkeys(leaves, next(iter(allocation.charges.values()), NO_CHARGE))
        allocation = allocation.with_migration_started(
            replace(allocation, mems=leaves, charges=still)
        )
    return _contradiction_text(allocation) or (allocation, same)


def _check_plausible(
    machine: NodeModel,
    pod: PodSandbox,
    container: Container,
    requested: PlacementOptions,
    claim: Allocation,
) -> str:
    """Why a container cannot have what it claims, as the end of a sentence; empty when it can."""
    if (
        claim.kind is ContainerKind.UNPINNED
        and uses_kubelet_rules(machine, requested)
        and not requested.is_unpinned
    ):
        return ""  # it shares all CPUs, as under the kubelet, whatever its memory
    if claim.kind in (ContainerKind.SHARED, ContainerKind.FOREIGN) or (
        claim.kind is ContainerKind.UNPINNED and not claim.mems
    ):
        alone = requested.is_unpinned
        if alone is (claim.kind is ContainerKind.SHARED):
            asks = "nothing" if alone else "CPUs or memory nodes"
            return f"says {claim.kind}, while its pod asks for {asks}"
        return ""
    if claim.kind is ContainerKind.UNPINNED:
        listed = requested.listed_mems
        return "" if claim.mems <= listed else _unlisted_cpus_text(numa_text(claim.mems), listed)
    if claim.exclusive and claim.cpus & machine.settings.reserved_cpus:
        reserved = claim.cpus & machine.settings.reserved_cpus
        return (
            f"claims {cpus_text(reserved)}, which {inflect_for_ids(reserved, 'is', 'are')} reserved"
        )
    if not container.resources.cpus:
        return f"claims {cpus_text(claim.cpus)}, which the runtime did not give it"
    if claim.kind is ContainerKind.LISTED:
        mine = requested.listed_cpus
        if not claim.cpus <= mine:
            return _unlisted_cpus_text(cpus_text(claim.cpus), mine)
        if claim.exclusive and requested.cpus is not CPUMode.EXCLUSIVE:
            return f"claims exclusive {cpus_text(claim.cpus)}, while its pod asks to list them only"
        wanted = compute_demand(pod, container, requested, machine.memory_total)
        if claim.exclusive and (
            isinstance(wanted, Rejection) or not may_be_exclusive(requested, claim.cpus, wanted)
        ):
            return f"claims exclusive {cpus_text(claim.cpus)}, which its request does not pay for"
        if not (
            claim.exclusive or claim.yields_to_exclusive or isinstance(wanted, Rejection)
        ) and is_yielding_list(requested, claim.cpus, wanted):
            return f"claims to keep {cpus_text(claim.cpus)}, which its request does not pay for"
        return ""
    wanted = compute_demand(pod, container, requested, machine.memory_total)
    own = 0 if isinstance(wanted, Rejection) else wanted.exclusive_cpus
    if len(claim.cpus) > own:
        return f"claims {len(claim.cpus)} exclusive CPUs, while its pod asks for {own}"
    return ""


def _unlisted_cpus_text(claimed: str, listed: CPUSet | NUMASet) -> str:
    return f"claims {claimed}, while its pod lists {listed or 'none'}"
