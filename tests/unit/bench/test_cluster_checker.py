"""Who counts from outside what two schedulers did to each other."""

from __future__ import annotations

from typing import Any

from bench.cluster.checker import PLACED, Checker
from nri_numa.machine.synthetic import build_synthetic_topology


def bound(name: str, cpus: int, placed: str = "", node: str = "n1") -> dict[str, Any]:
    return {
        "metadata": {
            "name": name, "uid": name, "annotations": {PLACED: placed} if placed else {},
        },
        "spec": {
            "nodeName": node, "containers": [{"resources": {"requests": {"cpu": str(cpus)}}}],
        },
    }  # fmt: skip


def checker() -> Checker:
    return Checker(zone_cpus={0: 8, 1: 8}, numa_of=lambda cpu: cpu // 8)


def test_what_fits_is_well() -> None:
    found = checker()
    pods = [bound("a", 5, '{"main":"0"}'), bound("b", 3, '{"main":"0"}'), bound("c", 8)]
    found.look(pods, {"n1": {"a": range(5), "c": range(8, 16)}})
    found.look(pods, {"n1": {}, "n2": {"z": range(5)}})
    assert found.good
    assert (found.looks, len(found.bound), found.unplaced) == (2, 3, {"c"})


def test_more_promised_than_there_is() -> None:
    found = checker()
    pods = [bound("a", 5, '{"main":"0"}'), bound("b", 4, '{"main":"0"}')]
    found.look([pods[0], bound("b", 4, '{"main":"0"}', node="n2")], {})
    assert found.good
    found.look(pods, {})
    assert found.promised_twice == {("n1", 0, "a, b")}
    assert not found.good


def test_what_a_pod_has_counts_and_not_what_it_was_promised() -> None:
    found = checker()
    pods = [bound("a", 5, '{"main":"0"}'), bound("b", 4, '{"main":"0"}')]
    found.look(pods, {"n1": {"a": range(8, 13)}})
    assert found.good
    assert found.elsewhere == {"a"}
    assert "1 pods on other NUMA nodes than promised" in found.text()


def test_one_cpu_for_two() -> None:
    found = checker()
    found.look([], {"n1": {"a": range(5), "b": range(4, 8)}, "n2": {"c": range(5)}})
    assert found.granted_twice == {("n1", 4)}
    assert not found.good


def test_a_real_node_is_another_machine() -> None:
    small = build_synthetic_topology(sockets=1, numa_per_socket=1, cores_per_numa=2, threads=1)
    found = Checker(zone_cpus={0: 8, 1: 8}, numa_of=lambda cpu: 1, real={"bed": small})
    pods = [bound(name, 1, '{"main":"0"}', "bed") for name in ("a", "b")]
    found.look(pods, {"bed": {"a": [0], "b": [1]}})
    assert (found.good, found.elsewhere) == (True, set())
    found.look([*pods, bound("c", 1, '{"main":"0"}', "bed")], {})
    assert found.promised_twice == {("bed", 0, "a, b, c")}
