"""The drop-in of a plugin that the runtime launches, read before the runtime hands it over."""

from pathlib import Path

import pytest

from nri_numa.cli.processes import read_drop_in
from nri_numa.errors import ConfigError

LAUNCHED = {"NRI_PLUGIN_SOCKET": "3", "NRI_PLUGIN_NAME": "nri-numa", "NRI_PLUGIN_IDX": "90"}


def test_the_name_with_its_index_comes_first(tmp_path: Path) -> None:
    (tmp_path / "nri-numa.conf").write_text("b")
    assert read_drop_in(LAUNCHED, str(tmp_path)) == "b"
    (tmp_path / "90-nri-numa.conf").write_text("a")
    assert read_drop_in(LAUNCHED, str(tmp_path)) == "a"


def test_no_file_and_no_directory_are_ordinary(tmp_path: Path) -> None:
    assert read_drop_in(LAUNCHED, str(tmp_path)) == ""
    assert read_drop_in(LAUNCHED, str(tmp_path / "none")) == ""


def test_it_is_not_for_plugins_that_dial(tmp_path: Path) -> None:
    (tmp_path / "nri-numa.conf").write_text("b")
    assert read_drop_in({}, str(tmp_path)) == ""
    assert read_drop_in({"NRI_PLUGIN_NAME": "nri-numa"}, str(tmp_path)) == ""


def test_a_name_cannot_lead_out_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "secret.conf").write_text("x")
    (tmp_path / "conf.d").mkdir()
    env = LAUNCHED | {"NRI_PLUGIN_NAME": "../secret"}
    assert read_drop_in(env, str(tmp_path / "conf.d")) == ""


@pytest.mark.parametrize("kind", ["directory", "bytes"])
def test_what_cannot_be_read_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "90-nri-numa.conf"
    path.mkdir() if kind == "directory" else path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"90-nri-numa\.conf: cannot be read"):
        read_drop_in(LAUNCHED, str(tmp_path))
