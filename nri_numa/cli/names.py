"""Completion of pods, namespaces and containers with what the live agent tells.

A shell waits for it with the cursor standing still: whatever is wrong, the answer is there after
`LIMIT` seconds, and it is empty.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import click

LIMIT: Final = 2.0
"""Seconds that a shell waits at most."""
_FINE: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,252}", re.ASCII)
"""Names as Kubernetes allows them; others are not put into a command line."""


class Known(NamedTuple):
    """One container that runs here or was refused lately."""

    namespace: str
    pod: str
    container: str


def known(ctx: click.Context) -> list[Known]:
    """The containers that the agent knows, in the order of their names; empty without an agent."""
    found: list[Known] = []

    def ask() -> None:
        found.extend(_ask(ctx))

    # A thread that is left behind: a name that is resolved, or an answer that comes byte by byte,
    # keeps to no time limit of a socket.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(LIMIT)
    return [] if asking.is_alive() else found


def _ask(ctx: click.Context) -> Iterator[Known]:
    from nri_numa.cli.agent_client import client

    given = [ctx.params.get(name) for name in ("api", "token_file", "ca_file")]
    try:
        asked = client(*given, timeout=LIMIT)
        listed: list[dict[str, Any]] = [
            *asked.get("/v1/assignments")["containers"],
            *asked.get("/v1/refusals")["refusals"],
        ]
        names = {(one["namespace"], one["pod"], one["container"]) for one in listed}
    except Exception:  # whatever it is, a shell shows nothing of it
        return
    for each in sorted(names):
        if all(isinstance(part, str) and _FINE.fullmatch(part) for part in each):
            yield Known(*each)


def _completion(
    choose: Callable[[click.Context, list[Known], str], Iterable[str]],
) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """A function as click wants it of one that chooses among all names."""

    def complete(ctx: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
        found = dict.fromkeys(choose(ctx, known(ctx), begun))
        return [name for name in found if name.startswith(begun)]

    return complete


def _namespace(ctx: click.Context) -> str | None:
    return ctx.params.get("namespace")


@_completion
def namespaces(_ctx: click.Context, found: list[Known], _begun: str) -> Iterable[str]:
    """Of all namespaces with containers here."""
    return (one.namespace for one in found)


@_completion
def pods(ctx: click.Context, found: list[Known], _begun: str) -> Iterable[str]:
    """Of pods by their name alone, of the namespace that is given."""
    within = _namespace(ctx)
    return (one.pod for one in found if within in (None, one.namespace))


@_completion
def pods_of_namespaces(ctx: click.Context, found: list[Known], begun: str) -> Iterable[str]:
    """Of pods as ``explain`` takes them: NAMESPACE/POD, or POD behind ``-n`` or once begun."""
    within = _namespace(ctx)
    if within is None:
        yield from (f"{one.namespace}/{one.pod}" for one in found)
    if within is not None or begun:
        yield from (one.pod for one in found if within in (None, one.namespace))


@_completion
def containers(ctx: click.Context, found: list[Known], _begun: str) -> Iterable[str]:
    """Of the containers of the pod that stands before it."""
    namespace, slash, pod = str(ctx.params.get("pod") or "").partition("/")
    within = namespace if slash else _namespace(ctx)
    for one in found:
        if one.pod == (pod if slash else namespace) and within in (None, one.namespace):
            yield one.container
