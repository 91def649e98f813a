"""Events and keys of log lines: one key for each thing, and an event that can be searched for."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEVELS = frozenset(("debug", "info", "warning", "error", "exception", "level", "log_function"))
REPORTS = frozenset(("_problems.report", "problems.report", "_log_each", "SparseWarning"))

KEYS = frozenset(
    """
    actual_cpus address adopted allowed_cpus call capacity_factors changed claim claim_uid
    clock_skew_s connection_count container container_count containers cpu_milli cpu_steal cpus
    cpus_before desired detail detected_in devices directory document drained_numa_nodes driver
    dry_run duration_s effective endpoint error event file healthy_slot_count holder hugepages
    id ids key kind launched lease line_count manager manager_policy memory memory_bytes mems
    metric missed_start missed_starts move moves node node_count node_group numa_node
    numa_node_count numa_nodes object_count object_kind observe offline_cpus on_exclusive_cpus
    online_cpus outcome output partitions path pod policy pool pool_before problem reason
    registration_count remedy removed repair_count repairable repaired requested_cpus resource
    restored result retry_s setting slot_count slots socket source start_delay_ms state
    sums_node_count sysfs_root taken_by target tls token traceback unmigrated_bytes update_count
    updated_containers verb version victim_node_count victims window_s withheld_mems yields_to
    """.split()  # noqa: SIM905 - a list of a hundred lines
)
"""Keys of all lines. ``x`` is a thing or a list, ``x_count`` a number, a time ends in its unit."""

NO_EVENT = re.compile(
    r"\b(the|an?|is|are|was|were|has|have|had|can|cannot|does|do|may|us|we|ours?|its?|which|that)\b"
    r"|[.:;,]",
    re.IGNORECASE,
)
"""Words and signs of a clause; an event is a noun and a participle."""


def _texts(argument: ast.expr) -> Iterator[str]:
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        yield argument.value
    elif isinstance(argument, ast.IfExp):
        yield from _texts(argument.body)
        yield from _texts(argument.orelse)


def _is_log_call(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    owner, _, method = name.rpartition(".")
    is_log = owner.endswith(("log", "logger")) or owner.startswith(("logs.get_", "get_logger"))
    return (
        (is_log and method in LEVELS)
        or name in ("level", "log_function")
        or any(name.endswith(report) for report in REPORTS)
    )


@cache
def calls() -> tuple[tuple[str, ast.Call], ...]:
    """Each call that writes a log line, with its place."""
    return tuple(
        (f"{path.relative_to(ROOT)}:{node.lineno}", node)
        for path in sorted((ROOT / "nri_numa").rglob("*.py"))
        if "pb" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and _is_log_call(node)
    )


def test_each_key_is_one_of_the_known() -> None:
    """Two names for one thing would hide half of the lines from a search."""
    used: dict[str, str] = {}
    for where, call in calls():
        for keyword in call.keywords:
            if keyword.arg not in (None, "log_function"):
                used[str(keyword.arg)] = where
            for part in ast.walk(keyword.value) if keyword.arg is None else ():
                for key in part.keys if isinstance(part, ast.Dict) else ():
                    used |= dict.fromkeys(_texts(key) if key is not None else (), where)
    assert len(used) > 60
    assert {key: where for key, where in used.items() if key not in KEYS} == {}


def test_each_event_is_a_noun_and_a_participle() -> None:
    events = [(where, text) for where, call in calls() for a in call.args[:1] for text in _texts(a)]
    assert len(events) > 100
    assert [f"{where}: {text}" for where, text in events if NO_EVENT.search(text)] == []
    lower = re.compile(r"[a-z]|[A-Z]{2,}s? |NUMA |Numa\w+ |NodeRes\w+ |ResourceSlice ")
    assert [f"{where}: {text}" for where, text in events if not lower.match(text)] == []
