"""Sums of a Node as kube-scheduler counts them, claims of pods, and PodDisruptionBudgets. Pure.

A pod fits on a Node by sums if its requests and those of the Node's pods are allocatable
(NodeResourcesFit). Unreadable fields count as missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import ceil
from typing import Any, Final

from msgspec import Struct

from nri_numa.cluster.node_facts import matches_expression
from nri_numa.kube.requests import list_of_mappings, mapping_or_empty, section_of, text_in_section
from nri_numa.text import BadQuantity, parse_exact_quantity

PODS_RESOURCE: Final = "pods"
_LOCAL_VOLUME_KINDS: Final = frozenset(
    {"configMap", "secret", "emptyDir", "projected", "downwardAPI", "hostPath", "image"}
)
"""Volumes that no node runs out of."""


def pod_sums(document: Mapping[str, Any]) -> Counter[str]:
    """Return the requests of a pod by resource: CPUs in thousandths, and one of the pods."""
    spec = section_of(document, "spec")
    running, peak = Counter[str](), Counter[str]()
    for container in list_of_mappings(spec.get("initContainers")):
        amounts = _requested_sums(container)
        peak |= running + amounts
        if container.get("restartPolicy") == "Always":
            running += amounts
    for container in list_of_mappings(spec.get("containers")):
        running += _requested_sums(container)
    sums = Counter({**(running | peak), **_requested_sums(spec)})
    return sums + _amounts(spec.get("overhead")) + Counter({PODS_RESOURCE: 1})


def _requested_sums(section: Mapping[str, Any]) -> Counter[str]:
    return _amounts(section_of(section, "resources").get("requests"))


def allocatable_sums(node: Mapping[str, Any]) -> Mapping[str, int]:
    """Return the allocatable amounts of a Node by resource."""
    return _amounts(section_of(node, "status").get("allocatable"))


def missing_sums(
    demand: Mapping[str, int], allocatable: Mapping[str, int], pods: Iterable[Mapping[str, int]]
) -> dict[str, int]:
    """Return the amounts that pods of a Node must give back before another one fits."""
    used = Counter[str]()
    for sums in pods:
        used.update(sums)
    amounts = {name: used[name] + n - allocatable.get(name, 0) for name, n in demand.items()}
    return {name: amount for name, amount in amounts.items() if amount > 0}


def _amounts(value: object) -> Counter[str]:
    return Counter(
        {name: _amount(name, str(text)) for name, text in mapping_or_empty(value).items()}
    )


@lru_cache(maxsize=4096)
def _amount(resource: str, text: str) -> int:
    try:
        return ceil(parse_exact_quantity(text) * (1000 if resource == "cpu" else 1))
    except BadQuantity:
        return 0


def has_neighbour_constraints(document: Mapping[str, Any]) -> bool:
    """Return True if a pod is kept from a node by more than sums.

    Ports, volumes and other pods may do so; kube-scheduler alone checks them.
    """
    spec = section_of(document, "spec")
    affinity = section_of(spec, "affinity")
    ports = (
        port
        for key in ("containers", "initContainers")
        for container in list_of_mappings(spec.get(key))
        for port in list_of_mappings(container.get("ports"))
    )
    volumes = list_of_mappings(spec.get("volumes"))
    return bool(
        affinity.get("podAffinity")
        or affinity.get("podAntiAffinity")
        or spec.get("topologySpreadConstraints")
        or spec.get("resourceClaims")
        or any(port.get("hostPort") for port in ports)
        or any(not (volume.keys() - {"name"} <= _LOCAL_VOLUME_KINDS) for volume in volumes)
    )


def repels_other_pods(document: Mapping[str, Any]) -> bool:
    """Return True if a pod of a node may keep others from it by its anti-affinity."""
    affinity = section_of(document, "spec", "affinity")
    return bool(affinity.get("podAntiAffinity"))


def claim_uses(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return container and request of each ResourceClaim that a pod's containers use.

    The request is empty for all requests of a claim.
    """
    return [
        (str(container.get("name")), str(use.get("request") or ""))
        for container in list_of_mappings(section_of(document, "spec").get("containers"))
        for use in list_of_mappings(section_of(container, "resources").get("claims"))
    ]


class DisruptionBudget(Struct, frozen=True):
    """A PodDisruptionBudget.

    Attributes:
        allowed: evictions that it allows now.
        disrupted: names of pods whose eviction is counted already.
    """

    namespace: str
    selector: Mapping[str, Any]
    allowed: int
    disrupted: frozenset[str]

    def covers(self, document: Mapping[str, Any]) -> bool:
        """Return True if the eviction of a pod counts; an empty selector matches no pod."""
        metadata = section_of(document, "metadata")
        if metadata.get("namespace") != self.namespace or metadata.get("name") in self.disrupted:
            return False
        labels = section_of(metadata, "labels")
        equal = section_of(self.selector, "matchLabels")
        expressions = list_of_mappings(self.selector.get("matchExpressions"))
        return bool(labels and (equal or expressions)) and (
            all(labels.get(key) == value for key, value in equal.items())
            and all(matches_expression(labels, e) for e in expressions)
        )


def read_disruption_budget(document: Mapping[str, Any]) -> DisruptionBudget:
    """Read a PodDisruptionBudget; without a status it allows no eviction."""
    status = section_of(document, "status")
    allowed = status.get("disruptionsAllowed")
    return DisruptionBudget(
        text_in_section(document, "metadata", "namespace"),
        section_of(document, "spec", "selector"),
        max(0, allowed) if isinstance(allowed, int) else 0,
        frozenset(section_of(status, "disruptedPods")),
    )
