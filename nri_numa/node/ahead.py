"""The decisions that are likely to be asked for next, made while nobody waits.

For each shape of containers that came lately (`nri_numa.nri.shapes`) the next decision is made as
soon as the last change of the state has been answered; for the container of a pod whose sandbox
runs, as soon as that is known. One that is asked for meanwhile takes what is ready if nothing it
depends on has changed since (`nri_numa.engine.ahead.Moment`), and is decided as usual otherwise.
The journal is written before the answer, here as there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from nri_numa.engine.ahead import (
    Moment,
    Names,
    Prepared,
    Taken,
    decided,
    labels_read,
    names_read,
    prepare,
    signed_for,
    take,
)
from nri_numa.engine.decision import Machine, Reading
from nri_numa.engine.invariants import step_violations
from nri_numa.engine.values.workload import Container, KnownDevices, PodSandbox
from nri_numa.machine.cgroups import CgroupPlace
from nri_numa.node.agent import Agent
from nri_numa.nri.shapes import Foreseen, Reads, Shape, answer_bytes
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import Metrics
from nri_numa.store.documents import ReadyDocuments

log = get_logger("ahead")

SHAPES: Final = 8
"""Shapes for which decisions are made ahead; each costs a decision after every change."""
FORESEEN: Final = 8
"""Shapes of containers that were foreseen and have not come."""
UNUSED: Final = 24
"""Decisions in a row that nobody asked for, after which a shape is out of use.

On a quiet node that is two minutes: free memory is read every five seconds. Afterwards a replica is
foreseen when its sandbox runs.
"""
ONCE: Final = 4
"""The same for a shape that came once, or was foreseen: most of those never come again."""
LONGEST: Final = 0.002
"""Seconds a decision may take to be worth making ahead after each change; everyday ones take a
tenth of that. On a machine with 64 NUMA nodes the worst take ten times as long."""

Converted = Callable[[], tuple[PodSandbox, Container]]


@dataclass(frozen=True, slots=True)
class _Ready:
    """A decision, what is written of it, and its answer, around the signature."""

    prepared: Prepared
    documents: ReadyDocuments
    before: bytes
    after: bytes


@dataclass(slots=True)
class _Known:
    """One shape.

    Attributes:
        pod, container: that had it last.
        moment: for which it was decided; None before that.
        ready: None where each container has to be decided about by itself.
        left: decisions that may be made while none is taken.
    """

    pod: PodSandbox
    container: Container
    moment: Moment | None = None
    ready: _Ready | None = None
    left: int = ONCE


class DecidedAhead:
    """Keeps decisions ready, and gives them out.

    Args:
        agent: whose state they depend on.
        metrics: counted into.
        now: Unix time in seconds.
        reading: what the kernel has left; must answer from memory, at once.
        later: calls a function when the reply has left.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        agent: Agent,
        metrics: Metrics,
        *,
        now: Callable[[], float],
        reading: Callable[[], Reading | None],
        later: Callable[[Callable[[], object]], object],
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._agent = agent
        self._clock = clock
        self._metrics = metrics
        self._now = now
        self._reading = reading
        self._later = later
        self._count = metrics.decided_ahead()
        # The shape that was asked for last comes last.
        self._shapes: dict[Shape, _Known] = {}
        # Of pods whose sandboxes run; the one that was told last comes last.
        self._foreseen: dict[Shape, _Known] = {}
        # What was decided as usual since there was time.
        self._arrived: list[tuple[Shape, PodSandbox, Container]] = []
        self._scheduled = False
        self._reads: tuple[Machine | None, Reads] = (None, Reads(marker="", slots_key=""))
        agent.subscribe(self.look)

    def reads(self) -> Reads:
        """What makes a shape, with the settings in force."""
        machine = self._agent.machine
        if self._reads[0] is not machine:
            settings = machine.settings
            reads = Reads(
                marker=settings.prefix + "/",
                slots_key=machine.slots_key,
                labels=labels_read(settings),
                names=names_read(settings),
                memory=machine.memory_total,
            )
            self._reads = machine, reads
            self._shapes.clear()  # they were told apart by other settings
            self._foreseen.clear()
            self._arrived.clear()
        return self._reads[1]

    def answer(
        self, shape: Shape, whose: Callable[[], tuple[Names, CgroupPlace]], converted: Converted
    ) -> bytes | None:
        """Answer a request to create a container with a decision that is ready.

        Args:
            shape: of the request, as `reads` says.
            whose: tells whose it is, and where the cgroup will be.
            converted: makes the pod and the container of the request, once the reply has left.

        Returns:
            The answer, serialised; None where it has to be decided as usual. Then nothing has
            happened.
        """
        known, agent = self._shapes.get(shape), self._agent
        if known is None:
            known = self._foreseen.get(shape)
            if known is None:
                self._count.new.inc()
                return None
        agent.look_aside()
        moment = known.moment
        if moment is None or not moment.lasts(agent.machine, agent.state, self._reading()):
            self._count.late.inc()
            return None
        ready = known.ready
        if ready is None:
            self._count.unfit.inc()
            return None
        names, place = whose()
        prepared, now = ready.prepared, self._now()
        taken = take(prepared, agent.state, names, now) if agent.takes_ahead else None
        if taken is None:
            self._count.unfit.inc()
            return None
        agent.take_ahead(
            taken,
            ready.documents.of(names, now),
            place,
            prepared.started,
            partial(self._tell, prepared, taken, converted),
        )
        self._count.hit.inc()
        self._came(shape, known)
        signature = signed_for(prepared, names.container_id)
        return b"%b%b%b" % (ready.before, signature.encode(), ready.after)

    def decided(self, shape: Shape, pod: PodSandbox, container: Container) -> None:
        """A container was decided about as usual: the next of its shape may follow."""
        self._arrived.append((shape, pod, container))
        self.look()

    def _settle(self) -> None:
        """Note what came meanwhile."""
        for shape, pod, container in self._arrived:
            known = self._shapes.get(shape)
            if known is None:
                known = self._foreseen.get(shape)
            if known is None:
                known = _Known(pod, container)
                # What was foreseen of its pod was wrong.
                for other in [other for other in self._foreseen if other[0] == shape[0]]:
                    del self._foreseen[other]
            self._came(shape, known)
        self._arrived.clear()

    def _came(self, shape: Shape, known: _Known) -> None:
        """A container of this shape came: it is in use, and comes last."""
        if self._shapes.pop(shape, None) is not None:
            known.left = UNUSED
        else:
            known.left = ONCE
            self._foreseen.pop(shape, None)
            if len(self._shapes) >= SHAPES:
                del self._shapes[next(iter(self._shapes))]
        self._shapes[shape] = known

    def began(
        self,
        foresee: Callable[[Reads], Foreseen | None],
        devices: Callable[[str], KnownDevices | None] | None = None,
    ) -> None:
        """A sandbox runs, and its containers are to come: see to it when no request waits.

        Args:
            foresee: tells what is likely to come.
            devices: tells which devices a container of this name will have, None where that is
                not known; None where nobody looks for any.
        """
        self._later(partial(self._foresee, foresee, devices))

    def _foresee(
        self,
        foresee: Callable[[Reads], Foreseen | None],
        devices: Callable[[str], KnownDevices | None] | None,
    ) -> None:
        found = foresee(self.reads())
        if found is None:
            return
        # Where pods like this one had a container before, the next one is like that.
        like = [one for one in self._shapes.items() if one[0][0] == found.shape[0]]
        if devices is None:
            for _, known in like:
                known.left = max(known.left, ONCE)
            if not like:
                self._expect(found.shape, found.pod, found.container)
        elif like:
            self._like(like, devices)
        elif (its := devices(found.container.name)) is not None:
            self._expect((*found.shape[:-1], its.key), found.pod, its.on(found.container))
        self.look()

    def _like(
        self,
        like: list[tuple[Shape, _Known]],
        devices: Callable[[str], KnownDevices | None],
    ) -> None:
        """Expect a container like one of these, with the devices that are known of it."""
        expected: dict[Shape, tuple[PodSandbox, Container]] = {}
        for shape, known in like:
            its = devices(known.container.name)
            # Where nothing is known of it, it may be told with the container, as it was then.
            if its is None or its.key in ("", shape[-1]):
                known.left = max(known.left, ONCE)
            else:
                expected[*shape[:-1], its.key] = known.pod, its.on(known.container)
        for shape, (pod, container) in expected.items():
            if shape not in self._shapes:
                self._expect(shape, pod, container)

    def _expect(self, shape: Shape, pod: PodSandbox, container: Container) -> None:
        """Have a decision ready for a container that has not come yet."""
        known = self._foreseen.pop(shape, None)
        if known is None:
            if len(self._foreseen) >= FORESEEN:
                del self._foreseen[next(iter(self._foreseen))]
            known = _Known(pod, container)
        known.left = ONCE
        self._foreseen[shape] = known

    def look(self) -> None:
        """Something may have changed: see to it when no request waits."""
        if not self._scheduled and (self._arrived or self._shapes or self._foreseen):
            self._scheduled = True
            self._later(self._work)

    def _work(self) -> None:
        """Make one decision that is not ready, and leave the next ones to another round."""
        self._scheduled = False
        agent = self._agent
        self.reads()
        self._settle()
        reading = self._reading()
        # Those whose pods wait for them go first.
        done = False
        for shapes in (self._foreseen, self._shapes):
            for shape, known in reversed(tuple(shapes.items())):
                moment = known.moment
                if moment is not None and moment.lasts(agent.machine, agent.state, reading):
                    continue
                if done:
                    self.look()
                    return
                if known.left:
                    known.left -= 1
                    self._decide(shape, known, reading)
                    done = True
                else:
                    del shapes[shape]

    def _decide(self, shape: Shape, known: _Known, reading: Reading | None) -> None:
        moment = Moment(machine=self._agent.machine, state=self._agent.state, reading=reading)
        known.moment, known.ready = moment, None
        started = self._clock()
        try:
            known.ready = _ready(moment, known, named=shape[1] is not None)
        except Exception:
            # The request itself will meet the same mistake, and is answered as configured.
            self._metrics.internal_errors.inc()
            log.exception("not decided ahead", pod=known.pod.full_name)
        if self._clock() - started > LONGEST:
            known.left = 0  # made again only for one that is taken, or asked for

    def _tell(self, prepared: Prepared, taken: Taken, converted: Converted) -> None:
        decision = decided(prepared, taken, *converted())
        self._agent.tell_late(decision, prepared.moment.machine.topology)


def _ready(moment: Moment, known: _Known, *, named: bool) -> _Ready | None:
    prepared = prepare(moment, known.pod, known.container, named=named)
    if prepared is None:
        return None
    decision, machine = prepared.decision, moment.machine
    if step_violations(moment.state, decision.state, machine.topology, machine.settings):
        return None  # said of the container that it happens to
    documents = ReadyDocuments(decision.allocation, prepared.record)
    answer = answer_bytes(decision.adjustment, decision.updates)
    mark = signed_for(prepared, decision.allocation.container_id).encode()
    if not mark:
        return _Ready(prepared, documents, answer, b"")
    before, found, after = answer.partition(mark)
    # Signatures of all containers are of one length, so nothing else of the answer changes.
    return _Ready(prepared, documents, before, after) if found and mark not in after else None
