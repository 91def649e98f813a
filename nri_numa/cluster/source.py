"""The agent, over its unix socket: documents of /v1, and the news that something changed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final, TypeVar

import httpx2
import msgspec

from nri_numa.http.responses import Assignments, Notices, NUMAInfo, Slots, TopologyDocument, Zones

HEARTBEAT: Final = 60.0
"""Seconds without a word on the stream after which the agent is given up; it says something every
fifteen."""
MOST: Final = 64 << 20
"""Bytes of one answer; the list of 10,000 containers has six million."""

_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError)
"""What msgspec raises for other documents than expected, and for bytes that are no text."""

T = TypeVar("T")


class AgentGone(Exception):
    """The agent does not answer; the message says why, and what was expected."""


class Changed(msgspec.Struct, frozen=True):
    """The data of an event of /v1/events.

    Attributes:
        serial: of the state.
        notices: number of the last notice.
    """

    serial: int
    notices: int


class AgentSource:
    """Reads one agent.

    Args:
        socket: path of its unix socket.
    """

    def __init__(self, socket: str) -> None:
        self._socket = socket
        transport = httpx2.AsyncHTTPTransport(uds=socket, trust_env=False)
        self._client = httpx2.AsyncClient(
            transport=transport,
            base_url="http://localhost",
            timeout=httpx2.Timeout(10.0, read=HEARTBEAT),
        )

    async def close(self) -> None:
        """End the connections."""
        await self._client.aclose()

    async def changes(self) -> AsyncIterator[Changed]:
        """Where the agent is, and then each change, until it goes away.

        Raises:
            AgentGone: it does.
        """
        try:
            async with self._client.stream("GET", "/v1/events") as response:
                if response.status_code != 200:
                    raise AgentGone(self._not_ours(response.status_code))
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        yield msgspec.json.decode(line[6:], type=Changed)
        except (httpx2.HTTPError, *_UNREADABLE, OSError) as error:
            raise AgentGone(self._why(error)) from error
        raise AgentGone(f"the agent at {self._socket} ended the stream")

    async def notices(self, after: int) -> Notices:
        """What happened to containers after a number of the sequence."""
        return await self._get(f"/v1/notices?after={after}", Notices)

    async def assignments(self) -> Assignments:
        """Every container and what it has."""
        return await self._get("/v1/assignments", Assignments)

    async def slots(self) -> Slots:
        """Exclusive CPUs that the scheduler may count."""
        return await self._get("/v1/slots", Slots)

    async def zones(self) -> Zones:
        """Every NUMA node as who schedules counts it."""
        return await self._get("/v1/zones", Zones)

    async def numa_info(self) -> NUMAInfo:
        """The machine in short."""
        return await self._get("/v2/system/numa/info", NUMAInfo)

    async def topology(self) -> TopologyDocument:
        """The machine."""
        return await self._get("/v1/topology", dict[str, Any])

    async def _get(self, path: str, kind: type[T]) -> T:
        try:
            response = await self._client.get(path)
            if response.status_code != 200:
                raise AgentGone(self._not_ours(response.status_code))
            if len(response.content) > MOST:
                raise AgentGone(f"{self._socket}: answers with more than {MOST} bytes")
            return msgspec.json.decode(response.content, type=kind)
        except (httpx2.HTTPError, *_UNREADABLE, OSError) as error:
            raise AgentGone(self._why(error)) from error

    def _not_ours(self, status: int) -> str:
        return f"{self._socket}: answers with status {status}, expected 200; is it an old agent?"

    def _why(self, error: Exception) -> str:
        if isinstance(error, _UNREADABLE):
            return f"{self._socket}: answers with something else than expected: {error}"
        return f"no answer at {self._socket}: {str(error) or type(error).__name__}"
