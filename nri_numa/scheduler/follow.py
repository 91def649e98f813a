"""Lists a kind and follows its changes: in pages, resumed, and listed again after 410 Gone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import httpx2
from lightkube.core.exceptions import ApiError, ConfigError
from lightkube.core.selector import build_selector

from nri_numa.kube_client import unreachable
from nri_numa.observe.logs import get_logger
from nri_numa.scheduler.lean import LeanConnection

log = get_logger("scheduler")

PAGE: Final = 500
"""Objects in one answer to a list; 5,000 nodes are ten of them, of about a megabyte each."""
_WATCH: Final = 300
"""Seconds after which the API server ends a watch, which is then resumed."""
_LONGEST: Final = 30.0
_GONE, _MISSING = 410, 404


class Follower:
    """Keeps somebody informed of all objects of one kind.

    Args:
        connection: to the API server.
        kind: a kind of `nri_numa.scheduler.kinds`.
        put: told of an object that is there.
        remove: told of an object that is gone, as it was last.
        listed: told the keys of all objects after a list; what else is known is gone.
        fields: selects among them.
        jitter: from 0 to 1, another one each time.
        directory: of the credentials, for messages.
    """

    def __init__(
        self,
        connection: LeanConnection,
        kind: Any,
        *,
        put: Callable[[dict[str, Any]], object],
        remove: Callable[[dict[str, Any]], object],
        listed: Callable[[frozenset[str]], object],
        key: Callable[[dict[str, Any]], str],
        fields: dict[str, Any] | None = None,
        everywhere: bool = False,
        directory: str = "",
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._connection = connection
        self._kind, self._fields = kind, fields
        self._put, self._remove, self._listed, self._key = put, remove, listed, key
        self._place = {"namespace": "*"} if everywhere else {}
        self._directory = Path(directory)
        self._jitter = jitter
        info = kind._api_info
        self._what = info.plural
        base = f"apis/{info.resource.group}" if info.resource.group else "api"
        self._path = f"/{base}/{info.resource.version}/{info.plural}"
        self._asked = {"fieldSelector": build_selector(fields, for_fields=True)} if fields else {}
        self.synced = asyncio.Event()
        self.problem = ""

    async def run(self) -> None:
        """Follow until cancelled."""
        version: str | None = None
        failures = 0
        while True:
            try:
                if version is None:
                    version = await self._list(await self._connection.client())
                self._well()
                asked = {**self._asked, **({"resourceVersion": version} if version else {})}
                async with aclosing(self._connection.events(self._path, asked, _WATCH)) as events:
                    async for event, found in events:
                        failures = 0
                        self._well()
                        version = found["metadata"].get("resourceVersion", version)
                        (self._remove if event == "DELETED" else self._put)(found)
            except (ApiError, httpx2.HTTPStatusError) as error:
                code = _code(error)
                version = None if code in (_GONE, _MISSING) else version
                if code == _GONE:
                    log.info("listing again", kind=self._what)
                    failures = 0
                    continue
                if code == _MISSING:
                    # Nothing of this kind can be there.
                    self._listed(frozenset())
                    self.synced.set()
                self._ill(f"{self._what}: {code}: {str(error)[:300]}")
            except (httpx2.HTTPError, ConfigError, OSError) as error:
                self._ill(unreachable(error, self._directory))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                version = None
                self._ill(f"{self._what}: cannot read the answer: {str(error)[:300]}")
            failures += 1
            await asyncio.sleep(
                min(_LONGEST, 0.25 * 2 ** min(failures, 8)) * (0.5 + self._jitter())
            )

    async def _list(self, client: Any) -> str | None:
        found = client.list(self._kind, **self._place, chunk_size=PAGE, fields=self._fields)
        keys: set[str] = set()
        async for one in found:
            document = dict(one)
            keys.add(self._key(document))
            self._put(document)
            if not len(keys) % 100:
                await asyncio.sleep(0)  # questions are answered meanwhile
        self._listed(frozenset(keys))
        self.synced.set()
        version = found.resourceVersion
        return str(version) if version else None

    def _well(self) -> None:
        if self.problem:
            log.info("the API server answers again", kind=self._what)
        self.problem = ""

    def _ill(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("cannot follow", kind=self._what, problem=problem)
        self.problem = problem


def _code(error: httpx2.HTTPStatusError) -> int:
    status = getattr(error, "status", None)
    if status is not None and status.code:
        return int(status.code)
    response = getattr(error, "response", None)
    return int(response.status_code) if response is not None else 0
