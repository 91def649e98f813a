"""Kubelet services on two sockets: registration, and preparation of claims.

They run in their own threads, because a preparation blocks on files and the API server, and the
event loop that answers the runtime must not block.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol

import grpc
import msgspec

from nri_numa.dra.claims import InvalidClaim
from nri_numa.dra.pb import dra_pb2 as dra
from nri_numa.dra.pb import pluginregistration_pb2 as registration
from nri_numa.errors import RuntimeUnavailable
from nri_numa.observe.logs import get_logger

log = get_logger("dra")

DRA_PLUGIN_TYPE: Final = "DRAPlugin"
DRA_SERVICE_VERSION: Final = "v1.DRAPlugin"
"""Kubernetes 1.34 and newer; the features that are used exist since 1.36."""
_DRA_SERVICE: Final = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
HEALTH_SERVICES: Final = ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
"""The same service, stable from Kubernetes 1.37 and alpha from 1.34 (KEP-4680)."""
_HEALTH_INTERVAL_S: Final = 1.0
_HEALTH_RESEND_S: Final = 10.0
"""Seconds between two checks of device health, and until it is sent again unchanged: the kubelet
treats a device without an update as unknown after 30."""
_REGISTRATION_SERVICE: Final = "pluginregistration.Registration"
_MAX_CONCURRENT_CALLS: Final = 16
"""Concurrent calls; some wait until containers have ended."""


class PreparedDevice(msgspec.Struct, frozen=True):
    """A device for the containers that name its request."""

    request: str
    pool: str
    device: str
    cdi: str
    share_id: str


class ClaimPreparer(Protocol):
    """Preparer of claims."""

    def prepare_claim(self, namespace: str, name: str, uid: str) -> Sequence[PreparedDevice]:
        """Prepare a claim; idempotent."""

    def unprepare_claim(self, uid: str) -> None:
        """Drop a claim; unknown claims are not an error."""

    def pool_and_device_health(self) -> tuple[str, Mapping[str, str]]:
        """Return the pool, and the problem of each device by name; empty for none."""


class KubeletPlugin:
    """DRA driver as the kubelet sees it; the kubelet finds it by the socket ``registry``.

    ``registered`` is called each time the kubelet has registered the driver.
    """

    def __init__(
        self,
        driver: str,
        registry: str,
        endpoint: str,
        preparer: ClaimPreparer,
        registered: Callable[[], object],
    ) -> None:
        self._driver, self._registry, self._endpoint = driver, registry, endpoint
        self._book, self._registered = preparer, registered
        self._servers: list[grpc.Server] = []
        self._stopped = threading.Event()

    def start(self) -> None:
        """Serve the driver's calls, then registration; `RuntimeUnavailable` without a socket."""
        calls = {
            "NodePrepareResources": _unary_rpc_handler(
                self._prepare_resources, dra.NodePrepareResourcesRequest
            ),
            "NodeUnprepareResources": _unary_rpc_handler(
                self._unprepare_resources, dra.NodeUnprepareResourcesRequest
            ),
        }
        registration_calls = {
            "GetInfo": _unary_rpc_handler(self._get_plugin_info, registration.InfoRequest),
            "NotifyRegistrationStatus": _unary_rpc_handler(
                self._on_registration_status, registration.RegistrationStatus
            ),
        }
        health = {
            "NodeWatchResources": grpc.unary_stream_rpc_method_handler(
                self._watch_device_health,
                request_deserializer=dra.NodeWatchResourcesRequest.FromString,
                response_serializer=dra.NodeWatchResourcesResponse.SerializeToString,
            )
        }
        self._stopped.clear()
        self._start_server(
            self._endpoint, {_DRA_SERVICE: calls, **dict.fromkeys(HEALTH_SERVICES, health)}
        )
        self._start_server(self._registry, {_REGISTRATION_SERVICE: registration_calls})

    def _start_server(self, path: str, services: Mapping[str, dict[str, Any]]) -> None:
        server = grpc.server(ThreadPoolExecutor(_MAX_CONCURRENT_CALLS, thread_name_prefix="dra"))
        server.add_generic_rpc_handlers(
            tuple(grpc.method_handlers_generic_handler(*service) for service in services.items())
        )
        try:
            os.makedirs(os.path.dirname(path), mode=0o750, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # of a process that was killed
            server.add_insecure_port(f"unix:{path}")
        except (OSError, RuntimeError) as error:
            self.stop()
            raise RuntimeUnavailable(f"DRA socket {path} cannot be made: {error}") from error
        server.start()
        self._servers.append(server)

    def stop(self) -> None:
        """Cancel every call, and close and remove the sockets."""
        self._stopped.set()
        servers, self._servers = self._servers, []
        for server in reversed(servers):
            server.stop(None).wait()
        for path in (self._registry, self._endpoint):
            with contextlib.suppress(OSError):
                os.unlink(path)

    # --- calls ----------------------------------------------------------------------------------

    def _get_plugin_info(self, request: Any, context: Any) -> Any:
        return registration.PluginInfo(
            type=DRA_PLUGIN_TYPE,
            name=self._driver,
            endpoint=self._endpoint,
            supported_versions=[DRA_SERVICE_VERSION, *HEALTH_SERVICES],
        )

    def _on_registration_status(self, request: Any, context: Any) -> Any:
        if request.plugin_registered:
            log.info("driver registered", driver=self._driver)
            self._registered()
        else:
            log.warning("driver rejected by kubelet", problem=request.error[:500])
        return registration.RegistrationStatusResponse()

    def _prepare_resources(self, request: Any, context: Any) -> Any:
        answer = dra.NodePrepareResourcesResponse()
        for claim in request.claims:
            entry = answer.claims[claim.uid]  # every claim needs an entry
            try:
                devices = self._book.prepare_claim(claim.namespace, claim.name, claim.uid)
            except (InvalidClaim, OSError) as error:
                entry.error = str(error)
                log.warning("claim not prepared", claim_uid=claim.uid, problem=str(error))
                continue
            for prepared in devices:
                entry.devices.add(
                    request_names=[prepared.request],
                    pool_name=prepared.pool,
                    device_name=prepared.device,
                    cdi_device_ids=[prepared.cdi],
                    share_id=prepared.share_id or None,
                )
        return answer

    def _unprepare_resources(self, request: Any, context: Any) -> Any:
        answer = dra.NodeUnprepareResourcesResponse()
        for claim in request.claims:
            entry = answer.claims[claim.uid]  # as above
            try:
                self._book.unprepare_claim(claim.uid)
            except OSError as error:
                entry.error = f"claim {claim.namespace}/{claim.name}: {error}"
                log.warning("claim not unprepared", claim_uid=claim.uid, problem=str(error))
        return answer

    def _watch_device_health(self, request: Any, context: Any) -> Iterator[Any]:
        """Yield the health of all devices: at once, on change, and before it expires."""
        sent_state, sent_at = None, 0.0
        while context.is_active() and not self._stopped.is_set():
            pool, devices = state = self._book.pool_and_device_health()
            if state != sent_state or time.monotonic() - sent_at >= _HEALTH_RESEND_S:
                sent_state, sent_at = state, time.monotonic()
                answer = dra.NodeWatchResourcesResponse()
                for name, problem in devices.items():
                    answer.devices.add(
                        device=dra.DeviceIdentifier(pool_name=pool, device_name=name),
                        health=dra.UNHEALTHY if problem else dra.HEALTHY,
                        last_updated_time=int(time.time()),
                        message=problem[:1000],
                    )
                yield answer
            self._stopped.wait(_HEALTH_INTERVAL_S)


def _unary_rpc_handler(method: Any, request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        method,
        request_deserializer=request.FromString,
        response_serializer=lambda message: message.SerializeToString(),
    )
