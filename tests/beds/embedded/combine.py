"""How a runtime combines the answers of several plugins; used by the embedded runtime.

Within one request every field of every container has one owner, the first plugin that sets it. A
second setter fails the request, even with an equal value and even when it is the same plugin again
in another item. A later plugin may take a field over where there is a removal marker: remove and
set in one answer. Ownership ends with the request. (github.com/containerd/nri, pkg/adaptation.)

Pure: protobuf messages in, protobuf messages out; the messages handed in as targets are changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableSequence
from typing import Final, TypeVar

from nri_numa.nri.wire.pb import nri_pb2 as pb

MARKER: Final = "-"
"""Before a key: remove what has this key."""

_MEMORY_FIELDS: Final = (
    ("limit", "MemLimit"),
    ("reservation", "MemReservation"),
    ("swap", "MemSwapLimit"),
    ("kernel", "MemKernelLimit"),
    ("kernel_tcp", "MemTCPLimit"),
    ("swappiness", "MemSwappiness"),
    ("disable_oom_killer", "MemDisableOomKiller"),
    ("use_hierarchy", "MemUseHierarchy"),
)
_CPU_FIELDS: Final = (
    ("shares", "CPUShares"),
    ("quota", "CPUQuota"),
    ("period", "CPUPeriod"),
    ("realtime_runtime", "CPURealtimeRuntime"),
    ("realtime_period", "CPURealtimePeriod"),
)
_RESOURCE_FIELDS: Final = (
    ("blockio_class", "BlockioClass"),
    ("rdt_class", "RdtClass"),
    ("pids", "PidsLimit"),
)
_LINUX_FIELDS: Final = (
    ("oom_score_adj", "OomScoreAdj"),
    ("io_priority", "IoPriority"),
    ("seccomp_policy", "SeccompPolicy"),
    ("scheduler", "LinuxSched"),
)
_RDT_FIELDS: Final = (
    ("clos_id", "RdtClosID"),
    ("schemata", "RdtSchemata"),
    ("enable_monitoring", "RdtEnableMonitoring"),
)
_HOOK_LISTS: Final = (
    "prestart",
    "create_runtime",
    "create_container",
    "start_container",
    "poststart",
    "poststop",
)

ItemT = TypeVar("ItemT")

Claim = Callable[[str, str], None]
"""Takes (field name of NRI's `Field` enum, key or empty); raises `MergeConflict`."""


class MergeConflict(Exception):
    """The answers cannot be combined; its text is the runtime's."""


class Owners:
    """Who set what, of every container, within one request."""

    __slots__ = ("_owners",)

    def __init__(self) -> None:
        self._owners: dict[tuple[str, str, str], str] = {}

    def claim(self, container_id: str, field: str, key: str, plugin: str) -> None:
        """Make `plugin` the owner.

        Raises:
            MergeConflict: the field has an owner.
        """
        owner = self._owners.get((container_id, field, key))
        if owner is not None:
            raise MergeConflict(f'plugins "{plugin}" and "{owner}" both tried to set {field} {key}')
        self._owners[container_id, field, key] = plugin

    def release(self, container_id: str, field: str, key: str) -> None:
        """Forget the owner: its value is being removed."""
        self._owners.pop((container_id, field, key), None)

    def adopt(self, other: Owners) -> None:
        """Take over what a copy has added."""
        self._owners = other._owners

    def copy(self) -> Owners:
        """Return an independent copy, for an update that may have to be dropped."""
        twin = Owners()
        twin._owners = dict(self._owners)
        return twin


def merge_resources(target: pb.LinuxResources, source: pb.LinuxResources, claim: Claim) -> None:
    """Copy what `source` sets over `target`, field by field.

    Raises:
        MergeConflict: a field has an owner already; `target` is half changed then.
    """
    for name, label in _MEMORY_FIELDS:
        if source.memory.HasField(name):
            claim(label, "")
            getattr(target.memory, name).CopyFrom(getattr(source.memory, name))
    for name, label in _CPU_FIELDS:
        if source.cpu.HasField(name):
            claim(label, "")
            getattr(target.cpu, name).CopyFrom(getattr(source.cpu, name))
    if source.cpu.cpus:
        claim("CPUSetCPUs", "")
        target.cpu.cpus = source.cpu.cpus
    if source.cpu.mems:
        claim("CPUSetMems", "")
        target.cpu.mems = source.cpu.mems
    for limit in source.hugepage_limits:
        claim("HugepageLimits", limit.page_size)
        _replace(target.hugepage_limits, limit, lambda item: item.page_size)
    for key in sorted(source.unified):
        claim("CgroupsUnified", key)
        target.unified[key] = source.unified[key]
    for name, label in _RESOURCE_FIELDS:
        if source.HasField(name):
            claim(label, "")
            getattr(target, name).CopyFrom(getattr(source, name))
    target.devices.extend(source.devices)


class CreateMerge:
    """Collects the answers to one CreateContainer.

    Attributes:
        container: the container as adjusted so far; what the next plugin is shown.
        updates: of other containers.
    """

    def __init__(self, container: pb.Container) -> None:
        """Begin with a container.

        Args:
            container: as requested; copied, and completed with empty sub-messages, since that is
                how plugins are shown it.
        """
        self.container = pb.Container()
        self.container.CopyFrom(container)
        fill_in(self.container)
        self._owners = Owners()
        self.updates = UpdateMerge(self._owners)

    def add(self, plugin: str, response: pb.CreateContainerResponse) -> None:
        """Take one plugin's answer.

        Raises:
            MergeConflict: it contradicts an earlier one, or updates the container being created.
        """
        self._adjust(plugin, response.adjust)
        for update in response.update:
            if update.container_id == self.container.id:
                raise MergeConflict(
                    f'plugin "{plugin}" asked update of "{update.container_id}" during creation'
                )
        self.updates.add(plugin, response.update)

    def _adjust(self, plugin: str, adjust: pb.ContainerAdjustment) -> None:
        container = self.container
        identity = container.id

        def claim(field: str, key: str = "") -> None:
            self._owners.claim(identity, field, key, plugin)

        def release(field: str, key: str = "") -> None:
            self._owners.release(identity, field, key)

        for key in _removals(adjust.annotations):
            release("Annotations", key)
            container.annotations.pop(key, None)
        for key in _settings(adjust.annotations):
            claim("Annotations", key)
            container.annotations[key] = adjust.annotations[key]

        for variable in adjust.env:
            if variable.key.startswith(MARKER):
                release("Env", variable.key[1:])
                _drop_env(container, variable.key[1:])
        for variable in adjust.env:
            if not variable.key.startswith(MARKER):
                claim("Env", variable.key)
                _drop_env(container, variable.key)
                container.env.append(f"{variable.key}={variable.value}")

        for mount in adjust.mounts:
            if mount.destination.startswith(MARKER):
                release("Mounts", mount.destination[1:])
                _drop(container.mounts, mount.destination[1:], lambda item: item.destination)
        for mount in adjust.mounts:
            if not mount.destination.startswith(MARKER):
                claim("Mounts", mount.destination)
                _replace(container.mounts, mount, lambda item: item.destination)

        for name in _HOOK_LISTS:
            getattr(container.hooks, name).extend(getattr(adjust.hooks, name))
        for limit in adjust.rlimits:
            claim("Rlimits", limit.type)
            container.rlimits.append(limit)
        for device in adjust.CDI_devices:
            claim("CdiDevices", device.name)
            container.CDI_devices.append(device)
        if adjust.args:
            arguments = list(adjust.args)
            if arguments[0] == "":
                release("Args")
                arguments = arguments[1:]
            claim("Args")
            container.args[:] = arguments
        self._adjust_linux(adjust.linux, claim, release)

    def _adjust_linux(
        self,
        adjust: pb.LinuxContainerAdjustment,
        claim: Callable[..., None],
        release: Callable[..., None],
    ) -> None:
        linux = self.container.linux
        for device in adjust.devices:
            if device.path.startswith(MARKER):
                release("Devices", device.path[1:])
                _drop(linux.devices, device.path[1:], lambda item: item.path)
        for device in adjust.devices:
            if not device.path.startswith(MARKER):
                claim("Devices", device.path)
                _replace(linux.devices, device, lambda item: item.path)
        for namespace in adjust.namespaces:
            if namespace.type.startswith(MARKER):
                release("Namespace", namespace.type[1:])
                _drop(linux.namespaces, namespace.type[1:], lambda item: item.type)
        for namespace in adjust.namespaces:
            if not namespace.type.startswith(MARKER):
                claim("Namespace", namespace.type)
                _replace(linux.namespaces, namespace, lambda item: item.type)

        merge_resources(linux.resources, adjust.resources, claim)
        if adjust.cgroups_path:
            claim("CgroupsPath")
            linux.cgroups_path = adjust.cgroups_path
        for name, label in _LINUX_FIELDS:
            if adjust.HasField(name):
                claim(label)
                getattr(linux, name).CopyFrom(getattr(adjust, name))
        if adjust.HasField("memory_policy"):
            claim("MemoryPolicy")  # goes into the OCI spec only; a container does not show it

        for key in _removals(adjust.sysctl):
            release("Sysctl", key)
            linux.sysctl.pop(key, None)
        for key in _settings(adjust.sysctl):
            claim("Sysctl", key)
            linux.sysctl[key] = adjust.sysctl[key]
        for key in _removals(adjust.net_devices):
            release("LinuxNetDevices", key)
            linux.net_devices.pop(key, None)
        for key in _settings(adjust.net_devices):
            claim("LinuxNetDevices", key)
            linux.net_devices[key].CopyFrom(adjust.net_devices[key])
        if adjust.rdt.remove:
            for _, label in _RDT_FIELDS:
                release(label)
            linux.ClearField("rdt")
        for name, label in _RDT_FIELDS:
            if adjust.rdt.HasField(name):
                claim(label)
                getattr(linux.rdt, name).CopyFrom(getattr(adjust.rdt, name))


class UpdateMerge:
    """Collects updates of containers from the answers to one request, in first-touched order."""

    def __init__(self, owners: Owners | None = None) -> None:
        self._owners = owners if owners is not None else Owners()
        self._records: dict[str, pb.ContainerUpdate] = {}

    def add(self, plugin: str, updates: Iterable[pb.ContainerUpdate]) -> None:
        """Take one plugin's updates. An update without a container id is dropped.

        Raises:
            MergeConflict: two set the same field, and the later one does not ignore failures.
        """
        for update in updates:
            identity = update.container_id
            if not identity:
                continue
            owners = self._owners.copy()
            known = self._records.get(identity)
            record = pb.ContainerUpdate(container_id=identity, ignore_failure=True)
            if known is not None:
                record.CopyFrom(known)

            def claim(
                field: str, key: str, identity: str = identity, owners: Owners = owners
            ) -> None:
                owners.claim(identity, field, key, plugin)

            try:
                merge_resources(record.linux.resources, update.linux.resources, claim)
            except MergeConflict:
                if update.ignore_failure:
                    continue
                raise
            record.ignore_failure = record.ignore_failure and update.ignore_failure
            self._records[identity] = record
            self._owners.adopt(owners)

    def take(self, container_id: str) -> pb.ContainerUpdate | None:
        """Return and remove the update of one container: the one the request is about."""
        return self._records.pop(container_id, None)

    def updates(self) -> list[pb.ContainerUpdate]:
        """Return the combined updates."""
        return list(self._records.values())


def merge_update(request: pb.LinuxResources, own: pb.ContainerUpdate | None) -> pb.LinuxResources:
    """Return what an UpdateContainer applies: the request, with the plugins' word over it."""
    merged = pb.LinuxResources()
    merged.CopyFrom(request)
    if own is not None:
        merge_resources(merged, own.linux.resources, lambda _field, _key: None)
    return merged


def fill_in(container: pb.Container) -> None:
    """Add the empty sub-messages plugins always find in a container."""
    container.hooks.SetInParent()
    container.linux.resources.memory.SetInParent()
    container.linux.resources.cpu.SetInParent()


def _removals(keys: Iterable[str]) -> list[str]:
    return sorted(key[1:] for key in keys if key.startswith(MARKER))


def _settings(keys: Iterable[str]) -> list[str]:
    return sorted(key for key in keys if not key.startswith(MARKER))


def _drop_env(container: pb.Container, name: str) -> None:
    container.env[:] = [item for item in container.env if item.partition("=")[0] != name]


def _drop(items: MutableSequence[ItemT], key: str, key_of: Callable[[ItemT], str]) -> None:
    kept = [item for item in items if key_of(item) != key]
    del items[:]
    items.extend(kept)


def _replace(items: MutableSequence[ItemT], item: ItemT, key_of: Callable[[ItemT], str]) -> None:
    _drop(items, key_of(item), key_of)
    items.append(item)
