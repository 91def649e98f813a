"""The options of one container: annotations, rules and defaults put together and checked for form.

An annotation ``<prefix>/<key>`` speaks for the whole pod, ``<prefix>/<key>.<container>`` for one
container. The spelling of other NRI plugins, ``<key>.<prefix>/pod`` and
``<key>.<prefix>/container.<container>``, means the same. From strongest to weakest the *levels* are
the container's annotations, the pod's annotations, each matching rule in order, the defaults.

Two keys that contradict each other are an error on one level. Between levels there is no
contradiction: the stronger level wins and the weaker key is ignored (a container may name its
CPUs although the pod has a policy, and may opt out of it with ``bind: none``).

Whether CPUs and NUMA nodes exist, are online and free is not asked here but in
`nri_numa.engine.admit`, which knows the machine.

Users who may create pods decide how long annotations are: 256 KiB for one pod, in any number of
pieces, and every container of the pod reads them while the runtime waits two seconds. So what no
machine and no pod can need is refused unread. The operator's permissions say who may ask for what,
by namespace, labels, annotations and QoS class, which are all that NRI shows of a pod's author.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Final, TypeAlias

import msgspec
from msgspec.structs import replace

from nri_numa.engine.old_records import (
    OLD_VALUES,
    OLD_WRITTEN_KEYS,
    old_value_expectation,
    old_value_sentence,
)
from nri_numa.engine.request import options
from nri_numa.engine.request.options import (
    CONTRADICTIONS_BY_KEY,
    DEFAULT_SOURCE,
    LEVEL_CONTRADICTIONS_BY_KEY,
    Contradiction,
    ContradictionIndex,
    OptionSource,
    PlacementOptions,
    SourceKind,
)
from nri_numa.model.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, ListFormatError, NUMASet
from nri_numa.model.machine import listed_words_text
from nri_numa.model.reasons import Rejection, RejectionReason
from nri_numa.model.settings import (
    ANY_ANNOTATION_KEY,
    DEFAULT_PERMISSION,
    AnnotationPermission,
    OnDenied,
    Rule,
    Settings,
)
from nri_numa.model.workload import Container, PodSandbox


def permission_of(
    permissions: Sequence[AnnotationPermission], pod: PodSandbox
) -> AnnotationPermission:
    """Return the first permission that matches, else the built-in one."""
    for permission in permissions:
        if _matches_pod(permission, pod):
            return permission
    return DEFAULT_PERMISSION


def _matches_pod(entry: AnnotationPermission | Rule, pod: PodSandbox) -> bool:
    """True if every condition on the pod that is not empty holds."""
    return (
        (not entry.qos or pod.qos in entry.qos)
        and all(pod.labels.get(key) == value for key, value in entry.labels.items())
        and (not entry.namespaces or any(fnmatchcase(pod.namespace, p) for p in entry.namespaces))
    )


def check_permission(
    permission: AnnotationPermission, key: str, value: str, list_limit: int
) -> str | None:
    """Say what was expected if a key or its value is not permitted; None if it is.

    A value that cannot be read, or is too long to be, is left to the check of its form.
    """
    reason = f", because {permission.name} allows no more"
    if check_value_length(key, value, list_limit) is not None:
        return None
    if ANY_ANNOTATION_KEY not in permission.allowed_keys and key not in permission.allowed_keys:
        keys = ", ".join(permission.allowed_keys)
        return (f"one of the keys {keys}" if keys else "no annotation of nri-numa") + reason
    allowed = permission.allowed_values.get(key)
    if allowed is None or value in allowed or (key, value) in OLD_VALUES:
        return None
    kind = options.TABLE.by_key[key].list_of
    if kind is None:
        return f"one of {', '.join(allowed)}{reason}"
    try:
        # What is allowed was checked when the configuration was read.
        if not kind.parse(value).bits & ~kind.parse(",".join(allowed)).bits:
            return None
    except ListFormatError:
        return None
    return f"no others than {','.join(allowed)}{reason}"


MAX_ANNOTATIONS: Final = 512
"""Annotations of one pod that may name our prefix: nine keys each for more than 50 containers."""

MAX_SUGGESTION_CHECKS: Final = 8
"""Unknown names below the prefix that are compared with our keys; see `MAX_ANNOTATIONS`.

Comparing two words takes longer than everything else about a name.
"""

MAX_SUGGESTION_CHARS: Final = 24
"""Characters of a word that may resemble one of our keys, of which the longest has ten.

`difflib.get_close_matches` calls two texts close from a ratio of 0.6 on, which is twice the
characters in common by those of both: 2 * 10 / (10 + 24) is below.
"""

MAX_VALUE_CHARS: Final = 2048
"""Characters of a value that is no list: peak hours may be many, 96 quarters of an hour at most."""

MAX_LIST_CHARS: Final = 4096
"""Characters of a list where the machine is not known: every one of 1024 CPUs by itself."""

_MIN_LIST_LIMIT_CHARS: Final = 1024
"""A list that is longer than the machine needs is clumsy, not hostile, up to here."""


def longest_list_chars(count: int) -> int:
    """Characters of the longest list that ids below ``count`` can need: each one by itself.

    The kernel prints ranges, so that what it prints is at most half as long.
    """
    characters, digits, first_id = 0, 1, 0
    while first_id < count:
        end_id = min(count, 10**digits)
        characters += (end_id - first_id) * (digits + 1)
        digits, first_id = digits + 1, end_id
    return max(_MIN_LIST_LIMIT_CHARS, characters)


def check_value_length(key: str, value: str, list_limit: int) -> str | None:
    """Say what was expected of a value that is too long to be read; None if it is not."""
    is_list = options.TABLE.by_key[key].list_of is not None
    limit = list_limit if is_list else MAX_VALUE_CHARS
    if len(value) <= limit:
        return None
    suffix = ", enough for every id of this machine" if is_list else ""
    return f"at most {limit} characters{suffix}"


SCHEDULED_NODES_KEY: Final = "scheduled-numa-nodes"
"""Key, below the prefix, of the annotation with the NUMA nodes that the scheduler held for each
container: JSON (``{"main":"1","helper":"0-1"}``), and a preference among NUMA nodes that suit
equally well. So a pod that carries it of its own accord gets nothing more."""
MAX_SCHEDULED_NODES_CHARS: Final = 16_384
"""Characters that are read; 100 containers with the longest names take less."""


def format_scheduled_nodes(numa_nodes: Mapping[str, NUMASet]) -> str:
    """Format the annotation's value by container name, without containers without NUMA nodes."""
    texts = {name: str(nodes) for name, nodes in sorted(numa_nodes.items()) if nodes}
    return json.dumps(texts, separators=(",", ":"))


def parse_scheduled_nodes(text: str) -> dict[str, NUMASet] | None:
    """Parse a value by container; None if it is not valid."""
    if len(text) > MAX_SCHEDULED_NODES_CHARS:
        return None
    try:
        lists = msgspec.json.decode(text, type=dict[str, str])
        return {name: NUMASet.parse(listed) for name, listed in lists.items()}
    except (ValueError, msgspec.DecodeError, RecursionError):
        return None


def scheduled_nodes(annotations: Mapping[str, str], prefix: str, container: str) -> NUMASet:
    """NUMA nodes that the scheduler reserved for one container; empty without a valid value."""
    text = written_annotation(annotations, prefix, SCHEDULED_NODES_KEY)
    if text is None:
        return NO_NUMA_NODES
    return (parse_scheduled_nodes(text) or {}).get(container, NO_NUMA_NODES)


CONTAINER_RESOURCES_KEY: Final = "container-resources"
"""The annotation's key, below the prefix; `nri_numa.engine.pod_admission` reads it."""
AGENT_WRITTEN_KEYS: Final = frozenset(
    {"assigned", SCHEDULED_NODES_KEY, CONTAINER_RESOURCES_KEY, *OLD_WRITTEN_KEYS.values()}
)
"""Keys under our prefix that we write ourselves: no pod asks for anything with them."""


def written_annotation(annotations: Mapping[str, str], prefix: str, key: str) -> str | None:
    """Return the value of an annotation of the extender, which may have its old key."""
    value = annotations.get(f"{prefix}/{key}")
    return annotations.get(f"{prefix}/{OLD_WRITTEN_KEYS[key]}") if value is None else value


_MAX_CACHED_REQUESTS: Final = 256
"""Different requests that an `OptionsResolver` remembers at a time."""
_MAX_CACHED_VALUE_CHARS: Final = 512
"""Characters of the values of one remembered request."""


def _invalid_value_rejection(key: str, value: str, remedy: str, source: OptionSource) -> Rejection:
    """Say what is wrong with a value; ``remedy`` follows *expected* in the sentence."""
    return Rejection(
        reason=RejectionReason.INVALID_ANNOTATION,
        detail=f"{_printable_name(key)} is {quote_value(value)} ({_printable_name(source.text)}), "
        f"expected {remedy}",
        rule="annotations must be valid and must not contradict each other",
    )


def _printable_name(name: str) -> str:
    """Show a name as it is unless it would break the line: only Kubernetes checks names."""
    return name if name.isprintable() and len(name) <= 400 else quote_value(name)


def quote_value(value: str) -> str:
    """Show a value of unknown length and content in one line."""
    # The text ends up in the CRI error and the pod's events, which have no room for megabytes.
    return repr(value) if len(value) <= 80 else f"{value[:80]!r}… ({len(value)} characters)"


# --- values -----------------------------------------------------------------------------------


def _expected_text(key: str, value: str) -> str | None:
    """Say what was expected of the value of a key; None when it is fine."""
    option = options.TABLE.by_key[key]
    if (key, value) in OLD_VALUES:
        return old_value_expectation(key, value)
    if choices := option.value_by_text:
        if value in choices:
            return None
        matches = get_close_matches(value[:80].strip().lower(), choices, n=1)
        suggestion = f" (did you mean {matches[0]}?)" if matches else ""
        return f"one of {', '.join(choices)}{suggestion}"
    if option.list_of is not None and not value:
        return f"{option.expected}, not an empty text"
    try:
        (option.parse if option.list_of is None else option.list_of.parse)(value)
    except ListFormatError as error:
        problem = str(error)
        # The offending part is quoted in there, and may be as long as the value.
        return f"{option.expected}: {problem if len(problem) <= 120 else problem[:120] + '…'}"
    except ValueError:
        return option.expected
    return None


def check_value(key: str, value: str) -> str | None:
    """Say what is wrong with a value and what was expected; None when it is fine.

    The same check serves annotations, rules and defaults. An unknown key is a problem too.
    """
    if key not in options.TABLE.by_key:
        return f"{quote_value(key)} is not a known key, expected {_known_keys_text(key)}"
    remedy = check_value_length(key, value, MAX_LIST_CHARS) or _expected_text(key, value)
    return None if remedy is None else f"{quote_value(value)} is not valid, expected {remedy}"


def _known_keys_text(key: str) -> str:
    match = _closest_key(key.lower())
    listed = "one of the keys " + ", ".join(options.TABLE.keys)
    return f"{listed} (did you mean {match}?)" if match else listed


def _closest_key(text: str) -> str | None:
    words = () if len(text) > MAX_SUGGESTION_CHARS else options.TABLE.keys
    return next(iter(get_close_matches(text, words, n=1)), None)


# --- contradictions ---------------------------------------------------------------------------


# Key to value and source.
_OptionLevel: TypeAlias = dict[str, tuple[str, OptionSource]]

_SAME_PLACE_SOURCE: Final = OptionSource(SourceKind.DEFAULT, "same place")


def _level_from_values(values: Mapping[str, str], source: OptionSource) -> _OptionLevel:
    return {key: (value, source) for key, value in values.items()}


def _find_contradiction(
    key: str, value: str, level: _OptionLevel, contradictions: ContradictionIndex
) -> Contradiction | None:
    for row in contradictions.get(key, ()):
        if row.other_key in level and (row.values is None or value in row.values):
            other_value = level[row.other_key][0]
            if row.other_values is None or other_value in row.other_values:
                return row
    return None


def _find_level_contradiction(level: _OptionLevel) -> tuple[str, str] | None:
    """Find two contradicting keys of one level: the first of them and the expectation."""
    for key, (value, _) in level.items():
        row = _find_contradiction(key, value, level, CONTRADICTIONS_BY_KEY)
        if row is not None:
            other_value, other_source = level[row.other_key]
            other_text = f"{row.other_key} {quote_value(other_value)} ({other_source.text})"
            return key, f"no {other_text} next to it, because {row.explanation}"
    return None


def check_option_level(values: Mapping[str, str]) -> list[str]:
    """List everything wrong with the values of one rule, or of the defaults, in their order."""
    problems = [
        f"{key}: {problem}"
        for key, value in values.items()
        if (problem := check_value(key, value)) is not None
    ]
    level = _level_from_values(values, _SAME_PLACE_SOURCE)
    if not problems and (contradiction := _find_level_contradiction(level)):
        key, remedy = contradiction
        problems.append(f"{key}: {quote_value(values[key])} is not valid, expected {remedy}")
    return problems


# --- sources ----------------------------------------------------------------------------------


def resolve_placement_options(
    settings: Settings, pod: PodSandbox, container: Container, list_limit: int = MAX_LIST_CHARS
) -> PlacementOptions | Rejection:
    """Put together what annotations, rules and defaults say about one container.

    Annotations that concern the container are checked even where a stronger level overrides them;
    keys of other containers are checked for being known keys only.
    """
    marker = settings.prefix + "/"
    names = [name for name in pod.annotations if marker in name]
    if not names and not settings.rules and not settings.defaults:
        return options.TABLE.nothing_requested
    levels: list[_OptionLevel] = []
    permission = permission_of(settings.permissions, pod)
    ignored: list[str] = []
    if names:
        read = _read_annotations(names, marker, pod, container, list_limit, permission, ignored)
        if isinstance(read, Rejection):
            return read
        levels += read
    annotated = len(levels)
    levels += [
        _level_from_values(rule.values, OptionSource(SourceKind.RULE, str(number)))
        for number, rule in enumerate(settings.rules, 1)
        if _rule_matches(rule, pod, container)
    ]
    if settings.defaults:
        levels.append(_level_from_values(settings.defaults, DEFAULT_SOURCE))
    resolved: _OptionLevel = {}
    for number, level in enumerate(levels):
        level_options: _OptionLevel = {}
        for key, entry in level.items():
            stronger = _find_contradiction(key, entry[0], resolved, LEVEL_CONTRADICTIONS_BY_KEY)
            if key not in resolved and stronger is None:
                level_options[key] = entry
        # Rules and defaults were checked when the configuration was read.
        if number < annotated and (contradiction := _find_level_contradiction(level_options)):
            key, remedy = contradiction
            value, source = level_options[key]
            return _invalid_value_rejection(key, value, remedy, source)
        resolved.update(level_options)
    return _build_placement_options(
        resolved,
        permission,
        ignored,
        pods_list="numacpu" in resolved and not (names and "numacpu" in levels[0]),
        scheduled=scheduled_nodes(pod.annotations, settings.prefix, container.name),
    )


class OptionsResolver:
    """`resolve_placement_options` for one set of settings, with a cache.

    Replicas and restarted pods ask for the same things again, and reading them takes longer than
    all arithmetic on a small machine.
    """

    def __init__(self, settings: Settings, list_limit: int = MAX_LIST_CHARS) -> None:
        self._settings = settings
        self._list_limit = list_limit
        self._marker = settings.prefix + "/"
        self._known: dict[tuple[object, ...], PlacementOptions] = {}

    def __call__(self, pod: PodSandbox, container: Container) -> PlacementOptions | Rejection:
        """The same as `resolve_placement_options`."""
        settings, marker = self._settings, self._marker
        annotations = tuple([item for item in pod.annotations.items() if marker in item[0]])
        rules: tuple[int, ...] = ()
        if settings.rules:
            rules = tuple(
                [n for n, rule in enumerate(settings.rules) if _rule_matches(rule, pod, container)]
            )
        if not annotations and not rules and not settings.defaults:
            return options.TABLE.nothing_requested
        permission = permission_of(settings.permissions, pod)
        key = (container.name, annotations, rules, permission.name)
        resolved = self._known.get(key)
        if resolved is not None:
            return resolved
        requested = resolve_placement_options(settings, pod, container, self._list_limit)
        # What is wrong names the pod; what is long comes from a user who probes for limits.
        if (
            isinstance(requested, PlacementOptions)
            and sum(len(value) for _, value in annotations) <= _MAX_CACHED_VALUE_CHARS
        ):
            if len(self._known) >= _MAX_CACHED_REQUESTS:
                self._known.clear()
            self._known[key] = requested
        return requested


def _read_annotations(
    names: list[str],
    marker: str,
    pod: PodSandbox,
    container: Container,
    list_limit: int,
    permission: AnnotationPermission,
    ignored: list[str],
) -> tuple[_OptionLevel, _OptionLevel] | Rejection:
    """Sort the agent's annotations into levels of container and pod, or into ``ignored``."""
    if len(names) > MAX_ANNOTATIONS:
        name = min(names)
        remedy = f"at most {MAX_ANNOTATIONS} annotations with {marker}, not {len(names)}"
        source = OptionSource(SourceKind.ANNOTATION, name)
        return _invalid_value_rejection(name, pod.annotations[name], remedy, source)
    mine: _OptionLevel = {}
    everybodys: _OptionLevel = {}
    below = 0
    for name in sorted(names):  # by name, so that the first of several mistakes is always the same
        below += not name.startswith(marker)
        parts = _parse_annotation_name(name, marker, guess=below <= MAX_SUGGESTION_CHECKS)
        if parts is None:
            continue
        key, target = parts
        if key in AGENT_WRITTEN_KEYS:
            continue
        value = pod.annotations[name].removesuffix("\n")  # the end of a YAML block scalar
        source = OptionSource(SourceKind.ANNOTATION, name, target is not None)
        if key not in options.TABLE.by_key:
            remedy = _known_keys_text(key)
        elif target == "":
            remedy = f"{marker}{key}, or {marker}{key}.CONTAINER with the container's name"
        elif target is not None and target != container.name:
            continue
        elif (expected := check_permission(permission, key, value, list_limit)) is not None:
            if permission.on_denied is OnDenied.IGNORE:
                ignored.append(
                    f"{key} {quote_value(value)} ({source.text}) is ignored, expected {expected}"
                )
                continue
            rule = f"{permission.name} allows pods of namespace {pod.namespace} no more"
            rejection = _invalid_value_rejection(key, value, expected, source)
            return replace(rejection, reason=RejectionReason.NOT_PERMITTED, rule=rule)
        else:
            level = everybodys if target is None else mine
            earlier = level.setdefault(key, (value, source))
            if earlier[0] != value:
                remedy = f"the same as {quote_value(earlier[0])} ({earlier[1].text})"
            else:
                problem = check_value_length(key, value, list_limit) or _expected_text(key, value)
                if problem is None:
                    continue
                remedy = problem
        return _invalid_value_rejection(key, value, remedy, source)
    return mine, everybodys


def _parse_annotation_name(name: str, marker: str, *, guess: bool) -> tuple[str, str | None] | None:
    """Take an annotation name apart into key and container (None: the whole pod).

    None for an annotation of another program, whose domain ends like the prefix. ``guess`` accepts
    names that resemble known keys, in a domain below the prefix.
    """
    start = name.index(marker)
    tail = name[start + len(marker) :]
    if start == 0:
        key, dot, target = tail.partition(".")
        return key, target if dot else None
    key = name[: start - 1]
    # A domain below the prefix may belong to another program: only keys of the agent, or names
    # that resemble them, are accepted.
    if name[start - 1] != "." or not (
        key in AGENT_WRITTEN_KEYS or key in options.TABLE.by_key or (guess and _closest_key(key))
    ):
        return None
    if tail == "pod":
        return key, None
    if tail.startswith("container."):
        return key, tail.removeprefix("container.")
    return None


def _rule_matches(rule: Rule, pod: PodSandbox, container: Container) -> bool:
    return (
        (not rule.runtime_handlers or pod.runtime_handler in rule.runtime_handlers)
        and _matches_pod(rule, pod)
        and (not rule.containers or any(fnmatchcase(container.name, p) for p in rule.containers))
    )


def _build_placement_options(
    level: _OptionLevel,
    permission: AnnotationPermission,
    ignored: list[str],
    *,
    pods_list: bool,
    scheduled: NUMASet,
) -> PlacementOptions:
    table = options.TABLE
    values: dict[str, Any] = {}
    for key, (text, _) in level.items():
        option = table.by_key[key]
        values[option.field] = option.parse(text)
    return table.record(
        **values,
        explicit_keys=frozenset(
            [key for key, (_, source) in level.items() if source is not DEFAULT_SOURCE]
        ),
        sources={key: source for key, (_, source) in level.items()},
        ignored=tuple(ignored),
        unrequested_cpus=permission.allow_unrequested_cpus,
        reserved_cpus=permission.allow_reserved_cpus,
        ignores_denied=permission.on_denied is OnDenied.IGNORE,
        permission=permission.name,
        listed_cpus=CPUSet.parse(values["numacpu"]) if "numacpu" in values else NO_CPUS,
        listed_mems=NUMASet.parse(values["numamem"]) if "numamem" in values else NO_NUMA_NODES,
        list_is_pods=pods_list,
        scheduled_nodes=scheduled,
    )


MAX_NAMED_CONTAINERS: Final = 16
"""Names of one pod that are looked after; more are no accident."""
_MAX_NAME_CHARS: Final = 63  # of a container's name: a DNS label


def annotated_container_names(annotations: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Return container names in the agent's annotations, each with its annotation.

    At most `MAX_NAMED_CONTAINERS`, in the order of the annotations' names. Names that no container
    can have are left out.
    """
    names: dict[str, str] = {}
    marker = prefix + "/"
    for name in sorted([name for name in annotations if marker in name]):
        key, target = _parse_annotation_name(name, marker, guess=False) or ("", None)
        if (
            key in options.TABLE.by_key
            and target
            and len(target) <= _MAX_NAME_CHARS
            and len(names) < MAX_NAMED_CONTAINERS
        ):
            names.setdefault(target, name)
    return names


def unknown_container_sentence(annotation: str, name: str, known_names: Sequence[str]) -> str:
    """Build the sentence for an annotation with a name that no container of the pod has."""
    known_text = f", only {listed_words_text([*map(quote_value, known_names)])}" * bool(known_names)
    similar = get_close_matches(name, known_names, n=1)
    return (
        f"annotation {annotation} is ignored, because its pod has no container "
        f"{quote_value(name)}{known_text}" + "".join(f" (did you mean {one}?)" for one in similar)
    )


def old_value_sentences(annotations: Mapping[str, str], prefix: str) -> list[str]:
    """Build a sentence for each annotation of an existing pod that has an old value."""
    marker = prefix + "/"
    sentences = []
    for name in sorted([name for name in annotations if marker in name])[:MAX_ANNOTATIONS]:
        key, _ = _parse_annotation_name(name, marker, guess=False) or ("", None)
        value = annotations[name].removesuffix("\n")
        if (key, value) in OLD_VALUES:
            sentences.append(old_value_sentence(_printable_name(name), key, value))
    return sentences


_MIN_PREFIX_SIMILARITY: Final = 0.88
"""`difflib`'s ratio from which a domain is taken for our prefix misspelt: two letters of
numa.kubernetes.io. node.kubernetes.io and kubernetes.io, which are in use, stay below."""


def misspelt_prefix_sentences(annotations: Mapping[str, str], prefix: str) -> list[str]:
    """Build a sentence for each annotation with a known key below a misspelt prefix."""
    misspelt = sorted(name for name in annotations if _prefix_candidate(name) not in ("", prefix))
    return [
        f"annotation {_printable_name(name)} is ignored, because its prefix is not {prefix} "
        f"(did you mean {_printable_name(name.replace(domain, prefix, 1))}?)"
        for name in misspelt[:MAX_SUGGESTION_CHECKS]
        if not (domain := _prefix_candidate(name)).endswith(f".{prefix}")
        and get_close_matches(domain.lower(), [prefix], n=1, cutoff=_MIN_PREFIX_SIMILARITY)
    ]


def _prefix_candidate(name: str) -> str:
    """Find the prefix in a name with a known key, in both spellings; else empty."""
    domain, _, tail = name.partition("/")
    if tail.partition(".")[0] in options.TABLE.by_key:
        return domain
    key, _, suffix = domain.partition(".")
    is_other_spelling = tail == "pod" or tail.startswith("container.")
    return suffix if is_other_spelling and key in options.TABLE.by_key else ""


def request_annotation_names(annotations: Mapping[str, str], prefix: str) -> list[str]:
    """The annotations that a pod's request would be read from, misspelt keys too, by name."""
    marker = prefix + "/"
    return sorted(
        name
        for name in annotations
        if marker in name
        and (parts := _parse_annotation_name(name, marker, guess=True))
        and parts[0] not in AGENT_WRITTEN_KEYS
    )
