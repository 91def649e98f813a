"""Pods that a node refuses for ever, sent to another one. Pure.

A pod that a node of ours refuses waits there with CreateContainerError: the kubelet asks again and
again, nobody schedules it anew, and its workload makes no other one. Where that is switched on, a
pod that has waited so for a while is evicted, if its node still has no room by what it publishes
and another one has. Where some of its containers run its node is asked for room for the others, and
another node for all. As long as a container of it never ran such a pod is in the phase Pending,
too; see `nri_numa.controller.partly` for those that are not.

What another node has is judged as the scheduler's extender judges it (`nri_numa.scheduler.fit`),
after the pod's own words about Nodes. Sums of requests, volumes and affinity among pods are not
looked at: a move may be in vain. So the same workload is moved only so often.

An output in the sense of `nri_numa.cluster.outputs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from msgspec import structs

from nri_numa.cluster.outbox import Bucket, pause
from nri_numa.cluster.outputs import FORBIDDEN_PAUSE
from nri_numa.cluster.requests import Outcome, Request, Resource, Result
from nri_numa.controller.evictions import Ledger, Mover, movable, workload_of
from nri_numa.controller.seats import Seat, admits
from nri_numa.scheduler.candidates import CandidateIndex
from nri_numa.scheduler.fit import Fits
from nri_numa.scheduler.node_room import NodeRoom
from nri_numa.scheduler.nodes import Hold, Nodes
from nri_numa.scheduler.pod_request import PodRequest

WAITS: Final = "CreateContainerError"
REASON: Final = "NUMAPodMoved"
LOOK: Final = 10.0
"""Seconds between two looks for another node; the kubelet asks its own every ten or more."""
AT_ONCE: Final = 4
"""Pods for which another node is looked for in one turn."""
PROMISED: Final = 60.0
"""Seconds for which the room of a successor is not offered to another stuck pod."""
MOST: Final = 10_000
"""Stuck pods that are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckRules:
    """How stuck pods are moved.

    Attributes:
        after: seconds that a pod waits at least.
        per_minute: evictions in the whole cluster.
        dry_run: the API server says what it would do, and does nothing.
    """

    after: float
    per_minute: float
    dry_run: bool = False


@dataclass(slots=True, kw_only=True)
class _Stuck:
    namespace: str
    name: str
    uid: str
    version: str
    node: str
    workload: str
    wish: PodRequest
    missing: PodRequest
    partly: bool
    spec: Mapping[str, Any]
    refusal: str
    since: float
    look_at: float
    failures: int = 0


def refusal(document: Mapping[str, Any]) -> str:
    """What our plugin said about a pod's container that waits for it; empty where nothing is ours.

    The runtime puts its own words before ours, which begin with a reason and name the pod and the
    container.
    """
    metadata, status = document.get("metadata") or {}, document.get("status") or {}
    listed = [
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ]
    for one in listed:
        waiting = (one.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") != WAITS:
            continue
        pod = f"{metadata.get('namespace')}/{metadata.get('name')}"
        before, found, after = str(waiting.get("message", "")).partition(
            f": pod {pod}, container {one.get('name')}: "
        )
        reason = before.rpartition(" ")[2].rpartition('"')[2]
        if found and reason.isalpha():
            return f"{reason}: {after}"
    return ""


def missing(wish: PodRequest, document: Mapping[str, Any]) -> PodRequest:
    """What a pod asks for without the containers of it that run, whose share its node counts.

    What is to be together with a container that runs is judged as if it could go anywhere: so the
    node is rather taken to have room, and the pod stays.
    """
    status = document.get("status") or {}
    listed = [*(status.get(key) or () for key in ("initContainerStatuses", "containerStatuses"))]
    running = {
        one.get("name")
        for statuses in listed
        for one in statuses
        if (one.get("state") or {}).get("running") is not None
    }
    if not running:
        return wish
    return structs.replace(
        wish,
        containers=tuple(need for need in wish.containers if need.container not in running),
        kubelets=tuple(need for need in wish.kubelets if need.container not in running),
        together=None,
    )


def _partly(document: Mapping[str, Any]) -> bool:
    return (document.get("status") or {}).get("phase") == "Running"


class StuckOutput:
    """Evictions of pods that wait for a node in vain, and an Event for each.

    Attributes:
        evicted: pods that were told to go.

    Args:
        mover: makes the requests.
        rules: how pods are moved.
        ledger: how often one workload may be moved.
        fleet: what nodes publish.
        panel: judges it.
        wish: reads what a pod asks for.
        seats: the Nodes, by name.
        now: the time.
    """

    def __init__(
        self,
        mover: Mover,
        rules: StuckRules,
        ledger: Ledger,
        fleet: Nodes,
        panel: CandidateIndex,
        wish: Callable[[Mapping[str, Any]], PodRequest],
        seats: Mapping[str, Seat],
        now: float,
    ) -> None:
        self.name = mover.output
        self.dropped = 0
        self.hold_until = 0.0
        self.evicted = 0
        self._mover, self._rules, self._ledger = mover, rules, ledger
        self._fleet, self._panel, self._wish, self._seats = fleet, panel, wish, seats
        # One at once: the successor shows whether there is room.
        self._bucket = Bucket(rules.per_minute / 60, 1.0, now)
        self._next = now
        self._pods: dict[str, _Stuck] = {}
        self._done: dict[str, float] = {}
        self._events: list[Request] = []
        # Who was asked for last, and where there is room; the watch may tell of its end first.
        self._asked: tuple[_Stuck, str, Fits] | None = None
        self._wall = 0.0

    # --- what is there ----------------------------------------------------------------------------

    def pod(self, document: Mapping[str, Any], now: float) -> None:
        """A pod is in the phase Pending, or was looked at because one of its containers waits."""
        metadata = document.get("metadata") or {}
        uid = str(metadata.get("uid", ""))
        said = refusal(document) if movable(document) else ""
        if not uid or not said or uid in self._done:
            self._pods.pop(uid, None)
            return
        wish = self._wish(document)
        if not wish.ours or wish.wrong or wish.nothing:
            # No node would take it, or only a node can say: lists of CPUs by number.
            self._pods.pop(uid, None)
            return
        known = self._pods.get(uid)
        if known is not None and known.partly == _partly(document):
            known.version, known.refusal = str(metadata.get("resourceVersion", "")), said
            known.missing = missing(wish, document)
            return
        if len(self._pods) >= MOST:
            self.dropped += 1
            return
        spec = document.get("spec") or {}
        self._pods[uid] = _Stuck(
            namespace=str(metadata.get("namespace", "")),
            name=str(metadata.get("name", "")),
            uid=uid,
            version=str(metadata.get("resourceVersion", "")),
            node=str(spec.get("nodeName", "")),
            workload=workload_of(document),
            wish=wish,
            missing=missing(wish, document),
            partly=_partly(document),
            spec={key: spec.get(key) for key in ("tolerations", "nodeSelector", "affinity")},
            refusal=said,
            since=now,
            look_at=now + self._rules.after,
        )

    def pod_gone(self, uid: str) -> None:
        """A pod is Pending no more, or gone."""
        if (known := self._pods.get(uid)) is not None and not known.partly:
            del self._pods[uid]

    def whole(self, uid: str) -> None:
        """A pod in the phase Running that was refused in part is gone, or is so no more."""
        self._pods.pop(uid, None)

    def pods_listed(self, uids: frozenset[str]) -> None:
        """These are all pods in the phase Pending."""
        for uid in self._pods.keys() - uids:
            self.pod_gone(uid)

    def tick(self, now: float, wall: float) -> None:
        """Time has passed; `wall` is Unix time in seconds, for Events."""
        self._wall = wall
        self._fleet.expire(now)
        for uid in [uid for uid, until in self._done.items() if until <= now]:
            del self._done[uid]

    # --- what is done -----------------------------------------------------------------------------

    def due(self, now: float) -> Request | None:
        """An Event that is owed, or the next eviction."""
        if self.hold_until > now:
            return None
        if self._events:
            return self._events[0]
        if self._bucket.wait(now) > 0:
            return None
        # The longest waiting first, then by uid.
        ready = sorted(
            (one for one in self._pods.values() if one.look_at <= now),
            key=lambda one: (one.since, one.uid),
        )
        for one in ready[:AT_ONCE]:
            free_at = self._ledger.free_at(one.workload, now)
            if free_at > now:
                one.look_at = free_at
            elif (found := self._elsewhere(one)) is None:
                one.look_at = now + LOOK
            else:
                self._asked = one, *found
                return self._mover.eviction(one.namespace, one.name, one.uid, one.version)
        return None

    def _elsewhere(self, one: _Stuck) -> tuple[str, Fits] | None:
        """The first node by name with room, where its own has none as it says itself."""
        own = self._fleet.room(one.node)
        if not isinstance(own, NodeRoom) or isinstance(
            self._panel.verdict(one.missing, one.node), Fits
        ):
            # What it publishes says nothing of why it refuses: a successor could come back.
            return None
        for name in sorted(self._fleet.names):
            if name == one.node or (there := self._seats.get(name)) is None:
                continue
            if not isinstance(self._fleet.room(name), NodeRoom) or not admits(there, one.spec):
                continue
            verdict = self._panel.verdict(one.wish, name)
            if isinstance(verdict, Fits):
                return name, verdict
        return None

    def next_due(self) -> float:
        """When the next request may be made, at the earliest."""
        if self._events:
            return self.hold_until
        looks = min((one.look_at for one in self._pods.values()), default=float("inf"))
        return max(self.hold_until, self._next, looks)

    def done(self, request: Request, outcome: Outcome, now: float, jitter: float) -> None:
        """This came of a request of ours."""
        if outcome.result is Result.FORBIDDEN:
            self.hold_until = now + FORBIDDEN_PAUSE
            return
        if request.resource is Resource.EVENTS:
            self._events.pop(0)  # once is enough, whatever came of it
            return
        self._bucket.take(now)
        self._next = now + self._bucket.wait(now)
        uid, asked = str(request.key), self._asked
        assert asked is not None  # noqa: S101  # it is what the request was made of
        one, node, fits = asked
        if outcome.result is not Result.DONE:
            # It changed meanwhile, a budget speaks for it, or it is gone: the watch tells.
            one.failures += 1
            one.look_at = now + LOOK + pause(one.failures, jitter)
            return
        self.evicted += 1
        self._pods.pop(uid, None)
        self._done[uid] = now + 10 * PROMISED
        self._ledger.moved(one.workload, now)
        self._fleet.hold(
            Hold(
                request=one.wish,
                node=node,
                places=dict(fits.places),
                charge=fits.charge,
                since=now,
                until=now + PROMISED,
            )
        )
        why = (
            f"node {one.node} has refused it for {now - one.since:.0f} s, and {node} has room; "
            f"{one.refusal}"
        )
        self._events.append(self._mover.event(one.namespace, one.name, uid, why, self._wall))

    def waiting(self) -> int:
        """Pods that are stuck."""
        return len(self._pods)

    def resync(self) -> None:
        """Pods are watched."""
