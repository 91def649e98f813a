"""An API server in memory: objects by path, their versions, watches, and what may go wrong."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote

from nri_numa.kube.requests import (
    ACCEPT_WHOLE_OBJECT,
    REQUEST_STEP_TIMEOUT_S,
    WATCH_DURATION_S,
    WATCH_OPENED,
    APIRequest,
    ContentType,
    KubeClient,
    KubeError,
    Outcome,
    Resource,
)

Document = dict[str, Any]
_PATH_PATTERN = re.compile(
    r"(/api/v1|/apis/[^/]+/[^/]+)(?:/namespaces/([^/]+))?/([^/]+)(?:/([^/]+)(?:/([^/]+))?)?"
)


class _Place(NamedTuple):
    """What a path says; a list has no name, and of all namespaces no namespace."""

    kind: str
    namespace: str
    name: str
    part: str


class _Change(NamedTuple):
    """The object before and after; a bookmark is of no place."""

    version: int
    place: _Place | None = None
    before: Document | None = None
    after: Document | None = None


@dataclass
class _Fault:
    pattern: str
    error: KubeError
    times: float


@dataclass(frozen=True)
class ServedRequest:
    """One request; the method of a watch is WATCH."""

    method: str
    path: str
    query: Mapping[str, str]
    body: Any = None
    form: str = ContentType.FULL_OBJECT
    accept: str = ACCEPT_WHOLE_OBJECT

    @property
    def text(self) -> str:
        """Method, path and parameters, in which patterns of faults are looked for."""
        return " ".join((self.method, self.path, *(f"{k}={v}" for k, v in self.query.items())))


class ClusterObjects(KubeClient):
    """What an API server keeps, and how it answers.

    Attributes:
        objects: the documents that are kept, by path; a test may change them without an event.
        requests: all that were made.
        on_request: is called before each answer, and may change objects.
        wall: its clock, seconds since the epoch.
        version: of the last change.
        manager: who applies, as managed fields name it.
    """

    def __init__(self, *, wall: Callable[[], float] = time.time, manager: str = "test") -> None:
        self.wall, self.manager, self.version = wall, manager, 1000
        self.objects: dict[str, Document] = {}
        self.requests: list[ServedRequest] = []
        self.on_request: Callable[[ServedRequest], object] = lambda request: None
        self._oldest = self._watch_era = 0
        self._changes: list[_Change] = []
        self._faults: list[_Fault] = []
        self._gates: list[tuple[str, asyncio.Event]] = []
        self._waiting: list[asyncio.Future[None]] = []

    # --- what a test does ---------------------------------------------------------------------

    def put(self, resource: Resource | str, *documents: Mapping[str, Any]) -> None:
        """These objects exist, new or changed; a version and a uid that they have are kept.

        The path of a list stands for a resource that `Resource` lacks.
        """
        for document in documents:
            metadata = document["metadata"]
            path = f"{resource}/{metadata['name']}"
            if isinstance(resource, Resource):
                namespace = metadata.get("namespace", "")
                path = resource.object_or_list_path(namespace, metadata["name"])
            self._store(path, deepcopy(dict(document)), metadata.get("resourceVersion"))

    def get(self, resource: Resource, name: str, namespace: str = "") -> Document:
        """The object itself; empty where there is none."""
        return self.objects.get(resource.object_or_list_path(namespace, name), {})

    def all(self, resource: Resource) -> list[Document]:
        """The objects of a kind."""
        return [self.objects[path] for path in self._paths(resource.object_or_list_path())]

    def patch(self, resource: Resource, name: str, changes: Document, namespace: str = "") -> None:
        """Somebody else merges this into an object."""
        path = resource.object_or_list_path(namespace, name)
        self._store(path, _merged(self.objects[path], changes))

    def remove(self, resource: Resource, name: str, namespace: str = "") -> None:
        """It does not exist any more."""
        self._store(resource.object_or_list_path(namespace, name), None)

    def fail(
        self,
        code: int,
        text: str = "not now",
        *,
        on: str = "",
        times: float = float("inf"),
        retry_after: float = 0.0,
    ) -> None:
        """Answer so from now on, where `ServedRequest.text` has the pattern; 0 is no answer."""
        self._faults.append(_Fault(on, KubeError(text, code, retry_after=retry_after), times))

    def recover(self) -> None:
        """Nothing fails any more."""
        self._faults.clear()

    def hold(self, on: str) -> asyncio.Event:
        """Answer requests with this pattern when the event is set, and not before."""
        gate = asyncio.Event()
        self._gates.append((on, gate))
        return gate

    def bookmark(self) -> str:
        """Tell watches that they are up to date; the result is the version."""
        self.version += 1
        self._changes.append(_Change(self.version))
        self._wake_watches()
        return str(self.version)

    def compact(self) -> None:
        """Forget what was; a watch from before is 410 Gone."""
        self._oldest = self.version = self.version + 1

    def end_watches(self) -> None:
        """Each of them, as it happens after `WATCH_DURATION_S`."""
        self._watch_era += 1
        self._wake_watches()

    def execute_at_once(self, request: APIRequest) -> Outcome:
        """Do a request without a loop: in memory nothing waits."""
        work = self.execute_request(request)
        try:
            work.send(None)
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome
        raise AssertionError(f"{request.target_text} waits")

    def bodies(self, method: str, path_end: str) -> list[Any]:
        """What was sent to paths with this end."""
        return [x.body for x in self.requests if x.method == method and x.path.endswith(path_end)]

    # --- how it answers -----------------------------------------------------------------------

    async def request_json(
        self,
        method: str,
        path: str,
        document: object = None,
        *,
        form: str = ContentType.FULL_OBJECT,
        accept: str = ACCEPT_WHOLE_OBJECT,
        seconds: float = REQUEST_STEP_TIMEOUT_S,
    ) -> Document:
        path, _, query = path.partition("?")
        parameters = dict(parse_qsl(query))
        request = ServedRequest(method, path, parameters, deepcopy(document), form, accept)
        await self._admit(request)
        if path == "/version":
            return {"gitVersion": "v1.36.0"}
        return deepcopy(self._answer(request))

    def server_time(self) -> float:
        return self.wall()

    async def refresh_credentials(self) -> None:
        """There are none."""

    async def close(self) -> None:
        """There is no connection."""

    async def _admit(self, request: ServedRequest) -> None:
        """Record a request, and fail it where that was told.

        Raises:
            KubeError: a fault.
        """
        self.requests.append(request)
        for pattern, gate in self._gates:
            if re.search(pattern, request.text):
                await gate.wait()
        self.on_request(request)
        for fault in self._faults:
            if fault.times > 0 and re.search(fault.pattern, request.text):
                fault.times -= 1
                raise fault.error

    def _answer(self, request: ServedRequest) -> Document:
        """What comes of a request; `KubeError` where the server says no."""
        place = _place_of(request.path)
        if request.method == "POST":
            return self._create(request, place)
        if not place.name:
            return self._list(request)
        path = request.path.removesuffix(f"/{place.part}") if place.part else request.path
        applies = request.form == ContentType.APPLY
        current = self.objects.get(path, {}) if applies else self._existing(path)
        if request.method != "GET":
            _check_preconditions(current, request.body)
            changed = _applied(current, request.body, self.manager) if applies else request.body
            if request.method == "PATCH" and not applies:
                changed = _patched(current, request)
            current = self._store(path, deepcopy(changed))
        return _in_form(current, request.accept)

    def _existing(self, path: str) -> Document:
        if path not in self.objects:
            place = _place_of(path)
            raise KubeError(f'{place.kind.rpartition("/")[2]} "{place.name}" not found', 404)
        return self.objects[path]

    def _create(self, request: ServedRequest, place: _Place) -> Document:
        """An object, or the binding or eviction of a pod."""
        if not place.part:
            path = f"{request.path}/{request.body['metadata']['name']}"
            if path in self.objects:
                raise KubeError("the object exists", 409)
            return self._store(path, deepcopy(request.body))
        path = request.path.rpartition("/")[0]
        pod, body = self._existing(path), request.body
        options = body.get("deleteOptions", {})
        _check_preconditions(pod, {"metadata": options.get("preconditions", body["metadata"])})
        if place.part == "eviction":
            if "dryRun" not in options:
                self._store(path, None)
        elif node := pod["spec"].get("nodeName"):
            raise KubeError(f"pod {place.name} is already assigned to node {node!r}", 409)
        else:
            metadata = {"annotations": body["metadata"].get("annotations", {})}
            bound = {"metadata": metadata, "spec": {"nodeName": body["target"]["name"]}}
            self._store(path, _merged(pod, bound))
        return {"kind": "Status", "status": "Success"}

    def _list(self, request: ServedRequest) -> Document:
        paths = self._paths(request.path, request.query.get("fieldSelector", ""))
        begin, limit = (int(request.query.get(word, 0)) for word in ("continue", "limit"))
        end = begin + limit if limit else len(paths)
        metadata = {"resourceVersion": str(self.version)}
        if end < len(paths):
            metadata["continue"] = str(end)
        items = [_in_form(self.objects[path], request.accept) for path in paths[begin:end]]
        return {"metadata": metadata, "items": items}

    def _paths(self, list_path: str, selector: str = "") -> list[str]:
        return sorted(
            path
            for path, document in self.objects.items()
            if _is_listed(_place_of(path), list_path) and _is_selected(document, selector)
        )

    def _store(self, path: str, document: Document | None, version: str | None = None) -> Document:
        before = self.objects.pop(path, None)
        self.version += 1
        if document is not None:
            metadata = document.setdefault("metadata", {})
            metadata["resourceVersion"] = version or str(self.version)
            uid = (before or {}).get("metadata", {}).get("uid", f"uid-{self.version}")
            metadata.setdefault("uid", uid)
            self.objects[path] = document
        self._changes.append(_Change(self.version, _place_of(path), before, deepcopy(document)))
        self._wake_watches()
        return document or {}

    # --- watches ------------------------------------------------------------------------------

    def _wake_watches(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def watch_events(
        self,
        path: str,
        parameters: Mapping[str, str],
        seconds: int = WATCH_DURATION_S,
        *,
        accept: str = ACCEPT_WHOLE_OBJECT,
    ) -> AsyncGenerator[tuple[str, Document]]:
        request = ServedRequest("WATCH", path, dict(parameters), accept=accept)
        await self._admit(request)
        yield WATCH_OPENED, {}
        loop, era, position = asyncio.get_running_loop(), self._watch_era, 0
        end, since = loop.time() + seconds, int(request.query["resourceVersion"])
        if since < self._oldest:
            raise KubeError("too old resource version", 410)
        while era == self._watch_era and loop.time() < end:
            changes, position = self._changes[position:], len(self._changes)
            for change in changes:
                for event in _watch_events(change, request) if change.version > since else ():
                    yield event
            if position == len(self._changes) and era == self._watch_era:
                future = loop.create_future()
                self._waiting.append(future)
                await asyncio.wait([future], timeout=end - loop.time())


@cache
def _place_of(path: str) -> _Place:
    match = _PATH_PATTERN.fullmatch(path)
    assert match is not None, path
    group, namespace, plural, name, part = (unquote(text or "") for text in match.groups())
    return _Place(f"{group}/{plural}", namespace, name, part)


def _is_listed(place: _Place, list_path: str) -> bool:
    listed = _place_of(list_path)
    return place.kind == listed.kind and listed.namespace in ("", place.namespace)


def _is_selected(document: Mapping[str, Any], selector: str) -> bool:
    """Whether an object is of a field selector; a field that it lacks is empty."""
    for term in filter(None, selector.split(",")):
        field, operator, text = re.split(r"(!?=)", term, maxsplit=1)
        value: Any = document
        for key in field.split("."):
            value = value.get(key, "") if isinstance(value, Mapping) else ""
        if (value == text) != (operator == "="):
            return False
    return True


def _watch_events(change: _Change, request: ServedRequest) -> Iterator[tuple[str, Document]]:
    """A change as a watch tells it, where it is of its kind and field selector."""
    version = {"resourceVersion": str(change.version)}
    if change.place is None:
        yield "BOOKMARK", {"metadata": version}
    elif _is_listed(change.place, request.path):
        selector = request.query.get("fieldSelector", "")
        before, after = (
            document if document is not None and _is_selected(document, selector) else None
            for document in (change.before, change.after)
        )
        if (document := after or before) is not None:
            kind = "DELETED" if after is None else "MODIFIED" if before is not None else "ADDED"
            yield kind, _in_form(_merged(document, {"metadata": version}), request.accept)


def _in_form(document: Document, accept: str) -> Document:
    """The object, or its metadata alone."""
    return {"metadata": document["metadata"]} if "PartialObjectMetadata" in accept else document


def _check_preconditions(current: Document, body: Any) -> None:
    """A uid or version that is sent must be that of the object."""
    sent = body.get("metadata", {}) if isinstance(body, Mapping) else {}
    metadata = current.get("metadata", {})
    for name in ("uid", "resourceVersion"):
        if sent.get(name) not in (None, metadata.get(name)):
            raise KubeError(f"the object has been modified: {name} {metadata.get(name)}", 409)


def _patched(current: Document, request: ServedRequest) -> Any:
    if request.form == ContentType.MERGE:
        return _merged(current, request.body)
    (change,) = request.body
    assert (change["op"], change["path"]) == ("replace", "/metadata/managedFields")
    return {**current, "metadata": {**current["metadata"], "managedFields": []}}


def _merged(current: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, Mapping):
        return deepcopy(patch)
    merged = dict(current) if isinstance(current, Mapping) else {}
    merged |= {name: _merged(merged.get(name), value) for name, value in patch.items()}
    return {name: value for name, value in merged.items() if patch.get(name, "") is not None}


def _applied(current: Document, body: Document, manager: str) -> Document:
    """Server-side apply by an owner of all fields that it names."""
    owned = {f"f:{name}": {} for name in body if name not in ("apiVersion", "kind", "metadata")}
    entry = {"manager": manager, "operation": "Apply", "fieldsV1": owned}
    uid = {key: value for key, value in current.get("metadata", {}).items() if key == "uid"}
    return {**body, "metadata": {**body["metadata"], **uid, "managedFields": [entry]}}
