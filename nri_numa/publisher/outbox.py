"""Pending writes to the API server and their times: bounded, fair, limited in rate. Pure.

An output has the desired object and the one that was sent, and makes requests of the difference.
Times are parameters, in seconds of a monotonic clock.
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
"""Seconds: the pause after failures doubles up to this one, which also follows a missing right."""
BLOCKED_RETRY_S: Final = 300.0
"""Seconds until the next attempt if another part of the cluster must be repaired first."""

K = TypeVar("K", bound=Hashable)


def backoff_seconds(failures: int, jitter: float) -> float:
    """Return the seconds to wait after consecutive failures.

    The jitter is from 0 to 1; thousands of nodes must not retry at the same moment.
    """
    max_pause_s = min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0 ** min(failures - 1, 10))
    return max_pause_s * (0.5 + 0.5 * jitter)


class TokenBucket:
    """A token bucket for requests: `rate` per second, and `burst` at once after an idle time."""

    def __init__(self, rate: float, burst: float, now_s: float) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._at = burst, now_s

    def seconds_until_token(self, now_s: float) -> float:
        """Return the seconds until the next request is allowed; 0 if it is."""
        self._refill_tokens(now_s)
        return 0.0 if self._tokens >= 1 else (1 - self._tokens) / self._rate

    def take_token(self, now_s: float) -> None:
        """Take the token of one request."""
        self._refill_tokens(now_s)
        self._tokens -= 1

    def _refill_tokens(self, now_s: float) -> None:
        self._tokens = min(self._burst, self._tokens + max(0.0, now_s - self._at) * self._rate)
        self._at = now_s


@dataclass(slots=True)
class DesiredAndSentItem:
    """The desired version of an item, and the sent one; None if none was sent."""

    desired: Any
    sent: Any = None
    retry_at: float = 0.0
    failures: int = 0

    @property
    def is_pending(self) -> bool:
        """True if the desired version has not been sent."""
        return bool(self.desired != self.sent)

    def mark_sent(self, version: object, retry_at: float = 0.0) -> None:
        """Record a sent version; a newer one may be sent from ``retry_at`` on."""
        self.sent, self.retry_at, self.failures = version, retry_at, 0

    def mark_failed(self, now_s: float, jitter: float) -> None:
        """Record a failure, and back off."""
        self.failures += 1
        self.retry_at = now_s + backoff_seconds(self.failures, jitter)


class VersionedQueue(dict[K, DesiredAndSentItem]):
    """Items by key, of which only the newest version is sent.

    A full queue drops an item that was sent; if none was, it does not accept the new item.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._places = capacity

    def set_desired(self, key: K, version: object) -> bool:
        """Set the desired version of a key; return False if the queue is full."""
        if key in self:
            self[key].desired = version
            return True
        if len(self) >= self._places:
            sent_key = next((k for k, item in self.items() if not item.is_pending), None)
            if sent_key is None:
                return False
            del self[sent_key]
        self[key] = DesiredAndSentItem(version)
        return True

    def pending_count(self) -> int:
        """Return the number of items still to be sent."""
        return sum(item.is_pending for item in self.values())

    def due_keys(self, now_s: float) -> list[K]:
        """Return the keys that may be sent now, the longest due first, equal ones by age."""
        due_items = [(k, i) for k, i in self.items() if i.is_pending and i.retry_at <= now_s]
        return [key for key, _ in sorted(due_items, key=lambda due: due[1].retry_at)]

    def next_due_at(self) -> float:
        """Return when the next item may be sent; infinity if none is pending."""
        return min((i.retry_at for i in self.values() if i.is_pending), default=float("inf"))


class Output:
    """One kind of object: its pending requests, and the handling of their outcomes.

    Attributes:
        name: label of the metrics.
        dropped: items that will never be written, since the last count.
        hold_until: earliest time of the next request.
        problem: sentence saying why nothing is written, and the remedy; empty without a problem.
        failure_text: text of the problem's log line.
    """

    name: str
    failure_text = "output not written"

    def __init__(self) -> None:
        self.dropped = 0
        self.hold_until = 0.0
        self.problem = ""

    def next_request(self, now_s: float) -> APIRequest | None:
        """Return the next request; None if nothing may be sent now."""
        return None if self.next_due_at() > now_s else self._next_request(now_s)

    def next_due_at(self) -> float:
        """Return when the next request may be made; infinity if none is pending."""
        return self.hold_until

    def on_outcome(
        self, request: APIRequest, outcome: Outcome, now_s: float, jitter: float
    ) -> None:
        """Handle the outcome of a request of this output."""
        self._on_outcome(request, outcome, now_s, jitter)
        if outcome.result is OutcomeKind.FORBIDDEN:
            # A right is missing, or a policy rejects this request.
            self.hold_until = now_s + MAX_BACKOFF_S

    def pending_count(self) -> int:
        """Return the number of items still to be sent."""
        return 0

    def is_node_read_due(self, now_s: float) -> bool:
        """Return True if the next request reads the Node; another output's read serves, too."""
        return False

    def schedule_resync(self) -> None:
        """Read the actual objects again."""

    def _next_request(self, now_s: float) -> APIRequest | None:
        raise NotImplementedError

    def _on_outcome(
        self, request: APIRequest, outcome: Outcome, now_s: float, jitter: float
    ) -> None:
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
    """One object, or a part of it, retried with backoff until it is as desired."""

    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node
        self._failures, self._not_before = 0, 0.0

    def next_due_at(self) -> float:
        """Return when the next request may be made."""
        return max(self.hold_until, self._not_before) if self.pending_count() else float("inf")

    def pending_count(self) -> int:
        """Return 1 while the object is not known to be as desired."""
        raise NotImplementedError

    def _node_read_request(self) -> APIRequest:
        return self._new_request(Verb.GET, Resource.NODES, self._node)

    def _mark_healthy(self) -> None:
        self._failures, self._not_before, self.problem = 0, 0.0, ""

    def _mark_failed(self, now_s: float, jitter: float) -> None:
        self._failures += 1
        self._not_before = now_s + backoff_seconds(self._failures, jitter)

    def _mark_blocked(self, problem: str, now_s: float, jitter: float) -> None:
        self.problem = problem
        self.hold_until = now_s + BLOCKED_RETRY_S * (0.8 + 0.4 * jitter)


class AppliedObjectOutput(SingleObjectOutput):
    """An object that the Node owns, written by server-side apply.

    An object with atomic lists has one field manager: the fields of another one are not taken
    unless `force` is set.

    Attributes:
        kind: kind of the object.
        missing_definition_hint: remedy if the cluster has no such kind.
        alternative: remedy if another field manager owns the fields.
    """

    resource: Resource
    kind = missing_definition_hint = alternative = ""

    def __init__(self, node: str, *, force: bool = False) -> None:
        super().__init__(node)
        self._object, self._force = node, force
        self._wanted: Any = None
        self._sent: Any = None
        self._owner_uid = ""

    def _build_object(self) -> dict[str, Any]:
        # With the uid of an earlier Node the object would be collected.
        owner = {"apiVersion": "v1", "kind": "Node", "name": self._node, "uid": self._owner_uid}
        return {
            "apiVersion": self.resource.api_version,
            "kind": self.kind,
            "metadata": {"name": self._object, "ownerReferences": [owner]},
            **self._build_contents(),
        }

    def _build_contents(self) -> dict[str, Any]:
        """Build the fields beside the metadata."""
        raise NotImplementedError

    def pending_count(self) -> int:
        """Return 1 while the object is not known to exist as desired."""
        return int(
            self._wanted is not None and (not self._owner_uid or self._build_object() != self._sent)
        )

    def is_node_read_due(self, now_s: float) -> bool:
        """Return True if the Node's UID is not known and may be read now."""
        return not self._owner_uid and self._wanted is not None and self.next_due_at() <= now_s

    def _next_request(self, now_s: float) -> APIRequest | None:
        """Return a read of the Node's UID first, then the apply of the object."""
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

    def _on_outcome(
        self, request: APIRequest, outcome: Outcome, now_s: float, jitter: float
    ) -> None:
        match outcome.result:
            case OutcomeKind.SUCCEEDED if request.resource is Resource.NODES:
                self._owner_uid = outcome.documents[0]["metadata"].get("uid") or "-"
            case OutcomeKind.SUCCEEDED:
                self._mark_healthy()
                self._sent = request.body
                self._on_applied(request, outcome.documents[0], now_s)
            case OutcomeKind.UNKNOWN:
                self._mark_blocked(f"{outcome.text}; {self.missing_definition_hint}", now_s, jitter)
            case OutcomeKind.CONFLICT if self.alternative:
                owners = re.findall(r'with "([^"]*)"', outcome.text)
                self._block_on_field_owners(owners, now_s, jitter)
            case OutcomeKind.INVALID if self.missing_definition_hint:
                text = f"{outcome.text}; is its definition another one?"
                self._mark_blocked(text, now_s, jitter)
            case OutcomeKind.FAILED | OutcomeKind.FORBIDDEN:
                # Retry unchanged: the Node is not known to be another one.
                self._mark_failed(now_s, jitter)
            case _:
                # The Node is not registered yet, or the object was deleted at this moment.
                self._owner_uid = ""
                self._mark_failed(now_s, jitter)

    def _on_applied(self, request: APIRequest, document: Mapping[str, Any], now_s: float) -> None:
        """Handle the object that was applied."""

    def _block_on_field_owners(self, owners: Iterable[str], now_s: float, jitter: float) -> None:
        names = escape_unprintable(", ".join(sorted(set(owners))) or "another field manager")[:200]
        self._mark_blocked(f"its fields belong to {names}; {self.alternative}", now_s, jitter)

    def schedule_resync(self) -> None:
        """Read the Node and apply the object again."""
        self._owner_uid, self._sent = "", None


class OutputQueue:
    """Takes one request at a time from outputs, the most important first.

    An error of the whole server pauses all outputs.
    """

    def __init__(
        self, outputs: Sequence[Output], *, rate: float, burst: float, now_s: float
    ) -> None:
        self.outputs = tuple(outputs)
        self._bucket = TokenBucket(rate, burst, now_s)
        self._hold_until = 0.0
        self.failures = 0

    def next_request(self, now_s: float) -> APIRequest | None:
        """Return the request to make now; its outcome must be passed to `on_outcome`."""
        if self._hold_until > now_s or self._bucket.seconds_until_token(now_s) > 0:
            return None
        for output in self.outputs:
            if (request := output.next_request(now_s)) is not None:
                self._bucket.take_token(now_s)
                return request
        return None

    def seconds_until_request(self, now_s: float) -> float:
        """Return the seconds until the next request; infinity if none is pending."""
        due = min((output.next_due_at() for output in self.outputs), default=float("inf"))
        return max(
            due - now_s, self._hold_until - now_s, self._bucket.seconds_until_token(now_s), 0.0
        )

    def on_outcome(
        self, request: APIRequest, outcome: Outcome, now_s: float, jitter: float
    ) -> None:
        """Pass an outcome to its output; a read of the Node serves all outputs."""
        if outcome.result in SERVER_WIDE_RESULTS:
            self.failures += 1
            # Not all nodes at the exact moment that the server named.
            pause_s = outcome.retry_after * (1 + 0.1 * jitter)
            self._hold_until = now_s + max(pause_s, backoff_seconds(self.failures, jitter))
            return
        self.failures = 0
        (output,) = (o for o in self.outputs if o.name == request.output)
        output.on_outcome(request, outcome, now_s, jitter)
        is_succeeded = outcome.result is OutcomeKind.SUCCEEDED
        if request.reads_node and not request.metadata and is_succeeded:
            for other_output in self.outputs:
                if other_output is not output and other_output.is_node_read_due(now_s):
                    other_output.on_outcome(request, outcome, now_s, jitter)

    def pending_count(self) -> int:
        """Return the number of items still to be sent."""
        return sum(output.pending_count() for output in self.outputs)

    def schedule_resync(self) -> None:
        """Read the actual objects of all outputs again."""
        for output in self.outputs:
            output.schedule_resync()
