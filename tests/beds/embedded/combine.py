"""How a runtime combines the answers of several plugins; used by the embedded runtime.

Within one request every field of every container has one owner, the first plugin that sets it. A
second setter fails the request, even with an equal value and even when it is the same plugin again
in another item. Ownership ends with the request. (github.com/containerd/nri, pkg/adaptation; of a
creation here is what nri-numa answers, and not that a plugin may take a field over by removing it.)

Pure: protobuf messages in, protobuf messages out; the messages handed in as targets are changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nri_numa.nri.wire.pb import nri_pb2 as pb

_LABELS = {"cpus": "CPUSetCPUs", "mems": "CPUSetMems", "quota": "CPUQuota"}

Claim = Callable[[str, str], None]
"""Takes (field name of NRI's `Field` enum, key or empty); raises `MergeConflict`."""


class MergeConflict(Exception):
    """The answers cannot be combined; its text is the runtime's."""


class Owners:
    """Who set what, of every container, within one request."""

    def __init__(self, owners: dict[tuple[str, str, str], str] | None = None) -> None:
        self._owners = owners or {}

    def claim(self, container_id: str, field: str, key: str, plugin: str) -> None:
        """Make `plugin` the owner.

        Raises:
            MergeConflict: the field has an owner.
        """
        owner = self._owners.setdefault((container_id, field, key), "")
        if owner:
            raise MergeConflict(f'plugins "{plugin}" and "{owner}" both tried to set {field} {key}')
        self._owners[container_id, field, key] = plugin

    def adopt(self, other: Owners) -> None:
        self._owners = other._owners

    def copy(self) -> Owners:
        """Return an independent copy, for an update that may have to be dropped."""
        return Owners(dict(self._owners))


def merge_resources(target: pb.LinuxResources, source: pb.LinuxResources, claim: Claim) -> None:
    """Copy what `source` sets over `target`, field by field.

    Raises:
        MergeConflict: a field has an owner already; `target` is half changed then.
    """
    rest = pb.LinuxResources()
    rest.CopyFrom(source)
    for part in ("memory", "cpu"):
        into = getattr(target, part)
        for field, _ in getattr(source, part).ListFields():
            claim(_LABELS.get(field.name, field.name), "")
            into.ClearField(field.name)
        into.MergeFrom(getattr(source, part))
        rest.ClearField(part)
    for field, _ in rest.ListFields():
        claim(field.name, "")
        target.ClearField(field.name)
    target.MergeFrom(rest)


class CreateMerge:
    """Collects the answers to one CreateContainer.

    Attributes:
        container: the container as adjusted so far; what the next plugin is shown. A copy of the
            requested one, completed with empty sub-messages, as plugins are shown it.
    """

    def __init__(self, container: pb.Container) -> None:
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
        adjust, container = response.adjust, self.container

        def claim(field: str, key: str = "") -> None:
            self._owners.claim(container.id, field, key, plugin)

        for key in sorted(adjust.annotations):
            claim("Annotations", key)
            container.annotations[key] = adjust.annotations[key]
        for variable in adjust.env:
            claim("Env", variable.key)
            kept = [each for each in container.env if each.partition("=")[0] != variable.key]
            container.env[:] = [*kept, f"{variable.key}={variable.value}"]
        merge_resources(container.linux.resources, adjust.linux.resources, claim)
        if adjust.linux.HasField("memory_policy"):
            claim("MemoryPolicy")  # goes into the OCI spec only; a container does not show it
        if any(update.container_id == container.id for update in response.update):
            raise MergeConflict(
                f'plugin "{plugin}" asked update of "{container.id}" during creation'
            )
        self.updates.add(plugin, response.update)


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
