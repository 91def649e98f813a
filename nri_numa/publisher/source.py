"""The agent, over its unix socket: documents of /v1, and the news that something changed."""

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
"""Seconds without a word on the stream after which the agent is given up; it says something every
fifteen."""
MAX_AGENT_ANSWER_BYTES: Final = 64 << 20
"""Bytes of one answer; the list of 10,000 containers has six million."""

PATH_BY_DOCUMENT: Final[dict[type, str]] = {
    Assignments: "/v1/assignments",
    MachineNUMAInfo: "/v2/system/numa/info",
    ExclusiveCPUSlotsDocument: "/v1/slots",
    TopologyDocument: "/v1/topology",
    Zones: "/v1/zones",
}

T = TypeVar("T")


class AgentUnavailable(Exception):
    """The agent does not answer; the message says why, and what was expected."""


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
        """End the connections."""
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def _open_response(self, path: str) -> AsyncIterator[aiohttp.StreamReader]:
        """The body of the answer to a GET.

        Raises:
            AgentUnavailable: there is none, it ends in the middle, or it is not what an agent says.
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
            # What msgspec raises for other documents than expected, and for bytes that are no text.
            text = f"{self._socket}: answers with something else than expected: {error}"
            raise AgentUnavailable(text) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            text = str(error) or type(error).__name__
            raise AgentUnavailable(f"no answer at {self._socket}: {text}") from error

    async def watch_changes(self) -> AsyncIterator[AgentChange]:
        """Where the agent is, and then each change, until it does not answer any more.

        Raises:
            AgentUnavailable: it does not.
        """
        async with self._open_response("/v1/events") as body:
            rest = b""
            while chunk := await body.readany():
                *lines, rest = (rest + chunk).split(b"\n")
                # What came while an earlier one was acted upon is one change: the newest.
                for line in [one for one in lines if one.startswith(b"data: ")][-1:]:
                    yield msgspec.json.decode(line[6:], type=AgentChange)
        raise AgentUnavailable(f"the agent at {self._socket} ended the stream")

    async def read_document(self, kind: type[T], path: str = "") -> T:
        """One document; those that have a path of their own are read there.

        Raises:
            AgentUnavailable: there is none, or it is another one.
        """
        async with self._open_response(path or PATH_BY_DOCUMENT[kind]) as body:
            data = bytearray()
            async for piece in body.iter_any():
                data += piece
                if len(data) > MAX_AGENT_ANSWER_BYTES:
                    raise AgentUnavailable(
                        f"{self._socket}: answers with more than {MAX_AGENT_ANSWER_BYTES} bytes"
                    )
            return msgspec.json.decode(data, type=kind)
