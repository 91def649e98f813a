"""The DaemonSet's pod on a real containerd: the image, the mounts and the few rights it asks for.

The test plays the kubelet with the shipped manifest. Only the two directories that belong to a
private test bed, and the configuration, are others than on a node.
"""

import json
import shutil
import stat
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nri_numa.cri.pb import cri_pb2
from nri_numa.model.cpuset import CPUSet
from tests.beds.cgroups import unified
from tests.beds.containerd import Containerd
from tests.beds.containerds import insist_on_rejection
from tests.beds.cri import CRI, allowed, poll
from tests.beds.daemonset import SECURITY, AgentContainer, pod_spec
from tests.beds.images import AGENT_IMAGE as IMAGE
from tests.beds.images import build_agent_image
from tests.beds.plugin_process import free_port
from tests.machines.cpus import MACHINE


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_agent_image(tmp_path_factory.mktemp("image") / "image.tar")


@pytest.fixture
def kubelet(
    request: pytest.FixtureRequest, containerd: Containerd, image: Path, tmp_path: Path
) -> Iterator[AgentContainer]:
    if IMAGE not in containerd.cri.images():
        containerd.import_image(image)
        poll(lambda: IMAGE in containerd.cri.images(), "image known to CRI")
    spec = pod_spec()
    (shipped,) = spec["containers"]
    assert shipped["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert shipped["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    directories = {name: tmp_path / name for name in ("state", "config")}
    for directory in directories.values():
        directory.mkdir()
    directories["nri"] = containerd.nri_socket.parent
    player = AgentContainer(containerd.cri, spec, directories)
    assert containerd.nri_socket.name == "nri.sock"
    yield player
    request.node.add_report_section("teardown", "plugin.log", player.log()[-6000:])


def answers(port: int, path: str) -> bool | None:
    """Whether a probe from the node succeeds."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}{path}", timeout=2) as answer:
            return answer.status == 200 or None
    except (OSError, urllib.error.HTTPError):
        return None


def runtime_default(tmp_path: Path) -> cri_pb2.SecurityProfile:
    return cri_pb2.SecurityProfile(profile_type=cri_pb2.RuntimeDefault)


def ours(tmp_path: Path) -> cri_pb2.SecurityProfile:
    """The shipped profile, which a runtime is told by its whole path."""
    profile = tmp_path / "nri-numa.json"
    shutil.copy(SECURITY / "nri-numa.json", profile)
    return cri_pb2.SecurityProfile(profile_type=cri_pb2.Localhost, localhost_ref=str(profile))


@pytest.mark.parametrize("seccomp", [runtime_default, ours], ids=["runtime-default", "ours"])
def test_the_plugin_pins_from_inside_a_container(
    cri: CRI,
    kubelet: AgentContainer,
    tmp_path: Path,
    seccomp: Callable[[Path], cri_pb2.SecurityProfile],
) -> None:
    """It pins other pods, keeps its state over its own restart, and gives everything back.

    Also by our own profile, as a runtime applies it, which needs some calls itself before the
    program begins.
    """
    kubelet.seccomp = seccomp(tmp_path)
    port = free_port()
    (tmp_path / "config" / "agent.yaml").write_text(
        json.dumps({"http": {"address": f"127.0.0.1:{port}"}})
    )
    whole = allowed("self")
    plugin = kubelet.run()
    poll(lambda: answers(port, "/readyz"), "ready")
    status = Path(f"/proc/{cri.pid(plugin)}/status").read_text()
    assert "CapEff:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status
    assert "Seccomp:\t2" in status

    owner = cri.owner()
    own = cri.allowed(owner)
    listed_cpu = str(max(MACHINE - CPUSet.parse(own.cpus)))
    listed = cri.pod("listed", numacpu=listed_cpu)
    assert cri.first_line(owner) == own
    assert own.cpus != whole.cpus
    assert cri.allowed(listed).cpus == listed_cpu
    # What the plugin's own container may use is not taken for the machine.
    assert cri.allowed(plugin).cpus != whole.cpus

    cri.stop(plugin, timeout_s=5)
    assert cri.status(plugin).status.exit_code == 0
    again = kubelet.run(attempt=1)
    poll(lambda: answers(port, "/readyz"), "ready again")
    assert cri.allowed(owner) == own
    pinned = [owner, listed]
    insist_on_rejection(cri, "second", numacpu=own.cpus)
    # A mount that is read-only would leave starting containers to the runtime. It is the plugin's
    # user that owns the file; it has no capability that would help.
    inside = Path(f"/proc/{cri.pid(again)}/root/sys/fs/cgroup")
    path = cri.info(listed)["runtimeSpec"]["linux"]["cgroupsPath"].lstrip("/")
    cpus = (inside if unified() else inside / "cpuset") / path / "cpuset.cpus"
    assert cpus.read_text() == f"{listed_cpu}\n"
    cpus.write_text(f"{listed_cpu}\n")
    assert (cpus.stat().st_uid, cpus.stat().st_mode & stat.S_IWUSR) == (0, stat.S_IWUSR)

    busy = kubelet.run("release", attempt=2)
    assert kubelet.wait(busy) == 1
    assert "stop it first" in kubelet.log()

    cri.stop(again, timeout_s=5)
    done = kubelet.run("release", attempt=3)
    assert kubelet.wait(done) == 0, kubelet.log()
    for container in pinned:
        assert cri.allowed(container) == whole

    stays = kubelet.run("release", "--stay", attempt=4)
    poll(lambda: "Waiting to be stopped." in kubelet.log(), "released and stays")
    cri.stop(stays, timeout_s=10)
    assert cri.status(stays).status.exit_code == 0
