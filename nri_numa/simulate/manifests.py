"""Manifests are read as workloads: every document is checked, and every problem is reported.

Supported kinds are Pod, Deployment, ReplicaSet, ReplicationController, StatefulSet, DaemonSet (one
pod, because there is one machine), Job, CronJob (one run) and List. Other kinds are skipped with a
note. A kind that looks like a misspelling is a problem.

Files are read as Kubernetes reads them, which converts YAML 1.1 to JSON: ``yes`` and ``on`` are
booleans, a date is a text, and a duplicate key is rejected. They are untrusted input: size, depth
and number of documents are bounded.
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
    """YAML loader for the scalars that Kubernetes knows."""


def _scalar_constructor(parse: Callable[[str], Any]) -> Callable[[Any, Any], Any]:
    def construct_scalar(loader: Any, node: Any) -> Any:
        text = loader.construct_scalar(node)
        try:
            return parse(text)
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
    """Yield the documents of a text in order.

    Raises:
        yaml.YAMLError: the rest of the text is not YAML.
    """
    safe_yaml.limit_depth_and_aliases(text)
    for number, document in enumerate(yaml.load_all(text, Loader=_Loader)):
        if number >= MAX_MANIFEST_DOCUMENTS:
            raise yaml.YAMLError(f"has more than {MAX_MANIFEST_DOCUMENTS} documents")
        yield document


def read_input_text(path: str | Path, max_bytes: int) -> str:
    """Read a file, or standard input for ``-``, of at most ``max_bytes``.

    Raises:
        OSError: the file cannot be read.
        ManifestError: the file is too large, or not UTF-8.
    """
    name = "standard input" if str(path) == "-" else str(path)
    with nullcontext(sys.stdin.buffer) if str(path) == "-" else open(path, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ManifestError((f"{name}: is larger than {max_bytes >> 20} MiB",))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ManifestError((f"{name}: is not UTF-8: byte {error.start}",)) from error


# --- Workloads ----------------------------------------------------------------------------------

MAX_WORKLOAD_PODS: Final = 10_000
"""Pods of one workload; no node runs a tenth of them."""

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
_KUBEVIRT_KINDS: Final = frozenset(
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
"""Letters of Kubernetes' random name suffixes: no vowels, so no words."""


class Manifests(msgspec.Struct, frozen=True, kw_only=True):
    """Workloads in the order of files and documents; notes say what was skipped."""

    workloads: tuple[Workload, ...] = ()
    notes: tuple[str, ...] = ()


def read_manifests(
    paths: Iterable[str | Path],
    slots_resource: str = "",
    devices: Collection[str] | None = None,
    *,
    every_device: bool = False,
) -> Manifests:
    """Read files, folders (their YAML and JSON files in order of name), or ``-``.

    ``slots_resource`` is the extended resource that counts exclusive CPUs, if there is one. With an
    inventory of ``devices`` other resources are problems. Without one they are ignored, unless
    ``every_device`` is set, because a cluster's nodes publish their resources.

    Raises:
        ManifestError: lists every problem of all files.
    """
    reading = _ManifestReader(slots_resource, devices, every_device=every_device)
    for path in paths:
        for file in _list_manifest_files(Path(path), reading.problems):
            try:
                text = read_input_text(file, MAX_MANIFEST_BYTES)
            except OSError as error:
                reading.problems.append(f"{file}: cannot be read: {error.strerror or error}")
            except ManifestError as error:
                reading.problems += error.problems
            else:
                source = "standard input" if str(file) == "-" else str(file)
                reading.add_workloads_of_text(source, text)
    return reading.build_manifests()


def read_manifests_from_text(
    text: str,
    source: str = "manifest",
    slots_resource: str = "",
    devices: Collection[str] | None = None,
) -> Manifests:
    """Read manifests from a text, named ``source`` in messages; else as `read_manifests`."""
    reading = _ManifestReader(slots_resource, devices)
    reading.add_workloads_of_text(source, text)
    return reading.build_manifests()


def _list_manifest_files(path: Path, problems: list[str]) -> list[Path]:
    if not os.path.isdir(path):  # or not accessible: reading it reports that
        return [path]
    files = sorted(
        file
        for entry in os.scandir(path)
        if (file := Path(entry)).suffix in (".yaml", ".yml", ".json") and entry.is_file()
    )
    if not files:
        problems.append(f"{path}: has no .yaml, .yml or .json files, expected manifests")
    return files


class _ManifestReader(PodManifestReader):
    """Reader of workloads from documents; collects notes and problems of all files."""

    def __init__(
        self,
        slots_resource: str,
        devices: Collection[str] | None = None,
        *,
        every_device: bool = False,
    ) -> None:
        super().__init__(slots_resource, devices, every_device=every_device)
        self.workloads: list[Workload] = []
        self.ended_pods = 0
        self.problems: list[str] = []

    def add_workloads_of_text(self, source: str, text: str) -> None:
        """Add the workloads of one file."""
        empty = True
        try:
            for number, document in enumerate(load_yaml_documents(text), 1):
                if document is not None:
                    empty = False
                    location = f"{source}, document {number}"
                    self._read_document(ManifestValue(location, "", document, self.problems))
        except yaml.YAMLError as error:
            self.problems.append(f"{source}: {safe_yaml.yaml_problem_text(error, text)}")
        else:
            if empty:
                self.problems.append(f"{source}: is empty, expected at least one manifest")

    def build_manifests(self) -> Manifests:
        """Return all workloads and notes; raise `ManifestError` if there are problems."""
        if self.problems:
            raise ManifestError(tuple(self.problems))
        notes = list(self.notes)
        if self.ended_pods:
            phases = " or ".join(sorted(ENDED_POD_PHASES, reverse=True))
            notes.append(f"{count_text(self.ended_pods, 'pod')} with phase {phases}: left out")
        return Manifests(workloads=tuple(self.workloads), notes=tuple(notes))

    def _read_document(self, root: ManifestValue) -> None:
        if not isinstance(root.value, Mapping):
            root.add_expectation_problem("a mapping with kind: Pod or the like")
            return
        kind = root["kind"].as_text()
        if not kind:
            if root["kind"].value is None:
                root["kind"].add_expectation_problem("Pod, Deployment or the like")
            return
        api_version = _API_VERSION_BY_KIND.get(kind)
        if api_version is None:
            guess = difflib.get_close_matches(kind, _API_VERSION_BY_KIND, n=1, cutoff=0.8)
            if guess:
                root["kind"].add_expectation_problem(f"{guess[0]}, or another kind that makes pods")
            else:
                self.notes.append(f"{root.location}: {_unread_kind_text(root, kind)}: left out")
            return
        version = root["apiVersion"]
        if version.value != api_version:
            version.add_expectation_problem(f"{api_version} for kind {kind}")
        if kind.endswith("List"):
            for item in root["items"].as_list("one manifest"):
                # An item is read as a document, named by its path in the list.
                location = f"{root.location}, {item.path}"
                self._read_document(ManifestValue(location, "", item.value, self.problems))
            return
        if kind == "Pod" and is_finished(root.value):
            self.ended_pods += 1
            return
        problem_count = len(self.problems)
        workload = self._read_workload(root, kind)
        if len(self.problems) == problem_count:
            self.workloads.append(workload)

    def _read_workload(self, root: ManifestValue, kind: str) -> Workload:
        meta = root["metadata"]
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
        source = f"{root.location} ({kind} {name})" if name else root.location
        root = ManifestValue(source, "", root.value, root.problems)
        spec = root["spec"]["jobTemplate"]["spec"] if kind == "CronJob" else root["spec"]
        template = root if kind == "Pod" else spec["template"]
        if kind != "Pod":
            template.as_mapping(required=True)
        pod = replace(
            self.read_pod(template, namespace),
            node_constraints=_read_node_constraints(template["spec"]),
        )
        pods = tuple(
            replace(pod, name=pod_name, uid=pod_uid(f"{kind}/{namespace}/{name}/{pod_name}"))
            for pod_name in _pod_names(root, spec, kind, name, generated=generated)
        )
        outside = {} if kind == "Pod" else read_string_map(meta["annotations"])
        if kind == "CronJob":
            outside |= read_string_map(root["spec"]["jobTemplate"]["metadata"]["annotations"])
        return Workload(
            source=source, kind=kind, namespace=namespace, name=name, pods=pods, annotations=outside
        )


def _unread_kind_text(root: ManifestValue, kind: str) -> str:
    """Explain why a document of another kind is no workload; a controller may make pods of it."""
    group, slash, _ = str(root["apiVersion"].value).partition("/")
    if kind in _KUBEVIRT_KINDS:
        return f"what counts of a {kind} is its launcher pod (virt-launcher-…), made by KubeVirt"
    if slash and "." in group and not group.endswith(".k8s.io"):
        return f"pods that a controller makes of {value_text(kind)} are not known"
    return f"{value_text(kind)} makes no pods"


def _read_node_constraints(spec: ManifestValue) -> dict[str, object]:
    """Return the raw constraints that `nri_numa.cluster.node_facts` evaluates."""
    spec["tolerations"].as_list("one toleration")
    read_string_map(spec["nodeSelector"])
    spec["affinity"].as_mapping()
    constraints = ((key, spec[key].value) for key in NODE_CONSTRAINTS)
    return {key: value for key, value in constraints if value is not None}


def _read_name(entry: ManifestValue, pattern: re.Pattern[str]) -> str:
    text = entry.as_text()
    if text and (len(text) > 253 or not pattern.fullmatch(text)):
        entry.add_expectation_problem("lower case letters, digits and dashes")
    return text


def _pod_names(
    root: ManifestValue, spec: ManifestValue, kind: str, name: str, *, generated: bool
) -> Iterator[str]:
    """Yield names of the pods in the form that their controller gives them.

    Random suffixes are hashes of the names, so every run gives the same ones.
    """
    match kind:
        case "Pod":
            yield f"{name}-{_hashed_name_suffix(root.location, 5)}" if generated else name
        case "StatefulSet":
            start = spec["ordinals"]["start"].as_number(0, 1 << 31)
            for number in range(spec["replicas"].as_number(1, MAX_WORKLOAD_PODS)):
                yield f"{name}-{start + number}"
        case "Deployment":
            # The suffix of a ReplicaSet is the hash of its template; here, of its owner.
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
        number, index = divmod(number, len(_SUFFIX_LETTERS))
        letters.append(_SUFFIX_LETTERS[index])
    return "".join(letters)
