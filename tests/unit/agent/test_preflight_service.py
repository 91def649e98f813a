"""The installed service, whether it can see its program and may do what is configured."""

import re
import textwrap
from pathlib import Path

import pytest

from nri_numa.agent.preflight import Finding, FindingLevel, check_systemd_service
from nri_numa.config import AgentConfig
from nri_numa.config.sections import Devices
from tests.machines.named import write_tree

REPOSITORY = Path(__file__).resolve().parents[3]
OURS = REPOSITORY / "systemd" / "nri-numa.service"
UNIT = "etc/systemd/system/nri-numa.service"


def install(root: Path, venv: str, *, drop_in: str = "") -> None:
    """Our unit, the link of docs/install-node.md, and a virtual environment below ``venv``."""
    script = f"{venv}/bin/nri-numa"
    write_tree(root, {UNIT: OURS.read_text(), script: f"#!/{venv}/bin/python\n"})
    (root / "usr/local/bin").mkdir(parents=True)
    (root / "usr/local/bin/nri-numa").symlink_to(root / script)
    if drop_in:
        write_tree(root, {f"{UNIT}.d/override.conf": drop_in})


def found(root: Path) -> Finding:
    (one,) = check_systemd_service(AgentConfig(), root)
    assert bool(one.remedy) == (one.level is not FindingLevel.OK)
    return one


@pytest.mark.parametrize(
    ("venv", "capability"), [("home/ann/nri-numa/.venv", True), ("root/nri-numa/.venv", False)]
)
def test_a_virtual_environment_below_a_home_directory_is_hidden_from_the_service(
    tmp_path: Path, venv: str, capability: bool
) -> None:
    """Somebody else's home is closed for a root without capabilities, root's own is not."""
    install(tmp_path, venv)
    one = found(tmp_path)
    assert one.level is FindingLevel.FAIL
    assert f"/{venv}" in one.message
    assert "ProtectHome=read-only" in one.remedy
    assert ("CAP_DAC_READ_SEARCH" in one.remedy) is capability


def test_the_drop_in_that_the_remedy_names_is_a_remedy(tmp_path: Path) -> None:
    install(tmp_path, "home/ann/.venv", drop_in="[Service]\nProtectHome=read-only\n")
    assert found(tmp_path).level is FindingLevel.OK


def test_elsewhere_it_is_seen(tmp_path: Path) -> None:
    install(tmp_path, "opt/nri-numa/.venv")
    assert found(tmp_path).message == "nri-numa.service runs /usr/local/bin/nri-numa"


def test_an_interpreter_below_a_home_directory_is_hidden_too(tmp_path: Path) -> None:
    install(tmp_path, "opt/nri-numa/.venv")
    (tmp_path / "opt/nri-numa/.venv/bin/nri-numa").write_text("#!/home/ann/python/bin/python3 -I\n")
    assert "/home/ann/python/bin/python3" in found(tmp_path).message


def test_without_a_service_there_is_nothing_to_say(tmp_path: Path) -> None:
    assert list(check_systemd_service(AgentConfig(), tmp_path)) == []
    write_tree(tmp_path, {f"{UNIT}.d/x.conf": "ExecStart=/bin/x\n"})
    assert list(check_systemd_service(AgentConfig(), tmp_path)) == []


# --- devices.networkInterfaces ------------------------------------------------------------------

CARDS = AgentConfig(devices=Devices(enabled=True))


def withheld(root: Path, config: AgentConfig = CARDS) -> bool:
    """Whether the check says that network namespaces cannot be entered, and what to do."""
    found = [one for one in check_systemd_service(config, root) if one.subject == "devices"]
    assert all(one.level is FindingLevel.WARN and one.remedy for one in found)
    if (root / "etc").exists():
        assert all("] CapabilityBoundingSet=CAP_SYS_ADMIN Restrict" in one.remedy for one in found)
    return bool(found)


def documented() -> str:
    text = (REPOSITORY / "docs" / "devices.md").read_text()
    (block,) = re.findall(r"\n\n((?: {6}.*\n)+)\n", text)
    assert "[Service]" in block
    return textwrap.dedent(block)


@pytest.mark.parametrize(
    ("drop_in", "warns"),
    [
        ("", True),
        ("CapabilityBoundingSet=CAP_SYS_ADMIN", True),
        ("RestrictNamespaces=net", True),
        ("RestrictNamespaces=yes\nRestrictNamespaces=ipc net\nCapabilityBoundingSet=~", False),
        ("RestrictNamespaces=no\nCapabilityBoundingSet=CAP_SYS_ADMIN CAP_SYS_NICE", False),
        ("RestrictNamespaces=\nCapabilityBoundingSet=~\nCapabilityBoundingSet=~CAP_KILL", False),
        ("RestrictNamespaces=\nCapabilityBoundingSet=~CAP_SYS_ADMIN", True),
        (
            "RestrictNamespaces=\nCapabilityBoundingSet=~\nCapabilityBoundingSet=~CAP_KILL\n"
            "CapabilityBoundingSet=CAP_KILL",
            False,
        ),
        ("RestrictNamespaces=\nRestrictNamespaces=~net\nCapabilityBoundingSet=~", True),
        ("CapabilityBoundingSet=CAP_SYS_ADMIN\nRestrictNamespaces=net\nRestrictNamespaces=1", True),
    ],
)
def test_the_unit_hides_network_namespaces(tmp_path: Path, drop_in: str, warns: bool) -> None:
    install(tmp_path, "opt/nri-numa/.venv", drop_in=drop_in)
    assert withheld(tmp_path) is warns
    assert not withheld(tmp_path, AgentConfig())
    assert not withheld(
        tmp_path, AgentConfig(devices=Devices(enabled=True, network_interfaces=False))
    )


def test_the_documented_drop_in_lets_it_in_beside_others(tmp_path: Path) -> None:
    install(tmp_path, "opt/nri-numa/.venv", drop_in=documented())
    assert not withheld(tmp_path)
    other = "[Service]\nProtectHome=read-only\nCapabilityBoundingSet=CAP_DAC_READ_SEARCH\n"
    write_tree(tmp_path, {f"{UNIT}.d/zz-home.conf": other})
    assert not withheld(tmp_path)


@pytest.mark.parametrize(
    ("status", "warns"),
    [
        ("Uid:\t0\t0\t0\t0\nCapEff:\t0000000000000000\n", True),
        ("Uid:\t0\t0\t0\t0\nCapEff:\t0000000000200000\n", False),
        ("Uid:\t0\t0\t0\t0\nCapEff:\t00000000a80425fb\n", True),
        ("Uid:\t1000\t0\t0\t0\nCapEff:\t0000000000000000\n", False),
        ("", False),
    ],
)
def test_a_containers_capabilities_are_the_agents(tmp_path: Path, status: str, warns: bool) -> None:
    write_tree(tmp_path, {"proc/self/status": status})
    assert withheld(tmp_path) is warns
