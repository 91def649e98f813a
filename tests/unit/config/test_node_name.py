"""What the node is called."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from nri_numa import config as configuration
from nri_numa.config import node_name
from nri_numa.errors import ConfigError


@pytest.mark.parametrize("environment", [{}, {"NRI_NUMA_NODE_NAME": ""}])
def test_the_machine_s_own_name_where_nothing_is_said(environment: dict[str, str]) -> None:
    assert node_name(configuration.load(None, env=environment)) == socket.gethostname().lower()


def test_the_downward_api_s_environment_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text("nodeName: from-file")
    assert node_name(configuration.load(str(file))) == "from-file"
    config = configuration.load(str(file), env={"NRI_NUMA_NODE_NAME": "worker-7.example.org"})
    assert node_name(config) == "worker-7.example.org"


@pytest.mark.parametrize("name", ["Worker-7", "worker_7", "-a", "a" * 254, "a b", "a/b"])
def test_a_name_that_no_node_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configuration.load(None, env={"NRI_NUMA_NODE_NAME": name})
    (problem,) = caught.value.problems
    assert problem.startswith(f"nodeName: {name[:80]!r}, expected a node's name")
