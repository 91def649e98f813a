"""The agent beside a kubelet with static policies: what it looks at, and what it says."""

import asyncio
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from nri_numa.agent.current_state import CurrentState
from nri_numa.agent.kubelet_sync import KubeletConfigWatch, KubeletSync
from nri_numa.agent.reload import apply_recomputed_settings
from nri_numa.agent.view import kubelet_document
from nri_numa.config import AgentConfig
from nri_numa.engine.desired import Drift, recorded_actual
from nri_numa.kubelet.configuration import DiscoveredConfig, KubeletFacts
from nri_numa.kubelet.state_files import KubeletStateFiles
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.settings import Settings
from nri_numa.model.workload import KubeletGrantOverriders, QoSClass, Resources
from tests.beds.agent_bed import AgentBed
from tests.beds.world import container, pod, resources
from tests.machines import named as machines


class KubeletBed(AgentBed):
    """A node whose kubelet has a static policy, and its state in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        settings = Settings(kubelet_override=KubeletGrantOverriders.ANNOTATED)
        super().__init__(machines.single_no_smt(), settings, kubelet=self._beside)
        self.starts = self.ends_whole = True

    def _beside(self, current: CurrentState) -> KubeletSync:
        files = KubeletStateFiles(str(self.directory))
        config = KubeletConfigWatch(str(self.directory))
        self.beside = KubeletSync(current, self.metrics, files, config)
        return self.beside

    def grant(self, **pods: str) -> None:
        """Write the state file as the kubelet does."""
        taken = CPUSet()
        for cpus in pods.values():
            taken = taken | CPUSet.parse(cpus)
        document = {
            "policyName": "static",
            "defaultCpuSet": str(self.topology.online - taken),
            "entries": {f"uid-{name}": {"app": cpus} for name, cpus in pods.items()},
        }
        made = self.directory / ".new"
        made.write_text(json.dumps(document))
        made.rename(self.directory / "cpu_manager_state")

    def look(self) -> None:
        """What happens every second."""
        self.agent.apply_grants(self.beside.refresh_kubelet_grants())
        self.beside.check_conflicts(self.agent.drift.known)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"nri_numa_{name}", labels)


@pytest.fixture
def bed(tmp_path: Path) -> KubeletBed:
    return KubeletBed(tmp_path)


def sent(cpus: str) -> Resources:
    return replace(resources(2, 1), cpus=cpus)


def test_a_grant_counts_for_the_very_next_container(bed: KubeletBed) -> None:
    """The kubelet wrote it a moment ago; nobody looked in between."""
    bed.grant()
    plain = pod("plain", qos=QoSClass.BURSTABLE)
    assert bed.place(plain, container(plain, wants=sent("0-3")))[0] == "0-3"
    bed.grant(g="2-3")
    of = pod("g")
    assert bed.place(of, container(of, wants=sent("2-3")))[0] == "2-3"
    assert bed.has("plain-app")[0] == "0-1"  # in the same answer
    assert bed.metric("kubelet_granted_cpus") == 2
    assert bed.metric("kubelet_static_policy", manager="cpu") == 1
    assert bed.log("kubelet grants changed")
    bed.check()


def test_what_both_write_is_said_once_and_shown(bed: KubeletBed) -> None:
    bed.grant(g="2-3")
    of = pod("g", {"numacpu": "1"})
    bed.place(of, container(of, wants=sent("2-3")))
    for _ in range(3):
        bed.update("g-app", Resources(cpus="2-3"))
    assert bed.has("g-app")[0] == "1"
    assert bed.metric("kubelet_cpuset_conflicts_total", yields_to="nri-numa") == 1
    said = "cpuset conflict with kubelet found"
    (line,) = bed.log(said)
    assert "requested_cpus=2-3 actual_cpus=1 " in line
    found = kubelet_document(bed.agent, bed.beside)
    (contest,), (grant,) = found.conflicts, found.grants
    assert (contest.pod, contest.requested_cpus, contest.actual_cpus) == ("g", "2-3", "1")
    assert (contest.yields_to, contest.detected_in, contest.count) == (
        "nri-numa", "UpdateContainer", 3,
    )  # fmt: skip
    assert (grant.pod, grant.cpus, grant.overridden) == ("g", "2-3", True)
    assert (found.cpu_policy, found.shared_cpus, found.override) == ("static", "0-1", "annotated")


def test_who_is_taken_over_by_the_kubelet_is_a_contest_that_it_wins(bed: KubeletBed) -> None:
    of = pod("own", {"cpus": "exclusive"})
    bed.place(of, container(of, wants=resources(1, 1)))
    bed.grant(own="3")
    bed.update("own-app", Resources(cpus="3"))
    assert bed.metric("kubelet_cpuset_conflicts_total", yields_to="kubelet") == 1
    assert bed.has("own-app")[0] == "3"


def test_everybodys_set_is_no_contest(bed: KubeletBed) -> None:
    """The kubelet sends its shared set to each container without a grant, ours too."""
    bed.grant(g="3")
    of = pod("own", {"cpus": "exclusive"}, qos=QoSClass.BURSTABLE)
    bed.place(of, container(of, wants=sent("0-2")))
    bed.update("own-app", Resources(cpus="0-2"))
    assert bed.beside.conflicts == {}


@pytest.mark.parametrize(("has", "contests"), [("2-3", 1), ("0-1", 1), ("0", 0), ("", 0)])
def test_a_cgroup_that_is_rewritten_with_the_kubelets_set_is_a_contest(
    bed: KubeletBed, has: str, contests: int
) -> None:
    """Its grant or what it shares among all others; somebody else's set is none."""
    bed.grant(g="2-3")
    of = pod("g", {"numacpu": "1"})
    bed.place(of, container(of, wants=sent("2-3")))
    correction = Drift(
        container_id="g-app",
        pod="default/g",
        container="app",
        cpus=CPUSet.parse("1"),
        desired_cpus=CPUSet.parse("1"),
        actual=recorded_actual(has, "", None),
        rank=2,
    )
    bed.agent.drift.update_drift(["g-app"], [correction], {"g-app": 0.0}, ["g-app"])
    for _ in range(2):
        bed.look()
    bed.stop("g-app")
    bed.look()
    assert bed.metric("kubelet_cpuset_conflicts_total", yields_to="kubelet") == contests
    assert bed.beside.conflicts == {}  # it is gone


def test_a_grant_on_owned_cpus_is_said(bed: KubeletBed) -> None:
    """The kubelet knows nothing of them. Nothing that runs is moved."""
    of = pod("own", {"cpus": "exclusive"})
    own = bed.place(of, container(of, wants=resources(1, 1)))[0]
    bed.grant(g=own)
    bed.look()
    assert bed.log("exclusive CPUs granted by kubelet")
    assert bed.has("own-app")[0] == own


def test_a_damaged_state_file_is_said_once_and_changes_nothing(bed: KubeletBed) -> None:
    bed.grant(g="2-3")
    bed.look()
    (bed.directory / "cpu_manager_state").write_text("{")
    for _ in range(3):
        bed.look()
    assert len(bed.log("kubelet state unreadable")) == 1
    assert bed.metric("kubelet_state_file_errors") == 1
    assert str(bed.agent.current.state.kubelet.granted_cpus) == "2-3"
    assert bed.beside.files.problems
    bed.grant()
    bed.look()
    assert bed.metric("kubelet_state_file_errors") == 0


def test_grants_of_nobody_and_of_pods_are_shown(bed: KubeletBed) -> None:
    (bed.directory / "cpu_manager_state").write_text(
        json.dumps(
            {
                "policyName": "static",
                "defaultCpuSet": "0",
                "entries": {"uid-soon": {"app": "1"}},
                "podEntries": {"uid-p": {"cpuSet": "2-3"}},
            }
        )
    )
    of = pod("p")
    bed.place(of, container(of, wants=sent("2-3")))
    found = kubelet_document(bed.agent, bed.beside)
    assert [(g.pod_uid, g.container, g.pod, g.cpus) for g in found.grants] == [
        ("uid-soon", "app", "", "1"),
        ("uid-p", "", "p", "2-3"),
    ]


def test_the_kubelets_configuration_is_followed_while_running(bed: KubeletBed) -> None:
    found = [
        DiscoveredConfig(
            path="k", facts=KubeletFacts(reserved_cpus=CPUSet.parse("0")), signature=(1,)
        )
    ]
    watch = KubeletConfigWatch("/nowhere", read=lambda *_: found[-1])
    agent, config = bed.agent, AgentConfig()
    apply = partial(apply_recomputed_settings, agent, SimpleNamespace(config=config), watch)
    watch.read_config(config)
    agent.current.machine = replace(
        agent.current.machine, settings=watch.settings_with_kubelet_config(config, bed.topology)
    )
    watch.report_config()
    watch.report_config()
    assert str(agent.current.machine.settings.reserved_cpus) == "0"
    assert len(bed.log("reservedCPUs 0")) == 1
    asyncio.run(watch.refresh_config(config, apply))  # nothing changed
    found.append(
        replace(found[0], facts=KubeletFacts(reserved_cpus=CPUSet.parse("0-1")), signature=(2,))
    )
    asyncio.run(watch.refresh_config(config, apply))
    assert str(agent.current.machine.settings.reserved_cpus) == "0-1"
    # What cannot be read changes nothing.
    found.append(DiscoveredConfig(path="k", problems=("k: cannot be read",), signature=(3,)))
    before = agent.current.machine
    asyncio.run(watch.refresh_config(config, apply))
    assert agent.current.machine is before
    assert bed.log("k: cannot be read")
    # What can be read beside it counts.
    facts = KubeletFacts(reserved_cpus=CPUSet.parse("0-2"))
    found.append(
        DiscoveredConfig(path="k", facts=facts, problems=("k.d: cannot be read",), signature=(9,))
    )
    asyncio.run(watch.refresh_config(config, apply))
    assert str(agent.current.machine.settings.reserved_cpus) == "0-2"
    # Nor does a kubelet that is being restarted.
    found.append(DiscoveredConfig(path="k", facts=KubeletFacts(), signature=(4,), running=True))
    asyncio.run(watch.refresh_config(config, apply))
    assert str(agent.current.machine.settings.reserved_cpus) == ""
    found.append(DiscoveredConfig())
    before = agent.current.machine
    asyncio.run(watch.refresh_config(config, apply))
    assert agent.current.machine is before
    assert watch.discovered.running
