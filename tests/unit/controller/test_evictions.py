"""How often one workload is moved, and what is said of a pod that goes."""

from __future__ import annotations

from nri_numa.controller.evictions import Ledger, Mover, workload_of


def test_one_workload_moves_so_often_and_another_as_well() -> None:
    ledger = Ledger(2, 100.0)
    for at in (0.0, 30.0):
        assert ledger.free_at("web", at) <= at
        ledger.moved("web", at)
    assert ledger.free_at("web", 50.0) == 100.0
    assert ledger.free_at("db", 50.0) <= 50.0
    assert ledger.free_at("web", 100.0) <= 100.0
    ledger.moved("web", 100.0)
    assert ledger.free_at("web", 110.0) == 130.0


def test_what_is_long_ago_is_forgotten() -> None:
    ledger = Ledger(1, 10.0)
    for number in range(70_000):
        ledger.moved(f"w{number}", float(number))
    assert ledger.free_at("w69999", 70_000.0) == 70_009.0
    assert ledger.free_at("w0", 70_000.0) <= 70_000.0


def test_texts_are_no_longer_than_the_api_server_takes() -> None:
    mover = Mover(output="stuck", prefix="numa.kubernetes.io", reason="NUMAPodMoved", end="moved")
    event = mover.event("shop", "p" * 253, "0123456789abcdef", "ü" * 2000, 0.0)
    assert len(event.name) <= 253
    assert event.name.endswith(".01234567.moved")
    assert len(event.body["note"].encode()) <= 1024


def test_who_makes_a_pod_again() -> None:
    owners = [{"kind": "Thing", "uid": "a"}, {"kind": "ReplicaSet", "uid": "b", "controller": True}]
    assert workload_of({"metadata": {"ownerReferences": owners}}) == "b"
    assert workload_of({"metadata": {}}) == ""
