"""All Nodes, followed: a list, then each change, and a new list whenever the changes break off."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import httpx2
from lightkube.core.exceptions import ConfigError
from lightkube.resources.core_v1 import Node

from nri_numa.cluster.kube import APIServer
from nri_numa.cluster.outbox import pause
from nri_numa.observe.logs import get_logger

log = get_logger("controller")

WATCH: Final = 240
"""Seconds after which the server ends a watch, which is begun again where it stood."""
CHUNK: Final = 500
"""Nodes of one answer to a list."""


class Hears(Protocol):
    """Who is told of Nodes."""

    def see(self, node: str, annotations: Mapping[str, str]) -> None:
        """One is there, new or changed."""

    def gone(self, node: str) -> None:
        """One is not there any more."""


class Sees(Hears, Protocol):
    """Who is told of Nodes, and knows them all."""

    def nodes(self) -> frozenset[str]:
        """All that were seen."""


class Following:
    """Follows Nodes for ever.

    Attributes:
        known: whether every Node was seen at least once.

    Args:
        api: is asked.
        sees: are told, the first one knows all of them.
        changed: called after each change.
        node: told each Node whole.
        jitter: from 0 to 1, another one each time.
    """

    def __init__(
        self,
        api: APIServer,
        sees: Sees,
        *more: Hears,
        changed: Callable[[], object],
        jitter: Callable[[], float],
        node: Callable[[Any], object] = lambda found: None,
    ) -> None:
        self._node = node
        self._api, self._sees, self._changed, self._jitter = api, sees, changed, jitter
        self._all: tuple[Hears, ...] = (sees, *more)
        self.known = False

    async def run(self) -> None:
        """Follow until cancelled."""
        failures, told = 0, ""
        while True:
            try:
                version = await self._list()
                failures, told = 0, ""
                await self._watch(version)
            except (httpx2.HTTPError, ConfigError, OSError, TimeoutError) as error:
                problem = f"{type(error).__name__}: {str(error)[:300]}"
                if problem != told:
                    log.warning("nodes cannot be followed for now", problem=problem)
                told = problem
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                # Not what an API server answers.
                log.warning("cannot read what the API server tells of nodes", error=repr(error))
            failures += 1
            await asyncio.sleep(pause(failures, self._jitter()))

    async def _list(self) -> str:
        client = await self._api.client()
        listed = client.list(Node, chunk_size=CHUNK)
        seen: set[str] = set()
        async for node in listed:
            seen.add(self._see(node))
        for name in self._sees.nodes() - seen:
            self._gone(name)
        self.known = True
        self._changed()
        return str(listed.resourceVersion)

    async def _watch(self, version: str) -> None:
        client = await self._api.client()
        events: Any = client.watch(Node, resource_version=version, server_timeout=WATCH)
        async with contextlib.aclosing(events):
            while True:
                # Longer than the server needs to say that nothing happened.
                async with asyncio.timeout(2 * WATCH):
                    kind, node = await anext(events, (None, None))
                if node is None:
                    return
                if kind == "DELETED":
                    self._gone(str(node.metadata.name))
                elif kind in ("ADDED", "MODIFIED"):
                    self._see(node)
                self._changed()

    def _see(self, node: Any) -> str:
        name = str(node.metadata.name)
        for one in self._all:
            one.see(name, node.metadata.annotations or {})
        self._node(node)
        return name

    def _gone(self, name: str) -> None:
        for one in self._all:
            one.gone(name)
