"""Turning NRI on in containerd's configuration, and touching nothing else."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from nri_numa.cli.common import Mistake
from nri_numa.cli.containerd import NAME, plan
from tests.unit.cli.conftest import invoke

FULL = """\
# comment at the top
version = 2
root = "/var/lib/containerd"  # here

[plugins]
  [plugins."io.containerd.grpc.v1.cri"]
    sandbox_image = "pause:3.9"

  [plugins."io.containerd.nri.v1.nri"]
    # keep me
    disable = true
    disable_connections = true
    plugin_path = "/opt/nri/plugins"

  [plugins."io.containerd.snapshotter.v1.overlayfs"]
    root_path = ""
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(text, errors="surrogateescape")
    return path


@pytest.mark.parametrize(
    "text",
    [
        FULL,
        "version = 2\n",
        "version = 2",
        "version = 3\n[plugins.'io.containerd.nri.v1.nri']\ndisable = true",
        "version = 2\n[plugins.'io.containerd.nri.v1.nri']",
        "version = 2\nimports = ['/etc/x/*.toml']\n[plugins.'io.containerd.nri.v1.nri']\n"
        "disable = true\n",
    ],
)
def test_exactly_the_nri_table_changes(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    change = plan(path)
    assert change is not None
    assert change.path == path
    before, after = tomllib.loads(text), tomllib.loads(change.text)
    assert after["plugins"][NAME]["disable"] is False
    assert "disable_connections" not in after["plugins"][NAME]
    for document in (before, after):
        table = document.setdefault("plugins", {}).setdefault(NAME, {})
        table.pop("disable", None)
        table.pop("disable_connections", None)
    assert after == before
    for line in text.splitlines():
        if "#" in line:
            assert line in change.text
    path.write_text(change.text)
    assert plan(path) is None


@pytest.mark.parametrize(
    "text",
    [
        "version = 3\n",
        "version = 2\n[plugins.'io.containerd.nri.v1.nri']\ndisable = false\n",
    ],
)
def test_what_is_on_stays_as_it_is(tmp_path: Path, text: str) -> None:
    assert plan(write(tmp_path, text)) is None


@pytest.mark.parametrize(
    "text",
    [
        "version = [",
        "version = 1\n",
        "version = 2 # \udce4",
        "version = 2\n[plugins]\n'io.containerd.nri.v1.nri' = {disable = true}\n",
        "version = 2\nplugins.'io.containerd.nri.v1.nri'.disable = true\n",
    ],
)
def test_what_cannot_be_edited_safely_is_left_to_the_operator(tmp_path: Path, text: str) -> None:
    with pytest.raises(Mistake):
        plan(write(tmp_path, text))


def test_a_drop_in_is_used_where_containerd_reads_them(tmp_path: Path) -> None:
    change = plan(write(tmp_path, "version = 2\nimports = ['conf.d/*.toml']\n"))
    assert change is not None
    assert change.path == tmp_path / "conf.d" / "nri-numa.toml"
    assert tomllib.loads(change.text) == {"version": 2, "plugins": {NAME: {"disable": False}}}
    change.path.parent.mkdir()
    change.path.write_text(change.text)
    assert plan(tmp_path / "config.toml") is None


def test_nothing_is_written_without_being_told(tmp_path: Path) -> None:
    path = write(tmp_path, FULL)
    arguments = ["check", "--fix-containerd", "--containerd-config", str(path)]
    result = invoke(*arguments)
    assert result.exit_code == 0
    assert "disable = false" in result.output
    assert path.read_text() == FULL


def test_writing_keeps_every_old_file(tmp_path: Path) -> None:
    path = write(tmp_path, FULL)
    path.chmod(0o600)
    arguments = ["check", "--fix-containerd", "--write", "--containerd-config", str(path)]
    assert invoke(*arguments).exit_code == 0
    assert (tmp_path / "config.toml.backup").read_text() == FULL
    assert path.stat().st_mode & 0o777 == 0o600
    assert "turns NRI on already" in invoke(*arguments).output
    path.write_text("version = 2\n")
    assert invoke(*arguments).exit_code == 0
    assert (tmp_path / "config.toml.backup1").read_text() == "version = 2\n"


def test_a_missing_file_is_made(tmp_path: Path) -> None:
    path = tmp_path / "etc" / "config.toml"
    arguments = ["check", "--fix-containerd", "--write", "--containerd-config", str(path)]
    assert invoke(*arguments).exit_code == 0
    assert plan(path) is None


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    arguments = ["check", "--fix-containerd", "--write", "--containerd-config"]
    result = invoke(*arguments, str(tmp_path / "file" / "config.toml"))
    assert result.exit_code == 1
