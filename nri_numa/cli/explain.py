"""``nri-numa explain``: why a container is where it is, or why it was refused."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterator
from typing import Any

import click

from nri_numa.cli.client import Client, NotKnown, api_options, client, segment
from nri_numa.cli.common import emit, harmless, output_option, terminal_width
from nri_numa.engine import explain_text


@click.command()
@click.argument("pod", metavar="[NAMESPACE/]POD")
@click.argument("container", required=False)
@click.option("-n", "--namespace", metavar="NAME", default="default", show_default=True)
@output_option()
@api_options
@click.pass_context
def explain(
    ctx: click.Context,
    pod: str,
    container: str | None,
    namespace: str,
    output: str,
    api: str | None,
    token_file: str | None,
    ca_file: str | None,
) -> None:
    """Say why the containers of POD are where they are, or why they were refused.

    Exit code 0 when they were placed, 1 when one was refused or the pod is not known here.
    """
    if "/" in pod:
        namespace, _, pod = pod.partition("/")
    if not namespace or not pod:
        raise click.UsageError("expected POD, or NAMESPACE/POD")
    asked = client(api, token_file, ca_file)
    path = f"/v1/explain/{segment(namespace)}/{segment(pod)}"
    if container is not None:
        path += f"/{segment(container)}"
    try:
        document = asked.get(path)
    except NotKnown as error:
        hint = _near(asked, namespace, pod)
        raise NotKnown(error.message + hint) from error
    if output == "table":
        click.echo("\n".join(lines(document["explanations"])))
    else:
        emit(document, output)
    if any(one["outcome"] == "refused" for one in document["explanations"]):
        ctx.exit(1)


def _near(asked: Client, namespace: str, pod: str) -> str:
    """Names that were perhaps meant."""
    known = {f"{c['namespace']}/{c['pod']}" for c in asked.get("/v1/assignments")["containers"]} | {
        f"{r['namespace']}/{r['pod']}" for r in asked.get("/v1/refusals")["refusals"]
    }
    same = sorted(name for name in known if name.partition("/")[2] == pod)
    near = same or difflib.get_close_matches(f"{namespace}/{pod}", sorted(known), n=3)
    return f"\n  Did you mean {harmless(' or '.join(near[:3]))}?" if near else ""


def lines(explanations: list[dict[str, Any]]) -> Iterator[str]:
    """The text; every line fits the terminal."""
    width = terminal_width()
    for number, one in enumerate(explanations):
        if number:
            yield ""
        if one.get("details") is not None:
            yield from explain_text.text(one["details"], width).split("\n")
            continue
        yield harmless(f"{one['namespace']}/{one['pod']}, container {one['container']}")
        assignment, refusal = one.get("assignment"), one.get("refusal")
        if assignment is not None:
            cpus = assignment["cpus"] or "any"
            mems = assignment["mems"] or "any"
            yield f"  CPUs {cpus}, memory nodes {mems}: {assignment['kind']}, policy " + (
                f"{assignment['policy']}"
                f"{'' if assignment['preferred'] else ', not the preferred set'}"
            )
            yield from _wrapped(f"because {one['summary']}", width, "  ")
        if refusal is not None:
            yield f"  refused: {harmless(refusal['reason'])}"
            yield from _wrapped(one["summary"], width, "  ")
        for step in one["steps"]:
            yield from _wrapped(f"- {step}", width, "    ", "      ")
        if assignment is not None and not one["steps"]:
            yield from _wrapped(
                "How this came about is not kept: the container was placed before the agent "
                "last started, or nothing was asked for it.",
                width,
                "    ",
            )


def _wrapped(text: str, width: int, first: str, rest: str | None = None) -> list[str]:
    return textwrap.wrap(
        harmless(text),
        width,
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
    )
