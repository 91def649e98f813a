"""The configuration: layers, every mistake at once, and the generated files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from msgspec.structs import replace

from nri_numa import config, safe_yaml
from nri_numa.config import layers, sections, values
from nri_numa.config.sections import AgentConfig
from nri_numa.errors import ConfigError
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.machine import Topology
from nri_numa.model.settings import CPUAmount, KubeletRules, Rule, Settings
from nri_numa.model.workload import QoSClass, Strategy
from tests.machines import named as machines
from tools.config_schema import described, document

ROOT = Path(__file__).parents[3]


def machine() -> Topology:
    """Two NUMA nodes with two CPUs each, a memory-only third, CPU 4 offline."""
    made = machines.snc_single_no_smt(cores_per_numa=2, memory_gib=1, memory_only_gib=[1])
    return replace(made, present=CPUSet(range(5)), possible=CPUSet(range(8)))


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "agent.yaml"
    path.write_text(text)
    return str(path)


def mistakes(tmp_path: Path, text: str, *more: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config.load_config(write(tmp_path, text), *more)
    return list(caught.value.problems)


# --- layers -------------------------------------------------------------------------------------


def test_nothing_given_is_the_defaults() -> None:
    assert config.load_config() == AgentConfig()
    assert config.derive_settings(AgentConfig()) == Settings(
        reservation_seconds=600.0, rebalance_moves=2
    )


def test_flags_beat_environment_beats_runtime_text_beats_file(tmp_path: Path) -> None:
    """Each layer overrides only the keys it names."""
    path = write(
        tmp_path,
        "log: {level: error, format: json}\nstrategy: pack\ncpuOvercommit: 2\nstateDir: /file\n",
    )
    loaded = config.load_config(
        path,
        {"NRI_NUMA_CPU_OVERCOMMIT": "4", "NRI_NUMA_STATE_DIR": "/environment"},
        {"stateDir": "/flag", "log.level": None},
        text="cpuOvercommit: 3\nlog: {level: debug}\n",
    )
    assert (loaded.state_dir, loaded.cpu_overcommit) == ("/flag", 4)
    log = loaded.log
    assert (log.level, log.format) == (sections.LogLevel.DEBUG, sections.LogFormat.JSON)
    assert loaded.strategy is Strategy.PACK


def test_the_short_environment_names_are_the_flags_and_the_full_name_wins() -> None:
    env = {"NRI_NUMA_HTTP": "off", "NRI_NUMA_NRI_SOCKET": "/x", "NRI_NUMA_PLUGIN_INDEX": "07"}
    loaded = config.load_config(env=env)
    runtime = loaded.runtime
    told = (loaded.http.address, runtime.nri_socket, runtime.plugin_index)
    assert told == ("off", "/x", "07")
    env["NRI_NUMA_HTTP_ADDRESS"] = "127.0.0.1:1"
    assert config.load_config(env=env).http.address == "127.0.0.1:1"


def test_every_key_has_an_environment_name() -> None:
    """And the names are what somebody would guess from the key."""
    names = layers.config_path_by_environment_name()
    assert set(names.values()) == set(sections.config_keys()) - {"apiVersion", "kind"}
    assert names["NRI_NUMA_KUBELET_COMPATIBILITY_EXCEPT"] == "kubeletCompatibility.except"
    assert names["NRI_NUMA_RESERVED_CPUS"] == "reservedCPUs"
    assert names["NRI_NUMA_ALIGN_L3"] == "alignL3"


def test_an_environment_value_that_is_no_yaml_is_said_with_its_name() -> None:
    with pytest.raises(ConfigError, match=r"rules: .* \(from environment NRI_NUMA_RULES\)"):
        config.load_config(env={"NRI_NUMA_RULES": "[{"})


def test_environment_values_of_every_kind_are_read() -> None:
    loaded = config.load_config(
        env={
            "NRI_NUMA_OBSERVE": "true",
            "NRI_NUMA_RESERVED_CPUS": "0",
            "NRI_NUMA_CAPACITY_FACTOR": "{1: 0.5}",
            "NRI_NUMA_PUBLISH_API_QPS": "9",
            "NRI_NUMA_RULES": "[{match: {qos: [BestEffort]}, set: {policy: none}}]",
            "NRI_NUMA_RECONCILE_INTERVAL": "5",
        }
    )
    assert loaded.observe
    assert loaded.capacity_factor == {1: 0.5}
    assert loaded.publish.api_qps == 9
    assert loaded.rules[0].match.qos == (QoSClass.BEST_EFFORT,)
    assert config.parse_duration(loaded.reconcile.interval) == 5
    assert config.derive_settings(loaded).reserved_cpus == CPUSet([0])


def test_environment_slips_are_errors_and_strangers_are_ignored() -> None:
    """Kubernetes' service links begin like our names and are nobody's mistake."""
    config.load_config(
        env={
            "NRI_NUMA_PORT_9891_TCP_ADDR": "10.0.0.1",
            "NRI_NUMA_SERVICE_HOST": "10.0.0.1",
            "NRI_NUMA_PORT": "tcp://10.0.0.1:9891",
            "NRI_NUMA_SOMETHING_ELSE_ENTIRELY": "x",
            "NRI_NUMA_CONFIG": "/x",
            "HOME": "/",
        }
    )
    with pytest.raises(ConfigError, match="did you mean NRI_NUMA_HTTP_ADDRESS"):
        config.load_config(env={"NRI_NUMA_HTTP_ADRESS": "x"})


def test_maps_are_replaced_and_not_mixed(tmp_path: Path) -> None:
    """Half of an old capacityFactor under a new one would drain nodes nobody meant."""
    path = write(tmp_path, "capacityFactor: {0: 0.1}\n")
    loaded = config.load_config(path, text="capacityFactor: {1: 0.2}")
    assert loaded.capacity_factor == {1: 0.2}


@pytest.mark.parametrize("text", ["", "\n# nothing\n", "http:\nlog:\n  level:\n", "{}", "---\n"])
def test_empty_documents_and_empty_keys_are_the_defaults(tmp_path: Path, text: str) -> None:
    assert config.load_config(write(tmp_path, text)) == AgentConfig()


def test_the_downward_apis_name_wins_over_the_files(tmp_path: Path) -> None:
    for nothing in ({}, {"NRI_NUMA_NODE_NAME": ""}):
        assert config.load_config(env=nothing).node_name == ""
    file = write(tmp_path, "nodeName: from-file")
    assert config.load_config(file).node_name == "from-file"
    loaded = config.load_config(file, env={"NRI_NUMA_NODE_NAME": "worker-7.example.org"})
    assert loaded.node_name == "worker-7.example.org"


# --- mistakes -----------------------------------------------------------------------------------


def test_every_mistake_is_listed_at_once_with_its_path_and_its_origin(tmp_path: Path) -> None:
    """Structural and semantic ones, from file, environment and flags, in one go."""
    found = mistakes(
        tmp_path,
        """
apiVersion: nri-numa/v9
htpp: {}
http: {address: "0.0.0.0:80", tlsKey: x}
reservedcpus: 0
capacityFactor: {0: 2, x: 1}
reservedCPUs: 3-1
strategy: packed
rules:
  - match: {namspaces: [a], qos: [Guarantee]}
    set: {polcy: best-effort, policy: best, scope: {}}
  - set: {}
  - match: {}
defaults: {cpus: both}
reconcile: {interval: soon}
publish: {apiQPS: 0}
runtime: {pluginName: "a b", pluginIndex: 100}
reservedMemory: {0: lots}
memoryOnlyNUMANodes: {ids: "1,,2"}
annotationPrefix: Numa/x
strictCPUReservation: yes
""",
        {"NRI_NUMA_LOG_LEVEL": "loud", "NRI_NUMA_OBSERVE": "maybe"},
        {"http.address": "1.2.3.4:99999"},
    )
    heads = {problem.partition(":")[0] for problem in found}
    assert heads == {
        "apiVersion",
        "htpp",
        "http.address",
        "http.tlsCert",
        "reservedcpus",
        "capacityFactor.0",
        "capacityFactor.x",
        "reservedCPUs",
        "strategy",
        "rules[0].match.namspaces",
        "rules[0].match.qos[0]",
        "rules[0].set.polcy",
        "rules[0].set.policy",
        "rules[0].set.scope",
        "rules[1].set",
        "rules[2].set",
        "defaults.cpus",
        "reconcile.interval",
        "publish.apiQPS",
        "runtime.pluginName",
        "runtime.pluginIndex",
        "reservedMemory.0",
        "memoryOnlyNUMANodes.ids",
        "annotationPrefix",
        "strictCPUReservation",
        "log.level",
        "observe",
    }
    joined = "\n".join(found)
    assert "htpp: unknown key, did you mean http?" in joined
    assert "reservedcpus: unknown key, did you mean reservedCPUs?" in joined
    assert "(from environment NRI_NUMA_LOG_LEVEL)" in joined
    assert "port 99999 is above 65535 (from command line)" in joined


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\na: 2\n", "line 2, column 1: the key 'a' stands here a second time"),
        ("capacityFactor: {0: 1, '0': 2}", "line 1, column 24: the key '0' stands here a second"),
        ("a: {1: 1, 1.0: 2}", "the key '1.0' stands here a second time"),
        ("a: [1\n", "line 2"),
        ("- a\n", "is a list, expected a mapping"),
        ("just words\n", "is a str, expected a mapping"),
        ("{}\n---\n{}\n", "line 2, column 1: but found another document"),
        ("? [a]\n: 1\n", "a key must be a word"),
        ("a: !!map [b]\n", "line 1, column 4: expected a mapping"),
        ("a: !!python/object:os.system {}\n", "could not determine a constructor"),
        ("x: " + "[" * 400_000 + "]" * 400_000, "nested more than 64 levels deep"),
        (
            "\n".join(
                f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 10)}]" for n in range(9)
            ),
            "line 5, column 45: aliases stand for 101218 nodes, expected at most 100000",
        ),
        ("x: " + "[" * 10, "did not find"),
        ("\0", "not allowed"),
    ],
)
def test_texts_that_are_no_document_say_where(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in "; ".join(mistakes(tmp_path, text))


def test_files_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "large").write_bytes(b"#" * (layers.MAX_CONFIG_BYTES + 1))
    for name, expected in (
        ("absent.yaml", "No such file"),
        (".", "Is a directory"),
        ("binary", "not UTF-8: byte 0"),
        ("large", "larger than 1 MiB"),
    ):
        with pytest.raises(ConfigError, match=expected):
            config.load_config(str(tmp_path / name))


@pytest.mark.parametrize(
    "text",
    [
        "observe: on",
        "cpuOvercommit: .nan",
        "cpuOvercommit: .inf",
        "cpuOvercommit: '2'",
        "capacityFactor: {0: .nan}",
        "rules: [{match: 1, set: {policy: none}}]",
        "http: {tokenFile: {}}",
        "capacityFactor: {-1: 1}",
        "capacityFactor: {99999: 1}",
        "rules: [1]",
        "rules: [{set: {policy: none, bind: true}}]",
        "defaults: {policy: }",
        "log: info",
        "runtime: {pluginIndex: '7'}",
        "runtime: {pluginIndex: '٠٧'}",
        "runtime: {nriSocket: ''}",
        "annotationPrefix: a_b",
        "annotationPrefix: numa.kubernetes.io/",
        "reconcile: {interval: -1}",
        "reservedMemory: {0: -1}",
        "reservedMemory: {0: 1Q}",
        "reservedMemory: {0: {hugepages-1Gi: 2}}",
        "kind: Pod",
        "http: {address: '127.0.0.1'}",
        "http: {address: ':x'}",
        "http: {address: '::1:80'}",
        "http: {address: ':9891'}",
        "http: {address: '10.0.0.7:9891', tokenFile: /t, allowAnonymous: true}",
        "http: {address: '[::]:9891'}",
        "http: {address: '127.evil.example:9891'}",
        "http: {tlsCert: x}",
        f"runtime: {{nriSocket: /{'x' * 110}}}",
        f"runtime: {{criSocket: unix:///{'x' * 110}}}",
        "runtime: {criSocket: relative.sock}",
        "runtime: {link: ttrpc}",
        "defaults: {numacpu: 1, bind: none}",
    ],
)
def test_bad_values_are_rejected(tmp_path: Path, text: str) -> None:
    found = mistakes(tmp_path, text)
    assert len(found) == 1
    assert ": " in found[0]


@pytest.mark.parametrize(
    "text",
    [
        "http: {address: '[::1]:0'}",
        "http: {address: 'localhost:9891'}",
        "http: {address: '127.8.9.1:9891'}",
        "http: {address: ':9891', tokenFile: /t, tlsCert: /c, tlsKey: /k}",
        "http: {address: ':9891', tokenFile: /t, allowPlaintextToken: true}",
        "publish: {apiQPS: 0.5, resyncInterval: 90, address: 'off'}",
        "http: {socket: /run/x/agent.sock}",
        "scheduler: {address: ':9894', allowAnonymous: true}",
        "controller: {address: ':1', tokenFile: x, tlsCert: c, tlsKey: k}",
        "controller: {address: ':1', tokenFile: x, allowPlaintextToken: true}",
        "http: {address: '127.0.0.1:9891', tokenFile: /t}",
        "http: {address: '0.0.0.0:9891', allowAnonymous: true}",
        "http: {address: off}",
        "runtime: {pluginIndex: 5}",
        "reservedCPUs: 0",
        "reservedMemory: {0: {memory: 1.5Gi, hugepages-1Gi: 2Gi}, 1: 1000000}",
        "rules: [{set: {numacpu: 3, load: 09:00-18:00}}]",
        "defaults: {policy: none}",
        "capacityFactor: {'1': 0}",
        "<<: {strategy: pack}",
    ],
)
def test_odd_but_good_values_are_taken(tmp_path: Path, text: str) -> None:
    config.derive_settings(config.load_config(write(tmp_path, text)))


def test_what_the_machine_does_not_have_is_a_mistake() -> None:
    """Checked when the machine is known, and all at once as well."""
    loaded = config.load_config(
        text="""
reservedCPUs: 0,5-6
capacityFactor: {0: 1, 7: 0.5}
reservedMemory: {1: 8Gi, 9: 1}
memoryOnlyNUMANodes: {ids: "0,2,4"}
"""
    )
    found = config.validate_config(loaded, machine())
    assert [p.partition(":")[0] for p in found] == [
        "reservedCPUs",
        "capacityFactor.7",
        "reservedMemory.9",
        "reservedMemory.1",
        "memoryOnlyNUMANodes.ids",
        "memoryOnlyNUMANodes.ids",
    ]
    assert "no CPUs 5-6" in found[0]
    whole = config.load_config(text="reservedCPUs: 0-3")
    assert "nothing is left" in config.validate_config(whole, machine())[0]
    assert config.validate_config(AgentConfig(), machine()) == []
    # An offline CPU may be reserved: it comes back.
    assert config.validate_config(config.load_config(text="reservedCPUs: 4"), machine()) == []


def test_the_machine_check_survives_bad_lists() -> None:
    """Form is said once, and not as a crash of the next check."""
    broken = AgentConfig(
        reserved_cpus="x",
        memory_only_numa_nodes=sections.MemoryOnlyNUMANodesSection(ids="y"),
        reserved_memory={0: "z"},
    )
    assert len(config.validate_config(broken, machine())) == 3


# --- reload -------------------------------------------------------------------------------------


def test_changes_are_told_apart_by_what_a_reload_can_do() -> None:
    old = config.load_config()
    new = config.load_config(
        text="""
log: {level: debug, file: /x}
http: {address: off}
rules: [{set: {policy: none}}]
strategy: pack
stateDir: /x
"""
    )
    live, restart = config.changed_paths(old, new)
    assert set(live) == {"log.level", "rules", "strategy"}
    assert set(restart) == {"log.file", "http.address", "stateDir"}
    assert config.changed_paths(old, old) == ((), ())


def test_a_reload_keeps_what_needs_a_restart() -> None:
    """So that the next reload names it again, and nobody reads a value that is not in effect."""
    old = config.load_config(text="http: {address: 127.0.0.1:1}\ncapacityFactor: {0: 0.5}")
    new = config.load_config(text="strategy: pack\nstateDir: /x\nreservedMemory: {1: 1Gi}")
    after = config.merge_reloadable(old, new)
    assert (after.http, after.state_dir) == (old.http, old.state_dir)
    assert (after.strategy, after.capacity_factor) == (new.strategy, {})
    assert dict(after.reserved_memory) == {1: "1Gi"}
    assert config.changed_paths(after, new) == ((), ("stateDir", "http.address"))
    assert config.merge_reloadable(old, old) == old


# --- values -------------------------------------------------------------------------------------


POLICY_RULES = KubeletRules(ties=True, cpus=True, memory=True)
FULL_RULES = replace(POLICY_RULES, static_cpus=True, cpu_order=True)


@pytest.mark.parametrize(
    ("text", "rules", "others"),
    [
        ("{}", KubeletRules(), (True, True, None)),
        ("{except: {alignBySocket: true}}", KubeletRules(align_by_socket=True), (True, True, None)),
        ("{mode: policies}", POLICY_RULES, (True, True, None)),
        ("{mode: full}", FULL_RULES, (False, False, CPUAmount(1))),
        (
            "{mode: full, except: {staticCPUs: false}}\nalignL3: true\n"
            "preferClosestNUMANodes: true\nsharedPool: {minCPUs: 3}",
            replace(FULL_RULES, static_cpus=False),
            (True, True, CPUAmount(3)),
        ),
    ],
)
def test_the_kubelets_rules_are_those_of_the_mode_and_its_exceptions(
    text: str, rules: KubeletRules, others: tuple[bool, bool, CPUAmount | None]
) -> None:
    made = config.derive_settings(config.load_config(text=f"kubeletCompatibility: {text}"))
    assert made.kubelet == rules
    assert (made.prefer_closest_numa_nodes, made.align_l3, made.limits.pool) == others


@pytest.mark.parametrize("more", ["", "strategy: packed\n"])
def test_an_unknown_kubelet_rule_is_rejected_with_the_known_ones(tmp_path: Path, more: str) -> None:
    text = f"{more}kubeletCompatibility: {{except: {{tie: true}}}}"
    (found,) = (one for one in mistakes(tmp_path, text) if one.startswith("kubelet"))
    assert "tie" in found
    assert "expected " in found
    assert "alignBySocket" in found


def test_settings_are_what_the_file_says() -> None:
    made = config.derive_settings(
        config.load_config(
            text=r"""
annotationPrefix: numa.example.org
podReservationTimeout: 1m30s
defaults: {policy: "restricted\n"}
rules:
  - match:
      namespaces: [a*]
      labels: {x: y}
      qos: [Burstable]
      runtimeHandlers: [kata]
      containers: [c]
    set: {numacpu: 3}
strategy: pack
cpuOvercommit: 1.5
capacityFactor: {1: 0.25}
reservedCPUs: 0-1
strictCPUReservation: true
reservedMemory: {0: 1Gi}
kubeletCompatibility: {except: {cpuOrder: true}}
memoryOnlyNUMANodes: {ids: 2}
injectEnvironment: false
rebalance: {maxMoves: 3}
"""
        )
    )
    assert made == Settings(
        reservation_seconds=90.0,
        rebalance_moves=3,
        prefix="numa.example.org",
        defaults={"policy": "restricted"},
        rules=(
            Rule(
                namespaces=("a*",),
                labels={"x": "y"},
                qos=(QoSClass.BURSTABLE,),
                runtime_handlers=("kata",),
                containers=("c",),
                values={"numacpu": "3"},
            ),
        ),
        strategy=Strategy.PACK,
        cpu_overcommit=1.5,
        capacity_factor={1: 0.25},
        reserved_cpus=CPUSet([0, 1]),
        strict_cpu_reservation=True,
        reserved_memory={0: 1 << 30},
        kubelet=KubeletRules(cpu_order=True),
        memory_only_numa_nodes=NUMASet([2]),
        inject_environment=False,
    )


@pytest.mark.parametrize(
    ("text", "amount"),
    [("0", 0), (7, 7), ("1k", 1000), ("1Ki", 1024), ("1.5Gi", 3 << 29), ("2E", 2 * 10**18)],
)
def test_quantities(text: str | int, amount: int) -> None:
    assert values.parse_memory_bytes(text) == amount


@pytest.mark.parametrize("text", ["", "1 Gi", "Gi", "-1", "1e3", "１", "1K", "1" * 50, "0x10"])
def test_bad_quantities(text: str) -> None:
    with pytest.raises(ValueError, match="no quantity"):
        values.parse_memory_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(0, 0), (1.5, 1.5), ("10", 10), ("250ms", 0.25), ("1m30s", 90), ("1.5h", 5400)],
)
def test_durations(text: str | float, seconds: float) -> None:
    assert config.parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "1 s", "-1s", "1d", float("nan"), "١s"])
def test_bad_durations(text: str | float) -> None:
    with pytest.raises(ValueError, match="no duration"):
        config.parse_duration(text)


# --- YAML ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("on", "on"), ("no", "no"), ("010", 10), ("10:30", "10:30"), ("1_000", "1_000"),
     ("0x1f", "0x1f"), ("2024-01-01", "2024-01-01"), ("1,23", "1,23"), ("True", True), ("~", None),
     ("1e3", 1000.0), ("9" * 30, "9" * 30)],
)  # fmt: skip
def test_scalars_mean_what_they_look_like(text: str, value: object) -> None:
    """YAML 1.1 would make true, 8, 630, 1000, 31 and a date of some of them."""
    assert safe_yaml.parse_yaml12(f"a: {text}") == {"a": value}


# --- generated files ----------------------------------------------------------------------------


def test_the_shipped_schema_is_fresh_and_accepts_what_the_loader_accepts() -> None:
    """Run ``make schema`` when this fails."""
    shipped = json.loads((ROOT / "config" / "agent.schema.json").read_text())
    assert shipped == document()
    Draft202012Validator.check_schema(shipped)
    Draft202012Validator(shipped).validate(config.effective_document(AgentConfig()))


def test_every_key_has_a_reference() -> None:
    for name, definition in described()["$defs"].items():
        for key, item in definition.get("properties", {}).items():
            assert item.get("description"), f"{name}.{key}"


def test_the_shipped_file_is_short_and_the_defaults_and_its_comments_are_valid() -> None:
    """What is commented out works where the comment sign is taken away."""
    lines = (ROOT / "config" / "agent.yaml").read_text().splitlines()
    assert config.load_config(text="\n".join(lines)) == AgentConfig()
    assert sum(not line.startswith("#") for line in lines if line) <= 30
    shown = [
        re.sub(r"^# (?=rules:|permissions:|  )", "", line)
        for line in lines
        if line not in ("rules: []", "permissions: []")
    ]
    loaded = config.load_config(text="\n".join(shown))
    assert config.changed_paths(AgentConfig(), loaded) == (("rules", "permissions"), ())


@pytest.mark.parametrize("key", ["nodeName", "strategy", "log", "kubelet"])
@pytest.mark.parametrize(
    "value",
    ["!!binary AAAA", "!!timestamp 2026-01-01", "!!set {a}", "!!omap [a: b]", "!!int x",
     "!!float x", "!!bool x", "!!python/name:os.x y", "5", "true", "1.5", "[a]",
     "{? !!binary A : b}"],
)  # fmt: skip
def test_values_of_other_types_are_mistakes_too(tmp_path: Path, key: str, value: str) -> None:
    """Tags that YAML has and JSON has not were a traceback, of `check` and of a reload."""
    assert mistakes(tmp_path, f"{key}: {value}\n")
