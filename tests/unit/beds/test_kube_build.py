"""How the Kubernetes bed gets its programs, without building them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.beds.kube import build, toolchain
from tests.beds.testbed import TestbedUnavailable

GO_MOD = (build.SOURCES / "go.mod").read_text(encoding="utf-8")


def test_the_release_is_the_one_of_its_parts() -> None:
    """A part of another release compiles at times, and is then something nobody runs."""
    assert re.fullmatch(r"v1\.\d+\.\d+", build.release())
    parts = re.findall(r"^\s*(k8s\.io/\S+) => (\S+) (\S+)$", GO_MOD, re.MULTILINE)
    assert len(parts) > 20
    for name, source, version in parts:
        assert (source, version) == (name, build.release().replace("v1.", "v0."))


ALL = [each for part in build.PARTS.values() for each in part]


@pytest.mark.parametrize("recipe", ALL, ids=lambda each: each.what)
def test_every_module_is_pinned(recipe: build.Recipe) -> None:
    pinned = (recipe.sources / "go.sum").read_text(encoding="utf-8")
    assert f"{recipe.module} {recipe.release()} h1:" in pinned


def test_helm_has_the_libraries_of_the_beds_kubernetes() -> None:
    """So that it is compiled in little time after it."""
    text = (build.HELM.sources / "go.mod").read_text(encoding="utf-8")
    version = build.release().replace("v1.", "v0.")
    assert f"k8s.io/client-go {version} // indirect" in text


def test_without_the_programs_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NRI_NUMA_CACHE", str(tmp_path))
    with pytest.raises(TestbedUnavailable, match=re.escape(build.release())) as caught:
        build.find_programs(build=False)
    assert "tests.beds.kube.build" in caught.value.remedy
    assert not list(tmp_path.iterdir())


@pytest.fixture
def without_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and an empty PATH; the folder of both."""
    monkeypatch.setenv("NRI_NUMA_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def write_program(file: Path, script: str) -> None:
    file.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    file.chmod(0o755)


def test_without_go_any_build_of_these_sources_will_do(without_go: Path) -> None:
    other = without_go / "kube" / f"{build.release()}-go1.26.1-0123456789abcdef"
    other.mkdir(parents=True)
    with pytest.raises(TestbedUnavailable, match=re.escape(build.release())):
        build.find_programs(build=False)
    programs = other.with_name(f"{build.release()}-go1.26.1-{build.KUBERNETES.key()}")
    programs.mkdir()
    assert build.find_programs() == programs


@pytest.mark.parametrize("says", ["go1.19.8", "", "something else"])
def test_a_go_that_is_too_old_is_none(without_go: Path, says: str) -> None:
    """Debian 12 has such a one; it cannot even read go.mod."""
    write_program(without_go / "go", f"echo '{says}'")
    assert toolchain.installed_go() is None


@pytest.mark.parametrize("says", ["go1.26.0", "go1.27.3", "devel go1.27-abc Tue"])
def test_a_go_that_is_new_enough_is_used(without_go: Path, says: str) -> None:
    write_program(without_go / "go", f"echo '{says}'")
    assert toolchain.installed_go() == without_go / "go"


def test_a_build_that_fails_is_tried_again_and_says_why(
    without_go: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Modules come from far away; what a killed build left is gone first."""
    left = without_go / "kube" / ".build-left"
    left.mkdir(parents=True)
    monkeypatch.setattr(build, "_PAUSE_S", 0.0)
    monkeypatch.setenv("GOCACHE", str(without_go))  # so that nobody looks at this disk's room
    monkeypatch.setenv("GOMODCACHE", str(without_go))
    write_program(
        without_go / "go",
        'if test "$1" = env; then echo go1.26.0; else echo "dial tcp: no route" >&2; exit 1; fi',
    )
    with pytest.raises(TestbedUnavailable, match="failed 3 times: dial tcp: no route"):
        build.find_programs()
    assert "attempt 2 failed" in capsys.readouterr().err
    assert [each.name for each in (without_go / "kube").iterdir()] == [".lock"]


def test_helm_is_built_from_its_own_go_mod_and_found_again(
    without_go: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes is there already, and is left as it is."""
    monkeypatch.setenv("GOCACHE", str(without_go))
    monkeypatch.setenv("GOMODCACHE", str(without_go))
    write_program(
        without_go / "go",
        'if test "$1" = env; then echo go1.26.0; exit; fi\n'
        'for word; do if test "$before" = -o; then echo "$PWD $word" > "$word/helm"; fi\n'
        "before=$word; last=$word; done; test $last = helm.sh/helm/v3/cmd/helm",
    )
    kubernetes = build.KUBERNETES.target(without_go / "kube", without_go / "go")
    kubernetes.mkdir(parents=True)
    helm = build.find_helm() / "helm"
    assert helm.read_text(encoding="utf-8").startswith(f"{build.HELM.sources} ")
    assert build.find_helm(build=False) == helm.parent
    assert build.main(["kubernetes"]) == 0
    assert build.find_programs(build=False) == kubernetes
