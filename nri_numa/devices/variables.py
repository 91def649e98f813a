"""Environment variables by which device plugins tell a container what it got. Pure.

Anybody may write such a variable into a pod. It costs nobody else anything: a container is placed
where it says that its device is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from nri_numa.devices.nvidia import ALL, NOTHING
from nri_numa.engine.values.workload import MOST_DEVICES
from nri_numa.machine.pci import PCI_ADDRESS

PCI_PREFIX = "PCIDEVICE_"
NVIDIA = "NVIDIA_VISIBLE_DEVICES"


class Named(NamedTuple):
    """What variables name.

    Attributes:
        addresses: PCI addresses with the variable's name.
        gpus: UUIDs or indices.
        notes: about values that are none.
    """

    addresses: tuple[tuple[str, str], ...] = ()
    gpus: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def named_by(variables: Mapping[str, str], *, pci: bool = True, nvidia: bool = True) -> Named:
    """Read the variables; at most `MOST_DEVICES` of each kind count.

    Args:
        variables: by name.
        pci: read those of the SR-IOV network device plugin.
        nvidia: read those of NVIDIA's.
    """
    addresses: list[tuple[str, str]] = []
    gpus: list[str] = []
    notes: list[str] = []
    for name, value in sorted(variables.items()):
        if pci and name.startswith(PCI_PREFIX):
            for part in value.split(",")[:MOST_DEVICES]:
                address = part.strip().lower()
                if PCI_ADDRESS.fullmatch(address):
                    addresses.append((address, name))
                elif address:
                    notes.append(
                        f"variable {_short(name)} is {_short(part)!r}, which is no PCI address: "
                        "no hint"
                    )
        elif nvidia and name == NVIDIA:
            word = value.strip().lower()
            if word == ALL:
                notes.append(f"variable {NVIDIA} is 'all', as images set it themselves: no hint")
            elif word not in NOTHING:
                gpus += [part.strip() for part in value.split(",") if part.strip()]
    return Named(tuple(addresses[:MOST_DEVICES]), tuple(gpus[:MOST_DEVICES]), tuple(notes))


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}…"
