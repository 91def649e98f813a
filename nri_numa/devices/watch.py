"""Puts the sources together: the devices of a container, at the moment it is decided about.

What takes time is done ahead, in threads, while the pod's sandbox is being made: its network
namespace is looked into, the kubelet is asked what it gave, files of the Container Device Interface
are read when they changed. A container that comes before that is done is placed without, and its
explanation says so. When a container is decided about, a few links of sysfs are read, and only for
devices that its message names.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from nri_numa.devices import interfaces, nvidia
from nri_numa.devices.cdi import CDIDevice, CDIRegistry
from nri_numa.devices.found import Found, hints
from nri_numa.devices.given import DEADLINE, PAUSE, GivenDevice, given_devices
from nri_numa.devices.sysfs import SysfsDevices
from nri_numa.devices.variables import named_by
from nri_numa.engine.values.mentions import DeviceNode, Mentions
from nri_numa.engine.values.workload import Container, PodSandbox
from nri_numa.machine.cpuset import NUMASet
from nri_numa.machine.pci import GPU, NIC
from nri_numa.observe.logs import get_logger

log = get_logger("devices")

MOST_PODS: Final = 4096
_MOST_WAITING: Final = 4096
_GPUS_AGAIN: Final = 60.0
_FILES_AGAIN: Final = 1.0
"""Seconds between two looks because of a name that is not known."""


class Sources(Protocol):
    """Which sources are asked; `nri_numa.config.device_sources.Devices` is one."""

    @property
    def nodes(self) -> bool:
        """Device files."""
        ...

    @property
    def variables(self) -> bool:
        """``PCIDEVICE_*``."""
        ...

    @property
    def nvidia(self) -> bool:
        """NVIDIA's GPUs."""
        ...

    @property
    def cdi(self) -> bool:
        """The Container Device Interface."""
        ...

    @property
    def cdi_directories(self) -> tuple[str, ...]:
        """Where its files are."""
        ...

    @property
    def network(self) -> bool:
        """Network interfaces."""
        ...

    @property
    def pod_resources(self) -> bool:
        """The kubelet."""
        ...


@dataclass(slots=True)
class _Book:
    """What was found out ahead about one pod; each attribute is replaced as a whole by a thread.

    Attributes:
        cards: the devices of its network interfaces.
        given: what the kubelet gave, by container.
        network_note, kubelet_note: why something is not known.
    """

    cards: tuple[Found, ...] = ()
    given: Mapping[str, tuple[GivenDevice, ...]] = field(default_factory=dict)
    network_note: str = ""
    kubelet_note: str = ""


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

        Args:
            sources: which are asked.
            root: holds ``sys/``, and ``proc/`` for NVIDIA's driver.
            kubelet_root: the kubelet's directory.
            places: the NUMA nodes that containers can be placed on.
            own_resource: our own extended resource, whose devices are CPUs.
            clock: seconds of a clock that never jumps.
            deadline: seconds that the kubelet has for an answer.
        """
        self._sources = sources
        self._root = root
        self._kubelet_root = kubelet_root
        self._places = places
        self._own_resource = own_resource
        self._clock = clock
        self._deadline = deadline
        self._sysfs = SysfsDevices(root)
        self._gpus = nvidia.GPUs()
        self._cdi = CDIRegistry(sources.cdi_directories)
        self._books: dict[str, _Book] = {}
        self._room = threading.BoundedSemaphore(_MOST_WAITING)
        # One thread each, so that a kubelet that hangs keeps nobody from its network cards.
        self._local = ThreadPoolExecutor(1, thread_name_prefix="devices")
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="pod resources")
        self._gpus_read = self._files_read = float("-inf")
        self._files_waiting = False

    def start(self) -> None:
        """Look around, in threads: the driver's GPUs, the files, and libraries that load slowly."""
        self._do(self._local, self._look_around)
        if self._sources.pod_resources:
            self._do(self._asking, given_devices, self._kubelet_root, "", "")

    def close(self) -> None:
        """Ask nothing any more; what is under way ends by itself."""
        for pool in (self._local, self._asking):
            pool.shutdown(wait=False, cancel_futures=True)

    def settle(self) -> None:
        """Wait until everything that was begun is done; for whoever is in no hurry."""
        for pool in (self._local, self._asking):
            pool.submit(lambda: None).result()

    # --- told by the link -------------------------------------------------------------------------

    def began(self, pod: PodSandbox, network: str) -> None:
        """A pod is being made: find out ahead what will be asked for its containers.

        Args:
            pod: whose.
            network: path of its network namespace; empty on the host's network.
        """
        book = self._books[pod.id] = _Book()
        while len(self._books) > MOST_PODS:
            del self._books[next(iter(self._books))]
        if self._sources.network and network:
            book.network_note = "its network interfaces were not looked at yet: no hint of them"
            self._do(self._local, self._look_into, pod, book, network)
        if self._sources.cdi and not self._files_waiting:
            self._files_waiting = True
            if not self._do(self._local, self._look_at_files):
                self._files_waiting = False
        if self._sources.pod_resources:
            book.kubelet_note = "the kubelet has not said yet what it gave: no hint of that"
            self._do(self._asking, self._ask, pod, book)

    def kept(self, pods: Iterable[tuple[PodSandbox, str]]) -> None:
        """There are these pods and no others; those that are new to us are looked at."""
        now = list(pods)
        # In one step: the threads look here whether a pod is still there.
        self._books = {p.id: self._books[p.id] for p, _ in now if p.id in self._books}
        for pod, network in now:
            if pod.id not in self._books:
                self.began(pod, network)

    def gone(self, pod_id: str) -> None:
        """A pod is removed."""
        self._books.pop(pod_id, None)

    def seen(self, pod: PodSandbox, container: Container, mentions: Mentions) -> Container:
        """The container with its devices as hints, by what is known at this moment."""
        notes: list[str] = []
        found = list(self._mentioned(mentions, notes))
        book = self._books.get(pod.id)
        given: list[Found] = []
        if book is not None:
            found += book.cards
            notes += filter(None, (book.network_note, book.kubelet_note))
            found += self._given(book.given.get(container.name, ()))
            others = [g for name, all in book.given.items() if name != container.name for g in all]
            given = list(self._given(others))
        if not found and not notes and not given:
            return container
        places = self._places()
        own = hints(found, places, notes)
        for note in own.notes:
            log.debug("device without hint", pod=pod.full_name, container=container.name, why=note)
        together = hints([*found, *given], places).requests if given else ()
        return replace(
            container, devices=own.requests, pod_devices=together, device_notes=own.notes
        )

    # --- sources that cost nothing ----------------------------------------------------------------

    def _mentioned(self, mentions: Mentions, notes: list[str]) -> Iterator[Found]:
        sources = self._sources
        if mentions.unread:
            notes.append(f"{mentions.unread} more devices than are looked at: no hint of them")
        for node in mentions.nodes:
            yield from self._of_node(node)
        if mentions.variables:
            named = named_by(mentions.variables, pci=sources.variables, nvidia=sources.nvidia)
            notes += named.notes
            for address, variable in named.addresses:
                at = self._sysfs.by_pci(address)
                if not at:
                    notes.append(
                        f"variable {variable} names {address}, which is not there: no hint"
                    )
                yield from at
            for name in named.gpus:
                gpu = self._gpu(name)
                if gpu is None:
                    notes.append(f"GPU {name[:60]!r} is not known to the driver: no hint")
                else:
                    yield gpu
        if sources.cdi:
            for name in mentions.cdi:
                yield from self._of_cdi(name, notes)

    def _of_node(self, node: DeviceNode) -> Iterator[Found]:
        if node.major == nvidia.MAJOR and node.type in ("c", "u"):
            address = self._gpus.of_minor(node.minor) if self._sources.nvidia else None
            if address is not None:
                yield self._at(address)
        elif self._sources.nodes:
            yield from self._sysfs.by_number(node.type, node.major, node.minor)

    def _of_cdi(self, name: str, notes: list[str]) -> Iterator[Found]:
        device = self._cdi.devices.get(name)
        if device is None:
            notes.append(f"CDI device {name[:80]!r} stands in no file that was read: no hint of it")
            if self._clock() - self._files_read > _FILES_AGAIN:
                self._files_read = self._clock()
                self._do(self._local, self._look_at_files)
            device = CDIDevice()
        for node in device.nodes:
            yield from self._of_node(node)
        for interface in device.interfaces:
            yield from self._sysfs.by_interface(interface)

    def _gpu(self, name: str) -> Found | None:
        address = self._gpus.of_name(name)
        if address is not None:
            return self._at(address)
        if self._clock() - self._gpus_read > _GPUS_AGAIN:
            self._gpus_read = self._clock()
            self._do(self._local, self._read_gpus)
        return None

    def _at(self, address: str) -> Found:
        """A GPU of NVIDIA's at a PCI address, on no NUMA node where sysfs does not have it."""
        found = self._sysfs.by_pci(address)
        return found[0]._replace(kind=GPU) if found else Found(GPU, address)

    def _given(self, devices: Iterable[GivenDevice]) -> Iterator[Found]:
        """Devices of the kubelet's, as those that sysfs knows where their ids tell which."""
        for device in devices:
            if device.resource == self._own_resource:
                continue
            address = (
                self._gpus.of_name(device.id) if device.id.lower().startswith("gpu-") else None
            )
            if address is not None:
                yield self._at(address)
                continue
            known = self._sysfs.by_pci(device.id)
            if known:
                yield from known
            else:
                yield Found(device.resource, device.id, device.numa_nodes)

    # --- in threads -------------------------------------------------------------------------------

    def _do(self, pool: ThreadPoolExecutor, function: Callable[..., object], *args: object) -> bool:
        """Let a thread do something; says whether it will."""
        if not self._room.acquire(blocking=False):
            return False  # the pods that wait say so themselves: their notes stay

        def guarded() -> None:
            try:
                function(*args)
            except Exception as error:
                log.error("devices were not looked at", error=repr(error))
            finally:
                self._room.release()

        try:
            pool.submit(guarded)
        except RuntimeError:  # the agent ends
            self._room.release()
            return False
        return True

    def _look_around(self) -> None:
        if self._sources.nvidia:
            self._read_gpus()
        if self._sources.cdi:
            self._look_at_files()
        if self._sources.network:
            interfaces.load()

    def _look_at_files(self) -> None:
        self._files_waiting = False  # whatever changes from here on is another look's
        if self._cdi.look():
            for problem in self._cdi.problems:
                log.warning("CDI file", problem=problem)

    def _read_gpus(self) -> None:
        self._gpus = nvidia.read_gpus(self._root)

    def _look_into(self, pod: PodSandbox, book: _Book, network: str) -> None:
        if self._books.get(pod.id) is not book:
            return  # it is gone; those behind it are waiting
        parents = interfaces.parents_in(network)
        if isinstance(parents, str):
            book.network_note = f"its network interfaces cannot be looked at: {parents}"
            return
        book.cards = tuple(
            one._replace(kind=NIC)
            for parent in parents
            for one in self._sysfs.by_bus(parent.bus, parent.name)
        )
        book.network_note = ""

    def _ask(self, pod: PodSandbox, book: _Book) -> None:
        if self._books.get(pod.id) is not book:
            return
        answer = given_devices(self._kubelet_root, pod.namespace, pod.name, self._deadline)
        if isinstance(answer, str):
            book.kubelet_note = f"the kubelet does not say what it gave: {answer}"
        else:
            book.given, book.kubelet_note = answer, ""
        time.sleep(PAUSE)  # of this thread, which nobody waits for
