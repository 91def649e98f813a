"""The options of a container: one declaration of each key.

A key is a field of `PlacementOptions`: the field's type says which values there are, its default
what holds without the key, and the `Option` beside it the rest. Annotations, rules, defaults,
permissions, explanations, claims, allocations, the schema and the reference go through `TABLE`;
only what a value does stands elsewhere. Every key may be set for a pod, for a container, by a rule
and by the defaults, and be named by a permission.

Readers look `TABLE` up when they use it, so another table can stand in its place.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from operator import attrgetter
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, get_args

import msgspec
from msgspec.structs import replace

from nri_numa.model.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet
from nri_numa.model.workload import (
    ALWAYS_BUSY_SCHEDULE,
    BUILT_IN_PERMISSION_NAME,
    NEVER_BUSY_SCHEDULE,
    SMT,
    Bind,
    BusySchedule,
    CPUMode,
    DeviceAlignmentMode,
    Distribution,
    MemoryPolicy,
    OnFailure,
    Policy,
    Scope,
)

_DAY_MINUTES = 1440
_LOAD_INTERVAL_PATTERN = re.compile(r"([0-9]{2}):([0-5][0-9])-([0-9]{2}):([0-5][0-9])", re.ASCII)


def parse_load(text: str) -> BusySchedule:
    """Read ``high``, ``low``, or peak hours: ``09:00-18:00``, ``22:00-06:00,12:00-13:00``.

    Hours are wall-clock times of the node. An interval that ends before it starts goes on past
    midnight; ``24:00`` may end one. Overlapping and touching intervals are joined, so equal hours
    give equal values however they were written. Anything else is a ValueError.
    """
    if text == "high":
        return ALWAYS_BUSY_SCHEDULE
    if text == "low":
        return NEVER_BUSY_SCHEDULE
    intervals: list[tuple[int, int]] = []
    for item in text.split(","):
        start, end = _parse_load_interval(item)
        if start < end:
            intervals.append((start, end))
        else:
            intervals += [(start, _DAY_MINUTES), (0, end)] if end else [(start, _DAY_MINUTES)]
    return BusySchedule(_merge_intervals(intervals))


def format_load(load: BusySchedule) -> str:
    """Write a load so that `parse_load` reads the same value back."""
    if load == ALWAYS_BUSY_SCHEDULE:
        return "high"
    if load == NEVER_BUSY_SCHEDULE:
        return "low"
    return ",".join(
        f"{a // 60:02}:{a % 60:02}-{b // 60:02}:{b % 60:02}" for a, b in load.busy_intervals
    )


def _parse_load_interval(item: str) -> tuple[int, int]:
    match = _LOAD_INTERVAL_PATTERN.fullmatch(item)
    h1, m1, h2, m2 = (0, 0, 0, 0) if match is None else map(int, match.groups())
    start_minute, end_minute = h1 * 60 + m1, h2 * 60 + m2
    if start_minute >= _DAY_MINUTES or end_minute > _DAY_MINUTES or start_minute == end_minute:
        raise ValueError(f"load {item!r} is no interval of the day")
    return start_minute, end_minute


def _merge_intervals(intervals: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return tuple(joined)


class HeldCPUSlots(msgspec.Struct, frozen=True, kw_only=True):
    """Exclusive CPUs that the scheduler counted; see `nri_numa.engine.request.demand`.

    Attributes:
        by_node: count on each NUMA node; empty if the kubelet has chosen none.
    """

    ids: str
    count: int
    by_node: Mapping[int, int] = msgspec.field(default_factory=dict)


class SourceKind(StrEnum):
    """Kind of source that set a key of a container's placement."""

    ANNOTATION = "annotation"
    RULE = "rule"
    DEFAULT = "default"
    SLOTS = "slots"
    CLAIM = "claim"
    STATIC_CPUS = "static-cpus"
    KUBELET_GRANT = "kubelet-grant"


class OptionSource(msgspec.Struct, frozen=True):
    """Source of a key's value.

    Attributes:
        name: the annotation, the rule's number, or the slots or claim that the container holds.
        is_for_container: True if the annotation names the container, not its whole pod.
    """

    kind: SourceKind
    name: str = ""
    is_for_container: bool = False

    @property
    def text(self) -> str:
        """``annotation numa.kubernetes.io/policy``, ``rule 2``, ``default``."""
        if self.kind in (SourceKind.ANNOTATION, SourceKind.RULE):
            return f"{self.kind} {self.name}"
        return self.name or self.kind.value


DEFAULT_SOURCE: Final = OptionSource(SourceKind.DEFAULT)
KUBELET_GRANT_SOURCE: Final = OptionSource(SourceKind.KUBELET_GRANT, "the kubelet's grant")
STATIC_CPUS_SETTING_AS_SOURCE: Final = OptionSource(SourceKind.STATIC_CPUS, "staticCPUs")


class Retention(StrEnum):
    """Condition on which an allocation keeps an option's value, in its field of the same name."""

    NEVER = "never"
    ALWAYS = "always"
    EXCLUSIVE = "exclusive"
    """With exclusive CPUs."""
    COMPUTED = "computed"
    """If its CPUs were computed, not listed."""
    SET = "set"
    """If the runtime was asked to set it."""


class Option(msgspec.Struct, frozen=True):
    """One key: all that does not follow from its field.

    Attributes:
        summary: one line for the reference and the schema.
        meanings: by value, what an explanation says of it; the empty text stands for all others.
        values_text, without_text: for the reference, what cannot be listed.
        expected: the end of the sentence about a bad value, unless it is one of `value_by_text`.
        list_of: the value is a kernel list of these, and is kept as it was written.
        claim_obstacle: why a claim cannot set it; empty if it is one of a claim's parameters.
        key, field, value_by_text: of the field.
    """

    summary: str
    meanings: Mapping[str, str] = msgspec.field(default_factory=dict)
    values_text: str = ""
    without_text: str = ""
    expected: str = ""
    list_of: type[CPUSet | NUMASet] | None = None
    parse: Callable[[str], object] = str
    format: Callable[[Any], str] = str
    claim_obstacle: str = ""
    retention: Retention = Retention.NEVER
    key: str = ""
    field: str = ""
    value_by_text: Mapping[str, object] = msgspec.field(default_factory=dict)

    def with_field(self, info: msgspec.structs.FieldInfo) -> Option:
        """The same with what the field says: its name, and the values of its type."""
        hint = get_args(info.type)[0]
        kind = (*get_args(hint), hint)[0]  # without None, which comes last
        declared = replace(self, key=info.encode_name, field=info.name)
        if kind is bool:
            value_by_text: Mapping[str, object] = {"true": True, "false": False}
        elif issubclass(kind, StrEnum):
            value_by_text = {str(value): value for value in kind}
        else:
            return declared
        text_by_value = {value: text for text, value in value_by_text.items()}
        return replace(
            declared,
            value_by_text=value_by_text,
            parse=value_by_text.__getitem__,
            format=text_by_value.__getitem__,
        )


class PlacementOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one container, resolved from annotations, rules and defaults.

    First the keys, then what is known about the request besides.

    Attributes:
        numacpu, numamem: kernel lists as they were written, checked for form only.
        explicit_keys: keys that came from an annotation or a rule, not from the defaults.
        sources: by key, where its value came from; without keys that nobody set.
        list_is_pods: ``numacpu`` is given for its whole pod, not for this container.
        slots: what the kubelet gave it of the extended resource; None where that is nothing.
        scheduled_nodes: NUMA nodes that the scheduler held for it; see
            `nri_numa.engine.request.annotations`.
    """

    numacpu: Annotated[str | None, Option(
        "CPUs by number",
        values_text="kernel list of CPUs: `1,23`, `0-3,8`",
        without_text="CPUs are computed, or left alone",
        expected="a list of CPUs in the kernel's format such as 0-3,8",
        list_of=CPUSet,
        claim_obstacle="the scheduler counted CPUs, and the agent chooses which",
    )] = None  # fmt: skip
    numamem: Annotated[str | None, Option(
        "memory nodes by number",
        values_text="kernel list of NUMA nodes: `1`, `0-1`",
        without_text="memory nodes are computed, or left alone",
        expected="a list of NUMA nodes in the kernel's format such as 0-1",
        list_of=NUMASet,
    )] = None  # fmt: skip
    bind: Annotated[Bind, Option("what a computed assignment may pin", {
        "none": "nothing is pinned",
        "cpu": "only its CPUs are pinned",
        "cpu+mem": "its CPUs and its memory are pinned",
    })] = Bind.CPU_MEM  # fmt: skip
    policy: Annotated[Policy, Option("alignment, as the kubelet's Topology Manager", {
        "none": "on any NUMA nodes",
        "best-effort": "on as few NUMA nodes as possible",
        "restricted": "on no more NUMA nodes than an empty machine would need",
        "single-numa-node": "on one NUMA node",
    })] = Policy.NONE  # fmt: skip
    scope: Annotated[Scope, Option(
        "what is aligned together", {
            "container": "each container of the pod is placed by itself",
            "pod": "all containers of the pod go to the same NUMA nodes",
        },
        claim_obstacle="each request of a claim is for one container",
    )] = Scope.CONTAINER  # fmt: skip
    cpus: Annotated[CPUMode | None, Option(
        "shared or exclusive CPUs",
        {"shared": "it shares CPUs with others", "exclusive": "it requests exclusive CPUs"},
        without_text="as the kubelet's static policy would",
        claim_obstacle="the CPUs of a claim are exclusive",
    )] = None  # fmt: skip
    smt: Annotated[SMT, Option(
        "how exclusive CPUs use the threads of a core", {
            "any": "any CPUs",
            "spread": "no two of its CPUs on one core while other cores are free",
            "full-core": "whole cores only",
            "isolate": "one CPU of each core, and the core's other CPUs stay idle",
            "pair": "beside containers that are busy when it is not",
        },
        retention=Retention.EXCLUSIVE,
    )] = SMT.SPREAD  # fmt: skip
    load: Annotated[BusySchedule | None, Option(
        "how busy the container is, and when",
        {"high": "it is busy all day", "low": "it is never busy", "": "when it is busy"},
        values_text="`high`, `low`, peak hours: `09:00-18:00`",
        without_text="unknown",
        expected="high, low, or daily peak hours between 00:00 and 24:00 such as 09:00-18:00, "
        "several separated by commas",
        parse=parse_load,
        format=format_load,
        retention=Retention.ALWAYS,
    )] = None  # fmt: skip
    on_failure: Annotated[OnFailure | None, Option(
        "what happens if the request cannot be met", {
            "reject": "if it does not fit, it is rejected",
            "best-effort": "if it does not fit, more NUMA nodes are allowed",
            "unpinned": "if it does not fit, it starts unpinned",
        },
        without_text="depends on the policy",
        claim_obstacle="a container has the CPUs of its claim, or waits for them",
    )] = msgspec.field(name="on-failure", default=None)  # fmt: skip
    devices: Annotated[DeviceAlignmentMode, Option("whether the NUMA nodes of its devices count", {
        "align": "the NUMA nodes of its devices count",
        "ignore": "its devices are ignored",
    })] = DeviceAlignmentMode.ALIGN  # fmt: skip
    distribute: Annotated[Distribution | None, Option(
        "how exclusive CPUs are distributed over its NUMA nodes", {
            "devices": "each NUMA node gives CPUs in proportion to its devices",
            "none": "as few NUMA nodes as possible give its CPUs",
        },
        without_text="`devices`, if it has devices on several NUMA nodes",
        claim_obstacle="the CPUs of a claim are of one NUMA node",
    )] = None  # fmt: skip
    mempolicy: Annotated[MemoryPolicy, Option(
        "the kernel's memory policy", {
            "default": "the kernel's own memory policy",
            "local": "memory near the CPU that asks for it",
            "preferred": "memory of one NUMA node first",
            "preferred-many": "memory of its NUMA nodes first",
            "bind": "memory of its NUMA nodes only",
            "interleave": "its memory in turn from each of its NUMA nodes",
            "weighted-interleave": "its memory in turn from its NUMA nodes, the faster more",
        },
        retention=Retention.SET,
    )] = MemoryPolicy.DEFAULT  # fmt: skip
    movable: Annotated[bool, Option(
        "whether it may move while it runs", {
            "true": "it may be moved to make room for others",
            "false": "it is not moved",
        },
        claim_obstacle="the CPUs of a claim are of one NUMA node",
        retention=Retention.COMPUTED,
    )] = False  # fmt: skip

    explicit_keys: frozenset[str] = frozenset()
    sources: Mapping[str, OptionSource] = msgspec.field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    unrequested_cpus: bool = False
    reserved_cpus: bool = False
    ignores_denied: bool = False
    permission: str = BUILT_IN_PERMISSION_NAME
    listed_cpus: CPUSet = NO_CPUS
    listed_mems: NUMASet = NO_NUMA_NODES
    list_is_pods: bool = False
    slots: HeldCPUSlots | None = None
    scheduled_nodes: NUMASet = NO_NUMA_NODES

    def source_text(self, key: str) -> str:
        """Source of a key's value, for people."""
        return self.sources.get(key, DEFAULT_SOURCE).text

    def is_from_annotation(self, key: str) -> bool:
        """True if a key's value comes from an annotation, not from the operator."""
        return self.sources.get(key, DEFAULT_SOURCE).kind is SourceKind.ANNOTATION

    @property
    def requires_whole_cores(self) -> bool:
        """True if it is set that CPUs are whole cores, which shared CPUs cannot guarantee."""
        return "smt" in self.explicit_keys and self.smt in (SMT.FULL_CORE, SMT.ISOLATE)

    @property
    def effective_policy(self) -> Policy:
        """Policy to align by: best-effort if none is set, except for exclusive CPUs."""
        if self.policy is Policy.NONE and self.cpus is not CPUMode.EXCLUSIVE:
            return Policy.BEST_EFFORT
        return self.policy

    @property
    def effective_on_failure(self) -> OnFailure:
        """Action if the container cannot be placed, also if it is not set."""
        is_listed = self.numacpu is not None or self.numamem is not None
        is_mild = self.policy is Policy.BEST_EFFORT and not is_listed
        return self.on_failure or (OnFailure.BEST_EFFORT if is_mild else OnFailure.REJECT)

    @property
    def is_unpinned(self) -> bool:
        """True if no option requests CPUs or memory, so the container is not pinned."""
        if self.numacpu is not None or self.numamem is not None:
            return False
        if self.bind is Bind.NONE:
            return True
        return (
            self.policy is Policy.NONE
            and self.cpus is not CPUMode.EXCLUSIVE
            and "bind" not in self.explicit_keys
            and not self.requires_whole_cores
        )


# --- contradictions ---------------------------------------------------------------------------


class Contradiction(NamedTuple):
    """``values`` of a key do not go with ``other_values`` of another; None stands for any value."""

    values: Collection[str] | None
    other_key: str
    other_values: Collection[str] | None
    explanation: str


_BIND_NONE_TEXT = "bind: none changes nothing"
_BIND_CPU_TEXT = "bind: cpu does not pin memory"
_NUMACPU_FIXED_TEXT = "the CPUs of numacpu are used as listed"
_NUMACPU_NODES_FIXED_TEXT = f"{_NUMACPU_FIXED_TEXT}, without other NUMA nodes"
_NUMAMEM_FIXED_TEXT = "the NUMA nodes of numamem are used as listed"

# Promises that cannot both be kept. A preference without effect (smt: spread or pair beside
# shared CPUs, scope without a policy, load without pair) is no contradiction.
_OPTION_CONTRADICTIONS: Final = (
    ("numacpu", None, "bind", {"none"}, _BIND_NONE_TEXT),
    ("numamem", None, "bind", {"none"}, _BIND_NONE_TEXT),
    ("policy", set(Policy) - {"none"}, "bind", {"none"}, _BIND_NONE_TEXT),
    ("cpus", {"exclusive"}, "bind", {"none"}, _BIND_NONE_TEXT),
    ("smt", {"full-core", "isolate"}, "bind", {"none"}, _BIND_NONE_TEXT),
    ("numacpu", None, "policy", set(Policy) - {"none"}, _NUMACPU_FIXED_TEXT),
    ("numacpu", None, "smt", {"full-core", "isolate"}, _NUMACPU_FIXED_TEXT),
    ("numacpu", None, "on-failure", {"best-effort"}, _NUMACPU_NODES_FIXED_TEXT),
    ("numamem", None, "on-failure", {"best-effort"}, _NUMAMEM_FIXED_TEXT),
    ("mempolicy", set(MemoryPolicy) - {"default"}, "bind", {"none"}, _BIND_NONE_TEXT),
    ("mempolicy", set(MemoryPolicy) - {"default"}, "bind", {"cpu"}, _BIND_CPU_TEXT),
    ("smt", {"full-core", "isolate"}, "cpus", {"shared"}, "shared CPUs are not exclusive"),
)
# On one level they ask for CPUs near that memory; between levels the stronger one counts.
_LEVEL_CONTRADICTIONS: Final = (
    *_OPTION_CONTRADICTIONS,
    ("numamem", None, "bind", {"cpu"}, _BIND_CPU_TEXT),
)

ContradictionIndex: TypeAlias = Mapping[str, Sequence[Contradiction]]


def _index_contradictions(
    contradictions: Iterable[tuple[str, Collection[str] | None, str, Collection[str], str]],
) -> ContradictionIndex:
    """Both keys of each have it; a key without any is left out."""
    rows: defaultdict[str, list[Contradiction]] = defaultdict(list)
    for key, values, other_key, other_values, explanation in contradictions:
        rows[key].append(Contradiction(values, other_key, other_values, explanation))
        rows[other_key].append(Contradiction(other_values, key, values, explanation))
    return dict(rows)


CONTRADICTIONS_BY_KEY: Final = _index_contradictions(_OPTION_CONTRADICTIONS)
LEVEL_CONTRADICTIONS_BY_KEY: Final = _index_contradictions(_LEVEL_CONTRADICTIONS)


# --- the table --------------------------------------------------------------------------------


class OptionTable(msgspec.Struct, frozen=True, dict=True):
    """Every option of a record, by key, in the order of its fields."""

    record: type[PlacementOptions]
    by_key: Mapping[str, Option]

    @classmethod
    def of(cls, record: type[PlacementOptions]) -> OptionTable:
        """Read the declarations of a record's fields."""
        options = [
            option.with_field(info)
            for info in msgspec.structs.fields(record)
            for option in get_args(info.type)[1:]
            if isinstance(option, Option)
        ]
        return cls(record, {option.key: option for option in options})

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Every key a pod, a rule or the defaults may set."""
        return tuple(self.by_key)

    @cached_property
    def nothing_requested(self) -> PlacementOptions:
        """The options of a container for which nothing is set."""
        return self.record()

    @cached_property
    def retained(self) -> tuple[tuple[str, Retention, attrgetter[Any]], ...]:
        """The field, the condition and the getter of each that an allocation may keep."""
        return tuple(
            [
                (option.field, option.retention, attrgetter(option.field))
                for option in self.by_key.values()
                if option.retention is not Retention.NEVER
            ]
        )

    @cached_property
    def claim_parameters(self) -> tuple[str, ...]:
        """Keys that a claim may set, sorted."""
        return tuple(sorted(key for key, o in self.by_key.items() if not o.claim_obstacle))


TABLE = OptionTable.of(PlacementOptions)
"""What readers go through."""
