"""Structured log lines: ``key=value`` (logfmt) or JSON, one event per line.

Every line of one request carries the same ``op`` id; `operation` binds it. Values come from pods
and are not trusted: characters that could end a line, move a cursor or reorder text are escaped.

Built on the standard library's logging: the agent's loggers are below ``nri_numa``, and one handler
writes for them and for warnings and errors of other libraries. A line below the threshold costs
nothing. With a loop (`defer_formatting`) the handler queues records and the loop formats them in
its next round, after the reply was sent. A reader that stops reading blocks nothing (`Outlet`): its
lines are queued up to a limit, then dropped and counted, and the count is logged when it reads
again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import re
import select
import socket
import stat
import sys
import threading
import time
import traceback
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import partial
from types import MappingProxyType
from typing import Any, Final, TextIO

from nri_numa.text import escape_unprintable

MAX_QUEUED_BYTES: Final = 512 * 1024
"""Bytes of queued lines; a line beyond them is dropped."""
READER_TIMEOUT_S: Final = 5.0
"""Seconds that a starting program, or a command, waits once for a reader that does not read."""


class Outlet:
    """Destination of lines: a stream, written to by its descriptor if it has one.

    The descriptor is often shared (containerd and its plugins, a shell and its jobs), and
    O_NONBLOCK belongs to the open file description that all of them share: set here, it would break
    the others. So a pipe or a terminal is opened once more by its name in /proc, which makes a new
    open file description, and a socket is sent to with MSG_DONTWAIT.

    Attributes:
        patient: wait for the reader; False once it took longer than `READER_TIMEOUT_S`.
        dropped: number of lines dropped so far.
    """

    def __init__(self, stream: TextIO) -> None:
        self.patient = True
        self.dropped = 0
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._stream: TextIO | None = None
        self._close: Callable[[], None] = lambda: None
        self._poll: select.poll | None = None
        try:
            descriptor = stream.fileno()
            stream.flush()
            mode = os.fstat(descriptor).st_mode
        except (OSError, ValueError, AttributeError):
            self._stream = stream
            return
        self._write = self._open_nonblocking_write(descriptor, mode)

    def _open_nonblocking_write(self, descriptor: int, mode: int) -> Callable[[bytes], int]:
        """Return a function that writes bytes; it raises BlockingIOError if it can write none."""
        if stat.S_ISSOCK(mode):
            sock = socket.socket(fileno=os.dup(descriptor))
            self._close = sock.close
            self._poll = _new_write_poll(sock.fileno())
            return lambda data: sock.send(data, socket.MSG_DONTWAIT)
        if not (stat.S_ISFIFO(mode) or os.isatty(descriptor)):
            return partial(os.write, descriptor)
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            new_descriptor = os.open(f"/proc/self/fd/{descriptor}", flags)
        except OSError:
            # A pipe of another user, or no /proc. poll(2) promises room for PIPE_BUF bytes,
            # unless another process writes at the same moment.
            self._poll = poll = _new_write_poll(descriptor)

            def write_when_ready(data: bytes) -> int:
                if not poll.poll(0):
                    raise BlockingIOError
                return os.write(descriptor, data[: select.PIPE_BUF])

            return write_when_ready
        self._close = lambda: os.close(new_descriptor)
        self._poll = _new_write_poll(new_descriptor)
        return partial(os.write, new_descriptor)

    @property
    def has_pending_lines(self) -> bool:
        """True if lines are queued for the reader."""
        return bool(self._waiting)

    def write_line(self, line: str) -> None:
        """Write, queue or drop a line; OSError and ValueError if nobody will ever read it."""
        if self._stream is not None:
            self._stream.write(line)
            self._stream.flush()
            return
        data = line.encode(errors="backslashreplace")
        size = len(data)
        if self._size + size > MAX_QUEUED_BYTES:
            self.dropped += 1
            return
        self._waiting.append(data)
        self._size += size
        self.drain_lines(READER_TIMEOUT_S if self.patient else 0.0)
        self.patient = self.patient and not self._waiting

    def drain_lines(self, seconds: float = 0.0) -> None:
        """Write queued lines for up to ``seconds``; on OSError they are dropped and counted."""
        deadline = time.monotonic() + seconds
        while self._waiting:
            data = self._waiting[0]
            try:
                written = self._write(data)
            except BlockingIOError:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0 or self._poll is None:
                    return
                self._poll.poll(remaining_s * 1000)
                continue
            except OSError:
                self.dropped += len(self._waiting)
                self._waiting.clear()
                self._size = 0
                raise
            self._size -= written
            if written < len(data):
                self._waiting[0] = data[written:]
            else:
                self._waiting.popleft()

    def close(self) -> None:
        """Close the descriptor opened here; the stream itself stays open."""
        self._close()
        self._close = lambda: None


def _new_write_poll(descriptor: int) -> select.poll:
    poll = select.poll()
    with contextlib.suppress(OSError):
        poll.register(descriptor, select.POLLOUT)
    return poll


_SYSLOG_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3}  # syslog(3)
LOG_LEVELS: Final = {name: int(getattr(logging, name.upper())) for name in _SYSLOG_PRIORITIES}

MAX_LOG_VALUE_CHARS = 4096
"""Characters of one value; a longer one is truncated and ends with its length."""

_LEVEL_NAMES = {number: name for name, number in LOG_LEVELS.items()}
_UNQUOTED_VALUE = re.compile(
    r"[A-Za-z0-9_./:@%+,\-*()\[\]{}<>|~^!?]{1," + f"{MAX_LOG_VALUE_CHARS}}}", re.ASCII
).fullmatch
_JOURNAL_SOCKET = "/run/systemd/journal/socket"

LogEvent = dict[str, Any]

_package_logger = logging.getLogger("nri_numa")

_bound: ContextVar[Mapping[str, object]] = ContextVar("bound", default=MappingProxyType({}))

# Ids group the lines of one request, across restarts too; nothing depends on them.
_operations = itertools.count(int.from_bytes(os.urandom(4)))


class Logger:
    """Writes events with fields."""

    __slots__ = ("_component", "_logger")

    def __init__(self, component: str) -> None:
        self._component = component
        self._logger = _package_logger.getChild(component)

    def debug(self, event: str, /, **fields: object) -> None:
        """Log a detail for developers."""
        self._emit_record(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: object) -> None:
        """Log a decision or a change of state."""
        self._emit_record(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: object) -> None:
        """Log a problem that does not fail a request."""
        self._emit_record(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: object) -> None:
        """Log a failed request."""
        self._emit_record(logging.ERROR, event, fields)

    def exception(self, event: str, /, **fields: object) -> None:
        """Log a request that failed with an unexpected exception, and its traceback."""
        error = sys.exc_info()[1]
        if error is not None:
            fields = {
                **fields,
                "error": f"{type(error).__name__}: {error}",
                "traceback": "".join(traceback.format_exception(error)).rstrip(),
            }
        self._emit_record(logging.ERROR, event, fields)

    def _emit_record(self, level: int, event: str, fields: Mapping[str, object]) -> None:
        if not self._logger.isEnabledFor(level):
            return
        # Logger.log would look up the caller's file and line number, which no line has.
        record = logging.LogRecord(self._logger.name, level, "", 0, event, None, None)
        record.component = self._component
        record.fields = {**_bound.get(), "component": self._component, **fields}
        self._logger.handle(record)


_WRITE_RETRY_S: Final = 0.5
"""Seconds until lines for a blocked reader are tried again."""
_FINAL_DRAIN_S: Final = 0.5
"""Seconds to wait for a blocked reader before the process ends."""


class _LogHandler(logging.Handler):
    """Writes records at once, or in the next round of the loop if one is set."""

    def __init__(self) -> None:
        super().__init__()
        self.render: Callable[[LogEvent], str] = render_logfmt
        self.outlet: Outlet | None = None
        self.lost = 0
        self._said_dropped = 0
        self._trying = False
        self.write: Callable[[str, str], None] = self.open_stream_writer(sys.stderr, journal=False)
        self.close_target: Callable[[], None] = lambda: None
        self.loop: AbstractEventLoop | None = None
        self.thread = threading.get_ident()
        self.queue: deque[logging.LogRecord] = deque()

    def open_stream_writer(self, stream: TextIO, *, journal: bool) -> Callable[[str, str], None]:
        """Return a function that writes lines to ``stream``, which becomes the outlet."""
        if self.outlet is not None:
            self.lost += self.outlet.dropped
            self.outlet.close()
        outlet = self.outlet = Outlet(stream)
        # Lines that an earlier reader missed do not concern this one.
        self._said_dropped = self.dropped_lines
        if journal:
            return lambda level, line: outlet.write_line(f"<{_SYSLOG_PRIORITIES[level]}>{line}\n")
        return lambda _level, line: outlet.write_line(line + "\n")

    def emit(self, record: logging.LogRecord) -> None:
        loop = self.loop
        if loop is None:
            self._write_record(record)
        elif threading.get_ident() != self.thread:
            self.queue.append(record)
            with contextlib.suppress(RuntimeError):  # the loop is closed; flush() follows
                loop.call_soon_threadsafe(self.flush)
        else:
            self.queue.append(record)
            if len(self.queue) == 1:
                loop.call_soon(self.flush)

    def flush(self) -> None:
        while self.queue:
            self._write_record(self.queue.popleft())

    @property
    def dropped_lines(self) -> int:
        """Number of lines that were dropped."""
        return self.lost + (self.outlet.dropped if self.outlet is not None else 0)

    def drain_lines(self, seconds: float = 0.0) -> None:
        """Write queued lines, and log how many were dropped meanwhile."""
        if self.outlet is None:
            return
        with contextlib.suppress(OSError):
            self.outlet.drain_lines(seconds)
        if not self.outlet.has_pending_lines and self.dropped_lines > self._said_dropped:
            count, self._said_dropped = self.dropped_lines - self._said_dropped, self.dropped_lines
            get_logger("logs").warning(
                "log lines dropped", line_count=count, problem="stderr was not read"
            )

    def _write_record(self, record: logging.LogRecord) -> None:
        event, dropped_before = _event_fields(record), self.dropped_lines
        # A full disk or a closed terminal must not keep a container from starting.
        try:
            self.write(event["level"], self.render(event))
        except (OSError, ValueError):
            self.lost += self.dropped_lines == dropped_before  # else the outlet has counted it
        self._try_later()

    def _try_later(self) -> None:
        """Schedule another write if the reader is blocked."""
        blocked = self.outlet is not None and self.outlet.has_pending_lines
        if self.loop is not None and blocked and not self._trying:
            self._trying = True
            self.loop.call_later(_WRITE_RETRY_S, self._retry_write)

    def _retry_write(self) -> None:
        self._trying = False
        self.drain_lines()
        self._try_later()


def _event_fields(record: logging.LogRecord) -> LogEvent:
    """Return the fields of a line: time, level and message first."""
    head: LogEvent = {
        "time": datetime.fromtimestamp(record.created, UTC),
        "level": _LEVEL_NAMES.get(
            record.levelno, "error" if record.levelno > logging.ERROR else "info"
        ),
        "msg": record.msg if hasattr(record, "fields") else record.getMessage(),
    }
    fields: Mapping[str, object] | None = getattr(record, "fields", None)
    if fields is None:  # another library's
        fields = {"component": record.name}
        if record.exc_info is not None and record.exc_info[1] is not None:
            lines = traceback.format_exception(record.exc_info[1])
            fields = {**fields, "traceback": "".join(lines).rstrip()}
    return {**head, **fields}


def get_logger(component: str) -> Logger:
    """Return a logger whose lines have ``component``."""
    return Logger(component)


class operation:  # used like a function; a class, because every request enters one
    """Bind a fresh ``op`` id of 8 hex digits, and ``fields``, to every line inside the block."""

    __slots__ = ("_fields", "_token")

    def __init__(self, **fields: object) -> None:
        self._fields = fields

    def __enter__(self) -> str:
        op = f"{next(_operations) & 0xFFFFFFFF:08x}"
        self._token = _bound.set({**_bound.get(), "op": op, **self._fields})
        return op

    def __exit__(self, *_: object) -> None:
        _bound.reset(self._token)


def set_level(level: str) -> None:
    """Change the threshold of every logger at once."""
    _package_logger.setLevel(LOG_LEVELS[level])


def setup_logging(
    level: str = "info",
    format: str = "logfmt",  # the configuration's word
    *,
    file: str = "",
    stream: TextIO | None = None,
) -> None:
    """Set threshold, form and destination.

    Without ``file``, lines go to standard error. When that is /dev/null, as in a plugin that the
    runtime launched, they go to the journal if there is one. Under systemd each line is
    prefixed with its priority (sd-daemon(3)) and carries no time, since the journal has its own.
    """
    _log_handler.flush()
    set_level(level)
    opened = open(file, "a", encoding="utf-8") if file else None  # noqa: SIM115  # kept open
    _log_handler.close_target()
    if opened is not None:
        _log_handler.write = _log_handler.open_stream_writer(opened, journal=False)
        _log_handler.close_target = opened.close
        journal = False
    elif stream is None and _is_null(sys.stderr) and os.path.exists(_JOURNAL_SOCKET):
        _log_handler.write, _log_handler.close_target = _open_journal_writer(_JOURNAL_SOCKET)
        journal = True
    else:
        target, _log_handler.close_target = stream or sys.stderr, lambda: None
        journal = _is_journal(target)
        _log_handler.write = _log_handler.open_stream_writer(target, journal=journal)
    if format == "json":
        _log_handler.render = render_json
    else:
        _log_handler.render = _render_logfmt_untimed if journal else render_logfmt


def defer_formatting(loop: AbstractEventLoop | None) -> None:
    """Format lines in ``loop``'s next round; None writes them at once again.

    After this call no line waits for the reader.
    """
    if _log_handler.outlet is not None:
        _log_handler.outlet.patient = False
    _log_handler.flush()
    _log_handler.loop, _log_handler.thread = loop, threading.get_ident()


def flush_lines() -> None:
    """Write queued lines before the process ends; takes at most half a second."""
    _log_handler.flush()
    _log_handler.drain_lines(_FINAL_DRAIN_S)


def count_dropped_lines() -> int:
    """Return the number of lines dropped since the start."""
    return _log_handler.dropped_lines


# --- destinations -------------------------------------------------------------------------------


def _open_journal_writer(path: str) -> tuple[Callable[[str, str], None], Callable[[], None]]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    sock.setblocking(False)

    def send_journal_line(level: str, line: str) -> None:
        # Lines contain no line ends, so the journal's simple form is enough.
        other_fields = f"PRIORITY={_SYSLOG_PRIORITIES[level]}\nSYSLOG_IDENTIFIER=nri-numa\n"
        sock.sendto(f"MESSAGE={line}\n{other_fields}".encode(), path)

    return send_journal_line, sock.close


def _is_null(stream: TextIO) -> bool:
    try:
        info = os.fstat(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return True
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == os.makedev(1, 3)


def _is_journal(stream: TextIO) -> bool:
    """Return True if ``stream`` is the journal, by JOURNAL_STREAM (systemd.exec(5))."""
    journal_id = os.environ.get("JOURNAL_STREAM")
    if not journal_id:
        return False
    try:
        info = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return journal_id == f"{info.st_dev}:{info.st_ino}"


# --- forms --------------------------------------------------------------------------------------


def _truncate_value(text: str) -> str:
    if len(text) <= MAX_LOG_VALUE_CHARS:
        return text
    return f"{text[:MAX_LOG_VALUE_CHARS]}… ({len(text)} characters)"


def render_logfmt(event: LogEvent) -> str:
    """Render ``time=… level=info msg="container pinned" pod=shop/cart-0``."""
    return f"time={_timestamp_text(event['time'])} {_render_logfmt_untimed(event)}"


def _render_logfmt_untimed(event: LogEvent) -> str:
    return " ".join(
        f"{key}={_logfmt_value(value)}" for key, value in event.items() if key != "time"
    )


def _logfmt_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if _UNQUOTED_VALUE(text):
        return text
    quoted = _truncate_value(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escape_unprintable(quoted)}"'


def render_json(event: LogEvent) -> str:
    """Render one JSON object; ``<``, ``>`` and ``&`` are escaped for viewers that show HTML."""
    document = {
        key: value if isinstance(value, bool | int) or value is None else _json_value(value)
        for key, value in event.items()
    }
    document["time"] = _timestamp_text(event["time"])
    text = json.dumps(document, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _json_value(value: object) -> str | float:
    if isinstance(value, float) and math.isfinite(value):
        return value
    return _truncate_value(str(value))


def _timestamp_text(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


_log_handler = _LogHandler()
_package_logger.addHandler(_log_handler)
_package_logger.propagate = False
logging.getLogger().addHandler(_log_handler)  # other libraries: warnings and errors
