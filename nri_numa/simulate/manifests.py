"""Manifests become workloads: every document is checked, and every mistake is reported at once.

Read are Pod, Deployment, ReplicaSet, ReplicationController, StatefulSet, DaemonSet (one pod: this
is about one machine), Job, CronJob (one run) and List. Other kinds are passed over with
a note, as a folder of manifests is full of them; a kind that looks like a slip is a mistake.

Files are read the way Kubernetes reads them: it reads YAML 1.1 and makes JSON of it, so that
``yes`` and ``on`` are booleans, a date stays text, and a key that stands twice is refused. They are
untrusted input: their size, depth and number of documents are bounded.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import sys
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml
from msgspec.structs import replace

from nri_numa import safe_yaml
from nri_numa.errors import AgentError
from nri_numa.model.machine import count_text
from nri_numa.model.workload import ENDED_POD_PHASES
from nri_numa.simulate.pods import (
    ContainerManifest,
    ContainerRole,
    PodManifest,
    ResourceQuantities,
    Workload,
    qos_of,
)
from nri_numa.text import (
    HUGEPAGES_PREFIX,
    BadQuantity,
    milli_cpus,
    parse_exact_quantity,
    parse_hugepages,
    whole_bytes,
)

MAX_MANIFEST_BYTES: Final = 8 << 20
MAX_MANIFEST_DOCUMENTS: Final = 10_000


class ManifestError(AgentError):
    """Manifests with mistakes: each problem names file, document, path, value and expectation."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


class _Loader(safe_yaml.Loader):
    """With the scalars that Kubernetes knows."""


def _scalar_constructor(make: Callable[[str], Any]) -> Callable[[Any, Any], Any]:
    def construct_scalar(loader: Any, node: Any) -> Any:
        text = loader.construct_scalar(node)
        try:
            return make(text)
        except ValueError as error:
            raise safe_yaml.RefusedYAMLValue(
                problem=str(error), problem_mark=node.start_mark
            ) from error

    return construct_scalar


def _parse_bool(text: str) -> bool:
    return text.lower() in ("yes", "true", "on")


for _tag, _pattern, _first, _construct in (
    ("bool", r"(?i:yes|no|true|false|on|off)", "yYnNtTfFoO", _scalar_constructor(_parse_bool)),
    ("int", r"[-+]?(0|[1-9][0-9]{0,17})", "-+0123456789", _scalar_constructor(int)),
    (
        "float",
        r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?",
        "-+.0123456789",
        _scalar_constructor(float),
    ),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first)
    )
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _construct)


def load_yaml_documents(text: str) -> Iterator[object]:
    """The documents of a text, one after another; empty ones are left out.

    Raises:
        yaml.YAMLError: from here on the text is no YAML.
    """
    safe_yaml.limit_depth_and_aliases(text)
    for number, document in enumerate(yaml.load_all(text, Loader=_Loader)):
        if number >= MAX_MANIFEST_DOCUMENTS:
            raise yaml.YAMLError(f"has more than {MAX_MANIFEST_DOCUMENTS} documents")
        yield document


def read_input_text(path: str | Path, most: int) -> str:
    """The text of a file, or of standard input for ``-``, of at most so many bytes.

    Raises:
        OSError: it cannot be read.
        ManifestError: it is too large, or no text; the one problem names the file.
    """
    name = "standard input" if str(path) == "-" else str(path)
    with nullcontext(sys.stdin.buffer) if str(path) == "-" else open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ManifestError((f"{name}: is larger than {most >> 20} MiB",))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ManifestError((f"{name}: is not UTF-8: byte {error.start}",)) from error


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


# --- Workloads ----------------------------------------------------------------------------------

MAX_WORKLOAD_PODS: Final = 10_000
"""Pods of one workload; no node runs a tenth of it."""

_API_VERSION_BY_KIND: Final = {
    "Pod": "v1",
    "List": "v1",
    "PodList": "v1",
    "ReplicationController": "v1",
    "Deployment": "apps/v1",
    "DeploymentList": "apps/v1",
    "ReplicaSet": "apps/v1",
    "StatefulSet": "apps/v1",
    "DaemonSet": "apps/v1",
    "Job": "batch/v1",
    "CronJob": "batch/v1",
}
_VIRTUAL_MACHINE_KINDS: Final = frozenset(
    {
        "VirtualMachine",
        "VirtualMachineInstance",
        "VirtualMachineInstanceReplicaSet",
        "VirtualMachinePool",
    }
)
_DNS_LABEL_PATTERN = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_DNS_SUBDOMAIN_PATTERN = re.compile(
    r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII
)
_SUFFIX_LETTERS: Final = "bcdfghjklmnpqrstvwxz2456789"
"""What Kubernetes makes random name endings of: no vowels, so no words."""
_UID_NAMESPACE: Final = uuid.UUID("8d1c1f5e-6b1d-5d55-9d0f-3f2b8f6a7c11")
_BUILT_IN_RESOURCES: Final = frozenset({"cpu", "memory", "ephemeral-storage"})
_POD_SUBJECT: Final = "the pod"
_CRITICAL_PRIORITY_CLASS: Final = "system-node-critical"


class Manifests(msgspec.Struct, frozen=True, kw_only=True):
    """What was read, in the order of files and documents; notes say what was passed over."""

    workloads: tuple[Workload, ...] = ()
    notes: tuple[str, ...] = ()


def read_manifests(
    paths: Iterable[str | Path],
    counted: str = "",
    devices: Collection[str] | None = None,
    *,
    every_device: bool = False,
) -> Manifests:
    """Read files, folders (their YAML and JSON files in order of name), or ``-``.

    ``counted`` is the extended resource that counts exclusive CPUs, if there is one. Resources that
    are not in an inventory of ``devices`` are mistakes; without an inventory pods are placed
    without what they ask for of such resources, unless ``every_device`` is read: a cluster's nodes
    publish what they have.

    Raises:
        ManifestError: with every mistake in all of them.
    """
    reading = _ManifestReader(counted, devices, every_device=every_device)
    for path in paths:
        for file in _list_manifest_files(Path(path), reading.problems):
            try:
                text = read_input_text(file, MAX_MANIFEST_BYTES)
            except OSError as error:
                reading.problems.append(f"{file}: cannot be read: {error.strerror or error}")
            except ManifestError as error:
                reading.problems += error.problems
            else:
                reading.add_workloads_of_text(
                    "standard input" if str(file) == "-" else str(file), text
                )
    return reading.build_manifests()


def read_manifests_from_text(
    text: str,
    source: str = "manifest",
    counted: str = "",
    devices: Collection[str] | None = None,
) -> Manifests:
    """Read manifests from a text, which messages call ``source``; else as `read_manifests`."""
    reading = _ManifestReader(counted, devices)
    reading.add_workloads_of_text(source, text)
    return reading.build_manifests()


def read_pod(document: object, source: str = "pod", counted: str = "") -> PodManifest:
    """Read one Pod as the API server gives it, with its own uid and all devices that it asks for.

    Else as `read_manifests`.
    """
    place = ManifestValue(source, "", document, [])
    meta = place["metadata"]
    meta.as_mapping(required=True)
    name = meta["name"].as_text() or meta["generateName"].as_text()
    namespace = meta["namespace"].as_text("default")
    reading = _ManifestReader(counted, every_device=True)
    template = reading.read_pod(place, namespace)
    uid = meta["uid"].as_text() or _pod_uid(f"Pod/{namespace}/{name}/{name}")
    if place.problems:
        raise ManifestError(tuple(place.problems))
    return replace(template, name=name, uid=uid)


def _list_manifest_files(path: Path, problems: list[str]) -> list[Path]:
    if not os.path.isdir(path):  # or it may not be looked at: reading it says so
        return [path]
    found = sorted(
        file
        for entry in os.scandir(path)
        if (file := Path(entry)).suffix in (".yaml", ".yml", ".json") and entry.is_file()
    )
    if not found:
        problems.append(f"{path}: has no .yaml, .yml or .json files, expected manifests")
    return found


class _ManifestReader:
    """Makes workloads of documents, and gathers them, notes and mistakes over all files."""

    def __init__(
        self, counted: str, devices: Collection[str] | None = None, *, every_device: bool = False
    ) -> None:
        self.counted, self.devices, self.every_device = counted, devices, every_device
        self.workloads: list[Workload] = []
        self.ended_pods = 0
        self.notes: list[str] = []
        self.problems: list[str] = []

    def add_workloads_of_text(self, source: str, text: str) -> None:
        """Read the text of one file."""
        empty = True
        try:
            for number, document in enumerate(load_yaml_documents(text), 1):
                if document is not None:
                    empty = False
                    place = ManifestValue(
                        f"{source}, document {number}", "", document, self.problems
                    )
                    self._read_document(place)
        except yaml.YAMLError as error:
            self.problems.append(f"{source}: {safe_yaml.yaml_problem_text(error, text)}")
        else:
            if empty:
                self.problems.append(f"{source}: is empty, expected at least one manifest")

    def build_manifests(self) -> Manifests:
        """What was read, unless there were mistakes."""
        if self.problems:
            raise ManifestError(tuple(self.problems))
        notes = list(self.notes)
        if self.ended_pods:
            phases = " or ".join(sorted(ENDED_POD_PHASES, reverse=True))
            notes.append(f"{count_text(self.ended_pods, 'pod')} with phase {phases}: left out")
        return Manifests(workloads=tuple(self.workloads), notes=tuple(notes))

    def _read_document(self, place: ManifestValue) -> None:
        if not isinstance(place.value, Mapping):
            place.add_expectation_problem("a mapping with kind: Pod or the like")
            return
        kind = place["kind"].as_text()
        if not kind:
            if place["kind"].value is None:
                place["kind"].add_expectation_problem("Pod, Deployment or the like")
            return
        wanted = _API_VERSION_BY_KIND.get(kind)
        if wanted is None:
            near = difflib.get_close_matches(kind, _API_VERSION_BY_KIND, n=1, cutoff=0.8)
            if near:
                place["kind"].add_expectation_problem(f"{near[0]}, or another kind that makes pods")
            else:
                self.notes.append(f"{place.location}: {_unread_kind_text(place, kind)}: left out")
            return
        version = place["apiVersion"]
        if version.value != wanted:
            version.add_expectation_problem(f"{wanted} for kind {kind}")
        if kind.endswith("List"):
            for item in place["items"].as_list("one manifest"):
                # An item is a document of its own, named by its place in the list.
                self._read_document(
                    ManifestValue(f"{place.location}, {item.path}", "", item.value, self.problems)
                )
            return
        if kind == "Pod" and str(place["status"]["phase"].value) in ENDED_POD_PHASES:
            self.ended_pods += 1
            return
        before = len(self.problems)
        workload = self._read_workload(place, kind)
        if len(self.problems) == before:
            self.workloads.append(workload)

    def _read_workload(self, place: ManifestValue, kind: str) -> Workload:
        meta = place["metadata"]
        meta.as_mapping(required=True)
        namespace = _read_name(meta["namespace"], _DNS_LABEL_PATTERN) or "default"
        nothing = (None, "")
        generated = meta["name"].value in nothing and meta["generateName"].value not in nothing
        name_at = meta["generateName"] if generated else meta["name"]
        name = (
            name_at.as_text().rstrip("-")
            if generated
            else _read_name(name_at, _DNS_SUBDOMAIN_PATTERN)
        )
        if name_at.value in nothing:
            name_at.add_expectation_problem("a name")
        where = f"{place.location} ({kind} {name})" if name else place.location
        place = ManifestValue(where, "", place.value, place.problems)
        spec = place["spec"]["jobTemplate"]["spec"] if kind == "CronJob" else place["spec"]
        template = place if kind == "Pod" else spec["template"]
        if kind != "Pod":
            template.as_mapping(required=True)
        made = self.read_pod(template, namespace)
        names = list(_pod_names(place, spec, kind, name, generated=generated))
        pods = tuple(
            replace(made, name=each, uid=_pod_uid(f"{kind}/{namespace}/{name}/{each}"))
            for each in names
        )
        outside = {} if kind == "Pod" else _read_string_map(meta["annotations"])
        if kind == "CronJob":
            outside |= _read_string_map(place["spec"]["jobTemplate"]["metadata"]["annotations"])
        return Workload(
            source=where,
            kind=kind,
            namespace=namespace,
            name=name,
            pods=pods,
            annotations=outside,
        )

    def read_pod(self, place: ManifestValue, namespace: str) -> PodManifest:
        """A pod that still wants a name and a uid."""
        meta, spec = place["metadata"], place["spec"]
        spec.as_mapping(required=True)
        labels, annotations = (
            _read_string_map(meta["labels"]),
            _read_string_map(meta["annotations"]),
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
        if not name or not _DNS_LABEL_PATTERN.fullmatch(name):
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
            if name not in pod_claims or not _DNS_LABEL_PATTERN.fullmatch(name):
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


def _unread_kind_text(place: ManifestValue, kind: str) -> str:
    """Why a document of another kind is no workload; a custom resource may become pods."""
    group, slash, _ = str(place["apiVersion"].value).partition("/")
    if kind in _VIRTUAL_MACHINE_KINDS:
        return f"what counts of a {kind} is its launcher pod (virt-launcher-…), made by KubeVirt"
    if slash and "." in group and not group.endswith(".k8s.io"):
        return f"pods that a controller makes of {value_text(kind)} are not known"
    return f"{value_text(kind)} makes no pods"


def _is_extended_resource(name: str) -> bool:
    """Whether a resource is an extended one (IsExtendedResourceName of Kubernetes)."""
    return "/" in name and "kubernetes.io/" not in name and not name.startswith("requests.")


def _read_name(place: ManifestValue, pattern: re.Pattern[str]) -> str:
    text = place.as_text()
    if text and (len(text) > 253 or not pattern.fullmatch(text)):
        place.add_expectation_problem("lower case letters, digits and dashes")
    return text


def _pod_names(
    place: ManifestValue, spec: ManifestValue, kind: str, name: str, *, generated: bool
) -> Iterator[str]:
    """Names of the pods, such as their controller would give them.

    Random endings are worked out from the names, so that every reading gives the same ones.
    """
    match kind:
        case "Pod":
            yield f"{name}-{_hashed_name_suffix(place.location, 5)}" if generated else name
        case "StatefulSet":
            start = spec["ordinals"]["start"].as_number(0, 1 << 31)
            for number in range(spec["replicas"].as_number(1, MAX_WORKLOAD_PODS)):
                yield f"{name}-{start + number}"
        case "Deployment":
            # The ending of the replica set is the hash of its template; here, of its owner.
            owner = f"{name}-{_hashed_name_suffix(f'{kind} {name}', 10)}"
            for number in range(spec["replicas"].as_number(1, MAX_WORKLOAD_PODS)):
                yield f"{owner}-{_hashed_name_suffix(f'{owner} {number}', 5)}"
        case "DaemonSet":
            yield f"{name}-{_hashed_name_suffix(f'{kind} {name}', 5)}"
        case "Job" | "CronJob":
            count = spec["parallelism"].as_number(1, MAX_WORKLOAD_PODS)
            if spec["completions"].value is not None:
                count = min(count, spec["completions"].as_number(1, 1 << 31))
            indexed = spec["completionMode"].as_text("NonIndexed") == "Indexed"
            for number in range(count):
                ending = _hashed_name_suffix(f"{kind} {name} {number}", 5)
                yield f"{name}-{number}-{ending}" if indexed else f"{name}-{ending}"
        case _:
            for number in range(spec["replicas"].as_number(1, MAX_WORKLOAD_PODS)):
                yield f"{name}-{_hashed_name_suffix(f'{kind} {name} {number}', 5)}"


def _hashed_name_suffix(text: str, length: int) -> str:
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16])
    letters = []
    for _ in range(length):
        number, place = divmod(number, len(_SUFFIX_LETTERS))
        letters.append(_SUFFIX_LETTERS[place])
    return "".join(letters)


def _pod_uid(path: str) -> str:
    return str(uuid.uuid5(_UID_NAMESPACE, path))


def _read_string_map(place: ManifestValue) -> dict[str, str]:
    """Labels or annotations; a number in them is the commonest slip."""
    return {key: at.as_text() for key, at in place.as_mapping().items()}
