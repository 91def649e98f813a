"""Completion of names with what the live agent tells."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from nri_numa.cli import agent_client, cli
from tests.beds.http_view import FakeView, assignment

Agent = tuple[str, FakeView]


def complete(words: str, last: str, address: str) -> list[str]:
    """What a shell would be told behind these words."""
    line = [*words.split(), last]
    environment = {
        "_NRI_NUMA_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(["nri-numa", *line]),
        "COMP_CWORD": str(len(line)),
        "NRI_NUMA_API": address,
    }
    done = CliRunner(env=environment).invoke(
        cli, prog_name="nri-numa", complete_var="_NRI_NUMA_COMPLETE"
    )
    assert done.exit_code == 0, done.output
    return [text.partition(",")[2] for text in done.output.split()]


@pytest.mark.parametrize(
    ("words", "last", "expected"),
    [
        ("explain", "", ["infra/pod-2", "infra/pod-4", "shop/pod-1"]),
        ("explain", "sh", ["shop/pod-1"]),
        ("explain", "pod-", ["pod-2", "pod-4", "pod-1"]),
        ("explain -n shop", "", ["pod-1"]),
        ("explain -n", "", ["infra", "shop"]),
        ("explain infra/pod-4", "", ["server", "sidecar"]),
        ("explain -n infra pod-4", "si", ["sidecar"]),
        ("explain pod-1", "", ["server"]),
        ("explain nobody", "", []),
        ("status --namespace", "i", ["infra"]),
        ("status --pod", "", ["pod-2", "pod-4", "pod-1"]),
        ("status -n shop --pod", "", ["pod-1"]),
        ("status -o", "w", ["wide"]),
    ],
)
def test_names_come_from_the_agent(
    agent: Agent, words: str, last: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        agent_client, "COMPLETION_TIMEOUT_S", 60.0
    )  # a busy machine is not what this is about
    agent[1].containers = [
        assignment(1),
        assignment(2),
        assignment(4),
        assignment(4, "sidecar"),
        replace(assignment(3), pod="$(reboot)"),
    ]
    assert complete(words, last, agent[0]) == expected


@contextmanager
def silent() -> Iterator[str]:
    """Somebody who accepts and then sends a byte now and then; the address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        over = threading.Event()

        def trickle() -> None:
            peer, _ = listener.accept()
            # Whoever asked may be gone by now.
            with peer, suppress(OSError):
                peer.sendall(b"HTTP/1.1 200 OK\r\nServer: nri-numa\r\n")
                while not over.wait(0.1):
                    peer.sendall(b"X")

        threading.Thread(target=trickle, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        over.set()


def test_an_agent_that_is_gone_or_hangs_completes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert complete("explain", "", "127.0.0.1:1") == []
    assert complete("explain", "", "ftp://nowhere") == []
    monkeypatch.setattr(agent_client, "COMPLETION_TIMEOUT_S", 0.3)
    with silent() as address:
        assert complete("explain", "", address) == []


def test_the_shell_has_its_answer_while_the_agent_hangs() -> None:
    """The program ends, whatever it is still waiting for."""
    with silent() as address:
        done = subprocess.run(
            [sys.executable, "-m", "nri_numa"],
            env={
                **os.environ,
                "_NRI_NUMA_COMPLETE": "bash_complete",
                "COMP_WORDS": "nri-numa explain ",
                "COMP_CWORD": "2",
                "NRI_NUMA_API": address,
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.stdout.strip() == ""
    assert done.stderr == ""
