"""What the parts of the running agent tell each other."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from nri_numa.agent.daemon import Daemon
from nri_numa.agent.loop import GapWatch
from nri_numa.config import load
from nri_numa.engine.state import Kind
from nri_numa.runtime import RuntimeInfo
from tests.beds.world import container, pod, resources
from tests.machines import named as machines


@pytest.mark.asyncio
@pytest.mark.parametrize(("told", "decided"), [(2.0, 3), (0.8, 1)])
async def test_the_time_that_the_runtime_tells_counts_for_its_synchronisation(
    tmp_path: Path, told: float, decided: int
) -> None:
    """Each look at the clock costs 0.25 s; what is decided later follows after the answer."""
    machines.write_sysfs(tmp_path / "root", machines.dual_smt())
    flags = {"sysfsRoot": str(tmp_path / "root"), "stateDir": str(tmp_path / "state")}
    config = load(flags=flags)
    daemon = Daemon(config, lambda text: config, GapWatch())
    agent, looks = daemon.agent, itertools.count()
    daemon.clock.monotonic = lambda: next(looks) / 4  # type: ignore[method-assign]
    daemon.handler.configured(
        RuntimeInfo(
            name="containerd",
            version="2.2.0",
            nri_version="0.11.0",
            registration_timeout=5.0,
            request_timeout=told,
            config="",
        )
    )
    pods = [pod(f"p{n}", {"policy": "single-numa-node"}) for n in range(4)]
    agent.synchronize(pods, [container(of, wants=resources(2, 1)) for of in pods])
    kinds = [allocation.kind for allocation in agent.state.allocations.values()]
    assert kinds.count(Kind.EXCLUSIVE) == decided
    daemon.store.close()
