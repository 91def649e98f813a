"""The ``scheduler`` section: where ``nri-numa scheduler`` listens, and how long it waits."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

from nri_numa.config.names import camel_case


class UnknownNodes(StrEnum):
    """What becomes of pods that ask for something, on nodes that publish nothing."""

    REFUSE = "refuse"
    ALLOW = "allow"


class Scheduling(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """The extender of kube-scheduler; the agent itself reads none of it."""

    address: Annotated[
        str,
        Meta(
            min_length=1,
            description="host:port where kube-scheduler asks, with /metrics, /healthz and /readyz.",
        ),
    ] = "127.0.0.1:9894"
    tls_cert: Annotated[
        str, Meta(description="Certificate chain in PEM; read again when it changes.")
    ] = ""
    tls_key: Annotated[str, Meta(description="Its key.")] = ""
    client_ca: Annotated[
        str,
        Meta(
            description="Certificate authority, in PEM, of those who may ask. Metrics and probes "
            "need no certificate."
        ),
    ] = ""
    allow_anonymous: Annotated[
        bool,
        Meta(
            description="Let everybody ask who reaches an address that is not loopback: whoever "
            "does can send any waiting pod to any node."
        ),
    ] = False
    lease: Annotated[
        str,
        Meta(
            description="Name of the Lease by which one of several replicas leads, in the "
            "namespace of the credentials; empty for a single replica."
        ),
    ] = ""
    unknown_nodes: Annotated[
        UnknownNodes,
        Meta(
            description="Whether pods that ask for something may go to nodes without a readable "
            "NodeResourceTopology."
        ),
    ] = UnknownNodes.REFUSE
    narrow: Annotated[
        bool,
        Meta(
            description="Of the nodes with room filter names those that suit best, so that the "
            "scheduler needs no prioritizeVerb; false where one is configured, or where another "
            "extender filters after this one."
        ),
    ] = True
    bind_timeout: Annotated[
        str | float,
        Meta(description="Time for one binding; below the scheduler's httpTimeout, at most 4s."),
    ] = "4s"
    settle: Annotated[
        str | float,
        Meta(
            description="Time from the start of a pod's containers until its node's "
            "NodeResourceTopology counts them, where that does not name them."
        ),
    ] = "10s"
    hold_limit: Annotated[
        str | float,
        Meta(description="Time after which NUMA nodes are given back of a pod that never started."),
    ] = "10m"
    wake_interval: Annotated[
        str | float,
        Meta(
            description="Least time between two touches of a Node's annotation, which wake the "
            "pods that were refused; 0 for none."
        ),
    ] = "2s"
    credentials: Annotated[
        str,
        Meta(min_length=1, description="Directory with token, ca.crt and namespace."),
    ] = "/var/run/secrets/kubernetes.io/serviceaccount"


LONGEST_BIND = 4.0
"""Seconds; a Lease that was lost is taken by another replica 5 s after the last renewal counted."""


def scheduling_problems(section: Scheduling) -> Iterator[str]:
    """What is wrong with the section, ``path: what is wrong, what was expected``."""
    from nri_numa.config.values import is_loopback, parse_duration, split_address

    if bool(section.tls_cert) != bool(section.tls_key):
        missing, given = ("tlsKey", "tlsCert") if section.tls_cert else ("tlsCert", "tlsKey")
        yield f"scheduler.{missing}: is not set, but scheduler.{given} is; TLS needs both"
    if section.client_ca and not section.tls_cert:
        yield "scheduler.clientCA: needs scheduler.tlsCert and scheduler.tlsKey"
    try:
        address = split_address(section.address)
    except ValueError as error:
        yield f"scheduler.address: {error}"
    else:
        if address is None:
            yield "scheduler.address: 'off', expected host:port: nobody could ask"
        elif not (is_loopback(address[0]) or section.client_ca or section.allow_anonymous):
            yield (
                f"scheduler.address: {section.address} can be reached from other machines; set "
                "scheduler.clientCA, or scheduler.allowAnonymous: true, or listen on 127.0.0.1"
            )
    for key, value, least, most in (
        ("bindTimeout", section.bind_timeout, 0.1, LONGEST_BIND),
        ("settle", section.settle, 0.0, 600.0),
        ("holdLimit", section.hold_limit, 1.0, 86_400.0),
        ("wakeInterval", section.wake_interval, 0.0, 3600.0),
    ):
        try:
            seconds = parse_duration(value)
        except ValueError as error:
            yield f"scheduler.{key}: {error}"
            continue
        if not least <= seconds <= most:
            yield f"scheduler.{key}: {value}, expected {least:g}s to {most:g}s"
