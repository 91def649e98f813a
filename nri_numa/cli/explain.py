"""``nri-numa explain``: the reasons for a container's placement or rejection."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import click

from nri_numa.cli.agent_client import (
    AgentClient,
    UnknownToAgent,
    complete_containers,
    complete_namespaced_pods,
    complete_namespaces,
    new_agent_client,
    quote_path_segment,
)
from nri_numa.cli.common import api_options, config_option, output_option, show_progress
from nri_numa.cli.output import terminal_width, wrap_text, write_document_or_lines
from nri_numa.cli.status import actual_cpuset_text
from nri_numa.engine.explain import sentences
from nri_numa.model.cpuset import CPUSet, ListFormatError, NUMASet
from nri_numa.model.machine import cpus_text, listed_words_text, numa_text
from nri_numa.text import escape_unprintable, human_bytes

_MAX_DEVICE_IDS_SHOWN: Final = 8
"""Ids of one resource in a line."""


@click.command("explain")
@click.argument("pod", metavar="[NAMESPACE/]POD", shell_complete=complete_namespaced_pods)
@click.argument("container", required=False, shell_complete=complete_containers)
@click.option(
    "-n",
    "--namespace",
    metavar="NAME",
    shell_complete=complete_namespaces,
    help="The pod's namespace.  [default: all namespaces]",
)
@click.option(
    "-A", "--all-namespaces", is_flag=True, help="Explain the pods of that name in all namespaces."
)
@click.option(
    "--kubelet/--no-kubelet",
    default=None,
    help="Also query this node's kubelet for its grants to the pod.  [default: if agent and "
    "kubelet run on this node]",
)
@click.option(
    "--kubelet-root",
    metavar="DIR",
    envvar="NRI_NUMA_KUBELET_ROOT",
    default="/var/lib/kubelet",
    show_default=True,
    help="The kubelet's directory, with its socket for PodResources.",
)
@click.option("--verbose", "-v", is_flag=True, help="Show all details, not only three lines.")
@output_option()
@config_option
@api_options
@click.pass_context
def explain_placements(
    ctx: click.Context,
    pod: str,
    container: str | None,
    namespace: str | None,
    all_namespaces: bool,
    kubelet: bool | None,
    kubelet_root: str,
    verbose: bool,
    output: str,
    config_path: str | None,
    api: str | None,
    token_file: str | None,
    ca_file: str | None,
) -> None:
    """Explain the placement of the containers of POD, or their rejection.

    Three lines for each container: its CPUs and memory, its request, and the reason; -v shows all
    details. Without a namespace, all namespaces are searched.

    Exit code 0 if all were placed, 1 if one was rejected or the pod is not known on this node.
    """
    namespace, pod = _parse_pod_reference(namespace, pod, container)
    if all_namespaces and namespace is not None:
        text = f"-A and namespace {namespace} contradict each other; expected one of them"
        raise click.UsageError(escape_unprintable(text))
    agent = new_agent_client(api, token_file, ca_file, config_path)
    with show_progress(f"asking {agent.address}"):
        if namespace is not None:
            spaces = [namespace]
        else:
            spaces = sorted({c.namespace for c in agent.container_names() if c.pod == pod})
        if len(spaces) > 1 and not all_namespaces:
            text = f"pods called {pod} are in {len(spaces)} namespaces: {', '.join(spaces)}"
            text += "; expected NAMESPACE/POD, or -A for all of them"
            raise click.UsageError(escape_unprintable(text))
        document = _fetch_explanations(agent, spaces, pod, container)
    grant_lines: list[str] = []
    if kubelet is None:
        kubelet = agent.on_this_node and os.path.isdir(kubelet_root)
    if kubelet and len(spaces) == 1:
        # After the agent's answer: grpc is imported for it, and the kubelet may hang.
        with show_progress("asking the kubelet"):
            document["kubelet"] = query_kubelet_grants(kubelet_root, spaces[0], pod)
        for sentence in kubelet_grant_sentences(
            document["kubelet"], document["explanations"], only_differences=not verbose
        ):
            grant_lines += ["", *wrap_text(sentence)]
    texts = explanation_lines(document["explanations"], time.time(), verbose=verbose)
    write_document_or_lines(document, output, [*texts, *grant_lines])
    if any(e["outcome"] == "rejected" for e in document["explanations"]):
        ctx.exit(1)


def _parse_pod_reference(
    namespace: str | None, pod: str, container: str | None
) -> tuple[str | None, str]:
    """Parse the namespace, None for all, and the name of the pod.

    Raises:
        click.UsageError: they are invalid.
    """
    option = namespace
    if "/" in pod:
        namespace, _, pod = pod.partition("/")
    if namespace == "" or not pod:
        raise click.UsageError("expected POD, or NAMESPACE/POD")
    if "/" in pod:
        # Names of Kubernetes have no slash: the container was written after it.
        name, _, suffix = pod.partition("/")
        text = f"{namespace}/{pod} has too many parts, expected [NAMESPACE/]POD and the container "
        text += f"as a second argument: nri-numa explain {namespace}/{name} {container or suffix}"
        raise click.UsageError(escape_unprintable(text))
    if option not in (None, namespace):
        text = f"--namespace {option} and {namespace}/{pod} name two namespaces; expected one"
        raise click.UsageError(escape_unprintable(text))
    return namespace, pod


def _fetch_explanations(
    agent: AgentClient, spaces: list[str], pod: str, container: str | None
) -> dict[str, Any]:
    if not spaces:
        link = agent.get_document("/v1/status")["link"]
        raise UnknownToAgent(
            f"nothing is known about a pod called {escape_unprintable(pod)} in any namespace; "
            f"{link.get('problem') or 'it does not run on this node'}"
            f"{_similar_names(agent, '', pod)}"
        )
    explanations: list[Any] = []
    for namespace in spaces:
        path = f"/v1/explain/{quote_path_segment(namespace)}/{quote_path_segment(pod)}"
        if container is not None:
            path += f"/{quote_path_segment(container)}"
        try:
            explanations += agent.get_document(path)["explanations"]
        except UnknownToAgent as error:
            if len(spaces) == 1:
                hint = _similar_names(agent, namespace, pod, container)
                raise UnknownToAgent(error.message + hint) from error
    if not explanations:
        text = f"no pod called {pod} has a container {container}; looked in namespaces "
        raise UnknownToAgent(escape_unprintable(text + ", ".join(spaces)))
    return {"explanations": explanations}


def _similar_names(
    agent: AgentClient, namespace: str, pod: str, container: str | None = None
) -> str:
    """Return a hint with similar names: containers of the pod if it is known, else pods."""
    names = agent.container_names()
    if container is not None:
        containers = ", ".join(c.container for c in names if c[:2] == (namespace, pod))
        if containers:
            return f"\n  The pod is known; its containers are {escape_unprintable(containers)}."
    pod = pod.lower()  # as all names of Kubernetes are
    pods: dict[str, list[str]] = {}  # by their name alone
    for space, name in sorted({c[:2] for c in names}):
        pods.setdefault(name, []).append(f"{space}/{name}")
    paths = [name for names in pods.values() for name in names]
    if not namespace:
        matches = [name for c in difflib.get_close_matches(pod, pods, n=3) for name in pods[c]]
    else:
        matches = pods.get(pod) or difflib.get_close_matches(f"{namespace}/{pod}", paths, n=3)
    return f"\n  Did you mean {escape_unprintable(' or '.join(matches[:3]))}?" if matches else ""


def explanation_lines(
    explanations: list[dict[str, Any]], current_time: float, *, verbose: bool = True
) -> Iterator[str]:
    """Return the text; no line is wider than the terminal."""
    for number, explanation in enumerate(explanations):
        if number:
            yield ""
        assignment, document = explanation.get("assignment") or {}, explanation["details"]
        if real := assignment.get("actual"):  # a duration is easier to read than a time
            document = {**document, "actual": actual_cpuset_text(real, current_time)}
        yield from sentences.render_text(document, terminal_width(), brief=not verbose).split("\n")
        if verbose:
            yield from _memory_location_lines(assignment)


def _memory_location_lines(assignment: dict[str, Any]) -> Iterator[str]:
    """Yield the location of the container's memory, if the agent reads it."""
    memory = assignment.get("memory")
    if memory is None:
        return
    amounts = memory["byNUMANode"].items()
    by_numa_node = ", ".join(f"{human_bytes(n)} on NUMA node {i}" for i, n in amounts if n)
    percent = memory["localPercent"]
    if percent is not None:
        home = assignment["mems"] or assignment["numaNodes"]
        text = f"{percent:g} % is on its own NUMA nodes ({home}): {by_numa_node}"
    else:
        text = f"the part on its own NUMA nodes is not known: {memory['problem']}"
        text += f": {by_numa_node}" if by_numa_node else ""
    yield from wrap_text(f"Memory: {text}", "  ", "    ")


# --- Grants of the kubelet -----------------------------------------------------------------------


def query_kubelet_grants(kubelet_root: str, namespace: str, pod: str) -> dict[str, Any]:
    """Query the grants of this node's kubelet to a pod; only ``problem`` if it does not answer."""
    from nri_numa.kubelet.pod_resources import query_pod

    grants = query_pod(kubelet_root, namespace, pod)
    if isinstance(grants, str):
        return {"problem": grants}

    def with_numa_nodes(amount: Any, **fields: Any) -> dict[str, Any]:
        return {**fields, "numaNodes": str(amount.numa_nodes)}

    return {
        "problem": "",
        "containers": [
            {
                "container": grant.container,
                "cpus": str(grant.cpus),
                "memory": [with_numa_nodes(m, type=m.kind, sizeBytes=m.size) for m in grant.memory],
                "devices": [
                    with_numa_nodes(d, resource=d.resource, ids=list(d.allocated_ids))
                    for d in grant.devices
                ],
                "claims": list(grant.claims),
            }
            for grant in grants
        ],
    }


def kubelet_grant_sentences(
    grants: Mapping[str, Any], explanations: list[dict[str, Any]], *, only_differences: bool = False
) -> Iterator[str]:
    """Yield sentences about the kubelet's grants to each explained container, and differences."""
    if grants["problem"]:
        if not only_differences:
            yield f"Could not ask the kubelet: {escape_unprintable(grants['problem'])}."
        return
    by_container = {grant["container"]: grant for grant in grants["containers"]}
    for explanation in explanations:
        name = escape_unprintable(explanation["container"])
        grant = by_container.get(explanation["container"])
        if grant is None:
            if not only_differences:
                # The kubelet never reports init and ephemeral containers.
                yield f"The kubelet does not report container {name}."
            continue
        if not only_differences:
            parts = [*_grant_parts(grant)] or ["no exclusive CPUs, memory or devices"]
            yield f"The kubelet granted container {name} {escape_unprintable('; '.join(parts))}."
        yield from _grant_differences(grant, explanation.get("assignment") or {})


def _grant_parts(grant: Mapping[str, Any]) -> Iterator[str]:
    if grant["cpus"]:
        yield f"exclusive {cpus_text(CPUSet.parse(grant['cpus']))}"
    for block in grant["memory"]:
        yield f"{human_bytes(block['sizeBytes'])} of {block['type']}{_numa_suffix(block)}"
    for devices in grant["devices"]:
        ids_text = ", ".join(devices["ids"][:_MAX_DEVICE_IDS_SHOWN])
        if (remainder := len(devices["ids"]) - _MAX_DEVICE_IDS_SHOWN) > 0:
            ids_text += f" and {remainder} more"
        yield f"{devices['resource']} {ids_text}{_numa_suffix(devices)}"
    for claim in grant["claims"]:
        yield f"claimed device {claim}"


def _numa_suffix(amount: Mapping[str, Any]) -> str:
    return f" of {numa_text(NUMASet.parse(amount['numaNodes']))}" if amount["numaNodes"] else ""


def _grant_differences(grant: Mapping[str, Any], assignment: Mapping[str, Any]) -> Iterator[str]:
    try:
        agent_cpus = CPUSet.parse(assignment.get("cpus", ""))
    except ListFormatError:
        return
    kubelet_cpus = CPUSet.parse(grant["cpus"])
    if kubelet_cpus and agent_cpus and kubelet_cpus != agent_cpus:
        yield (
            f"These differ: the agent has {cpus_text(agent_cpus)}, "
            f"the kubelet {cpus_text(kubelet_cpus)}."
        )
    slots = set(filter(None, assignment.get("slots", "").split(",")))
    missing = sorted(slots - {id for devices in grant["devices"] for id in devices["ids"]})
    if missing:
        yield (
            f"These differ: the agent has {listed_words_text(missing)}, "
            "the kubelet has no such device for it."
        )
