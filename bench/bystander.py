"""``python -m bench.bystander KIND``: load on the machine that is not ours, as a process.

``drops`` and ``silent`` are plain servers for the attackers of `bench.attacker`: one closes each
connection as soon as it has it, the other keeps them and says nothing. ``burns`` only computes.
The first line is ``ready``, for a server with its port.
"""

from __future__ import annotations

import resource
import socket
import sys


def serve(*, keep: bool) -> None:
    """Take connections as fast as they come, in the simplest way there is."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, most), most))
    server = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(f"ready {server.getsockname()[1]}", flush=True)
    kept = []
    while True:
        connection, _ = server.accept()
        if keep:
            kept.append(connection)
        else:
            connection.close()


def burn() -> None:
    """Take all of one CPU."""
    print("ready", flush=True)
    while True:
        pass


if __name__ == "__main__":
    match sys.argv[1]:
        case "burns":
            burn()
        case "drops" | "silent" as kind:
            serve(keep=kind == "silent")
        case kind:
            raise SystemExit(f"unknown bystander {kind!r}")
