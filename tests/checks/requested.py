"""Annotations and resources drawn by a number, and what they are taken for, one line each.

Of what nobody can foresee (values in the wrong case, keys beside the known ones, amounts between
two numbers, contradictions over three levels) it is written down what comes out, word for word.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final

from nri_numa.engine.request.annotations import resolve_placement_options
from nri_numa.engine.request.demand import MAX_CPU_SHARES, compute_demand, with_slots
from nri_numa.engine.request.options import TABLE, PlacementOptions
from nri_numa.model.reasons import Rejection, RejectionReason
from nri_numa.model.settings import AnnotationPermission, OnDenied, Rule, Settings
from nri_numa.model.workload import Container, PodSandbox, QoSClass, Resources

RECORDED: Final = Path(__file__).parents[1] / "golden" / "requested"
KINDS: Final = ("one-key", "many-keys", "levels", "amounts", "slots")
CASES: Final = 60
CAPACITY: Final = 64 << 30
GOOD: Final = {
    "numacpu": ("0", "0-3", "1,3,5-7", "0-1023"),
    "numamem": ("0", "0-1", "1,3"),
    "bind": ("cpu", "cpu+mem", "none"),
    "policy": ("none", "best-effort", "restricted", "single-numa-node"),
    "scope": ("container", "pod"),
    "cpus": ("exclusive", "shared"),
    "smt": ("any", "spread", "full-core", "isolate", "pair"),
    "load": ("high", "low", "09:00-18:00", "22:00-06:00,12:00-13:00", "00:00-24:00"),
    "on-failure": ("reject", "best-effort", "unpinned"),
    "devices": ("align", "ignore"),
    "distribute": ("devices", "none"),
    "mempolicy": ("default", "bind", "interleave"),
    "movable": ("true", "false"),
}
_BAD: Final = ("", " ", "None", "Exclusive", "3-1", "0,,1", "1-", "0-9999999", "25:00-26:00")
_LONG: Final = ("0," * 2048 + "0", "x" * 79, "x" * 80, "x" * 81, "é\n\u202e", "single-numa-nod")
_SCORES: Final = (None, 1, 2, 3, 500, 997, 998, 999, 1000, -997)


def _value(random: Random, key: str, good: float) -> str:
    if random.random() < good and key in GOOD:
        return random.choice(GOOD[key])
    return random.choice((*_BAD, *_LONG))


def _levels(random: Random, keys: int, good: float) -> dict[str, str]:
    return {key: _value(random, key, good) for key in random.sample(TABLE.keys, keys)}


def _annotations(random: Random, kind: str) -> dict[str, str]:
    prefix = "numa.kubernetes.io/"
    if kind == "one-key":
        key = random.choice(
            (*TABLE.keys, *TABLE.keys, "Policy", "polcy", "numa-cpu", "x" * 400, "x" * 401)
        )
        before = random.choice(("", "", "main.", "other.", "example.org/"))
        return {f"{before}{prefix}{key}": _value(random, key, 0.5)}
    if kind in ("amounts", "slots"):
        keys = random.choice(("", "policy", "cpus", "cpus", "smt"))
        return {prefix + keys: random.choice(GOOD[keys])} if keys else {}
    some = _levels(random, random.choice((2, 3, 4)), 0.97)
    own = _levels(random, random.choice((0, 0, 1, 2)), 0.97)
    return {
        **{f"{prefix}{key}": value for key, value in some.items()},
        **{f"main.{prefix}{key}": value for key, value in own.items()},
    }


def _settings(random: Random, kind: str) -> Settings:
    if kind == "one-key" or (kind == "many-keys" and random.random() < 0.5):
        return Settings()
    rules = (
        Rule(namespaces=("shop", "te*"), values=_levels(random, 1, 1.0)),
        Rule(qos=(QoSClass.GUARANTEED,), labels={"a": "b"}, values=_levels(random, 1, 1.0)),
        Rule(containers=("ma?n",), values=_levels(random, 2, 1.0)),
        Rule(runtime_handlers=("kata",), values=_levels(random, 1, 1.0)),
    )
    permissions = (
        AnnotationPermission(
            name="permissions[0]",
            namespaces=("shop",),
            allowed_keys=tuple(random.sample(TABLE.keys, 6)),
            allowed_values={
                "smt": ("any", "full-core"),
                "numacpu": ("0-3", "6"),
                "numamem": ("0",),
            },
            on_denied=random.choice(list(OnDenied)),
            allow_unrequested_cpus=random.random() < 0.5,
        ),
        AnnotationPermission(
            name="permissions[1]",
            labels={"a": "b"},
            allow_unrequested_cpus=True,
            allow_reserved_cpus=True,
        ),
    )
    return Settings(
        defaults=_levels(random, random.choice((0, 1, 2)), 1.0) if kind == "levels" else {},
        rules=tuple(rule for rule in rules if random.random() < 0.4) if kind == "levels" else (),
        permissions=tuple(one for one in permissions if random.random() < 0.5),
    )


def _resources(random: Random, kind: str) -> Resources:
    if kind not in ("amounts", "slots"):
        milli = random.choice((0, 1000, 2000, 1500))
        return Resources(
            cpu_shares=max(2, milli * 1024 // 1000),
            cpu_quota=milli * 100 or None,
            cpu_period=100_000,
        )
    milli = random.choice((0, 1, 999, 1000, 1001, 2000, 2000, 3000, 256_000, 300_000))
    shares = random.choice(
        (None, -1, 0, 1, 2, 3, 4, 1023, 1024, 1025, MAX_CPU_SHARES - 1, MAX_CPU_SHARES)
    )
    exact = max(2, milli * 1024 // 1000)
    period = random.choice((None, -1, 0, 1, 7, 1000, 33_333, 100_000, 100_000))
    quota = milli * (period if period and period > 0 else 100_000) // 1000
    memory = random.choice((None, -2, -1, 0, 1, 4096, (1 << 30) + 1, (1 << 62) - 1, 1 << 62))
    pages = {2 << 20: random.choice((0, 1, 2 << 20, (2 << 20) + 1, -1, 1 << 62)), 0: 4}
    return Resources(
        cpu_shares=random.choice((exact, exact, exact, shares, MAX_CPU_SHARES + 1)),
        cpu_quota=random.choice((quota, quota, quota, None, -1, 0, -2, 1 << 44, (1 << 44) - 1)),
        cpu_period=period,
        memory_limit=memory,
        hugepages=pages if random.random() < 0.4 else {},
    )


def _slots(random: Random) -> str:
    count = random.choice((1, 2, 2, 3))
    return random.choice(
        (
            ",".join(f"slot-{n}" for n in range(count)),
            ",".join(f"numa{n % 2}-slot-{n}" for n in range(count)),
            ",".join(["numa0-slot-1", "slot-2"]),
            *("slot-1,slot-1", "slot-", ",slot-1", "numa-slot-1", "x" * 80, "x" * 81, "x" * 79),
        )
    )


def told(kind: str) -> Iterator[str]:
    """What is asked for, and below it what that is taken for, or why it is refused."""
    for number in range(CASES):
        random = Random(f"{kind} {number}")
        settings = _settings(random, kind)
        pod = PodSandbox(
            id="p",
            uid="u",
            namespace=random.choice(("shop", "test")),
            name="web",
            labels=random.choice(({}, {"a": "b"})),
            annotations=_annotations(random, kind),
            qos=random.choice((QoSClass.GUARANTEED, *QoSClass)),
            runtime_handler=random.choice(("", "kata")),
        )
        made = Container(
            id="c",
            pod_id="p",
            name="main",
            resources=_resources(random, kind),
            oom_score_adj=random.choice(_SCORES),
            annotations={"numa.kubernetes.io/slots": _slots(random)} if kind == "slots" else {},
        )
        yield f"{number} {pod.qos} {pod.namespace} {_short(repr(dict(pod.annotations)))}"
        yield f"    {_asked(settings)} {_wants(made)}".rstrip()
        found = with_slots(settings, pod, made, resolve_placement_options(settings, pod, made))
        yield f"    {_answer(pod, found)}"
        if isinstance(found, PlacementOptions):
            yield f"    {_answer(pod, compute_demand(pod, made, found, CAPACITY))}"


def _short(text: str) -> str:
    return text if len(text) <= 400 else f"{text[:400]}…"


def _asked(one: Settings) -> str:
    words = [f"defaults {dict(one.defaults)}"] if one.defaults else []
    words += [f"rule {dict(rule.values)}" for rule in one.rules]
    words += [
        f"{each.name} {each.on_denied} {' '.join(each.allowed_keys)}" for each in one.permissions
    ]
    return "; ".join(words)


def _wants(one: Container) -> str:
    has = one.resources
    slots = one.annotations.get("numa.kubernetes.io/slots", "")
    return (
        f"shares {has.cpu_shares} quota {has.cpu_quota}/{has.cpu_period} memory {has.memory_limit} "
        f"pages {dict(has.hugepages)} score {one.oom_score_adj} {slots}"
    ).rstrip()


RECORDED_NAMES: Final = {
    "cpu_is_lower_bound": "cpu_at_least",
    "cpu_notes": "notes",
    "cpu_requested_milli": "cpu_paid_milli",
    "pod_requested_milli": "pod_paid_milli",
    "memory_requested": "memory_paid",
    "own_cpu_milli": "size_milli",
    "own_memory_bytes": "size_bytes",
    "explicit_keys": "given",
    "unrequested_cpus": "unpaid_cpus",
    "ignores_denied": "lenient",
    "list_is_pods": "pods_list",
    "scheduled_nodes": "placed",
}
"""Names in the recorded files, by field."""


OF_ONE_KEY: Final = (
    RejectionReason.INVALID_ANNOTATION,
    RejectionReason.NOT_PERMITTED,
    RejectionReason.SLOTS_CONFLICT,
)
"""Reasons whose detail begins with an annotation's key."""


def _answer(pod: PodSandbox, found: object) -> str:
    """All that is not as it is where nothing is asked for."""
    if isinstance(found, Rejection):
        who = f"pod {pod.full_name}, container main"
        key = found.detail.partition(" is ")[0] if found.reason in OF_ONE_KEY else ""
        return f"refused: {found.reason}: {who}: {found.detail} | {found.rule} | {key}"
    slots: tuple[str, ...] = type(found).__struct_fields__  # type: ignore[attr-defined]
    words = []
    for name in slots:
        if name == "memory_notes":
            continue  # among all notes
        value = getattr(found, "notes" if name == "cpu_notes" else name)
        if isinstance(value, frozenset):
            value = sorted(value)
        if value not in (None, (), "", [], {}):
            if name == "sources":
                value = {key: source.text for key, source in value.items()}
            text = str(value).replace("busy_intervals=", "busy=").replace("BusySchedule(", "Load(")
            words.append(f"{RECORDED_NAMES.get(name, name)}={_short(text)}")
    return " ".join(words)
