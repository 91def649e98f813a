"""Pods that get a network card of the machine, by the real CNI plugin ``host-device``.

A runtime has one network configuration for all pods, and ``host-device`` has the card's name in it.
Which pod gets which card is what a meta plugin such as Multus decides; here that is a script of
four lines that takes ``host-device``'s configuration from a file named like the pod.
"""

import json
import shutil
from pathlib import Path

from tests.beds.debs import CNI_PLUGINS, DebCache
from tests.machines.vm_machine import Machine

CARDS = ("e1000e", "igb", "virtio-net-pci")
_NAME = "cards"
_PROGRAMS = ("host-device", "static", "loopback")
# Runs `host-device` for everything but the question for versions, too: it knows its own best.
_SCRIPT = """#!/bin/sh
pod=${{CNI_ARGS##*K8S_POD_NAME=}}
file={cards}/${{pod%%;*}}
[ "$CNI_COMMAND" = VERSION ] && exec {programs}/host-device
exec {programs}/host-device <"$file"
"""


def moves_cards(machine: Machine) -> bool:
    """Whether there is a network card on each NUMA node, and more than one of both."""
    return machine.has_on_each_node(*CARDS)


def network(bed: Path) -> tuple[dict[str, object], Path]:
    """Configuration and folder of plugins for the runtime; the plugins' package is in the cache."""
    package = DebCache().cached(CNI_PLUGINS.label)
    assert package is not None, "the CNI plugins are not in the cache"
    programs, cards = bed / "cni-programs", bed / "cards"
    for directory in (programs, cards):
        directory.mkdir(parents=True, exist_ok=True)
    for name in _PROGRAMS:
        shutil.copy(package.root / "usr/lib/cni" / name, programs / name)
    script = programs / _NAME
    script.write_text(_SCRIPT.format(cards=cards, programs=programs), encoding="ascii")
    script.chmod(0o755)
    plugin = {"type": _NAME}
    return {"cniVersion": "1.0.0", "name": _NAME, "plugins": [plugin]}, programs


def give(bed: Path, pod: str, interface: str, address: str) -> None:
    """Let the next pod of a name have a network interface of the machine.

    `address`: it gets, with the length of its prefix; a runtime insists on one.
    """
    configuration = {
        "cniVersion": "1.0.0",
        "name": _NAME,
        "type": "host-device",
        "device": interface,
        "ipam": {"type": "static", "addresses": [{"address": address}]},
    }
    (bed / "cards" / pod).write_text(json.dumps(configuration), encoding="ascii")
