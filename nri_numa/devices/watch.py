"""Devices of a container from all sources, at the time of its admission.

Threads do the slow part while the runtime makes the pod's sandbox: they list the interfaces of its
network namespace, query the kubelet for its devices, read changed CDI files, and resolve the cached
links of sysfs again. A container that arrives earlier is placed without these devices, and its
explanation says so. An admission itself reads only a link of sysfs for each device that no
container had before.

So a device removed since the last sandbox was made may still give a hint. It is only a hint: what a
container may use is not decided here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec.structs import replace

from nri_numa.devices.lookup import (
    DeviceFinder,
    MissedHints,
    build_hints,
    read_nvidia_gpus,
    with_stocks,
)
from nri_numa.devices.sysfs import LocatedDevice
from nri_numa.machine.pci import NIC
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.workload import (
    MAX_CONTAINER_DEVICES,
    Container,
    DeviceRequest,
    PodSandbox,
    PodTable,
)
from nri_numa.observe.logs import get_logger
from nri_numa.runtime import PodObserver

if TYPE_CHECKING:
    from nri_numa.config.sections import Devices as Sources
    from nri_numa.devices.counts import DevicesOrReason
    from nri_numa.kubelet.pod_resources import NodeDevice

log = get_logger("devices")

MAX_REMEMBERED_PODS: Final = 4096
_GPU_REREAD_INTERVAL_S: Final = 60.0
_MIN_CDI_REREAD_INTERVAL_S: Final = 1.0
"""Seconds between two reads of the CDI files because of an unknown name."""

_NETWORK_NOT_READ_TEXT: Final = "its network interfaces were not read yet: no hint"
_NO_KUBELET_ANSWER_TEXT: Final = "the kubelet has not reported its devices yet: no hint"

KUBELET_ANSWER_TIMEOUT_S: Final = 1.0
"""Seconds for an answer, for which only a thread waits. A busy kubelet took more than 0.05; a pod
whose first container comes earlier still has the answer for its other containers and restarts."""
MIN_KUBELET_QUERY_INTERVAL_S: Final = 0.02
"""Seconds between two queries: half the kubelet's rate limit, since others query it too."""
RATE_LIMIT_RETRY_S: Final = 0.1
"""Seconds until a rate-limited query is repeated once."""


CLONE_NEWNET: Final = 0x40000000
INTERFACE_QUERY_TIMEOUT_S: Final = 1.0
"""Seconds for an answer of the kernel, which takes milliseconds."""


DevicesByContainer = Mapping[str, tuple[LocatedDevice, ...]]
"""Devices that the kubelet allocated, by container; a device's kind is its resource."""


@dataclass(slots=True)
class PodDevices:
    """Devices of one pod, found before its containers; threads replace each field as a whole.

    Attributes:
        pod: namespace and name of the pod.
        network: devices of its network interfaces, and a sentence if they are unknown.
        kubelet: devices the kubelet allocated, and a sentence if they are unknown.
    """

    pod: str
    network: tuple[tuple[LocatedDevice, ...], str]
    kubelet: tuple[DevicesByContainer, str]


_UNKNOWN_POD: Final = PodDevices("", ((), ""), ({}, ""))


def query_devices(
    kubelet_root: str, namespace: str, pod: str, seconds: float = KUBELET_ANSWER_TIMEOUT_S
) -> DevicesByContainer | str:
    """Query a pod's devices by container; a sentence if they are unknown. Blocks.

    Without a pod's name only the slow imports of the first query are done.
    """
    from nri_numa.kubelet import pod_resources

    if not pod:
        pod_resources.preload_grpc()
        return {}
    answer = pod_resources.query_pod(kubelet_root, namespace, pod, timeout_s=seconds)
    if isinstance(answer, str) and answer == pod_resources.RATE_LIMITED_PROBLEM:
        time.sleep(RATE_LIMIT_RETRY_S)
        answer = pod_resources.query_pod(kubelet_root, namespace, pod, timeout_s=seconds)
    if isinstance(answer, str):
        return answer
    devices_by_container: dict[str, tuple[LocatedDevice, ...]] = {}
    for container_answer in answer:
        devices = [
            LocatedDevice(devices.resource, id, frozenset(devices.by_id[id]))
            for devices in container_answer.devices
            for id in devices.allocated_ids
        ]
        if devices:
            devices_by_container[container_answer.container] = tuple(
                devices[: MAX_CONTAINER_DEVICES + 1]
            )
    return devices_by_container


class DeviceWatch(PodObserver):
    """Finds the devices of containers. Its methods run in the loop and never wait."""

    def __init__(
        self,
        sources: Sources,
        *,
        root: str,
        kubelet_root: str,
        alignable_nodes: Callable[[], NUMASet],
        own_resource: str = "",
        clock: Callable[[], float] = time.monotonic,
        deadline: float = KUBELET_ANSWER_TIMEOUT_S,
        node_devices: Callable[[], DevicesOrReason] = lambda: (),
    ) -> None:
        """Create the watch; `start` begins to read.

        ``root`` contains ``sys/``, and ``proc/`` for NVIDIA's driver; ``alignable_nodes`` are the
        NUMA nodes that containers can be placed on; devices of ``own_resource`` are CPUs.
        ``node_devices`` returns what the node has, without waiting, and starts a query.
        """
        self._sources = sources
        self._root = root
        self._node_devices = node_devices
        self._kubelet_root = kubelet_root
        self._places = alignable_nodes
        self._clock = clock
        self._deadline = deadline
        self._lookup = DeviceFinder(sources, root=root, own_resource=own_resource)
        self._pods: dict[str, PodDevices] = {}
        # One thread each, so a hanging kubelet does not delay the lookup of network cards.
        self._local = ThreadPoolExecutor(1, thread_name_prefix="devices")
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="pod resources")
        self._gpus_read = self._files_read = float("-inf")
        self._refresh_waiting = False

    def start(self) -> None:
        """Read the driver's GPUs and CDI files and import slow libraries, in threads."""
        self._submit_task(self._local, self._preload_sources)
        if self._sources.pod_resources:
            self._submit_task(self._asking, query_devices, self._kubelet_root, "", "")

    def close(self) -> None:
        """Cancel queued tasks; running ones end by themselves."""
        for pool in (self._local, self._asking):
            pool.shutdown(wait=False, cancel_futures=True)

    def wait_for_tasks(self) -> None:
        """Wait until all submitted tasks are done."""
        for pool in (self._local, self._asking):
            pool.submit(lambda: None).result()

    # --- called by the link -----------------------------------------------------------------------

    def on_run_pod(self, pod: PodSandbox) -> None:
        """Start to find the devices of a pod whose sandbox is being made."""
        network = pod.network_namespace
        reads_network, queries_kubelet = (
            bool(self._sources.network_interfaces and network),
            self._sources.pod_resources,
        )
        entry = PodDevices(
            pod.full_name,
            ((), _NETWORK_NOT_READ_TEXT * reads_network),
            ({}, _NO_KUBELET_ANSWER_TEXT * queries_kubelet),
        )
        self._pods[pod.id] = entry
        while len(self._pods) > MAX_REMEMBERED_PODS:
            del self._pods[next(iter(self._pods))]
        if not self._refresh_waiting:
            self._refresh_waiting = True
            self._submit_task(self._local, self._refresh_links_and_cdi)
        if reads_network:
            self._submit_task(self._local, self._find_network_devices, pod, entry)
        if queries_kubelet:
            self._submit_task(self._asking, self._query_kubelet, pod, entry)

    def on_synchronize(self, pods: PodTable, containers: Sequence[Container]) -> None:
        """Forget pods that are gone, and start to find the devices of new ones."""
        # In one step: the threads check here that a pod still exists.
        self._pods = {i: self._pods[i] for i in pods.uids if i in self._pods}
        for pod_id in pods.uids:
            if pod_id not in self._pods:
                self.on_run_pod(pods[pod_id])

    def on_remove_pod(self, pod_id: str, uid: str) -> None:
        """Forget a removed pod."""
        self._pods.pop(pod_id, None)

    def complete_container(
        self, pod: PodSandbox, container: Container
    ) -> tuple[PodSandbox, Container]:
        """Return the container with the devices that are known now."""
        entry, name = self._pods.get(pod.id, _UNKNOWN_POD), container.name
        (cards, network_note), (kubelet_devices, kubelet_note) = entry.network, entry.kubelet
        lookup, missed = self._lookup, MissedHints()
        devices = list(lookup.find_mentioned(container.mentions, missed))
        # Sources that lack a name are read again.
        if missed.cdi and self._clock() - self._files_read > _MIN_CDI_REREAD_INTERVAL_S:
            self._files_read = self._clock()
            self._submit_task(self._local, self._read_cdi_files)
        if missed.gpu and self._clock() - self._gpus_read > _GPU_REREAD_INTERVAL_S:
            self._gpus_read = self._clock()
            self._submit_task(self._local, self._read_gpus)
        devices += cards
        if name in kubelet_devices:
            devices += lookup.match_kubelet_devices(kubelet_devices[name])
        notes = [*missed.notes, *filter(None, (network_note, kubelet_note))]
        alignable_nodes = self._places()
        hints = build_hints(devices, alignable_nodes, notes)
        requests = self._with_stocks(hints.requests, kubelet_devices.get(name, ()))
        other_devices = [
            device
            for container_name, allocated_devices in kubelet_devices.items()
            if container_name != name
            for device in allocated_devices
        ]
        pod_requests: tuple[DeviceRequest, ...] = ()
        if other_devices:
            pod_devices = [*devices, *lookup.match_kubelet_devices(other_devices)]
            pod_requests = self._with_stocks(
                build_hints(pod_devices, alignable_nodes).requests,
                chain.from_iterable(kubelet_devices.values()),
            )
        for note in hints.notes:
            log.debug("device without hint", pod=entry.pod or pod.id, container=name, problem=note)
        return pod, replace(
            container, devices=requests, pod_devices=pod_requests, device_notes=hints.notes
        )

    def _with_stocks(
        self, requests: tuple[DeviceRequest, ...], held_devices: Iterable[LocatedDevice]
    ) -> tuple[DeviceRequest, ...]:
        """Return requests with the devices that the kubelet could give instead, if it says so."""
        held = tuple(held_devices)
        node_devices = self._list_node_devices() if held else ()
        return with_stocks(requests, held, node_devices, self._lookup, self._places())

    def _list_node_devices(self) -> tuple[NodeDevice, ...]:
        """Return the last answer about the node's devices; empty if there is none."""
        answer = self._node_devices()
        return () if isinstance(answer, str) else answer

    # --- in threads -------------------------------------------------------------------------------

    def _submit_task(
        self, pool: ThreadPoolExecutor, function: Callable[..., object], *args: object
    ) -> None:
        """Run a function in a thread; an exception is logged."""

        def run_guarded() -> None:
            try:
                function(*args)
            except Exception as error:
                log.error("device lookup failed", error=repr(error))

        with contextlib.suppress(RuntimeError):  # the agent ends
            pool.submit(run_guarded)

    def _preload_sources(self) -> None:
        if self._sources.nvidia:
            self._read_gpus()
        if self._sources.cdi:
            self._read_cdi_files()
        if self._sources.network_interfaces:
            import pyroute2  # noqa: F401 - imported ahead of the first query

    def _refresh_links_and_cdi(self) -> None:
        self._refresh_waiting = False  # a later change needs another refresh
        self._lookup.sysfs.reresolve_cached_links()
        if self._sources.cdi:
            self._read_cdi_files()

    def _read_cdi_files(self) -> None:
        cdi = self._lookup.cdi
        if cdi.refresh_specs():
            for problem in cdi.problems:
                log.warning("CDI file skipped", problem=problem)

    def _read_gpus(self) -> None:
        self._lookup.gpus = read_nvidia_gpus(self._root)

    def _find_network_devices(self, pod: PodSandbox, entry: PodDevices) -> None:
        if self._pods.get(pod.id) is not entry:
            return  # it was removed
        parents = list_interface_parents(pod.network_namespace)
        if isinstance(parents, str):
            entry.network = (), f"its network interfaces cannot be read: {parents}"
            return
        cards = tuple(
            card._replace(kind=NIC)
            for parent in parents
            for card in self._lookup.sysfs.by_bus(parent.bus, parent.name)
        )
        entry.network = cards, ""

    def _query_kubelet(self, pod: PodSandbox, entry: PodDevices) -> None:
        if self._pods.get(pod.id) is not entry:
            return
        answer = query_devices(self._kubelet_root, pod.namespace, pod.name, self._deadline)
        if isinstance(answer, str):
            entry.kubelet = {}, f"the kubelet does not report its devices: {answer}"
        else:
            resources = {device.kind for devices in answer.values() for device in devices}
            alternatives = [
                LocatedDevice(device.resource, device.id, device.numa_nodes)
                for device in (self._list_node_devices() if resources else ())
                if device.resource in resources
            ]
            for devices in (*answer.values(), alternatives):
                list(self._lookup.match_kubelet_devices(devices))  # caches them for the next lookup
            entry.kubelet = answer, ""
        time.sleep(MIN_KUBELET_QUERY_INTERVAL_S)  # nothing waits for this thread


# --- Network interfaces of a pod ---
#
# A network card that was moved into a pod is no longer in the host's sysfs, but the kernel still
# names its device (``IFLA_PARENT_DEV_NAME``, Linux 5.14). A thread enters the namespace and ends
# after the query: a longer life would keep the namespace, and its card, after the pod is gone.
# Nothing is forked. Within its thread pyroute2 is used as in any program.


class ParentDevice(NamedTuple):
    """Device of a network interface: its bus, and its name on that bus."""

    bus: str
    name: str


def list_interface_parents(
    namespace: str, seconds: float = INTERFACE_QUERY_TIMEOUT_S
) -> tuple[ParentDevice, ...] | str:
    """List the devices of interfaces in a network namespace; a sentence on failure. Blocks.

    ``namespace`` is a path such as ``/run/netns/cni-…`` or ``/proc/1234/ns/net``; the agent's own
    has none.
    """
    answer: list[tuple[ParentDevice, ...] | str] = []

    def list_interfaces() -> None:
        try:
            if os.stat(namespace).st_ino == os.stat("/proc/self/ns/net").st_ino:
                answer.append(())  # host network, whose cards belong to no pod
                return
            _enter_namespace(namespace)
            answer.append(_list_parent_devices())
        except OSError as error:
            answer.append(f"{namespace}: {error.strerror or error}")
        except Exception as error:  # pyroute2 has exceptions of many families
            answer.append(f"{namespace}: {error!r}")

    thread = threading.Thread(target=list_interfaces, name="network namespace", daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else f"{namespace}: the kernel did not answer within {seconds:g} s"


def _enter_namespace(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    # O_NONBLOCK: opening another file in its place, such as a FIFO, must not block.
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if libc.setns(descriptor, CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(descriptor)


def _list_parent_devices() -> tuple[ParentDevice, ...]:
    import pyroute2

    parents: list[ParentDevice] = []
    route: Any = pyroute2.IPRoute()
    with route:
        for link in route.get_links():
            bus = link.get_attr("IFLA_PARENT_DEV_BUS_NAME")
            name = link.get_attr("IFLA_PARENT_DEV_NAME")
            if bus and name and len(parents) < MAX_CONTAINER_DEVICES:
                parents.append(ParentDevice(bus, name))
    return tuple(parents)
