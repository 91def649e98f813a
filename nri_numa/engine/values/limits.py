"""What the operator lets pods ask for and how much of the machine they may hold, as data.

Annotations come from anyone who may create pods. `nri_numa.engine.request.permissions` applies the
permissions, `nri_numa.engine.place.quotas` the quotas and the floor of the shared pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from nri_numa.engine.values.workload import BUILT_IN_PERMISSION, QoSClass

ANY_KEY: Final = "*"


class Otherwise(StrEnum):
    """What happens to an annotation that is not permitted."""

    REFUSE = "refuse"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True, kw_only=True)
class Permission:
    """What the pods that it matches may ask for by annotation.

    Attributes:
        name: for sentences: ``permissions[1]``.
        namespaces: shell-style patterns; empty matches every namespace.
        labels: pod labels that must be equal.
        qos: classes; empty matches every class.
        keys: annotation keys without prefix that may be used; `ANY_KEY` for all.
        values: by key, the only values it may have. Lists of CPUs and NUMA nodes may name no
            others than these together.
        unpaid_cpus: CPUs may be owned, or kept from owners by a list, that no request pays for.
        reserved_cpus: ``numacpu`` may name reserved CPUs.
        otherwise: see `Otherwise`.
    """

    name: str
    namespaces: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    qos: tuple[QoSClass, ...] = ()
    keys: tuple[str, ...] = (ANY_KEY,)
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unpaid_cpus: bool = False
    reserved_cpus: bool = False
    otherwise: Otherwise = Otherwise.REFUSE


BUILT_IN: Final = Permission(name=BUILT_IN_PERMISSION)
"""For pods that no entry matches: every key, but exclusive CPUs only for paid requests."""


@dataclass(frozen=True, slots=True)
class CPUAmount:
    """A number of CPUs, or a part of those that containers may use.

    Attributes:
        cpus: the number, unless there is a percentage.
        percent: of the machine's CPUs, rounded down.
    """

    cpus: int = 0
    percent: float | None = None

    def of(self, total: int) -> int:
        """The number of CPUs on a machine where containers may use ``total``."""
        return self.cpus if self.percent is None else int(total * self.percent / 100)

    def __str__(self) -> str:
        return f"{self.cpus}" if self.percent is None else f"{self.percent:g}%"


EVERYTHING: Final = CPUAmount(percent=100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """How many CPUs may be withheld from others.

    Attributes:
        exclusive: owned CPUs, siblings that are kept idle for their owners included.
        listed: CPUs in shared lists (``numacpu``) that nobody can own.
    """

    exclusive: CPUAmount = EVERYTHING
    listed: CPUAmount = EVERYTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceQuota:
    """A quota for each namespace by itself that one of the patterns matches."""

    name: str
    namespaces: tuple[str, ...]
    quota: Quota


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Quotas and the floor of the shared pool.

    Attributes:
        quota: for everybody together. Lists that a CPU request pays for are counted and never
            refused.
        idle: siblings kept idle, for everybody together: nobody pays for them.
        namespaces: in order, the first that matches counts.
        pool: CPUs that stay in the shared pool of the machine, at least 1; None for what
            `nri_numa.engine.place.quotas.floor` works out.
        numa_pool: CPUs that stay in the shared pool on each NUMA node.
    """

    quota: Quota = Quota(listed=CPUAmount(percent=50))
    idle: CPUAmount = CPUAmount(percent=25)
    namespaces: tuple[NamespaceQuota, ...] = ()
    pool: CPUAmount | None = None
    numa_pool: CPUAmount = CPUAmount(0)
