"""An output that evicts, asked once a second as the controller does."""

from __future__ import annotations

from typing import Any

from nri_numa.kube.requests import APIRequest, Outcome, OutcomeKind


class EvictingCluster:
    """Answers an output's requests and lets time pass.

    Attributes:
        answers: result of an eviction by the pod's name; done where none is told.
        evicted: names and times.
        requests: all that were made.
    """

    output: Any

    def __init__(self) -> None:
        self.now = 0.0
        self.answers: dict[str, OutcomeKind] = {}
        self.evicted: list[tuple[str, float]] = []
        self.requests: list[APIRequest] = []

    def answer(self, request: APIRequest) -> Outcome:
        """As the API server would."""
        raise NotImplementedError

    def run(self, seconds: int) -> None:
        """Tick once a second, and answer what is due."""
        for _ in range(seconds):
            self.output.on_tick(self.now, 1_795_000_000.0 + self.now)
            while (request := self.output.next_request(self.now)) is not None:
                self.requests.append(request)
                self.output.on_outcome(request, self.answer(request), self.now, 0.5)
            self.now += 1

    @property
    def names(self) -> list[str]:
        """Pods that were evicted."""
        return [name for name, _ in self.evicted]
