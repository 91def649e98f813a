"""Manifests become workloads: every document is checked, and every mistake is reported at once.

Read are Pod, Deployment, ReplicaSet, ReplicationController, StatefulSet, DaemonSet (one pod: this
is about one machine), Job, CronJob (one run) and List. Kinds that make no pods are passed over with
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
from nri_numa.simulate.pods import (
    Amounts,
    ContainerManifest,
    PodManifest,
    Role,
    Workload,
    qos_of,
)
from nri_numa.text import HUGEPAGES, BadQuantity, milli_cpus, page_size, quantity, whole_bytes

MAX_BYTES: Final = 8 << 20
MAX_DOCUMENTS: Final = 10_000


class ManifestError(AgentError):
    """Manifests with mistakes: each problem names file, document, path, value and expectation."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


class _Loader(safe_yaml.Loader):
    """With the scalars that Kubernetes knows."""


def _scalar(make: Callable[[str], Any]) -> Callable[[Any, Any], Any]:
    def construct(loader: Any, node: Any) -> Any:
        text = loader.construct_scalar(node)
        try:
            return make(text)
        except ValueError as error:
            raise safe_yaml.BadValue(problem=str(error), problem_mark=node.start_mark) from error

    return construct


def _bool(text: str) -> bool:
    return text.lower() in ("yes", "true", "on")


for _tag, _pattern, _first, _construct in (
    ("bool", r"(?i:yes|no|true|false|on|off)", "yYnNtTfFoO", _scalar(_bool)),
    ("int", r"[-+]?(0|[1-9][0-9]{0,17})", "-+0123456789", _scalar(int)),
    ("float", r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", "-+.0123456789", _scalar(float)),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first)
    )
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _construct)


def parse_all(text: str) -> Iterator[object]:
    """The documents of a text, one after another; empty ones are left out.

    Raises:
        yaml.YAMLError: from here on the text is no YAML.
    """
    safe_yaml.limit_depth_and_aliases(text)
    for number, document in enumerate(yaml.load_all(text, Loader=_Loader)):
        if number >= MAX_DOCUMENTS:
            raise yaml.YAMLError(f"has more than {MAX_DOCUMENTS} documents")
        yield document


def text_of(path: str | Path, most: int) -> str:
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


def shown(value: object) -> str:
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


class Place(msgspec.Struct, frozen=True):
    """A place in a document: what stands there, or None, and where complaints are gathered.

    It is named by file and document, and by the path from the document's top, such as
    ``spec.containers[0].name``.
    """

    where: str
    path: str
    value: object
    problems: list[str]

    def complain(self, what: str) -> None:
        """Note a mistake at this place."""
        self.problems.append(f"{self.where}: {f'{self.path} ' if self.path else ''}{what}")

    def expected(self, expectation: str) -> None:
        """Note that the value is not what was expected."""
        self.complain(f"is {shown(self.value)}, expected {expectation}")

    def __getitem__(self, key: str) -> Place:
        """The place below; without a value when this is no mapping or has no such key."""
        below = self.value.get(key) if isinstance(self.value, Mapping) else None
        path = f"{self.path}.{key}" if "." not in key and "/" not in key else f"{self.path}[{key}]"
        return Place(self.where, path.removeprefix("."), below, self.problems)

    def mapping(self, *, required: bool = False) -> dict[str, Place]:
        """The places below by key; empty, after a complaint, when this is no mapping."""
        if self.value is None and not required:
            return {}
        if not isinstance(self.value, Mapping):
            self.expected("a mapping")
            return {}
        strange = [key for key in self.value if not isinstance(key, str)]
        for key in strange:
            self.complain(f"has the key {shown(key)}, expected text: quote it")
        return {key: self[key] for key in self.value if isinstance(key, str)}

    def items(self, what: str, *, required: bool = False) -> list[Place]:
        """The places below in a list of ``what``; empty, after a complaint, when it is none."""
        if self.value is None and not required:
            return []
        if not isinstance(self.value, list) or (required and not self.value):
            self.expected(f"a list of at least {what}" if required else "a list")
            return []
        return [
            Place(self.where, f"{self.path}[{number}]", item, self.problems)
            for number, item in enumerate(self.value)
        ]

    def text(self, default: str = "") -> str:
        """The text that stands here; the default, after a complaint, when it is none."""
        if self.value is None:
            return default
        if not isinstance(self.value, str):
            self.expected(f"text: put {shown(self.value)} in quotes")
            return default
        return self.value

    def number(self, default: int, most: int) -> int:
        """The whole number that stands here, between 0 and ``most``."""
        if self.value is None:
            return default
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            self.expected("a whole number")
            return default
        if not 0 <= self.value <= most:
            self.expected(f"0 to {most}")
            return default
        return self.value


# --- Workloads ----------------------------------------------------------------------------------

MAX_PODS: Final = 10_000
"""Pods of one workload; no node runs a tenth of it."""

_API_VERSIONS: Final = {
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
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_SUBDOMAIN = re.compile(
    r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII
)
_SUFFIX_LETTERS: Final = "bcdfghjklmnpqrstvwxz2456789"
"""What Kubernetes makes random name endings of: no vowels, so no words."""
_NAMESPACE: Final = uuid.UUID("8d1c1f5e-6b1d-5d55-9d0f-3f2b8f6a7c11")
_KNOWN: Final = frozenset({"cpu", "memory", "ephemeral-storage"})
_POD: Final = "the pod"
_CRITICAL: Final = "system-node-critical"


class Manifests(msgspec.Struct, frozen=True, kw_only=True):
    """What was read, in the order of files and documents; notes say what was passed over."""

    workloads: tuple[Workload, ...] = ()
    notes: tuple[str, ...] = ()


def read_files(
    paths: Iterable[str | Path], counted: str = "", devices: Collection[str] | None = None
) -> Manifests:
    """Read files, folders (their YAML and JSON files in order of name), or ``-``.

    ``counted`` is the extended resource that counts exclusive CPUs, if there is one. Resources that
    are not in an inventory of ``devices`` are mistakes; without an inventory pods are placed
    without what they ask for of such resources.

    Raises:
        ManifestError: with every mistake in all of them.
    """
    reading = _Reading(counted, devices)
    for path in paths:
        for file in _files(Path(path), reading.problems):
            try:
                text = text_of(file, MAX_BYTES)
            except OSError as error:
                reading.problems.append(f"{file}: cannot be read: {error.strerror or error}")
            except ManifestError as error:
                reading.problems += error.problems
            else:
                reading.add("standard input" if str(file) == "-" else str(file), text)
    return reading.done()


def read_text(
    text: str,
    source: str = "manifest",
    counted: str = "",
    devices: Collection[str] | None = None,
) -> Manifests:
    """Read manifests from a text, which messages call ``source``; else as `read_files`."""
    reading = _Reading(counted, devices)
    reading.add(source, text)
    return reading.done()


def read_pod(document: object, source: str = "pod", counted: str = "") -> PodManifest:
    """Read one Pod as the API server gives it, with its own uid and all devices that it asks for.

    Else as `read_files`.
    """
    place = Place(source, "", document, [])
    meta = place["metadata"]
    meta.mapping(required=True)
    name = meta["name"].text() or meta["generateName"].text()
    namespace = meta["namespace"].text("default")
    reading = _Reading(counted)
    reading.every_device = True
    template = reading.pod(place, namespace)
    uid = meta["uid"].text() or _uid(f"Pod/{namespace}/{name}/{name}")
    if place.problems:
        raise ManifestError(tuple(place.problems))
    return replace(template, name=name, uid=uid)


def _files(path: Path, problems: list[str]) -> list[Path]:
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


class _Reading:
    """Makes workloads of documents, and gathers them, notes and mistakes over all files."""

    def __init__(self, counted: str, devices: Collection[str] | None = None) -> None:
        self.counted, self.devices = counted, devices
        self.every_device = False
        self.workloads: list[Workload] = []
        self.notes: list[str] = []
        self.problems: list[str] = []

    def add(self, source: str, text: str) -> None:
        """Read the text of one file."""
        empty = True
        try:
            for number, document in enumerate(parse_all(text), 1):
                if document is not None:
                    empty = False
                    place = Place(f"{source}, document {number}", "", document, self.problems)
                    self._document(place)
        except yaml.YAMLError as error:
            self.problems.append(f"{source}: {safe_yaml.problem_of(error, text)}")
        else:
            if empty:
                self.problems.append(f"{source}: is empty, expected at least one manifest")

    def done(self) -> Manifests:
        """What was read, unless there were mistakes."""
        if self.problems:
            raise ManifestError(tuple(self.problems))
        return Manifests(workloads=tuple(self.workloads), notes=tuple(self.notes))

    def _document(self, place: Place) -> None:
        if not isinstance(place.value, Mapping):
            place.expected("a mapping with kind: Pod or the like")
            return
        kind = place["kind"].text()
        if not kind:
            if place["kind"].value is None:
                place["kind"].expected("Pod, Deployment or the like")
            return
        wanted = _API_VERSIONS.get(kind)
        if wanted is None:
            near = difflib.get_close_matches(kind, _API_VERSIONS, n=1, cutoff=0.8)
            if near:
                place["kind"].expected(f"{near[0]}, or another kind that makes pods")
            else:
                self.notes.append(f"{place.where}: {shown(kind)} makes no pods: left out")
            return
        version = place["apiVersion"]
        if version.value != wanted:
            version.expected(f"{wanted} for kind {kind}")
        if kind.endswith("List"):
            for item in place["items"].items("one manifest"):
                # An item is a document of its own, named by its place in the list.
                self._document(Place(f"{place.where}, {item.path}", "", item.value, self.problems))
            return
        before = len(self.problems)
        workload = self._workload(place, kind)
        if len(self.problems) == before:
            self.workloads.append(workload)

    def _workload(self, place: Place, kind: str) -> Workload:
        meta = place["metadata"]
        meta.mapping(required=True)
        namespace = _named(meta["namespace"], _LABEL) or "default"
        nothing = (None, "")
        generated = meta["name"].value in nothing and meta["generateName"].value not in nothing
        name_at = meta["generateName"] if generated else meta["name"]
        name = name_at.text().rstrip("-") if generated else _named(name_at, _SUBDOMAIN)
        if name_at.value in nothing:
            name_at.expected("a name")
        where = f"{place.where} ({kind} {name})" if name else place.where
        place = Place(where, "", place.value, place.problems)
        spec = place["spec"]["jobTemplate"]["spec"] if kind == "CronJob" else place["spec"]
        template = place if kind == "Pod" else spec["template"]
        if kind != "Pod":
            template.mapping(required=True)
        made = self.pod(template, namespace)
        names = list(_pod_names(place, spec, kind, name, generated=generated))
        pods = tuple(
            replace(made, name=each, uid=_uid(f"{kind}/{namespace}/{name}/{each}"))
            for each in names
        )
        outside = {} if kind == "Pod" else _texts(meta["annotations"])
        if kind == "CronJob":
            outside |= _texts(place["spec"]["jobTemplate"]["metadata"]["annotations"])
        return Workload(
            source=where,
            kind=kind,
            namespace=namespace,
            name=name,
            pods=pods,
            annotations=outside,
        )

    def pod(self, place: Place, namespace: str) -> PodManifest:
        """A pod that still wants a name and a uid."""
        meta, spec = place["metadata"], place["spec"]
        spec.mapping(required=True)
        labels, annotations = _texts(meta["labels"]), _texts(meta["annotations"])
        requests = limits = None
        if spec["resources"].value is not None:
            requests, limits = self._resources(spec["resources"], _POD)
        containers = self._containers(spec)
        if spec["overhead"].value is not None:
            self.notes.append(f"{place.where}: the pod's overhead has no NUMA node: left out")
        return PodManifest(
            source=place.where,
            namespace=namespace,
            name="",
            uid="",
            qos=qos_of(containers, requests, limits),
            labels=labels,
            annotations=annotations,
            containers=containers,
            pod_requests=requests,
            pod_limits=limits,
            critical=spec["priorityClassName"].text() == _CRITICAL,
            runtime_handler=spec["runtimeClassName"].text(),
        )

    def _containers(self, spec: Place) -> tuple[ContainerManifest, ...]:
        claims = {item["name"].text() for item in spec["resourceClaims"].items("one claim")}
        roles: list[tuple[Place, Role]] = []
        for item in spec["initContainers"].items("one container"):
            policy = item["restartPolicy"].text()
            if policy not in ("", "Always", "Never", "OnFailure"):
                item["restartPolicy"].expected("Always (a sidecar), or nothing")
            roles.append((item, Role.SIDECAR if policy == "Always" else Role.INIT))
        apps = spec["containers"].items("one container", required=True)
        names: set[str] = set()
        return tuple(
            self._container(item, role, names, claims)
            for item, role in [*roles, *((item, Role.APP) for item in apps)]
        )

    def _container(
        self, place: Place, role: Role, names: set[str], pod_claims: Collection[str]
    ) -> ContainerManifest:
        place.mapping(required=True)
        at = place["name"]
        name = at.text()
        if not name or not _LABEL.fullmatch(name):
            at.expected("lower case letters, digits and dashes, at most 63")
        elif name in names:
            at.expected("a name that no other container of the pod has")
        names.add(name)
        requests, limits = self._resources(place["resources"], f"container {name}")
        counts = {
            resource: self._count(place["resources"], resource, unit)
            for resource, unit in self._countable(place["resources"])
        }
        return ContainerManifest(
            name=name,
            role=role,
            requests=requests,
            limits=limits,
            slots=counts.pop(self.counted, 0),
            devices={resource: count for resource, count in counts.items() if count},
            claims=self._claims(place["resources"]["claims"], name, pod_claims),
        )

    def _claims(self, place: Place, container: str, pod_claims: Collection[str]) -> tuple[str, ...]:
        """The pod's claims that a container uses; what they allocate stands in other objects."""
        names = []
        for item in place.items("one claim"):
            name = item["name"].text()
            if name not in pod_claims or not _LABEL.fullmatch(name):
                item["name"].expected("one of the pod's resourceClaims")
            elif name not in names:  # each request of a claim is named by itself
                names.append(name)
        if names:
            kind = "ResourceClaim" if len(names) == 1 else "ResourceClaims"
            self.notes.append(
                f"{place.where}: {kind} {', '.join(names)} of container {container} left out: only "
                "the scheduler allocates such devices"
            )
        return tuple(names)

    def _countable(self, place: Place) -> Iterator[tuple[str, str]]:
        """Extended resources that count for a place, and what they count."""
        if self.counted:
            yield self.counted, "CPUs"
        named = {**place["requests"].mapping(), **place["limits"].mapping()}
        for name in sorted(named):
            if name in (self.devices or ()) or (self.every_device and _extended(name)):
                yield name, "devices"

    def _count(self, place: Place, resource: str, unit: str) -> int:
        """How many of an extended resource, which is asked for as a limit."""
        at, request = place["limits"][resource], place["requests"][resource]
        try:
            found = [quantity(one.value) for one in (at, request) if one.value is not None]
        except BadQuantity:
            return 0  # it is said already
        if not found:
            return 0
        if at.value is None or len(set(found)) > 1:
            request.expected("the same as a limit: an extended resource cannot be overcommitted")
        elif found[0] < 0 or found[0] != int(found[0]):
            at.expected(f"a whole number of {unit}")
        return int(found[0])

    def _resources(self, place: Place, whose: str) -> tuple[Amounts, Amounts]:
        place.mapping()
        limits = self._amounts(place["limits"], whose)
        given = self._amounts(place["requests"], whose)
        for label, request, limit in (
            ("cpu", given.cpu_milli, limits.cpu_milli),
            ("memory", given.memory, limits.memory),
        ):
            if request is not None and limit is not None and request > limit:
                at = place["requests"][label]
                at.expected(f"at most the limit, {shown(place['limits'][label].value)}")
        if not given.hugepages.items() <= limits.hugepages.items():
            place["requests"].complain("has huge pages that differ from the limits")
        if (given.hugepages or limits.hugepages) and not any(
            a.cpu_milli or a.memory for a in (given, limits)
        ):
            place.complain("has huge pages alone, expected cpu or memory beside them")
        requests = given.over(limits)
        return replace(requests, hugepages={**limits.hugepages, **given.hugepages}), limits

    def _amounts(self, place: Place, whose: str) -> Amounts:
        cpu: int | None = None
        memory: int | None = None
        hugepages: dict[int, int] = {}
        for name, at in place.mapping().items():
            if at.value is None:
                continue
            try:
                if name == "cpu":
                    cpu = milli_cpus(at.value)
                elif name == "memory":
                    memory = whole_bytes(at.value)
                elif name.startswith(HUGEPAGES):
                    size, amount = page_size(name), whole_bytes(at.value)
                    if amount % size:
                        raise BadQuantity(f"whole pages of {size} bytes")
                    hugepages[size] = amount
                else:
                    quantity(at.value)
                    self._other(name, at, whose)
            except BadQuantity as error:
                at.expected(str(error))
        return Amounts(cpu_milli=cpu, memory=memory, hugepages=hugepages)

    def _other(self, name: str, place: Place, whose: str) -> None:
        if name in _KNOWN or (name == self.counted and name):
            return
        if "/" not in name:
            near = difflib.get_close_matches(name, [*_KNOWN, "hugepages-2Mi", "hugepages-1Gi"], n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            place.complain(f"is no resource, expected cpu, memory or hugepages-<size>{hint}")
            return
        if self.devices is not None:
            if name not in self.devices:
                near = difflib.get_close_matches(name, self.devices, n=1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                place.complain(f"is not in the inventory of devices, expected it there{hint}")
            elif whose == _POD:
                place.complain("is asked for by the pod as a whole, expected in a container")
            return
        note = f"{place.where}: {whose} is placed without {name}: --devices gives no inventory"
        if note not in self.notes:
            self.notes.append(note)


def _extended(name: str) -> bool:
    """Whether a resource is an extended one (IsExtendedResourceName of Kubernetes)."""
    return "/" in name and "kubernetes.io/" not in name and not name.startswith("requests.")


def _named(place: Place, pattern: re.Pattern[str]) -> str:
    text = place.text()
    if text and (len(text) > 253 or not pattern.fullmatch(text)):
        place.expected("lower case letters, digits and dashes")
    return text


def _pod_names(
    place: Place, spec: Place, kind: str, name: str, *, generated: bool
) -> Iterator[str]:
    """Names of the pods, such as their controller would give them.

    Random endings are worked out from the names, so that every reading gives the same ones.
    """
    match kind:
        case "Pod":
            yield f"{name}-{_ending(place.where, 5)}" if generated else name
        case "StatefulSet":
            start = spec["ordinals"]["start"].number(0, 1 << 31)
            for number in range(spec["replicas"].number(1, MAX_PODS)):
                yield f"{name}-{start + number}"
        case "Deployment":
            # The ending of the replica set is the hash of its template; here, of its owner.
            owner = f"{name}-{_ending(f'{kind} {name}', 10)}"
            for number in range(spec["replicas"].number(1, MAX_PODS)):
                yield f"{owner}-{_ending(f'{owner} {number}', 5)}"
        case "DaemonSet":
            yield f"{name}-{_ending(f'{kind} {name}', 5)}"
        case "Job" | "CronJob":
            count = spec["parallelism"].number(1, MAX_PODS)
            if spec["completions"].value is not None:
                count = min(count, spec["completions"].number(1, 1 << 31))
            indexed = spec["completionMode"].text("NonIndexed") == "Indexed"
            for number in range(count):
                ending = _ending(f"{kind} {name} {number}", 5)
                yield f"{name}-{number}-{ending}" if indexed else f"{name}-{ending}"
        case _:
            for number in range(spec["replicas"].number(1, MAX_PODS)):
                yield f"{name}-{_ending(f'{kind} {name} {number}', 5)}"


def _ending(text: str, length: int) -> str:
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16])
    letters = []
    for _ in range(length):
        number, place = divmod(number, len(_SUFFIX_LETTERS))
        letters.append(_SUFFIX_LETTERS[place])
    return "".join(letters)


def _uid(path: str) -> str:
    return str(uuid.uuid5(_NAMESPACE, path))


def _texts(place: Place) -> dict[str, str]:
    """Labels or annotations; a number in them is the commonest slip."""
    return {key: at.text() for key, at in place.mapping().items()}
