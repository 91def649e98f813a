"""Which of several replicas works: a Lease of coordination.k8s.io/v1, held and renewed. Pure.

The rules are those of client-go's leader election: a Lease is taken over only when it stood still
for its whole duration by our own clock, times of two machines are never compared, and every write
names the version that was read, so that of two writers one loses. Whoever could not renew for two
thirds of the duration stops to lead before anybody else begins.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from nri_numa.cluster.requests import Outcome, Request, Resource, Result, Verb

RETRY: Final = 2 / 15
"""Part of the duration between two looks or renewals: client-go's 2 s of 15 s."""
DEADLINE: Final = 2 / 3
"""Part of the duration after which a leader that could not renew gives up: 10 s of 15 s."""


class Lease:
    """One Lease, and whether it is ours.

    An output in the sense of `nri_numa.cluster.outputs`: it makes requests, and is told what came
    of them.

    Attributes:
        holder: who holds it, as far as known; empty for nobody.

    Args:
        name: of the Lease.
        namespace: of the Lease.
        identity: of this replica; another one for each.
        duration: seconds.
    """

    def __init__(self, name: str, namespace: str, identity: str, duration: float) -> None:
        self.name = "lease"
        self.dropped = 0
        self.hold_until = 0.0
        self.holder = ""
        self._name, self._namespace, self._identity = name, namespace, identity
        self._duration = duration
        self._there: dict[str, Any] | None = None
        self._known: dict[str, Any] | None = None
        """The spec that was seen last, also when the Lease must be read again."""
        self._absent = False
        self._seen = -float("inf")
        """Since when the Lease stands still as we know it."""
        self._renewed = -float("inf")
        """When our last write that counted was begun."""
        self._asked = 0.0
        self._wall = 0.0

    def leads(self, now: float) -> bool:
        """Whether this replica may work at this moment."""
        return now < self._renewed + self._duration * DEADLINE

    def tell_time(self, wall: float) -> None:
        """Unix time in seconds, for what stands in the Lease; nothing is decided by it."""
        self._wall = wall

    def due(self, now: float) -> Request | None:
        """Look at it, make it, renew it or take it over."""
        if self.hold_until > now:
            return None
        self._asked = now
        if self._absent:
            return self._write(Verb.CREATE, {}, transitions=0)
        if self._there is None:
            return self._request(Verb.GET, {})
        spec = self._there.get("spec") or {}
        if spec.get("holderIdentity") == self._identity:
            return self._write(Verb.UPDATE, self._there, spec.get("leaseTransitions") or 0)
        if not spec.get("holderIdentity") or now >= self._seen + self._runs(spec):
            return self._write(Verb.UPDATE, self._there, (spec.get("leaseTransitions") or 0) + 1)
        return self._request(Verb.GET, {})

    def next_due(self) -> float:
        """When that is."""
        return self.hold_until

    def done(self, request: Request, outcome: Outcome, now: float, jitter: float) -> None:
        """This came of a request of ours."""
        pause = self._duration * RETRY * (1 + 0.2 * jitter)
        self.hold_until = now + pause
        match outcome.result:
            case Result.DONE:
                (document,) = outcome.documents
                self._absent = False
                self._look(document, now)
                if request.verb is not Verb.GET:
                    # From before the request: the server may have counted from then.
                    self._renewed = self._asked
                elif self.holder in ("", self._identity) or self._stands_still(now):
                    self.hold_until = now
            case Result.MISSING:
                self._there, self._absent, self.hold_until = None, True, now + pause / 4
            case _:
                # Somebody was quicker, or nobody answers: look again before anything is written.
                self._there, self._absent = None, False

    def release(self) -> Request | None:
        """Give it back at the end, so that nobody has to wait; None when it is not ours."""
        if self._there is None or self.holder != self._identity:
            return None
        self._renewed = -float("inf")
        spec = {**(self._there.get("spec") or {}), "holderIdentity": "", "leaseDurationSeconds": 1}
        return self._request(Verb.UPDATE, {**self._there, "spec": spec})

    def _look(self, document: dict[str, Any], now: float) -> None:
        self._there = document
        spec = document.get("spec") or {}
        if self._known != spec:
            self._seen = now
        self._known = spec
        self.holder = spec.get("holderIdentity") or ""
        if self.holder != self._identity:
            self._renewed = -float("inf")

    def _stands_still(self, now: float) -> bool:
        return now >= self._seen + self._runs((self._there or {}).get("spec") or {})

    def _runs(self, spec: dict[str, Any]) -> float:
        """Seconds that its holder has; what nobody in their senses writes counts as ours."""
        told = spec.get("leaseDurationSeconds")
        return float(told) if isinstance(told, int) and 0 < told <= 3600 else self._duration

    def _write(self, verb: Verb, there: dict[str, Any], transitions: int) -> Request:
        # Six digits must follow the seconds; a client that drops zeros would be refused one time
        # in a million.
        wall = datetime.fromtimestamp(self._wall, UTC)
        moment = wall.replace(microsecond=wall.microsecond or 1).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = there.get("spec") or {}
        ours = spec.get("holderIdentity") == self._identity
        return self._request(
            verb,
            {
                **there,
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {
                    **(there.get("metadata") or {}),
                    "name": self._name,
                    "namespace": self._namespace,
                },
                "spec": {
                    **spec,
                    "holderIdentity": self._identity,
                    "leaseDurationSeconds": max(1, round(self._duration)),
                    "acquireTime": (spec.get("acquireTime") if ours else None) or moment,
                    "renewTime": moment,
                    "leaseTransitions": transitions,
                },
            },
        )

    def _request(self, verb: Verb, body: dict[str, Any]) -> Request:
        return Request(
            output=self.name,
            verb=verb,
            resource=Resource.LEASES,
            name=self._name,
            namespace=self._namespace,
            body=body,
            whole=True,
        )

    def waiting(self) -> int:
        """Nothing is ever behind."""
        return 0

    def resync(self) -> None:
        """It is looked at all the time."""
