"""What pods ask for: every good form is understood, every bad one is named."""

from collections.abc import Mapping
from enum import StrEnum

import pytest
from msgspec.structs import replace

from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.request.annotations import (
    MAX_ANNOTATIONS,
    MAX_SUGGESTION_CHECKS,
    OptionsResolver,
    annotated_container_names,
    check_option_level,
    check_value,
    longest_list_chars,
    misspelt_prefix_sentences,
    old_value_sentences,
    quote_value,
    resolve_placement_options,
    unknown_container_sentence,
)
from nri_numa.engine.request.options import TABLE, PlacementOptions, format_load, parse_load
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.reasons import Rejection
from nri_numa.model.settings import ALL_CPUS_AMOUNT, AnnotationPermission, CPUAmount, Rule, Settings
from nri_numa.model.workload import (
    ALWAYS_BUSY_SCHEDULE,
    NEVER_BUSY_SCHEDULE,
    SMT,
    Bind,
    BusySchedule,
    Container,
    CPUMode,
    DeviceAlignmentMode,
    Distribution,
    MemoryPolicy,
    OnFailure,
    PodSandbox,
    Policy,
    QoSClass,
    Scope,
)
from tests.machines import named as machines

PREFIX = "numa.kubernetes.io"

MAIN = Container(id="c1", pod_id="p1", name="main")


def web(annotations: Mapping[str, str]) -> PodSandbox:
    burstable = QoSClass.BURSTABLE
    return PodSandbox(
        id="p1", uid="u1", namespace="shop", name="web", annotations=annotations, qos=burstable
    )


def asked(
    annotations: Mapping[str, str],
    settings: Settings | None = None,
    *,
    container: str = "main",
    labels: Mapping[str, str] | None = None,
    runtime_handler: str = "",
) -> PlacementOptions | Rejection:
    pod = replace(web(annotations), labels=labels or {}, runtime_handler=runtime_handler)
    settings, asking = settings or Settings(), replace(MAIN, name=container)
    found = resolve_placement_options(settings, pod, asking)
    resolver = OptionsResolver(settings)
    # The second time from memory.
    assert resolver(pod, asking) == resolver(pod, asking) == found
    return found


def good(
    annotations: Mapping[str, str], settings: Settings | None = None, **more: str
) -> PlacementOptions:
    found = asked(annotations, settings, **more)  # type: ignore[arg-type]
    assert isinstance(found, PlacementOptions), found.detail
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
    "devices": DeviceAlignmentMode,
    "distribute": Distribution,
    "mempolicy": MemoryPolicy,
}


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        *((key, one.value, one) for key, kind in CHOICES.items() for one in kind),
        ("numacpu", "0-3,8", "0-3,8"),
        ("numamem", "0-1", "0-1"),
        ("load", "high", ALWAYS_BUSY_SCHEDULE),
        ("load", "low", NEVER_BUSY_SCHEDULE),
        ("load", "09:00-18:00", BusySchedule(((540, 1080),))),
        ("movable", "true", True),
        ("movable", "false", False),
    ],
)
def test_every_value_of_every_key_is_understood(key: str, value: str, expected: object) -> None:
    requested = good({f"{PREFIX}/{key}": value})
    assert getattr(requested, key.replace("-", "_")) == expected
    assert requested.explicit_keys == {key}
    assert requested.source_text(key) == f"annotation {PREFIX}/{key}"
    assert check_value(key, value) is None
    # The end of a block scalar, which a permission does not see either.
    only = AnnotationPermission(name="only", allowed_keys=(key,), allowed_values={key: (value,)})
    trimmed = good({f"{PREFIX}/{key}": f"{value}\n"}, Settings(permissions=(only,)))
    assert trimmed == replace(requested, permission="only")


def test_the_containers_own_annotation_beats_the_pods() -> None:
    annotations = {f"{PREFIX}/policy": "restricted", f"{PREFIX}/policy.main": "best-effort"}
    assert good(annotations).policy is Policy.BEST_EFFORT
    assert good(annotations).source_text("policy") == f"annotation {PREFIX}/policy.main"
    assert good(annotations, container="sidecar").policy is Policy.RESTRICTED


def test_the_values_of_another_containers_keys_are_not_this_containers_problem() -> None:
    annotations = {f"{PREFIX}/numacpu.other": "rubbish", f"{PREFIX}/scope": "pod"}
    assert good(annotations).scope is Scope.POD
    assert isinstance(asked(annotations, container="other"), Rejection)


@pytest.mark.parametrize("name", ["assigned", "assigned.main", "assigned.other"])
def test_what_we_write_ourselves_is_not_read(name: str) -> None:
    assert good({f"{PREFIX}/{name}": '{"cpus":"1"}'}) == PlacementOptions()


def test_the_spelling_of_other_nri_plugins_means_the_same() -> None:
    annotations = {
        f"policy.{PREFIX}/pod": "restricted",
        f"numacpu.{PREFIX}/container.main": "2-3",
        f"assigned.{PREFIX}/pod": "ignored",
    }
    requested = good(annotations)
    assert (requested.numacpu, requested.policy) == ("2-3", Policy.NONE)
    assert requested.source_text("numacpu") == f"annotation numacpu.{PREFIX}/container.main"
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
    assert good({name: "anything"}) == PlacementOptions()


def test_the_prefix_can_be_changed() -> None:
    settings = Settings(prefix="cpu.example.com")
    annotations = {"cpu.example.com/policy": "restricted", f"{PREFIX}/policy": "rubbish"}
    assert good(annotations, settings).policy is Policy.RESTRICTED


# --- rules and defaults -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "matches"),
    [
        (Rule(), True),
        (Rule(namespaces=("kube-*", "s?op")), True),
        (Rule(namespaces=("kube-*",)), False),
        (Rule(labels={"tier": "db"}), True),
        (Rule(labels={"tier": "db", "zone": "a"}), False),
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
    assert isinstance(requested, PlacementOptions)
    assert (requested.scope is Scope.POD) is matches


# --- bad values -------------------------------------------------------------------------------

NODES = "a list of NUMA nodes"
POLICIES = "one of none, best-effort, restricted, single-numa-node"
PEAK = "high, low, or daily peak hours between 00:00 and 24:00 such as 09:00-18:00"

# What is wrong with a list is in tests/unit/model/test_cpuset.py, with peak hours below.
BAD_VALUES: list[tuple[str, str, str]] = [
    ("numacpu", "", "not an empty text"),
    ("numacpu", "3-1", "runs backwards"),
    ("numamem", "", "not an empty text"),
    ("numamem", "node0", NODES),
    ("numamem", "1024", "above 1023"),
    ("bind", "", "one of none, cpu, cpu+mem"),
    ("bind", "cpu,mem", "one of none, cpu, cpu+mem"),
    ("bind", "cpu ", "did you mean cpu?"),
    ("policy", "Restricted", "did you mean restricted?"),
    ("policy", "best_effort", "did you mean best-effort?"),
    ("policy", "single-numa", "did you mean single-numa-node?"),
    ("policy", "р" * 300, POLICIES),
    ("scope", "node", "one of container, pod"),
    ("cpus", "4", "one of shared, exclusive"),
    ("smt", "off", "one of any, spread, full-core, isolate, pair"),
    ("smt", "paired", "did you mean pair?"),
    ("load", "medium", PEAK),
    ("on-failure", "widen", "expected best-effort, the new name of widen"),
    ("on-failure", "fail", "one of reject, best-effort, unpinned"),
    ("devices", "none", "one of align, ignore"),
    ("distribute", "device", "one of devices, none"),
    ("mempolicy", "MPOL_BIND", "one of default, local, preferred"),
    ("mempolicy", "bind:0", "did you mean bind?"),
    ("movable", "maybe", "one of true, false"),
]


@pytest.mark.parametrize(("key", "value", "expectation"), BAD_VALUES)
def test_a_bad_value_is_rejected_by_name(key: str, value: str, expectation: str) -> None:
    for name in (key, f"{key}.main"):
        bad = asked({f"{PREFIX}/{name}": value})
        assert isinstance(bad, Rejection), bad
        assert bad.detail.startswith(f"{key} is ")
        assert quote_value(value) in bad.detail
        assert f"(annotation {PREFIX}/{name})" in bad.detail
        assert ", expected " in bad.detail
        assert expectation in bad.detail
        assert len(bad.detail) < 600
        assert bad.detail.isprintable()
    problem = check_value(key, value)
    assert problem is not None
    assert quote_value(value) in problem
    assert expectation in problem


def test_the_table_of_bad_values_covers_every_key() -> None:
    assert {key for key, _, _ in BAD_VALUES} == set(TABLE.keys)


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
def test_an_unknown_key_is_rejected_for_containers(key: str, expectation: str, suffix: str) -> None:
    bad = asked({f"{PREFIX}/{key}{suffix}": "v1"})
    assert isinstance(bad, Rejection)
    for part in (f"{PREFIX}/{key}{suffix}", "'v1'", expectation):
        assert part in bad.detail


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
    assert isinstance(found, Rejection) is bool(said)
    assert said in getattr(found, "detail", "")


# --- contradictions ---------------------------------------------------------------------------

CONTRADICTIONS: list[tuple[dict[str, str], str, str]] = [
    ({"numacpu": "0-3", "bind": "none"}, "numacpu", "bind"),
    ({"numamem": "0", "bind": "none"}, "numamem", "bind"),
    ({"policy": "best-effort", "bind": "none"}, "policy", "bind"),
    ({"cpus": "exclusive", "bind": "none"}, "cpus", "bind"),
    ({"smt": "full-core", "bind": "none"}, "smt", "bind"),
    ({"numacpu": "0-3", "policy": "best-effort"}, "numacpu", "policy"),
    ({"numacpu": "0-3", "smt": "full-core"}, "numacpu", "smt"),
    ({"numacpu": "0-3", "on-failure": "best-effort"}, "numacpu", "on-failure"),
    ({"numamem": "0", "on-failure": "best-effort"}, "numamem", "on-failure"),
    ({"smt": "full-core", "cpus": "shared"}, "smt", "cpus"),
    ({"smt": "isolate", "cpus": "shared"}, "smt", "cpus"),
]


@pytest.mark.parametrize(("keys", "first", "second"), CONTRADICTIONS)
def test_contradictions_of_a_level_are_wrong(keys: dict[str, str], first: str, second: str) -> None:
    for suffix in ("", ".main"):
        bad = asked({f"{PREFIX}/{key}{suffix}": value for key, value in keys.items()})
        assert isinstance(bad, Rejection), keys
        named = bad.detail.partition(" is ")[0]
        assert {named, *(k for k in (first, second) if f"no {k} " in bad.detail)} == set(keys)
        for part in (
            *(quote_value(value) for value in keys.values()),
            *(f"{PREFIX}/{key}{suffix}" for key in keys),
            "next to it, because",
        ):
            assert part in bad.detail
    assert len(check_option_level(keys)) == 1


@pytest.mark.parametrize(("keys", "first", "second"), CONTRADICTIONS)
def test_between_levels_the_stronger_one_wins_and_the_weaker_key_is_not_heard(
    keys: dict[str, str], first: str, second: str
) -> None:
    for strong, weak in ((first, second), (second, first)):
        requested = good({f"{PREFIX}/{strong}.main": keys[strong], f"{PREFIX}/{weak}": keys[weak]})
        assert requested.explicit_keys == {strong}
        requested = good(ours(**{strong: keys[strong]}), Settings(defaults={weak: keys[weak]}))
        assert set(requested.sources) == {strong}


def test_the_problems_of_a_level_are_all_listed() -> None:
    problems = check_option_level({"policy": "x", "smt": "spread", "bind": "y", "nope": "z"})
    assert [problem.split(":")[0] for problem in problems] == ["policy", "bind", "nope"]


def test_a_resolver_tells_requests_apart_however_many_it_has_seen() -> None:
    rules = (
        Rule(namespaces=("shop",), values={"policy": "restricted"}),
        Rule(labels={"app": "db"}, values={"smt": "isolate"}),
    )
    settings = Settings(rules=rules)
    resolver = OptionsResolver(settings)
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
        assert resolver(pod, asking) == resolve_placement_options(settings, pod, asking)


def test_a_resolver_does_not_hoard_long_values() -> None:
    resolver = OptionsResolver(Settings())
    text = ",".join(map(str, range(300)))
    pod = web({f"{PREFIX}/numacpu": text})
    found = resolver(pod, MAIN)
    assert isinstance(found, PlacementOptions)
    assert found.numacpu == text
    assert resolver(pod, MAIN) is not found


# --- bounds: annotations of any length and number cost little, and what is too much is said -------


@pytest.mark.parametrize("count", [1, 10, 11, 512, 1024, 8192])
def test_every_id_by_itself_is_read(count: int) -> None:
    text = ",".join(map(str, range(count)))
    assert len(text) <= longest_list_chars(count)
    if count >= 512:
        assert longest_list_chars(count) == len(text) + 1


def test_the_limit_of_a_list_is_the_machines() -> None:
    machine = NodeModel(topology=machines.dual_smt(), settings=Settings())
    fits = ",".join(map(str, range(64)))
    found = machine.options_resolver(web({f"{PREFIX}/numacpu": fits}), MAIN)
    assert isinstance(found, PlacementOptions)
    assert CPUSet.parse(found.numacpu or "") == CPUSet(range(64))
    found = machine.options_resolver(web({f"{PREFIX}/numacpu": "0," * 125_000 + "0"}), MAIN)
    assert isinstance(found, Rejection)
    assert "expected at most 1024 characters, enough for every id" in found.detail
    assert "(250001 characters)" in found.detail


@pytest.mark.parametrize("longer", [False, True])
@pytest.mark.parametrize(("key", "limit"), [("load", 2048), ("numacpu", 4096), ("numamem", 4096)])
def test_a_value_is_read_up_to_its_limit(key: str, limit: int, longer: bool) -> None:
    """The limits are those of docs/annotations.md; the machine of a list is not known here."""
    found = asked({f"{PREFIX}/{key}": "x" * (limit + longer)})
    assert isinstance(found, Rejection)
    assert (f"expected at most {limit} characters" in found.detail) is longer


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a" * 363, f"({{source}}{'a' * 363})"),
        ("a" * 364, f"('{{source}}{'a' * 43}'… (401 characters))"),
        ("line\nbreak", "('{source}line\\nbreak')"),
    ],
)
def test_a_name_in_a_message_breaks_no_line_and_fills_no_event(name: str, shown: str) -> None:
    """Only Kubernetes checks names; other clients of a runtime do not."""
    found = asked({f"{PREFIX}/policy.{name}": "x"}, container=name)
    assert isinstance(found, Rejection)
    assert shown.format(source=f"annotation {PREFIX}/policy.") in found.detail


def test_more_annotations_than_any_pod_needs_are_rejected_as_a_whole() -> None:
    names = {f"{PREFIX}/load.c{n}": "high" for n in range(MAX_ANNOTATIONS)}
    assert isinstance(asked(names), PlacementOptions)
    found = asked(names | {f"{PREFIX}/load": "high"})
    assert isinstance(found, Rejection)
    assert f"at most {MAX_ANNOTATIONS} annotations" in found.detail
    assert f"not {MAX_ANNOTATIONS + 1}" in found.detail


def test_a_near_miss_below_the_prefix_is_found_among_few_and_let_be_among_many() -> None:
    """Beyond that they are somebody's names, and comparing is what costs."""
    miss = {f"polcy.{PREFIX}/pod": "restricted"}
    assert isinstance(asked(miss), Rejection)
    other = {f"n{n:03}.{PREFIX}/pod": "x" for n in range(MAX_SUGGESTION_CHECKS)}
    exact = {f"policy.{PREFIX}/pod": "restricted"}
    assert asked(other | miss) == PlacementOptions()
    found = asked(other | exact)
    assert isinstance(found, PlacementOptions)
    assert found.policy is Policy.RESTRICTED


@pytest.mark.parametrize(
    ("amount", "text", "of_64"),
    [(CPUAmount(6), "6", 6), (CPUAmount(percent=12.5), "12.5%", 8), (ALL_CPUS_AMOUNT, "100%", 64)],
)
def test_amounts_of_cpus_are_said_as_written(amount: CPUAmount, text: str, of_64: int) -> None:
    assert (str(amount), amount.cpus_of_total(64)) == (text, of_64)


@pytest.mark.parametrize(("length", "shown"), [(80, "'{}'"), (81, "'{}'… (81 characters)")])
def test_a_value_in_a_message_is_shown_up_to_eighty_characters(length: int, shown: str) -> None:
    found = asked({f"{PREFIX}/policy": "x" * length})
    assert isinstance(found, Rejection)
    assert f"policy is {shown.format('x' * 80)} (annotation" in found.detail


@pytest.mark.parametrize(("more", "cut"), [(0, ""), (1, "…")])
def test_what_is_wrong_with_a_list_is_shown_up_to_120_characters(more: int, cut: str) -> None:
    """Characters that nobody can see are shown as ten each."""
    value = "x" * (9 + more) + "\U000e0001" * 7
    found = asked({f"{PREFIX}/numacpu": value})
    assert isinstance(found, Rejection)
    problem = f"{value!r} is not a number or a range such as 0-3"
    assert len(problem) == 120 + more
    assert found.detail.endswith(f" such as 0-3,8: {problem[:120]}{cut}")


@pytest.mark.parametrize(
    ("annotation", "name"),
    [
        ("numa.kubernetes.io/numacpu.web", "web"),
        ("numacpu.numa.kubernetes.io/container.web", "web"),
        # The whole pod, or nobody.
        ("numa.kubernetes.io/numacpu.", None),
        ("numacpu.numa.kubernetes.io/pod", None),
        ("numacpu.numa.kubernetes.io/container.", None),
        # What we write ourselves, what is refused as unknown, and what is somebody else's.
        ("numa.kubernetes.io/assigned.web", None),
        ("numa.kubernetes.io/numacpuu.web", None),
        ("other.io/numacpu.web", None),
        ("xnuma.kubernetes.io/numacpu.web", None),
        ("numacpu.numa.kubernetes.io", None),
        ("numa.kubernetes.io/numacpu." + "x" * 64, None),
    ],
)
def test_whom_an_annotation_speaks_to(annotation: str, name: str | None) -> None:
    assert annotated_container_names({annotation: "0"}, PREFIX) == (
        {} if name is None else {name: annotation}
    )


def test_the_sentence_names_who_was_perhaps_meant() -> None:
    assert unknown_container_sentence("a/numacpu.enigne", "enigne", ("engine", "proxy")) == (
        "annotation a/numacpu.enigne is ignored, because its pod has no container 'enigne', only "
        "'engine' and 'proxy' (did you mean engine?)"
    )
    assert unknown_container_sentence("a", "x", ()).endswith("no container 'x'")


@pytest.mark.parametrize(
    ("annotation", "meant"),
    [
        ("numa.kubernets.io/policy", "numa.kubernetes.io/policy"),
        ("nuam.kubernetes.io/policy.web", "numa.kubernetes.io/policy.web"),
        ("NUMA.kubernetes.io/cpus", "numa.kubernetes.io/cpus"),
        ("numacpu.numa.kubernetes.com/pod", "numacpu.numa.kubernetes.io/pod"),
        ("numacpu.numa.kubernetes.i/pod", "numacpu.numa.kubernetes.io/pod"),
        # Right as it is, nothing of ours, and domains that are in use.
        ("numa.kubernetes.io/policy", None),
        ("numacpu.numa.kubernetes.io/container.web", None),
        ("numa.kubernets.io/polcy", None),
        ("sub.numa.kubernetes.io/policy", None),
        ("node.kubernetes.io/policy", None),
        ("kubernetes.io/policy", None),
        ("policy", None),
    ],
)
def test_a_prefix_that_is_nearly_ours_is_a_slip(annotation: str, meant: str | None) -> None:
    found = misspelt_prefix_sentences({annotation: "x"}, PREFIX)
    assert [f"(did you mean {meant}?)" in one for one in found] == ([True] if meant else [])


def test_of_many_slips_a_few_are_named() -> None:
    many = {f"numa.kubernets.io/policy.c{n}": "x" for n in range(1000)}
    assert len(misspelt_prefix_sentences(many, PREFIX)) == MAX_SUGGESTION_CHECKS


@pytest.mark.parametrize(
    ("text", "busy"),
    [
        ("22:00-24:00", ((1320, 1440),)),
        ("00:00-24:00", ((0, 1440),)),
        ("09:00-12:00,12:00-14:00", ((540, 840),)),
    ],
)
def test_text_becomes_sorted_separate_minutes(text: str, busy: tuple[tuple[int, int], ...]) -> None:
    assert parse_load(text) == BusySchedule(busy)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "HIGH",
        "9:00-18:00",
        "09:00-10:00, 11:00-12:00",
        "09:00-18:00,",
        "09:00-18:00,low",
        "٠٩:00-18:00",
        "24:00-06:00",
        "09:00-24:01",
        "09:60-10:00",
        "09:00-10:60",
        "09:00-09:00",
    ],
)
def test_a_bad_load_is_a_problem_that_says_what_was_expected(text: str) -> None:
    expected = TABLE.by_key["load"].expected
    assert check_value("load", text) == f"{text!r} is not valid, expected {expected}"


@pytest.mark.parametrize(
    ("load", "text"),
    [
        (ALWAYS_BUSY_SCHEDULE, "high"),
        (NEVER_BUSY_SCHEDULE, "low"),
        (BusySchedule(((0, 65), (600, 1440))), "00:00-01:05,10:00-24:00"),
        (BusySchedule(((1379, 1439),)), "22:59-23:59"),
    ],
)
def test_a_load_is_written_as_it_is_read(load: BusySchedule, text: str) -> None:
    assert format_load(load) == text
    assert parse_load(text) == load


def test_an_old_value_of_an_existing_pod_is_named_with_the_new_one() -> None:
    prefix = "numa.kubernetes.io"
    old = {f"{prefix}/on-failure": "widen", f"{prefix}/on-failure.app": "best-effort", "x": "widen"}
    (sentence,) = old_value_sentences(old, prefix)
    assert "on-failure is 'widen', expected best-effort, the new name of widen" in sentence
