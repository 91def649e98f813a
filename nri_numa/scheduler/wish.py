"""What a pod asks for, read by the engine's own rules before any node has seen it.

The kubelet creates init containers one after another and then the others, which run together; what
an ended init container had is there again. So an init container is judged beside the sidecars that
started before it, and the rest together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from nri_numa.engine.place.memory import KEY, pages_name, without_nodes
from nri_numa.engine.request.annotations import by_annotation, resolve
from nri_numa.engine.request.demand import Demand, demand, with_slots, with_static_cpus
from nri_numa.engine.state import NOTHING, Charge
from nri_numa.engine.values.settings import Settings
from nri_numa.engine.values.workload import (
    SMT,
    Bind,
    Container,
    CPUMode,
    OnFailure,
    PodSandbox,
    Policy,
    QoSClass,
    Refusal,
    Requested,
    Scope,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A container of a pod that is not placed yet.

    Attributes:
        container: as a runtime would be told it.
        ends: it is an init container that ends before the others start.
        memory: bytes of its memory request; None where there is none.
    """

    container: Container
    ends: bool = False
    memory: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one container needs of NUMA nodes.

    Attributes:
        container: its name.
        ends: see `Member`.
        policy: by which it is aligned.
        exclusive: CPUs.
        milli: thousandths of a CPU that it shares.
        amounts: bytes by resource (``memory``, ``hugepages-…``) that must be in its NUMA nodes.
        paid: of these, what is allocated to it.
        smt: what to do about siblings.
        on_failure: what happens on the node when it does not fit.
    """

    container: str
    ends: bool = False
    policy: Policy = Policy.NONE
    exclusive: int = 0
    milli: int = 0
    paid_milli: int = 0
    amounts: tuple[tuple[str, int], ...] = ()
    paid: tuple[tuple[str, int], ...] = ()
    smt: SMT = SMT.SPREAD
    on_failure: OnFailure = OnFailure.REJECT


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a pod asks for.

    Attributes:
        uid, namespace, name: of the pod.
        needs: of the containers that ask us for something, in the order in which they start.
        together: one need for the whole pod, under scope ``pod``; its container is empty.
        kubelets: what the kubelet aligns where it has a policy: whole CPUs of a Guaranteed pod's
            containers, by itself.
        wrong: why every node of ours would refuse it.
        ours: an annotation, a rule or a default asks for something.
    """

    uid: str
    namespace: str
    name: str
    needs: tuple[Need, ...] = ()
    together: Need | None = None
    kubelets: tuple[Need, ...] = ()
    wrong: str = ""
    ours: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """What replicas share: pods with equal keys are judged alike."""
        return self.needs, self.together, self.kubelets

    @property
    def nothing(self) -> bool:
        """No node needs to be looked at."""
        return not (self.needs or self.together or self.kubelets or self.wrong)


def wish_of(settings: Settings, pod: PodSandbox, members: Sequence[Member]) -> Wish:
    """Read what a pod asks for.

    Args:
        settings: prefix, rules, defaults and permissions, as the nodes have them.
        pod: with annotations, labels and QoS class.
        members: its containers in the order in which they start.
    """
    wish = Wish(uid=pod.uid, namespace=pod.namespace, name=pod.name)
    needs: list[Need] = []
    kubelets: list[Need] = []
    scopes: set[Scope] = set()
    allocated, whole_milli = NOTHING, NOTHING  # of the containers that stay
    for member in members:
        container = member.container
        requested = with_slots(settings, pod, container, resolve(settings, pod, container))
        requested = with_static_cpus(settings, pod, container, requested)
        if isinstance(requested, Refusal):
            return replace(wish, wrong=_why(requested, pod, container), ours=True)
        whole = _whole_cpus(pod, container, whole_milli)
        if whole:
            kubelets.append(_kubelets(member, whole))
            if not member.ends:
                whole_milli = whole_milli.plus(Charge(cpu_milli=1000 * whole))
        # Whole CPUs a kubelet may pin, and what it pins is left to it.
        if not whole and _policy_without_nodes(requested):
            refused = without_nodes(requested, f"pod {pod.full_name}, container {container.name}")
            return replace(wish, wrong=_why(refused, pod, container), ours=True)
        if requested.leave_alone or requested.numacpu is not None:
            # CPUs by number are known on the node alone.
            continue
        found = demand(pod, container, requested, 0, allocated)
        if isinstance(found, Refusal):
            return replace(wish, wrong=_why(found, pod, container), ours=True)
        scopes.add(requested.scope)
        need = _need(member, requested, _exact(pod, member, found))
        needs.append(need)
        if not member.ends:
            milli = 1000 * need.exclusive or min(need.milli, need.paid_milli)
            allocated = allocated.plus(Charge(milli, dict(need.paid).get("memory", 0)))
    together = None
    if Scope.POD in scopes and len(needs) > 1:
        together = _together(needs)
    return replace(
        wish,
        needs=tuple(needs),
        together=together,
        kubelets=tuple(kubelets),
        ours=bool(needs),
    )


def _policy_without_nodes(requested: Requested) -> bool:
    """Whether every node refuses its memory policy, since no machine pins its memory."""
    listed = requested.numacpu is not None and requested.numamem is None
    return (
        requested.mempolicy.on_nodes
        and (requested.leave_alone or listed)
        and requested.on_failure is not OnFailure.UNPINNED
        and by_annotation(requested, KEY)
    )


def _why(refusal: Refusal, pod: PodSandbox, container: Container) -> str:
    """The refusal without the names, so that replicas have one text."""
    return refusal.message.removeprefix(f"pod {pod.full_name}, container {container.name}: ")


def _whole_cpus(pod: PodSandbox, container: Container, others: Charge) -> int:
    """CPUs that the kubelet's static policy would give (cm/cpumanager/policy_static.go)."""
    if pod.qos is not QoSClass.GUARANTEED:
        return 0
    asked = Requested(cpus=None, policy=Policy.BEST_EFFORT)
    found = demand(pod, container, asked, 0, others)
    return found.exclusive_cpus if isinstance(found, Demand) else 0


def _kubelets(member: Member, cpus: int) -> Need:
    amounts = _amounts(member.container.resources.hugepages, member.memory or 0)
    return Need(
        container=member.container.name,
        ends=member.ends,
        policy=Policy.BEST_EFFORT,
        exclusive=cpus,
        amounts=amounts,
        paid=amounts,
        smt=SMT.ANY,
    )


def _exact(pod: PodSandbox, member: Member, found: Demand) -> Demand:
    """The node reads a request from the OOM score; here it is known."""
    if found.memory_source == "none" and member.memory and pod.qos is QoSClass.BURSTABLE:
        found = structs.replace(found, memory_bytes=member.memory, memory_source="request")
    if pod.qos is QoSClass.BURSTABLE:
        found = structs.replace(found, memory_paid=min(found.memory_bytes, member.memory or 0))
    return found


def _need(member: Member, requested: Requested, found: Demand) -> Need:
    memory = requested.bind is Bind.CPU_MEM and requested.numamem is None
    policy = requested.policy
    if policy is Policy.NONE and requested.cpus is not CPUMode.EXCLUSIVE:
        policy = Policy.BEST_EFFORT  # as the node does: ``bind`` alone names no policy
    on_failure = requested.on_failure
    if on_failure is None:
        mild = requested.policy is Policy.BEST_EFFORT and requested.numamem is None
        on_failure = OnFailure.WIDEN if mild else OnFailure.REJECT
    return Need(
        container=member.container.name,
        ends=member.ends,
        policy=policy,
        exclusive=found.exclusive_cpus,
        milli=0 if found.exclusive_cpus else found.cpu_milli,
        paid_milli=0 if found.exclusive_cpus else found.cpu_paid_milli,
        amounts=_amounts(found.hugepages, found.memory_bytes) if memory else (),
        paid=_amounts(found.hugepages, found.memory_paid) if memory else (),
        smt=requested.smt,
        on_failure=on_failure,
    )


def _amounts(hugepages: Mapping[int, int], memory: int) -> tuple[tuple[str, int], ...]:
    found = [("memory", memory)] if memory else []
    for size, amount in sorted(hugepages.items()):
        if amount:
            found.append((pages_name(size), amount))
    return tuple(found)


def _together(needs: Sequence[Need]) -> Need:
    """The peak of the pod: what runs at the same time, or an init container if that is more."""
    staying = [need for need in needs if not need.ends]
    ending = [need for need in needs if need.ends]
    first = needs[0]

    def peak(one: Sequence[int], others: Sequence[int]) -> int:
        return max(sum(one), max(others, default=0))

    names = sorted({name for need in needs for name, _ in need.amounts})

    def amounts(of: str) -> tuple[tuple[str, int], ...]:
        return tuple(
            (
                name,
                peak(
                    [dict(getattr(need, of)).get(name, 0) for need in staying],
                    [dict(getattr(need, of)).get(name, 0) for need in ending],
                ),
            )
            for name in names
        )

    return Need(
        container="",
        policy=first.policy,
        exclusive=peak([n.exclusive for n in staying], [n.exclusive for n in ending]),
        milli=peak([n.milli for n in staying], [n.milli for n in ending]),
        paid_milli=peak([n.paid_milli for n in staying], [n.paid_milli for n in ending]),
        amounts=amounts("amounts"),
        paid=amounts("paid"),
        smt=first.smt,
        on_failure=first.on_failure,
    )
