"""A machine as a document: what the API and ``nri-numa topology -o json`` answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nri_numa.machine.cpuset import NO_CPUS, CPUSet
from nri_numa.machine.model import Topology
from nri_numa.machine.pci import PCIDevice


def topology_document(
    topology: Topology,
    *,
    reserved: CPUSet = NO_CPUS,
    devices: Sequence[PCIDevice] | None = None,
) -> dict[str, Any]:
    """Describe a machine with the names of fields that stay the same over versions.

    Id sets are texts in list format, sizes are bytes; every list is sorted by id. A NUMA node's
    ``distances`` are in the order of ``numaNodes``.

    Args:
        topology: the machine.
        reserved: CPUs that the configuration keeps for the system.
        devices: its PCI devices; without them the document says nothing of devices.
    """
    return {
        "id": topology.id,
        "cpus": {
            "online": str(topology.online),
            "offline": str(topology.present - topology.online),
            "present": str(topology.present),
            "possible": str(topology.possible),
            "isolated": str(topology.isolated),
            "nohzFull": str(topology.nohz_full),
            "allowed": str(topology.allowed),
            "reserved": str(reserved),
        },
        "counts": {
            "sockets": len(topology.sockets),
            "numaNodes": len(topology.numa_nodes),
            "l3Groups": len(topology.l3_groups),
            "cores": len(topology.cores),
            "cpus": len(topology.online),
            "threadsPerCore": topology.threads_per_core,
        },
        "sockets": [
            {"id": s.id, "cpus": str(s.cpus), "numaNodes": str(s.numa_nodes)}
            for _, s in sorted(topology.sockets.items())
        ],
        "numaNodes": [
            {
                "id": n.id,
                "cpus": str(n.cpus),
                "memoryBytes": n.memory_bytes,
                "memoryAllowed": n.id in topology.memory_nodes,
                "hugePages": [
                    {"sizeBytes": size, "count": total // size}
                    for size, total in sorted(n.hugepages.items())
                ],
                "distances": [topology.distance(n.id, other) for other in topology.numa_ids],
            }
            for _, n in sorted(topology.numa_nodes.items())
        ],
        "l3Groups": [
            {"id": g.id, "cpus": str(g.cpus)} for _, g in sorted(topology.l3_groups.items())
        ],
        "cores": [
            {
                "id": c.id,
                "cpus": str(c.cpus),
                "socket": c.socket,
                "numaNode": c.numa_node,
                "kind": c.kind.value,
            }
            for _, c in sorted(topology.cores.items())
        ],
        "partitions": [
            {
                "cgroup": one.cgroup,
                "kind": one.kind.value,
                "cpus": str(one.cpus),
                "problem": one.problem,
            }
            for one in topology.partitions
        ],
        "warnings": list(topology.warnings),
        **({} if devices is None else {"devices": [_device(one) for one in devices]}),
    }


def _device(device: PCIDevice) -> dict[str, Any]:
    return {
        "address": device.address,
        "kind": device.kind,
        "vendor": device.vendor,
        "device": device.device,
        "numaNode": device.numa_node,
    }
