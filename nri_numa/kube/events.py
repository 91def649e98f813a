"""Events of events.k8s.io/v1 about pods. Pure."""

from __future__ import annotations

from typing import Any, Final

from nri_numa.text import escape_unprintable, micro_time_text

MAX_EVENT_NOTE_BYTES: Final = 1024
"""Bytes of an Event's note, the API server's limit."""
MAX_EVENT_NAME_CHARS: Final = 253


def pod_event(
    namespace: str, name: str, uid: str, *, id: str, event_time: float, text: str, **fields: str
) -> dict[str, Any]:
    """Build an Event about a pod; `event_time` is Unix time in seconds."""
    regarding = {"apiVersion": "v1", "kind": "Pod", "namespace": namespace, "name": name}
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": event_name(name, id), "namespace": namespace},
        "eventTime": micro_time_text(event_time),
        "note": _truncate_note(text),
        "regarding": {**regarding, "uid": uid},
        **fields,
    }


def event_name(pod: str, id: str) -> str:
    """Return the name of an Event, equal for equal ids, so no process creates a second one."""
    suffix = f".{id}"
    return pod[: MAX_EVENT_NAME_CHARS - len(suffix)].rstrip("-.") + suffix


def _truncate_note(text: str) -> str:
    # One line without control characters, safe in kubectl, chats and logs.
    data = escape_unprintable(text).encode()
    if len(data) <= MAX_EVENT_NOTE_BYTES:
        return data.decode()
    return data[: MAX_EVENT_NOTE_BYTES - 3].decode(errors="ignore") + "…"
