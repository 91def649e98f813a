"""Removal from all Nodes of what stays after the publisher has stopped.

The kubelet keeps an unknown extended resource without limit, and the scheduler counts it; the
annotation marks that offline capacity counts on a node. It is run once, with its own rights:
docs/install-cluster.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from nri_numa.config import AgentConfig
from nri_numa.kube.api import name_of
from nri_numa.kube.requests import (
    APIRequest,
    KubeClient,
    Outcome,
    OutcomeKind,
    Resource,
    Verb,
    annotations_of,
    section_of,
)
from nri_numa.model.offline_capacity import NODE_EXISTING_NUMA_IDS_ANNOTATION
from nri_numa.observe.logs import get_logger

log = get_logger("publish")

WITHDRAW_CAPACITY: Final = "capacity"
"""Target of a withdrawal: the extended resource of exclusive CPUs."""


async def withdraw_from_all_nodes(
    config: AgentConfig, api: KubeClient, targets: frozenset[str]
) -> int:
    """Remove the targets from every Node; return the number of failed requests."""
    outcomes: list[Outcome] = []
    try:
        listed = await api.execute_request(
            APIRequest(output="withdraw", verb=Verb.LIST, resource=Resource.NODES)
        )
        outcomes.append(listed)
        for node in listed.documents:
            for request in _withdrawal_requests(node, config, targets):
                outcomes.append(await api.execute_request(request))
                log.info(
                    "object withdrawn", target=request.target_text, result=outcomes[-1].result.value
                )
    finally:
        await api.close()
    # A missing Node needs no withdrawal.
    failed = [o for o in outcomes if o.result not in (OutcomeKind.SUCCEEDED, OutcomeKind.MISSING)]
    for outcome in failed:
        log.error("object not withdrawn", problem=outcome.text)
    return len(failed)


def _withdrawal_requests(
    node: Mapping[str, Any], config: AgentConfig, targets: frozenset[str]
) -> Iterator[APIRequest]:
    """Yield the requests that remove the targets from one Node."""
    resource = config.device_plugin.resource_name
    key = f"{config.annotation_prefix}/{NODE_EXISTING_NUMA_IDS_ANNOTATION}"
    parts = {
        part: {resource: None}
        for part in ("capacity", "allocatable")
        if resource in section_of(node, "status", part)
    }
    if WITHDRAW_CAPACITY in targets and parts:
        yield _patch_request(Resource.NODE_STATUS, node, {"status": parts})
    if NODE_EXISTING_NUMA_IDS_ANNOTATION in targets and key in annotations_of(node):
        yield _patch_request(Resource.NODES, node, {"metadata": {"annotations": {key: None}}})


def _patch_request(resource: Resource, node: Mapping[str, Any], body: object) -> APIRequest:
    name = name_of(node)
    return APIRequest(output="withdraw", verb=Verb.PATCH, resource=resource, name=name, body=body)
