"""One pod of a manifest or of the API server: every mistake in it is named by its place.

It is untrusted input. What is said of a pod here holds for all that read one: the extender, the
controller and simulations.
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
    """Manifests with mistakes: each problem names file, document, path, value and expectation."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


def value_text(value: object) -> str:
    """A value as a message shows it: short, and on one line."""
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
    """A place in a document: what stands there, or None, and where complaints are gathered.

    It is named by file and document, and by the path from the document's top, such as
    ``spec.containers[0].name``.
    """

    location: str
    path: str
    value: object
    problems: list[str]

    def add_problem(self, what: str) -> None:
        """Note a mistake at this place."""
        self.problems.append(f"{self.location}: {f'{self.path} ' if self.path else ''}{what}")

    def add_expectation_problem(self, expectation: str) -> None:
        """Note that the value is not what was expected."""
        self.add_problem(f"is {value_text(self.value)}, expected {expectation}")

    def __getitem__(self, key: str) -> ManifestValue:
        """The place below; without a value when this is no mapping or has no such key."""
        below = self.value.get(key) if isinstance(self.value, Mapping) else None
        path = f"{self.path}.{key}" if "." not in key and "/" not in key else f"{self.path}[{key}]"
        return ManifestValue(self.location, path.removeprefix("."), below, self.problems)

    def as_mapping(self, *, required: bool = False) -> dict[str, ManifestValue]:
        """The places below by key; empty, after a complaint, when this is no mapping."""
        if self.value is None and not required:
            return {}
        if not isinstance(self.value, Mapping):
            self.add_expectation_problem("a mapping")
            return {}
        strange = [key for key in self.value if not isinstance(key, str)]
        for key in strange:
            self.add_problem(f"has the key {value_text(key)}, expected text: quote it")
        return {key: self[key] for key in self.value if isinstance(key, str)}

    def as_list(self, what: str, *, required: bool = False) -> list[ManifestValue]:
        """The places below in a list of ``what``; empty, after a complaint, when it is none."""
        if self.value is None and not required:
            return []
        if not isinstance(self.value, list) or (required and not self.value):
            self.add_expectation_problem(f"a list of at least {what}" if required else "a list")
            return []
        return [
            ManifestValue(self.location, f"{self.path}[{number}]", item, self.problems)
            for number, item in enumerate(self.value)
        ]

    def as_text(self, default: str = "") -> str:
        """The text that stands here; the default, after a complaint, when it is none."""
        if self.value is None:
            return default
        if not isinstance(self.value, str):
            self.add_expectation_problem(f"text: put {value_text(self.value)} in quotes")
            return default
        return self.value

    def as_number(self, default: int, most: int) -> int:
        """The whole number that stands here, between 0 and ``most``."""
        if self.value is None:
            return default
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            self.add_expectation_problem("a whole number")
            return default
        if not 0 <= self.value <= most:
            self.add_expectation_problem(f"0 to {most}")
            return default
        return self.value


def read_pod(document: object, counted: str = "") -> PodManifest:
    """Read one Pod as the API server gives it, with its own uid and all devices that it asks for.

    Else as `read_manifests`.
    """
    place = ManifestValue("pod", "", document, [])
    meta = place["metadata"]
    meta.as_mapping(required=True)
    name = meta["name"].as_text() or meta["generateName"].as_text()
    namespace = meta["namespace"].as_text("default")
    reader = PodManifestReader(counted, every_device=True)
    template = reader.read_pod(place, namespace)
    uid = meta["uid"].as_text() or pod_uid(f"Pod/{namespace}/{name}/{name}")
    if place.problems:
        raise ManifestError(tuple(place.problems))
    return replace(template, name=name, uid=uid)


class PodManifestReader:
    """Reads pods, and gathers notes; mistakes are gathered by the places that have them.

    Args:
        counted: the extended resource that counts exclusive CPUs, if there is one.
        devices: resources of an inventory; others are mistakes.
        every_device: read what is asked for of all extended resources.
    """

    def __init__(
        self, counted: str, devices: Collection[str] | None = None, *, every_device: bool = False
    ) -> None:
        self.counted, self.devices, self.every_device = counted, devices, every_device
        self.notes: list[str] = []

    def read_pod(self, place: ManifestValue, namespace: str) -> PodManifest:
        """A pod that still wants a name and a uid."""
        meta, spec = place["metadata"], place["spec"]
        spec.as_mapping(required=True)
        labels, annotations = (
            read_string_map(meta["labels"]),
            read_string_map(meta["annotations"]),
        )
        requests = limits = None
        if spec["resources"].value is not None:
            requests, limits = self._read_resources(spec["resources"], _POD_SUBJECT)
        containers = self._read_containers(spec)
        if spec["overhead"].value is not None:
            self.notes.append(f"{place.location}: the pod's overhead has no NUMA node: left out")
        return PodManifest(
            source=place.location,
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
            roles.append(
                (item, ContainerRole.SIDECAR if policy == "Always" else ContainerRole.INIT)
            )
        apps = spec["containers"].as_list("one container", required=True)
        debuggers = spec["ephemeralContainers"].as_list("one container")
        for item in debuggers:
            if item["resources"].as_mapping():
                item["resources"].add_expectation_problem("none: an ephemeral container has none")
        names: set[str] = set()
        return tuple(
            self._read_container(item, role, names, claims)
            for item, role in [
                *roles,
                *((item, ContainerRole.APP) for item in apps),
                *((item, ContainerRole.EPHEMERAL) for item in debuggers),
            ]
        )

    def _read_container(
        self,
        place: ManifestValue,
        role: ContainerRole,
        names: set[str],
        pod_claims: Collection[str],
    ) -> ContainerManifest:
        place.as_mapping(required=True)
        at = place["name"]
        name = at.as_text()
        if not name or not DNS_LABEL_PATTERN.fullmatch(name):
            at.add_expectation_problem("lower case letters, digits and dashes, at most 63")
        elif name in names:
            at.add_expectation_problem("a name that no other container of the pod has")
        names.add(name)
        requests, limits = self._read_resources(place["resources"], f"container {name}")
        counts = {
            resource: self._read_resource_count(place["resources"], resource, unit)
            for resource, unit in self._extended_resources_with_units(place["resources"])
        }
        return ContainerManifest(
            name=name,
            role=role,
            requests=requests,
            limits=limits,
            slots=counts.pop(self.counted, 0),
            devices={resource: count for resource, count in counts.items() if count},
            claims=self._read_claim_names(place["resources"]["claims"], name, pod_claims),
        )

    def _read_claim_names(
        self, place: ManifestValue, container: str, pod_claims: Collection[str]
    ) -> tuple[str, ...]:
        """The pod's claims that a container uses; what they allocate stands in other objects."""
        names = []
        for item in place.as_list("one claim"):
            name = item["name"].as_text()
            if name not in pod_claims or not DNS_LABEL_PATTERN.fullmatch(name):
                item["name"].add_expectation_problem("one of the pod's resourceClaims")
            elif name not in names:  # each request of a claim is named by itself
                names.append(name)
        if names:
            kind = "ResourceClaim" if len(names) == 1 else "ResourceClaims"
            self.notes.append(
                f"{place.location}: {kind} {', '.join(names)} of container {container} left "
                "out: only "
                "the scheduler allocates such devices"
            )
        return tuple(names)

    def _extended_resources_with_units(self, place: ManifestValue) -> Iterator[tuple[str, str]]:
        """Extended resources that count for a place, and what they count."""
        if self.counted:
            yield self.counted, "CPUs"
        named = {**place["requests"].as_mapping(), **place["limits"].as_mapping()}
        for name in sorted(named):
            if name in (self.devices or ()) or (self.every_device and _is_extended_resource(name)):
                yield name, "devices"

    def _read_resource_count(self, place: ManifestValue, resource: str, unit: str) -> int:
        """How many of an extended resource, which is asked for as a limit."""
        at, request = place["limits"][resource], place["requests"][resource]
        try:
            found = [
                parse_exact_quantity(one.value) for one in (at, request) if one.value is not None
            ]
        except BadQuantity:
            return 0  # it is said already
        if not found:
            return 0
        if at.value is None or len(set(found)) > 1:
            request.add_expectation_problem(
                "the same as a limit: an extended resource cannot be overcommitted"
            )
        elif found[0] < 0 or found[0] != int(found[0]):
            at.add_expectation_problem(f"a whole number of {unit}")
        return int(found[0])

    def _read_resources(
        self, place: ManifestValue, whose: str
    ) -> tuple[ResourceQuantities, ResourceQuantities]:
        place.as_mapping()
        limits = self._read_quantities(place["limits"], whose)
        given = self._read_quantities(place["requests"], whose)
        for label, request, limit in (
            ("cpu", given.cpu_milli, limits.cpu_milli),
            ("memory", given.memory, limits.memory),
        ):
            if request is not None and limit is not None and request > limit:
                at = place["requests"][label]
                at.add_expectation_problem(
                    f"at most the limit, {value_text(place['limits'][label].value)}"
                )
        if not given.hugepages.items() <= limits.hugepages.items():
            place["requests"].add_problem("has huge pages that differ from the limits")
        if (given.hugepages or limits.hugepages) and not any(
            a.cpu_milli or a.memory for a in (given, limits)
        ):
            place.add_problem("has huge pages alone, expected cpu or memory beside them")
        requests = given.with_defaults(limits)
        return replace(requests, hugepages={**limits.hugepages, **given.hugepages}), limits

    def _read_quantities(self, place: ManifestValue, whose: str) -> ResourceQuantities:
        cpu: int | None = None
        memory: int | None = None
        hugepages: dict[int, int] = {}
        for name, at in place.as_mapping().items():
            if at.value is None:
                continue
            try:
                if name == "cpu":
                    cpu = milli_cpus(at.value)
                elif name == "memory":
                    memory = whole_bytes(at.value)
                elif name.startswith(HUGEPAGES_PREFIX):
                    size, hugepages[size] = parse_hugepages(name, at.value)
                else:
                    parse_exact_quantity(at.value)
                    self._check_resource_name(name, at, whose)
            except BadQuantity as error:
                at.add_expectation_problem(str(error))
        return ResourceQuantities(cpu_milli=cpu, memory=memory, hugepages=hugepages)

    def _check_resource_name(self, name: str, place: ManifestValue, whose: str) -> None:
        if name in _BUILT_IN_RESOURCES or (name == self.counted and name):
            return
        if "/" not in name:
            near = difflib.get_close_matches(
                name, [*_BUILT_IN_RESOURCES, "hugepages-2Mi", "hugepages-1Gi"], n=1
            )
            hint = f", did you mean {near[0]}?" if near else ""
            place.add_problem(f"is no resource, expected cpu, memory or hugepages-<size>{hint}")
            return
        if self.devices is not None:
            if name not in self.devices:
                near = difflib.get_close_matches(name, self.devices, n=1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                place.add_problem(f"is not in the inventory of devices, expected it there{hint}")
            elif whose == _POD_SUBJECT:
                place.add_problem("is asked for by the pod as a whole, expected in a container")
            return
        if self.every_device:
            return
        note = f"{place.location}: {whose} is placed without {name}: --devices gives no inventory"
        if note not in self.notes:
            self.notes.append(note)


def _is_extended_resource(name: str) -> bool:
    """Whether a resource is an extended one (IsExtendedResourceName of Kubernetes)."""
    return "/" in name and "kubernetes.io/" not in name and not name.startswith("requests.")


def pod_uid(path: str) -> str:
    """The uid of a pod that has none, the same one every time."""
    return str(uuid.uuid5(_UID_NAMESPACE, path))


def read_string_map(place: ManifestValue) -> dict[str, str]:
    """Labels or annotations; a number in them is the commonest slip."""
    return {key: at.as_text() for key, at in place.as_mapping().items()}
