"""Parts by the configuration and the runtime: the link, memory policies, devices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nri_numa.config import AgentConfig, LinkKind
from nri_numa.engine.values.workload import RUNTIMES, SINCE, MemoryPolicies, MemoryPolicy
from nri_numa.machine.cgroups import CgroupReader, CgroupWriter
from nri_numa.node.agent import Agent
from nri_numa.node.handler import AgentHandler
from nri_numa.nri.wire.versions import parse_version
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import Metrics
from nri_numa.runtime import RuntimeInfo

if TYPE_CHECKING:
    from nri_numa.cri.link import CRILink
    from nri_numa.devices.counts import Counted
    from nri_numa.devices.watch import DeviceWatch
    from nri_numa.machine.pci import PCIDevice
    from nri_numa.node.late import LateStarts


log = get_logger("daemon")


def over_cri(config: AgentConfig, *, launched: bool = False) -> bool:
    """Whether the runtime is reached over CRI; never where it launched us over NRI itself."""
    if config.runtime.link is not LinkKind.CRI:
        return False
    if launched:
        log.warning("runtime.link: cri is not used", because="the runtime launched us over NRI")
    return not launched


def claimed_socket(config: AgentConfig, *, launched: bool = False) -> str:
    """The socket whose directory says that an agent works on this runtime."""
    if over_cri(config, launched=launched):
        return config.runtime.cri_socket.removeprefix("unix://")
    return config.runtime.nri_socket


def late_starts(
    agent: Agent, metrics: Metrics, reader: CgroupReader, writer: CgroupWriter
) -> LateStarts:
    """Who puts late containers right; only where they can be late."""
    from nri_numa.node.late import LateStarts

    return LateStarts(agent, metrics, reader, writer)


def cri_link(config: AgentConfig, handler: AgentHandler, late: LateStarts) -> CRILink:
    """The link over CRI; grpc is imported here and not before."""
    from nri_numa.cri.link import CRILink

    return CRILink(
        handler,
        late,
        socket_path=config.runtime.cri_socket,
    )


# --- Memory policies that this node's runtime and kernel can set ---

_INSTEAD: Final = {
    MemoryPolicy.PREFERRED_MANY: MemoryPolicy.PREFERRED,
    MemoryPolicy.WEIGHTED_INTERLEAVE: MemoryPolicy.INTERLEAVE,
}


def memory_policies(
    info: RuntimeInfo, kernel: str, *, over_cri: bool, sysfs_root: Path = Path("/")
) -> MemoryPolicies:
    """What can be set here.

    Args:
        info: what the runtime said of itself.
        kernel: its release, ``6.1.0-18-amd64``; one that cannot be read is taken for a new one.
        sysfs_root: holds ``sys/``, where the weights of interleaving are.
        over_cri: containers are watched over CRI, and met when they exist.
    """
    if over_cri:
        clause = f"{info.name} {info.version} is watched over CRI, which knows none; expected NRI"
        return MemoryPolicies(dict.fromkeys(MemoryPolicy, clause))
    if not info.nri_version:
        clause = (
            f"{info.name} {info.version} hands none on (its NRI is older than 0.12); expected "
            f"{RUNTIMES}"
        )
        return MemoryPolicies(dict.fromkeys(MemoryPolicy, clause))
    release = parse_version(kernel)
    return MemoryPolicies(
        {
            mode: f"Linux {kernel} does not have it; expected Linux {since[0]}.{since[1]} or "
            f"newer, or {_INSTEAD[mode]}"
            for mode, since in SINCE.items()
            if release is not None and release[:2] < since
        },
        weights=_weights(sysfs_root / "sys/kernel/mm/mempolicy/weighted_interleave"),
    )


def _weights(folder: Path) -> dict[int, int]:
    """``node0`` and so on, each a number from 1 to 255; what cannot be read counts as 1."""
    found: dict[int, int] = {}
    for path in sorted(folder.glob("node*")):
        with suppress(OSError, ValueError):
            weight = int(path.read_text(encoding="ascii"))
            if 1 <= weight <= 255:
                found[int(path.name.removeprefix("node"))] = weight
    return found


# --- Devices ---


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
