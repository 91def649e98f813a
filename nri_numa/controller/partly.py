"""Pods of which one container runs and another is refused that ran before, found by Events.

As long as a container never ran its pod is in the phase Pending (the kubelet's `getPhase`). One
that ended and is to be started again leaves it in the phase Running, as most pods of a cluster are,
so it is not found by following pods. But the kubelet tells of each container that it cannot create,
with the words of whoever refused it. Who is told of so is looked at as long as that goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from nri_numa.controller.stuck import LOOK, StuckOutput, refusal
from nri_numa.kube_api import KubeAPI, KubeError
from nri_numa.observe.logs import get_logger

log = get_logger("controller")

FIELDS: Final = "involvedObject.kind=Pod,reason=Failed"
"""Which Events are followed; the reason is the kubelet's (pkg/kubelet/events/event.go)."""
KEPT: Final = 60.0
"""Seconds for which a pod is looked at after the last sign; its status comes after the Event."""
MOST: Final = 1000
"""Pods that are looked at, one after the other."""
TURN: Final = 1.0
"""Seconds between two turns."""


@dataclass(slots=True)
class _Suspect:
    look_at: float
    until: float
    uid: str = ""


class Partly:
    """Tells of pods in the phase Running of which a container is refused.

    Attributes:
        problem: why pods cannot be looked at; empty where they can.

    Args:
        connection: to the API server.
        stuck: is told.
        clock: seconds that only grow.
    """

    def __init__(self, connection: KubeAPI, stuck: StuckOutput, clock: Callable[[], float]) -> None:
        self._connection, self._stuck, self._clock = connection, stuck, clock
        self._suspects: dict[tuple[str, str], _Suspect] = {}
        self.problem = ""

    def told(self, event: Mapping[str, Any]) -> None:
        """An Event is there (``v1``, of `FIELDS`); only those of our refusals say something."""
        about = event.get("involvedObject")
        found = about if isinstance(about, Mapping) else {}
        pod = str(found.get("namespace", "")), str(found.get("name", ""))
        if f": pod {pod[0]}/{pod[1]}, container " not in str(event.get("message", "")):
            return
        now = self._clock()
        if (known := self._suspects.get(pod)) is not None:
            known.until = now + KEPT
        elif len(self._suspects) < MOST:
            self._suspects[pod] = _Suspect(look_at=now, until=now + KEPT)

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(TURN)
            await self.turn()

    async def turn(self) -> None:
        """Look at everybody who is due."""
        now = self._clock()
        for pod, one in list(self._suspects.items()):
            if one.look_at > now:
                continue
            try:
                document = await self._read(*pod)
            except KubeError as error:
                if not self.problem:
                    log.warning("cannot look at a pod", problem=str(error)[:300])
                self.problem = str(error)[:300] or type(error).__name__
                return
            self.problem = ""
            self._looked(pod, one, document)

    def _looked(self, pod: tuple[str, str], one: _Suspect, document: Mapping[str, Any]) -> None:
        now = self._clock()
        one.look_at = now + LOOK
        uid = str((document.get("metadata") or {}).get("uid", ""))
        waits = (document.get("status") or {}).get("phase") == "Running" and refusal(document)
        if one.uid and (one.uid != uid or not waits):
            self._stuck.whole(one.uid)
        one.uid = uid if waits else ""
        if waits:
            one.until = now + KEPT
            self._stuck.pod(document, now)
        elif not uid or one.until <= now:
            del self._suspects[pod]

    async def _read(self, namespace: str, name: str) -> Mapping[str, Any]:
        """The pod of that name; empty where there is none. By a list: who moves pods may list."""
        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods"
        chosen = quote(f"metadata.name={name}", safe="")
        found = await self._connection.objects(f"{path}?fieldSelector={chosen}")
        return found[0] if found else {}
