"""The objects that are written: what of each is still to be done, and what an outcome means. Pure.

An output knows what should be there and what it believes to be there, and makes requests of the
difference. Another kind of object is another class of this form in `outputs` of the publisher.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

from nri_numa.cluster import wanted
from nri_numa.cluster.one_node import OneNode
from nri_numa.cluster.outbox import LONGEST_PAUSE, Bucket, Shelf
from nri_numa.cluster.requests import Outcome, Request, Resource, Result, Verb
from nri_numa.http.responses import Assignment, Notice

MOST: Final = 1024
"""Things of one output that are remembered; a node has 110 pods, the agent keeps 256 notices."""
FORGOTTEN: Final = 3600.0
"""Seconds after which the API server forgets an Event. A notice that is older was published by an
earlier process, or comes too late to be news."""
PACE: Final = (0.0, 10.0, 60.0)
"""Seconds between a new Event and its first updates; then `LONGEST_PACE`."""
LONGEST_PACE: Final = 300.0
"""Of something that goes on and on one update in five minutes, as client-go does."""
POD_BURST: Final = 25
"""New Events of one pod at once, then one in `LONGEST_PACE`: client-go's measure."""
FORBIDDEN_PAUSE: Final = LONGEST_PAUSE
"""Somebody must mend a role first."""


class Output(Protocol):
    """One kind of object."""

    name: str
    dropped: int
    hold_until: float

    def due(self, now: float) -> Request | None:
        """The next request; None when nothing may be sent now."""
        ...

    def next_due(self) -> float:
        """When that will be otherwise; infinity when nothing waits."""
        ...

    def done(self, request: Request, outcome: Outcome, now: float, jitter: float) -> None:
        """This came of a request of ours."""
        ...

    def waiting(self) -> int:
        """How much is still to be sent."""
        ...

    def resync(self) -> None:
        """Look at what is really there."""
        ...


class NodeOutput(OneNode):
    """Annotations and labels of the Node.

    Args:
        node: its name.
        prefix: of all keys.
        annotations, labels: whether each is written; ours that are there all the same are removed.
    """

    def __init__(self, node: str, prefix: str, *, annotations: bool, labels: bool) -> None:
        super().__init__("node", node)
        self._prefix = prefix
        self._with = {"annotations": annotations, "labels": labels}
        self._wanted: dict[str, dict[str, str]] = {"annotations": {}, "labels": {}}
        self._there = self._wanted

    def want(self, annotations: Mapping[str, str], labels: Mapping[str, str]) -> None:
        """The machine is like this."""
        self._wanted = {
            "annotations": dict(annotations) if self._with["annotations"] else {},
            "labels": dict(labels) if self._with["labels"] else {},
        }
        self._ask()

    def _take(self, document: Mapping[str, Any]) -> None:
        metadata = document.get("metadata", {})
        self._there = {part: metadata.get(part) or {} for part in ("annotations", "labels")}

    def _write(self) -> Request | None:
        if not (changes := self._changes()):
            return None
        return Request(
            output=self.name,
            verb=Verb.PATCH,
            resource=Resource.NODES,
            name=self._node,
            body={"metadata": changes},
        )

    def _changes(self) -> dict[str, dict[str, str | None]]:
        """What must change on the Node; keys that are not wanted get None."""
        changes: dict[str, dict[str, str | None]] = {}
        for part, ours in (
            ("annotations", wanted.NODE_ANNOTATIONS),
            ("labels", wanted.NODE_LABELS),
        ):
            should, there = self._wanted[part], self._there[part]
            keys = {f"{self._prefix}/{key}" for key in ours} | should.keys()
            changed = {k: should.get(k) for k in sorted(keys) if should.get(k) != there.get(k)}
            if changed:
                changes[part] = changed
        return changes


_PodName = tuple[str, str]


class PodOutput:
    """The ``assigned`` annotation of pods.

    Args:
        node: whose pods are looked at.
        prefix: of the annotation.
    """

    def __init__(self, node: str, prefix: str) -> None:
        self.name = "pods"
        self.dropped = 0
        self.hold_until = 0.0
        self._node, self._key = node, f"{prefix}/assigned"
        self._shelf: Shelf[_PodName] = Shelf(MOST)
        self._look = False

    def want(self, assignments: Iterable[Assignment]) -> None:
        """These are all containers; pods without pinned ones are left as they are."""
        now = wanted.pod_annotations(assignments)
        for name in self._shelf.keys():  # noqa: SIM118  # a shelf is no mapping
            if name not in now:
                self._shelf.drop(name)
        for name, version in now.items():
            if not self._shelf.want(name, version):
                self.dropped += 1

    def due(self, now: float) -> Request | None:
        """A look at all pods when it is time for that, else the next annotation."""
        if self.hold_until > now:
            return None
        if self._look:
            return Request(
                output=self.name,
                verb=Verb.LIST,
                resource=Resource.PODS,
                field_selector={"spec.nodeName": self._node},
            )
        for name in self._shelf.due(now):
            version = self._shelf.wanted(name)
            assert isinstance(version, tuple)  # noqa: S101  # as `want` made it
            uid, text = version
            metadata: dict[str, Any] = {"annotations": {self._key: text}}
            if "-" in uid:
                # Not to a namesake. What the runtime has of a static pod is a hash, no UID.
                metadata["uid"] = uid
            return Request(
                output=self.name,
                verb=Verb.PATCH,
                resource=Resource.PODS,
                namespace=name[0],
                name=name[1],
                body={"metadata": metadata},
                key=name,
                version=version,
            )
        return None

    def next_due(self) -> float:
        """When the next request may be made."""
        return max(self.hold_until, 0.0 if self._look else self._shelf.next_due())

    def done(self, request: Request, outcome: Outcome, now: float, jitter: float) -> None:
        """Remember what is there now."""
        if outcome.result is Result.FORBIDDEN:
            self.hold_until = now + FORBIDDEN_PAUSE
            return
        if request.verb is Verb.LIST:
            if outcome.result is Result.DONE:
                self._look = False
                self._compare(outcome.documents)
            else:
                self.hold_until = now + 1.0 + jitter
            return
        name = request.key
        assert isinstance(name, tuple)  # noqa: S101  # as `due` made it
        if outcome.result in (Result.DONE, Result.MISSING, Result.CONFLICT):
            # Gone, or there is another pod of that name by now: the next resync finds out.
            self._shelf.sent(name, request.version)
        elif outcome.result is Result.INVALID:
            self._shelf.sent(name, request.version)
            self.dropped += 1
        else:
            self._shelf.later(name, now, jitter)

    def _compare(self, documents: Iterable[Mapping[str, Any]]) -> None:
        """Whose annotation somebody removed or changed gets it again."""
        for document in documents:
            metadata = document["metadata"]
            name = (metadata["namespace"], metadata["name"])
            there = (metadata.get("annotations") or {}).get(self._key)
            sent = self._shelf.version(name)
            if isinstance(sent, tuple) and sent[1] != there:
                self._shelf.undo(name)

    def waiting(self) -> int:
        """Pods whose annotation is not up to date."""
        return len(self._shelf)

    def resync(self) -> None:
        """Look at all pods of the node."""
        self._look = bool(self._shelf.keys())


class EventOutput:
    """Events of what happened to containers.

    Args:
        node: which reports.
        prefix: names the reporting controller.
    """

    def __init__(self, node: str, prefix: str) -> None:
        self.name = "events"
        self.dropped = 0
        self.old = 0
        self.hold_until = 0.0
        self._node, self._prefix = node, prefix
        self._shelf: Shelf[str] = Shelf(MOST)
        self._notices: dict[str, Notice] = {}
        self._there: set[str] = set()
        self._updates: dict[str, int] = {}
        self._pods: dict[str, Bucket] = {}

    def want(self, notices: Iterable[Notice], at: float) -> None:
        """These are new, or changed.

        Args:
            notices: from the agent.
            at: Unix time in seconds, on the clock that the notices were made with.
        """
        for notice in notices:
            if notice.id not in self._shelf and at - notice.last > FORGOTTEN:
                self.old += 1
            elif self._shelf.want(notice.id, notice.count):
                self._notices[notice.id] = notice
            else:
                self.dropped += 1
        for gone in [key for key in self._notices if key not in self._shelf]:
            self._forget(gone)

    def due(self, now: float) -> Request | None:
        """The next Event to be made, or to be counted up."""
        if self.hold_until > now:
            return None
        for key in self._shelf.due(now):
            notice = self._notices[key]
            new = key not in self._there
            if new and (wait := self._bucket(notice.pod_uid, now).wait(now)) > 0:
                self._shelf.postpone(key, now + wait)
                continue
            if not new and notice.count < 2:
                self._shelf.sent(key, notice.count)
                continue
            body = (
                wanted.event(notice, prefix=self._prefix, node=self._node)
                if new
                else wanted.series(notice)
            )
            return Request(
                output=self.name,
                verb=Verb.CREATE if new else Verb.PATCH,
                resource=Resource.EVENTS,
                namespace=notice.namespace,
                name=wanted.event_name(notice),
                body=body,
                key=key,
                version=notice.count,
            )
        return None

    def _bucket(self, pod_uid: str, now: float) -> Bucket:
        bucket = self._pods.get(pod_uid)
        if bucket is None:
            if len(self._pods) >= MOST:
                del self._pods[next(iter(self._pods))]
            bucket = self._pods[pod_uid] = Bucket(1 / LONGEST_PACE, POD_BURST, now)
        return bucket

    def next_due(self) -> float:
        """When the next request may be made."""
        return max(self.hold_until, self._shelf.next_due())

    def done(self, request: Request, outcome: Outcome, now: float, jitter: float) -> None:
        """Remember what is there now."""
        key = str(request.key)
        match outcome.result:
            case Result.DONE:
                self._there.add(key)
                if request.verb is Verb.CREATE and key in self._notices:
                    self._bucket(self._notices[key].pod_uid, now).take(now)
                done = self._updates[key] = self._updates.get(key, 0) + 1
                pace = PACE[done] if done < len(PACE) else LONGEST_PACE
                self._shelf.sent(key, request.version, now + pace)
            case Result.EXISTS:
                # An earlier process of ours made it, or the answer did not reach us.
                self._there.add(key)
            case Result.MISSING if request.verb is Verb.PATCH:
                # The API server forgot it, or somebody removed it: it happened again all the same.
                self._there.discard(key)
            case Result.MISSING | Result.ENDING | Result.INVALID:
                self.dropped += 1
                self._forget(key)
            case Result.FORBIDDEN:
                self.hold_until = now + FORBIDDEN_PAUSE
            case _:
                self._shelf.later(key, now, jitter)

    def _forget(self, key: str) -> None:
        self._shelf.drop(key)
        self._notices.pop(key, None)
        self._there.discard(key)
        self._updates.pop(key, None)

    def waiting(self) -> int:
        """Notices that are not told yet."""
        return len(self._shelf)

    def resync(self) -> None:
        """Events that somebody removed stay removed."""
