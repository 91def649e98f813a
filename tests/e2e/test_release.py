"""``nri-numa release`` on a real containerd: what the kernel says afterwards."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from tests.beds.cgroups import CGROUP_ROOT, unified
from tests.beds.containerd import Containerd
from tests.beds.cri import CRI, allowed, guaranteed, poll, with_cpus
from tests.beds.plugin_process import PluginProcess, StartPlugin


def results(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return {c["pod"]: c for c in json.loads(done.stdout)["containers"]}


def quota(pid: int) -> int:
    """CFS quota of a process's cgroup, -1 for none."""
    wanted, name = ("", "cpu.max") if unified() else ("cpu", "cpu.cfs_quota_us")
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if wanted in controllers.split(","):
            word = (CGROUP_ROOT / wanted / path.lstrip("/") / name).read_text().split()[0]
            return -1 if word == "max" else int(word)
    raise LookupError(f"no cgroup of process {pid}")


def test_everything_is_given_back(containerd: Containerd, cri: CRI, plugin: PluginProcess) -> None:
    """CPUs, memory nodes and CPU limits come back; whom somebody else pinned stays."""
    whole = allowed("self")
    listed = cri.pod("listed", numacpu="1", numamem=whole.mems)
    owner = cri.owner()
    unbound = cri.pod("unbound")
    foreign = cri.run(cri.run_pod("foreign"), resources=with_cpus(guaranteed(1), "0"))
    own = cri.allowed(owner).cpus
    assert cri.allowed(unbound).cpus != whole.cpus
    assert quota(cri.pid(owner)) == -1

    rejected = plugin.release()
    assert rejected.returncode == 1
    assert f"process {plugin.pid}" in rejected.stderr
    assert cri.allowed(owner).cpus == own

    planned = results(plugin.release("--dry-run", "-o", "json"))
    assert {pod: c["result"] for pod, c in planned.items()} == {
        "listed": "planned",
        "owner": "planned",
        "unbound": "planned",
        "foreign": "foreign",
    }
    assert cri.allowed(owner).cpus == own

    assert plugin.terminate() == 0
    done = results(plugin.release("-o", "json"))
    assert {pod: c["result"] for pod, c in done.items() if pod != "foreign"} == dict.fromkeys(
        ("listed", "owner", "unbound"), "released"
    )
    for container in (listed, owner, unbound):
        assert cri.allowed(container) == whole
    assert cri.allowed(foreign).cpus == "0"
    poll(lambda: quota(cri.pid(owner)) == 100_000, "the CPU limit is back")
    assert not plugin.checkpoint.exists()
    assert plugin.checkpoint.with_name("checkpoint.released").exists()

    again = plugin.release()
    assert again.returncode == 0
    assert again.stdout.startswith("0 released; ")
    assert cri.allowed(foreign).cpus == "0"


def test_without_its_checkpoint(cri: CRI, plugin: PluginProcess) -> None:
    """Annotations and the shared pool tell what was ours."""
    whole = allowed("self")
    owner = cri.owner()
    unbound = cri.pod("unbound")
    plugin.terminate()
    plugin.checkpoint.unlink()
    done = plugin.release()
    assert done.returncode == 0, done.stderr
    assert re.search(r"^2 released; ", done.stdout, re.MULTILINE)
    assert done.stderr == ""  # a Guaranteed container's limit is its request
    assert cri.allowed(owner) == cri.allowed(unbound) == whole


def test_a_plugin_that_comes_back_pins_again(cri: CRI, plugin: PluginProcess) -> None:
    """Uninstalling is no one-way street."""
    owner = cri.owner()
    unbound = cri.pod("unbound")
    plugin.terminate()
    assert plugin.release().returncode == 0
    assert cri.allowed(owner) == cri.allowed(unbound) == allowed("self")
    plugin.start()
    poll(lambda: len(cri.cpus(owner)) == 1, "owner pinned again")
    poll(lambda: cri.allowed(unbound) != allowed("self"), "unbound narrowed")


def test_says_why_it_cannot(start_plugin: StartPlugin, tmp_path: Path) -> None:
    plugin = start_plugin()
    plugin.terminate()
    done = plugin.release(f"--nri-socket={tmp_path}/none.sock")
    assert done.returncode == 3
    assert "nothing was released" in done.stderr
    assert "none.sock" in done.stderr
    assert plugin.checkpoint.exists()
