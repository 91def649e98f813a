"""Outputs for this node: labels, annotations, capacity, pods and Events. Pure.

The objects that belong to the Node are in `nri_numa.publisher.topology`,
`nri_numa.publisher.slices` and `nri_numa.publisher.numatopology`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from nri_numa.kube.events import event_name
from nri_numa.kube.requests import (
    APIRequest,
    Outcome,
    OutcomeKind,
    Resource,
    Verb,
    annotations_of,
    section_of,
)
from nri_numa.model.offline_capacity import (
    DRAINED_ANNOTATION,
    MAX_CAPACITY_DOCUMENT_BYTES,
    OFFLINE_CAPACITY_ANNOTATION,
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
"""Items of one output; a node has 110 pods, the agent keeps 256 notices."""
API_SERVER_EVENT_TTL_S: Final = 3600.0
"""Seconds after which the API server deletes an Event. An older notice was published by an earlier
process, or is too old to publish."""
EVENT_UPDATE_INTERVALS_S: Final = (0.0, 10.0, 60.0)
"""Seconds between a new Event and its first updates; then `MAX_EVENT_UPDATE_INTERVAL_S`."""
MAX_EVENT_UPDATE_INTERVAL_S: Final = 300.0
"""Seconds between two updates of a lasting Event, as in client-go."""
EVENT_BURST_PER_POD: Final = 25
"""New Events of one pod at once, then one in `MAX_EVENT_UPDATE_INTERVAL_S`, as in client-go."""


class NodePatchOutput(SingleObjectOutput):
    """Keeps a part of the Node as desired: reads it first, then writes the difference."""

    def __init__(self, node: str) -> None:
        super().__init__(node)
        self._active = self._node_read = False

    def _record_node_state(self, document: Mapping[str, Any]) -> None:
        """Record the Node's part from a read or a write."""
        raise NotImplementedError

    def _patch_request(self) -> APIRequest | None:
        """Return the patch from the actual part to the desired one; None if they are equal."""
        raise NotImplementedError

    def pending_count(self) -> int:
        """Return 1 while the part is not known to be as desired."""
        return int(self._active and (not self._node_read or self._patch_request() is not None))

    def is_node_read_due(self, now_s: float) -> bool:
        """Return True if the Node was not read yet and may be read now."""
        return self._active and not self._node_read and self.next_due_at() <= now_s

    def _next_request(self, now_s: float) -> APIRequest | None:
        return self._patch_request() if self._node_read else self._node_read_request()

    def _on_outcome(
        self, request: APIRequest, outcome: Outcome, now_s: float, jitter: float
    ) -> None:
        if outcome.result is not OutcomeKind.SUCCEEDED:
            # The Node is not registered yet, or deleted: read it until it exists.
            self._node_read = False
            self._mark_failed(now_s, jitter)
            return
        self._record_node_state(outcome.documents[0])
        self._node_read = True
        if request.verb is Verb.PATCH and self._patch_request() is not None:
            # Another program writes the same part: back off.
            self._mark_failed(now_s, jitter)
        else:
            self._mark_healthy()

    def schedule_resync(self) -> None:
        """Read the Node again."""
        self._node_read = False


class NodeMetadataOutput(NodePatchOutput):
    """Annotations and labels of the Node; the publisher's own ones are removed if disabled."""

    name = "node"

    def __init__(self, node: str, prefix: str, *, annotations: bool, labels: bool) -> None:
        super().__init__(node)
        self._with = {"annotations": annotations, "labels": labels}
        self._ours = {
            "annotations": {f"{prefix}/{key}" for key in desired_objects.NODE_ANNOTATIONS},
            "labels": {f"{prefix}/{key}" for key in desired_objects.NODE_LABELS},
        }
        self._wanted: dict[str, Mapping[str, str]] = {"annotations": {}, "labels": {}}
        self._there = self._wanted

    def set_desired(self, annotations: Mapping[str, str], labels: Mapping[str, str]) -> None:
        """Set the desired annotations and labels of the machine."""
        machine = {"annotations": annotations, "labels": labels}
        self._wanted = {part: machine[part] if flag else {} for part, flag in self._with.items()}
        self._active = True

    def _record_node_state(self, document: Mapping[str, Any]) -> None:
        self._there = {part: section_of(document, "metadata", part) for part in self._with}

    def _patch_request(self) -> APIRequest | None:
        changes: dict[str, dict[str, str | None]] = {}
        for part, own_keys in self._ours.items():
            desired, actual = self._wanted[part], self._there[part]
            keys = sorted(own_keys | desired.keys())
            if changed := {k: desired.get(k) for k in keys if desired.get(k) != actual.get(k)}:
                changes[part] = changed
        if not changes:
            return None
        return self._new_request(Verb.PATCH, Resource.NODES, self._node, body={"metadata": changes})


class NodeCapacityOutput(NodePatchOutput):
    """Exclusive CPUs in the capacity of the Node's status, which the scheduler counts.

    The kubelet copies a capacity that it does not know to allocatable, and sets it to 0 when it
    registers the Node again (kubernetes ``pkg/kubelet/nodestatus/setters.go`` and
    ``kubelet_node_status.go``), so it is read again at every resync.
    """

    name = "capacity"

    def __init__(self, node: str, resource: str) -> None:
        super().__init__(node)
        self._resource, self._wanted = resource, ""
        self._there: str | None = None

    def set_desired(self, count: int) -> None:
        """Set the number of exclusive CPUs."""
        self._wanted, self._active = str(count), True

    def _record_node_state(self, document: Mapping[str, Any]) -> None:
        self._there = section_of(document, "status", "capacity").get(self._resource)

    def _patch_request(self) -> APIRequest | None:
        if self._there == self._wanted:
            return None
        body = {"status": {"capacity": {self._resource: self._wanted}}}
        return self._new_request(Verb.PATCH, Resource.NODE_STATUS, self._node, body=body)


class AgentOfflineCapacityOutput(Output):
    """Offline capacity and drains in the Node's annotations, as a document for the agent.

    The agent has no access to the API server, so the publisher reads the Node for it. The texts are
    passed on unchanged: the agent validates them.

    Attributes:
        document: for the agent's file; empty before the first read of the Node.
        problem: sentence saying why a text is not passed on.
    """

    name, failure_text = "handover", "capacity not handed to agent"

    def __init__(self, node: str, prefix: str, interval: float) -> None:
        super().__init__()
        self.document = ""
        self._node, self._prefix, self._interval = node, prefix, interval
        self._failures = 0

    def is_node_read_due(self, now_s: float) -> bool:
        """Return True if the next read of the Node is due."""
        return self.hold_until <= now_s

    def _next_request(self, now_s: float) -> APIRequest | None:
        return self._new_request(Verb.GET, Resource.NODES, self._node, metadata=True)

    def _on_outcome(
        self, request: APIRequest, outcome: Outcome, now_s: float, jitter: float
    ) -> None:
        """Build the document; an unreadable Node leaves it as it was."""
        if outcome.result is not OutcomeKind.SUCCEEDED:
            self._failures += 1
            self.hold_until = now_s + backoff_seconds(self._failures, jitter)
            return
        self._failures = 0
        self.hold_until = now_s + self._interval * (0.9 + 0.2 * jitter)
        annotations = annotations_of(outcome.documents[0])
        texts = {
            key: str(annotations.get(f"{self._prefix}/{key}", ""))
            for key in (OFFLINE_CAPACITY_ANNOTATION, DRAINED_ANNOTATION)
        }
        document = json.dumps(texts, separators=(",", ":"))
        self.problem = ""
        if len(document) > MAX_CAPACITY_DOCUMENT_BYTES:
            # The agent would reject the document, too, and keep its last one.
            self.problem = (
                f"the annotations {OFFLINE_CAPACITY_ANNOTATION} and {DRAINED_ANNOTATION} have "
                f"{len(document)} bytes together, expected {MAX_CAPACITY_DOCUMENT_BYTES} at most"
            )
        else:
            self.document = document


class PodAnnotationOutput(Output):
    """The ``assigned`` annotation of the node's pods."""

    name = "pods"

    def __init__(self, node: str, prefix: str) -> None:
        super().__init__()
        self._node, self._key = node, f"{prefix}/assigned"
        self._shelf: VersionedQueue[tuple[str, str]] = VersionedQueue(MAX_ITEMS_PER_OUTPUT)
        self._list_due = False

    def set_desired(self, assignments: Iterable[Assignment]) -> None:
        """Set all containers; pods without a pinned one are not changed."""
        versions = desired_objects.pod_annotations(assignments)
        for name in self._shelf.keys() - versions.keys():
            del self._shelf[name]
        self.dropped += sum(
            not self._shelf.set_desired(name, version) for name, version in versions.items()
        )

    def _next_request(self, now_s: float) -> APIRequest | None:
        """Return a list of all pods if a resync is due, else the next annotation."""
        if self._list_due:
            return self._pod_list_request(spec_nodeName=self._node)
        for name in self._shelf.due_keys(now_s):
            uid, text = version = self._shelf[name].desired
            metadata: dict[str, Any] = {"annotations": {self._key: text}}
            if "-" in uid:
                # Not to another pod of that name. A static pod has a hash instead of a UID.
                metadata["uid"] = uid
            body = {"metadata": metadata}
            return self._new_request(
                Verb.PATCH, Resource.PODS, name[1],
                namespace=name[0], body=body, key=name, version=version,
            )  # fmt: skip
        return None

    def next_due_at(self) -> float:
        """Return when the next request may be made."""
        return max(self.hold_until, 0.0 if self._list_due else self._shelf.next_due_at())

    def _on_outcome(
        self, request: APIRequest, outcome: Outcome, now_s: float, jitter: float
    ) -> None:
        if request.verb is Verb.LIST:
            if outcome.result is OutcomeKind.SUCCEEDED:
                self._list_due = False
                self._mark_changed_annotations(outcome.documents)
            else:
                self.hold_until = now_s + 1.0 + jitter
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
            # The pod is gone, or another one has its name: the next resync corrects this.
            item.mark_sent(request.version)
            self.dropped += outcome.result is OutcomeKind.INVALID
        else:
            item.mark_failed(now_s, jitter)

    def _mark_changed_annotations(self, documents: Iterable[Mapping[str, Any]]) -> None:
        """Mark pods as unsent whose annotation was removed or changed."""
        for document in documents:
            metadata = document["metadata"]
            name = (metadata["namespace"], metadata["name"])
            annotation = annotations_of(document).get(self._key)
            item = self._shelf.get(name)
            if item is not None and item.sent is not None and item.sent[1] != annotation:
                item.sent = None

    def pending_count(self) -> int:
        """Return the number of pods whose annotation is not up to date."""
        return self._shelf.pending_count()

    def schedule_resync(self) -> None:
        """List all pods of the node again."""
        self._list_due = bool(self._shelf)


@dataclass(slots=True)
class _EventProgress:
    notice: Notice
    exists: bool = False
    written_count: int = 0


class EventOutput(Output):
    """Events about containers, made from the agent's notices.

    Attributes:
        expired_count: notices that were an hour old when they were first read.
    """

    name = "events"

    def __init__(self, node: str, prefix: str) -> None:
        super().__init__()
        self.expired_count = 0
        self._node, self._prefix = node, prefix
        self._shelf: VersionedQueue[str] = VersionedQueue(MAX_ITEMS_PER_OUTPUT)
        self._known: dict[str, _EventProgress] = {}
        self._pods: dict[str, TokenBucket] = {}

    def add_notices(self, notices: Iterable[Notice], wall: float) -> None:
        """Add new or changed notices; `wall` is the current Unix time."""
        for notice in notices:
            if notice.id not in self._shelf and wall - notice.last_time > API_SERVER_EVENT_TTL_S:
                self.expired_count += 1
            elif self._shelf.set_desired(notice.id, notice.count):
                self._known.setdefault(notice.id, _EventProgress(notice)).notice = notice
            else:
                self.dropped += 1
        for key in self._known.keys() - self._shelf.keys():
            del self._known[key]

    def _next_request(self, now_s: float) -> APIRequest | None:
        """Return the next Event to create, or to update with its count."""
        for key in self._shelf.due_keys(now_s):
            item, notice = self._shelf[key], self._known[key].notice
            if not self._known[key].exists:
                bucket = self._pod_token_bucket(notice.pod_uid, now_s)
                if (pause_s := bucket.seconds_until_token(now_s)) > 0:
                    item.retry_at = now_s + pause_s
                    continue
                verb = Verb.CREATE
                body = desired_objects.build_event(notice, self._prefix, self._node)
            elif notice.count < 2:
                item.mark_sent(notice.count)
                continue
            else:
                verb, body = Verb.PATCH, desired_objects.event_series(notice)
            return self._new_request(
                verb, Resource.EVENTS, event_name(notice.pod, key),
                namespace=notice.namespace, body=body, key=key, version=notice.count,
            )  # fmt: skip
        return None

    def _pod_token_bucket(self, pod_uid: str, now_s: float) -> TokenBucket:
        bucket = self._pods.get(pod_uid)
        if bucket is None:
            if len(self._pods) >= MAX_ITEMS_PER_OUTPUT:
                del self._pods[next(iter(self._pods))]
            bucket = self._pods[pod_uid] = TokenBucket(
                1 / MAX_EVENT_UPDATE_INTERVAL_S, EVENT_BURST_PER_POD, now_s
            )
        return bucket

    def next_due_at(self) -> float:
        """Return when the next request may be made."""
        return max(self.hold_until, self._shelf.next_due_at())

    def _on_outcome(
        self, request: APIRequest, outcome: Outcome, now_s: float, jitter: float
    ) -> None:
        key = str(request.key)
        if (item := self._shelf.get(key)) is None:
            return
        progress = self._known[key]
        match outcome.result:
            case OutcomeKind.SUCCEEDED:
                progress.exists = True
                if request.verb is Verb.CREATE:
                    self._pod_token_bucket(progress.notice.pod_uid, now_s).take_token(now_s)
                progress.written_count += 1
                intervals_s = EVENT_UPDATE_INTERVALS_S[progress.written_count :]
                interval_s = intervals_s[0] if intervals_s else MAX_EVENT_UPDATE_INTERVAL_S
                item.mark_sent(request.version, now_s + interval_s)
            case OutcomeKind.EXISTS:
                # An earlier publisher created it, or the answer was lost.
                progress.exists = True
            case OutcomeKind.MISSING if request.verb is Verb.PATCH:
                # The Event expired or was deleted: create it again.
                progress.exists = False
            case OutcomeKind.MISSING | OutcomeKind.ENDING | OutcomeKind.INVALID:
                self.dropped += 1
                del self._shelf[key], self._known[key]
            case _:
                item.mark_failed(now_s, jitter)

    def pending_count(self) -> int:
        """Return the number of notices not written yet; deleted Events stay deleted."""
        return self._shelf.pending_count()
