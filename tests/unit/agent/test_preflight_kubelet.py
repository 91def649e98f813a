"""What the machine check says of the kubelet."""

from __future__ import annotations

from pathlib import Path

import pytest

from nri_numa.agent.preflight import Finding, Level, kubelet
from nri_numa.config import AgentConfig
from nri_numa.config.sections import Kubelet
from tests.machines import named as machines

HEAD = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"
STATIC = '{"policyName":"static","defaultCpuSet":"0-1","entries":{"u":{"c":"2-3"}}}'


def look(directory: Path, reserved: str = "", **section: str) -> list[Finding]:
    config = AgentConfig(
        kubelet_root=str(directory),
        kubelet=Kubelet(**section),  # type: ignore[arg-type]
        reserved_cpus=reserved,
    )
    found = list(kubelet(config, machines.dual_smt(), str(directory / "proc")))
    assert all(f.subject == "kubelet" for f in found)
    assert all(bool(f.remedy) == (f.level is Level.WARN) for f in found)
    return found


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, ["its configuration cannot be read"]),
        ({"config.yaml": HEAD + "cpuManagerPolicy: none\n"}, ["cpuManagerPolicy none"]),
        ({"config.yaml": HEAD + "cpuManagerPolicy: static\n"}, ["CPU manager policy is static"]),
        (
            {"config.yaml": HEAD + "cpuManagerPolicy: static\nmemoryManagerPolicy: Static\n"},
            ["CPU manager policy is static", "memory manager policy is Static"],
        ),
        # The state file is what the kubelet really runs with.
        (
            {
                "config.yaml": HEAD + "cpuManagerPolicy: static\n",
                "cpu_manager_state": '{"policyName":"none","defaultCpuSet":""}',
            },
            ["does not start again", "cpuManagerPolicy none"],
        ),
        ({"cpu_manager_state": STATIC}, ["static: it pins Guaranteed pods itself; CPUs 2-3 gra"]),
        ({"memory_manager_state": '{"policyName":"Static"}'}, ["policy is Static"]),
        (
            {"cpu_manager_state": "garbage", "config.yaml": "{"},
            ["its configuration: ", "its state: ", "its configuration cannot be read"],
        ),
        (
            {"cpu_manager_state": "[]", "config.yaml": "[]"},
            [
                "expected a KubeletConfiguration",
                "Expected `object`",
                "its configuration cannot be read",
            ],
        ),
        (
            {"config.yaml": HEAD + "reservedSystemCPUs: '0'\n"},
            ["cpuManagerPolicy none", "ours by its configuration: reservedCPUs 0"],
        ),
    ],
)
def test_what_the_kubelet_does_beside_us(
    tmp_path: Path, files: dict[str, str], words: list[str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = look(tmp_path)
    assert len(found) == len(words), found
    for finding, part in zip(found, words, strict=True):
        assert part in finding.message
        fine = ("its configuration cannot be read", "cpuManagerPolicy none", "ours by")
        assert (finding.level is Level.OK) == any(one in finding.message for one in fine)


def test_differences_are_warnings(tmp_path: Path) -> None:
    (tmp_path / "k.yaml").write_text(HEAD + "reservedSystemCPUs: 0-1\n")
    found = look(tmp_path, reserved="0", config=str(tmp_path / "k.yaml"))
    warnings = [f.message for f in found if f.level is Level.WARN]
    assert len(warnings) == 1
    assert "reservedCPUs is 0, and the kubelet's reservedSystemCPUs reserves 0-1" in warnings[0]
