"""``kubectl numa cluster`` and ``kubectl numa why POD``: what is asked for, and how it is printed.

It stands beside ``kubectl-numa`` and needs nothing but Python 3.9.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from typing import Any, Callable, Iterator

import kubectl_numa_cluster as view
import kubectl_numa_why as reasons

TOPOLOGIES = "noderesourcetopologies.topology.node.k8s.io"
PATH = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies"


def columns() -> int | None:
    """Columns that a table may take: of the terminal, or as COLUMNS says; None for any number."""
    if sys.stdout.isatty():
        return shutil.get_terminal_size((80, 24)).columns
    given = os.environ.get("COLUMNS", "")
    return int(given) or None if given.isascii() and given.isdigit() and len(given) < 7 else None


def show(document: Any, lines: list[str], output: str) -> None:
    """Print a document as it was asked for."""
    if output == "json":
        print(json.dumps(document, indent=2))
    elif output == "yaml":
        print(view.yaml(document), end="")
    else:
        print("\n".join(map(view.harmless, lines)))


def every(
    kubectl: Any, path: str, read: Callable[[Iterator[view.Object]], Any], **words: str
) -> Any:
    """What `read` makes of all objects of a kind, each as it comes from the API server's memory.

    ``kubectl get -o json`` reads all of them and writes them anew, with spaces: for thousands of
    Nodes that takes longer than everything else, and a gigabyte.

    Args:
        kubectl: is asked.
        path: of the list, with parameters.
        read: keeps what is shown of the objects.
        words: of `Kubectl.ask`.
    """
    path += f"{'&' if '?' in path else '?'}resourceVersion=0"
    return kubectl.ask(
        "get", f"--raw={path}", read=lambda printed: read(view.items(printed)), **words
    )


def cluster(kubectl: Any, options: argparse.Namespace) -> int:
    """Show the NUMA nodes of all nodes; exit code 1 where a pod is stuck.

    Args:
        kubectl: is asked; what goes wrong there is its to say.
        options: of the command line.
    """
    prefix = options.prefix
    drained = every(
        kubectl,
        "/api/v1/nodes",
        lambda nodes: {view.name_of(one): view.drained(one, prefix) for one in nodes},
        doing="reading nodes",
    )
    shown = every(
        kubectl,
        PATH,
        lambda found: view.machines(found, drained, prefix),
        doing="reading topologies",
        unknown_kind=f"the cluster has no {TOPOLOGIES}; nri-numa publish writes them where "
        "publish.nodeResourceTopology is on",
    )
    stuck = every(
        kubectl,
        "/api/v1/pods?fieldSelector=status.phase%3DPending",
        lambda pods: [found for one in pods for found in view.stuck_containers(one)],
        doing="reading pods that wait",
    )
    found = view.document(shown, stuck)
    limit = None if options.all else view.MAX_NODES
    lines = view.text(found, columns(), wide=options.output == "wide", limit=limit)
    show(found, lines, options.output)
    return 1 if found["stuckPods"] else 0


def why(kubectl: Any, options: argparse.Namespace) -> int:
    """Say where a pod is and why, or why nowhere; exit code 1 where nowhere.

    Args:
        kubectl: is asked; what goes wrong there is its to say.
        options: of the command line.
    """
    space = [f"--namespace={options.namespace}"] if options.namespace else []
    pod = kubectl.ask(
        *("get", "pod", options.pod, *space, "--output=json"),
        doing=f"looking for pod {options.pod}",
    )
    name, space = pod["metadata"]["name"], pod["metadata"]["namespace"]
    about = f"--field-selector=involvedObject.kind=Pod,involvedObject.name={name}"
    events = kubectl.ask(
        *("get", "events", f"--namespace={space}", about, "--output=json"), doing="reading Events"
    )
    found = reasons.document(pod, events["items"], options.prefix)
    show(found, reasons.sentences(found), options.output)
    return 1 if reasons.nowhere(found) else 0
