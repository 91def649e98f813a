"""The link to the runtime breaks: resets in every message, a hanging plugin, other sockets."""

import contextlib
import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from nri_numa.demo.runtime import PodOperationFailed
from nri_numa.model.cpuset import CPUSet
from nri_numa.nri.wire.pb import nri_pb2 as pb
from tests.beds.embedded_node import RUNTIMES, THOROUGH, EmbeddedNode, until


def life(node: EmbeddedNode, name: str) -> None:
    pod = node.pod(name, {"policy": "single-numa-node"})
    container = node.create(pod, cpus=2)
    node.begin(container)
    more = pb.LinuxResources()
    more.cpu.shares.value = 2000
    node.call(node.runtime.update_container(container.id, more))
    node.call(node.runtime.update_pod(pod.id, more))
    node.call(node.runtime.stop_container(container.id))
    node.call(node.runtime.remove_container(container.id))
    node.call(node.runtime.stop_pod(pod.id))
    node.call(node.runtime.remove_pod(pod.id))


def test_a_reset_in_the_middle_of_every_message(node: EmbeddedNode) -> None:
    """The request is cut, the connection gone: the runtime goes on, and so do we."""
    life(node, "dry")
    # UpdatePodSandbox first: a runtime that hangs up soon after it was told which events we want
    # is taken for an old one, and is asked for the oldest events only from then on.
    methods = sorted(
        {call.method for call in node.runtime.calls}, key=lambda m: (m != "UpdatePodSandbox", m)
    )
    assert {"Configure", "Synchronize", "CreateContainer", "StopContainer"} <= set(methods)
    for number, method in enumerate(methods):
        before = node.connections
        node.runtime.faults.drop_in = method
        if method in ("Configure", "Synchronize"):
            node.call(node.runtime.disconnect_plugins())
            node.new_socket()
        else:
            life(node, f"cut{number}")
        until(lambda: not node.runtime.faults.drop_in, f"{method} was cut")
        node.new_socket()  # ends the plugin's pause, which grows with every failure
        node.reconnected(before)
        node.check()
    node.usable()
    assert node.metric("nri_numa_link_registrations_total") >= len(methods)
    node.logged('"state":"disconnected"')


@pytest.mark.parametrize("bare", [{"request_timeout": 0.5}], indirect=True, ids=["impatient"])
def test_a_plugin_that_hangs_is_dropped_and_recovers(node: EmbeddedNode) -> None:
    """What started meanwhile is found, pinned, counted and said; what ran does not move."""
    before = node.connections
    os.kill(node.plugin.pid, signal.SIGSTOP)
    try:
        missed = node.listed("missed", "2")
        grabbed = node.owner("grabbed")
        plain = node.free("plain")
        assert missed.cpus == str(node.topology.online)
        assert not node.runtime.plugins, "the runtime gave it up"
    finally:
        os.kill(node.plugin.pid, signal.SIGCONT)
    node.reconnected(before)
    until(lambda: missed.cpus == "2", "the missed one is pinned")
    until(lambda: len(CPUSet.parse(grabbed.cpus)) == 2, "the owner has its own")
    node.check()
    assert not CPUSet.parse(plain.cpus) & CPUSet.parse(grabbed.cpus)
    assert node.metric("nri_numa_missed_starts_total") == 3
    node.logged('"missed_starts":3')
    node.logged("the runtime closed the connection before the answer")
    node.usable()


@pytest.mark.parametrize("bare", RUNTIMES.values(), indirect=True, ids=RUNTIMES)
def test_the_runtime_dies_and_comes_back(node: EmbeddedNode) -> None:
    process = node.plugin.pid
    for _ in range(3):
        before = node.connections
        node.restart_runtime()
        node.reconnected(before)
        node.check()
    assert node.plugin.pid == process
    assert node.metric("nri_numa_link_up") == 1
    assert node.metric("nri_numa_link_registrations_total") == 4
    node.usable()


def test_a_runtime_that_answers_no_registration_is_said_until_it_does(tmp_path: Path) -> None:
    """No pod starts any more and no request comes: only a call of ours without an answer tells."""
    with EmbeddedNode(tmp_path, config={"runtime": {"registrationTimeout": "1s"}}) as node:
        node.start()
        assert node.metric("nri_numa_registration_pending_seconds") == 0
        node.runtime.faults.delays["Synchronize"] = 3600
        before = node.connections
        node.restart_runtime()
        node.logged("runtime call unanswered")
        status, text = node.plugin.get("/readyz")
        assert status == 503
        assert "has not answered a registration" in text
        assert node.metric("nri_numa_registration_pending_seconds") >= 1
        [line] = [r for r in node.plugin.records() if r["msg"] == "runtime call unanswered"]
        assert "restart the runtime" in line["remedy"]
        node.runtime.faults.delays.clear()
        node.restart_runtime()
        node.reconnected(before)
        node.logged("runtime call answered")
        assert node.metric("nri_numa_registration_pending_seconds") == 0


INSTEAD = ["deaf socket", "file", "nothing", "directory", "dangling link"]


@pytest.mark.parametrize("instead", INSTEAD if THOROUGH else INSTEAD[:2])
def test_the_socket_is_replaced(node: EmbeddedNode, instead: str) -> None:
    """Whatever lies where the socket was: it is said, waited out, and the new socket is found."""
    before = node.connections
    node.call(node.runtime.stop())
    node.socket.unlink(missing_ok=True)
    deaf = socket.socket(socket.AF_UNIX)
    match instead:
        case "file":
            node.socket.write_text("not a socket\n")
        case "directory":
            node.socket.mkdir()
        case "dangling link":
            node.socket.symlink_to(node.directory / "nowhere")
        case "deaf socket":
            deaf.bind(str(node.socket))  # bound and not listening, as after a kill -9
        case _:
            pass
    tries = node.plugin.log().count('"state":"disconnected"')
    until(
        lambda: node.plugin.log().count('"state":"disconnected"') > tries or tries > 1,
        "it dialled in vain",
    )
    if instead == "directory":
        node.socket.rmdir()
    node.call(node.runtime.start())
    node.reconnected(before)
    deaf.close()
    node.check()


def test_a_refusal_of_the_second_look_is_no_reason_to_start_unpinned(node: EmbeddedNode) -> None:
    """Cut while a container is refused: it is created without us, found, and stays visible."""
    with pytest.raises(PodOperationFailed, match="default/bad"):
        node.listed("bad", "3-1")
    before = node.connections
    node.runtime.faults.drop_in = "CreateContainer"
    bad = node.listed("worse", "3-1")
    assert bad.cpus == str(node.topology.online)
    node.new_socket()
    node.reconnected(before)
    node.logged("started while we were away and stays unpinned")
    node.check()
    assert node.metric("nri_numa_missed_starts_total") == 1


def test_garbage_from_the_runtime_is_counted_said_and_survived(node: EmbeddedNode) -> None:
    """The link is closed and dialled again; nothing that was placed is touched."""
    before = node.connections
    node.call(node.runtime.stop())
    node.socket.unlink(missing_ok=True)
    babbler = socket.socket(socket.AF_UNIX)
    babbler.bind(str(node.socket))
    babbler.listen(4)

    def babble() -> None:
        connection, _ = babbler.accept()
        # It hangs up in the middle, or after the last byte, or says something.
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.recv(1)

    thread = threading.Thread(target=babble, daemon=True)
    thread.start()
    until(lambda: node.metric("nri_numa_protocol_errors_total") >= 1, "it is counted")
    until(lambda: "the peer broke the protocol" in node.plugin.log(), "and said")
    thread.join(10)
    babbler.close()
    node.socket.unlink()
    node.call(node.runtime.start())
    node.reconnected(before)
    node.check()
    assert node.metric("nri_numa_internal_errors_total") == 0
