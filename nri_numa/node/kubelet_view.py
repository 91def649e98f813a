"""Shows the kubelet beside us as an API document."""

from __future__ import annotations

from nri_numa.engine.others import KUBELETS, shown_kind
from nri_numa.http.responses import Kubelet, KubeletContest, KubeletGrant
from nri_numa.node.agent import Agent
from nri_numa.node.beside_kubelet import BesideKubelet
from nri_numa.node.kubelet_settings import KubeletSettings


def kubelet_document(
    agent: Agent, beside: BesideKubelet, configuration: KubeletSettings
) -> Kubelet:
    """What the kubelet's managers granted, and where it and we disagree.

    Reads what is replaced as a whole, so any thread may call it.
    """
    state, settings = agent.state, agent.machine.settings
    grants, adopted = state.kubelet, configuration.adopted
    shown = grants.shared[0] if grants.shared else ""
    return Kubelet(
        cpu_policy=grants.cpu_policy,
        memory_policy=grants.memory_policy,
        override=settings.kubelet_override.value,
        shared_cpus=str(shown),
        granted_cpus=str(grants.granted),
        grants=tuple(_grants(agent)),
        contests=tuple(
            KubeletContest(
                container_id=one.container_id,
                namespace=one.namespace,
                pod=one.pod,
                pod_uid=one.pod_uid,
                container=one.container,
                asked=one.asked,
                kept=one.kept,
                yields_to=one.yields_to,
                seen_in=one.seen_in,
                since=one.since,
                times=one.times,
            )
            for _, one in sorted(beside.contests.items())
        ),
        problems=(*beside.problems, *configuration.found.problems),
        configuration=configuration.found.path,
        adopted=adopted.adopted if adopted else (),
        differences=adopted.differences if adopted else (),
    )


def _grants(agent: Agent) -> list[KubeletGrant]:
    """Of containers, then of whole pods; each by UID and name."""
    state = agent.state
    grants = state.kubelet
    live = {(a.pod_uid, a.container): a for a in state.allocations.values()}
    by_id = {("", a.container_id): a for a in state.allocations.values()}
    pods = {a.pod_uid: a for a in state.allocations.values()}
    found: list[KubeletGrant] = []
    for holder in sorted(grants.cpus.keys() | grants.mems.keys()):
        a = live.get(holder) or by_id.get(holder)
        cpus = grants.cpus.get(holder, "")
        found.append(
            KubeletGrant(
                pod_uid=a.pod_uid if a else holder[0],
                container=a.container if a else holder[1],
                namespace=a.namespace if a else "",
                pod=a.pod if a else "",
                cpus=str(cpus),
                mems=str(grants.mems.get(holder, "")),
                overridden=bool(cpus) and a is not None and shown_kind(state, a) != KUBELETS,
            )
        )
    for uid in sorted(grants.pods.keys() | grants.pod_mems.keys()):
        a = pods.get(uid)
        found.append(
            KubeletGrant(
                pod_uid=uid,
                container="",
                namespace=a.namespace if a else "",
                pod=a.pod if a else "",
                cpus=str(grants.pods.get(uid, "")),
                mems=str(grants.pod_mems.get(uid, "")),
                overridden=False,
            )
        )
    return found
