"""What operators install: the unit, the Kustomize base, the Helm chart, the containerd drop-ins."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from nri_numa import __version__
from nri_numa import config as configuration
from nri_numa.check import nri_section
from tools import helm_schema

REPOSITORY = Path(__file__).resolve().parents[2]
BASE = REPOSITORY / "config/kubernetes/base"
CHART = REPOSITORY / "config/helm/nri-numa"
UNIT = REPOSITORY / "systemd/nri-numa.service"


def by_kind(text: str) -> dict[str, Any]:
    """Documents by their kind."""
    return {d["kind"]: d for d in yaml.safe_load_all(text) if d}


def program(*names: str) -> str:
    """The first of these programs that is there, or skip."""
    for name in names:
        found = shutil.which(name)
        if found:
            return found
    pytest.skip(f"{' or '.join(names)} is not installed")


def kustomized(directory: str) -> dict[str, Any]:
    """What kustomize makes of a directory below config/kubernetes."""
    tool = program("kubectl", "kustomize")
    verb = ["kustomize"] if tool.endswith("kubectl") else ["build"]
    done = subprocess.run(
        [tool, *verb, str(REPOSITORY / "config/kubernetes" / directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return by_kind(done.stdout)


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``helm template`` of the chart."""
    command = [program("helm"), "template", "nri-numa", str(CHART), "-n", "nri-numa", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def helmed(*arguments: str) -> dict[str, Any]:
    """What Helm makes of the chart."""
    done = helm(*arguments)
    assert done.returncode == 0, done.stderr
    return by_kind(done.stdout)


# --- the DaemonSet ----------------------------------------------------------------------------


def test_the_pod_has_no_more_rights_than_it_needs() -> None:
    pod = yaml.safe_load((BASE / "daemonset.yaml").read_text())["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "runAsUser": 0,
        "runAsGroup": 0,
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert pod["automountServiceAccountToken"] is False
    assert not pod.get("hostPID")
    writable = [m["name"] for m in container["volumeMounts"] if not m.get("readOnly")]
    assert writable == ["state"]
    assert {v["name"] for v in pod["volumes"]} == {m["name"] for m in container["volumeMounts"]}


def test_paths_are_those_of_the_configuration() -> None:
    """Mounts and probes fit the agent's defaults, which the shipped agent.yaml leaves alone."""
    config = configuration.load(str(BASE / "agent.yaml"))
    pod = yaml.safe_load((BASE / "daemonset.yaml").read_text())["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    assert config.runtime.nri_socket == f"{mounts['nri']}/nri.sock"
    assert config.state_dir == mounts["state"]
    assert config.cgroup_root == mounts["cgroup"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        get = container[probe]["httpGet"]
        assert f"{get['host']}:{get['port']}" == config.http.address


def test_one_version_everywhere() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
    for directory in ("base", "release"):
        text = (BASE.parent / directory / "kustomization.yaml").read_text()
        assert yaml.safe_load(text)["images"] == [
            {"name": "localhost/nri-numa", "newTag": __version__}
        ]
    assert f"localhost/nri-numa:{__version__} " in (REPOSITORY / "Containerfile").read_text()


def test_kustomize_builds_the_base() -> None:
    documents = kustomized("base")
    assert set(documents) == {"Namespace", "ServiceAccount", "ConfigMap", "DaemonSet"}
    pod = documents["DaemonSet"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == f"localhost/nri-numa:{__version__}"
    # The hash in the name rolls the DaemonSet when the configuration changes.
    (name,) = [v["configMap"]["name"] for v in pod["volumes"] if "configMap" in v]
    assert name == documents["ConfigMap"]["metadata"]["name"]
    assert re.fullmatch(r"nri-numa-[a-z0-9]{10}", name)


def test_releasing_happens_before_the_pod_is_ready() -> None:
    """``rollout status`` tells when every node is released."""
    daemonset = kustomized("release")["DaemonSet"]["spec"]
    pod = daemonset["template"]["spec"]
    (init,), (container,) = pod["initContainers"], pod["containers"]
    base = kustomized("base")["DaemonSet"]["spec"]["template"]["spec"]["containers"][0]
    for key in ("image", "securityContext", "volumeMounts", "resources"):
        assert init[key] == container[key] == base[key]
    assert init["args"] == ["release"]
    assert container["args"] == ["release", "--stay"]
    assert not [key for key in container if key.endswith("Probe")]
    assert daemonset["updateStrategy"]["rollingUpdate"]["maxUnavailable"] == "100%"


# --- Helm -------------------------------------------------------------------------------------


@pytest.mark.parametrize("directory", ["base", "release"])
def test_the_chart_and_kustomize_are_equal_in_effect(directory: str) -> None:
    values = ["--set", "release=true"] if directory == "release" else []
    ours, theirs = helmed(*values), kustomized(directory)
    for documents in (ours, theirs):
        template = documents["DaemonSet"]["spec"]["template"]
        template["metadata"].pop("annotations", None)
        for volume in template["spec"]["volumes"]:
            if "configMap" in volume:
                volume["configMap"]["name"] = "same"
    assert ours["DaemonSet"]["spec"] == theirs["DaemonSet"]["spec"]
    texts = [d["ConfigMap"]["data"]["agent.yaml"] for d in (ours, theirs)]
    assert yaml.safe_load(texts[0]) == yaml.safe_load(texts[1])


def test_the_charts_schema_knows_the_agents_configuration() -> None:
    """``python tools/helm_schema.py`` brings it up to date."""
    assert (CHART / "values.schema.json").read_text() == helm_schema.merged()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"config": {"strategie": "spread"}}, "strategie"),
        ({"config": {"strategy": "sprinkle"}}, "sprinkle"),
        ({"hostPaths": {"nri": "run/nri", "state": "/run/nri-numa"}}, "run/nri"),
        ({"updateStrategy": {"maxUnavailable": "110%"}}, "110%"),
        ({"relase": True}, "relase"),
    ],
)
def test_the_charts_schema_refuses_mistakes(values: dict[str, Any], words: str) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    default = yaml.safe_load((CHART / "values.yaml").read_text())
    assert not list(validator.iter_errors(default))
    errors = list(validator.iter_errors(default | values))
    assert errors
    assert words in " ".join(str(e.message) for e in errors)


def test_helm_refuses_them_too() -> None:
    done = helm("--set", "config.strategie=spread")
    assert done.returncode != 0
    assert "strategie" in done.stderr


def test_probes_follow_the_address() -> None:
    documents = helmed(
        "--set", "config.http.address=0.0.0.0:9999", "--set", "config.http.tlsCert=/x"
    )
    (container,) = documents["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"] == {
        "host": "127.0.0.1",
        "port": 9999,
        "scheme": "HTTPS",
        "path": "/readyz",
    }
    off = helmed("--set", "config.http.address=off")
    (container,) = off["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    assert not [key for key in container if key.endswith("Probe")]


def test_optional_parts_of_the_chart() -> None:
    documents = helmed(
        *("--set", "hostPaths.kubelet=/var/lib/kubelet"),
        *("--set", "secretName=nri-numa-http"),
        *("--set", "seLinuxOptions.type=spc_t"),
        *("--set-json", 'config.rules=[{"match":{"namespaces":["a"]},"set":{"policy":"none"}}]'),
    )
    pod = documents["DaemonSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounts = {m["name"]: m for m in container["volumeMounts"]}
    assert mounts["kubelet"]["readOnly"]
    assert mounts["secret"]["readOnly"]
    assert container["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}
    agent = yaml.safe_load(documents["ConfigMap"]["data"]["agent.yaml"])
    assert agent["rules"][0]["set"] == {"policy": "none"}
    assert agent["kind"] == "AgentConfig"


# --- containerd -------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
def test_the_drop_ins_turn_nri_on(version: int) -> None:
    document = tomllib.loads((REPOSITORY / f"config/containerd/nri-v{version}.toml").read_text())
    assert document["version"] == version
    assert nri_section(document) == {"disable": False}


# --- systemd ----------------------------------------------------------------------------------


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with a program that is there on every machine."""
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/usr/local/bin/nri-numa", "/bin/true"))
    return copy


def test_systemd_finds_nothing_wrong_with_the_unit(unit: Path) -> None:
    done = subprocess.run(
        [program("systemd-analyze"), "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    ours = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert not ours
    assert done.returncode == 0, done.stderr


def test_the_unit_is_as_closed_as_the_documentation_says(unit: Path) -> None:
    done = subprocess.run(
        [program("systemd-analyze"), "security", "--offline=true", "--no-pager", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    match = re.search(r"Overall exposure level for .*: ([0-9.]+)", done.stdout)
    assert match is not None, done.stdout + done.stderr
    assert float(match[1]) <= 2.2
