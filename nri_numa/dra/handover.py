"""How the agent, which has no credentials, gets to read a claim: it asks the publisher by file.

In a directory that both may write, the agent puts ``ask-ID.json`` (which claim) and waits for
``answer-ID.json`` (the claim as the API server has it, or why it cannot be had). Every question has
an id of its own, so no old answer is taken for a new one; the agent removes both. What
another process writes there is read as hostile input, and judged by the agent.

``registered.json`` changes whenever the kubelet has taken the driver: a kubelet that starts deletes
its ResourceSlices.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from nri_numa.dra.claims import MAX_CLAIM_BYTES, InvalidClaim

REGISTRATION_MARKER_FILE: Final = "registered.json"
_ASK_ANSWER_PREFIXES: Final = ("ask", "answer")
_REQUEST_FILE_ID_PATTERN: Final = re.compile(r"ask-([0-9a-f]{16})\.json")
_POLL_INTERVAL_S: Final = 0.05
"""Seconds between two looks for an answer; the publisher looks as often for questions."""


class ClaimFileRequester:
    """The agent's side; an answer may take ``patience`` seconds, and the kubelet waits for 45."""

    def __init__(
        self,
        directory: str,
        *,
        patience: float = 20.0,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._directory, self._patience, self._sleep = directory, patience, sleep
        self._registered = 0

    def remove_leftovers(self) -> None:
        """Take away what a process that was killed left."""
        # Questions first: an answer is taken back when its question is not there any more.
        for kind in ("ask-", "answer-", "registered.json."):
            for name in list_file_names(self._directory):
                if name.startswith(f".{kind}") or (kind.endswith("-") and name.startswith(kind)):
                    _unlink_if_present(os.path.join(self._directory, name))

    def fetch_claim(self, namespace: str, name: str, uid: str) -> object:
        """The claim object.

        Raises:
            InvalidClaim: it cannot be had; the message says why.
        """
        number, who = secrets.token_hex(8), f"claim {namespace}/{name}"
        ask, answered = (
            os.path.join(self._directory, f"{one}-{number}.json") for one in _ASK_ANSWER_PREFIXES
        )
        end = time.monotonic() + self._patience
        text = None
        try:
            write_file_atomically(
                ask, json.dumps({"namespace": namespace, "name": name, "uid": uid})
            )
            while text is None:
                try:
                    text = read_small_file_or_raise(answered, MAX_CLAIM_BYTES)
                except FileNotFoundError:
                    if time.monotonic() > end:
                        raise InvalidClaim(
                            f"{who}: nri-numa publish did not hand it over in "
                            f"{self._patience:g} s, expected it to run with dra.enabled"
                        ) from None
                    self._sleep(_POLL_INTERVAL_S)
            answer = msgspec.json.decode(text, type=dict[str, Any])
        except OSError as error:
            why = f"{error.filename}: {error.strerror or error}"
            raise InvalidClaim(f"{who}: dra.handover: {why}") from None
        except (msgspec.MsgspecError, RecursionError):
            raise InvalidClaim(f"{who}: what was handed over is no document") from None
        finally:
            _unlink_if_present(ask)
            _unlink_if_present(answered)
        if answer.get("problem"):
            raise InvalidClaim(f"{who}: {str(answer['problem'])[:500]}")
        return answer.get("claim")

    def write_registration_marker(self) -> None:
        """The kubelet has taken the driver."""
        self._registered += 1
        text = json.dumps({"process": os.getpid(), "at": time.time(), "times": self._registered})
        with contextlib.suppress(OSError):  # it is published again in a while anyway
            write_file_atomically(os.path.join(self._directory, REGISTRATION_MARKER_FILE), text)


class ClaimFileResponder:
    """The publisher's side."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def pending_requests(self) -> list[tuple[str, dict[str, Any]]]:
        """Questions that have no answer yet: id, and what is asked."""
        there = set(list_file_names(self._directory))
        found = []
        for name in sorted(there):
            match = _REQUEST_FILE_ID_PATTERN.fullmatch(name)
            if match is None or f"answer-{match[1]}.json" in there:
                continue
            try:
                text = read_small_file_or_raise(os.path.join(self._directory, name), 4096)
                found.append((match[1], msgspec.json.decode(text, type=dict[str, Any])))
            except (OSError, msgspec.MsgspecError, RecursionError):
                continue  # taken back in this moment
        return found

    def write_answer_if_still_asked(self, id: str, answer: dict[str, Any]) -> None:
        """Answer a question, if it is still asked.

        Raises:
            OSError: it cannot be written.
        """
        asked, answered = (
            os.path.join(self._directory, f"{one}-{id}.json") for one in _ASK_ANSWER_PREFIXES
        )
        if os.path.exists(asked):
            write_file_atomically(answered, json.dumps(answer))
            if not os.path.exists(asked):  # the agent removed both already
                _unlink_if_present(answered)

    def read_registration_marker(self) -> str:
        """A text that is another one when the kubelet has taken the driver again."""
        try:
            return read_small_file_or_raise(
                os.path.join(self._directory, REGISTRATION_MARKER_FILE), 4096
            )
        except OSError:
            return ""


def list_file_names(directory: str) -> list[str]:
    """What is in a directory; nothing where it is not there."""
    try:
        return os.listdir(directory)
    except OSError:
        return []


def write_file_atomically(path: str, text: str, *, mode: int = 0o644) -> None:
    """Write a file whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    # Names that begin with a dot are not read: neither by us nor as CDI files.
    head, tail = os.path.split(path)
    beside = os.path.join(head, f".{tail}.new")
    _unlink_if_present(beside)  # of a process that was killed
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(beside, flags, mode)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        _unlink_if_present(beside)
        raise


def read_small_file_or_raise(path: str, longest: int) -> str:
    """The text of a small regular file that another process may have put there.

    Raises:
        FileNotFoundError: there is none.
        OSError: it is something else than such a file.
    """
    # Neither a link that leads elsewhere nor a pipe without a writer may hold or mislead us.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    descriptor = os.open(path, flags)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", path)
        data = file.read(longest + 1)
    if len(data) > longest:
        raise OSError(errno.EFBIG, f"is larger than {longest} bytes", path)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise OSError(errno.EINVAL, "is no UTF-8", path) from None


def _unlink_if_present(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
