"""Puts the sources together: the devices of a container, at the moment it is decided about.

What takes time is done ahead, in threads, while the pod's sandbox is being made: its network
namespace is looked into, the kubelet is asked what it gave, files of the Container Device Interface
are read when they changed, and what is remembered of sysfs is compared with it. A container that
comes before that is done is placed without, and its explanation says so. When a container is
decided about, nothing is read but a link of sysfs for each device that no container had before.

So a device that went since the last sandbox was made may still be a hint. It is a hint only: what a
container may use is not decided here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from nri_numa.devices.lookup import DeviceFinder, MissedHints, build_hints, read_nvidia_gpus
from nri_numa.devices.sysfs import LocatedDevice
from nri_numa.machine.pci import NIC
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.workload import (
    MAX_CONTAINER_DEVICES,
    Container,
    DeviceMentions,
    KnownContainerDevices,
    PodSandbox,
    PodTable,
)
from nri_numa.observe.logs import get_logger
from nri_numa.runtime import PodObserver

if TYPE_CHECKING:
    from nri_numa.config.sections import Devices as Sources

log = get_logger("devices")

MAX_REMEMBERED_PODS: Final = 4096
_GPU_REREAD_INTERVAL_S: Final = 60.0
_MIN_CDI_REREAD_INTERVAL_S: Final = 1.0
"""Seconds between two looks because of a name that is not known."""

_NETWORK_NOT_READ_TEXT: Final = "its network interfaces were not looked at yet: no hint of them"
_NO_KUBELET_ANSWER_TEXT: Final = "the kubelet has not said yet what it gave: no hint of that"

KUBELET_ANSWER_TIMEOUT_S: Final = 0.05
"""Seconds for an answer. It is known at once or not in time: the first container comes soon."""
MIN_KUBELET_QUERY_INTERVAL_S: Final = 0.02
"""Seconds between two questions: half of what the kubelet admits, for others ask as well."""
RATE_LIMIT_RETRY_S: Final = 0.1
"""Seconds after which a kubelet that was asked too often is asked once more."""


CLONE_NEWNET: Final = 0x40000000
INTERFACE_QUERY_TIMEOUT_S: Final = 1.0
"""Seconds for an answer of the kernel, which is a matter of milliseconds."""


DevicesByContainer = Mapping[str, tuple[LocatedDevice, ...]]
"""What the kubelet gave, by container; a device's kind is its resource."""


@dataclass(slots=True)
class PodDevices:
    """What was found out about one pod ahead of its containers; threads replace each half whole.

    Attributes:
        pod: its namespace and name.
        network: the devices of its network interfaces, and why they are not known.
        kubelet: what the kubelet gave, and why that is not known.
    """

    pod: str
    network: tuple[tuple[LocatedDevice, ...], str]
    kubelet: tuple[DevicesByContainer, str]


_UNKNOWN_POD: Final = PodDevices("", ((), ""), ({}, ""))


def query_devices(
    kubelet_root: str, namespace: str, pod: str, seconds: float = KUBELET_ANSWER_TIMEOUT_S
) -> DevicesByContainer | str:
    """The devices of a pod by container, or why they are not known. Blocks.

    Without a pod's name nothing is asked, but what takes time the first time is done.
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
    found: dict[str, tuple[LocatedDevice, ...]] = {}
    for one in answer:
        devices = [
            LocatedDevice(devices.resource, id, frozenset(devices.by_id[id]))
            for devices in one.devices
            for id in devices.allocated_ids
        ]
        if devices:
            found[one.container] = tuple(devices[: MAX_CONTAINER_DEVICES + 1])
    return found


class DeviceWatch(PodObserver):
    """Knows the devices of containers. Its methods are called in the loop and never wait."""

    def __init__(
        self,
        sources: Sources,
        *,
        root: str,
        kubelet_root: str,
        places: Callable[[], NUMASet],
        own_resource: str = "",
        clock: Callable[[], float] = time.monotonic,
        deadline: float = KUBELET_ANSWER_TIMEOUT_S,
    ) -> None:
        """Make a watch that knows nothing yet; `start` lets it look around.

        ``root`` holds ``sys/``, and ``proc/`` for NVIDIA's driver; ``places`` are the NUMA nodes
        that containers can be placed on; devices of ``own_resource`` are CPUs.
        """
        self._sources = sources
        self._root = root
        self._kubelet_root = kubelet_root
        self._places = places
        self._clock = clock
        self._deadline = deadline
        self._lookup = DeviceFinder(sources, root=root, own_resource=own_resource)
        self._pods: dict[str, PodDevices] = {}
        # One thread each, so that a kubelet that hangs holds up no look at network cards.
        self._local = ThreadPoolExecutor(1, thread_name_prefix="devices")
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="pod resources")
        self._gpus_read = self._files_read = float("-inf")
        self._refresh_waiting = False

    def start(self) -> None:
        """Look around, in threads: the driver's GPUs, the files, and libraries that load slowly."""
        self._submit_task(self._local, self._preload_sources)
        if self._sources.pod_resources:
            self._submit_task(self._asking, query_devices, self._kubelet_root, "", "")

    def close(self) -> None:
        """Ask nothing any more; what is under way ends by itself."""
        for pool in (self._local, self._asking):
            pool.shutdown(wait=False, cancel_futures=True)

    def wait_for_tasks(self) -> None:
        """Wait until everything that was begun is done."""
        for pool in (self._local, self._asking):
            pool.submit(lambda: None).result()

    # --- called by the link -----------------------------------------------------------------------

    def on_run_pod(self, pod: PodSandbox) -> None:
        """A pod is being made: find out ahead what its containers will have."""
        network = pod.network_namespace
        looks, asks = bool(self._sources.network and network), self._sources.pod_resources
        entry = PodDevices(
            pod.full_name,
            ((), _NETWORK_NOT_READ_TEXT * looks),
            ({}, _NO_KUBELET_ANSWER_TEXT * asks),
        )
        self._pods[pod.id] = entry
        while len(self._pods) > MAX_REMEMBERED_PODS:
            del self._pods[next(iter(self._pods))]
        if not self._refresh_waiting:
            self._refresh_waiting = True
            self._submit_task(self._local, self._refresh_links_and_cdi)
        if looks:
            self._submit_task(self._local, self._find_network_devices, pod, entry)
        if asks:
            self._submit_task(self._asking, self._query_kubelet, pod, entry)

    def on_synchronize(self, pods: PodTable, containers: Sequence[Container]) -> None:
        """There are these pods and no others; those that are new to us are looked at."""
        # In one step: the threads look here whether a pod is still there.
        self._pods = {i: self._pods[i] for i in pods.uids if i in self._pods}
        for pod_id in pods.uids:
            if pod_id not in self._pods:
                self.on_run_pod(pods[pod_id])

    def on_remove_pod(self, pod_id: str, uid: str) -> None:
        """A pod is removed."""
        self._pods.pop(pod_id, None)

    def complete(self, pod: PodSandbox, container: Container) -> tuple[PodSandbox, Container]:
        """The container with what is known of its devices."""
        known = self.known_container_devices(pod.id, container.name, container.mentions)
        return pod, known.apply_to(container)

    def known_container_devices(
        self, pod_id: str, name: str, mentions: DeviceMentions
    ) -> KnownContainerDevices:
        """What is known at this moment of the devices of the container ``name``."""
        entry = self._pods.get(pod_id, _UNKNOWN_POD)
        (cards, network_note), (given, kubelet_note) = entry.network, entry.kubelet
        lookup, missed = self._lookup, MissedHints()
        found = list(lookup.find_mentioned(mentions, missed))
        # A name that is missed is looked for once more.
        if missed.cdi and self._clock() - self._files_read > _MIN_CDI_REREAD_INTERVAL_S:
            self._files_read = self._clock()
            self._submit_task(self._local, self._read_cdi_files)
        if missed.gpu and self._clock() - self._gpus_read > _GPU_REREAD_INTERVAL_S:
            self._gpus_read = self._clock()
            self._submit_task(self._local, self._read_gpus)
        found += cards
        if name in given:
            found += lookup.match_kubelet_devices(given[name])
        notes = [*missed.notes, *filter(None, (network_note, kubelet_note))]
        places = self._places()
        mine = build_hints(found, places, notes)
        others = [one for its, all in given.items() if its != name for one in all]
        together = (
            build_hints([*found, *lookup.match_kubelet_devices(others)], places).requests
            if others
            else ()
        )
        for note in mine.notes:
            log.debug("device without hint", pod=entry.pod or pod_id, container=name, why=note)
        return KnownContainerDevices(mine.requests, together, mine.notes)

    # --- in threads -------------------------------------------------------------------------------

    def _submit_task(
        self, pool: ThreadPoolExecutor, function: Callable[..., object], *args: object
    ) -> None:
        """Let a thread do something."""

        def run_guarded() -> None:
            try:
                function(*args)
            except Exception as error:
                log.error("devices were not looked at", error=repr(error))

        with contextlib.suppress(RuntimeError):  # the agent ends
            pool.submit(run_guarded)

    def _preload_sources(self) -> None:
        if self._sources.nvidia:
            self._read_gpus()
        if self._sources.cdi:
            self._read_cdi_files()
        if self._sources.network:
            import pyroute2  # noqa: F401 - so that the first question is quick

    def _refresh_links_and_cdi(self) -> None:
        self._refresh_waiting = False  # whatever changes from here on is another look's
        self._lookup.sysfs.reresolve_cached_links()
        if self._sources.cdi:
            self._read_cdi_files()

    def _read_cdi_files(self) -> None:
        cdi = self._lookup.cdi
        if cdi.refresh_specs():
            for problem in cdi.problems:
                log.warning("CDI file", problem=problem)

    def _read_gpus(self) -> None:
        self._lookup.gpus = read_nvidia_gpus(self._root)

    def _find_network_devices(self, pod: PodSandbox, entry: PodDevices) -> None:
        if self._pods.get(pod.id) is not entry:
            return  # it is gone; those behind it are waiting
        parents = list_interface_parents(pod.network_namespace)
        if isinstance(parents, str):
            entry.network = (), f"its network interfaces cannot be looked at: {parents}"
            return
        cards = tuple(
            one._replace(kind=NIC)
            for parent in parents
            for one in self._lookup.sysfs.by_bus(parent.bus, parent.name)
        )
        entry.network = cards, ""

    def _query_kubelet(self, pod: PodSandbox, entry: PodDevices) -> None:
        if self._pods.get(pod.id) is not entry:
            return
        answer = query_devices(self._kubelet_root, pod.namespace, pod.name, self._deadline)
        if isinstance(answer, str):
            entry.kubelet = {}, f"the kubelet does not say what it gave: {answer}"
        else:
            for devices in answer.values():
                list(
                    self._lookup.match_kubelet_devices(devices)
                )  # the next lookup finds them remembered
            entry.kubelet = answer, ""
        time.sleep(MIN_KUBELET_QUERY_INTERVAL_S)  # of this thread, which nothing waits for


# --- Network interfaces of a pod ---
#
# A network card that was moved into a pod is not in the host's sysfs any more, but the kernel still
# names its device (``IFLA_PARENT_DEV_NAME``, Linux 5.14). The namespace is entered by a thread that
# ends with the question: a thread that came back from elsewhere is of no use, one that stayed would
# keep the namespace, and the card in it, after the pod has gone; and nothing is forked. Within its
# thread pyroute2 is used as in any program.


class ParentDevice(NamedTuple):
    """The device of a network interface: its bus, and its name there."""

    bus: str
    name: str


def list_interface_parents(
    namespace: str, seconds: float = INTERFACE_QUERY_TIMEOUT_S
) -> tuple[ParentDevice, ...] | str:
    """The interfaces with a device in a network namespace, or why they are not known. Blocks.

    ``namespace`` is a path such as ``/run/netns/cni-…`` or ``/proc/1234/ns/net``; our own gives
    none.
    """
    answer: list[tuple[ParentDevice, ...] | str] = []

    def list_interfaces() -> None:
        try:
            if os.stat(namespace).st_ino == os.stat("/proc/self/ns/net").st_ino:
                answer.append(())  # it is on the host's network, whose cards belong to no pod
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
    # Whatever is in the namespace's place must not make anybody wait.
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if libc.setns(descriptor, CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(descriptor)


def _list_parent_devices() -> tuple[ParentDevice, ...]:
    import pyroute2

    found: list[ParentDevice] = []
    route: Any = pyroute2.IPRoute()
    with route:
        for link in route.get_links():
            bus = link.get_attr("IFLA_PARENT_DEV_BUS_NAME")
            name = link.get_attr("IFLA_PARENT_DEV_NAME")
            if bus and name and len(found) < MAX_CONTAINER_DEVICES:
                found.append(ParentDevice(bus, name))
    return tuple(found)
