"""Replicas that ask an API server for one Lease, by clocks of the tests."""

import asyncio
from typing import Any

import pytest

from nri_numa.kube.lease import Lease, reachable_address
from nri_numa.kube.requests import APIRequest, Outcome, OutcomeKind, Resource
from tests.beds.cluster_objects import ClusterObjects, ServedRequest


class Replicas:
    """Two of them, the Lease, and the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cluster = ClusterObjects()
        self.said: list[tuple[str, bool]] = []
        self.one, self.other = (self._made(name) for name in ("one", "other"))

    def _made(self, name: str) -> Lease:
        lease = Lease(
            "l", "ns", self.cluster.execute_request, identity=name,
            clock=lambda: self.now, wall=lambda: 1_795_000_000.0 + self.now, jitter=lambda: 0.5,
        )  # fmt: skip
        lease.limit = 60.0
        lease.changed = lambda: self.said.append((name, lease.is_leader))
        return lease

    @property
    def lease(self) -> dict[str, Any]:
        return self.cluster.get(Resource.LEASES, "l", "ns")

    @property
    def holder(self) -> str:
        return str(self.lease["spec"]["holderIdentity"])

    async def run(self, seconds: float, *replicas: Lease) -> None:
        """Half a second at a time."""
        end = self.now + seconds
        while self.now < end:
            for one in replicas:
                await one.run_step()
                assert not (self.one.is_leader and self.other.is_leader)
            self.now += 0.5


@pytest.fixture
def made() -> Replicas:
    return Replicas()


async def test_one_leads_and_another_takes_over_what_is_not_renewed(made: Replicas) -> None:
    await made.run(8, made.one, made.other)
    assert (made.one.is_leader, made.other.is_leader, made.holder) == (True, False, "one")
    assert made.other.holder == "one"
    began = made.now
    await made.run(10.5, made.other)
    assert not made.one.is_leader, "it stops by itself before anybody takes over"
    assert not made.other.is_leader
    await made.run(8, made.other)
    assert (made.other.is_leader, made.holder) == (True, "other")
    assert began + 12 < made.other.since < made.now
    assert made.lease["spec"]["leaseTransitions"] == 1
    await made.run(4, made.one, made.other)
    assert not made.one.is_leader, "who comes back does not take it again"
    assert made.said == [
        ("one", True), ("other", True), ("one", False),
    ]  # fmt: skip
    await made.other.release_lease()
    assert (made.other.is_leader, made.holder) == (False, "")
    await made.run(4, made.one)
    assert made.one.is_leader, "what is given back is taken at once"
    await made.other.release_lease()
    assert made.holder == "one", "nobody gives back what is another's"


async def test_of_two_that_write_one_fails(made: Replicas) -> None:
    def overtake(request: ServedRequest) -> None:
        if request.method == "PUT":  # another replica writes in between
            made.cluster.patch(Resource.LEASES, "l", {}, "ns")

    await made.run(4, made.one)
    assert made.one.is_leader
    await made.one.release_lease()
    made.cluster.on_request = overtake
    await made.run(30, made.one, made.other)
    assert not made.one.is_leader
    assert not made.other.is_leader


async def test_of_two_that_make_it_one_fails(made: Replicas) -> None:
    await asyncio.gather(made.one.run_step(), made.other.run_step())  # neither finds a Lease
    made.now += 3
    await asyncio.gather(made.one.run_step(), made.other.run_step())
    assert made.one.is_leader != made.other.is_leader
    await made.run(8, made.one, made.other)
    assert made.one.is_leader == (made.holder == "one")
    assert made.other.is_leader == (made.holder == "other")


async def test_after_an_outage_it_leads_again_within_seconds(made: Replicas) -> None:
    """However long it was: a back-off of a minute would be a minute without a leader."""
    await made.run(4, made.one)
    made.cluster.fail(503, "etcd is away")
    await made.run(300, made.one)
    assert not made.one.is_leader
    made.cluster.recover()
    await made.run(5, made.one)
    assert made.one.is_leader


async def test_a_server_that_never_answers_is_given_up() -> None:
    """A renewal that comes too late is none, and the next attempt needs its time too."""
    told: list[OutcomeKind] = []

    async def never(request: APIRequest) -> Outcome:
        await asyncio.Event().wait()
        raise AssertionError(request)

    lease = Lease("l", "ns", never, identity="one")
    lease.limit = 0.01
    lease.answered = lambda request, outcome: told.append(outcome.result)
    await lease.run_step()
    assert not lease.is_leader
    assert told == [OutcomeKind.UNREACHABLE]


@pytest.mark.parametrize(
    ("spec", "after"),
    [
        ({"holderIdentity": "x", "leaseDurationSeconds": -7, "leaseTransitions": None}, 15.0),
        ({"holderIdentity": "x", "leaseDurationSeconds": 5}, 5.0),
        (None, 0.0),
    ],
)
async def test_a_lease_that_nobody_renews_is_taken_over_after_its_own_duration(
    made: Replicas, spec: dict[str, Any] | None, after: float
) -> None:
    """Or after ours, where it has none that makes sense; its times say nothing."""
    made.cluster.put(Resource.LEASES, {"metadata": {"name": "l", "namespace": "ns"}, "spec": spec})
    while not made.one.is_leader:
        await made.run(0.5, made.one)
    assert after <= made.now < after + 4
    assert made.lease["spec"]["renewTime"].partition(".")[2].endswith("Z")
    made.lease["spec"]["renewTime"] = "1999-01-01T00:00:00.000001Z"
    await made.run(3, made.one, made.other)
    assert made.one.is_leader, "times of another machine are not compared"
    made.cluster.remove(Resource.LEASES, "l", "ns")
    await made.run(30, made.other)
    assert made.other.is_leader, "one that is deleted is made again, once its holder has ended"
    made.cluster.remove(Resource.LEASES, "l", "ns")
    await made.run(30, made.one, made.other)
    assert made.one.is_leader != made.other.is_leader, "one that is deleted is made again"


@pytest.mark.parametrize(
    ("address", "server", "found"),
    [
        (None, "192.0.2.1", ""),
        (("10.0.0.7", 9894), "", "10.0.0.7:9894"),
        (("fd00::7", 9894), "", "[fd00::7]:9894"),
        (("127.0.0.1", 9894), "192.0.2.1", ""),
        (("", 9894), "127.0.0.2", ""),
        (("0.0.0.0", 9894), "no address", ""),
    ],
)
def test_the_address_is_one_that_other_pods_reach(
    address: tuple[str, int] | None, server: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", server)
    assert reachable_address(address) == found
