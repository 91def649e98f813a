"""Whatever happens to the HTTP side, it neither ends nor delays anything else."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from nri_numa.agent import serving, view
from nri_numa.agent.loop import LoopMonitor
from nri_numa.agent.serving import HTTPThread
from nri_numa.agent.usage import UsageWatches
from nri_numa.config import HTTP, AgentConfig
from nri_numa.engine.node_model import NodeModel
from nri_numa.model.settings import Settings
from nri_numa.observe.metrics import Metrics
from tests.beds.link_bed import eventually
from tests.beds.views import live_view
from tests.beds.world import agent_of
from tests.machines import named as machines


def make(section: HTTP) -> tuple[HTTPThread, Metrics]:
    metrics = Metrics("0")
    machine = NodeModel(topology=machines.single_smt(), settings=Settings())
    agent = agent_of(machine, metrics=metrics)

    def new_view(watches: UsageWatches) -> view.LiveView:
        return live_view(agent, watches=watches)

    config = AgentConfig(http=section)
    return HTTPThread(config, agent, new_view, LoopMonitor()), metrics


def value(metrics: Metrics, name: str) -> float:
    return metrics.registry.get_sample_value(name) or 0.0


def during(made: HTTPThread, condition: Callable[[], bool]) -> None:
    """Run until the condition holds, then end it."""

    async def test() -> None:
        task = asyncio.create_task(made.run())
        try:
            await eventually(condition)
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(test())


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "SERVE_RETRY_S", 0.001)
    monkeypatch.setattr(serving, "LINK_WAIT_S", 0.001)


def test_a_mistake_is_counted_once_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real, tries = view.LiveView, []

    def broken(*given: Any, **more: Any) -> view.LiveView:
        tries.append(1)
        if len(tries) < 4:
            raise RuntimeError("a bug")
        return real(*given, **more)

    monkeypatch.setattr("tests.beds.views.LiveView", broken)
    made, metrics = make(HTTP(address="127.0.0.1:0"))
    during(made, lambda: value(metrics, "nri_numa_http_up") == 1)
    assert len(tries) == 4
    assert value(metrics, "nri_numa_internal_errors_total") == 1


def test_a_configuration_that_cannot_be_served_is_no_mistake_of_ours() -> None:
    made, metrics = make(HTTP(address="127.0.0.1:0", token_file="/nowhere/token"))
    looks = itertools.count()
    during(made, lambda: next(looks) > 50)
    assert value(metrics, "nri_numa_internal_errors_total") == 0
    assert value(metrics, "nri_numa_http_up") == 0


def test_it_waits_for_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "LINK_WAIT_S", 3600.0)
    made, metrics = make(HTTP(address="127.0.0.1:0"))

    async def test() -> None:
        task = asyncio.create_task(made.run())
        for _ in range(20):
            await asyncio.sleep(0)
        assert value(metrics, "nri_numa_http_up") == 0
        made.allow_start()
        await eventually(lambda: value(metrics, "nri_numa_http_up") == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert value(metrics, "nri_numa_http_up") == 0

    asyncio.run(test())


def test_a_scrape_shows_the_nodes_of_the_machine() -> None:
    made, metrics = make(HTTP(address="127.0.0.1:0"))
    during(made, lambda: 'nri_numa_cpus{numa_node="0"' in metrics.render_metrics())
    assert 'nri_numa_cpus{numa_node="0",state="shared"} 8' in metrics.render_metrics()
