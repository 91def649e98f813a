"""The file in which the publisher hands the Node's word to the agent."""

from __future__ import annotations

import contextlib
import os


class HandoverFile:
    """Writes a file when its text is another one, whole or not at all.

    Args:
        path: of the file; its directory must be ours to write.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._written: str | None = None

    def write(self, text: str) -> bool:
        """Put `text` there; whether it was another one before.

        Raises:
            OSError: it cannot be written; it is tried again next time.
        """
        if text == self._written and os.path.exists(self._path):
            return False
        beside = f"{self._path}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)  # of a process that was killed
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(beside, flags, 0o644)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(beside, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise
        self._written = text
        return True
