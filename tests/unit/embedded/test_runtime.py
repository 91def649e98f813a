"""The embedded runtime without a plugin: operations out of order, and what a machine cannot do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from nri_numa.nri.wire.pb import nri_pb2 as pb
from tests.beds.embedded.runtime import (
    ContainerState,
    CRIError,
    EmbeddedPod,
    EmbeddedRuntime,
)
from tests.beds.recording_plugin import pin

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[EmbeddedRuntime]:
    async with EmbeddedRuntime(str(tmp_path / "nri.sock"), cpus="0-7", mems="0-1") as made:
        yield made


async def web(runtime: EmbeddedRuntime) -> EmbeddedPod:
    return await runtime.run_pod(pb.PodSandbox(name="web", namespace="default"))


async def test_without_a_plugin_a_container_gets_what_it_asked_for(
    runtime: EmbeddedRuntime,
) -> None:
    pod = await web(runtime)
    asked = pb.Container(name="app")
    asked.linux.resources.CopyFrom(pin("2-3", "1"))
    app = await runtime.create_container(pod.id, asked)
    other = await runtime.create_container(pod.id, pb.Container(name="other"))
    assert (app.cpus, app.mems, app.state) == ("2-3", "1", ContainerState.CREATED)
    assert (other.cpus, other.mems, other.name) == ("0-7", "0-1", "other")
    assert app.message.labels["io.kubernetes.pod.name"] == "web"
    assert len(app.id) == 64
    assert asked.id == ""  # what is handed in is not changed
    assert list(runtime.containers) == [app.id, other.id]


async def test_ids_repeat_from_run_to_run(tmp_path: Path) -> None:
    ids = []
    for number in range(2):
        async with EmbeddedRuntime(str(tmp_path / f"{number}.sock")) as runtime:
            ids.append((await web(runtime)).id)
    assert ids[0] == ids[1]


async def test_what_does_not_exist_is_named(runtime: EmbeddedRuntime) -> None:
    with pytest.raises(CRIError, match="sandbox nope: not found"):
        await runtime.create_container("nope", pb.Container())
    for pod_operation in (runtime.stop_pod, runtime.remove_pod):
        with pytest.raises(CRIError, match="sandbox nope: not found"):
            await pod_operation("nope")
    for operation in (
        runtime.start_container,
        runtime.stop_container,
        runtime.exit_container,
        runtime.remove_container,
    ):
        with pytest.raises(CRIError, match="container nope: not found"):
            await operation("nope")


async def test_operations_out_of_order_fail(runtime: EmbeddedRuntime) -> None:
    pod = await web(runtime)
    app = await runtime.create_container(pod.id, pb.Container(name="app"))
    await runtime.start_container(app.id)
    with pytest.raises(CRIError, match="is running"):
        await runtime.start_container(app.id)
    await runtime.stop_container(app.id)
    with pytest.raises(CRIError, match="is exited"):
        await runtime.update_container(app.id, pin("1"))
    await runtime.stop_pod(pod.id)
    await runtime.stop_pod(pod.id)
    with pytest.raises(CRIError, match="is not running"):
        await runtime.create_container(pod.id, pb.Container(name="late"))
    await runtime.remove_pod(pod.id)
    assert not runtime.containers
    assert not runtime.pods


@pytest.mark.parametrize(
    ("cpus", "mems", "problem"),
    [
        ("8", "", r"cpuset.cpus 8: numerical result out of range"),
        ("", "2", r"cpuset.mems 2: numerical result out of range"),
        ("3-1", "", "invalid argument"),
    ],
)
async def test_a_cpuset_the_machine_does_not_have_fails_where_the_kernel_would(
    runtime: EmbeddedRuntime, cpus: str, mems: str, problem: str
) -> None:
    """At the start of a created container, at once for a running one."""
    pod = await web(runtime)
    bad = pb.Container(name="bad")
    bad.linux.resources.CopyFrom(pin(cpus, mems))
    created = await runtime.create_container(pod.id, bad)
    with pytest.raises(CRIError, match=problem):
        await runtime.start_container(created.id)
    running = await runtime.create_container(pod.id, pb.Container(name="good"))
    await runtime.start_container(running.id)
    with pytest.raises(CRIError, match=problem):
        await runtime.update_container(running.id, pin(cpus, mems))
    assert (running.cpus, running.mems) == ("0-7", "0-1")


async def test_zeros_in_an_update_mean_leave_alone(runtime: EmbeddedRuntime) -> None:
    """The kubelet's cpuset-only update carries shares, quota, period and limit of zero."""
    pod = await web(runtime)
    asked = pb.Container(name="app")
    asked.linux.resources.cpu.shares.value = 512
    asked.linux.resources.memory.limit.value = 1 << 30
    app = await runtime.create_container(pod.id, asked)
    await runtime.update_container(app.id, pin("1"))
    resources = app.message.linux.resources
    assert (resources.cpu.cpus, resources.cpu.shares.value) == ("1", 512)
    assert resources.memory.limit.value == 1 << 30
    assert not resources.cpu.HasField("quota")


async def test_nobody_connecting_is_a_timeout(runtime: EmbeddedRuntime) -> None:
    with pytest.raises(TimeoutError):
        await runtime.wait_for_plugin(limit=0.01)


async def test_stopping_twice_is_harmless(tmp_path: Path) -> None:
    runtime = EmbeddedRuntime(str(tmp_path / "nri.sock"))
    await runtime.stop()
    await runtime.start()
    await runtime.stop()
    await runtime.stop()
