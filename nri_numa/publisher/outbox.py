"""What waits to be written, and when each may be: bounded, fair, no faster than allowed. Pure.

An output knows what should be in the API server and what it believes to be there, and makes
requests of the difference. Time is handed in, in seconds of a clock that only grows.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from nri_numa.kube.requests import (
    SERVER_WIDE_RESULTS,
    APIRequest,
    ContentType,
    Outcome,
    OutcomeKind,
    Resource,
    Verb,
)
from nri_numa.text import escape_unprintable

MIN_BACKOFF_S: Final = 1.0
MAX_BACKOFF_S: Final = 60.0
"""Seconds: the pause after failures doubles from the first to the longest, which is also the one
where a role must be mended first."""
BLOCKED_RETRY_S: Final = 300.0
"""Seconds until the next attempt where something else of the cluster must be mended first."""

K = TypeVar("K", bound=Hashable)


def backoff_seconds(failures: int, jitter: float) -> float:
    """Seconds to wait after so many failures in a row, 1 after the first.

    The jitter is from 0 to 1; thousands of nodes must not come back in the same moment.
    """
    longest = min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0 ** min(failures - 1, 10))
    return longest * (0.5 + 0.5 * jitter)


class TokenBucket:
    """Requests as a token bucket: so many per second, and so many at once after a quiet time."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._at = burst, now

    def seconds_until_token(self, now: float) -> float:
        """Seconds until one more is allowed; 0 when it is."""
        self._refill_tokens(now)
        return 0.0 if self._tokens >= 1 else (1 - self._tokens) / self._rate

    def take_token(self, now: float) -> None:
        """One is made."""
        self._refill_tokens(now)
        self._tokens -= 1

    def _refill_tokens(self, now: float) -> None:
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._at) * self._rate)
        self._at = now


@dataclass(slots=True)
class DesiredAndSentItem:
    """A thing that is wanted in one version, and was sent in one; None for never."""

    desired: Any
    sent: Any = None
    retry_at: float = 0.0
    failures: int = 0

    @property
    def is_pending(self) -> bool:
        """Whether the newest version is still to be sent."""
        return bool(self.desired != self.sent)

    def mark_sent(self, version: object, again_at: float = 0.0) -> None:
        """It is there in this version; a newer one may be sent from ``again_at`` on."""
        self.sent, self.retry_at, self.failures = version, again_at, 0

    def mark_failed(self, now: float, jitter: float) -> None:
        """It could not be sent."""
        self.failures += 1
        self.retry_at = now + backoff_seconds(self.failures, jitter)


class VersionedQueue(dict[K, DesiredAndSentItem]):
    """Things by key, of which only the newest version is ever sent.

    When there are more things than places, one that was sent makes room first; when none was, the
    newcomer finds no place.
    """

    def __init__(self, places: int) -> None:
        super().__init__()
        self._places = places

    def set_desired(self, key: K, version: object) -> bool:
        """This is what it should be now; False when there is no place for it."""
        if key in self:
            self[key].desired = version
            return True
        if len(self) >= self._places:
            done = next((k for k, one in self.items() if not one.is_pending), None)
            if done is None:
                return False
            del self[done]
        self[key] = DesiredAndSentItem(version)
        return True

    def pending_count(self) -> int:
        """How many are still to be sent."""
        return sum(item.is_pending for item in self.values())

    def due_keys(self, now: float) -> list[K]:
        """What may be sent now, the longest waiting first, of equals the older."""
        ready = [(k, i) for k, i in self.items() if i.is_pending and i.retry_at <= now]
        return [key for key, _ in sorted(ready, key=lambda one: one[1].retry_at)]

    def next_due_at(self) -> float:
        """When the next one may be sent; infinity when nothing waits."""
        return min((i.retry_at for i in self.values() if i.is_pending), default=float("inf"))


class Output:
    """One kind of object: what of it is still to be done, and what an outcome means.

    Attributes:
        name: the metric's label.
        dropped: what will never be written, since this was counted last.
        hold_until: when the next request may be made at the earliest.
        problem: why nothing is written, and what to do, as a sentence; empty when all is well.
        failure_text: what a log line says of the problem.
    """

    failure_text = "not written"

    def __init__(self, name: str) -> None:
        self.name = name
        self.dropped = 0
        self.hold_until = 0.0
        self.problem = ""

    def next_request(self, now: float) -> APIRequest | None:
        """The next request; None when nothing may be sent now."""
        return None if self.next_due_at() > now else self._next_request(now)

    def next_due_at(self) -> float:
        """When that will be otherwise; infinity when nothing waits."""
        return self.hold_until

    def on_outcome(self, request: APIRequest, outcome: Outcome, now: float, jitter: float) -> None:
        """This came of a request of ours."""
        self._on_outcome(request, outcome, now, jitter)
        if outcome.result is OutcomeKind.FORBIDDEN:
            # A right is missing, or a policy refuses this one; what waits comes before it next.
            self.hold_until = now + MAX_BACKOFF_S

    def pending_count(self) -> int:
        """How much is still to be sent."""
        return 0

    def is_node_read_due(self, now: float) -> bool:
        """Whether the next request is to read the Node: an answer to another one will do."""
        return False

    def schedule_resync(self) -> None:
        """Look at what is really there."""

    def _next_request(self, now: float) -> APIRequest | None:
        raise NotImplementedError

    def _on_outcome(self, request: APIRequest, outcome: Outcome, now: float, jitter: float) -> None:
        raise NotImplementedError

    def _new_request(
        self, verb: Verb, resource: Resource, name: str = "", **more: Any
    ) -> APIRequest:
        return APIRequest(output=self.name, verb=verb, resource=resource, name=name, **more)

    def _pod_list_request(
        self, key: object = None, namespace: str = "", **fields: str
    ) -> APIRequest:
        selector = {name.replace("_", "."): value for name, value in fields.items()}
        return self._new_request(
            Verb.LIST, Resource.PODS, namespace=namespace, field_selector=selector, key=key
        )


class SingleObjectOutput(Output):
    """One object, or a part of it: tried again with growing pauses until it is as it should be."""

    def __init__(self, name: str, node: str) -> None:
        super().__init__(name)
        self._node = node
        self._failures, self._not_before = 0, 0.0

    def next_due_at(self) -> float:
        """When the next request may be made."""
        return max(self.hold_until, self._not_before) if self.pending_count() else float("inf")

    def pending_count(self) -> int:
        """1 while the object is not known to be as it should."""
        raise NotImplementedError

    def _node_read_request(self) -> APIRequest:
        return self._new_request(Verb.GET, Resource.NODES, self._node)

    def _mark_healthy(self) -> None:
        self._failures, self._not_before, self.problem = 0, 0.0, ""

    def _mark_failed(self, now: float, jitter: float) -> None:
        self._failures += 1
        self._not_before = now + backoff_seconds(self._failures, jitter)

    def _mark_blocked(self, problem: str, now: float, jitter: float) -> None:
        self.problem = problem
        self.hold_until = now + BLOCKED_RETRY_S * (0.8 + 0.4 * jitter)


def node_owner_reference(node: str, uid: str) -> dict[str, Any]:
    """A reference to the Node as it is now: with an earlier uid the object would be collected."""
    return {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}


class AppliedObjectOutput(SingleObjectOutput):
    """An object that belongs to the Node and that server-side apply brings there.

    One object with atomic lists has one owner: fields that another one owns are not taken, unless
    `force`.

    Attributes:
        missing_definition_hint: what to do where the cluster has no such kind.
        alternative: what to do where another one owns the fields.
    """

    resource: Resource
    missing_definition_hint = alternative = ""

    def __init__(self, name: str, node: str, *, force: bool = False) -> None:
        super().__init__(name, node)
        self._object, self._force = node, force
        self._wanted: Any = None
        self._sent: Any = None
        self._owner_uid = ""

    def _build_object(self) -> dict[str, Any]:
        """The whole object."""
        raise NotImplementedError

    def pending_count(self) -> int:
        """1 while it is not known to be there as it should."""
        return int(
            self._wanted is not None and (not self._owner_uid or self._build_object() != self._sent)
        )

    def is_node_read_due(self, now: float) -> bool:
        """Whether its UID is not known."""
        return not self._owner_uid and self._wanted is not None and self.next_due_at() <= now

    def _next_request(self, now: float) -> APIRequest | None:
        """The Node's UID first, then the object."""
        return self._apply_request() if self._owner_uid else self._node_read_request()

    def _apply_request(self) -> APIRequest:
        return self._new_request(
            Verb.PATCH,
            self.resource,
            self._object,
            form=ContentType.APPLY,
            body=self._build_object(),
            force=self._force,
        )

    def _on_outcome(self, request: APIRequest, outcome: Outcome, now: float, jitter: float) -> None:
        match outcome.result:
            case OutcomeKind.SUCCEEDED if request.resource is Resource.NODES:
                self._owner_uid = outcome.documents[0]["metadata"].get("uid") or "-"
            case OutcomeKind.SUCCEEDED:
                self._mark_healthy()
                self._sent = request.body
                self._on_applied(request, outcome.documents[0], now)
            case OutcomeKind.UNKNOWN:
                self._mark_blocked(f"{outcome.text}; {self.missing_definition_hint}", now, jitter)
            case OutcomeKind.CONFLICT if self.alternative:
                self._block_on_field_owners(
                    re.findall(r'with "([^"]*)"', outcome.text), now, jitter
                )
            case OutcomeKind.INVALID if self.missing_definition_hint:
                text = f"{outcome.text}; is its definition another one?"
                self._mark_blocked(text, now, jitter)
            case OutcomeKind.FAILED | OutcomeKind.FORBIDDEN:
                self._mark_failed(
                    now, jitter
                )  # the same once more: nothing says that it is another one
            case _:
                # The Node is not registered yet, or the object went in this moment.
                self._owner_uid = ""
                self._mark_failed(now, jitter)

    def _on_applied(self, request: APIRequest, document: Mapping[str, Any], now: float) -> None:
        """The object is there."""

    def _block_on_field_owners(self, owners: Iterable[str], now: float, jitter: float) -> None:
        names = escape_unprintable(", ".join(sorted(set(owners))) or "another field manager")[:200]
        self._mark_blocked(f"its fields belong to {names}; {self.alternative}", now, jitter)

    def schedule_resync(self) -> None:
        """Look at the Node again, and apply the object once more."""
        self._owner_uid, self._sent = "", None


class OutputQueue:
    """Takes one request at a time from outputs, the most important first.

    When the server cannot, all of them wait.
    """

    def __init__(self, outputs: Sequence[Output], *, rate: float, burst: float, now: float) -> None:
        self.outputs = tuple(outputs)
        self._bucket = TokenBucket(rate, burst, now)
        self._hold_until = 0.0
        self.failures = 0

    def next_request(self, now: float) -> APIRequest | None:
        """The request to make now; what comes of it must be handed to `done`."""
        if self._hold_until > now or self._bucket.seconds_until_token(now) > 0:
            return None
        for output in self.outputs:
            if (request := output.next_request(now)) is not None:
                self._bucket.take_token(now)
                return request
        return None

    def seconds_until_request(self, now: float) -> float:
        """Seconds until there may be one; infinity while nothing is to be done."""
        due = min((output.next_due_at() for output in self.outputs), default=float("inf"))
        return max(due - now, self._hold_until - now, self._bucket.seconds_until_token(now), 0.0)

    def on_outcome(self, request: APIRequest, outcome: Outcome, now: float, jitter: float) -> None:
        """This came of a request."""
        if outcome.result in SERVER_WIDE_RESULTS:
            self.failures += 1
            # Not all in the very moment that the server named.
            after = outcome.retry_after * (1 + 0.1 * jitter)
            self._hold_until = now + max(after, backoff_seconds(self.failures, jitter))
            return
        self.failures = 0
        (output,) = (one for one in self.outputs if one.name == request.output)
        output.on_outcome(request, outcome, now, jitter)
        whole = request.verb is Verb.GET and request.resource is Resource.NODES
        if whole and not request.metadata and outcome.result is OutcomeKind.SUCCEEDED:
            for other in self.outputs:
                if other is not output and other.is_node_read_due(now):
                    other.on_outcome(request, outcome, now, jitter)

    def pending_count(self) -> int:
        """How much is still to be sent."""
        return sum(output.pending_count() for output in self.outputs)

    def schedule_resync(self) -> None:
        """Look at what is really there."""
        for output in self.outputs:
            output.schedule_resync()
