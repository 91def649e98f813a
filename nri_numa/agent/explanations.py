"""Explanations over a restart: what is kept of decisions, in a file beside the checkpoint.

It is no part of what was meant: written when there is time, a copy of the memory of some seconds
ago, no larger than `MAX_EXPLANATIONS_FILE_BYTES`, and left out as a whole when it cannot be used.
No request waits for it, and what is lost with it is only how a decision came about.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Mapping
from typing import Final
from zlib import crc32

import msgspec

from nri_numa.agent.agent import Agent
from nri_numa.agent.history import RejectedContainer
from nri_numa.engine.state import Allocation
from nri_numa.observe.logs import get_logger
from nri_numa.observe.traces import PackedTrace
from nri_numa.store.files import read_file, replace_file
from nri_numa.store.journal import allocation_document, encode

log = get_logger("explanations")

EXPLANATIONS_FILE_NAME: Final = "explanations"
MAX_EXPLANATIONS_FILE_BYTES: Final = 4 << 20
"""Ten thousand explanations of the usual size; the youngest are kept."""
_HEADER_FORMAT: Final = b"nri-numa explanations 5d1b72e6 %08x\n"
"""With the crc32 of the rest. Versions before 0.2 use a file only with this number in it."""


class _SavedTrace(msgspec.Struct, array_like=True, frozen=True):
    """One trace; ``mark`` stands for the allocation that it explains."""

    container_id: str
    mark: int
    trace: PackedTrace


class _ExplanationDocument(msgspec.Struct, array_like=True, frozen=True):
    identity: dict[str, str]
    traces: list[_SavedTrace]
    refusals: list[RejectedContainer]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_ExplanationDocument).decode

ExplanationSnapshot = tuple[
    dict[str, tuple[PackedTrace, Allocation]], tuple[RejectedContainer, ...]
]


class ExplanationFile:
    """Saves an agent's explanations now and then, and restores them at the next start.

    The identity is the checkpoint's; but for ``version`` it must be the same to be used again.
    """

    def __init__(self, directory: str, *, identity: Mapping[str, str], agent: Agent) -> None:
        self.path = os.path.join(directory, EXPLANATIONS_FILE_NAME)
        self._identity = {key: value for key, value in identity.items() if key != "version"}
        self._agent = agent
        self._saved: ExplanationSnapshot = ({}, ())
        self._saving: asyncio.Task[None] | None = None
        self._trouble = ""

    def load(self) -> str:
        """Restore what the agent knew, before anything happens; why nothing is used, or nothing."""
        try:
            data = read_file(self.path, MAX_EXPLANATIONS_FILE_BYTES)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"{self.path}: cannot be read: {error.strerror or error}; it is not used"
        head, _, rest = data.partition(b"\n")
        if head.split()[-1:] != (_HEADER_FORMAT % crc32(rest)).split()[-1:]:
            return f"{self.path}: is damaged; it is not used"
        try:
            file = _decode(rest)
            if file.identity != self._identity:
                return f"{self.path}: is of another machine or boot; it is not used"
            live = self._agent.current.state.allocations
            traces = {
                one.container_id: one.trace
                for one in file.traces
                # One that has changed since is explained by nothing that we know.
                if one.container_id in live
                and _allocation_digest(live[one.container_id]) == one.mark
            }
        except (msgspec.MsgspecError, RecursionError) as error:
            return f"{self.path}: is damaged ({error}); it is not used"
        self._agent.history.restore_traces(traces, file.refusals)
        self._saved = self._current_snapshot()
        return ""

    def save_soon(self) -> None:
        """Write the file in a thread, when something changed and the last time is over."""
        if self._saving is not None and not self._saving.done():
            return
        now = self._current_snapshot()
        if now != self._saved:
            self._saving = asyncio.create_task(self._save_snapshot(now), name="explanations")

    async def _save_snapshot(self, snapshot: ExplanationSnapshot) -> None:
        self._report_problem(await asyncio.to_thread(self._write_snapshot, snapshot), snapshot)

    async def save_last_changes(self) -> None:
        """Write what changed since the last time; the agent ends."""
        if self._saving is not None:
            await asyncio.gather(self._saving, return_exceptions=True)
        now = self._current_snapshot()
        if now != self._saved:
            self._report_problem(self._write_snapshot(now), now)

    def _report_problem(self, problem: str, snapshot: ExplanationSnapshot) -> None:
        if not problem:
            self._saved = snapshot
        elif not self._trouble:
            log.warning("explanations not saved", problem=problem)
        self._trouble = problem

    def _current_snapshot(self) -> ExplanationSnapshot:
        """What there is to save; equal to another one when nothing changed."""
        live = self._agent.current.state.allocations
        traces = {
            container_id: (kept, live[container_id])
            for container_id, kept in self._agent.history.packed_traces().items()
            if container_id in live
        }
        return traces, self._agent.history.rejections

    def _write_snapshot(self, snapshot: ExplanationSnapshot) -> str:
        """Replace the file; runs in a thread. Says what went wrong."""
        data = encode_snapshot(snapshot, self._identity)
        try:
            os.close(replace_file(self.path, data))
        except OSError as error:
            return f"{self.path}: cannot be written: {error.strerror or error}"
        return ""


def encode_snapshot(
    snapshot: ExplanationSnapshot,
    identity: dict[str, str],
    limit: int = MAX_EXPLANATIONS_FILE_BYTES,
) -> bytes:
    """The file's bytes, at most ``limit`` of them: refusals first, the youngest first."""
    traces, refusals = snapshot
    by_age = sorted(traces.items(), key=lambda item: (-item[1][1].assigned_at, item[0]))
    found = itertools.chain(
        reversed(refusals), (_SavedTrace(i, _allocation_digest(a), kept) for i, (kept, a) in by_age)
    )
    left = limit - len(_encode(identity)) - 100  # the head, and what frames the lists
    some = [one for one in found if (left := left - len(_encode(one))) >= 0]
    saved = [one for one in some if isinstance(one, _SavedTrace)]
    refused = [one for one in reversed(some) if isinstance(one, RejectedContainer)]
    rest = _encode(_ExplanationDocument(identity, saved, refused))
    return _HEADER_FORMAT % crc32(rest) + rest


def _allocation_digest(allocation: Allocation) -> int:
    """Another one for each decision about a container, also after a restart."""
    return crc32(encode(allocation_document(allocation)))
