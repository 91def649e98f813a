"""What single keys may be, and which keys need or exclude one another."""

import pytest

from nri_numa import config as configuration
from nri_numa.config import AgentConfig, RuntimeLinkKind, driver_sockets, validate_config
from nri_numa.config.sections import DRA, DevicePluginSection, RuntimeLinkSection
from nri_numa.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *(
            (f"nodeName: '{name}'", f"nodeName: {name[:80]!r}, expected a node's name")
            for name in ("Worker-7", "worker_7", "-a", "a" * 254, "a b", "a/b")
        ),
        # publish, and the socket
        ("publish: {apiQPS: 0}", "publish.apiQPS: 0, expected more than 0"),
        ("reconcile: {maxRepairs: 0}", "reconcile.maxRepairs: 0, expected at least 1"),
        ("publish: {apiQPS: 101}", "publish.apiQPS: 101, expected at most 100"),
        (
            "publish: {resyncInterval: 100ms}",
            "publish.resyncInterval: 100ms, expected 1s to 86400s",
        ),
        ("publish: {resyncInterval: soon}", "publish.resyncInterval: 'soon' is no duration"),
        (
            "publish: {nodeResourceTopologyValidity: 10m}",
            "nodeResourceTopologyValidity: 10m, expected 0, or three times publish.resyncInterval",
        ),
        ("publish: {nodeResourceTopologyValidity: soon}", "'soon' is no duration"),
        ("publish: {address: '0.0.0.0:9892'}", "expected one on loopback, or off"),
        ("publish: {address: nowhere}", "publish.address: 'nowhere' is no address"),
        ("publish: {credentialsDir: ''}", "publish.credentialsDir: is empty"),
        ("publish: {event: true}", "did you mean events?"),
        ("http: {socket: agent.sock}", "http.socket: 'agent.sock', expected an absolute path"),
        (f"http: {{socket: /{'x' * 120}}}", "expected an absolute path of at most 107 bytes"),
        # a token over an open network, and what to do instead
        (
            "http: {address: ':9891', tokenFile: /t}",
            "http.tokenFile: clients would send the token to :9891 unencrypted; set http.tlsCert "
            "and http.tlsKey, or listen on 127.0.0.1, or set http.allowPlaintextToken: true where "
            "the network itself encrypts",
        ),
        # found when the file is read, and not by the first pod that the rule is for
        (
            "rules: [{set: {policy: none}}, {set: {numacpu: 3, bind: none}}]",
            "rules[1].set.numacpu: '3' is not valid, expected no bind 'none'",
        ),
        # controller
        (
            "controller: {evictions: {stuckPods: {delay: 0s}}}",
            "controller.evictions.stuckPods.delay: 0s, expected 1s to 86400s",
        ),
        ("controller: {evictions: {maxPerMinute: 0}}", "controller.evictions.maxPerMinute: 0"),
        (
            "controller: {evictions: {maxPerWorkloadPerHour: 0}}",
            "controller.evictions.maxPerWorkloadPerHour: 0",
        ),
        ("controller: {evictions: {stuckPods: {evicts: true}}}", "did you mean evict?"),
        (
            "controller: {evictions: {cpuSteal: {delay: never}}}",
            "controller.evictions.cpuSteal.delay: 'never' is no duration",
        ),
        (
            "controller: {evictions: {cpuSteal: {belowFactor: 0.95}}}",
            "controller.evictions.cpuSteal.belowFactor: 0.95, expected at most",
        ),
        (
            "controller: {evictions: {cpuSteal: {belowFactor: .nan}}}",
            "controller.evictions.cpuSteal",
        ),
        (
            "controller: {evictions: {cpuSteal: {maxAffectedFraction: -0.1}}}",
            "controller.evictions.cpuSteal.maxAffectedFraction: -0.1",
        ),
        ("controller: {prometheus: {url: ftp://x, query: y}}", "expected http:// or https://"),
        ("controller: {prometheus: {url: http://x}}", "prometheus.query: is empty, but url is set"),
        ("controller: {tlsCert: x}", "controller.tlsKey: is not set, but controller.tlsCert is"),
        ("controller: {address: ':1', tokenFile: x}", "controller.tokenFile: clients would send"),
        (
            "controller: {address: ':1', page: {enabled: true}}",
            "controller.page.tokenFile: is not set",
        ),
        ("controller: {verdicts: {enabled: true}}", "cannot reach 127.0.0.1:9893; expected a"),
        (
            "controller: {tokenFile: x, page: {enabled: true, tokenFile: x}}",
            "controller.page.tokenFile: 'x' is controller.tokenFile too",
        ),
        # scheduler
        ("scheduler: {address: '0.0.0.0:9894'}", "scheduler.clientCA, or scheduler.allowAnonymous"),
        ("scheduler: {address: 'off'}", "where kube-scheduler can reach it"),
        ("scheduler: {address: here}", "expected host:port"),
        ("scheduler: {tlsCert: a}", "scheduler.tlsKey: is not set"),
        ("scheduler: {clientCA: a}", "needs scheduler.tlsCert"),
        ("scheduler: {bindTimeout: 5s}", "scheduler.bindTimeout: 5s, expected 0.1s to 4s"),
        (
            "scheduler: {topologyReportDelay: x}",
            "scheduler.topologyReportDelay: 'x' is no duration",
        ),
        # reading containers
        ("containerUsage: {interval: 10ms}", "containerUsage.interval: 10ms, expected 1s"),
        ("containerUsage: {interval: soon}", "containerUsage.interval: 'soon' is no duration"),
        ("containerUsage: {cpuPressure: true}", "expected metric, off or read"),
        (
            "containerUsage: {memory: read}\nhttp: {address: 'off'}",
            "containerUsage.memory: is read, but http.address is off",
        ),
        ("measuredCapacity: {mode: maybe}", "measuredCapacity.mode"),
        ("measuredCapacity: {halfLife: 0.5}", "measuredCapacity.halfLife: 0.5, expected 1s"),
        ("measuredCapacity: {minFactor: 2}", "measuredCapacity.minFactor: 2, expected at most 1"),
        ("rebalance: {maxMoves: 4}", "rebalance.maxMoves: 4, expected at most 3"),
        # devices
        ("devices: {cdiSpecDirs: [cdi]}", "devices.cdiSpecDirs: 'cdi', expected an absolute"),
        (f"devices: {{cdiSpecDirs: [{'/a,' * 9}]}}", "9 directories, expected at most 8"),
        ("dra: {driver: Upper.example.com}", "dra.driver: 'Upper.example.com', expected a DNS"),
        ("dra: {driver: nodots}", "dra.driver: 'nodots'"),
        (f"dra: {{driver: {'a' * 60}.com}}", "of at most 63 characters"),
        ("dra: {handoverDir: claims}", "dra.handoverDir: 'claims', expected an absolute path"),
        ("dra: {enabled: true}\ndevices: {cdiSpecDirs: []}", "devices.cdiSpecDirs: is empty"),
        ("devicePlugin: {socketDir: device-plugins}", "devicePlugin.socketDir: 'device-plugins'"),
        (f"devicePlugin: {{socketDir: /{'d' * 100}}}", "because sockets in it"),
    ],
)
def test_a_mistake_is_named_with_what_was_expected(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configuration.load_config(text=text)
    assert any(words in problem for problem in caught.value.problems), caught.value.problems


def test_what_costs_or_evicts_is_off_by_default() -> None:
    config = configuration.load_config(text="")
    evictions = config.controller.evictions
    reasons = (evictions.drained_numa_nodes, evictions.stuck_pods, evictions.cpu_steal)
    assert not any(one.evict for one in reasons)
    usage = config.container_usage
    assert (usage.memory, usage.cpu_pressure, config.dra.enabled) == ("off", "off", False)


def test_paths_of_sockets_are_short() -> None:
    config = AgentConfig(dra=DRA(enabled=True), kubelet_root="/" + "k" * 80)
    (problem,) = validate_config(config)
    assert "makes a socket's path of" in problem
    assert driver_sockets("/var/lib/kubelet", "d.example.com") == (
        "/var/lib/kubelet/plugins_registry/d.example.com-reg.sock",
        "/var/lib/kubelet/plugins/d.example.com/dra.sock",
    )


def test_claims_are_not_seen_over_cri() -> None:
    over_cri = AgentConfig(
        runtime=RuntimeLinkSection(link=RuntimeLinkKind.CRI), dra=DRA(enabled=True)
    )
    (problem,) = validate_config(over_cri)
    assert problem.startswith("dra.enabled: is on, and runtime.link is cri")
    assert validate_config(AgentConfig(dra=DRA(enabled=True))) == []


@pytest.mark.parametrize(
    "name",
    [
        "numa.example.com/exclusive-cpu",
        "a/b",
        "example.com/Exclusive_CPU.v1",
        "mykubernetes.iox/cpu",
        f"{'a' * 244}/{'b' * 63}",
    ],
)
def test_good_names_of_the_extended_resource(name: str) -> None:
    assert validate_config(AgentConfig(device_plugin=DevicePluginSection(resource_name=name))) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("exclusive-cpu", "has no prefix"),
        ("numa.kubernetes.io/exclusive-cpu", "below kubernetes.io"),
        ("kubernetes.io/cpu", "below kubernetes.io"),
        ("mykubernetes.io/cpu", "below kubernetes.io"),  # the API server looks for the text
        ("requests.example.com/cpu", "language of quotas"),
        ("Example.com/cpu", "no DNS name"),
        ("/cpu", "no DNS name"),
        (f"{'a' * 245}/b", "no DNS name"),
        ("example.com/", "after the slash"),
        ("example.com/-cpu", "after the slash"),
        ("example.com/a/b", "after the slash"),
        ("example.com/cpü", "after the slash"),
        (f"a/{'b' * 64}", "after the slash"),
    ],
)
def test_what_the_api_server_refuses_is_a_mistake(name: str, words: str) -> None:
    (problem,) = validate_config(AgentConfig(device_plugin=DevicePluginSection(resource_name=name)))
    assert problem.startswith("devicePlugin.resourceName: ")
    assert words in problem
    assert "expected" in problem
