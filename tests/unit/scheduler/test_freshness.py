"""Objects that nobody renews any more are not believed."""

from __future__ import annotations

from typing import Any

import pytest

from nri_numa.scheduler.published import Freshness

PREFIX = "numa.kubernetes.io"


def said(renewed: object = "12:00", valid: object = "900") -> dict[str, Any]:
    annotations = {f"{PREFIX}/renewed": renewed, f"{PREFIX}/valid-seconds": valid}
    return {"metadata": {"name": "n", "annotations": annotations}}


@pytest.mark.parametrize("valid", [None, "", "0", "-1", "NaN", "1e3", "9" * 7, 900, []])
def test_without_a_validity_it_holds_for_ever(valid: object) -> None:
    fresh = Freshness(PREFIX)
    fresh.seen("n", said(), 0.0)
    assert fresh.seen("n", said(valid=valid), 1.0)
    assert fresh.stale(1e9) == []


@pytest.mark.parametrize("document", [{}, {"metadata": None}, {"metadata": {"annotations": "x"}}])
def test_nonsense_holds(document: dict[str, Any]) -> None:
    fresh = Freshness(PREFIX)
    assert fresh.seen("n", document, 0.0)
    assert fresh.stale(1e9) == []
