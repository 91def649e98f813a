"""Kubelet configuration: the keys and flags that concern the agent, and where to find them.

Source: kubernetes ``cmd/kubelet/app/server.go``: the file of ``--config``, then the drop-ins of
``--config-dir`` in lexical order, each a JSON merge patch (lists are replaced, null removes), then
the flags of the command line.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec

from nri_numa.kubelet import state_files
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.text import BadQuantity, milli_cpus, page_bytes_of_resource, whole_bytes

KUBELET_CONFIG_KIND: Final = "KubeletConfiguration"
_DOCUMENT_TYPE: Final = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": KUBELET_CONFIG_KIND,
}

_DEFAULT_KUBELET_ROOT: Final = "/var/lib/kubelet"
_KEY_BY_FLAG: Final = {
    "cpu-manager-policy": "cpuManagerPolicy",
    "memory-manager-policy": "memoryManagerPolicy",
    "topology-manager-policy": "topologyManagerPolicy",
    "topology-manager-scope": "topologyManagerScope",
    "reserved-cpus": "reservedSystemCPUs",
    "reserved-memory": "reservedMemory",
    "system-reserved": "systemReserved",
    "kube-reserved": "kubeReserved",
    "cpu-manager-policy-options": "cpuManagerPolicyOptions",
    "topology-manager-policy-options": "topologyManagerPolicyOptions",
    "container-runtime-endpoint": "containerRuntimeEndpoint",
}
"""Keys of the file by the flag that overrides each."""
_KEY_BY_SPELLING: Final = {
    spelling.replace("-", "").lower(): key
    for flag, key in _KEY_BY_FLAG.items()
    for spelling in (flag, key)
}
"""Keys by misspelling: another case, or the flag's name (``reservedCpus``)."""
_MAPPING_KEYS: Final = ("systemReserved", "kubeReserved", "cpuManagerPolicyOptions",
                  "topologyManagerPolicyOptions")  # fmt: skip


class KubeletFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Flags of the kubelet's command line that concern the agent.

    Attributes:
        config, config_dir: paths; empty if not set.
        root_dir: the kubelet's directory.
        hostname_override: name of the Node; empty for the host name.
        values: values of flags that are also keys of the configuration file, in the file's form.
    """

    config: str = ""
    config_dir: str = ""
    root_dir: str = _DEFAULT_KUBELET_ROOT
    hostname_override: str = ""
    values: Mapping[str, Any] = msgspec.field(default_factory=dict)


class KubeletFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Values of the kubelet's configuration that concern the agent.

    Attributes:
        cpu_policy, memory_policy, topology_policy, topology_scope: with the kubelet's defaults.
        cpu_options: of the CPU manager's policy.
        reserved_cpus: ``reservedSystemCPUs``; None if not set.
        reserved_milli: millicores of ``systemReserved`` and ``kubeReserved`` together.
        reserved_bytes: bytes of memory of both.
        reserved_memory: ``reservedMemory``: by NUMA node, bytes by page size, 0 for ordinary
            memory.
        runtime_endpoint: ``containerRuntimeEndpoint``; empty if not set.
    """

    cpu_policy: str = "none"
    memory_policy: str = "None"
    topology_policy: str = "none"
    topology_scope: str = "container"
    cpu_options: Mapping[str, str] = msgspec.field(default_factory=dict)
    reserved_cpus: CPUSet | None = None
    reserved_milli: int = 0
    reserved_bytes: int = 0
    reserved_memory: Mapping[int, Mapping[int, int]] = msgspec.field(default_factory=dict)
    runtime_endpoint: str = ""

    @property
    def pins_containers(self) -> bool:
        """True if its CPU or Memory Manager pins containers."""
        return self.cpu_policy == "static" or self.memory_policy == "Static"


def parse_command_line(arguments: Sequence[str]) -> KubeletFlags:
    """Parse a command line: ``--flag=value`` or ``--flag value``.

    The last of equal flags counts; those of maps and of ``--reserved-memory`` add up.
    """
    values_by_flag: dict[str, list[str]] = {}
    for number, argument in enumerate(arguments[1:], 1):
        if not argument.startswith("-"):
            continue
        name, equals, value = argument.lstrip("-").partition("=")
        if not equals:
            next_argument = arguments[number + 1] if number + 1 < len(arguments) else ""
            value = "" if next_argument.startswith("-") else next_argument
        values_by_flag.setdefault(name, []).append(value)
    last_values = {name: values[-1] for name, values in values_by_flag.items()}
    return KubeletFlags(
        config=last_values.get("config", ""),
        config_dir=last_values.get("config-dir", ""),
        root_dir=last_values.get("root-dir") or _DEFAULT_KUBELET_ROOT,
        # As in GetHostname of pkg/util/node.
        hostname_override=last_values.get("hostname-override", "").strip().lower(),
        values={
            key: _parse_flag_value(key, values_by_flag[flag])
            for flag, key in _KEY_BY_FLAG.items()
            if flag in values_by_flag
        },
    )


def _parse_flag_value(key: str, texts: Sequence[str]) -> object:
    if key == "reservedMemory":  # 0:memory=1Gi,hugepages-2Mi=512Mi;1:memory=2Gi
        parts = [part.partition(":") for part in ";".join(texts).split(";") if part]
        return [{"numaNode": node, "limits": _parse_pairs(limits)} for node, _, limits in parts]
    return _parse_pairs(",".join(texts)) if key in _MAPPING_KEYS else texts[-1]


def _parse_pairs(text: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in text.split(",") if part)
    return {name.strip(): value.strip() for name, _, value in pairs}


def merge_file_and_drop_ins(
    documents: Iterable[tuple[str, object]],
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Merge the file and its drop-ins, each as a JSON merge patch (RFC 7396).

    ``documents`` are names and contents. Returns the merged document, and sentences about ignored
    documents, with which the kubelet would not start.
    """
    merged: dict[str, Any] = {}
    problems: list[str] = []
    for name, document in documents:
        if not isinstance(document, dict):
            problems.append(f"{name}: is {_type_text(document)}, expected a {KUBELET_CONFIG_KIND}")
            continue
        wrong_key = next((k for k, v in _DOCUMENT_TYPE.items() if document.get(k) != v), None)
        if wrong_key is None:
            merged = _merge_patch(merged, document)
        else:
            value = _value_text(document.get(wrong_key))
            problems.append(f"{name}: {wrong_key} is {value}, expected {_DOCUMENT_TYPE[wrong_key]}")
    return merged, tuple(problems)


def _list_misspelt_keys(documents: Iterable[tuple[str, object]]) -> Iterator[str]:
    """List misspelt keys, which the kubelet ignores, as sentences with the expected key."""
    for name, document in documents:
        for key in document if isinstance(document, dict) else ():
            expected_key = _KEY_BY_SPELLING.get(key.replace("-", "").lower(), key)
            if key != expected_key:
                yield f"{name}: {key} is no key of a {KUBELET_CONFIG_KIND}, expected {expected_key}"


def _merge_patch(base: Any, patch: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base) if isinstance(base, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            merged[key] = _merge_patch(merged.get(key), value)
        else:
            merged[key] = value
    return merged


class _Reservation(msgspec.Struct, frozen=True, rename="camel"):
    numa_node: Annotated[int, msgspec.Meta(ge=0, lt=NUMASet.LIMIT)] = 0
    limits: dict[str, Any] | None = None


class _Configuration(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    cpu_manager_policy: str = ""
    cpu_manager_policy_options: dict[str, Any] | None = None
    memory_manager_policy: str = ""
    topology_manager_policy: str = ""
    topology_manager_scope: str = ""
    reserved_cpus: CPUSet | None = msgspec.field(default=None, name="reservedSystemCPUs")
    system_reserved: dict[str, Any] | None = None
    kube_reserved: dict[str, Any] | None = None
    reserved_memory: tuple[_Reservation, ...] | None = None
    container_runtime_endpoint: str = ""


def decode_kubelet_facts(document: Mapping[str, Any], flags: Mapping[str, Any]) -> KubeletFacts:
    """Decode the values that concern the agent; flags override the document.

    Raises:
        ValueError, msgspec.ValidationError: no kubelet would start with these values.
    """
    config = msgspec.convert(
        {**document, **flags},
        _Configuration,
        strict=False,
        dec_hook=lambda _, text: CPUSet.parse(msgspec.convert(text, str)),
    )
    milli = reserved_bytes = 0
    for amounts in (config.system_reserved or {}, config.kube_reserved or {}):
        milli += _parse_reserved_amount("reserved CPUs", milli_cpus, amounts.get("cpu", 0))
        reserved_bytes += _parse_reserved_amount(
            "reserved memory", whole_bytes, amounts.get("memory", 0)
        )
    memory: dict[int, dict[int, int]] = {}
    for reservation in config.reserved_memory or ():
        by_size = memory.setdefault(reservation.numa_node, {})
        for kind, value in (reservation.limits or {}).items():
            key = f"reservedMemory.{kind}"
            size = (
                0 if kind == "memory" else _parse_reserved_amount(key, page_bytes_of_resource, kind)
            )
            by_size[size] = by_size.get(size, 0) + _parse_reserved_amount(key, whole_bytes, value)
    return KubeletFacts(
        cpu_policy=config.cpu_manager_policy or "none",
        memory_policy=config.memory_manager_policy or "None",
        topology_policy=config.topology_manager_policy or "none",
        topology_scope=config.topology_manager_scope or "container",
        cpu_options={k: str(v) for k, v in (config.cpu_manager_policy_options or {}).items()},
        reserved_cpus=config.reserved_cpus or None,
        reserved_milli=milli,
        reserved_bytes=reserved_bytes,
        reserved_memory=memory,
        runtime_endpoint=config.container_runtime_endpoint,
    )


def _parse_reserved_amount(key: str, read_amount: Callable[[Any], int], value: object) -> int:
    try:
        return read_amount(value)
    except BadQuantity as error:
        raise BadQuantity(f"{key}: is {_value_text(value)}, expected {error}") from error


def _type_text(value: object) -> str:
    return "empty" if value is None else f"a {type(value).__name__}"


def _value_text(value: object) -> str:
    return "missing" if value is None else repr(value)[:60]


# --- Discovery of the kubelet's configuration: its command line, its file, its drop-ins -----------
# `/configz` would be authoritative, but needs credentials, and the root agent has none. All of this
# runs in a thread, never while a request waits.


MAX_DROP_IN_FILES: Final = 200
"""Maximum number of drop-ins; a directory with more is the wrong one."""
CONFIG_AUTO: Final = "auto"
CONFIG_OFF: Final = "off"


class DiscoveredConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Kubelet configuration as found now.

    Attributes:
        path: of its file, as the kubelet names it; empty if there is none.
        facts: its values; None if there is no configuration, or one of its files is unreadable.
        problems: sentences about unreadable files and ignored keys.
        signature: of all files; equal signatures mean that nothing changed.
        running: True if it comes from the command line of a running kubelet.
    """

    path: str = ""
    facts: KubeletFacts | None = None
    problems: tuple[str, ...] = ()
    signature: tuple[object, ...] = ()
    running: bool = False


def read_kubelet_config(
    config: str, config_dir: str, kubelet_root: str, proc: str = "/proc"
) -> DiscoveredConfig:
    """Read the configuration from a path, or find it on ``auto``; read nothing on ``off``.

    ``config_dir`` has the drop-ins if no command line names a directory. ``kubelet_root`` is the
    kubelet's directory as the agent sees it, and identifies this node's kubelet among others.
    """
    if config == CONFIG_OFF:
        return DiscoveredConfig()
    flags, prefix, running = KubeletFlags(), "", None
    path, directory = config, config_dir
    if config == CONFIG_AUTO:
        running = _find_kubelet_flags_and_root(kubelet_root, proc)
        if running is not None:
            flags, prefix = running
            path, directory = flags.config, flags.config_dir or config_dir
        else:
            path = os.path.join(kubelet_root, "config.yaml")  # where kubeadm puts it
            if not os.path.exists(path):
                return DiscoveredConfig()
    drop_ins, problems = _list_drop_ins(directory, prefix)
    names = [path, *drop_ins] if path else drop_ins
    documents, unreadable, signature = _read_documents(names, prefix)
    merged, merge_problems = merge_file_and_drop_ins(documents)
    problems += [*unreadable, *merge_problems, *_list_misspelt_keys(documents)]
    facts = None
    # Without one of its files this would be another configuration, with which no kubelet starts.
    if (merged or flags.values) and not (unreadable or merge_problems):
        try:
            facts = decode_kubelet_facts(merged, flags.values)
        except (msgspec.ValidationError, ValueError) as error:
            problems.append(f"{path or 'command line'}: {str(error)[:200]}")
    return DiscoveredConfig(
        path=path or "command line",
        facts=facts,
        problems=tuple(problems),
        signature=(path, directory, flags.values, *signature, *problems),
        running=running is not None,
    )


def _list_drop_ins(directory: str, prefix: str) -> tuple[list[str], list[str]]:
    """List the paths of the drop-ins, in the kubelet's order, and problems of the directory."""
    if not directory:
        return [], []
    try:
        # Entries of each directory by name, as in Go's WalkDir.
        paths = sorted(
            _walk_conf_files(prefix + directory, len(prefix)), key=lambda path: path.split("/")
        )
    except OSError as error:
        return [], [f"{directory}: cannot be read: {error.strerror or error}"]
    if len(paths) > MAX_DROP_IN_FILES:
        problem = f"{directory}: has {len(paths)} drop-ins, expected at most {MAX_DROP_IN_FILES}"
        return paths[:MAX_DROP_IN_FILES], [problem]
    return paths, []


def _read_documents(
    names: Iterable[str], prefix: str
) -> tuple[list[tuple[str, object]], list[str], list[object]]:
    """Read the documents, the problems of unreadable ones, and the signature of each file."""
    from nri_numa import safe_yaml

    documents: list[tuple[str, object]] = []
    problems: list[str] = []
    signature: list[object] = []
    for name in names:
        try:
            data, file_signature = state_files.read_kubelet_file(prefix + name)
            text = data.decode()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            problems.append(f"{name}: cannot be read: {reason}")
            continue
        signature.append((name, file_signature))
        try:
            documents.append((name, safe_yaml.parse_yaml12(text)))
        except ValueError as error:
            problems.append(f"{name}: {error}")
    return documents, problems, signature


def registered_node_name(kubelet_root: str, proc: str = "/proc") -> str:
    """Return the running kubelet's name of its Node: the override, else the lower-case host name.

    Operators see it if ``nodeName`` is not set; no decision depends on it.
    """
    running = _find_kubelet_flags_and_root(kubelet_root, proc)
    override = running[0].hostname_override if running is not None else ""
    return override or socket.gethostname().lower()


def _find_kubelet_flags_and_root(kubelet_root: str, proc: str) -> tuple[KubeletFlags, str] | None:
    """Find the flags of the kubelet that uses this directory, and the prefix of its paths.

    Other kubelets may run (nested clusters, tests); the directory's inode identifies the right one.
    """
    try:
        root_stat = os.stat(kubelet_root)
    except OSError:
        return None
    for entry in sorted(os.listdir(proc)) if os.path.isdir(proc) else ():
        if not entry.isdigit():
            continue
        base = os.path.join(proc, entry)
        try:
            with open(os.path.join(base, "cmdline"), "rb") as file:
                data = file.read(state_files.MAX_STATE_FILE_BYTES)
            command = data.decode(errors="replace").split("\0")
            if os.path.basename(command[0]) != "kubelet":
                continue
            flags = parse_command_line(command)
            process_stat = _stat_below(os.path.join(base, "root"), flags.root_dir)
        except OSError:
            continue  # the process ended, or may not be read
        if (process_stat.st_dev, process_stat.st_ino) == (root_stat.st_dev, root_stat.st_ino):
            return flags, os.path.join(base, "root")
    return None


def _stat_below(root: str, path: str) -> os.stat_result:
    """Stat a directory below the root of a process; a link in a container does not count."""
    if os.path.samestat(os.stat(root), os.stat("/")):
        return os.stat(path)
    directory = os.open(root, os.O_PATH | os.O_CLOEXEC)
    try:
        for part in path.split("/"):
            entry = os.open(part or ".", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            os.close(directory)
            directory = entry
        return os.fstat(directory)
    finally:
        os.close(directory)


def _walk_conf_files(directory: str, skip: int) -> Iterator[str]:
    """List ``*.conf`` files, also in subdirectories, without the first ``skip`` characters."""

    def raise_walk_error(error: OSError) -> None:
        raise error

    for base, _, names in os.walk(directory, onerror=raise_walk_error):
        yield from (os.path.join(base, name)[skip:] for name in names if name.endswith(".conf"))
