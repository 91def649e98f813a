"""The scheduler as it is shipped: no more rights than it needs, the same by Kustomize and Helm."""

from __future__ import annotations

import yaml

from nri_numa import config as configuration
from nri_numa.engine.request.annotations import PLACED
from nri_numa.scheduler.watcher import ROOM
from tests.shipped.test_install_manifests import CHART, charted, documents, helm, in_the_chart

PARTS = ("serviceaccount", "role", "policies", "deployment")
ON = ("--set", "scheduler.enabled=true")
SERVED = (
    *ON,
    *("--set", "scheduler.kubeScheduler.enabled=false"),
    *("--set", "config.scheduler.address=:9894"),
    *("--set", "config.scheduler.lease=nri-numa-scheduler"),
)
TLS = (
    *SERVED,
    *("--set", "scheduler.secretName=extender"),
    *("--set", "config.scheduler.tlsCert=/etc/nri-numa-secret/tls.crt"),
    *("--set", "config.scheduler.tlsKey=/etc/nri-numa-secret/tls.key"),
    *("--set", "config.scheduler.clientCA=/etc/nri-numa-secret/ca.crt"),
)


def test_the_chart_says_the_same_as_kustomize() -> None:
    ours = charted(*ON)
    in_the_chart(ours, *(f"scheduler/{one}.yaml" for one in PARTS))
    (scheduler,) = documents("scheduler/scheduler.yaml")
    text = ours["ConfigMap", "nri-numa-scheduler"]["data"]["scheduler.yaml"]
    assert yaml.safe_load(text) == scheduler
    assert ("Service", "nri-numa-scheduler") not in ours


def test_who_does_not_narrow_is_asked_for_scores() -> None:
    """Else nobody would know which of the nodes with room suits best."""
    for narrow, verb in (("true", None), ("false", "prioritize")):
        made = charted(*ON, "--set", f"config.scheduler.narrow={narrow}")
        text = made["ConfigMap", "nri-numa-scheduler"]["data"]["scheduler.yaml"]
        (extender,) = yaml.safe_load(text)["extenders"]
        assert extender.get("prioritizeVerb") == verb
        assert bool(extender.get("weight")) == bool(verb)


def test_the_default_scheduler_asks_a_service_with_certificates() -> None:
    """Whoever may call bind can send any waiting pod to any node."""
    ours = charted(*TLS)
    (port,) = ours["Service", "nri-numa-scheduler"]["spec"]["ports"]
    text = ours["ConfigMap", "nri-numa-scheduler"]["data"]["scheduler.yaml"]
    (extender,) = yaml.safe_load(text)["extenders"]
    assert extender["urlPrefix"] == "https://nri-numa-scheduler.nri-numa.svc:9894"
    assert port["port"] == 9894
    assert extender["enableHTTPS"] is True
    assert set(extender["tlsConfig"]) == {"certFile", "keyFile", "caFile"}
    assert extender["ignorable"] is False
    assert extender["managedResources"] == [{"name": "numa.example.com/exclusive-cpu"}]
    pod = ours["Deployment", "nri-numa-scheduler"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["secret"] == "/etc/nri-numa-secret"
    # Its account is no kube-scheduler then.
    assert ("ClusterRoleBinding", "nri-numa-scheduler-stock") not in ours
    config = ours["ConfigMap", "nri-numa"]["data"]["agent.yaml"]
    assert yaml.safe_load(config)["scheduler"]["lease"] == "nri-numa-scheduler"


def test_what_does_not_go_together_is_said() -> None:
    done = helm(*ON, "--set", "scheduler.kubeScheduler.enabled=false")
    assert done.returncode != 0
    assert "config.scheduler.address is 127.0.0.1:9894" in done.stderr
    done = helm(*SERVED, "--set", "config.scheduler.lease=")
    assert done.returncode != 0
    assert "config.scheduler.lease is not set" in done.stderr
    done = helm(*ON, "--set", "scheduler.name=default-scheduler")
    assert done.returncode != 0


def test_its_container_has_no_rights_and_few_in_the_cluster() -> None:
    (deployment,) = documents("scheduler/deployment.yaml")
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    for container in pod["containers"]:
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert all(mount["readOnly"] for mount in container["volumeMounts"])
    assert not [volume for volume in pod["volumes"] if "hostPath" in volume]
    rules = {
        (rule["resources"][0], *rule["verbs"])
        for one in documents("scheduler/role.yaml")
        for rule in one.get("rules", ())
    }
    assert rules == {
        ("noderesourcetopologies", "get", "list", "watch"),
        ("pods", "get", "list", "watch"),
        ("pods/binding", "create"),
        ("nodes", "patch"),
        ("leases", "create"),
        ("leases", "get", "update"),
    }


def test_the_policies_name_the_two_annotations() -> None:
    policies = [
        d for d in documents("scheduler/policies.yaml") if d["kind"] == "ValidatingAdmissionPolicy"
    ]
    nodes, bindings = (policy["spec"] for policy in policies)
    assert f"numa.kubernetes.io/{ROOM}'" in nodes["validations"][1]["expression"]
    # It applies to wrong bindings, and refuses each of them (docs/adr/0059).
    ((wrong,), (refused,)) = bindings["matchConditions"], bindings["validations"]
    assert f"numa.kubernetes.io/{PLACED}'" in wrong["expression"]
    assert refused["expression"] == "false"
    for one in documents("scheduler/policies.yaml"):
        spec = one["spec"]
        assert spec.get("failurePolicy", "Fail") == "Fail"
        assert spec.get("validationActions", ["Deny"]) == ["Deny"]
    other = charted(*ON, "--set", "config.annotationPrefix=numa.example.org")
    text = yaml.safe_dump(other["ValidatingAdmissionPolicy", "nri-numa-scheduler-nodes"])
    assert f"numa.example.org/{ROOM}" in text
    assert f"numa.kubernetes.io/{ROOM}" not in text


def test_the_lease_of_the_role_is_that_of_the_schedulers() -> None:
    (scheduler,) = documents("scheduler/scheduler.yaml")
    (names,) = (
        rule["resourceNames"]
        for one in documents("scheduler/role.yaml")
        for rule in one.get("rules", ())
        if "resourceNames" in rule
    )
    assert scheduler["leaderElection"]["resourceName"] in names
    (extender,) = scheduler["extenders"]
    address = configuration.AgentConfig().scheduler.address
    assert extender["urlPrefix"] == f"http://{address}"


def test_the_schedulers_pods_are_not_the_daemonsets() -> None:
    ours = charted(*ON)
    selector = ours["DaemonSet", "nri-numa"]["spec"]["selector"]["matchLabels"]
    labels = ours["Deployment", "nri-numa-scheduler"]["spec"]["template"]["metadata"]["labels"]
    assert not selector.items() <= labels.items()


def test_it_is_off_by_default() -> None:
    assert not [name for _, name in charted() if "scheduler" in name]
    assert not yaml.safe_load((CHART / "values.yaml").read_text())["scheduler"]["enabled"]


POLICY = "--set=networkPolicy.enabled=true"


def test_only_the_port_that_is_served_is_open_where_that_is_wanted() -> None:
    """And none where it serves its own pod."""
    name = ("NetworkPolicy", "nri-numa-scheduler")
    assert name not in charted(*ON)
    assert name not in charted(POLICY)
    closed = charted(*ON, POLICY)[name]["spec"]
    assert (closed["policyTypes"], closed["ingress"]) == (["Ingress"], [])
    made = charted(*TLS, POLICY)
    template = made["Deployment", "nri-numa-scheduler"]["spec"]["template"]
    assert closed["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert made[name]["spec"]["ingress"] == [{"ports": [{"port": 9894}]}]
    peers = '--set-json=networkPolicy.scheduler.from=[{"ipBlock":{"cidr":"192.0.2.0/24"}}]'
    assert charted(*TLS, POLICY, peers)[name]["spec"]["ingress"] == [
        {"ports": [{"port": 9894}], "from": [{"ipBlock": {"cidr": "192.0.2.0/24"}}]}
    ]


def test_whom_a_network_policy_cannot_name_is_refused() -> None:
    done = helm(*ON, POLICY, '--set-json=networkPolicy.scheduler.from=["10.0.0.0/8"]')
    assert done.returncode != 0
    assert "networkPolicy/scheduler/from" in done.stderr
