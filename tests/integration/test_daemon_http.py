"""The real process: started, given pods by a runtime over its socket, and asked over HTTP."""

import fcntl
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from bench.attacker import flood, linger
from nri_numa.demo.runtime import DemoContainer, PodOperationFailed
from nri_numa.model.cpuset import CPUSet
from tests.beds.embedded_node import EmbeddedNode, limits, until
from tests.machines import named as machines

GIB = 1 << 30
SINGLE = {"policy": "single-numa-node"}


@pytest.fixture
def here(tmp_path: Path) -> Iterator[EmbeddedNode]:
    """Two sockets, four NUMA nodes of 8 CPUs and 16 GiB; NUMA node 0 is CPUs 0-3,16-19."""
    with EmbeddedNode(tmp_path, topology=machines.snc_smt()) as node:
        yield node


@pytest.fixture
def node(here: EmbeddedNode) -> EmbeddedNode:
    """With the plugin."""
    here.start()
    return here


def created(
    node: EmbeddedNode,
    name: str,
    annotations: Mapping[str, str],
    cpus: float = 0,
    memory: int = GIB,
) -> DemoContainer:
    """A container of a Guaranteed pod, as the kubelet would ask for it."""
    return node.create(node.pod(name, annotations), cpus=cpus, memory=memory)


def interpreter(node: EmbeddedNode, *words: str) -> None:
    """Have the next plugin started by a script that ends with these words."""
    script = node.directory / "python"
    script.write_text(f'#!/bin/sh\n{" ".join(words)} "$@"\n')
    script.chmod(0o755)
    node.plugin.python = str(script)


def metrics(node: EmbeddedNode) -> dict[str, float]:
    rows = (line.rpartition(" ") for line in node.plugin.get("/metrics")[1].splitlines())
    return {name: float(value) for name, _, value in rows if not name.startswith("#")}


@contextmanager
def events(node: EmbeddedNode) -> Iterator[Iterator[dict[str, Any]]]:
    """The changes as they are sent."""
    with urllib.request.urlopen(f"http://{node.plugin.address}/v1/events", timeout=180) as stream:
        lines = (line for line in stream if line.startswith(b"data: "))
        yield (json.loads(line.removeprefix(b"data: ")) for line in lines)


def test_the_pods_sum_is_kept_from_run_pod_sandbox_on(node: EmbeddedNode) -> None:
    """``scope: pod``: nobody else gets its CPUs while its first image is still being pulled."""
    sandbox = node.pod("whole", {**SINGLE, "scope": "pod"}, given=limits(7, GIB))
    (kept,) = node.assignments().values()
    assert (kept["pod"], kept["container"], kept["kind"]) == ("whole", "*", "reservation")
    assert len(CPUSet.parse(kept["cpus"])) == 7
    assert kept["reservation"] == "hard"
    node.call(node.runtime.stop_pod(sandbox.id))
    (kept,) = node.assignments().values()
    assert kept["reservation"] == "soft"
    node.call(node.runtime.remove_pod(sandbox.id))
    assert not node.assignments()


def test_the_api_tells_what_the_runtime_was_told(node: EmbeddedNode) -> None:
    """Metrics, lists and explanations agree with the cpusets the containers really got."""
    plain = created(node, "plain", {})
    listed = created(node, "listed", {"numacpu": "1,9", "numamem": "0"})
    own = created(node, "own", SINGLE, cpus=4, memory=4 * GIB)
    with pytest.raises(PodOperationFailed, match="9 exclusive CPUs needed, more"):
        created(node, "big", SINGLE, cpus=9, memory=4 * GIB)
    shared = created(node, "shared", {"policy": "best-effort"}, cpus=1.5)

    told = node.assignments()
    for made, kind in (
        (plain, "unpinned"),
        (listed, "listed"),
        (own, "exclusive"),
        (shared, "shared"),
    ):
        assert told[made.id]["kind"] == kind
        assert told[made.id]["cpus"] == made.cpus
        assert told[made.id]["mems"] in ("", made.mems)
        assert told[made.id]["aligned"]
    filtered = node.plugin.json("/v1/assignments?namespace=default&pod=own")
    assert [c["pod"] for c in filtered["containers"]] == ["own"]

    samples = metrics(node)
    for kind in ("unpinned", "listed", "exclusive", "shared"):
        assert samples[f'nri_numa_containers{{kind="{kind}",aligned="true"}}'] == 1
    assert samples['nri_numa_containers{kind="foreign",aligned="true"}'] == 0
    i = told[own.id]["numaNodes"]
    label = f'{{numa_node="{i}"}}'
    assert samples[f'nri_numa_cpus{{numa_node="{i}",state="exclusive"}}'] == 4
    assert samples[f'nri_numa_cpus{{numa_node="{i}",state="shared"}}'] == 4
    assert samples[f"nri_numa_free_cpus{label}"] == 4
    assert samples[f"nri_numa_memory_bytes{label}"] == 16 * GIB
    assert samples[f"nri_numa_memory_allocated_bytes{label}"] == 4 * GIB
    assert samples[f"nri_numa_memory_free_bytes{label}"] <= 12 * GIB
    assert samples["nri_numa_shared_pool_cpus"] == 28
    assert samples["nri_numa_link_up"] == samples["nri_numa_http_up"] == 1
    assert samples["nri_numa_internal_errors_total"] == 0
    assert samples["nri_numa_invariant_violations_total"] == 0
    written = samples["nri_numa_checkpoint_written_timestamp_seconds"]
    assert abs(time.time() - written) < 60
    assert samples["nri_numa_config_last_reload_successful"] == 1
    status = node.plugin.json("/v1/status")
    assert samples[f'nri_numa_node_info{{node_name="{status["nodeName"]}"}}'] == 1
    assert samples["nri_numa_checkpoint_write_duration_seconds_count"] >= 4
    rejected = (
        'nri_numa_decisions_total{outcome="rejected",policy="single-numa-node",'
        'reason="TopologyAffinityError"}'
    )
    assert samples[rejected] == 1

    (one,) = node.plugin.json("/v1/explain/default/own")["explanations"]
    assert one["outcome"] == "admitted"
    assert one["assignment"]["cpus"] == own.cpus
    steps = " ".join(one["decisionSteps"])
    assert f"It runs on exclusive CPUs {own.cpus}" in steps
    assert (
        "It requests 4 exclusive CPUs and 4 GiB of memory on one NUMA node (annotation "
        "numa.kubernetes.io/policy: single-numa-node)."
    ) in steps
    assert one["details"]["pool"]["after"] != one["details"]["pool"]["before"]

    (one,) = node.plugin.json("/v1/explain/default/big/app")["explanations"]
    assert one["outcome"] == "rejected"
    assert one["rejection"]["reason"] == "TopologyAffinityError"
    assert one["details"]["rejection"]["rule"] in " ".join(one["decisionSteps"])
    cpu = one["details"]["resources"][0]
    assert cpu["demand"] == 9
    assert len(cpu["numaNodes"]) == 4
    assert not any(n["sufficient"] for n in cpu["numaNodes"])
    assert [r["pod"] for r in node.plugin.json("/v1/rejections")["rejections"]] == ["big"]
    text = node.says("explain", "-v", "default/big", status=1)
    assert "The rule: policy single-numa-node admits one NUMA node only." in text
    assert re.search(r"Free on NUMA nodes? [0-9,-]+( each)?: [0-9] of 8 CPUs", text)
    status, missing = node.plugin.get("/v1/explain/default/nobody")
    assert (status, "default/nobody" in missing) == (404, True)

    # What its pod gives back when it ends is seen as well.
    node.call(node.runtime.stop_container(own.id))
    node.call(node.runtime.remove_pod(own.message.pod_sandbox_id))
    samples = metrics(node)
    assert samples['nri_numa_containers{kind="exclusive",aligned="true"}'] == 0
    assert samples["nri_numa_shared_pool_cpus"] == 32
    status, missing = node.plugin.get("/v1/explain/default/own")
    assert (status, '"NotFound"' in missing) == (404, True)
    assert "Traceback" not in node.plugin.log()


def test_machine_health_and_readiness_are_answered(node: EmbeddedNode) -> None:
    assert node.plugin.json("/v2/system/numa/info") == {
        "code": 200,
        "message": "OK",
        "data": {
            "nodenums": 4,
            "cpulist": [
                "0,1,2,3,16,17,18,19",
                "4,5,6,7,20,21,22,23",
                "8,9,10,11,24,25,26,27",
                "12,13,14,15,28,29,30,31",
            ],
            "memsize": [str(16 * GIB)] * 4,
        },
    }
    assert node.plugin.json("/readyz") == {"ready": True, "reason": ""}
    assert node.plugin.get("/healthz") == (200, "ok\n")
    status = node.plugin.json("/v1/status")
    assert status["link"]["state"] == "active"
    assert status["link"]["runtime"] == "containerd"
    assert status["observe"] is False
    assert node.plugin.json("/v1/topology")["counts"]["numaNodes"] == 4
    assert node.plugin.get("/")[0] in (200, 404)


def test_changes_are_sent_as_they_happen(node: EmbeddedNode) -> None:
    """And an open stream does not keep the process from ending."""
    assert node.plugin.get("/healthz")[0] == 200
    with events(node) as stream:
        first = next(stream)
        assert first["ready"] is True
        created(node, "own", SINGLE, cpus=2)
        assert next(stream)["serial"] > first["serial"]
        assert node.plugin.terminate() == 0


def test_without_a_runtime_the_api_says_what_is_missing(here: EmbeddedNode) -> None:
    here.call(here.runtime.stop())
    here.start(wait=False)
    status, text = here.plugin.get("/readyz")
    assert (status, "disconnected" in text, str(here.socket) in text) == (503, True, True)
    assert here.plugin.json("/v1/status")["ready"] is False
    assert here.metric("nri_numa_link_up") == 0
    assert here.plugin.terminate() == 0


def test_a_runtime_that_goes_away_is_not_ready_and_is_told(node: EmbeddedNode) -> None:
    assert node.plugin.json("/readyz")["ready"] is True
    with events(node) as stream:
        assert next(stream)["ready"]
        node.call(node.runtime.stop())
        assert any(not event["ready"] for event in stream)
        status, text = node.plugin.get("/readyz")
        assert (status, "disconnected" in text) == (503, True)
        node.call(node.runtime.start())
        assert any(event["ready"] for event in stream)
    assert node.plugin.json("/readyz")["ready"] is True


@pytest.mark.parametrize("token", ["", "missing"])
def test_without_port_or_token_pods_are_placed_without_api(here: EmbeddedNode, token: str) -> None:
    """Served without the token it would tell everybody which pods run here."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        if token:
            here.plugin.config["http"] = {"tokenFile": "/nowhere/token"}
            said = "http.tokenFile"
        else:
            here.plugin.port = other.getsockname()[1]
            said = f"cannot listen on 127.0.0.1:{here.plugin.port}: another program has"
        here.start()
        here.logged("http not ")
        assert said in next(r for r in here.plugin.log().splitlines() if "http not " in r)
        assert created(here, "own", SINGLE, cpus=2).cpus == "0-1"
        assert here.plugin.terminate() == 0


def test_an_agent_on_a_socket_alone_is_asked_by_the_commands(here: EmbeddedNode) -> None:
    """No port, so no other user can ask; the configuration says where, or --api does."""
    path = here.directory / "api.sock"
    here.plugin.config["http"] = {"address": "off", "socket": str(path)}
    here.start()
    here.logged("http listening")
    assert created(here, "own", SINGLE, cpus=2).cpus == "0-1"
    until(path.exists, "the socket")
    configuration = here.directory / "asked.yaml"
    configuration.write_text(json.dumps({"http": {"address": "off", "socket": str(path)}}))
    for how in (f"--config={configuration}", f"--api=unix://{path}", f"--api={path}"):
        for command in (["status"], ["explain", "own"]):
            done = subprocess.run(
                [sys.executable, "-m", "nri_numa", *command, how], capture_output=True, text=True
            )
            assert (done.returncode, "0-1" in done.stdout) == (0, True), done


def test_nothing_of_the_server_is_loaded_before_the_link_stands(here: EmbeddedNode) -> None:
    """Containers wait for the registration, and nobody waits for the page."""
    interpreter(here, f"exec {sys.executable} -X importtime")
    here.start()
    assert here.plugin.get("/healthz")[0] == 200
    lines = here.plugin.log().splitlines()
    active = next(n for n, one in enumerate(lines) if '"state":"active"' in one)
    loaded = [(n, one) for n, one in enumerate(lines) if one.startswith("import time:")]
    before = {one.rpartition("|")[2].strip() for n, one in loaded if n < active}
    after = {one.rpartition("|")[2].strip() for n, one in loaded if n > active}
    assert {"h11", "nri_numa.web.server", "nri_numa.agent.view"} <= after
    assert not {n for n in before if n.startswith(("nri_numa.web", "h11", "aiohttp"))}
    assert not {n for n in before | after if n.split(".")[0] in ("aiohttp", "grpc")}


def test_off_means_off(here: EmbeddedNode) -> None:
    interpreter(here, f"exec {sys.executable} -X importtime")
    here.plugin.arguments.append("--http=off")
    here.start()
    created(here, "own", SINGLE, cpus=2)
    here.logged("container placed")
    assert here.plugin.terminate() == 0
    assert "nri_numa.web" not in here.plugin.log()
    assert "http listening" not in here.plugin.log()


def test_a_pod_that_starts_without_a_link_is_explained_and_noticed(node: EmbeddedNode) -> None:
    """It ran unpinned without a word, and ``explain`` knew nothing."""
    node.call(node.runtime.stop())
    node.logged('"state":"disconnected"')
    container = created(node, "db", SINGLE, cpus=2)
    node.begin(container)
    assert container.cpus == "0-31"
    since = r"no link to the runtime since 20[0-9: -]+ UTC \(.*\); containers that start"
    status, text = node.plugin.get("/v1/explain/default/db")
    assert status == 404
    assert re.search(since, text)
    for command in (("explain", "db"), ("explain", "default/db"), ("status",)):
        assert re.search(since, node.says(*command))
    node.call(node.runtime.start())
    until(
        lambda: any(one.get("missed_start") for one in node.plugin.records("container placed")),
        "it is placed",
    )
    # A runtime that is slow to carry its update out is noticed too, and that is no matter here.
    notices = node.plugin.json("/v1/notices")["notices"]
    assert [one["pod"] for one in notices if one["kind"] == "missed-start"] == ["db"]
    assert "There is no link" not in node.says("explain", "db")
    until(lambda: container.cpus == "0-1", "it has its CPUs")


@contextmanager
def attacked(node: EmbeddedNode, *attackers: Coroutine[Any, Any, None]) -> Iterator[None]:
    """Attackers at work; they go on until the end."""
    tasks = [node.submit(one) for one in attackers]
    try:
        yield
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()


def places_all(node: EmbeddedNode, count: int = 25) -> None:
    """Create containers one after the other: each is placed, and the runtime keeps the plugin."""
    for n in range(count):
        made = created(node, f"web-{n}", {"policy": "best-effort", "cpus": "shared"}, cpus=0.1)
        assert made.message.linux.resources.cpu.cpus, f"container {n} started unpinned"
    assert not node.runtime.closed


@pytest.mark.parametrize("path", ["/healthz", "/v1/status"])
def test_pipelining_clients_delay_nobody(here: EmbeddedNode, path: str) -> None:
    """As anybody on the node can: without the token, with probes or with what is refused."""
    token = here.directory / "token"
    token.write_text("0123456789abcdef")
    here.plugin.config["http"] = {"tokenFile": str(token)}
    here.start()
    assert here.plugin.get("/healthz")[0] == 200
    with attacked(here, *(flood(here.plugin.bound, path) for _ in range(4))):
        assert here.plugin.get(path)[0] in (200, 401)
        places_all(here)
        assert here.plugin.get("/healthz")[0] == 200
    assert here.plugin.terminate() == 0


def test_connections_that_never_finish_a_request_keep_no_probe_out(here: EmbeddedNode) -> None:
    """More than there are places and more than the reserve holds."""
    # 32 places, and 32 in the reserve
    interpreter(here, "ulimit -n 128;", f"exec {sys.executable}")
    here.start()
    assert here.plugin.get("/healthz")[0] == 200
    with attacked(here, *(linger(here.plugin.bound, b"GET /heal", 0.1) for _ in range(80))):
        until(lambda: here.plugin.get("/v1/status")[0] == 503, "all places are taken")
        places_all(here)
        for path in ("/healthz", "/readyz"):
            assert here.plugin.get(path)[0] == 200
    until(lambda: here.plugin.get("/metrics")[0] == 200, "there are places again")
    assert here.metric("nri_numa_http_connections_dropped_total") > 0
    assert here.plugin.terminate() == 0


def test_an_unread_log_stops_nothing(here: EmbeddedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers are placed, the lines wait for their reader, and SIGTERM ends the process."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    fcntl.fcntl(writing, 1031, 4096)  # F_SETPIPE_SZ: one page
    plugin = here.plugin
    monkeypatch.setattr(
        plugin,
        "_spawn",
        lambda: subprocess.Popen(plugin.words(), env=plugin.environment, stderr=writing),
    )
    try:
        here.start(wait=False)
        here.call(here.runtime.wait_for_plugin())
        places_all(here, 60)
        text = ""
        while '"pod":"default/web-59"' not in text:
            time.sleep(0.01)
            with suppress(BlockingIOError):
                text += os.read(reading, 1 << 20).decode()
        for n in range(60):
            assert f'"pod":"default/web-{n}"' in text
        places_all(here, 60)
        assert plugin.terminate() == 0
    finally:
        os.close(reading)
        os.close(writing)
