"""What the event loop knows of its own gaps."""

from __future__ import annotations

import asyncio

from nri_numa.loop import watched_loop


def test_a_gap_is_seen_whenever_it_happens_and_told_once() -> None:
    """A callback that took long is known, whatever timers there are."""
    now = [0.0]
    loop, watch = watched_loop(lambda: now[0])

    async def work() -> list[float]:
        seen = []
        for busy in (0.5, 2.0, 1.0, 0.0):
            now[0] += busy
            await asyncio.sleep(0)
            if busy != 2.0:
                seen.append(watch.take())
        return seen

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        assert runner.run(work()) == [0.5, 2.0, 0.0]
