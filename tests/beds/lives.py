"""Lives of pods drawn by a number, and what each event left behind, one line each.

``make recorded`` writes them down in ``tests/golden/lives``. Do that when other places are meant,
and read the difference: it is what pods get that come after an upgrade.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final

from msgspec.structs import replace

from nri_numa.engine.decision import Admitted, Rejected
from nri_numa.engine.explain import explanation, sentences
from nri_numa.engine.explain.explanation import ExplanationDocument
from nri_numa.engine.state import Allocation, ContainerKind
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.machine import Topology
from nri_numa.model.settings import (
    AnnotationPermission,
    CPUAmount,
    CPUWithholdingQuota,
    IsolatedCPUs,
    KubeletRules,
    NamespacePatternQuota,
    NohzFullCPUs,
    OnDenied,
    PreferredCores,
    QuotasAndPoolFloor,
    Rule,
    Settings,
)
from nri_numa.model.workload import (
    Container,
    Device,
    DeviceRequest,
    PodSandbox,
    QoSClass,
    Resources,
    Strategy,
)
from tests.beds.recorded import write_down
from tests.beds.world import GIB, World, container, pod, resources
from tests.machines import named

_ODD: Final = 100
"""The first number of an odd life."""
RECORDED: Final = Path(__file__).parents[1] / "golden" / "lives"
_MACHINES: Final = (
    *("snc_smt", "dual_smt_16", "hybrid", "memory_only", "chiplets", "isolated_cpus"),
    *("nohz_full_cpus", "huge_pages", "joined_sockets", "snc_asymmetric", "offline_cpus"),
    *("dual_adjacent", "cpu_only", "sixteen_nodes", "single_smt", "dual_alternating"),
    *("snc_smt", "dual_smt_16", "hybrid", "memory_only", "chiplets", "huge_pages"),
    *("joined_sockets", "ten_nodes", "inside_cpuset", "sparse_ids", "no_caches"),
    *("snc_smt", "dual_smt_16", "snc_asymmetric", "dual_smt", "huge_pages"),
)
_ODD_MACHINES: Final = (
    *("snc_smt", "huge_pages", "dual_smt_16", "memory_only", "chiplets", "sparse_ids"),
    *("joined_sockets", "snc_asymmetric", "hybrid", "isolated_cpus", "ten_nodes"),
    *("huge_pages", "dual_smt", "no_caches", "cpu_only", "memory_only", "snc_smt"),
    *("dual_smt_16", "huge_pages", "sparse_ids", "offline_cpus", "inside_cpuset"),
    *("nohz_full_cpus", "single_smt"),
)
LIVES: Final = (
    *(f"{number:02}-{machine}" for number, machine in enumerate(_MACHINES)),
    *(f"{number}-{machine}" for number, machine in enumerate(_ODD_MACHINES, _ODD)),
)
"""Names: a number and the machine."""
_NAMESPACES: Final = ("default", "team-a", "team-b")
_OF_THE_PROCESS: Final = ("nri_numa_log_lines_dropped_total",)
"""Counted since the process began, so whatever ran before this life is in it."""
_PERIODS: Final = (100_000, 100_000, 50_000, 33_333, 7_000)

EVENTS: Final = 24


class Life:
    """One node, and what happens to it.

    Args:
        name: of `LIVES`; the same name is the same life.
    """

    def __init__(self, name: str) -> None:
        self._random = Random(int(name.partition("-")[0]))
        topology = getattr(named, name.partition("-")[2])()
        settings = self._settings(topology)
        self.world = World(topology, settings)
        self.world.synchronize()
        self.lines = [f"settings: {', '.join(recorded_settings(settings))}"]
        self._had: dict[str, str] = {"kept for pods": ""}
        self._number = 0

    def _settings(self, topology: Topology) -> Settings:
        random = self._random
        kubelet = random.random() < 0.2
        first = sorted(topology.allowed)
        without_cpus = NUMASet(node.id for node in topology.numa_nodes.values() if not node.cpus)
        memory_only = without_cpus if random.random() < 0.7 else NUMASet()
        settings = Settings(
            strategy=random.choice(list(Strategy)),
            cpu_overcommit=random.choice((1.0, 1.0, 1.5)),
            reserved_cpus=CPUSet(first[: random.choice((0, 0, 1, 2))] if len(first) > 4 else ()),
            strict_reserved=random.random() < 0.3,
            reserved_memory={0: GIB} if random.random() < 0.3 else {},
        )
        static_cpus, prefer_closest = random.random() < 0.3, random.random() < 0.8
        cpus = kubelet and random.random() < 0.5
        cpu_order = random.choice((False, False, True))
        across_numa, across_cores = random.random() < 0.3, random.random() < 0.2
        align_l3, by_socket = random.random() < 0.8, random.random() < 0.2
        return replace(
            settings,
            prefer_closest=prefer_closest,
            kubelet=KubeletRules(
                ties=kubelet,
                cpus=cpus,
                memory=kubelet,
                static_cpus=static_cpus,
                cpu_order=cpu_order,
                distribute_cpus_across_numa=across_numa,
                distribute_cpus_across_cores=across_cores,
                align_by_socket=by_socket,
            ),
            align_l3=align_l3,
            isolated=random.choice((IsolatedCPUs.ANY, IsolatedCPUs.PREFER, IsolatedCPUs.AVOID)),
            nohz_full=random.choice(list(NohzFullCPUs)),
            cores=random.choice(list(PreferredCores)),
            memory_only_nodes=memory_only,
            disable_cfs_quota=random.random() < 0.8,
            set_environment=random.random() < 0.8,
            permissions=(AnnotationPermission(name="permissions[0]", unpaid_cpus=True),)
            if random.random() < 0.3
            else (),
            limits=QuotasAndPoolFloor(
                quota=CPUWithholdingQuota(exclusive=CPUAmount(percent=75)),
                idle_siblings=CPUAmount(percent=random.choice((25, 50))),
                numa_pool=CPUAmount(random.choice((0, 0, 1))),
            )
            if random.random() < 0.5
            else QuotasAndPoolFloor(),
        )

    def lived(self) -> list[str]:
        events = (
            *((self._create, 11), (self._stop, 4), (self._resize, 4), (self._restart, 1)),
            *((self._sets_a_cpuset, 1), (self._drain, 1), (self._loses_the_checkpoint, 1)),
            *((self._granted, 1), (self._in_a_gap, 1)),
        )
        some = [event for event, _ in events]
        weights = [weight for _, weight in events]
        for _ in range(EVENTS):
            event = self._random.choices(some, weights)[0]
            if self.world.live or event == self._create:
                event()
                self._look()
        self._explain()
        return self.lines

    def _explain(self) -> None:
        """What is told of the first and the last container and of a refusal, and all notices."""
        agent = self.world.agent
        documents = [
            explanation.explain_allocation(
                one, agent.history.explanation_of(one.container_id), agent.current.cpus_of(one)
            )
            for _, one in sorted(agent.current.state.allocations.items())
        ]
        refused = [
            explanation.explain_rejection(
                agent.history.explanation_of_rejection(one), one.reason, one.message
            )
            for one in agent.history.rejections
        ]
        for document in self._told_at_the_end(documents, refused):
            self.lines.append("explained:")
            self.lines += [f"    {line}" for line in sentences.render_text(document).splitlines()]
        self.lines.append("noted:")
        for one in agent.history.notices.notices_after():
            who = f"{one.pod}/{one.container}"
            self.lines.append(
                f"    {one.notice_kind} {who} {one.count}: {one.reason} {one.message}".rstrip()
            )

    def _told_at_the_end(
        self, documents: list[ExplanationDocument], refused: list[ExplanationDocument]
    ) -> list[ExplanationDocument]:
        return [*documents[:1], *documents[-1:], *refused[-1:]]

    def _look(self) -> None:
        """Whatever is other than it was, and the shared pool."""
        self.world.check()
        state = self.world.agent.current.state
        now = {
            i: f"{_allocation(state.allocations[i])} | {self._runs_on(i)}"
            for i in sorted(self.world.live)
        }
        now["pool"] = str(self.world.agent.current.desired.pool)
        now["kept for pods"] = "; ".join(
            f"{uid} {one.affinity}{'' if one.affinity_is_preferred else ' not preferred'}"
            for uid, one in sorted(state.pods.items())
            if one.affinity is not None
        )
        for name in sorted(now.keys() | self._had.keys()):
            if now.get(name) != self._had.get(name):
                self.lines.append(f"    {name}: {now.get(name, 'gone')}")
        self._had = now

    def _runs_on(self, container_id: str) -> str:
        has = self.world.live[container_id].resources
        pool = self.world.agent.current.desired.pool
        cpus = "the pool" if has.cpus == str(pool) else has.cpus or "all"
        return f"runs on {cpus}/{has.mems or 'all'} quota {has.cpu_quota}"

    def _wishes(self) -> dict[str, str]:
        random = self._random
        if random.random() < 0.15:
            online = sorted(self.world.topology.online)
            some = CPUSet(random.sample(online, min(len(online), random.choice((1, 2, 2, 4)))))
            wishes = {"numacpu": str(some)}
            if random.random() < 0.4:
                wishes["cpus"] = "exclusive"
            if random.random() < 0.4:
                wishes["numamem"] = str(random.choice(sorted(self.world.topology.numa_nodes)))
            return wishes
        wishes = {
            "policy": random.choice(
                ("best-effort", "restricted", "single-numa-node", "single-numa-node", "none")
            )
        }
        for key, chance, values in (
            ("cpus", 0.4, ("exclusive", "exclusive", "shared")),
            ("smt", 0.4, ("any", "spread", "full-core", "isolate", "pair")),
            ("scope", 0.3, ("pod", "container")),
            ("bind", 0.15, ("cpu", "cpu+mem", "none")),
            ("on-failure", 0.3, ("reject", "widen", "unpinned")),
            ("load", 0.2, ("high", "low", "09:00-18:00", "22:00-06:00")),
        ):
            if random.random() < chance:
                wishes[key] = random.choice(values)
        return wishes if random.random() < 0.9 else {}

    def _new(self) -> tuple[PodSandbox, Container, str]:
        random = self._random
        self._number += 1
        if self.world.pods and random.random() < 0.25:
            of, wishes = self.world.pods[sorted(self.world.pods)[-1]], "same pod"
        else:
            asked = self._wishes()
            qos = random.choices(list(QoSClass), (6, 2, 1))[0]
            cpus, memory = self._size()
            total = resources(cpus * 2, memory * 2) if "scope" in asked else None
            of = pod(f"p{self._number:02}", asked, qos=qos, total=total)
            wishes = f"{qos} {' '.join(f'{key}={value}' for key, value in asked.items())}"
        cpus, memory = self._size()
        pages = {}
        sizes = _page_sizes(self.world.topology)
        if sizes and random.random() < 0.4:
            pages = {random.choice(sizes): random.choice((1, 2, 3)) * GIB}
        made = container(of, f"c{self._number:02}", resources(cpus, memory, hugepages=pages))
        if random.random() < 0.15:
            made = replace(made, devices=(self._devices(),))
        text = f"{cpus:g} CPUs {memory:g} GiB {pages or ''}{' devices' if made.devices else ''}"
        return of, made, f"{wishes}, {text}"

    def _size(self) -> tuple[float, float]:
        random = self._random
        most = len(self.world.topology.allowed)
        cpus = random.choice((0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 4.0, most // 4, most // 2))
        return float(cpus), random.choice((0.0, 0.5, 1.0, 1.0, 3.0, 9.0, 40.0))

    def _devices(self) -> DeviceRequest:
        random = self._random
        nodes = sorted(self.world.topology.numa_nodes)
        devices = []
        for k in range(4):
            where = random.sample(nodes, min(len(nodes), random.choice((1, 2))))
            known = random.random() < 0.7
            devices.append(Device(id=f"d{k}", numa_nodes=frozenset(where if known else ())))
        return DeviceRequest(
            resource="example.org/gpu", count=random.choice((1, 2)), devices=tuple(devices)
        )

    def _create(self) -> None:
        of, made, asked = self._new()
        answer = self.world.create(of, made)
        said = _refused(answer) if isinstance(answer, Rejected) else ""
        self.lines.append(f"create {made.id}: {asked} {said}".rstrip())
        self._answered(answer)

    def _answered(self, answer: Admitted | Rejected | None) -> None:
        """More of an answer, where a life tells more."""

    def _in_a_gap(self) -> None:
        of, made, asked = self._new()
        self.world.meet(of, made)
        self.world.synchronize()
        self.lines.append(f"created while nobody looked, {made.id}: {asked}")

    def _pick(self) -> str:
        return self._random.choice(sorted(self.world.live))

    def _stop(self) -> None:
        one = self._pick()
        of = self.world.live[one].pod_id
        self.world.stop(one)
        self.lines.append(f"stop {one}")
        if of in self.world.pods and all(c.pod_id != of for c in self.world.live.values()):
            self.world.remove_pod(self.world.pods[of])
            self.lines[-1] += ", the last of its pod"

    def _resize(self) -> None:
        one = self._pick()
        cpus, memory = self._size()
        refused = self.world.update(one, resources(cpus, memory))
        said = _refused(refused) if refused else ""
        self.lines.append(f"resize {one} to {cpus:g} CPUs {memory:g} GiB {said}".rstrip())

    def _restart(self) -> None:
        self.world.restart()
        self.lines.append("restart")

    def _loses_the_checkpoint(self) -> None:
        self.world.restart(lost=True)
        self.lines.append("restart without the checkpoint")

    def _sets_a_cpuset(self) -> None:
        one = self._pick()
        allowed = sorted(self.world.topology.allowed)
        text = str(CPUSet(allowed[: self._random.choice((1, 2, 4))]))
        self.world.update(one, Resources(cpus=text))
        self.lines.append(f"somebody sets {one} to {text}")

    def _drain(self) -> None:
        numa_node = self._random.choice(sorted(self.world.topology.numa_nodes))
        factor = self._random.choice((0.0, 0.5, 1.0))
        self.world.settings = replace(self.world.settings, capacity_factor={numa_node: factor})
        self.world.apply(
            self.world.agent.apply_node_model(
                replace(self.world.agent.current.machine, settings=self.world.settings)
            )
        )
        self.lines.append(f"NUMA node {numa_node} is worth {factor:g}")

    def _granted(self) -> None:
        pool = sorted(self.world.agent.current.desired.pool)
        if len(pool) < 4:
            return
        text = str(CPUSet(pool[-1:]))
        self.world.kubelet({("of-the-kubelet", "c"): text}, reserved="0")
        self.lines.append(f"the kubelet grants {text}")


class OddLife(Life):
    """With what is rare: amounts beside the round ones, rules, quotas, memory kept back.

    Of each answer and of the end more is told than of other lives: the environment, the warnings,
    more explanations, what is stored, and what was counted.

    Args:
        name: of `LIVES`.
    """

    def _settings(self, topology: Topology) -> Settings:
        random, nodes = self._random, sorted(topology.numa_nodes)
        sizes = _page_sizes(topology)
        amounts = (CPUAmount(1), CPUAmount(3), CPUAmount(percent=33), CPUAmount(percent=100))
        return replace(
            super()._settings(topology),
            defaults={"policy": "best-effort"} if random.random() < 0.3 else {},
            rules=(
                Rule(namespaces=("team-*",), values={"smt": "full-core", "policy": "restricted"}),
                Rule(labels={"kind": "odd"}, qos=(QoSClass.BURSTABLE,), values={"bind": "cpu"}),
                Rule(containers=("c*1",), values={"scope": "container", "load": "high"}),
            )[: random.choice((0, 1, 3))],
            capacity_factor={random.choice(nodes): random.choice((0.0, 0.33, 0.9))}
            if random.random() < 0.3
            else {},
            reserved_memory={i: random.choice((0, 3, GIB + 1)) for i in nodes},
            reserved_hugepages={nodes[-1]: dict.fromkeys(sizes, GIB)} if sizes else {},
            permissions=(
                AnnotationPermission(
                    name="permissions[0]",
                    namespaces=("team-a",),
                    keys=("policy", "cpus", "smt", "scope", "on-failure"),
                    values={"smt": ("any", "full-core", "isolate")},
                    on_denied=random.choice(list(OnDenied)),
                ),
                AnnotationPermission(
                    name="permissions[1]", labels={"kind": "odd"}, unpaid_cpus=True
                ),
                AnnotationPermission(
                    name="permissions[2]", reserved_cpus=True, qos=(QoSClass.GUARANTEED,)
                ),
            )[random.choice((0, 0, 1, 3)) :],
            limits=QuotasAndPoolFloor(
                quota=CPUWithholdingQuota(
                    exclusive=random.choice(amounts), listed=random.choice(amounts)
                ),
                idle_siblings=random.choice(amounts),
                namespaces=(
                    NamespacePatternQuota(
                        name="limits.namespaces[0]",
                        namespaces=("team-b",),
                        quota=CPUWithholdingQuota(
                            exclusive=random.choice(amounts), listed=CPUAmount(2)
                        ),
                    ),
                ),
                pool=random.choice((None, CPUAmount(2))),
                numa_pool=CPUAmount(random.choice((0, 1, 2))),
            )
            if random.random() < 0.4
            else QuotasAndPoolFloor(),
        )

    def _wants(self) -> tuple[Resources, int | None]:
        """Resources, and the OOM score, near the places where something else begins."""
        random = self._random
        cpus, memory = self._size()
        milli = max(0, round(cpus * 1000) + random.choice((0, 0, 0, 0, -1, 1, -500, 250)))
        limited = milli if random.random() < 0.75 else 0
        period = random.choice(_PERIODS)
        bytes_ = round(memory * GIB) + random.choice((0, 0, 0, 1, -1, 4096))
        share = random.choice((1, 1, 1, 2))
        return (
            Resources(
                cpu_shares=max(2, milli // share * 1024 // 1000),
                cpu_quota=limited * period // 1000 or random.choice((None, -1, 0)),
                cpu_period=period if limited else random.choice((None, 0, period)),
                memory_limit=bytes_ if bytes_ > 0 and random.random() < 0.8 else None,
                hugepages=self._pages(),
            ),
            random.choice((None, None, 2, 3, 500, 900, 998, 999, 1000, -997)),
        )

    def _pages(self) -> dict[int, int]:
        random = self._random
        return {
            size: max(0, random.choice((1, 2, 3)) * GIB + random.choice((0, 0, size, -size, 1)))
            for size in _page_sizes(self.world.topology)
            if random.random() < 0.4
        }

    def _new(self) -> tuple[PodSandbox, Container, str]:
        random = self._random
        self._number += 1
        wants, score = self._wants()
        if self.world.pods and random.random() < 0.25:
            of, wishes = self.world.pods[sorted(self.world.pods)[-1]], "same pod"
        else:
            asked = self._wishes()
            qos = random.choices(list(QoSClass), (5, 4, 1))[0]
            of = pod(
                f"p{self._number:02}",
                asked,
                qos=qos,
                total=self._wants()[0] if random.random() < 0.5 else None,
                namespace=random.choice(_NAMESPACES),
                labels={"kind": "odd"} if random.random() < 0.3 else {},
            )
            said = " ".join(f"{key}={value}" for key, value in asked.items())
            wishes = f"{of.namespace} {qos} {said}{' odd' if of.labels else ''}"
        made = container(of, f"c{self._number:02}", wants, oom_score_adj=score)
        if random.random() < 0.25:
            made = replace(made, devices=(self._devices(),))
        text = f"{_resources(wants)} score {score}{' devices' if made.devices else ''}"
        return of, made, f"{wishes}, {text}"

    def _resize(self) -> None:
        one = self._pick()
        wants, _ = self._wants()
        wants = replace(wants, hugepages={})
        refused = self.world.update(one, wants)
        said = f"refused: {refused.reason}: {refused.message}" if refused else ""
        self.lines.append(f"resize {one} to {_resources(wants)} {said}".rstrip())

    def _answered(self, answer: Admitted | Rejected | None) -> None:
        if isinstance(answer, Admitted):
            told = answer.adjustment
            words = [f"{key}={value}" for key, value in sorted(told.env.items())]
            self.lines += [f"    told {' '.join(words)}"] if words else []
            if told.memory_policy is not None:
                self.lines.append(f"    memory policy {told.memory_policy}")
            self.lines += [f"    warned: {one}" for one in answer.warnings]

    def _told_at_the_end(
        self, documents: list[ExplanationDocument], refused: list[ExplanationDocument]
    ) -> list[ExplanationDocument]:
        return [*documents[:4], *refused[-2:]]

    def _explain(self) -> None:
        super()._explain()
        self.lines.append("stored:")
        for key, document in sorted(self.world.store.documents.items()):
            self.lines.append(f"    {key} {json.dumps(document, sort_keys=True)}")
        self.lines.append("counted:")
        for metric in self.world.metrics.registry.collect():
            for name, labels, value, *_ in metric.samples:
                if name in _OF_THE_PROCESS or not name.endswith("_total") or not value:
                    continue
                if name.startswith("nri_numa"):
                    which = " ".join(f"{key}={each}" for key, each in sorted(labels.items()))
                    self.lines.append(f"    {name} {which} {value:g}")


def _page_sizes(topology: Topology) -> list[int]:
    return sorted({size for node in topology.numa_nodes.values() for size in node.hugepages})


def _resources(one: Resources) -> str:
    words = [f"shares {one.cpu_shares} quota {one.cpu_quota}/{one.cpu_period}"]
    words.append(f"memory {one.memory_limit}")
    words += [f"{size}: {amount}" for size, amount in one.hugepages.items()]
    return " ".join(words)


def _refused(one: Rejected) -> str:
    return f"refused: {one.reason}: {one.message.partition(', container ')[2]}"


RECORDED_SETTINGS: Final = {
    "cpu_overcommit": "oversale",
    "disable_cfs_quota": "lift_quota",
    "reservation_seconds": "kept_seconds",
    "rebalance_moves": "room_moves",
}
"""Names of settings in recorded files, by field."""


def recorded_settings(settings: Settings) -> Iterator[str]:
    """What differs from the defaults, as it stands in recorded files."""
    usual = Settings()
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if isinstance(value, KubeletRules):
            rules = [rule for rule in value.__struct_fields__ if getattr(value, rule)]
            yield from (f"kubelet.{rule}" for rule in rules)
        elif value != getattr(usual, name):
            known = RECORDED_SETTINGS.get(name, name)
            is_long = isinstance(value, QuotasAndPoolFloor | tuple)
            yield known if is_long else f"{known}={value}"


def _allocation(one: Allocation) -> str:
    words: list[object] = [one.kind, one.cpus or "-"]
    if one.idle_siblings:
        words.append(f"idle {one.idle_siblings}")
    if one.exclusive and one.kind is not ContainerKind.EXCLUSIVE:
        words.append("owned")
    words.append(f"numa {one.numa_nodes or '-'} mems {one.mems or '-'} {one.policy} {one.smt}")
    if not one.aligned:
        words.append("not preferred")
    if one.foreign_cpus:
        words.append(f"pinned {one.foreign_cpus}")
    if one.lifted_quota is not None:
        words.append(f"lifted {one.lifted_quota}")
    if one.reason:
        words.append(f"({one.reason})")
    for i, charge in sorted(one.charges.items()):
        pages = "".join(f" {size}:{each / GIB:g}G" for size, each in charge.hugepages.items())
        words.append(f"[{i}: {charge.cpu_milli}m {charge.memory / GIB:g}G{pages}]")
    return " ".join(map(str, words))


def told(name: str) -> list[str]:
    """What became of one of `LIVES`."""
    return (Life if int(name.partition("-")[0]) < _ODD else OddLife)(name).lived()


if __name__ == "__main__":
    write_down(RECORDED, LIVES, told)
