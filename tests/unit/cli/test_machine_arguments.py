"""Case 18: names and keys that say nothing, or the same thing twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from nri_numa.cli import cli

POD = """\
apiVersion: v1
kind: Pod
metadata: {name: a}
spec: {containers: [{name: c, image: x}]}
"""


@pytest.fixture
def pods(tmp_path: Path) -> str:
    file = tmp_path / "pods.yaml"
    file.write_text(POD)
    return str(file)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--machine", ""], "--machine': is empty; expected the name of a folder or file"),
        (["--sysfs-root", ""], "--sysfs-root': is empty; expected the name of a folder or file"),
        (["--machine", "synthetic:cores=4,cores=8"], "cores is given twice; expected it once"),
        (
            ["--machine", "synthetic:hugepages-2Mi=1Gi,hugepages-2Mi=2Gi"],
            "hugepages-2Mi is given twice",
        ),
        (
            ["--machine", "synthetic:sockets=1,numa=1,cores=4,offline=4000"],
            "offline names CPU 4000, which does not exist; expected CPUs among 0-7",
        ),
        (
            ["--machine", "synthetic:sockets=1,numa=1,cores=4,isolated=2+9-10"],
            "isolated names CPUs 9-10, which do not exist",
        ),
        (
            ["--machine", "synthetic:sockets=1,numa=1,cores=4,nohz-full=9"],
            "nohz-full names CPU 9, which does not exist",
        ),
        (
            ["--machine", "synthetic:sockets=1,numa=1,cores=1,offline=0-1"],
            "offline is all of 0-1; expected one CPU to be left",
        ),
        (["--set", "strategy=pack", "--set", "strategy=spread"], "strategy is given twice"),
    ],
)
def test_case_18_simulate_refuses(pods: str, arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(cli, ["simulate", pods, *arguments])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize("command", [["topology"], ["check"], ["capture", "x.tar.gz"]])
def test_case_18_an_empty_root_is_not_this_machine(command: list[str], tmp_path: Path) -> None:
    arguments = [str(tmp_path / part) if part.endswith(".gz") else part for part in command]
    result = CliRunner().invoke(cli, [*arguments, "--sysfs-root", ""])
    assert result.exit_code == 2
    assert "is empty" in result.output
