"""The headline's arithmetic: what its figures say, without running anything."""

from __future__ import annotations

from bench.headline.__main__ import WAYS, Run, factors, report


def run(rate: float, cpu: int, busy_node: int) -> Run:
    met = cpu == busy_node
    return Run(rate=rate, waited=0.66 if met else 0.0, cpus=(cpu,), learned=True, met=met)


def test_the_best_numa_node_is_whole_and_what_is_nearly_as_good() -> None:
    assert factors({0: 0.33, 1: 0.99}) == {0: 0.333, 1: 1.0}
    assert factors({0: 0.95, 1: 0.99}) == {0: 1.0, 1: 1.0}
    assert factors({0: 0.2, 1: 0.2}) == {0: 1.0, 1: 1.0}, "what disturbs all alike prefers none"
    assert factors({0: 0.0, 1: 0.0}) == {0: 1.0, 1: 1.0}


def test_a_table_tells_both_positions_and_what_is_possible() -> None:
    blind = [run(10, 0, 0), run(30, 0, 1)]
    measured = [run(30, 1, 0), run(30, 0, 1)]
    text = report(
        {"kernel": blind, "blind": blind, "kubelet": blind, "measured": measured},
        each=2,
        runs=2,
        seconds=1,
    )
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if "|" in line}
    row = [cell.strip() for cell in rows[WAYS["measured"].title].split("|")]
    assert row[2:8] == ["30.0", "30.0", "30.0 to 30.0", "1.50", "0%", "0 of 2"]
    assert "1 of 2" in rows[WAYS["blind"].title], "it would have been evicted once"
    assert "(1 of 2 runs): 3.00 times as many epochs a second" in text
    assert "1/(2+1) of a CPU" in text
    assert "no more than 1.50 times better on average" in text
    assert "every job learned: yes" in text
    assert "say little" not in text
    both = {"kernel": blind, "blind": blind, "kubelet": blind, "measured": measured}
    noisy = report(both, each=2, runs=2, seconds=1, busy=0.8)
    assert "**Others used 80% of the CPUs just before: these figures say little.**" in noisy


def test_without_a_run_that_met_them_nothing_is_claimed() -> None:
    lucky = [run(30, 1, 0)]
    text = report(dict.fromkeys(WAYS, lucky), each=1, runs=1, seconds=1)
    assert "Where the blind placement met" not in text
