"""What docs/quick-start.md says to do on a node, done on a real containerd of both series.

There is no kubelet: ``kubectl`` is a program that asks the test to make the CRI calls that a
kubelet would make. ``systemctl restart containerd`` restarts the bed's daemon. The rest is real.
"""

import contextlib
import json
import re
import shutil
import signal
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from nri_numa.config.values import parse_memory_bytes
from nri_numa.model.cpuset import CPUSet
from tests.beds import cri
from tests.beds.containerd import Containerd
from tests.beds.cri import CRIError, poll
from tests.beds.plugin_process import free_port
from tests.beds.processes import Daemon
from tests.checks.docs_blocks import Block, blocks, environment, make_checkout, make_programs, run
from tests.machines.cpus import MACHINE

# The page asks for two; on a machine with two, one has to stay for everybody else.
OWNABLE = len(MACHINE) - 1

_SHIM = """#!{python}
import json, socket, sys
with socket.socket(socket.AF_UNIX) as link:
    link.connect({address!r})
    link.sendall(json.dumps(["{name}", *sys.argv[1:]]).encode() + b"\\n")
    code, text = json.loads(link.makefile("rb").readline())
sys.stdout.write(text)
sys.exit(code)
"""


class QuickStartNode:
    """What a kubelet and systemd would do, as far as the page asks for it."""

    def __init__(self, containerd: Containerd, checkout: Path) -> None:
        self.containerd = containerd
        self.checkout = checkout
        self.pods: dict[str, cri.Pod] = {}
        self.containers: dict[str, cri.Container] = {}
        self.failures: dict[str, str] = {}

    def answer(self, words: list[str]) -> tuple[int, str]:
        """Exit code and output of a command line."""
        match words:
            case ["systemctl", "restart", "containerd"]:
                self.containerd.stop()
                self.containerd.start(keep_configuration=True)
                return 0, ""
            case ["kubectl", "apply", "-f", path]:
                return 0, self._apply(yaml.safe_load((self.checkout / path).read_text()))
            case ["kubectl", "wait", "--for=condition=Ready", target]:
                name = target.removeprefix("pod/")
                ready = name in self.containers
                return (0, f"pod/{name} condition met\n") if ready else (1, "timed out\n")
            case ["kubectl", "logs", name]:
                poll(lambda: self.containerd.cri.logs(self.containers[name])[1:], "log")
                return 0, "\n".join(self.containerd.cri.logs(self.containers[name])) + "\n"
            case ["kubectl", "describe", "pod", name]:
                return 0, f"Name: {name}\nEvents:\n  Warning  Failed  {self.failures.get(name)}\n"
            case ["kubectl", "delete", "pod", *names]:
                for name in names:
                    self.containerd.cri.remove_pod(self.pods.pop(name))
                return 0, ""
            case _:
                return 2, f"the test knows nothing of {' '.join(words)}\n"

    def _apply(self, document: dict[str, Any]) -> str:
        meta, (spec,) = document["metadata"], document["spec"]["containers"]
        limits = spec.get("resources", {}).get("limits", {})
        name = meta["name"]
        self.pods[name] = self.containerd.cri.run_pod(
            name,
            annotations=meta["annotations"],
            qos=cri.QoS.GUARANTEED if limits else cri.QoS.BEST_EFFORT,
        )
        try:
            self.containers[name] = self.containerd.cri.run(
                self.pods[name],
                spec["name"],
                command=spec["command"],
                resources=cri.guaranteed(
                    min(int(limits["cpu"]), OWNABLE), parse_memory_bytes(limits["memory"])
                )
                if limits
                else cri.BEST_EFFORT,
            )
        except CRIError as error:
            self.failures[name] = error.message
        return f"pod/{name} created\n"


@contextlib.contextmanager
def served(address: Path, answer: Callable[[list[str]], tuple[int, str]]) -> Iterator[None]:
    """Answer the programs' questions in a thread."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            try:
                said: tuple[int, str] = answer(json.loads(self.rfile.readline()))
            except Exception as error:
                said = 70, f"the test failed: {error!r}\n"
            self.wfile.write(json.dumps(said).encode() + b"\n")

    with socketserver.UnixStreamServer(str(address), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


class Terminal(Daemon):
    """The terminal in which the plugin stays."""

    def __init__(
        self, block: Block, checkout: Path, directory: Path, environment: dict[str, str]
    ) -> None:
        typed = ["bash", "-c", f"exec {block.text}"]
        super().__init__("plugin", typed, directory, environment)
        self.folder = checkout

    def start(self) -> None:
        """Type the command, and wait until the log says what the page says."""
        super().start()
        poll(
            lambda: re.search(r'msg="link changed" .*state=active', self.log()),
            "state=active in the log",
        )


def test_every_block_of_the_quick_start(containerd: Containerd, tmp_path: Path) -> None:
    """From a node whose NRI is off to a pinned pod, a refusal, and everything given back."""
    checkout = make_checkout(tmp_path)
    directory = Path(containerd.directory, "quick-start")
    with Containerd(containerd.binaries, directory, nri=False) as bed:
        node = QuickStartNode(bed, checkout)
        address = bed.directory / "ask.sock"
        shims = {
            name: _SHIM.format(python=sys.executable, address=str(address), name=name)
            for name in ("kubectl", "systemctl")
        }
        # Where containerd keeps its configuration is the one thing that is not as on a node.
        shims["sudo"] = (
            "#!/bin/sh\n"
            'case "$*" in *--fix-runtime*)\n'
            f'  set -- "$@" --containerd-config={bed.configuration};;\nesac\n'
            # Where root's installation is, neither: it would stay on this machine.
            f"export NODE={tmp_path}/opt\n"
            'case "$1" in /opt/nri-numa/*)\n'
            f'  program="$NODE/${{1#/opt/nri-numa/}}"; shift; set -- "$program" "$@";;\nesac\n'
            'exec "$@"\n'
        )
        env = environment(
            make_programs(tmp_path, shims),
            {
                "NRI_NUMA_NRI_SOCKET": str(bed.nri_socket),
                "NRI_NUMA_STATE_DIR": str(bed.directory / "state"),
                "NRI_NUMA_HTTP": f"127.0.0.1:{free_port()}",
            },
        )
        with served(address, node.answer), contextlib.ExitStack() as stack:
            printed = []
            for block in blocks():
                if block.stays:
                    terminal = Terminal(block, checkout, tmp_path, env)
                    stack.enter_context(terminal)
                    continue
                if block.stops:
                    assert terminal.end(signal.SIGINT) == 0, terminal.log()
                printed.append(run(block, checkout, env))
        seen = next(text for text in printed if "Cpus_allowed_list" in text and "condition" in text)
        (cpus,) = re.findall(r"Cpus_allowed_list:\s*(\S+)", seen)
        assert len(CPUSet.parse(cpus)) == min(2, OWNABLE), "CPUs of its own"
    shutil.rmtree(directory)
