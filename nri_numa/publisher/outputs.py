"""What is written about this node: its labels and annotations, capacity, pods and Events. Pure.

The objects that belong to the Node are in `nri_numa.publisher.topology`,
`nri_numa.publisher.slices` and `nri_numa.publisher.numatopology`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from nri_numa.kube.requests import APIRequest, Outcome, OutcomeKind, Resource, Verb
from nri_numa.model.offline_capacity import (
    DRAINED_ANNOTATION,
    MAX_CAPACITY_DOCUMENT_BYTES,
    OFFLINE_CAPACITY_KEY,
)
from nri_numa.observe.notices import Notice
from nri_numa.publisher import desired_objects
from nri_numa.publisher.outbox import (
    Output,
    SingleObjectOutput,
    TokenBucket,
    VersionedQueue,
    backoff_seconds,
)
from nri_numa.web.responses import Assignment

MAX_ITEMS_PER_OUTPUT: Final = 1024
"""Things of one output that are remembered; a node has 110 pods, the agent keeps 256 notices."""
API_SERVER_EVENT_TTL_S: Final = 3600.0
"""Seconds after which the API server forgets an Event. A notice that is older was published by an
earlier process, or comes too late to be news."""
EVENT_UPDATE_INTERVALS_S: Final = (0.0, 10.0, 60.0)
"""Seconds between a new Event and its first updates; then `MAX_EVENT_UPDATE_INTERVAL_S`."""
MAX_EVENT_UPDATE_INTERVAL_S: Final = 300.0
"""Of something that goes on and on one update in five minutes, as client-go does."""
EVENT_BURST_PER_POD: Final = 25
"""New Events of one pod at once, then one in `MAX_EVENT_UPDATE_INTERVAL_S`: client-go's measure."""


class NodePatchOutput(SingleObjectOutput):
    """Keeps a part of the Node as it should be: look first, then write the difference."""

    def __init__(self, name: str, node: str) -> None:
        super().__init__(name, node)
        self._active = self._node_read = False

    def _record_node_state(self, document: Mapping[str, Any]) -> None:
        """This came when the Node was read or written."""
        raise NotImplementedError

    def _patch_request(self) -> APIRequest | None:
        """What makes the part that was read into the wanted one; None when it is."""
        raise NotImplementedError

    def pending_count(self) -> int:
        """1 while it is not known to be as it should."""
        return int(self._active and (not self._node_read or self._patch_request() is not None))

    def is_node_read_due(self, now: float) -> bool:
        """Whether it was not read yet."""
        return self._active and not self._node_read and self.next_due_at() <= now

    def _next_request(self, now: float) -> APIRequest | None:
        return self._patch_request() if self._node_read else self._node_read_request()

    def _new_patch_request(self, resource: Resource, body: dict[str, Any]) -> APIRequest:
        return self._new_request(Verb.PATCH, resource, self._node, body=body)

    def _on_outcome(self, request: APIRequest, outcome: Outcome, now: float, jitter: float) -> None:
        if outcome.result is not OutcomeKind.SUCCEEDED:
            # Not registered yet, or deleted: it is looked for until it is there.
            self._node_read = False
            self._mark_failed(now, jitter)
            return
        self._record_node_state(outcome.documents[0])
        self._node_read = True
        if request.verb is Verb.PATCH and self._patch_request() is not None:
            # Another one writes the same: not faster than once in a while.
            self._mark_failed(now, jitter)
        else:
            self._mark_healthy()

    def schedule_resync(self) -> None:
        """Look at the Node again."""
        self._node_read = False


class NodeMetadataOutput(NodePatchOutput):
    """Annotations and labels of the Node; ours that are there but switched off are removed."""

    def __init__(self, node: str, prefix: str, *, annotations: bool, labels: bool) -> None:
        super().__init__("node", node)
        self._with = {"annotations": annotations, "labels": labels}
        self._ours = {
            "annotations": {f"{prefix}/{key}" for key in desired_objects.NODE_ANNOTATIONS},
            "labels": {f"{prefix}/{key}" for key in desired_objects.NODE_LABELS},
        }
        self._wanted: dict[str, dict[str, str]] = {"annotations": {}, "labels": {}}
        self._there = self._wanted

    def set_desired(self, annotations: Mapping[str, str], labels: Mapping[str, str]) -> None:
        """The machine is like this."""
        machine = {"annotations": annotations, "labels": labels}
        self._wanted = {part: dict(machine[part]) if on else {} for part, on in self._with.items()}
        self._active = True

    def _record_node_state(self, document: Mapping[str, Any]) -> None:
        metadata = document.get("metadata", {})
        self._there = {part: metadata.get(part) or {} for part in self._with}

    def _patch_request(self) -> APIRequest | None:
        changes: dict[str, dict[str, str | None]] = {}
        for part, ours in self._ours.items():
            should, there = self._wanted[part], self._there[part]
            keys = sorted(ours | should.keys())
            if changed := {k: should.get(k) for k in keys if should.get(k) != there.get(k)}:
                changes[part] = changed
        return self._new_patch_request(Resource.NODES, {"metadata": changes}) if changes else None


class NodeCapacityOutput(NodePatchOutput):
    """Exclusive CPUs in the capacity of the Node's status: what the scheduler counts by.

    The kubelet takes a capacity that it does not know of over into allocatable, and sets it to 0
    when it registers the Node anew (kubernetes ``pkg/kubelet/nodestatus/setters.go`` and
    ``kubelet_node_status.go``), so it is looked at again at every resync.
    """

    def __init__(self, node: str, resource: str) -> None:
        super().__init__("capacity", node)
        self._resource, self._wanted = resource, ""
        self._there: str | None = None

    def set_desired(self, count: int) -> None:
        """So many exclusive CPUs may be counted."""
        self._wanted, self._active = str(count), True

    def _record_node_state(self, document: Mapping[str, Any]) -> None:
        capacity = (document.get("status") or {}).get("capacity") or {}
        self._there = capacity.get(self._resource)

    def _patch_request(self) -> APIRequest | None:
        if self._there == self._wanted:
            return None
        capacity = {self._resource: self._wanted}
        return self._new_patch_request(Resource.NODE_STATUS, {"status": {"capacity": capacity}})


class AgentOfflineCapacityOutput(Output):
    """What the Node's annotations say of its capacity, as a document for the agent.

    The agent asks nothing but the machine it is on, so its publisher looks at the Node for it. The
    texts are handed on as they are: the agent judges them.

    Attributes:
        document: for the agent's file; empty before the Node was seen.
        problem: why a text is not handed on.
    """

    failure_text = "capacity not handed to the agent"

    def __init__(self, node: str, prefix: str, interval: float) -> None:
        super().__init__("handover")
        self.document = ""
        self._node, self._prefix, self._interval = node, prefix, interval
        self._failures = 0

    def is_node_read_due(self, now: float) -> bool:
        """Whether it is time to look again."""
        return self.hold_until <= now

    def _next_request(self, now: float) -> APIRequest | None:
        return self._new_request(Verb.GET, Resource.NODES, self._node, metadata=True)

    def _on_outcome(self, request: APIRequest, outcome: Outcome, now: float, jitter: float) -> None:
        """A Node that cannot be read says what it said before."""
        if outcome.result is not OutcomeKind.SUCCEEDED:
            self._failures += 1
            self.hold_until = now + backoff_seconds(self._failures, jitter)
            return
        self._failures = 0
        self.hold_until = now + self._interval * (0.9 + 0.2 * jitter)
        annotations = outcome.documents[0].get("metadata", {}).get("annotations") or {}
        texts = {
            key: str(annotations.get(f"{self._prefix}/{key}", ""))
            for key in (OFFLINE_CAPACITY_KEY, DRAINED_ANNOTATION)
        }
        document = json.dumps(texts, separators=(",", ":"))
        self.problem = ""
        if len(document) > MAX_CAPACITY_DOCUMENT_BYTES:
            # The agent would refuse it too, and go on with what it knows.
            self.problem = (
                f"the annotations {OFFLINE_CAPACITY_KEY} and {DRAINED_ANNOTATION} have "
                f"{len(document)} bytes "
                f"together, expected {MAX_CAPACITY_DOCUMENT_BYTES} at most"
            )
        else:
            self.document = document


_PodName = tuple[str, str]


class PodAnnotationOutput(Output):
    """The ``assigned`` annotation of the node's pods."""

    def __init__(self, node: str, prefix: str) -> None:
        super().__init__("pods")
        self._node, self._key = node, f"{prefix}/assigned"
        self._shelf: VersionedQueue[_PodName] = VersionedQueue(MAX_ITEMS_PER_OUTPUT)
        self._list_due = False

    def set_desired(self, assignments: Iterable[Assignment]) -> None:
        """These are all containers; pods without pinned ones are left as they are."""
        now = desired_objects.pod_annotations(assignments)
        for name in self._shelf.keys() - now.keys():
            del self._shelf[name]
        self.dropped += sum(
            not self._shelf.set_desired(name, version) for name, version in now.items()
        )

    def _next_request(self, now: float) -> APIRequest | None:
        """A look at all pods when it is time for that, else the next annotation."""
        if self._list_due:
            return self._pod_list_request(spec_nodeName=self._node)
        for name in self._shelf.due_keys(now):
            uid, text = version = self._shelf[name].desired
            metadata: dict[str, Any] = {"annotations": {self._key: text}}
            if "-" in uid:
                # Not to a namesake. What the runtime has of a static pod is a hash, no UID.
                metadata["uid"] = uid
            body = {"metadata": metadata}
            return self._new_request(
                Verb.PATCH, Resource.PODS, name[1],
                namespace=name[0], body=body, key=name, version=version,
            )  # fmt: skip
        return None

    def next_due_at(self) -> float:
        """When the next request may be made."""
        return max(self.hold_until, 0.0 if self._list_due else self._shelf.next_due_at())

    def _on_outcome(self, request: APIRequest, outcome: Outcome, now: float, jitter: float) -> None:
        if request.verb is Verb.LIST:
            if outcome.result is OutcomeKind.SUCCEEDED:
                self._list_due = False
                self._mark_changed_annotations(outcome.documents)
            else:
                self.hold_until = now + 1.0 + jitter
            return
        item = self._shelf.get(request.key)
        if item is None:
            return
        if outcome.result in (
            OutcomeKind.SUCCEEDED,
            OutcomeKind.MISSING,
            OutcomeKind.CONFLICT,
            OutcomeKind.INVALID,
        ):
            # Gone, or there is another pod of that name by now: the next resync finds out.
            item.mark_sent(request.version)
            self.dropped += outcome.result is OutcomeKind.INVALID
        else:
            item.mark_failed(now, jitter)

    def _mark_changed_annotations(self, documents: Iterable[Mapping[str, Any]]) -> None:
        """A pod whose annotation was removed or changed gets it again."""
        for document in documents:
            metadata = document["metadata"]
            name = (metadata["namespace"], metadata["name"])
            there = (metadata.get("annotations") or {}).get(self._key)
            item = self._shelf.get(name)
            if item is not None and item.sent is not None and item.sent[1] != there:
                item.sent = None

    def pending_count(self) -> int:
        """Pods whose annotation is not up to date."""
        return self._shelf.pending_count()

    def schedule_resync(self) -> None:
        """Look at all pods of the node."""
        self._list_due = bool(self._shelf)


@dataclass(slots=True)
class _EventProgress:
    notice: Notice
    exists: bool = False
    written_count: int = 0


class EventOutput(Output):
    """Events of what happened to containers.

    Attributes:
        expired_count: notices that were an hour old when they were first read.
    """

    def __init__(self, node: str, prefix: str) -> None:
        super().__init__("events")
        self.expired_count = 0
        self._node, self._prefix = node, prefix
        self._shelf: VersionedQueue[str] = VersionedQueue(MAX_ITEMS_PER_OUTPUT)
        self._known: dict[str, _EventProgress] = {}
        self._pods: dict[str, TokenBucket] = {}

    def add_notices(self, notices: Iterable[Notice], at: float) -> None:
        """These are new, or changed, at this Unix time."""
        for notice in notices:
            if notice.id not in self._shelf and at - notice.last_time > API_SERVER_EVENT_TTL_S:
                self.expired_count += 1
            elif self._shelf.set_desired(notice.id, notice.count):
                self._known.setdefault(notice.id, _EventProgress(notice)).notice = notice
            else:
                self.dropped += 1
        for key in self._known.keys() - self._shelf.keys():
            del self._known[key]

    def _next_request(self, now: float) -> APIRequest | None:
        """The next Event to be made, or to be counted up."""
        for key in self._shelf.due_keys(now):
            item, notice = self._shelf[key], self._known[key].notice
            if not self._known[key].exists:
                if (
                    wait := self._pod_token_bucket(notice.pod_uid, now).seconds_until_token(now)
                ) > 0:
                    item.retry_at = now + wait
                    continue
                verb, body = (
                    Verb.CREATE,
                    desired_objects.build_event(notice, self._prefix, self._node),
                )
            elif notice.count < 2:
                item.mark_sent(notice.count)
                continue
            else:
                verb, body = Verb.PATCH, desired_objects.event_series(notice)
            return self._new_request(
                verb, Resource.EVENTS, desired_objects.event_name(notice.pod, key),
                namespace=notice.namespace, body=body, key=key, version=notice.count,
            )  # fmt: skip
        return None

    def _pod_token_bucket(self, pod_uid: str, now: float) -> TokenBucket:
        bucket = self._pods.get(pod_uid)
        if bucket is None:
            if len(self._pods) >= MAX_ITEMS_PER_OUTPUT:
                del self._pods[next(iter(self._pods))]
            bucket = self._pods[pod_uid] = TokenBucket(
                1 / MAX_EVENT_UPDATE_INTERVAL_S, EVENT_BURST_PER_POD, now
            )
        return bucket

    def next_due_at(self) -> float:
        """When the next request may be made."""
        return max(self.hold_until, self._shelf.next_due_at())

    def _on_outcome(self, request: APIRequest, outcome: Outcome, now: float, jitter: float) -> None:
        key = str(request.key)
        if (item := self._shelf.get(key)) is None:
            return
        known = self._known[key]
        match outcome.result:
            case OutcomeKind.SUCCEEDED:
                known.exists = True
                if request.verb is Verb.CREATE:
                    self._pod_token_bucket(known.notice.pod_uid, now).take_token(now)
                known.written_count += 1
                pace = (
                    EVENT_UPDATE_INTERVALS_S[known.written_count]
                    if known.written_count < len(EVENT_UPDATE_INTERVALS_S)
                    else MAX_EVENT_UPDATE_INTERVAL_S
                )
                item.mark_sent(request.version, now + pace)
            case OutcomeKind.EXISTS:
                # An earlier process of ours made it, or the answer did not reach us.
                known.exists = True
            case OutcomeKind.MISSING if request.verb is Verb.PATCH:
                # The API server forgot it, or it was removed: it happened again all the same.
                known.exists = False
            case OutcomeKind.MISSING | OutcomeKind.ENDING | OutcomeKind.INVALID:
                self.dropped += 1
                del self._shelf[key], self._known[key]
            case _:
                item.mark_failed(now, jitter)

    def pending_count(self) -> int:
        """Notices that are not written yet; Events that were removed stay removed."""
        return self._shelf.pending_count()
