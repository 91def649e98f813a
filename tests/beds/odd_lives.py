"""Lives with what is rare: amounts beside the round ones, rules, quotas, memory kept back.

Of each answer and of the end more is told than of other lives: the environment, the warnings, more
explanations, what is stored, and what was counted.
"""

from __future__ import annotations

import json
from typing import Final

from msgspec.structs import replace

from nri_numa.engine.decision import Admitted, Refused
from nri_numa.engine.explain.explanation import Document
from nri_numa.model.machine import Topology
from nri_numa.model.settings import (
    CPUAmount,
    Limits,
    NamespaceQuota,
    Otherwise,
    Permission,
    Quota,
    Rule,
    Settings,
)
from nri_numa.model.workload import Container, PodSandbox, QoSClass, Resources
from tests.beds.lives import RECORDED, Life
from tests.beds.recorded import write_down
from tests.beds.world import GIB, container, pod

ODD_LIVES: Final = tuple(
    f"{number}-{machine}"
    for number, machine in enumerate(
        (
            *("snc_smt", "huge_pages", "dual_smt_16", "memory_only", "chiplets", "sparse_ids"),
            *("joined_sockets", "snc_asymmetric", "hybrid", "isolated_cpus", "ten_nodes"),
            *("huge_pages", "dual_smt", "no_caches", "cpu_only", "memory_only", "snc_smt"),
            *("dual_smt_16", "huge_pages", "sparse_ids", "offline_cpus", "inside_cpuset"),
            *("nohz_full_cpus", "single_smt"),
        ),
        start=100,
    )
)
"""Names: a number and the machine."""
_NAMESPACES: Final = ("default", "team-a", "team-b")
_OF_THE_PROCESS: Final = ("nri_numa_log_lines_dropped_total",)
"""Counted since the process began, so whatever ran before this life is in it."""
_PERIODS: Final = (100_000, 100_000, 50_000, 33_333, 7_000)


class OddLife(Life):
    """One node, and what rarely happens to it; the name is one of `ODD_LIVES`."""

    def _settings(self, topology: Topology) -> Settings:
        random, nodes = self._random, sorted(topology.numa_nodes)
        sizes = {size for node in topology.numa_nodes.values() for size in node.hugepages}
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
                Permission(
                    name="permissions[0]",
                    namespaces=("team-a",),
                    keys=("policy", "cpus", "smt", "scope", "on-failure"),
                    values={"smt": ("any", "full-core", "isolate")},
                    otherwise=random.choice(list(Otherwise)),
                ),
                Permission(name="permissions[1]", labels={"kind": "odd"}, unpaid_cpus=True),
                Permission(name="permissions[2]", reserved_cpus=True, qos=(QoSClass.GUARANTEED,)),
            )[random.choice((0, 0, 1, 3)) :],
            limits=Limits(
                quota=Quota(exclusive=random.choice(amounts), listed=random.choice(amounts)),
                idle=random.choice(amounts),
                namespaces=(
                    NamespaceQuota(
                        name="limits.namespaces[0]",
                        namespaces=("team-b",),
                        quota=Quota(exclusive=random.choice(amounts), listed=CPUAmount(2)),
                    ),
                ),
                pool=random.choice((None, CPUAmount(2))),
                numa_pool=CPUAmount(random.choice((0, 1, 2))),
            )
            if random.random() < 0.4
            else Limits(),
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
        sizes = sorted(
            {size for node in self.world.topology.numa_nodes.values() for size in node.hugepages}
        )
        return {
            size: max(0, random.choice((1, 2, 3)) * GIB + random.choice((0, 0, size, -size, 1)))
            for size in sizes
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

    def _answered(self, answer: Admitted | Refused | None) -> None:
        if isinstance(answer, Admitted):
            told = answer.adjustment
            words = [f"{key}={value}" for key, value in sorted(told.env.items())]
            self.lines += [f"    told {' '.join(words)}"] if words else []
            if told.memory_policy is not None:
                self.lines.append(f"    memory policy {told.memory_policy}")
            self.lines += [f"    warned: {one}" for one in answer.warnings]

    def _told_at_the_end(
        self, documents: list[Document], refused: list[Document]
    ) -> list[Document]:
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


def _resources(one: Resources) -> str:
    words = [f"shares {one.cpu_shares} quota {one.cpu_quota}/{one.cpu_period}"]
    words.append(f"memory {one.memory_limit}")
    words += [f"{size}: {amount}" for size, amount in one.hugepages.items()]
    return " ".join(words)


def main() -> None:
    """Write all of it down."""
    write_down(RECORDED, ODD_LIVES, lambda name: OddLife(name).lived())


if __name__ == "__main__":
    main()
