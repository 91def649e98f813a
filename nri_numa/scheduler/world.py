"""What the watches tell, taken into the fleet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nri_numa.engine.request.annotations import read_placed
from nri_numa.machine.cpuset import NUMASet
from nri_numa.observe.logs import get_logger
from nri_numa.scheduler.fleet import Fleet, Hold
from nri_numa.scheduler.freshness import Freshness
from nri_numa.scheduler.pods import Reader, placed_annotation
from nri_numa.scheduler.published import Table, Unreadable, read
from nri_numa.text import harmless

log = get_logger("scheduler")

PARTLY = 6.0
"""How many times `settle` a pod is held of which some container may not run yet."""


class World:
    """Takes in nodes and pods.

    Args:
        fleet: of the nodes.
        reader: of pods.
        prefix: of annotations.
        settle: seconds from the start of containers until a node's object counts them, where it
            does not name them.
        limit: seconds that a pod is held at most.
        clock: seconds that only grow.
        grown: told the name of a node that has more room.
        settled: told the uid of a pod that waits no longer.
    """

    def __init__(
        self,
        fleet: Fleet,
        reader: Reader,
        *,
        prefix: str,
        settle: float,
        limit: float,
        clock: Callable[[], float],
        grown: Callable[[str], object],
        settled: Callable[[str], object],
    ) -> None:
        self._fleet, self._reader, self._prefix = fleet, reader, prefix
        self._settle, self._limit, self._clock = settle, limit, clock
        self._grown, self._settled = grown, settled
        self._fresh = Freshness(prefix)

    # --- NodeResourceTopology ---------------------------------------------------------------------

    def node(self, document: Mapping[str, Any]) -> None:
        """An object is there."""
        name = name_of(document)
        known = read(document, self._prefix)
        if not self._fresh.seen(name, document, self._clock()) and isinstance(known, Table):
            known = replace(known, silent=True)
        before = self._fleet.published(name)
        if isinstance(known, Unreadable) and before != known:
            log.warning(
                "a NodeResourceTopology cannot be read: nothing is known of the node",
                node=name,
                problem=harmless(known.why)[:500],
            )
        if self._fleet.put(name, known):
            self._grown(name)

    def node_gone(self, document: Mapping[str, Any]) -> None:
        """An object is gone."""
        self._forget(name_of(document))

    def nodes_listed(self, names: frozenset[str]) -> None:
        """These are all."""
        for name in self._fleet.names - names:
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._fresh.gone(name)
        self._fleet.remove(name)

    # --- pods that are bound and did not start ----------------------------------------------------

    def pod(self, document: Mapping[str, Any]) -> None:
        """A pod is bound to a node, and none of its containers runs yet."""
        uid = uid_of(document)
        self._settled(uid)
        node = _text(document, "spec", "nodeName")
        if _text(document, "metadata", "deletionTimestamp"):
            self._give_back(uid)
            return
        held = self._fleet.holds.get(uid)
        if held is not None and held.node == node:
            # A list from before its binding did not name it.
            self._fleet.stays(uid, held.since + self._limit)
            return
        places = self._places(document)
        if held is None and not places:
            return
        # Of another replica, of our life before, or of a scheduler that bound it elsewhere.
        found = self._told_of(document, places, self._limit)
        if found is not None:
            self._fleet.hold(found)

    def pod_gone(self, document: Mapping[str, Any]) -> None:
        """A pod left the phase Pending, or is gone.

        Args:
            document: the pod as it was *before*: a watch with a field selector ends with the last
                object that the selector took. So it does not say whether the pod runs now, and one
                that was removed by force is held for a while in vain.
        """
        uid = uid_of(document)
        self._settled(uid)
        self._reader.forget(uid)
        if _text(document, "metadata", "deletionTimestamp"):
            self._give_back(uid)
            return
        self._leaves(uid, self._clock() + self._counted_in(document))

    def runs(self, document: Mapping[str, Any]) -> None:
        """A pod runs of which nobody knows whether anybody told of it while it was on its way.

        It is held as if it had left the phase Pending now, unless its node counts it.
        """
        uid, places = uid_of(document), self._places(document)
        ending = _text(document, "metadata", "deletionTimestamp")
        if not places or ending or uid in self._fleet.holds:
            return
        found = self._told_of(document, places, self._counted_in(document))
        self._reader.forget(uid)
        if found is None:
            return
        known = self._fleet.published(found.node)
        if not (isinstance(known, Table) and found.counted_by(known)):
            self._fleet.hold(replace(found, left=True))

    def pods_listed(self, uids: frozenset[str]) -> None:
        """These are all that are on their way.

        Another one that is held started or is gone; one whose binding is being written is not there
        yet. Time tells.
        """
        until = self._clock() + PARTLY * self._settle
        for uid in self._fleet.holds.keys() - uids:
            self._leaves(uid, until)

    def tick(self) -> None:
        """Time has passed."""
        now = self._clock()
        for name in self._fresh.stale(now):
            known = self._fleet.published(name)
            if isinstance(known, Table) and not known.silent:
                log.warning(
                    "a NodeResourceTopology is not renewed: nobody is sent there",
                    node=name,
                    remedy="look at nri-numa publish of that node",
                )
                self._fleet.put(name, replace(known, silent=True))
        for hold in self._fleet.expire(now):
            if now - hold.since >= self._limit:
                log.info(
                    "NUMA nodes are given back of a pod that did not start",
                    pod=f"{hold.wish.namespace}/{hold.wish.name}",
                    node=hold.node,
                )
            self._grown(hold.node)

    def _places(self, document: Mapping[str, Any]) -> Mapping[str, NUMASet]:
        """NUMA nodes by container, as a pod's annotation says; empty where it says nothing."""
        text = placed_annotation(document, self._prefix)
        return (read_placed(text) if text is not None else None) or {}

    def _told_of(
        self, document: Mapping[str, Any], places: Mapping[str, NUMASet], seconds: float
    ) -> Hold | None:
        """What is to be held for a pod that has a node; None where it asks for nothing."""
        node, wish = _text(document, "spec", "nodeName"), self._reader.wish(document)
        if wish.nothing or wish.wrong or not node:
            return None
        now = self._clock()
        return Hold(wish=wish, node=node, places=places, since=now, until=now + seconds)

    def _counted_in(self, document: Mapping[str, Any]) -> float:
        """Seconds until a node counts a pod that left the phase Pending.

        The first of its containers runs; whether the others do is not known here.
        """
        return (PARTLY if _containers(document) > 1 else 1.0) * self._settle

    def _leaves(self, uid: str, until: float) -> None:
        hold = self._fleet.leaves(uid, until)
        if hold is not None:
            self._grown(hold.node)

    def _give_back(self, uid: str) -> None:
        hold = self._fleet.release(uid)
        if hold is not None:
            self._grown(hold.node)


def name_of(document: Mapping[str, Any]) -> str:
    """The object's name."""
    return _text(document, "metadata", "name")


def uid_of(document: Mapping[str, Any]) -> str:
    """The object's uid."""
    return _text(document, "metadata", "uid")


def _text(document: Mapping[str, Any], section: str, key: str) -> str:
    found = document.get(section)
    value = found.get(key) if isinstance(found, Mapping) else None
    return value if isinstance(value, str) else ""


def _containers(document: Mapping[str, Any]) -> int:
    spec = document.get("spec")
    listed = spec.get("containers") if isinstance(spec, Mapping) else None
    return len(listed) if isinstance(listed, list) else 0
