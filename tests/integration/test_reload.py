"""SIGHUP, through the real process: what changes at once, and what waits for a restart."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nri_numa.agent.runtime_lock import RuntimeLock
from nri_numa.demo.runtime import PodOperationFailed
from tests.beds.embedded_node import EmbeddedNode, until


@pytest.fixture
def node(tmp_path: Path) -> Iterator[EmbeddedNode]:
    with EmbeddedNode(tmp_path) as made:
        made.start()
        yield made


def reload(node: EmbeddedNode, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Change the file, send the signal; what is logged until the reload is done or refused."""
    before = len(node.plugin.records())
    node.plugin.reload({**node.config, **config})

    def new() -> list[dict[str, Any]]:
        return node.plugin.records()[before:]

    ends = ("configuration reloaded", "configuration not reloaded")
    until(lambda: any(record["msg"] in ends for record in new()), "the reload is logged")
    return new()


def told(records: list[dict[str, Any]]) -> tuple[set[str], list[str]]:
    """Keys that changed, and keys that need a restart, in the order of the lines."""
    changed = next(r["changed"] for r in records if r["msg"] == "configuration reloaded")
    waiting = [r["key"] for r in records if r["msg"] == "restart required"]
    return set(filter(None, changed.split(", "))), waiting


def test_what_can_change_live_decides_the_next_container(node: EmbeddedNode) -> None:
    """And nobody who runs is moved or refused by it."""
    first = node.run("first", {"policy": "single-numa-node"}, cpus=2)
    before = first.cpus
    rules = [{"match": {"namespaces": ["default"]}, "set": {"policy": "single-numa-node"}}]
    records = reload(node, {"reservedCPUs": "2", "rules": rules})
    assert told(records) == ({"reservedCPUs", "rules"}, [])
    assert first.cpus == before
    # The rule binds a container that asks for nothing itself, and CPU 2 is not given away.
    seen = [node.run(f"ruled-{n}", {}, cpus=1) for n in range(4)]
    assert all(node.assignments()[one.id]["policy"] == "single-numa-node" for one in seen)
    assert not any(one.cpus == "2" for one in seen)
    # And the other way: a reload takes a key back to its default.
    records = reload(node, {"reservedCPUs": "2"})
    assert told(records) == ({"rules"}, [])
    plain = node.run("plain", {}, cpus=1)
    assert node.assignments()[plain.id]["kind"] == "unpinned"
    assert node.plugin.metric("nri_numa_invariant_violations_total") == 0


def test_what_needs_a_restart_is_named_at_every_reload_until_then(node: EmbeddedNode) -> None:
    later = {"stateDir": "/nowhere", "kubeletRoot": "/elsewhere", "runtime": {"pluginIndex": "11"}}
    # The directory is given as a flag too, and a flag beats the file.
    assert told(reload(node, later)) == (set(), ["runtime.pluginIndex", "kubeletRoot"])
    changed, waiting = told(reload(node, {**later, "strategy": "pack"}))
    assert (changed, waiting) == ({"strategy"}, ["runtime.pluginIndex", "kubeletRoot"])
    # The warning stays true: the old values are still those in effect.
    changed, waiting = told(reload(node, {**later, "strategy": "spread"}))
    assert (changed, waiting) == ({"strategy"}, ["runtime.pluginIndex", "kubeletRoot"])
    assert told(reload(node, {})) == (set(), [])


def test_a_file_with_mistakes_changes_nothing_and_all_are_named(node: EmbeddedNode) -> None:
    began = len(node.plugin.records())
    reload(node, {"strategy": "packed", "observe": True, "reservedCPUs": "999"})

    def named() -> bool:
        """Each mistake has a line of its own, and the first one ends the wait above."""
        records = node.plugin.records()[began:]
        problems = [r["problem"] for r in records if r["msg"] == "configuration not reloaded"]
        expected = 'strategy: "packed", expected most-memory, pack or spread'
        return any(problem.startswith(expected) for problem in problems)

    until(named, "the mistake is named")
    assert not any(r["msg"] == "configuration reloaded" for r in node.plugin.records()[began:])
    assert node.plugin.metric("nri_numa_config_last_reload_successful") == 0
    started = node.plugin.metric("nri_numa_config_last_reload_success_timestamp_seconds")
    own = node.run("own", {"policy": "single-numa-node"}, cpus=2)
    assert node.assignments()[own.id]["kind"] == "exclusive"
    node.plugin.config_file.write_text("strategy: [")
    before = len(node.plugin.records())
    os.kill(node.plugin.pid, signal.SIGHUP)
    until(lambda: len(node.plugin.records()) > before, "the broken file is logged")
    assert node.plugin.running
    with pytest.raises(PodOperationFailed, match="exclusive CPUs"):
        node.run("big", {"policy": "single-numa-node"}, cpus=33)
    node.check()
    reload(node, {"strategy": "pack"})
    assert node.plugin.metric("nri_numa_config_last_reload_successful") == 1
    reloaded = node.plugin.metric("nri_numa_config_last_reload_success_timestamp_seconds")
    assert reloaded > started


def test_what_was_only_observed_is_put_right_once_no_other_agent_works(tmp_path: Path) -> None:
    """With two agents the runtime failed every container: both set the same annotation."""
    with EmbeddedNode(tmp_path, config={"observe": True, "reconcile": {"interval": 0}}) as node:
        node.start()
        made = [node.owner(), node.listed("none", "9999"), node.owner("other")]
        assert [one.cpus for one in made] == [str(node.topology.online)] * 3
        other = RuntimeLock(str(node.socket))
        other.acquire()
        reload(node, {"observe": False, "reconcile": {"interval": 0}})
        node.logged("runtime locked by another agent")
        made.append(node.owner("next"))
        assert made[-1].cpus == str(node.topology.online)
        other.close()
        node.check()
        assert len({one.cpus for one in made}) == 4
        assert node.plugin.metric("nri_numa_drift_found_total") == 0


def test_the_log_level_changes_at_once(node: EmbeddedNode) -> None:
    quiet = {"log": {"format": "json", "level": "warning"}, "kubeletRoot": "/elsewhere"}
    node.plugin.reload({**node.config, **quiet})
    node.logged("restart required")  # the last line before it gets quiet
    node.run("settled", {})
    before = len(node.plugin.records())
    node.run("quiet", {"policy": "single-numa-node"}, cpus=1)
    node.check()
    assert [r for r in node.plugin.records()[before:] if r["level"] in ("debug", "info")] == []


def test_containers_start_while_a_reload_waits_for_its_file(node: EmbeddedNode) -> None:
    """A configuration on a slow or dead file system costs the reload, and no container start."""
    text = node.plugin.config_file.read_text()
    changed = json.dumps({**json.loads(text), "strategy": "pack"})
    node.plugin.config_file.unlink()
    os.mkfifo(node.plugin.config_file)  # whoever opens it waits for a writer
    before = len(node.plugin.records())
    os.kill(node.plugin.pid, signal.SIGHUP)
    with node.plugin.config_file.open("w") as pipe:  # which opens when the plugin has
        own = node.run("own", {"policy": "single-numa-node"}, cpus=2)
        assert node.assignments()[own.id]["kind"] == "exclusive"
        # Asked for once more meanwhile: the file is read again when this turn is over.
        os.kill(node.plugin.pid, signal.SIGHUP)
        node.run("plain", {})
        other = node.plugin.config_file.with_name("other")
        other.write_text(json.dumps({**json.loads(text), "strategy": "pack", "cpuOvercommit": 2}))
        other.rename(node.plugin.config_file)
        pipe.write(changed)

    def said() -> list[str]:
        records = node.plugin.records()[before:]
        return [r["changed"] for r in records if r["msg"] == "configuration reloaded"]

    until(lambda: said() == ["strategy", "cpuOvercommit"], "both are in force, in their order")
    node.check()
