"""Whether a ResourceClaim can be met on this machine, as far as that is known when it is prepared.

What is not found out here a container is refused for later, with its pod waiting: so everything
that cannot change any more is judged now, by the engine's own rules for annotations and slots.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from nri_numa.dra.claims import CPU, MEMORY, BadClaim, Claim, Result
from nri_numa.engine.decision import Machine
from nri_numa.engine.request.annotations import Resolver
from nri_numa.engine.request.demand import result_text, with_slots
from nri_numa.engine.values.workload import Container, PodSandbox, Refusal, Requested, Resources
from nri_numa.machine.model import numa_text

_PERIOD = 100_000


def judge(machine: Machine, claim: Claim) -> None:
    """Say no to what this machine does not have, and to parameters that make no sense.

    Raises:
        BadClaim: with the first that was found.
    """
    for number, one in enumerate(claim.results):
        who = f"claim {claim.full_name}, request {one.request}"
        _amounts(machine, who, one)
        requested = _requested(machine, claim, number)
        if isinstance(requested, Refusal):
            raise BadClaim(f"{who}: {requested.message}")
        _memory(machine, who, one, requested)


def with_parameters(
    machine: Machine, pod: PodSandbox, container: Container, results: Sequence[Result]
) -> PodSandbox:
    """The pod as if its annotations said for this container what its claims say."""
    prefix = machine.settings.prefix
    said = {
        f"{prefix}/{key}.{container.name}": value
        for one in results
        for key, value in one.parameters.items()
    }
    # What the pod itself says of this container is nearer to it.
    return replace(pod, annotations={**said, **pod.annotations}) if said else pod


def _amounts(machine: Machine, who: str, one: Result) -> None:
    node = machine.topology.numa_nodes.get(one.numa_node)
    if node is None or not node.cpus:
        raise BadClaim(
            f"{who}: NUMA node {one.numa_node} is not there or has no CPUs, expected one "
            f"of {machine.topology.cpu_nodes}"
        )
    usable = len(machine.node_cpus[one.numa_node] - machine.settings.reserved_cpus)
    for what, asked, has in (
        (CPU, one.cpus, usable),
        (MEMORY, one.capacity.get(MEMORY, 0), node.memory_bytes),
    ):
        if asked > has:
            raise BadClaim(
                f"{who}: takes {asked} of {what}, and NUMA node {one.numa_node} has {has}"
            )


def _requested(machine: Machine, claim: Claim, number: int) -> Requested | Refusal:
    """What a container with this result alone, and as many CPUs, would ask for."""
    one = claim.results[number]
    pod = PodSandbox(id="", uid="", namespace=claim.namespace, name=claim.name)
    text = result_text(one.numa_node, claim.uid, number, one.cpus)
    container = Container(
        id="",
        pod_id="",
        name="claim",
        annotations={machine.slots_key: text},
        resources=Resources(cpu_quota=one.cpus * _PERIOD, cpu_period=_PERIOD),
    )
    # That of the machine remembers what it read, for the loop's thread alone.
    resolve = Resolver(machine.settings, machine.list_limit)
    asked = resolve(with_parameters(machine, pod, container, [one]), container)
    return with_slots(machine.settings, pod, container, asked)


def _memory(machine: Machine, who: str, one: Result, requested: Requested) -> None:
    """The list of ``numamem``, which the engine compares with the machine when it places."""
    listed = requested.listed_mems
    if not listed:
        return
    there = machine.topology.memory_nodes
    if missing := listed - there:
        raise BadClaim(
            f"{who}: parameter numamem is {requested.numamem!r}, and "
            f"{numa_text(missing, 'has', 'have')} no memory for containers; expected NUMA nodes "
            f"among {there}"
        )
    if one.capacity.get(MEMORY) and one.numa_node not in listed:
        raise BadClaim(
            f"{who}: parameter numamem is {requested.numamem!r}, and the claim takes memory of "
            f"NUMA node {one.numa_node}; expected that one in it, or no memory in the claim"
        )
