"""Takes off all Nodes what stays there when nobody publishes it any more.

The kubelet keeps an extended resource that it does not know for ever, and the scheduler counts by
it; the annotation says that capacity from outside counts on a node. Run once, with rights of its
own: docs/install.md.
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
    mapping_or_empty,
)
from nri_numa.model.offline_capacity import NODE_EXISTING_NUMA_IDS_ANNOTATION
from nri_numa.observe.logs import get_logger

log = get_logger("publish")

WITHDRAW_CAPACITY: Final = "capacity"
WITHDRAWABLE_KINDS: Final = (WITHDRAW_CAPACITY, NODE_EXISTING_NUMA_IDS_ANNOTATION)
"""What can be withdrawn: the extended resource of exclusive CPUs, and the annotation."""


async def withdraw_from_all_nodes(
    config: AgentConfig, api: KubeClient, kinds: frozenset[str]
) -> int:
    """Take what is named off every Node; the result is how many requests failed."""
    outcomes: list[Outcome] = []
    try:
        listed = await api.execute(
            APIRequest(output="withdraw", verb=Verb.LIST, resource=Resource.NODES)
        )
        outcomes.append(listed)
        for node in listed.documents:
            for request in _withdrawal_requests(node, config, kinds):
                outcomes.append(await api.execute(request))
                log.info("withdrawn", target=request.target_text, result=outcomes[-1].result.value)
    finally:
        await api.close()
    # A Node that is gone has nothing left.
    failed = [
        one for one in outcomes if one.result not in (OutcomeKind.SUCCEEDED, OutcomeKind.MISSING)
    ]
    for outcome in failed:
        log.error("not withdrawn", problem=outcome.text)
    return len(failed)


def _withdrawal_requests(
    node: Mapping[str, Any], config: AgentConfig, kinds: frozenset[str]
) -> Iterator[APIRequest]:
    """What takes it off one Node; nothing where it is not there."""
    resource, key = (
        config.device_plugin.resource_name,
        f"{config.annotation_prefix}/{NODE_EXISTING_NUMA_IDS_ANNOTATION}",
    )
    parts = {
        part: {resource: None}
        for part in ("capacity", "allocatable")
        if resource in mapping_or_empty(mapping_or_empty(node.get("status")).get(part))
    }
    if WITHDRAW_CAPACITY in kinds and parts:
        yield _patch_request(Resource.NODE_STATUS, node, {"status": parts})
    if NODE_EXISTING_NUMA_IDS_ANNOTATION in kinds and key in annotations_of(node):
        yield _patch_request(Resource.NODES, node, {"metadata": {"annotations": {key: None}}})


def _patch_request(resource: Resource, node: Mapping[str, Any], body: object) -> APIRequest:
    name = name_of(node)
    return APIRequest(output="withdraw", verb=Verb.PATCH, resource=resource, name=name, body=body)
