"""What ``nri-numa publish`` writes, as Kubernetes users see it; with the rights it ships with."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.beds.certificates import make_certificate
from tests.beds.cri import poll
from tests.beds.kube.bed import MANIFESTS, KubeBed, Publisher, install, token
from tests.beds.kube.client import Client, JsonObject, KubeError
from tests.beds.kube.events import Thief, answers, events, wait_event
from tests.beds.kube.manifests import EXCLUSIVE, PREFIX, asks, container, pod, template, workload
from tests.machines.cpus import NO_CPU

POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"


def rejected(name: str) -> JsonObject:
    """A pod that no node takes; Events outlive pods, so each name is used once in all tests."""
    return pod(name, annotations=asks(numacpu=NO_CPU))


@pytest.fixture
def installed(client: Client) -> Client:
    """The API server with the shipped service account, roles and policies."""
    install(client)
    return client


@pytest.fixture
def publisher(bed: KubeBed, installed: Client) -> Iterator[Publisher]:
    with Publisher(bed, token(installed, "bed"), config={"podAnnotation": True}) as process:
        yield process


def count(event: JsonObject) -> int:
    return int((event.get("series") or {}).get("count", 1))


def test_a_rejection_is_easy_to_find(bed: KubeBed, installed: Client, publisher: Publisher) -> None:
    """One Event whose count grows, over restarts of both sides too."""
    installed.apply(rejected("publish-once"))
    event = wait_event(installed, publisher, "publish-once", "PlacementRejected")
    uid = installed.ask("GET", "/api/v1/namespaces/default/pods/publish-once")["metadata"]["uid"]
    assert event["regarding"]["uid"] == uid
    assert event["regarding"]["fieldPath"] == "spec.containers{main}"
    assert event["reportingInstance"] == "bed"
    described = installed.kubectl("describe", "pod", "publish-once")
    assert "PlacementRejected" in described
    assert f"{PREFIX}/nri-numa" in described
    publisher.end()
    bed.node.plugin.restart(kill=True)
    publisher.start()

    def again() -> list[JsonObject] | None:
        found = events(installed, "publish-once", "PlacementRejected")
        return found if max(map(count, found)) > count(event) else None

    (same,) = poll(again, "a higher count")
    assert same["metadata"]["uid"] == event["metadata"]["uid"]


def test_a_static_pod_says_so_too(bed: KubeBed, installed: Client, publisher: Publisher) -> None:
    """The runtime knows it by a hash, and so does kubectl."""
    manifest = bed.node.directory / "static" / "fixed.json"
    manifest.write_text(json.dumps(rejected("fixed")))
    try:
        wait_event(installed, publisher, "fixed-bed", "PlacementRejected")
        assert "PlacementRejected" in installed.kubectl("describe", "pod", "fixed-bed")
    finally:
        manifest.unlink()
        poll(lambda: installed.pod("fixed-bed") is None, "its end")


def test_a_node_has_its_numa_nodes(bed: KubeBed, installed: Client, publisher: Publisher) -> None:
    """And again when somebody removed it."""

    def announced() -> JsonObject | None:
        publisher.check()
        metadata = (installed.get("/api/v1/nodes/bed") or {}).get("metadata", {})
        there = metadata.get("annotations", {})
        whole = f"{PREFIX}/numacpu" in there and f"{PREFIX}/sockets" in metadata.get("labels", {})
        return metadata if whole else None

    def right() -> bool | None:
        """Not what an earlier test left on the Node: what the agent says now."""
        if (metadata := announced()) is None:
            return None
        data = bed.node.plugin.json("/v2/system/numa/info")["data"]
        there = metadata["annotations"]
        same = (
            there[f"{PREFIX}/numacpu"] == "|".join(data["cpulist"])
            and there[f"{PREFIX}/numamem"] == "|".join(data["memsize"])
            and metadata["labels"][f"{PREFIX}/numa-nodes"] == str(data["nodenums"])
        )
        return same or None

    poll(right, "annotations of the Node")
    installed.kubectl("annotate", "node", "bed", f"{PREFIX}/numacpu-")
    installed.kubectl("label", "node", "bed", f"{PREFIX}/sockets-")
    poll(announced, "annotations put back")


def test_a_pod_says_what_it_has(installed: Client, publisher: Publisher) -> None:
    """Also when somebody removed the annotation."""
    installed.run(pod("exclusive", container(cpus="1"), annotations=EXCLUSIVE))

    def assigned() -> Any:
        publisher.check()
        text = installed.pod("exclusive")["metadata"]["annotations"].get(f"{PREFIX}/assigned")  # type: ignore[index]
        return json.loads(text) if text else None

    assert poll(assigned, "the annotation")["main"]["cpus"]
    installed.kubectl("annotate", "pod", "exclusive", f"{PREFIX}/assigned-")
    poll(assigned, "the annotation put back")


def test_it_waits_for_the_api_server(bed: KubeBed, installed: Client) -> None:
    """What happened while the API server was away is told when it is back; said once."""
    installed.apply(rejected("publish-away"))
    poll(lambda: bed.node.plugin.json("/v1/notices")["notices"], "a notice")
    credentials = token(installed, "bed")
    server = bed.control.daemons["kube-apiserver"]
    server.kill()  # a good end takes a minute
    try:
        with Publisher(bed, credentials) as process:
            poll(lambda: process.records("API server unavailable"), "that it says so")
            server.start()
            poll(lambda: answers(installed), "API server")
            wait_event(installed, process, "publish-away", "PlacementRejected")
            assert len(process.records("API server unavailable")) == 1
            assert process.records("API server available again")
    finally:
        if not server.running:
            server.start()
        poll(lambda: answers(installed), "API server")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [("authority", ("certificate is not accepted", "ca.crt")), ("token", ("401", "is expired"))],
)
def test_wrong_credentials_are_named(
    bed: KubeBed, installed: Client, tmp_path: Path, wrong: str, words: tuple[str, ...]
) -> None:
    make_certificate(tmp_path, "another")
    authority = (tmp_path / "cert.pem").read_bytes() if wrong == "authority" else None
    shown = "nobody-knows-this" if wrong == "token" else token(installed, "bed")
    with Publisher(bed, shown, certificate=authority) as process:
        (line,) = poll(lambda: process.records("API server unavailable"), "its complaint")
        assert all(word in line["problem"] for word in words), line


def test_a_missing_right_is_named(bed: KubeBed, installed: Client) -> None:
    installed.kubectl("delete", "clusterrolebinding", "nri-numa-publish")
    try:
        with Publisher(bed, token(installed, "bed")) as process:
            lines = poll(lambda: process.records("object not written"), "its complaint")
            assert any("resources [nodes], verbs [get]" in line["problem"] for line in lines)
    finally:
        install(installed)


# --- the policies -----------------------------------------------------------------------------


BED, ELSEWHERE = "/api/v1/nodes/bed", "/api/v1/nodes/elsewhere"
PODS = "/api/v1/namespaces/default/pods"
EVENTS = "/apis/events.k8s.io/v1/namespaces/default/events"
OURS = {"annotations": {f"{PREFIX}/numacpu": "0"}}


@pytest.fixture
def elsewhere(installed: Client) -> Iterator[str]:
    """Another node with a pod; both are objects only."""
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "elsewhere"}}
    installed.ask("POST", "/api/v1/nodes", node)
    try:
        installed.apply(pod("victim", nodeName="elsewhere"))
        yield "victim"
    finally:
        installed.kubectl("delete", "node", "elsewhere")


def _note(node: str) -> JsonObject:
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"generateName": "forged-", "namespace": "default"},
        "eventTime": "2026-01-01T00:00:00.000000Z",
        "reportingController": f"{PREFIX}/nri-numa",
        "reportingInstance": node,
        "action": "Placing",
        "reason": "PlacementRejected",
        "type": "Warning",
        "note": "forged",
        "regarding": {"apiVersion": "v1", "kind": "Pod", "namespace": "default", "name": "victim"},
    }


def test_a_stolen_token_is_void_elsewhere(bed: KubeBed, installed: Client, elsewhere: str) -> None:
    thief = Thief(bed, token(installed, "bed"))
    installed.apply(pod("here", nodeName="bed"))
    here, victim = f"{PODS}/here", f"{PODS}/{elsewhere}"
    assigned = {f"{PREFIX}/assigned": "{}"}
    # What it may.
    assert thief.patches(BED, **OURS) == ""
    assert thief.patches(here, annotations=assigned) == ""
    assert thief.does("POST", EVENTS, _note("bed")) == ""
    # Another node, its pods, and Events in its name.
    assert "only write to the Node that its token names" in thief.patches(ELSEWHERE, **OURS)
    assert "pods of the Node that its token" in thief.patches(victim, annotations=assigned)
    said = thief.does("POST", EVENTS, _note("elsewhere"))
    assert "Events that the Node of its token reports" in said
    # More than annotations of its own.
    assert "change the spec" in thief.does("PATCH", BED, {"spec": {"unschedulable": True}})
    assert "annotations that begin with" in thief.patches(BED, annotations={"a": "b"})
    for key in ("drained", "offline-capacity", "of-tomorrow"):
        theirs = {f"{PREFIX}/{key}": "0"}
        assert "annotations numacpu, numamem and" in thief.patches(BED, annotations=theirs), key
    assert "labels that begin with" in thief.patches(BED, labels={"zone": "b"})
    gone = {"kubernetes.io/hostname": None}
    assert "labels that begin with" in thief.patches(BED, labels=gone)
    assert "finalizers" in thief.patches(BED, finalizers=["example.com/stay"])
    assert "only write the annotation" in thief.patches(here, annotations={"a": "b"})
    assert "may not change" in thief.patches(here, labels={"a": "b"})
    assert "may not change" in thief.patches(here, finalizers=["example.com/stay"])
    about_node = _note("bed")
    about_node["regarding"] = {"apiVersion": "v1", "kind": "Namespace", "name": "default"}
    assert "Events about pods" in thief.does("POST", EVENTS, about_node)
    # The status of its Node, which publish-capacity gives it, no more than the one resource.
    slots = {"numa.example.com/exclusive-cpu": "1"}
    elsewhere_status = thief.does("PATCH", f"{ELSEWHERE}/status", {"status": {"capacity": slots}})
    assert elsewhere_status.startswith("403 ")
    assert "denied request" in elsewhere_status
    more = thief.does("PATCH", f"{BED}/status", {"status": {"capacity": {"cpu": "999"}}})
    assert "only write the capacity" in more
    well = [{"type": "Ready", "status": "False", "reason": "forged"}]
    conditions = thief.does("PATCH", f"{BED}/status", {"status": {"conditions": well}})
    assert "nothing of a Node's status but capacity" in conditions
    # And nothing that the roles do not give.
    for method, path in (
        ("GET", "/api/v1/secrets"),
        ("GET", here),
        ("DELETE", here),
        ("DELETE", ELSEWHERE),
        ("POST", "/api/v1/nodes"),
        ("POST", f"{here}/eviction"),
    ):
        said = thief.does(method, path, {} if method in ("POST", "PATCH") else None)
        assert said.startswith("403 "), (method, path, said)


def test_a_token_that_names_no_node_writes_nothing(bed: KubeBed, installed: Client) -> None:
    thief = Thief(bed, token(installed))
    # The API server begins to apply a policy a moment after it was made.
    poll(lambda: thief.patches(f"{BED}?dryRun=All", **OURS), "the policies are in force")
    assert "only write to the Node that its token names" in thief.patches(BED, **OURS)
    said = thief.does("POST", EVENTS, _note("bed"))
    assert "Events that the Node of its token reports" in said


# --- the policies for tenants -----------------------------------------------------------------


@pytest.fixture
def tenants(installed: Client) -> Iterator[Client]:
    """With the policies about what namespaces may ask for."""
    installed.kubectl("apply", f"--kustomize={MANIFESTS / 'admission'}")
    namespaces = {
        "plain": {},
        "free": {f"{PREFIX}/numacpu": "allowed", f"{PREFIX}/cpus": "exclusive"},
    }
    installed.apply(*(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
        for name, labels in namespaces.items()
    ))  # fmt: skip
    try:
        # The API server compiles them in a moment of its own.
        poll(
            lambda: "numacpu=allowed" in tries(installed, "plain", asks(numacpu="0")),
            "the policies",
        )
        yield installed
    finally:
        installed.kubectl("delete", f"--kustomize={MANIFESTS / 'admission'}")
        installed.kubectl("delete", "namespace", *namespaces)


def tries(client: Client, namespace: str, asked: JsonObject) -> str:
    """The API server's no to an object, or a pod's annotations, on a dry run; else empty."""
    document = asked if "kind" in asked else pod("tried", annotations=asked)
    try:
        client.kubectl(
            "create", "--dry-run=server", f"--namespace={namespace}", "--filename=-",
            documents=[document],
        )  # fmt: skip
    except KubeError as error:
        return str(error)
    return ""


def test_the_policies_for_tenants_admit_and_reject_as_written(tenants: Client) -> None:
    lists, whole = "numacpu=allowed", "cpus=exclusive"
    wanted: list[tuple[dict[str, str], str]] = [
        ({}, ""),
        (asks(policy="single-numa-node"), ""),
        (asks(cpus="shared", smt="spread"), ""),
        (asks(numacpu="1"), lists),
        (asks(numamem__main="0"), lists),
        ({f"numacpu.{PREFIX}/pod": "1"}, lists),
        ({f"numamem.{PREFIX}/container.main": "0"}, lists),
        (asks(cpus="exclusive"), whole),
        (asks(cpus__main="exclusive"), whole),
        ({f"cpus.{PREFIX}/pod": "exclusive"}, whole),
        (asks(smt="full-core"), whole),
        (asks(smt__main="isolate"), whole),
        (asks(cpus="exclusive\n"), whole),
        (asks(smt="full-core\n"), whole),
    ]
    for asked, needed in wanted:
        said = tries(tenants, "plain", asked)
        assert (needed in said) if needed else said == "", (asked, said)
        assert tries(tenants, "free", asked) == "", asked


def test_a_claim_may_ask_for_what_an_annotation_may(tenants: Client) -> None:
    """In a claim and in a template; parameters of another driver are none of our business."""
    lists, whole = "numacpu=allowed", "cpus=exclusive"
    ours = "dra.numa.example.com"
    wanted: list[tuple[str, dict[str, str], str]] = [
        (ours, {"policy": "restricted", "smt": "spread"}, ""),
        (ours, {"numamem": "0"}, lists),
        (ours, {"smt": "full-core\n"}, whole),
        (ours, {"bind": "both", "smt": "isolate"}, whole),
        ("gpu.example.com", {"numamem": "0", "smt": "isolate"}, ""),
    ]
    for driver, parameters, needed in wanted:
        devices = {
            "requests": [{"name": "cpus", "exactly": {"deviceClassName": "numa-node"}}],
            "config": [{"opaque": {"driver": "gpu.example.com", "parameters": {}}},
                       {"opaque": {"driver": driver, "parameters": parameters}}],
        }  # fmt: skip
        for kind, spec in (
            ("ResourceClaim", {"devices": devices}),
            ("ResourceClaimTemplate", {"spec": {"devices": devices}}),
        ):
            document = {"apiVersion": "resource.k8s.io/v1", "kind": kind,
                        "metadata": {"name": "tried"}, "spec": spec}  # fmt: skip
            said = tries(tenants, "plain", document)
            assert (needed in said) if needed else said == "", (document, said)
            assert tries(tenants, "free", document) == "", document


def test_the_policies_for_tenants_let_updates_of_something_else_pass(tenants: Client) -> None:
    """What a pod has may stay when its namespace loses the label, and may not be changed then."""
    document = pod("before", annotations=asks(numacpu="0"))
    tenants.kubectl("create", "--namespace=free", "--filename=-", documents=[document])
    tenants.kubectl("label", "namespace", "free", f"{PREFIX}/numacpu-")
    poll(lambda: tries(tenants, "free", asks(numacpu="0")), "the label to be gone")
    tenants.kubectl("label", "--namespace=free", "pod", "before", "a=b")
    with pytest.raises(KubeError, match="numacpu=allowed"):
        tenants.kubectl(
            "annotate", "--namespace=free", "--overwrite", "pod", "before", f"{PREFIX}/numacpu=1"
        )
    patch = ["patch", "pod", "before", "--namespace=free", "--subresource=status", "--patch"]
    tenants.kubectl(*patch, '{"status":{"message":"as a kubelet writes it"}}')
    with pytest.raises(KubeError, match="numacpu=allowed"):
        tenants.kubectl(*patch, json.dumps({"metadata": {"annotations": asks(numacpu="1")}}))


def test_annotations_without_effect_have_events(installed: Client, publisher: Publisher) -> None:
    """The prefix at the first container; the container's name when there will be no other."""
    slips = {"numa.kubernets.io/policy": "restricted", **asks(policy__mian="restricted")}
    installed.run(pod("slip", annotations=slips))
    event = wait_event(installed, publisher, "slip", "AnnotationIgnored")
    assert "(did you mean numa.kubernetes.io/policy?)" in event["note"]
    assert "fieldPath" not in event["regarding"]
    assert "AnnotationIgnored" in installed.kubectl("describe", "pod", "slip")
    installed.kubectl("delete", "pod", "slip")

    def notes() -> list[str]:
        return [one["note"] for one in events(installed, "slip", "AnnotationIgnored")]

    poll(lambda: any("did you mean main?" in note for note in notes()), "the other Event")


def test_mistakes_are_warned_of_at_kubectl_apply(installed: Client) -> None:
    """Each on the pod and in a template, and nothing else is warned of."""
    sound = asks(policy="restricted", cpus__main="shared") | {
        f"smt.{PREFIX}/container.main": "any",
        "node.kubernetes.io/policy": "x",
        "kubernetes.io/policy": "x",
        f"{PREFIX}/scheduled-numa-nodes": "{}",
    }
    other = asks(policy__mian="restricted") | {f"smt.{PREFIX}/container.mian": "any"}
    slips = {
        **{"numa.kubernets.io/policy": "restricted", "nuam.kubernetes.io/cpus.main": "shared"},
        **{f"{PREFIX}/polcy": "restricted", f"cpu.{PREFIX}/container.main": "shared"},
    }

    def made(kind: str, inside: dict[str, str], outside: dict[str, str]) -> JsonObject:
        if kind == "Pod":
            return pod("tried", annotations=inside)
        inner = "Job" if kind == "CronJob" else kind
        restart = {"restartPolicy": "Never"} if inner == "Job" else {}
        one = workload(inner, "tried", template(annotations=inside, **restart))
        if kind == "CronJob":
            spec = {"schedule": "@yearly", "jobTemplate": {"spec": one["spec"]}}
            one = {**one, "kind": kind, "spec": spec}
        one["metadata"]["annotations"] = outside
        return one

    def warned(kind: str, inside: dict[str, str], outside: dict[str, str] = sound) -> str:
        create = ("create", "--dry-run=server", "--filename=-")
        return installed.completed(*create, documents=[made(kind, inside, outside)]).stderr

    installed.kubectl("apply", f"--filename={MANIFESTS / 'admission/mistakes.yaml'}")
    try:
        poll(lambda: "mian" in warned("Pod", other), "the policy")
        assert warned("Pod", sound) == ""
        policy = installed.ask("GET", f"{POLICIES}/nri-numa-mistakes")
        assert not policy.get("status", {}).get("typeChecking", {}).get("expressionWarnings")
        for kind in ("Deployment", "DaemonSet", "CronJob"):
            assert warned(kind, sound) == ""
            outside = warned(kind, {})
            assert re.search(rf"{PREFIX}/policy(, | is ignored)", outside)  # in any order
            assert f"stands on the {kind} and not on its pods" in outside
            for each in ("Pod", kind):
                said = warned(each, sound | other | slips)
                assert all(name in said for name in (*other, *slips)), said
                assert "it has main" in said
    finally:
        installed.kubectl("delete", f"--filename={MANIFESTS / 'admission/mistakes.yaml'}")
