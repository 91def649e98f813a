"""``check --fix-runtime`` turns NRI on in the runtime that runs, and in no other."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from nri_numa.cli.common import Failure, InputError
from nri_numa.cli.node import fix_runtime_config
from tests.beds import crio_nodes
from tests.beds.cli import invoke
from tests.machines.named import write_tree

DROP_INS = "etc/crio/crio.conf.d"
OURS = f"{DROP_INS}/99-nri-numa.conf"


def files(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): path.read_text()
        for path in root.glob("etc/**/*")
        if path.is_file()
    }


@pytest.mark.parametrize(
    "node", [crio_nodes.debian, lambda root: crio_nodes.fedora_coreos(root, "1.28.0")]
)
def test_crio_gets_one_drop_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], node: Callable[[Path], None]
) -> None:
    """The files of CRI-O stay, and those of containerd too."""
    node(tmp_path)
    before = files(tmp_path)
    fix_runtime_config(tmp_path)
    shown = capsys.readouterr().out
    assert f"# {tmp_path / OURS}\n[crio.nri]\nenable_nri = true\n" in shown
    assert "systemctl restart crio" in shown
    assert files(tmp_path) == before
    fix_runtime_config(tmp_path, write=True)
    after = files(tmp_path)
    assert tomllib.loads(after.pop(OURS)) == {"crio": {"nri": {"enable_nri": True}}}
    assert after == before
    fix_runtime_config(tmp_path, write=True)
    assert "turns NRI on already" in capsys.readouterr().out


def test_external_plugins_are_let_in_again(tmp_path: Path) -> None:
    crio_nodes.debian(tmp_path)
    write_tree(tmp_path, {f"{DROP_INS}/20-nri": "[crio.nri]\nnri_disable_connections = true\n"})
    fix_runtime_config(tmp_path, write=True)
    assert tomllib.loads((tmp_path / OURS).read_text())["crio"]["nri"] == {
        "enable_nri": True,
        "nri_disable_connections": False,
    }


@pytest.mark.parametrize("name", ["99-nri-numa.conf", "99-site", "99-nri-numa.conf.old"])
def test_a_file_that_is_read_later_is_left_to_the_operator(tmp_path: Path, name: str) -> None:
    crio_nodes.debian(tmp_path)
    write_tree(tmp_path, {f"{DROP_INS}/{name}": "[crio.nri]\nenable_nri = false\n"})
    before = files(tmp_path)
    with pytest.raises(InputError, match=f"{name} sets enable_nri = false"):
        fix_runtime_config(tmp_path, write=True)
    assert files(tmp_path) == before


def test_openshift_gets_machine_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    crio_nodes.openshift(tmp_path, "1.29.9-5.rhaos4.16.git34690b8.el9")
    before = files(tmp_path)
    fix_runtime_config(tmp_path)
    assert "enable_nri = true" in capsys.readouterr().out
    with pytest.raises(Failure, match=r"MachineConfig:\n\[crio.nri\]\nenable_nri = true"):
        fix_runtime_config(tmp_path, write=True)
    assert files(tmp_path) == before


def test_a_crio_without_nri_cannot_be_fixed(tmp_path: Path) -> None:
    crio_nodes.debian(tmp_path, "1.25.5")
    with pytest.raises(Failure, match=r"CRI-O 1.25 has no NRI, expected 1.26 or newer"):
        fix_runtime_config(tmp_path, write=True)


def test_the_runtime_that_runs_is_fixed_and_not_the_one_that_is_installed(tmp_path: Path) -> None:
    crio_nodes.add_crio(tmp_path, "1.29.0")
    crio_nodes.add_process(tmp_path, 12, "/usr/bin/containerd")
    write_tree(tmp_path, {"etc/containerd/config.toml": "version = 2\n", f"{DROP_INS}/x": ""})
    fix_runtime_config(tmp_path, write=True)
    assert "disable = false" in (tmp_path / "etc/containerd/config.toml").read_text()
    assert not (tmp_path / OURS).exists()


def test_where_nothing_says_which_of_two_runtimes_nothing_is_written(tmp_path: Path) -> None:
    crio_nodes.debian(tmp_path)
    crio_nodes.add_process(tmp_path, 12, "/usr/bin/containerd")
    before = files(tmp_path)
    with pytest.raises(Failure, match=r"CRI-O \(process 640\) and containerd \(process 12\)"):
        fix_runtime_config(tmp_path, write=True)
    assert files(tmp_path) == before
    fix_runtime_config(tmp_path, kubelet_endpoint="unix:///var/run/crio/crio.sock", write=True)
    assert (tmp_path / OURS).exists()


def test_no_runtime_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Failure, match="neither containerd nor CRI-O is here"):
        fix_runtime_config(tmp_path, write=True)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "192.0.2.1")
    with pytest.raises(Failure, match="this pod does not see its node's runtime"):
        fix_runtime_config(tmp_path, write=True)
    assert not list(tmp_path.iterdir())


def test_the_old_option_names_the_new_one() -> None:
    result = invoke("check", "--fix-containerd", code=2)
    assert "--fix-containerd is gone, expected --fix-runtime" in result.output
    assert "--fix-containerd" not in invoke("check", "--help", code=0).output
