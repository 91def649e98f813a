"""Manifests of small pods, as text."""

import json
from collections.abc import Mapping
from typing import Any

from nri_numa.engine.node_model import MeasuredFree, NodeModel
from nri_numa.model.machine import Topology
from nri_numa.model.settings import Settings
from nri_numa.simulate.manifests import read_manifests_from_text
from nri_numa.simulate.simulator import ContainerOutcome, Simulation, plan_actions, simulate_plan

PREFIX = "numa.kubernetes.io/"


def pod(
    name: str = "pod",
    cpus: float | str | None = None,
    memory: str | None = None,
    wishes: Mapping[str, str] | None = None,
    *,
    guaranteed: bool = True,
    hugepages: str | None = None,
) -> str:
    """One Pod document with one container; annotation keys are given without the prefix."""
    amounts: dict[str, Any] = {}
    if cpus is not None:
        amounts["cpu"] = cpus
    if memory is not None:
        amounts["memory"] = memory
    if hugepages is not None:
        amounts["hugepages-2Mi"] = hugepages
    where = "limits" if guaranteed else "requests"
    return document("Pod", name, {"containers": [container("app", {where: amounts})]}, wishes)


def container(name: str, resources: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "image": "busybox:1.36", "resources": resources, **more}


def document(
    kind: str, name: str, spec: Mapping[str, Any], wishes: Mapping[str, str] | None = None
) -> str:
    """A document whose pods have these annotations; JSON is YAML."""
    annotations = {PREFIX + key: value for key, value in (wishes or {}).items()}
    version = {"Pod": "v1", "Job": "batch/v1"}.get(kind, "apps/v1")
    meta = {"name": name, "annotations": annotations}
    return json.dumps({"apiVersion": version, "kind": kind, "metadata": meta, "spec": spec})


def replicated(
    kind: str,
    name: str,
    count: int,
    spec: Mapping[str, Any],
    wishes: Mapping[str, str] | None = None,
) -> str:
    """A document that makes several pods."""
    annotations = {PREFIX + key: value for key, value in (wishes or {}).items()}
    template = {"metadata": {"annotations": annotations}, "spec": spec}
    return document(kind, name, {"replicas": count, "template": template})


def run(
    topology: Topology,
    *documents: str,
    settings: Settings | None = None,
    reading: MeasuredFree | None = None,
    keep_going: bool = False,
) -> Simulation:
    manifests = read_manifests_from_text("\n---\n".join(documents), "pods.yaml")
    machine = NodeModel(topology=topology, settings=settings or Settings())
    return simulate_plan(
        machine, plan_actions(manifests.workloads), reading=reading, keep_going=keep_going
    )


def outcomes(result: Simulation) -> dict[str, ContainerOutcome]:
    """By ``pod/container``, how each fared the last time something happened to it."""
    return {
        f"{event.pod.name}/{outcome.container}": outcome
        for event in result.events
        for outcome in event.outcomes
    }


def the(result: Simulation) -> ContainerOutcome:
    """The only container of the last event."""
    (outcome,) = result.events[-1].outcomes
    return outcome
