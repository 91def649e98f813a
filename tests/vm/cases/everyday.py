"""The everyday node: systemd as the first process, the systemd cgroup driver, the shipped unit.

After each case the machine insists that systemd's AllowedCPUs and AllowedMemoryNodes, the cgroup
and the agent say the same of every container, and that they still do when a property of each scope
was set (`tests.vm.scopes`).
"""

import os
import re
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from tests.beds import race_bed
from tests.beds.cri import CRI, Container, Resources, guaranteed, poll
from tests.beds.images import FIRST_LINE_COMMAND, IMAGE, build_image
from tests.beds.plugin_process import REPOSITORY
from tests.beds.vm_system import VENV
from tests.machines.vm_machine import Machine, format_list, parse_list
from tests.vm import words
from tests.vm.guest import Guest
from tests.vm.plugin import UNIT, UnitPlugin, systemctl
from tests.vm.registry import case
from tests.vm.scopes import systemd_agrees
from tools import packages
from tools.build_image import Rootfs
from tools.interpreter import here

_OWNERS = 3
_NO_ROUNDS = {"reconcile": {"interval": "1h"}}


def _everyday(machine: Machine) -> bool:
    return bool(machine.system)


def _outside_core(machine: Machine) -> bool:
    """Machines of `make test-all` only: it takes minutes, and what CI runs covers most of it."""
    return _everyday(machine) and not machine.core


@case(applies=_everyday, system=True, limit_s=800, turn=0)  # seven pods
def placed_beside_neighbours(guest: Guest) -> None:
    """With three neighbours each kind of placement is right at its first instruction."""
    neighbours = [guest.pod(f"neighbour-{i}") for i in range(3)]
    own = guest.pinned(guest.pod("owner", {"cpus": "exclusive"}, cpus=2)).cpus
    assert len(own) == 2
    for each in neighbours:
        guest.settles(each, cpus=guest.online - own)
    numa_node = guest.full_nodes()[-1]
    cpu = max(guest.cpus_of(numa_node) - own)
    listed = guest.pod("listed", {"numacpu": str(cpu), "numamem": str(numa_node)})
    guest.pinned(listed, cpus=frozenset({cpu}), mems=frozenset({numa_node}))
    aligned = guest.pinned(guest.pod("aligned", {"policy": "single-numa-node"}, cpus=1))
    assert len(guest.nodes_of(aligned.cpus)) == len(aligned.mems) == 1
    own |= aligned.cpus  # a Guaranteed pod with a policy owns its CPU
    assert len(own) == 3
    second = guest.pinned(guest.pod("second", {"cpus": "exclusive"}, cpus=1)).cpus
    assert len(second) == 1
    assert not second & own
    for each in neighbours:
        guest.settles(each, cpus=guest.online - own - second)


def _drifts(guest: Guest, drift: Callable[[Path, str], object]) -> None:
    guest.reconfigure(_NO_ROUNDS)  # found by inotify
    neighbour = guest.pod("neighbour")
    own = guest.pinned(guest.pod("owner", {"cpus": "exclusive"}, cpus=2)).cpus
    guest.settles(neighbour, cpus=guest.online - own)
    before = guest.plugin.metric("nri_numa_drift_repaired_total")
    began = time.monotonic()
    drift(words.cgroup(guest.pid(neighbour)), format_list(guest.online))
    # It may be repaired before anybody has seen it.
    poll(lambda: guest.plugin.metric("nri_numa_drift_repaired_total") > before, "the repair")
    guest.notes.append(f"counted as repaired {time.monotonic() - began:.1f} s after it began")
    guest.settles(neighbour, cpus=guest.online - own)
    guest.reconfigure({})


@case(applies=_everyday, system=True)
def drift_by_hand(guest: Guest) -> None:
    """A cgroup that was written by hand is put right, and stays so when systemd writes it again."""
    _drifts(guest, lambda cgroup, cpus: (cgroup / "cpuset.cpus").write_text(cpus))


@case(applies=_everyday, system=True, turn=1)
def drift_by_systemd(guest: Guest) -> None:
    """The same where systemd was told the other set: by ``systemctl set-property AllowedCPUs=``."""
    _drifts(
        guest,
        lambda cgroup, cpus: systemctl(
            "set-property", "--runtime", cgroup.name, f"AllowedCPUs={cpus}"
        ),
    )


@case(applies=_everyday, system=True, turn=1)
def killed_and_started_by_systemd(guest: Guest) -> None:
    """Kill -9 of the service: systemd starts it again, nobody moves, CPUs are given once."""
    neighbour = guest.pod("neighbour")
    own = guest.pinned(guest.pod("owner", {"cpus": "exclusive"}, cpus=2)).cpus
    guest.plugin.kill()
    second = guest.pod("second", {"cpus": "exclusive"}, cpus=1)
    guest.plugin.wait_ready(timeout_s=150)
    poll(lambda: len(words.allowed(guest.pid(second)).cpus) == 1, "a CPU for the second")
    other = words.allowed(guest.pid(second)).cpus
    assert not other & own
    guest.settles(neighbour, cpus=guest.online - own - other)


@case(applies=_everyday, system=True, turn=0)
def killed_before_systemd_knew(guest: Guest) -> None:
    """Kill -9 once a neighbour made room: a new process tells systemd what the old one did not."""
    guest.reconfigure(_NO_ROUNDS)
    neighbour = guest.pod("neighbour")
    systemd_agrees(guest)
    file, process = words.cgroup(guest.pid(neighbour)) / "cpuset.cpus", guest.plugin.pid
    had, pod = file.read_text(), guest.sandbox("owner", {"cpus": "exclusive"})

    def kill() -> None:
        poll(lambda: file.read_text() != had, "the neighbour makes room", every_s=0.02)
        os.kill(process, signal.SIGKILL)

    with ThreadPoolExecutor(1) as thread:
        killed = thread.submit(kill)
        owner = guest.container(pod, "main", cpus=2)
        killed.result()
    guest.plugin.wait_ready(timeout_s=150)
    pid = guest.pid(owner)
    poll(lambda: len(words.allowed(pid).cpus) == 2, "two CPUs for the owner")
    guest.settles(neighbour, cpus=guest.online - words.allowed(pid).cpus)
    systemd_agrees(guest)
    guest.reconfigure({})


@case(applies=_everyday, system=True, turn=1)
def cpu_back_while_systemd_is_told(guest: Guest) -> None:
    """A CPU is back before systemd has heard that it went: what systemd hears undoes nothing."""
    guest.reconfigure(_NO_ROUNDS)
    owner = guest.pod("owner", {"cpus": "exclusive", "numacpu": "2-3"}, cpus=2)
    file = words.cgroup(guest.pid(owner)) / "cpuset.cpus"
    before = guest.plugin.metric("nri_numa_drift_found_total")
    for pause in (0.8, 1.0, 1.2, 1.4, 1.8):  # it is told a second after the write
        words.set_online(3, online=False)
        try:
            poll(lambda: file.read_text() == "2\n", "a list without CPU 3", every_s=0.05)
            time.sleep(pause)
        finally:
            words.set_online(3, online=True)
        guest.settles(owner, cpus=frozenset({2, 3}))
        systemd_agrees(guest)
        assert guest.plugin.metric("nri_numa_drift_found_total") == before, f"{pause} s"
    guest.reconfigure({})


@case(applies=_everyday, system=True, limit_s=800)  # twelve pods
def created_at_once(guest: Guest) -> None:
    """Three times pods start while an owner is granted: they leave its CPU, and systemd has it."""
    for number in range(3):
        with ThreadPoolExecutor(4) as threads:
            plain = [threads.submit(guest.pod, f"plain-{number}-{i}") for i in range(3)]
            owner = threads.submit(guest.pod, f"owner-{number}", {"cpus": "exclusive"}, cpus=1)
        own = guest.pinned(owner.result()).cpus
        assert len(own) == 1
        for each in plain:
            guest.settles(each.result(), cpus=guest.online - own)
        systemd_agrees(guest)
        guest.reset()


@case(applies=_everyday, system=True, limit_s=800)  # a dozen pods
def updated_beside_owners(guest: Guest) -> None:
    """Updates of neighbours' memory bring no owner's CPU back, while owners come and go."""
    # tests/e2e assert how long that is, on real CPUs: emulated ones stand still at times.
    count, late = race_bed.updated_beside_owners(guest.containerd, _OWNERS)
    guest.notes.append(f"{count} updates; ms after an owner's first instruction: {late}")
    assert count > _OWNERS
    # A write during which an emulated CPU stood still is looked at again, and nothing else is.
    if not guest.plugin.metric("nri_numa_cgroup_writes_slow_total"):
        assert guest.plugin.metric("nri_numa_undelivered_updates_repaired_total") == 0
    assert guest.plugin.metric("nri_numa_drift_repairs_abandoned_total") == 0


@case(applies=_outside_core, system=True, limit_s=800)  # two restarts
def nothing_brings_an_owned_cpu_back(guest: Guest) -> None:
    """Reloads, a pause, an exec, restarts, an update without the plugin: a neighbour stays away."""
    neighbour = guest.pod("neighbour")
    own = guest.pinned(guest.pod("owner", {"cpus": "exclusive"}, cpus=2)).cpus
    guest.settles(neighbour, cpus=guest.online - own)
    systemd_agrees(guest)  # what systemd has by now is what it would write
    for way in ("daemon-reload", "daemon-reexec"):
        systemctl(way)
        guest.now(neighbour, cpus=guest.online - own)
    assert guest.containerd.paused_and_executed(neighbour.id) == format_list(guest.online - own)
    guest.now(neighbour, cpus=guest.online - own)
    guest.plugin.kill()  # systemd, which starts it again, takes a second for that
    guest.containerd.cri.update(neighbour, Resources(memory=96 << 20))
    guest.now(neighbour, cpus=guest.online - own)
    guest.plugin.wait_ready(timeout_s=150)
    guest.containerd.restart()
    guest.plugin.wait_ready(timeout_s=150)
    guest.containerd.cri.stop(neighbour)
    again = guest.containerd.cri.run(
        neighbour.pod, resources=guaranteed(1), command=FIRST_LINE_COMMAND, attempt=1
    )
    guest.pinned(again, cpus=guest.online - own)


@case(applies=_everyday, system=True, turn=1)
def displaced_and_back(guest: Guest) -> None:
    """An owner whose CPU is offline makes room for the next owner, and has its CPU when it is back.

    systemd has all of that, too.
    """
    neighbour = guest.pod("neighbour")
    owner = guest.pod("owner", {"cpus": "exclusive", "numacpu": "2"})
    guest.pinned(owner, cpus=frozenset({2}))
    words.set_online(2, online=False)
    try:
        guest.settles(owner, cpus=guest.online)
        own = guest.pinned(guest.pod("next", {"cpus": "exclusive"})).cpus
        for each in (owner, neighbour):
            guest.settles(each, cpus=guest.online - own)
        said = subprocess.run(
            ["nri-numa", "status"], capture_output=True, text=True, check=True
        ).stdout
        assert "default/owner/main: displaced, because CPU 2 is offline" in " ".join(
            said.split()
        ), said
        systemd_agrees(guest)
    finally:
        words.set_online(2, online=True)
    guest.settles(owner, cpus=frozenset({2}))
    guest.settles(neighbour, cpus=guest.online - own - {2})


@case(
    applies=_everyday, system=True, plugin=False, limit_s=800, turn=0
)  # three minutes of them hung
def reloaded_hung_and_stopped(guest: Guest) -> None:
    """The service has no capability; it outlives a reload, a hang ends it, a stop moves nobody."""
    guest.plugin.ensure_ready()
    first = guest.plugin.pid
    status = Path(f"/proc/{first}/status").read_text()
    assert re.search(r"^CapEff:\s+0+$", status, re.MULTILINE), status
    owner = guest.pod("owner", {"cpus": "exclusive"}, cpus=1)
    own = guest.pinned(owner).cpus
    assert len(own) == 1
    systemctl("reload", "nri-numa")
    assert guest.plugin.pid == first
    guest.plugin.log_start = len(guest.plugin.log().encode())  # what is said from now on counts
    os.kill(first, signal.SIGSTOP)
    poll(lambda: guest.plugin.pid not in (0, first), "another process", timeout_s=600, every_s=2)
    guest.plugin.wait_ready(timeout_s=150)
    assert words.allowed(guest.pid(owner)).cpus == own
    other = guest.pinned(guest.pod("second", {"cpus": "exclusive"}, cpus=1)).cpus
    assert len(other) == 1
    assert not other & own, "the checkpoint outlived the process"
    guest.plugin.terminate()
    assert (guest.plugin.state_directory / "checkpoint").exists()
    assert words.allowed(guest.pid(owner)).cpus == own


@case(applies=_everyday, system=True, plugin=False, turn=0)
def released(guest: Guest) -> None:
    """After ``release`` all have everything, in the cgroup and in systemd."""
    guest.plugin.ensure_ready()
    all_of_them = [guest.pod("neighbour"), guest.pod("owner", {"cpus": "exclusive"}, cpus=2)]
    guest.plugin.terminate()
    done = subprocess.run(["nri-numa", "release"], capture_output=True, text=True, check=False)
    guest.notes += (done.stdout + done.stderr).splitlines()
    assert done.returncode == 0
    for each in all_of_them:
        guest.settles(each, cpus=guest.online, mems=guest.memory_nodes)
    systemd_agrees(guest)


@case(
    applies=lambda machine: machine.system == "trixie" and machine.core,
    system=True,
    plugin=False,
    runtime=False,
    limit_s=800,  # two restarts of the runtime
    turn=1,
)
def limit_lifted_under_crun(guest: Guest) -> None:
    """A CPU limit that crun set while no agent ran is lifted, follows a resize, and comes back.

    crun from 1.11 on limits the scope and its own cgroup in it (Debian 13 has 1.21; 1.28 does too).
    """
    crun = Path("/usr/bin/crun")
    version = subprocess.run([crun, "--version"], capture_output=True, text=True, check=True)
    guest.notes.append(version.stdout.splitlines()[0])
    guest.containerd.stop()
    usual = guest.containerd.binaries
    guest.containerd.binaries = replace(usual, runc=crun)
    try:
        guest.containerd.start(timeout_s=150)
        guest.plugin.terminate()
        owner = guest.pod("owner", {"cpus": "exclusive"}, cpus=1)
        limits = _cpu_limits(guest, owner)
        guest.notes.append(f"as crun made them: {limits}")
        assert limits == ["100000 100000"] * 2
        guest.plugin.ensure_ready()
        poll(lambda: _is_unlimited(guest, owner), "no limit", timeout_s=60, every_s=0.5)
        guest.containerd.cri.update(owner, guaranteed(2, 64 << 20))
        poll(lambda: len(words.allowed(guest.pid(owner)).cpus) == 2, "a second CPU", timeout_s=60)
        poll(lambda: _is_unlimited(guest, owner), "no limit", timeout_s=60, every_s=0.5)
        guest.plugin.terminate()
        done = subprocess.run(["nri-numa", "release"], capture_output=True, text=True, check=False)
        guest.notes += [*(done.stdout + done.stderr).splitlines(), str(_cpu_limits(guest, owner))]
        assert done.returncode == 0
        assert " back " in done.stdout
        assert "200000 100000" in _cpu_limits(guest, owner)
    finally:
        guest.reset()
        guest.containerd.stop()
        guest.containerd.binaries = usual


def _cpu_limits(guest: Guest, container: Container) -> list[str]:
    """``cpu.max`` of crun's cgroup and of the scope around it."""
    inner = words.cgroup(guest.pid(container))
    return [(each / "cpu.max").read_text().strip() for each in (inner, inner.parent)]


def _is_unlimited(guest: Guest, container: Container) -> bool:
    return all(text.startswith("max ") for text in _cpu_limits(guest, container))


_PROBE = f"""[Service]
Type=oneshot
Restart=no
WatchdogSec=0
RuntimeDirectory=probe
ExecStart=
ExecStart={VENV}/bin/python -c "from nri_numa.devices.watch import list_interface_parents; \\
    print(list_interface_parents('/run/netns/probe', 60))"
Environment=PYTHONPATH={REPOSITORY}
StandardOutput=append:/run/probe.log
"""


@case(applies=_everyday, system=True, plugin=False, runtime=False)
def network_namespaces_by_a_drop_in(guest: Guest) -> None:
    """The unit as shipped may enter no network namespace, with the documented drop-in it may."""
    subprocess.run(["ip", "netns", "add", "probe"], check=True)
    unit = Path("/etc/systemd/system/probe.service")
    shipped = (REPOSITORY / "systemd/nri-numa.service").read_text()
    unit.write_text(shipped.replace("Sockets=nri-numa.socket\n", ""))
    drop_ins = unit.with_name("probe.service.d")
    drop_ins.mkdir()
    (drop_ins / "probe.conf").write_text(_PROBE)
    systemctl("daemon-reload")
    systemctl("start", "probe")
    text = (REPOSITORY / "docs/devices.md").read_text()
    (documented,) = re.findall(r"\n\n((?: {6}.*\n)+)\n", text)
    (drop_ins / "devices.conf").write_text(textwrap.dedent(documented))
    systemctl("daemon-reload")
    systemctl("start", "probe")
    without, given = Path("/run/probe.log").read_text().splitlines()
    guest.notes += [without, given]
    assert "Operation not permitted" in without
    assert given == "()"


_RUNTIME = Path("/run/containerd/containerd.sock")
_CONTAINERD = "/etc/containerd/config.toml"
_SETTINGS = Path("/etc/nri-numa/agent.yaml")
# What a node has before nri-numa: Debian's containerd 1.7, which has NRI off.
_NODE = f"""set -e
mkdir -p /etc/containerd
containerd config default | sed \\
  -e 's/SystemdCgroup = false/SystemdCgroup = true/' \\
  -e 's|sandbox_image = .*|sandbox_image = "{IMAGE}"|' \\
  -e 's/disable_apparmor = false/disable_apparmor = true/' > {_CONTAINERD}
printf '#!/bin/sh\\nexec "$@"\\n' > /usr/local/bin/sudo
chmod 755 /usr/local/bin/sudo
rm -f /etc/systemd/system/containerd.service /etc/nri-numa/agent.yaml
systemctl daemon-reload
systemctl start containerd
"""


def _commands(section: str, first: str = "") -> str:
    """What a section of docs/install-node.md has the reader type, from the block that begins so."""
    text = (REPOSITORY / "docs/install-node.md").read_text().partition(f"\n## {section}\n")[2]
    blocks = re.findall(r"\n\n((?: {4}.*\n)+)", "\n" + text.partition("\n## ")[0])
    return textwrap.dedent(next(block for block in blocks if block.lstrip().startswith(first)))


# The .deb with the program that the image has, and the same of a higher version.
_UPGRADE = """cd /run
dpkg-deb -R old.deb tree
sed -i 's/^Version: .*/Version: 1000/' tree/DEBIAN/control
dpkg-deb -Znone -b tree new.deb
"""


def _upgraded(plugin: UnitPlugin, type_in: Callable[[str], str]) -> None:
    """Install the package, upgrade and remove it: only an upgrade restarts it, settings stay."""
    processes = [plugin.pid]
    UNIT.unlink()
    UNIT.with_suffix(".socket").unlink()
    made = Rootfs()
    made.add("bin/nri-numa", b'#!/bin/sh\nexec /usr/local/bin/nri-numa "$@"\n', 0o755)
    Path("/run/old.deb").write_bytes(packages.deb(made, here()))
    type_in(_UPGRADE)
    for name in ("old", "new"):
        type_in(f"dpkg -i /run/{name}.deb; echo '# kept' >> {_SETTINGS}")
        processes.append(plugin.pid)
    assert processes[0] == processes[1] != processes[2] != 0
    assert re.search(r"default +owner +main +exclusive", type_in("nri-numa status"))
    type_in("dpkg -r nri-numa")
    type_in("dpkg -i /run/new.deb")
    assert plugin.pid == 0
    assert _SETTINGS.read_text().endswith("# kept\n# kept\n")


@case(
    applies=lambda machine: machine.system == "trixie" and not machine.kubernetes,
    system=True,
    plugin=False,
    runtime=False,
    limit_s=800,  # a score of programs and three restarts
)
def installed_by_the_page(guest: Guest) -> None:
    """docs/install-node.md as it stands, on Debian's own containerd: from ``check`` to ``release``.

    All but ``make node`` and its link, which the image has already. In `make test-all` the package
    takes the place of the page's units in between.
    """
    plugin = guest.plugin
    assert isinstance(plugin, UnitPlugin)
    plugin.uninstall()
    guest.containerd.stop()

    def type_in(commands: str, *, works: bool = True) -> str:
        done = subprocess.run(
            ["sh", "-xc", f"set -e\n{commands}" if works else commands],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY,
            check=False,
        )  # fmt: skip
        guest.notes += done.stdout.splitlines()
        assert done.returncode == 0 or not works, done.stdout
        return done.stdout

    type_in(_NODE)
    plugin.slow_down()
    archive = build_image(guest.containerd.binaries.busybox, Path("/run/page.tar"))
    poll(lambda: subprocess.run(["ctr", "version"], check=False).returncode == 0, "ctr")
    type_in(f"ctr -n k8s.io images import --local {archive}")
    # The first of them says that NRI is off, with an exit code of 1.
    said = type_in(_commands("NRI in the runtime", "sudo nri-numa check"), works=False)
    assert "disable = false" in said
    type_in(_commands("As a systemd service", "sudo cp"))
    with CRI(_RUNTIME, Path("/run/page"), slices=True) as cri:
        try:
            plain = cri.run(cri.run_pod("plain"), command=FIRST_LINE_COMMAND)
            own = {"numa.kubernetes.io/cpus": "exclusive"}
            owner = cri.run(
                cri.run_pod("owner", annotations=own),
                resources=guaranteed(1),
                command=FIRST_LINE_COMMAND,
            )
            (cpu,) = parse_list(cri.first_line(owner).cpus)
            assert words.allowed(cri.pid(plain)).cpus == guest.online - {cpu}
            assert re.search(r"default +owner +main +exclusive", type_in("sudo nri-numa status"))
            before = [words.allowed(cri.pid(each)) for each in (plain, owner)]
            if not guest.machine.core:
                _upgraded(plugin, type_in)
                assert before == [words.allowed(cri.pid(each)) for each in (plain, owner)]
            type_in(_commands("Uninstall", "sudo systemctl disable"))
            if not guest.machine.core:
                type_in("dpkg -P nri-numa")
                assert not _SETTINGS.exists()
            for each in (plain, owner):
                assert words.allowed(cri.pid(each)).cpus == guest.online
        finally:
            cri.remove_all()
            type_in("systemctl stop containerd; systemctl disable --now nri-numa", works=False)
            plugin.uninstall()
