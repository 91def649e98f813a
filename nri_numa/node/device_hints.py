"""The watch over containers' devices, where the configuration switches it on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nri_numa.config import AgentConfig
from nri_numa.node.agent import Agent

if TYPE_CHECKING:
    from nri_numa.devices.counts import Counted
    from nri_numa.devices.watch import DeviceWatch
    from nri_numa.machine.pci import PCIDevice


def device_watch(config: AgentConfig, agent: Agent) -> DeviceWatch | None:
    """A watch by the configuration's section ``devices``; None, and nothing imported, when off."""
    if not config.devices.enabled:
        return None
    from nri_numa.devices.watch import DeviceWatch

    return DeviceWatch(
        config.devices,
        root=config.sysfs_root,
        kubelet_root=config.kubelet_root,
        places=lambda: agent.machine.places,
        own_resource=config.device_plugin.resource_name,
    )


def counted_devices(config: AgentConfig) -> Callable[[], Counted | None]:
    """Asks how many devices the kubelet can give; None, and nothing imported, when off."""
    if not config.devices.count:
        return lambda: None
    from nri_numa.devices.counts import DeviceCounts

    return DeviceCounts(config.kubelet_root, config.device_plugin.resource_name).known


def known_roots(config: AgentConfig) -> dict[int, tuple[str, ...]]:
    """PCIe roots by NUMA node, for the devices that claims allocate; none, unread, when off."""
    if not config.dra.enabled:
        return {}
    from nri_numa.machine.pci import pcie_roots
    from nri_numa.machine.tree import open_tree

    return pcie_roots(open_tree(config.sysfs_root))


def shown_devices(config: AgentConfig) -> tuple[PCIDevice, ...] | None:
    """The machine's PCI devices as they are now; None, and nothing read, when off."""
    if not config.devices.enabled:
        return None
    from nri_numa.machine.pci import pci_devices
    from nri_numa.machine.tree import open_tree

    return pci_devices(open_tree(config.sysfs_root))
