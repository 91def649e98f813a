"""The bench of device sources says whether its budget was kept, and where it was worst."""

from __future__ import annotations

from dataclasses import replace

from bench.devices import Measured, report
from bench.stats import summary

QUICK = Measured(
    case="no devices", ahead=False, off=summary([0.001]), on=summary([0.001]), beside=0.5
)


def test_a_budget_that_every_case_keeps() -> None:
    slower = replace(QUICK, case="a device file", on=summary([0.001049]), beside=1.0)
    text = report([QUICK, slower])
    assert text.endswith(
        "Budget of +50 µs at p50 kept: +49 µs at most (a device file, decided when asked)."
    )
    assert "100%" in text


def test_a_budget_that_one_case_misses() -> None:
    slower = replace(QUICK, case="a device file", ahead=True, on=summary([0.001051]))
    assert "missed: +51 µs at most (a device file, decided ahead)" in report([slower, QUICK])
