"""The verb bind: evaluate the node again, assume the pod, write node and annotation in one request.

kube-scheduler calls again for a pod if the first call took too long. The second call waits for the
first, so no pod gets two nodes or is assumed twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from nri_numa.cluster.cluster_state import AssumedPod, ClusterState
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.cluster.pod_request import PodRequest
from nri_numa.config import AgentConfig, parse_duration
from nri_numa.engine.pod_admission import ExpectedContainer, format_expected_containers
from nri_numa.engine.request.annotations import (
    CONTAINER_RESOURCES_KEY,
    SCHEDULED_NODES_KEY,
    format_scheduled_nodes,
)
from nri_numa.kube.api import uid_of
from nri_numa.kube.requests import KubeClient, KubeError, Resource, text_in_section
from nri_numa.observe.logs import get_logger
from nri_numa.scheduler.candidates import VerdictCache
from nri_numa.scheduler.fit import Unfit
from nri_numa.scheduler.protocol import BindingArgs
from nri_numa.scheduler.watcher import MAX_RECHECK_PAUSE_S, PodWatcher

log = get_logger("scheduler")

_MAX_WRITTEN_ANNOTATION_BYTES: Final = 200_000
"""Bytes of an annotation; a pod may have 256 KiB in all, which the API server does not check in a
Binding."""
_API_TIMEOUT_TEXT: Final = "the API server did not answer in time"


class Binder:
    """Binds pods to their nodes."""

    def __init__(
        self,
        api: KubeClient,
        nodes: ClusterState,
        candidates: VerdictCache,
        reader: PodReader,
        pods: PodWatcher,
        config: AgentConfig,
        clock: Callable[[], float],
    ) -> None:
        self._api, self._nodes, self._candidates = api, nodes, candidates
        self._reader, self._pods, self._clock = reader, pods, clock
        self._annotation = f"{config.annotation_prefix}/{SCHEDULED_NODES_KEY}"
        self._containers = f"{config.annotation_prefix}/{CONTAINER_RESOURCES_KEY}"
        self._timeout = parse_duration(config.scheduler.bind_timeout)

        self._running: dict[str, tuple[str, asyncio.Task[str]]] = {}

    async def bind(self, binding: BindingArgs) -> str:
        """Bind a pod to its node; return the problem, empty if the pod is bound."""
        running_bind = self._running.get(binding.uid)
        if running_bind is not None:
            node, task = running_bind
            problem = await asyncio.shield(task)
            if node == binding.node or not problem:
                return problem or ("" if node == binding.node else f"is on {node} already")
            return await self.bind(binding)
        task = asyncio.create_task(self._bind_pod(binding), name=f"bind {binding.name}")
        self._running[binding.uid] = binding.node, task
        task.add_done_callback(lambda _: self._running.pop(binding.uid, None))
        return await asyncio.shield(task)

    async def wait_for_bindings(self) -> None:
        """Wait for the bindings in progress; each is limited by its time-outs."""
        await asyncio.gather(*(task for _, task in self._running.values()), return_exceptions=True)

    async def _bind_pod(self, binding: BindingArgs) -> str:
        deadline = asyncio.get_running_loop().time() + self._timeout
        request = await self._load_pod_request(binding, deadline)
        if isinstance(request, str):
            return request
        annotations: dict[str, str] = {}
        earlier = self._nodes.assumed_pods.get(binding.uid)
        if not request.is_unconstrained:
            # No await between this line and `assume_pod`, so no other binding comes between.
            if earlier is not None:
                self._nodes.forget_pod(binding.uid)
            problem = self._assume_pod(request, binding, annotations)
            if problem:
                if earlier is not None:
                    self._nodes.assume_pod(earlier)
                return problem
        problem, code = await self._create_binding(binding, annotations, deadline)
        if 400 <= code < 500 and code != 409:
            # The binding was certainly not written.
            self._nodes.forget_pod(binding.uid)
            if earlier is not None and code != 404:
                self._nodes.assume_pod(earlier)
        elif problem:
            problem = await self._confirm_binding(
                binding, problem, earlier, is_conflict=code == 409
            )
        if not problem:
            pod, placed = f"{binding.namespace}/{binding.name}", annotations.get(self._annotation)
            log.debug("pod bound", pod=pod, node=binding.node, numa_nodes=placed or "")
        return problem

    async def _load_pod_request(self, binding: BindingArgs, deadline: float) -> PodRequest | str:
        """Read the pod's request and its node's pods; return the request or the problem."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._api.refresh_credentials()
                request = self._reader.cached_request(binding.uid)
                if request is None:
                    request = self._reader.read_pod_request(
                        await self._api.request_json("GET", _pod_api_path(binding))
                    )
                    if request.uid != binding.uid:
                        pod = f"{binding.namespace}/{binding.name}"
                        return f"pod {pod} is another one by now"
                if not request.is_unconstrained:
                    await self._pods.read_node(binding.node)
        except KubeError as error:
            return str(error)[:500]
        except TimeoutError:
            return _API_TIMEOUT_TEXT
        return request

    def _assume_pod(
        self, request: PodRequest, binding: BindingArgs, annotations: dict[str, str]
    ) -> str:
        """Assume the pod and fill in the binding's annotations; return the problem or ``""``."""
        if request.invalid_reason:
            return request.invalid_reason
        verdict = self._candidates.evaluate_node(request, binding.node)
        if isinstance(verdict, Unfit):
            return verdict.reason_text(verdict.best_amount)
        assigned_nodes = {name: numa_nodes for name, numa_nodes in verdict.numa_nodes if numa_nodes}
        text = format_scheduled_nodes(assigned_nodes)
        if assigned_nodes and len(text) <= _MAX_WRITTEN_ANNOTATION_BYTES:
            annotations[self._annotation] = text
        containers = {
            c.container: ExpectedContainer(
                milli=1000 * c.exclusive_cpus or c.shared_milli,
                memory=dict(c.amounts).get("memory", 0),
                is_init=c.is_init,
            )
            for c in request.containers
        }
        if (
            len(containers) > 1
            and len(text := format_expected_containers(containers)) <= _MAX_WRITTEN_ANNOTATION_BYTES
        ):
            annotations[self._containers] = text
        now_s = self._clock()
        self._nodes.assume_pod(
            AssumedPod(
                request=request,
                node=binding.node,
                numa_nodes=assigned_nodes,
                charge=verdict.pod_charge,
                assumed_at=now_s,
                expires_at=now_s + MAX_RECHECK_PAUSE_S,
            )
        )
        return ""

    async def _create_binding(
        self, binding: BindingArgs, annotations: dict[str, str], deadline: float
    ) -> tuple[str, int]:
        """Write the binding; return the problem and the status code, 0 without an answer."""
        metadata: dict[str, Any] = {"name": binding.name, "uid": binding.uid}
        if annotations:
            metadata["annotations"] = annotations
        document = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": metadata,
            "target": {"apiVersion": "v1", "kind": "Node", "name": binding.node},
        }
        try:
            async with asyncio.timeout_at(deadline):
                await self._api.request_json("POST", f"{_pod_api_path(binding)}/binding", document)
        except KubeError as error:
            return f"{error.code}: {str(error)[:500]}" if error.code else str(error), error.code
        except TimeoutError:
            return _API_TIMEOUT_TEXT, 0
        return "", 0

    async def _confirm_binding(
        self, binding: BindingArgs, problem: str, earlier: AssumedPod | None, *, is_conflict: bool
    ) -> str:
        """Read the pod after a binding of unknown outcome; return the problem or an empty text.

        A binding without an answer may be written after this read. The pod then stays assumed, and
        its next attempt is sent to the same node.
        """
        try:
            async with asyncio.timeout(self._timeout):
                pod = await self._api.request_json("GET", _pod_api_path(binding))
        except KubeError as error:
            if error.code == 404:
                self._nodes.forget_pod(binding.uid)
            return problem
        except TimeoutError:
            return problem  # assumed until the watch or the time-out decides
        node, same_pod = text_in_section(pod, "spec", "nodeName"), uid_of(pod) == binding.uid
        if same_pod and node == binding.node:
            return ""
        if same_pod and not node and not is_conflict:
            return problem
        self._nodes.forget_pod(binding.uid)
        if same_pod and earlier is not None and earlier.node == node:
            self._nodes.assume_pod(earlier)  # the pod is on the node of its first binding
        return problem


def _pod_api_path(binding: BindingArgs) -> str:
    return Resource.PODS.object_or_list_path(binding.namespace, binding.name)
