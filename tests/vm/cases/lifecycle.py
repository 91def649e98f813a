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

    def next_owner(self, guest: Guest) -> None:
        own = guest.pinned(guest.pod("next", {"cpus": "exclusive"}, cpus=1)).cpus
        taken = self.seen[1].cpus | self.seen[2].cpus
        assert len(own) == 1
        assert not own & taken, f"CPU {format_list(own)} belongs to somebody already"


@case(turn=0)
def plugin_killed(guest: Guest) -> None:
    """Kill -9 of the plugin: containers stay while it is away and after it is back."""
    node = _Node.create(guest)
    guest.plugin.kill()
    node.unmoved(guest, "while the plugin is dead")
    guest.plugin.start()
    node.unmoved(guest, "after the plugin is back")
    node.next_owner(guest)
    guest.containerd.cri.stop_pod(node.owner.pod)


@case()
def started_while_away(guest: Guest) -> None:
    """A container that started without the plugin is pinned as soon as the plugin is back."""
    guest.plugin.kill()
    numa_node = guest.full_nodes()[-1]
    cpu = min(guest.cpus_of(numa_node))
    listed = guest.pod("listed", {"numacpu": str(cpu), "numamem": str(numa_node)})
    guest.pinned(listed, cpus=guest.online)
    guest.plugin.start()
    guest.settles(listed, cpus=frozenset({cpu}), mems=frozenset({numa_node}))


@case(turn=0)
def runtime_killed(guest: Guest) -> None:
    """Kill -9 of containerd: nothing moves, and the plugin finds it again by itself."""
    node = _Node.create(guest)
    plugin = guest.plugin.pid
    guest.containerd.kill()
    node_pids = [word.cpus for word in node.seen]
    guest.containerd.start(timeout_s=150)
    guest.plugin.wait_ready(timeout_s=120)
    assert guest.plugin.pid == plugin, "the plugin's process is the same"
    assert [word.cpus for word in node.now(guest)] == node_pids
    node.unmoved(guest, "after the runtime is back")
    node.next_owner(guest)
