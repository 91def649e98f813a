"""Crashes of the plugin and of the runtime: no running container moves."""

from __future__ import annotations

from dataclasses import dataclass

from tests.beds.cri import Container
from tests.machines.vm_machine import format_list
from tests.vm import words
from tests.vm.guest import Guest
from tests.vm.registry import case


@dataclass
class _Node:
    """Four pods that stand for all."""

    shared: Container
    listed: Container
    owner: Container
    aligned: Container
    seen: list[words.Allowed]

    @classmethod
    def create(cls, guest: Guest) -> _Node:
        last = guest.full_nodes()[-1]
        listed_cpu = max(guest.cpus_of(last))
        node = cls(
            shared=guest.pod("shared"),
            listed=guest.pod("listed", {"numacpu": str(listed_cpu), "numamem": str(last)}),
            owner=guest.pod("owner", {"cpus": "exclusive"}, cpus=1),
            aligned=guest.pod("aligned", {"policy": "single-numa-node", "cpus": "shared"}),
            seen=[],
        )
        node.seen = node.now(guest)
        assert node.seen[1].cpus == {listed_cpu}
        assert len(node.seen[2].cpus) == 1
        return node

    def now(self, guest: Guest) -> list[words.Allowed]:
        return [
            words.allowed(guest.pid(each))
            for each in (self.shared, self.listed, self.owner, self.aligned)
        ]

    def unmoved(self, guest: Guest, when: str) -> None:
        found = self.now(guest)
        assert found == self.seen, f"{when}: {found}, expected {self.seen}"


@case(turn=0, limit_s=800)  # six pods and two restarts
def killed(guest: Guest) -> None:
    """Kill -9 of plugin and containerd: nobody moves, and who started meanwhile is pinned."""
    node = _Node.create(guest)
    guest.plugin.kill()
    node.unmoved(guest, "while the plugin is dead")
    missed = guest.pod("missed", {"numacpu": format_list(node.seen[1].cpus)})
    guest.pinned(missed, cpus=guest.online)
    guest.plugin.start()
    guest.settles(missed, cpus=node.seen[1].cpus)
    node.unmoved(guest, "after the plugin is back")
    plugin = guest.plugin.pid
    guest.containerd.kill()
    guest.containerd.start(timeout_s=150)
    guest.plugin.wait_ready(timeout_s=120)
    assert guest.plugin.pid == plugin, "the plugin's process is the same"
    node.unmoved(guest, "after the runtime is back")
    own = guest.pinned(guest.pod("next", {"cpus": "exclusive"}, cpus=1)).cpus
    assert len(own) == 1
    taken = node.seen[1].cpus | node.seen[2].cpus
    assert not own & taken, f"CPU {format_list(own)} belongs to somebody already"
