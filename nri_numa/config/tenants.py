"""What stands in the configuration about tenants: permissions, quotas, the floor of the pool.

Form and texts are as in `nri_numa.config.sections`, which these sections are part of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta, Struct, field

from nri_numa.config.names import camel_case
from nri_numa.engine.values.settings import (
    ANY_KEY,
    CPUAmount,
    Limits,
    NamespaceQuota,
    Otherwise,
    Permission,
    Quota,
)
from nri_numa.engine.values.workload import QoSClass

Amount = str | int
Text = Annotated[str, Meta(min_length=1)]

AUTO = "auto"
_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,3})?)%", re.ASCII)
_MOST_CPUS = 8192  # of the largest kernels, as in `nri_numa.machine.cpuset`


class PodMatch(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """Which pods; everything given must match, nothing given matches all."""

    namespaces: Annotated[
        tuple[Text, ...], Meta(description="Shell patterns of namespaces; one must match.")
    ] = ()
    labels: Annotated[
        dict[str, str], Meta(description="Pod labels that must have exactly these values.")
    ] = field(default_factory=dict)
    qos: Annotated[
        tuple[QoSClass, ...], Meta(description="QoS classes; the pod's must be one of them.")
    ] = ()


class PermissionDocument(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """One permission: which pods, and what their annotations may ask for."""

    match: Annotated[PodMatch, Meta(description="Which pods; without it, all of them.")] = (
        PodMatch()
    )
    keys: Annotated[
        tuple[Text, ...],
        Meta(
            description="Annotation keys, without the prefix, that may be used; * is all of them, "
            "an empty list none."
        ),
    ] = (ANY_KEY,)
    values: Annotated[
        dict[str, tuple[str | int, ...]],
        Meta(
            description="By key, the only values it may have. numacpu and numamem may name no "
            "others than these lists together."
        ),
    ] = field(default_factory=dict)
    unpaid_cpus: Annotated[
        bool,
        Meta(
            description="Exclusive CPUs, and shared lists that keep theirs, may be more than the "
            "CPU request pays for."
        ),
    ] = False
    reserved_cpus: Annotated[bool, Meta(description="numacpu may name reserved CPUs.")] = False
    otherwise: Annotated[
        Otherwise,
        Meta(
            description="What is not permitted is refused, or ignored with a warning: the key is "
            "passed over, and who does not pay for exclusive CPUs shares."
        ),
    ] = Otherwise.REFUSE


class SharedPool(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """What stays for containers without exclusive CPUs."""

    cpus: Annotated[
        Amount,
        Meta(
            description="CPUs of the machine that may become neither exclusive nor idle siblings, "
            "as a number or such as 10%. auto is 1 where reservedCPUs are part of the pool, else a "
            "twentieth of the CPUs, at least 1."
        ),
    ] = AUTO
    numa_node_cpus: Annotated[
        Amount,
        Meta(description="The same for each NUMA node, of its CPUs. 0 sets no floor there."),
    ] = 0


class NamespaceQuotaDocument(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """Quotas for each namespace by itself that one of the patterns matches."""

    namespaces: Annotated[
        tuple[Text, ...],
        Meta(description="Shell patterns; the first item with one that matches counts."),
    ] = ()
    exclusive_cpus: Annotated[
        Amount,
        Meta(description="Exclusive CPUs of its containers, siblings kept idle for them included."),
    ] = "100%"
    listed_cpus: Annotated[
        Amount,
        Meta(description="The same of its own shared lists."),
    ] = "100%"


class Quotas(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """How many CPUs may be withheld from others, as numbers or parts of the machine's CPUs."""

    exclusive_cpus: Annotated[
        Amount,
        Meta(description="Exclusive CPUs of containers, siblings kept idle for them included."),
    ] = "100%"
    idle_cpus: Annotated[
        Amount, Meta(description="Siblings that smt: isolate may keep idle, which nobody pays for.")
    ] = "25%"
    listed_cpus: Annotated[
        Amount,
        Meta(
            description="CPUs in shared lists (numacpu) that cannot become exclusive, since a "
            "permission has unpaidCPUs. A part of the machine is at least one core, and two CPUs. "
            "Paid lists are counted and never refused; all others give way to exclusive CPUs and "
            "do not count."
        ),
    ] = "50%"
    namespaces: Annotated[
        tuple[NamespaceQuotaDocument, ...],
        Meta(description="Quotas of single namespaces, besides the ones for all together."),
    ] = ()


def parse_amount(value: str | int) -> CPUAmount:
    """A number of CPUs, or a percentage of them.

    Raises:
        ValueError: with what was expected.
    """
    text = str(value)
    match = _PERCENT.fullmatch(text)
    if match is not None and float(match[1]) <= 100:
        return CPUAmount(percent=float(match[1]))
    if text.isascii() and text.isdigit() and len(text) <= 4 and int(text) <= _MOST_CPUS:
        return CPUAmount(int(text))
    raise ValueError(f"{text[:40]!r}, expected a number of CPUs, or a part of them such as 25%")


def permissions(documents: tuple[PermissionDocument, ...]) -> tuple[Permission, ...]:
    """What the engine sees of the permissions."""
    return tuple(
        Permission(
            name=f"permissions[{number}]",
            namespaces=one.match.namespaces,
            labels=one.match.labels,
            qos=one.match.qos,
            keys=one.keys,
            values={key: tuple(str(v) for v in values) for key, values in one.values.items()},
            unpaid_cpus=one.unpaid_cpus,
            reserved_cpus=one.reserved_cpus,
            otherwise=one.otherwise,
        )
        for number, one in enumerate(documents)
    )


def limits(quotas: Quotas, pool: SharedPool) -> Limits:
    """What the engine sees of the quotas and the floor."""
    return Limits(
        quota=Quota(
            exclusive=parse_amount(quotas.exclusive_cpus), listed=parse_amount(quotas.listed_cpus)
        ),
        idle=parse_amount(quotas.idle_cpus),
        namespaces=tuple(
            NamespaceQuota(
                name=f"quotas.namespaces[{number}]",
                namespaces=one.namespaces,
                quota=Quota(
                    exclusive=parse_amount(one.exclusive_cpus),
                    listed=parse_amount(one.listed_cpus),
                ),
            )
            for number, one in enumerate(quotas.namespaces)
        ),
        pool=None if pool.cpus == AUTO else parse_amount(pool.cpus),
        numa_pool=parse_amount(pool.numa_node_cpus),
    )


def permission_problems(documents: tuple[PermissionDocument, ...]) -> Iterator[str]:
    """What is wrong with the permissions: unknown keys, values that no annotation can have."""
    from nri_numa.engine.request.annotations import KEYS, check_value  # as `config.problems` does

    last = len(documents) - 1
    for number, one in enumerate(documents):
        path = f"permissions[{number}]"
        for key in one.keys:
            if key != ANY_KEY and key not in KEYS:
                yield f"{path}.keys: {check_value(key, '')}"
        for key, values in one.values.items():
            if key not in KEYS:
                yield f"{path}.values: {check_value(key, '')}"
                continue
            if ANY_KEY not in one.keys and key not in one.keys:
                yield f"{path}.values.{key}: has values, but {path}.keys does not allow the key"
            if not values:
                yield f"{path}.values.{key}: is empty, expected at least one value"
            for value in values:
                problem = check_value(key, str(value))
                if problem is not None:
                    yield f"{path}.values.{key}: {problem}"
        if number < last and one.match == PodMatch():
            yield f"{path}.match: matches every pod, so that the entries after it never count"


def limit_problems(quotas: Quotas, pool: SharedPool) -> Iterator[str]:
    """What is wrong with the quotas and the floor."""
    amounts: list[tuple[str, str | int]] = [
        ("quotas.exclusiveCPUs", quotas.exclusive_cpus),
        ("quotas.idleCPUs", quotas.idle_cpus),
        ("quotas.listedCPUs", quotas.listed_cpus),
        ("sharedPool.numaNodeCPUs", pool.numa_node_cpus),
    ]
    if pool.cpus != AUTO:
        amounts.append(("sharedPool.cpus", pool.cpus))
    for number, one in enumerate(quotas.namespaces):
        path = f"quotas.namespaces[{number}]"
        if not one.namespaces:
            yield f"{path}.namespaces: is empty, expected at least one namespace"
        amounts.append((f"{path}.exclusiveCPUs", one.exclusive_cpus))
        amounts.append((f"{path}.listedCPUs", one.listed_cpus))
    for path, value in amounts:
        try:
            parse_amount(value)
        except ValueError as error:
            yield f"{path}: {error}"
