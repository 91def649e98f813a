"""What others say of the capacity of nodes: documents, judged. Pure.

A PUT carries the NUMA nodes of one Node::

    {"zones": {"0": 0.5, "1": 1}, "validity": 60}

A file holds those of many, and a query of Prometheus one sample for each NUMA node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from nri_numa.offline_capacity import BadCapacity, factor, zone, zones

MOST_NODES: Final = 20_000
MOST_PROBLEMS: Final = 20
"""Problems of one document that are told; the rest is counted."""
LEAST_VALIDITY: Final = 5.0


@dataclass(frozen=True, slots=True)
class Offer:
    """What one source says of one Node.

    Attributes:
        node: its name.
        zones: by NUMA node, the part of its CPUs that is there.
        validity: seconds that this counts; None for the source's own.
    """

    node: str
    zones: Mapping[int, float]
    validity: float | None = None


def from_put(node: str, document: object, *, longest: float) -> Offer:
    """The body of a PUT.

    Args:
        node: whom it is about.
        document: of the body.
        longest: seconds of validity that may be asked for.

    Raises:
        BadCapacity: it is not as expected.
    """
    if not isinstance(document, Mapping):
        raise BadCapacity('expected a JSON object such as {"zones": {"0": 0.5}}')
    if unknown := sorted(str(key) for key in document if key not in ("zones", "validity")):
        raise BadCapacity(f"unknown key {ascii(unknown[0])[:60]}, expected zones and validity")
    found = zones(document.get("zones"))
    if not found:
        raise BadCapacity("zones: is empty, expected at least one NUMA node")
    validity = document.get("validity")
    if validity is None:
        return Offer(node, found)
    if isinstance(validity, bool) or not isinstance(validity, int | float):
        raise BadCapacity(f"validity: {ascii(validity)[:60]}, expected seconds")
    if not LEAST_VALIDITY <= validity <= longest:
        raise BadCapacity(
            f"validity: {ascii(validity)[:60]}, expected {LEAST_VALIDITY:g} to {longest:g} seconds"
        )
    return Offer(node, found, float(validity))


def from_file(document: object) -> tuple[list[Offer], list[str]]:
    """A file ``{nodes: {worker-1: {0: 0.5}}}``: what is sound of it, and what is wrong.

    Raises:
        BadCapacity: nothing of it can be used.
    """
    nodes = document.get("nodes") if isinstance(document, Mapping) else None
    if not isinstance(nodes, Mapping) or set(document) != {"nodes"}:  # type: ignore[call-overload]
        raise BadCapacity("expected a mapping with the one key nodes: {worker-1: {0: 0.5}}")
    if len(nodes) > MOST_NODES:
        raise BadCapacity(f"nodes: has {len(nodes)} entries, expected {MOST_NODES} at most")
    offers: list[Offer] = []
    problems: list[str] = []
    for name, one in nodes.items():
        try:
            offers.append(Offer(str(name), zones(one)))
        except BadCapacity as error:
            problems.append(f"nodes.{ascii(str(name))[:80]}: {error}")
    return offers, shortened(problems)


def from_query(
    document: object, *, node_label: str, numa_node_label: str
) -> tuple[list[Offer], list[str]]:
    """The answer to an instant query: what is sound of it, and what is wrong.

    Args:
        document: of ``/api/v1/query``.
        node_label: label with the Node.
        numa_node_label: label with the NUMA node.

    Raises:
        BadCapacity: it is no such answer.
    """
    if not isinstance(document, Mapping) or document.get("status") != "success":
        told = document.get("error") if isinstance(document, Mapping) else None
        raise BadCapacity(f"the query failed: {ascii(told)[:200]}")
    data = document.get("data")
    samples = data.get("result") if isinstance(data, Mapping) else None
    if not isinstance(samples, list) or data.get("resultType") != "vector":  # type: ignore[union-attr]
        raise BadCapacity("the query's result is no instant vector")
    found: dict[str, dict[int, float]] = {}
    problems: list[str] = []
    for sample in samples:
        try:
            node, i, value = _sample(sample, node_label, numa_node_label)
            if i in found.setdefault(node, {}):
                raise BadCapacity(f"node {node}, NUMA node {i}: has more than one sample")
            found[node][i] = value
        except BadCapacity as error:
            problems.append(str(error))
    if len(found) > MOST_NODES:
        raise BadCapacity(f"the query tells {len(found)} nodes, expected {MOST_NODES} at most")
    offers = [Offer(node, zones) for node, zones in sorted(found.items()) if zones]
    return offers, shortened(problems)


def _sample(sample: Any, node_label: str, numa_node_label: str) -> tuple[str, int, float]:
    labels = sample.get("metric") if isinstance(sample, Mapping) else None
    value = sample.get("value") if isinstance(sample, Mapping) else None
    if not isinstance(labels, Mapping) or not isinstance(value, list) or len(value) != 2:
        raise BadCapacity(f"a sample is not as expected: {ascii(sample)[:120]}")
    node, numa_node = labels.get(node_label), labels.get(numa_node_label)
    if not isinstance(node, str) or not node:
        raise BadCapacity(f"a sample has no label {node_label}: {ascii(dict(labels))[:120]}")
    where = f"node {ascii(node)[:80]}, {numa_node_label}={ascii(numa_node)[:40]}"
    try:
        # A text in JSON, so that NaN and infinities can be told.
        return node, zone(numa_node), factor(float(str(value[1])[:40]))
    except BadCapacity as error:
        raise BadCapacity(f"{where}: {error}") from None
    except ValueError:
        raise BadCapacity(f"{where}: {ascii(value[1])[:40]} is no number") from None


def shortened(problems: Iterable[str]) -> list[str]:
    """The first problems, and how many more there are."""
    found = list(problems)
    more = len(found) - MOST_PROBLEMS
    return [*found[:MOST_PROBLEMS], f"and {more} more"] if more > 0 else found
