"""The container bed itself: a real containerd does what later tests take for granted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.beds import cgroups
from tests.beds.containerd import Containerd
from tests.beds.cri import (
    BEST_EFFORT,
    CRI,
    CRIError,
    QoS,
    Resources,
    Seen,
    burstable,
    guaranteed,
)

pytestmark = pytest.mark.e2e


def machine() -> Seen:
    """What this very process may use, which a container without a cpuset gets too."""
    text = Path("/proc/self/status").read_text()
    fields = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
    return Seen(cpus=fields["Cpus_allowed_list"], mems=fields["Mems_allowed_list"])


def test_version_is_the_one_unpacked(containerd: Containerd, cri: CRI) -> None:
    assert cri.version().startswith(f"containerd {containerd.binaries.version}")


def test_first_line_tells_what_the_process_may_use(cri: CRI) -> None:
    """Without a plugin a container sees every CPU, with a cpuset from the kubelet just those."""
    pod = cri.run_pod("first-line", qos=QoS.BURSTABLE)
    assert cri.first_line(cri.run(pod, "free", resources=burstable(0.5))) == machine()
    pinned = cri.run(pod, "pinned", resources=Resources(cpus="1", mems="0"))
    assert cri.first_line(pinned) == Seen(cpus="1", mems="0")
    assert cri.allowed(pinned) == Seen(cpus="1", mems="0")
    assert cgroups.cpuset_of(f"{pod.cgroup_parent}/{pinned.id}") == ("1", "0")


def test_limits_reach_the_spec(cri: CRI) -> None:
    pod = cri.run_pod("limits")
    container = cri.run(pod, resources=guaranteed(1.5, memory=32 * 1024 * 1024))
    resources = cri.info(container)["runtimeSpec"]["linux"]["resources"]
    assert (resources["cpu"]["shares"], resources["cpu"]["quota"]) == (1536, 150_000)
    assert resources["memory"]["limit"] == 32 * 1024 * 1024
    assert cri.info(container)["runtimeSpec"]["linux"]["cgroupsPath"].startswith(
        f"{cri.cgroup_root}/pod"
    )


def test_update_moves_a_running_container(cri: CRI) -> None:
    container = cri.run(cri.run_pod("update"), resources=BEST_EFFORT)
    cri.update(container, Resources(cpus="0-1"))
    assert cri.allowed(container).cpus == "0-1"
    with pytest.raises(CRIError, match="UpdateContainerResources"):
        cri.update(container, Resources(cpus="4000"))
    assert cri.allowed(container).cpus == "0-1"


@pytest.mark.parametrize("kill", [False, True], ids=["sigterm", "sigkill"])
def test_containers_outlive_the_daemon(containerd: Containerd, cri: CRI, kill: bool) -> None:
    container = cri.run(cri.run_pod("outlive"), resources=Resources(cpus="1"))
    pid = cri.pid(container)
    containerd.restart(kill=kill)
    assert cri.running(container)
    assert cri.pid(container) == pid
    assert cri.allowed(container).cpus == "1"


def test_stop_ends_a_container_at_once(cri: CRI) -> None:
    container = cri.run(cri.run_pod("stop"))
    pid = cri.pid(container)
    cri.stop(container)
    assert not cri.running(container)
    assert not Path(f"/proc/{pid}").exists()


def test_nothing_is_left_behind(containerd: Containerd, tmp_path: Path) -> None:
    """A bed that is closed with running pods leaves no process, mount, cgroup or socket."""
    with Containerd(containerd.binaries, tmp_path) as second:
        pod = second.cri.run_pod("left", qos=QoS.BURSTABLE)
        second.cri.run(pod)
        assert second.shims()
    assert second.shims() == []
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    for root in cgroups.hierarchies():
        assert not (root / pod.cgroup_parent.lstrip("/")).exists()
    assert second.log()
