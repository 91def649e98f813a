"""ResourceClaims for the agent, which has no credentials: it requests them by file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from nri_numa.dra.claims import prune_claim
from nri_numa.dra.handover import ClaimFileResponder
from nri_numa.kube.requests import APIRequest, KubeClient, OutcomeKind, Resource, Verb
from nri_numa.observe.logs import get_logger
from nri_numa.observe.reports import ReportOnce

log = get_logger("publish")

CLAIM_REQUEST_POLL_INTERVAL_S: Final = 0.1
"""Seconds between two polls for requests; one `listdir` of a small directory costs 10 µs."""


CLAIM_PROBLEM_EVENT: Final = "claim not handed over"


class ClaimRequestAnswerer:
    """Answers the agent's requests for claims.

    Args:
        registered: called at the first poll, and when the kubelet has registered the driver.
    """

    def __init__(
        self, handover: ClaimFileResponder, api: KubeClient, registered: Callable[[], object]
    ) -> None:
        self._handover, self._api, self._driver_registered = handover, api, registered
        self._problems = ReportOnce(log)
        self._registered: str | None = None

    async def run(self) -> None:
        """Answer until cancelled."""
        while True:
            await self.answer_pending()
            await asyncio.sleep(CLAIM_REQUEST_POLL_INTERVAL_S)

    async def answer_pending(self) -> None:
        """Answer all pending requests."""
        if (text := self._handover.read_registration_marker()) != self._registered:
            self._registered = text
            self._driver_registered()
        for id, question in self._handover.pending_requests():
            answer = await self._fetch_claim(question)
            try:
                self._handover.write_answer_if_still_asked(id, answer)
            except OSError as error:
                problem = f"{error.filename}: {error.strerror or error}"
                self._problems.report(CLAIM_PROBLEM_EVENT, f"dra.handoverDir: {problem}")
            else:
                if "problem" not in answer:
                    self._problems.report(CLAIM_PROBLEM_EVENT, "")

    async def _fetch_claim(self, question: dict[str, Any]) -> dict[str, Any]:
        namespace, name = question.get("namespace"), question.get("name")
        if not (isinstance(namespace, str) and isinstance(name, str) and namespace and name):
            return {"problem": "the question names no claim"}
        request = APIRequest(
            output="claims", verb=Verb.GET, resource=Resource.CLAIMS, namespace=namespace, name=name
        )
        outcome = await self._api.execute_request(request)
        if outcome.result is not OutcomeKind.SUCCEEDED:
            self._problems.report(CLAIM_PROBLEM_EVENT, outcome.text)
            return {"problem": outcome.text}
        return {"claim": prune_claim(outcome.documents[0])}
