"""The everyday node: systemd as the first process, the systemd cgroup driver, the shipped unit.

After each case the machine insists that systemd's AllowedCPUs and AllowedMemoryNodes, the cgroup
and the agent say the same of every container, and that they still do when a property of each scope
was set (`tests.vm.scopes`).
"""

from __future__ import annotations

import re
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

from tests.beds.cri import Container, poll
from tests.beds.plugin_process import REPOSITORY
from tests.beds.vm_system import VENV
from tests.machines.vm_machine import Machine, format_list
from tests.vm import words
from tests.vm.guest import Guest
from tests.vm.plugin import systemctl
from tests.vm.registry import case


def _everyday(machine: Machine) -> bool:
    return bool(machine.system)


def _neighbours(guest: Guest) -> list[Container]:
    return [guest.pod(f"neighbour-{i}") for i in range(3)]


@case(applies=_everyday, system=True)
def placed_beside_neighbours(guest: Guest) -> None:
    """With three neighbours each kind of placement is right at its first instruction."""
    neighbours = _neighbours(guest)
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
    assert not aligned.cpus & own


def _drifts(guest: Guest, drift: Callable[[Path, str], object]) -> None:
    guest.reconfigure({"reconcile": {"interval": "5s"}})
    neighbours = _neighbours(guest)
    own = guest.pinned(guest.pod("owner", {"cpus": "exclusive"}, cpus=2)).cpus
    for each in neighbours:
        guest.settles(each, cpus=guest.online - own)
    pid = guest.pid(neighbours[0])
    before = guest.plugin.metric("nri_numa_drift_repaired_total")
    drift(words.cgroup(pid), format_list(guest.online))
    poll(lambda: words.allowed(pid).cpus == guest.online or None, "the drift")
    guest.settles(neighbours[0], cpus=guest.online - own, timeout_s=120)
    poll(
        lambda: guest.plugin.metric("nri_numa_drift_repaired_total") > before or None,
        "the repair counted",
    )


@case(applies=_everyday, system=True)
def drift_by_hand(guest: Guest) -> None:
    """A cgroup that was written by hand is put right, and stays so when systemd writes it again."""
    _drifts(guest, lambda cgroup, cpus: (cgroup / "cpuset.cpus").write_text(cpus))


@case(applies=_everyday, system=True)
def drift_by_systemd(guest: Guest) -> None:
    """The same where systemd was told the other set: by ``systemctl set-property AllowedCPUs=``."""
    _drifts(
        guest,
        lambda cgroup, cpus: systemctl(
            "set-property", "--runtime", cgroup.name, f"AllowedCPUs={cpus}"
        ),
    )


@case(applies=_everyday, system=True)
def killed_and_started_by_systemd(guest: Guest) -> None:
    """Kill -9 of the service: systemd starts it again, nobody moves, CPUs are given once."""
    neighbours = _neighbours(guest)
    own = guest.pinned(guest.pod("owner", {"cpus": "exclusive"}, cpus=2)).cpus
    guest.plugin.kill()
    second = guest.pod("second", {"cpus": "exclusive"}, cpus=1)
    guest.plugin.wait_ready(timeout_s=150)
    poll(lambda: len(words.allowed(guest.pid(second)).cpus) == 1 or None, "a CPU for the second")
    other = words.allowed(guest.pid(second)).cpus
    assert not other & own
    for each in neighbours:
        guest.settles(each, cpus=guest.online - own - other)


_PROBE = f"""[Service]
Type=oneshot
Restart=no
WatchdogSec=0
RuntimeDirectory=probe
ExecStart=
ExecStart={VENV}/bin/python -c "from nri_numa.devices.interfaces import parents_in; \\
    print(parents_in('/run/netns/probe', 60))"
Environment=PYTHONPATH={REPOSITORY}
StandardOutput=append:/run/probe.log
"""


@case(applies=_everyday, system=True, plugin=False, runtime=False)
def network_namespaces_by_a_drop_in(guest: Guest) -> None:
    """The unit as shipped may enter no network namespace, with the documented drop-in it may."""
    subprocess.run(["ip", "netns", "add", "probe"], check=True)
    unit = Path("/etc/systemd/system/probe.service")
    unit.write_text((REPOSITORY / "systemd/nri-numa.service").read_text())
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
