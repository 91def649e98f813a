"""What is installed where: a node gets what the plugin imports, pinned like what was tested."""

import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def pins(name: str) -> dict[str, list[str]]:
    """By canonical name of the distribution, each pin with its marker and hashes."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text().replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        distribution = canonicalize_name(re.split(r"[=<>!~ ;\[]", line)[0])
        found.setdefault(distribution, []).append(" ".join(line.split()))
    return found


def asked(name: str) -> set[str]:
    """The distributions that an .in file asks for."""
    lines = (ROOT / "requirements" / f"{name}.in").read_text().splitlines()
    return {canonicalize_name(Requirement(line).name) for line in lines if line.strip()}


@pytest.mark.parametrize("name", ["runtime", "build"])
def test_a_node_gets_exactly_what_the_tests_ran_with(name: str) -> None:
    lock = pins("lock")
    for distribution, lines in pins(name).items():
        # A tool of the tests may need something everywhere that a node needs on some systems only.
        one, other = (
            [re.sub(r" ; .*? (?=--hash)", " ", line) for line in each]
            for each in (lock[distribution], lines)
        )
        assert one == other


def test_a_node_gets_no_tool_of_the_tests() -> None:
    tools = asked("test") | asked("lint") | asked("vm") | asked("docs")
    assert "pytest" in tools
    assert not pins("runtime").keys() & (tools | {"pluggy", "iniconfig", "mypy-extensions"})
    assert pins("build").keys() == asked("build")


def test_make_node_installs_these_and_nothing_else() -> None:
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "node"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    installs = re.findall(r"pip install (.*)", done.stdout)
    files = [set(re.findall(r"-r (\S+)", line)) for line in installs]
    assert files == [{"requirements/runtime.txt", "requirements/build.txt"}, set()]
    assert "--require-hashes" in installs[0]
    assert "--no-deps" in installs[1]
    assert "--no-build-isolation" in installs[1]
    assert ".venv" not in done.stdout, "root runs nothing of a user's checkout"
