"""``nri-numa controller`` as in its Deployment: its own service account."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.beds.kube.bed import KubeBed
from tests.beds.kube.client import Client, JsonObject
from tests.beds.kube.service import MANIFESTS, NAMESPACE, Service

ACCOUNT = "nri-numa-controller"
TOKEN = "0123456789abcdef0123456789abcdef"

# Sends one request and prints status and body: for an address inside the bed's network.
_ASK = """
import sys, urllib.request, urllib.error
method, url, token, body = sys.argv[1:]
request = urllib.request.Request(url, body.encode() or None, method=method)
request.add_header("Authorization", "Bearer " + token)
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try:
    with opener.open(request, timeout=30) as answer:
        print(answer.status, answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
except OSError as error:
    print(0, error)
"""


def install(client: Client) -> None:
    """The shipped service account, roles and policies."""
    files = (
        "controller/serviceaccount.yaml",
        "controller/role.yaml",
        "controller/policies.yaml",
        "controller-drain/role.yaml",
        "controller-stuck/role.yaml",
        "controller-stuck-partly/role.yaml",
        "controller-steal/role.yaml",
    )
    client.kubectl("apply", *(f"--filename={MANIFESTS / file}" for file in files))


class Controller(Service):
    """One replica; a context manager."""

    def __init__(self, bed: KubeBed, port: int, **config: Any) -> None:
        token = bed.client.kubectl("create", "token", ACCOUNT, f"--namespace={NAMESPACE}")
        super().__init__(bed, "controller", token.strip())
        self._url = f"http://127.0.0.1:{port}"
        self.give("put-token", TOKEN.encode())
        section = {
            "address": f"127.0.0.1:{port}",
            "credentials": str(self.directory),
            "tokenFile": str(self.directory / "put-token"),
            "smoothing": 0,
            "leastTime": 0,
            **config,
        }
        self.configure(controller=section)

    def ask(self, method: str, path: str, body: JsonObject | None = None) -> tuple[int, str]:
        """One request to it, with the token; status 0 while nobody listens."""
        self.check()
        text = "" if body is None else json.dumps(body)
        command = [*self.enter, sys.executable, "-c", _ASK, method, self._url + path, TOKEN, text]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        status, _, answer = done.stdout.partition(" ")
        return int(status), answer.strip()
