"""``nri-numa simulate --cluster`` as a user meets it: kubectl's output in, an answer out."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from nri_numa.cli import cli, simulate_cluster
from tests.beds.cli import invoke
from tests.beds.objects import PREFIX, container, pod, single, topology


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def nrt(*free: int, name: str, **keys: Any) -> dict[str, Any]:
    return {"kind": "NodeResourceTopology", **topology(*free, name=name, **keys)}


def node(name: str, **spec: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": spec}


def manifest(cpus: int, name: str = "new") -> dict[str, Any]:
    made = single(cpus, name=name)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": made["metadata"], "spec": made["spec"]}


def runs(name: str, on: str, cpus: int) -> dict[str, Any]:
    """A pod that has its CPUs."""
    made = single(cpus, name=name, node=on, phase="Running")
    return {"apiVersion": "v1", "kind": "Pod", **made}


def listed(*items: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "List", "items": list(items)}


def simulate(capture: object, *pods: dict[str, Any], more: tuple[str, ...] = ()) -> Result:
    Path("pods.yaml").write_text("\n---\n".join(json.dumps(one) for one in pods))
    if not isinstance(capture, str):
        capture = json.dumps(capture)
    Path("cluster").write_text(capture)
    return invoke("simulate", "--cluster", "cluster", *more, "pods.yaml")


def document(capture: object, *pods: dict[str, Any]) -> Any:
    done = simulate(capture, *pods, more=("-o", "json"))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return json.loads(done.stdout)


# --- the answer -----------------------------------------------------------------------------------


def test_where_it_fits_and_why_not_elsewhere() -> None:
    cluster = listed(
        nrt(8, 12, name="a"),
        nrt(8, 9, name="b"),
        nrt(4, 4, of=8, name="c"),
        nrt(16, 16, name="d"),
        node("a"),
        node("b"),
        node("c"),
        node("d", unschedulable=True),
        node("e"),
    )
    done = simulate(cluster, manifest(12))
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert "default/new fits on 1 node; the best is a" in lines
    assert "  a: main on NUMA node 1, score 6" in lines or "  a: main on NUMA node 1" in done.stdout
    assert (
        "  rejected by b: needs 12 exclusive CPUs on one NUMA node; at most 9 free for exclusive "
        "use" in lines
    )
    assert "an empty node has 8, and waiting does not help" in done.stdout
    assert "rejected by e: no NodeResourceTopology object" in done.stdout
    assert "  rejected by d: it is cordoned" in lines
    assert "Not checked: the sum of requests" in done.stdout


def test_pods_of_a_manifest_leave_less_for_the_next() -> None:
    cluster = listed(nrt(8, 0, name="a"), nrt(8, 0, name="b"))
    found = document(cluster, *(manifest(6, name) for name in ("one", "two", "three")))
    assert [one["node"] for one in found["pods"]] == ["a", "b", ""]
    assert [one["feasible"] for one in found["pods"]] == [True, True, False]
    assert found["pods"][2]["rejectedBy"][0]["nodes"] == ["a", "b"]


def test_pods_on_their_way_are_counted_and_nothing_moves_then() -> None:
    held = single(6, name="held", node="a", scheduled_numa_nodes='{"main":"0"}')
    moving = nrt(8, 0, name="a", zone={f"{PREFIX}/exclusive-cpus-after-moves": "12"})
    done = simulate(listed(moving), manifest(12))
    assert "  a: main on NUMA node 0, score 0, after moving containers" in done.stdout
    cluster = listed(moving, {"kind": "Pod", **held})
    found = document(cluster, manifest(4))
    assert found["cluster"]["assumedPods"] == 1
    assert found["pods"][0]["feasible"] is False


def test_pods_with_one_verdict_have_it_once_and_the_sum_is_last() -> None:
    done = simulate(listed(nrt(4, 0, name="a")), *(manifest(9, f"web-{i}") for i in range(5)))
    lines = done.stdout.splitlines()
    assert lines[0] == "1 node with 0 pods."
    assert sum("fits on no node" in line for line in lines) == 1
    assert "Each of 5 pods (default/web-0, default/web-1" in done.stdout
    assert "0 of 5 pods fit." in lines


@pytest.mark.parametrize(("gpus", "fits"), [("3", ["a"]), ("4", []), ("1.5", None)])
def test_devices_of_a_manifest_count_as_in_the_extender(gpus: str, fits: list[str] | None) -> None:
    cluster = listed(nrt(8, 8, name="a"), nrt(8, 2, name="b"))
    for item in cluster["items"]:
        for zone in item["zones"]:
            zone["resources"].append({"name": "x.io/gpu", "allocatable": "4", "available": "3"})
    cluster["items"][1]["zones"][0]["resources"][-1]["available"] = "2"
    wanted = manifest(4)
    wanted["spec"]["containers"][0]["resources"]["limits"]["x.io/gpu"] = gpus
    if fits is None:
        done = simulate(cluster, wanted)
        assert (done.exit_code, "expected a whole number of devices" in done.stderr) == (2, True)
        return
    judged = document(cluster, wanted)
    assert [one["name"] for one in judged["pods"][0]["nodes"]] == fits
    assert not any("--devices" in note for note in judged["notes"])


TAINT = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("spec", "fits", "rejected"),
    [
        ({}, ["plain"], {"tainted": "it has a taint", "ssd": "it is cordoned"}),
        ({"tolerations": [{"key": "gpu", "operator": "Exists"}]}, ["plain", "tainted"], {}),
        ({"nodeSelector": {"disk": "ssd"}}, [], {"plain": "node selector", "ssd": "cordoned"}),
        ({"nodeSelector": {"disk": "ssd"}, "tolerations": [{"operator": "Exists"}]}, ["ssd"], {}),
    ],
)
@pytest.mark.parametrize("asks", [True, False])
def test_nodes_that_kube_scheduler_leaves_out_are_left_out(
    spec: dict[str, Any], fits: list[str], rejected: dict[str, str], asks: bool
) -> None:
    names = ("plain", "tainted", "ssd")
    ssd = node("ssd", unschedulable=True)
    ssd["metadata"]["labels"] = {"disk": "ssd"}
    nodes = node("plain"), node("tainted", taints=[TAINT]), ssd
    wanted = manifest(4) if asks else {"apiVersion": "v1", "kind": "Pod", **pod(container(cpu="1"))}
    wanted["spec"] = {**wanted["spec"], **spec}
    cluster = listed(*(nrt(8, name=name) for name in names), *nodes)
    found = document(cluster, wanted)
    assert found["cluster"]["cordoned"] == ["ssd"]
    (judged,) = found["pods"]
    said = {name: one["reason"] for one in judged["rejectedBy"] for name in one["nodes"]}
    assert sorted(set(names) - said.keys()) == fits
    assert all(text in said[name] for name, text in rejected.items())
    assert judged["feasible"] is bool(fits)
    if not asks:
        text = simulate(cluster, wanted).stdout
        assert ("every other node fits" if fits else "no node takes it") in text


def test_pods_that_have_ended_count_nothing() -> None:
    ended = [runs(f"p{n}", "a", 4) for n in range(2)]
    for one, phase in zip(ended, ("Succeeded", "Failed"), strict=True):
        one["status"]["phase"] = phase
    found = document(listed(nrt(4, name="a"), node("a"), *ended), manifest(8))
    assert found["cluster"]["pods"] == 0


def test_a_pod_without_a_wish_fits_everywhere() -> None:
    plain = pod(container(cpu="1"))
    plain = {"apiVersion": "v1", "kind": "Pod", **plain}
    done = simulate(listed(nrt(0, name="a")), plain)
    assert (done.exit_code, "every node fits" in done.stdout) == (0, True)


# --- what kubectl prints --------------------------------------------------------------------------


def test_lists_of_each_kind_one_after_another_and_yaml() -> None:
    topologies = {"kind": "NodeResourceTopologyList", "items": [topology(8, name="a")]}
    nodes = {"kind": "NodeList", "items": [node("a")]}
    both = json.dumps(topologies) + "\n" + json.dumps(nodes)
    assert simulate(both, manifest(4)).exit_code == 0
    assert simulate(yaml.safe_dump(listed(nrt(8, name="a"), node("a"))), manifest(4)).exit_code == 0
    together = listed(nrt(8, name="a"), {"kind": "Service", "metadata": {"name": "x"}})
    done = simulate(together, manifest(4), more=("-o", "yaml"))
    found = yaml.safe_load(done.stdout)
    assert "Skipped: Service." in found["notes"]
    assert found["pods"][0]["numaNodes"] == {"main": "0"}


def test_an_annotation_for_a_container_that_is_not_there_is_a_note() -> None:
    pod = manifest(4)
    pod["metadata"]["annotations"]["numa.kubernetes.io/smt.mian"] = "any"
    (found, *_) = document(listed(nrt(8, name="a"), node("a")), pod)["notes"]
    assert found.endswith("only 'main' (did you mean main?)")


def test_objects_that_cannot_be_read_are_unknown_nodes() -> None:
    broken = nrt(8, name="b")
    broken["zones"][0]["resources"][0]["available"] = "much"
    found = document(listed(nrt(2, name="a"), broken, node("a"), node("b")), manifest(4))
    assert "much" in found["cluster"]["unknown"]["b"]
    assert {"its NodeResourceTopology cannot be read"} <= {
        one["reason"] for one in found["pods"][0]["rejectedBy"]
    }


@pytest.mark.parametrize(
    ("key", "odd"),
    [
        ("metadata", {"name": "odd", "ownerReferences": 1}),
        ("metadata", {"name": "odd", "ownerReferences": ["x", {"controller": True}]}),
        ("metadata", {"name": "odd", "annotations": []}),
        ("metadata", {"name": "odd", "annotations": {f"{PREFIX}/assigned": "[" * 100_000}}),
        ("status", 1),
        ("status", {"phase": []}),
        ("spec", {"nodeName": {}}),
        ("spec", {"nodeName": "a", "containers": 5}),
        ("spec", 7),
    ],
)
def test_a_pod_that_makes_no_sense_ends_nothing(key: str, odd: Any) -> None:
    cluster = listed(nrt(8, name="a"), node("a"), {**runs("odd", "a", 2), key: odd})
    assert document(cluster, manifest(4))["pods"][0]["feasible"]


@pytest.mark.parametrize(
    ("capture", "said"),
    [
        ("", "is empty"),
        (listed(), "has no NodeResourceTopology, but nothing"),
        (listed(node("a"), node("b")), "has no NodeResourceTopology, but Node"),
        ({"apiVersion": "v1", "kind": "Deployment", "metadata": {"name": "x"}}, "but Deployment"),
        ("NAME STATUS\nworker-1 Ready\n", "expected what kubectl get"),
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("a: [", "expected what kubectl get"),
        ([1], "is a list, expected"),
        (listed(1), "is 1, expected"),
        (listed({"kind": "Pod", "metadata": {}}), "a Pod has no metadata.name"),
        (listed({"kind": "Pod"}), "a Pod has no metadata.name"),
        ({"kind": {}}, "but an object without a kind"),
    ],
)
def test_what_is_no_capture_is_said(capture: object, said: str) -> None:
    done = simulate(capture, manifest(4))
    assert done.exit_code == 2, done.output
    assert said in done.output
    assert "Traceback" not in done.output


def test_files_that_are_too_large_or_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_cluster, "MAX_YAML_CHARS", 100)
    done = simulate(yaml.safe_dump(listed(nrt(8, name="a"))), manifest(4))
    assert (done.exit_code, "expected JSON (-o json)" in done.output) == (2, True)
    monkeypatch.setattr(simulate_cluster, "MAX_CAPTURE_BYTES", 1000)
    done = simulate(listed(*(nrt(8, name=f"n{i}") for i in range(9))), manifest(4))
    assert (done.exit_code, "is larger than" in done.output) == (2, True)
    Path("cluster").write_bytes(b"{\xff}")
    done = invoke("simulate", "--cluster", "cluster", "pods.yaml")
    assert (done.exit_code, "is not UTF-8" in done.output) == (2, True)
    done = invoke("simulate", "--cluster", "nowhere", "pods.yaml")
    assert (done.exit_code, "cannot be read" in done.output) == (3, True)


def test_options_that_speak_of_one_machine_do_not_go_with_it() -> None:
    for more in (("--machine", "x"), ("--measured-memory",), ("--compare", "strategy=pack")):
        done = simulate(listed(nrt(8, name="a")), manifest(4), more=more)
        assert (done.exit_code, "--cluster goes with" in done.output) == (2, True)
    done = CliRunner().invoke(cli, ["simulate", "--cluster", "-", "-"], input="{}")
    assert (done.exit_code, "both standard input" in done.output) == (2, True)
    done = simulate(listed(nrt(8, name="a")), {"kind": "Pod"})
    assert done.exit_code == 2


def test_the_settings_are_those_of_the_nodes() -> None:
    """``strategy`` chooses among nodes that fit equally well."""
    cluster = listed(nrt(16, name="a"), nrt(8, name="b"))
    spread = simulate(cluster, manifest(4), more=("--set", "strategy=spread", "-o", "json"))
    packed = simulate(cluster, manifest(4), more=("--set", "strategy=pack", "-o", "json"))
    chosen = [json.loads(done.stdout)["pods"][0]["node"] for done in (spread, packed)]
    assert chosen == ["a", "b"]


def test_standard_input_is_read_too() -> None:
    Path("pods.yaml").write_text(json.dumps(manifest(4)))
    text = json.dumps(listed(nrt(8, name="a")))
    done = CliRunner().invoke(cli, ["simulate", "--cluster", "-", "pods.yaml"], input=text)
    assert done.exit_code == 0, done.output


def test_a_container_with_a_claim_is_not_judged_where_our_driver_is_on() -> None:
    big = manifest(40)
    big["spec"]["resourceClaims"] = [{"name": "numa", "resourceClaimTemplateName": "forty"}]
    big["spec"]["containers"][0]["resources"]["claims"] = [{"name": "numa"}]
    capture = listed(node("n1"), nrt(8, 8, name="n1"))
    assert simulate(capture, big).exit_code == 1
    found = simulate(capture, big, more=("--set", "dra.enabled=true"))
    assert found.exit_code == 0
    assert "containers with claims are not checked" in " ".join(found.output.split())
