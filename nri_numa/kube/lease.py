"""Leader election among replicas by a Lease of coordination.k8s.io/v1.

The rules are those of client-go's leader election: a Lease is taken over only if it was not renewed
for its whole duration by the replica's own clock, times of two machines are never compared, and
every write has the version that was read, so one of two writers gets a conflict. A leader that
could not renew for two thirds of the duration stops leading before another one starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from nri_numa.config.values import is_loopback
from nri_numa.kube.requests import APIRequest, Outcome, OutcomeKind, Resource, Verb, section_of
from nri_numa.observe.logs import get_logger
from nri_numa.text import micro_time_text

log = get_logger("lease")

LEASE_DURATION_S: Final = 15.0
"""Seconds that the Lease is valid without a renewal; this and the next two are client-go's."""
RENEW_INTERVAL_S: Final = 2.0
"""Seconds between two reads or renewals."""
RENEW_DEADLINE_S: Final = 10.0
"""Seconds after which a leader that could not renew stops leading."""
MIN_LEASE_REQUEST_INTERVAL_S: Final = 0.05
"""Minimum seconds between two requests."""
MAX_LEADERSHIP_CHECK_INTERVAL_S: Final = 1.0
"""Maximum seconds between two checks of the clock."""
LEASE_RELEASE_TIMEOUT_S: Final = 3.0
"""Maximum seconds for releasing the Lease when a replica stops."""
_NORMAL_ELECTION_OUTCOMES: Final = frozenset(
    {OutcomeKind.SUCCEEDED, OutcomeKind.MISSING, OutcomeKind.EXISTS, OutcomeKind.CONFLICT}
)
"""Normal outcomes: one of two concurrent writers gets a conflict."""


class Lease:
    """One replica's part in the election.

    Attributes:
        holder: last known holder; empty for none.
        since: time at which this replica became the leader; infinity if it never did.
        problem: sentence saying why the Lease cannot be used; empty without a problem.
        answered: called with each request and its outcome.
        changed: called when this replica starts or stops leading.
        limit: maximum seconds of one request; half of the renewal deadline, so two fit.

    Args:
        execute: executes a request, and never raises.
        identity: name of this replica; unique by default.
        address: host:port where other replicas reach this one; part of the identity.
    """

    limit = RENEW_DEADLINE_S / 2

    def __init__(
        self,
        name: str,
        namespace: str,
        execute: Callable[[APIRequest], Awaitable[Outcome]],
        *,
        identity: str = "",
        address: str = "",
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.answered: Callable[[APIRequest, Outcome], object] = lambda request, outcome: None
        self.changed: Callable[[], object] = lambda: None
        self.holder = self.problem = ""
        self.since = float("inf")
        self._name, self._namespace = name, namespace
        self._identity = identity or f"{socket.gethostname()[:60]}_{uuid.uuid4()}_{address}"
        self._ask = execute
        self._clock, self._wall, self._jitter = clock, wall, jitter
        self._there: dict[str, Any] | None = None
        self._known: Mapping[str, Any] | None = None
        """The spec that was read last, also when the Lease must be read again."""
        self._absent = self._led = False
        self._hold_until = 0.0
        self._seen = self._renewed = float("-inf")
        """Since when the Lease stands still as we know it; when our last write that counted was
        begun."""

    @property
    def is_leader(self) -> bool:
        """True if this replica leads at this moment."""
        return self._clock() < self._renewed + RENEW_DEADLINE_S

    @property
    def leader_address(self) -> str:
        """host:port of another replica that leads; empty if unknown or none leads."""
        if self.is_leader or self.holder == self._identity:
            return ""
        return "".join(self.holder.split("_")[2:3])

    @property
    def standby_problem(self) -> str:
        """Sentence saying why this replica neither leads nor knows the leader's address."""
        if self.problem or self.is_leader or self.leader_address:
            return self.problem
        if not self.holder:
            return "no replica leads yet"
        return f"another replica leads, and says no address: {self.holder}"

    async def run_election(self) -> None:
        """Take part in the election until cancelled."""
        while True:
            pause_s = await self.run_step()
            await asyncio.sleep(pause_s)

    async def run_step(self) -> float:
        """Send the request that is due; return the seconds until the next step."""
        start_time = self._clock()
        if self._hold_until <= start_time:
            request = self._next_request(start_time)
            try:
                async with asyncio.timeout(self.limit):
                    outcome = await self._ask(request)
            except TimeoutError:
                text = "the API server did not answer in time"
                outcome = Outcome(result=OutcomeKind.UNREACHABLE, text=text)
            self._on_outcome(request, outcome, start_time)
            self.answered(request, outcome)
        if self.is_leader != self._led:
            self._led = not self._led
            self.since = self._clock() if self._led else self.since
            log.info("lease acquired" if self._led else "lease lost", holder=self.holder)
            self.changed()
        return max(
            MIN_LEASE_REQUEST_INTERVAL_S,
            min(MAX_LEADERSHIP_CHECK_INTERVAL_S, self._hold_until - self._clock()),
        )

    async def release_lease(self) -> None:
        """Release the Lease when this replica stops, so another one can lead at once."""
        if self._there is None or self.holder != self._identity:
            return
        self._renewed = float("-inf")
        spec = section_of(self._there, "spec")
        spec = {**spec, "holderIdentity": "", "leaseDurationSeconds": 1}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEASE_RELEASE_TIMEOUT_S):
                await self._ask(self._lease_request(Verb.UPDATE, {**self._there, "spec": spec}))

    def _next_request(self, now_s: float) -> APIRequest:
        """Return a read, a creation, a renewal or a takeover of the Lease."""
        if self._absent:
            if self._known is not None and not self.is_leader and now_s < self._expires_at():
                return self._lease_request(Verb.GET)  # deleted: its holder creates it again
            return self._new_write_request(Verb.CREATE, {}, 0)
        if self._there is not None:
            spec = section_of(self._there, "spec")
            transitions = spec.get("leaseTransitions") or 0
            if spec.get("holderIdentity") == self._identity:
                return self._new_write_request(Verb.UPDATE, self._there, transitions)
            if not spec.get("holderIdentity") or now_s >= self._expires_at():
                return self._new_write_request(Verb.UPDATE, self._there, transitions + 1)
        return self._lease_request(Verb.GET)

    def _on_outcome(self, request: APIRequest, outcome: Outcome, start_time: float) -> None:
        now_s = self._clock()
        pause = RENEW_INTERVAL_S * (1 + 0.2 * self._jitter())
        self._hold_until = now_s + pause
        if outcome.result is OutcomeKind.SUCCEEDED:
            (document,) = outcome.documents
            self._absent = False
            self._record_lease(document, now_s)
            if request.verb is not Verb.GET:
                # The time before the request: the server may have counted from then.
                self._renewed = start_time
            elif self.holder in ("", self._identity) or now_s >= self._expires_at():
                self._hold_until = now_s
        elif outcome.result is OutcomeKind.MISSING:
            self._seen = self._seen if self._absent else now_s
            self._there, self._absent, self._hold_until = None, True, now_s + pause / 4
        else:
            # Another replica wrote first, or no answer came: read again before the next write.
            self._there, self._absent = None, False
        is_normal = outcome.result in _NORMAL_ELECTION_OUTCOMES
        problem = "" if is_normal else f"the Lease cannot be used: {outcome.text}"
        if problem and problem != self.problem:
            log.warning("leader election failed", problem=outcome.text)
        self.problem = problem

    def _record_lease(self, document: dict[str, Any], now_s: float) -> None:
        spec = section_of(document, "spec")
        if self._known != spec:
            self._seen = now_s
        self._there, self._known = document, spec
        self.holder = spec.get("holderIdentity") or ""
        if self.holder != self._identity:
            self._renewed = float("-inf")

    def _expires_at(self) -> float:
        """Return when the Lease expires without a renewal; an invalid duration is replaced."""
        duration_s = (self._known or {}).get("leaseDurationSeconds")
        if not isinstance(duration_s, int) or not 0 < duration_s <= 3600:
            duration_s = LEASE_DURATION_S
        return self._seen + duration_s

    def _new_write_request(
        self, verb: Verb, document: dict[str, Any], transitions: int
    ) -> APIRequest:
        moment = micro_time_text(self._wall())
        spec, metadata = section_of(document, "spec"), section_of(document, "metadata")
        is_holder = spec.get("holderIdentity") == self._identity
        body = {
            **document,
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {**metadata, "name": self._name, "namespace": self._namespace},
            "spec": {
                **spec,
                "holderIdentity": self._identity,
                "leaseDurationSeconds": round(LEASE_DURATION_S),
                "acquireTime": (spec.get("acquireTime") if is_holder else None) or moment,
                "renewTime": moment,
                "leaseTransitions": transitions,
            },
        }
        return self._lease_request(verb, body)

    def _lease_request(self, verb: Verb, body: dict[str, Any] | None = None) -> APIRequest:
        return APIRequest(
            output="lease",
            verb=verb,
            resource=Resource.LEASES,
            name=self._name,
            namespace=self._namespace,
            body=body,
        )


def reachable_address(address: tuple[str, int] | None) -> str:
    """Return host:port where other pods reach a listening address; empty if they cannot.

    For a wildcard address the host is the kernel's source address for the API server; nothing is
    sent.
    """
    if address is None:
        return ""
    host, port = address
    if host in ("", "0.0.0.0", "::"):  # noqa: S104
        server = os.environ.get("KUBERNETES_SERVICE_HOST", "")
        family = socket.AF_INET6 if ":" in server else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((server, 443))
                host = probe.getsockname()[0]
        except OSError:
            return ""
    if is_loopback(host):
        return ""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
