"""The publisher as it is shipped: no more rights than it needs, the same by Kustomize and Helm.

That these rights are enough, and what the policies refuse, is in tests/kube/test_publish.py.
"""

import re
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from nri_numa import config as configuration
from nri_numa.config.layers import config_path_by_environment_name
from nri_numa.config.sections import Publish
from nri_numa.kube.requests import Resource
from nri_numa.publisher import desired_objects, topology
from tests.beds.http_view import FakeView
from tests.beds.install_manifests import AS_ROOT, BASE, charted, documents
from tests.beds.publisher_bed import ObjectBed
from tests.beds.schemas import closed_schema

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs/kubernetes-objects.md"


def pod(directory: str = "publish") -> dict[str, Any]:
    """What a component adds to the pod."""
    (patch,) = documents(f"{directory}/container.yaml")
    spec: dict[str, Any] = patch["spec"]["template"]["spec"]
    return spec


def container(name: str) -> dict[str, Any]:
    (found,) = [one for one in pod()["containers"] if one["name"] == name]
    return found


def test_the_publisher_has_no_rights_on_the_node() -> None:
    nobody = {"runAsUser": 65534, "runAsGroup": 65534, "runAsNonRoot": True}
    assert container("publish")["securityContext"] == {**AS_ROOT, **nobody}
    assert all(mount["readOnly"] for mount in container("publish")["volumeMounts"])


def test_only_the_publisher_sees_the_token() -> None:
    assert [m["name"] for m in container("nri-numa")["volumeMounts"]] == ["api"]
    assert "token" in [m["name"] for m in container("publish")["volumeMounts"]]
    (account,) = documents("publish/serviceaccount.yaml")
    assert account["automountServiceAccountToken"] is False
    assert pod()["serviceAccountName"] == account["metadata"]["name"]


def test_the_paths_are_those_of_the_configuration() -> None:
    config = configuration.load_config()
    mounts = {m["name"]: m["mountPath"] for m in container("publish")["volumeMounts"]}
    assert mounts["token"] == config.publish.credentials_dir
    for name in ("nri-numa", "publish"):
        one = container(name)
        names = {e["name"]: e.get("value") for e in one["env"]}
        api = next(m["mountPath"] for m in one["volumeMounts"] if m["name"] == "api")
        assert names["NRI_NUMA_HTTP_SOCKET"] == f"{api}/agent.sock"
        assert names.keys() <= set(config_path_by_environment_name())
    get = container("publish")["livenessProbe"]["httpGet"]
    assert f"{get['host']}:{get['port']}" == config.publish.address
    for directory, name, containers in (
        ("publish-pods", "NRI_NUMA_PUBLISH_POD_ANNOTATION", ["publish"]),
        # The agent names pods that have no container yet (docs/adr/0047).
        ("publish-topology", "NRI_NUMA_PUBLISH_NODE_RESOURCE_TOPOLOGY", ["nri-numa", "publish"]),
        ("publish-volcano", "NRI_NUMA_PUBLISH_NUMATOPOLOGY", ["publish"]),
    ):
        more = pod(directory)["containers"]
        assert [one["name"] for one in more] == containers
        assert all(one["env"] == [{"name": name, "value": "true"}] for one in more)
        assert name in config_path_by_environment_name()


def test_the_roles_give_what_the_page_says_and_no_more() -> None:
    files = [one.relative_to(BASE.parent) for one in BASE.parent.glob("publish*/role.yaml")]
    given = {
        (group or "core", resource, ", ".join(rule["verbs"]))
        for one in documents(*map(str, files))
        if one["kind"] == "ClusterRole"
        for rule in one["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    row = r"^\| (core|[a-z.]+\.[a-z0-9.]+) \| ([a-z/]+) \| ([a-z, ]+) \|"
    assert given == set(re.findall(row, PAGE.with_name("security.md").read_text(), re.MULTILINE))


def test_the_page_has_every_key_and_every_reason() -> None:
    page = PAGE.read_text()
    for reason, kind in desired_objects.EVENT_REASONS.values():
        assert f"| `{reason}` | {kind} |" in page
    keys = (
        *desired_objects.NODE_ANNOTATIONS,
        *desired_objects.NODE_LABELS,
        *topology.ZONE_ATTRIBUTES,
    )
    for key in (*keys, topology.RELEASE_COUNTER_ANNOTATION, "agent-state"):
        assert f"| `numa.kubernetes.io/{key}` |" in page


def test_the_chart_has_the_same_container() -> None:
    ours = charted("--set", "publish.enabled=true")
    made = ours["DaemonSet", "nri-numa"]["spec"]["template"]["spec"]
    (one,) = (each for each in made["containers"] if each["name"] == "publish")
    assert one == container("publish")
    assert all(volume in made["volumes"] for volume in pod()["volumes"])


def test_the_definition_is_of_the_version_that_keeps_attributes() -> None:
    (definition,) = documents("publish-topology/crd.yaml")
    (version,) = definition["spec"]["versions"]
    assert f"{definition['spec']['group']}/{version['name']}" == Resource.TOPOLOGIES.api_version
    assert definition["spec"]["names"]["kind"] == topology.TopologyOutput.kind
    approved = "https://github.com/kubernetes/enhancements/pull/1870"
    assert definition["metadata"]["annotations"] == {"api-approved.kubernetes.io": approved}
    schema = version["schema"]["openAPIV3Schema"]
    bed = ObjectBed(topology.TopologyOutput("n1", "x.io", Publish()), Resource.TOPOLOGIES)
    bed.output.set_desired(FakeView().scheduler_zones_document())
    bed.later()
    whole = bed.requests[-1].body
    assert [e.message for e in Draft202012Validator(closed_schema(schema)).iter_errors(whole)] == []
