"""Scheduler and controller as they are shipped: few rights, the same by Kustomize and Helm."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from nri_numa import config as configuration
from nri_numa.config.sections import camel_case
from nri_numa.controller.service import LEASE_NAME
from tests.beds.install_manifests import (
    BASE,
    charted,
    documents,
    helm,
    in_the_chart,
    kustomized,
    rejection,
)

PAGE = BASE.parents[2] / "docs/security.md"
ON = {
    "scheduler": ("--set=scheduler.enabled=true",),
    "controller": (
        "--set=publish.enabled=true,config.publish.nodeResourceTopology=true",
        "--set=controller.enabled=true",
    ),
}
SERVED = (
    *ON["scheduler"],
    "--set=scheduler.kubeScheduler.enabled=false",
    "--set=config.scheduler.address=:9894,config.scheduler.leaseName=nri-numa-scheduler",
)
SECRET = "/etc/nri-numa-secret"
TLS = {
    "scheduler": (
        *SERVED,
        "--set=scheduler.secretName=extender",
        f"--set=config.scheduler.tlsCert={SECRET}/tls.crt",
        f"--set=config.scheduler.tlsKey={SECRET}/tls.key",
        f"--set=config.scheduler.clientCA={SECRET}/ca.crt",
    ),
    "controller": (
        *ON["controller"],
        "--set=controller.secretName=nri-numa-controller",
        "--set=config.controller.address=0.0.0.0:9893",
        f"--set=config.controller.tokenFile={SECRET}/token",
        f"--set=config.controller.tlsCert={SECRET}/tls.crt",
        f"--set=config.controller.tlsKey={SECRET}/tls.key",
    ),
}
RIGHTS = {
    "scheduler": {
        ("noderesourcetopologies", "list", "watch"),
        ("pods", "get", "list", "watch"),
        ("pods/binding", "create"),
        ("nodes", "get"),
        ("poddisruptionbudgets", "list"),
        ("resourceclaims", "list"),
        ("events", "create"),
        ("nodes", "patch"),
        ("leases", "create"),
        ("leases", "get", "update"),
    },
    "controller": {
        ("nodes", "list", "watch", "patch"),
        ("leases", "create"),
        ("leases", "get", "update"),
    },
}


def pod_of(workload: dict[str, Any]) -> dict[str, Any]:
    """What a DaemonSet or a Deployment says of its pods."""
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    return spec


def rules(part: str) -> list[dict[str, Any]]:
    return [rule for one in documents(f"{part}/role.yaml") for rule in one.get("rules", ())]


def extender(made: dict[tuple[str, str], Any]) -> dict[str, Any]:
    """What the chart's kube-scheduler knows of its only extender."""
    text = made["ConfigMap", "nri-numa-scheduler"]["data"]["scheduler.yaml"]
    (found,) = yaml.safe_load(text)["extenders"]
    return dict(found)


# --- both -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ON)
def test_it_has_no_rights_on_the_node_and_few_in_the_cluster(part: str) -> None:
    (deployment,) = documents(f"{part}/deployment.yaml")
    pod = pod_of(deployment)
    for container in pod["containers"]:
        security = pod.get("securityContext", {}) | container["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert all(mount["readOnly"] for mount in container["volumeMounts"])
    assert not [volume for volume in pod["volumes"] if "hostPath" in volume]
    assert not {"hostPID", "hostIPC", "hostNetwork"} & pod.keys()
    assert {(rule["resources"][0], *rule["verbs"]) for rule in rules(part)} == RIGHTS[part]


@pytest.mark.parametrize("part", ON)
def test_its_pods_are_not_the_daemonsets(part: str) -> None:
    ours = charted(*ON[part])
    selector = ours["DaemonSet", "nri-numa"]["spec"]["selector"]["matchLabels"]
    labels = ours["Deployment", f"nri-numa-{part}"]["spec"]["template"]["metadata"]["labels"]
    assert not selector.items() <= labels.items()


POLICY = "--set=networkPolicy.enabled=true"


@pytest.mark.parametrize(("part", "port"), [("scheduler", 9894), ("controller", 9893)])
def test_only_the_port_that_is_served_is_open_where_that_is_wanted(part: str, port: int) -> None:
    """And none where it serves its own pod, or loopback."""
    name = ("NetworkPolicy", f"nri-numa-{part}")
    assert name not in charted(*ON[part])
    assert name not in charted(POLICY)
    closed = charted(*ON[part], POLICY)[name]["spec"]
    assert (closed["policyTypes"], closed["ingress"]) == (["Ingress"], [])
    made = charted(*TLS[part], POLICY)
    template = made["Deployment", name[1]]["spec"]["template"]
    assert closed["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert made[name]["spec"]["ingress"] == [{"ports": [{"port": port}]}]
    own = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "nri-numa-controller"}}}
    peers = f'--set-json=networkPolicy.{part}.from=[{{"ipBlock":{{"cidr":"192.0.2.0/24"}}}}]'
    assert charted(*TLS[part], POLICY, peers)[name]["spec"]["ingress"] == [
        {
            "ports": [{"port": port}],
            "from": [
                {"ipBlock": {"cidr": "192.0.2.0/24"}},
                *([own] if part == "controller" else []),  # one hands on to another
            ],
        }
    ]
    wrong = f'--set-json=networkPolicy.{part}.from=["10.0.0.0/8"]'
    assert f"networkPolicy/{part}/from" in rejection(*ON[part], POLICY, wrong)


# --- the scheduler --------------------------------------------------------------------------------


def test_the_schedulers_configuration_is_that_of_kustomize() -> None:
    ours = charted(*ON["scheduler"])
    (scheduler,) = documents("scheduler/scheduler.yaml")
    text = ours["ConfigMap", "nri-numa-scheduler"]["data"]["scheduler.yaml"]
    assert yaml.safe_load(text) == scheduler
    assert ("Service", "nri-numa-scheduler") not in ours
    (names,) = (rule["resourceNames"] for rule in rules("scheduler") if "resourceNames" in rule)
    assert scheduler["leaderElection"]["resourceName"] in names
    address = configuration.AgentConfig().scheduler.address
    assert extender(ours)["urlPrefix"] == f"http://{address}"


def test_who_does_not_narrow_is_asked_for_scores() -> None:
    """Else nobody would know which of the nodes with room suits best."""
    for narrow, verb in (("true", None), ("false", "prioritize")):
        made = extender(charted(*ON["scheduler"], f"--set=config.scheduler.filterToBest={narrow}"))
        assert made.get("prioritizeVerb") == verb
        assert bool(made.get("weight")) == bool(verb)


def test_without_preemption_the_extender_reads_no_budgets() -> None:
    for enabled in (True, False):
        made = charted(*ON["scheduler"], f"--set=scheduler.preemption={str(enabled).lower()}")
        resources = [r for rule in made["ClusterRole", "nri-numa-scheduler"]["rules"]
                     for r in rule["resources"]]  # fmt: skip
        assert ("preemptVerb" in extender(made)) is enabled
        assert ("poddisruptionbudgets" in resources) is enabled
        assert ("resourceclaims" in resources) is enabled
        assert ("events" in resources) is enabled


def test_the_default_scheduler_asks_a_service_with_certificates() -> None:
    """Whoever may call bind can send any waiting pod to any node."""
    ours = charted(*TLS["scheduler"])
    (port,) = ours["Service", "nri-numa-scheduler"]["spec"]["ports"]
    asked = extender(ours)
    assert asked["urlPrefix"] == "https://nri-numa-scheduler.nri-numa.svc:9894"
    assert port["port"] == 9894
    assert asked["enableHTTPS"] is True
    assert set(asked["tlsConfig"]) == {"certFile", "keyFile", "caFile", "serverName"}
    assert asked["tlsConfig"]["serverName"] == "nri-numa-scheduler.nri-numa.svc"
    assert asked["ignorable"] is False
    assert asked["managedResources"] == [{"name": "numa.example.com/exclusive-cpu"}]
    (container,) = pod_of(ours["Deployment", "nri-numa-scheduler"])["containers"]
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"
        assert container[probe]["timeoutSeconds"] == 5
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["secret"] == SECRET
    # Its account is no kube-scheduler then.
    assert ("ClusterRoleBinding", "nri-numa-scheduler-stock") not in ours
    config = ours["ConfigMap", "nri-numa"]["data"]["agent.yaml"]
    assert yaml.safe_load(config)["scheduler"]["leaseName"] == "nri-numa-scheduler"


def test_what_does_not_go_together_is_said() -> None:
    alone = rejection(*ON["scheduler"], "--set=scheduler.kubeScheduler.enabled=false")
    assert "config.scheduler.address is 127.0.0.1:9894" in alone
    assert "leaseName is not set" in rejection(*SERVED, "--set=config.scheduler.leaseName=")
    assert rejection(*ON["scheduler"], "--set=scheduler.name=default-scheduler")


# --- the controller -------------------------------------------------------------------------------


def test_where_the_controller_looks_is_where_things_are() -> None:
    (deployment,) = documents("controller/deployment.yaml")
    (container,) = pod_of(deployment)["containers"]
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    assert mounts["token"] == configuration.AgentConfig().controller.credentials_dir
    (names,) = (rule["resourceNames"] for rule in rules("controller") if "resourceNames" in rule)
    assert names == [LEASE_NAME]
    page = PAGE.read_text()
    for resource, *verbs in RIGHTS["controller"] | RIGHTS["scheduler"]:
        assert f"| {resource} | {', '.join(verbs)} |" in page


def test_the_agent_reads_what_the_publisher_writes() -> None:
    """By Kustomize, and by Helm in the same places."""
    ours = pod_of(charted(*ON["controller"])["DaemonSet", "nri-numa"])
    theirs = pod_of(kustomized("base", "publish", "controller")["DaemonSet"])
    found = {}
    for container in theirs["containers"]:
        (mount,) = (m for m in container["volumeMounts"] if m["name"] == "capacity")
        (file,) = (
            e["value"] for e in container["env"] if e["name"] == "NRI_NUMA_OFFLINE_CAPACITY_FILE"
        )
        assert Path(file).parent == Path(mount["mountPath"])
        found[container["name"]] = mount.get("readOnly", False)
    assert found == {"nri-numa": True, "publish": False}
    volumes = [{v["name"]: v for v in pod["volumes"]}["capacity"] for pod in (ours, theirs)]
    assert volumes[0] == volumes[1]
    for one, other in zip(ours["containers"], theirs["containers"], strict=True):
        paths = [sorted(m["mountPath"] for m in c["volumeMounts"]) for c in (one, other)]
        assert paths[0] == paths[1], one["name"]


EVICTS = [("pods/eviction", "create"), ("events", "create")]
READS = ("noderesourcetopologies", "list, watch")


@pytest.mark.parametrize(
    ("component", "key", "more", "below"),
    [
        ("controller-drain", "evictions.drained_numa_nodes.evict", [("pods", "list"), *EVICTS], ""),
        ("controller-page", "page.enabled", [READS], ""),
        (
            "controller-stuck",
            "evictions.stuck_pods.evict",
            [READS, ("pods", "list, watch"), *EVICTS],
            "",
        ),
        (
            "controller-stuck-partly",
            "evictions.stuck_pods.include_running",
            [("events", "list, watch")],
            "controller-stuck",
        ),
        (
            "controller-verdicts",
            "verdicts.enabled",
            [READS, ("pods", "list, watch")],
            "controller-service",
        ),
        ("controller-steal", "evictions.cpu_steal.evict", [READS, ("pods", "list"), *EVICTS], ""),
    ],
)
def test_each_more_is_a_right_of_its_own(
    component: str, key: str, more: list[tuple[str, str]], below: str
) -> None:
    """The same by Helm, documented, and there only where its key of the configuration is set.

    `below`: the component without which it means nothing.
    """
    role, *_ = documents(f"{component}/role.yaml")
    assert [(r["resources"][0], ", ".join(r["verbs"])) for r in role["rules"]] == more
    page = PAGE.read_text()
    assert all(f"| {resource} | {verbs} |" in page for resource, verbs in more)
    on = (
        *ON["controller"],
        "--set=config.controller.address=:9893",
        *(
            ["--set=config.controller.evictions.stuckPods.evict=true"]
            if "partly" in component
            else ()
        ),
    )
    keys = key.split(".")
    switch = f"--set=config.controller.{'.'.join(map(camel_case, keys))}=true"
    in_the_chart(charted(*on, switch), f"{component}/role.yaml")
    assert component not in helm(*on).stdout
    environment = {
        one["name"]: one["value"]
        for patch in documents(*(f"{one}/container.yaml" for one in (below, component) if one))
        for container in pod_of(patch)["containers"]
        for one in container["env"]
    }
    value: Any = configuration.load_config(None, environment).controller
    for name in keys:
        value = getattr(value, name)
    assert value is True
    assert kustomized("base", "publish", "controller", *filter(None, [below]), component)


def test_a_controller_that_listens_has_probes_and_a_service() -> None:
    """The same by Kustomize and Helm; on loopback, where no probe gets to, neither."""
    found = kustomized("base", "publish", "controller", "controller-service")
    ours = charted(*TLS["controller"])
    pods = [pod_of(found["Deployment"]), pod_of(ours["Deployment", "nri-numa-controller"])]
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
    controller = configuration.load_config(None, environment).controller
    assert (controller.address, controller.token_file) == ("0.0.0.0:9893", f"{SECRET}/token")
    quiet = charted(*ON["controller"])
    (container,) = pod_of(quiet["Deployment", "nri-numa-controller"])["containers"]
    assert not container.keys() & {"ports", "livenessProbe", "readinessProbe"}
    assert ("Service", "nri-numa-controller") not in quiet
