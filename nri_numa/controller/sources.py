"""Capacity sources besides a PUT: a file that is polled, and queries of Prometheus."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import aiohttp
import msgspec

from nri_numa import safe_yaml
from nri_numa.config.sections import PrometheusCapacityQuery
from nri_numa.controller.capacity import (
    CapacityReport,
    parse_capacity_file,
    parse_query_answer,
    truncate_problems,
)
from nri_numa.model.offline_capacity import BadCapacity
from nri_numa.observe.logs import get_logger

log = get_logger("controller")

FILE_POLL_INTERVAL_S: Final = 2.0
"""Seconds between two reads of a file."""
MAX_SOURCE_BYTES: Final = 16 << 20
"""Bytes of a file or an answer; 5,000 nodes with four NUMA nodes each take two million."""
QUERY_TIMEOUT_S: Final = 10.0
QUERY_INTERVAL_S: Final = 30.0
"""Seconds between two queries."""

CapacityReportSink = Callable[[str, Sequence[CapacityReport]], list[str]]


class ExternalCapacitySource:
    """Reads capacity reports periodically, and logs each problem once.

    Args:
        location: path or URL that is read.
        sink: receives a source's reports about all Nodes, and returns problems.
        set_readable: receives True if the source could be read.
    """

    name = ""
    interval = FILE_POLL_INTERVAL_S

    def __init__(
        self, location: str, sink: CapacityReportSink, set_readable: Callable[[bool], object]
    ) -> None:
        self.location, self._take, self._up = location, sink, set_readable
        self._said: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            await self.poll_once()
            await asyncio.sleep(self.interval)

    async def poll_once(self) -> None:
        """Read once."""
        try:
            measurements, problems = await self._read_capacity_reports()
        except BadCapacity as error:
            self._report_problems([str(error)], readable=False)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            text = getattr(error, "strerror", None) or str(error)[:300] or type(error).__name__
            self._report_problems([f"cannot be read: {text}"], readable=False)
        else:
            all_problems = [*problems, *truncate_problems(self._take(self.name, measurements))]
            self._report_problems(all_problems, readable=True)

    async def _read_capacity_reports(self) -> tuple[list[CapacityReport], list[str]]:
        """Read the valid reports and the problems."""
        raise NotImplementedError

    def _report_problems(self, problems: Sequence[str], *, readable: bool) -> None:
        self._up(readable)
        for problem in problems:
            if problem not in self._said:
                text = f"{self.location}: {problem}"
                log.warning("capacity source faulty", source=self.name, problem=text)
        if self._said and not problems:
            log.info("capacity source recovered", source=self.name)
        self._said = frozenset(problems)


class CapacityFileSource(ExternalCapacitySource):
    """A YAML or JSON file with many Nodes.

    Its values count while it can be read; a missing file reports nothing.
    """

    name = "file"

    def __init__(
        self, path: str, sink: CapacityReportSink, set_readable: Callable[[bool], object]
    ) -> None:
        super().__init__(path, sink, set_readable)
        self._seen: tuple[int, ...] = ()
        self._last: tuple[list[CapacityReport], list[str]] = [], []

    async def _read_capacity_reports(self) -> tuple[list[CapacityReport], list[str]]:
        return await asyncio.to_thread(self._reparse_reports_if_changed)

    def _reparse_reports_if_changed(self) -> tuple[list[CapacityReport], list[str]]:
        old_identity, self._seen = self._seen, ()
        with open(self.location, "rb") as file:
            status = os.fstat(file.fileno())
            identity = (status.st_mtime_ns, status.st_size, status.st_ino)
            if identity != old_identity:
                data = file.read(MAX_SOURCE_BYTES + 1)
                if len(data) > MAX_SOURCE_BYTES:
                    raise BadCapacity(f"is larger than {MAX_SOURCE_BYTES} bytes")
                try:
                    self._last = parse_capacity_file(safe_yaml.parse_yaml12(data.decode()))
                except (safe_yaml.YAMLProblem, UnicodeDecodeError) as error:
                    raise BadCapacity(str(error)[:300]) from None
        self._seen = identity
        return self._last


class PrometheusSource(ExternalCapacitySource):
    """An instant query, repeated periodically."""

    name = "prometheus"
    interval = QUERY_INTERVAL_S

    def __init__(
        self,
        config: PrometheusCapacityQuery,
        sink: CapacityReportSink,
        set_readable: Callable[[bool], object],
    ) -> None:
        super().__init__(config.url, sink, set_readable)
        self._config = config

    async def _read_capacity_reports(self) -> tuple[list[CapacityReport], list[str]]:
        config = self._config
        headers = {}
        if config.token_file:
            token = await asyncio.to_thread(Path(config.token_file).read_text, "ascii")
            headers["Authorization"] = f"Bearer {token.strip()}"
        verify: ssl.SSLContext | bool = True
        if config.ca_file:
            verify = await asyncio.to_thread(ssl.create_default_context, cafile=config.ca_file)
        url = f"{config.url.rstrip('/')}/api/v1/query"
        limits = aiohttp.ClientTimeout(
            total=None, sock_connect=QUERY_TIMEOUT_S, sock_read=QUERY_TIMEOUT_S
        )
        async with (
            aiohttp.ClientSession(timeout=limits) as client,
            client.get(
                url,
                params={"query": config.query},
                headers=headers,
                ssl=verify,
                allow_redirects=False,
            ) as response,
        ):
            data = bytearray()
            async for chunk in response.content.iter_any():
                data += chunk
                if len(data) > MAX_SOURCE_BYTES:
                    raise BadCapacity(f"the answer is larger than {MAX_SOURCE_BYTES} bytes")
            # An error of a query has the same form, with another status.
            if response.status not in (200, 400, 422, 503):
                raise BadCapacity(f"answers with status {response.status}")
        try:
            document = await asyncio.to_thread(msgspec.json.decode, bytes(data))
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise BadCapacity(f"the answer is no JSON: {str(error)[:100]}") from None
        return parse_query_answer(
            document, node_label=config.node_label, numa_node_label=config.numa_node_label
        )
