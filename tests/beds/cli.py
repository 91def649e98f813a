"""Commands run in this process as if at a terminal."""

from collections.abc import Callable

from click.testing import CliRunner, Result

from nri_numa.cli import cli

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
