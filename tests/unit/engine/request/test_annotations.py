"""What pods ask for: every good form is understood, every bad one is named."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import pytest
from msgspec.structs import replace

from nri_numa.engine.request.annotations import (
    KEYS,
    Resolver,
    check_level,
    check_value,
    quoted,
    resolve,
)
from nri_numa.model.settings import Rule, Settings
from nri_numa.model.workload import (
    HIGH,
    LOW,
    SMT,
    Bind,
    Container,
    CPUMode,
    DeviceUse,
    Load,
    MemoryPolicy,
    OnFailure,
    PodSandbox,
    Policy,
    QoSClass,
    Refusal,
    Requested,
    Scope,
)

PREFIX = "numa.kubernetes.io"


def asked(
    annotations: Mapping[str, str],
    settings: Settings | None = None,
    *,
    container: str = "main",
    labels: Mapping[str, str] | None = None,
    runtime_handler: str = "",
) -> Requested | Refusal:
    pod = PodSandbox(
        id="p1",
        uid="u1",
        namespace="shop",
        name="web",
        labels=labels or {},
        annotations=annotations,
        qos=QoSClass.BURSTABLE,
        runtime_handler=runtime_handler,
    )
    settings, asking = settings or Settings(), Container(id="c1", pod_id="p1", name=container)
    found = resolve(settings, pod, asking)
    resolver = Resolver(settings)
    # The second time from memory.
    assert resolver(pod, asking) == resolver(pod, asking) == found
    return found


def good(
    annotations: Mapping[str, str], settings: Settings | None = None, **more: str
) -> Requested:
    found = asked(annotations, settings, **more)  # type: ignore[arg-type]
    assert isinstance(found, Requested), found.message
    return found


def ours(**keys: str) -> dict[str, str]:
    return {f"{PREFIX}/{key.replace('_', '-')}": value for key, value in keys.items()}


# --- good ones --------------------------------------------------------------------------------


CHOICES: dict[str, type[StrEnum]] = {
    "bind": Bind,
    "policy": Policy,
    "scope": Scope,
    "cpus": CPUMode,
    "smt": SMT,
    "on-failure": OnFailure,
    "devices": DeviceUse,
    "mempolicy": MemoryPolicy,
}


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        *((key, one.value, one) for key, kind in CHOICES.items() for one in kind),
        ("numacpu", "0-3,8", "0-3,8"),
        ("numamem", "0-1", "0-1"),
        ("load", "high", HIGH),
        ("load", "low", LOW),
        ("load", "09:00-18:00", Load(((540, 1080),))),
        ("movable", "true", True),
        ("movable", "false", False),
    ],
)
def test_every_value_of_every_key_is_understood(key: str, value: str, expected: object) -> None:
    requested = good({f"{PREFIX}/{key}": value})
    assert getattr(requested, key.replace("-", "_")) == expected
    assert requested.given == {key}
    assert requested.sources == {key: f"annotation {PREFIX}/{key}"}
    assert check_value(key, value) is None


def test_the_containers_own_annotation_beats_the_pods() -> None:
    annotations = {f"{PREFIX}/policy": "restricted", f"{PREFIX}/policy.main": "best-effort"}
    assert good(annotations).policy is Policy.BEST_EFFORT
    assert good(annotations).sources == {"policy": f"annotation {PREFIX}/policy.main"}
    assert good(annotations, container="sidecar").policy is Policy.RESTRICTED


def test_the_values_of_another_containers_keys_are_not_this_containers_problem() -> None:
    annotations = {f"{PREFIX}/numacpu.other": "rubbish", f"{PREFIX}/scope": "pod"}
    assert good(annotations).scope is Scope.POD
    assert isinstance(asked(annotations, container="other"), Refusal)


@pytest.mark.parametrize("name", ["assigned", "assigned.main", "assigned.other"])
def test_what_we_write_ourselves_is_not_read(name: str) -> None:
    assert good({f"{PREFIX}/{name}": '{"cpus":"1"}'}) == Requested()


def test_the_spelling_of_other_nri_plugins_means_the_same() -> None:
    annotations = {
        f"policy.{PREFIX}/pod": "restricted",
        f"numacpu.{PREFIX}/container.main": "2-3",
        f"assigned.{PREFIX}/pod": "ignored",
    }
    requested = good(annotations)
    assert (requested.numacpu, requested.policy) == ("2-3", Policy.NONE)
    assert requested.sources == {"numacpu": f"annotation numacpu.{PREFIX}/container.main"}
    assert good(annotations, container="side").policy is Policy.RESTRICTED


@pytest.mark.parametrize(
    "name",
    [
        f"my{PREFIX}/policy",  # another domain that ends like ours
        f"backup.{PREFIX}/pod",  # a domain below ours, for something else
        f"policy.{PREFIX}/rack",
        f"x/y.{PREFIX}/pod",
    ],
)
def test_foreign_annotations_are_left_alone(name: str) -> None:
    assert good({name: "anything"}) == Requested()


def test_the_prefix_can_be_changed() -> None:
    settings = Settings(prefix="cpu.example.com")
    annotations = {"cpu.example.com/policy": "restricted", f"{PREFIX}/policy": "rubbish"}
    assert good(annotations, settings).policy is Policy.RESTRICTED


# --- rules and defaults -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "matches"),
    [
        (Rule(), True),
        (Rule(namespaces=("shop",)), True),
        (Rule(namespaces=("kube-*", "s?op")), True),
        (Rule(namespaces=("kube-*",)), False),
        (Rule(labels={"tier": "db"}), True),
        (Rule(labels={"tier": "db", "zone": "a"}), False),
        (Rule(labels={"tier": "web"}), False),
        (Rule(qos=(QoSClass.BURSTABLE,)), True),
        (Rule(qos=(QoSClass.GUARANTEED,)), False),
        (Rule(runtime_handlers=("kata",)), True),
        (Rule(runtime_handlers=("runc",)), False),
        (Rule(containers=("ma*",)), True),
        (Rule(containers=("side*",)), False),
        (Rule(namespaces=("shop",), containers=("side*",)), False),
    ],
)
def test_a_rule_matches_when_all_its_conditions_do(rule: Rule, matches: bool) -> None:
    named = replace(rule, values={"scope": "pod"})
    requested = asked({}, Settings(rules=(named,)), labels={"tier": "db"}, runtime_handler="kata")
    assert isinstance(requested, Requested)
    assert (requested.scope is Scope.POD) is matches


def test_a_bad_rule_or_default_is_named_as_such() -> None:
    bad_rule = asked({}, Settings(rules=(Rule(), Rule(values={"policy": "bets"}))))
    assert isinstance(bad_rule, Refusal)
    assert (bad_rule.source, bad_rule.key) == ("rule 2", "policy")
    bad_default = asked({}, Settings(defaults={"polcy": "restricted"}))
    assert isinstance(bad_default, Refusal)
    assert bad_default.source == "default"
    assert "did you mean policy?" in bad_default.message


# --- bad values -------------------------------------------------------------------------------

LIST = "kernel's format"
NODES = "a list of NUMA nodes"
POLICIES = "one of none, best-effort, restricted, single-numa-node"
PEAK = "high, low, or daily peak hours between 00:00 and 24:00 such as 09:00-18:00"

# What is wrong with a list is in tests/unit/model/test_cpuset.py, with peak hours in test_load.py.
BAD_VALUES: list[tuple[str, str, str]] = [
    ("numacpu", "", "not an empty text"),
    ("numacpu", "x" * 4000, LIST),
    ("numacpu", "3-1", "runs backwards"),
    ("numacpu", "1," * 40000, "at most 4096 characters"),
    ("numamem", "", "not an empty text"),
    ("numamem", "node0", NODES),
    ("numamem", "1024", "above 1023"),
    ("bind", "", "one of none, cpu, cpu+mem"),
    ("bind", "cpu,mem", "one of none, cpu, cpu+mem"),
    ("bind", "cpu ", "did you mean cpu?"),
    ("policy", "Restricted", "did you mean restricted?"),
    ("policy", "best_effort", "did you mean best-effort?"),
    ("policy", "single-numa", "did you mean single-numa-node?"),
    ("policy", "single", POLICIES),
    ("policy", "р" * 300, POLICIES),
    ("scope", "node", "one of container, pod"),
    ("cpus", "4", "one of shared, exclusive"),
    ("smt", "off", "one of any, spread, full-core, isolate, pair"),
    ("smt", "paired", "did you mean pair?"),
    ("load", "medium", PEAK),
    ("load", "09:00-18:00," * 5000, "at most 2048 characters"),
    ("on-failure", "fail", "one of reject, widen, unpinned"),
    ("devices", "none", "one of align, ignore"),
    ("mempolicy", "MPOL_BIND", "one of default, local, preferred"),
    ("mempolicy", "bind:0", "did you mean bind?"),
    ("movable", "maybe", "one of true, false"),
]


@pytest.mark.parametrize(("key", "value", "expectation"), BAD_VALUES)
def test_a_bad_value_is_refused_by_name(key: str, value: str, expectation: str) -> None:
    for name in (key, f"{key}.main"):
        bad = asked({f"{PREFIX}/{name}": value})
        assert isinstance(bad, Refusal), bad
        assert (bad.key, bad.value) == (key, value)
        assert bad.message.startswith(f"pod shop/web, container main: {key} is ")
        assert quoted(value) in bad.message
        assert f"(annotation {PREFIX}/{name})" in bad.message
        assert ", expected " in bad.message
        assert expectation in bad.message
        assert len(bad.message) < 600
        assert bad.message.isprintable()
    problem = check_value(key, value)
    assert problem is not None
    assert quoted(value) in problem
    assert expectation in problem


def test_the_table_of_bad_values_covers_every_key() -> None:
    assert {key for key, _, _ in BAD_VALUES} == set(KEYS)


UNKNOWN_KEYS = [
    ("polcy", "did you mean policy?"),
    ("Policy", "did you mean policy?"),
    ("cpu", "did you mean cpus?"),
    ("onFailure", "did you mean on-failure?"),
    ("", "one of the keys numacpu,"),
    ("ассigned", "one of the keys numacpu,"),
    ("x" * 300, "one of the keys numacpu,"),
]


@pytest.mark.parametrize(("key", "expectation"), UNKNOWN_KEYS)
@pytest.mark.parametrize("suffix", ["", ".main", ".another"])
def test_an_unknown_key_under_our_prefix_is_refused_for_every_container(
    key: str, expectation: str, suffix: str
) -> None:
    bad = asked({f"{PREFIX}/{key}{suffix}": "v1"})
    assert isinstance(bad, Refusal)
    assert (bad.key, bad.value) == (key, "v1")
    for part in ("shop/web", "main", f"{PREFIX}/{key}{suffix}", "'v1'", expectation):
        assert part in bad.message


@pytest.mark.parametrize(
    ("annotations", "said"),
    [
        ({f"{PREFIX}/policy.": "restricted"}, f"{PREFIX}/policy.CONTAINER"),
        ({f"policy.{PREFIX}/container.": "restricted"}, f"{PREFIX}/policy.CONTAINER"),
        # One value in both spellings is fine, two are not.
        (
            {f"{PREFIX}/policy": "restricted", f"policy.{PREFIX}/pod": "none"},
            "expected the same as 'restricted' (annotation ",
        ),
        ({f"{PREFIX}/policy": "none", f"policy.{PREFIX}/pod": "none"}, ""),
        # Even where the container has its own.
        ({f"{PREFIX}/policy": "bad", f"{PREFIX}/policy.main": "none"}, "policy is 'bad'"),
    ],
)
def test_what_is_said_to_nobody_or_twice(annotations: dict[str, str], said: str) -> None:
    found = asked(annotations)
    assert isinstance(found, Refusal) is bool(said)
    assert said in getattr(found, "message", "")


# --- contradictions ---------------------------------------------------------------------------

CONTRADICTIONS: list[tuple[dict[str, str], str, str]] = [
    ({"numacpu": "0-3", "bind": "none"}, "numacpu", "bind"),
    ({"numamem": "0", "bind": "none"}, "numamem", "bind"),
    ({"numamem": "0", "bind": "cpu"}, "numamem", "bind"),
    ({"policy": "best-effort", "bind": "none"}, "policy", "bind"),
    ({"policy": "single-numa-node", "bind": "none"}, "policy", "bind"),
    ({"cpus": "exclusive", "bind": "none"}, "cpus", "bind"),
    ({"smt": "full-core", "bind": "none"}, "smt", "bind"),
    ({"numacpu": "0-3", "policy": "best-effort"}, "numacpu", "policy"),
    ({"numacpu": "0-3", "policy": "single-numa-node"}, "numacpu", "policy"),
    ({"numacpu": "0-3", "smt": "full-core"}, "numacpu", "smt"),
    ({"numacpu": "0-3", "on-failure": "widen"}, "numacpu", "on-failure"),
    ({"numamem": "0", "on-failure": "widen"}, "numamem", "on-failure"),
    ({"smt": "full-core", "cpus": "shared"}, "smt", "cpus"),
    ({"smt": "isolate", "cpus": "shared"}, "smt", "cpus"),
]


@pytest.mark.parametrize(("keys", "first", "second"), CONTRADICTIONS)
def test_contradicting_keys_of_one_level_are_refused(
    keys: dict[str, str], first: str, second: str
) -> None:
    for suffix in ("", ".main"):
        bad = asked({f"{PREFIX}/{key}{suffix}": value for key, value in keys.items()})
        assert isinstance(bad, Refusal), keys
        assert {bad.key, *(k for k in (first, second) if f"no {k} " in bad.message)} == set(keys)
        for part in (
            "shop/web",
            "container main",
            *(quoted(value) for value in keys.values()),
            *(f"{PREFIX}/{key}{suffix}" for key in keys),
            "next to it, because",
        ):
            assert part in bad.message
    assert len(check_level(keys)) == 1


@pytest.mark.parametrize(("keys", "first", "second"), CONTRADICTIONS)
def test_between_levels_the_stronger_one_wins_and_the_weaker_key_is_not_heard(
    keys: dict[str, str], first: str, second: str
) -> None:
    for strong, weak in ((first, second), (second, first)):
        requested = good({f"{PREFIX}/{strong}.main": keys[strong], f"{PREFIX}/{weak}": keys[weak]})
        assert requested.given == {strong}
        requested = good(ours(**{strong: keys[strong]}), Settings(defaults={weak: keys[weak]}))
        assert set(requested.sources) == {strong}


def test_the_problems_of_a_level_are_all_listed() -> None:
    problems = check_level({"policy": "x", "smt": "spread", "bind": "y", "nope": "z"})
    assert [problem.split(":")[0] for problem in problems] == ["policy", "bind", "nope"]


def test_a_resolver_tells_requests_apart_however_many_it_has_seen() -> None:
    rules = (
        Rule(namespaces=("shop",), values={"policy": "restricted"}),
        Rule(labels={"app": "db"}, values={"smt": "isolate"}),
    )
    settings = Settings(rules=rules)
    resolver = Resolver(settings)
    for n in range(600):
        pod = PodSandbox(
            id="p",
            uid="u",
            namespace="shop" if n % 2 else "bank",
            name=f"web-{n}",
            labels={"app": "db"} if n % 3 else {},
            annotations={f"{PREFIX}/numacpu": str(n % 300)} if n % 5 else {},
        )
        asking = Container(id="c", pod_id="p", name="main" if n % 7 else "side")
        assert resolver(pod, asking) == resolve(settings, pod, asking)


def test_a_resolver_does_not_hoard_long_values() -> None:
    resolver = Resolver(Settings())
    text = ",".join(map(str, range(300)))
    pod = PodSandbox(
        id="p", uid="u", namespace="n", name="w", annotations={f"{PREFIX}/numacpu": text}
    )
    asking = Container(id="c", pod_id="p", name="main")
    found = resolver(pod, asking)
    assert isinstance(found, Requested)
    assert found.numacpu == text
    assert resolver(pod, asking) is not found
