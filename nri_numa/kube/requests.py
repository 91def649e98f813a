"""Requests to the API server and their outcomes as values, and the client protocol. Pure."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Final, Protocol
from urllib.parse import quote, urlencode


class KubeError(OSError):
    """A failed request to the API server.

    Attributes:
        code: status code of the answer; 0 without an answer.
        causes: reasons in the details of its Status.
        retry_after: seconds that the server wants no further request.
    """

    def __init__(
        self,
        text: str,
        code: int = 0,
        causes: frozenset[str] = frozenset(),
        retry_after: float = 0.0,
    ) -> None:
        super().__init__(text)
        self.code, self.causes, self.retry_after = code, causes, retry_after


class Verb(StrEnum):
    """Verb of a request, as in RBAC."""

    GET = "get"
    LIST = "list"
    CREATE = "create"
    PATCH = "patch"
    UPDATE = "update"


HTTP_METHODS: Final = {
    Verb.GET: "GET",
    Verb.CREATE: "POST",
    Verb.PATCH: "PATCH",
    Verb.UPDATE: "PUT",
}
"""HTTP methods by verb; a list is read in pages."""


class ContentType(StrEnum):
    """Content type of a write, which says how its body is applied."""

    FULL_OBJECT = "application/json"
    MERGE = "application/merge-patch+json"
    APPLY = "application/apply-patch+yaml"
    """Server-side apply: creates the object if needed, and owns its fields."""
    JSON = "application/json-patch+json"


class Resource(Enum):
    """API group, version, and resource with its subresource."""

    NODES = ("", "v1", "nodes")
    NODE_STATUS = ("", "v1", "nodes/status")
    PODS = ("", "v1", "pods")
    EVICTIONS = ("", "v1", "pods/eviction")
    EVENTS = ("events.k8s.io", "v1", "events")
    TOPOLOGIES = ("topology.node.k8s.io", "v1alpha2", "noderesourcetopologies")
    NUMATOPOLOGIES = ("nodeinfo.volcano.sh", "v1alpha1", "numatopologies")
    LEASES = ("coordination.k8s.io", "v1", "leases")
    CLAIMS = ("resource.k8s.io", "v1", "resourceclaims")
    DISRUPTION_BUDGETS = ("policy", "v1", "poddisruptionbudgets")
    SLICES = ("resource.k8s.io", "v1", "resourceslices")

    @property
    def api_group(self) -> str:
        """API group; empty for the core group."""
        return self.value[0]

    @property
    def api_version(self) -> str:
        """The ``apiVersion`` of its objects."""
        return "/".join(part for part in self.value[:2] if part)

    @property
    def plural_name(self) -> str:
        """Name in RBAC rules."""
        return self.value[2]

    def object_or_list_path(self, namespace: str = "", name: str = "") -> str:
        """Return the path of all objects, or of one."""
        group, version, plural = self.value
        kind, _, part = plural.partition("/")
        scope = ("namespaces", namespace) if namespace else ()
        parts = ("apis" if group else "api", group, version, *scope, kind, name, part)
        return "/" + "/".join(quote(p, safe="") for p in parts if p)


@dataclass(frozen=True, slots=True, kw_only=True)
class APIRequest:
    """One request.

    Attributes:
        output: name of its output; label of the metrics.
        key, version: identify the request for its output.
        body: a whole object, or a patch.
        force: take fields from other field managers; for server-side apply.
        field_selector: of a list.
        metadata: read the metadata of the object alone: a Node has fifty images.
    """

    output: str
    verb: Verb
    resource: Resource
    name: str = ""
    namespace: str = ""
    body: Any = None
    form: ContentType = ContentType.MERGE
    force: bool = False
    field_selector: Mapping[str, str] = field(default_factory=dict)
    metadata: bool = False
    key: Any = None
    version: Any = None

    @property
    def reads_node(self) -> bool:
        """True if it reads one Node."""
        return self.verb is Verb.GET and self.resource is Resource.NODES

    @property
    def target_text(self) -> str:
        """Object of the request, for log lines."""
        return "/".join(
            part for part in (self.resource.plural_name, self.namespace, self.name) if part
        )

    @property
    def url_path(self) -> str:
        """Path and parameters."""
        # A new object is named in its body, a subresource in the path.
        named = self.verb is not Verb.CREATE or "/" in self.resource.plural_name
        path = self.resource.object_or_list_path(self.namespace, self.name if named else "")
        return f"{path}?{urlencode({'force': 'true'})}" if self.force else path


class OutcomeKind(StrEnum):
    """Kind of a request's outcome, which decides the next request."""

    SUCCEEDED = "done"
    EXISTS = "exists"
    MISSING = "missing"
    UNKNOWN = "unknown"
    """The API server does not know this kind of object."""
    CONFLICT = "conflict"
    FORBIDDEN = "forbidden"
    ENDING = "ending"
    """The namespace is being deleted: no object can be created there."""
    INVALID = "invalid"
    BLOCKED = "blocked"
    """A disruption budget does not allow an eviction now."""
    FAILED = "failed"
    """The server failed on this request."""
    THROTTLED = "busy"
    UNAUTHORIZED = "unauthorized"
    UNREACHABLE = "unreachable"


SERVER_WIDE_RESULTS: Final = frozenset(
    {OutcomeKind.THROTTLED, OutcomeKind.UNAUTHORIZED, OutcomeKind.UNREACHABLE}
)
"""Outcomes of the whole server: other requests would fail, too."""
_RESOURCES_NEEDING_CRD: Final = frozenset({Resource.TOPOLOGIES, Resource.NUMATOPOLOGIES})
"""Kinds that a cluster has only after their definition was applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of a request.

    Attributes:
        text: sentence with the problem and the remedy; empty after a success.
        retry_after: seconds that the server wants no further request.
    """

    result: OutcomeKind
    text: str = ""
    retry_after: float = 0.0
    documents: tuple[dict[str, Any], ...] = ()


_OUTCOME_BY_STATUS: Final = {
    **dict.fromkeys((400, 413, 415, 422), OutcomeKind.INVALID),
    401: OutcomeKind.UNAUTHORIZED,
    403: OutcomeKind.FORBIDDEN,
    404: OutcomeKind.MISSING,
    409: OutcomeKind.CONFLICT,
    **dict.fromkeys((429, 503, 504), OutcomeKind.THROTTLED),
}
"""By status code; every other is `OutcomeKind.FAILED`."""


def classify_error(request: APIRequest, error: KubeError) -> Outcome:
    """Classify the error of a request."""
    code, api_text, retry_after = error.code, str(error), error.retry_after
    if not code:
        return Outcome(result=OutcomeKind.UNREACHABLE, text=api_text)
    result, remedy = _OUTCOME_BY_STATUS.get(code, OutcomeKind.FAILED), ""
    names_object = f'"{request.name}"' in api_text
    if "ValidatingAdmissionPolicy" in api_text:
        result = OutcomeKind.FORBIDDEN
        remedy = "; an admission policy refused it: does the token name this node?"
    elif code == 401:
        remedy = "; the token is expired, of another cluster, or the clocks differ"
    elif code == 403:
        if "NamespaceTerminating" in error.causes or "is being terminated" in api_text:
            result = OutcomeKind.ENDING
        else:
            remedy = (
                f"; a ClusterRole of its service account lacks apiGroups "
                f"[{request.resource.api_group!r}], resources [{request.resource.plural_name}], "
                f"verbs [{request.verb}]"
            )
    elif code == 404 and request.resource in _RESOURCES_NEEDING_CRD and not names_object:
        # The message about a missing object names it; otherwise its definition is missing.
        result, remedy = OutcomeKind.UNKNOWN, "; no such kind of object"
    elif code == 409 and request.verb is Verb.CREATE:
        result = OutcomeKind.EXISTS
    elif code == 429 and "DisruptionBudget" in error.causes:
        result = OutcomeKind.BLOCKED
    elif code == 429:
        retry_after = retry_after or 1.0
    text = f"{request.verb} {request.target_text}: {code}: {api_text[:500]}{remedy}"
    return Outcome(result=result, text=text, retry_after=retry_after)


# --- the client -----------------------------------------------------------------------------------

REQUEST_STEP_TIMEOUT_S: Final = 10.0
"""Seconds for each step of a request; a hanging server must not block a process."""
LIST_PAGE_TIMEOUT_S: Final = 60.0
"""Seconds for a page of a list, which takes longer on a busy server; its own limit is as long."""
LIST_PAGE_SIZE: Final = 500
"""Objects in one page of a list; 5,000 nodes are ten pages of about 1 MB each."""
WATCH_DURATION_S: Final = 300
"""Seconds after which the API server ends a watch, which is then resumed."""
ACCEPT_WHOLE_OBJECT: Final = "application/json"
ACCEPT_METADATA: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
ACCEPT_METADATA_LIST: Final = ACCEPT_METADATA.replace("Metadata;", "MetadataList;")
"""Accepted forms: a whole object, its metadata alone, or the metadata of each object of a list."""
WATCH_OPENED: Final = ""
"""First event of a watch: the server has accepted it."""


class KubeClient(Protocol):
    """An API server as processes use it; `nri_numa.kube.api.KubeAPI` reaches one over HTTP.

    A subclass sends single requests and watches; lists and outcomes are built on these here.
    """

    @abstractmethod
    async def request_json(
        self,
        method: str,
        path: str,
        document: object = None,
        *,
        form: str = ContentType.FULL_OBJECT,
        accept: str = ACCEPT_WHOLE_OBJECT,
        seconds: float = REQUEST_STEP_TIMEOUT_S,
    ) -> dict[str, Any]:
        """Send one request, and return the decoded JSON answer.

        The path is quoted; the content type `form` says how the document is applied. The request
        fails after `seconds` without a byte.

        Raises:
            KubeError: the server rejects the request, or does not answer.
        """

    @abstractmethod
    def watch_events(
        self,
        path: str,
        parameters: Mapping[str, str],
        seconds: int = WATCH_DURATION_S,
        *,
        accept: str = ACCEPT_WHOLE_OBJECT,
    ) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
        """Yield `WATCH_OPENED`, then event and object, until the server ends the watch.

        Raises:
            KubeError: the server rejects or aborts the watch, or the connection is lost.
        """

    @abstractmethod
    def server_time(self) -> float:
        """Return the server's time in seconds since the epoch, at most a second off."""

    @abstractmethod
    async def refresh_credentials(self) -> None:
        """Read the credentials if the last read is a second old.

        Raises:
            KubeError: the credentials are missing or unreadable.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close the connections; the next request reads the credentials again."""

    async def execute_request(self, request: APIRequest) -> Outcome:
        """Execute one request; every failure is a value."""
        path = request.url_path
        try:
            if request.verb is Verb.LIST:
                selector = ",".join(f"{key}={x}" for key, x in request.field_selector.items())
                documents = await self.list_objects(path, selector)
            else:
                form = request.form if request.verb is Verb.PATCH else ContentType.FULL_OBJECT
                accept = ACCEPT_METADATA if request.metadata else ACCEPT_WHOLE_OBJECT
                method = HTTP_METHODS[request.verb]
                documents = [
                    await self.request_json(method, path, request.body, form=form, accept=accept)
                ]
            if not all(isinstance(document.get("metadata", {}), dict) for document in documents):
                raise KubeError("cannot read the answer: its metadata is no mapping", 200)
        except KubeError as error:
            return classify_error(request, error)
        return Outcome(result=OutcomeKind.SUCCEEDED, documents=tuple(documents))

    async def list_objects(self, path: str, fields: str = "") -> list[dict[str, Any]]:
        """Read a list by a field selector; errors are those of `request_json`."""
        pages = self.list_pages(path, {"fieldSelector": fields} if fields else {})
        return [document async for _, items in pages for document in items]

    async def list_pages(
        self, path: str, parameters: Mapping[str, str], *, accept: str = ACCEPT_WHOLE_OBJECT
    ) -> AsyncIterator[tuple[Mapping[str, Any], list[dict[str, Any]]]]:
        """Yield metadata and objects of each page; errors are those of `request_json`."""
        query = {**parameters, "limit": str(LIST_PAGE_SIZE)}
        while True:
            url = f"{path}?{urlencode(query)}"
            page = await self.request_json("GET", url, accept=accept, seconds=LIST_PAGE_TIMEOUT_S)
            metadata = section_of(page, "metadata")
            yield metadata, _decode_items(page)
            if not metadata.get("continue"):
                return
            query["continue"] = str(metadata["continue"])


def _decode_items(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    items = document.get("items") or []
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise KubeError("cannot read the answer: it is no list of objects")
    return items


# --- documents ------------------------------------------------------------------------------------


def section_of(document: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """Return the mapping below keys, one in the other; empty if there is none."""
    for key in keys:
        document = mapping_or_empty(document.get(key))
    return document


def annotations_of(document: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the annotations of an object."""
    return section_of(document, "metadata", "annotations")


def text_in_section(document: Mapping[str, Any], section: str, key: str) -> str:
    """Return a text in a section; empty if it is no text."""
    value = section_of(document, section).get(key)
    return value if isinstance(value, str) else ""


def mapping_or_empty(value: object) -> Mapping[str, Any]:
    """Return the value if it is a mapping, which a user's document need not have; else {}."""
    return value if isinstance(value, Mapping) else {}


def list_of_mappings(value: object) -> list[Mapping[str, Any]]:
    """Return the mappings in a list; empty if the value is no list."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
