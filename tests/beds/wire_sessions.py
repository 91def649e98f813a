"""Sessions of the wire fed with packets."""

from typing import Any

from nri_numa.errors import RemoteProtocolError
from nri_numa.nri.wire import events as ev
from nri_numa.nri.wire.pb import nri_pb2 as pb


def answer(session: Any, event: Any) -> None:
    """Answer the way a plugin or a runtime would, so that the phases move on."""
    if isinstance(event, ev.ConfigureRequested):
        session.reply(event.stream, pb.ConfigureResponse(events=1))
    elif not isinstance(
        event, ev.RegistrationAnswered | ev.UpdateContainersAnswered | ev.RequestAnswered
    ):
        session.reply(event.stream)


def feed(session: Any, packets: list[bytes]) -> tuple[list[str], str, bytes]:
    """Return (events, how it ended, bytes sent) of a session fed with packets."""
    seen: list[str] = []
    try:
        for packet in packets:
            session.receive_data(packet)
            while (event := session.next_event()) is not None:
                seen.append(repr(event))
                answer(session, event)
    except RemoteProtocolError as error:
        return seen, str(error), session.data_to_send()
    return seen, "", session.data_to_send()
