"""A decision made ahead is the one that would have been made, byte for byte.

Two nodes live through the same random life, one of them deciding ahead. After every request their
answers, states, journals, books of starting containers and explanations must be the same; when
what may wait is done makes no difference. On half of the nodes containers have devices, told by
their messages or given by a kubelet that answers when it likes. ``NRI_NUMA_AHEAD_CASES`` sets the
number of creations.
"""

from __future__ import annotations

import os
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nri_numa.devices.given import GivenDevice
from nri_numa.engine.decision import Machine, Reading
from nri_numa.engine.invariants import violations
from nri_numa.engine.values.answers import ContainerUpdate
from nri_numa.engine.values.kubelet import NO_GRANTS, KubeletGrants
from nri_numa.engine.values.limits import (
    CPUAmount,
    Limits,
    NamespaceQuota,
    Permission,
    Quota,
)
from nri_numa.engine.values.settings import CPUOrder, Rule, Settings
from nri_numa.engine.values.workload import QoSClass, Strategy
from nri_numa.machine.cgroups import CgroupPlace
from nri_numa.machine.cpuset import CPUSet
from nri_numa.node.agent import Agent
from nri_numa.node.ahead import DecidedAhead
from nri_numa.node.unmatched import UnmatchedAnnotations
from nri_numa.nri import conversion
from nri_numa.nri.adapter import Adapter
from nri_numa.nri.handler import RequestRefused
from nri_numa.nri.shapes import whose
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.observe.metrics import Metrics
from tests.beds.device_tree import GPU_CLASS, DeviceTree
from tests.beds.device_watch import Given, Watch, kubelet_answers
from tests.beds.world import MemoryStore
from tests.machines import named as machines

PREFIX = "numa.kubernetes.io/"
CASES = int(os.environ.get("NRI_NUMA_AHEAD_CASES", "600"))
WORLDS = 6
"""Parts that the cases are run in; each is a test of its own."""
LIFE = 60
"""Creations in the life of one node."""

MACHINES = (
    machines.single_smt, machines.dual_smt, machines.dual_no_smt, machines.snc_smt,
    machines.snc_asymmetric, machines.hybrid, machines.memory_only, machines.huge_pages,
)  # fmt: skip


GPUS = {f"0000:{k}b:00.0": k for k in range(4)}
"""The card with minor number *k* is on NUMA node *k*, where the machine has that."""
LOST = "0000:9b:00.0"
"""A card that tells no NUMA node."""


@pytest.fixture
def kubelet(monkeypatch: pytest.MonkeyPatch) -> dict[str, Given]:
    """What the kubelet answers, by the name of the pod."""
    return kubelet_answers(monkeypatch)


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A machine's devices; the same for all nodes."""
    root = tmp_path_factory.mktemp("devices")
    tree = DeviceTree(root)
    for minor, (address, node) in enumerate((*GPUS.items(), (LOST, -1))):
        card = tree.pci(address, node, GPU_CLASS)
        tree.number("char", f"226:{minor}", tree.child(card, "drm", f"renderD{minor}"))
    return root


class Side:
    """One node: agent, adapter, and what it does when the reply has left."""

    def __init__(
        self, machine: Machine, *, ahead: bool, observe: bool, devices: Path | None
    ) -> None:
        self.waiting: deque[Callable[[], object]] = deque()
        self.store = MemoryStore()
        self.metrics = Metrics("test")
        self.reading: Reading | None = None
        self.time = 1_000_000.0
        self.grants: KubeletGrants | None = None
        self.agent = Agent(
            machine,
            metrics=self.metrics,
            store=self.store,
            now=lambda: self.time,
            reading=lambda: self.reading,
            later=self.waiting.append,
            observe=observe,
        )
        self.agent.look_aside = self.look_aside
        self.concerned: list[tuple[tuple[str, ...], int]] = []
        self.agent.concern = lambda ids, applying: self.concerned.append((tuple(ids), applying))
        self.unheard = UnmatchedAnnotations(
            lambda: machine.settings.prefix, lambda: self.time, self.waiting.append
        )
        self.ahead = (
            DecidedAhead(
                self.agent,
                self.metrics,
                now=lambda: self.time,
                reading=lambda: self.reading,
                later=self.waiting.append,
            )
            if ahead
            else None
        )
        self.devices = None if devices is None else Watch(devices, self.agent)
        if self.devices is not None:
            self.devices.start(self.waiting.append)
        self.adapter = Adapter(
            self.agent,
            self.metrics,
            watch=self.unheard,
            slots_key=lambda: self.agent.machine.slots_key,
            devices=self.devices,
            ahead=self.ahead,
        )

    def look_aside(self) -> None:
        """The kubelet's files changed a moment ago, and nobody has looked since."""
        if self.grants is not None:
            grants, self.grants = self.grants, None
            self.agent.granted(grants)

    def ask(self, method: str, *arguments: Any) -> bytes | str | None:
        """A request; the bytes of its answer, or the text of a refusal."""
        try:
            answer = getattr(self.adapter, method)(*arguments)
        except RequestRefused as refused:
            return refused.message
        return None if answer is None else bytes(answer.SerializeToString())

    def rest(self) -> None:
        """Everything that may wait is done."""
        if self.devices is not None:
            self.devices.settle()
        for _ in range(10_000):
            if not self.waiting:
                return
            self.waiting.popleft()()
        raise AssertionError("it never comes to rest")

    def seen(self) -> dict[str, object]:
        """What the next requests depend on, and what is on disk."""
        agent = self.agent
        return {
            "state": agent.state,
            "documents": self.store.documents,
            "unwritten": self.store.unwritten,
            "places": agent.places,
            "starts": {i: (i in agent.starts.begun) for i in agent.starts.ids()},
            "pending": agent.has_pending,
            "refused": agent.refused,
            "narrowed": agent.narrowed_at,
            "changes": agent.pool_changes,
        }

    def told(self) -> dict[str, object]:
        """What people are shown, once everything that may wait is done."""
        return {
            "grounds": {i: self.agent.grounds_of(i) for i in self.agent.state.allocations},
            "decisions": {
                (s.name, tuple(sorted(s.labels.items()))): s.value
                for family in self.metrics.registry.collect()
                if family.name in ("nri_numa_decisions", "nri_numa_invariant_violations")
                for s in family.samples
            },
            "notices": Counter((n.what, n.message) for n in self.agent.notices.after()),
            "concerned": Counter(self.concerned),
        }


class Life:
    """The same random life on two nodes."""

    def __init__(self, seed: int, devices: Path | None, kubelet: dict[str, Given]) -> None:
        self.kubelet = kubelet
        self.has_devices = devices is not None
        # Of its own, so that a life is the same but for them.
        self.luck = random.Random(seed)
        self.rng = rng = random.Random(seed)
        machine = Machine(
            topology=rng.choice(MACHINES)(),
            settings=self.settings(),
            key=rng.choice((b"a key of this node", b"")),
        )
        observe = rng.random() < 0.05
        self.sides = [
            Side(machine, ahead=ahead, observe=observe, devices=devices) for ahead in (True, False)
        ]
        self.templates = [self.template() for _ in range(rng.randint(1, 5))]
        # How many pods are the first of their workload.
        self.first = rng.choice((0.03, 0.3))
        self.pods: list[pb.PodSandbox] = []
        self.live: list[tuple[pb.PodSandbox, pb.Container]] = []
        self.number = 0

    def settings(self) -> Settings:
        rng = self.rng
        rules = (
            Rule(labels={"tier": "gold"}, values={"policy": "restricted"}),
            Rule(namespaces=("shop*",), qos=(QoSClass.BURSTABLE,), values={"bind": "cpu"}),
            Rule(runtime_handlers=("fast",), values={"policy": "single-numa-node"}),
            Rule(containers=("side*",), values={"bind": "none"}),
        )
        return Settings(
            strategy=rng.choice(list(Strategy)),
            cpu_order=rng.choice(list(CPUOrder)),
            reserved_cpus=CPUSet.parse(rng.choice(("", "0"))),
            strict_reserved=rng.random() < 0.2,
            static_cpus=rng.random() < 0.2,
            kubelet_memory=rng.random() < 0.2,
            kubelet_ties=rng.random() < 0.2,
            lift_quota=rng.random() < 0.7,
            tell_environment=rng.random() < 0.7,
            rules=tuple(rule for rule in rules if rng.random() < 0.3),
            defaults={"policy": "best-effort"} if rng.random() < 0.2 else {},
            permissions=(Permission(name="permissions[0]", labels={"team": "a"}, keys=("policy",)),)
            if rng.random() < 0.2
            else (),
            limits=Limits(
                namespaces=(
                    NamespaceQuota(
                        name="quotas.namespaces[0]",
                        namespaces=("shop",),
                        quota=Quota(exclusive=CPUAmount(4), listed=CPUAmount(2)),
                    ),
                )
                if rng.random() < 0.3
                else ()
            ),
        )

    def template(self) -> tuple[pb.PodSandbox, pb.Container]:
        """What replicas of one workload have in common."""
        rng = self.rng
        asks = {
            "policy": ("none", "best-effort", "restricted", "single-numa-node", "single-numa-node"),
            "cpus": ("shared", "exclusive"),
            "scope": ("container", "pod"),
            "smt": ("any", "spread", "full-core", "isolate"),
            "bind": ("cpu", "cpu+mem", "none"),
            "on-failure": ("reject", "widen", "unpinned"),
            "load": ("high", "low", "09:00-18:00"),
            "numamem": ("0", "1"),
            "numacpu": ("0", "1-2", "5"),
            "policy.app": ("restricted",),
            "policy.side": ("best-effort",),
            "placed": ('{"app":"1"}', '{"app":"0","side":"1"}'),
            "devices": ("ignore",),
            "mempolicy": ("bind", "local", "preferred", "interleave"),
        }
        usual = {"policy": 0.8, "cpus": 0.3, "numacpu": 0.1}
        pod = pb.PodSandbox(
            namespace=rng.choice(("shop", "shop-2", "default")),
            runtime_handler=rng.choice(("", "", "fast")),
            labels={
                k: rng.choice(("gold", "a", "b")) for k in ("tier", "team") if rng.random() < 0.4
            },
            annotations={
                PREFIX + key: rng.choice(values)
                for key, values in asks.items()
                if rng.random() < usual.get(key, 0.12)
            },
        )
        container = pb.Container(name=rng.choice(("app", "app", "side", "side-2")))
        below = rng.choice(
            ("/kubepods", "/kubepods", "/kubepods/burstable", "/kubepods/besteffort")
        )
        if rng.random() < 0.9:
            pod.linux.cgroup_parent = below + "/pod"
        whole = rng.random() < 0.6
        milli = rng.choice((1000, 1000, 2000, 3000, 4000)) if whole else rng.choice((0, 50, 500))
        cpu = container.linux.resources.cpu
        cpu.shares.value = max(2, milli * 1024 // 1000)
        if milli and rng.random() < 0.9:
            cpu.quota.value, cpu.period.value = milli * 100, 100_000
        if rng.random() < 0.7:
            container.linux.resources.memory.limit.value = rng.choice((1, 64, 900, 20_000)) << 20
        if rng.random() < 0.1:
            container.linux.resources.hugepage_limits.add(page_size="2MB", limit=4 << 20)
        if rng.random() < 0.08:
            cpu.cpus = rng.choice(("0", "0-1"))
        if rng.random() < 0.1:
            cpu.mems = "0"
        if rng.random() < 0.8:
            # What the kubelet says of most pods of each class, and what it says of none.
            likely = {"/kubepods/burstable": 999, "/kubepods/besteffort": 1000}.get(below, -997)
            scores = (likely, likely, likely, -997, 1000, 500, 900)
            container.linux.oom_score_adj.value = rng.choice(scores)
        if rng.random() < 0.7:
            sandbox_resources(pod.linux.pod_resources, container.linux.resources)
        if self.luck.random() < 0.6:
            for minor in self.luck.sample(range(len(GPUS) + 1), self.luck.choice((1, 1, 2))):
                container.linux.devices.add(type="c", major=226, minor=minor)
            container.annotations["told"] = self.luck.choice(("by the kubelet", "by the message"))
        return pod, container

    # --- what happens -----------------------------------------------------------------------------

    def live_through(self, creations: int) -> None:
        rng = self.rng
        other: list[Callable[[], None]] = [
            self.stop, self.stop, self.stop, self.remove_pod, self.start, self.post_start,
            self.resize, self.grants, self.machine_changes, self.memory_changes, self.waits,
            self.disk, self.synchronize, self.again,
        ]  # fmt: skip
        for _ in range(creations):
            self.create()
            if len(self.live) > 8 or rng.random() < 0.3:
                self.stop()
            if rng.random() < 0.25:
                rng.choice(other)()
            for side in self.sides:
                side.time += 1.5
            # A node has time between most requests, and sometimes none at all.
            if rng.random() < 0.8:
                self.rest()
        self.rest()

    def rest(self) -> None:
        for side in self.sides:
            side.rest()
        mine, plain = (side.told() for side in self.sides)
        assert mine == plain

    def both(self, method: str, *arguments: Any) -> bytes | str | None:
        mine, plain = (side.ask(method, *arguments) for side in self.sides)
        assert mine == plain
        self.same()
        return mine

    def same(self) -> None:
        mine, plain = (side.seen() for side in self.sides)
        assert mine == plain
        agent = self.sides[0].agent
        assert violations(agent.state, agent.machine.topology, agent.machine.settings) == []

    def create(self) -> None:
        rng = self.rng
        self.number += 1
        if rng.random() < self.first:
            self.templates[rng.randrange(len(self.templates))] = self.template()
        pod, container = pb.PodSandbox(), pb.Container()
        for message, source in zip((pod, container), rng.choice(self.templates), strict=True):
            message.CopyFrom(source)
        pod.id, container.id = f"s{self.number:04}", f"c{self.number:04}" * rng.choice((1, 16))
        pod.name = f"pod-{self.number}"
        if rng.random() < 0.9:
            pod.uid = f"u{self.number}"
        elif rng.random() < 0.5:
            pod.labels["io.kubernetes.pod.uid"] = f"u{self.number}"
        if self.pods and rng.random() < 0.12:  # another container of a pod that is there
            pod.CopyFrom(rng.choice(self.pods))
        self.noise(pod, container)
        self.gets_devices(pod, container)
        container.pod_sandbox_id = pod.id
        if rng.random() < 0.7:
            self.both("run_pod", pod)
            if rng.random() < 0.8:
                self.rest()
        request = pb.CreateContainerRequest(pod=pod, container=container)
        answer = self.both("create_container", request)
        if isinstance(answer, bytes):
            self.live = [
                (p, c)
                for p, c in self.live
                if (p.id, c.name) != (pod.id, container.name) and c.id != container.id
            ]
            self.live.append((pod, container))
            self.pods = [*[p for p in self.pods if p.id != pod.id][-6:], pod]

    def noise(self, pod: pb.PodSandbox, container: pb.Container) -> None:
        """What no decision reads differs from one replica to the next."""
        rng = self.rng
        pod.labels["pod-index"] = str(self.number)
        pod.annotations["seen.example/at"] = str(self.number)
        container.annotations["hash"] = str(self.number)
        container.labels["io.kubernetes.container.hash"] = str(self.number)
        container.env.append(f"POD={self.number}")
        container.mounts.add(destination="/data", source=f"/pods/{self.number}", type="bind")
        container.linux.cgroups_path = f"/kubepods/pod{self.number}/{container.id}"
        container.pid = rng.choice((0, self.number))
        if pod.linux.cgroup_parent:
            pod.linux.cgroup_parent = f"{pod.linux.cgroup_parent}{self.number}"
        if rng.random() < 0.1:
            container.name = f"{rng.choice(('side', 'main'))}-{self.number}"
        if rng.random() < 0.1:
            container.linux.oom_score_adj.value = rng.choice((-997, 0, 1, 2, 700, 998, 999, 1000))
        if rng.random() < 0.3:
            container.linux.resources.devices.add(type="c", access="rwm", allow=rng.random() < 0.5)
            container.linux.resources.memory.swap.value = self.number
        if rng.random() < 0.03:
            container.annotations[PREFIX + "slots"] = "slot-1"
        if rng.random() < 0.05:  # older runtimes leave these to labels
            container.labels["io.kubernetes.container.name"] = container.name
            container.name = ""

    def gets_devices(self, pod: pb.PodSandbox, container: pb.Container) -> None:
        """Replicas have the same devices or others like them; told here, there, or on both sides.

        What the template put into the message are the minor numbers of cards.
        """
        rng = self.luck
        cards = [*GPUS, LOST]
        minors = [device.minor for device in container.linux.devices]
        if minors and rng.random() < 0.3:  # another replica has other ones
            minors = rng.sample(range(len(cards)), len(minors))
        if container.annotations.pop("told", "") == "by the kubelet" or rng.random() < 0.1:
            devices = [GivenDevice("x.com/gpu", cards[k], frozenset()) for k in minors]
            if rng.random() < 0.1:
                devices.append(GivenDevice("x.com/fpga", "f1", frozenset({1})))
            answer = {container.name or "app": tuple(devices)}
            if rng.random() < 0.1:
                answer["helper"] = tuple(devices[:1])
            self.kubelet[pod.name] = answer if rng.random() < 0.95 else "it hangs"
            if rng.random() < 0.5:
                minors = []
        if rng.random() < 0.05:
            minors = [rng.randrange(7)]
        del container.linux.devices[:]
        if not self.has_devices:
            return
        for minor in minors:
            container.linux.devices.add(type="c", major=226, minor=minor)
        if rng.random() < 0.05:
            made_up = rng.choice((*cards, "0000:ff:00.0", "nonsense"))
            container.env.append(f"PCIDEVICE_X={made_up}")
        if rng.random() < 0.05:
            container.env.append("NVIDIA_VISIBLE_DEVICES=GPU-1")

    def again(self) -> None:
        """The same request once more: the runtime did not get our answer."""
        if self.live:
            pod, container = self.rng.choice(self.live)
            self.both("create_container", pb.CreateContainerRequest(pod=pod, container=container))

    def stop(self) -> None:
        if self.live:
            pod, container = self.live.pop(self.rng.randrange(len(self.live)))
            self.both("stop_container", pb.StopContainerRequest(pod=pod, container=container))
            if self.rng.random() < 0.6:
                self.both("remove_container", pod, container)

    def remove_pod(self) -> None:
        if self.pods:
            pod = self.pods.pop(self.rng.randrange(len(self.pods)))
            self.live = [(p, c) for p, c in self.live if p.id != pod.id]
            self.both("stop_pod", pod)
            self.both("remove_pod", pod)

    def start(self) -> None:
        if self.live:
            self.both("start_container", *self.rng.choice(self.live))

    def post_start(self) -> None:
        if self.live:
            self.both("post_start_container", *self.rng.choice(self.live))

    def resize(self) -> None:
        if self.live:
            pod, container = self.rng.choice(self.live)
            request = pb.UpdateContainerRequest(pod=pod, container=container)
            cpu = request.linux_resources.cpu
            milli = self.rng.choice((500, 1000, 2000, 3000))
            cpu.shares.value, cpu.quota.value, cpu.period.value = milli, milli * 100, 100_000
            if self.rng.random() < 0.2:
                cpu.cpus = "0"
            self.both("update_container", request)

    def grants(self) -> None:
        """The kubelet's static policy gives CPUs away, or takes them back."""
        topology = self.sides[0].agent.machine.topology
        cpus = CPUSet([max(topology.allowed)])
        now = KubeletGrants(cpu_policy="static", cpus={("uid-k", "k"): cpus})
        grants = self.rng.choice((now, NO_GRANTS, NO_GRANTS))
        for side in self.sides:
            side.grants = grants

    def machine_changes(self) -> None:
        """A reload: one NUMA node is drained, or other CPUs are reserved."""
        rng = self.rng
        factor = rng.choice(({}, {0: 0.0}, {0: 0.5}))
        strategy = rng.choice(list(Strategy))
        answers = []
        for side in self.sides:
            machine = side.agent.machine
            settings = replace(machine.settings, capacity_factor=factor, strategy=strategy)
            answers.append(side.agent.retopology(replace(machine, settings=settings)))
        assert answers[0] == answers[1]
        self.same()

    def memory_changes(self) -> None:
        free = self.rng.choice((1 << 20, 1 << 30, 1 << 40))
        topology = self.sides[0].agent.machine.topology
        reading = Reading(memory=dict.fromkeys(topology.numa_nodes, free))
        for side in self.sides:
            side.reading = None if free == 1 << 40 else reading
            if side.ahead is not None:
                side.ahead.look()

    def waits(self) -> None:
        """A repair could not be sent, or was written to the cgroup: the next reply says so."""
        if self.live:
            _, container = self.rng.choice(self.live)
            update = ContainerUpdate(container.id, cpus="0", ignore_failure=True)
            ride = self.rng.random() < 0.5
            for side in self.sides:
                if ride:
                    side.agent.ride(update)
                else:
                    side.agent.put_back([update])
            self.same()

    def disk(self) -> None:
        """The state directory fills up, or has room again."""
        full = not self.sides[0].store.full
        for side in self.sides:
            side.store.full = full

    def synchronize(self) -> None:
        """The runtime restarted."""
        pods = {pod.id: pod for pod, _ in self.live}
        answers = [
            [
                update.SerializeToString()
                for update in side.adapter.synchronize(
                    list(pods.values()), [container for _, container in self.live]
                )
            ]
            for side in self.sides
        ]
        assert answers[0] == answers[1]
        self.same()


def sandbox_resources(pod: pb.LinuxResources, container: pb.LinuxResources) -> None:
    """What containerd tells of a pod with one container: every number wrapped, 0 for none."""
    for key in ("shares", "quota", "period"):
        getattr(pod.cpu, key).value = getattr(container.cpu, key).value
    pod.memory.limit.value = container.memory.limit.value


def counted(side: Side) -> Counter[str]:
    """What became of the decisions made ahead."""
    return Counter(
        {
            sample.labels["result"]: int(sample.value)
            for family in side.metrics.registry.collect()
            if family.name == "nri_numa_decided_ahead"
            for sample in family.samples
        }
    )


@pytest.mark.parametrize("part", range(WORLDS))
def test_a_decision_made_ahead_is_the_one_that_would_have_been_made(
    part: int, devices: Path, kubelet: dict[str, Given]
) -> None:
    results: Counter[str] = Counter()
    creations = 0
    seed = part
    while creations < CASES / WORLDS:
        kubelet.clear()
        life = Life(seed, devices if seed // WORLDS % 2 else None, kubelet)
        life.live_through(LIFE)
        results += counted(life.sides[0])
        creations += LIFE
        seed += WORLDS
    # It says nothing where nothing is decided ahead, and all ways out are gone.
    assert results["hit"] >= creations // 10, results
    assert min(results[way] for way in ("new", "late", "unfit")) > 0, results


def test_conversion_and_names_agree() -> None:
    """What is written into a prepared decision is what the conversion would have read."""
    rng = random.Random(1)
    life = Life(1, None, {})
    for number in range(200):
        pod, container = pb.PodSandbox(id=f"s{number}"), pb.Container(id=f"c{number}")
        for field in ("uid", "name"):
            if rng.random() < 0.5:
                setattr(pod, field, f"{field}-{number}")
            if rng.random() < 0.5:
                pod.labels[f"io.kubernetes.pod.{field}"] = f"label-{number}"
        life.noise(pod, container)
        request = pb.CreateContainerRequest(pod=pod, container=container)
        (names, place), known = whose(request), conversion.pod_from(pod, container)
        assert (names.pod_id, names.pod_uid, names.pod) == (known.id, known.uid, known.name)
        made = conversion.container_from(container, brief=True)
        assert (names.container_id, names.container) == (made.id, made.name)
        assert place == CgroupPlace(made.cgroups_path, made.pid)
