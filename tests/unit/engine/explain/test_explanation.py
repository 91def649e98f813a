"""What few decisions tell, and hostile input; whole explanations are in tests/golden/lives."""

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_numa.engine.align.hints import DeviceDemand, ResourceDemand
from nri_numa.engine.align.policies import AlignmentRequest, align_demands
from nri_numa.engine.decision import Admitted, Rejected
from nri_numa.engine.explain import explanation
from nri_numa.engine.explain import sentences as explain_text
from nri_numa.engine.explain.explanation import StoredExplanation, stored_explanation
from nri_numa.engine.explain.sentences import drift_text, start_delay_text
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.machine import Topology, Unit
from nri_numa.model.settings import Settings
from nri_numa.model.workload import Device, DeviceRequest, Policy, Resources
from tests.beds.explained import of_decision
from tests.beds.world import GIB, SINGLE, World, container, pod, resources
from tests.machines import named as machines

FOUR = machines.snc_smt()


class ExplainingWorld(World):
    """Tells of what it decides."""

    def __init__(self, topology: Topology = FOUR, **settings: Any) -> None:
        super().__init__(topology, Settings(**settings))

    def decide(
        self,
        asks: Mapping[str, str] | None = None,
        wants: Resources | None = None,
        name: str = "web",
    ) -> Admitted | Rejected:
        of = pod(name, asks)
        decision = self.create(of, container(of, wants=wants))
        assert decision is not None
        return decision

    def explain(self, *args: Any, **kwargs: Any) -> explanation.ExplanationDocument:
        document = of_decision(self.agent.current.machine, self.decide(*args, **kwargs))
        # Whoever reads it over HTTP sees the same.
        assert json.loads(json.dumps(document)) == document
        return document


def told(document: explanation.ExplanationDocument) -> str:
    """All sentences as one text, without line breaks."""
    return " ".join(explain_text.explanation_sentences(document))


# --- what was asked ---------------------------------------------------------------------------


def test_in_brief_it_is_what_happened_what_was_asked_for_and_why() -> None:
    assert explain_text.render_text(
        ExplainingWorld().explain(SINGLE, resources(4, 8)), brief=True
    ) == (
        "default/web, container app\n"
        "  It runs on exclusive CPUs 0-3, with memory of NUMA node 0.\n"
        "  It requests 4 exclusive CPUs and 8 GiB of memory on one NUMA node (annotation\n"
        "  numa.kubernetes.io/policy: single-numa-node).\n"
        "  NUMA node 0 was chosen: it has room for everything."
    )
    rejected = explain_text.render_text(
        ExplainingWorld().explain(SINGLE, resources(9, 8)), brief=True
    )
    assert rejected.startswith(
        "default/web, container app\n  Rejected (TopologyAffinityError): cpu: 9"
    )
    assert "The rule:" not in rejected


def test_the_choice_of_numa_nodes_can_be_told_alone() -> None:
    document = ExplainingWorld().explain(SINGLE, resources(4, 8))
    assert explain_text.choice_sentences(document)[0] == (
        "NUMA node 0 was chosen: it has room for everything."
    )


def test_defaults_that_do_not_matter_are_not_told() -> None:
    node = ExplainingWorld(defaults={"smt": "spread", "on-failure": "reject"})
    assert "smt" not in told(node.explain({"numacpu": "1"}, name="a"))
    assert "on-failure" not in told(node.explain(None, name="b"))
    shared = told(node.explain({"policy": "best-effort"}, resources(0.5), name="c"))
    assert "smt" not in shared
    assert "on-failure: reject (default)" in shared


def test_who_asks_for_exclusive_cpus_without_a_number_asked_for_something() -> None:
    text = told(ExplainingWorld().explain({"cpus": "exclusive"}))
    assert "cpus: exclusive (annotation" in text
    assert "It requests no" not in text
    assert "It requests no placement of CPUs or memory." in told(
        ExplainingWorld().explain({"bind": "none"})
    )


def test_every_value_is_told_with_what_it_means() -> None:
    text = told(
        ExplainingWorld().explain({**SINGLE, "devices": "ignore", "movable": "true"}, resources(2))
    )
    assert "devices: ignore (annotation numa.kubernetes.io/devices): its devices are" in text
    assert "movable: true (annotation numa.kubernetes.io/movable): it may be moved" in text


@given(
    st.sampled_from(["none", "best-effort", "restricted", "single-numa-node"]),
    st.lists(st.tuples(st.sampled_from([0, 0.5, 1, 3, 5, 12]), st.integers(0, 20)), max_size=5),
    st.none() | st.tuples(st.sampled_from([1, 2.5, 6]), st.integers(1, 20)),
)
@example("none", [(12, 1)], None)
@example("best-effort", [(5, 4)], (2.5, 2))
def test_what_is_said_of_a_container_is_what_its_document_has(
    policy: str, sizes: list[tuple[float, int]], total: tuple[float, int] | None
) -> None:
    """Limits are those of the runtime, whatever counts of them beside the rest of its pod."""
    node = ExplainingWorld()
    of = pod("web", {"policy": policy}, total=resources(*total) if total else None)
    for number, (cpus, memory) in enumerate(sizes):
        decision = node.create(of, container(of, f"c{number}", resources(cpus, memory)))
        assert decision is not None
        document = of_decision(node.agent.current.machine, decision)
        text, demand = told(document), document["demand"]
        if demand is not None:
            counted = " of it count, because the limit of its pod leaves no more"
            for amount, name, unit, key in (
                (1000 * cpus, "CPU limit", Unit.MILLI_CPUS, "cpuMilli"),
                (memory * GIB, "memory limit", Unit.BYTES, "memoryBytes"),
            ):
                if f"its {name}" in text:
                    part = "" if demand[key] == amount else f"; {unit.amount_text(demand[key])}"
                    of_memory = " of memory" if key == "memoryBytes" else ""
                    assert (
                        f"{unit.amount_text(int(amount))}{of_memory}: its {name}"
                        f"{part and part + counted}." in text
                    )
        narrow = explain_text._PREFERRED_PLACE_TEXT in text
        assert not narrow or document["result"]["policy"] != "none"
        for numa_node, free in re.findall(
            r"Free on NUMA node ([0-9]+): ([0-9.]+) of [0-9.]+ CPU", text
        ):
            (cpu,) = (r for r in document["resources"] if r["resource"] == "cpu")
            (here,) = (n for n in cpu["numaNodes"] if n["numaNode"] == int(numa_node))
            assert free == Unit(cpu["unit"]).amount_text(here["free"], free=True).split()[0]


def test_what_no_numa_node_ever_had_is_said_on_a_busy_machine_too() -> None:
    """Waiting does not help: that is another answer than how much is free now."""
    node = ExplainingWorld()
    node.decide({"policy": "best-effort"}, resources(20), name="filler")
    for document in (
        node.explain(SINGLE, resources(20), name="never"),
        ExplainingWorld().explain(SINGLE, resources(20)),
    ):
        assert "20 exclusive CPUs needed, more than the 8 CPUs of any one NUMA node" in told(
            document
        )


def test_what_another_version_wrote_is_not_blamed_on_a_restart() -> None:
    decision = ExplainingWorld().decide(SINGLE, resources(2, 1))
    assert isinstance(decision, Admitted)
    unread = StoredExplanation("default", "web", "app", None, None)
    for document in (
        explanation.explain_allocation(decision.allocation, unread, "0-1"),
        explanation.explain_rejection(unread, "Odd", "something is odd"),
    ):
        text = told(document)
        assert "another version of nri-numa wrote the explanation" in text
        assert "last started" not in text


def test_free_memory_has_one_rounding_in_one_answer() -> None:
    node = ExplainingWorld(machines.single_smt(cores_per_numa=8))
    node.decide(SINGLE, resources(1, 2.03), name="filler")
    text = told(node.explain(SINGLE, resources(1, 15)))
    assert {*re.findall(r"13\.[0-9]|14 of", text)} == {"13.9"}


def test_nothing_is_free_for_exclusive_use_where_the_pool_rejects() -> None:
    node = ExplainingWorld(machines.single_no_smt(cores_per_numa=2, memory_gib=2))
    rejected = node.explain(SINGLE, resources(2, 0.5))
    assert rejected["rejection"]["reason"].startswith("SharedPool")
    assert "for exclusive use" not in told(rejected)


# --- where it fits, and why there --------------------------------------------------------------


def test_a_resource_that_needs_fewer_numa_nodes_than_another_says_so() -> None:
    text = told(ExplainingWorld().explain({"policy": "restricted"}, resources(10, 40)))
    assert "10 CPUs needed. 2 NUMA nodes are enough; another resource needs 3." in text


def test_machines_of_many_numa_nodes_are_not_listed_to_the_end() -> None:
    many = build_synthetic_topology(sockets=4, numa_per_socket=4, cores_per_numa=4, memory_gib=16)
    node = ExplainingWorld(many)
    for n in range(12):
        node.decide({"policy": "best-effort", "numamem": str(n)}, resources(1, 1 + n), name=f"a{n}")
    text = told(node.explain(SINGLE, resources(1, 1)))
    assert text.count("Free on NUMA node") == 8
    assert "8 more NUMA nodes are not shown." in text


def test_memory_that_is_left_alone_is_not_counted() -> None:
    node = ExplainingWorld()
    unread = node.explain({"numacpu": "2"}, name="b")
    del unread["free"][0]["memoryBytes"]
    assert "Free before its placement: NUMA node 0: 8 CPUs; NUMA node 1" in told(unread)


# --- other resources, which come with devices and running containers -----------------------------


def aligned(policy: Policy, *demands: Any) -> explanation.ExplanationDocument:
    """Explain an alignment of demands as they are, without a container of that kind."""
    alignment = align_demands(AlignmentRequest(demands, NUMASet([0, 1]), policy, FOUR.distance))
    decision = ExplainingWorld().decide({"policy": "restricted"}, resources(1))
    assert isinstance(decision, Admitted)
    trace = replace(decision.trace, alignment=alignment)
    return explanation.explain_allocation(decision.allocation, stored_explanation(trace), "0")


def test_devices_are_told_as_well() -> None:
    gpus = DeviceDemand(
        request=DeviceRequest(
            resource="example.com/gpu",
            count=1,
            devices=(Device(id="a", numa_nodes=frozenset([1])), Device(id="b")),
        )
    )
    text = told(aligned(Policy.RESTRICTED, gpus))
    assert "example.com/gpu: 1 needed. One NUMA node is enough: NUMA node 1 has that." in text
    assert "Free on NUMA node 0: 0 of 0 of example.com/gpu (1 needed)." in text


def test_a_resource_that_does_not_care_or_cannot_be_had_says_so() -> None:
    anywhere = ResourceDemand(resource="memory", need=0, capacity={0: 1, 1: 1}, free_amounts={})
    impossible = ResourceDemand(
        resource="cpu", need=9, capacity={0: 4, 1: 4}, free_amounts={0: 4, 1: 4}, unit=Unit.CPUS
    )
    text = told(aligned(Policy.BEST_EFFORT, anywhere, impossible))
    assert "Memory: any NUMA node suits." in text
    assert "CPUs: 9 CPUs needed, all NUMA nodes together have 8 CPUs." in text
    document = aligned(Policy.RESTRICTED, anywhere)
    document["alignment"]["numaNodes"] = None
    document["resources"][0] |= {
        "unit": "lanes",
        "hint": "impossible",
        "demand": 3,
    }  # a later agent
    assert "Memory: 3 needed" in told(document)
    assert "No NUMA constraint applies: every NUMA node suits." in told(document)


# --- refusals -----------------------------------------------------------------------------------


def test_a_rejection_without_a_rule_still_reads_well() -> None:
    decision = ExplainingWorld().decide(SINGLE, resources(9))
    assert isinstance(decision, Rejected)
    document = explanation.explain_rejection(
        stored_explanation(replace(decision.trace, rule="")), "Odd", "something is odd"
    )
    assert explain_text.explanation_sentences(document)[0] == "Rejected (Odd): something is odd."
    assert "The rule" not in told(document)


def test_the_widened_say_what_they_could_not_have() -> None:
    document = ExplainingWorld().explain({**SINGLE, "on-failure": "best-effort"}, resources(9))
    assert document["outcome"] == explanation.MISALIGNED_OUTCOME
    assert "on-failure: best-effort, so more NUMA nodes are allowed." in told(document)


# --- later, and afterwards ------------------------------------------------------------------------


def test_what_happened_since_is_told_last() -> None:
    document = ExplainingWorld().explain(SINGLE, resources(4, 8))
    document["later"] = ["since then rejected: too large"]
    assert explain_text.explanation_sections(document)[-1] == (
        "Later",
        ["Since then rejected: too large."],
    )


# --- hostile and odd input ----------------------------------------------------------------------

HOSTILE = "a\x1b[2J\nb\u202e\u2028"


def test_hostile_names_are_shown_and_do_nothing() -> None:
    of = replace(pod("x", SINGLE), name=HOSTILE, namespace=HOSTILE)
    made = replace(container(of, wants=resources(9)), name=HOSTILE)
    decision = ExplainingWorld().reject(of, made)
    text = explain_text.render_text(
        explanation.explain_rejection(
            stored_explanation(decision.trace), decision.reason, decision.message
        )
    )
    assert all(line.isprintable() for line in text.split("\n"))
    assert "a\\x1b[2J\\nb\\u202e\\u2028" in text


@pytest.mark.parametrize("width", [0, 40, 60, 80, 200])
def test_no_line_is_wider_than_asked(width: int) -> None:
    long = "1," * 400 + "1"
    for asked in (SINGLE, {"numacpu": long, "numamem": "0"}, {"numacpu": "3-1" * 200}):
        document = ExplainingWorld().explain(asked, resources(4, 8), name="p" * 253)
        lines = explain_text.render_text(document, width).split("\n")
        assert max(map(len, lines)) <= max(40, width)


def test_values_of_any_length_are_cut() -> None:
    long = ",".join(["1"] * 500)
    assert "It requests CPUs 1,1" in told(ExplainingWorld().explain({"numacpu": long}))
    for asked in ({"numacpu": long}, {"numamem": "0" * 999}, {"numacpu": long + ",77"}):
        document = ExplainingWorld().explain(asked)
        assert max(map(len, explain_text.explanation_sentences(document))) < 400


@pytest.mark.parametrize(
    ("owners", "expected"),
    [
        ((), "desired 4-7, actual 0-7 since 12 s"),
        (("a/b/c",), "desired 4-7, actual 0-7 since 12 s, on exclusive CPUs of a/b/c"),
        (("a", "b", "c"), "desired 4-7, actual 0-7 since 12 s, on exclusive CPUs of a, b and c"),
        (
            tuple("abcde"),
            "desired 4-7, actual 0-7 since 12 s, on exclusive CPUs of a, b, c and 2 more",
        ),
    ],
)
def test_owners_are_named(owners: tuple[str, ...], expected: str) -> None:
    assert drift_text("desired 4-7, actual 0-7", "12 s", owners, is_abandoned=False) == expected


def test_a_fight_that_was_given_up_is_said() -> None:
    said = drift_text("desired 4-7, actual 0-7", "12 s", (), is_abandoned=True)
    assert said.endswith("repairs are abandoned, because another program rewrites it")


def test_late_and_in_time_are_told_apart() -> None:
    assert (
        start_delay_text(0.0124)
        == "start delay at most 12 ms: it started before its cpuset was written"
    )
    for seconds in (0.0, -0.003):  # a clock may be set back
        assert (
            start_delay_text(seconds) == "no start delay: its cpuset was written before it started"
        )
