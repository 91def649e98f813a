"""Requests to the API server as values, what came of them, and the client that does them. Pure."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Final, Protocol
from urllib.parse import quote, urlencode


class KubeError(OSError):
    """The API server did not do what it was asked.

    Attributes:
        code: the status code of its answer; 0 where there was none.
        causes: reasons among the details of its Status.
        retry_after: seconds that it wants to be left alone.
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
    """What is done, in the words of RBAC."""

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
"""Of HTTP; a list is read in pages."""


class ContentType(StrEnum):
    """How what is written is meant, by its content type."""

    FULL_OBJECT = "application/json"
    MERGE = "application/merge-patch+json"
    APPLY = "application/apply-patch+yaml"
    """Server-side apply: makes the object too, and owns what it names."""
    JSON = "application/json-patch+json"


class Resource(Enum):
    """On what: API group, version, and resource with its subresource."""

    NODES = ("", "v1", "nodes")
    NODE_STATUS = ("", "v1", "nodes/status")
    PODS = ("", "v1", "pods")
    EVICTIONS = ("", "v1", "pods/eviction")
    EVENTS = ("events.k8s.io", "v1", "events")
    TOPOLOGIES = ("topology.node.k8s.io", "v1alpha2", "noderesourcetopologies")
    NUMATOPOLOGIES = ("nodeinfo.volcano.sh", "v1alpha1", "numatopologies")
    LEASES = ("coordination.k8s.io", "v1", "leases")
    CLAIMS = ("resource.k8s.io", "v1", "resourceclaims")
    SLICES = ("resource.k8s.io", "v1", "resourceslices")

    @property
    def api_group(self) -> str:
        """Its API group; empty for the core."""
        return self.value[0]

    @property
    def plural(self) -> str:
        """Its name in RBAC rules."""
        return self.value[2]

    def object_or_list_path(self, namespace: str = "", name: str = "") -> str:
        """Of all objects, or of one."""
        group, version, plural = self.value
        kind, _, part = plural.partition("/")
        within = ("namespaces", namespace) if namespace else ()
        parts = ("apis" if group else "api", group, version, *within, kind, name, part)
        return "/" + "/".join(quote(one, safe="") for one in parts if one)


@dataclass(frozen=True, slots=True, kw_only=True)
class APIRequest:
    """One request.

    Attributes:
        output: what it is for; the metric's label.
        key, version: what the output knows it by.
        body: a whole object, or a patch.
        force: take fields from other owners; for server-side apply.
        field_selector: for a list.
        metadata: all that is to be read of the object: a Node has fifty images.
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
    def target_text(self) -> str:
        """Which object, for log lines."""
        return "/".join(part for part in (self.resource.plural, self.namespace, self.name) if part)

    @property
    def url_path(self) -> str:
        """Path and parameters."""
        # What is made is named by its body, a part of an object by the path.
        named = self.verb is not Verb.CREATE or "/" in self.resource.plural
        path = self.resource.object_or_list_path(self.namespace, self.name if named else "")
        return f"{path}?{urlencode({'force': 'true'})}" if self.force else path


class OutcomeKind(StrEnum):
    """What came of a request, as far as it matters to what follows."""

    SUCCEEDED = "done"
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
    THROTTLED = "busy"
    UNAUTHORIZED = "unauthorized"
    UNREACHABLE = "unreachable"


SERVER_WIDE_RESULTS: Final = frozenset(
    {OutcomeKind.THROTTLED, OutcomeKind.UNAUTHORIZED, OutcomeKind.UNREACHABLE}
)
"""What is not about the one request: nothing else would fare better."""
_RESOURCES_NEEDING_CRD: Final = frozenset({Resource.TOPOLOGIES, Resource.NUMATOPOLOGIES})
"""Kinds that a cluster has only where their definition was applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a request.

    Attributes:
        text: what was wrong and what to do, as a sentence; empty when done.
        retry_after: seconds that the server wants to be left alone.
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
    """What an error means for a request."""
    code, api_text, retry_after = error.code, str(error), error.retry_after
    if not code:
        return Outcome(result=OutcomeKind.UNREACHABLE, text=api_text)
    result, remedy = _OUTCOME_BY_STATUS.get(code, OutcomeKind.FAILED), ""
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
                f"[{request.resource.api_group!r}], resources [{request.resource.plural}], "
                f"verbs [{request.verb}]"
            )
    elif (
        code == 404
        and request.resource in _RESOURCES_NEEDING_CRD
        and f'"{request.name}"' not in api_text
    ):
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
"""Seconds for each step of a request; a silent server must not hold us for ever."""
LIST_PAGE_TIMEOUT_S: Final = 60.0
"""The same for a page of a list, which a busy server takes longer for; its own limit is as long."""
LIST_PAGE_SIZE: Final = 500
"""Objects in one answer to a list; 5,000 nodes are ten of them, of about a megabyte each."""
WATCH_DURATION_S: Final = 300
"""Seconds after which the API server ends a watch, which is then resumed."""
ACCEPT_WHOLE_OBJECT: Final = "application/json"
ACCEPT_METADATA: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
ACCEPT_METADATA_LIST: Final = ACCEPT_METADATA.replace("Metadata;", "MetadataList;")
"""What is accepted: an object, or its metadata alone; of a list that of each object."""
WATCH_OPENED: Final = ""
"""What a watch says first: the server follows."""


class KubeClient(Protocol):
    """An API server as processes use it; `nri_numa.kube.api.KubeAPI` reaches one over HTTP.

    A subclass does single requests and watches, of which lists and outcomes are made here.
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
        """Do one request; what comes back, read as JSON.

        The path is quoted; the content type `form` of the document says how a patch is meant.
        After so many `seconds` without a byte there is no answer.

        Raises:
            KubeError: the server says no, or nothing came back.
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
        """Follow a watch until the server ends it: `WATCH_OPENED`, then event and object.

        Raises:
            KubeError: the server says no, be it in the middle, or the connection was lost.
        """

    @abstractmethod
    def server_time(self) -> float:
        """Seconds since the epoch by the server's clock, a second off at most."""

    @abstractmethod
    async def refresh_credentials(self) -> None:
        """Have credentials, of now or of a second ago.

        Raises:
            KubeError: there are none.
        """

    @abstractmethod
    async def close(self) -> None:
        """End the connections; the next request reads everything again."""

    async def execute(self, request: APIRequest) -> Outcome:
        """Do one request; every failure is a value."""
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
            if not all(isinstance(one.get("metadata", {}), dict) for one in documents):
                raise KubeError("cannot read the answer: its metadata is no mapping", 200)
        except KubeError as error:
            return classify_error(request, error)
        return Outcome(result=OutcomeKind.SUCCEEDED, documents=tuple(documents))

    async def list_objects(self, path: str, fields: str = "") -> list[dict[str, Any]]:
        """Read a list, of a field selector.

        Raises:
            KubeError: see `request_json`.
        """
        pages = self.list_pages(path, {"fieldSelector": fields} if fields else {})
        return [document async for _, items in pages for document in items]

    async def list_pages(
        self, path: str, parameters: Mapping[str, str], *, accept: str = ACCEPT_WHOLE_OBJECT
    ) -> AsyncIterator[tuple[Mapping[str, Any], list[dict[str, Any]]]]:
        """Read a long list: metadata and objects of each page.

        Raises:
            KubeError: see `request_json`.
        """
        asked = {**parameters, "limit": str(LIST_PAGE_SIZE)}
        while True:
            url = f"{path}?{urlencode(asked)}"
            page = await self.request_json("GET", url, accept=accept, seconds=LIST_PAGE_TIMEOUT_S)
            metadata = mapping_or_empty(page.get("metadata"))
            yield metadata, _decode_items(page)
            if not metadata.get("continue"):
                return
            asked["continue"] = str(metadata["continue"])


def _decode_items(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    items = document.get("items") or []
    if not isinstance(items, list) or not all(isinstance(one, dict) for one in items):
        raise KubeError("cannot read the answer: it is no list of objects")
    return items


# --- documents ------------------------------------------------------------------------------------


def annotations_of(document: Mapping[str, Any]) -> Mapping[str, str]:
    """The annotations of an object."""
    return mapping_or_empty(mapping_or_empty(document.get("metadata")).get("annotations"))


def text_in_section(document: Mapping[str, Any], section: str, key: str) -> str:
    """A text in a section; empty where it is none."""
    value = mapping_or_empty(document.get(section)).get(key)
    return value if isinstance(value, str) else ""


def mapping_or_empty(value: object) -> Mapping[str, Any]:
    """The value where it is a mapping, which a document of a user need not have."""
    return value if isinstance(value, Mapping) else {}


def list_of_mappings(value: object) -> list[Mapping[str, Any]]:
    """The mappings in a list; none where it is no list."""
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []
