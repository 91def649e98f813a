"""Commands run in this process as if at a terminal."""

import os
from collections.abc import Iterator

import pytest

from tests.beds.cli import Columns
from tests.beds.http_view import FakeView, served


@pytest.fixture(autouse=True)
def _nothing_of_this_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Commands run in a folder of their own, with an empty configuration."""
    for name in list(os.environ):
        if name.startswith("NRI_NUMA_"):
            monkeypatch.delenv(name)
    folder = tmp_path_factory.mktemp("here")
    (folder / "empty.yaml").touch()
    monkeypatch.setenv("NRI_NUMA_CONFIG", str(folder / "empty.yaml"))
    monkeypatch.chdir(folder)


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
