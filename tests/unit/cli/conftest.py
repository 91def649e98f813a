"""Commands run in this process as if at a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.beds.http_view import FakeView, served

Columns = Callable[[int], None]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Columns:
    """Make the output of click's runner a terminal of 80 columns, or of as many as are given."""
    monkeypatch.setattr(
        "click.testing._NamedTextIOWrapper.isatty", lambda _self: True, raising=False
    )

    def columns(count: int) -> None:
        monkeypatch.setenv("COLUMNS", str(count))

    columns(80)
    return columns


@pytest.fixture
def agent() -> Iterator[tuple[str, object]]:
    """A served view in a thread of its own; its address and the view."""
    view = FakeView()
    with served(view) as (host, port):
        yield f"{host}:{port}", view
