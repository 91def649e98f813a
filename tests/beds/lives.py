"""Lives of pods drawn by a number, and what each event left behind, a line of values each.

``make recorded`` writes them down in ``tests/golden/lives``, values and texts apart, and says what
differs by class. Do that when other places are meant: the difference is what pods get that come
after an upgrade.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

from msgspec.structs import replace

from nri_numa.engine.decision import Admitted, Rejected
from nri_numa.engine.explain import explanation, sentences
from nri_numa.engine.explain.explanation import ExplanationDocument
from nri_numa.engine.state import Allocation
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
from tests.beds.life_record import LifeRecord
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
        self.record = LifeRecord()
        self.record.add("0 settings", settings=list(recorded_settings(settings)))
        self._had: dict[str, dict[str, Any]] = {}
        self._number = 0
        self._event = 1

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
            strict_cpu_reservation=random.random() < 0.3,
            reserved_memory={0: GIB} if random.random() < 0.3 else {},
        )
        static_cpus, prefer_closest = random.random() < 0.3, random.random() < 0.8
        cpus = kubelet and random.random() < 0.5
        cpu_order = random.choice((False, False, True))
        across_numa, across_cores = random.random() < 0.3, random.random() < 0.2
        align_l3, by_socket = random.random() < 0.8, random.random() < 0.2
        return replace(
            settings,
            prefer_closest_numa_nodes=prefer_closest,
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
            preferred_cores=random.choice(list(PreferredCores)),
            memory_only_numa_nodes=memory_only,
            disable_cfs_quota=random.random() < 0.8,
            inject_environment=random.random() < 0.8,
            permissions=(AnnotationPermission(name="permissions[0]", allow_unrequested_cpus=True),)
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

    def live(self) -> LifeRecord:
        """Let all happen, and return what was recorded."""
        events = (
            *((self._create, 11), (self._stop, 4), (self._resize, 4), (self._restart, 1)),
            *((self._set_cpuset, 1), (self._drain, 1), (self._lose_checkpoint, 1)),
            *((self._grant, 1), (self._create_unseen, 1)),
        )
        some = [event for event, _ in events]
        weights = [weight for _, weight in events]
        for _ in range(EVENTS):
            event = self._random.choices(some, weights)[0]
            if self.world.live or event == self._create:
                event()
                self._look()
                self._event += 1
        self._explain()
        return self.record

    def _record(self, event: str, container_id: str = "", *texts: str, **values: object) -> None:
        about = f"{self._event} {event} {container_id}".rstrip()
        self.record.add(about, *texts, event=event, container=container_id, **values)

    def _record_answer(
        self, event: str, container_id: str, asked: str, rejected: Rejected | None, **values: object
    ) -> None:
        verdict, reason, text = "admitted", "", ""
        if rejected is not None:
            verdict, reason, text = "rejected", rejected.reason, rejected.message
        self._record(
            event, container_id, text, asked=asked, verdict=verdict, reason=reason, **values
        )

    def _explain(self) -> None:
        """What is told of the first and the last container and of a refusal, and all notices."""
        agent = self.world.agent
        documents = [
            explanation.explain_allocation(
                one, agent.history.explanation_of(one.container_id), agent.current.cpus_of(one)
            )
            for _, one in sorted(agent.current.state.allocations.items())
        ]
        rejected = [
            explanation.explain_rejection(
                agent.history.explanation_of_rejection(one), one.reason, one.message
            )
            for one in agent.history.rejections
        ]
        for document in self._documents_of_the_end(documents, rejected):
            text = sentences.render_text(document)
            self.record.add(f"explained {document['pod']}/{document['container']}", text)
        for one in agent.history.notices.notices_after():
            who = f"{one.pod}/{one.container}"
            self.record.add(
                f"notice {one.notice_kind} {who}",
                one.message,
                notice=one.notice_kind,
                container=who,
                count=one.count,
                reason=one.reason,
            )

    def _documents_of_the_end(
        self, documents: list[ExplanationDocument], rejected: list[ExplanationDocument]
    ) -> list[ExplanationDocument]:
        return [*documents[:1], *documents[-1:], *rejected[-1:]]

    def _look(self) -> None:
        """Record what is other than it was: containers, and the node's pool and reservations."""
        self.world.check()
        current = self.world.agent.current
        now = {
            i: {**_values_of(current.state.allocations[i]), "runs_on": self._runs_on(i)}
            for i in self.world.live
        }
        now["node"] = {
            "pool": str(current.desired.pool),
            "reserved": {
                uid: [str(one.affinity), one.affinity_is_preferred]
                for uid, one in sorted(current.state.pods.items())
                if one.affinity is not None
            },
        }
        for name in sorted(now.keys() | self._had.keys()):
            had, has = self._had.get(name), now.get(name)
            if has is None:
                self.record.add(f"{self._event} {name}", gone=True)
            elif has != had:
                reason, moved = "", None
                if name in self.world.live:
                    reason = current.state.allocations[name].reason
                    moved = (had is not None and _place(had) != _place(has)) or None
                self.record.add(f"{self._event} {name}", reason, **has, moved=moved)
        self._had = now

    def _runs_on(self, container_id: str) -> list[object]:
        """CPUs, memory nodes and quota that the runtime has."""
        has = self.world.live[container_id].resources
        pool = self.world.agent.current.desired.pool
        cpus = "the pool" if has.cpus == str(pool) else has.cpus or "all"
        return [cpus, has.mems or "all", has.cpu_quota]

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
            ("on-failure", 0.3, ("reject", "best-effort", "unpinned")),
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
        rejected = answer if isinstance(answer, Rejected) else None
        self._record_answer("create", made.id, asked, rejected)
        self._record_adjustment(made.id, answer)

    def _record_adjustment(self, container_id: str, answer: Admitted | Rejected | None) -> None:
        """Record more of an answer, in a life that has more."""

    def _create_unseen(self) -> None:
        of, made, asked = self._new()
        self.world.meet(of, made)
        self.world.synchronize()
        self._record("missed-start", made.id, asked=asked)

    def _pick(self) -> str:
        return self._random.choice(sorted(self.world.live))

    def _stop(self) -> None:
        one = self._pick()
        of = self.world.live[one].pod_id
        self.world.stop(one)
        last = of in self.world.pods and all(c.pod_id != of for c in self.world.live.values())
        if last:
            self.world.remove_pod(self.world.pods[of])
        self._record("stop", one, pod_removed=last or None)

    def _resize(self) -> None:
        one = self._pick()
        cpus, memory = self._size()
        rejected = self.world.update(one, resources(cpus, memory))
        self._record_answer("resize", one, f"{cpus:g} CPUs {memory:g} GiB", rejected)

    def _restart(self) -> None:
        self.world.restart()
        self._record("restart")

    def _lose_checkpoint(self) -> None:
        self.world.restart(lost=True)
        self._record("restart-without-checkpoint")

    def _set_cpuset(self) -> None:
        one = self._pick()
        allowed = sorted(self.world.topology.allowed)
        text = str(CPUSet(allowed[: self._random.choice((1, 2, 4))]))
        self.world.update(one, Resources(cpus=text))
        self._record("set-cpuset", one, asked=text)

    def _drain(self) -> None:
        numa_node = self._random.choice(sorted(self.world.topology.numa_nodes))
        factor = self._random.choice((0.0, 0.5, 1.0))
        self.world.settings = replace(self.world.settings, capacity_factor={numa_node: factor})
        self.world.apply(
            self.world.agent.apply_node_model(
                replace(self.world.agent.current.machine, settings=self.world.settings)
            )
        )
        self._record("capacity-factor", asked=f"NUMA node {numa_node}: {factor:g}")

    def _grant(self) -> None:
        pool = sorted(self.world.agent.current.desired.pool)
        if len(pool) < 4:
            return
        text = str(CPUSet(pool[-1:]))
        self.world.kubelet({("of-the-kubelet", "c"): text}, reserved="0")
        self._record("kubelet-grant", asked=text)


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
                    allowed_keys=("policy", "cpus", "smt", "scope", "on-failure"),
                    allowed_values={"smt": ("any", "full-core", "isolate")},
                    on_denied=random.choice(list(OnDenied)),
                ),
                AnnotationPermission(
                    name="permissions[1]", labels={"kind": "odd"}, allow_unrequested_cpus=True
                ),
                AnnotationPermission(
                    name="permissions[2]", allow_reserved_cpus=True, qos=(QoSClass.GUARANTEED,)
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
        rejected = self.world.update(one, wants)
        self._record_answer("resize", one, _resources(wants), rejected)

    def _record_adjustment(self, container_id: str, answer: Admitted | Rejected | None) -> None:
        if isinstance(answer, Admitted):
            adjustment, policy = answer.adjustment, answer.adjustment.memory_policy
            self.record.add(
                f"{self._event} adjustment {container_id}",
                *answer.warnings,
                env=dict(sorted(adjustment.env.items())),
                memory_policy=None if policy is None else str(policy),
                warnings=len(answer.warnings) or None,
            )

    def _documents_of_the_end(
        self, documents: list[ExplanationDocument], rejected: list[ExplanationDocument]
    ) -> list[ExplanationDocument]:
        return [*documents[:4], *rejected[-2:]]

    def _explain(self) -> None:
        super()._explain()
        for key, stored in sorted(self.world.store.documents.items()):
            document = dict(sorted(stored.items()))
            text, nodes = document.pop("reason", ""), document.pop("numaNodes", None)
            self.record.add(f"stored {key}", str(text), numa_nodes=nodes, **document)
        for metric in self.world.metrics.registry.collect():
            for name, labels, value, *_ in metric.samples:
                if name in _OF_THE_PROCESS or not name.endswith("_total") or not value:
                    continue
                if name.startswith("nri_numa"):
                    which = " ".join(f"{key}={each}" for key, each in sorted(labels.items()))
                    self.record.add(f"counter {name} {which}".rstrip(), total=value)


def _page_sizes(topology: Topology) -> list[int]:
    return sorted({size for node in topology.numa_nodes.values() for size in node.hugepages})


def _resources(one: Resources) -> str:
    words = [f"shares {one.cpu_shares} quota {one.cpu_quota}/{one.cpu_period}"]
    words.append(f"memory {one.memory_limit}")
    words += [f"{size}: {amount}" for size, amount in one.hugepages.items()]
    return " ".join(words)


def recorded_settings(settings: Settings) -> Iterator[str]:
    """What differs from the defaults, as it stands in recorded files."""
    usual = Settings()
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if isinstance(value, KubeletRules):
            rules = [rule for rule in value.__struct_fields__ if getattr(value, rule)]
            yield from (f"kubelet.{rule}" for rule in rules)
        elif value != getattr(usual, name):
            is_long = isinstance(value, QuotasAndPoolFloor | tuple)
            yield name if is_long else f"{name}={value}"


def _place(values: dict[str, Any]) -> tuple[object, object]:
    return values["cpus"], values["mems"]


def _values_of(one: Allocation) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "cpus": str(one.cpus),
        "numa_nodes": str(one.numa_nodes),
        "mems": str(one.mems),
        "aligned": one.aligned,
        "idle_siblings": str(one.idle_siblings),
        "exclusive": one.exclusive or None,
        "policy": one.policy,
        "smt": one.smt,
        "foreign_cpus": str(one.foreign_cpus),
        "lifted_quota": one.lifted_quota,
        "charges": {
            i: [charge.cpu_milli, charge.memory, dict(charge.hugepages)]
            for i, charge in sorted(one.charges.items())
        },
    }


def record_life(name: str) -> LifeRecord:
    """What became of one of `LIVES`."""
    return (Life if int(name.partition("-")[0]) < _ODD else OddLife)(name).live()
