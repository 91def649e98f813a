"""``kubectl numa``: whom it asks, what runs there, and what it says when that cannot be done.

A small program plays kubectl here; `tests/kube/test_kubectl_numa.py` has the real one.
"""

import ast
import hashlib
import io
import json
import os
import pty
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from nri_numa import __version__
from nri_numa.model.reasons import RejectionReason
from tools import kubectl_plugin

PROGRAM = kubectl_plugin.SOURCES / kubectl_plugin.PROGRAM

FAKE = """#!{python}
import json, os, sys
world = json.load(open(os.path.join(os.path.dirname(__file__), "world.json")))
words = [w for w in sys.argv[1:] if not w.startswith(("--context", "--kubeconfig"))]
with open(os.path.join(os.path.dirname(__file__), "calls"), "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
def fail(text):
    print("Error from server " + text, file=sys.stderr)
    sys.exit(1)
if words[:2] == ["get", "events"] or words[1].startswith("noderesourcetopologies."):
    print(json.dumps({{"items": world.get(words[1].partition(".")[0], [])}}))
    sys.exit(0)
if words[0] == "exec":
    print("from the node")
    sys.exit(world.get("exit", 0))
if words[:2] == ["get", "--raw"]:
    for part, document in world["raw"].items():
        if part in words[2] and isinstance(document, str):
            fail(document)
        if part in words[2]:
            print(json.dumps(document))
            sys.exit(0)
    fail('(NotFound): services "nri-numa-controller" not found')
if words[:2] == ["get", "pod"]:
    if words[2] in world["pod"]:
        print(json.dumps(world["pod"][words[2]]))
        sys.exit(0)
    print("E1122 10:54:35.660653 30466 memcache.go:265] noise", file=sys.stderr)
    fail('(NotFound): pods "%s" not found' % words[2])
if words[:2] == ["get", "pods"]:
    if "--all-namespaces" in words and world.get("forbidden"):
        fail("(Forbidden): pods is forbidden: User")
    node = [w.partition("spec.nodeName=")[2] for w in words if "nodeName" in w]
    print(json.dumps({{"items": [
        p for p in world["agents"] if not node or p["spec"]["nodeName"] == node[0]
    ]}}))
    sys.exit(0)
if words[:2] == ["get", "node"]:
    print(json.dumps(world["node"]))
    sys.exit(0)
if words[:2] == ["annotate", "node"]:
    if world.get("other_writers", 0):
        world["other_writers"] -= 1
        world["node"]["metadata"]["annotations"] |= {{"numa.kubernetes.io/drained": "0"}}
        with open(os.path.join(os.path.dirname(__file__), "world.json"), "w") as file:
            json.dump(world, file)
        fail('(Conflict): Operation cannot be fulfilled on nodes "worker-1": the object has been '
             "modified; please apply your changes to the latest version and try again")
    print("{{}}")
    sys.exit(0)
print("unknown: %s" % words, file=sys.stderr)
sys.exit(1)
"""


def agent(node: str, *, state: str = "running", **probe: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": f"nri-numa-{node}", "namespace": "numa-system"},
        "spec": {
            "nodeName": node,
            "containers": [
                {"name": "sidecar"},
                {"name": "nri-numa", "readinessProbe": {"httpGet": {"port": 9891, **probe}}},
            ],
        },
        "status": {
            "phase": "Pending",
            "containerStatuses": [
                {"name": "sidecar", "state": {"running": {}}},
                {"name": "nri-numa", "state": {state: {}}},
            ],
        },
    }


def pod(node: str = "", **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "database", "namespace": "shop", "uid": "uid-1"},
        "spec": {"nodeName": node} if node else {},
        "status": status,
    }


@pytest.fixture
def world(tmp_path: Path) -> dict[str, Any]:
    return {
        "pod": {"database": pod("worker-2")},
        # Another part of nri-numa, which is no agent, comes first.
        "agents": [
            {
                "metadata": {"name": "a-scheduler", "namespace": "numa-system"},
                "spec": {"nodeName": "worker-2", "containers": [{"name": "scheduler"}]},
            },
            agent("worker-1"),
            agent("worker-2"),
        ],
        "raw": {},
    }


class Run:
    """Runs the plugin with a program as kubectl that answers from this world."""

    def __init__(self, directory: Path, world: dict[str, Any]) -> None:
        self.directory, self.world = directory, world
        self.kubectl = directory / "kubectl"
        self.kubectl.write_text(FAKE.format(python=sys.executable))
        self.kubectl.chmod(0o755)

    def __call__(
        self, *arguments: str, program: Path = PROGRAM, stdin: int = subprocess.DEVNULL, **env: str
    ) -> subprocess.CompletedProcess[str]:
        (self.directory / "world.json").write_text(json.dumps(self.world))
        clean = {key: text for key, text in os.environ.items() if key != "COLUMNS"}
        return subprocess.run(
            [sys.executable, str(program), *arguments],
            env={**clean, "KUBECTL_PATH": str(self.kubectl), **env},
            stdin=stdin, stdout=subprocess.PIPE if stdin < 0 else stdin, stderr=subprocess.PIPE,
            text=True, timeout=60, check=False,
        )  # fmt: skip

    def also(self, place: str, words: str) -> None:
        """Let kubectl do this before it gets to that place."""
        self.kubectl.write_text(self.kubectl.read_text().replace(place, words + place, 1))

    @property
    def calls(self) -> list[list[str]]:
        """The words of each call of kubectl."""
        file = self.directory / "calls"
        return [*map(json.loads, file.read_text().splitlines())] if file.exists() else []

    @property
    def asked(self) -> str:
        return "\n".join(" ".join(words) for words in self.calls)


@pytest.fixture
def run(tmp_path: Path, world: dict[str, Any]) -> Run:
    return Run(tmp_path, world)


def test_another_name_in_the_chart_is_found_by_what_it_does_not_change(run: Run) -> None:
    done = run("status", "database", "--selector=app.kubernetes.io/name=nri-numa")
    assert done.returncode == 0
    assert "component=agent" not in run.asked
    nobody = 'if "--selector=app.kubernetes.io/name=nri-numa" in words: world["agents"] = []\n'
    run.also('if words[0] == "exec"', nobody)
    done = run("status", "database")
    assert (done.returncode, done.stdout) == (0, "from the node\n"), done.stderr
    assert "app.kubernetes.io/part-of=nri-numa,app.kubernetes.io/component=agent" in run.asked


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["explain", "database"], ["explain", "shop/database", "--output=table"]),
        (["explain", "database", "engine"], ["explain", "shop/database", "engine"]),
        (["explain", "database", "-v"], ["explain", "shop/database", "--verbose"]),
        (["explain", "pod/database", "-o", "json"], ["explain", "shop/database", "--output=json"]),
        (["status", "shop/database"], ["status", "--namespace=shop", "--pod=database"]),
        (["status", "database", "-A", "-o", "wide"], ["status", "--output=wide"]),
        (["status", "database", "-w"], ["status", "--namespace=shop", "--pod=database", "--watch"]),
        (["status", "--node", "worker-2"], ["status", "--output=table"]),
        (["explain", "gone", "--node=worker-2"], ["explain", "gone", "--output=table"]),
        (["explain", "gone", "-n", "a", "--node=worker-2"], ["explain", "a/gone"]),
        (["topology", "database"], ["topology", "--output=table"]),
    ],
)
def test_the_pods_agent_runs_commands(run: Run, arguments: list[str], command: list[str]) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (0, "from the node\n"), done.stderr
    where, _, what = " ".join(run.calls[-1]).partition(" -- nri-numa ")
    assert where == "exec --namespace=numa-system nri-numa-worker-2 --container=nri-numa"
    assert what.startswith(" ".join(command))


def test_at_a_terminal_the_command_gets_one_too(run: Run) -> None:
    """So that tables fit it, and watching clears it."""
    assert run("status", "database").returncode == 0
    assert "--tty" not in run.calls[-1]
    master, slave = pty.openpty()
    try:
        done = run("status", "database", "--watch", stdin=slave)
    finally:
        os.close(slave)
        os.close(master)
    assert (done.returncode, done.stderr) == (0, "")
    assert run.calls[-1][:3] == ["exec", "--stdin", "--tty"]


def test_flags_of_kubectl_go_on_and_exit_codes_return(run: Run) -> None:
    run.world["exit"] = 1
    assert run("explain", "database", "--context", "east", "-n", "shop").returncode == 1
    assert [call[0] for call in run.calls] == ["--context=east"] * 3
    assert "--namespace=shop" in run.calls[0]


def test_who_may_not_list_all_looks_in_the_usual_namespace(run: Run) -> None:
    run.world["forbidden"] = True
    assert run("status", "database").returncode == 0
    assert "--namespace=nri-numa" in run.asked
    assert run("status", "database", KUBECTL_NUMA_NAMESPACE="elsewhere").returncode == 0
    assert "--namespace=elsewhere" in run.asked
    assert run("status", "database", "--selector", "app=mine").returncode == 0
    assert "--selector=app=mine" in run.asked


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["explain", "nobody"], 1, 'pods "nobody" not found'),
        (["status"], 2, "expected a POD, or --node NODE; nri-numa runs on worker-1, worker-2"),
        (["status", "--node", "worker-9"], 3, "no pod of nri-numa on node worker-9"),
        (["explain", "a/b/c"], 2, "the container as a word of its own"),
        (["explain", "/database"], 2, "expected POD or NAMESPACE/POD"),
        (["explain", "-n", "other", "shop/database"], 2, "name two namespaces"),
        (["explain"], 2, "the following arguments are required: POD"),
        (["status", "database", "-o", "xml"], 2, "invalid choice: 'xml'"),
        (["status", "database", "--proxy", "-o", "yaml"], 2, "--proxy goes with -o table or json"),
        (["status", "database", "--proxy", "-w"], 2, "does not go with --watch"),
        (["explain", "x", "--node=worker-1", "--proxy"], 2, "needs the pod's namespace"),
    ],
)
def test_what_cannot_be_asked_is_said(run: Run, arguments: list[str], code: int, said: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert "memcache.go" not in done.stderr
    assert "Traceback" not in done.stderr


def test_pods_and_agents_that_are_not_there_yet(run: Run) -> None:
    condition = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes\x1b[31m"}
    run.world["pod"]["database"] = pod(conditions=[condition])
    done = run("explain", "database")
    assert done.returncode == 1
    assert "pod shop/database has no node yet: 0/3 nodes\\x1b[31m" in done.stderr
    run.world["pod"]["database"] = pod("worker-1")
    run.world["agents"] = [agent("worker-1", state="waiting")]
    done = run("explain", "database")
    assert done.returncode == 3
    assert "does not run: pod numa-system/nri-numa-worker-1 is Pending" in done.stderr
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off 10s"}
    run.world["agents"][0]["status"]["containerStatuses"][1]["state"] = {"waiting": waiting}
    assert "is in CrashLoopBackOff: back-off 10s" in run("status", "database").stderr


def test_no_kubectl_is_said(run: Run) -> None:
    done = run("explain", "database", KUBECTL_PATH="/nowhere/kubectl")
    assert (done.returncode, "install kubectl" in done.stderr) == (3, True)


def test_the_api_servers_proxy_is_the_other_way(run: Run) -> None:
    one = {"namespace": "shop", "pod": "database", "container": "engine", "kind": "exclusive"}
    one |= {"cpus": "0-3", "mems": "0", "policy": "single-numa-node"}
    run.world["raw"] = {
        "/v1/status": {"ready": True},
        "/v1/assignments": {"containers": [one, {**one, "pod": "other"}]},
        "/v1/rejections": {"rejections": [{**one, "reason": "CPUExclusive"}]},
        "/v1/topology": {"numaNodes": [{"id": 0, "cpus": "0-3", "memoryBytes": 1 << 30}]},
        "/v1/explain/shop/database": {
            "explanations": [
                {**one, "outcome": "rejected", "summary": "no", "decisionSteps": ["Because."]}
            ]
        },
    }
    done = run("status", "database", "--proxy")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "shop/database engine: exclusive, CPUs 0-3, memory nodes 0, policy single-numa-node",
        "shop/database engine: rejected, CPUExclusive",
    ]
    assert "/namespaces/numa-system/pods/nri-numa-worker-2:9891/proxy/v1/" in run.asked
    document = json.loads(run("status", "database", "--proxy", "-o", "json").stdout)
    assert document["containers"] == [one]
    done = run("explain", "database", "--proxy")
    assert (done.returncode, "  Because.\n" in done.stdout) == (1, True)
    assert "NUMA node 0: CPUs 0-3, 1024 MiB" in run("topology", "database", "--proxy").stdout
    run.world["agents"] = [agent("worker-2", host="127.0.0.1")]
    done = run("status", "database", "--proxy")
    assert (done.returncode, "loopback only" in done.stderr) == (3, True)


HOSTILE = "\x1b]0;x\x07\x9b31m\u202e\u200b<b>\r\n\x00\ud800--x"


@pytest.mark.parametrize("way", ["status", "explain", "topology"])
def test_hostile_names_do_not_reach_the_terminal(run: Run, way: str) -> None:
    """The agent in its pod escapes for itself; this is what the program prints by itself."""
    fields = ("container", "kind", "cpus", "mems", "policy", "reason", "outcome", "summary")
    one = {**dict.fromkeys(fields, HOSTILE), "namespace": "shop", "pod": "database"}
    run.world["raw"] = {
        "/v1/status": {"ready": True},
        "/v1/assignments": {"containers": [one]},
        "/v1/rejections": {"rejections": [one]},
        "/v1/topology": {"numaNodes": [{"id": HOSTILE, "cpus": HOSTILE, "memoryBytes": 1 << 30}]},
        "/v1/explain/shop/database": {"explanations": [{**one, "decisionSteps": [HOSTILE]}]},
    }
    for form in ("table", "json"):
        done = run(way, "database", "--proxy", "-o", form)
        assert done.returncode == 0, done.stderr
        assert all(line.isprintable() for line in done.stdout.split("\n"))
        assert "<b>" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", "--", "--as=admin"],
        ["explain", "shop/--raw=x"],
        ["explain", "-n", "--as=admin", "database"],
        ["explain", "-n=--as=admin", "database"],
        ["explain", "database", "--", "--api=x"],
        ["status", "--", "-A"],
    ],
)
def test_no_name_becomes_an_option_of_what_runs_next(run: Run, arguments: list[str]) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert not run.calls


def test_what_the_program_says_itself_is_harmless(run: Run) -> None:
    done = run("explain", "a\x1b[2J/b\u202e/c")
    assert done.returncode == 2
    assert done.stderr.rstrip("\n").isprintable()
    done = run("status", "--node", "\x1b[2J\u202e")
    assert done.returncode == 3
    assert done.stderr.rstrip("\n").isprintable()


# --- drain and undrain ----------------------------------------------------------------------------


def node(**annotations: str) -> dict[str, Any]:
    made = {f"numa.kubernetes.io/{k.replace('_', '-')}": v for k, v in annotations.items()}
    return {"metadata": {"name": "worker-1", "resourceVersion": "7", "annotations": made}}


@pytest.mark.parametrize(
    ("command", "before", "change"),
    [
        ("drain", "", "drained=1"),
        ("drain", "0", "drained=0,1"),
        ("drain", "0-1", None),
        ("undrain", "0-1\n", "drained=0"),
        ("undrain", "1", "drained-"),
        ("undrain", "0", None),
    ],
)
def test_the_annotation_has_drained_nodes(run: Run, command: str, before: str, change: str) -> None:
    run.world["node"] = node(numa_ids="0-1", **({"drained": before} if before else {}))
    done = run(command, "worker-1", "1" if before else "node-1", "--context=east")
    assert (done.returncode, done.stderr) == (0, "")
    assert "NUMA node 1 of worker-1" in done.stdout
    assert all("--context=east" in call for call in run.calls)
    written = [call for call in run.calls if "annotate" in call]
    if change is None:
        assert written == []
    else:
        assert f"numa.kubernetes.io/{change}" in written[0]
        assert "--resource-version=7" in written[0], "nobody else's change is lost"


@pytest.mark.parametrize(("writers", "code"), [(2, 0), (9, 1)])
def test_a_written_node_is_reread(run: Run, writers: int, code: int) -> None:
    """The kubelet writes a Node too; its change, and another operator's, stay."""
    run.world |= {"node": node(numa_ids="0-1"), "other_writers": writers}
    done = run("drain", "worker-1", "1")
    assert done.returncode == code, done.stderr
    written = [call for call in run.calls if "annotate" in call]
    assert "numa.kubernetes.io/drained=0,1" in written[-1]
    assert ("the object has been modified" in done.stderr) == bool(code)


@pytest.mark.parametrize(
    ("there", "drained", "arguments", "code", "said"),
    [
        ("0-1", "", ["worker-1", "2"], 1, "has no NUMA node 2; it has 0-1"),
        ("0-1", "", ["worker-1", "x"], 2, "ZONE is 'x'; expected a NUMA node"),
        ("0-1", "", ["worker-1", "-1"], 2, ""),
        ("0-1", "", ["worker-1"], 2, "ZONE"),
        ("0-1", "", ["worker-1", "1", "--prefix=other.io"], 0, "no annotation other.io/numa-ids"),
        ("", "", ["worker-1", "5"], 0, "no annotation numa.kubernetes.io/numa-ids"),
        ("0-1", "all", ["worker-1", "1"], 1, "'all', expected NUMA nodes as a list"),
    ],
)
def test_what_cannot_be_drained_says_why(
    run: Run, there: str, drained: str, arguments: list[str], code: int, said: str
) -> None:
    run.world["node"] = node(numa_ids=there, drained=drained)
    done = run("drain", *arguments)
    assert done.returncode == code
    assert said in done.stderr
    assert ("annotate" in run.asked) == (code == 0)


# --- the cluster, and why -------------------------------------------------------------------------

SERVICE = "/api/v1/namespaces/nri-numa/services/https:nri-numa-controller:http/proxy/v1"
PENDING = "/api/v1/pods?fieldSelector=status.phase%3DPending"
REJECTED = (
    "failed to create containerd container: NRI: rpc error: code = Unknown desc = {0}: "
    "pod shop/database, container engine: needs 12 CPUs; free: 8"
)


def rejected(reason: str = "CPUExclusive", message: str = REJECTED) -> dict[str, Any]:
    waiting = {"reason": "CreateContainerError", "message": message.format(reason)}
    one = {"name": "engine", "state": {"waiting": waiting}}
    return pod("worker-1", phase="Pending", containerStatuses=[one])


def overview(*nodes: dict[str, Any], matching: int = 0) -> dict[str, Any]:
    total = {"nodes": 3, "unknownNodes": 1, "exclusiveCpus": 64, "freeExclusiveCpus": 44}
    total |= {"maxExclusiveRequest": 16, "fragmentation": 0.143}
    return {"total": total, "matchingNodes": matching or len(nodes), "nodes": [*nodes]}


def shown(name: str, *free: int, problem: str = "") -> dict[str, Any]:
    zones = [
        {"id": i, "exclusiveCpus": 16, "freeExclusiveCpus": n, "memoryBytes": 32 << 30,
         "freeMemoryBytes": 32 << 30, "capacityFactor": 1 - i / 4, "drained": False}
        for i, n in enumerate(free)
    ]  # fmt: skip
    return {
        "name": name, "zones": zones, "problem": problem, "agentReady": True,
        "drainedNumaNodes": "1", "maxExclusiveRequest": max(free, default=0),
        "fragmentation": 0.333,
    }  # fmt: skip


def test_the_controllers_numbers_and_stuck_pods_are_shown(run: Run) -> None:
    no = "no NodeResourceTopology\x1b[2J"
    run.world["raw"] = {
        f"{SERVICE}/cluster": overview(shown("worker-1", 8, 4), shown("worker-3", problem=no)),
        PENDING: {"items": [rejected(), pod("worker-1")]},
    }
    done = run("cluster", "--context=east")
    assert done.returncode == 1, "a pod is stuck"
    assert [" ".join(line.split()) for line in done.stdout.splitlines()] == [
        "NODE NUMA NODES FREE CAPACITY MAX EXCLUSIVE FRAGMENTATION MEMORY FREE CAPACITY FACTOR "
        "DRAINED",
        "worker-1 2 8+4 32 8 33% 64 GiB 0.75-1 1",
        "",
        "44 of 64 exclusive CPUs are free on 2 nodes; the largest request that fits one NUMA node "
        "is 16 CPUs, fragmentation 14%.",
        "Node worker-3: no NodeResourceTopology\\x1b[2J.",
        "Stuck: shop/database on worker-1, container engine: CPUExclusive (kubectl numa why "
        "database -n shop)",
    ]
    assert all("--context=east" in call for call in run.calls)
    document = json.loads(run("cluster", "-o", "json").stdout)
    assert len(document["nodes"]) == 2
    assert document["stuckPods"][0]["message"].startswith("pod shop/database, container engine")


def test_people_see_a_hundred_nodes_and_programs_all(run: Run) -> None:
    nodes = [shown(f"n{number}", 1) for number in range(500)]
    run.world["raw"] = {
        "offset=0&limit=500": overview(*nodes, matching=501),
        "offset=500&limit=500": overview(shown("last", 1), matching=501),
        "offset=0&limit=100": overview(*nodes[:100], matching=501),
        PENDING: {"items": []},
    }
    assert "401 more nodes: --all." in run("cluster").stdout
    assert len(json.loads(run("cluster", "-o", "json").stdout)["nodes"]) == 501
    assert "\nlast " in run("cluster", "--all").stdout


def test_without_a_controller_the_objects_speak(run: Run) -> None:
    resources = [{"name": "cpu", "available": "8"}, {"name": "memory", "available": "64Gi"}]
    zones = [{"name": "node-0", "resources": resources}, {"name": "node-1"}]
    run.world["noderesourcetopologies"] = [{"metadata": {"name": "worker-1"}, "zones": zones}]
    run.world["raw"] = {PENDING: {"items": []}}
    done = run("cluster", "--controller=shop/other")
    assert (done.returncode, done.stderr) == (0, "")
    first, *lines = done.stdout.splitlines()
    assert first.startswith("no verdict: no controller answers: ")
    assert "config.controller.page.enabled" in first
    assert [line.split() for line in lines] == [
        ["NUMA", "NODE", "AVAILABLE", "CPUS", "AVAILABLE", "MEMORY"],
        ["worker-1/node-0", "8", "64Gi"],
        ["worker-1/node-1", "-", "-"],
    ]
    assert "services/https:other:http/proxy" in run.asked


def verdict(**more: Any) -> dict[str, Any]:
    return {
        "node": "", "verdict": "infeasible", "invalidReason": "",
        "feasibleNodes": 0, "evaluatedNodes": 3,
        "bestNode": "", "numaNodes": {}, "afterMoves": False, "reasons": [], "excluded": [],
        "notEvaluated": ["volumes"], "stale": "", **more,
    }  # fmt: skip


UNSCHEDULED = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available."}
REASON = {
    "message": "needs 12 CPUs", "retryCondition": "never", "nodes": 7, "examples": ["n1", "n2"],
}  # fmt: skip
EXCLUDED = {"reason": "taint", "nodes": 1, "examples": ["n9"]}


@pytest.mark.parametrize(
    ("said", "lines"),
    [
        (
            verdict(reasons=[REASON], excluded=[EXCLUDED]),
            ["it fits on 0 of 3 nodes.",
             "  7 nodes (n1, n2, …): needs 12 CPUs; waiting does not help",
             "  1 node (n9): not evaluated: taint", "Not checked: volumes."],
        ),
        (
            verdict(feasibleNodes=2, bestNode="n4", numaNodes={"main": "0"}, stale="o",
                    afterMoves=True),
            [
                "it fits on 2 of 3 nodes, best on n4 (NUMA node of main: 0) after moving "
                "other containers.",
             "The answer may be outdated or incomplete: o"],
        ),
        (verdict(verdict="invalid", invalidReason="cpu"), ["every node rejects it: cpu"]),
        (verdict(verdict="unconstrained"), ["it requests no NUMA nodes"]),
    ],
)  # fmt: skip
def test_a_pending_pod_has_its_verdict(run: Run, said: dict[str, Any], lines: list[str]) -> None:
    run.world["pod"]["database"] = pod(phase="Pending", conditions=[UNSCHEDULED])
    run.world["raw"] = {f"{SERVICE}/verdicts/shop/database?uid=uid-1": said}
    done = run("why", "database")
    assert done.returncode == 1, done.stderr
    assert "It has no node. The scheduler default-scheduler says: 0/3 nodes are" in done.stdout
    for line in lines:
        assert line in done.stdout
    assert json.loads(run("why", "database", "-o", "json").stdout)["verdict"] == said


@pytest.mark.parametrize(
    ("problem", "asked"),
    [
        ('(Forbidden): services "x" is forbidden: User "u" cannot get', "/services/https:"),
        ("(ServiceUnavailable): error trying to reach service: HTTP", "/services/http:"),
    ],
)
def test_without_a_verdict_it_says_what_switches_one_on(run: Run, problem: str, asked: str) -> None:
    """A controller without TLS is asked a second time."""
    run.world["pod"]["database"] = pod(phase="Pending", conditions=[UNSCHEDULED])
    run.world["raw"] = {"/proxy/": problem}
    done = run("why", "database")
    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    assert last.startswith(
        f"no verdict: the controller does not answer: Error from server {problem}"
    )
    assert "config.controller.verdicts.enabled" in last
    assert asked in " ".join(run.calls[-1])


def test_a_pod_that_runs_has_both_sides(run: Run) -> None:
    assigned = {"main": {"cpus": "4-7", "mems": "0", "policy": "restricted", "reason": "It fits."}}
    asks = {
        "policy": "restricted\n",
        "scheduled-numa-nodes": '{"main":"0"}',
        "assigned": json.dumps(assigned),
    }
    fine = run.world["pod"]["database"] = pod("worker-2", phase="Running")
    fine["metadata"]["annotations"] = {f"numa.kubernetes.io/{k}": v for k, v in asks.items()}
    run.world["events"] = [
        {"involvedObject": {"uid": uid}, "reason": "Moved", "message": text, "count": 4,
         "reportingComponent": f"numa.kubernetes.io/{who}", "lastTimestamp": "2026-11-22"}
        for uid, who, text in (("uid-1", "nri-numa", "moved"), ("uid-0", "nri-numa", "earlier"),
                               ("uid-1", "kubelet", "pulled"))
    ]  # fmt: skip
    done = run("why", "pod/database")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "shop/database requests policy=restricted.",
        "It is on node worker-2, phase Running.",
        "The scheduler default-scheduler chose NUMA node 0 there for main.",
        "Container main runs on CPUs 4-7 with memory of NUMA nodes 0, policy restricted: It fits.",
        "Event Moved, 4 times, last at 2026-11-22: moved",
    ]
    assert "proxy" not in run.asked, "nothing is judged"
    fine["metadata"]["annotations"] = {"numa.kubernetes.io/assigned": "[1"}
    assert "kubectl numa explain database -n shop asks the agent" in run("why", "database").stdout


@pytest.mark.parametrize(
    ("stuck", "words"),
    [
        (
            rejected(),
            "the node rejects it, CPUExclusive: pod shop/database, container engine: needs",
        ),
        (rejected(), "It starts when its node has room"),
        (rejected("NewReason"), "It starts when its node has room"),
        (rejected("UnknownCPU"), "Waiting does not help"),
        (rejected("NotPermitted"), "as the message says"),
        (rejected(message="pulling"), "but not because of its placement: CreateContainerError pul"),
        (pod("worker-1", phase="Failed", reason="OutOfcpu"), "It failed there: OutOfcpu"),
        (pod(phase="Pending"), "no scheduler gave a reason: does one named default-scheduler run?"),
    ],
)
def test_a_pod_that_does_not_start_has_the_words_of_its_node(
    run: Run, stuck: dict[str, Any], words: str
) -> None:
    run.world["pod"]["database"] = stuck
    run.world["raw"] = {"/proxy/": verdict(node="worker-1", verdict="rejected-by-node")}
    done = run("why", "database")
    assert words in done.stdout, done.stderr
    nowhere = "pulling" not in str(stuck)
    assert done.returncode == nowhere
    asks = nowhere and stuck["status"]["phase"] == "Pending"
    assert ("The controller says: it fits on 0 of 3 other nodes" in done.stdout) == asks
    if not nowhere:
        claim = {"reason": "FailedPrepareDynamicResources", "message": "claim shop/c: scope"}
        run.world["events"] = [{"involvedObject": {"uid": "uid-1"}, **claim}]
        done = run("why", "database")
        assert (done.returncode, "its ResourceClaim: claim shop/c: scope" in done.stdout) == (
            1,
            True,
        )


def test_what_waiting_is_good_for_is_known_of_every_reason() -> None:
    """``python -m tools.docs_regions`` brings it up to date."""
    text = PROGRAM.read_text()
    assert text == kubectl_plugin.program_with_reasons(text)
    region = text.partition("\nREASONS = {")[2].partition("\n}\n")[0]
    assert set(re.findall(r"[A-Z]\w+", region)) == set(RejectionReason)


# --- what is handed out ---------------------------------------------------------------------------


def test_it_is_one_short_file_for_an_old_python_and_needs_nothing_else() -> None:
    text = PROGRAM.read_text()
    ast.parse(text, feature_version=(3, 9))
    imported = set(re.findall(r"^ *(?:import|from) (\w+)", text, re.MULTILINE))
    assert imported <= set(sys.stdlib_module_names)
    assert os.access(PROGRAM, os.X_OK)
    assert len(text.splitlines()) <= 700


def test_the_manifest_is_for_the_archive_as_krew_reads_it() -> None:
    packed = kubectl_plugin.archive()
    assert packed == kubectl_plugin.archive(), "the same tree gives the same bytes"
    document = yaml.safe_load(kubectl_plugin.manifest(packed))
    assert document["apiVersion"] == "krew.googlecontainertools.github.com/v1alpha2"
    assert (document["kind"], document["metadata"]["name"]) == ("Plugin", "numa")
    spec = document["spec"]
    assert spec["version"] == f"v{__version__}"
    assert set(spec) == {
        *("version", "homepage", "shortDescription", "description", "caveats", "platforms")
    }
    (platform,) = spec["platforms"]
    assert platform["sha256"] == hashlib.sha256(packed).hexdigest()
    assert platform["uri"].endswith(".tar.gz")
    with tarfile.open(fileobj=io.BytesIO(packed)) as unpacked:
        names = {member.name: member.mode for member in unpacked if member.isfile()}
    assert {entry["from"] for entry in platform["files"]} == set(names)
    assert names[platform["bin"]] == 0o755


def test_one_file_helps_and_completes(tmp_path: Path, run: Run) -> None:
    """As kubectl finds it on PATH, with nothing beside it."""
    kubectl_plugin.main(["-o", str(tmp_path / "bin")])
    one = tmp_path / "bin" / kubectl_plugin.PROGRAM
    run.also('if words[:2] == ["get", "pods"]:\n', "world['agents'] += world['pod'].values()\n")

    def answered(*arguments: str) -> str:
        done = run(*arguments, program=one)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert answered() == answered("help") == answered("--help")
    assert "--context" in answered("help")
    assert "--context" not in answered("help", "explain")
    assert "--selector" in answered("help", "explain")
    assert answered("--version") == f"kubectl numa {__version__}\n"
    assert 'exec kubectl numa __complete "$@"' in answered("completion")
    assert answered("__complete", "top").split() == ["topology", ":4"]
    assert answered("__complete", "explain", "data").split() == ["database", ":4"]
    assert answered("__complete", "drain", "").split() == [":4"]
