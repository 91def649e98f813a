"""The ``publish`` section: what ``nri-numa publish`` writes to the API server, and how fast."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from nri_numa.config.names import camel_case


class Publish(Struct, frozen=True, forbid_unknown_fields=True, rename=camel_case):
    """What ``nri-numa publish`` writes to the API server; the agent itself reads none of it."""

    events: Annotated[
        bool,
        Meta(
            description="Events on pods: refused, placed wider than ideal, not pinned, late, "
            "drift, placed after the start."
        ),
    ] = True
    node_annotations: Annotated[
        bool,
        Meta(
            description="Annotations numacpu and numamem of the Node, below the annotation prefix: "
            "CPUs and bytes by NUMA node."
        ),
    ] = True
    node_labels: Annotated[
        bool,
        Meta(
            description="Labels of the Node, below the annotation prefix, with the machine's shape."
        ),
    ] = True
    pod_annotation: Annotated[
        bool,
        Meta(
            description="Annotation assigned on each pod with pinned containers: what they have. "
            "Needs the rights to list and patch pods."
        ),
    ] = False
    capacity: Annotated[
        bool,
        Meta(
            description="Exclusive CPUs in the status of the Node, as devicePlugin.resourceName, "
            "for the scheduler to count by; instead of nri-numa device-plugin. Needs the right to "
            "patch nodes/status."
        ),
    ] = False
    node_resource_topology: Annotated[
        bool,
        Meta(
            description="A NodeResourceTopology of the Node: what each NUMA node has and what is "
            "left, for schedulers. Needs its definition in the cluster and the rights to get, "
            "create and patch it."
        ),
    ] = False
    node_resource_topology_force: Annotated[
        bool,
        Meta(description="Take that object's zones from another publisher."),
    ] = False
    node_resource_topology_validity: Annotated[
        str | float,
        Meta(
            description="Time after which readers may not believe that object any more where "
            "nobody renews it, at every resync; three times resync or more. 0: they may for ever."
        ),
    ] = 0
    numatopology: Annotated[
        bool,
        Meta(
            description="A Numatopology of the Node, for Volcano's plugin numaaware. Needs "
            "Volcano's definition in the cluster and the rights to create and patch it."
        ),
    ] = False
    rate: Annotated[
        float, Meta(gt=0, le=100, description="Requests to the API server per second at most.")
    ] = 5.0
    burst: Annotated[
        int, Meta(ge=1, le=1000, description="Requests at once after a quiet time.")
    ] = 10
    resync: Annotated[
        str | float,
        Meta(
            description="Time between two looks at what is really there, to put back what somebody "
            "removed; 1s or more."
        ),
    ] = "5m"
    credentials: Annotated[
        str,
        Meta(
            min_length=1,
            description="Directory with token and ca.crt; both are read again when they change.",
        ),
    ] = "/var/run/secrets/kubernetes.io/serviceaccount"
    address: Annotated[
        str,
        Meta(
            min_length=1,
            description="host:port on loopback for its metrics and probes, or off.",
        ),
    ] = "127.0.0.1:9892"
