"""Which of several replicas works: a Lease of coordination.k8s.io/v1, held and renewed.

The rules are those of client-go's leader election: a Lease is taken over only when it stood still
for its whole duration by our own clock, times of two machines are never compared, and every write
names the version that was read, so that of two writers one loses. A replica that could not renew
for two thirds of the duration stops to lead before another one begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Final

from nri_numa.config.values import is_loopback
from nri_numa.kube.requests import APIRequest, Outcome, OutcomeKind, Resource, Verb
from nri_numa.observe.logs import get_logger

log = get_logger("lease")

LEASE_DURATION_S: Final = 15.0
"""Seconds that the Lease is worth without being renewed; as the next two client-go's."""
RENEW_INTERVAL_S: Final = 2.0
"""Seconds between two looks or renewals."""
RENEW_DEADLINE_S: Final = 10.0
"""Seconds after which a leader that could not renew gives up."""
MIN_LEASE_REQUEST_INTERVAL_S: Final = 0.05
"""Seconds between two requests at least."""
MAX_LEADERSHIP_CHECK_INTERVAL_S: Final = 1.0
"""Seconds between two looks at the clock at most."""
LEASE_RELEASE_TIMEOUT_S: Final = 3.0
"""Seconds that the end of a replica waits for its Lease to be given back."""
_NORMAL_ELECTION_OUTCOMES: Final = frozenset(
    {OutcomeKind.SUCCEEDED, OutcomeKind.MISSING, OutcomeKind.EXISTS, OutcomeKind.CONFLICT}
)
"""Of two that write at once one is refused: that is the election, and no problem."""

LeaseSpec = dict[str, Any]


class Lease:
    """One replica's part in the election.

    Attributes:
        holder: the replica that holds it, as far as known; empty for none.
        since: when this one began to lead, by its clock; infinity when it never did.
        problem: why the Lease cannot be used, as a sentence; empty when it can.
        answered: is called with each request and what came of it.
        changed: is called when this replica begins or ends to lead.
        limit: seconds that one request may take; half of what a renewal has, so that another fits.

    Args:
        ask: does a request, and never raises.
        identity: a name for this replica; another one for each by default.
        address: host:port where other replicas reach this one; part of the identity.
    """

    limit = RENEW_DEADLINE_S / 2

    def __init__(
        self,
        name: str,
        namespace: str,
        ask: Callable[[APIRequest], Awaitable[Outcome]],
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
        self._ask = ask
        self._clock, self._wall, self._jitter = clock, wall, jitter
        self._there: dict[str, Any] | None = None
        self._known: LeaseSpec | None = None
        """The spec that was read last, also when the Lease must be read again."""
        self._absent = self._led = False
        self._hold_until = 0.0
        self._seen = self._renewed = float("-inf")
        """Since when the Lease stands still as we know it; when our last write that counted was
        begun."""

    @property
    def is_leader(self) -> bool:
        """Whether this replica may work at this moment."""
        return self._clock() < self._renewed + RENEW_DEADLINE_S

    @property
    def leader_address(self) -> str:
        """host:port of the other replica that leads; empty where it says none, or none leads."""
        if self.is_leader or self.holder == self._identity:
            return ""
        return "".join(self.holder.split("_")[2:3])

    @property
    def standby_problem(self) -> str:
        """Why this replica neither leads nor knows where to send others; empty when it does."""
        if self.problem or self.is_leader or self.leader_address:
            return self.problem
        if not self.holder:
            return "no replica leads yet"
        return f"another replica leads, and says no address: {self.holder}"

    async def run(self) -> None:
        """Take part until cancelled."""
        pause = 0.0
        while True:
            await asyncio.sleep(pause)
            pause = await self.run_step()

    async def run_step(self) -> float:
        """Do what is due; the result is the seconds until the next time."""
        began = self._clock()
        if self._hold_until <= began:
            request = self._next_request(began)
            try:
                async with asyncio.timeout(self.limit):
                    outcome = await self._ask(request)
            except TimeoutError:
                text = "the API server did not answer in time"
                outcome = Outcome(result=OutcomeKind.UNREACHABLE, text=text)
            self._on_outcome(request, outcome, began)
            self.answered(request, outcome)
        if self.is_leader != self._led:
            self._led = not self._led
            self.since = self._clock() if self._led else self.since
            log.info("leads" if self._led else "does not lead", holder=self.holder)
            self.changed()
        return max(
            MIN_LEASE_REQUEST_INTERVAL_S,
            min(MAX_LEADERSHIP_CHECK_INTERVAL_S, self._hold_until - self._clock()),
        )

    async def release(self) -> None:
        """Let another replica lead at once; for the end."""
        if self._there is None or self.holder != self._identity:
            return
        self._renewed = float("-inf")
        spec = {**_lease_spec(self._there), "holderIdentity": "", "leaseDurationSeconds": 1}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEASE_RELEASE_TIMEOUT_S):
                await self._ask(self._lease_request(Verb.UPDATE, {**self._there, "spec": spec}))

    def _next_request(self, now: float) -> APIRequest:
        """Look at it, make it, renew it or take it over."""
        if self._absent:
            if self._known is not None and not self.is_leader and now < self._expires_at():
                return self._lease_request(Verb.GET)  # it was deleted: its holder makes it again
            return self._new_write_request(Verb.CREATE, {}, 0)
        if self._there is None:
            return self._lease_request(Verb.GET)
        spec = _lease_spec(self._there)
        transitions = spec.get("leaseTransitions") or 0
        if spec.get("holderIdentity") == self._identity:
            return self._new_write_request(Verb.UPDATE, self._there, transitions)
        if not spec.get("holderIdentity") or now >= self._expires_at():
            return self._new_write_request(Verb.UPDATE, self._there, transitions + 1)
        return self._lease_request(Verb.GET)

    def _on_outcome(self, request: APIRequest, outcome: Outcome, began: float) -> None:
        now = self._clock()
        pause = RENEW_INTERVAL_S * (1 + 0.2 * self._jitter())
        self._hold_until = now + pause
        if outcome.result is OutcomeKind.SUCCEEDED:
            (document,) = outcome.documents
            self._absent = False
            self._record_lease(document, now)
            if request.verb is not Verb.GET:
                # From before the request: the server may have counted from then.
                self._renewed = began
            elif self.holder in ("", self._identity) or now >= self._expires_at():
                self._hold_until = now
        elif outcome.result is OutcomeKind.MISSING:
            self._seen = self._seen if self._absent else now
            self._there, self._absent, self._hold_until = None, True, now + pause / 4
        else:
            # Another replica was quicker, or no answer came: look again before anything is written.
            self._there, self._absent = None, False
        well = outcome.result in _NORMAL_ELECTION_OUTCOMES
        problem = "" if well else f"the Lease cannot be used: {outcome.text}"
        if problem and problem != self.problem:
            log.warning("cannot be elected", problem=outcome.text)
        self.problem = problem

    def _record_lease(self, document: dict[str, Any], now: float) -> None:
        self._there, spec = document, _lease_spec(document)
        if self._known != spec:
            self._seen = now
        self._known = spec
        self.holder = spec.get("holderIdentity") or ""
        if self.holder != self._identity:
            self._renewed = float("-inf")

    def _expires_at(self) -> float:
        """When it has stood still for long enough; where its duration makes no sense, by ours."""
        runs = (self._known or {}).get("leaseDurationSeconds")
        if not isinstance(runs, int) or not 0 < runs <= 3600:
            return self._seen + LEASE_DURATION_S
        return self._seen + runs

    def _new_write_request(self, verb: Verb, there: dict[str, Any], transitions: int) -> APIRequest:
        # Six digits must follow the seconds; zeros could be dropped.
        wall = datetime.fromtimestamp(self._wall(), UTC)
        moment = wall.replace(microsecond=wall.microsecond or 1).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec, metadata = _lease_spec(there), there.get("metadata") or {}
        ours = spec.get("holderIdentity") == self._identity
        body = {
            **there,
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {**metadata, "name": self._name, "namespace": self._namespace},
            "spec": {
                **spec,
                "holderIdentity": self._identity,
                "leaseDurationSeconds": round(LEASE_DURATION_S),
                "acquireTime": (spec.get("acquireTime") if ours else None) or moment,
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


def _lease_spec(document: dict[str, Any]) -> LeaseSpec:
    return document.get("spec") or {}


def reachable_address(address: tuple[str, int] | None) -> str:
    """host:port where other pods reach what listens on an address; empty where they cannot.

    Of all addresses it is the one from which the kernel would ask the API server; nothing is sent.
    """
    if address is None:
        return ""
    host, port = address
    if host in ("", "0.0.0.0", "::"):  # noqa: S104
        server = os.environ.get("KUBERNETES_SERVICE_HOST", "")
        family = socket.AF_INET6 if ":" in server else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as asking:
                asking.connect((server, 443))
                host = asking.getsockname()[0]
        except OSError:
            return ""
    if is_loopback(host):
        return ""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
