"""What systemd means containers to have, beside what the kernel and the agent say."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.beds.containerd import Containerd
from tests.beds.cri import poll
from tests.beds.plugin_process import PluginProcess
from tests.machines.vm_machine import format_list, parse_list
from tests.vm import words
from tests.vm.plugin import systemctl

_MEMORY_HIGH = 512 * 1024 * 1024


class Guest(Protocol):
    """What is looked at: a machine with a runtime and an agent; see `tests.vm.guest.Guest`."""

    notes: list[str]

    @property
    def containerd(self) -> Containerd: ...
    @property
    def plugin(self) -> PluginProcess: ...
    @property
    def online(self) -> frozenset[int]: ...
    @property
    def memory_nodes(self) -> frozenset[int]: ...


@dataclass(frozen=True, slots=True)
class Scope:
    """One running container: its scope, and what three parties mean it to have."""

    pod: str
    unit: str
    directory: Path
    kernel: tuple[str, str]
    systemd: tuple[str, str]
    agent: tuple[str, str]

    def agrees(self, online: frozenset[int], mems: frozenset[int]) -> bool:
        """Whether it is the same; an agent that leaves a container alone means everything."""
        meant = tuple(
            own or format_list(all) for own, all in zip(self.agent, (online, mems), strict=True)
        )
        there = tuple(
            own or format_list(all) for own, all in zip(self.kernel, (online, mems), strict=True)
        )
        return self.kernel == self.systemd and there == meant


def scopes(guest: Guest) -> list[Scope]:
    everything = ("", "")
    meant: dict[str, tuple[str, str]] = {}
    if agent := guest.plugin.running:
        listed = guest.plugin.json("/v1/assignments")["containers"]
        meant = {one["id"]: (one["cpus"], one["mems"]) for one in listed}
    found = []
    running = guest.containerd.cri.containers(running=True)
    cgroups = [words.cgroup(guest.containerd.cri.pid(each.id)) for each in running]
    for each, directory, shown in zip(running, cgroups, _shown(cgroups), strict=True):
        found.append(
            Scope(
                pod=each.labels["io.kubernetes.pod.name"],
                unit=directory.name,
                directory=directory,
                kernel=(
                    (directory / "cpuset.cpus").read_text().strip(),
                    (directory / "cpuset.mems").read_text().strip(),
                ),
                systemd=shown,
                agent=meant.get(each.id, ("unknown", "unknown")) if agent else everything,
            )
        )
    return found


def _shown(cgroups: Sequence[Path]) -> list[tuple[str, str]]:
    """Both properties of the scopes of cgroups, by one call: a program takes a second here."""
    if not cgroups:
        return []
    properties = ("--property=AllowedCPUs", "--property=AllowedMemoryNodes")
    found = []
    # "AllowedCPUs=0-2 5", and an empty line between two units.
    for block in systemctl("show", *properties, *(each.name for each in cgroups)).split("\n\n"):
        values = dict(line.split("=", 1) for line in block.splitlines())
        found.append((_list(values["AllowedCPUs"]), _list(values["AllowedMemoryNodes"])))
    return found


def _list(text: str) -> str:
    return format_list(parse_list(",".join(text.split())))


def systemd_agrees(guest: Guest) -> None:
    """Insist that systemd, the kernel and the agent mean the same, and still do after a property.

    systemd writes all properties of a scope whenever one of them is set: a set that only the cgroup
    has is gone then. It may take a moment until systemd has a set, but after the property nothing
    may come back, not even for a moment.
    """
    with contextlib.suppress(TimeoutError):
        poll(lambda: not _differing(guest), "agreement", every_s=2)
    _insist(guest, "at the end of the case")
    there = scopes(guest)
    for scope in there:
        systemctl("set-property", "--runtime", scope.unit, f"MemoryHigh={_MEMORY_HIGH}")
    for scope in there:
        file = scope.directory / "memory.high"
        poll(
            lambda file=file: file.read_text().strip() == str(_MEMORY_HIGH) or None,  # type: ignore[misc]
            f"MemoryHigh of {scope.unit}",
        )
    _insist(guest, "after MemoryHigh was set")


def _differing(guest: Guest) -> list[Scope]:
    return [one for one in scopes(guest) if not one.agrees(guest.online, guest.memory_nodes)]


def _insist(guest: Guest, when: str) -> None:
    found = scopes(guest)
    guest.notes += [
        f"{when}: {one.pod}: kernel {one.kernel}, systemd {one.systemd}, agent {one.agent}"
        for one in found
    ]
    wrong = [one for one in found if not one.agrees(guest.online, guest.memory_nodes)]
    assert not wrong, f"{when}: " + "; ".join(
        f"{one.pod} ({one.unit}): kernel {one.kernel}, systemd {one.systemd}, agent {one.agent}"
        for one in wrong
    )
