"""What is said on a terminal while somebody waits."""

import io
import re
import threading

import pytest

from nri_numa.cli.common import show_progress


class Screen(io.StringIO):
    """Standard error that is, or is not, a terminal."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal
        self.written = threading.Event()

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count


def screen(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> Screen:
    made = Screen(terminal=terminal)
    monkeypatch.setattr("sys.stderr", made)
    return made


def test_what_takes_long_is_said_and_wiped_away(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = screen(monkeypatch, terminal=True)
    with show_progress("asking \x1b[31mnode", delay_s=0.01) as at:
        assert shown.written.wait(30)
        assert re.search(r"asking \\x1b\[31mnode … \d+ s", shown.getvalue())
        at("waiting for the runtime")
        while "waiting for the runtime" not in shown.getvalue():
            shown.written.clear()
            assert shown.written.wait(30)
    assert shown.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_quick_is_not_mentioned(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> None:
    shown = screen(monkeypatch, terminal=terminal)
    with show_progress("asking", delay_s=600):
        pass
    assert shown.getvalue() == ""


def test_no_pipe_and_no_log_gets_any_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = screen(monkeypatch, terminal=False)
    with show_progress("asking", delay_s=0.001) as at:
        at("something else")
        assert not shown.written.wait(0.05)
    assert shown.getvalue() == ""


def test_a_failure_leaves_no_line_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = screen(monkeypatch, terminal=True)

    def work() -> None:
        with show_progress("asking", delay_s=0.01):
            assert shown.written.wait(30)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        work()
    assert shown.getvalue().endswith("\r\x1b[K")
