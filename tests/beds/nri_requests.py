"""A handler behind the conversion from protobuf, without a session and a socket."""

from collections.abc import Sequence

from nri_numa.nri import conversion
from nri_numa.nri.wire import events as ev
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.versions import Event
from nri_numa.runtime import RuntimeHandler


class NRIRequests:
    """Requests as messages; what is answered is read back."""

    def __init__(self, handler: RuntimeHandler) -> None:
        self.handler = handler

    def answer(self, request: ev.EventRequested | ev.SynchronizeRequested) -> bytes:
        answer = conversion.answer_request(self.handler, request)
        return b"" if answer is None else answer.SerializeToString()

    def synchronize(
        self, pods: Sequence[pb.PodSandbox], containers: Sequence[pb.Container]
    ) -> bytes:
        return self.answer(ev.SynchronizeRequested(0, pods, containers))

    def create_container(self, request: pb.CreateContainerRequest) -> bytes:
        return self.answer(ev.EventRequested(0, Event.CREATE_CONTAINER, request))

    def update_container(self, request: pb.UpdateContainerRequest) -> bytes:
        return self.answer(ev.EventRequested(0, Event.UPDATE_CONTAINER, request))

    def stop_container(self, request: pb.StopContainerRequest) -> bytes:
        return self.answer(ev.EventRequested(0, Event.STOP_CONTAINER, request))

    def container_event(self, event: Event, pod: pb.PodSandbox, container: pb.Container) -> bytes:
        change = pb.StateChangeEvent(pod=pod, container=container)
        return self.answer(ev.EventRequested(0, event, change))

    def pod_event(self, event: Event, pod: pb.PodSandbox) -> bytes:
        return self.answer(ev.EventRequested(0, event, pb.StateChangeEvent(pod=pod)))
