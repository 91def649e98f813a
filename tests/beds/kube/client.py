"""How tests speak to the bed's API server: kubectl for what people do, plain HTTP for looking.

A kubectl process is too dear for a question that is asked ten times a second. One ``kubectl proxy``
with a unix socket answers those; such a socket can be reached from outside the bed's network.
"""

import http.client
import json
import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.beds.cri import poll

JsonObject = dict[str, Any]

# Only bounds a failure: a pod is there in a second, on a machine that does ten other things in
# tens of them.
PATIENCE_S = 180.0


class KubeError(RuntimeError):
    """kubectl or the API server refused; the message has their words."""


class Client:
    """Calls one API server as the administrator."""

    def __init__(
        self, kubectl: Sequence[str], environment: Mapping[str, str], proxy_socket: Path
    ) -> None:
        self._kubectl = list(kubectl)
        self._environment = dict(environment)
        self._proxy_socket = proxy_socket

    def kubectl(self, *arguments: str, documents: Sequence[JsonObject] = ()) -> str:
        """Run kubectl to its end; returns what it printed.

        Raises:
            KubeError: it failed.
        """
        return self.completed(*arguments, documents=documents).stdout

    def completed(
        self, *arguments: str, documents: Sequence[JsonObject] = ()
    ) -> subprocess.CompletedProcess[str]:
        """`kubectl` with its standard error, which has the API server's warnings."""
        done = subprocess.run(
            [*self._kubectl, *arguments],
            env=self._environment,
            input="\n---\n".join(json.dumps(document) for document in documents),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        if done.returncode != 0:
            raise KubeError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done

    def apply(self, *documents: JsonObject) -> None:
        self.kubectl("apply", "--filename=-", documents=documents)

    def request(
        self, method: str, path: str, body: object = None, *, content_type: str = ""
    ) -> tuple[int, JsonObject]:
        """One HTTP request; status and document. A PATCH merges unless its type says otherwise.

        Raises:
            OSError: nobody listens.
        """
        connection = http.client.HTTPConnection("localhost", timeout=60)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.sock.settimeout(60)
            connection.sock.connect(str(self._proxy_socket))
            data = None if body is None else json.dumps(body).encode()
            kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
            connection.request(method, path, data, {"Content-Type": content_type or kind})
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        try:
            document = json.loads(text)
        except ValueError:
            document = {"message": text.decode(errors="replace")}
        return answer.status, document

    def ask(self, method: str, path: str, body: object = None, **kind: str) -> JsonObject:
        """`request` that must succeed.

        Raises:
            KubeError: another status than 2xx.
        """
        status, document = self.request(method, path, body, **kind)
        if not 200 <= status < 300:
            raise KubeError(f"{method} {path}: {status}: {document.get('message', document)}")
        return document

    def token(self, account: str, namespace: str = "nri-numa", *, node: str = "") -> str:
        """A token of a service account; one that names a node, or none."""
        tied = ["--bound-object-kind=Node", f"--bound-object-name={node}"] if node else []
        return self.kubectl("create", "token", account, f"--namespace={namespace}", *tied).strip()

    def events(self, reason: str) -> list[JsonObject]:
        found = self.ask("GET", "/apis/events.k8s.io/v1/namespaces/default/events")["items"]
        return [one for one in found if one["reason"] == reason]

    def add_node(
        self,
        name: str,
        *,
        cpus: int = 32,
        memory: str = "64Gi",
        labels: Mapping[str, str] | None = None,
        ready: bool = False,
    ) -> None:
        """A Node that is an object only.

        `ready`: Ready and without taints, where nothing minds that it never reports; else what is
        put there tolerates that.
        """
        metadata = {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": metadata}
        self.ask("POST", "/api/v1/nodes", node)
        room = {"cpu": str(cpus), "memory": memory, "pods": "110"}
        status: JsonObject = {"capacity": room, "allocatable": room}
        if ready:
            status["conditions"] = [
                {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "a test's"}
            ]
        self.ask("PATCH", f"/api/v1/nodes/{name}/status", {"status": status})
        if ready:  # admission tainted it as not ready, and nobody takes that back
            self.ask("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": None}})

    def get(self, path: str) -> JsonObject | None:
        status, document = self.request("GET", path)
        if status == http.client.NOT_FOUND:
            return None
        if status != http.client.OK:
            raise KubeError(f"GET {path}: {status}: {document.get('message', document)}")
        return document

    def node(self, name: str) -> JsonObject:
        """A Node; one that is not there says nothing of itself."""
        return self.get(f"/api/v1/nodes/{name}") or {"status": {}, "spec": {}}

    # -- pods ------------------------------------------------------------------------------

    def pod(self, name: str, namespace: str = "default") -> JsonObject | None:
        return self.get(f"/api/v1/namespaces/{namespace}/pods/{name}")

    def pods(self, selector: str = "", namespace: str = "default") -> list[JsonObject]:
        """The pods that a label selector takes, by name."""
        path = f"/api/v1/namespaces/{namespace}/pods?labelSelector={selector}"
        items: list[JsonObject] = self.ask("GET", path)["items"]
        return sorted(items, key=lambda pod: str(pod["metadata"]["name"]))

    def run(self, document: JsonObject) -> JsonObject:
        self.apply(document)
        return self.wait_ready(document["metadata"]["name"])

    def said(self, name: str, *arguments: str) -> str:
        """What a pod's container printed; its first line may come after it is Ready."""
        return poll(lambda: self.kubectl("logs", name, *arguments), f"a line of {name}")

    def wait_ready(self, name: str, *, timeout_s: float = PATIENCE_S) -> JsonObject:
        return self.wait_pod(name, is_ready, "Ready", timeout_s=timeout_s)

    def wait_pod(
        self,
        name: str,
        probe: Callable[[JsonObject], bool],
        what: str,
        *,
        timeout_s: float = PATIENCE_S,
    ) -> JsonObject:
        last: JsonObject = {}

        def ask() -> JsonObject | None:
            pod = self.pod(name)
            last.update(pod or {})
            return pod if pod is not None and probe(pod) else None

        try:
            return poll(ask, f"pod {name} {what}", timeout_s=timeout_s)
        except TimeoutError as error:
            status = json.dumps(last.get("status"), indent=1)
            raise TimeoutError(f"{error}; its status: {status}") from None

    def wait_rejected(self, name: str) -> str:
        """Wait until the node refuses a pod's container; what the kubelet says of that."""
        rejected = self.wait_pod(
            name, lambda it: waiting_reason(it)[0] == "CreateContainerError", "refused"
        )
        return waiting_reason(rejected)[1]

    def delete_pods(self) -> None:
        """Remove every workload of the namespace ``default`` and wait until its pods are gone."""
        kinds = "deployments,daemonsets,statefulsets,jobs,pods"
        self.kubectl("delete", kinds, "--all", "--grace-period=0", "--force", "--wait=false")
        poll(lambda: not self.pods(), "end of all pods")


def is_ready(pod: JsonObject) -> bool:
    conditions = pod["status"].get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def takes_pods(node: JsonObject) -> bool:
    return is_ready(node) and not node["spec"].get("taints")


def waiting_reason(pod: JsonObject) -> tuple[str, str]:
    """Reason and message of the first container that waits; empty where none does."""
    for container in pod["status"].get("containerStatuses", []):
        if (waiting := container["state"].get("waiting")) is not None:
            return str(waiting.get("reason", "")), str(waiting.get("message", ""))
    return "", ""


def unscheduled(pod: JsonObject) -> str:
    """Why the scheduler finds no node; empty where it has found one, or did not try yet."""
    for one in pod["status"].get("conditions", []):
        if one["type"] == "PodScheduled" and one["status"] == "False":
            return str(one.get("message", ""))
    return ""


def client_environment(directory: Path, kubeconfig: Path) -> dict[str, str]:
    """An environment for the bed's programs: no proxies, no locale and no configuration of ours."""
    return {
        "PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
        "HOME": str(directory),
        "KUBECONFIG": str(kubeconfig),
        "LC_ALL": "C",
    }
