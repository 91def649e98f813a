"""The commands at a real terminal and in real shells."""

import contextlib
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beds.embedded_node import EmbeddedNode, until

PROGRAM = Path(sys.executable).parent / "nri-numa"


class Terminal:
    """A command with a terminal of its own, 80 columns wide."""

    def __init__(self, *command: str) -> None:
        self.shown = ""
        self.pid, self.master = pty.fork()
        if self.pid == 0:  # pragma: no cover - the child
            os.environ.update(TERM="xterm", COLUMNS="80", LINES="40")
            # Who runs the tests in the background may have it ignored, and that is inherited.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execv(command[0], command)

    def wait_for(self, text: str, limit: float = 180.0) -> None:
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
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.master)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[EmbeddedNode]:
    with EmbeddedNode(tmp_path) as node:
        node.start()
        until(node.plugin.responsive, "its HTTP server answers")
        yield node


def test_a_watched_status_follows_the_node_until_it_is_interrupted(node: EmbeddedNode) -> None:
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
        terminal.wait_for("(retrying)")
        assert terminal.interrupt() == 0
        assert "Traceback" not in terminal.shown
    finally:
        terminal.close()


LONG = "checkout-service-with-a-long-name-7d4b9c6f5d-x2x1z-0123456789-abcdef"


def test_a_narrow_terminal_shows_names_whole_and_a_pipe_one_row_a_line(node: EmbeddedNode) -> None:
    """The next command needs every letter of the name; a pipe finds it in one piece."""
    node.listed(LONG)
    command = (str(PROGRAM), "status", f"--api={node.plugin.address}")
    terminal = Terminal(*command)
    try:
        terminal.wait_for("-o wide shows all")
    finally:
        terminal.close()
    assert "…" not in terminal.shown
    rows = terminal.shown[terminal.shown.index("NAMESPACE") :].splitlines()
    assert max(map(len, rows)) <= 80
    begin, end = rows[0].index("POD"), rows[0].index("CONTAINER")
    assert LONG in "".join(row[begin:end].strip() for row in rows)
    environment = {name: text for name, text in os.environ.items() if name != "COLUMNS"}
    piped = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=30, check=True
    ).stdout
    assert sum(LONG in line and "listed" in line for line in piped.splitlines()) == 1


@pytest.mark.parametrize("words", [["status"], ["explain", "web"]])
def test_a_command_that_waits_says_for_what(words: list[str]) -> None:
    """Here for an agent that accepts the connection and does not answer."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        terminal = Terminal(str(PROGRAM), *words, f"--api={address}")
        try:
            terminal.wait_for(f"asking {address} … ")
            terminal.wait_for(f"\x1b[Knri-numa: no answer from {address}")
        finally:
            terminal.close()


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


def completed(words: str, api: str = "") -> list[str]:
    script = (
        f"export NRI_NUMA_API={api}; source <(nri-numa completion bash); "
        f"COMP_WORDS=(nri-numa {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
        "_nri_numa_completion nri-numa; echo ${COMPREPLY[@]}"
    )
    return in_shell("bash", script).split()


@pytest.mark.parametrize(
    ("words", "expected"), [("sta", "status"), ("explain --ap", "--api"), ("sim", "simulate")]
)
def test_bash_completes(words: str, expected: str) -> None:
    assert completed(words) == [expected]


def test_shells_complete_the_names_of_the_live_plugin(node: EmbeddedNode) -> None:
    """Bash itself, and what the scripts of the others set: they are in the tests below."""
    for name in ("database-0", "web"):
        node.listed(name)
    for words, expected in (
        ("explain ''", ["default/database-0", "default/web"]),
        ("status -n ''", ["default"]),
        ("explain web ''", ["app"]),
    ):
        assert completed(words, api=node.plugin.address) == expected
    for shell, word in (("fish", ""), ("zsh", "2")):
        asked = f"_NRI_NUMA_COMPLETE={shell}_complete COMP_CWORD={word} nri-numa"
        script = f"NRI_NUMA_API={node.plugin.address} COMP_WORDS='nri-numa explain ' {asked}"
        assert "default/database-0" in in_shell("bash", script)


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
