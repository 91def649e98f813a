"""Notices of what happened to containers; Kubernetes Events are made from them.

A rejection that the kubelet provokes again every ten seconds is one notice whose count grows, so a
slow reader misses repetitions but no notice. Each change of a notice gets the next number of one
sequence: a reader continues after the last number that it has read. The id of a notice never
changes, across restarts either (`nri_numa.store.history_file`), so its Event is created only once.

The HTTP server reads from another thread: a notice never changes, a changed one replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from enum import StrEnum
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from nri_numa.engine.state import Allocation
from nri_numa.model.reasons import FORMER_REASONS
from nri_numa.observe.traces import PackedTrace

MAX_NOTICES: Final = 256
"""Number of stored notices; the oldest is evicted."""
MERGE_WINDOW_S: Final = 600.0
"""Seconds after the last repetition in which the next one counts on the same notice; client-go
aggregates similar Events for as long."""
MAX_NOTICE_MESSAGE_CHARS: Final = 1024
"""Characters of a message; the message of an Event may have as many bytes."""
K8S_SPAN_ATTRIBUTE_NAMES: Final = ("namespace.name", "pod.name", "pod.uid", "container.name")


class NoticedEventKind(StrEnum):
    """Kind of event that a notice is about."""

    REJECTED = "rejected"
    MISALIGNED = "misaligned"
    UNPINNED = "unpinned"
    MISSED_START = "missed-start"
    UNDELIVERED_UPDATE = "undelivered-update"
    DRIFT = "drift"
    IGNORED = "ignored"
    MOVED = "moved"
    ROOM = "room"
    UNDONE = "undone"
    SHARED_AGAIN = "shared"
    RESERVATION_RELEASED = "reservation"


FORMER_NOTICE_KINDS: Final = {
    "gap": NoticedEventKind.MISSED_START,
    "late": NoticedEventKind.UNDELIVERED_UPDATE,
    "refused": NoticedEventKind.REJECTED,
    "widened": NoticedEventKind.MISALIGNED,
}
"""Kind by the name that it had in histories of older versions."""


class NoticeMessageReason(StrEnum):
    """Reason of a notice that is not about a rejection; empty if the kind says everything."""

    NONE = ""
    PARTLY_MIGRATED = "PartlyMigrated"
    REPAIRS_ABANDONED = "RepairsAbandoned"
    REJECTED_RUNNING = "RejectedRunning"
    UNKNOWN_CONTAINER = "UnknownContainer"
    UNKNOWN_PREFIX = "UnknownPrefix"
    OLD_VALUE = "OldValue"


FORMER_NOTICE_REASONS: Final = {
    **FORMER_REASONS,
    "GivenUp": "RepairsAbandoned",
    "PartlyMoved": "PartlyMigrated",
    "RefusedRunning": "RejectedRunning",
}
"""Reason by the name that it had in histories of older versions."""


_NOTICE_FIELDS: Final = {
    "pod_uid": "podUID",
    "notice_kind": "kind",
    "first_time": "firstTime",
    "last_time": "lastTime",
}
FORMER_NOTICE_FIELDS: Final = {"what": "kind", "first": "firstTime", "last": "lastTime"}
"""Field by the name that it had in histories of older versions."""


class Notice(msgspec.Struct, frozen=True, kw_only=True, rename=_NOTICE_FIELDS):
    """Something that happened to a container, once or repeatedly."""

    id: Annotated[str, "Of this notice for good, over restarts too."]
    number: Annotated[int, "Where in the sequence it last changed."]
    notice_kind: Annotated[
        str,
        "rejected, misaligned, unpinned, missed-start, undelivered-update, drift, ignored, moved, "
        "room, undone, shared or reservation; more may come.",
    ]
    reason: Annotated[str, "A short CamelCase name; may be empty."]
    message: Annotated[str, "The latest words about it."]
    namespace: str
    pod: str
    pod_uid: str  # for a static pod, the hash of its manifest
    container: str
    count: Annotated[int, "How often it happened."]
    first_time: Annotated[float, "Seconds since the epoch."]
    last_time: Annotated[float, "Seconds since the epoch."]


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """A rejected container, stored as long as its pod exists, for `explain`.

    Attributes:
        last_time: Unix time in seconds of the last rejection.
        count: number of rejections for this reason; the kubelet keeps retrying.
    """

    pod_id: str
    namespace: str
    pod: str
    container: str
    reason: str
    message: str
    last_time: float
    trace: PackedTrace
    observed: bool = False
    count: int = 1

    @property
    def merge_key(self) -> tuple[str, str, str, str]:
        """Key that all rejections of a container for one reason share."""
        return self.namespace, self.pod, self.container, self.reason


class NoticedContainer(NamedTuple):
    """Names of a container; that of the container is empty for its pod."""

    namespace: str
    pod: str
    pod_uid: str
    container: str


def container_of_allocation(allocation: Allocation) -> NoticedContainer:
    """Return the names of the container of an allocation."""
    return NoticedContainer(
        allocation.namespace, allocation.pod, allocation.pod_uid, allocation.container
    )


_Key = tuple[str, str, str, str]


class NoticeLog:
    """The latest ``limit`` notices; ``clock`` returns Unix time in seconds.

    Args:
        changed: called after every change.

    Attributes:
        instance: id of the sequence; ids of notices begin with it.
        number: the last number assigned.
        evicted: number of notices evicted by newer ones.
        keep: called with every new or changed notice, to store it on disk.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        limit: int = MAX_NOTICES,
        *,
        changed: Callable[[], object] = lambda: None,
    ) -> None:
        self._now = clock
        self._limit = limit
        self._kept: dict[_Key, Notice] = {}
        self.instance = "0"
        self.number = 0
        self.evicted = 0
        self.keep: Callable[[Notice], object] = lambda notice: None
        self._changed = changed

    def restore_notices(
        self, instance: str, notices: Iterable[Notice] = (), number: int = 0
    ) -> None:
        """Restore the notices of an earlier run; only before any notice is added."""
        self.instance, self.number = instance, number
        for notice in sorted(notices, key=lambda one: one.number)[-self._limit :]:
            self._kept[_merge_key(notice)] = notice
            self.number = max(self.number, notice.number)

    def add_notice(
        self,
        container: NoticedContainer,
        kind: str,
        message: str,
        *,
        reason: str = NoticeMessageReason.NONE,
    ) -> Notice:
        """Add a notice, or count it on the same one of the last `MERGE_WINDOW_S` seconds."""
        noted_at = self._now()
        key = container.pod_uid, container.container, kind, reason
        prior = self._kept.pop(key, None)
        self.number += 1
        notice = Notice(
            id=f"{self.instance}{self.number:x}",
            number=self.number,
            notice_kind=kind,
            reason=reason,
            message=message
            if len(message) <= MAX_NOTICE_MESSAGE_CHARS
            else f"{message[: MAX_NOTICE_MESSAGE_CHARS - 1]}…",
            **container._asdict(),
            count=1,
            first_time=noted_at,
            last_time=noted_at,
        )
        if prior is not None and abs(noted_at - prior.last_time) < MERGE_WINDOW_S:
            notice = replace(
                notice, id=prior.id, count=prior.count + 1, first_time=prior.first_time
            )
        self._kept[key] = notice
        if len(self._kept) > self._limit:
            del self._kept[next(iter(self._kept))]
            self.evicted += 1
        self.keep(notice)
        self._changed()
        return notice

    def add_for_allocation(
        self,
        allocation: Allocation,
        kind: str,
        message: str,
        *,
        reason: str = NoticeMessageReason.NONE,
    ) -> Notice:
        """Add a notice about the container of an allocation."""
        return self.add_notice(container_of_allocation(allocation), kind, message, reason=reason)

    def withdraw_notice(self, notice: Notice) -> None:
        """Drop a notice that turned out to be wrong."""
        self._kept.pop(_merge_key(notice), None)
        self._changed()

    def ignored_annotations_of(self, pod_uid: str) -> list[Notice]:
        """Return the notices about a pod's annotations that have no effect."""
        notices = self.notices_after()
        return [
            n for n in notices if (n.pod_uid, n.notice_kind) == (pod_uid, NoticedEventKind.IGNORED)
        ]

    def notices_after(self, number: int = 0) -> list[Notice]:
        """Return the notices that changed after ``number``, in the order of the sequence."""
        notices = [notice for notice in tuple(self._kept.values()) if notice.number > number]
        return sorted(notices, key=lambda one: one.number)


def _merge_key(notice: Notice) -> _Key:
    return notice.pod_uid, notice.container, notice.notice_kind, notice.reason


class DecidedRequest(msgspec.Struct, rename="camel"):
    """A request of the runtime, and the decision about its container."""

    method: Annotated[str, "The request as NRI names it, such as CreateContainer."]
    container_id: Annotated[str, "Empty for Synchronize, which is about all containers."]
    traceparent: Annotated[str, "The runtime's span in W3C Trace Context; empty without one."]
    start: Annotated[float, "When it came; seconds since the epoch."]
    number: Annotated[int, "Where in the sequence."] = 0
    end_time: Annotated[float, "When it was decided; seconds since the epoch."] = msgspec.field(
        name="end", default=0.0
    )
    rejection: Annotated[str, "Message of the rejection; empty without one."] = ""
    attributes: Annotated[dict[str, str | int], "By their names in OpenTelemetry."] = {}


_current_request: ContextVar[DecidedRequest | None] = ContextVar("_request", default=None)


def begin_request(method: str, container_id: str, traceparent: str, start_time: float) -> None:
    """Begin a request; deferred tasks run in its context and may record its decision too."""
    _current_request.set(DecidedRequest(method, container_id, traceparent, start_time))


class RequestDecisions:
    """The latest ``limit`` decided requests; one that has a number never changes."""

    def __init__(
        self,
        clock: Callable[[], float],
        limit: int = 0,
        *,
        changed: Callable[[], object] = lambda: None,
    ) -> None:
        self._now = clock
        self.limit, self.number = limit, 0
        self._changed = changed
        self._kept: tuple[DecidedRequest, ...] = ()

    def record_decision(
        self,
        container: str,
        names: Sequence[str],
        fields: Mapping[str, object],
        rejection: str = "",
    ) -> None:
        """Record the decision on a request; ``names`` are values of `K8S_SPAN_ATTRIBUTE_NAMES`."""
        span = _current_request.get()
        if self.limit and span is not None and not span.number and span.container_id == container:
            labels = {"container.id": container} if container else {}
            labels |= {
                f"k8s.{name}": value
                for name, value in zip(K8S_SPAN_ATTRIBUTE_NAMES, names, strict=False)
            }
            details = {f"numa.{k}": v if isinstance(v, int) else str(v) for k, v in fields.items()}
            span.attributes, span.rejection = {**labels, **details}, rejection
            span.end_time, span.number = self._now(), self.number + 1
            self._kept = (*self._kept[1 - self.limit :], span)
            self.number = span.number
            self._changed()

    def requests_after(self, number: int) -> tuple[DecidedRequest, ...]:
        """Return the decided requests after ``number``."""
        return tuple([request for request in self._kept if request.number > number])
