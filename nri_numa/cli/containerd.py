"""``nri-numa check --fix-containerd``: turn NRI on in containerd's configuration.

The file is edited as text, so that its comments stay, and parsed before and after: the result is
only used when exactly the NRI table differs.
"""

from __future__ import annotations

import copy
import os
import re
import tomllib
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import click

from nri_numa.agent.preflight import (
    containerd_nri_section,
    find_containerd_distribution,
    nri_unsupported_reason,
    read_containerd_nri_config,
)
from nri_numa.cli.common import Failure, InputError
from nri_numa.store.files import replace_file

DEFAULT_CONTAINERD_CONFIG_PATH = "/etc/containerd/config.toml"
NRI_PLUGIN_NAME = "io.containerd.nri.v1.nri"
_NRI_SECTION_PATTERN = re.compile(
    rf"^[ \t]*\[[ \t]*plugins[ \t]*\.[ \t]*(['\"]){re.escape(NRI_PLUGIN_NAME)}\1[ \t]*\]"
)
_TOML_TABLE_HEADER_PATTERN = re.compile(r"^[ \t]*\[")
_DISABLE_KEY_PATTERN = re.compile(r"^[ \t]*(disable|disable_connections)[ \t]*=")
_NRI_SECTION = f"[plugins.'{NRI_PLUGIN_NAME}']\n  disable = false\n"
_CONTAINERD_RESTART_ADVICE_TEXT = (
    "Then restart it: systemctl restart containerd. Running containers are not touched."
)


class FileChange(NamedTuple):
    """A file with its whole new content, of which one part is shown."""

    path: Path
    text: str
    excerpt: str


def plan_fix(path: Path) -> FileChange | None:
    """The change that turns NRI on; None when it is on."""
    try:
        version, table, files = read_containerd_nri_config(path)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.filename == str(path):
            return _plan_new_file(path, 2)
        raise Failure(f"{error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(str(error)) from error
    if version < 2:
        raise InputError(
            f"{path} has version {version}; migrate it first: containerd config migrate"
        )
    # containerd 1.7 (version 2) has NRI off by default, 2.x (version 3) on. A 2.x reads version 2
    # files too; saying it once more does no harm there.
    off = {"disable": version < 3, "disable_connections": False}
    deciding = [files.get(key, path) for key, default in off.items() if table.get(key, default)]
    if not deciding:
        return None
    if other := next((file for file in deciding if file != path), None):
        raise InputError(
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
    text = f"version = {version}\n\n{_NRI_SECTION}"
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
        change = FileChange(path, f"{text}{tail}\n{_NRI_SECTION}", _NRI_SECTION)
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
    wrong = InputError(
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


def fix_containerd_config(config: str, *, write: bool) -> None:
    """Show, or write, what turns NRI on.

    Raises:
        Failure: this containerd has no NRI, or a distribution or another file system has the file.
    """
    if lacks := nri_unsupported_reason():
        raise Failure(f"{lacks}; install a newer one, or set runtime.link: cri")
    if (
        distribution := find_containerd_distribution()
    ) and config == DEFAULT_CONTAINERD_CONFIG_PATH:
        raise Failure(f"{distribution.nri_enabling_hint}:\n{_NRI_SECTION}")
    if "KUBERNETES_SERVICE_HOST" in os.environ and not os.path.exists(config):
        raise Failure(
            f"this pod does not see {config}; in that file of the node set:\n{_NRI_SECTION}"
        )
    change = plan_fix(Path(config))
    if change is None:
        click.echo(f"{config} turns NRI on already.")
        return
    if not write:
        click.echo(f"# {change.path}")
        click.echo(change.excerpt, nl=False)
        click.echo()
        click.echo(
            f"# --write puts this there and keeps a backup. {_CONTAINERD_RESTART_ADVICE_TEXT}"
        )
        return
    try:
        backup = _write_with_backup(change)
    except OSError as error:
        raise Failure(f"{change.path}: {error.strerror or error}") from error
    click.echo(
        f"{change.path} written{f', the old one is {backup}' if backup else ''}. "
        f"{_CONTAINERD_RESTART_ADVICE_TEXT}"
    )


def _write_with_backup(change: FileChange) -> Path | None:
    """Write the file; the backup of the old one, where there was one."""
    path, backup, mode = change.path, None, 0o644
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        mode = path.stat().st_mode & 0o7777
        names = (path.with_name(f"{path.name}.backup{number or ''}") for number in count())
        backup = next(name for name in names if not name.exists())
        backup.write_bytes(path.read_bytes())
        backup.chmod(mode)
    os.close(replace_file(os.path.realpath(path), change.text.encode(), sync=True, mode=mode))
    return backup
