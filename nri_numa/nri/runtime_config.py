"""The configuration of containerd that is installed here: is NRI on, and what turns it on.

The file is edited as text, so that its comments stay, and parsed before and after: the result is
only used when exactly the NRI table differs.
"""

from __future__ import annotations

import copy
import glob
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from nri_numa.runtime_profile import RuntimeProfile, profile_of_version

CONTAINERD_CONFIG_PATH: Final = "/etc/containerd/config.toml"
NRI_PLUGIN_NAME: Final = "io.containerd.nri.v1.nri"
VERSION_QUERY_TIMEOUT_S: Final = 2.0
_NRI_SECTION_PATTERN = re.compile(
    rf"^[ \t]*\[[ \t]*plugins[ \t]*\.[ \t]*(['\"]){re.escape(NRI_PLUGIN_NAME)}\1[ \t]*\]"
)
_TOML_TABLE_HEADER_PATTERN = re.compile(r"^[ \t]*\[")
_DISABLE_KEY_PATTERN = re.compile(r"^[ \t]*(disable|disable_connections)[ \t]*=")
NRI_SECTION: Final = f"[plugins.'{NRI_PLUGIN_NAME}']\n  disable = false\n"


# --- reading ---


def nri_disabled_reason(root: Path = Path("/")) -> str | None:
    """Why containerd does not serve NRI, as far as its configuration files say."""
    distribution = find_containerd_distribution(root)
    path = root / CONTAINERD_CONFIG_PATH[1:] if distribution is None else distribution.config
    try:
        version, table, files = read_containerd_nri_config(path, root)
    except OSError as error:
        return None if error.filename == str(path) else f"{error.filename}: {error.strerror}"
    except ValueError as error:
        return str(error)
    at = files.get("disable", path)
    if table.get("disable") is True:
        return f"{at} disables it"
    if "disable" not in table and isinstance(version, int) and version < 3:
        # A 2.x reads such files too, and has it on all the same.
        installed = query_containerd(root)
        if installed is None:
            return f"{at} does not turn it on, which containerd before 2.0 needs"
        if not installed.profile.nri_by_default:
            return (
                f"{at} does not turn it on, and containerd {installed.version} has it off by "
                "default"
            )
    if table.get("disable_connections") is True:
        return f"{files['disable_connections']} sets disable_connections"
    return None


def read_containerd_nri_config(
    path: Path, root: Path = Path("/")
) -> tuple[Any, dict[str, Any], dict[str, Path]]:
    """The version of containerd's file, the NRI table, and which file each of its keys is from.

    Imported files win over those before them, as in LoadConfig of containerd.

    Raises:
        OSError, ValueError: a file cannot be read, or is not valid; with its name.
    """
    version, files, found = None, [path], list[tuple[Path, Mapping[str, Any]]]()
    for file in files:
        try:
            document = tomllib.loads(file.read_text("utf-8"))
        except ValueError as error:  # of UTF-8, or of TOML
            raise ValueError(f"{file} is not valid TOML: {error}") from error
        version = version or document.get("version", 1)
        if section := containerd_nri_section(document):
            found.append((file, section))
        for imported in _imported_config_files(document, file, root):
            if imported not in files:
                files.append(imported)
    table, by = dict[str, Any](), dict[str, Path]()
    if found and found[-1][0] != path:
        installed = query_containerd(root)
        if installed is not None and not installed.profile.merges_config_tables:
            del found[:-1]
            by["disable"] = found[0][0]
    for file, section in found:
        table.update(section)
        by.update(dict.fromkeys(section, file))
    return version, table, by


def _imported_config_files(document: Mapping[str, Any], file: Path, root: Path) -> Iterator[Path]:
    patterns = document.get("imports", [])
    if not isinstance(patterns, list):
        raise ValueError(f"{file}: imports is {patterns!r}, expected a list of files")
    for pattern in map(str, patterns):
        base = root if pattern.startswith("/") else file.parent
        at = os.path.normpath(base / pattern.lstrip("/"))
        found = sorted(glob.glob(at, include_hidden=True)) if "*" in pattern else [at]
        yield from map(Path, found)


_BINARY_DIRECTORIES = (
    *("usr/local/bin", "usr/bin", "bin", "usr/local/sbin", "usr/sbin"),
    *("var/lib/rancher/k3s/data/current/bin", "var/lib/rancher/rke2/bin"),
)


class InstalledContainerd(NamedTuple):
    """The containerd where it usually is; ``version`` such as 1.7."""

    version: str
    profile: RuntimeProfile


def nri_unsupported_reason(root: Path = Path("/")) -> str:
    """Why the installed containerd cannot serve NRI whatever its configuration says; else empty."""
    installed = query_containerd(root)
    if installed is None or installed.profile.nri_release is not None:
        return ""
    return f"containerd {installed.version} has no NRI, expected 1.7 or newer"


class KubernetesDistribution(NamedTuple):
    """A distribution of Kubernetes that makes containerd's configuration itself.

    Attributes:
        config: the file that its containerd reads, written anew at each of its starts.
    """

    name: str
    config: Path

    @property
    def nri_enabling_hint(self) -> str:
        """Where NRI is turned on instead, for a sentence."""
        return (
            f"{self.name} reads {self.config} and writes it anew at each start: turn NRI on in the "
            "template beside it (config-v3.toml.tmpl; config.toml.tmpl before containerd 2.0), "
            f'below {{{{ template "base" . }}}}, and restart {self.name}'
        )


def find_containerd_distribution(root: Path = Path("/")) -> KubernetesDistribution | None:
    """The distribution whose containerd runs here; None where containerd is its own package."""
    for name in ("k3s", "RKE2"):
        config = root / f"var/lib/rancher/{name.lower()}/agent/etc/containerd/config.toml"
        if config.exists():
            return KubernetesDistribution(name, config)
    return None


def query_containerd(root: Path = Path("/")) -> InstalledContainerd | None:
    """Ask the installed containerd for its version; None without one, or when it does not say."""
    for directory in _BINARY_DIRECTORIES:
        program = root / directory / "containerd"
        if not os.access(program, os.X_OK):
            continue
        try:
            # The program that the node runs as root anyway.
            said = subprocess.run(  # noqa: S603
                [str(program), "--version"],
                capture_output=True,
                text=True,
                timeout=VERSION_QUERY_TIMEOUT_S,
            ).stdout
        except (OSError, ValueError, subprocess.SubprocessError):
            return None
        found = re.search(r"\bv?([0-9]{1,4}\.[0-9]{1,4})\.[0-9]", said)
        if found is None:
            return None
        return InstalledContainerd(found[1], profile_of_version("containerd", found[1]))
    return None


def containerd_nri_section(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The table of containerd's NRI plugin; empty when there is none."""
    plugins = document.get("plugins", {})
    section = plugins.get(NRI_PLUGIN_NAME, {}) if isinstance(plugins, Mapping) else {}
    return section if isinstance(section, Mapping) else {}


# --- turning NRI on ---


class FileChange(NamedTuple):
    """A file with its whole new content, of which one part is shown."""

    path: Path
    text: str
    excerpt: str


def plan_fix(path: Path) -> FileChange | None:
    """The change of containerd's configuration that turns NRI on; None when it is on.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is not valid, another one decides, or it cannot be edited as text.
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
    # containerd 1.7 (version 2) has NRI off by default, 2.x (version 3) on. A 2.x reads version 2
    # files too; saying it once more does no harm there.
    off = {"disable": version < 3, "disable_connections": False}
    deciding = [files.get(key, path) for key, default in off.items() if table.get(key, default)]
    if not deciding:
        return None
    if other := next((file for file in deciding if file != path), None):
        raise ValueError(
            f"{other} decides it, which {path} imports: set disable = false in its "
            f"[plugins.'{NRI_PLUGIN_NAME}'], without disable_connections"
        )
    text = path.read_text("utf-8")
    document = tomllib.loads(text)
    directory = _drop_in_directory(document, path)
    if directory is not None and not containerd_nri_section(document):
        return _plan_new_file(directory / "nri-numa.toml", version)
    return _enable_nri(path, text, document)


def _plan_new_file(path: Path, version: int) -> FileChange:
    text = f"version = {version}\n\n{NRI_SECTION}"
    return FileChange(path, text, text)


def _drop_in_directory(document: Mapping[str, Any], path: Path) -> Path | None:
    """The directory of the first import such as ``/etc/containerd/conf.d/*.toml``."""
    for pattern in document.get("imports", ()):
        if isinstance(pattern, str) and pattern.endswith("/*.toml"):
            return (path.parent / pattern).parent
    return None


def _enable_nri(path: Path, text: str, document: Mapping[str, Any]) -> FileChange:
    lines = text.splitlines(keepends=True)
    start = next((i for i, line in enumerate(lines) if _NRI_SECTION_PATTERN.match(line)), None)
    if start is None:
        tail = "" if not text or text.endswith("\n") else "\n"
        change = FileChange(path, f"{text}{tail}\n{NRI_SECTION}", NRI_SECTION)
    else:
        behind = range(start + 1, len(lines))
        end = next((i for i in behind if _TOML_TABLE_HEADER_PATTERN.match(lines[i])), len(lines))
        kept = [line for line in lines[start + 1 : end] if not _DISABLE_KEY_PATTERN.match(line)]
        table = "".join([lines[start].rstrip("\n"), "\n  disable = false\n", *kept])
        edited = "".join([*lines[:start], table, *lines[end:]])
        change = FileChange(path, edited, table.rstrip() + "\n")
    _check_only_nri_changed(document, change.text)
    return change


def _check_only_nri_changed(before: Mapping[str, Any], edited: str) -> None:
    wrong = ValueError(
        "the NRI table is written in a way this command does not edit; "
        f"set disable = false in [plugins.'{NRI_PLUGIN_NAME}'] by hand"
    )
    try:
        after = tomllib.loads(edited)
    except tomllib.TOMLDecodeError as error:
        raise wrong from error
    wanted = copy.deepcopy(dict(before))
    table = wanted.setdefault("plugins", {}).setdefault(NRI_PLUGIN_NAME, {})
    table.pop("disable_connections", None)
    table["disable"] = False
    if after != wanted:
        raise wrong
