"""The kinds that are read and written, as plain documents: what is in them is checked by us."""

from __future__ import annotations

from lightkube.generic_resource import (
    GenericGlobalResource,
    GenericNamespacedResource,
    create_api_info,
)


class Topology(GenericGlobalResource):
    """NodeResourceTopology."""

    _api_info = create_api_info(
        "topology.node.k8s.io", "v1alpha2", "NodeResourceTopology", "noderesourcetopologies"
    )


class RawPod(GenericNamespacedResource):
    """A pod."""

    _api_info = create_api_info("", "v1", "Pod", "pods")


class RawEvent(GenericNamespacedResource):
    """An Event, of the kind that kubelets write."""

    _api_info = create_api_info("", "v1", "Event", "events")


class RawNode(GenericGlobalResource):
    """A Node."""

    _api_info = create_api_info("", "v1", "Node", "nodes")
