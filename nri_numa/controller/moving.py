"""Everything of the controller that evicts, as configured: outputs, and what they must be told.

Each of the three has a switch of its own; what none of them needs is neither asked of the API
server nor imported.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from nri_numa import __version__
from nri_numa import config as configuration
from nri_numa.cluster.outputs import Output
from nri_numa.config import AgentConfig, parse_duration, slots_resource
from nri_numa.config.sections import Steal, Stuck
from nri_numa.controller.drain import DrainOutput, DrainRules
from nri_numa.controller.evictions import Ledger, Mover
from nri_numa.controller.following import Hears
from nri_numa.controller.metrics import ControllerMetrics
from nri_numa.controller.seats import Seat, seat
from nri_numa.controller.steal import StealOutput, StealRules

if TYPE_CHECKING:
    from nri_numa.controller.partly import Partly
    from nri_numa.controller.stuck import StuckOutput
    from nri_numa.scheduler.fleet import Fleet
    from nri_numa.scheduler.freshness import Freshness


class Moving:
    """What evicts.

    Attributes:
        outputs: to be asked for requests.
        hears: to be told of Nodes.
        drain: of drained NUMA nodes; None where that is off.
        steal: of NUMA nodes that the host takes away; None where that is off.
        stuck: of pods that are refused for ever; None where that is off.

    Args:
        config: checked.
        clock: seconds that only grow.
        jitter: from 0 to 1, another one each time.
    """

    def __init__(
        self, config: AgentConfig, *, clock: Callable[[], float], jitter: Callable[[], float]
    ) -> None:
        section, self._prefix = config.controller, config.annotation_prefix
        self._credentials = section.credentials
        self._clock, self._jitter = clock, jitter
        self._seats: dict[str, Seat] = {}
        self._fleet: Fleet | None = None
        self._fresh: Freshness | None = None
        self.outputs: list[Output] = []
        self.hears: list[Hears] = []
        self.drain: DrainOutput | None = None
        self.stuck: StuckOutput | None = None
        self.steal: StealOutput | None = None
        if section.drain.evict:
            self.drain = DrainOutput(
                self._prefix,
                DrainRules(
                    after=parse_duration(section.drain.after),
                    per_minute=section.drain.per_minute,
                    dry_run=section.drain.dry_run,
                ),
                clock(),
            )
            self.outputs.append(self.drain)
            self.hears.append(_Timed(self.drain, clock))
        self._partly_running = section.stuck.partly_running
        if section.stuck.evict:
            self.stuck = self._make_stuck(config, section.stuck)
            self.outputs.append(self.stuck)
            self.hears.append(_Left(self._seats))
        if section.steal.evict:
            self.steal = self._make_steal(section.steal)
            self.outputs.append(self.steal)
            self.hears.append(_Timed(self.steal, clock))

    def _make_stuck(self, config: AgentConfig, rules: Stuck) -> StuckOutput:
        from nri_numa.controller import stuck
        from nri_numa.scheduler.fleet import Fleet
        from nri_numa.scheduler.freshness import Freshness
        from nri_numa.scheduler.panel import Panel
        from nri_numa.scheduler.pods import Reader

        settings = configuration.settings(config)
        self._fleet, self._fresh = Fleet(), Freshness(self._prefix)
        return stuck.StuckOutput(
            Mover(
                output="stuck",
                prefix=self._prefix,
                reason=stuck.REASON,
                end="moved",
                dry_run=rules.dry_run,
            ),
            stuck.StuckRules(
                after=parse_duration(rules.after),
                per_minute=rules.per_minute,
                dry_run=rules.dry_run,
            ),
            Ledger(rules.per_workload),
            self._fleet,
            Panel(self._fleet, settings.strategy),
            Reader(settings, slots_resource(config), claims=config.dra.enabled).wish,
            self._seats,
            self._clock(),
        )

    def _make_steal(self, rules: Steal) -> StealOutput:
        return StealOutput(
            self._prefix,
            StealRules(
                below=rules.below,
                after=parse_duration(rules.after),
                at_most=rules.at_most,
                per_minute=rules.per_minute,
                dry_run=rules.dry_run,
            ),
            Ledger(rules.per_workload),
            self._clock(),
        )

    # --- what is there ----------------------------------------------------------------------------

    def node(self, node: Any) -> None:
        """A Node is there, whole."""
        if self.stuck is None:
            return
        name, spec = str(node.metadata.name), node.spec
        taints = [
            (t.key or "", t.value or "", t.effect or "") for t in (spec and spec.taints) or ()
        ]
        cordoned = bool(spec and spec.unschedulable)
        self._seats[name] = seat(name, node.metadata.labels, taints, unschedulable=cordoned)

    def work(self) -> list[Coroutine[Any, Any, None]]:
        """What must run beside: watches of the objects that are needed."""
        if self.stuck is None and self.steal is None:
            return []
        return [self._follow()]

    async def _follow(self) -> None:
        import asyncio

        from nri_numa.scheduler.follow import Follower
        from nri_numa.scheduler.kinds import RawEvent, RawPod, Topology
        from nri_numa.scheduler.lean import LeanConnection
        from nri_numa.scheduler.world import name_of, uid_of

        connection = LeanConnection(
            self._credentials,
            user_agent=f"nri-numa-controller/{__version__}",
            field_manager="nri-numa-controller",
        )
        followers = [
            Follower(
                connection,
                Topology,
                put=self._topology,
                remove=self._topology_gone,
                listed=self._topologies_listed,
                key=name_of,
                directory=self._credentials,
                jitter=self._jitter,
            )
        ]
        partly: Partly | None = None
        if (stuck := self.stuck) is not None and self._partly_running:
            from nri_numa.controller import partly as looking

            partly = looking.Partly(connection, stuck, self._clock)
            followers.append(
                Follower(
                    connection,
                    RawEvent,
                    put=partly.told,
                    remove=lambda document: None,
                    listed=lambda uids: None,
                    key=uid_of,
                    fields=dict(looking.FIELDS),
                    everywhere=True,
                    directory=self._credentials,
                    jitter=self._jitter,
                )
            )
        if stuck is not None:
            followers.append(
                Follower(
                    connection,
                    RawPod,
                    put=lambda document: stuck.pod(document, self._clock()),
                    remove=lambda document: stuck.pod_gone(uid_of(document)),
                    listed=stuck.pods_listed,
                    key=uid_of,
                    fields={"status.phase": "Pending"},
                    everywhere=True,
                    directory=self._credentials,
                    jitter=self._jitter,
                )
            )
        try:
            async with asyncio.TaskGroup() as group:
                for one in followers:
                    group.create_task(one.run())
                if partly is not None:
                    group.create_task(partly.run())
        finally:
            await connection.close()

    def _topology(self, document: Mapping[str, Any]) -> None:
        from nri_numa.scheduler.published import read
        from nri_numa.scheduler.world import name_of

        if self._fleet is not None and self._fresh is not None:
            name = name_of(document)
            self._fresh.seen(name, document, self._clock())
            self._fleet.put(name, read(document, self._prefix))
        if self.steal is not None:
            self.steal.topology(document)

    def _topology_gone(self, document: Mapping[str, Any]) -> None:
        from nri_numa.scheduler.world import name_of

        self._left(name_of(document))

    def _topologies_listed(self, names: frozenset[str]) -> None:
        known = self._fleet.names if self._fleet is not None else frozenset[str]()
        if self.steal is not None:
            known |= self.steal.nodes
        for name in known - names:
            self._left(name)

    def _left(self, name: str) -> None:
        if self._fleet is not None and self._fresh is not None:
            self._fresh.gone(name)
            self._fleet.remove(name)
        if self.steal is not None:
            self.steal.topology_gone(name)

    # --- time -------------------------------------------------------------------------------------

    def tick(self, now: float, wall: float) -> None:
        """Time has passed; once a second, whether this replica leads or not.

        Args:
            now: the time.
            wall: Unix time in seconds, for Events.
        """
        if self.drain is not None:
            self.drain.tell_time(wall)
        if self.stuck is not None and self._fleet is not None and self._fresh is not None:
            for name in self._fresh.stale(now):
                self._fleet.remove(name)  # nothing is known of it any more
            self.stuck.tick(now, wall)
        if self.steal is not None:
            self.steal.tick(now, wall)

    def measure(self, metrics: ControllerMetrics) -> None:
        """Set what is counted by looking."""
        if self.drain is not None:
            metrics.drained.set(self.drain.emptied())
            metrics.to_move.set(self.drain.waiting())
        if self.stuck is not None:
            metrics.stuck.set(self.stuck.waiting())
        if self.steal is not None:
            metrics.stolen.set(self.steal.poor())


class _Timed:
    """Tells who needs the time when a Node was seen.

    Args:
        output: is told.
        clock: seconds that only grow.
    """

    def __init__(self, output: DrainOutput | StealOutput, clock: Callable[[], float]) -> None:
        self._output, self._clock = output, clock

    def see(self, node: str, annotations: Mapping[str, str]) -> None:
        """A Node is there."""
        self._output.see(node, annotations, self._clock())

    def gone(self, node: str) -> None:
        """It is not there any more."""
        self._output.gone(node)


class _Left:
    """Forgets Nodes that are gone; those that are there come whole, by `Moving.node`.

    Args:
        seats: of the Nodes.
    """

    def __init__(self, seats: dict[str, Seat]) -> None:
        self._seats = seats

    def see(self, node: str, annotations: Mapping[str, str]) -> None:
        """A Node is there."""

    def gone(self, node: str) -> None:
        """It is not there any more."""
        self._seats.pop(node, None)
