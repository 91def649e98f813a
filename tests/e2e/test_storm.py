"""Update storms: containerd's NRI layer must not lock up while the plugin pushes updates.

Up to NRI 0.12.0 a plugin's own UpdateContainers call and any event take two locks in opposite order
(containerd#13733); from then on no pod operation ever returns. Each call here has a limit, so a
locked runtime shows as a failed call.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.beds import cgroups
from tests.beds.containerd import Containerd
from tests.beds.cri import CRI, CRIError, QoS, Resources, burstable, guaranteed, poll
from tests.beds.plugin_process import StartPlugin
from tests.machines.cpus import LAST, MACHINE

pytestmark = pytest.mark.e2e

ROUNDS = 3  # of each sort of load, at least
SECONDS = 6.0  # plain UpdateContainers locks 2.1.9 within 3 s of such a load


class Storm:
    """Runs functions in threads, until time is over and each ran often enough, or one fails."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._errors: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self.rounds: dict[str, int] = {}

    def add(self, name: str, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                while not self._over() and not self._errors:
                    work()
                    self.rounds[name] += 1
            except BaseException as error:
                self._errors.append(error)

        self.rounds[name] = 0
        self._threads.append(threading.Thread(target=run, name=name, daemon=True))

    def _over(self) -> bool:
        # A slow machine takes longer for the same load.
        return time.monotonic() >= self._end and min(self.rounds.values()) >= ROUNDS

    def run(self) -> None:
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join(SECONDS + 60)
            assert not thread.is_alive(), f"{thread.name} hangs"
        if self._errors:
            raise self._errors[0]


@pytest.fixture
def impatient(containerd: Containerd) -> Iterator[Callable[[], CRI]]:
    """Makes clients that give a call up after 20 s: a locked runtime never answers."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(containerd.client(timeout_s=20))


def test_pushes_under_load_do_not_lock_the_runtime(
    cri: CRI, start_plugin: StartPlugin, impatient: Callable[[], CRI]
) -> None:
    reconcile = {"interval": "0.2s", "maxRepairs": 1_000_000}
    plugin = start_plugin({"reconcile": reconcile})
    pod = cri.run_pod("many", qos=QoS.BURSTABLE)
    shared = [cri.run(pod, f"c{i}", resources=burstable(0.1)) for i in range(6)]
    listed_pod = cri.run_pod("listed", annotations={"numa.kubernetes.io/numacpu": "1"})
    listed = cri.run(listed_pod)
    storm = Storm(SECONDS)

    def updates(client: CRI, number: int) -> Callable[[], None]:
        shares = 100 + number

        def work() -> None:
            nonlocal shares
            shares += 3
            for container in shared[number::3]:
                client.update(container, Resources(shares=shares))

        return work

    for number in range(3):
        storm.add(f"updates-{number}", updates(impatient(), number))

    churn = impatient()

    def owners() -> None:
        annotations = {"numa.kubernetes.io/cpus": "exclusive"}
        own_pod = churn.run_pod("owner", annotations=annotations)
        churn.run(own_pod, resources=guaranteed(1))
        churn.remove_pod(own_pod)

    storm.add("owners", owners)

    narrow = False

    def reloads() -> None:
        """The pool changes without any request to answer: what nobody asks for is pushed."""
        nonlocal narrow
        narrow = not narrow
        # With two CPUs, one listed and one owned, the pool has none to spare: only drift is pushed.
        narrower = narrow and len(MACHINE) > 2
        reserved = {"reservedCPUs": LAST, "strictReserved": True} if narrower else {}
        plugin.reload({"reconcile": reconcile, **reserved})
        time.sleep(0.4)

    storm.add("reloads", reloads)

    def drift() -> None:
        """Somebody else writes the cgroup file; the repair is pushed too."""
        cgroups.write_cpus(f"{listed_pod.cgroup_parent}/{listed.id}", str(MACHINE))
        time.sleep(0.1)

    storm.add("drift", drift)
    storm.run()

    # Still alive, and right: nobody has CPUs of a pool of long ago, a new pod is pinned from its
    # first line.
    plugin.reload({"reconcile": reconcile})
    for container in shared:
        cri.settles(container, MACHINE)
    poll(lambda: cri.allowed(listed).cpus == "1", "drift repaired")
    late = cri.pod("late", numacpu=LAST)
    assert cri.first_line(late).cpus == LAST
    assert plugin.ready()


def test_many_containers_take_one_answer(cri: CRI, start_plugin: StartPlugin) -> None:
    """Some hundred kilobytes of answers and pictures pass: frames of any size arrive whole."""
    plugin = start_plugin()
    pod = cri.run_pod("crowd", qos=QoS.BURSTABLE, annotations={"example.com/note": "x" * 60_000})
    crowd = [cri.run(pod, f"c{i}", resources=burstable(0.1)) for i in range(25)]
    owner_pod = cri.run_pod("owner", annotations={"numa.kubernetes.io/cpus": "exclusive"})
    owner = cri.run(owner_pod, resources=guaranteed(1))
    rest = MACHINE - cri.cpus(owner)
    assert [cri.cpus(each) for each in crowd] == [rest] * len(crowd)
    plugin.restart(kill=True)
    assert [cri.cpus(each) for each in crowd] == [rest] * len(crowd)
    thief = {"numa.kubernetes.io/numacpu": cri.allowed(owner).cpus}
    thief_pod = cri.run_pod("thief", annotations=thief)
    with pytest.raises(CRIError, match="default/thief"):
        cri.create(thief_pod)
