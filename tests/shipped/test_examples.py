"""The workloads of config/examples are placed as their headers say.

That a real API server takes them is in tests/kube/test_workloads.py.
"""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from nri_numa.cli import cli

ROOT = Path(__file__).resolve().parents[2]
WORKLOADS = sorted((ROOT / "config/examples/workloads").glob("*.yaml"))
SHOWN = re.compile(r"^#     \$ nri-numa (?P<command>(?:.*\\\n)*.*)\n(?P<answer>(?:#.*\n)+)", re.M)


@pytest.mark.parametrize("path", WORKLOADS, ids=lambda path: path.stem)
def test_a_workload_is_placed_as_described(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = path.read_text()
    found = SHOWN.search(text)
    if found is None:
        # What makes no pods names the file with the pod that is made of it.
        assert re.search(r"kubevirt-launcher\.yaml\.$", text, re.MULTILINE)
        assert path.with_stem("kubevirt-launcher") in WORKLOADS
        return
    command = found["command"].replace("\\\n#", "")
    done = CliRunner(env={"COLUMNS": "120"}).invoke(cli, shlex.split(command))
    assert done.exit_code == 0, done.output
    shown = [line.removeprefix("#     ").rstrip() for line in found["answer"].splitlines()]
    assert len(shown) > 1
    missing = [line for line in shown if line != "#" and line not in done.output.splitlines()]
    assert not missing, done.output
    assert " is ignored" not in done.output, "an annotation stands where it has no effect"


def test_the_example_of_the_readme_gets_what_it_says(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    shown = re.search(r"^    apiVersion: v1\n(?:    .*\n)+", readme, re.MULTILINE)
    machine = re.search(r"--machine (synthetic:\S+)", readme)
    assert shown is not None
    assert machine is not None
    pod = tmp_path / "database.yaml"
    pod.write_text(shown[0])
    done = CliRunner().invoke(cli, ["simulate", str(pod), "--machine", machine[1]])
    assert done.exit_code == 0, done.output
    assert "4 exclusive CPUs on NUMA node" in done.output
    assert len(readme.split()) <= 935, "README has 850 words, and a tenth at most more"
