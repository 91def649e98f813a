"""Lines for somebody who stopped reading: they wait, they are dropped, nobody is held up."""

import fcntl
import io
import os
import select
import socket
from collections.abc import Iterator

import pytest

from nri_numa.observe import logs
from nri_numa.observe.logs import Outlet
from nri_numa.observe.metrics import Metrics
from tests.beds.waiting_loop import WaitingLoop

LINE = "x" * 99 + "\n"
_F_SETPIPE_SZ = 1031  # fcntl(2); named in the standard library from 3.10 on Linux only


class Pipe:
    """A pipe of one page, written to by its stream."""

    def __init__(self) -> None:
        self.reading, writing = os.pipe()
        fcntl.fcntl(writing, _F_SETPIPE_SZ, 4096)
        os.set_blocking(self.reading, False)
        self.stream = os.fdopen(writing, "w")

    def read(self) -> str:
        """What is there."""
        found = b""
        while select.select([self.reading], [], [], 0)[0] and (
            data := os.read(self.reading, 1 << 20)
        ):
            found += data
        return found.decode()

    def close(self) -> None:
        self.stream.close()
        os.close(self.reading)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def impatient(stream: io.TextIOBase) -> Outlet:
    made = Outlet(stream)  # type: ignore[arg-type]
    made.patient = False
    return made


def rest(pipe: Pipe, out: Outlet) -> str:
    """All that the reader gets when it is back."""
    text = ""
    while out.has_pending_lines:
        text += pipe.read()
        out.drain_lines()
    out.close()
    return text + pipe.read()


@pytest.mark.parametrize("named", [True, False])
def test_a_stalled_reader_gets_what_waited_in_order_when_it_is_back(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """Also without a name in /proc, where the outlet asks before it writes."""

    def refused(*_: object) -> int:
        raise PermissionError

    if not named:
        monkeypatch.setattr(os, "open", refused)
    out = impatient(pipe.stream)
    lines = [f"{n} {LINE}" for n in range(200)]
    for line in lines:
        out.write_line(line)
    assert out.has_pending_lines
    assert rest(pipe, out) == "".join(lines)
    assert out.dropped == 0


def test_beyond_the_limit_whole_lines_go(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_QUEUED_BYTES", 1000)
    out = impatient(pipe.stream)
    for _ in range(100):
        out.write_line(LINE)
    assert out.dropped > 0
    assert rest(pipe, out) == LINE * (100 - out.dropped)


def test_others_with_the_same_pipe_are_left_alone(pipe: Pipe) -> None:
    """O_NONBLOCK belongs to the open file, which the runtime that launched us may share."""
    out = impatient(pipe.stream)
    out.write_line(LINE)
    assert os.get_blocking(pipe.stream.fileno())
    out.close()


def test_a_long_line_may_go_in_parts(pipe: Pipe) -> None:
    out = impatient(pipe.stream)
    long = "y" * 10_000 + "\n"
    out.write_line(long)
    out.write_line(LINE)
    assert rest(pipe, out) == long + LINE


def test_a_socket_that_nobody_reads_does_not_block_either() -> None:
    """The journal that systemd gives a service is one."""
    ours, journal = socket.socketpair()
    with ours, journal, ours.makefile("w") as stream:
        out = impatient(stream)
        while not out.has_pending_lines:
            out.write_line(LINE)
        assert ours.getblocking()
        while out.has_pending_lines:
            journal.recv(1 << 20)
            out.drain_lines()
        out.close()


def test_a_reader_that_is_gone_is_an_error_and_what_waited_is_lost(pipe: Pipe) -> None:
    out = impatient(pipe.stream)
    while not out.has_pending_lines:
        out.write_line(LINE)
    os.close(pipe.reading)
    with pytest.raises(BrokenPipeError):
        out.write_line(LINE)
    assert (out.has_pending_lines, out.dropped > 0) == (False, True)
    out.close()
    pipe.reading = os.open(os.devnull, os.O_RDONLY)


def test_commands_wait_briefly_for_a_reader(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "READER_TIMEOUT_S", 0.01)
    out = Outlet(pipe.stream)
    while out.patient:
        out.write_line(LINE)
    assert out.has_pending_lines
    out.close()


def test_dropped_lines_are_counted_and_said(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_QUEUED_BYTES", 10_000)
    logs.setup_logging(stream=pipe.stream)
    before = logs.count_dropped_lines()
    loop = WaitingLoop()
    logs.defer_formatting(loop)
    try:
        log = logs.get_logger("agent")
        for n in range(500):
            log.info("container placed", number=n)
        loop.round()
        lost = logs.count_dropped_lines() - before
        assert lost > 0
        assert (
            f"nri_numa_log_lines_dropped_total {float(before + lost)}"
            in Metrics("0").render_metrics()
        )
        text = ""
        for _ in range(50):
            text += pipe.read()
            loop.round()
        text += pipe.read()
    finally:
        logs.defer_formatting(None)
        logs.setup_logging(stream=io.StringIO())
    *kept, said = text.splitlines()
    assert [f"number={n}" in line for n, line in enumerate(kept)] == [True] * (500 - lost)
    assert "level=warning" in said
    assert f'msg="log lines dropped" component=logs line_count={lost} ' in said
    assert not loop.waiting
