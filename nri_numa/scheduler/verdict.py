"""What is said of one node: the pod fits, or what is short. Values without any rule."""

from __future__ import annotations

from dataclasses import dataclass

from nri_numa.engine.align.policies import amount_text
from nri_numa.machine.cpuset import NUMASet
from nri_numa.scheduler.published import Column


@dataclass(frozen=True, slots=True)
class Charge:
    """What a pod takes on one node, in the order of the node's NUMA nodes.

    Attributes:
        exclusive: CPUs, with siblings that are kept idle.
        milli: thousandths of a CPU, of exclusive ones too.
        others: bytes by resource.
    """

    exclusive: Column
    milli: Column
    others: tuple[tuple[str, Column], ...] = ()


@dataclass(frozen=True, slots=True)
class Fits:
    """The pod fits.

    Attributes:
        places: NUMA nodes by container, in the order in which they start.
        charge: what it takes while all of it runs; None where it takes nothing that is counted.
        width: NUMA nodes of the widest container; 0 when nothing of it is aligned.
        wider: wider than an empty machine would need, or not pinned.
        left: thousandths of the scarcest resource that are left on its NUMA nodes.
        factor: least capacity factor of these, in thousandths.
    """

    places: tuple[tuple[str, NUMASet], ...] = ()
    charge: Charge | None = None
    width: int = 0
    wider: bool = False
    left: int = 1000
    factor: int = 1000


@dataclass(frozen=True, slots=True)
class Short:
    """The pod does not fit: one class of reasons, and how near this node comes.

    Attributes:
        what: what is needed, in words: ``12 exclusive CPUs``.
        where: on how many NUMA nodes, in words; empty for the whole node.
        unit: of ``most``, as `nri_numa.engine.align.policies.amount_text` knows it.
        most: the most that is free there, or that there is at all.
        never: waiting does not help: an empty node has too little.
        apart: each resource has room, and no NUMA node for all of them.
    """

    what: str
    where: str = ""
    unit: str = ""
    most: int = 0
    never: bool = False
    apart: bool = False

    @property
    def group(self) -> tuple[object, ...]:
        """What shorts of one class share."""
        return self.what, self.where, self.never, self.apart

    def text(self, most: int) -> str:
        """The reason for all nodes of a class; ``most`` is the most of any of them."""
        where = f" on {self.where}" if self.where else ""
        if self.apart:
            return f"needs {self.what}{where}; each is free, but not together"
        if not self.unit:
            return f"needs {self.what}{where}"
        amount = amount_text(most, self.unit).removesuffix("s").removesuffix(" CPU")
        return (
            f"needs {self.what}{where}; {'most there is' if self.never else 'most free'}: {amount}"
        )


Verdict = Fits | Short
