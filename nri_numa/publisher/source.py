"""The agent, over its unix socket: documents of /v1, and its stream of changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import aiohttp
import msgspec

from nri_numa.web.responses import (
    Assignments,
    ExclusiveCPUSlotsDocument,
    MachineNUMAInfo,
    TopologyDocument,
    Zones,
)

AGENT_SILENCE_TIMEOUT_S: Final = 60.0
"""Seconds without data on the stream after which the connection is closed; the agent sends every
15 s."""
MAX_AGENT_ANSWER_BYTES: Final = 64 << 20
"""Bytes of one answer; the list of 10,000 containers has 6 MB."""

PATH_BY_DOCUMENT: Final[dict[type, str]] = {
    Assignments: "/v1/assignments",
    MachineNUMAInfo: "/v2/system/numa/info",
    ExclusiveCPUSlotsDocument: "/v1/slots",
    TopologyDocument: "/v1/topology",
    Zones: "/v1/zones",
}

T = TypeVar("T")


class AgentUnavailable(Exception):
    """The agent does not answer; the message has the reason, and what was expected."""


class AgentChange(msgspec.Struct, frozen=True):
    """The data of an event of /v1/events: serial of the state, and number of the last notice."""

    serial: int
    notices: int


class AgentSource:
    """Reads one agent, by its unix socket."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def _open_response(self, path: str) -> AsyncIterator[aiohttp.StreamReader]:
        """Open the body of the answer to a GET.

        Raises:
            AgentUnavailable: no answer, an incomplete one, or one that is not an agent's.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(
                "http://localhost",
                connector=aiohttp.UnixConnector(self._socket),
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=10.0, sock_read=AGENT_SILENCE_TIMEOUT_S
                ),
            )
        try:
            async with self._session.get(path) as response:
                if response.status != 200:
                    raise AgentUnavailable(
                        f"{self._socket}: answers with status {response.status}, expected 200; "
                        "is it an old agent?"
                    )
                yield response.content
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            # Raised by msgspec for unexpected documents, and for bytes that are no text.
            text = f"{self._socket}: answers with something else than expected: {error}"
            raise AgentUnavailable(text) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            text = str(error) or type(error).__name__
            raise AgentUnavailable(f"no answer at {self._socket}: {text}") from error

    async def watch_changes(self) -> AsyncIterator[AgentChange]:
        """Yield the agent's current serials, then each change, until the stream ends.

        Raises:
            AgentUnavailable: the agent does not answer, or ends the stream.
        """
        async with self._open_response("/v1/events") as body:
            remainder = b""
            while chunk := await body.readany():
                *lines, remainder = (remainder + chunk).split(b"\n")
                # Changes that arrive while one is handled count as one: the newest.
                for line in [entry for entry in lines if entry.startswith(b"data: ")][-1:]:
                    yield msgspec.json.decode(line[6:], type=AgentChange)
        raise AgentUnavailable(f"the agent at {self._socket} ended the stream")

    async def read_document(self, kind: type[T], path: str = "") -> T:
        """Read one document, from the path of its kind unless a path is given.

        Raises:
            AgentUnavailable: no answer, or another document.
        """
        async with self._open_response(path or PATH_BY_DOCUMENT[kind]) as body:
            data = bytearray()
            async for chunk in body.iter_any():
                data += chunk
                if len(data) > MAX_AGENT_ANSWER_BYTES:
                    raise AgentUnavailable(
                        f"{self._socket}: answers with more than {MAX_AGENT_ANSWER_BYTES} bytes"
                    )
            return msgspec.json.decode(data, type=kind)
