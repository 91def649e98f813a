"""The real process: started, given pods by a runtime over its socket, and asked over HTTP."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from bench.attacker import flood, linger
from nri_numa.model.cpuset import CPUSet
from nri_numa.nri.wire.pb import nri_pb2 as pb
from tests.beds.embedded.runtime import EmbeddedRuntime
from tests.beds.embedded.world import CRIError, EmbeddedContainer
from tests.beds.http_view import connected, get, in_loop
from tests.beds.plugin_process import plugin_environment
from tests.machines import named as machines

PREFIX = "numa.kubernetes.io/"
GIB = 1 << 30
SINGLE = {"policy": "single-numa-node"}


class Node:
    """A runtime, and the plugin as a process of its own."""

    def __init__(self, directory: Path, runtime: EmbeddedRuntime | None) -> None:
        self.directory = directory
        self.runtime = runtime
        self.process: asyncio.subprocess.Process
        self.lines: list[str] = []
        self._grown = asyncio.Condition()
        self._reader: asyncio.Task[None]

    async def start(
        self,
        http: str,
        environment: Mapping[str, str],
        *python: str,
        stderr: int = asyncio.subprocess.PIPE,
        files: int = 1024,
    ) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *python,
            "-m",
            "nri_numa",
            "run",
            f"--nri-socket={self.directory / 'nri.sock'}",
            f"--state-dir={self.directory / 'state'}",
            f"--sysfs-root={self.directory / 'root'}",
            f"--http={http}",
            env=plugin_environment(environment),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=stderr,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
        )
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        if self.process.stderr is None:
            return
        async for line in self.process.stderr:
            async with self._grown:
                self.lines.append(line.decode().rstrip())
                self._grown.notify_all()

    async def line(self, *parts: str) -> str:
        """The first log line with all these parts; waits for it."""

        def found() -> str:
            return next((one for one in self.lines if all(p in one for p in parts)), "")

        async with asyncio.timeout(180), self._grown:
            await self._grown.wait_for(found)
        return found()

    async def address(self) -> tuple[str, int]:
        match = re.search(r"address=127\.0\.0\.1:([0-9]+)", await self.line('"http listening"'))
        assert match is not None
        return "127.0.0.1", int(match[1])

    async def get(self, target: str, status: int = 200) -> Any:
        reply = await get(await self.address(), target)
        assert reply.status == status, reply.body
        return reply.json

    async def metrics(self) -> dict[str, float]:
        reply = await get(await self.address(), "/metrics")
        assert reply.status == 200
        rows = (line.rpartition(" ") for line in reply.body.decode().splitlines())
        return {name: float(value) for name, _, value in rows if not name.startswith("#")}

    async def create(
        self, name: str, annotations: Mapping[str, str], cpus: float = 0, memory: int = 0
    ) -> EmbeddedContainer:
        """A container of a Guaranteed pod, as the kubelet would ask for it."""
        assert self.runtime is not None
        pod = pb.PodSandbox(
            name=name,
            namespace="shop",
            uid=f"uid-{name}",
            annotations={PREFIX + key: value for key, value in annotations.items()},
        )
        pod.linux.cgroup_parent = f"/kubepods/pod{name}"
        sandbox = await self.runtime.run_pod(pod)
        container = pb.Container(name="app")
        if cpus:
            container.linux.resources.cpu.quota.value = int(cpus * 100_000)
            container.linux.resources.cpu.period.value = 100_000
            container.linux.resources.cpu.shares.value = int(cpus * 1024)
        if memory:
            container.linux.resources.memory.limit.value = memory
        return await self.runtime.create_container(sandbox.id, container)

    async def says(self, *command: str, status: int | None = None) -> str:
        """What a command that asks the agent writes, in one line."""
        host, port = await self.address()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "nri_numa", *command, "--api", f"http://{host}:{port}"),
            env=plugin_environment(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        assert status in (None, process.returncode)
        return " ".join(output.decode().split())

    async def stop(self) -> int:
        """End the process as systemd does; its exit code."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(180):
            code = await self.process.wait()
        await self._reader
        return code


@asynccontextmanager
async def node(
    directory: Path,
    *python: str,
    http: str = "127.0.0.1:0",
    runtime: bool = True,
    environment: Mapping[str, str] | None = None,
    stderr: int = asyncio.subprocess.PIPE,
    files: int = 1024,
) -> AsyncIterator[Node]:
    """Two sockets, four NUMA nodes of 8 CPUs and 16 GiB; NUMA node 0 is CPUs 0-3,16-19."""
    topology = machines.snc_smt()
    machines.write_sysfs(directory / "root", topology)
    if not runtime:
        made = Node(directory, None)
        await made.start(http, environment or {}, *python)
        try:
            yield made
        finally:
            await made.stop()
        return
    path = str(directory / "nri.sock")
    async with EmbeddedRuntime(
        path, cpus=str(topology.online), mems=str(topology.memory_nodes)
    ) as embedded:
        made = Node(directory, embedded)
        await made.start(http, environment or {}, *python, stderr=stderr, files=files)
        try:
            await embedded.wait_for_plugin()
            yield made
        finally:
            await made.stop()


@in_loop
async def test_the_pods_sum_is_kept_from_run_pod_sandbox_on(tmp_path: Path) -> None:
    """``scope: pod``: nobody else gets its CPUs while its first image is still being pulled."""
    async with node(tmp_path) as here:
        assert here.runtime is not None
        pod = pb.PodSandbox(name="whole", namespace="shop", uid="uid-whole")
        pod.annotations.update({PREFIX + "policy": "single-numa-node", PREFIX + "scope": "pod"})
        pod.linux.cgroup_parent = "/kubepods/podwhole"
        pod.linux.pod_resources.cpu.quota.value = 700_000
        pod.linux.pod_resources.cpu.period.value = 100_000
        pod.linux.pod_resources.memory.limit.value = GIB
        sandbox = await here.runtime.run_pod(pod)
        (kept,) = (await here.get("/v1/assignments"))["containers"]
        assert (kept["pod"], kept["container"], kept["kind"]) == ("whole", "*", "kept")
        assert len(CPUSet.parse(kept["cpus"])) == 7
        await here.runtime.stop_pod(sandbox.id)
        assert (await here.get("/v1/assignments"))["containers"] == []


@in_loop
async def test_the_api_tells_what_the_runtime_was_told(tmp_path: Path) -> None:
    """Metrics, lists and explanations agree with the cpusets the containers really got."""
    async with node(tmp_path) as here:
        plain = await here.create("plain", {})
        listed = await here.create("listed", {"numacpu": "1,9", "numamem": "0"})
        own = await here.create("own", SINGLE, cpus=4, memory=4 * GIB)
        with pytest.raises(CRIError, match="9 exclusive CPUs needed, more"):
            await here.create("big", SINGLE, cpus=9, memory=4 * GIB)
        shared = await here.create("shared", {"policy": "best-effort"}, cpus=1.5)
        assert here.runtime is not None

        by_pod = {c["pod"]: c for c in (await here.get("/v1/assignments"))["containers"]}
        for name, made, kind in (
            ("plain", plain, "unbound"),
            ("listed", listed, "explicit"),
            ("own", own, "exclusive"),
            ("shared", shared, "shared"),
        ):
            has = here.runtime.containers[made.id]
            assert by_pod[name]["id"] == made.id
            assert by_pod[name]["kind"] == kind
            assert by_pod[name]["cpus"] == has.cpus
            if by_pod[name]["mems"]:
                assert by_pod[name]["mems"] == has.mems
            assert by_pod[name]["preferred"]
        filtered = await here.get("/v1/assignments?namespace=shop&pod=own")
        assert [c["pod"] for c in filtered["containers"]] == ["own"]

        samples = await here.metrics()
        for kind in ("unbound", "explicit", "exclusive", "shared"):
            assert samples[f'nri_numa_containers{{kind="{kind}",preferred="true"}}'] == 1
        assert samples['nri_numa_containers{kind="foreign",preferred="true"}'] == 0
        i = by_pod["own"]["numaNodes"]
        label = f'{{numa_node="{i}"}}'
        assert samples[f'nri_numa_numa_node_cpus{{numa_node="{i}",state="exclusive"}}'] == 4
        assert samples[f'nri_numa_numa_node_cpus{{numa_node="{i}",state="shared"}}'] == 4
        assert samples[f"nri_numa_numa_node_available_cpus{label}"] == 4
        assert samples[f"nri_numa_numa_node_memory_bytes{label}"] == 16 * GIB
        assert samples[f"nri_numa_numa_node_memory_allocated_bytes{label}"] == 4 * GIB
        assert samples[f"nri_numa_numa_node_memory_available_bytes{label}"] <= 12 * GIB
        assert samples["nri_numa_shared_pool_cpus"] == 28
        assert samples["nri_numa_link_up"] == samples["nri_numa_http_up"] == 1
        assert samples["nri_numa_internal_errors_total"] == 0
        assert samples["nri_numa_invariant_violations_total"] == 0
        written = samples["nri_numa_checkpoint_written_timestamp_seconds"]
        assert abs(time.time() - written) < 60
        assert samples["nri_numa_config_last_reload_successful"] == 1
        status = await here.get("/v1/status")
        assert samples[f'nri_numa_node_info{{node_name="{status["nodeName"]}"}}'] == 1
        assert samples["nri_numa_checkpoint_write_seconds_count"] >= 4
        refused = (
            'nri_numa_decisions_total{outcome="refused",policy="single-numa-node",'
            'reason="TopologyAffinityError"}'
        )
        assert samples[refused] == 1

        (one,) = (await here.get("/v1/explain/shop/own"))["explanations"]
        assert one["outcome"] == "admitted"
        assert one["assignment"]["cpus"] == own.cpus
        steps = " ".join(one["steps"])
        assert f"It runs on exclusive CPUs {by_pod['own']['cpus']}" in steps
        assert (
            "It asked for 4 exclusive CPUs and 4 GiB on one NUMA node (annotation "
            "numa.kubernetes.io/policy: single-numa-node)."
        ) in steps
        assert one["details"]["pool"]["after"] != one["details"]["pool"]["before"]

        (one,) = (await here.get("/v1/explain/shop/big/app"))["explanations"]
        assert one["outcome"] == "refused"
        assert one["refusal"]["reason"] == "TopologyAffinityError"
        assert one["details"]["refusal"]["rule"] in " ".join(one["steps"])
        cpu = one["details"]["resources"][0]
        assert cpu["needed"] == 9
        assert len(cpu["numaNodes"]) == 4
        assert not any(n["enough"] for n in cpu["numaNodes"])
        assert [r["pod"] for r in (await here.get("/v1/refusals"))["refusals"]] == ["big"]
        text = await here.says("explain", "-v", "shop/big", status=1)
        assert "The rule: policy single-numa-node admits one NUMA node only." in text
        assert re.search(r"Free on NUMA nodes? [0-9,-]+( each)?: [0-9] of 8 CPUs", text)
        missing = await here.get("/v1/explain/shop/nobody", 404)
        assert "shop/nobody" in missing["error"]["message"]

        # What its pod gives back when it ends is seen as well.
        await here.runtime.stop_container(own.id)
        await here.runtime.stop_pod(own.message.pod_sandbox_id)
        samples = await here.metrics()
        assert samples['nri_numa_containers{kind="exclusive",preferred="true"}'] == 0
        assert samples["nri_numa_shared_pool_cpus"] == 32
        assert (await here.get("/v1/explain/shop/own", 404))["error"]["reason"] == "NotFound"
    assert "Traceback" not in "\n".join(here.lines)


@in_loop
async def test_machine_health_and_readiness_are_answered(tmp_path: Path) -> None:
    async with node(tmp_path) as here:
        assert await here.get("/v2/system/numa/info") == {
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
        assert (await here.get("/readyz")) == {"ready": True, "reason": ""}
        reply = await get(await here.address(), "/healthz")
        assert (reply.status, reply.body) == (200, b"ok\n")
        status = await here.get("/v1/status")
        assert status["link"]["state"] == "active"
        assert status["link"]["runtime"] == "containerd"
        assert status["observe"] is False
        topology = await here.get("/v1/topology")
        assert topology["counts"]["numaNodes"] == 4
        assert (await get(await here.address(), "/")).status in (200, 404)


@in_loop
async def test_changes_are_sent_as_they_happen(tmp_path: Path) -> None:
    """And an open stream does not keep the process from ending."""

    async def event(reader: asyncio.StreamReader) -> dict[str, Any]:
        async with asyncio.timeout(180):
            while True:
                line = await reader.readline()
                assert line, "the stream ended"
                if line.startswith(b"data: "):
                    found: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
                    return found

    async with node(tmp_path) as here:
        address = await here.address()
        async with connected(address) as (reader, writer):
            writer.write(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            first = await event(reader)
            assert first["ready"] is True
            await here.create("own", SINGLE, cpus=2, memory=GIB)
            second = await event(reader)
            assert second["serial"] > first["serial"]
            assert await here.stop() == 0


@in_loop
async def test_without_a_runtime_the_api_says_what_is_missing(tmp_path: Path) -> None:
    async with node(tmp_path, runtime=False) as here:
        readiness = await here.get("/readyz", 503)
        assert "disconnected" in readiness["reason"]
        assert str(tmp_path / "nri.sock") in readiness["reason"]
        assert (await here.get("/v1/status"))["ready"] is False
        samples = await here.metrics()
        assert samples["nri_numa_link_up"] == 0
        assert await here.stop() == 0


@in_loop
async def test_a_runtime_that_goes_away_is_not_ready_and_is_told(tmp_path: Path) -> None:
    async with node(tmp_path) as here:
        assert (await here.get("/readyz"))["ready"] is True
        assert here.runtime is not None
        async with connected(await here.address()) as (reader, writer):
            writer.write(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b'"ready":true')
            await here.runtime.stop()
            async with asyncio.timeout(180):
                await reader.readuntil(b'"ready":false')
            assert "disconnected" in (await here.get("/readyz", 503))["reason"]
            await here.runtime.start()
            async with asyncio.timeout(180):
                await reader.readuntil(b'"ready":true')
        assert (await here.get("/readyz"))["ready"] is True


@pytest.mark.parametrize("token", ["", "missing"])
@in_loop
async def test_without_a_port_or_its_token_there_is_no_api_and_containers_are_placed(
    tmp_path: Path, token: str
) -> None:
    """Served without the token it would tell everybody which pods run here."""
    given = {"NRI_NUMA_HTTP_TOKEN_FILE": str(tmp_path / token)} if token else {}
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        http = "127.0.0.1:0" if token else taken
        async with node(tmp_path, http=http, environment=given) as here:
            line = await here.line("no http")
            said = "http.tokenFile" if token else f"cannot listen on {taken}: another program has"
            assert said in line
            own = await here.create("own", SINGLE, cpus=2, memory=GIB)
            assert here.runtime is not None
            assert here.runtime.containers[own.id].cpus == "0-1"
            assert await here.stop() == 0


@in_loop
async def test_nothing_of_the_server_is_loaded_before_the_link_stands(tmp_path: Path) -> None:
    """Containers wait for the registration, and nobody waits for the page."""
    async with node(tmp_path, "-X", "importtime") as here:
        await here.address()
        active = here.lines.index(await here.line("msg=link", "state=active"))
        loaded = [n for n, one in enumerate(here.lines) if one.startswith("import time:")]
        before = {here.lines[n].rpartition("|")[2].strip() for n in loaded if n < active}
        after = {here.lines[n].rpartition("|")[2].strip() for n in loaded if n > active}
        assert {"h11", "nri_numa.web.server", "nri_numa.agent.view"} <= after
        assert not {n for n in before if n.startswith(("nri_numa.web", "h11", "aiohttp"))}
        assert not {n for n in before | after if n.split(".")[0] in ("aiohttp", "grpc")}


@in_loop
async def test_off_means_off(tmp_path: Path) -> None:
    async with node(tmp_path, "-X", "importtime", http="off") as here:
        await here.create("own", SINGLE, cpus=2, memory=GIB)
        await here.line("container placed")
        assert await here.stop() == 0
    assert not [one for one in here.lines if "nri_numa.web" in one or "http listening" in one]


@in_loop
async def test_a_pod_that_starts_without_a_link_is_explained_and_noticed(tmp_path: Path) -> None:
    """It ran unpinned without a word, and ``explain`` knew nothing."""
    async with node(tmp_path) as here:
        assert here.runtime is not None
        await here.runtime.stop()
        await here.line("msg=link", "disconnected")
        container = await here.create("db", SINGLE, cpus=2)
        await here.runtime.start_container(container.id)
        assert container.cpus == "0-31"
        since = (
            r"there is no link to the runtime since 20[0-9: -]+ UTC \(.*\): containers that start"
        )
        document = await here.get("/v1/explain/shop/db", 404)
        assert re.search(since, document["error"]["message"])
        for command in (("explain", "db"), ("explain", "shop/db"), ("status",)):
            assert re.search(since, await here.says(*command))
        await here.runtime.start()
        await here.line('"container placed"', "gap=true", "pod=shop/db")
        (notice,) = (await here.get("/v1/notices"))["notices"]
        assert (notice["what"], notice["pod"]) == ("gap", "db")
        assert "There is no link" not in await here.says("explain", "db")
        assert container.cpus == "0-1"


@asynccontextmanager
async def attacked(*attackers: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Attackers at work; they go on until the end."""
    tasks = [asyncio.ensure_future(one) for one in attackers]
    try:
        await asyncio.sleep(0)
        yield
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def places_all(here: Node, count: int = 25) -> None:
    """Create containers one after the other: each is placed, and the runtime keeps the plugin."""
    assert here.runtime is not None
    for n in range(count):
        made = await here.create(f"web-{n}", {"policy": "best-effort", "cpus": "shared"}, cpus=0.1)
        assert here.runtime.containers[made.id].cpus, f"container {n} started unpinned"
    assert not here.runtime.closed


@pytest.mark.parametrize("path", ["/healthz", "/v1/status"])
@in_loop
async def test_pipelining_clients_delay_nobody(tmp_path: Path, path: str) -> None:
    """As anybody on the node can: without the token, with probes or with what is refused."""
    (tmp_path / "token").write_text("0123456789abcdef")
    token = {"NRI_NUMA_HTTP_TOKEN_FILE": str(tmp_path / "token")}

    async with node(tmp_path, environment=token) as here:
        address = await here.address()
        async with attacked(*(flood(address[1], path) for _ in range(4))):
            assert (await get(address, path)).status in (200, 401)
            await places_all(here)
            assert (await get(address, "/healthz")).status == 200
        assert await here.stop() == 0


@in_loop
async def test_connections_that_never_finish_a_request_keep_no_probe_out(tmp_path: Path) -> None:
    """More than there are places and more than the reserve holds."""
    async with node(tmp_path, files=128) as here:  # 32 places, and 32 in the reserve
        address = await here.address()
        async with attacked(*(linger(address[1], b"GET /heal", 0.1) for _ in range(80))):
            while (await get(address, "/v1/status")).status != 503:
                pass
            await places_all(here)
            for path in ("/healthz", "/readyz"):
                assert (await get(address, path)).status == 200
        while (reply := await get(address, "/metrics")).status != 200:
            pass
        assert b"nri_numa_http_dropped_total 0.0" not in reply.body
        assert await here.stop() == 0


@in_loop
async def test_a_log_that_nobody_reads_stops_nothing(tmp_path: Path) -> None:
    """Containers are placed, the lines wait for their reader, and SIGTERM ends the process."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    fcntl.fcntl(writing, 1031, 4096)  # F_SETPIPE_SZ: one page
    debug = {"NRI_NUMA_LOG_LEVEL": "debug"}
    try:
        async with node(tmp_path, environment=debug, stderr=writing) as here:
            await places_all(here, 60)
            text = ""
            while "pod=shop/web-59" not in text:
                await asyncio.sleep(0.01)
                with suppress(BlockingIOError):
                    text += os.read(reading, 1 << 20).decode()
            for n in range(60):
                assert f"pod=shop/web-{n} " in text
            await places_all(here, 60)
            assert await here.stop() == 0
    finally:
        os.close(reading)
        os.close(writing)
