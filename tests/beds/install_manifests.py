"""What operators install, as kustomize, Helm and the files have it."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.beds.kube import build
from tests.beds.testbed import TestbedUnavailable

REPOSITORY = Path(__file__).resolve().parents[2]


BASE = REPOSITORY / "config/kubernetes/base"


CHART = REPOSITORY / "config/helm/nri-numa"


@cache
def built() -> list[str]:
    """Folders of what the beds have built; looked for once, because Go is asked for its version."""
    found = []
    for find in (build.find_helm, build.find_programs):
        with contextlib.suppress(TestbedUnavailable):
            found.append(str(find(build=False)))
    return found


def program(*names: str) -> str:
    """The first of these programs that is there, or skip.

    Helm and kubectl are in no Debian: they are also looked for where the beds have built them.
    """
    path = os.pathsep.join([os.environ.get("PATH", ""), *built()])
    for name in names:
        found = shutil.which(name, path=path)
        if found:
            return found
    missing = f"{' or '.join(names)} is not installed"
    if {"helm", "kubectl"} & {*names} and os.environ.get("NRI_NUMA_REQUIRE_KUBE") == "1":
        pytest.fail(f"NRI_NUMA_REQUIRE_KUBE=1, but {missing}", pytrace=False)
    pytest.skip(missing)


def kustomized(directory: str, *components: str) -> dict[str, Any]:
    """What kustomize makes of a directory below config/kubernetes, with components from there."""
    tool = program("kubectl", "kustomize")
    verb = ["kustomize"] if tool.endswith("kubectl") else ["build"]
    with tempfile.TemporaryDirectory() as name:
        overlay = Path(name).resolve()
        source = os.path.relpath(REPOSITORY / "config/kubernetes", overlay)
        document = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": "nri-numa",
            "resources": [f"{source}/{directory}"],
            "components": [f"{source}/{one}" for one in components],
        }
        (overlay / "kustomization.yaml").write_text(json.dumps(document))
        done = subprocess.run(
            [tool, *verb, str(overlay)], capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    return {d["kind"]: d for d in yaml.safe_load_all(done.stdout) if d}


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``helm template`` of the chart."""
    command = [program("helm"), "template", "nri-numa", str(CHART), "-n", "nri-numa", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def rejection(*arguments: str) -> str:
    """What Helm says against these options."""
    done = helm(*arguments)
    assert done.returncode != 0
    return done.stderr


def helmed(*arguments: str) -> dict[str, Any]:
    """What the chart makes with these options, by kind."""
    return {kind: one for (kind, _), one in charted(*arguments).items()}


def charted(*arguments: str) -> dict[tuple[str, str], Any]:
    """What the chart makes with these options, by kind and name."""
    done = helm(*arguments)
    assert done.returncode == 0, done.stderr
    return {(d["kind"], d["metadata"]["name"]): d for d in yaml.safe_load_all(done.stdout) if d}


def documents(*files: str) -> list[dict[str, Any]]:
    """All documents of some files below config/kubernetes."""
    texts = [(BASE.parent / file).read_text() for file in files]
    return [one for text in texts for one in yaml.safe_load_all(text) if one]


def in_the_chart(ours: dict[tuple[str, str], Any], *files: str) -> None:
    """Insist that the chart made the documents of these files, but for labels."""
    for theirs in documents(*files):
        one = ours[theirs["kind"], theirs["metadata"]["name"]]
        for each in (one, theirs):
            each["metadata"].pop("labels", None)
        if theirs["kind"] == "Deployment":
            template = one["spec"]["template"]
            assert "checksum/config" in template["metadata"].pop("annotations")
        if theirs["kind"] == "CustomResourceDefinition":
            del one["metadata"]["annotations"]["helm.sh/resource-policy"]
        assert one == theirs


AS_ROOT = {
    "runAsUser": 0,
    "runAsGroup": 0,
    "privileged": False,
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
