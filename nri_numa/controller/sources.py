"""Where capacity comes from besides a PUT: a file that is watched, and queries of Prometheus."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import httpx2

from nri_numa import safe_yaml
from nri_numa.config.sections import Prometheus
from nri_numa.controller.offers import Offer, from_file, from_query, shortened
from nri_numa.observe.logs import get_logger
from nri_numa.offline_capacity import BadCapacity

log = get_logger("controller")

LOOK: Final = 2.0
"""Seconds between two looks at a file."""
LARGEST: Final = 16 << 20
"""Bytes of a file or an answer; 5,000 nodes with four NUMA nodes each take two million."""
TIMEOUT: Final = 10.0
INTERVAL: Final = 30.0
"""Seconds between two queries."""

Take = Callable[[str, Sequence[Offer]], list[str]]
"""Takes what a source says of all nodes, and returns problems."""


class Teller:
    """Says problems of a source once, and that it is well again.

    Args:
        source: its name.
        up: told whether it could be read.
    """

    def __init__(self, source: str, up: Callable[[bool], object]) -> None:
        self._source, self._up = source, up
        self._said: frozenset[str] = frozenset()

    def tell(self, problems: Sequence[str], *, readable: bool) -> None:
        """These are the problems now."""
        self._up(readable)
        for problem in problems:
            if problem not in self._said:
                log.warning("capacity not as expected", source=self._source, problem=problem)
        if self._said and not problems:
            log.info("capacity is as expected again", source=self._source)
        self._said = frozenset(problems)


class FileSource:
    """A YAML or JSON file with many nodes.

    What stands there counts as long as it can be read; one that is away is silent.

    Args:
        path: of the file.
        take: takes what it says.
        up: told whether it could be read.
    """

    name = "file"

    def __init__(self, path: str, take: Take, up: Callable[[bool], object]) -> None:
        self._path = Path(path)
        self._take = take
        self._teller = Teller(self.name, up)
        self._seen: tuple[int, ...] = ()
        self._offers: list[Offer] = []
        self._problems: list[str] = []

    async def run(self) -> None:
        """Look at it until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK)

    async def look(self) -> None:
        """Read it when it changed, and say again what stands there."""
        try:
            await asyncio.to_thread(self._read)
        except BadCapacity as error:
            self._teller.tell([f"{self._path}: {error}"], readable=False)
            return
        except OSError as error:
            self._seen = ()
            self._teller.tell([f"{self._path}: {error.strerror or error}"], readable=False)
            return
        problems = [*self._problems, *shortened(self._take(self.name, self._offers))]
        self._teller.tell([f"{self._path}: {one}" for one in problems], readable=True)

    def _read(self) -> None:
        with self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            seen = (status.st_mtime_ns, status.st_size, status.st_ino)
            if seen == self._seen:
                return
            data = file.read(LARGEST + 1)
        self._seen = ()
        if len(data) > LARGEST:
            raise BadCapacity(f"is larger than {LARGEST} bytes")
        try:
            document = safe_yaml.parse(data.decode())
        except (safe_yaml.YAMLProblem, UnicodeDecodeError) as error:
            raise BadCapacity(str(error)[:300]) from None
        self._offers, self._problems = from_file(document)
        self._seen = seen


class PrometheusSource:
    """An instant query, asked again and again.

    Args:
        config: server, query and labels.
        take: takes what it says.
        up: told whether it answered.
    """

    name = "prometheus"

    def __init__(self, config: Prometheus, take: Take, up: Callable[[bool], object]) -> None:
        self._config = config
        self._take = take
        self._teller = Teller(self.name, up)

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            await self.ask()
            await asyncio.sleep(INTERVAL)

    async def ask(self) -> None:
        """Ask once."""
        try:
            offers, problems = await self._query()
        except BadCapacity as error:
            self._teller.tell([str(error)], readable=False)
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
            text = str(error)[:300] or type(error).__name__
            self._teller.tell([f"no answer from {self._config.url}: {text}"], readable=False)
        else:
            problems = [*problems, *shortened(self._take(self.name, offers))]
            self._teller.tell(problems, readable=True)

    async def _query(self) -> tuple[list[Offer], list[str]]:
        config = self._config
        headers = {}
        if config.token_file:
            token = await asyncio.to_thread(Path(config.token_file).read_text, "ascii")
            headers["Authorization"] = f"Bearer {token.strip()}"
        verify: ssl.SSLContext | bool = True
        if config.ca_file:
            verify = await asyncio.to_thread(ssl.create_default_context, cafile=config.ca_file)
        url = f"{config.url.rstrip('/')}/api/v1/query"
        async with (
            httpx2.AsyncClient(verify=verify, timeout=TIMEOUT, trust_env=False) as client,
            client.stream("GET", url, params={"query": config.query}, headers=headers) as response,
        ):
            data = bytearray()
            async for piece in response.aiter_bytes():
                data += piece
                if len(data) > LARGEST:
                    raise BadCapacity(f"the answer is larger than {LARGEST} bytes")
            # An error of a query is told in the same form, with another status.
            if response.status_code not in (200, 400, 422, 503):
                raise BadCapacity(f"{config.url} answers with status {response.status_code}")
            document = await asyncio.to_thread(_json, bytes(data))
        return from_query(
            document,
            node_label=config.node_label,
            numa_node_label=config.numa_node_label,
        )


def _json(data: bytes) -> object:
    import msgspec

    try:
        document: object = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadCapacity(f"the answer is no JSON: {str(error)[:100]}") from None
    return document
