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
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from nri_numa.devices import interfaces
from nri_numa.devices.lookup import Lookup, Missed, hints, read_gpus
from nri_numa.devices.sysfs import Found
from nri_numa.machine.pci import NIC
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.workload import (
    MOST_DEVICES,
    KnownDevices,
    Mentions,
    PodSandbox,
)
from nri_numa.observe.logs import get_logger

if TYPE_CHECKING:
    from nri_numa.config.sections import Devices as Sources

log = get_logger("devices")

MOST_PODS: Final = 4096
_GPUS_AGAIN: Final = 60.0
_FILES_AGAIN: Final = 1.0
"""Seconds between two looks because of a name that is not known."""

_NOT_READ: Final = "its network interfaces were not looked at yet: no hint of them"
_NOT_SAID: Final = "the kubelet has not said yet what it gave: no hint of that"

DEADLINE: Final = 0.05
"""Seconds for an answer. It is known at once or not in time: the first container comes soon."""
PAUSE: Final = 0.02
"""Seconds between two questions: half of what the kubelet admits, for others ask as well."""
BUSY_PAUSE: Final = 0.1
"""Seconds after which a kubelet that was asked too often is asked once more."""


Given = Mapping[str, tuple[Found, ...]]
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
    network: tuple[tuple[Found, ...], str]
    kubelet: tuple[Given, str]


def given_devices(
    kubelet_root: str, namespace: str, pod: str, seconds: float = DEADLINE
) -> Given | str:
    """The devices of a pod by container, or why they are not known. Blocks.

    Without a pod's name nothing is asked, but what takes time the first time is done.
    """
    from nri_numa.kubelet import pod_resources

    if not pod:
        pod_resources.load()
        return {}
    answer = pod_resources.given_to(kubelet_root, namespace, pod, timeout_s=seconds)
    if isinstance(answer, str) and answer == pod_resources.TOO_OFTEN:
        time.sleep(BUSY_PAUSE)
        answer = pod_resources.given_to(kubelet_root, namespace, pod, timeout_s=seconds)
    if isinstance(answer, str):
        return answer
    found: dict[str, tuple[Found, ...]] = {}
    for one in answer:
        devices = [
            Found(devices.resource, id, frozenset(devices.by_id[id]))
            for devices in one.devices
            for id in devices.ids
        ]
        if devices:
            found[one.container] = tuple(devices[: MOST_DEVICES + 1])
    return found


class DeviceWatch:
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
        deadline: float = DEADLINE,
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
        self._lookup = Lookup(sources, root=root, own_resource=own_resource)
        self._pods: dict[str, PodDevices] = {}
        # One thread each, so that a kubelet that hangs holds up no look at network cards.
        self._local = ThreadPoolExecutor(1, thread_name_prefix="devices")
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="pod resources")
        self._gpus_read = self._files_read = float("-inf")
        self._refresh_waiting = False

    def start(self) -> None:
        """Look around, in threads: the driver's GPUs, the files, and libraries that load slowly."""
        self._do(self._local, self._read_all)
        if self._sources.pod_resources:
            self._do(self._asking, given_devices, self._kubelet_root, "", "")

    def close(self) -> None:
        """Ask nothing any more; what is under way ends by itself."""
        for pool in (self._local, self._asking):
            pool.shutdown(wait=False, cancel_futures=True)

    def settle(self) -> None:
        """Wait until everything that was begun is done."""
        for pool in (self._local, self._asking):
            pool.submit(lambda: None).result()

    # --- called by the link -----------------------------------------------------------------------

    def began(self, pod: PodSandbox) -> None:
        """A pod is being made: find out ahead what its containers will have."""
        network = pod.network_namespace
        looks, asks = bool(self._sources.network and network), self._sources.pod_resources
        entry = PodDevices(pod.full_name, ((), _NOT_READ * looks), ({}, _NOT_SAID * asks))
        self._pods[pod.id] = entry
        while len(self._pods) > MOST_PODS:
            del self._pods[next(iter(self._pods))]
        if not self._refresh_waiting:
            self._refresh_waiting = True
            self._do(self._local, self._refresh)
        if looks:
            self._do(self._local, self._read_network, pod, entry)
        if asks:
            self._do(self._asking, self._ask, pod, entry)

    def kept(self, pods: Sequence[PodSandbox]) -> None:
        """There are these pods and no others; those that are new to us are looked at."""
        # In one step: the threads look here whether a pod is still there.
        self._pods = {pod.id: self._pods[pod.id] for pod in pods if pod.id in self._pods}
        for pod in pods:
            if pod.id not in self._pods:
                self.began(pod)

    def removed(self, pod_id: str) -> None:
        """A pod is removed."""
        self._pods.pop(pod_id, None)

    def known(self, pod_id: str, name: str, mentions: Mentions) -> KnownDevices:
        """What is known at this moment of the devices of the container ``name``."""
        entry = self._pods.get(pod_id) or PodDevices(pod_id, ((), ""), ({}, ""))
        (cards, network_note), (given, kubelet_note) = entry.network, entry.kubelet
        lookup, missed = self._lookup, Missed()
        found = list(lookup.mentioned(mentions, missed))
        # A name that is missed is looked for once more.
        if missed.cdi and self._clock() - self._files_read > _FILES_AGAIN:
            self._files_read = self._clock()
            self._do(self._local, self._read_files)
        if missed.gpu and self._clock() - self._gpus_read > _GPUS_AGAIN:
            self._gpus_read = self._clock()
            self._do(self._local, self._read_gpus)
        found += cards
        found += lookup.given(given.get(name, ()))
        notes = [*missed.notes, *filter(None, (network_note, kubelet_note))]
        places = self._places()
        mine = hints(found, places, notes)
        others = [one for its, all in given.items() if its != name for one in all]
        together = hints([*found, *lookup.given(others)], places).requests if others else ()
        for note in mine.notes:
            log.debug("device without hint", pod=entry.pod, container=name, why=note)
        return KnownDevices(mine.requests, together, mine.notes)

    # --- in threads -------------------------------------------------------------------------------

    def _do(self, pool: ThreadPoolExecutor, function: Callable[..., object], *args: object) -> None:
        """Let a thread do something."""

        def guarded() -> None:
            try:
                function(*args)
            except Exception as error:
                log.error("devices were not looked at", error=repr(error))

        with contextlib.suppress(RuntimeError):  # the agent ends
            pool.submit(guarded)

    def _read_all(self) -> None:
        if self._sources.nvidia:
            self._read_gpus()
        if self._sources.cdi:
            self._read_files()
        if self._sources.network:
            interfaces.load()

    def _refresh(self) -> None:
        self._refresh_waiting = False  # whatever changes from here on is another look's
        self._lookup.sysfs.refresh()
        if self._sources.cdi:
            self._read_files()

    def _read_files(self) -> None:
        cdi = self._lookup.cdi
        if cdi.refresh():
            for problem in cdi.problems:
                log.warning("CDI file", problem=problem)

    def _read_gpus(self) -> None:
        self._lookup.gpus = read_gpus(self._root)

    def _read_network(self, pod: PodSandbox, entry: PodDevices) -> None:
        if self._pods.get(pod.id) is not entry:
            return  # it is gone; those behind it are waiting
        parents = interfaces.parents_in(pod.network_namespace)
        if isinstance(parents, str):
            entry.network = (), f"its network interfaces cannot be looked at: {parents}"
            return
        cards = tuple(
            one._replace(kind=NIC)
            for parent in parents
            for one in self._lookup.sysfs.by_bus(parent.bus, parent.name)
        )
        entry.network = cards, ""

    def _ask(self, pod: PodSandbox, entry: PodDevices) -> None:
        if self._pods.get(pod.id) is not entry:
            return
        answer = given_devices(self._kubelet_root, pod.namespace, pod.name, self._deadline)
        if isinstance(answer, str):
            entry.kubelet = {}, f"the kubelet does not say what it gave: {answer}"
        else:
            for devices in answer.values():
                list(self._lookup.given(devices))  # the next lookup finds them remembered
            entry.kubelet = answer, ""
        time.sleep(PAUSE)  # of this thread, which nothing waits for
