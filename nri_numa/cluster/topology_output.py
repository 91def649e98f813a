"""The NodeResourceTopology of one Node: what is still to be done about it. Pure.

One object with atomic lists has one owner. Whoever else owns its zones (NFD's topology updater, the
resource topology exporter, koordlet, somebody with an editor) is named once and not fought.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from nri_numa.cluster import node_topology
from nri_numa.cluster.node_topology import RENEWED, VALID
from nri_numa.cluster.outbox import Shelf
from nri_numa.cluster.outputs import FORBIDDEN_PAUSE
from nri_numa.cluster.requests import Form, Outcome, Request, Resource, Result, Verb
from nri_numa.cluster.wanted import micro_time
from nri_numa.http.responses import Zones
from nri_numa.text import harmless

MANAGER: Final = "nri-numa-publish"
"""Owns our fields."""
SLOWLY: Final = 300.0
"""Seconds until the next attempt where somebody must do something first."""
TOUCH: Final = 7.0
"""Seconds after which the object is changed again when something was given back. The write wakes
pods that the plugin refused, but it looks at the object only once in its cacheResyncPeriodSeconds
(5 is its documents' least); what was woken before that is refused from old numbers, and nothing
would wake it again."""
PRUNE: Final = "failed to prune fields"
"""In the API server's words when an entry of managedFields is of a version that lacks our fields.
Applying never works again until somebody takes these entries away."""
_OURS: Final = ("f:zones", "f:attributes")


class TopologyOutput:
    """One NodeResourceTopology.

    Args:
        node: name of the Node, and of the object.
        prefix: of our own attributes and the annotation.
        force: take the fields from whoever else owns them.
        validity: seconds after which readers may not believe it where nobody renews it; 0 for none.

    Attributes:
        problem: why the object is not written, and what to do, as a sentence; else empty.
    """

    def __init__(
        self, node: str, prefix: str, *, force: bool = False, validity: float = 0.0
    ) -> None:
        self._validity, self._renewed = validity, ""
        self.name = "topology"
        self.dropped = 0
        self.hold_until = 0.0
        self.problem = ""
        self._node, self._prefix, self._force = node, prefix, force
        self._key = f"{prefix}/{node_topology.FREED}"
        self._wanted: node_topology.Object | None = None
        self._steady: Zones | None = None
        self._sent: node_topology.Object | None = None
        self._applied: node_topology.Object | None = None
        self._owner_uid = self._object_uid = ""
        self._looked = self._reset = self._cured = False
        self._freed, self._touch_at = 0, float("inf")
        self._failures: Shelf[str] = Shelf(1)

    def renew(self, wall: float) -> None:
        """It holds since this Unix time in seconds; written where it has a validity."""
        self._renewed = micro_time(wall)

    def want(self, found: Zones | None) -> None:
        """This is what the agent says; None when it has said nothing for a while.

        Free memory goes up and down by itself: it is taken over when something else changed, and
        at every look.
        """
        if found is None:
            if self._wanted is not None:
                self._wanted, self._steady = node_topology.silent(self._prefix, self._wanted), None
            return
        steady = node_topology.steady(found)
        if steady != self._steady:
            self._steady = steady
            self._wanted = node_topology.contents(self._prefix, found)
            self._failures.want("object", self)

    def _body(self) -> node_topology.Object:
        assert self._wanted is not None  # noqa: S101  # asked by `_pending` only
        annotations = {self._key: str(self._freed)}
        if self._validity:
            annotations[f"{self._prefix}/{RENEWED}"] = self._renewed
            annotations[f"{self._prefix}/{VALID}"] = f"{self._validity:.0f}"
        return node_topology.body(self._node, self._owner_uid, annotations, self._wanted)

    def due(self, now: float) -> Request | None:
        """The Node's UID first, then who owns the object, then the object."""
        if self.next_due() > now:
            return None
        if not self._owner_uid:
            return Request(
                output=self.name, verb=Verb.GET, resource=Resource.NODES, name=self._node
            )
        if not self._looked:
            return self._request(Verb.GET)
        if self._reset:
            clean = [{"op": "replace", "path": "/metadata/managedFields", "value": [{}]}]
            return self._request(Verb.PATCH, form=Form.JSON, patch=clean)
        if self._touch_at <= now:
            self._freed, self._touch_at = self._freed + 1, float("inf")
        return self._request(Verb.PATCH, form=Form.APPLY, body=self._body(), force=self._force)

    def _request(self, verb: Verb, **more: Any) -> Request:
        return Request(
            output=self.name, verb=verb, resource=Resource.TOPOLOGIES, name=self._node, **more
        )

    def next_due(self) -> float:
        """When the next request may be made."""
        if self._pending():
            return max(self.hold_until, self._failures.next_due())
        return max(self.hold_until, self._touch_at)

    def _pending(self) -> bool:
        if self._wanted is None:
            return False
        return not (self._owner_uid and self._looked) or self._body() != self._sent

    def done(self, request: Request, outcome: Outcome, now: float, jitter: float) -> None:
        """Remember what is there now."""
        result = outcome.result
        if result is Result.DONE:
            self._did(request, outcome.documents[0]["metadata"], now, jitter)
        elif result is Result.MISSING and request.verb is Verb.GET and self._owner_uid:
            self._looked, self._sent, self._object_uid = True, None, ""
        elif result is Result.FORBIDDEN:
            self.hold_until = now + FORBIDDEN_PAUSE
        elif result is Result.UNKNOWN:
            self._later(
                f"{outcome.text}; apply config/kubernetes/publish-topology/crd.yaml", now, jitter
            )
        elif result is Result.CONFLICT:
            self._contested(re.findall(r'with "([^"]*)"', outcome.text), now, jitter)
        elif result is Result.FAILED and PRUNE in outcome.text and not self._cured:
            self._reset = self._cured = True
        elif result is Result.INVALID:
            self._later(f"{outcome.text}; is its definition another one than ours?", now, jitter)
        else:
            # The Node is not registered yet, or the object went in this moment.
            self._looked = self._reset = False
            self._failures.later("object", now, jitter)

    def _did(
        self, request: Request, metadata: Mapping[str, Any], now: float, jitter: float
    ) -> None:
        if request.resource is Resource.NODES:
            self._owner_uid = metadata.get("uid") or "-"
        elif request.verb is Verb.GET:
            self._looked, self._sent, self._object_uid = True, None, metadata.get("uid", "")
            self._freed = max(
                self._freed, _number((metadata.get("annotations") or {}).get(self._key))
            )
            others = owners(metadata.get("managedFields") or ())
            if others and not self._force:
                self._contested(others, now, jitter)
        elif request.form is Form.JSON:
            self._reset = False
        else:
            self._did_apply(request.body, metadata.get("uid", ""), now)

    def _did_apply(self, body: node_topology.Object, uid: str, now: float) -> None:
        self.problem = ""
        self._failures.drop("object")
        self._failures.want("object", self)
        if node_topology.rose(self._applied, body):
            self._touch_at = now + TOUCH
        self._sent = self._applied = body
        if self._object_uid and uid != self._object_uid:
            # Somebody took it away: perhaps the garbage collector, because the Node is another one.
            self._owner_uid = ""
        self._object_uid = uid

    def _contested(self, whose: Iterable[str], now: float, jitter: float) -> None:
        names = ", ".join(sorted(set(whose))) or "somebody"
        self._later(
            f"its zones belong to {harmless(names)[:200]}; stop that, or leave "
            "publish.nodeResourceTopology off, or set publish.nodeResourceTopologyForce",
            now,
            jitter,
        )

    def _later(self, problem: str, now: float, jitter: float) -> None:
        self.problem = problem
        self._looked = False
        self.hold_until = now + SLOWLY * (0.8 + 0.4 * jitter)

    def waiting(self) -> int:
        """1 while the object is not known to be as it should."""
        return int(self._pending())

    def resync(self) -> None:
        """Look at the Node and at the object again, and apply it once more."""
        self._owner_uid, self._steady = "", None
        self._looked = self._cured = False


def owners(managed: Iterable[Mapping[str, Any]]) -> list[str]:
    """Who else owns zones or attributes, by name, each once.

    Args:
        managed: ``metadata.managedFields``.
    """
    return sorted(
        {
            str(one.get("manager", ""))
            for one in managed
            if one.get("manager") != MANAGER
            and any(field in (one.get("fieldsV1") or {}) for field in _OURS)
        }
    )


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() and len(text) < 16 else 0
