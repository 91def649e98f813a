"""``kubectl numa cluster`` and ``kubectl numa why``: what they make of what the API server has.

A small program plays kubectl, as in `tests.shipped.test_kubectl_plugin`.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from nri_numa.cluster.node_resources import NodeResources
from nri_numa.cluster.topology_reader import decode_topology
from tests.beds.objects import PREFIX, topology
from tests.shipped.test_kubectl_plugin import PROGRAM, Run
from tests.shipped.test_kubectl_plugin import run as run
from tools import kubectl_plugin

REFUSED = (
    "failed to create containerd container: NRI: rpc error: code = Unknown desc = CPUsTaken: "
    "pod shop/refused, container main: needs 12 CPUs; free: 8"
)


def node(name: str, **annotations: str) -> dict[str, Any]:
    keys = {f"{PREFIX}/{key.replace('_', '-')}": text for key, text in annotations.items()}
    return {"metadata": {"name": name, "annotations": keys}}


def pod(name: str, on: str = "", **more: Any) -> dict[str, Any]:
    status = {
        "phase": "Pending",
        **({"conditions": more["conditions"]} if "conditions" in more else {}),
        "containerStatuses": [
            {"name": "main", "state": {"waiting": more["waiting"]}} if "waiting" in more else
            {"name": "main", "state": {"running": {}}}
        ],
    }  # fmt: skip
    annotations = {f"{PREFIX}/{key}": text for key, text in more.get("asks", {}).items()}
    return {
        "metadata": {
            "name": name, "namespace": "shop", "uid": f"uid-{name}", "annotations": annotations
        },
        "spec": {"schedulerName": "numa-scheduler", **({"nodeName": on} if on else {})},
        "status": status,
    }  # fmt: skip


def waiting(message: str, reason: str = "CreateContainerError") -> dict[str, str]:
    return {"reason": reason, "message": message}


@pytest.fixture
def world() -> dict[str, Any]:
    refused = pod("refused", "worker-1", waiting=waiting(REFUSED))
    return {
        "noderesourcetopologies": [
            topology(8, 4, name="worker-1", zone={f"{PREFIX}/capacity-factor": "0.75"}),
            topology(16, 16, name="worker-2"),
        ],
        "nodes": [node("worker-1", drained="1\n"), node("worker-2"), node("worker-3")],
        "pods": [refused, pod("slow", "worker-1", waiting=waiting("pulling", "ErrImagePull"))],
        "pod": {"refused": refused},
        "events": [],
    }


# --- the cluster ----------------------------------------------------------------------------------


def test_every_node_has_a_row_and_who_is_stuck_is_named(run: Run) -> None:
    done = run("cluster", "--context=east")
    assert done.returncode == 1, "a pod is stuck"
    assert [" ".join(line.split()) for line in done.stdout.splitlines()[:3]] == [
        "NODE NUMA FREE OF LARGEST FRAGMENTED MEMORY FREE FACTOR DRAINED STUCK",
        "worker-1 2 8+4 32 8 33% 64Gi 0.75 1 1",
        "worker-2 2 16+16 32 16 0% 64Gi 1 - 0",
    ]
    assert "44 of 64 exclusive CPUs are free on 2 nodes" in done.stdout
    assert "fits one NUMA node is 16, 14% fragmented" in done.stdout
    assert "Node worker-3: no NodeResourceTopology says" in done.stdout
    assert "Stuck: shop/refused on worker-1, container main: CPUsTaken" in done.stdout
    assert "slow" not in done.stdout


def test_wide_has_a_row_for_every_numa_node(run: Run, world: dict[str, Any]) -> None:
    world["pods"] = []
    done = run("cluster", "-o", "wide")
    assert done.returncode == 0
    rows = [line.split() for line in done.stdout.splitlines()[1:5]]
    assert rows[1] == ["worker-1", "1", "4", "16", "32Gi", "32Gi", "0.75", "yes"]


def test_narrow_terminals_lose_columns_and_no_name(run: Run, world: dict[str, Any]) -> None:
    name = "worker-1-with-a-long-name.example.org"
    world["noderesourcetopologies"][0]["metadata"]["name"] = name
    lines = run("cluster", COLUMNS="40").stdout.splitlines()
    table = lines[: lines.index("")]
    assert max(map(len, table)) <= 40
    assert "MEMORY" not in table[0]
    assert "Not shown for want of width: NUMA, OF, FRAGMENTED, MEMORY FREE" in "\n".join(lines)
    assert name in "".join(line.split()[0] for line in table[1:])
    assert "MEMORY FREE" in run("cluster").stdout, "a pipe gets everything"


def test_of_thousands_those_that_need_attention_are_shown(run: Run, world: dict[str, Any]) -> None:
    names = [f"n{number:04}" for number in range(3000)]
    attributes = {"n1500": {f"{PREFIX}/agent": "not-ready"}}
    world["noderesourcetopologies"] = [
        topology(8, name=name, attributes=attributes.get(name)) for name in names
    ]
    world["nodes"] = [node(name, drained="0") for name in ("n2000", *(f"x{n}" for n in range(150)))]
    world["pods"] = [
        pod(f"p{n}", "n2999", waiting=waiting(REFUSED.replace("refused", f"p{n}")))
        for n in range(150)
    ]
    lines = run("cluster").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:6]] == ["n2999", "n1500", "n2000", "n0000", "n0001"]
    assert len(lines) == 306
    assert [line for line in lines if line.endswith("--all.")] == [
        "2900 more nodes: --all.", "51 more such nodes: --all.", "50 more stuck pods: --all."
    ]  # fmt: skip
    assert len(run("cluster", "--all").stdout.splitlines()) == 3304


def test_documents_say_the_same(run: Run) -> None:
    document = json.loads(run("cluster", "-o", "json").stdout)
    assert yaml.safe_load(run("cluster", "-o", "yaml").stdout) == document
    one = document["nodes"][0]
    assert one["largestExclusiveRequest"] == 8
    assert one["fragmentation"] == pytest.approx(1 / 3, abs=0.001)
    assert [zone["drained"] for zone in one["zones"]] == [False, True]
    assert document["stuckPods"][0]["message"].startswith("pod shop/refused, container main")


def module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, kubectl_plugin.SOURCES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize(
    "zone",
    [
        {},
        {f"{PREFIX}/free-exclusive-cpus": "3"},
        {f"{PREFIX}/free-exclusive-cpus": "99", f"{PREFIX}/capacity-factor": "0.125"},
    ],
)
def test_it_reads_what_the_scheduler_reads(zone: dict[str, str]) -> None:
    view = module("kubectl_numa_cluster")
    document = topology(8, 0, 15, memory=(1, 2, 3), zone=zone)
    document["zones"][0]["resources"][0]["available"] = "7500m"
    table = decode_topology(document, PREFIX)
    assert isinstance(table, NodeResources)
    (node,) = view.machines([document], {}, PREFIX)
    assert [z["freeExclusiveCpus"] for z in node["zones"]] == list(table.exclusive.free)
    assert [z["exclusiveCpus"] for z in node["zones"]] == list(table.exclusive.capacity)
    assert [z["freeMemoryBytes"] for z in node["zones"]] == list(table.other_resources[0].free)
    assert [round(1000 * z["capacityFactor"]) for z in node["zones"]] == list(table.factor)


@pytest.mark.parametrize(
    ("free", "fragmentation"),
    [((16, 16), 0), ((0, 0), 0), ((8, 8), 0.5), ((4, 4, 4, 4), 0.75), ((16, 1), 0)],
)
def test_fragmented_is_what_the_largest_request_loses(
    free: tuple[int, ...], fragmentation: float
) -> None:
    """Of 16 CPUs a NUMA node: 8 and 8 could be 16 in one place, and 16 and 1 cannot be more."""
    view = module("kubectl_numa_cluster")
    (node,) = view.machines([topology(*free)], {}, PREFIX)
    assert node["fragmentation"] == fragmentation


@pytest.mark.parametrize(
    "zones",
    [
        "none",
        [{"name": "socket", "type": "Node", "resources": [{"name": "cpu"}]}],
        [{"name": "node-0", "type": "Node", "resources": [{"name": "cpu", "allocatable": "much"}]}],
        [17],
    ],
)
def test_an_object_of_another_form_makes_its_node_an_unknown_one(
    run: Run, world: dict[str, Any], zones: object
) -> None:
    world["noderesourcetopologies"][0]["zones"] = zones
    world["nodes"][0]["metadata"]["annotations"] = {f"{PREFIX}/drained": "all\x1b[2J"}
    done = run("cluster")
    assert done.stderr == ""
    assert "Node worker-1: its NodeResourceTopology cannot be read" in done.stdout
    assert "16+16" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_cluster_without_the_objects_says_who_writes_them(
    run: Run, world: dict[str, Any]
) -> None:
    del world["noderesourcetopologies"]
    done = run("cluster")
    assert (done.returncode, done.stdout) == (1, "")
    assert "publish.nodeResourceTopology" in done.stderr
    world["noderesourcetopologies"] = world["nodes"] = world["pods"] = []
    done = run("cluster")
    assert done.returncode == 0
    assert done.stdout.startswith("0 of 0 exclusive CPUs are free")


def test_thousands_of_nodes_are_read_while_they_come(run: Run, world: dict[str, Any]) -> None:
    world["nodes"] = [node(f"worker-{number}", drained="0") for number in range(12345)]
    found = json.loads(run("cluster", "-o", "json").stdout)["nodes"]
    assert len({one["name"] for one in found}) == len(found) == 12345
    assert {one["drained"] for one in found} == {"0"}
    world["cut"] = 300_000
    assert "printed something that is no JSON" in run("cluster").stderr


def test_a_copy_of_one_file_says_what_is_missing(tmp_path: Path, run: Run) -> None:
    lonely = tmp_path / "bin" / "kubectl-numa"
    lonely.parent.mkdir()
    shutil.copy(PROGRAM, lonely)
    done = run("cluster", program=lonely)
    assert (done.returncode, done.stdout) == (3, "")
    assert "kubectl_numa_commands.py is not beside" in done.stderr
    # A link leads to where the others are.
    lonely.unlink()
    lonely.symlink_to(PROGRAM)
    done = run("cluster", program=lonely)
    assert "worker-2" in done.stdout, done.stderr


# --- why ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "after",
    [
        "preemption: 0/40 nodes are available: 40 No preemption victims.",
        "no new claims to deallocate, preemption: 0/40 nodes are available: 40 No victims.",
        "still not schedulable, preemption: 0/40 nodes are available: 40 No victims.",
    ],
)
def test_a_pod_that_no_node_takes_has_the_schedulers_reasons(
    run: Run, world: dict[str, Any], after: str
) -> None:
    message = (
        "0/40 nodes are available: 31 needs 12 exclusive CPUs on one NUMA node; "
        "most free for exclusive use: 8, 9 Insufficient cpu. "
        f"{after}"
    )
    condition = {"type": "PodScheduled", "status": "False", "message": message}
    world["pod"]["big"] = pod("big", conditions=[condition], asks={"policy": "single-numa-node\n"})
    done = run("why", "big", "-n", "shop")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines() == [
        "shop/big asks for policy=single-numa-node.",
        "It has no node. The scheduler numa-scheduler says:",
        "  31 nodes: needs 12 exclusive CPUs on one NUMA node; most free for exclusive use: 8",
        "  9 nodes: Insufficient cpu",
    ]
    world["pod"]["big"] = pod("big")
    assert (
        "no scheduler has said why: does one with the name numa-scheduler"
        in run("why", "shop/big").stdout
    )
    # What the condition does not say any more, the last Event may.
    world["events"] = [event("big", "FailedScheduling", "0/1 nodes are available: 1 x.")]
    assert "  1 node: x\n" in run("why", "big").stdout
    world["pod"]["big"]["spec"]["schedulingGates"] = [{"name": "queue"}]
    assert "it waits for the scheduling gates queue" in run("why", "big").stdout


def event(about: str, reason: str, message: str, **more: Any) -> dict[str, Any]:
    return {
        "involvedObject": {"kind": "Pod", "name": about, "uid": f"uid-{about}"},
        "reason": reason,
        "message": message,
        "lastTimestamp": None,
        "eventTime": "2026-11-22T10:00:00.000000Z",
        **more,
    }


def test_a_pod_that_runs_has_both_sides(run: Run, world: dict[str, Any]) -> None:
    assigned = {"main": {"cpus": "4-7", "mems": "0", "policy": "restricted", "reason": "It fits."}}
    asks = {"policy": "restricted", "placed": '{"main":"0"}', "assigned": json.dumps(assigned)}
    world["pod"]["fine"] = pod("fine", "worker-2", asks=asks)
    done = run("why", "pod/fine")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "shop/fine asks for policy=restricted.",
        "It is on node worker-2, phase Pending.",
        "The scheduler numa-scheduler held NUMA node 0 there for container main.",
        "Container main runs on CPUs 4-7 with memory of NUMA nodes 0, policy restricted: It fits.",
    ]
    asks["placed"] = '{"main":"1"}'
    world["pod"]["fine"] = pod("fine", "worker-2", asks=asks)
    assert "not what the scheduler held: NUMA node 1" in run("why", "fine").stdout
    world["pod"]["fine"] = pod("fine", "worker-2", asks={"placed": "[", "assigned": "[1"})
    lines = run("why", "fine").stdout
    assert "held no NUMA nodes for it" in lines
    assert "kubectl numa explain fine -n shop asks the agent" in lines


def test_a_pod_that_its_node_refuses_has_the_nodes_words(run: Run, world: dict[str, Any]) -> None:
    world["events"] = [
        event("refused", "PlacementRefused", "CPUsTaken: no", series={"count": 4}),
        event("refused", "Pulled", "image"),
        {
            **event("refused", "PlacementRefused", "of an earlier pod"),
            "involvedObject": {"uid": "x"},
        },
    ]
    done = run("why", "refused")
    assert done.returncode == 1
    assert "the node refuses it, CPUsTaken: pod shop/refused, container main: needs" in done.stdout
    assert "no scheduler looks at it any more" in done.stdout
    assert "Event PlacementRefused, 4 times, last at 2026-11-22T10:00:00" in done.stdout
    assert "earlier" not in done.stdout
    assert "Pulled" not in done.stdout
    document = json.loads(run("why", "refused", "-o", "json").stdout)
    assert document["waiting"][0]["reason"] == "CPUsTaken"
    assert yaml.safe_load(run("why", "refused", "-o", "yaml").stdout) == document


@pytest.mark.parametrize(
    ("reason", "waits"), [("CPUOwned", True), ("UnknownCPU", False), ("InvalidAnnotation", False)]
)
def test_only_where_waiting_helps_a_start_is_promised(
    run: Run, world: dict[str, Any], reason: str, waits: bool
) -> None:
    message = REFUSED.replace("CPUsTaken", reason)
    world["pod"]["refused"] = pod("refused", "worker-1", waiting=waiting(message))
    done = run("why", "refused")
    assert done.returncode == 1
    assert ("when there is room" in done.stdout) == waits
    assert ("Waiting does not help" in done.stdout) == (not waits)


def test_what_a_rejected_container_waits_for_is_known_of_every_reason() -> None:
    """``python -m tools.docs_regions`` brings it up to date."""
    assert kubectl_plugin.REASONS.read_text() == kubectl_plugin.reasons()


def test_a_claim_that_the_node_refuses_is_a_refusal(run: Run, world: dict[str, Any]) -> None:
    message = "Failed to prepare dynamic resources: claim shop/c: parameter 'scope' is not for"
    world["pod"]["claims"] = pod("claims", "worker-1", waiting=waiting("", "ContainerCreating"))
    world["events"] = [event("claims", "FailedPrepareDynamicResources", message)]
    done = run("why", "claims")
    assert done.returncode == 1
    assert f"its ResourceClaim is refused on the node: {message}" in done.stdout
    assert "not because of its placement" not in done.stdout


def test_a_failed_pod_has_the_kubelets_reason(run: Run, world: dict[str, Any]) -> None:
    failed = pod("failed", "worker-1", asks={"placed": '{"a":"0"}', "containers": "{}"})
    failed["status"] = {
        "phase": "Failed", "reason": "OutOfcpu", "message": "Node didn't have enough resource: cpu"
    }  # fmt: skip
    world["pod"]["failed"] = failed
    done = run("why", "failed")
    assert done.returncode == 1
    assert "It failed there, OutOfcpu: Node didn't have enough resource: cpu" in done.stdout
    assert "asks for nothing by annotation" in done.stdout, "the extender wrote `containers`"
    failed["metadata"]["annotations"].pop(f"{PREFIX}/placed")
    assert "asks for containers={}" in run("why", "failed").stdout


def test_why_speaks_of_pods_that_are_there(run: Run) -> None:
    done = run("why", "nobody")
    assert (done.returncode, done.stdout) == (1, "")
    assert 'pods "nobody" not found' in done.stderr
    for arguments in (["why"], ["why", "--", "--raw=x"], ["why", "a/b/c"]):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
