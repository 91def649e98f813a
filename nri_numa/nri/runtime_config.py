"""Runtimes of this node; containerd's configuration: check that NRI is on, plan how to turn it on.

`nri_numa.nri.crio_config` does the same for CRI-O. The file is edited as text, so that its comments
stay. It is parsed before and after the edit, and the result is used only if nothing but the NRI
table differs.
"""

from __future__ import annotations

import copy
import glob
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from nri_numa.runtime_profile import (
    CONTAINERD_FILES,
    CRI_O_FILES,
    RuntimeFiles,
    RuntimeProfile,
    profile_of_version,
)

NRI_PLUGIN_NAME: Final = "io.containerd.nri.v1.nri"
VERSION_QUERY_TIMEOUT_S: Final = 2.0
_NRI_SECTION_PATTERN = re.compile(
    rf"^[ \t]*\[[ \t]*plugins[ \t]*\.[ \t]*(['\"]){re.escape(NRI_PLUGIN_NAME)}\1[ \t]*\]"
)
_DISABLE_KEY_PATTERN = re.compile(r"^[ \t]*(disable|disable_connections)[ \t]*=")


# --- which runtime ---

_BINARY_DIRECTORIES = (
    *("usr/local/bin", "usr/bin", "bin", "usr/local/sbin", "usr/sbin"),
    *("var/lib/rancher/k3s/data/current/bin", "var/lib/rancher/rke2/bin"),
)


class FoundRuntime(NamedTuple):
    """Runtime of this node, with what shows it: a process, its socket, or its configuration."""

    files: RuntimeFiles
    evidence: str
    is_running: bool


def find_runtimes(root: Path = Path("/")) -> list[FoundRuntime]:
    """Find containerd and CRI-O on this node, the running ones first."""
    processes = _list_process_names(root)
    runtimes = [
        runtime
        for files in (CONTAINERD_FILES, CRI_O_FILES)
        if (runtime := _find_runtime(files, processes, root)) is not None
    ]
    return sorted(runtimes, key=lambda r: (not r.is_running, r.files.title))


def _list_process_names(root: Path) -> dict[str, str]:
    """List process ids by name; of a name the lowest id."""
    ids: dict[str, str] = {}
    for comm in sorted(root.glob("proc/[0-9]*/comm"), key=lambda p: int(p.parent.name)):
        try:
            ids.setdefault(comm.read_text("utf-8", "replace").strip(), comm.parent.name)
        except OSError:
            continue  # the process ended
    return ids


def _find_runtime(
    files: RuntimeFiles, processes: Mapping[str, str], root: Path
) -> FoundRuntime | None:
    if process_id := processes.get(files.program):
        return FoundRuntime(files, f"process {process_id}", is_running=True)
    # os.path.exists(), unlike Path.exists(), answers in folders that this user may not enter.
    if os.path.exists(root / files.cri_socket[1:]):
        return FoundRuntime(files, files.cri_socket, is_running=True)
    program = next((d for d in _BINARY_DIRECTORIES if os.path.exists(root / d / files.program)), "")
    if program or os.path.exists((root / files.config[1:]).parent):
        evidence = f"/{program}/{files.program}" if program else os.path.dirname(files.config)
        return FoundRuntime(files, evidence, is_running=False)
    return None


def choose_runtime(runtimes: Sequence[FoundRuntime], kubelet_endpoint: str) -> RuntimeFiles | None:
    """Choose the runtime of the kubelet; None if there is none, or nothing decides between two."""
    for files in (CRI_O_FILES, CONTAINERD_FILES):
        if os.path.basename(kubelet_endpoint) == os.path.basename(files.cri_socket):
            return files
    candidates = [r for r in runtimes if r.is_running] or runtimes
    return candidates[0].files if len(candidates) == 1 else None


# --- reading ---


def nri_disabled_reason(root: Path = Path("/")) -> str | None:
    """Return the reason why containerd does not serve NRI, by its configuration files."""
    distribution = find_containerd_distribution(root)
    path = root / CONTAINERD_FILES.config[1:] if distribution is None else distribution.config
    try:
        version, table, files = read_containerd_nri_config(path, root)
    except OSError as error:
        return None if error.filename == str(path) else f"{error.filename}: {error.strerror}"
    except ValueError as error:
        return str(error)
    source = files.get("disable", path)
    if table.get("disable") is True:
        return f"{source} disables it"
    if "disable" not in table and isinstance(version, int) and version < 3:
        # containerd 2.x reads such files too, and has NRI on by default.
        installed = query_runtime(CONTAINERD_FILES, root)
        if installed is None:
            return f"{source} does not turn it on, which containerd before 2.0 needs"
        if not installed.profile.nri_by_default:
            release = f"containerd {installed.version}"
            return f"{source} does not turn it on, and {release} has it off by default"
    if table.get("disable_connections") is True:
        return f"{files['disable_connections']} sets disable_connections"
    return None


def read_containerd_nri_config(
    path: Path, root: Path = Path("/")
) -> tuple[Any, dict[str, Any], dict[str, Path]]:
    """Read the version of containerd's file, the NRI table, and the file that sets each key.

    Imported files override those before them, as in LoadConfig of containerd.

    Raises:
        OSError, ValueError: a file cannot be read or is not valid; the message names it.
    """
    version, files, sections = None, [path], list[tuple[Path, Mapping[str, Any]]]()
    for file in files:
        try:
            document = tomllib.loads(file.read_text("utf-8"))
        except ValueError as error:  # not UTF-8, or not TOML
            raise ValueError(f"{file} is not valid TOML: {error}") from error
        version = version or document.get("version", 1)
        if section := containerd_nri_section(document):
            sections.append((file, section))
        for imported in _imported_config_files(document, file, root):
            if imported not in files:
                files.append(imported)
    table, file_by_key = dict[str, Any](), dict[str, Path]()
    if sections and sections[-1][0] != path:
        installed = query_runtime(CONTAINERD_FILES, root)
        if installed is not None and not installed.profile.merges_config_tables:
            del sections[:-1]
            file_by_key["disable"] = sections[0][0]
    for file, section in sections:
        table.update(section)
        file_by_key.update(dict.fromkeys(section, file))
    return version, table, file_by_key


def _imported_config_files(document: Mapping[str, Any], file: Path, root: Path) -> Iterator[Path]:
    patterns = document.get("imports", [])
    if not isinstance(patterns, list):
        raise ValueError(f"{file}: imports is {patterns!r}, expected a list of files")
    for pattern in map(str, patterns):
        base = root if pattern.startswith("/") else file.parent
        target = os.path.normpath(base / pattern.lstrip("/"))
        paths = sorted(glob.glob(target, include_hidden=True)) if "*" in pattern else [target]
        yield from map(Path, paths)


class InstalledRuntime(NamedTuple):
    """Runtime in one of its usual directories; ``version`` is such as 1.7."""

    version: str
    profile: RuntimeProfile


def nri_unsupported_reason(files: RuntimeFiles, root: Path = Path("/")) -> str:
    """Return the reason why the installed runtime has no NRI at all; empty if it has."""
    installed = query_runtime(files, root)
    if installed is None or installed.profile.nri_release is not None:
        return ""
    return f"{files.title} {installed.version} has no NRI, expected {files.min_version} or newer"


class KubernetesDistribution(NamedTuple):
    """Kubernetes distribution that writes containerd's configuration itself.

    Attributes:
        config: the file that its containerd reads, rewritten at each start of the distribution.
    """

    name: str
    config: Path

    @property
    def nri_enabling_hint(self) -> str:
        """Clause that says where to turn NRI on."""
        return (
            f"{self.name} reads {self.config} and writes it anew at each start: turn NRI on in the "
            "template beside it (config-v3.toml.tmpl; config.toml.tmpl before containerd 2.0), "
            f'below {{{{ template "base" . }}}}, and restart {self.name}'
        )


def find_containerd_distribution(root: Path = Path("/")) -> KubernetesDistribution | None:
    """Find the distribution whose containerd runs here; None if containerd has its own package."""
    for name in ("k3s", "RKE2"):
        config = root / f"var/lib/rancher/{name.lower()}/agent/etc/containerd/config.toml"
        if os.path.exists(config):
            return KubernetesDistribution(name, config)
    return None


def query_runtime(files: RuntimeFiles, root: Path = Path("/")) -> InstalledRuntime | None:
    """Query the installed runtime for its version; None if it is missing or does not answer."""
    for directory in _BINARY_DIRECTORIES:
        program = root / directory / files.program
        if not os.access(program, os.X_OK):
            continue
        try:
            # The node runs this program as root anyway.
            output = subprocess.run(  # noqa: S603
                [str(program), "--version"],
                capture_output=True,
                text=True,
                timeout=VERSION_QUERY_TIMEOUT_S,
            ).stdout
        except (OSError, ValueError, subprocess.SubprocessError):
            return None
        match = re.search(r"\bv?([0-9]{1,4}\.[0-9]{1,4})\.[0-9]", output)
        if match is None:
            return None
        return InstalledRuntime(match[1], profile_of_version(files.title, match[1]))
    return None


def containerd_nri_section(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the table of containerd's NRI plugin; empty if there is none."""
    plugins = document.get("plugins", {})
    section = plugins.get(NRI_PLUGIN_NAME, {}) if isinstance(plugins, Mapping) else {}
    return section if isinstance(section, Mapping) else {}


# --- turning NRI on ---


class FileChange(NamedTuple):
    """File with its whole new content, of which only the excerpt is shown."""

    path: Path
    text: str
    excerpt: str


def plan_fix(path: Path) -> FileChange | None:
    """Plan the change of containerd's configuration that turns NRI on; None if it is on.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is not valid, an imported file decides, or it cannot be edited as text.
    """
    try:
        version, table, files = read_containerd_nri_config(path)
    except FileNotFoundError as error:
        if error.filename == str(path):
            return _plan_new_file(path, 2)
        raise
    if version < 2:
        raise ValueError(
            f"{path} has version {version}; migrate it first: containerd config migrate"
        )
    # containerd 1.7 (version 2) has NRI off by default, 2.x (version 3) on. 2.x reads version 2
    # files too; a redundant key does no harm there.
    defaults = {"disable": version < 3, "disable_connections": False}
    sources = [files.get(k, path) for k, default in defaults.items() if table.get(k, default)]
    if not sources:
        return None
    if other_file := next((file for file in sources if file != path), None):
        raise ValueError(
            f"{other_file} decides it, which {path} imports: set disable = false in its "
            f"[plugins.'{NRI_PLUGIN_NAME}'], without disable_connections"
        )
    text = path.read_text("utf-8")
    document = tomllib.loads(text)
    directory = _drop_in_directory(document, path)
    if directory is not None and not containerd_nri_section(document):
        return _plan_new_file(directory / "nri-numa.toml", version)
    return _enable_nri(path, text, document)


def _plan_new_file(path: Path, version: int) -> FileChange:
    text = f"version = {version}\n\n{CONTAINERD_FILES.nri_section}"
    return FileChange(path, text, text)


def _drop_in_directory(document: Mapping[str, Any], path: Path) -> Path | None:
    """Return the directory of the first import such as ``/etc/containerd/conf.d/*.toml``."""
    for pattern in document.get("imports", ()):
        if isinstance(pattern, str) and pattern.endswith("/*.toml"):
            return (path.parent / pattern).parent
    return None


def _enable_nri(path: Path, text: str, document: Mapping[str, Any]) -> FileChange:
    lines = text.splitlines(keepends=True)
    start = next((i for i, line in enumerate(lines) if _NRI_SECTION_PATTERN.match(line)), None)
    if start is None:
        tail = "" if not text or text.endswith("\n") else "\n"
        table = CONTAINERD_FILES.nri_section
        change = FileChange(path, f"{text}{tail}\n{table}", table)
    else:
        indices = range(start + 1, len(lines))
        stop = next((i for i in indices if lines[i].lstrip().startswith("[")), len(lines))
        body = [line for line in lines[start + 1 : stop] if not _DISABLE_KEY_PATTERN.match(line)]
        table = "".join([lines[start].rstrip("\n"), "\n  disable = false\n", *body])
        edited = "".join([*lines[:start], table, *lines[stop:]])
        change = FileChange(path, edited, table.rstrip() + "\n")
    _check_only_nri_changed(document, change.text)
    return change


def _check_only_nri_changed(document: Mapping[str, Any], edited: str) -> None:
    problem = ValueError(
        "the NRI table is written in a way this command does not edit; "
        f"set disable = false in [plugins.'{NRI_PLUGIN_NAME}'] by hand"
    )
    try:
        edited_document = tomllib.loads(edited)
    except tomllib.TOMLDecodeError as error:
        raise problem from error
    expected_document = copy.deepcopy(dict(document))
    table = expected_document.setdefault("plugins", {}).setdefault(NRI_PLUGIN_NAME, {})
    table.pop("disable_connections", None)
    table["disable"] = False
    if edited_document != expected_document:
        raise problem
