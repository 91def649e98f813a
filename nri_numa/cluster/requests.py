"""One request to the API server as a value, and what came of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any


class Verb(StrEnum):
    """What is done, in the words of RBAC."""

    GET = "get"
    LIST = "list"
    CREATE = "create"
    PATCH = "patch"
    UPDATE = "update"


class Form(StrEnum):
    """How a patch is meant."""

    MERGE = "merge"
    APPLY = "apply"
    """Server-side apply: makes the object too, and owns what it names."""
    JSON = "json"


class Resource(Enum):
    """On what: API group and resource."""

    NODES = ("", "nodes")
    NODE_STATUS = ("", "nodes/status")
    PODS = ("", "pods")
    EVICTIONS = ("", "pods/eviction")
    EVENTS = ("events.k8s.io", "events")
    TOPOLOGIES = ("topology.node.k8s.io", "noderesourcetopologies")
    NUMATOPOLOGIES = ("nodeinfo.volcano.sh", "numatopologies")
    LEASES = ("coordination.k8s.io", "leases")
    CLAIMS = ("resource.k8s.io", "resourceclaims")
    SLICES = ("resource.k8s.io", "resourceslices")

    @property
    def group(self) -> str:
        """Its API group; empty for the core."""
        return self.value[0]

    @property
    def plural(self) -> str:
        """Its name in RBAC rules."""
        return self.value[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request.

    Attributes:
        output: who wants it; the metric's label.
        key, version: what whoever wants it knows it by.
        body: a whole object, or a merge patch.
        patch: the operations of a JSON patch.
        form: of a patch.
        force: take fields from other owners; for server-side apply.
        field_selector: for a list.
        whole: whether the answer is wanted whole; otherwise its metadata.
    """

    output: str
    verb: Verb
    resource: Resource
    name: str = ""
    namespace: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    patch: list[dict[str, Any]] = field(default_factory=list)
    form: Form = Form.MERGE
    force: bool = False
    field_selector: dict[str, str] = field(default_factory=dict)
    whole: bool = False
    key: object = None
    version: object = None

    @property
    def target(self) -> str:
        """Which object, for log lines."""
        return "/".join(part for part in (self.resource.plural, self.namespace, self.name) if part)


class Result(StrEnum):
    """What came of a request, as far as anybody acts on it."""

    DONE = "done"
    EXISTS = "exists"
    MISSING = "missing"
    UNKNOWN = "unknown"
    """The API server does not know this kind of object."""
    CONFLICT = "conflict"
    FORBIDDEN = "forbidden"
    ENDING = "ending"
    """The namespace is being deleted: nothing can be made there any more."""
    INVALID = "invalid"
    BLOCKED = "blocked"
    """A disruption budget does not allow an eviction now."""
    FAILED = "failed"
    """The server could not do this one."""
    BUSY = "busy"
    UNAUTHORIZED = "unauthorized"
    UNREACHABLE = "unreachable"


WHOLE = frozenset({Result.BUSY, Result.UNAUTHORIZED, Result.UNREACHABLE})
"""What is not about the one request: nothing else would fare better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a request.

    Attributes:
        text: what was wrong and what to do, as a sentence; empty when done.
        retry_after: seconds the server wants to be left alone.
        documents: what was read.
    """

    result: Result
    text: str = ""
    retry_after: float = 0.0
    documents: tuple[dict[str, Any], ...] = ()
