"""``python -m bench.disturb KIND PORT [PATH PAUSE]``: somebody else who keeps the plugin busy.

A process of its own, so that reading the answers does not hold up whoever measures. It runs until
it is ended, and says ``ready`` once the first answer is there.
"""

from __future__ import annotations

import http.client
import sys
import time


def again(port: int, path: str, pause: float) -> None:
    """Ask for one path again and again, over a connection for each request."""
    first = True
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        if answer.status != 200 or not body:
            raise RuntimeError(f"{path}: {answer.status} {body[:200]!r}")
        if first:
            print("ready", flush=True)
            first = False
        time.sleep(pause)


def page(port: int) -> None:
    """An open page: the event stream, and what the page fetches after each event."""
    stream = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    stream.request("GET", "/v1/events")
    events = stream.getresponse()
    print("ready", flush=True)
    while line := events.readline():
        if line.startswith(b"event:"):
            for path in ("/v1/status", "/v1/assignments", "/v1/rejections"):
                fetch = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                fetch.request("GET", path)
                fetch.getresponse().read()
                fetch.close()


if __name__ == "__main__":
    kind, port = sys.argv[1], int(sys.argv[2])
    if kind == "page":
        page(port)
    else:
        again(port, sys.argv[3], float(sys.argv[4]))
