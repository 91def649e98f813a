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
    CAPTURE_COMMAND,
    MAX_MOVED_PODS,
    CapturedCluster,
    CaptureError,
    find_blocking_pods,
    find_moving_containers,
    nodes_by_container,
    parse_capture,
)
from nri_numa.cli.common import InputError, Unreachable, show_progress
from nri_numa.cli.output import terminal_width, wrap_text, write_document_or_lines
from nri_numa.cluster.manifests import ManifestError
from nri_numa.cluster.node_resources import NodeResources
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.cluster.pod_request import PodRequest
from nri_numa.cluster.pods import PodManifest, Workload, ineffective_annotation_sentences
from nri_numa.config import AgentConfig
from nri_numa.model.machine import count_text
from nri_numa.model.workload import Strategy
from nri_numa.scheduler.candidates import VerdictCache
from nri_numa.scheduler.fit import Fit
from nri_numa.scheduler.nodes import AssumedPod
from nri_numa.simulate.manifests import load_yaml_documents, read_input_text
from nri_numa.text import escape_unprintable, human_bytes

MAX_CAPTURE_BYTES: Final = 256 << 20
"""Bytes of a capture: 5,000 nodes with 20 pods each are below it without managed fields."""
MAX_YAML_CHARS: Final = 16 << 20
"""Characters: YAML is read a hundred times slower than JSON."""
MAX_NAMED_NODES: Final = 5
"""Nodes that a line names."""
NUMA_ONLY_NOTE: Final = (
    "Only NUMA nodes are judged: not the sum of requests, node selectors, affinity, taints, "
    "volumes, quotas of the nodes, or priorities."
)
CLAIMS_NOT_JUDGED_TEXT: Final = (
    "What containers get of ResourceClaims is allocated by the scheduler itself: such containers "
    "are not judged."
)


def simulate_cluster(
    file: str,
    workloads: Sequence[Workload],
    config: AgentConfig,
    output: str,
) -> int:
    """Judge pods one after another, each in what the others leave; the exit code.

    The file is a capture, ``-`` for standard input, and the configuration that of the nodes.

    Raises:
        InputError: the file is no capture.
        Unreachable: it cannot be read.
    """
    with show_progress(f"reading {file}"):
        try:
            reader = PodReader(config)
            cluster = parse_capture(_read_cluster_documents(file), reader, config.annotation_prefix)
        except CaptureError as error:
            raise InputError(escape_unprintable(f"--cluster {file}: {error}")) from error
        except ManifestError as error:
            raise InputError(escape_unprintable(f"--cluster {error}")) from error
    pods = [pod for workload in workloads for pod in workload.pods]
    mistaken = ineffective_annotation_sentences(workloads, config.annotation_prefix)
    nodes, candidates = cluster.nodes, VerdictCache(cluster.nodes, config.strategy)
    claimed = config.dra.enabled and any(one.claims for pod in pods for one in pod.containers)
    with show_progress(f"judging {len(pods)} pods on {len(cluster.names)} nodes"):
        about = {
            "nodes": len(cluster.names),
            "cordoned": sorted(cluster.cordoned),
            "unknown": {
                name: candidates.unreadable_reason(name) or "it has no NodeResourceTopology"
                for name in cluster.names
                if not isinstance(nodes.published_resources(name), NodeResources)
            },
            "pods": cluster.pods,
            "onTheirWay": len(nodes.assumed_pods),
        }
        judged = [
            _evaluate_pod(pod, reader.build_pod_request(pod), cluster, candidates, config.strategy)
            for pod in pods
        ]
    document = {
        "cluster": about,
        "pods": judged,
        "notes": [
            *mistaken,
            *cluster.notes,
            *([CLAIMS_NOT_JUDGED_TEXT] if claimed else []),
            NUMA_ONLY_NOTE,
        ],
    }
    write_document_or_lines(document, output, report_lines(document))
    return 2 if mistaken else int(not all(one["fits"] for one in judged))


def _read_cluster_documents(file: str) -> Iterator[object]:
    try:
        text = read_input_text(file, MAX_CAPTURE_BYTES).strip()
    except OSError as error:
        raise Unreachable(f"--cluster {file}: cannot be read: {error.strerror or error}") from error
    if not text:
        raise CaptureError(f"is empty, expected what {CAPTURE_COMMAND} prints")
    if text[0] not in "{[":
        if len(text) > MAX_YAML_CHARS:
            raise CaptureError(
                f"is YAML of more than {MAX_YAML_CHARS >> 20} MiB; expected JSON (-o json)"
            )
        try:
            yield from load_yaml_documents(text)
        except yaml.YAMLError as error:
            raise CaptureError(
                f"{safe_yaml.yaml_problem_text(error, text)}; expected what "
                f"{CAPTURE_COMMAND} prints"
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


def _evaluate_pod(
    pod: PodManifest,
    request: PodRequest,
    cluster: CapturedCluster,
    candidates: VerdictCache,
    strategy: Strategy,
) -> dict[str, Any]:
    """Where a pod fits, which it then takes; why not elsewhere; and what would have to move."""
    names = [name for name in cluster.names if name not in cluster.cordoned]
    filtered = candidates.filter_nodes(request, names)
    fits: list[tuple[int, str, Fit]] = []
    if not request.is_unconstrained:
        for name in filtered.feasible:
            verdict = candidates.evaluate_node(request, name)
            assert isinstance(verdict, Fit)  # noqa: S101  # the filter said so
            fits.append((verdict.score, name, verdict))
    # The best first, as the scheduler takes them; then by name.
    fits.sort(key=lambda one: (-one[0], one[1]))
    reasons: dict[str, list[str]] = {}
    for name, why in (filtered.failed | filtered.unresolvable).items():
        reasons.setdefault(why, []).append(name)
    document: dict[str, Any] = {
        "namespace": pod.namespace,
        "pod": pod.name,
        "fits": bool(filtered.feasible),
        "asks": not request.is_unconstrained,
        "node": fits[0][1] if fits else "",
        "numaNodes": nodes_by_container(fits[0][2]) if fits else {},
        "nodes": [
            {
                "name": n,
                "score": s,
                "numaNodes": nodes_by_container(v),
                "afterMoving": v.requires_moves,
                "movers": find_moving_containers(v, n, cluster.running, strategy)
                if v.requires_moves and i < MAX_NAMED_NODES
                else [],
            }
            for i, (s, n, v) in enumerate(fits)
        ],
        "refused": [
            {"reason": why, "hopeless": nodes[0] in filtered.unresolvable, "nodes": nodes}
            for why, nodes in sorted(reasons.items(), key=lambda one: (-len(one[1]), one[0]))
        ],
        "wouldHaveToMove": None,
    }
    if fits:
        _, node, verdict = fits[0]
        places, charge = dict(verdict.numa_nodes), verdict.pod_charge
        cluster.nodes.assume_pod(
            AssumedPod(
                request=request,
                node=node,
                numa_nodes=places,
                charge=charge,
                assumed_at=0,
                expires_at=inf,
            )
        )
    elif not filtered.feasible and not request.invalid_reason:
        rooms = {
            name: room
            for name in names
            if isinstance(room := cluster.nodes.free_resources(name), NodeResources)
            and not room.agent_not_ready
        }
        document["wouldHaveToMove"] = find_blocking_pods(request, rooms, cluster.running, strategy)
    return document


# --- in words -------------------------------------------------------------------------------------


def report_lines(document: Mapping[str, Any]) -> list[str]:
    """The document for people."""
    cluster = document["cluster"]
    head = f"{count_text(cluster['nodes'], 'node')} with {count_text(cluster['pods'], 'pod')}"
    if cluster["onTheirWay"]:
        head += f", {cluster['onTheirWay']} of them on their way"
    lines = [head + "."]
    if cluster["cordoned"]:
        lines.append(f"Cordoned, not asked: {_names_text(cluster['cordoned'])}.")
    pods = document["pods"]
    for _, alike in groupby(pods, key=lambda one: list(_verdict_lines(one, ""))):
        group = [*alike]
        names = [f"{one['namespace']}/{one['pod']}" for one in group]
        who = names[0] if len(names) == 1 else f"Each of {len(names)} pods ({_names_text(names)})"
        lines += ["", *_verdict_lines(group[0], who)]
    if len(pods) > 1:
        lines += ["", f"{sum(one['fits'] for one in pods)} of {len(pods)} pods fit."]
    width = max(30, terminal_width())
    return [
        part
        for line in [*lines, "", *document["notes"]]
        for part in wrap_text(line, "", " " * (len(line) - len(line.lstrip()) + 2), width=width)
        or [""]
    ]


def _verdict_lines(one: Mapping[str, Any], name: str) -> Iterator[str]:
    if not one["asks"]:
        yield f"{name} asks for nothing that nri-numa decides: every node fits."
        return
    if one["fits"]:
        yield (
            f"{name} fits on {count_text(len(one['nodes']), 'node')}; it would go to {one['node']}"
        )
        for node in one["nodes"][:MAX_NAMED_NODES]:
            after = ", after movable containers of it moved" if node["afterMoving"] else ""
            if movers := [
                f"{one['container']} ({human_bytes(one['bytes'])}) to {one['numaNode']}"
                for one in node["movers"]
            ]:
                after = f", fits after moving {' and '.join(movers)}"
            yield (
                f"  {node['name']}: {_numa_nodes_text(node['numaNodes'])}, score "
                f"{node['score']}{after}"
            )
        if len(one["nodes"]) > MAX_NAMED_NODES:
            yield f"  and {len(one['nodes']) - MAX_NAMED_NODES} more"
    else:
        yield f"{name} fits on no node"
    for refused in one["refused"]:
        never = ", and waiting does not help" if refused["hopeless"] else ""
        yield f"  refused by {_names_text(refused['nodes'])}: {refused['reason']}{never}"
    if one["wouldHaveToMove"] is not None:
        yield from _moves_lines(one["wouldHaveToMove"])


def _moves_lines(moving: Mapping[str, Any]) -> Iterator[str]:
    if moving["pods"]:
        yield (
            f"  It would fit on {moving['node']}, {_numa_nodes_text(moving['numaNodes'])}, without "
            f"{count_text(len(moving['pods']), 'pod')}:"
        )
        for pod in moving["pods"]:
            to = f"fits on {pod['fitsOn']}" if pod["fitsOn"] else "fits nowhere else"
            yield f"    {pod['pod']}, which {to}"
    else:
        yield f"  Moving up to {MAX_MOVED_PODS} pods away from one node would not make room."
    if moving["cut"]:
        yield f"  The search was cut after {moving['setsTried']} sets: there may be a smaller one."


def _numa_nodes_text(numa_nodes: Mapping[str, str]) -> str:
    parts = [f"{name} on NUMA node {i}" for name, i in numa_nodes.items() if i]
    return "; ".join(parts) or "on any NUMA node"


def _names_text(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED_NODES} more" if len(names) > MAX_NAMED_NODES else ""
    return f"{', '.join(names[:MAX_NAMED_NODES])}{more}"
