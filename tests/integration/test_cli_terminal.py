"""The commands at a real terminal and in real shells."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.embedded_node import Node
from tests.support.http_view import HOSTILE

PROGRAM = Path(sys.executable).parent / "nri-numa"


class Terminal:
    """A command with a terminal of its own, 80 columns wide."""

    def __init__(self, *command: str) -> None:
        self.shown = ""
        self.pid, self.master = pty.fork()
        if self.pid == 0:  # pragma: no cover - the child
            os.environ.update(TERM="xterm", COLUMNS="80", LINES="40")
            os.execv(command[0], command)

    def wait_for(self, text: str, limit: float = 30.0) -> None:
        """Read on until the text was shown."""
        end = time.monotonic() + limit
        while text not in self.shown:
            assert time.monotonic() < end, f"{text!r} was not shown: {self.shown[-2000:]!r}"
            self.shown += os.read(self.master, 65536).decode()

    def interrupt(self) -> int:
        """Ctrl-C; the exit status."""
        os.write(self.master, b"\x03")
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        """End it, if it has not ended."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.master)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path) as node:
        node.start()
        yield node


def test_a_watched_status_follows_the_node_until_it_is_interrupted(node: Node) -> None:
    terminal = Terminal(
        str(PROGRAM), "status", "--watch", "--interval=0.2", f"--api={node.plugin.address}"
    )
    try:
        terminal.wait_for("No containers.")
        node.listed("late-arrival")
        terminal.wait_for("late-arrival")
        terminal.wait_for("\x1b[2J")  # the screen is cleared, not scrolled
        # The plugin goes away: that is said, and watching goes on.
        node.plugin.terminate()
        terminal.wait_for("(trying again)")
        assert terminal.interrupt() == 0
        assert "Traceback" not in terminal.shown
    finally:
        terminal.close()


@pytest.mark.parametrize("command", ["status", "explain"])
def test_no_name_reaches_the_terminal_as_a_command_to_it(node: Node, command: str) -> None:
    """Nor breaks the table: every line keeps to 80 columns, whatever a pod is called."""
    name = HOSTILE.replace("/", "") + "x" * 200
    node.listed(name)
    arguments = [command, f"--api={node.plugin.address}"]
    if command == "explain":
        arguments[1:1] = [f"default/{name}"]
    done = subprocess.run(
        [str(PROGRAM), *arguments],
        env={**os.environ, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "\u202e" not in done.stdout
    if command == "status":
        assert max(map(len, done.stdout.splitlines())) <= 80


def in_shell(shell: str, script: str) -> str:
    """What a script prints in a real shell that finds the program."""
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run(
        [found, "-c", script],
        env={**os.environ, "PATH": f"{PROGRAM.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("words", "expected"), [("sta", "status"), ("explain --ap", "--api"), ("sim", "simulate")]
)
def test_bash_completes(words: str, expected: str) -> None:
    script = (
        "source <(nri-numa completion bash); "
        f"COMP_WORDS=(nri-numa {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
        "_nri_numa_completion nri-numa; echo ${COMPREPLY[@]}"
    )
    assert in_shell("bash", script).split() == [expected]


def test_fish_completes() -> None:
    script = "nri-numa completion fish | source; complete -C 'nri-numa sta'"
    assert in_shell("fish", script).split()[0] == "status"


def test_zsh_completes() -> None:
    """The script registers its function for the program; what that asks the program is answered."""
    script = (
        "autoload -U compinit; compinit -u -D; source <(nri-numa completion zsh); "
        "print -r -- ${_comps[nri-numa]}; "
        "COMP_WORDS='nri-numa sta' COMP_CWORD=1 _NRI_NUMA_COMPLETE=zsh_complete nri-numa"
    )
    function, kind, word, *_ = in_shell("zsh", script).splitlines()
    assert (function, kind, word) == ("_nri_numa_completion", "plain", "status")
