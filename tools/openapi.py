"""The OpenAPI description of the API, generated from its documents.

``python -m tools.openapi FILE`` writes it; a test keeps it fresh and checks the running
server's answers against it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import yaml

from nri_numa.web import responses as documents

_TOPOLOGY: dict[str, Any] = {
    "title": "Topology",
    "description": "The machine, as `nri-numa topology -o json` shows it.",
    "type": "object",
    "required": [
        "id",
        "cpus",
        "counts",
        "sockets",
        "numaNodes",
        "l3Groups",
        "cores",
        "partitions",
        "warnings",
    ],
    "properties": {
        "id": {"type": "string"},
        "cpus": {"type": "object", "additionalProperties": {"type": "string"}},
        "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
        "sockets": {"type": "array", "items": {"type": "object"}},
        "numaNodes": {"type": "array", "items": {"type": "object"}},
        "l3Groups": {"type": "array", "items": {"type": "object"}},
        "cores": {"type": "array", "items": {"type": "object"}},
        "partitions": {"type": "array", "items": {"type": "object"}},
        "warnings": {"type": "array", "items": {"type": "string"}},
        # Only where the configuration has containers placed by their devices.
        "devices": {"type": "array", "items": {"type": "object"}},
    },
}

_RECORDS = (
    documents.Status,
    documents.Readiness,
    documents.Assignments,
    documents.PodExplanations,
    documents.RejectionsDocument,
    documents.ExclusiveCPUSlotsDocument,
    documents.Zones,
    documents.KubeletDocument,
    documents.Notices,
    documents.DecidedRequests,
    documents.NodeUsage,
    documents.MeasuredContainersOfName,
    documents.MachineNUMAInfo,
    documents.Error,
)


def _text(media: str, description: str) -> dict[str, Any]:
    return {"description": description, "content": {media: {"schema": {"type": "string"}}}}


def _document(name: str, description: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _parameter(name: str, where: str, description: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": where,
        "required": where == "path",
        "description": description,
        "schema": {"type": "string", "minLength": 1} if where == "path" else {"type": "string"},
    }


_NAMESPACE = _parameter("namespace", "path", "The pod's namespace.")
_POD = _parameter("pod", "path", "The pod's name.")
_CONTAINER = _parameter("container", "path", "The container's name.")
_AFTER = {
    **_parameter("after", "query", "Only what changed after this number of the sequence."),
    "schema": {"type": "integer", "minimum": 0, "maximum": 10**18 - 1},
}
_KNOWN = {"200": _document("PodExplanations", "The explanations."), "404": "NotFound"}

# path: (operation id, summary, parameters, answers, whether a token is needed)
_PATHS: dict[str, tuple[str, str, list[dict[str, Any]], dict[str, Any], bool]] = {
    "/healthz": (
        "healthz",
        "The process is alive, and its loop answers the runtime.",
        [],
        {
            "200": _text("text/plain", "Alive."),
            "503": _text("text/plain", "That loop has been stuck for ten seconds or more."),
        },
        False,
    ),
    "/readyz": (
        "readyz",
        "Containers are placed: the plugin is registered and synchronized.",
        [],
        {
            "200": _document("Readiness", "Ready."),
            "503": _document("Readiness", "Not ready, with the reason."),
        },
        False,
    ),
    "/metrics": (
        "metrics",
        "Metrics in Prometheus' text format.",
        [],
        {"200": _text("text/plain", "The metrics.")},
        True,
    ),
    "/v1/status": (
        "status",
        "The agent itself: version, link, checkpoint, counts.",
        [],
        {"200": _document("Status", "The status.")},
        True,
    ),
    "/v1/topology": (
        "topology",
        "The machine: sockets, NUMA nodes, caches, cores, CPUs.",
        [],
        {"200": _document("Topology", "The machine.")},
        True,
    ),
    "/v1/assignments": (
        "assignments",
        "Every container with its assignment, and every NUMA node with its free amounts.",
        [
            _parameter("namespace", "query", "Only containers of this namespace."),
            _parameter("pod", "query", "Only containers of pods of this name."),
        ],
        {"200": _document("Assignments", "The assignments.")},
        True,
    ),
    "/v1/explain/{namespace}/{pod}": (
        "explainPod",
        "Why the containers of a pod are where they are.",
        [_NAMESPACE, _POD],
        _KNOWN,
        True,
    ),
    "/v1/explain/{namespace}/{pod}/{container}": (
        "explainContainer",
        "Why one container is where it is.",
        [_NAMESPACE, _POD, _CONTAINER],
        _KNOWN,
        True,
    ),
    "/v1/rejections": (
        "rejections",
        "Containers that were rejected, newest first.",
        [],
        {"200": _document("RejectionsDocument", "The rejections.")},
        True,
    ),
    "/v1/slots": (
        "slots",
        "Exclusive CPUs that the scheduler may count, and allocated slots.",
        [],
        {"200": _document("ExclusiveCPUSlotsDocument", "The count.")},
        True,
    ),
    "/v1/zones": (
        "zones",
        "Every NUMA node as a scheduler counts it: capacity, allocatable, available.",
        [],
        {"200": _document("Zones", "The NUMA nodes, and the pods that are there.")},
        True,
    ),
    "/v1/kubelet": (
        "kubelet",
        "The kubelet: grants of its managers, and conflicts with nri-numa.",
        [],
        {"200": _document("KubeletDocument", "State of the kubelet.")},
        True,
    ),
    "/v1/notices": (
        "notices",
        "Events of containers that matter to users of the pod.",
        [_AFTER],
        {"200": _document("Notices", "The notices, in the order of their numbers.")},
        True,
    ),
    "/v1/requests": (
        "requests",
        "Decisions about requests of the runtime; spans are made from them.",
        [_AFTER],
        {"200": _document("DecidedRequests", "The requests, in the order of their numbers.")},
        True,
    ),
    "/v1/use": (
        "use",
        "Actual usage of CPUs and memory, as the kernel counts it, in the last minutes.",
        [],
        {"200": _document("NodeUsage", "The last sample and those before.")},
        True,
    ),
    "/v1/use/{namespace}/{pod}/{container}": (
        "containerUse",
        "Actual usage of one container, measured now, over half a second.",
        [_NAMESPACE, _POD, _CONTAINER],
        {"200": _document("MeasuredContainersOfName", "Its usage."), "404": "NotFound"},
        True,
    ),
    "/v1/events": (
        "events",
        "Server-sent events: one `state` event for every change, its data an object with serial, "
        "version, ready and the number of the last notice.",
        [],
        {"200": _text("text/event-stream", "The stream; it ends when the client leaves.")},
        True,
    ),
    "/v2/system/numa/info": (
        "numaInfo",
        "The machine in the form of the numacpu and numamem node annotations.",
        [],
        {"200": _document("MachineNUMAInfo", "The machine.")},
        True,
    ),
    "/openapi.yaml": (
        "openapi",
        "This description.",
        [],
        {"200": _text("application/yaml", "The description.")},
        True,
    ),
}

_ERRORS = {
    "BadRequest": "The path or a query parameter is wrong.",
    "Unauthorized": "The bearer token is missing or wrong.",
    "NotFound": "Nothing is known about that.",
    "MethodNotAllowed": "The API only reads.",
}


def describe() -> dict[str, Any]:
    """The description as a document."""
    _, schemas = msgspec.json.schema_components(
        _RECORDS, ref_template="#/components/schemas/{name}"
    )
    for name, schema in schemas.items():
        _describe_fields(getattr(documents, name), schema["properties"])
    schemas["Topology"] = _TOPOLOGY
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "nri-numa",
            "version": "1",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "Who has which CPUs and memory nodes of this machine, and why. The API "
            "only reads. Fields may be added; those that are here keep their name and meaning.",
        },
        "servers": [{"url": "/"}],
        "paths": {path: {"get": _operation(*entry)} for path, entry in _PATHS.items()},
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "responses": {name: _document("Error", text) for name, text in _ERRORS.items()},
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "The token of http.tokenFile, when one is configured.",
                }
            },
        },
    }


def _describe_fields(record: Any, properties: dict[str, Any]) -> None:
    hints = get_type_hints(record, include_extras=True)
    for field in msgspec.structs.fields(record):
        for text in getattr(hints[field.name], "__metadata__", ()):
            name = field.encode_name
            properties[name] = {"description": text, **properties[name]}


def _operation(
    name: str,
    summary: str,
    parameters: list[dict[str, Any]],
    answers: dict[str, Any],
    guarded: bool,
) -> dict[str, Any]:
    responses = {
        code: {"$ref": f"#/components/responses/{answer}"} if isinstance(answer, str) else answer
        for code, answer in answers.items()
    }
    responses["400"] = {"$ref": "#/components/responses/BadRequest"}
    if guarded:
        responses["401"] = {"$ref": "#/components/responses/Unauthorized"}
    operation: dict[str, Any] = {"operationId": name, "summary": summary}
    if parameters:
        operation["parameters"] = parameters
    operation["responses"] = dict(sorted(responses.items()))
    operation["security"] = [{}, {"token": []}] if guarded else [{}]
    return operation


class _Plain(yaml.SafeDumper):
    """Writes every node in full: anchors are hard to read."""

    def ignore_aliases(self, data: object) -> bool:
        """Never use anchors."""
        return True


def text() -> str:
    """The description as YAML."""
    head = "# Generated by python -m tools.openapi; edit nri_numa/web/responses.py.\n"
    return head + str(yaml.dump(describe(), Dumper=_Plain, sort_keys=False, width=100))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(text())
