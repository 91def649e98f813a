"""The NRI session: captured conversations, both roles joined, and every way to break the rules."""

import struct
from typing import Any

import pytest

from nri_numa.errors import LocalProtocolError, RemoteProtocolError
from nri_numa.nri.wire import events as ev
from nri_numa.nri.wire import ttrpc
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.pb import ttrpc_pb2
from nri_numa.nri.wire.session import PLUGIN_METHODS, Phase, PluginSession, RuntimeSession
from nri_numa.nri.wire.versions import AGENT_EVENTS, Event
from tests.beds.wire import SessionPair, drain, golden, request_frame


def answers_of(session: Any) -> dict[int, ttrpc_pb2.Response]:
    """Read what a session wants to send as responses, by stream."""
    trunk, reader, found = ttrpc.Trunk(), ttrpc.MessageReader(), {}
    trunk.receive_data(session.data_to_send())
    while (chunk := trunk.next_chunk()) is not None:
        reader.receive_data(chunk[1])
        while (message := reader.next_message()) is not None:
            assert message[1] == ttrpc.MessageType.RESPONSE
            found[message[0]] = ttrpc_pb2.Response.FromString(message[2])
    return found


def to_runtime(stream: int, method: str) -> bytes:
    """A request of a plugin."""
    return request_frame(
        stream,
        method,
        service="nri.pkg.api.v1alpha1.Runtime",
        connection=ttrpc.RUNTIME_CONNECTION_ID,
    )


# --- captured conversations ---------------------------------------------------------------------


def test_a_captured_registration_is_spoken_byte_for_byte() -> None:
    """With containerd 2.1.9: register, configure, an empty synchronisation."""
    session = PluginSession()
    session.register_plugin("numapin", "10", timeout=5)
    assert session.data_to_send() == golden("register-plugin")

    session.receive_data(golden("register-plugin-reply"))
    assert drain(session) == [ev.RegistrationAnswered(None)]
    session.receive_data(golden("configure-containerd-2.1.9"))
    (configure,) = drain(session)
    assert configure.info.name == "containerd"
    assert configure.info.version == "2.1.9+unknown"
    assert configure.info.nri_version == ""
    assert configure.info.registration_timeout == 5.0
    assert configure.info.request_timeout == 2.0
    assert configure.info.config == ""
    session.reply(configure.stream, pb.ConfigureResponse(events=0x68F))
    assert session.data_to_send() == golden("configure-reply")

    session.receive_data(golden("synchronize-empty"))
    (synchronize,) = drain(session)
    assert (list(synchronize.pods), list(synchronize.containers)) == ([], [])
    session.reply(synchronize.stream, pb.SynchronizeResponse())
    assert session.data_to_send() == golden("synchronize-reply")
    assert session.phase is Phase.ACTIVE


def test_a_captured_nri_0_12_conversation() -> None:
    """The library of NRI 0.12.2: its version, a running container, an event, an update."""
    session = PluginSession()
    session.register_plugin("numapin", "10")
    session.data_to_send()
    session.receive_data(golden("register-plugin-reply") + golden("configure-nri-0.12.2"))
    _, configure = drain(session)
    assert configure.info.nri_version == "v0.12.2"
    session.reply(configure.stream, pb.ConfigureResponse(events=0x68F))

    session.receive_data(golden("synchronize-one-container"))
    (synchronize,) = drain(session)
    assert [(pod.id, pod.name) for pod in synchronize.pods] == [("pod0", "pod0")]
    (container,) = synchronize.containers
    assert (container.id, container.pod_sandbox_id, container.state) == (
        "ctr0",
        "pod0",
        pb.CONTAINER_RUNNING,
    )
    session.reply(synchronize.stream)
    session.receive_data(golden("run-pod-sandbox"))
    (run,) = drain(session)
    assert (run.event, run.message.pod.id) == (Event.RUN_POD_SANDBOX, "pod0")
    session.reply_error(run.stream, "method RunPodSandbox", ttrpc.Code.UNIMPLEMENTED)
    assert session.data_to_send().endswith(golden("run-pod-sandbox-unimplemented"))
    session.receive_data(golden("state-change-run-pod"))
    (again,) = drain(session)
    assert (again.event, again.message.pod) == (run.event, run.message.pod)


def test_a_captured_update_and_the_answers_that_pin() -> None:
    session = SessionPair().active().plugin
    session.receive_data(golden("update-container"))
    (asked,) = drain(session)
    assert asked.message.container.id == "ctr0"
    assert asked.message.linux_resources.cpu.cpus == "0-1"
    assert asked.message.linux_resources.HasField("memory")  # present and empty
    update = pb.ContainerUpdate(container_id="ctr0")
    update.linux.resources.cpu.cpus, update.linux.resources.cpu.mems = "3", "0"
    session.reply(asked.stream, pb.UpdateContainerResponse(update=[update]))
    assert session.data_to_send() == golden("update-container-reply")

    other = SessionPair().active().plugin
    other.receive_data(request_frame(7, "CreateContainer"))
    (create,) = drain(other)
    response = pb.CreateContainerResponse()
    response.adjust.linux.resources.cpu.cpus = "2-3"
    response.adjust.linux.resources.cpu.mems = "0"
    other.reply(create.stream, response)
    assert other.data_to_send() == golden("create-container-reply")


def test_a_captured_unsolicited_update() -> None:
    session = SessionPair().active().plugin
    update = pb.ContainerUpdate(
        container_id="f370c00ec9c206e71059b9b75b50e79417541ec8931c1ffcf0183681bf4abdfc",
        ignore_failure=True,
    )
    update.linux.resources.cpu.cpus, update.linux.resources.cpu.mems = "1", "0"
    assert session.update_containers(pb.UpdateContainersRequest(update=[update])) == 3
    assert session.data_to_send() == golden("update-containers")


# --- the handshake -------------------------------------------------------------------------------


def test_configure_and_synchronize_in_one_packet_are_served_in_turn() -> None:
    """The runtime may not wait; the answer to the first makes the second legal."""
    pair = SessionPair()
    pair.plugin.register_plugin("numapin", "10")
    pair.plugin.receive_data(request_frame(1, "Configure") + request_frame(3, "Synchronize"))
    configure = pair.plugin.next_event()
    pair.plugin.reply(configure.stream, pb.ConfigureResponse(events=1))
    assert isinstance(pair.plugin.next_event(), ev.SynchronizeRequested)


def test_a_second_registration_is_accepted_and_ignored_by_a_runtime() -> None:
    pair = SessionPair().active()
    pair.runtime.receive_data(to_runtime(99, "RegisterPlugin"))
    assert drain(pair.runtime) == []
    assert list(answers_of(pair.runtime)) == [99]
    assert pair.runtime.phase is Phase.ACTIVE


def test_a_name_no_runtime_takes_is_not_even_sent_and_another_once() -> None:
    session = PluginSession()
    with pytest.raises(LocalProtocolError, match="plugin"):
        session.register_plugin("a b", "10")
    assert session.data_to_send() == b""
    session.register_plugin("x", "10")
    with pytest.raises(LocalProtocolError, match="registered already"):
        session.register_plugin("x", "10")
    with pytest.raises(LocalProtocolError, match="UpdateContainers is illegal while registering"):
        session.update_containers(pb.UpdateContainersRequest())


# --- Synchronize ---------------------------------------------------------------------------------


def test_slices_are_collected_and_each_is_echoed() -> None:
    """An answer without `more` to a slice with it makes the runtime drop the plugin."""
    pair = SessionPair().configured()
    containers = [pb.Container(id=f"c{number}") for number in range(3)]
    slices = [
        pb.SynchronizeRequest(containers=containers[:2], more=True),
        pb.SynchronizeRequest(more=True),
        pb.SynchronizeRequest(pods=[pb.PodSandbox(id="p")], more=True),
    ]
    for request in slices:
        pair.runtime.call_plugin("Synchronize", request)
        assert pair.to_plugin() == []
        (answered,) = pair.to_runtime()
        assert pb.SynchronizeResponse.FromString(answered.payload).more
    pair.runtime.call_plugin("Synchronize", pb.SynchronizeRequest(containers=containers[2:]))
    (event,) = pair.to_plugin()
    assert list(event.containers) == containers
    assert [pod.id for pod in event.pods] == ["p"]
    pair.plugin.reply(event.stream, pb.SynchronizeResponse())
    assert len(pair.to_runtime()) == 1
    assert pair.runtime.phase is Phase.ACTIVE


def test_a_second_synchronize_replaces_the_picture() -> None:
    pair = SessionPair().active()
    pair.runtime.call_plugin("Synchronize", pb.SynchronizeRequest(pods=[pb.PodSandbox(id="p")]))
    (event,) = pair.to_plugin()
    assert len(event.pods) == 1
    pair.plugin.reply(event.stream)
    pair.to_runtime()
    assert pair.plugin.phase is pair.runtime.phase is Phase.ACTIVE


@pytest.mark.parametrize(("limit", "most", "sent"), [("max_objects", 3, 4), ("max_bytes", 20, 2)])
def test_a_picture_without_end_is_cut_off(limit: str, most: int, sent: int) -> None:
    pair = SessionPair().configured()
    setattr(pair.plugin, limit, most)
    slice_ = pb.SynchronizeRequest(pods=[pb.PodSandbox(id="0123456789")], more=True)
    for _ in range(sent - 1):
        pair.runtime.call_plugin("Synchronize", slice_)
        pair.to_plugin()
        pair.to_runtime()
    pair.runtime.call_plugin("Synchronize", slice_)
    with pytest.raises(RemoteProtocolError, match=f"brought {sent} pods and containers"):
        pair.to_plugin()


# --- events --------------------------------------------------------------------------------------

POD = pb.PodSandbox(id="p1", name="web")
CONTAINER = pb.Container(id="c1", name="app")


REQUESTS = {Event.CREATE_CONTAINER, Event.UPDATE_CONTAINER, Event.STOP_CONTAINER}
SUBSCRIBED = [event for event in Event if event.mask_bit & AGENT_EVENTS]


@pytest.mark.parametrize("event", [event for event in SUBSCRIBED if event not in REQUESTS])
def test_events_are_the_same_in_both_styles(event: Event) -> None:
    parts = {"pod": POD, "container": CONTAINER}
    if event.method_name.endswith("PodSandbox"):
        del parts["container"]
    new, old = SessionPair().active(), SessionPair().active()
    new.runtime.call_plugin(event.method_name, PLUGIN_METHODS[event.method_name](**parts))
    old.runtime.call_plugin("StateChange", pb.StateChangeEvent(event=event.name, **parts))
    for (seen,) in (new.to_plugin(), old.to_plugin()):
        assert (seen.stream, seen.event, seen.method) == (5, event, event.method_name)
        assert all(getattr(seen.message, name) == part for name, part in parts.items())


def test_every_method_is_known() -> None:
    names = {method.name for method in pb.DESCRIPTOR.services_by_name["Plugin"].methods}
    assert set(PLUGIN_METHODS) == names


def test_a_goodbye_is_an_event() -> None:
    pair = SessionPair().active()
    pair.runtime.call_plugin("Shutdown", pb.Empty())
    assert pair.to_plugin() == [ev.ShutdownRequested(5)]


@pytest.mark.parametrize("number", [0, 4, 15, 99])
def test_a_state_change_of_the_future_is_answered_and_passed_over(number: int) -> None:
    pair = SessionPair().active()
    pair.plugin.receive_data(request_frame(101, "StateChange", bytes([8, number])))
    assert drain(pair.plugin) == []
    response = answers_of(pair.plugin)[101]
    assert not response.HasField("status")


def test_frames_of_unknown_connections_are_dropped() -> None:
    pair = SessionPair().active()
    for connection in (0, 3, 7, 0xFFFFFFFF):
        pair.plugin.receive_data(ttrpc.encode_frames(connection, b"\xff" * 100))
    assert drain(pair.plugin) == []
    assert pair.plugin.phase is Phase.ACTIVE


# --- what cannot be served -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "code", "text"),
    [
        (request_frame(101, "Nope"), 12, "method Nope"),
        (request_frame(101, "CreateContainer", service="x.y"), 12, "service x.y"),
        (
            request_frame(101, "CreateContainer", b"\xff"),
            13,
            "ttrpc: error unmarshalling payload: ",
        ),
        (
            request_frame(101, "CreateContainer", b"\x0a\x04\x0a\x02\xff\xfe"),
            13,
            "ttrpc: error unmarshalling payload: ",
        ),
        (request_frame(2, "CreateContainer"), 3, "StreamID must be odd"),
    ],
)
def test_what_cannot_be_served_is_answered_harmlessly(frame: bytes, code: int, text: str) -> None:
    """Code 12 decides whether a runtime falls back to StateChange, so the texts are exact."""
    pair = SessionPair().active()
    pair.plugin.receive_data(frame)
    assert drain(pair.plugin) == []
    ((_, response),) = answers_of(pair.plugin).items()
    assert response.status.code == code
    assert response.status.message.startswith(text)
    pair.plugin.receive_data(request_frame(103, "CreateContainer"))
    assert len(drain(pair.plugin)) == 1


def test_a_go_servers_error_answer_is_understood() -> None:
    pair = SessionPair().active()
    streams = [pair.plugin.update_containers(pb.UpdateContainersRequest()) for _ in range(3)]
    assert streams == [3, 5, 7]
    pair.plugin.receive_data(golden("unknown-method-reply"))
    assert drain(pair.plugin) == [
        ev.UpdateContainersAnswered(7, ttrpc.CallStatus(code=12, message="method Nope"))
    ]


def test_a_runtime_answers_unknown_methods_too() -> None:
    pair = SessionPair().active()
    pair.runtime.receive_data(to_runtime(7, "Nope"))
    assert drain(pair.runtime) == []
    assert pair.runtime.data_to_send() == golden("unknown-method-reply")


# --- UpdateContainers ----------------------------------------------------------------------------


def test_a_forgotten_update_makes_no_event() -> None:
    pair = SessionPair().active()
    pair.plugin.abandon_call(pair.plugin.update_containers(pb.UpdateContainersRequest()))
    (event,) = pair.to_runtime()
    pair.runtime.reply(event.stream)
    assert pair.to_plugin() == []


def test_an_update_before_the_answer_to_a_request_is_refused_here() -> None:
    """The runtime holds the lock that the update needs until we have answered."""
    pair = SessionPair().active()
    pair.runtime.call_plugin("CreateContainer", pb.CreateContainerRequest())
    (event,) = pair.to_plugin()
    with pytest.raises(LocalProtocolError, match="before the open request"):
        pair.plugin.update_containers(pb.UpdateContainersRequest())
    pair.plugin.reply(event.stream)
    pair.plugin.update_containers(pb.UpdateContainersRequest())


def test_an_update_may_cross_a_synchronize_on_the_wire() -> None:
    pair = SessionPair().configured()
    pair.runtime.call_plugin("Synchronize", pb.SynchronizeRequest())
    pair.plugin.update_containers(pb.UpdateContainersRequest())
    (update,) = pair.to_runtime()
    assert isinstance(update, ev.UpdateContainersRequested)
    (synchronize,) = pair.to_plugin()
    assert isinstance(synchronize, ev.SynchronizeRequested)


def test_an_unreadable_answer_to_an_update_ends_the_session() -> None:
    pair = SessionPair().active()
    stream = pair.plugin.update_containers(pb.UpdateContainersRequest())
    body = ttrpc_pb2.Response(payload=b"\xff").SerializeToString()
    message = ttrpc.encode_message(stream, ttrpc.MessageType.RESPONSE, body)
    pair.plugin.receive_data(ttrpc.encode_frames(ttrpc.RUNTIME_CONNECTION_ID, message))
    with pytest.raises(RemoteProtocolError, match="UpdateContainersResponse"):
        pair.plugin.next_event()


# --- breaking the rules --------------------------------------------------------------------------


@pytest.mark.parametrize("method", sorted(set(PLUGIN_METHODS) - {"Configure", "Shutdown"}))
def test_nothing_is_legal_before_configure(method: str) -> None:
    session = PluginSession()
    session.register_plugin("x", "10")
    session.receive_data(request_frame(1, method))
    with pytest.raises(RemoteProtocolError, match="illegal while registering"):
        session.next_event()


@pytest.mark.parametrize(
    "wire",
    [
        b"\0\0\0\1\x7f\xff\xff\xff",  # a frame of 2 GiB
        ttrpc.encode_frames(1, b"\x7f\xff\xff\xff\0\0\0\1\1\0"),  # a message of 2 GiB
        ttrpc.encode_frames(2, ttrpc.encode_message(1, 3, b"")),  # data instead of a response
        request_frame(1, "Configure") + request_frame(3, "Configure"),  # unanswered, and again
    ],
)
def test_after_the_peers_mistake_the_session_is_dead_for_good(wire: bytes) -> None:
    session = PluginSession()
    session.register_plugin("x", "10")
    session.receive_data(wire)
    with pytest.raises(RemoteProtocolError):
        drain(session)
    assert session.phase is Phase.DEAD
    session.receive_eof()
    assert session.phase is Phase.DEAD
    for attempt in (
        session.next_event,
        lambda: session.receive_data(b""),
        lambda: session.reply(1),
        lambda: session.reply_error(1, "x"),
        lambda: session.update_containers(pb.UpdateContainersRequest()),
        lambda: session.register_plugin("x", "10"),
    ):
        with pytest.raises(LocalProtocolError, match="dead"):
            attempt()


def test_events_before_the_mistake_are_still_delivered() -> None:
    pair = SessionPair().active()
    pair.plugin.receive_data(request_frame(101, "CreateContainer") + b"\0\0\0\1\xff\xff\xff\xff")
    assert isinstance(pair.plugin.next_event(), ev.EventRequested)
    pair.plugin.reply(101)
    with pytest.raises(RemoteProtocolError):
        pair.plugin.next_event()
    assert pair.plugin.data_to_send() != b""  # the answer can still leave


def test_after_the_end_of_the_socket_nothing_is_accepted() -> None:
    session = PluginSession()
    session.receive_eof()
    assert session.phase is Phase.CLOSED
    with pytest.raises(LocalProtocolError, match="closed"):
        session.receive_data(b"")


def test_answering_what_was_not_asked_is_our_mistake_and_harmless() -> None:
    pair = SessionPair().active()
    with pytest.raises(LocalProtocolError, match="not waiting"):
        pair.plugin.reply(99)
    with pytest.raises(LocalProtocolError, match="not waiting"):
        pair.runtime.reply(99)
    assert pair.plugin.phase is Phase.ACTIVE


def test_a_bug_in_the_session_kills_it_too() -> None:
    """Nothing can be said of its state any more."""

    class Broken(PluginSession):
        def _event_from_call(self, call: ttrpc.Call) -> ev.PluginSessionEvent | None:
            raise ZeroDivisionError

    session = Broken()
    session.register_plugin("x", "10")
    session.receive_data(request_frame(1, "Configure"))
    with pytest.raises(ZeroDivisionError):
        session.next_event()
    assert session.phase is Phase.DEAD


def test_a_runtime_cannot_ask_out_of_turn() -> None:
    runtime = RuntimeSession()
    with pytest.raises(LocalProtocolError, match="Configure is illegal while connected"):
        runtime.call_plugin("Configure", pb.ConfigureRequest())
    with pytest.raises(LocalProtocolError, match="no method Nope"):
        runtime.call_plugin("Nope", pb.Empty())


def test_a_runtime_forgets_a_call_that_took_too_long() -> None:
    pair = SessionPair().active()
    stream = pair.runtime.call_plugin("CreateContainer", pb.CreateContainerRequest())
    pair.runtime.abandon_call(stream)
    pair.runtime.abandon_call(stream)
    (event,) = pair.to_plugin()
    pair.plugin.reply(event.stream)
    assert pair.to_runtime() == []


def test_a_refused_synchronisation_does_not_move_the_runtime_on() -> None:
    pair = SessionPair().configured()
    pair.runtime.call_plugin("Synchronize", pb.SynchronizeRequest())
    before = pair.runtime.phase
    (event,) = pair.to_plugin()
    pair.plugin.reply_error(event.stream, "no CPU left")
    (answered,) = pair.to_runtime()
    assert answered.status == ttrpc.CallStatus(code=2, message="no CPU left")
    assert pair.runtime.phase is before


def test_a_request_of_an_unregistered_plugin_ends_the_runtimes_session() -> None:
    runtime = RuntimeSession()
    runtime.receive_data(to_runtime(1, "UpdateContainers"))
    with pytest.raises(RemoteProtocolError, match="UpdateContainers is illegal while connected"):
        runtime.next_event()


def test_a_plugin_takes_the_oversized_picture_of_an_old_runtime_and_a_runtime_none() -> None:
    """Containerd up to 1.7.25 sends a large node in one message above the 4 MiB of ttrpc."""
    pods = [pb.PodSandbox(id=str(number), name="x" * 100_000) for number in range(60)]
    body = ttrpc_pb2.Request(
        service="nri.pkg.api.v1alpha1.Plugin",
        method="Synchronize",
        payload=pb.SynchronizeRequest(pods=pods).SerializeToString(),
    ).SerializeToString()
    assert len(body) > ttrpc.MAX_MESSAGE_BODY_BYTES
    message = struct.pack(">IIBB", len(body), 3, 1, 0) + body
    plugin = SessionPair().configured().plugin
    wire = ttrpc.encode_frames(ttrpc.PLUGIN_CONNECTION_ID, message)
    seen: list[Any] = []
    for start in range(0, len(wire), 1 << 18):
        plugin.receive_data(wire[start : start + (1 << 18)])
        seen += drain(plugin)
    (event,) = seen
    assert len(event.pods) == 60

    runtime = SessionPair().active().runtime
    runtime.receive_data(ttrpc.encode_frames(ttrpc.RUNTIME_CONNECTION_ID, message[:10]))
    with pytest.raises(RemoteProtocolError, match="at most 4194304 are allowed"):
        runtime.next_event()
