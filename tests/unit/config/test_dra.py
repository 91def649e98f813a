"""The section ``dra``: off by default, and every mistake is named."""

from __future__ import annotations

import pytest

from nri_numa.config import problems
from nri_numa.config.dra import DRA, sockets
from nri_numa.config.sections import AgentConfig, LinkKind, Runtime


def test_it_is_off_and_then_nothing_is_wrong() -> None:
    config = AgentConfig()
    assert not config.dra.enabled
    assert problems(config) == []


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (DRA(driver="Upper.example.com"), "dra.driver: 'Upper.example.com', expected a DNS name"),
        (DRA(driver="nodots"), "dra.driver: 'nodots'"),
        (DRA(driver=f"{'a' * 60}.com"), "of at most 63 characters"),
        (DRA(handover="claims"), "dra.handover: 'claims', expected an absolute path"),
        (DRA(cdi_directory=""), "dra.cdiDirectory: ''"),
    ],
)
def test_what_is_wrong_is_said(section: DRA, words: str) -> None:
    (problem,) = problems(AgentConfig(dra=section))
    assert words in problem


def test_paths_of_sockets_are_short() -> None:
    config = AgentConfig(dra=DRA(enabled=True), kubelet_root="/" + "k" * 80)
    (problem,) = problems(config)
    assert "makes a socket's path of" in problem
    assert sockets("/var/lib/kubelet", "d.example.com") == (
        "/var/lib/kubelet/plugins_registry/d.example.com-reg.sock",
        "/var/lib/kubelet/plugins/d.example.com/dra.sock",
    )


def test_claims_cannot_be_told_over_cri() -> None:
    over_cri = AgentConfig(runtime=Runtime(link=LinkKind.CRI), dra=DRA(enabled=True))
    (problem,) = problems(over_cri)
    assert problem.startswith("dra.enabled: is on, and runtime.link is cri")
    assert problems(AgentConfig(dra=DRA(enabled=True))) == []
