"""How a pod is evicted, what is said of it, and how often one workload is moved. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from nri_numa.cluster.requests import Request, Resource, Verb
from nri_numa.cluster.wanted import LONGEST_NAME, LONGEST_NOTE, micro_time
from nri_numa.text import harmless

_REMEMBERED: Final = 65536
"""Workloads; far more than are moved in the time that is looked back on."""


def movable(document: Mapping[str, Any]) -> bool:
    """Whether a pod's owner makes another one, which may go elsewhere.

    Static pods and those of a DaemonSet come back to the same node; a pod without a controller does
    not come back at all. Those of kube-system are not ours to move, and a policy refuses it.
    """
    metadata = _mapping(document.get("metadata"))
    if metadata.get("deletionTimestamp") or metadata.get("namespace") == "kube-system":
        return False
    if _mapping(document.get("status")).get("phase") in ("Succeeded", "Failed"):
        return False
    if "kubernetes.io/config.mirror" in _mapping(metadata.get("annotations")):
        return False
    made_by = _made_by(metadata)
    return bool(made_by) and made_by.get("kind") not in ("DaemonSet", "Node")


def workload_of(document: Mapping[str, Any]) -> str:
    """The uid of the controller that makes a pod again; empty for none."""
    return str(_made_by(_mapping(document.get("metadata"))).get("uid", ""))


def _made_by(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """The reference to the controller; empty where there is none. Files may say anything."""
    listed = metadata.get("ownerReferences")
    references = [_mapping(one) for one in listed] if isinstance(listed, list) else []
    return next((one for one in references if one.get("controller")), {})


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mover:
    """Makes the requests of one output.

    Attributes:
        output: its name.
        prefix: of annotations; names the reporting controller.
        reason: of its Events.
        end: of the names of its Events.
        dry_run: the API server says what it would do, and does nothing.
    """

    output: str
    prefix: str
    reason: str
    end: str
    dry_run: bool = False

    def eviction(self, namespace: str, name: str, uid: str, version: str = "") -> Request:
        """An eviction of this very pod.

        Args:
            namespace: of the pod.
            name: of the pod.
            uid: of the pod.
            version: the resourceVersion that it must have; empty for any.
        """
        conditions = {"uid": uid, **({"resourceVersion": version} if version else {})}
        options: dict[str, Any] = {"preconditions": conditions}
        if self.dry_run:
            options["dryRun"] = ["All"]
        return Request(
            output=self.output,
            verb=Verb.CREATE,
            resource=Resource.EVICTIONS,
            namespace=namespace,
            name=name,
            body={
                "apiVersion": "policy/v1",
                "kind": "Eviction",
                "metadata": {"namespace": namespace, "name": name},
                "deleteOptions": options,
            },
            key=uid,
        )

    def event(self, namespace: str, name: str, uid: str, why: str, wall: float) -> Request:
        """An Event about a pod that was told to go.

        Args:
            namespace: of the pod.
            name: of the pod.
            uid: of the pod.
            why: it had to.
            wall: Unix time in seconds.
        """
        would = "would be evicted (dry run)" if self.dry_run else "evicted"
        note = harmless(f"{would}: {why}").encode()[:LONGEST_NOTE].decode(errors="ignore")
        end = f".{uid[:8]}.{self.end}"
        named = name[: LONGEST_NAME - len(end)].rstrip("-.") + end
        body = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": named, "namespace": namespace},
            "eventTime": micro_time(wall),
            "reportingController": f"{self.prefix}/nri-numa-controller",
            "reportingInstance": "nri-numa-controller",
            "action": "Evicting",
            "reason": self.reason,
            "type": "Normal",
            "note": note,
            "regarding": {
                "apiVersion": "v1",
                "kind": "Pod",
                "namespace": namespace,
                "name": name,
                "uid": uid,
            },
        }
        return Request(
            output=self.output,
            verb=Verb.CREATE,
            resource=Resource.EVENTS,
            namespace=namespace,
            name=named,
            body=body,
        )


class Ledger:
    """Which workload was moved when: the same one goes only so often, so that nothing circles.

    Args:
        most: moves of one workload.
        per: seconds in which they count.
    """

    def __init__(self, most: int, per: float = 3600.0) -> None:
        self._most, self._per = most, per
        self._moves: dict[str, deque[float]] = {}

    def free_at(self, workload: str, now: float) -> float:
        """When it may be moved again; a time that has come when it may be now."""
        moves = self._moves.get(workload)
        if moves is None:
            return now
        while moves and moves[0] + self._per <= now:
            moves.popleft()
        if not moves:
            del self._moves[workload]
        return now if len(moves) < self._most else moves[0] + self._per

    def moved(self, workload: str, now: float) -> None:
        """One of its pods was told to go."""
        if len(self._moves) >= _REMEMBERED:
            for one in list(self._moves):
                self.free_at(one, now)
        self._moves.setdefault(workload, deque(maxlen=self._most)).append(now)
