"""Documents of Kubernetes for tests: pods of the image that the bed has, and their owners."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.beds.cri import PREFIX as PREFIX
from tests.beds.cri import asks as asks
from tests.beds.images import FIRST_LINE_COMMAND, IMAGE
from tests.beds.kube.client import JsonObject

EXCLUSIVE = asks(cpus="exclusive")


def container(
    name: str = "main",
    *,
    cpus: str = "50m",
    memory: str = "32Mi",
    limits: bool = True,
    command: Sequence[str] = FIRST_LINE_COMMAND,
    **more: Any,
) -> JsonObject:
    """A container that prints what it may use before it does anything else, and stays.

    `cpus`: its request, a Kubernetes quantity; empty for none.
    `memory`: its request; empty for none.
    """
    requests = {key: text for key, text in (("cpu", cpus), ("memory", memory)) if text}
    resources = {"requests": requests, **({"limits": requests} if limits else {})}
    return {
        "name": name,
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": list(command),
        "resources": resources,
        **more,
    }


def template(
    *containers: JsonObject, annotations: Mapping[str, str] | None = None, **spec: Any
) -> JsonObject:
    """Metadata and spec of a pod, as a Deployment holds them.

    `containers`: default `container`.
    """
    return {
        "metadata": {"annotations": dict(annotations or {}), "labels": {}},
        "spec": {
            "containers": list(containers) or [container()],
            # "sleep" as process 1 does not hear SIGTERM.
            "terminationGracePeriodSeconds": 0,
            **spec,
        },
    }


def pod(name: str, *containers: JsonObject, **keys: Any) -> JsonObject:
    document = template(*containers, **keys)
    document["metadata"]["name"] = name
    return {"apiVersion": "v1", "kind": "Pod", **document}


def definition(kind: str, group: str, version: str, scope: str = "Cluster") -> JsonObject:
    """A kind of somebody else with any fields: not its schema is judged."""
    plural = f"{kind.lower()}s" if kind[-1] != "y" else f"{kind.lower()[:-1]}ies"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    one = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": scope,
            "names": {"kind": kind, "plural": plural},
            "versions": [one],
        },
    }


def workload(kind: str, name: str, pods: JsonObject, **spec: Any) -> JsonObject:
    """A Deployment, DaemonSet, StatefulSet or Job of pods like `pods`, labelled ``app=<name>``."""
    pods = {**pods, "metadata": {**pods["metadata"], "labels": {"app": name}}}
    group = "batch/v1" if kind == "Job" else "apps/v1"
    selector = {} if kind == "Job" else {"selector": {"matchLabels": {"app": name}}}
    return {
        "apiVersion": group,
        "kind": kind,
        "metadata": {"name": name},
        "spec": {"template": pods, **selector, **spec},
    }
