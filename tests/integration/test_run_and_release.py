"""What a running agent is to the runtime, and to a ``release`` beside it."""

from pathlib import Path

import pytest

from nri_numa.demo.runtime import PodOperationFailed
from tests.beds.embedded_node import EmbeddedNode, until
from tests.beds.plugin_process import PluginProcess
from tests.machines import named as machines


def test_a_release_elsewhere_touches_nothing_under_a_running_agent(tmp_path: Path) -> None:
    """A slip in --state-dir once gave everybody every CPU while the agent said otherwise."""
    with EmbeddedNode(tmp_path) as node:
        node.start()
        own = node.owner("own", 2)
        before = own.cpus
        done = node.plugin.release(f"--state-dir={tmp_path}/elsewhere")
        assert (done.returncode, done.stdout) == (1, "")
        assert "stop it first" in done.stderr
        assert own.cpus == before
        # Whoever dies lets go of it, however it dies.
        node.plugin.kill()
        done = node.plugin.release(f"--state-dir={tmp_path}/elsewhere")
        assert done.returncode == 0, done.stderr
        assert own.cpus == str(node.topology.online)


def test_a_second_agent_does_not_register_until_the_first_ends(tmp_path: Path) -> None:
    """With both registered the runtime failed every container: both set the same annotation."""
    with EmbeddedNode(tmp_path) as node:
        node.start()
        second = PluginProcess(
            tmp_path / "second", node.socket, config=node.config, sysfs_root=node.sysfs_root
        )
        node.others.append(second)
        second.start(wait=False)
        until(second.responsive, "it serves")
        assert node.owner("own", 2).cpus == "0-1"
        status, reason = second.get("/readyz")
        assert status == 503
        assert "another agent (process " in reason
        assert "works on the runtime of this socket" in reason
        assert len(node.runtime.plugins) == 1
        observer = PluginProcess(
            tmp_path / "observer",
            node.socket,
            config={**node.config, "observe": True},
            sysfs_root=node.sysfs_root,
            arguments=["--plugin-name=observer", "--plugin-index=05"],
        )
        node.others.append(observer)
        observer.start()  # it changes nothing, and may be there
        node.plugin.kill()
        second.wait_ready()
        assert node.owner("next", 2).cpus not in ("", "0-1")


def test_an_index_of_one_digit_has_two_when_it_is_registered(tmp_path: Path) -> None:
    """`pluginIndex: 05` is the number 5 in YAML; `check` takes it, and so does the runtime."""
    with EmbeddedNode(tmp_path, config={"runtime": {"pluginIndex": 5}}) as node:
        node.start()
        node.call(node.runtime.wait_for_plugin())
        assert [each[:3] for each in node.runtime.plugins] == ["05-"]


def test_explanations_survive_a_restart(tmp_path: Path) -> None:
    """Who asks why after an upgrade gets the sentences of the day it was decided."""
    with EmbeddedNode(tmp_path) as node:
        node.start()
        node.owner("own", 2)
        with pytest.raises(PodOperationFailed, match="exclusive CPUs"):
            node.run("big", {"policy": "single-numa-node"}, cpus=33)
        before = [node.plugin.json(f"/v1/explain/default/{pod}") for pod in ("own", "big")]
        node.plugin.restart()
        assert [node.plugin.json(f"/v1/explain/default/{p}") for p in ("own", "big")] == before
        assert all(one["explanations"][0]["decisionSteps"] for one in before)
        # And a damaged file costs no more than what was in it.
        assert node.plugin.terminate() == 0
        (node.plugin.state_directory / "history").write_bytes(b"nonsense")
        node.start()
        node.logged("history not restored")
        (own,) = node.plugin.json("/v1/explain/default/own")["explanations"]
        assert own["summary"] == before[0]["explanations"][0]["summary"]
        node.check()


def test_an_annotation_without_its_container_is_said_at_the_pods_end(tmp_path: Path) -> None:
    """Otherwise a slip in the name is a pin that nobody has, without a word."""
    with EmbeddedNode(tmp_path) as node:
        node.start()
        pods = [
            node.pod("slip", {"numacpu.enigne": "1"}),
            node.pod("older", {"numacpu.enigne": "1"}),
            node.pod("fine", {"numacpu.engine": "2"}),
        ]
        for pod in pods:
            node.create(pod, name="engine")
        node.plugin.restart()
        for pod in pods:
            node.call(node.runtime.remove_pod(pod.id))
        node.logged("did you mean engine?")

        def named() -> set[str]:
            records = node.plugin.records()
            return {r["pod"] for r in records if r["msg"] == "annotation without effect"}

        until(lambda: named() == {"default/slip", "default/older"}, "both are named")


def test_case_16_memory_that_was_added_counts_after_a_rejection(tmp_path: Path) -> None:
    """The first is refused; what it missed is looked for at once, and the next one gets it."""
    small = machines.single_smt(cores_per_numa=8, memory_gib=0.125)
    with EmbeddedNode(tmp_path, topology=small) as node:
        node.start()
        wish = {"policy": "single-numa-node"}
        with pytest.raises(PodOperationFailed, match=r"256 MiB memory"):
            node.run("first", wish, cpus=0.5)
        node.write_machine(machines.single_smt(cores_per_numa=8, memory_gib=8))
        tries = iter(range(10_000))

        def placed() -> bool:
            try:
                node.run(f"next-{next(tries)}", wish, cpus=0.5)
            except PodOperationFailed:
                return False
            return True

        until(placed, "the memory is seen")
        node.logged("machine changed")
