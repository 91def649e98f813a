"""What `nri-numa check` says about nodes with CRI-O, and about two runtimes."""

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

import pytest

from nri_numa.agent import preflight
from nri_numa.agent.preflight import Finding, FindingLevel
from nri_numa.config import AgentConfig
from nri_numa.config.sections import RuntimeLinkKind, RuntimeLinkSection
from tests.beds import crio_nodes
from tests.machines.named import write_tree

Node = Callable[[Path], None]
OK, WARN, FAIL = FindingLevel.OK, FindingLevel.WARN, FindingLevel.FAIL
NODES = [crio_nodes.fedora_coreos, crio_nodes.debian, crio_nodes.openshift]
DROP_IN = "etc/crio/crio.conf.d/50-site.conf"


def findings(root: Path, link: RuntimeLinkKind = RuntimeLinkKind.NRI) -> list[Finding]:
    """The findings about the runtime, whose NRI socket would be ``nri.sock`` in the tree."""
    config = AgentConfig(
        kubelet_root=str(root / "var/lib/kubelet"),
        runtime=RuntimeLinkSection(
            link=link, nri_socket=str(root / "nri.sock"), cri_socket=f"unix://{root}/crio.sock"
        ),
    )
    return list(preflight.check_runtime_link(config, root))


def about(subject: str, found: list[Finding]) -> Finding:
    chosen = [finding for finding in found if finding.subject == subject]
    assert len(chosen) == 1, found
    return chosen[0]


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        yield server


@pytest.mark.parametrize(
    ("node", "version", "text"),
    [
        (crio_nodes.fedora_coreos, "1.34", "its default"),
        (crio_nodes.debian, "1.29", "crun"),
        (crio_nodes.openshift, "1.32", "crun"),
    ],
)
def test_a_crio_with_nri_has_drivers(tmp_path: Path, node: Node, version: str, text: str) -> None:
    node(tmp_path)
    write_tree(tmp_path, {DROP_IN: "[crio.nri]\nenable_nri = true\n"})
    with listening(tmp_path / "nri.sock"):
        found = findings(tmp_path)
    assert [finding.level for finding in found] == [OK, OK]
    assert found[0].message == f"CRI-O {version}, cgroup manager systemd, OCI runtime {text}"


def test_a_crio_before_1_30_without_a_setting_has_nri_off(tmp_path: Path) -> None:
    """And no word of containerd, whose file is there too."""
    crio_nodes.debian(tmp_path)
    nri = about("NRI", findings(tmp_path))
    assert nri.level is FAIL
    assert "no file turns it on, and CRI-O 1.29 has it off by default" in nri.message
    assert "--fix-runtime" in nri.remedy
    assert "containerd" not in nri.message + nri.remedy


def test_a_crio_from_1_30_on_has_nri_on(tmp_path: Path) -> None:
    crio_nodes.fedora_coreos(tmp_path)
    nri = about("NRI", findings(tmp_path))
    assert nri.message.startswith("there is no socket")
    assert nri.remedy.startswith("Start CRI-O")


def test_without_a_version_the_setting_is_asked_for(tmp_path: Path) -> None:
    crio_nodes.fedora_coreos(tmp_path)
    (tmp_path / "usr/bin/crio").unlink()
    nri = about("NRI", findings(tmp_path))
    assert "does not turn it on, which CRI-O before 1.30 needs" in nri.message


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("enable_nri = false", "50-site.conf sets enable_nri = false"),
        (
            "enable_nri = true\nnri_disable_connections = true",
            "50-site.conf sets nri_disable_connections = true",
        ),
        (
            'enable_nri = true\nnri_listen = "/run/other/nri.sock"',
            "50-site.conf sets nri_listen = '/run/other/nri.sock'",
        ),
    ],
)
def test_a_drop_in_that_stops_plugins(tmp_path: Path, node: Node, setting: str, text: str) -> None:
    node(tmp_path)
    write_tree(tmp_path, {DROP_IN: f"[crio.nri]\n{setting}\n"})
    nri = about("NRI", findings(tmp_path))
    assert (nri.level, text in nri.message) == (FAIL, True), nri


def test_a_socket_that_answers_is_gone_after_the_next_restart(tmp_path: Path) -> None:
    crio_nodes.fedora_coreos(tmp_path)
    write_tree(tmp_path, {DROP_IN: "[crio.nri]\nenable_nri = false\n"})
    with listening(tmp_path / "nri.sock"):
        nri = about("NRI", findings(tmp_path))
    assert (nri.level, "answers, but" in nri.message) == (WARN, True)


def test_the_last_file_by_name_decides(tmp_path: Path) -> None:
    """Whatever its name ends with, and also in a directory below."""
    crio_nodes.openshift(tmp_path)
    directory = "etc/crio/crio.conf.d"
    write_tree(
        tmp_path,
        {
            "etc/crio/crio.conf": "[crio.nri]\nenable_nri = true\n",
            f"{directory}/98-off": "[crio.nri]\nenable_nri = false\n",
            f"{directory}/99/on": "[crio.nri]\nenable_nri = true\n",
        },
    )
    assert about("NRI", findings(tmp_path)).remedy.startswith("Start CRI-O")


def test_openshift_gets_a_machine_config(tmp_path: Path) -> None:
    crio_nodes.openshift(tmp_path, "1.29.9-5.rhaos4.16.git34690b8.el9")
    nri = about("NRI", findings(tmp_path))
    assert nri.level is FAIL
    assert "MachineConfig" in nri.remedy


def test_a_crio_without_nri_is_named(tmp_path: Path) -> None:
    crio_nodes.debian(tmp_path, "1.25.5")
    nri = about("NRI", findings(tmp_path))
    assert (nri.level, nri.message) == (FAIL, "CRI-O 1.25 has no NRI, expected 1.26 or newer")
    assert nri.remedy == "Install a newer CRI-O, or set runtime.link: cri."


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[crio.nri", "50-site.conf is not valid TOML"),
        ('[crio.nri]\nenable_nri = "yes"\n', "enable_nri is 'yes', expected true or false"),
        ("[crio.runtime]\ncgroup_manager = 2\n", "cgroup_manager is 2, expected a text"),
    ],
)
def test_a_file_that_stops_crio_is_named(tmp_path: Path, text: str, problem: str) -> None:
    crio_nodes.debian(tmp_path)
    write_tree(tmp_path, {DROP_IN: text})
    found = about("runtime", findings(tmp_path))
    assert (found.level, problem in found.message) == (FAIL, True), found


@pytest.mark.parametrize(
    ("timeout", "is_named"), [("500ms", True), ("1.5s", True), ("2s", False), ("0s", False)]
)
def test_a_request_timeout_below_nri_is_named(tmp_path: Path, timeout: str, is_named: bool) -> None:
    crio_nodes.fedora_coreos(tmp_path)
    setting = f'nri_plugin_request_timeout = "{timeout}"'
    write_tree(tmp_path, {DROP_IN: f"[crio.nri]\n{setting}\n"})
    found = findings(tmp_path)
    assert any("nri_plugin_request_timeout" in f.message for f in found) is is_named


@pytest.mark.parametrize(
    ("endpoint", "choice"),
    [
        ("/var/run/crio/crio.sock", "the kubelet uses CRI-O"),
        ("/run/containerd/containerd.sock", "the kubelet uses containerd"),
        ("", "the kubelet's is not known"),
    ],
)
def test_two_runtimes_are_named_with_kubelets(tmp_path: Path, endpoint: str, choice: str) -> None:
    crio_nodes.fedora_coreos(tmp_path)
    crio_nodes.add_process(tmp_path, 700, "/usr/bin/containerd")
    kubelet_file = tmp_path / "var/lib/kubelet/config.yaml"
    kubelet_file.write_text(crio_nodes.KUBELET_FILE.format(endpoint) if endpoint else "")
    found = findings(tmp_path)
    assert found[0].level is WARN
    assert "CRI-O (process 812) and containerd (process 700) run here" in found[0].message
    assert choice in found[0].message
    assert ("CRI-O" in about("NRI", found).remedy) is ("CRI-O" in choice)


def test_an_nri_socket_of_the_other_runtime_is_named(tmp_path: Path) -> None:
    crio_nodes.debian(tmp_path, "1.34.0")
    crio_nodes.add_process(tmp_path, os.getpid(), "/usr/bin/containerd")
    with listening(tmp_path / "nri.sock"):
        found = findings(tmp_path)
    assert (found[-1].level, "is served by containerd" in found[-1].message) == (FAIL, True)


def test_a_socket_without_its_process_shows_a_runtime(tmp_path: Path) -> None:
    """As a pod sees it, which has only the socket."""
    (tmp_path / "run/crio").mkdir(parents=True)
    with listening(tmp_path / "run/crio/crio.sock"):
        assert about("runtime", findings(tmp_path)).message.startswith("CRI-O, ")


@contextmanager
def as_another_user() -> Iterator[None]:
    """Run as a user without rights, if the test runs as root."""
    user = os.geteuid()
    os.setresuid(user or 65534, user or 65534, user)
    try:
        yield
    finally:
        os.setresuid(user, user, user)


@pytest.mark.parametrize(
    "locked", ["run/containerd", "run/crio", "usr/local/bin", "var/lib/rancher", "etc/crio"]
)
def test_folders_that_this_user_may_not_enter_end_no_check(locked: str) -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are for their user only
        root = Path(name)
        root.chmod(0o755)
        crio_nodes.debian(root)
        (root / locked).mkdir(parents=True, exist_ok=True)
        findings(root)  # imports what only this user may read
        (root / locked).chmod(0)
        with as_another_user():
            found = findings(root)
        (root / locked).chmod(0o755)
    assert found[-1].level is FAIL
    assert (found[-1].remedy == "Run as root.") is (locked == "etc/crio")


def greet(server: socket.socket) -> None:
    """Send a client a SETTINGS frame of HTTP/2, as a gRPC server does."""
    with server.accept()[0] as peer, suppress(OSError):
        peer.sendall(b"\0\0\0\4\0\0\0\0\0")


def test_a_socket_that_serves_cri_is_no_nri(tmp_path: Path) -> None:
    crio_nodes.fedora_coreos(tmp_path)
    with listening(tmp_path / "nri.sock") as server:
        thread = Thread(target=greet, args=(server,))
        thread.start()
        nri = about("NRI", findings(tmp_path))
        thread.join()
    assert (nri.level, "serves gRPC" in nri.message) == (FAIL, True)
    assert nri.remedy == "Set runtime.nriSocket to the NRI socket of the runtime."


def test_over_cri_the_usual_socket_is_offered(tmp_path: Path) -> None:
    crio_nodes.fedora_coreos(tmp_path)
    cri = about("CRI", findings(tmp_path, RuntimeLinkKind.CRI))
    assert "such as /run/crio/crio.sock" in cri.remedy
