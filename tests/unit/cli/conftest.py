"""Commands run in this process as if at a terminal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner, Result

from nri_numa.cli import cli
from tests.beds.http_view import FakeView, served

Columns = Callable[[int], None]


def invoke(*arguments: str, code: int | None = None, stdin: str | None = None) -> Result:
    """Run a command; it ends with this exit code, where one is given."""
    done = CliRunner().invoke(cli, arguments, input=stdin)
    assert code in (None, done.exit_code), done.output
    return done


def shows(text: str, *words: str) -> None:
    """All of these are in a text."""
    for word in words:
        assert word in text, text


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
