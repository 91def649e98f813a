"""Exclusive CPUs in proportion to a container's devices, and beside their PCIe roots.

A job with four GPUs on each of two NUMA nodes runs a process for each GPU, so each NUMA node gives
half of its CPUs. Without this rule one NUMA node gives all of them if it can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from nri_numa.engine.decision import PlacementRequest
from nri_numa.engine.place.needs import devices_giving_hints
from nri_numa.model.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.model.machine import Topology, count_text, cpus_text, join_words, numa_text
from nri_numa.model.workload import SMT, Device, DeviceAlignmentMode, Distribution, Policy


class DeviceDistribution(msgspec.Struct, frozen=True, kw_only=True):
    """CPUs that NUMA nodes should give to a container, in proportion to its devices there.

    Attributes:
        device_counts, cpu_counts: by NUMA node.
        ambiguous_devices: belong to several of the NUMA nodes, and count on none.
    """

    resource: str
    device_counts: Mapping[int, int]
    cpu_counts: Mapping[int, int]
    ambiguous_devices: tuple[Device, ...] = ()

    def cpu_shortfalls(self, topology: Topology, cpus: CPUSet) -> dict[int, int]:
        """Count the CPUs that NUMA nodes do not give although they should."""
        counts = topology.cpu_count_by_node(cpus)
        return {i: n - counts.get(i, 0) for i, n in self.cpu_counts.items() if n > counts.get(i, 0)}

    def proportion_sentences(self, topology: Topology, cpus: CPUSet) -> list[str]:
        """Say what the CPUs are in proportion to, what is missing, and what does not count."""
        items = [f"{n} on NUMA node {i}" for i, n in sorted(self.device_counts.items())]
        devices_text = f"in proportion to its {self.resource} devices, {join_words(items)}"
        shortfalls = self.cpu_shortfalls(topology, cpus)
        texts = [f"its CPUs are {'not ' if shortfalls else ''}{devices_text}"]
        for i, n in sorted(shortfalls.items()):
            count_of_all = f"{self.cpu_counts[i] - n} of {count_text(self.cpu_counts[i], 'CPU')}"
            texts.append(f"{count_of_all} beside those on NUMA node {i} could be taken")
        for device in self.ambiguous_devices:
            text = f"its {self.resource} {device.id} is of {numa_text(NUMASet(device.numa_nodes))}"
            texts.append(f"{text}, so it does not count in the proportion")
        return texts


def device_distribution(case: PlacementRequest, numa_nodes: NUMASet) -> DeviceDistribution | None:
    """Distribute CPUs over NUMA nodes by the resource with the most devices, then by name.

    None if the devices are not on several of the NUMA nodes, if the pod or the kubelet's rules
    distribute CPUs in another way, and if the kubelet chose them as an extended resource. In a pod
    that is placed as a whole the container's own devices count.
    """
    requests, topology = case.container.devices, case.node.machine.topology
    if not (requests and case.demand.exclusive_cpus and _may_distribute(case)):
        return None
    nodes = frozenset(numa_nodes & topology.cpu_nodes)
    devices = [device for request in devices_giving_hints(case) for device in request.devices]
    device_nodes = {i for device in devices for i in device.numa_nodes & nodes}
    main_request = min(requests, key=lambda r: (-len(r.devices), r.resource))
    inside = [(d, sorted(d.numa_nodes & nodes)) for d in main_request.devices]
    device_counts = Counter(ids[0] for _, ids in inside if len(ids) == 1)
    if len(device_nodes) < 2 or not device_counts:
        return None
    takes_whole_cores = case.effective_smt in (SMT.ANY, SMT.FULL_CORE)
    unit = topology.threads_per_core if takes_whole_cores else 1
    return DeviceDistribution(
        resource=main_request.resource,
        device_counts=dict(device_counts),
        cpu_counts=apportion_cpus(case.demand.exclusive_cpus, device_counts, unit),
        ambiguous_devices=tuple(d for d, ids in inside if len(ids) > 1),
    )


def _may_distribute(case: PlacementRequest) -> bool:
    """True if devices count; the key is needed without a policy and beside the kubelet's rules."""
    requested, kubelet = case.requested, case.node.machine.settings.kubelet
    if requested.devices is DeviceAlignmentMode.IGNORE or requested.slots is not None:
        return False
    if requested.distribute is not None:
        return requested.distribute is Distribution.DEVICES
    has_kubelet_rule = kubelet.ties or kubelet.cpu_order or kubelet.distribute_cpus_across_numa
    return case.policy is not Policy.NONE and not has_kubelet_rule


def parts_for_devices(
    case: PlacementRequest,
    distribution: DeviceDistribution | None,
    numa_nodes: NUMASet,
    free_cpus: CPUSet,
    limits: Mapping[int, int],
) -> tuple[tuple[CPUSet, int], ...]:
    """Return CPUs to take first, with their numbers: of each NUMA node, local ones before others.

    ``limits`` are the CPUs that NUMA nodes can give at most. Without a distribution the container
    may be on any of several NUMA nodes, so that local CPUs count on a single one only. A core for
    each CPU is better than a local second thread.
    """
    if not case.container.devices or (distribution is None and len(numa_nodes) > 1):
        return ()
    need, machine = case.demand.exclusive_cpus, case.node.machine
    counts = dict.fromkeys(numa_nodes, need) if distribution is None else distribution.cpu_counts
    has_own_cores = case.effective_smt in (SMT.SPREAD, SMT.PAIR)
    parts: list[tuple[CPUSet, int]] = []
    for i, count in sorted(counts.items()):
        node_cpus = machine.topology.cpus_of(NUMASet([i]))
        limited = min(count, limits.get(i, count))
        local_cpus = _local_cpus(case, i)
        if local_cpus and local_cpus != node_cpus:
            cores = machine.allocator_index.whole_cores((free_cpus & local_cpus).bits)
            max_count = cores.bit_count() if has_own_cores else limited
            parts.append((local_cpus, min(limited, max_count)))
        if distribution is not None:
            parts.append((node_cpus, limited))
    return tuple(parts)


def _local_cpus(case: PlacementRequest, numa_node: int) -> CPUSet:
    """Return the CPUs of a NUMA node that are beside the PCIe roots of devices; none if unknown."""
    kubelet, bits = case.node.machine.settings.kubelet, 0
    is_ignored = case.requested.devices is DeviceAlignmentMode.IGNORE or kubelet.cpu_order
    for request in () if is_ignored or case.policy is Policy.NONE else case.container.devices:
        for device in request.devices:
            bits |= device.local_cpus.bits if numa_node in device.numa_nodes else 0
    return CPUSet.from_bits(bits & case.node.machine.topology.cpu_bits_of(1 << numa_node))


def local_cpu_sentences(case: PlacementRequest, numa_nodes: NUMASet, cpus: CPUSet) -> list[str]:
    """Say which CPUs are beside PCIe roots, or that roots make no difference between caches."""
    sentences: list[str] = []
    for unit in case.node.machine.allocator_index.numa if case.container.devices else ():
        local_cpus = _local_cpus(case, unit.id) if unit.id in numa_nodes else NO_CPUS
        if local_cpus.bits == unit.bits and len(unit.l3_groups) > 1:
            text = f"all CPUs of NUMA node {unit.id} are beside the PCIe roots of its devices"
            sentences.append(f"{text}, so the roots make no difference")
        elif local_cpus and local_cpus.bits != unit.bits:
            text = f"of its CPUs on NUMA node {unit.id}, {len(cpus & local_cpus)} are beside"
            sentences.append(f"{text} the PCIe roots of its devices, {cpus_text(local_cpus)}")
    return sentences


def apportion_cpus(count: int, weights: Mapping[int, int], unit: int = 1) -> dict[int, int]:
    """Split a count over NUMA nodes in proportion to their weights, in whole units.

    One unit more goes to the largest remainders, of equal ones to the lower id. The last NUMA node
    gets less than a whole unit if the count does not divide.
    """
    units, total = -(-count // unit), sum(weights.values())
    parts = {i: units * weights[i] // total for i in sorted(weights)}
    by_remainder = sorted(parts, key=lambda i: (-(units * weights[i] % total), i))
    for i in by_remainder[: units - sum(parts.values())]:
        parts[i] += 1
    counts = {i: part * unit for i, part in parts.items()}
    counts[max(i for i, part in parts.items() if part)] -= units * unit - count
    return counts
