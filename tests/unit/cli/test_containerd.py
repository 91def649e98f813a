"""Turning NRI on in containerd's configuration, and touching nothing else."""

import tomllib
from pathlib import Path

import pytest
from click.testing import Result

from nri_numa.nri.runtime_config import NRI_PLUGIN_NAME, plan_fix
from tests.beds.cli import invoke
from tests.machines.named import write_tree

TABLE = f"[plugins.'{NRI_PLUGIN_NAME}']\n"
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


def fix(path: Path, *options: str) -> Result:
    return invoke("check", "--fix-runtime", *options, "--containerd-config", str(path))


@pytest.mark.parametrize(
    "text",
    [
        FULL,
        "version = 2\n",
        "version = 2",
        f"version = 3\n{TABLE}disable = true",
        "version = 2\n[plugins.'io.containerd.nri.v1.nri']",
        f"version = 2\nimports = ['/etc/x/*.toml']\n{TABLE}disable = true\n",
    ],
)
def test_exactly_the_nri_table_changes(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    change = plan_fix(path)
    assert change is not None
    assert change.path == path
    before, after = tomllib.loads(text), tomllib.loads(change.text)
    assert after["plugins"][NRI_PLUGIN_NAME]["disable"] is False
    assert "disable_connections" not in after["plugins"][NRI_PLUGIN_NAME]
    for document in (before, after):
        table = document.setdefault("plugins", {}).setdefault(NRI_PLUGIN_NAME, {})
        table.pop("disable", None)
        table.pop("disable_connections", None)
    assert after == before
    for line in text.splitlines():
        if "#" in line:
            assert line in change.text
    path.write_text(change.text)
    assert plan_fix(path) is None


@pytest.mark.parametrize(
    ("main", "files", "code", "said"),
    [
        ("disable = false", {}, 0, "turns NRI on already"),
        ("disable = true", {"a": "disable = true", "b": "disable = false"}, 0, "on already"),
        ("disable = true", {"a": "disable = false", "b": "disable = true"}, 2, "/b.toml decides"),
        ("", {"a": "disable_connections = true"}, 2, "/a.toml decides it"),
        ("", {"a": "["}, 2, "/a.toml is not valid TOML: "),
        ("", {"a.toml/x": ""}, 1, "/a.toml: Is a directory"),
    ],
)
def test_the_files_that_are_imported_decide(
    tmp_path: Path, main: str, files: dict[str, str], code: int, said: str
) -> None:
    write_tree(tmp_path / "conf.d", {f"{n}.toml": TABLE + text for n, text in files.items()})
    path = write(tmp_path, text := f"version = 2\nimports = ['conf.d/*.toml']\n{TABLE}{main}\n")
    result = fix(path, "--write")
    assert (result.exit_code, said in result.output) == (code, True), result.output
    assert path.read_text() == text


@pytest.mark.parametrize(
    "text",
    [
        "version = [",
        "version = 1\n",
        "version = 2\nimports = 'x'\n",
        "version = 2 # \udce4",
        "version = 2\n[plugins]\n'io.containerd.nri.v1.nri' = {disable = true}\n",
        "version = 2\nplugins.'io.containerd.nri.v1.nri'.disable = true\n",
    ],
)
def test_what_cannot_be_edited_safely_is_left_to_the_operator(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    before = path.read_bytes()
    assert fix(path, "--write").exit_code == 2
    assert path.read_bytes() == before


def test_a_drop_in_is_used_where_containerd_reads_them(tmp_path: Path) -> None:
    assert plan_fix(write(tmp_path, "version = 3\n")) is None, "on by default"
    change = plan_fix(write(tmp_path, "version = 2\nimports = ['conf.d/*.toml']\n"))
    assert change is not None
    assert change.path == tmp_path / "conf.d" / "nri-numa.toml"
    assert tomllib.loads(change.text) == {
        "version": 2,
        "plugins": {NRI_PLUGIN_NAME: {"disable": False}},
    }
    change.path.parent.mkdir()
    change.path.write_text(change.text)
    assert plan_fix(tmp_path / "config.toml") is None


def test_nothing_is_written_unasked_and_then_every_old_file_is_kept(tmp_path: Path) -> None:
    path = write(tmp_path, FULL)
    path.chmod(0o600)
    result = fix(path)
    assert (result.exit_code, "disable = false" in result.output) == (0, True)
    assert path.read_text() == FULL
    assert fix(path, "--write").exit_code == 0
    assert (tmp_path / "config.toml.backup").read_text() == FULL
    assert path.stat().st_mode & 0o777 == 0o600
    assert "turns NRI on already" in fix(path, "--write").output
    path.write_text("version = 2\n")
    assert fix(path, "--write").exit_code == 0
    assert (tmp_path / "config.toml.backup1").read_text() == "version = 2\n"


def test_a_missing_file_is_made(tmp_path: Path) -> None:
    """Where one can be; where not, that is said."""
    path = tmp_path / "etc" / "config.toml"
    assert fix(path, "--write").exit_code == 0
    assert plan_fix(path) is None
    assert fix(path / "config.toml", "--write").exit_code == 1


def test_a_pod_invents_no_file_of_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "192.0.2.1")
    path = tmp_path / "config.toml"
    said = fix(path, "--write")
    assert said.exit_code == 1
    assert f"this pod does not see {path}; in that file of the node set" in said.output
    assert not path.exists()
