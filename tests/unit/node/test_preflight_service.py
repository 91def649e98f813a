"""The installed service and whether it can see its program."""

from __future__ import annotations

from pathlib import Path

import pytest

from nri_numa.node.preflight import Finding, Level
from nri_numa.node.preflight_service import service

OURS = Path(__file__).resolve().parents[3] / "systemd" / "nri-numa.service"


def install(root: Path, venv: str, *, drop_in: str = "") -> None:
    """Our unit, the link of docs/install.md, and a virtual environment below ``venv``."""
    units = root / "etc" / "systemd" / "system"
    units.mkdir(parents=True)
    (units / "nri-numa.service").write_text(OURS.read_text())
    script = root / venv / "bin" / "nri-numa"
    script.parent.mkdir(parents=True)
    script.write_text(f"#!/{venv}/bin/python\n")
    link = root / "usr" / "local" / "bin" / "nri-numa"
    link.parent.mkdir(parents=True)
    link.symlink_to(script)
    if drop_in:
        directory = units / "nri-numa.service.d"
        directory.mkdir()
        (directory / "override.conf").write_text(drop_in)


def found(root: Path) -> Finding:
    """The one finding."""
    (one,) = service(root)
    assert bool(one.remedy) == (one.level is not Level.OK)
    return one


@pytest.mark.parametrize(
    ("venv", "capability"),
    [("home/ann/nri-numa/.venv", True), ("root/nri-numa/.venv", False)],
)
def test_a_virtual_environment_below_a_home_directory_is_hidden_from_the_service(
    tmp_path: Path, venv: str, capability: bool
) -> None:
    """Somebody else's home is closed for a root without capabilities, root's own is not."""
    install(tmp_path, venv)
    one = found(tmp_path)
    assert one.level is Level.FAIL
    assert f"/{venv}" in one.message
    assert "ProtectHome=read-only" in one.remedy
    assert ("CAP_DAC_READ_SEARCH" in one.remedy) is capability


def test_the_drop_in_that_the_remedy_names_is_a_remedy(tmp_path: Path) -> None:
    install(tmp_path, "home/ann/.venv", drop_in="[Service]\nProtectHome=read-only\n")
    assert found(tmp_path).level is Level.OK


def test_elsewhere_it_is_seen(tmp_path: Path) -> None:
    install(tmp_path, "opt/nri-numa/.venv")
    assert found(tmp_path).message == "nri-numa.service runs /usr/local/bin/nri-numa"


def test_an_interpreter_below_a_home_directory_is_hidden_too(tmp_path: Path) -> None:
    install(tmp_path, "opt/nri-numa/.venv")
    (tmp_path / "opt/nri-numa/.venv/bin/nri-numa").write_text("#!/home/ann/python/bin/python3 -I\n")
    assert "/home/ann/python/bin/python3" in found(tmp_path).message


def test_without_a_service_there_is_nothing_to_say(tmp_path: Path) -> None:
    assert list(service(tmp_path)) == []
    (tmp_path / "etc/systemd/system/nri-numa.service.d").mkdir(parents=True)
    (tmp_path / "etc/systemd/system/nri-numa.service.d/x.conf").write_text("ExecStart=/bin/x\n")
    assert list(service(tmp_path)) == []
