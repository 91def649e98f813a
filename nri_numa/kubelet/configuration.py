"""What the kubelet's configuration says that concerns us. Pure.

Source: kubernetes ``cmd/kubelet/app/server.go``: the file of ``--config``, then the drop-ins of
``--config-dir`` in lexical order, each a JSON merge patch (lists are replaced, null removes), then
the flags of the command line.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from nri_numa.kubelet import state_files
from nri_numa.model.cpuset import CPUSet, ListFormatError
from nri_numa.text import BadQuantity, milli_cpus, page_size, whole_bytes

API_VERSION: Final = "kubelet.config.k8s.io/v1beta1"
KIND: Final = "KubeletConfiguration"

_DEFAULT_ROOT: Final = "/var/lib/kubelet"
_KEYS: Final = {
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


class Flags(msgspec.Struct, frozen=True, kw_only=True):
    """What the kubelet's command line says that concerns us.

    Attributes:
        config, config_dir: paths; empty when not given.
        root_dir: the kubelet's directory.
        values: key of the configuration file to the text of its flag.
    """

    config: str = ""
    config_dir: str = ""
    root_dir: str = _DEFAULT_ROOT
    values: Mapping[str, str] = msgspec.field(default_factory=dict)


class KubeletFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The kubelet's configuration, as far as we care.

    Attributes:
        cpu_policy, memory_policy, topology_policy: with the kubelet's defaults.
        cpu_options: of the CPU manager's policy.
        reserved_cpus: ``reservedSystemCPUs``; None when not set.
        reserved_milli: thousandths of a CPU of ``systemReserved`` and ``kubeReserved``.
        reserved_bytes: bytes of memory of both.
        reserved_memory: ``reservedMemory``: by NUMA node, bytes by page size, 0 for ordinary
            memory.
        problems: sentences about what cannot be read, each ``key: what, what was expected``.
    """

    cpu_policy: str = "none"
    memory_policy: str = "None"
    topology_policy: str = "none"
    cpu_options: Mapping[str, str] = msgspec.field(default_factory=dict)
    reserved_cpus: CPUSet | None = None
    reserved_milli: int = 0
    reserved_bytes: int = 0
    reserved_memory: Mapping[int, Mapping[int, int]] = msgspec.field(default_factory=dict)
    problems: tuple[str, ...] = ()


def command_line(words: Sequence[str]) -> Flags:
    """Read a command line: ``--flag=value`` or ``--flag value``; the last of equal flags counts."""
    found: dict[str, str] = {}
    for number, word in enumerate(words[1:], 1):
        if not word.startswith("-"):
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if not equals:
            after = words[number + 1] if number + 1 < len(words) else ""
            value = "" if after.startswith("-") else after
        found[name] = value
    return Flags(
        config=found.get("config", ""),
        config_dir=found.get("config-dir", ""),
        root_dir=found.get("root-dir") or _DEFAULT_ROOT,
        values={key: found[flag] for flag, key in _KEYS.items() if flag in found},
    )


def merged(documents: Iterable[tuple[str, object]]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Lay the file and its drop-ins over one another, each as a JSON merge patch (RFC 7396).

    ``documents`` are names and contents. Returns the outcome, and sentences about documents that
    are left out: the kubelet would not start.
    """
    whole: dict[str, Any] = {}
    problems: list[str] = []
    for name, document in documents:
        if not isinstance(document, dict):
            problems.append(f"{name}: is {_kind(document)}, expected a {KIND}")
            continue
        for key, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
            if document.get(key) != wanted:
                problems.append(f"{name}: {key} is {_short(document.get(key))}, expected {wanted}")
                break
        else:
            whole = _patched(whole, document)
    return whole, tuple(problems)


def _patched(base: Any, patch: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(base) if isinstance(base, dict) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, dict):
            found[key] = _patched(found.get(key), value)
        else:
            found[key] = value
    return found


def facts(document: Mapping[str, Any], flags: Mapping[str, str]) -> KubeletFacts:
    """Read what concerns us; flags beat the document, and what cannot be read is a problem."""
    problems: list[str] = []
    text = {key: value for key, value in document.items() if isinstance(value, str)} | dict(flags)

    def amounts(key: str) -> Mapping[str, Any]:
        if key in flags:
            return _pairs(flags[key])
        value = document.get(key) or {}
        if isinstance(value, dict):
            return value
        problems.append(f"{key}: is {_kind(value)}, expected names and values")
        return {}

    reserved = None
    if text.get("reservedSystemCPUs"):
        try:
            reserved = CPUSet.parse(text["reservedSystemCPUs"])
        except ListFormatError as error:
            problems.append(f"reservedSystemCPUs: {_short(text['reservedSystemCPUs'])}: {error}")
    milli = memory = 0
    for key in ("systemReserved", "kubeReserved"):
        of = amounts(key)
        for resource, value in of.items():
            try:
                if resource == "cpu":
                    milli += milli_cpus(value)
                elif resource == "memory":
                    memory += whole_bytes(value)
            except BadQuantity as error:
                problems.append(f"{key}.{resource}: is {_short(value)}, expected {error}")
    return KubeletFacts(
        cpu_policy=text.get("cpuManagerPolicy") or "none",
        memory_policy=text.get("memoryManagerPolicy") or "None",
        topology_policy=text.get("topologyManagerPolicy") or "none",
        cpu_options={k: str(v) for k, v in amounts("cpuManagerPolicyOptions").items()},
        reserved_cpus=reserved,
        reserved_milli=milli,
        reserved_bytes=memory,
        reserved_memory=_reserved_memory(document, flags, problems),
        problems=tuple(problems),
    )


def _reserved_memory(
    document: Mapping[str, Any], flags: Mapping[str, str], problems: list[str]
) -> Mapping[int, Mapping[int, int]]:
    key = "reservedMemory"
    entries: Any = document.get(key) or []
    if key in flags:  # 0:memory=1Gi,hugepages-2Mi=512Mi;1:memory=2Gi
        parts = [part.partition(":") for part in flags[key].split(";") if part]
        entries = [{"numaNode": node, "limits": _pairs(limits)} for node, _, limits in parts]
    found: dict[int, dict[int, int]] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        node = entry.get("numaNode", 0) if isinstance(entry, dict) else None
        limits = entry.get("limits") or {} if isinstance(entry, dict) else None
        if not _is_small(str(node)) or not isinstance(limits, dict):
            problems.append(f"{key}: {_short(entry)}, expected numaNode and limits")
            continue
        table = found.setdefault(int(str(node)), {})
        for kind, value in limits.items():
            try:
                size = 0 if kind == "memory" else page_size(str(kind))
                table[size] = table.get(size, 0) + whole_bytes(value)
            except BadQuantity as error:
                problems.append(f"{key}: {kind} is {_short(value)}, expected {error}")
    return found


def _pairs(text: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in text.split(",") if part)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _kind(value: object) -> str:
    return "empty" if value is None else f"a {type(value).__name__}"


def _short(value: object) -> str:
    return "missing" if value is None else repr(value)[:60]


def _is_small(text: str) -> bool:
    # `isdigit` alone takes digits that `int` does not.
    return text.isascii() and text.isdigit() and len(text) <= 4


# --- Finds and reads the kubelet's configuration: its command line, its file, its drop-ins --------
# `/configz` would be the truth, and is not asked: it takes credentials, and the agent that runs as
# root on the node has none. Everything here happens in a thread, never while a request waits.


MAX_FILES: Final = 200
"""Drop-ins that are read; more is the wrong directory."""
AUTO: Final = "auto"
OFF: Final = "off"


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The kubelet's configuration as it is now.

    Attributes:
        path: of its file as the kubelet names it; empty when there is none.
        facts: what it says; None when there is none.
        problems: sentences about what could not be read.
        signature: of everything that was read; equal ones mean that nothing changed.
        running: whether the command line of a running kubelet was followed.
    """

    path: str = ""
    facts: KubeletFacts | None = None
    problems: tuple[str, ...] = ()
    signature: tuple[object, ...] = ()
    running: bool = False


def read(config: str, config_dir: str, kubelet_root: str, proc: str = "/proc") -> Found:
    """Read it, from a path, or where it is on ``auto``; nothing on ``off``.

    ``config_dir`` has the drop-ins where no command line names a directory. By ``kubelet_root``,
    the directory as we see it, our kubelet is known among others.
    """
    if config == OFF:
        return Found()
    flags, prefix, running = Flags(), "", None
    if config == AUTO:
        running = _process(kubelet_root, proc)
        if running is not None:
            flags, prefix = running
            path, directory = flags.config, flags.config_dir or config_dir
        else:
            path = os.path.join(kubelet_root, "config.yaml")  # where kubeadm puts it
            directory = config_dir
            if not os.path.exists(path):
                return Found()
    else:
        path, directory = config, config_dir
    documents: list[tuple[str, object]] = []
    problems: list[str] = []
    signature: list[object] = [path, directory, tuple(sorted(flags.values.items()))]
    drop_ins: list[str] = []
    if directory:
        try:
            drop_ins = sorted(_drop_ins(prefix + directory, len(prefix)))
        except OSError as error:
            problems.append(f"{directory}: cannot be read: {error.strerror or error}")
    if len(drop_ins) > MAX_FILES:
        problems.append(f"{directory}: has {len(drop_ins)} drop-ins, expected at most {MAX_FILES}")
    for name in (*((path,) if path else ()), *drop_ins[:MAX_FILES]):
        try:
            data, seen = state_files.read(prefix + name)
            text = data.decode()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            problems.append(f"{name}: cannot be read: {why}")
            continue
        signature.append((name, seen))
        try:
            documents.append((name, _parsed(text)))
        except ValueError as error:
            problems.append(f"{name}: {error}")
    whole, left_out = merged(documents)
    known = facts(whole, flags.values)
    return Found(
        path=path or "command line",
        facts=known if whole or flags.values else None,
        problems=(*problems, *left_out, *known.problems),
        signature=(*signature, *problems),
        running=running is not None,
    )


def _process(kubelet_root: str, proc: str) -> tuple[Flags, str] | None:
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
                words = file.read(state_files.MAX_BYTES).decode(errors="replace").split("\0")
            if os.path.basename(words[0]) != "kubelet":
                continue
            flags = command_line(words)
            theirs = os.stat(os.path.join(base, "root") + flags.root_dir)
        except OSError:
            continue  # it ended meanwhile, or we may not look
        if (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino):
            return flags, os.path.join(base, "root")
    return None


def _drop_ins(directory: str, skip: int) -> Iterator[str]:
    """Paths of ``*.conf`` files, subdirectories included, without the first ``skip`` characters."""

    def fail(error: OSError) -> None:
        raise error

    for base, _, names in os.walk(directory, onerror=fail):
        yield from (os.path.join(base, name)[skip:] for name in names if name.endswith(".conf"))


def _parsed(text: str) -> object:
    """The document of a file in YAML or JSON.

    Raises:
        ValueError: with what was expected.
    """
    from nri_numa import safe_yaml

    return safe_yaml.parse(text)
