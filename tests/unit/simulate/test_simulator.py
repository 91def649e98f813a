"""What-if: the engine's answers, one pod after another, and changes of pods that are there."""

from typing import Any

import pytest
from msgspec.structs import replace

from nri_numa.cluster.manifests import ManifestError
from nri_numa.cluster.pods import ContainerRole
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.simulate.manifests import read_manifests_from_text
from nri_numa.simulate.simulator import PodAction, SimulatedOutcome, Simulation, plan_actions
from tests.machines import named as machines
from tests.machines.named import snc_smt
from tests.machines.pods import container, document, pod, replicated, run, the

SINGLE = {"policy": "single-numa-node"}
BEST_EFFORT = {"policy": "best-effort"}


def problems(*documents: str) -> tuple[str, ...]:
    with pytest.raises(ManifestError) as caught:
        plan_actions(read_manifests_from_text("\n---\n".join(documents), "f.yaml").workloads)
    return caught.value.problems


def fresh(result: Simulation) -> None:
    """Nothing is booked at the end."""
    assert result.final_fill == result.initial_fill
    assert result.running_containers == ()


# --- creating -------------------------------------------------------------------------------------


def test_a_rejected_container_takes_its_pod_along() -> None:
    spec = {
        "containers": [
            container("fits", {"limits": {"cpu": 2, "memory": "1Gi"}}),
            container("does-not", {"limits": {"cpu": 9, "memory": "1Gi"}}),
            container("never-tried", {"limits": {"cpu": 1, "memory": "1Gi"}}),
        ]
    }
    result = run(snc_smt(), document("Pod", "p", spec, SINGLE))
    assert [o.verdict for o in result.events[0].outcomes] == [
        SimulatedOutcome.PLACED,
        SimulatedOutcome.REJECTED,
    ]
    fresh(result)


@pytest.mark.parametrize(
    ("wishes", "verdict"),
    [
        ({}, SimulatedOutcome.UNTOUCHED),
        ({"bind": "none"}, SimulatedOutcome.UNTOUCHED),
        ({**SINGLE, "on-failure": "unpinned"}, SimulatedOutcome.UNPINNED),
        ({**SINGLE, "on-failure": "best-effort"}, SimulatedOutcome.MISALIGNED),
        (SINGLE, SimulatedOutcome.REJECTED),
        (BEST_EFFORT, SimulatedOutcome.PLACED),  # nine CPUs need two NUMA nodes on an empty machine
        ({"numacpu": "1"}, SimulatedOutcome.PLACED),
    ],
)
def test_each_way_to_fare_has_its_word(wishes: dict[str, str], verdict: SimulatedOutcome) -> None:
    assert the(run(snc_smt(), pod("p", 9, "1Gi", wishes))).verdict is verdict


# --- the order inside a pod -----------------------------------------------------------------------


def in_order(wishes: dict[str, str]) -> str:
    return document(
        "Pod",
        "p",
        {
            "initContainers": [
                container("prepare", {"limits": {"cpu": 2, "memory": "1Gi"}}),
                container(
                    "proxy", {"limits": {"cpu": "500m", "memory": "1Gi"}}, restartPolicy="Always"
                ),
            ],
            "containers": [container("app", {"limits": {"cpu": 2, "memory": "1Gi"}})],
        },
        wishes,
    )


def test_init_containers_end_and_their_cpus_go_to_the_app() -> None:
    result = run(snc_smt(), in_order({**SINGLE, "scope": "pod"}))
    prepare, proxy, app = result.events[0].outcomes
    assert (prepare.role, proxy.role, app.role) == (
        ContainerRole.INIT,
        ContainerRole.SIDECAR,
        ContainerRole.APP,
    )
    assert prepare.cpus == app.cpus
    assert {prepare.mems, proxy.mems, app.mems} == {app.mems}
    assert [a.container for a, _ in result.running_containers] == ["proxy", "app"]
    # The sidecar made room for the app that started after it.
    assert set(result.events[0].changed_cpus) == {"default/p/proxy"}
    assert not CPUSet.parse(result.running_containers[0][1]) & CPUSet.parse(app.cpus)


# --- changes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "before", "cpus"),
    [
        ((2, 4), "0-1", "0-3"),
        ((4, 2), "0-3", "0-1"),
        ((2, 9), "0-1", ""),  # it does not fit, and changes nothing
        ((2, 9, 3), "0-1", "0-2"),  # from what the container has
    ],
)
def test_new_resources_are_a_resize(sizes: tuple[int, ...], before: str, cpus: str) -> None:
    steps = [pod("db", n, f"{n}Gi", SINGLE) for n in sizes]
    result = run(snc_smt(), *steps, keep_going=True)
    event = result.events[-1]
    assert event.action is PodAction.RESIZE
    assert not event.changed_cpus  # it is no other container
    (outcome,) = event.outcomes
    assert (outcome.previous_cpus, outcome.cpus) == (before, cpus)
    assert (outcome.verdict is SimulatedOutcome.REJECTED) is (not cpus)
    assert ("resize rejected" in outcome.message) is (not cpus)
    assert [standing for _, standing in result.running_containers] == [cpus or before]
    kept = sizes[-1] if cpus else sizes[-2]
    assert result.final_fill[0].memory_allocated_bytes == kept << 30


def test_a_rejected_pod_has_nothing_to_resize() -> None:
    result = run(
        snc_smt(), pod("db", 9, "1Gi", SINGLE), pod("db", 2, "1Gi", SINGLE), keep_going=True
    )
    assert result.events[1].outcomes == ()
    fresh(result)


def test_the_same_document_twice_is_no_change() -> None:
    assert len(run(snc_smt(), pod("db", 2, "1Gi"), pod("db", 2, "1Gi")).events) == 1


def scaled(*counts: int) -> list[str]:
    spec = {"containers": [container("app", {"limits": {"cpu": 2, "memory": "1Gi"}})]}
    return [replicated("StatefulSet", "db", count, spec, SINGLE) for count in counts]


def test_replicas_come_and_go() -> None:
    result = run(snc_smt(), *scaled(1, 3, 0))
    actions = [(e.action, e.pod.name) for e in result.events]
    assert actions == [
        (PodAction.CREATE, "db-0"),
        (PodAction.CREATE, "db-1"),
        (PodAction.CREATE, "db-2"),
        (PodAction.REMOVE, "db-2"),
        (PodAction.REMOVE, "db-1"),
        (PodAction.REMOVE, "db-0"),
    ]
    fresh(result)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (pod("p", 2, "1Gi"), pod("p", 2, "1Gi", SINGLE), "annotations are read at creation only"),
        (pod("p", 2, "1Gi"), pod("p", 2, "1Gi", guaranteed=False), "QoS class cannot change"),
        (pod("p", 2, "1Gi"), pod("p", 2), "memory limits cannot be taken away"),
        (
            pod("p", 2, "1Gi", hugepages="2Mi"),
            pod("p", 2, "1Gi", hugepages="4Mi"),
            "huge pages cannot be resized",
        ),
        (
            pod("p"),
            pod("p").replace('"spec": {', '"spec": {"runtimeClassName": "kata", '),
            "runtime class cannot be changed",
        ),
        (in_order({}), in_order({}).replace('"prepare"', '"other"'), "containers cannot be added"),
        (in_order({}), in_order({}).replace("1Gi", "2Gi", 1), "init container cannot be resized"),
    ],
)
def test_what_cannot_change_in_place_is_a_mistake(before: str, after: str, words: str) -> None:
    found = problems(before, after)
    assert any(words in problem for problem in found), found
    assert all("document 2 (Pod p): is a change of f.yaml, document 1" in p for p in found)


def test_two_workloads_cannot_make_the_same_pod() -> None:
    (problem,) = problems(*scaled(1), pod("db-0"))
    assert problem.endswith(
        "pod default/db-0 is made by f.yaml, document 1 (StatefulSet db) already"
    )


# --- what the engine does with it -----------------------------------------------------------------


def test_a_pod_needs_what_its_unlimited_containers_request_too() -> None:
    """The sum of limits knows nothing of a container without one; the sum of requests does."""
    spec = {
        "containers": [
            container("limited", {"limits": {"cpu": 1}}),
            container("unlimited", {"requests": {"cpu": 7.5}}),
        ]
    }
    wishes = {**SINGLE, "scope": "pod", "bind": "cpu"}
    outcome = the_first(run(snc_smt(), document("Pod", "p", spec, wishes)))
    assert outcome.verdict is SimulatedOutcome.REJECTED  # 8.5 CPUs on NUMA nodes of 8


def the_first(result: Simulation) -> Any:
    return result.events[0].outcomes[0]


def test_huge_pages_of_withheld_memory_are_not_there_either() -> None:
    machine = machines.snc_smt(hugepages={2 << 20: 1 << 30})
    wish = pod("p", 1, "1Gi", SINGLE, hugepages="512Mi")
    assert the(run(machine, wish)).verdict is SimulatedOutcome.PLACED
    withheld = replace(machine, withheld_memory=NUMASet.parse("0-2"))
    assert the(run(withheld, wish)).mems == "3"
