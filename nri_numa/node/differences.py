"""What containers really have, wherever it is not what they are meant to have.

Decisions are intent. `status`, `explain`, the API and the page show the kernel's word beside it for
as long as the two differ, and the metrics count how long somebody could run on owned CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType

import msgspec

from nri_numa.engine.resync import Correction
from nri_numa.observe.metrics import Metrics


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """What one container has instead of what is meant.

    Attributes:
        cpus: kernel list that it can really use.
        mems: kernel list of its memory nodes.
        meant_cpus: kernel list that it should be able to use; empty where it is so.
        meant_mems: kernel list of memory nodes, likewise.
        since: Unix time from which on it was so, as far as seen.
        intruder: it can run on CPUs that another container owns.
        obstacle: which cgroup keeps it from what is meant; empty when none does.
        found: what the cgroup says, for people.
        given_up: it was put right again and again, and is left to whoever rewrites it.
    """

    cpus: str
    mems: str
    meant_cpus: str = ""
    meant_mems: str = ""
    since: float
    intruder: bool
    found: str
    obstacle: str = ""
    given_up: bool = False

    @property
    def text(self) -> str:
        """Both sides: ``meant 4-7, has 0-7; memory nodes: meant 0, has 0-1``.

        What is neither is told as it was found.
        """
        parts = []
        if self.meant_cpus:
            parts.append(f"meant {self.meant_cpus}, has {self.cpus or 'none'}")
        if self.meant_mems:
            parts.append(f"memory nodes: meant {self.meant_mems}, has {self.mems or 'none'}")
        if parts and self.obstacle:
            parts.append(self.obstacle)
        return "; ".join(parts) or self.found


Known = Mapping[str, Difference]
"""By container id; never changes, so that it can be read from any thread."""


class Differences(Mapping[str, Difference]):
    """By container id, whoever has something else than is meant.

    Every change replaces `known` as a whole: whoever shows it may live in another thread.

    Args:
        metrics: counted into.
        now: Unix time in seconds.
        changed: called after every change.

    Attributes:
        known: all of them at this moment.
    """

    def __init__(
        self,
        metrics: Metrics,
        now: Callable[[], float],
        changed: Callable[[], object] = lambda: None,
    ) -> None:
        self._metrics = metrics
        self._now = now
        self._changed = changed
        self._counted = now()
        self.known: Known = MappingProxyType({})

    def __getitem__(self, container_id: str) -> Difference:
        """What this one has."""
        return self.known[container_id]

    def __iter__(self) -> Iterator[str]:
        """Container ids."""
        return iter(self.known)

    def __len__(self) -> int:
        """How many differ."""
        return len(self.known)

    def looked(
        self,
        container_ids: Iterable[str],
        corrections: Iterable[Correction],
        since: Mapping[str, float] | None = None,
        given_up: Collection[str] | None = None,
    ) -> None:
        """Take in what a look at some containers showed; the others of them are as meant.

        Args:
            container_ids: who was looked at.
            corrections: who of them differs.
            since: Unix time from which on it can have been so, where that is known.
            given_up: who of them is left to whoever rewrites it; None: as before.
        """
        self.count_on()
        wrong = {c.container_id: c for c in corrections}
        after = dict(self.known)
        for container_id in container_ids:
            if container_id not in wrong:
                after.pop(container_id, None)
        for container_id, one in wrong.items():
            known = after.get(container_id)
            began = known.since if known else (since or {}).get(container_id, self._now())
            intruder = one.rank == 0
            if known and known.intruder != intruder:
                began = self._counted
            if intruder and not (known and known.intruder):
                self._metrics.neighbours_seen.inc()
                self._metrics.neighbour_seconds.inc(max(0.0, self._counted - began))
            if given_up is None:
                left = known is not None and known.given_up
            else:
                left = container_id in given_up
            after[container_id] = Difference(
                cpus=str(one.has_cpus),
                mems=str(one.has_mems),
                meant_cpus=str(one.meant_cpus),
                meant_mems=str(one.meant_mems),
                since=began,
                intruder=intruder,
                found=one.found,
                obstacle=one.obstacle,
                given_up=left,
            )
        self._swap(after)

    def forget(self, *container_ids: str) -> None:
        """They are as meant, or gone."""
        gone = self.known.keys() & set(container_ids)
        if not gone:
            return
        self.count_on()
        self._swap({i: one for i, one in self.known.items() if i not in gone})

    def count_on(self) -> None:
        """Count the seconds since the last call of those on exclusive CPUs of others."""
        now = self._now()
        seconds, self._counted = max(0.0, now - self._counted), now
        self._metrics.neighbour_seconds.inc(seconds * sum(d.intruder for d in self.known.values()))

    def _swap(self, after: dict[str, Difference]) -> None:
        if after == self.known:
            return
        self.known = MappingProxyType(after)
        self._metrics.neighbours.set(sum(one.intruder for one in after.values()))
        self._changed()
