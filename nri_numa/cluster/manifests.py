"""Reader for one pod of a manifest or of the API server, which names each problem by its path.

The pod is untrusted input. The extender, the controller and simulations read pods here.
"""

from __future__ import annotations

import difflib
import re
import uuid
from collections.abc import Collection, Iterator, Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from nri_numa.cluster.pods import (
    ContainerManifest,
    ContainerRole,
    PodManifest,
    ResourceQuantities,
    qos_of,
)
from nri_numa.errors import AgentError
from nri_numa.text import (
    HUGEPAGES_PREFIX,
    BadQuantity,
    milli_cpus,
    parse_exact_quantity,
    parse_hugepages,
    whole_bytes,
)

DNS_LABEL_PATTERN: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_UID_NAMESPACE: Final = uuid.UUID("8d1c1f5e-6b1d-5d55-9d0f-3f2b8f6a7c11")
_BUILT_IN_RESOURCES: Final = frozenset({"cpu", "memory", "ephemeral-storage"})
_POD_SUBJECT: Final = "the pod"
_CRITICAL_PRIORITY_CLASS: Final = "system-node-critical"


class ManifestError(AgentError):
    """Invalid manifests: each problem names file, document, path, value and expectation."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


def value_text(value: object) -> str:
    """Return a value as a message shows it: short, and on one line."""
    if value is None:
        return "not set"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value) if isinstance(value, int | float) else repr(str(value))
    return text if len(text) <= 60 else f"{text[:50]}… ({len(text)} characters)"


class ManifestValue(msgspec.Struct, frozen=True):
    """A value in a document with its location, None if it is missing; it collects problems.

    The location is file and document, the path starts at the document's top, such as
    ``spec.containers[0].name``.
    """

    location: str
    path: str
    value: object
    problems: list[str]

    def add_problem(self, clause: str) -> None:
        """Add a problem of this value."""
        self.problems.append(f"{self.location}: {f'{self.path} ' if self.path else ''}{clause}")

    def add_expectation_problem(self, expectation: str) -> None:
        """Add the problem that the value is not what was expected."""
        self.add_problem(f"is {value_text(self.value)}, expected {expectation}")

    def __getitem__(self, key: str) -> ManifestValue:
        """Return the value of a key; None as its value if this is no mapping or lacks the key."""
        below = self.value.get(key) if isinstance(self.value, Mapping) else None
        path = f"{self.path}.{key}" if "." not in key and "/" not in key else f"{self.path}[{key}]"
        return ManifestValue(self.location, path.removeprefix("."), below, self.problems)

    def as_mapping(self, *, required: bool = False) -> dict[str, ManifestValue]:
        """Return the values by key; empty, with a problem, if this is no mapping."""
        if self.value is None and not required:
            return {}
        if not isinstance(self.value, Mapping):
            self.add_expectation_problem("a mapping")
            return {}
        for key in self.value:
            if not isinstance(key, str):
                self.add_problem(f"has the key {value_text(key)}, expected text: quote it")
        return {key: self[key] for key in self.value if isinstance(key, str)}

    def as_list(self, item_text: str, *, required: bool = False) -> list[ManifestValue]:
        """Return the values of a list; empty, with a problem, if this is no list."""
        if self.value is None and not required:
            return []
        if not isinstance(self.value, list) or (required and not self.value):
            text = f"a list of at least {item_text}" if required else "a list"
            self.add_expectation_problem(text)
            return []
        return [
            ManifestValue(self.location, f"{self.path}[{number}]", item, self.problems)
            for number, item in enumerate(self.value)
        ]

    def as_text(self, default: str = "") -> str:
        """Return the text; the default, with a problem, if the value is no text."""
        if self.value is None:
            return default
        if not isinstance(self.value, str):
            self.add_expectation_problem(f"text: put {value_text(self.value)} in quotes")
            return default
        return self.value

    def as_number(self, default: int, maximum: int) -> int:
        """Return the whole number; the default, with a problem, if it is not 0 to ``maximum``."""
        if self.value is None:
            return default
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            self.add_expectation_problem("a whole number")
            return default
        if not 0 <= self.value <= maximum:
            self.add_expectation_problem(f"0 to {maximum}")
            return default
        return self.value


def read_pod(document: object, slots_resource: str = "") -> PodManifest:
    """Read one Pod of the API server, with its own uid and all devices that it requests.

    Otherwise as `read_manifests`.
    """
    root = ManifestValue("pod", "", document, [])
    meta = root["metadata"]
    meta.as_mapping(required=True)
    name = meta["name"].as_text() or meta["generateName"].as_text()
    namespace = meta["namespace"].as_text("default")
    reader = PodManifestReader(slots_resource, every_device=True)
    template = reader.read_pod(root, namespace)
    uid = meta["uid"].as_text() or pod_uid(f"Pod/{namespace}/{name}/{name}")
    if root.problems:
        raise ManifestError(tuple(root.problems))
    return replace(template, name=name, uid=uid)


class PodManifestReader:
    """Reads pods, and collects notes; problems are collected by the values that have them.

    Args:
        slots_resource: extended resource that counts exclusive CPUs; empty for none.
        devices: resources of an inventory; others are problems.
        every_device: read the requests of all extended resources.
    """

    def __init__(
        self,
        slots_resource: str,
        devices: Collection[str] | None = None,
        *,
        every_device: bool = False,
    ) -> None:
        self.counted, self.devices, self.every_device = slots_resource, devices, every_device
        self.notes: list[str] = []

    def read_pod(self, pod: ManifestValue, namespace: str) -> PodManifest:
        """Read a pod without its name and uid."""
        meta, spec = pod["metadata"], pod["spec"]
        spec.as_mapping(required=True)
        labels = read_string_map(meta["labels"])
        annotations = read_string_map(meta["annotations"])
        requests = limits = None
        if spec["resources"].value is not None:
            requests, limits = self._read_resources(spec["resources"], _POD_SUBJECT)
        containers = self._read_containers(spec)
        if spec["overhead"].value is not None:
            self.notes.append(f"{pod.location}: the pod's overhead has no NUMA node: ignored")
        return PodManifest(
            source=pod.location,
            namespace=namespace,
            name="",
            uid="",
            qos=qos_of(containers, requests, limits),
            labels=labels,
            annotations=annotations,
            containers=containers,
            pod_requests=requests,
            pod_limits=limits,
            critical=spec["priorityClassName"].as_text() == _CRITICAL_PRIORITY_CLASS,
            runtime_handler=spec["runtimeClassName"].as_text(),
        )

    def _read_containers(self, spec: ManifestValue) -> tuple[ContainerManifest, ...]:
        claims = {item["name"].as_text() for item in spec["resourceClaims"].as_list("one claim")}
        roles: list[tuple[ManifestValue, ContainerRole]] = []
        for item in spec["initContainers"].as_list("one container"):
            policy = item["restartPolicy"].as_text()
            if policy not in ("", "Always", "Never", "OnFailure"):
                item["restartPolicy"].add_expectation_problem("Always (a sidecar), or nothing")
            role = ContainerRole.SIDECAR if policy == "Always" else ContainerRole.INIT
            roles.append((item, role))
        apps = spec["containers"].as_list("one container", required=True)
        roles += [(item, ContainerRole.APP) for item in apps]
        for item in spec["ephemeralContainers"].as_list("one container"):
            if item["resources"].as_mapping():
                item["resources"].add_expectation_problem("none: an ephemeral container has none")
            roles.append((item, ContainerRole.EPHEMERAL))
        names: set[str] = set()
        return tuple(self._read_container(item, role, names, claims) for item, role in roles)

    def _read_container(
        self,
        container: ManifestValue,
        role: ContainerRole,
        names: set[str],
        pod_claims: Collection[str],
    ) -> ContainerManifest:
        container.as_mapping(required=True)
        name_value = container["name"]
        name = name_value.as_text()
        if not name or not DNS_LABEL_PATTERN.fullmatch(name):
            name_value.add_expectation_problem("lower case letters, digits and dashes, at most 63")
        elif name in names:
            name_value.add_expectation_problem("a name that no other container of the pod has")
        names.add(name)
        requests, limits = self._read_resources(container["resources"], f"container {name}")
        counts = {
            resource: self._read_resource_count(container["resources"], resource, unit)
            for resource, unit in self._extended_resources_with_units(container["resources"])
        }
        return ContainerManifest(
            name=name,
            role=role,
            requests=requests,
            limits=limits,
            slots=counts.pop(self.counted, 0),
            devices={resource: count for resource, count in counts.items() if count},
            claims=self._read_claim_names(container["resources"]["claims"], name, pod_claims),
        )

    def _read_claim_names(
        self, claims: ManifestValue, container: str, pod_claims: Collection[str]
    ) -> tuple[str, ...]:
        """Read a container's claims of the pod; their allocations are in other objects."""
        names = []
        for item in claims.as_list("one claim"):
            name = item["name"].as_text()
            if name not in pod_claims or not DNS_LABEL_PATTERN.fullmatch(name):
                item["name"].add_expectation_problem("one of the pod's resourceClaims")
            elif name not in names:  # each request of a claim is named by itself
                names.append(name)
        if names:
            kind = "ResourceClaim" if len(names) == 1 else "ResourceClaims"
            self.notes.append(
                f"{claims.location}: {kind} {', '.join(names)} of container {container} ignored: "
                f"only the scheduler allocates such devices"
            )
        return tuple(names)

    def _extended_resources_with_units(self, resources: ManifestValue) -> Iterator[tuple[str, str]]:
        """Yield the extended resources that count here, and the unit that they count."""
        if self.counted:
            yield self.counted, "CPUs"
        named = {**resources["requests"].as_mapping(), **resources["limits"].as_mapping()}
        for name in sorted(named):
            if name in (self.devices or ()) or (self.every_device and _is_extended_resource(name)):
                yield name, "devices"

    def _read_resource_count(self, resources: ManifestValue, resource: str, unit: str) -> int:
        """Read the count of an extended resource, which is requested as a limit."""
        limit, request = resources["limits"][resource], resources["requests"][resource]
        try:
            amounts = [
                parse_exact_quantity(v.value) for v in (limit, request) if v.value is not None
            ]
        except BadQuantity:
            return 0  # the problem was added already
        if not amounts:
            return 0
        if limit.value is None or len(set(amounts)) > 1:
            request.add_expectation_problem(
                "the same as a limit: an extended resource cannot be overcommitted"
            )
        elif amounts[0] < 0 or amounts[0] != int(amounts[0]):
            limit.add_expectation_problem(f"a whole number of {unit}")
        return int(amounts[0])

    def _read_resources(
        self, resources: ManifestValue, subject: str
    ) -> tuple[ResourceQuantities, ResourceQuantities]:
        resources.as_mapping()
        limits = self._read_quantities(resources["limits"], subject)
        quantities = self._read_quantities(resources["requests"], subject)
        for label, request, limit in (
            ("cpu", quantities.cpu_milli, limits.cpu_milli),
            ("memory", quantities.memory, limits.memory),
        ):
            if request is not None and limit is not None and request > limit:
                request_value = resources["requests"][label]
                request_value.add_expectation_problem(
                    f"at most the limit, {value_text(resources['limits'][label].value)}"
                )
        if not quantities.hugepages.items() <= limits.hugepages.items():
            resources["requests"].add_problem("has huge pages that differ from the limits")
        has_other_resources = any(a.cpu_milli or a.memory for a in (quantities, limits))
        if (quantities.hugepages or limits.hugepages) and not has_other_resources:
            resources.add_problem("has huge pages alone, expected cpu or memory beside them")
        requests = quantities.with_defaults(limits)
        return replace(requests, hugepages={**limits.hugepages, **quantities.hugepages}), limits

    def _read_quantities(self, quantities: ManifestValue, subject: str) -> ResourceQuantities:
        cpu: int | None = None
        memory: int | None = None
        hugepages: dict[int, int] = {}
        for name, item in quantities.as_mapping().items():
            if item.value is None:
                continue
            try:
                if name == "cpu":
                    cpu = milli_cpus(item.value)
                elif name == "memory":
                    memory = whole_bytes(item.value)
                elif name.startswith(HUGEPAGES_PREFIX):
                    size, hugepages[size] = parse_hugepages(name, item.value)
                else:
                    parse_exact_quantity(item.value)
                    self._check_resource_name(name, item, subject)
            except BadQuantity as error:
                item.add_expectation_problem(str(error))
        return ResourceQuantities(cpu_milli=cpu, memory=memory, hugepages=hugepages)

    def _check_resource_name(self, name: str, value: ManifestValue, subject: str) -> None:
        if name in _BUILT_IN_RESOURCES or (name == self.counted and name):
            return
        if "/" not in name:
            matches = difflib.get_close_matches(
                name, [*_BUILT_IN_RESOURCES, "hugepages-2Mi", "hugepages-1Gi"], n=1
            )
            hint = f", did you mean {matches[0]}?" if matches else ""
            value.add_problem(f"is no resource, expected cpu, memory or hugepages-<size>{hint}")
            return
        if self.devices is not None:
            if name not in self.devices:
                matches = difflib.get_close_matches(name, self.devices, n=1)
                hint = f" (did you mean {matches[0]}?)" if matches else ""
                value.add_problem(f"is not in the inventory of devices, expected one of it{hint}")
            elif subject == _POD_SUBJECT:
                value.add_problem("is requested by the pod as a whole, expected in a container")
            return
        if self.every_device:
            return
        note = f"{value.location}: {subject} is placed without {name}: --devices gives no inventory"
        if note not in self.notes:
            self.notes.append(note)


def _is_extended_resource(name: str) -> bool:
    """Return True for an extended resource (IsExtendedResourceName of Kubernetes)."""
    return "/" in name and "kubernetes.io/" not in name and not name.startswith("requests.")


def pod_uid(path: str) -> str:
    """Return a stable uid for a pod that has none."""
    return str(uuid.uuid5(_UID_NAMESPACE, path))


def read_string_map(mapping: ManifestValue) -> dict[str, str]:
    """Read labels or annotations; a number in them is the most common error."""
    return {key: item.as_text() for key, item in mapping.as_mapping().items()}
