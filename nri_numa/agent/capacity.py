"""Capacity factors beside the configuration's: from outside, and measured from steal.

From outside: `nri-numa publish` writes a file, as another user, so
`nri_numa.model.offline_capacity` validates all of it. It can only lower the capacity for new
containers, down to nothing (docs/adr/0050-capacity-from-outside.md).

Measured: from the steal of hypervisors (docs/adr/0056-measured-where-it-runs.md).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final, NamedTuple

from msgspec.structs import replace

from nri_numa.agent.current_state import CurrentState
from nri_numa.agent.loop import Clock
from nri_numa.agent.reload import ApplySettings
from nri_numa.config.sections import StealCapacity, StealTimeMode
from nri_numa.config.values import parse_duration
from nri_numa.errors import TopologyError
from nri_numa.machine.cpu_wait import (
    CPUStealAndWaitTimes,
    SmoothedStealFactors,
    parse_steal_and_wait_times,
    read_frequency_by_node,
    runqueue_by_node,
    steal_by_node,
)
from nri_numa.machine.tree import open_tree
from nri_numa.model.machine import Topology
from nri_numa.model.offline_capacity import (
    DRAINED_ANNOTATION,
    MAX_CAPACITY_DOCUMENT_BYTES,
    MAX_CAPACITY_VALIDITY_S,
    OFFLINE_CAPACITY_ANNOTATION,
    BadCapacity,
    OfflineCapacity,
    format_id_list,
    parse_id_list,
    parse_json_object,
    parse_offline_capacity,
)
from nri_numa.model.settings import Settings
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import CPUWaitGauges, Metrics
from nri_numa.observe.reports import ReportOnce
from nri_numa.store.files import read_file

# --- From outside ---

log = get_logger("capacity")

FILE_CHECK_INTERVAL_S: Final = 1.0
"""Seconds between two reads of the file; one `open` of a missing file costs 5 µs."""


def _factors_text(factors: Mapping[int, float]) -> str:
    return " ".join(f"{i}:{f:g}" for i, f in sorted(factors.items())) or "all 1"


class CapacityMonitor(ABC):
    """Reads capacity factors periodically; they apply to new containers, nothing is moved.

    Attributes:
        factors: by NUMA node, those that are not 1; replaced as a whole.
    """

    factors: Mapping[int, float] = {}
    interval: float
    _in_force = True

    @abstractmethod
    def refresh_capacity(self, topology: Topology) -> bool:
        """Read the factors; True if settings differ now. Called in a thread."""

    async def run_monitor(self, current: CurrentState, apply_settings: ApplySettings) -> None:
        """Read and apply factors until cancelled."""
        while True:
            await self.apply_capacity(current, apply_settings)
            await asyncio.sleep(self.interval)

    async def apply_capacity(self, current: CurrentState, apply_settings: ApplySettings) -> None:
        """Read once and apply changes; settings that could not be applied are tried again."""
        if await asyncio.to_thread(self.refresh_capacity, current.machine.topology):
            self._in_force = False
        if not self._in_force:
            self._in_force = await apply_settings()


class ExternalCapacity(CapacityMonitor):
    """Capacity factors from a file; none if its path is empty."""

    interval = FILE_CHECK_INTERVAL_S

    def __init__(self, path: str, clock: Clock) -> None:
        self._path = path
        self._now = clock.time
        self._capacity = OfflineCapacity()
        self._drained: frozenset[int] = frozenset()
        self._said: frozenset[str] = frozenset()

    def refresh_capacity(self, topology: Topology) -> bool:
        """Read the file and drop expired factors; True if anything differs.

        A missing or invalid file changes nothing: earlier factors apply until they expire, and a
        drained NUMA node stays drained.
        """
        problems: set[str] = set()
        try:
            problems = self._apply_document(
                read_file(self._path, MAX_CAPACITY_DOCUMENT_BYTES, check_owner=False).decode()
            )
        except FileNotFoundError:
            pass
        except UnicodeDecodeError:
            problems = {"cannot be read: is not UTF-8"}
        except OSError as error:
            problems = {f"cannot be read: {error.strerror or error}"}
        time_s, capacity = self._now(), self._capacity
        if capacity.zones and capacity.expires_at > time_s + MAX_CAPACITY_VALIDITY_S:
            problems.add("until is more than 7 days away: it does not count")
        counts = time_s < capacity.expires_at <= time_s + MAX_CAPACITY_VALIDITY_S
        factors = {
            **({i: f for i, f in sorted(capacity.zones.items()) if f < 1} if counts else {}),
            **dict.fromkeys(sorted(self._drained), 0.0),
        }
        if absent := set(factors) - set(topology.numa_nodes):
            problems.add(
                f"this machine has no NUMA node {format_id_list(absent)}; it has "
                f"{topology.numa_ids}"
            )
            factors = {i: f for i, f in factors.items() if i not in absent}
        for problem in sorted(problems - self._said):
            log.warning("external capacity not applied", file=self._path, problem=problem)
        self._said = frozenset(problems)
        if factors == self.factors:
            return False
        log.info(
            "external capacity applied",
            capacity_factors=_factors_text(factors),
            source=capacity.source,
            drained_numa_nodes=format_id_list(self._drained),
        )
        self.factors = factors
        return True

    def _apply_document(self, text: str) -> set[str]:
        """Apply the valid part of a document; returns the problems of the rest."""
        try:
            document = parse_json_object(text)
        except BadCapacity as error:
            return {str(error)}
        problems: set[str] = set()
        if unknown := document.keys() - {OFFLINE_CAPACITY_ANNOTATION, DRAINED_ANNOTATION}:
            problems.add(f"unknown key {ascii(min(unknown))[:60]}")
        for key in (OFFLINE_CAPACITY_ANNOTATION, DRAINED_ANNOTATION):
            value = document.get(key)
            if not isinstance(value, str):
                problems.add(f"{key}: expected a text")
                continue
            try:
                if key == DRAINED_ANNOTATION:
                    self._drained = parse_id_list(value)
                else:
                    self._capacity = parse_offline_capacity(value)
            except BadCapacity as error:
                problems.add(f"{key}: {error}")
        return problems


# --- Measured ---

MIN_FACTOR_CHANGE: Final = 0.1
"""Difference between average and factor above which the factor changes."""
UNKNOWN_STEAL_EVENT: Final = "CPU steal not measured"
STEAL_SOURCE: Final = "steal"
"""Source of these factors in log lines."""


class StealWatch(CapacityMonitor):
    """Measures steal of each NUMA node, and derives capacity factors."""

    def __init__(self, config: StealCapacity, root: str, metrics: Metrics, clock: Clock) -> None:
        self.interval = parse_duration(config.interval)
        self._acts = config.mode is StealTimeMode.ENFORCE
        self._root = root
        self._metrics = metrics
        self._gauges: CPUWaitGauges | None = None
        self._clock = clock
        self._smoothed = SmoothedStealFactors(
            half_life=parse_duration(config.half_life),
            step=MIN_FACTOR_CHANGE,
            floor=config.min_factor,
        )
        self._last: tuple[float, Topology, CPUStealAndWaitTimes] | None = None
        self._problems = ReportOnce(log)

    def enforced_factors(self) -> Mapping[int, float]:
        """Return the measured factors that apply, by NUMA node; any thread may call this."""
        return self.factors if self._acts else {}

    def refresh_capacity(self, topology: Topology) -> bool:
        """Read once; True if settings differ. An unreadable file changes nothing."""
        time_s = self._clock.monotonic()
        try:
            tree = open_tree(self._root)
            times = parse_steal_and_wait_times(
                tree.read_file("proc/stat") or "", tree.read_file("proc/schedstat") or ""
            )
        except (TopologyError, OSError) as error:
            return self._report_unreadable(str(error))
        if not times.steal:
            return self._report_unreadable(f"{self._root.rstrip('/')}/proc/stat reports no steal")
        self._problems.report(UNKNOWN_STEAL_EVENT, "", "CPU steal measured again")
        last_reading, self._last = self._last, (time_s, topology, times)
        # CPUs that changed their NUMA node since would be counted on the new one.
        if last_reading is None or last_reading[1] is not topology or time_s <= last_reading[0]:
            return False
        seconds = time_s - last_reading[0]
        steal = steal_by_node(last_reading[2], times, topology)
        self._smoothed.retain_nodes(set(topology.numa_nodes))
        changed = self._smoothed.update_steal(steal, seconds)
        if changed:
            self.factors = dict(self._smoothed.factors)
            log.info(
                "capacity measured",
                capacity_factors=_factors_text(self.factors),
                cpu_steal=" ".join(f"{i}:{s:.3f}" for i, s in sorted(steal.items())),
                source=STEAL_SOURCE,
                effective=self._acts,
            )
        if self._gauges is None:
            self._gauges = CPUWaitGauges(self._metrics)
        self._gauges.update_gauges(
            {i: self.factors.get(i, 1.0) for i in steal},
            steal,
            runqueue_by_node(last_reading[2], times, topology, seconds),
            read_frequency_by_node(tree, topology),
        )
        return changed and self._acts

    def _report_unreadable(self, problem: str) -> bool:
        self._problems.report(UNKNOWN_STEAL_EVENT, problem, problem=problem)
        self._last = None
        return False


class CapacityFactors(NamedTuple):
    """All factors beside the configuration's."""

    outside: ExternalCapacity
    measured: StealWatch

    def apply_to_settings(self, settings: Settings, topology: Topology) -> Settings:
        """Return the settings with the lower of configured and measured factors.

        A factor from outside is multiplied instead. Any thread may call this.
        """
        outside, measured = self.outside.factors, self.measured.enforced_factors()
        factors = dict(settings.capacity_factor)
        for i in topology.numa_nodes:
            base = factors.get(i, 1.0)
            factor = base * outside[i] if i in outside else min(base, measured.get(i, base))
            if factor != base:
                factors[i] = factor
        return replace(settings, capacity_factor=factors)
