"""Documents become pods; every mistake is told with its place."""

from pathlib import Path

import pytest
import yaml

from nri_numa.cluster.manifests import ManifestError
from nri_numa.cluster.pods import ContainerRole, Workload
from nri_numa.demo.stage import examples_directory
from nri_numa.model.workload import QoSClass
from nri_numa.simulate.manifests import Manifests, read_manifests, read_manifests_from_text

POD = """
apiVersion: v1
kind: Pod
metadata: {name: p}
spec:
  containers: [{name: app, image: x}]
"""


def pods(text: str) -> list[str]:
    return [
        pod.full_name
        for workload in read_manifests_from_text(text).workloads
        for pod in workload.pods
    ]


def only(text: str) -> Workload:
    (workload,) = read_manifests_from_text(text).workloads
    return workload


def problems(text: str, counted: str = "") -> tuple[str, ...]:
    with pytest.raises(ManifestError) as caught:
        read_manifests_from_text(text, "f.yaml", counted)
    return caught.value.problems


def workload(kind: str, version: str = "apps/v1", spec: str = "") -> str:
    return f"""
apiVersion: {version}
kind: {kind}
metadata: {{name: web, namespace: shop}}
spec:
  {spec}
  template:
    metadata: {{labels: {{app: web}}, annotations: {{a/b: c}}}}
    spec:
      containers: [{{name: app, image: x}}]
"""


# --- which pods -----------------------------------------------------------------------------------


def test_a_pod_is_itself() -> None:
    (pod,) = only(POD).pods
    assert (pod.full_name, pod.qos) == ("default/p", QoSClass.BEST_EFFORT)
    assert pod.source == "manifest, document 1 (Pod p)"
    assert [c.name for c in pod.containers] == ["app"]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (workload("Deployment"), 1),
        (workload("Deployment", spec="replicas: 3"), 3),
        (workload("Deployment", spec="replicas: 0"), 0),
        (workload("ReplicaSet", spec="replicas: 2"), 2),
        (workload("ReplicationController", "v1", "replicas: 2"), 2),
        (workload("StatefulSet", spec="replicas: 4"), 4),
        (workload("DaemonSet"), 1),
        (workload("Job", "batch/v1"), 1),
        (workload("Job", "batch/v1", "parallelism: 5"), 5),
        (workload("Job", "batch/v1", "parallelism: 5\n  completions: 2"), 2),
    ],
)
def test_a_controller_makes_as_many_pods_as_it_says(text: str, count: int) -> None:
    made = only(text).pods
    assert len(made) == len({pod.name for pod in made}) == len({pod.uid for pod in made}) == count
    for pod in made:
        assert pod.name.startswith("web-")
        assert (pod.namespace, pod.labels, pod.annotations) == (
            "shop",
            {"app": "web"},
            {"a/b": "c"},
        )


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        (workload("StatefulSet", spec="replicas: 2"), ["web-0", "web-1"]),
        (workload("StatefulSet", spec="replicas: 2\n  ordinals: {start: 5}"), ["web-5", "web-6"]),
        (
            workload("Job", "batch/v1", "parallelism: 2\n  completionMode: Indexed"),
            ["web-0-", "web-1-"],
        ),
        (POD.replace("{name: p}", "{name: '', namespace: '', generateName: job-}"), ["job-"]),
    ],
)
def test_names_are_those_that_the_controller_gives(text: str, begin: list[str]) -> None:
    """With an ending that is made up where there is one."""
    made = [name.partition("/")[2] for name in pods(text)]
    for name, start in zip(made, begin, strict=True):
        assert name.startswith(start)
        assert (len(name) > len(start)) is start.endswith("-")


def test_a_cron_job_is_one_run() -> None:
    job = yaml.safe_load(workload("Job", "batch/v1"))
    job["kind"], job["spec"] = "CronJob", {"jobTemplate": {"spec": job["spec"]}}
    assert len(pods(yaml.safe_dump(job))) == 1


def test_names_are_the_same_at_every_reading_and_differ_between_workloads() -> None:
    text = workload("Deployment", spec="replicas: 3")
    assert pods(text) == pods(text)
    assert not set(pods(text)) & set(pods(text.replace("name: web,", "name: api,")))


def test_a_list_holds_documents() -> None:
    text = yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "List",
            "items": [yaml.safe_load(POD), yaml.safe_load(workload("StatefulSet"))],
        }
    )
    assert pods(text) == ["default/p", "shop/web-0"]


def test_claims_of_a_container_are_told_once_for_all_pods_of_a_workload() -> None:
    document = yaml.safe_load(workload("StatefulSet"))
    spec = document["spec"]["template"]["spec"]
    document["spec"]["replicas"] = 3
    spec["resourceClaims"] = [{"name": "numa", "resourceClaimTemplateName": "four"}]
    claims = [{"name": "numa", "request": "a"}, {"name": "numa", "request": "b"}]
    spec["containers"][0].setdefault("resources", {})["claims"] = claims
    read = read_manifests_from_text(yaml.safe_dump(document))
    assert [one.containers[0].claims for one in read.workloads[0].pods] == [("numa",)] * 3
    name = spec["containers"][0]["name"]
    assert read.notes == (
        f"manifest, document 1 (StatefulSet web): ResourceClaim numa of container {name} "
        f"ignored: only the scheduler allocates such devices",
    )
    claims[1]["name"] = "gpu"
    (problem,) = problems(yaml.safe_dump(document))
    assert "claims[1].name is 'gpu', expected one of the pod's resourceClaims" in problem


def test_other_kinds_are_passed_over_with_a_note_and_slips_are_not() -> None:
    others = [
        ("Service", "v1", "'Service' makes no pods"),
        ("Ingress", "networking.k8s.io/v1", "'Ingress' makes no pods"),
        ("JobSet", "jobset.x-k8s.io/v1alpha2", "pods that a controller makes of 'JobSet' are"),
        ("VirtualMachine", "kubevirt.io/v1", "what counts of a VirtualMachine is its launcher pod"),
    ]
    read = read_manifests_from_text(
        "\n---\n".join([POD, *(f"{{kind: {k}, apiVersion: {v}}}" for k, v, _ in others)])
    )
    assert len(read.workloads) == 1
    for number, (note, (_, _, text)) in enumerate(zip(read.notes, others, strict=True), 2):
        assert note.startswith(f"manifest, document {number}: {text}")
        assert note.endswith(": left out")
    (problem,) = problems("kind: Deploymnt\napiVersion: apps/v1")
    assert problem == (
        "f.yaml, document 1: kind is 'Deploymnt', expected Deployment, or another kind that makes "
        "pods"
    )


@pytest.mark.parametrize("phase", ["Succeeded", "Failed", "Running", "[]"])
def test_pods_that_have_ended_take_nothing(phase: str) -> None:
    read = read_manifests_from_text(f"{POD}status: {{phase: {phase}}}\n---\n{POD}")
    ended = phase in ("Succeeded", "Failed")
    assert len(read.workloads) == 2 - ended
    assert read.notes == ("1 pod with phase Succeeded or Failed: left out",) * ended


# --- containers and resources ---------------------------------------------------------------------


def test_init_containers_come_first_and_sidecars_are_known() -> None:
    (pod,) = only(
        """
apiVersion: v1
kind: Pod
metadata: {name: p}
spec:
  containers: [{name: app}]
  initContainers:
    - {name: prepare}
    - {name: proxy, restartPolicy: Always}
"""
    ).pods
    assert [(c.name, c.role) for c in pod.containers] == [
        ("prepare", ContainerRole.INIT),
        ("proxy", ContainerRole.SIDECAR),
        ("app", ContainerRole.APP),
    ]


def resources(text: str) -> str:
    return POD.replace("image: x", f"resources: {text}")


def test_requests_default_to_the_limits() -> None:
    (pod,) = only(resources("{limits: {cpu: 1.5, memory: 2Gi}, requests: {cpu: 500m}}")).pods
    (container,) = pod.containers
    assert (container.requests.cpu_milli, container.limits.cpu_milli) == (500, 1500)
    assert container.requests.memory == container.limits.memory == 2 << 30
    assert pod.qos is QoSClass.BURSTABLE


def test_huge_pages_are_read_by_size() -> None:
    (pod,) = only(resources("{limits: {cpu: 1, hugepages-2Mi: 64Mi, hugepages-1Gi: 1Gi}}")).pods
    assert pod.containers[0].limits.hugepages == {2 << 20: 64 << 20, 1 << 30: 1 << 30}


def test_devices_are_noted_since_nobody_knows_where_they_are() -> None:
    read = read_manifests_from_text(
        resources("{limits: {example.com/gpu: 1, ephemeral-storage: 1Gi}}")
    )
    assert len(read.notes) == 1
    assert "example.com/gpu" in read.notes[0]


def test_pod_level_resources_and_critical_pods_are_read() -> None:
    text = POD.replace("spec:", "spec:\n  resources: {limits: {cpu: 4, memory: 1Gi}}")
    text = text.replace("spec:", "spec:\n  priorityClassName: system-node-critical", 1)
    (pod,) = only(text.replace("spec:", "spec:\n  runtimeClassName: kata", 1)).pods
    assert pod.pod_limits is not None
    assert (pod.pod_limits.cpu_milli, pod.qos) == (4000, QoSClass.GUARANTEED)
    assert (pod.critical, pod.runtime_handler) == (True, "kata")


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty, expected at least one manifest"),
        ("- 1", "is a list, expected a mapping"),
        ("just words", "is 'just words', expected a mapping"),
        ("apiVersion: v1", "kind is not set, expected Pod"),
        ("kind: 3", "kind is 3, expected text"),
        ("a: [", "line 2, column 1"),
        (POD.replace("v1", "v2"), "apiVersion is 'v2', expected v1 for kind Pod"),
        (POD.replace("apiVersion: v1", ""), "apiVersion is not set, expected v1"),
        (POD.replace("{name: p}", "{}"), "metadata.name is not set, expected a name"),
        (POD.replace("{name: p}", "{name: ''}"), "metadata.name is '', expected a name"),
        (POD.replace("{name: p}", "[]"), "metadata is an empty list, expected a mapping"),
        (POD.replace("{name: p}", "{name: 3}"), "metadata.name is 3, expected text"),
        (POD.replace("{name: p}", "{name: P_1}"), "metadata.name is 'P_1', expected lower case"),
        (
            POD.replace("{name: p}", "{name: p, namespace: a.b}"),
            "metadata.namespace is 'a.b', expected lower case",
        ),
        (
            POD.replace("{name: p}", "{name: p, annotations: {numa.kubernetes.io/numacpu: 1}}"),
            "metadata.annotations[numa.kubernetes.io/numacpu] is 1, expected text: put 1 in quotes",
        ),
        (
            POD.replace("{name: p}", "{name: p, labels: {on: yes}}"),
            "metadata.labels has the key true, expected text: quote it",
        ),
        (POD.partition("spec:")[0], "spec is not set, expected a mapping"),
        (
            POD.replace("[{name: app, image: x}]", "[]"),
            "spec.containers is an empty list, expected",
        ),
        (POD.replace("[{name: app, image: x}]", "3"), "spec.containers is 3, expected a list"),
        (POD.replace("[{name: app, image: x}]", "[app]"), "spec.containers[0] is 'app', expected"),
        (POD.replace("name: app, ", ""), "spec.containers[0].name is not set, expected"),
        (POD.replace("name: app", "name: App"), "spec.containers[0].name is 'App', expected"),
        (
            POD.replace("[{name: app, image: x}]", "[{name: a}, {name: a}]"),
            "spec.containers[1].name is 'a', expected a name that no other container",
        ),
        (
            POD.replace(
                "containers:", "initContainers: [{name: i, restartPolicy: Maybe}]\n  containers:"
            ),
            "spec.initContainers[0].restartPolicy is 'Maybe', expected Always (a sidecar)",
        ),
        (resources("3"), "spec.containers[0].resources is 3, expected a mapping"),
        (resources("{limits: [cpu]}"), "resources.limits is a list, expected a mapping"),
        (resources("{limits: {cpu: abc}}"), "limits.cpu is 'abc', expected a quantity such as 2"),
        (resources("{limits: {cpu: -1}}"), "limits.cpu is -1, expected 0 or more"),
        (resources("{limits: {cpu: yes}}"), "limits.cpu is true, expected a quantity"),
        (resources("{limits: {memory: 400m}}"), "limits.memory is '400m', expected whole bytes"),
        (resources("{limits: {mem: 1Gi}}"), "limits.mem is no resource, expected cpu"),
        (resources("{limits: {mem: 1Gi}}"), "did you mean memory?"),
        (
            resources("{limits: {cpu: 1}, requests: {cpu: 2}}"),
            "requests.cpu is 2, expected at most the limit, 1",
        ),
        (
            resources("{limits: {memory: 1Gi}, requests: {memory: 2Gi}}"),
            "requests.memory is '2Gi', expected at most the limit, '1Gi'",
        ),
        (
            resources("{limits: {cpu: 1, hugepages-2Mi: 3Mi}}"),
            "expected a multiple of 2 MiB such as 4Mi",
        ),
        (resources("{limits: {cpu: 1, hugepages-5Mi: 5Mi}}"), "expected hugepages-2Mi"),
        (resources("{limits: {hugepages-2Mi: 4Mi}}"), "huge pages alone, expected cpu or memory"),
        (
            resources("{limits: {cpu: 1, hugepages-2Mi: 4Mi}, requests: {hugepages-2Mi: 2Mi}}"),
            "huge pages that differ from the limits",
        ),
        (workload("Deployment", spec="replicas: -1"), "spec.replicas is -1, expected 0 to 10000"),
        (workload("Deployment", spec="replicas: 1.5"), "expected a whole number"),
        (workload("Deployment", spec="replicas: 99999"), "expected 0 to 10000"),
        (workload("Deployment").partition("spec:")[0], "spec.template is not set, expected a map"),
        (workload("Deployment", "v1"), "apiVersion is 'v1', expected apps/v1 for kind Deployment"),
    ],
)
def test_a_mistake_names_place_value_and_expectation(text: str, words: str) -> None:
    found = problems(text)
    assert any(words in problem for problem in found), found
    assert all(problem.startswith("f.yaml") for problem in found)


@pytest.mark.parametrize(
    ("amounts", "words"),
    [
        ("limits: {example.com/cpu: 1.5}", "limits[example.com/cpu] is 1.5, expected a whole"),
        ("limits: {example.com/cpu: x}", "limits[example.com/cpu] is 'x', expected a quantity"),
        ("requests: {example.com/cpu: 2}", "requests[example.com/cpu] is 2, expected the same"),
        (
            "limits: {example.com/cpu: 2}, requests: {example.com/cpu: 1}",
            "requests[example.com/cpu] is 1, expected the same as a limit",
        ),
    ],
)
def test_the_resource_of_exclusive_cpus_is_whole_and_a_limit(amounts: str, words: str) -> None:
    found = problems(resources(f"{{{amounts}}}"), "example.com/cpu")
    assert any(words in problem for problem in found), found


def test_slots_are_whole_cpus_however_they_are_written() -> None:
    for text, slots in (
        ("{limits: {example.com/cpu: '2e0'}, requests: {example.com/cpu: 2}}", 2),
        ("{}", 0),
    ):
        read = read_manifests_from_text(resources(text), "f.yaml", "example.com/cpu")
        assert read.workloads[0].pods[0].containers[0].slots == slots


def test_all_mistakes_of_all_files_come_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        f"{resources('{limits: {cpu: x, memory: y}}')}\n---\nkind: Podd\n---\n{POD}"
    )
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe")
    (tmp_path / "c.yaml").write_text("a: 1\na: 2")
    (tmp_path / "notes.txt").write_text("not a manifest")
    with pytest.raises(ManifestError) as caught:
        read_manifests([tmp_path, tmp_path / "missing.yaml"])
    named = [problem.removeprefix(f"{tmp_path}/") for problem in caught.value.problems]
    assert [name.split(" ")[0].rstrip(",:") for name in named] == [
        "a.yaml",
        "a.yaml",
        "a.yaml",
        "b.yaml",
        "c.yaml",
        "missing.yaml",
    ]
    assert "document 1 (Pod p)" in named[0]
    assert "document 2" in named[2]
    assert "No such file" in named[-1]


def test_what_cannot_be_manifests_is_told(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="expected manifests"):
        read_manifests([tmp_path])
    huge = tmp_path / "huge.yaml"
    huge.write_text("#" * (9 << 20))
    with pytest.raises(ManifestError, match="larger than 8 MiB"):
        read_manifests([huge])


# --- the examples ---------------------------------------------------------------------------------

CANONICAL = Path(__file__).parents[3] / "config" / "examples"


def test_the_installed_examples_are_those_of_the_configuration_folder() -> None:
    """A wheel carries the copy, people read the folder."""
    copies = {path.name: path.read_text() for path in examples_directory().iterdir()}
    assert copies == {path.name: path.read_text() for path in CANONICAL.glob("*.yaml")}


@pytest.mark.parametrize("path", sorted(CANONICAL.glob("*.yaml")), ids=lambda path: path.name)
def test_an_example_is_read_and_explains_itself(path: Path) -> None:
    assert path.read_text().startswith("# ")
    read: Manifests = read_manifests([path])
    assert read.workloads
    assert read.notes == ()
    for document in yaml.safe_load_all(path.read_text()):
        spec = document["spec"].get("template", document)["spec"]
        if "selector" in document["spec"]:
            labels = document["spec"]["template"]["metadata"]["labels"]
            assert document["spec"]["selector"]["matchLabels"] == labels
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            assert container["image"] == "busybox:1.36"
