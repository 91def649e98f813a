"""The controller as it is shipped: no more rights than it needs, the same by Kustomize and Helm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from nri_numa import config as configuration
from nri_numa.config.sections import camel_case
from nri_numa.controller.service import LEASE, ControllerMetrics
from nri_numa.model.offline_capacity import OFFLINE_CAPACITY
from tests.shipped.test_install_manifests import (
    BASE,
    CHART,
    charted,
    documents,
    helm,
    in_the_chart,
    kustomized,
)

PAGE = BASE.parents[2] / "docs/controller.md"
ON = ("--set", "publish.enabled=true", "--set", "controller.enabled=true")


def test_it_has_no_rights_on_the_node_and_few_in_the_cluster() -> None:
    (deployment,) = documents("controller/deployment.yaml")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert all(mount["readOnly"] for mount in container["volumeMounts"])
    assert not [volume for volume in pod["volumes"] if "hostPath" in volume]
    rules = {
        (rule["resources"][0], *rule["verbs"])
        for one in documents("controller/role.yaml")
        for rule in one.get("rules", ())
    }
    assert rules == {
        ("nodes", "list", "watch", "patch"),
        ("leases", "create"),
        ("leases", "get", "update"),
    }
    page = PAGE.read_text()
    for resource, *verbs in rules:
        assert f"| {resource} | {', '.join(verbs)} |" in page


def test_where_it_looks_is_where_things_are() -> None:
    (deployment,) = documents("controller/deployment.yaml")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    config = configuration.AgentConfig().controller
    assert mounts["token"] == config.credentials
    leases = [
        r
        for d in documents("controller/role.yaml")
        for r in d.get("rules", ())
        if "resourceNames" in r
    ]
    assert leases[0]["resourceNames"] == [LEASE]


def test_the_policy_names_the_one_annotation() -> None:
    policy, binding, evictions, of_evictions = documents("controller/policies.yaml")
    assert of_evictions["spec"]["policyName"] == evictions["metadata"]["name"]
    assert of_evictions["spec"]["validationActions"] == ["Deny"]
    assert "'kube-system'" in evictions["spec"]["matchConditions"][0]["expression"]
    assert binding["spec"]["validationActions"] == ["Deny"]
    assert policy["spec"]["failurePolicy"] == "Fail"
    assert (
        f"numa.kubernetes.io/{OFFLINE_CAPACITY}'" in policy["spec"]["validations"][1]["expression"]
    )


def test_the_agent_reads_what_the_publisher_writes() -> None:
    template = kustomized("base", "publish", "controller")["DaemonSet"]["spec"]["template"]
    found = {}
    for container in template["spec"]["containers"]:
        (mount,) = (m for m in container["volumeMounts"] if m["name"] == "capacity")
        (file,) = (
            e["value"] for e in container["env"] if e["name"] == "NRI_NUMA_OFFLINE_CAPACITY_FILE"
        )
        assert Path(file).parent == Path(mount["mountPath"])
        found[container["name"]] = mount.get("readOnly", False)
    assert found == {"nri-numa": True, "publish": False}


def test_the_chart_says_the_same_as_kustomize() -> None:
    ours = charted(*ON)
    parts = ("serviceaccount", "role", "policies", "deployment")
    in_the_chart(ours, *(f"controller/{one}.yaml" for one in parts))
    pods = ours["DaemonSet", "nri-numa"]["spec"]["template"]["spec"]
    want = kustomized("base", "publish", "controller")["DaemonSet"]["spec"]["template"]["spec"]
    volumes = [{v["name"]: v for v in pod["volumes"]}["capacity"] for pod in (pods, want)]
    assert volumes[0] == volumes[1]
    for one, other in zip(pods["containers"], want["containers"], strict=True):
        paths = [sorted(m["mountPath"] for m in c["volumeMounts"]) for c in (one, other)]
        assert paths[0] == paths[1], one["name"]


def test_the_controllers_pods_are_not_the_daemonsets() -> None:
    ours = charted(*ON)
    selector = ours["DaemonSet", "nri-numa"]["spec"]["selector"]["matchLabels"]
    labels = ours["Deployment", "nri-numa-controller"]["spec"]["template"]["metadata"]["labels"]
    assert not selector.items() <= labels.items()
    (deployment,) = documents("controller/deployment.yaml")
    base = yaml.safe_load((BASE / "daemonset.yaml").read_text())["spec"]["selector"]["matchLabels"]
    assert not base.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()


def test_it_is_off_by_default() -> None:
    assert "controller" not in "".join(name for _, name in charted())
    assert "capacity" not in helm().stdout
    assert not yaml.safe_load((CHART / "values.yaml").read_text())["controller"]["enabled"]


def test_the_page_has_every_metric() -> None:
    page = PAGE.read_text()
    metrics = ControllerMetrics("1")
    for one in metrics.all:
        (family,) = one.collect()
        suffix = "_total" if family.type == "counter" else ""
        assert f"| `{family.name}{suffix}` |" in page


@pytest.mark.parametrize(
    ("component", "keys", "rules", "below"),
    [
        (
            "controller-drain",
            ("drain", "evict"),
            [("pods", "list"), ("pods/eviction", "create"), ("events", "create")],
            "",
        ),
        (
            "controller-page",
            ("page", "enabled"),
            [("noderesourcetopologies", "list, watch")],
            "",
        ),
        (
            "controller-stuck",
            ("stuck", "evict"),
            [
                ("noderesourcetopologies", "list, watch"),
                ("pods", "list, watch"),
                ("pods/eviction", "create"),
                ("events", "create"),
            ],
            "",
        ),
        (
            "controller-stuck-partly",
            ("stuck", "partly_running"),
            [("events", "list, watch")],
            "controller-stuck",
        ),
        (
            "controller-steal",
            ("steal", "evict"),
            [
                ("noderesourcetopologies", "list, watch"),
                ("pods", "list"),
                ("pods/eviction", "create"),
                ("events", "create"),
            ],
            "",
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_each_more_is_a_right_of_its_own(
    component: str, keys: tuple[str, str], rules: list[tuple[str, str]], below: str
) -> None:
    """The same by Helm, documented, and there only where its key of the configuration is set.

    `below`: the component without which it means nothing.
    """
    role, _ = documents(f"{component}/role.yaml")
    assert [(r["resources"][0], ", ".join(r["verbs"])) for r in role["rules"]] == rules
    page = PAGE.read_text()
    assert all(f"| {resource} | {verbs} |" in page for resource, verbs in rules)
    on = (*ON, *(("--set", "config.controller.stuck.evict=true") if below else ()))
    key = ".".join(map(camel_case, keys))
    in_the_chart(charted(*on, "--set", f"config.controller.{key}=true"), f"{component}/role.yaml")
    assert component not in helm(*on).stdout
    (patch,) = documents(f"{component}/container.yaml")
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    environment = {one["name"]: one["value"] for one in container["env"]}
    value: Any = configuration.load(None, environment).controller
    for name in keys:
        value = getattr(value, name)
    assert value is True
    assert kustomized("base", "publish", "controller", *filter(None, [below]), component)


def test_who_listens_has_probes_and_a_service() -> None:
    """The same by Kustomize and Helm; on loopback, where no probe gets to, neither."""
    found = kustomized("base", "publish", "controller", "controller-service")
    secret = "/etc/nri-numa-secret"
    settings = {
        "address": "0.0.0.0:9893", "tokenFile": f"{secret}/token",
        "tlsCert": f"{secret}/tls.crt", "tlsKey": f"{secret}/tls.key",
    }  # fmt: skip
    arguments = [f"--set=config.controller.{key}={text}" for key, text in settings.items()]
    ours = charted(*ON, *arguments, "--set=controller.secretName=nri-numa-controller")
    pods = [
        one["spec"]["template"]["spec"]
        for one in (found["Deployment"], ours["Deployment", "nri-numa-controller"])
    ]
    for key in ("ports", "livenessProbe", "readinessProbe"):
        one, other = (pod["containers"][0][key] for pod in pods)
        assert one == other
    for pod in pods:
        (volume,) = (v for v in pod["volumes"] if v["name"] == "secret")
        assert volume["secret"] == {"secretName": "nri-numa-controller", "defaultMode": 0o440}
        (container,) = pod["containers"]
        assert {p["name"]: p["containerPort"] for p in container["ports"]} == {"http": 9893}
    service = ours["Service", "nri-numa-controller"]
    assert service["spec"] == found["Service"]["spec"]
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    environment = {e["name"]: e["value"] for e in pods[0]["containers"][0]["env"]}
    controller = configuration.load(None, environment).controller
    assert (controller.address, controller.token_file) == (
        settings["address"],
        settings["tokenFile"],
    )
    quiet = charted(*ON)
    (container,) = quiet["Deployment", "nri-numa-controller"]["spec"]["template"]["spec"][
        "containers"
    ]
    assert not container.keys() & {"ports", "livenessProbe", "readinessProbe"}
    assert ("Service", "nri-numa-controller") not in quiet


def test_only_the_port_that_is_served_is_open_where_that_is_wanted() -> None:
    """On loopback none is."""

    def ingress(*arguments: str) -> Any:
        done = helm(*ON, "--set=networkPolicy.enabled=true", *arguments)
        assert done.returncode == 0, done.stderr
        (policy,) = (
            one for one in yaml.safe_load_all(done.stdout) if one and one["kind"] == "NetworkPolicy"
        )
        assert policy["spec"]["podSelector"] == {
            "matchLabels": {"app.kubernetes.io/name": "nri-numa-controller"}
        }
        return policy["spec"]["ingress"]

    assert "NetworkPolicy" not in helm(*ON).stdout
    assert ingress() == []
    served = (
        "--set=controller.secretName=nri-numa-controller",
        "--set=config.controller.address=0.0.0.0:9893",
        "--set=config.controller.tokenFile=/etc/nri-numa-secret/token",
        "--set=config.controller.tlsCert=/etc/nri-numa-secret/tls.crt",
        "--set=config.controller.tlsKey=/etc/nri-numa-secret/tls.key",
    )
    assert ingress(*served) == [{"ports": [{"port": 9893}]}]
    peer = '[{"namespaceSelector":{"matchLabels":{"name":"monitoring"}}}]'
    (rule,) = ingress(*served, f"--set-json=networkPolicy.controller.from={peer}")
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]
