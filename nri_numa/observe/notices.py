"""What happened to containers, for readers outside the node: Kubernetes Events are made of it.

A refusal that the kubelet asks for again every ten seconds is one notice whose count grows, so a
reader that comes late misses repetitions and no occurrence. Each change of a notice gets the next
number of one sequence: a reader that has read up to a number wants those after it. The id of a
notice stays the same for as long as it lives, over restarts too (`nri_numa.store.history_file`), so
that what is made of it elsewhere is made once.

The HTTP side reads from another thread: a notice never changes, another one takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from enum import StrEnum
from typing import Annotated, Final

import msgspec
from msgspec.structs import replace

from nri_numa.engine.state import Allocation
from nri_numa.observe.traces import PackedTrace

MAX_NOTICES: Final = 256
"""Notices kept; a reader that is away for longer than these last misses the oldest."""
MERGE_WINDOW_S: Final = 600.0
"""Seconds after the last repetition in which the next one belongs to the same notice; client-go
gathers similar Events for as long."""
MAX_NOTICE_MESSAGE_CHARS: Final = 1024
"""Characters of a message; what becomes an Event may have as many bytes."""
K8S_SPAN_ATTRIBUTE_NAMES: Final = ("namespace.name", "pod.name", "pod.uid", "container.name")


class NoticedEventKind(StrEnum):
    """What happened."""

    REJECTED = "refused"
    MISALIGNED = "widened"
    UNPINNED = "unpinned"
    MISSED_START = "gap"
    UNDELIVERED_UPDATE = "late"
    DRIFT = "drift"
    IGNORED = "ignored"
    MOVED = "moved"
    ROOM = "room"
    UNDONE = "undone"
    SHARED_AGAIN = "shared"
    RESERVATION_RELEASED = "reservation"


class NoticeMessageReason(StrEnum):
    """Why it is said, where no container was rejected; empty where the kind says everything."""

    NONE = ""
    PARTLY_MOVED = "PartlyMoved"
    REPAIRS_ABANDONED = "GivenUp"
    REJECTED_RUNNING = "RefusedRunning"
    UNKNOWN_CONTAINER = "UnknownContainer"
    UNKNOWN_PREFIX = "UnknownPrefix"


class Notice(msgspec.Struct, frozen=True, kw_only=True, rename={"pod_uid": "podUID"}):
    """Something that happened to a container, once or again and again."""

    id: Annotated[str, "Of this notice for good, over restarts too."]
    number: Annotated[int, "Where in the sequence it last changed."]
    notice_kind: Annotated[
        str,
        "refused, widened, unpinned, gap, late, drift, ignored, moved, room, undone, shared or "
        "reservation; more may come.",
    ] = msgspec.field(name="what")
    reason: Annotated[str, "A short CamelCase name; may be empty."]
    message: Annotated[str, "The latest words about it."]
    namespace: str
    pod: str
    pod_uid: str  # of a static pod the hash of its manifest
    container: str
    count: Annotated[int, "How often it happened."]
    first_time: Annotated[float, "Seconds since the epoch."] = msgspec.field(name="first")
    last_time: Annotated[float, "Seconds since the epoch."] = msgspec.field(name="last")


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """A rejected container, kept as long as its pod so that the pod's author can ask why.

    Attributes:
        last_time: Unix time in seconds of the last rejection.
        count: how often it was rejected for this reason: the kubelet tries again and again.
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
    def key(self) -> tuple[str, str, str, str]:
        """The same for all rejections of a container for one reason."""
        return self.namespace, self.pod, self.container, self.reason


_Key = tuple[str, str, str, str]


class NoticeLog:
    """The latest ``limit`` notices; ``now`` is Unix time in seconds.

    Args:
        changed: called after every change.

    Attributes:
        instance: of the sequence; ids begin with it.
        number: the last one given out.
        evicted: notices that made room for newer ones.
        keep: called with every notice that is new or changed, to make it outlive the process.
    """

    def __init__(
        self,
        now: Callable[[], float],
        limit: int = MAX_NOTICES,
        *,
        changed: Callable[[], object] = lambda: None,
    ) -> None:
        self._now = now
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
        """Go on where an earlier run ended; only before anything is added."""
        self.instance, self.number = instance, number
        for notice in sorted(notices, key=lambda one: one.number)[-self._limit :]:
            self._kept[_merge_key(notice)] = notice
            self.number = max(self.number, notice.number)

    def add_notice(
        self,
        what: str,
        message: str,
        *,
        namespace: str,
        pod: str,
        pod_uid: str,
        container: str,
        reason: str = NoticeMessageReason.NONE,
    ) -> Notice:
        """Something happened; within `MERGE_WINDOW_S` seconds of the same it is counted there."""
        key, at = (pod_uid, container, what, reason), self._now()
        before = self._kept.pop(key, None)
        self.number += 1
        notice = Notice(
            id=f"{self.instance}{self.number:x}",
            number=self.number,
            notice_kind=what,
            reason=reason,
            message=message
            if len(message) <= MAX_NOTICE_MESSAGE_CHARS
            else f"{message[: MAX_NOTICE_MESSAGE_CHARS - 1]}…",
            namespace=namespace,
            pod=pod,
            pod_uid=pod_uid,
            container=container,
            count=1,
            first_time=at,
            last_time=at,
        )
        if before is not None and abs(at - before.last_time) < MERGE_WINDOW_S:
            notice = replace(
                notice, id=before.id, count=before.count + 1, first_time=before.first_time
            )
        self._kept[key] = notice
        if len(self._kept) > self._limit:
            del self._kept[next(iter(self._kept))]
            self.evicted += 1
        self.keep(notice)
        self._changed()
        return notice

    def add_for_allocation(
        self, one: Allocation, what: str, message: str, *, reason: str = NoticeMessageReason.NONE
    ) -> Notice:
        """`add` for a container with an allocation."""
        return self.add_notice(
            what,
            message,
            namespace=one.namespace,
            pod=one.pod,
            pod_uid=one.pod_uid,
            container=one.container,
            reason=reason,
        )

    def withdraw_notice(self, notice: Notice) -> None:
        """Forget a notice that turned out to be wrong."""
        self._kept.pop(_merge_key(notice), None)
        self._changed()

    def ignored_annotations_of(self, pod_uid: str) -> list[Notice]:
        """What is said of a pod's annotations that have no effect."""
        notices = self.notices_after()
        return [
            n for n in notices if (n.pod_uid, n.notice_kind) == (pod_uid, NoticedEventKind.IGNORED)
        ]

    def notices_after(self, number: int = 0) -> list[Notice]:
        """What changed after a number, in the order of the sequence."""
        found = [notice for notice in tuple(self._kept.values()) if notice.number > number]
        return sorted(found, key=lambda one: one.number)


def _merge_key(notice: Notice) -> _Key:
    return notice.pod_uid, notice.container, notice.notice_kind, notice.reason


class DecidedRequest(msgspec.Struct, rename="camel"):
    """A request of the runtime, and what was decided about the container that it is about."""

    method: Annotated[str, "The request as NRI names it, such as CreateContainer."]
    container_id: Annotated[str, "Empty for Synchronize, which is about all containers."]
    traceparent: Annotated[str, "The runtime's span in W3C Trace Context; empty without one."]
    start: Annotated[float, "When it came; seconds since the epoch."]
    number: Annotated[int, "Where in the sequence."] = 0
    end_time: Annotated[float, "When it was decided; seconds since the epoch."] = msgspec.field(
        name="end", default=0.0
    )
    refused: Annotated[str, "Why it was refused; else empty."] = ""
    attributes: Annotated[dict[str, str | int], "By their names in OpenTelemetry."] = {}


_current_request: ContextVar[DecidedRequest | None] = ContextVar("_request", default=None)


def begin_request(method: str, container_id: str, traceparent: str, at: float) -> None:
    """A request begins; what it defers runs in its context, and is its decision too."""
    _current_request.set(DecidedRequest(method, container_id, traceparent, at))


class RequestDecisions:
    """The latest ``limit`` requests that were decided; one that has a number never changes."""

    def __init__(
        self,
        now: Callable[[], float],
        limit: int = 0,
        *,
        changed: Callable[[], object] = lambda: None,
    ) -> None:
        self._now = now
        self.limit, self.number = limit, 0
        self._changed = changed
        self._kept: tuple[DecidedRequest, ...] = ()

    def record_decision(
        self, container: str, who: Sequence[str], fields: Mapping[str, object], refused: str = ""
    ) -> None:
        """A decision about a container, with its `K8S_SPAN_ATTRIBUTE_NAMES`, or about all."""
        one = _current_request.get()
        if self.limit and one is not None and not one.number and one.container_id == container:
            named = {"container.id": container} if container else {}
            named |= {
                f"k8s.{name}": value
                for name, value in zip(K8S_SPAN_ATTRIBUTE_NAMES, who, strict=False)
            }
            own = {f"numa.{k}": v if isinstance(v, int) else str(v) for k, v in fields.items()}
            one.attributes, one.refused = {**named, **own}, refused
            one.end_time, one.number = self._now(), self.number + 1
            self._kept = (*self._kept[1 - self.limit :], one)
            self.number = one.number
            self._changed()

    def requests_after(self, number: int) -> tuple[DecidedRequest, ...]:
        """Those after a number of the sequence."""
        return tuple([one for one in self._kept if one.number > number])
