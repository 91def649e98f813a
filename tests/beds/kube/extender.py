"""``nri-numa scheduler`` beside a second kube-scheduler, as in its Deployment: no root, a token."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.beds import certificates
from tests.beds.kube.bed import MANIFESTS, KubeBed, Service
from tests.beds.kube.caller import Caller
from tests.beds.kube.client import Client
from tests.beds.processes import ProcessBed, wait_for

ACCOUNT: Final = "nri-numa-scheduler"
SCHEDULER: Final = "numa-scheduler"
"""What pods say in ``schedulerName``."""
_PORT: Final = 19894
_SCHEDULER_PORT: Final = 10269

_PARTS = ("serviceaccount", "role", "policies")


def install(client: Client) -> None:
    """Everything of the shipped manifests but the Deployment."""
    files = ["base/namespace.yaml", *(f"scheduler/{name}.yaml" for name in _PARTS)]
    client.kubectl("apply", *(f"--filename={MANIFESTS / file}" for file in files))


class Extender(ProcessBed):
    """One extender and the kube-scheduler that asks it; a context manager.

    Args:
        certificate: file with a key and its certificate, which the extender and those who ask show
            and trust; such a replica has no kube-scheduler: whoever holds the file asks.
        preempts: kube-scheduler asks it for victims.
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
        preempts: bool = True,
    ) -> None:
        self._bed, self._standby = bed, standby
        self._certificate = certificate
        url = f"{'https' if certificate else 'http'}://127.0.0.1:{port}"
        self.process = Service(bed, "scheduler", bed.client.token(ACCOUNT))
        self.directory = self.process.directory
        shown = str(certificate or "")
        self._caller = Caller(self.process.enter, url, authority=shown, own=shown)
        if certificate is not None:
            self.process.give("own.pem", certificate.read_bytes())
        own = str(self.directory / "own.pem")
        section = {
            "address": f"127.0.0.1:{port}",
            "credentialsDir": str(self.directory),
            "leaseName": ACCOUNT,
            **(dict.fromkeys(("tlsCert", "tlsKey", "clientCA"), own) if certificate else {}),
            **(config or {}),
        }
        log = {"format": "json", "level": level}
        self.process.configure(scheduler=section, log=log)
        asked = {
            "urlPrefix": url,
            "filterVerb": "filter",
            **({"preemptVerb": "preempt"} if preempts else {}),
            "bindVerb": "bind",
            "httpTimeout": "5s",
            "nodeCacheCapable": True,
            "ignorable": False,
        }
        file = bed.control.write_scheduler(
            self.directory, profiles=[{"schedulerName": name}], extenders=[asked]
        )
        self.scheduler = bed.control.scheduler("numa-scheduler", file, scheduler_port)

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
        both = [self.process, self.scheduler]
        wait_for(both, lambda: self.get("/readyz") == "ok", "extender")

    def get(self, path: str, body: object = None) -> str:
        """What it answers; empty where nobody listens."""
        status, text = self._caller.ask("GET" if body is None else "POST", path, body)
        return text if status else ""

    def asking(self, path: str, body: object) -> subprocess.Popen[str]:
        """A request of which nobody waits for the answer."""
        return self._caller.asking("POST", path, body)

    def log(self) -> str:
        return f"{self.process.log()}\n--- {SCHEDULER}\n{self.scheduler.log()}"


def make_certificate(directory: Path) -> Path:
    """A key with a certificate for loopback, in one file that is its own authority too."""
    certificates.make_certificate(directory, "extender")
    own = directory / "own.pem"
    own.write_text((directory / "cert.pem").read_text() + (directory / "key.pem").read_text())
    return own
