"""``nri-numa simulate --cluster FILE``: would pods fit in a cluster, where, and what would move."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import inf
from typing import Any, Final

import yaml

from nri_numa import safe_yaml
from nri_numa.cli.captured_cluster import (
    EXPECTED,
    LARGEST,
    Captured,
    CaptureError,
    captured,
    moving,
    numa_nodes,
    search,
)
from nri_numa.cli.common import Mistake, Unreachable, progress
from nri_numa.cli.output import answer, terminal_width, wrapped
from nri_numa.model.machine import counted
from nri_numa.model.settings import Settings
from nri_numa.model.workload import Strategy
from nri_numa.scheduler.candidates import CandidateIndex
from nri_numa.scheduler.fit import Fits
from nri_numa.scheduler.node_room import NodeRoom
from nri_numa.scheduler.nodes import Hold
from nri_numa.scheduler.pod_reader import PodReader
from nri_numa.scheduler.pod_request import PodRequest
from nri_numa.simulate.manifests import ManifestError, parse_all, text_of
from nri_numa.simulate.pods import PodManifest, Workload, without_effect
from nri_numa.text import harmless, human_bytes

LARGEST_FILE: Final = 256 << 20
"""Bytes of a capture: 5,000 nodes with 20 pods each are below it without managed fields."""
LARGEST_YAML: Final = 16 << 20
"""Characters: YAML is read a hundred times slower than JSON."""
NAMED: Final = 5
"""Nodes that a line names."""
NOT_JUDGED: Final = (
    "Only NUMA nodes are judged: not the sum of requests, node selectors, affinity, taints, "
    "volumes, quotas of the nodes, or priorities."
)
CLAIMS: Final = (
    "What containers get of ResourceClaims is allocated by the scheduler itself: such containers "
    "are not judged."
)


def simulate_cluster(
    file: str,
    workloads: Sequence[Workload],
    settings: Settings,
    output: str,
    counted_by: str = "",
    claims: bool = False,
) -> int:
    """Judge pods one after another, each in what the others leave; the exit code.

    The file is a capture, ``-`` for standard input. Settings, the extended resource that counts
    exclusive CPUs, and whether our DRA driver is on (``claims``) are those of the nodes.

    Raises:
        Mistake: the file is no capture.
        Unreachable: it cannot be read.
    """
    with progress(f"reading {file}"):
        try:
            reader = PodReader(settings, counted_by, claims=claims)
            cluster = captured(_documents(file), reader, settings.prefix)
        except CaptureError as error:
            raise Mistake(harmless(f"--cluster {file}: {error}")) from error
        except ManifestError as error:
            raise Mistake(harmless(f"--cluster {error}")) from error
    pods = [pod for workload in workloads for pod in workload.pods]
    mistaken = without_effect(workloads, settings.prefix)
    nodes, candidates = cluster.nodes, CandidateIndex(cluster.nodes, settings.strategy)
    claimed = claims and any(one.claims for pod in pods for one in pod.containers)
    with progress(f"judging {len(pods)} pods on {len(cluster.names)} nodes"):
        about = {
            "nodes": len(cluster.names),
            "cordoned": sorted(cluster.cordoned),
            "unknown": {
                name: candidates.why(name) or "it has no NodeResourceTopology"
                for name in cluster.names
                if not isinstance(nodes.published(name), NodeRoom)
            },
            "pods": cluster.pods,
            "onTheirWay": len(nodes.holds),
        }
        judged = [
            _judged(pod, reader.request_of(pod), cluster, candidates, settings.strategy)
            for pod in pods
        ]
    document = {
        "cluster": about,
        "pods": judged,
        "notes": [
            *mistaken,
            *cluster.notes,
            *([CLAIMS] if claimed else []),
            NOT_JUDGED,
        ],
    }
    answer(document, output, story(document))
    return 2 if mistaken else int(not all(one["fits"] for one in judged))


def _documents(file: str) -> Iterator[object]:
    try:
        text = text_of(file, LARGEST_FILE).strip()
    except OSError as error:
        raise Unreachable(f"--cluster {file}: cannot be read: {error.strerror or error}") from error
    if not text:
        raise CaptureError(f"is empty, expected what {EXPECTED} prints")
    if text[0] not in "{[":
        if len(text) > LARGEST_YAML:
            raise CaptureError(
                f"is YAML of more than {LARGEST_YAML >> 20} MiB; expected JSON (-o json)"
            )
        try:
            yield from parse_all(text)
        except yaml.YAMLError as error:
            raise CaptureError(
                f"{safe_yaml.problem_of(error, text)}; expected what {EXPECTED} prints"
            ) from error
        return
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        try:
            document, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise CaptureError(f"is no JSON: {str(error)[:100]}") from error
        yield document
        while at < len(text) and text[at].isspace():
            at += 1


def _judged(
    pod: PodManifest,
    request: PodRequest,
    cluster: Captured,
    candidates: CandidateIndex,
    strategy: Strategy,
) -> dict[str, Any]:
    """Where a pod fits, which it then takes; why not elsewhere; and what would have to move."""
    names = [name for name in cluster.names if name not in cluster.cordoned]
    filtered = candidates.filter(request, names)
    fits: list[tuple[int, str, Fits]] = []
    if not request.nothing:
        for name in filtered.fits:
            verdict = candidates.verdict(request, name)
            assert isinstance(verdict, Fits)  # noqa: S101  # the filter said so
            fits.append((verdict.score, name, verdict))
    # The best first, as the scheduler takes them; then by name.
    fits.sort(key=lambda one: (-one[0], one[1]))
    reasons: dict[str, list[str]] = {}
    for name, why in (filtered.failed | filtered.hopeless).items():
        reasons.setdefault(why, []).append(name)
    document: dict[str, Any] = {
        "namespace": pod.namespace,
        "pod": pod.name,
        "fits": bool(filtered.fits),
        "asks": not request.nothing,
        "node": fits[0][1] if fits else "",
        "numaNodes": numa_nodes(fits[0][2]) if fits else {},
        "nodes": [
            {
                "name": n,
                "score": s,
                "numaNodes": numa_nodes(v),
                "afterMoving": v.moves,
                "movers": moving(v, n, cluster.running, strategy) if v.moves and i < NAMED else [],
            }
            for i, (s, n, v) in enumerate(fits)
        ],
        "refused": [
            {"reason": why, "hopeless": nodes[0] in filtered.hopeless, "nodes": nodes}
            for why, nodes in sorted(reasons.items(), key=lambda one: (-len(one[1]), one[0]))
        ],
        "wouldHaveToMove": None,
    }
    if fits:
        _, node, verdict = fits[0]
        places, charge = dict(verdict.places), verdict.charge
        cluster.nodes.hold(
            Hold(request=request, node=node, places=places, charge=charge, since=0, until=inf)
        )
    elif not filtered.fits and not request.wrong:
        rooms = {
            name: room
            for name in names
            if isinstance(room := cluster.nodes.room(name), NodeRoom) and not room.silent
        }
        document["wouldHaveToMove"] = search(request, rooms, cluster.running, strategy)
    return document


# --- in words -------------------------------------------------------------------------------------


def story(document: Mapping[str, Any]) -> list[str]:
    """The document for people."""
    cluster = document["cluster"]
    head = f"{counted(cluster['nodes'], 'node')} with {counted(cluster['pods'], 'pod')}"
    if cluster["onTheirWay"]:
        head += f", {cluster['onTheirWay']} of them on their way"
    lines = [head + "."]
    if cluster["cordoned"]:
        lines.append(f"Cordoned, not asked: {_named(cluster['cordoned'])}.")
    pods = document["pods"]
    for _, alike in groupby(pods, key=lambda one: list(_about(one, ""))):
        group = [*alike]
        names = [f"{one['namespace']}/{one['pod']}" for one in group]
        who = names[0] if len(names) == 1 else f"Each of {len(names)} pods ({_named(names)})"
        lines += ["", *_about(group[0], who)]
    if len(pods) > 1:
        lines += ["", f"{sum(one['fits'] for one in pods)} of {len(pods)} pods fit."]
    width = max(30, terminal_width())
    return [
        part
        for line in [*lines, "", *document["notes"]]
        for part in wrapped(line, "", " " * (len(line) - len(line.lstrip()) + 2), width=width)
        or [""]
    ]


def _about(one: Mapping[str, Any], name: str) -> Iterator[str]:
    if not one["asks"]:
        yield f"{name} asks for nothing that nri-numa decides: every node fits."
        return
    if one["fits"]:
        yield f"{name} fits on {counted(len(one['nodes']), 'node')}; it would go to {one['node']}"
        for node in one["nodes"][:NAMED]:
            after = ", after movable containers of it moved" if node["afterMoving"] else ""
            if movers := [
                f"{one['container']} ({human_bytes(one['bytes'])}) to {one['numaNode']}"
                for one in node["movers"]
            ]:
                after = f", fits after moving {' and '.join(movers)}"
            yield f"  {node['name']}: {_zones(node['numaNodes'])}, score {node['score']}{after}"
        if len(one["nodes"]) > NAMED:
            yield f"  and {len(one['nodes']) - NAMED} more"
    else:
        yield f"{name} fits on no node"
    for refused in one["refused"]:
        never = ", and waiting does not help" if refused["hopeless"] else ""
        yield f"  refused by {_named(refused['nodes'])}: {refused['reason']}{never}"
    if one["wouldHaveToMove"] is not None:
        yield from _about_moving(one["wouldHaveToMove"])


def _about_moving(moving: Mapping[str, Any]) -> Iterator[str]:
    if moving["pods"]:
        yield (
            f"  It would fit on {moving['node']}, {_zones(moving['numaNodes'])}, without "
            f"{counted(len(moving['pods']), 'pod')}:"
        )
        for pod in moving["pods"]:
            to = f"fits on {pod['fitsOn']}" if pod["fitsOn"] else "fits nowhere else"
            yield f"    {pod['pod']}, which {to}"
    else:
        yield f"  Moving up to {LARGEST} pods away from one node would not make room."
    if moving["cut"]:
        yield f"  The search was cut after {moving['setsTried']} sets: there may be a smaller one."


def _zones(numa_nodes: Mapping[str, str]) -> str:
    parts = [f"{name} on NUMA node {i}" for name, i in numa_nodes.items() if i]
    return "; ".join(parts) or "on any NUMA node"


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"
