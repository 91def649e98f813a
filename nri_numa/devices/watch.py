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

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from nri_numa.devices import interfaces
from nri_numa.devices.lookup import GivenDevice, Lookup, Missed, hints, read_gpus
from nri_numa.devices.sysfs import Found
from nri_numa.machine.pci import NIC
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.workload import (
    MOST_DEVICES,
    NO_DEVICES,
    NO_MENTIONS,
    KnownDevices,
    Mentions,
    PodSandbox,
)
from nri_numa.observe.logs import get_logger

if TYPE_CHECKING:
    from nri_numa.config.sections import Devices as Sources

log = get_logger("devices")

MOST_PODS: Final = 4096
_MOST_WAITING: Final = 4096
_GPUS_AGAIN: Final = 60.0
_FILES_AGAIN: Final = 1.0
"""Seconds between two looks because of a name that is not known."""
_MOST_ANSWERS: Final = 256
"""Different containers whose devices are remembered; replicas have the same."""
_MOST_CHARACTERS: Final = 4096
"""Of what a message mentions; more is not remembered, since anybody can write it."""

_NOT_READ: Final = "its network interfaces were not looked at yet: no hint of them"
_NOT_SAID: Final = "the kubelet has not said yet what it gave: no hint of that"

DEADLINE: Final = 0.05
"""Seconds for an answer. It is known at once or not in time: the first container comes soon."""
PAUSE: Final = 0.02
"""Seconds between two questions: half of what the kubelet admits, for others ask as well."""
BUSY_PAUSE: Final = 0.1
"""Seconds after which a kubelet that was asked too often is asked once more."""


# --- what was found out about one pod ahead of its containers -------------------------------------
# Threads find it out, and the loop looks while a container waits. So whatever a thread tells is
# replaced as a whole, and the loop compares objects instead of what is in them.


Given = Mapping[str, tuple[GivenDevice, ...]]
"""What the kubelet gave, by container."""


class Findings(NamedTuple):
    """What was found out.

    Attributes:
        cards: the devices of its network interfaces.
        given: what the kubelet gave.
        network_note, kubelet_note: why something is not known.
    """

    cards: tuple[Found, ...] = ()
    given: Given = MappingProxyType({})
    network_note: str = ""
    kubelet_note: str = ""


NO_FINDINGS: Final = Findings()
"""Of nearly all pods: no device is known, and nothing is to be said. One look tells, since
`findings` makes it this very object."""


def findings(what: Findings) -> Findings:
    """The same; `NO_FINDINGS` itself where it says nothing."""
    return NO_FINDINGS if what == NO_FINDINGS else what


@dataclass(slots=True)
class PodDevices:
    """What is kept of one pod.

    Attributes:
        pod: its namespace and name.
        findings: what was found out; replaced as a whole, by threads that take turns.
    """

    pod: str
    findings: Findings


def given_devices(
    kubelet_root: str, namespace: str, pod: str, seconds: float = DEADLINE
) -> Mapping[str, tuple[GivenDevice, ...]] | str:
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
    found: dict[str, tuple[GivenDevice, ...]] = {}
    for one in answer:
        devices = [
            GivenDevice(devices.resource, id, frozenset(devices.by_id[id]))
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
        # What came of mentions and books before. Replaced by another one whenever something that
        # it depends on is read anew: what is still added to the former is lost.
        self._answers: dict[tuple[object, ...], KnownDevices] = {}
        self._pods: dict[str, PodDevices] = {}
        self._turn = threading.Lock()  # for threads that change findings
        self._room = threading.BoundedSemaphore(_MOST_WAITING)
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
        so_far = findings(Findings(network_note=_NOT_READ * looks, kubelet_note=_NOT_SAID * asks))
        entry = PodDevices(pod.full_name, so_far)
        self._pods[pod.id] = entry
        while len(self._pods) > MOST_PODS:
            del self._pods[next(iter(self._pods))]
        if not self._refresh_waiting:
            self._refresh_waiting = True
            if not self._do(self._local, self._refresh):
                self._refresh_waiting = False
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
        answers = self._answers  # before anything is looked at: see `__init__`
        entry = self._pods.get(pod_id)
        known = NO_FINDINGS if entry is None else entry.findings
        if mentions is NO_MENTIONS and known is NO_FINDINGS:
            return NO_DEVICES
        places = self._places()
        cards, given, network_note, kubelet_note = known
        own: tuple[GivenDevice, ...] = ()
        others: tuple[GivenDevice, ...] = ()
        if given:
            own = given.get(name, ())
            others = tuple([g for its, all in given.items() if its != name for g in all])
        said = mentions.nodes, tuple(mentions.variables.items()), mentions.cdi, mentions.unread
        key = places.bits, cards, own, others, network_note, kubelet_note, said
        found = answers.get(key)
        if found is None:
            missed = Missed()
            found = self._resolved(known, own, others, mentions, places, missed)
            # A name that is missed is to be looked for once more.
            if not missed.gpu and not missed.cdi and _characters(mentions) <= _MOST_CHARACTERS:
                if len(answers) >= _MOST_ANSWERS:
                    answers.clear()
                answers[key] = found
        for note in found.notes:
            pod = pod_id if entry is None else entry.pod
            log.debug("device without hint", pod=pod, container=name, why=note)
        return found

    def _resolved(
        self,
        known: Findings,
        own: tuple[GivenDevice, ...],
        others: tuple[GivenDevice, ...],
        mentions: Mentions,
        places: NUMASet,
        missed: Missed,
    ) -> KnownDevices:
        """The devices of a container, by all sources; a name that is missed is looked for."""
        lookup = self._lookup
        found = list(lookup.mentioned(mentions, missed))
        if missed.cdi and self._clock() - self._files_read > _FILES_AGAIN:
            self._files_read = self._clock()
            self._do(self._local, self._read_files)
        if missed.gpu and self._clock() - self._gpus_read > _GPUS_AGAIN:
            self._gpus_read = self._clock()
            self._do(self._local, self._read_gpus)
        found += known.cards
        found += lookup.given(own)
        notes = [*missed.notes, *filter(None, (known.network_note, known.kubelet_note))]
        mine = hints(found, places, notes)
        given = list(lookup.given(others))
        together = hints([*found, *given], places).requests if given else ()
        if not mine.requests and not mine.notes and not together:
            return NO_DEVICES
        return KnownDevices(mine.requests, together, mine.notes)

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

    def _read_all(self) -> None:
        if self._sources.nvidia:
            self._read_gpus()
        if self._sources.cdi:
            self._read_files()
        if self._sources.network:
            interfaces.load()

    def _refresh(self) -> None:
        self._refresh_waiting = False  # whatever changes from here on is another look's
        if self._lookup.sysfs.refresh():
            self._answers = {}
        if self._sources.cdi:
            self._read_files()

    def _read_files(self) -> None:
        cdi = self._lookup.cdi
        if cdi.refresh():
            self._answers = {}
            for problem in cdi.problems:
                log.warning("CDI file", problem=problem)

    def _read_gpus(self) -> None:
        self._lookup.gpus = read_gpus(self._root)
        self._answers = {}

    def _read_network(self, pod: PodSandbox, entry: PodDevices) -> None:
        if self._pods.get(pod.id) is not entry:
            return  # it is gone; those behind it are waiting
        parents = interfaces.parents_in(pod.network_namespace)
        cards: tuple[Found, ...] = ()
        note = ""
        if isinstance(parents, str):
            note = f"its network interfaces cannot be looked at: {parents}"
        else:
            cards = tuple(
                one._replace(kind=NIC)
                for parent in parents
                for one in self._lookup.sysfs.by_bus(parent.bus, parent.name)
            )
        with self._turn:
            entry.findings = findings(entry.findings._replace(cards=cards, network_note=note))

    def _ask(self, pod: PodSandbox, entry: PodDevices) -> None:
        if self._pods.get(pod.id) is not entry:
            return
        answer = given_devices(self._kubelet_root, pod.namespace, pod.name, self._deadline)
        given: Given = {}
        note = ""
        if isinstance(answer, str):
            note = f"the kubelet does not say what it gave: {answer}"
        else:
            given = answer
            for devices in answer.values():
                list(self._lookup.given(devices))  # the next lookup finds them remembered
        with self._turn:
            entry.findings = findings(entry.findings._replace(given=given, kubelet_note=note))
        time.sleep(PAUSE)  # of this thread, which nothing waits for


def _characters(mentions: Mentions) -> int:
    """How much a message says."""
    variables = mentions.variables
    return sum(map(len, (*variables, *variables.values(), *mentions.cdi)))
