"""What the kubelet says that it gave to a pod, beside what the agent says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nri_numa.kubelet.pod_resources import Given, given_to
from nri_numa.machine.cpuset import CPUSet, ListFormatError, NUMASet
from nri_numa.machine.model import cpus_text, numa_text
from nri_numa.text import harmless

_SHOWN = 8
"""Ids of one resource that a line shows."""


def ask(kubelet_root: str, namespace: str, pod: str) -> dict[str, Any]:
    """Ask the kubelet of this node once: its word, or ``problem`` where there is none.

    Args:
        kubelet_root: its root directory.
        namespace: of the pod.
        pod: its name.
    """
    found = given_to(kubelet_root, namespace, pod)
    if isinstance(found, str):
        return {"problem": found}
    return {"problem": "", "containers": [_document(one) for one in found]}


def _document(given: Given) -> dict[str, Any]:
    return {
        "container": given.container,
        "cpus": str(given.cpus),
        "memory": [
            {"type": one.kind, "sizeBytes": one.size, "numaNodes": str(one.numa_nodes)}
            for one in given.memory
        ],
        "devices": [
            {"resource": one.resource, "ids": list(one.ids), "numaNodes": str(one.numa_nodes)}
            for one in given.devices
        ],
        "claims": list(given.claims),
    }


def sentences(word: Mapping[str, Any], explanations: list[dict[str, Any]]) -> Iterator[str]:
    """The document of `ask` in sentences, one for each container that was explained.

    Args:
        word: the document.
        explanations: of the agent, to say where the two differ.
    """
    if word["problem"]:
        yield f"The kubelet's own word cannot be had: {harmless(word['problem'])}."
        return
    told = {one["container"]: one for one in word["containers"]}
    for explanation in explanations:
        name = explanation["container"]
        one = told.get(name)
        if one is None:
            # Init and ephemeral containers are never told.
            yield f"The kubelet tells nothing of container {harmless(name)}."
            continue
        parts = [*_parts(one)] or ["nothing of its own: no exclusive CPUs, memory or devices"]
        yield f"The kubelet gave container {harmless(name)} {harmless('; '.join(parts))}."
        yield from _differences(one, explanation.get("assignment") or {})


def _parts(one: Mapping[str, Any]) -> Iterator[str]:
    if one["cpus"]:
        yield f"exclusive {cpus_text(CPUSet.parse(one['cpus']))}"
    for block in one["memory"]:
        yield f"{block['sizeBytes']} bytes of {block['type']}{_of(block)}"
    for devices in one["devices"]:
        ids = devices["ids"]
        more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
        yield f"{devices['resource']} {', '.join(ids[:_SHOWN])}{more}{_of(devices)}"
    for claim in one["claims"]:
        yield f"claimed device {claim}"


def _of(one: Mapping[str, Any]) -> str:
    return f" of {numa_text(NUMASet.parse(one['numaNodes']))}" if one["numaNodes"] else ""


def _differences(one: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[str]:
    try:
        has = CPUSet.parse(ours.get("cpus", ""))
    except ListFormatError:
        return
    gave = CPUSet.parse(one["cpus"])
    if gave and has and gave != has:
        yield f"That differs: the agent says {cpus_text(has)}, the kubelet {cpus_text(gave)}."
    held = set(filter(None, ours.get("slots", "").split(",")))
    given = {id for devices in one["devices"] for id in devices["ids"]}
    if held - given:
        yield (
            f"That differs: the agent says that it holds {', '.join(sorted(held - given))}, the "
            "kubelet gave it no such device."
        )
