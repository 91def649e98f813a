"""What a container really has beside what is meant, as one sentence for people."""

from __future__ import annotations

from collections.abc import Sequence


def late_text(seconds: float) -> str:
    """What over CRI is never sure: ``late by at most 12 ms: it started before …``.

    Args:
        seconds: from when its process was made until it had what was decided.
    """
    if seconds <= 0:
        return "in time: it had its CPUs when it started"
    return (
        f"late by at most {seconds * 1000:.0f} ms: it started before its CPUs were decided and set"
    )


def displaced_text(cpus: str) -> str:
    """``displaced, own CPU 2 offline: on the shared pool until one is back``.

    Args:
        cpus: kernel list of its own.
    """
    are = "CPU" if cpus.isdigit() else "CPUs"
    return f"displaced, own {are} {cpus} offline: on the shared pool until one is back"


_OWNERS = 3  # that are told by name


def actual_text(text: str, since: str, owners: Sequence[str], *, given_up: bool) -> str:
    """``meant 4-7, has 0-7 since 12 s, on exclusive CPUs of shop/db/server``.

    Args:
        text: both sides.
        since: how long, or from when on.
        owners: whose CPUs it can run on.
        given_up: it is left to whoever rewrites it.
    """
    parts = [f"{text} since {since}"]
    if owners:
        named = list(owners[:_OWNERS])
        if len(owners) > _OWNERS:
            named.append(f"{len(owners) - _OWNERS} more")
        who = " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)
        parts.append(f", on exclusive CPUs of {who}")
    if given_up:
        parts.append(
            "; put right again and again, and now left as it is, because something else rewrites it"
        )
    return "".join(parts)
