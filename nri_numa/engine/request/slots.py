"""Exclusive CPUs that the scheduler counted: *slots*, ids of an extended resource.

A pod that requests the extended resource of `nri_numa.device_plugin` needs no annotation of ours.
The kubelet chooses ids for each of its containers, and the plugin's answer to Allocate makes it put
them on the container, as the CRI annotation ``<prefix>/slots``. The container gets exactly as many
exclusive CPUs as it holds slots.

The annotation counts on containers only. The kubelet does not copy annotations of pods to their
containers; a runtime may be set up to do so, but a pod that carries this key itself is refused, as
with every key that is not one of `nri_numa.engine.request.annotations.KEYS`.

An id is ``slot-7``, or ``numa1-slot-7`` where the plugin announces NUMA nodes. The kubelet has
chosen the NUMA node then, so the CPUs are taken there and nowhere else. What a ResourceClaim gives
comes the same way; see `nri_numa.engine.request.claims`.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

from msgspec.structs import replace

from nri_numa.engine.request.claims import CLAIM, not_prepared, read_claims
from nri_numa.engine.request.demand import MAX_SHARES, limit_milli, request_milli
from nri_numa.engine.request.permissions import permission_of
from nri_numa.engine.values.refusal import Refusal
from nri_numa.engine.values.settings import Settings
from nri_numa.engine.values.workload import (
    Bind,
    Container,
    CPUMode,
    PodSandbox,
    Requested,
    Scope,
    Slots,
)

SLOTS: Final = "slots"
"""Annotation key, below the prefix, with the ids that a container holds, separated by commas."""
MOST: Final = 4096
"""Ids of one container; the kernel is built for no more than 8192 CPUs (NR_CPUS)."""
_LONGEST: Final = 28 * MOST
_ID: Final = re.compile(r"(?:numa([0-9]{1,4})-)?slot-[0-9]{1,6}", re.ASCII)


def read_slots(text: str) -> Slots | str:
    """Read the ids that a container holds.

    Returns:
        The slots, or what was expected instead, as the end of a sentence.
    """
    if CLAIM in text and (claimed := read_claims(text)) is not None:
        return claimed
    ids = text.split(",") if len(text) <= _LONGEST else []
    nodes = [_ID.fullmatch(one) for one in ids]
    if not ids or not all(nodes) or len(set(ids)) < len(ids) or len(ids) > MOST:
        return f"up to {MOST} different ids such as slot-0 or numa0-slot-0, separated by commas"
    on = [match[1] for match in nodes if match is not None]
    # Ids of both sorts come from a change of the plugin's configuration in between: none binds.
    by_node = Counter(int(i) for i in on) if all(i is not None for i in on) else {}
    return Slots(ids=text, count=len(ids), by_node=dict(sorted(by_node.items())))


def slots_held(settings: Settings, container: Container) -> str:
    """The ids that the kubelet gave a container; empty where it gave none."""
    return container.annotations.get(f"{settings.prefix}/{SLOTS}", "")


def with_slots(
    settings: Settings, pod: PodSandbox, container: Container, requested: Requested | Refusal
) -> Requested | Refusal:
    """Add what its slots ask for to what a container requests.

    They are stronger than the defaults. What a pod or a rule says must not contradict them, and
    the container's CPU limit, else its request, must be as many CPUs as it holds slots: the
    scheduler counts both. A permission with ``unpaidCPUs`` lets it be less.
    """
    text = slots_held(settings, container)
    if not text or isinstance(requested, Refusal):
        return requested
    if (refused := not_prepared(pod, container, text)) is not None:
        return refused
    who = f"pod {pod.full_name}, container {container.name}"
    slots = read_slots(text)
    if isinstance(slots, str):
        shown = repr(text) if len(text) <= 80 else f"{text[:80]!r}… ({len(text)} characters)"
        return Refusal(
            reason="InvalidSlots",
            message=f"{who}: {SLOTS} is {shown} (annotation {settings.prefix}/{SLOTS} of the "
            f"container), expected {slots}",
            rule="the device plugin of nri-numa says which slots a container holds",
        )
    plural, claimed = "s" if slots.count != 1 else "", CLAIM in text
    held = f"{slots.count} slot{plural} of the device plugin"
    if claimed:
        held = f"{slots.count} CPU{plural} of a ResourceClaim"
    clash = _clash(requested, slots)
    if clash:
        key, value, why = clash
        source = requested.sources.get(key, "default")
        return Refusal(
            reason="SlotsConflict",
            message=f"{who}: {key} is {value!r} ({source}) and it holds {held}, expected one of "
            f"them, because {why}",
            rule="slots and annotations must not contradict each other",
            key=key,
            value=value,
            source=source,
        )
    # Where nothing else is asked for, nobody has looked it up.
    permission = permission_of(settings.permissions, pod)
    resources = container.resources
    limit, request = limit_milli(resources, []), request_milli(resources, [])
    milli, wanted = limit or request, 1000 * slots.count
    at_least = not limit and (resources.cpu_shares or 0) >= MAX_SHARES
    if milli != wanted and not (milli < wanted and (at_least or permission.unpaid_cpus)):
        value = f"{milli}m" if milli else "not set"
        return Refusal(
            reason="SlotsMismatch",
            message=f"{who}: cpu is {value} and it holds {held}, expected {wanted}m: "
            + ("as many as the claim has" if claimed else "a CPU for each slot"),
            rule="a container has as many exclusive CPUs as it holds slots",
        )
    return replace(
        requested,
        cpus=CPUMode.EXCLUSIVE,
        bind=Bind.CPU_MEM if requested.bind is Bind.NONE else requested.bind,
        slots=slots,
        unpaid_cpus=permission.unpaid_cpus,
        permission=permission.name,
        given=requested.given | {"cpus"},
        sources={**requested.sources, "cpus": held},
    )


def _clash(requested: Requested, slots: Slots) -> tuple[str, str, str] | None:
    """What contradicts the slots: a key, its value, and why."""
    if requested.numacpu is not None:
        return "numacpu", requested.numacpu, "the CPUs of numacpu are taken as they are"
    if requested.cpus is CPUMode.SHARED and "cpus" in requested.given:
        return "cpus", requested.cpus.value, "slots are exclusive CPUs"
    if requested.bind is Bind.NONE and "bind" in requested.given:
        return "bind", requested.bind.value, "bind: none touches nothing"
    if requested.scope is Scope.POD and slots.by_node:
        why = "the kubelet has chosen a NUMA node for each container"
        return "scope", requested.scope.value, why
    return None
