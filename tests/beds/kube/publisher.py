"""``nri-numa publish`` as in its container: a token that names its node, the agent's socket."""

from collections.abc import Mapping
from typing import Any

from tests.beds.kube.bed import KubeBed
from tests.beds.kube.client import Client
from tests.beds.kube.service import MANIFESTS, Service

ACCOUNT = "nri-numa-publish"


def install(client: Client) -> None:
    """Everything of the shipped manifests that the publisher needs, without the DaemonSet."""
    files = (
        "base/namespace.yaml",
        "publish/serviceaccount.yaml",
        "publish/role.yaml",
        "publish/policies.yaml",
        "publish-pods/role.yaml",
        "publish-capacity/role.yaml",
        "publish-capacity/policies.yaml",
    )
    client.kubectl("apply", *(f"--filename={MANIFESTS / file}" for file in files))


def token(client: Client, node: str = "") -> str:
    return client.token(ACCOUNT, node=node)


class Publisher(Service):
    """One publisher; a context manager.

    Args:
        certificate: of the certificate authority; the bed's by default.
    """

    def __init__(
        self,
        bed: KubeBed,
        token: str,
        *,
        config: Mapping[str, Any] | None = None,
        certificate: bytes | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(bed, "publish", token, certificate=certificate)
        section = {
            "credentialsDir": str(self.directory),
            "resyncInterval": "2s",
            "apiQPS": 20,
            **(config or {}),
        }
        self.configure(
            http={"socket": str(bed.node.api_socket)},
            nodeName=bed.node.name,
            publish=section,
            **(more or {}),
        )
