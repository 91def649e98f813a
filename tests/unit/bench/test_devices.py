"""The bench of device sources says whether its budget was kept, and where it was worst."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.devices import Measured, measure, report
from bench.stats import summary

QUICK = Measured(
    case="no devices",
    off=summary([0.001]),
    control=summary([0.001]),
    on=summary([0.001]),
    beside=0.5,
)


def test_a_budget_that_every_case_keeps() -> None:
    slower = replace(QUICK, case="a device file", on=summary([0.001049]), beside=1.0)
    text = report([QUICK, slower])
    assert text.endswith(
        "Budget of +50 µs at p50 kept: +49 µs at most (a device file), where two with the same "
        "settings differ by 0 µs at most."
    )
    assert "100%" in text


def test_a_budget_that_one_case_misses() -> None:
    slower = replace(QUICK, case="a device file", on=summary([0.001051]))
    assert "missed: +51 µs at most (a device file)" in report([slower, QUICK])


def test_what_two_of_the_same_settings_differ_is_told_beside_the_result() -> None:
    """The result is against both of them: each is as likely the slower one."""
    text = report([replace(QUICK, control=summary([0.00104]), on=summary([0.00106]))])
    assert "kept: +40 µs at most" in text
    assert text.endswith("differ by 40 µs at most.")


def test_each_plugin_has_its_configuration_and_its_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plugin runs here: one that looks for devices takes 1 s more."""

    @contextlib.asynccontextmanager
    async def bed(
        directory: Path, topology: object, *, more: Sequence[str]
    ) -> AsyncIterator[dict[str, Any]]:
        (flag,) = more
        document = json.loads(Path(flag.removeprefix("--config=")).read_text(encoding="utf-8"))
        assert (directory / "machine/sys/dev/char/226:128").exists(), "it has the device as well"
        yield document

    async def fill(one: object, residents: int, shape: object) -> None:
        pass

    lives: list[bool] = []

    async def life(one: dict[str, Any], name: str, change: object) -> tuple[float, bool]:
        looks = one["devices"]["enabled"]
        lives.append(looks)
        return 3.0 + looks, looks

    monkeypatch.setattr("bench.devices.bed", bed)
    monkeypatch.setattr("bench.devices.fill", fill)
    monkeypatch.setattr("bench.devices._one", life)
    monkeypatch.setattr("bench.devices._apart", lambda kubelet, beds: None)
    found = asyncio.run(measure(rounds=3))
    assert [(m.off.p50, m.control.p50, m.on.p50, m.beside) for m in found] == [
        (3.0, 3.0, 4.0, 1.0)
    ] * 3
    turns = [lives[i : i + 3] for i in range(0, len(lives), 3)]
    assert len({tuple(turn) for turn in turns}) > 1, "nobody always comes after the same one"
    assert all(sorted(turn) == sorted(turns[0]) for turn in turns)
    assert len({m.case for m in found}) == 3
