"""Log lines: form, safety, cost, and where they go."""

import io
import json
import logging
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nri_numa.observe import logs
from tests.beds.waiting_loop import WaitingLoop

HOSTILE = 'a\x1b[2J\nb\r\t\x00\x9b31m‮\u2028<script>"quote" \\ \ud800'


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    yield
    logs.defer_formatting(None)
    logs.setup_logging()


@pytest.fixture
def out() -> io.StringIO:
    stream = io.StringIO()
    logs.setup_logging(stream=stream)
    return stream


def test_a_line_is_one_line_of_key_and_value(out: io.StringIO) -> None:
    logs.get_logger("agent").info(
        "container placed", pod="shop/cart-0", cpus="0-3,8", seconds=0.25, ok=True, none=None
    )
    assert re.fullmatch(
        r"time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z level=info "
        r'msg="container placed" component=agent pod=shop/cart-0 cpus=0-3,8 seconds=0\.25 ok=true '
        r"none=None\n",
        out.getvalue(),
    )


def test_every_line_of_one_request_carries_the_same_op(out: io.StringIO) -> None:
    """And lines outside of it carry none."""
    log = logs.get_logger("agent")
    with logs.operation(event="CreateContainer") as op:
        log.info("one")
        log.info("two")
    log.info("four")
    lines = out.getvalue().splitlines()
    assert re.fullmatch(r"[0-9a-f]{8}", op)
    assert [f"op={op} event=CreateContainer" in line for line in lines] == [True, True, False]


def test_levels_below_the_threshold_cost_nothing_and_change_while_running(out: io.StringIO) -> None:
    class Dear:
        def __str__(self) -> str:
            raise AssertionError("formatted although nobody sees it")

    log = logs.get_logger("agent")
    log.debug("hidden", value=Dear())
    logs.set_level("error")
    log.info("hidden", value=Dear())
    log.warning("hidden", value=Dear())
    log.error("shown")
    logs.set_level("debug")
    log.debug("shown too")
    assert [line.split("msg=")[1].split(" comp")[0] for line in out.getvalue().splitlines()] == [
        "shown",
        '"shown too"',
    ]


def test_exceptions_are_one_line_with_their_traceback(out: io.StringIO) -> None:
    try:
        raise ValueError("odd\nvalue")
    except ValueError:
        logs.get_logger("agent").exception("failed", pod="a/b")
    line = out.getvalue()
    assert line.count("\n") == 1
    assert 'error="ValueError: odd\\nvalue"' in line
    assert "Traceback (most recent call last)" in line
    logs.get_logger("agent").exception("without one")
    assert "traceback" not in out.getvalue().splitlines()[1]


def test_hostile_values_are_shown_harmlessly_in_both_forms(out: io.StringIO) -> None:
    log = logs.get_logger("agent")
    log.info(HOSTILE, pod=HOSTILE)
    line = out.getvalue()
    assert line.rstrip("\n").isprintable()
    assert "\\x1b[2J\\nb" in line
    stream = io.StringIO()
    logs.setup_logging(format="json", stream=stream)
    log.info(HOSTILE, pod=HOSTILE)
    text = stream.getvalue()
    assert text.rstrip("\n").isprintable()
    assert text.isascii()
    assert "<" not in text
    assert json.loads(text)["pod"] == HOSTILE


@given(st.text(alphabet=st.characters(), max_size=60))
def test_any_value_stays_on_its_line_and_between_its_quotes(value: str) -> None:
    """A pod cannot forge a second field, or a second line."""
    text = logs._logfmt_value(value)
    assert text.isprintable()
    if text.startswith('"'):
        assert re.fullmatch(r'"(?:[^"\\]|\\.)*"', text)
    else:
        assert not set(text) & set(" =\"'\\")


def test_long_values_are_cut_and_say_so(out: io.StringIO) -> None:
    logs.get_logger("agent").info("x", value="y" * 5_000 + '"' * 5_000)
    assert len(out.getvalue()) < 4300
    assert "(10000 characters)" in out.getvalue()


def test_json_keeps_numbers_and_has_no_nan() -> None:
    stream = io.StringIO()
    logs.setup_logging(format="json", stream=stream)
    logs.get_logger("a").info("x", n=3, f=0.5, b=False, none=None, nan=float("nan"), p=Path("/"))
    document = json.loads(stream.getvalue(), parse_constant=lambda _: pytest.fail("not JSON"))
    assert (document["n"], document["f"], document["b"], document["none"]) == (3, 0.5, False, None)
    assert (document["nan"], document["p"], document["level"]) == ("nan", "/", "info")


def test_with_a_loop_the_text_is_made_in_its_next_round(out: io.StringIO) -> None:
    """So that the reply leaves first; the time and the op are those of the event."""
    loop = WaitingLoop()
    logs.defer_formatting(loop)
    log = logs.get_logger("agent")
    with logs.operation() as op:
        log.info("one")
        log.info("two")
    assert out.getvalue() == ""
    assert len(loop.waiting) == 1
    loop.round()
    assert [f"op={op}" in line for line in out.getvalue().splitlines()] == [True, True]
    log.info("three")
    logs.flush_lines()
    assert "three" in out.getvalue()
    loop.round()
    assert out.getvalue().count("\n") == 3


def test_a_closed_stream_is_no_reason_to_fail_and_counts_each_line_once() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    for stream in (closed := io.StringIO(), unread := os.fdopen(writing, "w")):
        logs.setup_logging(stream=stream)
        closed.close()
        before = logs.count_dropped_lines()
        logs.get_logger("agent").error("nobody reads this")
        assert logs.count_dropped_lines() == before + 1
    unread.close()


def test_lines_can_go_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    logs.setup_logging(file=str(path))
    logs.get_logger("agent").info("one")
    logs.setup_logging(file=str(path))
    logs.get_logger("agent").info("two")
    assert [line.split()[2] for line in path.read_text().splitlines()] == ["msg=one", "msg=two"]
    with pytest.raises(OSError, match="No such file"):
        logs.setup_logging(file=str(tmp_path / "absent" / "log"))


def test_lines_for_systemd_have_a_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "journal").open("w+") as stream:
        info = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{info.st_dev}:{info.st_ino}")
        logs.setup_logging(stream=stream)
        logs.get_logger("agent").warning("unusual topology found")
        stream.seek(0)
        assert stream.read() == '<4>level=warning msg="unusual topology found" component=agent\n'
        monkeypatch.setenv("JOURNAL_STREAM", "0:0")
        logs.setup_logging(stream=stream)
        logs.get_logger("agent").error("x")
        stream.seek(0)
        assert stream.read().splitlines()[1].startswith("time=")


def test_no_standard_error_means_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime gives a launched plugin /dev/null (NRI's pre-installed mode)."""
    path = str(tmp_path / "journal.socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal, open(os.devnull, "w") as null:
        journal.bind(path)
        monkeypatch.setattr(logs, "_JOURNAL_SOCKET", path)
        monkeypatch.setattr(sys, "stderr", null)
        logs.setup_logging()
        logs.get_logger("agent").error("x")
        fields = dict(line.split("=", 1) for line in journal.recv(4096).decode().splitlines())
    assert fields == {
        "MESSAGE": "level=error msg=x component=agent",
        "PRIORITY": "3",
        "SYSLOG_IDENTIFIER": "nri-numa",
    }


def test_a_field_may_have_any_name(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup_logging()
    logs.get_logger("agent").error("x", event=1, self=2)
    assert capsys.readouterr().err.endswith(" event=1 self=2\n")


def test_other_libraries_speak_in_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup_logging()
    other = logging.getLogger("asyncio")
    other.info("nobody wants to know")
    try:
        raise ValueError("of theirs")
    except ValueError:
        other.exception("Task %s was lost", "x")
    (line,) = capsys.readouterr().err.splitlines()
    assert 'level=error msg="Task x was lost" component=asyncio traceback=' in line
    assert "ValueError: of theirs" in line
