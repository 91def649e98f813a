"""CRI-O's configuration: check that NRI is on, and plan how to turn it on.

Sources: crio.conf(5) and crio.conf.d(5). The main file is read first, then every file below the
drop-in directory in lexical order, whatever its name ends with; a key that is set later counts.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from nri_numa.nri.runtime_config import FileChange, query_runtime
from nri_numa.runtime_profile import CRI_O_FILES

DROP_IN_DIRECTORY: Final = f"{CRI_O_FILES.config}.d"
DROP_IN_NAME: Final = "99-nri-numa.conf"
_KEYS_BY_TABLE: Final[Mapping[str, Mapping[str, type]]] = {
    "nri": {
        "enable_nri": bool,
        "nri_disable_connections": bool,
        "nri_listen": str,
        "nri_plugin_request_timeout": str,
    },
    "runtime": {"cgroup_manager": str, "default_runtime": str},
}
_MACHINE_CONFIG_DIRECTORY: Final = "etc/machine-config-daemon"


class CRIOConfig(NamedTuple):
    """Keys of CRI-O's files that concern NRI and cgroups, and the file that sets each."""

    values: Mapping[str, Any]
    file_by_key: Mapping[str, Path]

    def setting_text(self, key: str) -> str:
        """Return a clause that names a key's file and value."""
        value = self.values[key]
        text = str(value).lower() if isinstance(value, bool) else repr(value)
        return f"{self.file_by_key[key]} sets {key} = {text}"


def read_crio_config(root: Path = Path("/")) -> CRIOConfig:
    """Read CRI-O's main file and drop-ins; `OSError` or `ValueError` names a bad one."""
    values, file_by_key = dict[str, Any](), dict[str, Path]()
    for file in _list_config_files(root):
        for key, value in _read_keys(file):
            values[key], file_by_key[key] = value, file
    return CRIOConfig(values, file_by_key)


def _list_config_files(root: Path) -> Iterator[Path]:
    """List the existing files in CRI-O's order: that of Go's filepath.Walk."""
    if (main := root / CRI_O_FILES.config[1:]).exists():
        yield main
    drop_ins = (root / DROP_IN_DIRECTORY[1:]).rglob("*")
    yield from sorted((file for file in drop_ins if not file.is_dir()), key=lambda f: f.parts)


def _read_keys(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        document = tomllib.loads(file.read_text("utf-8"))
    except ValueError as error:  # not UTF-8, or not TOML
        raise ValueError(f"{file} is not valid TOML: {error}") from error
    for table, type_by_key in _KEYS_BY_TABLE.items():
        section = document.get("crio", {})
        section = section.get(table, {}) if isinstance(section, Mapping) else {}
        for key, kind in type_by_key.items():
            value = section.get(key) if isinstance(section, Mapping) else None
            if value is None:
                continue
            if not isinstance(value, kind):
                type_text = "true or false" if kind is bool else "a text"
                raise ValueError(f"{file}: {key} is {value!r}, expected {type_text}")
            yield key, value


def nri_disabled_reason(config: CRIOConfig, root: Path = Path("/")) -> str:
    """Return the reason why CRI-O does not serve NRI, by its files; empty if it does."""
    if config.values.get("enable_nri") is False:
        return config.setting_text("enable_nri")
    if "enable_nri" not in config.values:
        installed = query_runtime(CRI_O_FILES, root)
        if installed is None:
            return f"{CRI_O_FILES.config} does not turn it on, which CRI-O before 1.30 needs"
        if not installed.profile.nri_by_default:
            return f"no file turns it on, and CRI-O {installed.version} has it off by default"
    if config.values.get("nri_disable_connections"):
        return config.setting_text("nri_disable_connections")
    return ""


def is_written_by_openshift(root: Path = Path("/")) -> bool:
    """True if the Machine Config Operator of OpenShift writes CRI-O's files."""
    return os.path.exists(root / _MACHINE_CONFIG_DIRECTORY)


OPENSHIFT_HINT: Final = (
    f"OpenShift's Machine Config Operator writes this node's files: give {DROP_IN_DIRECTORY}/"
    f"{DROP_IN_NAME} to the nodes by a MachineConfig"
)


def plan_fix(root: Path = Path("/")) -> FileChange | None:
    """Plan the drop-in that turns NRI on in CRI-O; None if it is on.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is not valid, or one that is read after the drop-in decides.
    """
    config = read_crio_config(root)
    if not nri_disabled_reason(config, root):
        return None
    path = root / DROP_IN_DIRECTORY[1:] / DROP_IN_NAME
    needed_values = {"enable_nri": True, "nri_disable_connections": False}
    for key, needed_value in needed_values.items():
        file = config.file_by_key.get(key, Path())
        is_read_later = path.parent in file.parents and file.parts >= path.parts
        if is_read_later and config.values[key] is not needed_value:
            raise ValueError(
                f"{config.setting_text(key)}, and CRI-O does not read {path.name} after it: set "
                f"{key} = {str(needed_value).lower()} there"
            )
    text = CRI_O_FILES.nri_section
    if config.values.get("nri_disable_connections"):
        text += "nri_disable_connections = false\n"
    return FileChange(path, text, text)
