"""``nri-numa scheduler`` beside a second kube-scheduler, as in its Deployment: no root, a token."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.beds.cri import poll
from tests.beds.kube.bed import KubeBed
from tests.beds.kube.client import Client
from tests.beds.kube.service import MANIFESTS, NAMESPACE, Service
from tests.beds.processes import Bed, Daemon

ACCOUNT: Final = "nri-numa-scheduler"
SCHEDULER: Final = "numa-scheduler"
"""What pods say in ``schedulerName``."""
_PORT: Final = 19894
_SCHEDULER_PORT: Final = 10269

_PARTS = ("serviceaccount", "role", "policies")
_ASK = """
import ssl, sys, urllib.error, urllib.request
url, body, own = sys.argv[1:]
context = None
if own:
    context = ssl.create_default_context(cafile=own)
    context.load_cert_chain(own, own)
try:
    data = body.encode() or None
    print(urllib.request.urlopen(url, data, timeout=10, context=context).read().decode())
except urllib.error.HTTPError as error:
    print(error.read().decode())
"""


def install(client: Client) -> None:
    """Everything of the shipped manifests but the Deployment."""
    files = ["base/namespace.yaml", *(f"scheduler/{name}.yaml" for name in _PARTS)]
    client.kubectl("apply", *(f"--filename={MANIFESTS / file}" for file in files))


class Extender(Bed):
    """One extender and the kube-scheduler that asks it; a context manager.

    Args:
        certificate: file with a key and its certificate, which the extender and those who ask show
            and trust; such a replica has no kube-scheduler: whoever holds the file asks.
    """

    def __init__(
        self,
        bed: KubeBed,
        *,
        config: Mapping[str, Any] | None = None,
        port: int = _PORT,
        scheduler_port: int = _SCHEDULER_PORT,
        name: str = SCHEDULER,
        standby: bool = False,
        certificate: Path | None = None,
        level: str = "debug",
    ) -> None:
        self._bed, self._standby = bed, standby
        self._certificate = certificate
        self._url = f"{'https' if certificate else 'http'}://127.0.0.1:{port}"
        token = bed.client.kubectl("create", "token", ACCOUNT, f"--namespace={NAMESPACE}").strip()
        self.process = Service(bed, "scheduler", token)
        self.directory = self.process.directory
        if certificate is not None:
            self.process.give("own.pem", certificate.read_bytes())
        section = {
            "address": f"127.0.0.1:{port}",
            "credentials": str(self.directory),
            "lease": ACCOUNT,
            **(_tls(self.directory) if certificate else {}),
            **(config or {}),
        }
        log = {"format": "json", "level": level}
        self.process.configure(scheduler=section, log=log)
        narrow = section.get("narrow", True)
        prioritize = {} if narrow else {"prioritizeVerb": "prioritize", "weight": 5}
        document = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": {"leaderElect": False},
            "clientConnection": {
                "kubeconfig": str(bed.control.kubeconfig("system:kube-scheduler"))
            },
            "profiles": [{"schedulerName": name}],
            "extenders": [
                {
                    "urlPrefix": self._url,
                    "filterVerb": "filter",
                    **prioritize,
                    "bindVerb": "bind",
                    "httpTimeout": "5s",
                    "nodeCacheCapable": True,
                    "ignorable": False,
                }
            ],
        }
        file = self.directory / "scheduler.json"
        file.write_text(json.dumps(document, indent=1), encoding="utf-8")
        self.scheduler = Daemon(
            "numa-scheduler",
            [
                *self.process.enter,
                str(bed.control.programs / "kube-scheduler"),
                f"--config={file}",
                f"--secure-port={scheduler_port}",
            ],
            self.directory,
            bed.control.environment,
        )

    def start(self) -> None:
        """Start it; with a scheduler unless it has a certificate of its own."""
        self.process.start()
        if self._certificate is None:
            self.scheduler.start()
            if not self._standby:
                self.wait_ready()

    def close(self) -> None:
        self.scheduler.end()
        self.process.end()

    def wait_ready(self) -> None:

        def ask() -> bool | None:
            self.process.check()
            return True if self.get("/readyz") == "ok" else None

        try:
            poll(ask, "extender")
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.log()[-3000:]}") from None

    def get(self, path: str, body: object = None) -> str:
        """What it answers, from inside the bed's network; empty where nobody listens."""
        text = json.dumps(body) if body is not None else ""
        command = [*self.process.enter, sys.executable, "-c", _ASK, self._url + path, text]
        own = str(self._certificate or "")
        done = subprocess.run([*command, own], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    def asking(self, path: str, body: object) -> subprocess.Popen[bytes]:
        """The same as a process, for who does not wait for the answer."""
        command = [*self.process.enter, sys.executable, "-c", _ASK, self._url + path]
        return subprocess.Popen(
            [*command, json.dumps(body), str(self._certificate or "")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def log(self) -> str:
        return f"{self.process.log()}\n--- {SCHEDULER}\n{self.scheduler.log()}"


def _tls(directory: Path) -> dict[str, str]:
    own = str(directory / "own.pem")
    return {"tlsCert": own, "tlsKey": own, "clientCA": own}


def make_certificate(directory: Path) -> Path:
    """A key with a certificate for loopback, in one file that is its own authority too."""
    file, key = directory / "extender.pem", directory / "extender.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj",
         "/CN=extender", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(key), "-out", str(file)],
        check=True, capture_output=True,
    )  # fmt: skip
    file.write_text(file.read_text() + key.read_text())
    return file
