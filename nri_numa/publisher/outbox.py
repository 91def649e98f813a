"""What waits to be written, and when each may be: bounded, fair, no faster than allowed. Pure.

An output knows what should be in the API server and what it believes to be there, and makes
requests of the difference. Time is handed in, in seconds of a clock that only grows.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from nri_numa.kube.requests import WHOLE, Form, Outcome, Request, Resource, Result, Verb
from nri_numa.text import harmless

FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 60.0
"""Seconds: the pause after failures doubles from the first to the longest, which is also the one
where a role must be mended first."""
SLOWLY: Final = 300.0
"""Seconds until the next attempt where something else of the cluster must be mended first."""

K = TypeVar("K", bound=Hashable)


def pause(failures: int, jitter: float) -> float:
    """Seconds to wait after so many failures in a row, 1 after the first.

    The jitter is from 0 to 1; thousands of nodes must not come back in the same moment.
    """
    longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures - 1, 10))
    return longest * (0.5 + 0.5 * jitter)


class Bucket:
    """Requests as a token bucket: so many per second, and so many at once after a quiet time."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._at = burst, now

    def wait(self, now: float) -> float:
        """Seconds until one more is allowed; 0 when it is."""
        self._fill(now)
        return 0.0 if self._tokens >= 1 else (1 - self._tokens) / self._rate

    def take(self, now: float) -> None:
        """One is made."""
        self._fill(now)
        self._tokens -= 1

    def _fill(self, now: float) -> None:
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._at) * self._rate)
        self._at = now


@dataclass(slots=True)
class Item:
    """A thing that is wanted in one version, and was sent in one; None for never."""

    wanted: Any
    sent: Any = None
    not_before: float = 0.0
    failures: int = 0

    @property
    def waiting(self) -> bool:
        """Whether the newest version is still to be sent."""
        return bool(self.wanted != self.sent)

    def done(self, version: object, again_at: float = 0.0) -> None:
        """It is there in this version; a newer one may be sent from ``again_at`` on."""
        self.sent, self.not_before, self.failures = version, again_at, 0

    def later(self, now: float, jitter: float) -> None:
        """It could not be sent."""
        self.failures += 1
        self.not_before = now + pause(self.failures, jitter)


class Shelf(dict[K, Item]):
    """Things by key, of which only the newest version is ever sent.

    When there are more things than places, one that was sent makes room first; when none was, the
    newcomer finds no place.
    """

    def __init__(self, places: int) -> None:
        super().__init__()
        self._places = places

    def want(self, key: K, version: object) -> bool:
        """This is what it should be now; False when there is no place for it."""
        if key in self:
            self[key].wanted = version
            return True
        if len(self) >= self._places:
            done = next((k for k, one in self.items() if not one.waiting), None)
            if done is None:
                return False
            del self[done]
        self[key] = Item(version)
        return True

    def waiting(self) -> int:
        """How many are still to be sent."""
        return sum(item.waiting for item in self.values())

    def due(self, now: float) -> list[K]:
        """What may be sent now, the longest waiting first, of equals the older."""
        ready = [(k, i) for k, i in self.items() if i.waiting and i.not_before <= now]
        return [key for key, _ in sorted(ready, key=lambda one: one[1].not_before)]

    def next_due(self) -> float:
        """When the next one may be sent; infinity when nothing waits."""
        return min((i.not_before for i in self.values() if i.waiting), default=float("inf"))


class Output:
    """One kind of object: what of it is still to be done, and what an outcome means.

    Attributes:
        name: the metric's label.
        dropped: what will never be written, since this was counted last.
        hold_until: when the next request may be made at the earliest.
        problem: why nothing is written, and what to do, as a sentence; empty when all is well.
        complaint: what a log line says of the problem.
    """

    complaint = "not written"

    def __init__(self, name: str) -> None:
        self.name = name
        self.dropped = 0
        self.hold_until = 0.0
        self.problem = ""

    def due(self, now: float) -> Request | None:
        """The next request; None when nothing may be sent now."""
        return None if self.next_due() > now else self._due(now)

    def next_due(self) -> float:
        """When that will be otherwise; infinity when nothing waits."""
        return self.hold_until

    def done(self, request: Request, outcome: Outcome, now: float, jitter: float) -> None:
        """This came of a request of ours."""
        self._done(request, outcome, now, jitter)
        if outcome.result is Result.FORBIDDEN:
            # A right is missing, or a policy refuses this one; what waits comes before it next.
            self.hold_until = now + LONGEST_PAUSE

    def waiting(self) -> int:
        """How much is still to be sent."""
        return 0

    def reads_node(self, now: float) -> bool:
        """Whether the next request is to read the Node: an answer to another one will do."""
        return False

    def resync(self) -> None:
        """Look at what is really there."""

    def _due(self, now: float) -> Request | None:
        raise NotImplementedError

    def _done(self, request: Request, outcome: Outcome, now: float, jitter: float) -> None:
        raise NotImplementedError

    def _request(self, verb: Verb, resource: Resource, name: str = "", **more: Any) -> Request:
        return Request(output=self.name, verb=verb, resource=resource, name=name, **more)

    def _list_pods(self, key: object = None, namespace: str = "", **fields: str) -> Request:
        selector = {name.replace("_", "."): value for name, value in fields.items()}
        return self._request(
            Verb.LIST, Resource.PODS, namespace=namespace, field_selector=selector, key=key
        )


class OneObject(Output):
    """One object, or a part of it: tried again with growing pauses until it is as it should be."""

    def __init__(self, name: str, node: str) -> None:
        super().__init__(name)
        self._node = node
        self._failures, self._not_before = 0, 0.0

    def next_due(self) -> float:
        """When the next request may be made."""
        return max(self.hold_until, self._not_before) if self.waiting() else float("inf")

    def waiting(self) -> int:
        """1 while the object is not known to be as it should."""
        raise NotImplementedError

    def _read_node(self) -> Request:
        return self._request(Verb.GET, Resource.NODES, self._node)

    def _works(self) -> None:
        self._failures, self._not_before, self.problem = 0, 0.0, ""

    def _later(self, now: float, jitter: float) -> None:
        self._failures += 1
        self._not_before = now + pause(self._failures, jitter)

    def _slowly(self, problem: str, now: float, jitter: float) -> None:
        self.problem = problem
        self.hold_until = now + SLOWLY * (0.8 + 0.4 * jitter)


def owner(node: str, uid: str) -> dict[str, Any]:
    """A reference to the Node as it is now: with an earlier uid the object would be collected."""
    return {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}


class AppliedObject(OneObject):
    """An object that belongs to the Node and that server-side apply brings there.

    One object with atomic lists has one owner: fields that another one owns are not taken, unless
    `force`.

    Attributes:
        undefined: what to do where the cluster has no such kind.
        instead: what to do where another one owns the fields.
    """

    resource: Resource
    undefined = instead = ""

    def __init__(self, name: str, node: str, *, force: bool = False) -> None:
        super().__init__(name, node)
        self._object, self._force = node, force
        self._wanted: Any = None
        self._sent: Any = None
        self._owner_uid = ""

    def _body(self) -> dict[str, Any]:
        """The whole object."""
        raise NotImplementedError

    def waiting(self) -> int:
        """1 while it is not known to be there as it should."""
        return int(self._wanted is not None and (not self._owner_uid or self._body() != self._sent))

    def reads_node(self, now: float) -> bool:
        """Whether its UID is not known."""
        return not self._owner_uid and self._wanted is not None and self.next_due() <= now

    def _due(self, now: float) -> Request | None:
        """The Node's UID first, then the object."""
        return self._apply() if self._owner_uid else self._read_node()

    def _apply(self) -> Request:
        return self._request(
            Verb.PATCH,
            self.resource,
            self._object,
            form=Form.APPLY,
            body=self._body(),
            force=self._force,
        )

    def _done(self, request: Request, outcome: Outcome, now: float, jitter: float) -> None:
        match outcome.result:
            case Result.DONE if request.resource is Resource.NODES:
                self._owner_uid = outcome.documents[0]["metadata"].get("uid") or "-"
            case Result.DONE:
                self._works()
                self._sent = request.body
                self._applied(request, outcome.documents[0], now)
            case Result.UNKNOWN:
                self._slowly(f"{outcome.text}; {self.undefined}", now, jitter)
            case Result.CONFLICT if self.instead:
                self._contested(re.findall(r'with "([^"]*)"', outcome.text), now, jitter)
            case Result.INVALID if self.undefined:
                text = f"{outcome.text}; is its definition another one?"
                self._slowly(text, now, jitter)
            case Result.FAILED | Result.FORBIDDEN:
                self._later(now, jitter)  # the same once more: nothing says that it is another one
            case _:
                # The Node is not registered yet, or the object went in this moment.
                self._owner_uid = ""
                self._later(now, jitter)

    def _applied(self, request: Request, document: Mapping[str, Any], now: float) -> None:
        """The object is there."""

    def _contested(self, owners: Iterable[str], now: float, jitter: float) -> None:
        names = harmless(", ".join(sorted(set(owners))) or "another field manager")[:200]
        self._slowly(f"its fields belong to {names}; {self.instead}", now, jitter)

    def resync(self) -> None:
        """Look at the Node again, and apply the object once more."""
        self._owner_uid, self._sent = "", None


class OutputQueue:
    """Takes one request at a time from outputs, the most important first.

    When the server cannot, all of them wait.
    """

    def __init__(self, outputs: Sequence[Output], *, rate: float, burst: float, now: float) -> None:
        self.outputs = tuple(outputs)
        self._bucket = Bucket(rate, burst, now)
        self._hold_until = 0.0
        self.failures = 0

    def next(self, now: float) -> Request | None:
        """The request to make now; what comes of it must be handed to `done`."""
        if self._hold_until > now or self._bucket.wait(now) > 0:
            return None
        for output in self.outputs:
            if (request := output.due(now)) is not None:
                self._bucket.take(now)
                return request
        return None

    def wait(self, now: float) -> float:
        """Seconds until there may be one; infinity while nothing is to be done."""
        due = min((output.next_due() for output in self.outputs), default=float("inf"))
        return max(due - now, self._hold_until - now, self._bucket.wait(now), 0.0)

    def done(self, request: Request, outcome: Outcome, now: float, jitter: float) -> None:
        """This came of a request."""
        if outcome.result in WHOLE:
            self.failures += 1
            # Not all in the very moment that the server named.
            after = outcome.retry_after * (1 + 0.1 * jitter)
            self._hold_until = now + max(after, pause(self.failures, jitter))
            return
        self.failures = 0
        (output,) = (one for one in self.outputs if one.name == request.output)
        output.done(request, outcome, now, jitter)
        whole = request.verb is Verb.GET and request.resource is Resource.NODES
        if whole and not request.metadata and outcome.result is Result.DONE:
            for other in self.outputs:
                if other is not output and other.reads_node(now):
                    other.done(request, outcome, now, jitter)

    def waiting(self) -> int:
        """How much is still to be sent."""
        return sum(output.waiting() for output in self.outputs)

    def resync(self) -> None:
        """Look at what is really there."""
        for output in self.outputs:
            output.resync()
