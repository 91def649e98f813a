"""Files by which the agent, which has no credentials, requests claims from the publisher.

In a directory that both may write, the agent writes ``ask-ID.json`` (the claim's name) and waits
for ``answer-ID.json`` (the claim of the API server, or a problem). Every request has its own id, so
no old answer is mistaken for a new one; the agent removes both files. Each side reads the other's
files as hostile input, and the agent validates the claim.

``registered.json`` changes whenever the kubelet registers the driver: a kubelet deletes the
driver's ResourceSlices when it starts.
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
"""Seconds between two polls for an answer; the publisher polls for requests as often."""


class ClaimFileRequester:
    """The agent's side; an answer may take ``patience`` seconds, the kubelet waits 45."""

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
        """Remove files of a killed process."""
        # Requests first: the publisher removes an answer whose request is gone.
        for kind in ("ask-", "answer-", "registered.json."):
            for name in list_file_names(self._directory):
                if name.startswith(f".{kind}") or (kind.endswith("-") and name.startswith(kind)):
                    _unlink_if_present(os.path.join(self._directory, name))

    def fetch_claim(self, namespace: str, name: str, uid: str) -> object:
        """Request the claim object from the publisher; `InvalidClaim` says why there is none."""
        number, subject = secrets.token_hex(8), f"claim {namespace}/{name}"
        request_path, answer_path = (
            os.path.join(self._directory, f"{kind}-{number}.json") for kind in _ASK_ANSWER_PREFIXES
        )
        deadline = time.monotonic() + self._patience
        text = None
        try:
            write_file_atomically(
                request_path, json.dumps({"namespace": namespace, "name": name, "uid": uid})
            )
            while text is None:
                try:
                    text = read_small_file_or_raise(answer_path, MAX_CLAIM_BYTES)
                except FileNotFoundError:
                    if time.monotonic() > deadline:
                        raise InvalidClaim(
                            f"{subject}: nri-numa publish did not hand it over in "
                            f"{self._patience:g} s, expected it to run with dra.enabled"
                        ) from None
                    self._sleep(_POLL_INTERVAL_S)
            answer = msgspec.json.decode(text, type=dict[str, Any])
        except OSError as error:
            problem = f"{error.filename}: {error.strerror or error}"
            raise InvalidClaim(f"{subject}: dra.handoverDir: {problem}") from None
        except (msgspec.MsgspecError, RecursionError):
            raise InvalidClaim(f"{subject}: the handed-over document is not valid") from None
        finally:
            _unlink_if_present(request_path)
            _unlink_if_present(answer_path)
        if answer.get("problem"):
            raise InvalidClaim(f"{subject}: {str(answer['problem'])[:500]}")
        return answer.get("claim")

    def write_registration_marker(self) -> None:
        """Record that the kubelet has registered the driver."""
        self._registered += 1
        text = json.dumps({"process": os.getpid(), "at": time.time(), "times": self._registered})
        with contextlib.suppress(OSError):  # slices are published again at the next interval
            write_file_atomically(os.path.join(self._directory, REGISTRATION_MARKER_FILE), text)


class ClaimFileResponder:
    """The publisher's side."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def pending_requests(self) -> list[tuple[str, dict[str, Any]]]:
        """List id and document of requests without an answer."""
        names = set(list_file_names(self._directory))
        requests = []
        for name in sorted(names):
            match = _REQUEST_FILE_ID_PATTERN.fullmatch(name)
            if match is None or f"answer-{match[1]}.json" in names:
                continue
            try:
                text = read_small_file_or_raise(os.path.join(self._directory, name), 4096)
                requests.append((match[1], msgspec.json.decode(text, type=dict[str, Any])))
            except (OSError, msgspec.MsgspecError, RecursionError):
                continue  # removed meanwhile, or not readable
        return requests

    def write_answer_if_still_asked(self, id: str, answer: dict[str, Any]) -> None:
        """Answer a request if its file still exists; `OSError` if that cannot be written."""
        request_path, answer_path = (
            os.path.join(self._directory, f"{kind}-{id}.json") for kind in _ASK_ANSWER_PREFIXES
        )
        if os.path.exists(request_path):
            write_file_atomically(answer_path, json.dumps(answer))
            if not os.path.exists(request_path):  # the agent removed both already
                _unlink_if_present(answer_path)

    def read_registration_marker(self) -> str:
        """Read a text that changes each time the kubelet registers the driver."""
        try:
            return read_small_file_or_raise(
                os.path.join(self._directory, REGISTRATION_MARKER_FILE), 4096
            )
        except OSError:
            return ""


def list_file_names(directory: str) -> list[str]:
    """List the files of a directory; empty if it cannot be read."""
    try:
        return os.listdir(directory)
    except OSError:
        return []


def write_file_atomically(path: str, text: str, *, mode: int = 0o644) -> None:
    """Write a file whole or not at all; `OSError` if that fails."""
    # Names with a leading dot are read neither as requests nor as CDI files.
    head, tail = os.path.split(path)
    temporary_path = os.path.join(head, f".{tail}.new")
    _unlink_if_present(temporary_path)  # of a process that was killed
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary_path, flags, mode)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary_path, path)
    except BaseException:
        _unlink_if_present(temporary_path)
        raise


def read_small_file_or_raise(path: str, max_bytes: int) -> str:
    """Read a small regular file of another process; `OSError` if there is none."""
    # Do not follow a link, and do not block on a pipe without a writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    descriptor = os.open(path, flags)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", path)
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"is larger than {max_bytes} bytes", path)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise OSError(errno.EINVAL, "is not UTF-8", path) from None


def _unlink_if_present(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
