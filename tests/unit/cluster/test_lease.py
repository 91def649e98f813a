"""Two replicas and one Lease, on a server that keeps versions as the API server does."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from nri_numa.cluster.lease import Lease
from nri_numa.cluster.requests import Outcome, Request, Result, Verb

WALL = 1_795_000_000.0


class Server:
    """Keeps one Lease.

    Attributes:
        down: whether nobody gets an answer.
    """

    def __init__(self) -> None:
        self.there: dict[str, Any] | None = None
        self.version = 0
        self.down = False

    def __call__(self, request: Request) -> Outcome:
        if self.down:
            return Outcome(result=Result.UNREACHABLE)
        if request.verb is Verb.GET:
            if self.there is None:
                return Outcome(result=Result.MISSING)
            return Outcome(result=Result.DONE, documents=(deepcopy(self.there),))
        given = request.body["metadata"].get("resourceVersion")
        if request.verb is Verb.CREATE:
            if self.there is not None:
                return Outcome(result=Result.EXISTS)
        elif self.there is None:
            return Outcome(result=Result.MISSING)
        elif given != str(self.version):
            return Outcome(result=Result.CONFLICT)
        self.version += 1
        self.there = deepcopy(request.body)
        self.there["metadata"]["resourceVersion"] = str(self.version)
        return Outcome(result=Result.DONE, documents=(deepcopy(self.there),))


class Race:
    """Replicas that are asked in turn, half a second apart."""

    def __init__(self, *names: str) -> None:
        self.server = Server()
        self.replicas = {name: Lease("l", "ns", name, 15.0) for name in names}
        self.now = 0.0
        self.frozen: set[str] = set()

    def step(self) -> None:
        for name, lease in self.replicas.items():
            if name in self.frozen:
                continue
            lease.tell_time(WALL + self.now)
            if (request := lease.due(self.now)) is not None:
                lease.done(request, self.server(request), self.now, 0.5)
        assert len(self.leaders()) <= 1
        self.now += 0.5

    def leaders(self) -> list[str]:
        return [name for name, lease in self.replicas.items() if lease.leads(self.now)]

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.step()


def test_one_of_two_leads_and_goes_on() -> None:
    race = Race("a", "b")
    race.run(120)
    assert race.leaders() == ["a"]
    assert race.replicas["b"].holder == "a"
    assert race.server.there is not None
    assert race.server.there["spec"]["leaseTransitions"] == 0


def test_who_falls_silent_is_replaced_after_the_duration_and_not_before() -> None:
    race = Race("a", "b")
    race.run(10)
    race.frozen.add("a")
    race.run(10)
    assert race.leaders() in ([], ["a"])
    race.run(10)
    assert race.leaders() == ["b"]
    race.frozen.clear()
    race.run(30)
    assert race.leaders() == ["b"], "who comes back does not take it again"
    assert race.server.there is not None
    assert race.server.there["spec"]["leaseTransitions"] == 1


def test_who_gives_it_back_is_replaced_at_once() -> None:
    race = Race("a", "b")
    race.run(10)
    request = race.replicas["a"].release()
    assert request is not None
    assert not race.replicas["a"].leads(race.now)
    race.server(request)
    race.frozen.add("a")
    race.run(4)
    assert race.leaders() == ["b"]
    assert Lease("l", "ns", "c", 15.0).release() is None


def test_nobody_leads_without_an_api_server() -> None:
    race = Race("a", "b")
    race.run(10)
    race.server.down = True
    race.run(11)
    assert race.leaders() == []
    race.server.down = False
    race.run(20)
    assert len(race.leaders()) == 1


def test_a_clock_that_is_wrong_changes_nothing() -> None:
    race = Race("a", "b")
    race.run(10)
    assert race.server.there is not None
    race.server.there["spec"]["renewTime"] = "1999-01-01T00:00:00.000001Z"
    race.run(3)
    assert race.leaders() == ["a"]


def test_a_lease_that_somebody_deletes_is_made_again() -> None:
    race = Race("a", "b")
    race.run(10)
    race.server.there = None
    race.run(30)
    assert len(race.leaders()) == 1


def test_a_lease_of_nonsense_is_taken_over_after_our_own_duration() -> None:
    race = Race("a")
    race.server.there = {
        "metadata": {"name": "l", "resourceVersion": "1"},
        "spec": {"holderIdentity": "x", "leaseDurationSeconds": -7, "leaseTransitions": None},
    }
    race.server.version = 1
    race.run(14)
    assert race.leaders() == []
    race.run(6)
    assert race.leaders() == ["a"]


def test_an_empty_lease_is_taken_at_once() -> None:
    race = Race("a")
    race.server.there = {"metadata": {"name": "l", "resourceVersion": "1"}}
    race.server.version = 1
    race.run(1)
    assert race.leaders() == ["a"]


def test_times_have_six_digits() -> None:
    lease = Lease("l", "ns", "a", 15.0)
    lease.tell_time(WALL)
    asked = lease.due(0.0)
    assert asked is not None
    lease.done(asked, Outcome(result=Result.MISSING), 0.0, 0.0)
    made = lease.due(10.0)
    assert made is not None
    assert made.body["spec"]["renewTime"].endswith(".000001Z")
