"""``nri-numa explain``: why a container is where it is, or why it was refused."""

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
from nri_numa.model.machine import cpus_text, numa_text
from nri_numa.text import escape_unprintable, human_bytes

_MAX_DEVICE_IDS_SHOWN: Final = 8
"""Ids of one resource in a line."""


@click.command()
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
    "-A",
    "--all-namespaces",
    is_flag=True,
    help="Explain every pod of that name, where several namespaces have one.",
)
@click.option(
    "--kubelet/--no-kubelet",
    default=None,
    help="Ask the kubelet of this node as well, what it gave to the pod.  [default: with an agent "
    "on this node, where a kubelet is]",
)
@click.option(
    "--kubelet-root",
    metavar="DIR",
    envvar="NRI_NUMA_KUBELET_ROOT",
    default="/var/lib/kubelet",
    show_default=True,
    help="The kubelet's directory, with its socket for PodResources.",
)
@click.option("--verbose", "-v", is_flag=True, help="Say all that is known, not three lines.")
@output_option()
@config_option
@api_options
@click.pass_context
def explain(
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
    """Say why the containers of POD are where they are, or why they were refused.

    In short: what they have, what was asked for and why this place; -v says the rest. Without a
    namespace the pod is looked for in all of them, as status shows all of them.

    Exit code 0 when they were placed, 1 when one was refused or the pod is not known here.
    """
    namespace, pod = _parse_pod_reference(namespace, pod, container)
    if all_namespaces and namespace is not None:
        raise click.UsageError(
            f"-A and namespace {escape_unprintable(namespace)} contradict each other; expected "
            "one of them"
        )
    agent = new_agent_client(api, token_file, ca_file, config_path)
    with show_progress(f"asking {agent.address}"):
        if namespace is not None:
            spaces = [namespace]
        else:
            spaces = sorted({one.namespace for one in agent.container_names() if one.pod == pod})
        if len(spaces) > 1 and not all_namespaces:
            raise click.UsageError(
                f"pods called {escape_unprintable(pod)} are in {len(spaces)} namespaces: "
                f"{escape_unprintable(', '.join(spaces))}; expected NAMESPACE/POD, or -A for "
                "all of them"
            )
        document = _fetch_explanations(agent, spaces, pod, container)
    beside: list[str] = []
    if kubelet is None:
        kubelet = agent.on_this_node and os.path.isdir(kubelet_root)
    if kubelet and len(spaces) == 1:
        # After the agent's answer: grpc is imported for it, and the kubelet may hang.
        with show_progress("asking the kubelet"):
            document["kubelet"] = query_kubelet_grants(kubelet_root, spaces[0], pod)
        for sentence in kubelet_grant_sentences(
            document["kubelet"], document["explanations"], only_differences=not verbose
        ):
            beside += ["", *wrap_text(sentence)]
    texts = explanation_lines(document["explanations"], time.time(), verbose=verbose)
    write_document_or_lines(document, output, [*texts, *beside])
    if any(one["outcome"] == "refused" for one in document["explanations"]):
        ctx.exit(1)


def _parse_pod_reference(
    namespace: str | None, pod: str, container: str | None
) -> tuple[str | None, str]:
    """Namespace, None for all, and name of the pod that is meant.

    Raises:
        click.UsageError: it is none.
    """
    before = namespace
    if "/" in pod:
        namespace, _, pod = pod.partition("/")
    if namespace == "" or not pod:
        raise click.UsageError("expected POD, or NAMESPACE/POD")
    if "/" in pod:
        # No name of Kubernetes has a slash: the container was written behind it.
        name, _, rest = pod.partition("/")
        raise click.UsageError(
            f"{escape_unprintable(f'{namespace}/{pod}')} has too many parts, expected "
            "[NAMESPACE/]POD and "
            "the container as a second argument: nri-numa explain "
            f"{escape_unprintable(f'{namespace}/{name} {container or rest}')}"
        )
    if before not in (None, namespace):
        raise click.UsageError(
            f"--namespace {escape_unprintable(str(before))} and "
            f"{escape_unprintable(f'{namespace}/{pod}')} name two "
            "namespaces; expected one"
        )
    return namespace, pod


def _fetch_explanations(
    agent: AgentClient, spaces: list[str], pod: str, container: str | None
) -> dict[str, Any]:
    """The explanations of the pods of this name in these namespaces."""
    if not spaces:
        what = escape_unprintable(pod)
        link = agent.get_document("/v1/status")["link"]
        raise UnknownToAgent(
            f"nothing is known about a pod called {what} in any namespace; "
            f"{link.get('problem') or 'it does not run on this node'}"
            f"{_similar_names(agent, '', pod)}"
        )
    found: list[Any] = []
    for namespace in spaces:
        path = f"/v1/explain/{quote_path_segment(namespace)}/{quote_path_segment(pod)}"
        if container is not None:
            path += f"/{quote_path_segment(container)}"
        try:
            found += agent.get_document(path)["explanations"]
        except UnknownToAgent as error:
            if len(spaces) == 1:
                near = _similar_names(agent, namespace, pod, container)
                raise UnknownToAgent(error.message + near) from error
    if not found:
        raise UnknownToAgent(
            f"no pod called {escape_unprintable(pod)} has a container "
            f"{escape_unprintable(str(container))}; looked in "
            f"namespaces {escape_unprintable(', '.join(spaces))}"
        )
    return {"explanations": found}


def _similar_names(
    agent: AgentClient, namespace: str, pod: str, container: str | None = None
) -> str:
    """Names that were perhaps meant: containers of the pod where it is known, else pods."""
    names = agent.container_names()
    if container is not None:
        has = [one.container for one in names if one[:2] == (namespace, pod)]
        if has:
            return f"\n  The pod is known; its containers are {escape_unprintable(', '.join(has))}."
    pod = pod.lower()  # as all names of Kubernetes are
    pods: dict[str, list[str]] = {}  # by their name alone
    for space, name in sorted({one[:2] for one in names}):
        pods.setdefault(name, []).append(f"{space}/{name}")
    known = [name for names in pods.values() for name in names]
    if not namespace:
        near = [name for one in difflib.get_close_matches(pod, pods, n=3) for name in pods[one]]
    else:
        near = pods.get(pod) or difflib.get_close_matches(f"{namespace}/{pod}", known, n=3)
    return f"\n  Did you mean {escape_unprintable(' or '.join(near[:3]))}?" if near else ""


def explanation_lines(
    explanations: list[dict[str, Any]], now: float, *, verbose: bool = True
) -> Iterator[str]:
    """The text; no line is wider than the terminal."""
    for number, one in enumerate(explanations):
        if number:
            yield ""
        assignment, document = one.get("assignment") or {}, one["details"]
        if real := assignment.get("actual"):  # how long is easier to read than since when
            document = {**document, "actual": actual_cpuset_text(real, now)}
        yield from sentences.render_text(document, terminal_width(), brief=not verbose).split("\n")
        if verbose:
            yield from _memory_location_lines(assignment)


def _memory_location_lines(assignment: dict[str, Any]) -> Iterator[str]:
    """Where its memory is, if the agent looks for that."""
    memory = assignment.get("memory")
    if memory is None:
        return
    by_numa_node = ", ".join(
        f"{human_bytes(amount)} on NUMA node {i}"
        for i, amount in memory["byNUMANode"].items()
        if amount
    )
    percent = memory["localPercent"]
    if percent is not None:
        home = assignment["mems"] or assignment["numaNodes"]
        text = f"{percent:g} % is on its own NUMA nodes ({home}): {by_numa_node}"
    else:
        text = f"what part is on its own NUMA nodes is not known here, because {memory['problem']}"
        text += f": {by_numa_node}" if by_numa_node else ""
    yield from wrap_text(f"Memory: {text}", "  ", "    ")


# --- What the kubelet gave -----------------------------------------------------------------------


def query_kubelet_grants(kubelet_root: str, namespace: str, pod: str) -> dict[str, Any]:
    """What the kubelet of this node gave to a pod, or ``problem`` where it does not answer."""
    from nri_numa.kubelet.pod_resources import query_pod

    found = query_pod(kubelet_root, namespace, pod)
    if isinstance(found, str):
        return {"problem": found}

    def with_numa_nodes(one: Any, **more: Any) -> dict[str, Any]:
        return {**more, "numaNodes": str(one.numa_nodes)}

    return {
        "problem": "",
        "containers": [
            {
                "container": given.container,
                "cpus": str(given.cpus),
                "memory": [
                    with_numa_nodes(one, type=one.kind, sizeBytes=one.size) for one in given.memory
                ],
                "devices": [
                    with_numa_nodes(one, resource=one.resource, ids=list(one.allocated_ids))
                    for one in given.devices
                ],
                "claims": list(given.claims),
            }
            for given in found
        ],
    }


def kubelet_grant_sentences(
    grants: Mapping[str, Any],
    explanations: list[dict[str, Any]],
    *,
    only_differences: bool = False,
) -> Iterator[str]:
    """`query_kubelet_grants` in sentences for each explained container, and what differs."""
    if grants["problem"]:
        if not only_differences:
            yield f"The kubelet's own word cannot be had: {escape_unprintable(grants['problem'])}."
        return
    by_container = {one["container"]: one for one in grants["containers"]}
    for explanation in explanations:
        name = explanation["container"]
        one = by_container.get(name)
        if only_differences:
            if one is not None:
                yield from _grant_differences(one, explanation.get("assignment") or {})
            continue
        if one is None:
            # Init and ephemeral containers are never in it.
            yield f"The kubelet reports nothing about container {escape_unprintable(name)}."
            continue
        parts = [*_grant_parts(one)] or ["nothing exclusive: no CPUs, memory or devices"]
        yield (
            f"The kubelet gave container {escape_unprintable(name)} "
            f"{escape_unprintable('; '.join(parts))}."
        )
        yield from _grant_differences(one, explanation.get("assignment") or {})


def _grant_parts(one: Mapping[str, Any]) -> Iterator[str]:
    if one["cpus"]:
        yield f"exclusive {cpus_text(CPUSet.parse(one['cpus']))}"
    for block in one["memory"]:
        yield f"{block['sizeBytes']} bytes of {block['type']}{_numa_suffix(block)}"
    for devices in one["devices"]:
        ids = devices["ids"]
        more = (
            f" and {len(ids) - _MAX_DEVICE_IDS_SHOWN} more"
            if len(ids) > _MAX_DEVICE_IDS_SHOWN
            else ""
        )
        shown = ", ".join(ids[:_MAX_DEVICE_IDS_SHOWN])
        yield f"{devices['resource']} {shown}{more}{_numa_suffix(devices)}"
    for claim in one["claims"]:
        yield f"claimed device {claim}"


def _numa_suffix(one: Mapping[str, Any]) -> str:
    return f" of {numa_text(NUMASet.parse(one['numaNodes']))}" if one["numaNodes"] else ""


def _grant_differences(one: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[str]:
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
