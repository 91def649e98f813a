"""``nri-numa controller`` as in its Deployment: its own service account."""

import os
from typing import Any

from tests.beds.kube.bed import MANIFESTS, KubeBed, Service
from tests.beds.kube.caller import Caller
from tests.beds.kube.client import Client, JsonObject
from tests.beds.kube.node import NOBODY

ACCOUNT = "nri-numa-controller"
TOKEN = "0123456789abcdef0123456789abcdef"


def install(client: Client) -> None:
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


def offline_capacity(bed: KubeBed) -> dict[str, Any]:
    """The section for agent and publisher, which have a file between them."""
    directory = bed.directory / "capacity"
    directory.mkdir(exist_ok=True)
    os.chown(directory, NOBODY, NOBODY)
    return {"offlineCapacity": {"file": str(directory / "capacity.json"), "interval": "1s"}}


class Controller(Service):
    """One replica; a context manager."""

    def __init__(self, bed: KubeBed, port: int, *, host: str = "127.0.0.1", **config: Any) -> None:
        super().__init__(bed, "controller", bed.client.token(ACCOUNT))
        self._caller = Caller(self.enter, f"http://{host}:{port}", token=TOKEN)
        self.give("put-token", TOKEN.encode())
        section = {
            "address": f"{host}:{port}",
            "allowPlaintextToken": True,
            "credentialsDir": str(self.directory),
            "tokenFile": str(self.directory / "put-token"),
            "smoothingTime": 0,
            "minUpdateInterval": 0,
            **config,
        }
        self.configure(controller=section)

    def ask(self, method: str, path: str, body: JsonObject | None = None) -> tuple[int, str]:
        """One request to it, with the token; status 0 while nobody listens."""
        self.check()
        return self._caller.ask(method, path, body)
