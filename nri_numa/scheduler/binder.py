"""The verb bind: judge once more, hold, and write node and annotation in one request.

A second call for the same pod, which kube-scheduler makes when the first took too long, waits for
the first: one pod is never bound twice, and never held twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx2
from lightkube.core.exceptions import ApiError, ConfigError

from nri_numa.engine.request.annotations import PLACED, placed_text
from nri_numa.kube_client import unreachable
from nri_numa.observe.logs import get_logger
from nri_numa.scheduler.fleet import Fleet, Hold
from nri_numa.scheduler.kinds import RawPod
from nri_numa.scheduler.lean import LeanConnection, refused
from nri_numa.scheduler.panel import Panel, reason
from nri_numa.scheduler.pods import Reader
from nri_numa.scheduler.protocol import Binding
from nri_numa.scheduler.verdict import Fits
from nri_numa.scheduler.wish import Wish

log = get_logger("scheduler")

_MISSING: Final = "404:"
_LARGEST: Final = 200_000
"""Bytes of an annotation; 256 KiB are all that a pod may have, and nobody checks it here."""


class Binder:
    """Binds pods.

    Args:
        connection: to the API server.
        directory: of its credentials, for messages.
        fleet: where pods are held.
        panel: judges once more.
        reader: knows the pods that were filtered.
        prefix: of annotations.
        timeout: seconds for one bind; below the httpTimeout of the scheduler.
        limit: seconds that a pod is held at most.
        clock: seconds that only grow.
        look: takes in who runs on a node, where that is not known for sure.
    """

    def __init__(
        self,
        connection: LeanConnection,
        *,
        directory: str,
        fleet: Fleet,
        panel: Panel,
        reader: Reader,
        prefix: str,
        timeout: float,
        limit: float,
        clock: Callable[[], float],
        look: Callable[[str], Awaitable[None]],
    ) -> None:
        self._look_at = look
        self._connection, self._directory = connection, Path(directory)
        self._fleet, self._panel, self._reader = fleet, panel, reader
        self._prefix, self._timeout, self._limit, self._clock = prefix, timeout, limit, clock
        self._running: dict[str, tuple[str, asyncio.Task[str]]] = {}

    async def bind(self, asked: Binding) -> str:
        """Bind a pod; the result is why not, empty when it is bound."""
        known = self._running.get(asked.uid)
        if known is not None:
            node, task = known
            problem = await asyncio.shield(task)
            if node == asked.node or not problem:
                return problem or ("" if node == asked.node else f"is on {node} already")
            return await self.bind(asked)
        task = asyncio.create_task(self._bind(asked), name=f"bind {asked.name}")
        self._running[asked.uid] = asked.node, task
        task.add_done_callback(lambda _: self._running.pop(asked.uid, None))
        return await asyncio.shield(task)

    async def _bind(self, asked: Binding) -> str:
        deadline = asyncio.get_running_loop().time() + self._timeout
        try:
            async with asyncio.timeout_at(deadline):
                await self._connection.renew()
                wish = self._reader.remembered(asked.uid)
                if wish is None:
                    client: Any = await self._connection.client()
                    pod = await client.get(RawPod, asked.name, namespace=asked.namespace)
                    wish = self._reader.wish(dict(pod))
                    if wish.uid != asked.uid:
                        return f"pod {asked.namespace}/{asked.name} is another one by now"
                if not wish.nothing:
                    await self._look_at(asked.node)
        except (TimeoutError, httpx2.HTTPError, ConfigError, OSError, ValueError) as error:
            return _text(error, self._directory)
        annotations: dict[str, str] = {}
        earlier = self._fleet.holds.get(asked.uid)
        if not wish.nothing:
            # From here to the hold nothing waits, so nobody comes between.
            if earlier is not None:
                self._fleet.release(asked.uid)
            problem = self._hold(wish, asked, annotations)
            if problem:
                if earlier is not None:
                    self._fleet.hold(earlier)
                return problem
        problem, sure = await self._post(asked, annotations, deadline)
        if problem and sure:
            self._fleet.release(asked.uid)
            if earlier is not None and not problem.startswith(_MISSING):
                self._fleet.hold(earlier)
        if problem and not sure:
            problem = await self._look(asked, problem, earlier)
        if not problem:
            placed = annotations.get(f"{self._prefix}/{PLACED}", "")
            pod = f"{asked.namespace}/{asked.name}"
            log.debug("has its node", pod=pod, node=asked.node, placed=placed)
        return problem

    def _hold(self, wish: Wish, asked: Binding, annotations: dict[str, str]) -> str:
        """Hold what the pod needs, and fill in what its binding says; the result is why not."""
        if wish.wrong:
            return wish.wrong
        found = self._panel.verdict(wish, asked.node)
        if not isinstance(found, Fits):
            return reason(found, found.most)
        places = {name: numa_nodes for name, numa_nodes in found.places if numa_nodes}
        text = placed_text(places)
        if places and len(text) <= _LARGEST:
            annotations[f"{self._prefix}/{PLACED}"] = text
        now = self._clock()
        self._fleet.hold(
            Hold(
                wish=wish,
                node=asked.node,
                places=places,
                charge=found.charge,
                since=now,
                until=now + self._limit,
            )
        )
        return ""

    async def _post(
        self, asked: Binding, annotations: dict[str, str], deadline: float
    ) -> tuple[str, bool]:
        """Write the binding; why not, and whether it is sure that it was not written."""
        metadata: dict[str, Any] = {"name": asked.name, "uid": asked.uid}
        if annotations:
            metadata["annotations"] = annotations
        document = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": metadata,
            "target": {"apiVersion": "v1", "kind": "Node", "name": asked.node},
        }
        namespace, name = quote(asked.namespace, safe=""), quote(asked.name, safe="")
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/binding"
        try:
            async with asyncio.timeout_at(deadline):
                code, body = await self._connection.post(path, document)
        except (TimeoutError, httpx2.HTTPError, ConfigError, OSError, ValueError) as error:
            return _text(error, self._directory), False
        if 200 <= code < 300:
            return "", True
        return f"{code}: {str(refused(code, body))[:500]}", 400 <= code < 500 and code != 409

    async def _look(self, asked: Binding, problem: str, earlier: Hold | None) -> str:
        """After a binding of which nobody knows whether it was written: read the pod."""
        try:
            async with asyncio.timeout(self._timeout):
                client: Any = await self._connection.client()
                pod = dict(await client.get(RawPod, asked.name, namespace=asked.namespace))
        except ApiError as error:
            if error.status.code == 404:
                self._fleet.release(asked.uid)
            return problem
        except (TimeoutError, httpx2.HTTPError, ConfigError, OSError, ValueError):
            return problem  # held until the watch or the limit tells
        node = (pod.get("spec") or {}).get("nodeName")
        same = (pod.get("metadata") or {}).get("uid") == asked.uid
        if same and node == asked.node:
            return ""
        self._fleet.release(asked.uid)
        if same and earlier is not None and earlier.node == node:
            self._fleet.hold(earlier)  # it is where it was sent before
        return problem


def _text(error: BaseException, directory: Path) -> str:
    if isinstance(error, TimeoutError):
        return "the API server did not answer in time"
    if isinstance(error, httpx2.HTTPStatusError):
        return str(error)[:500]
    return unreachable(error, directory)
