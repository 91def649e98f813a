"""What the kubelet's configuration says that concerns us. Pure.

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

KUBELET_CONFIG_API_VERSION: Final = "kubelet.config.k8s.io/v1beta1"
KUBELET_CONFIG_KIND: Final = "KubeletConfiguration"

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
}
"""Flags that say what a key of the file says too, and beat it."""
_KEY_BY_SPELLING: Final = {
    spelling.replace("-", "").lower(): key
    for flag, key in _KEY_BY_FLAG.items()
    for spelling in (flag, key)
}
"""What a key is taken for that is not one: another case, or a flag's name (``reservedCpus``)."""
_MAPPING_KEYS: Final = ("systemReserved", "kubeReserved", "cpuManagerPolicyOptions",
                  "topologyManagerPolicyOptions")  # fmt: skip


class KubeletFlags(msgspec.Struct, frozen=True, kw_only=True):
    """What the kubelet's command line says that concerns us.

    Attributes:
        config, config_dir: paths; empty when not given.
        root_dir: the kubelet's directory.
        hostname_override: what the Node is called; empty for the host name.
        values: what flags say that are keys of the configuration file too, in the file's form.
    """

    config: str = ""
    config_dir: str = ""
    root_dir: str = _DEFAULT_KUBELET_ROOT
    hostname_override: str = ""
    values: Mapping[str, Any] = msgspec.field(default_factory=dict)


class KubeletFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The kubelet's configuration, as far as we care.

    Attributes:
        cpu_policy, memory_policy, topology_policy, topology_scope: with the kubelet's defaults.
        cpu_options: of the CPU manager's policy.
        reserved_cpus: ``reservedSystemCPUs``; None when not set.
        reserved_milli: thousandths of a CPU of ``systemReserved`` and ``kubeReserved``.
        reserved_bytes: bytes of memory of both.
        reserved_memory: ``reservedMemory``: by NUMA node, bytes by page size, 0 for ordinary
            memory.
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

    @property
    def pins_containers(self) -> bool:
        """Whether its CPU or Memory Manager pins containers."""
        return self.cpu_policy == "static" or self.memory_policy == "Static"


def parse_command_line(words: Sequence[str]) -> KubeletFlags:
    """Read a command line: ``--flag=value`` or ``--flag value``.

    The last of equal flags counts; those of tables and of ``--reserved-memory`` add up.
    """
    given: dict[str, list[str]] = {}
    for number, word in enumerate(words[1:], 1):
        if not word.startswith("-"):
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if not equals:
            after = words[number + 1] if number + 1 < len(words) else ""
            value = "" if after.startswith("-") else after
        given.setdefault(name, []).append(value)
    found = {name: values[-1] for name, values in given.items()}
    return KubeletFlags(
        config=found.get("config", ""),
        config_dir=found.get("config-dir", ""),
        root_dir=found.get("root-dir") or _DEFAULT_KUBELET_ROOT,
        # As pkg/util/node GetHostname does.
        hostname_override=found.get("hostname-override", "").strip().lower(),
        values={
            key: _parse_flag_value(key, given[flag])
            for flag, key in _KEY_BY_FLAG.items()
            if flag in given
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
    """Lay the file and its drop-ins over one another, each as a JSON merge patch (RFC 7396).

    ``documents`` are names and contents. Returns the outcome, and sentences about documents that
    are left out: the kubelet would not start.
    """
    whole: dict[str, Any] = {}
    problems: list[str] = []
    for name, document in documents:
        if not isinstance(document, dict):
            problems.append(f"{name}: is {_type_text(document)}, expected a {KUBELET_CONFIG_KIND}")
            continue
        for key, wanted in (
            ("apiVersion", KUBELET_CONFIG_API_VERSION),
            ("kind", KUBELET_CONFIG_KIND),
        ):
            if document.get(key) != wanted:
                problems.append(
                    f"{name}: {key} is {_value_text(document.get(key))}, expected {wanted}"
                )
                break
        else:
            whole = _merge_patch(whole, document)
    return whole, tuple(problems)


def _list_misspelt_keys(documents: Iterable[tuple[str, object]]) -> Iterator[str]:
    """A sentence for each key that the kubelet passes over, and that one of ours was meant by."""
    for name, document in documents:
        for key in document if isinstance(document, dict) else ():
            expected = _KEY_BY_SPELLING.get(key.replace("-", "").lower(), key)
            if key != expected:
                yield f"{name}: {key} is no key of a {KUBELET_CONFIG_KIND}, expected {expected}"


def _merge_patch(base: Any, patch: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(base) if isinstance(base, dict) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, dict):
            found[key] = _merge_patch(found.get(key), value)
        else:
            found[key] = value
    return found


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


def decode_kubelet_facts(document: Mapping[str, Any], flags: Mapping[str, Any]) -> KubeletFacts:
    """Read what concerns us; flags beat the document.

    Raises:
        ValueError, msgspec.ValidationError: a kubelet would not start with that.
    """
    found = msgspec.convert(
        {**document, **flags},
        _Configuration,
        strict=False,
        dec_hook=lambda _, text: CPUSet.parse(msgspec.convert(text, str)),
    )
    milli = reserved_bytes = 0
    for of in (found.system_reserved or {}, found.kube_reserved or {}):
        milli += _parse_reserved_amount("reserved CPUs", milli_cpus, of.get("cpu", 0))
        reserved_bytes += _parse_reserved_amount(
            "reserved memory", whole_bytes, of.get("memory", 0)
        )
    memory: dict[int, dict[int, int]] = {}
    for one in found.reserved_memory or ():
        by_size = memory.setdefault(one.numa_node, {})
        for kind, value in (one.limits or {}).items():
            key = f"reservedMemory.{kind}"
            size = (
                0 if kind == "memory" else _parse_reserved_amount(key, page_bytes_of_resource, kind)
            )
            by_size[size] = by_size.get(size, 0) + _parse_reserved_amount(key, whole_bytes, value)
    return KubeletFacts(
        cpu_policy=found.cpu_manager_policy or "none",
        memory_policy=found.memory_manager_policy or "None",
        topology_policy=found.topology_manager_policy or "none",
        topology_scope=found.topology_manager_scope or "container",
        cpu_options={k: str(v) for k, v in (found.cpu_manager_policy_options or {}).items()},
        reserved_cpus=found.reserved_cpus or None,
        reserved_milli=milli,
        reserved_bytes=reserved_bytes,
        reserved_memory=memory,
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


# --- Finds and reads the kubelet's configuration: its command line, its file, its drop-ins --------
# `/configz` would be the truth, and is not asked: it takes credentials, and the agent that runs as
# root on the node has none. Everything here happens in a thread, never while a request waits.


MAX_DROP_IN_FILES: Final = 200
"""Drop-ins that are read; more is the wrong directory."""
CONFIG_AUTO: Final = "auto"
CONFIG_OFF: Final = "off"


class DiscoveredConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The kubelet's configuration as it is now.

    Attributes:
        path: of its file as the kubelet names it; empty when there is none.
        facts: what it says; None when there is none, or a file of it cannot be read.
        problems: sentences about what could not be read, or is passed over.
        signature: of everything that was read; equal ones mean that nothing changed.
        running: whether the command line of a running kubelet was followed.
    """

    path: str = ""
    facts: KubeletFacts | None = None
    problems: tuple[str, ...] = ()
    signature: tuple[object, ...] = ()
    running: bool = False


def read_kubelet_config(
    config: str, config_dir: str, kubelet_root: str, proc: str = "/proc"
) -> DiscoveredConfig:
    """Read it, from a path, or where it is on ``auto``; nothing on ``off``.

    ``config_dir`` has the drop-ins where no command line names a directory. By ``kubelet_root``,
    the directory as we see it, our kubelet is known among others.
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
    merged, left_out = merge_file_and_drop_ins(documents)
    problems += [*unreadable, *left_out, *_list_misspelt_keys(documents)]
    facts = None
    # Without one of its files it would be another configuration, and no kubelet starts with that.
    if (merged or flags.values) and not (unreadable or left_out):
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
    """Paths of the drop-ins, in the kubelet's order, and what is wrong with the directory."""
    if not directory:
        return [], []
    try:
        # A directory's entries by name, as Go's WalkDir has them.
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
    """Documents by file, what is wrong with others, and the signature of each file that is read."""
    from nri_numa import safe_yaml

    documents: list[tuple[str, object]] = []
    problems: list[str] = []
    signature: list[object] = []
    for name in names:
        try:
            data, file_signature = state_files.read_kubelet_file(prefix + name)
            text = data.decode()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            problems.append(f"{name}: cannot be read: {why}")
            continue
        signature.append((name, file_signature))
        try:
            documents.append((name, safe_yaml.parse_yaml12(text)))
        except ValueError as error:
            problems.append(f"{name}: {error}")
    return documents, problems, signature


def registered_node_name(kubelet_root: str, proc: str = "/proc") -> str:
    """What the running kubelet calls its Node: as it was told, or else the host name in lower case.

    It is for operators where ``nodeName`` says nothing; nothing is decided by it.
    """
    running = _find_kubelet_flags_and_root(kubelet_root, proc)
    told = running[0].hostname_override if running is not None else ""
    return told or socket.gethostname().lower()


def _find_kubelet_flags_and_root(kubelet_root: str, proc: str) -> tuple[KubeletFlags, str] | None:
    """Command line of the kubelet that uses this directory, and the prefix of its paths.

    There may be others (nested clusters, tests): the one whose directory is the one we see.
    """
    try:
        ours = os.stat(kubelet_root)
    except OSError:
        return None
    for entry in sorted(os.listdir(proc)) if os.path.isdir(proc) else ():
        if not entry.isdigit():
            continue
        base = os.path.join(proc, entry)
        try:
            with open(os.path.join(base, "cmdline"), "rb") as file:
                words = (
                    file.read(state_files.MAX_STATE_FILE_BYTES).decode(errors="replace").split("\0")
                )
            if os.path.basename(words[0]) != "kubelet":
                continue
            flags = parse_command_line(words)
            theirs = _stat_below(os.path.join(base, "root"), flags.root_dir)
        except OSError:
            continue  # it ended meanwhile, or we may not look
        if (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino):
            return flags, os.path.join(base, "root")
    return None


def _stat_below(root: str, path: str) -> os.stat_result:
    """A directory of a process with this root; a container's link to ours makes it no kubelet."""
    if os.path.samestat(os.stat(root), os.stat("/")):
        return os.stat(path)
    at = os.open(root, os.O_PATH | os.O_CLOEXEC)
    try:
        for part in path.split("/"):
            below = os.open(part or ".", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = below
        return os.fstat(at)
    finally:
        os.close(at)


def _walk_conf_files(directory: str, skip: int) -> Iterator[str]:
    """Paths of ``*.conf`` files, subdirectories included, without the first ``skip`` characters."""

    def raise_walk_error(error: OSError) -> None:
        raise error

    for base, _, names in os.walk(directory, onerror=raise_walk_error):
        yield from (os.path.join(base, name)[skip:] for name in names if name.endswith(".conf"))
