"""Claims for the agent, which has no credentials: it asks by file, and gets what the server has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from nri_numa.dra.claims import pruned
from nri_numa.dra.handover import HandoverServer
from nri_numa.kube.api import KubeAPI
from nri_numa.kube.requests import Request, Resource, Result, Verb
from nri_numa.observe.logs import get_logger

log = get_logger("publish")

EVERY: Final = 0.1
"""Seconds between two looks for questions; one `listdir` of a small directory costs 10 µs."""


class ClaimServer:
    """Answers the agent's questions.

    Args:
        registered: is called when the kubelet has taken the driver, or we have just begun.
    """

    def __init__(
        self, handover: HandoverServer, api: KubeAPI, registered: Callable[[], object]
    ) -> None:
        self._handover, self._api, self._driver_registered = handover, api, registered
        self._said = ""
        self._registered: str | None = None

    async def run(self) -> None:
        """Answer until cancelled."""
        while True:
            await self.step()
            await asyncio.sleep(EVERY)

    async def step(self) -> None:
        """Answer what is asked now."""
        if (text := self._handover.registered()) != self._registered:
            self._registered = text
            self._driver_registered()
        for id, question in self._handover.questions():
            answer = await self._answer(question)
            try:
                self._handover.answer(id, answer)
            except OSError as error:
                self._say(f"dra.handover: {error.filename}: {error.strerror or error}")
            else:
                if "problem" not in answer:
                    self._said = ""

    async def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        namespace, name = question.get("namespace"), question.get("name")
        if not (isinstance(namespace, str) and isinstance(name, str) and namespace and name):
            return {"problem": "the question names no claim"}
        outcome = await self._api.do(
            Request(
                output="claims",
                verb=Verb.GET,
                resource=Resource.CLAIMS,
                namespace=namespace,
                name=name,
            )
        )
        if outcome.result is not Result.DONE:
            self._say(outcome.text)
            return {"problem": outcome.text}
        return {"claim": pruned(outcome.documents[0])}

    def _say(self, problem: str) -> None:
        if problem != self._said:
            log.warning("a claim is not handed over", problem=problem)
        self._said = problem
