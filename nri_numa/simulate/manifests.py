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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml
from msgspec.structs import replace

from nri_numa import safe_yaml
from nri_numa.cluster.manifests import (
    DNS_LABEL_PATTERN,
    ManifestError,
    ManifestValue,
    PodManifestReader,
    pod_uid,
    read_string_map,
    value_text,
)
from nri_numa.cluster.node_facts import NODE_CONSTRAINTS
from nri_numa.cluster.pods import Workload, is_finished
from nri_numa.model.machine import count_text
from nri_numa.model.workload import ENDED_POD_PHASES

MAX_MANIFEST_BYTES: Final = 8 << 20
MAX_MANIFEST_DOCUMENTS: Final = 10_000


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
_DNS_SUBDOMAIN_PATTERN = re.compile(
    r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII
)
_SUFFIX_LETTERS: Final = "bcdfghjklmnpqrstvwxz2456789"
"""What Kubernetes makes random name endings of: no vowels, so no words."""


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


class _ManifestReader(PodManifestReader):
    """Makes workloads of documents, and gathers them, notes and mistakes over all files."""

    def __init__(
        self, counted: str, devices: Collection[str] | None = None, *, every_device: bool = False
    ) -> None:
        super().__init__(counted, devices, every_device=every_device)
        self.workloads: list[Workload] = []
        self.ended_pods = 0
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
        if kind == "Pod" and is_finished(place.value):
            self.ended_pods += 1
            return
        before = len(self.problems)
        workload = self._read_workload(place, kind)
        if len(self.problems) == before:
            self.workloads.append(workload)

    def _read_workload(self, place: ManifestValue, kind: str) -> Workload:
        meta = place["metadata"]
        meta.as_mapping(required=True)
        namespace = _read_name(meta["namespace"], DNS_LABEL_PATTERN) or "default"
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
        made = replace(
            self.read_pod(template, namespace),
            node_constraints=_read_node_constraints(template["spec"]),
        )
        names = list(_pod_names(place, spec, kind, name, generated=generated))
        pods = tuple(
            replace(made, name=each, uid=pod_uid(f"{kind}/{namespace}/{name}/{each}"))
            for each in names
        )
        outside = {} if kind == "Pod" else read_string_map(meta["annotations"])
        if kind == "CronJob":
            outside |= read_string_map(place["spec"]["jobTemplate"]["metadata"]["annotations"])
        return Workload(
            source=where,
            kind=kind,
            namespace=namespace,
            name=name,
            pods=pods,
            annotations=outside,
        )


def _unread_kind_text(place: ManifestValue, kind: str) -> str:
    """Why a document of another kind is no workload; a custom resource may become pods."""
    group, slash, _ = str(place["apiVersion"].value).partition("/")
    if kind in _VIRTUAL_MACHINE_KINDS:
        return f"what counts of a {kind} is its launcher pod (virt-launcher-…), made by KubeVirt"
    if slash and "." in group and not group.endswith(".k8s.io"):
        return f"pods that a controller makes of {value_text(kind)} are not known"
    return f"{value_text(kind)} makes no pods"


def _read_node_constraints(spec: ManifestValue) -> dict[str, object]:
    """What is judged by `nri_numa.cluster.node_facts`, as it stands."""
    spec["tolerations"].as_list("one toleration")
    read_string_map(spec["nodeSelector"])
    spec["affinity"].as_mapping()
    given = ((key, spec[key].value) for key in NODE_CONSTRAINTS)
    return {key: value for key, value in given if value is not None}


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
