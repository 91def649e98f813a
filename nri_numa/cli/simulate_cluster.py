"""``nri-numa simulate --cluster FILE``: the nodes of a cluster on which pods would fit.

The file is the output of ``kubectl get noderesourcetopologies,nodes,pods -A -o json``. It is read
in the same way as the scheduler's watches (`nri_numa.cluster`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import groupby
from typing import Any, Final

import yaml
from msgspec import Struct

from nri_numa import safe_yaml
from nri_numa.cli.common import InputError, Unreachable, show_progress
from nri_numa.cli.output import terminal_width, wrap_text, write_document_or_lines
from nri_numa.cluster.cluster_state import AssumedPod, ClusterState
from nri_numa.cluster.manifests import ManifestError, value_text
from nri_numa.cluster.node_facts import Exclusion, node_admits
from nri_numa.cluster.node_resources import NodeResources
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.cluster.pod_request import PodRequest
from nri_numa.cluster.pods import (
    PodManifest,
    Workload,
    ineffective_annotation_sentences,
    is_finished,
)
from nri_numa.config import AgentConfig
from nri_numa.errors import AgentError
from nri_numa.kube.requests import text_in_section
from nri_numa.model.machine import count_text
from nri_numa.scheduler.candidates import VerdictCache
from nri_numa.scheduler.fit import Fit
from nri_numa.simulate.manifests import load_yaml_documents, read_input_text
from nri_numa.text import escape_unprintable

MAX_CAPTURE_BYTES: Final = 256 << 20
"""Maximum size of a capture; 5,000 nodes with 20 pods each fit without managed fields."""
MAX_YAML_CHARS: Final = 16 << 20
"""Maximum characters of YAML, which is read a hundred times slower than JSON."""
MAX_NAMED_NODES: Final = 5
"""Maximum nodes that a line names."""
CAPTURE_COMMAND: Final = "kubectl get noderesourcetopologies,nodes,pods --all-namespaces -o json"
_CAPTURED_KINDS: Final = ("NodeResourceTopology", "Node", "Pod")
NOT_JUDGED_NOTE: Final = (
    "Checked: NUMA nodes, taints, node selectors and node affinity. Not checked: the sum of "
    "requests, "
    "volumes, affinity among pods, quotas of the nodes, or priorities."
)
CLAIMS_NOT_JUDGED_TEXT: Final = (
    "The scheduler itself allocates ResourceClaims, so containers with claims are not checked."
)
_EXCLUSION_TEXTS: Final = {
    Exclusion.CORDONED: "it is cordoned",
    Exclusion.TAINT: "it has a taint that the pod does not tolerate",
    Exclusion.AFFINITY: "the pod's node selector or node affinity does not match it",
}

Document = Mapping[str, Any]


class CaptureError(AgentError):
    """A file that is no capture of a cluster; the text says what was expected."""


class CapturedCluster(Struct, frozen=True):
    """A cluster, and notes about its capture.

    ``names`` are all nodes in order, also those without an object; ``pods`` is the number of pods
    that have not ended.
    """

    state: ClusterState
    names: tuple[str, ...]
    pods: int
    notes: tuple[str, ...]

    def exclusion(self, name: str, spec: Document) -> Exclusion | None:
        """Return why a node takes no pod with this spec; None if it does, or without a Node."""
        facts = self.state.node_facts(name)
        return None if facts is None else node_admits(facts, spec)


def simulate_cluster(
    file: str, workloads: Sequence[Workload], config: AgentConfig, output: str
) -> int:
    """Evaluate pods in order, each with the resources that are still free; return the exit code.

    The file is a capture, ``-`` for standard input, and the configuration is that of the nodes.

    Raises:
        InputError: the file is no capture.
        Unreachable: the file cannot be read.
    """
    reader = PodReader(config)
    with show_progress(f"reading {file}"):
        try:
            cluster = parse_capture(_read_cluster_documents(file), reader)
        except CaptureError as error:
            raise InputError(escape_unprintable(f"--cluster {file}: {error}")) from error
        except ManifestError as error:
            raise InputError(escape_unprintable(f"--cluster {error}")) from error
    pods = [pod for workload in workloads for pod in workload.pods]
    mistaken = ineffective_annotation_sentences(workloads, config.annotation_prefix)
    state, candidates = cluster.state, VerdictCache(cluster.state, config.strategy)
    claimed = config.dra.enabled and any(c.claims for pod in pods for c in pod.containers)
    with show_progress(f"judging {len(pods)} pods on {len(cluster.names)} nodes"):
        facts = [f for name in cluster.names if (f := state.node_facts(name)) is not None]
        about = {
            "nodes": len(cluster.names),
            "cordoned": [f.name for f in facts if f.unschedulable],
            "unknown": {
                name: candidates.unreadable_reason(name) or "it has no NodeResourceTopology"
                for name in cluster.names
                if not isinstance(state.published_resources(name), NodeResources)
            },
            "pods": cluster.pods,
            "assumedPods": len(state.assumed_pods),
        }
        results = [
            _evaluate_pod(pod, reader.build_pod_request(pod), cluster, candidates) for pod in pods
        ]
    notes = [*mistaken, *cluster.notes, *([CLAIMS_NOT_JUDGED_TEXT] if claimed else [])]
    document = {"cluster": about, "pods": results, "notes": [*notes, NOT_JUDGED_NOTE]}
    write_document_or_lines(document, output, report_lines(document))
    return 2 if mistaken else int(not all(r["feasible"] for r in results))


# --- the capture ----------------------------------------------------------------------------------


def parse_capture(documents: Iterable[object], reader: PodReader) -> CapturedCluster:
    """Parse a capture: lists of objects, or objects, as kubectl prints them.

    Raises:
        CaptureError: it is neither, or has no NodeResourceTopology.
    """
    objects: dict[str, dict[str, Document]] = {kind: {} for kind in _CAPTURED_KINDS}
    skipped_names: set[str] = set()
    for document in _flatten_objects(documents):
        kind = document.get("kind")
        if not isinstance(kind, str) or kind not in objects:
            skipped_names.add(kind[:60] if isinstance(kind, str) else "an object without a kind")
            continue
        name = text_in_section(document, "metadata", "name")
        if not name:
            raise CaptureError(
                f"a {kind} has no metadata.name; expected what {CAPTURE_COMMAND} prints"
            )
        namespace = text_in_section(document, "metadata", "namespace")
        objects[kind][f"{namespace}/{name}" if kind == "Pod" else name] = document
    topologies, nodes, pods = (objects[kind] for kind in _CAPTURED_KINDS)
    if not topologies:
        kind_names = sorted([*skipped_names, *(kind for kind in _CAPTURED_KINDS if objects[kind])])
        raise CaptureError(
            f"has no NodeResourceTopology, but {', '.join(kind_names) or 'nothing'}; expected what "
            f"{CAPTURE_COMMAND} prints, where nri-numa publish writes them "
            "(publish.nodeResourceTopology)"
        )
    pods = {name: document for name, document in sorted(pods.items()) if not is_finished(document)}
    state = ClusterState.from_documents(
        [*topologies.values(), *nodes.values(), *pods.values()], reader
    )
    return CapturedCluster(
        state=state,
        names=tuple(sorted(nodes or topologies)),
        pods=len(pods),
        notes=tuple(_capture_notes(skipped_names, topologies.keys(), nodes.keys(), pods.keys())),
    )


def _capture_notes(
    skipped_names: Set[str], topologies: Set[str], nodes: Set[str], pods: Set[str]
) -> Iterator[str]:
    if skipped_names:
        yield f"Skipped: {', '.join(sorted(skipped_names))}."
    if not nodes:
        yield (
            "It has no Nodes: all nodes with a NodeResourceTopology count as ready, and without "
            "taints."
        )
    if not pods:
        yield "It has no Pods: assumed pods are not known."
    if nodes and (orphans := topologies - nodes):
        yield f"NodeResourceTopology without a Node, skipped: {_names_text(sorted(orphans))}."


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
    decoder, offset = json.JSONDecoder(), 0
    while offset < len(text):
        try:
            document, offset = decoder.raw_decode(text, offset)
        except (ValueError, RecursionError) as error:
            raise CaptureError(f"is no JSON: {str(error)[:100]}") from error
        yield document
        while offset < len(text) and text[offset].isspace():
            offset += 1


def _flatten_objects(documents: Iterable[object]) -> Iterator[Document]:
    for document in documents:
        if not isinstance(document, Mapping):
            raise CaptureError(f"is {value_text(document)}, expected what {CAPTURE_COMMAND} prints")
        items = document.get("items")
        if isinstance(items, list) and str(document.get("kind", "List")).endswith("List"):
            # The items of a typed list have no kind of their own.
            kind = str(document.get("kind", "")).removesuffix("List")
            yield from _flatten_objects(
                {"kind": kind, **item} if kind and isinstance(item, Mapping) else item
                for item in items
            )
        else:
            yield document


# --- one pod --------------------------------------------------------------------------------------


def _evaluate_pod(
    pod: PodManifest,
    request: PodRequest,
    cluster: CapturedCluster,
    candidates: VerdictCache,
) -> dict[str, Any]:
    """Return the nodes on which a pod fits and the reasons of the others; assume it on the best."""
    excluded = {
        name: reason
        for name in cluster.names
        if (reason := cluster.exclusion(name, pod.node_constraints)) is not None
    }
    names = [name for name in cluster.names if name not in excluded]
    filtered = candidates.filter_nodes(request, names)
    fits: list[tuple[int, str, Fit]] = []
    if not request.is_unconstrained:
        for name in filtered.feasible:
            verdict = candidates.evaluate_node(request, name)
            assert isinstance(verdict, Fit)  # noqa: S101  # the filter said so
            fits.append((verdict.score, name, verdict))
    # The best first, as the scheduler takes them; then by name.
    fits.sort(key=lambda one: (-one[0], one[1]))
    reasons = {name: _EXCLUSION_TEXTS[reason] for name, reason in excluded.items()}
    reasons |= filtered.failed | filtered.unresolvable
    unresolvable = {name for name, reason in excluded.items() if reason is Exclusion.AFFINITY}
    document: dict[str, Any] = {
        "namespace": pod.namespace,
        "pod": pod.name,
        "feasible": bool(filtered.feasible),
        "constrained": not request.is_unconstrained,
        "node": fits[0][1] if fits else "",
        "numaNodes": nodes_by_container(fits[0][2]) if fits else {},
        "nodes": [
            {
                "name": n,
                "score": s,
                "numaNodes": nodes_by_container(v),
                "afterMoves": v.requires_moves,
            }
            for s, n, v in fits
        ],
        "rejectedBy": _group_by_reason(reasons, unresolvable | filtered.unresolvable.keys()),
    }
    if fits:
        _, node, verdict = fits[0]
        cluster.state.assume_pod(
            AssumedPod(
                request=request,
                node=node,
                numa_nodes=dict(verdict.numa_nodes),
                charge=verdict.pod_charge,
                assumed_at=0,
            )
        )
    return document


def _group_by_reason(reasons: Mapping[str, str], unresolvable: Set[str]) -> list[dict[str, Any]]:
    """Group nodes by reason, the largest group first; then by reason."""
    groups: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault(reason, []).append(name)
    return [
        {"reason": reason, "unresolvable": nodes[0] in unresolvable, "nodes": nodes}
        for reason, nodes in sorted(groups.items(), key=lambda one: (-len(one[1]), one[0]))
    ]


def nodes_by_container(verdict: Fit) -> dict[str, str]:
    """Return the NUMA nodes by container."""
    return {name: str(numa_nodes) for name, numa_nodes in verdict.numa_nodes}


# --- in words -------------------------------------------------------------------------------------


def report_lines(document: Mapping[str, Any]) -> list[str]:
    """Return the document as lines for people."""
    cluster = document["cluster"]
    head = f"{count_text(cluster['nodes'], 'node')} with {count_text(cluster['pods'], 'pod')}"
    if cluster["assumedPods"]:
        head += f", {cluster['assumedPods']} of them assumed"
    lines = [head + "."]
    pods = document["pods"]
    for _, members in groupby(pods, key=lambda pod: list(_verdict_lines(pod, ""))):
        group = [*members]
        names = [f"{pod['namespace']}/{pod['pod']}" for pod in group]
        name = names[0] if len(names) == 1 else f"Each of {len(names)} pods ({_names_text(names)})"
        lines += ["", *_verdict_lines(group[0], name)]
    if len(pods) > 1:
        lines += ["", f"{sum(pod['feasible'] for pod in pods)} of {len(pods)} pods fit."]
    width = max(30, terminal_width())
    return [
        part
        for line in [*lines, "", *document["notes"]]
        for part in wrap_text(line, "", " " * (len(line) - len(line.lstrip()) + 2), width=width)
        or [""]
    ]


def _verdict_lines(pod: Mapping[str, Any], name: str) -> Iterator[str]:
    if not pod["constrained"]:
        result_text = "every other node fits" if pod["feasible"] else "no node takes it"
        fits = result_text if pod["rejectedBy"] else "every node fits"
        yield f"{name} requests no placement: {fits}."
    elif pod["feasible"]:
        yield (f"{name} fits on {count_text(len(pod['nodes']), 'node')}; the best is {pod['node']}")
        for node in pod["nodes"][:MAX_NAMED_NODES]:
            condition = ", after moving containers" if node["afterMoves"] else ""
            yield (
                f"  {node['name']}: {_numa_nodes_text(node['numaNodes'])}, score "
                f"{node['score']}{condition}"
            )
        if len(pod["nodes"]) > MAX_NAMED_NODES:
            yield f"  and {len(pod['nodes']) - MAX_NAMED_NODES} more"
    else:
        yield f"{name} fits on no node"
    for group in pod["rejectedBy"]:
        suffix = ", and waiting does not help" if group["unresolvable"] else ""
        yield f"  rejected by {_names_text(group['nodes'])}: {group['reason']}{suffix}"


def _numa_nodes_text(numa_nodes: Mapping[str, str]) -> str:
    parts = [f"{name} on NUMA node {i}" for name, i in numa_nodes.items() if i]
    return "; ".join(parts) or "on any NUMA node"


def _names_text(names: Sequence[str]) -> str:
    suffix = f" and {len(names) - MAX_NAMED_NODES} more" if len(names) > MAX_NAMED_NODES else ""
    return f"{', '.join(names[:MAX_NAMED_NODES])}{suffix}"
