"""The API server, over lightkube: requests out, outcomes back. Every failure is a value here.

Token and certificate authority are files that the kubelet renews: lightkube reads the token again
when it is refused, and a changed ca.crt gives a new client.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final

import httpx2
from lightkube import AsyncClient
from lightkube.core.exceptions import ApiError, ConfigError
from lightkube.generic_resource import create_global_resource
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import Node, NodeStatus, Pod, PodEviction
from lightkube.resources.events_v1 import Event
from lightkube.resources.resource_v1 import ResourceClaim, ResourceSlice
from lightkube.types import PatchType

from nri_numa.cluster import node_topology, numatopology
from nri_numa.cluster.requests import Form, Outcome, Request, Resource, Result, Verb
from nri_numa.kube_client import Connection, unreachable

SKEW: Final = 60.0
"""Seconds that our clock may differ from the API server's before it is said."""
_KINDS: Final[dict[Resource, Any]] = {
    Resource.NODES: Node,
    Resource.NODE_STATUS: NodeStatus,
    Resource.PODS: Pod,
    Resource.EVICTIONS: PodEviction,
    Resource.EVENTS: Event,
    Resource.LEASES: Lease,
    Resource.CLAIMS: ResourceClaim,
    Resource.SLICES: ResourceSlice,
    Resource.TOPOLOGIES: create_global_resource(
        Resource.TOPOLOGIES.group,
        node_topology.API_VERSION.rpartition("/")[2],
        node_topology.KIND,
        Resource.TOPOLOGIES.plural,
    ),
    Resource.NUMATOPOLOGIES: create_global_resource(
        Resource.NUMATOPOLOGIES.group,
        numatopology.API_VERSION.rpartition("/")[2],
        numatopology.KIND,
        Resource.NUMATOPOLOGIES.plural,
    ),
}
_DEFINED: Final = frozenset({Resource.TOPOLOGIES, Resource.NUMATOPOLOGIES})
"""Kinds that a cluster has only where somebody brought their definition."""
_FORMS: Final = {
    Form.MERGE: PatchType.MERGE,
    Form.APPLY: PatchType.APPLY,
    Form.JSON: PatchType.JSON,
}


class APIServer:
    """Asks the API server, one request at a time.

    Args:
        credentials: directory with ``token`` and ``ca.crt``, as a pod has it.
        user_agent: names us in its audit log.
        wall: Unix time in seconds.
        skewed: told how many seconds our clock is ahead, at each answer.
        field_manager: whose fields are what we write.
    """

    def __init__(
        self,
        credentials: str,
        *,
        user_agent: str,
        wall: Callable[[], float] = time.time,
        skewed: Callable[[float], object] = lambda seconds: None,
        field_manager: str = "nri-numa-publish",
    ) -> None:
        self._directory = Path(credentials)
        self._wall = wall
        self._skewed = skewed
        self._connection = Connection(
            credentials, user_agent=user_agent, field_manager=field_manager, date=self._date
        )

    async def ask(self, request: Request) -> Outcome:
        """Do a request; never raises but when it is cancelled."""
        try:
            client = await self._connection.client()
            documents = await self._send(client, request)
        except ApiError as error:
            return judged(request, error.response, error.status.message or "", _causes(error))
        except httpx2.HTTPStatusError as error:
            return judged(request, error.response, error.response.text[:200], frozenset())
        except (httpx2.HTTPError, ConfigError, OSError) as error:
            await self.close()  # the next attempt reads everything again
            return Outcome(result=Result.UNREACHABLE, text=unreachable(error, self._directory))
        except (ValueError, TypeError, KeyError) as error:
            # Not what an API server answers.
            return Outcome(result=Result.FAILED, text=f"cannot read the answer: {error}"[:300])
        return Outcome(result=Result.DONE, documents=documents)

    async def client(self) -> AsyncClient:
        """The client, for what is no single request.

        Raises:
            ConfigError: there are no credentials.
            OSError: they cannot be read.
        """
        return await self._connection.client()

    async def close(self) -> None:
        """End the connections."""
        await self._connection.close()

    async def _send(self, client: Any, request: Request) -> tuple[dict[str, Any], ...]:
        kind = _KINDS[request.resource]
        place = {"namespace": request.namespace} if request.namespace else {}
        if request.verb is Verb.LIST:
            listed = client.list(kind, namespace="*", fields=dict(request.field_selector))
            shown = _whole if request.whole else _metadata
            return tuple([shown(one) async for one in listed])
        if request.verb is Verb.GET:
            found = await client.get(kind, request.name, **place)
        elif request.verb is Verb.CREATE:
            # Only for a subresource is the name of its object a word of its own.
            of = {"name": request.name} if request.resource is Resource.EVICTIONS else {}
            found = await client.create(kind.from_dict(request.body), **of, **place)
            if request.resource is Resource.EVICTIONS:
                return ()  # a Status
        elif request.verb is Verb.UPDATE:
            found = await client.replace(kind.from_dict(request.body), **place)
        else:
            body = request.patch if request.form is Form.JSON else request.body
            form, force = _FORMS[request.form], request.force
            found = await client.patch(
                kind, request.name, body, patch_type=form, force=force, **place
            )
        return (_whole(found) if request.whole else _metadata(found),)

    def _date(self, text: str) -> None:
        try:
            server = parsedate_to_datetime(text).timestamp()
        except ValueError:
            return
        self._skewed(self._wall() - server)


def _whole(found: Any) -> dict[str, Any]:
    """The object as the server has it."""
    document: dict[str, Any] = found.to_dict()
    return document


def _metadata(found: Any) -> dict[str, Any]:
    """All that anybody asks of an object."""
    document = {"metadata": found.metadata.to_dict()}
    status = getattr(found, "status", None)
    if isinstance(found, Node | NodeStatus) and status is not None:
        document["capacity"] = dict(status.capacity or {})
    return document


def judged(
    request: Request, response: httpx2.Response, message: str, causes: frozenset[str]
) -> Outcome:
    """What a status code means for a request.

    Args:
        request: that was sent.
        response: its answer, 4xx or 5xx.
        message: of the server.
        causes: reasons among the details of its Status.
    """
    code = response.status_code
    retry_after = _seconds(response.headers.get("Retry-After", ""))
    what = f"{request.verb} {request.target}: {code}: {message[:500]}"
    if "ValidatingAdmissionPolicy" in message:
        return Outcome(
            result=Result.FORBIDDEN,
            text=f"{what}; an admission policy refused it: does the token name this node?",
        )
    match code:
        case 400 | 413 | 415 | 422:
            return Outcome(result=Result.INVALID, text=what)
        case 401:
            return Outcome(
                result=Result.UNAUTHORIZED,
                text=f"{what}; the token is expired, of another cluster, or the clocks differ",
            )
        case 403 if "NamespaceTerminating" in causes or "is being terminated" in message:
            return Outcome(result=Result.ENDING, text=what)
        case 403:
            return Outcome(
                result=Result.FORBIDDEN,
                text=f"{what}; a ClusterRole of its service account lacks "
                f"apiGroups [{request.resource.group!r}], resources [{request.resource.plural}], "
                f"verbs [{request.verb}]",
            )
        case 404 if request.resource in _DEFINED and _no_such_kind(request, message):
            return Outcome(result=Result.UNKNOWN, text=f"{what}; no such kind of object")
        case 404:
            return Outcome(result=Result.MISSING, text=what)
        case 409 if request.verb is Verb.CREATE:
            return Outcome(result=Result.EXISTS, text=what)
        case 409:
            return Outcome(result=Result.CONFLICT, text=what)
        case 429 if "DisruptionBudget" in causes:
            return Outcome(result=Result.BLOCKED, text=what)
        case 429:
            return Outcome(result=Result.BUSY, text=what, retry_after=retry_after or 1.0)
        case 503 | 504:
            return Outcome(result=Result.BUSY, text=what, retry_after=retry_after)
        case _:
            return Outcome(result=Result.FAILED, text=what, retry_after=retry_after)


def _no_such_kind(request: Request, message: str) -> bool:
    """Whether not the object is missing but its definition; that of a missing object names it."""
    return f'"{request.name}"' not in message


def _causes(error: ApiError) -> frozenset[str]:
    details = error.status.details
    return frozenset(one.reason or "" for one in (details.causes or [])) if details else frozenset()


def _seconds(text: str) -> float:
    """The value of Retry-After; servers of Kubernetes send seconds, never a date."""
    # No more digits than `int` reads.
    return float(min(int(text[:12]), 3600)) if text.isascii() and text.isdigit() else 0.0
