"""What tests ask an API server about Events and forged notes."""

import contextlib
import json
from typing import Any

from tests.beds.cri import poll
from tests.beds.kube.bed import KubeBed, Service
from tests.beds.kube.caller import Caller
from tests.beds.kube.client import Client, JsonObject
from tests.beds.kube.control_plane import ADDRESS
from tests.beds.kube.manifests import PREFIX
from tests.beds.processes import wait_for


def events(client: Client, name: str, reason: str) -> list[JsonObject]:
    return [
        one
        for one in client.events(reason)
        if one["regarding"].get("name") == name
        and one.get("reportingController") == f"{PREFIX}/nri-numa"
    ]


def wait_event(client: Client, publisher: Service, name: str, reason: str) -> JsonObject:
    what = f"Event {reason} of {name}"
    return wait_for([publisher], lambda: events(client, name, reason), what)[0]


def answers(client: Client) -> bool:
    """Whether the API server is there."""
    with contextlib.suppress(OSError):
        return client.request("GET", "/readyz")[0] == 200
    return False


class Thief:
    """Calls the API server with nothing but a token; kubectl would need more rights."""

    def __init__(self, bed: KubeBed, token: str) -> None:
        enter, authority = bed.control.namespaces.enter(mounts=False), bed.control.certificate
        url = f"https://{ADDRESS}:6443"
        self._caller = Caller(enter, url, token=token, authority=str(authority))

    def does(self, method: str, path: str, body: JsonObject | None = None) -> str:
        """The API server's no; empty when it did it."""
        status, text = self._caller.ask(method, path, body)
        return "" if 200 <= status < 300 else f"{status} {json.loads(text)['message']}"

    def patches(self, path: str, **metadata: Any) -> str:
        return self.does("PATCH", path, {"metadata": metadata})

    def writes_one_annotation(self, name: str, key: str) -> None:
        """Insist that it may write this annotation of a Node, and nothing else of it."""
        node = f"/api/v1/nodes/{name}?dryRun=All"
        others = {f"{PREFIX}/drained": "0"}
        poll(
            lambda: "may only write the annotation" in self.patches(node, annotations=others),
            "the policy in force",
        )
        assert self.patches(node, annotations={f"{PREFIX}/{key}": "{}"}) == ""
        for metadata in ({"labels": {"a": "b"}}, {"finalizers": ["example.com/stay"]}):
            assert "nothing of a Node but its annotation" in self.patches(node, **metadata)
        cordon = self.does("PATCH", node, {"spec": {"unschedulable": True}})
        assert "nothing of a Node but its annotation" in cordon
        assert "forbidden" in self.does("GET", "/api/v1/namespaces/nri-numa/secrets")
