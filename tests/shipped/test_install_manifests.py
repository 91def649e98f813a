"""What operators install: the unit, the Kustomize base, the Helm chart, the containerd drop-ins."""

import contextlib
import json
import re
import shutil
import subprocess
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from nri_numa import __version__
from nri_numa import config as configuration
from nri_numa.config.layers import LayeredDocument
from nri_numa.config.old_keys import OLD_KEYS
from nri_numa.errors import ConfigError
from nri_numa.nri.runtime_config import containerd_nri_section
from tests.beds.install_manifests import (
    AS_ROOT,
    BASE,
    CHART,
    REPOSITORY,
    charted,
    documents,
    helm,
    helmed,
    in_the_chart,
    kustomized,
    program,
    rejection,
)
from tools import chart_files, helm_schema

SECCOMP = REPOSITORY / "config/security/nri-numa.json"
APPARMOR = REPOSITORY / "config/security/nri-numa.apparmor"
UNIT = REPOSITORY / "systemd/nri-numa.service"


# --- the DaemonSet ----------------------------------------------------------------------------


def test_the_pod_has_no_more_rights_than_it_needs_and_is_probed_where_it_answers() -> None:
    pod = yaml.safe_load((BASE / "daemonset.yaml").read_text())["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["securityContext"] == AS_ROOT
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        get = container[probe]["httpGet"]
        assert f"{get['host']}:{get['port']}" == configuration.AgentConfig().http.address
        assert container[probe]["timeoutSeconds"] == 5
    assert pod["automountServiceAccountToken"] is False
    assert not pod.get("hostPID")
    writable = [m["name"] for m in container["volumeMounts"] if not m.get("readOnly")]
    assert writable == ["state", "cgroup"]
    assert {v["name"] for v in pod["volumes"]} == {m["name"] for m in container["volumeMounts"]}


def test_one_version_everywhere() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
    for directory in ("base", "release"):
        text = (BASE.parent / directory / "kustomization.yaml").read_text()
        assert yaml.safe_load(text)["images"] == [
            {"name": "localhost/nri-numa", "newTag": __version__}
        ]


def test_kustomize_builds_the_base() -> None:
    documents = kustomized("base")
    assert set(documents) == {"Namespace", "ServiceAccount", "ConfigMap", "DaemonSet"}
    pod = documents["DaemonSet"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == f"localhost/nri-numa:{__version__}"
    # The hash in the name rolls the DaemonSet when the configuration changes.
    (name,) = [v["configMap"]["name"] for v in pod["volumes"] if "configMap" in v]
    assert name == documents["ConfigMap"]["metadata"]["name"]
    assert re.fullmatch(r"nri-numa-[a-z0-9]{10}", name)


def test_releasing_happens_before_the_pod_is_ready() -> None:
    """``rollout status`` tells when every node is released."""
    daemonset = kustomized("release")["DaemonSet"]["spec"]
    pod = daemonset["template"]["spec"]
    (init,), (container,) = pod["initContainers"], pod["containers"]
    base = kustomized("base")["DaemonSet"]["spec"]["template"]["spec"]["containers"][0]
    for key in ("image", "securityContext", "resources"):
        assert init[key] == container[key] == base[key]
    # Releasing goes through the runtime: of the mounts only the checkpoint's is writable.
    mounts = {m["name"]: m for m in base["volumeMounts"]}
    mounts["cgroup"] = {**mounts["cgroup"], "readOnly": True}
    for one in (init, container):
        assert {m["name"]: m for m in one["volumeMounts"]} == mounts
    assert init["args"] == ["release"]
    assert container["args"] == ["release", "--stay"]
    assert not [key for key in container if key.endswith("Probe")]
    assert daemonset["updateStrategy"]["rollingUpdate"]["maxUnavailable"] == "100%"


def test_the_device_plugin_sees_the_kubelets_directories_and_nothing_of_the_agents() -> None:
    made = kustomized("base", "publish", "device-plugin")["DaemonSet"]
    pod = made["spec"]["template"]["spec"]
    by_name = {one["name"]: one for one in pod["containers"]}
    assert by_name.keys() == {"nri-numa", "publish", "device-plugin"}
    assert {one["image"] for one in pod["containers"]} == {f"localhost/nri-numa:{__version__}"}
    agent, plugin = by_name["nri-numa"], by_name["device-plugin"]
    assert plugin["securityContext"] == agent["securityContext"]
    assert plugin["args"] == ["device-plugin"]
    mounts = {m["mountPath"]: not m.get("readOnly") for m in plugin["volumeMounts"]}
    assert mounts == {
        configuration.AgentConfig().device_plugin.socket_dir: True,
        "/var/lib/kubelet/pod-resources": False,
        "/etc/nri-numa": False,
    }
    assert pod["automountServiceAccountToken"] is False


def test_profiles_of_our_own_are_for_the_agent_alone() -> None:
    """The device plugin calls other things, and was not tried with them."""
    made = kustomized("base", "seccomp", "apparmor", "device-plugin")
    agent, plugin = made["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    assert agent["securityContext"].pop("appArmorProfile") == {
        "type": "Localhost",
        "localhostProfile": re.findall(r"^profile (\S+) ", APPARMOR.read_text(), re.MULTILINE)[0],
    }
    assert agent["securityContext"].pop("seccompProfile") == {
        "type": "Localhost",
        "localhostProfile": SECCOMP.name,
    }
    assert plugin["securityContext"].pop("seccompProfile") == {"type": "RuntimeDefault"}
    assert agent["securityContext"] == plugin["securityContext"]


# --- Helm -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("directories", "values"),
    [
        (["base"], ""),
        (["release"], "releaseContainers=true"),
        (["base", "device-plugin"], "devicePlugin.enabled=true"),
        (
            ["base", "seccomp", "device-plugin", "moves-memory"],
            "devicePlugin.enabled=true,seccompProfile=nri-numa.json,movesMemory=true",
        ),
        (["base", "apparmor"], "appArmorProfile=nri-numa"),
        (["base", "openshift"], "seLinuxOptions.type=spc_t"),
    ],
)
def test_the_chart_and_kustomize_are_equal_in_effect(directories: list[str], values: str) -> None:
    ours, theirs = helmed(*(["--set", values] if values else [])), kustomized(*directories)
    for objects in (ours, theirs):
        template = objects["DaemonSet"]["spec"]["template"]
        template["metadata"].pop("annotations", None)
        for volume in template["spec"]["volumes"]:
            if "configMap" in volume:
                volume["configMap"]["name"] = "same"
        # Which comes first makes no difference.
        containers = [*template["spec"]["containers"], *template["spec"].get("initContainers", [])]
        for named in (template["spec"]["volumes"], *(c["volumeMounts"] for c in containers)):
            named.sort(key=lambda one: str(one["name"]))
    assert ours["DaemonSet"]["spec"] == theirs["DaemonSet"]["spec"]
    texts = [d["ConfigMap"]["data"]["agent.yaml"] for d in (ours, theirs)]
    assert yaml.safe_load(texts[0]) == yaml.safe_load(texts[1])


ALL = (
    "--kube-version=v1.30.0",
    "--set=publish.enabled=true,controller.enabled=true,scheduler.enabled=true",
    "--set=admission.lists=true,admission.exclusive=true",
    *(f"--set=config.publish.{key}=true" for key in ("podAnnotation", "numatopology")),
    "--set=config.publish.nodeResourceTopology=true,config.controller.page.enabled=true",
    *(
        f"--set=config.controller.evictions.{key}.evict=true"
        for key in ("drainedNUMANodes", "stuckPods", "cpuSteal")
    ),
    "--set=config.controller.evictions.stuckPods.includeRunning=true",
)
OBJECTS = re.compile("serviceaccount|role|policies|mistakes|deployment|crd|deviceclass")


@pytest.mark.parametrize(
    ("more", "other"),
    [("dra.enabled", "publish-capacity"), ("publish.nodeCapacity", "publish-dra")],
)
def test_the_chart_has_the_objects_of_kustomize_and_no_further_right(more: str, other: str) -> None:
    ours = charted(*ALL, f"--set=config.{more}=true")
    rights = {
        key
        for key, one in ours.items()
        if "Role" in key[0] and "helm.sh/hook" not in one["metadata"].get("annotations", {})
    }
    others = (other, "base", "controller-verdicts")  # the last listens wider than loopback
    files = [
        f"{file.parent.name}/{file.name}"
        for file in BASE.parent.glob("*/*.yaml")
        if OBJECTS.fullmatch(file.stem) and file.parent.name not in others
    ]
    in_the_chart(ours, *files)
    assert rights <= {(one["kind"], one["metadata"]["name"]) for one in documents(*files)}
    made = charted(*ALL, f"--set=config.{more}=true", "--set=config.annotationPrefix=example.com")
    policies = [one["spec"] for (kind, _), one in made.items() if kind.startswith("Validating")]
    assert len(policies) > 20
    assert "numa.kubernetes.io" not in str(policies)


def test_the_extender_may_do_what_it_asks_for_and_no_more() -> None:
    """The chart has the same; a pod is got where another replica was asked about it."""
    rights: dict[str, set[str]] = {}
    for one in documents("scheduler/role.yaml"):
        for rule in one.get("rules", ()):
            for resource in rule["resources"]:
                rights.setdefault(resource, set()).update(rule["verbs"])
    assert rights == {
        "noderesourcetopologies": {"list", "watch"},
        "pods": {"get", "list", "watch"},
        "pods/binding": {"create"},
        "nodes": {"get", "patch"},
        "poddisruptionbudgets": {"list"},
        "resourceclaims": {"list"},
        "events": {"create"},
        "leases": {"create", "get", "update"},
    }


def test_the_chart_leaves_off_what_nobody_asked_for() -> None:
    assert not re.search("publish|scheduler|controller|capacity|numa-(lists|excl)", helm().stdout)
    more = helm("--set", "publish.enabled=true").stdout
    assert not re.search("topology.node|volcano|claims|publish-dra", more)


def test_the_chart_has_the_dra_driver_as_kustomize_does() -> None:
    ours = charted("--set", "publish.enabled=true,config.dra.enabled=true")
    ours_pod = ours["DaemonSet", "nri-numa"]["spec"]["template"]["spec"]
    (patch,) = documents("publish-dra/container.yaml")
    theirs_pod = patch["spec"]["template"]["spec"]
    assert all(volume in ours_pod["volumes"] for volume in theirs_pod["volumes"])
    for theirs_one in theirs_pod["containers"]:
        (one,) = (c for c in ours_pod["containers"] if c["name"] == theirs_one["name"])
        assert all(mount in one["volumeMounts"] for mount in theirs_one["volumeMounts"])


DEVICES = ("/run/netns", "/etc/cdi", "/var/run/cdi", "/var/lib/kubelet/pod-resources")


@pytest.mark.parametrize(
    ("values", "mounted", "may"),
    [
        ("config.devices.countFree=true", DEVICES[3:], False),
        ("config.devices.enabled=true,devicePlugin.enabled=true", DEVICES, True),
        ("config.devices.enabled=true,config.devices.networkInterfaces=false", DEVICES[1:], False),
        ("config.devices.enabled=true,config.devices.cdi=false", (DEVICES[0], DEVICES[3]), True),
        ("config.devices.enabled=true,hostPaths.kubelet=/var/lib/kubelet", DEVICES[:3], True),
        ("config.devices.enabled=true,publish.enabled=true,config.dra.enabled=true", DEVICES, True),
        ("config.devices.enabled=true,releaseContainers=true", (), False),
    ],
)
def test_devices_in_the_charts_configuration_bring_their_mounts(
    values: str, mounted: tuple[str, ...], may: bool
) -> None:
    pod = helmed("--set", values)["DaemonSet"]["spec"]["template"]
    agent, *others = pod["spec"]["containers"]
    mounts = {mount["mountPath"]: mount for mount in agent["volumeMounts"]}
    assert {path for path in DEVICES if path in mounts} == {*mounted}
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert len(volumes) == len(pod["spec"]["volumes"])
    assert len(mounts) == len(agent["volumeMounts"])
    for path in mounted:
        assert volumes[mounts[path]["name"]]["hostPath"]["path"] == path
    assert ("SYS_ADMIN" in agent["securityContext"]["capabilities"].get("add", [])) is may
    assert not any("add" in one["securityContext"]["capabilities"] for one in others)


@pytest.mark.parametrize("profile", ["latency", "ai-gpu", "density", "observe", "openshift"])
def test_every_profile_is_a_sound_configuration(profile: str) -> None:
    text = helmed("-f", str(CHART / f"profiles/{profile}.yaml"))["ConfigMap"]["data"]["agent.yaml"]
    config = configuration.load_config(text=text)
    assert str(config.defaults["policy"]) == "best-effort"
    assert config.observe is (profile == "observe")


@pytest.mark.parametrize(
    ("socket", "directory"),
    [
        ("", "/run/containerd"),
        ("unix:///run/k3s/containerd/containerd.sock", "/run/k3s/containerd"),
    ],
)
def test_over_cri_the_chart_mounts_that_socket_alone(socket: str, directory: str) -> None:
    more = ["--set", f"config.runtime.criSocket={socket}"] if socket else []
    for releasing in ([], ["--set", "releaseContainers=true"]):
        pod = helmed("--set", "config.runtime.link=cri", *more, *releasing)["DaemonSet"]
        pod = pod["spec"]["template"]["spec"]
        found = {one["name"]: one["hostPath"] for one in pod["volumes"] if "hostPath" in one}
        assert found["cri"] == {"path": directory, "type": "Directory"}
        assert "nri" not in found
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            (mount,) = [one for one in container["volumeMounts"] if one["name"] == "cri"]
            assert mount == {"name": "cri", "mountPath": directory, "readOnly": True}


def test_over_cri_kustomize_mounts_the_socket_of_crio_and_not_that_of_nri() -> None:
    pod = kustomized("base", "over-cri")["DaemonSet"]["spec"]["template"]["spec"]
    (agent,) = pod["containers"]
    hosts = {one["name"]: one["hostPath"]["path"] for one in pod["volumes"] if "hostPath" in one}
    mounts = {one["name"]: one["mountPath"] for one in agent["volumeMounts"]}
    assert (hosts["cri"], mounts["cri"]) == ("/run/crio", "/run/crio")
    assert "nri" not in hosts.keys() | mounts.keys()
    env = {one["name"]: one["value"] for one in agent["env"] if "value" in one}
    config = configuration.load_config(None, env)
    assert config.runtime.link == "cri"
    assert config.runtime.cri_socket == "/run/crio/crio.sock"


def test_openshifts_constraints_allow_what_the_pod_has() -> None:
    made = kustomized("base", "openshift")
    allowed, pod = made["SecurityContextConstraints"], made["DaemonSet"]["spec"]["template"]["spec"]
    assert allowed["users"] == [f"system:serviceaccount:nri-numa:{pod['serviceAccountName']}"]
    assert pod["hostNetwork"] is allowed["allowHostNetwork"] is True
    assert {kind for one in pod["volumes"] for kind in one.keys() - {"name"}} <= {
        *allowed["volumes"]
    }
    (agent,) = pod["containers"]
    context = agent["securityContext"]
    assert context["capabilities"] == {"drop": allowed["requiredDropCapabilities"]}
    assert context["readOnlyRootFilesystem"] is allowed["readOnlyRootFilesystem"]
    assert context["seLinuxOptions"] == {"type": "spc_t"}


def test_the_charts_schema_knows_the_agents_configuration() -> None:
    """``python tools/helm_schema.py`` brings it up to date."""
    assert (CHART / "values.schema.json").read_text() == helm_schema.merged()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"config": {"strategie": "spread"}}, "strategie"),
        ({"config": {"strategy": "sprinkle"}}, "sprinkle"),
        ({"hostPaths": {"nri": "run/nri", "state": "/run/nri-numa"}}, "run/nri"),
        ({"updateStrategy": {"maxUnavailable": "110%"}}, "110%"),
        ({"relase": True}, "relase"),
        ({"image": {"repository": "a/b", "digest": "sha256:12"}}, "sha256:12"),
        ({"extraEnv": [{"value": "no name"}]}, "name"),
        ({"extraArgs": [1]}, "1"),
        ({"extraVolumeMounts": [{"name": "x"}]}, "mountPath"),
        ({"admission": {"actions": ["Block"]}}, "Block"),
        ({"admission": {"actions": ["Deny", "Warn"]}}, "Warn"),  # not both, says the API server
        ({"admission": {"failurePolicy": "fail"}}, "fail"),
        ({"admission": {"list": True}}, "list"),
        ({"nameOverride": "Not A Name"}, "Not A Name"),
        ({"monitoring": {"podMonitor": {"enabld": True}}}, "enabld"),
        ({"monitoring": {"runbookBaseURL": "docs"}}, "docs"),
    ],
)
def test_the_charts_schema_rejects_mistakes(values: dict[str, Any], words: str) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    default = yaml.safe_load((CHART / "values.yaml").read_text())
    assert not list(validator.iter_errors(default))
    errors = list(validator.iter_errors(default | values))
    assert errors
    assert words in " ".join(str(e.message) for e in errors)


GROUPS = [
    {"name": "gpu", "label": "kind", "values": ["gpu", "gpu-2"],
     "config": {"devices": {"enabled": True}, "reservedCPUs": "0-3"}},
    {"name": "db", "label": "role", "values": ["db"], "config": {"strategy": "pack"}},
]  # fmt: skip
EXTENDER = ("--set=scheduler.enabled=true",)
STUCK = (
    "--set=publish.enabled=true,controller.enabled=true,config.controller.evictions.stuckPods.evict=true",
    "--set=config.publish.nodeResourceTopology=true",
)


def grouped(groups: object, **config: object) -> list[str]:
    values = {"nodeGroups": groups, "config": config}
    return [f"--set-json={key}={json.dumps(value)}" for key, value in values.items()]


def selects(daemon_set: dict[str, Any], labels: dict[str, str]) -> bool:
    node = daemon_set["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = node["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    return all(
        (labels.get(one["key"]) in one["values"]) is (one["operator"] == "In")
        for one in term["matchExpressions"]
    )


def test_each_kind_of_nodes_has_its_settings() -> None:
    """Every node is of one DaemonSet, with the group's configuration over that of all."""
    made = charted(*grouped(GROUPS, reservedCPUs="0", strategy="spread"))
    sets = {name: one for (kind, name), one in made.items() if kind == "DaemonSet"}
    settings = {
        name: configuration.load_config(text=one["data"]["agent.yaml"])
        for (kind, name), one in made.items()
        if kind == "ConfigMap"
    }
    assert {n: (c.node_group, c.reserved_cpus, c.strategy) for n, c in settings.items()} == {
        "nri-numa-gpu": ("gpu", "0-3", "spread"),
        "nri-numa-db": ("db", "0", "pack"),
        "nri-numa": ("", "0", "spread"),
    }
    nodes: dict[str, list[dict[str, str]]] = {
        "nri-numa-gpu": [{"kind": "gpu"}, {"kind": "gpu-2", "role": "db"}],
        "nri-numa-db": [{"kind": "other", "role": "db"}],
        "nri-numa": [{}, {"role": "web"}],
    }
    for owner, kinds in nodes.items():
        pod = sets[owner]["spec"]["template"]
        assert (
            sets[owner]["spec"]["selector"]["matchLabels"].items()
            <= pod["metadata"]["labels"].items()
        )
        (config,) = (v for v in pod["spec"]["volumes"] if v["name"] == "config")
        assert config["configMap"]["name"] == owner
        for labels in kinds:
            assert [n for n, one in sets.items() if selects(one, labels)] == [owner], labels
    assert "netns" in str(sets["nri-numa-gpu"])
    assert "netns" not in str(sets["nri-numa-db"])


@pytest.mark.parametrize(
    ("groups", "config", "words"),
    [
        ([GROUPS[0], GROUPS[0]], {}, "gpu is there twice, expected another name for each group"),
        ([GROUPS[0] | {"config": {"dra": {"enabled": True}}}], {}, "gpu has config.dra, which all"),
        ([GROUPS[0] | {"config": {"reservedCPU": "0"}}], {}, "'reservedCPU' not allowed"),
        ([GROUPS[0] | {"values": []}], {}, "got 0, want 1"),
        ([GROUPS[0] | {"name": "GPU nodes"}], {}, "does not match pattern"),
        ([], {"nodeGroup": "gpu"}, 'config.nodeGroup: is "gpu", expected nodeGroups'),
    ],
)
def test_node_groups_are_validated(groups: object, config: dict[str, Any], words: str) -> None:
    assert words in rejection(*grouped(groups, **config))


@pytest.mark.parametrize(
    "config",
    [
        {"rules": [{"match": {"namespaces": ["a"]}, "set": {"policy": "none"}}]},
        {"permissions": [{"match": {"namespaces": ["a"]}, "allowedKeys": ["policy"]}]},
        {"strategy": "pack"},
        {"defaults": {"policy": "restricted"}},
        {"kubeletCompatibility": {"mode": "full"}},
    ],
    ids=lambda config: next(iter(config)),
)
def test_what_the_extender_judges_by_is_the_same_on_all_nodes(config: dict[str, Any]) -> None:
    groups = grouped([GROUPS[0] | {"config": config}])
    assert helm(*groups).returncode == 0
    for judge, name in (
        (EXTENDER, "scheduler.enabled"),
        (STUCK, "config.controller.evictions.stuckPods"),
    ):
        said = rejection(*groups, *judge)
        assert f"gpu has config.{next(iter(config))}, by which {name} judges all nodes" in said


SWITCHES = {
    **dict.fromkeys(("controller.enabled", "config.dra.enabled"), "publish.enabled"),
    **dict.fromkeys(
        (
            f"config.publish.{key}"
            for key in ("nodeCapacity", "nodeResourceTopology", "podAnnotation")
        ),
        "publish.enabled",
    ),
    **dict.fromkeys(
        (
            f"config.controller.{key}"
            for key in (
                "page.enabled",
                "evictions.drainedNUMANodes.evict",
                "evictions.stuckPods.evict",
            )
        ),
        "controller.enabled",
    ),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_that_would_do_nothing_is_refused_with_what_is_missing(switch: str) -> None:
    said = rejection(f"--set={switch}=true")
    assert f"{switch}: is on, but has no effect without {SWITCHES[switch]}=true" in said


def test_the_schema_of_values_rejects_each_old_key(tmp_path: Path) -> None:
    """What to write instead is said by ``nri-numa check``, of the same configuration."""
    old_keys = [old for old in OLD_KEYS if ": " not in old and "[]" not in old]
    gathered = LayeredDocument()
    for old in old_keys:
        gathered.set_key(old, True, "")
    (file := tmp_path / "values.json").write_text(json.dumps({"config": gathered.document}))
    said = rejection(f"--values={file}")
    for old in old_keys:
        parent, _, key = old.rpartition(".")
        if parent not in old_keys:
            assert f"'{key}'" in said, old


def test_of_the_controller_only_draining_does_without_the_topologies() -> None:
    on = "--set=publish.enabled=true,controller.enabled=true"
    for key, needs in (
        ("page.enabled", True),
        ("evictions.cpuSteal.evict", True),
        ("evictions.drainedNUMANodes.evict", False),
    ):
        done = helm(on, f"--set=config.controller.{key}=true")
        assert ("without config.publish.nodeResourceTopology=true" in done.stderr) is needs


def test_the_daemonset_of_all_other_nodes_has_no_pods_of_a_group() -> None:
    made = charted(*grouped(GROUPS))
    selector = made["DaemonSet", "nri-numa"]["spec"]["selector"]
    (other,) = selector["matchExpressions"]
    labels = made["DaemonSet", "nri-numa-gpu"]["spec"]["template"]["metadata"]["labels"]
    assert selector["matchLabels"].items() <= labels.items()
    assert (other["key"] in labels, other["operator"]) == (True, "DoesNotExist")


def test_releasing_sees_what_the_agent_sees() -> None:
    """A configuration may name files below extraVolumeMounts."""
    mounts = [{"name": "x", "mountPath": "/x"}]
    made = helmed(
        f"--set-json=extraVolumeMounts={json.dumps(mounts)}",
        "--set=releaseContainers=true,extraEnv[0].name=TZ,extraEnv[0].value=UTC",
    )
    (init,) = made["DaemonSet"]["spec"]["template"]["spec"]["initContainers"]
    assert mounts[0] in init["volumeMounts"]
    assert init["env"] == [{"name": "TZ", "value": "UTC"}]


def test_what_outlives_the_publisher_is_taken_away_with_a_right_that_ends() -> None:
    """Before an uninstallation everything, after a rollback what is not written any more."""

    def hooks(*values: str) -> dict[str, tuple[list[str], set[str]]]:
        made = charted("--set=publish.enabled=true", *values)
        kept = {key: one for key, one in made.items() if "withdraw" in key[1]}
        for one in kept.values():
            policy = one["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
            assert policy == "before-hook-creation,hook-succeeded"
        return {
            one["metadata"]["annotations"]["helm.sh/hook"]: (
                one["spec"]["template"]["spec"]["containers"][0]["args"][1:],
                {kind for kind, other in kept if other == name},
            )
            for (kind, name), one in kept.items()
            if kind == "Job"
        }

    both = ["capacity", "numa-ids"]
    kinds = {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Job"}
    capacity, controller = "--set=config.publish.nodeCapacity=true", "--set=controller.enabled=true"
    assert hooks() == {"post-rollback": (both, kinds)}
    assert hooks(capacity, controller) == {"pre-delete": (both, kinds)}
    assert hooks(capacity)["post-rollback"] == (["numa-ids"], kinds)
    releasing = hooks(capacity, controller, "--set=releaseContainers=true")
    assert releasing == {"post-rollback": (both, kinds), "pre-delete": (both, kinds)}


TOKEN = {"tokenFile": "/etc/nri-numa-secret/token"}
TLS = {"tlsCert": "/etc/nri-numa-secret/tls.crt", "tlsKey": "/etc/nri-numa-secret/tls.key"}


@pytest.mark.parametrize(
    "http",
    [
        {},
        *({"address": f"{host}:9891"} for host in ("127.0.0.1", "127.8.9.1", "localhost", "[::1]")),
        {"address": "off"},
        {"address": "0.0.0.0:9891", **TOKEN, **TLS},
        {"address": "0.0.0.0:9891", **TOKEN, "allowPlaintextToken": True},
        {"address": "[::]:9891", "allowAnonymous": True},
        {"address": "0.0.0.0:9891"},
        {"address": "10.0.0.7:9891", **TOKEN},
        {"address": "10.0.0.7:9891", "tokenFile": "", **TLS},
        {"address": "[::]:9891", **TLS},
        {"address": "localhost.example.org:9891", "allowAnonymous": False},
    ],
    ids=str,
)
def test_the_schema_and_the_agent_agree_who_may_reach_it(http: dict[str, Any]) -> None:
    """What the agent would refuse on every node is refused when the chart is installed."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    default = yaml.safe_load((CHART / "values.yaml").read_text())
    values = default | {"config": {"http": http}}
    mistakes = list(jsonschema.Draft7Validator(schema).iter_errors(values))
    expected = pytest.raises(ConfigError) if mistakes else contextlib.nullcontext()
    with expected:
        configuration.load_config(text=json.dumps({"http": http}))


def test_what_the_chart_has_from_elsewhere_is_current() -> None:
    """``python -m tools.chart_files`` brings it up to date."""
    for copy, original in chart_files.COPIES.items():
        assert copy.read_text() == original.read_text()
    assert chart_files.README.read_text() == chart_files.readme()


WIDE = (
    "--set=config.http.address=0.0.0.0:9891,secretName=nri-numa-http",
    *(f"--set=config.http.{key}={value}" for key, value in {**TOKEN, **TLS}.items()),
)


def test_the_chart_for_the_prometheus_operator() -> None:
    documents = helmed(
        *WIDE,
        *(f"--set=monitoring.{kind}Monitor.enabled=true" for kind in ("pod", "service")),
        "--set=monitoring.prometheusRule.enabled=true,monitoring.dashboard.enabled=true",
        "--set=monitoring.podMonitor.labels.release=prometheus,monitoring.interval=15s",
        "--set=monitoring.runbookBaseURL=https://runbooks.example.org/numa/",
    )
    pod = documents["DaemonSet"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": 9891}]
    monitor = documents["PodMonitor"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["scheme"], endpoint["interval"]) == ("http", "https", "15s")
    assert endpoint["authorization"]["credentials"] == {"name": "nri-numa-http", "key": "token"}
    assert endpoint["honorLabels"], "the container's namespace and pod, not the agent's"
    assert {r["targetLabel"] for r in endpoint["relabelings"]} == {"job", "node"}
    assert documents["ServiceMonitor"]["spec"]["endpoints"] == [endpoint]
    service = documents["Service"]
    assert service["spec"]["clusterIP"] == "None"
    for selected in (monitor["spec"]["selector"]["matchLabels"], service["spec"]["selector"]):
        assert selected.items() <= pod["metadata"]["labels"].items()
    chosen = documents["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
    assert chosen.items() <= service["metadata"]["labels"].items()

    rules = documents["PrometheusRule"]["spec"]
    original = yaml.safe_load((REPOSITORY / "config/prometheus/alerts.yaml").read_text())
    address = "https://docs.nri-numa.example/"
    text = json.dumps(original).replace(address, "https://runbooks.example.org/numa/")
    ours = 'namespace=\\"nri-numa\\", daemonset=~\\"nri-numa\\"'
    text = text.replace('daemonset=~\\".*nri-numa.*\\"', ours)
    assert text.count(ours) == 2
    assert rules == json.loads(text)

    dashboard = documents["ConfigMap"]
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    shown = json.loads(dashboard["data"]["nri-numa.json"])
    assert shown == json.loads((REPOSITORY / "config/grafana/nri-numa.json").read_text())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((), "config.http.address is not set"),
        (("--set", "config.http.address=127.0.0.1:9891"), "loopback"),
        ((*WIDE, "--set", "secretName="), "secretName is empty"),
    ],
)
def test_a_monitor_that_reaches_nothing_is_rejected(values: tuple[str, ...], words: str) -> None:
    assert words in rejection(*values, "--set", "monitoring.podMonitor.enabled=true")


def test_names_and_what_is_added_to_the_container() -> None:
    digest = f"sha256:{'ab' * 32}"
    documents = helmed(
        f"--set=fullnameOverride=placement,nameOverride=numa,image.digest={digest}",
        "--set=extraArgs={--log-level=debug},extraEnv[0].name=TZ,extraEnv[0].value=UTC",
    )
    assert {d["metadata"]["name"] for d in documents.values()} == {"placement"}
    daemonset = documents["DaemonSet"]
    labels = daemonset["metadata"]["labels"]
    assert labels["app.kubernetes.io/name"] == "numa"
    assert labels["app.kubernetes.io/version"] == __version__
    pod = daemonset["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "placement"
    (container,) = pod["containers"]
    assert container["image"] == f"localhost/nri-numa@{digest}"
    assert container["args"] == ["run", "--log-level=debug"]
    names = ["NRI_NUMA_NODE_NAME", "POD_NAMESPACE", "POD_NAME", "TZ"]
    assert [one["name"] for one in container["env"]] == names
    (config,) = [v["configMap"]["name"] for v in pod["volumes"] if "configMap" in v]
    assert config == documents["ConfigMap"]["metadata"]["name"]
    # Else as other charts do it.
    for release, name in (("numa", "numa-nri-numa"), ("nri-numa-2", "nri-numa-2")):
        command = [program("helm"), "template", release, str(CHART)]
        made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        (found,) = (d for d in yaml.safe_load_all(made) if d["kind"] == "DaemonSet")
        assert found["metadata"]["name"] == name
    # With -controller behind it, it is the value of a label.
    assert "maxLength: got 53, want 52" in rejection(f"--set=fullnameOverride={'a' * 53}")


def test_what_helm_says_after_an_installation_knows_the_value_of_today() -> None:
    """``helm template`` leaves NOTES.txt out, so it is made in the place of a manifest."""
    with tempfile.TemporaryDirectory() as name:
        chart = Path(name) / "nri-numa"
        shutil.copytree(CHART, chart)
        notes = (chart / "templates/NOTES.txt").read_text()
        indented = "".join(f"  {line}\n" for line in notes.splitlines())
        (chart / "templates/said.yaml").write_text(f"said: |\n{indented}")

        def said(*values: str) -> str:
            command = [program("helm"), "template", "nri-numa", str(chart), "-n", "nri-numa",
                       "--show-only", "templates/said.yaml", *values]  # fmt: skip
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        assert "--set releaseContainers=true" in said()
        removing = said("--set", "releaseContainers=true")
        assert "nothing is left to do:" in removing
        assert "rollout status -n nri-numa daemonset/nri-numa" in said()
        assert "schedulerName" not in said()
        scheduler = said("--set=scheduler.enabled=true", "--set=scheduler.name=by-numa")
        assert "schedulerName: by-numa" in scheduler
        # A scheduler that nobody tells about NUMA nodes refuses every pod that asks.
        hint = "--set publish.enabled=true --set config.publish.nodeResourceTopology=true"
        assert hint in scheduler
        assert hint not in said("--set=scheduler.enabled=true", *hint.split())


@pytest.mark.parametrize("other", ["devicePlugin.enabled", "config.publish.nodeCapacity"])
def test_cpus_are_offered_to_schedulers_in_one_way(other: str) -> None:
    said = rejection("--set", f"publish.enabled=true,config.dra.enabled=true,{other}=true")
    assert "offer the same CPUs once more" in said


@pytest.mark.parametrize("part", ["scheduler", "controller"])
def test_deployments_go_where_values_say(part: str) -> None:
    there: dict[str, Any] = {
        "nodeSelector": {"role": "infra"},
        "tolerations": [{"key": "infra", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
    }
    wanted = json.dumps({"enabled": True, **there})
    made = helmed("--set=publish.enabled=true", "--set-json", f"{part}={wanted}")
    spec = made["Deployment"]["spec"]["template"]["spec"]
    assert spec["nodeSelector"].items() >= there["nodeSelector"].items()
    assert (spec["tolerations"], spec["affinity"]) == (there["tolerations"], there["affinity"])


def test_probes_follow_the_address() -> None:
    documents = helmed(
        *("--set", "config.http.address=0.0.0.0:9999", "--set", "config.http.tokenFile=/t"),
        *("--set", "config.http.tlsCert=/x", "--set", "config.http.tlsKey=/y"),
    )
    (container,) = documents["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    asked = {"host": "127.0.0.1", "port": 9999, "scheme": "HTTPS", "path": "/readyz"}
    assert container["readinessProbe"]["httpGet"] == asked
    probes = [one for key, one in container.items() if key.endswith("Probe")]
    assert [one["timeoutSeconds"] for one in probes] == [5, 5, 5]
    off = helmed("--set", "config.http.address=off")
    (container,) = off["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    assert not [key for key in container if key.endswith("Probe")]


def test_optional_parts_of_the_chart() -> None:
    root = "/data/kubelet"
    documents = helmed(
        f"--set=hostPaths.kubelet={root},config.kubeletRoot={root},secretName=nri-numa-http",
        "--set=devicePlugin.enabled=true,seLinuxOptions.type=spc_t",
        *("--set-json", 'extraVolumes=[{"name":"x","emptyDir":{}}]'),
        *("--set-json", 'extraVolumeMounts=[{"name":"x","mountPath":"/x"}]'),
        *("--set-json", 'config.rules=[{"match":{"namespaces":["a"]},"set":{"policy":"none"}}]'),
    )
    pod = documents["DaemonSet"]["spec"]["template"]["spec"]
    container, plugin = pod["containers"]
    mounts = {m["name"]: m for m in (*plugin["volumeMounts"], *container["volumeMounts"])}
    assert mounts["kubelet"] == {"name": "kubelet", "mountPath": root, "readOnly": True}
    assert mounts["pod-resources"]["mountPath"] == f"{root}/pod-resources"
    assert mounts["secret"]["readOnly"]
    assert {"name": "x", "emptyDir": {}} in pod["volumes"]
    assert mounts["x"] == {"name": "x", "mountPath": "/x"}
    assert container["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}
    agent = yaml.safe_load(documents["ConfigMap"]["data"]["agent.yaml"])
    assert agent["rules"][0]["set"] == {"policy": "none"}
    assert agent["kind"] == "AgentConfig"


# --- containerd -------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
def test_the_drop_ins_turn_nri_on(version: int) -> None:
    document = tomllib.loads((REPOSITORY / f"config/containerd/nri-v{version}.toml").read_text())
    assert document["version"] == version
    assert containerd_nri_section(document) == {"disable": False}


# --- systemd ----------------------------------------------------------------------------------


def test_the_unit_is_sound_and_as_closed_and_patient_as_documented(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    # A program that is there on every machine.
    unit.write_text(UNIT.read_text().replace("/usr/local/bin/nri-numa", "/bin/true"))

    def analyze(*words: str) -> subprocess.CompletedProcess[str]:
        command = [program("systemd-analyze"), *words, str(unit)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    verified = analyze("verify", "--man=no")
    assert UNIT.name not in verified.stderr
    assert verified.returncode == 0, verified.stderr
    done = analyze("security", "--offline=true", "--no-pager")
    match = re.search(r"Overall exposure level for .*: ([0-9.]+)", done.stdout)
    assert match is not None, done.stdout + done.stderr
    assert float(match[1]) <= 1.5
    # Imports alone take half a minute where CPUs are starved.
    assert "TimeoutStartSec=90\n" in unit.read_text()
