"""``nri-numa simulate`` as a user meets it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result

from nri_numa.cli.machine import parse_synthetic
from nri_numa.demo.stage import examples_directory
from nri_numa.engine.rebalance import MAX_SEARCH_WORK
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import NUMAMemoryReading
from tests.beds.cli import invoke, shows
from tests.machines.named import snc_smt, write_sysfs
from tests.machines.pods import container, document, pod, replicated

SINGLE = {"policy": "single-numa-node"}
MODEL = "synthetic:sockets=2,numa=2,cores=4,threads=2,memory=16Gi,hugepages-2Mi=1Gi"


def simulate(*arguments: str, machine: str = MODEL, **more: Any) -> Result:
    return invoke("simulate", *(("--machine", machine) if machine else ()), *arguments, **more)


def write(*documents: str) -> str:
    Path("pods.yaml").write_text("\n---\n".join(documents))
    return "pods.yaml"


def as_json(*arguments: str) -> Any:
    return json.loads(simulate(*arguments, "-o", "json").stdout)


# --- the answer -----------------------------------------------------------------------------------


def test_all_placed_is_0_and_told_with_where_why_and_how_full() -> None:
    done = simulate(write(pod("db", 4, "2Gi", SINGLE), pod("other")), code=0)
    lines = done.output.splitlines()
    assert lines[:2] == ["Machine:", MODEL]
    assert "2 sockets, 4 NUMA nodes, 16 cores, 32 CPUs, 64 GiB" in lines[2]
    (row,) = (line for line in lines if " db " in line)
    assert row.split()[:5] == ["1", "db", "app", "0-3", "0"]
    assert "exclusive CPUs on NUMA node 0" in row
    node = next(line for line in lines if line.startswith("0 "))
    assert node.split() == ["0", "8", "0", "4", "4", "16", "GiB", "2", "GiB", "13", "GiB"]
    assert "2 pods placed." in done.output


def test_a_rejection_is_1_with_message_and_how_it_came_about() -> None:
    done = simulate(write(pod("big", 9, "1Gi", SINGLE), pod("small", 1, "1Gi", SINGLE)), code=1)
    shows(done.output, "REJECTED", "0 pods placed, 1 rejection, 1 step not tried.")
    assert "Rejected: pods.yaml, document 1 (Pod big)" in done.output
    text = " ".join(done.output.split())
    shows(text, "9 exclusive CPUs needed", "Policy single-numa-node rejects it")


@pytest.mark.parametrize("limit", [MAX_SEARCH_WORK, 500])
def test_a_movable_container_makes_room(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the search goes on after the agent's answer."""
    monkeypatch.setattr("nri_numa.engine.rebalance.MAX_SEARCH_WORK", limit)
    aside = pod("aside", 2, "1Gi", {**SINGLE, "movable": "true"})
    lists = ("4-7,20-21", "8-11,24-25", "12-15,28-29")
    listed = [pod(f"on-{i + 1}", 6, "1Gi", {"numacpu": text}) for i, text in enumerate(lists)]
    done = simulate(write(aside, *listed, pod("whole", 8, "1Gi", SINGLE)), code=0)
    text = " ".join(done.output.split())
    assert "fits after moving default/aside/app (1 GiB) from NUMA node 0 to 1" in text
    assert "5 pods placed." in text


@pytest.mark.parametrize(
    ("old", "new"), [("--continue", "--keep-going"), ("--live-memory", "--measured-memory")]
)
def test_an_old_option_names_the_new_one(old: str, new: str) -> None:
    done = simulate(old, write(pod("db", 1)), code=2)
    assert f"{old} is gone, expected {new}" in done.output
    assert old not in simulate("--help", code=0).output


def test_keep_going_goes_on() -> None:
    files = write(pod("big", 9, "1Gi", SINGLE), pod("small", 1, "1Gi", SINGLE))
    done = simulate("--keep-going", files, code=1)
    assert "1 pod placed, 1 rejection." in done.output


def test_resizes_removals_and_who_made_room_are_told() -> None:
    spec = {"containers": [container("app", {"limits": {"cpu": 1, "memory": "1Gi"}})]}
    done = simulate(
        write(
            pod("other"),
            pod("db", 2, "1Gi", SINGLE),
            pod("db", 4, "1Gi", SINGLE),
            replicated("StatefulSet", "s", 1, spec),
            replicated("StatefulSet", "s", 0, spec),
        )
    )
    assert done.exit_code == 0, done.output
    assert "0-1 -> 0-3" in done.output
    assert "resized: 4 exclusive CPUs" in " ".join(done.output.split())
    shows(done.output, "3: default/other/app -> 4-31", "removed")


def test_namespaces_are_told_when_there_are_several() -> None:
    other = json.loads(pod("b"))
    other["metadata"]["namespace"] = "shop"
    done = simulate(write(pod("a"), json.dumps(other)))
    shows(done.output, "default/a", "shop/b")


def test_verbose_explains_every_container() -> None:
    files = write(pod("db", 4, "2Gi", SINGLE), pod("other"))
    assert "Placement options" not in simulate(files).output
    done = simulate("-v", files)
    shows(done.output, "default/db, container app", "Choice of NUMA nodes")


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("arguments", [[], ["-v"], ["--compare", "strategy=pack"]])
def test_everything_fits_80_columns(arguments: list[str]) -> None:
    spec = {"containers": [container("a-container-with-quite-a-name", {"limits": {"cpu": "500m"}})]}
    files = write(
        replicated(
            "Deployment", "a-deployment-with-a-long-name", 3, spec, {"policy": "restricted"}
        ),
        pod("x" * 80, wishes={"numacpu": "0-3"}),
        pod("too-big", 500, "1Gi", SINGLE),
    )
    done = simulate(*arguments, files, code=1)
    assert max(map(len, done.output.splitlines())) <= 80


def test_compare_shows_both() -> None:
    spec = {"containers": [container("app", {"limits": {"cpu": 2, "memory": "1Gi"}})]}
    files = write(replicated("StatefulSet", "db", 2, spec, SINGLE))
    done = simulate("--compare", "strategy=pack", files, code=0)
    rows = [line.split() for line in done.output.splitlines() if "db-" in line]
    assert rows == [
        ["1", "db-0", "app", "0-1", "0", "0-1", "0"],
        ["2", "db-1", "app", "4-5", "1", "2-3", "0"],
    ]
    assert "B: strategy=pack" in done.output
    found = as_json("--compare", "strategy=pack", files)
    assert found["comparedWith"]["settings"] == ["strategy=pack"]
    (node, *_) = found["comparedWith"]["numaNodes"]
    assert node["after"]["exclusive"] == 4
    assert found["numaNodes"][0]["after"]["exclusive"] == 2


def test_one_side_of_a_comparison_may_reject() -> None:
    files = write(pod("a", 5, "1Gi", SINGLE), pod("b", 5, "1Gi", SINGLE))
    done = simulate("--compare", "capacityFactor={1: 0, 2: 0, 3: 0}", files, code=1)
    shows(done.output, "A: 2 pods placed.", "B: 1 pod placed, 1 rejection.")


def test_json_and_yaml_say_the_same() -> None:
    files = write(pod("db", 4, "2Gi", SINGLE), pod("big", 9, "1Gi", SINGLE))
    found = as_json(files)
    assert yaml.safe_load(simulate(files, "-o", "yaml").stdout) == found
    assert found["rejected"] == 1
    first, second = found["events"]
    assert (first["pod"], first["action"], first["qos"]) == ("db", "create", "Guaranteed")
    (had,) = first["containers"]
    place = "0-3", "0", "exclusive", "placed"
    assert (had["cpus"], had["mems"], had["kind"], had["verdict"]) == place
    (rejected,) = second["containers"]
    assert rejected["verdict"] == "rejected"
    assert rejected["explanation"]["rejection"]["reason"] == "TopologyAffinityError"
    assert found["running"] == [
        {"namespace": "default", "pod": "db", "container": "app", "cpus": "0-3", "mems": "0"}
    ]
    assert found["numaNodes"][0]["before"]["cpuAllocatedMilli"] == 0
    assert found["numaNodes"][0]["after"]["cpuAllocatedMilli"] == 4000


def counted(cpus: int, slots: int) -> str:
    """A pod that asks by the extended resource."""
    amounts = {"cpu": cpus, "memory": "1Gi", "numa.example.com/exclusive-cpu": slots}
    return document("Pod", "db", {"containers": [container("app", {"limits": amounts})]})


def test_the_extended_resource_gives_exclusive_cpus() -> None:
    """As through the device plugin; another number of CPUs is refused as there."""
    done = simulate(write(counted(4, 4)), code=0)
    assert "4 exclusive CPUs on NUMA node 0" in done.output
    assert "placed without" not in done.output
    assert "SlotsMismatch" in simulate(write(counted(4, 3)), code=1).output
    changed = simulate(write(counted(4, 4), counted(2, 2)))
    assert "extended resources cannot be resized" in changed.output


@pytest.mark.parametrize(
    "setting", ["publish.nodeCapacity=true", "devicePlugin.resourceName=cpus.example.org/own"]
)
def test_a_resource_that_gives_no_slots_is_passed_over(setting: str) -> None:
    done = simulate(write(counted(4, 4)), "--set", setting, code=0)
    assert "exclusive CPUs" not in done.output
    assert "placed without" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("documents", "words"),
    [
        ([pod("a"), "kind: Service\napiVersion: v1"], ["'Service' makes no pods"]),
        (
            [pod("a", 3, "1Gi", {"numacpu": "4-6"})],
            ["container app: CPUs 4-6 are isolated (isolcpus)"],
        ),
        (
            [pod("a", 1, "1Gi", {"numamem": "0", "mempolicy": "weighted-interleave"})],
            [
                "mempolicy weighted-interleave needs containerd 2.3, CRI-O 1.37",
                "and Linux 6.9 or newer",
            ],
        ),
    ],
)
def test_notes_say_what_was_passed_over_or_is_odd(documents: list[str], words: list[str]) -> None:
    machine = "synthetic:sockets=1,numa=1,cores=8,isolated=2-7"
    done = simulate(write(*documents), machine=machine, code=0)
    said = " ".join(done.output.split())
    assert all(one in said for one in words)


def test_why_a_whole_limit_is_shared_is_said_in_the_row() -> None:
    half = pod("half", 4, None, SINGLE)
    shares = pod("shares", 4, None, {**SINGLE, "cpus": "shared"})
    done = simulate(write(half, shares, pod("part", 1.5, None, SINGLE)))
    rows = {name: one for one in done.output.splitlines() for name in one.split()[1:2]}
    assert rows["half"].endswith(
        "shared CPUs on NUMA node 0, because the pod is Burstable, not Guaranteed: the container "
        "has no memory limit"
    )
    assert rows["shares"].endswith("shared CPUs on NUMA node 1")
    assert "because" not in rows["part"]


def test_notes_warn_once_of_an_annotation_for_a_container_that_is_not_there() -> None:
    spec = {"containers": [container("app", {})], "initContainers": [container("setup", {})]}
    asks = {"smt.ap": "any", "smt.setup": "any", "numacpu.app": "0"}
    done = simulate(write(replicated("Deployment", "web", 3, spec, asks)), code=2)
    said = " ".join(done.output.split())
    assert said.count("smt.ap is ignored") == 1
    assert "only 'setup' and 'app' (did you mean app?)" in said
    assert "Deployment web" in said
    assert "smt.setup is ignored" not in said
    assert "numacpu.app is ignored" not in said


@pytest.mark.parametrize("kind", ["Deployment", "CronJob"])
def test_notes_warn_of_a_misspelt_prefix_and_of_annotations_outside_the_template(kind: str) -> None:
    pods = json.loads(replicated("Deployment", "web", 1, {"containers": [container("app", {})]}))
    template = pods["spec"]["template"]
    template["metadata"]["annotations"] = {"numa.kubernets.io/bind": "cpu"}
    job = {"metadata": {}, "spec": {"template": template}}
    asked = {"policy": "restricted", "polcy": "restricted"}
    if kind == "CronJob":
        cron = json.loads(document(kind, "web", {"jobTemplate": job}, asked))
        made = json.dumps(cron | {"apiVersion": "batch/v1"})
    else:
        made = document(kind, "web", pods["spec"], asked)
    said = " ".join(simulate(write(made), code=2).output.split())
    assert "its prefix is not numa.kubernetes.io (did you mean numa.kubernetes.io/bind?)" in said
    below = "spec.jobTemplate.spec" if kind == "CronJob" else "spec"
    for key in asked:
        assert (
            f"annotation numa.kubernetes.io/{key} is ignored, because it stands on the {kind} and "
            f"not on its pods; expected in {below}.template.metadata.annotations" in said
        )


def test_the_examples_are_placed_up_to_the_one_that_is_too_big() -> None:
    done = simulate(str(examples_directory()), code=1)
    shows(done.output, "10 pods placed, 1 rejection.", "07-too-big.yaml")


def test_names_cannot_move_the_cursor() -> None:
    hostile = json.loads(pod("a"))
    hostile["metadata"]["annotations"] = {"numa.kubernetes.io/numacpu": "\u001b[2J\u202e1"}
    done = simulate(write(json.dumps(hostile)), code=1)
    assert "\x1b" not in done.output
    assert "\u202e" not in done.output


# --- the machine ----------------------------------------------------------------------------------


def test_this_machine_is_the_default() -> None:
    done = simulate(write(pod("a")), machine="", code=0)
    assert "Machine: this machine" in done.output


def test_what_the_kubelet_of_this_machine_reserves_is_not_given() -> None:
    head = {"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration"}
    kubelet = {**head, "kubeReserved": {"memory": "1Gi"}}
    Path("kubelet.yaml").write_text(json.dumps(kubelet))
    Path("agent.yaml").write_text(f"kubelet: {{config: {Path('kubelet.yaml').resolve()}}}")

    def free(*arguments: str, machine: str) -> int:
        done = simulate(write(pod("p")), *arguments, "-o", "json", machine=machine)
        return sum(n["before"]["memoryFreeBytes"] for n in json.loads(done.stdout)["numaNodes"])

    assert free("--config", "agent.yaml", machine="") < free(machine="")
    assert free("--config", "agent.yaml", machine=MODEL) == free(machine=MODEL)


def test_sysfs_root_and_machine_are_the_same_thing_given_once(tmp_path: Path) -> None:
    write_sysfs(tmp_path / "root", snc_smt())
    files = write(pod("db", 4, "2Gi", SINGLE))
    first = simulate("--sysfs-root", str(tmp_path / "root"), files, machine="")
    second = simulate(files, machine=str(tmp_path / "root"))
    assert first.exit_code == 0, first.output
    assert first.output == second.output


def test_pods_without_requests_are_spread_over_the_numa_nodes() -> None:
    """The first example of the page about the configuration."""
    Path("agent.yaml").write_text("defaults: {policy: best-effort}\n")
    files = write(*(pod(f"p{n}", wishes={}) for n in range(8)))
    answer = as_json("--config", "agent.yaml", files)
    mems = [c["mems"] for s in answer["events"] for c in s["containers"]]
    assert mems == ["0", "1", "2", "3"] * 2


def test_exclusive_for_a_whole_pod_leaves_sidecars_and_debuggers_to_share() -> None:
    half = {"limits": {"cpu": "500m", "memory": "1Gi"}}
    spec = {
        "initContainers": [container("proxy", half, restartPolicy="Always")],
        "containers": [container("main", {"limits": {"cpu": 2, "memory": "1Gi"}})],
        "ephemeralContainers": [{"name": "debugger", "image": "busybox"}],
    }
    wishes = {"cpus": "exclusive", "policy": "best-effort"}
    answer = as_json(write(document("Pod", "db", spec, wishes)))
    (event,) = answer["events"]
    kinds = {c["container"]: c["explanation"]["result"]["kind"] for c in event["containers"]}
    assert kinds == {"proxy": "shared", "main": "exclusive", "debugger": "shared"}
    assert event["qos"] == "Guaranteed"


def test_isolated_cpus_are_for_containers_of_one_cpu() -> None:
    files = write(
        *(pod(name, cpus, "1Gi", SINGLE) for name, cpus in (("two", 2), ("a", 1), ("b", 1)))
    )
    machine = "synthetic:sockets=1,numa=1,cores=4,threads=1,memory=16Gi,isolated=2-3"
    done = simulate("--keep-going", "--set", "reservedCPUs=0", files, machine=machine, code=1)
    shows(done.output, "(isolatedCPUs: avoid)")
    rows = [line.split() for line in done.output.splitlines() if " app " in line]
    assert [row[3] for row in rows[1:3]] == ["1", "2"]


def test_memory_in_use_counts_only_when_asked(tmp_path: Path) -> None:
    machine = snc_smt()
    used = {
        i: NUMAMemoryReading(total_bytes=n.memory_bytes, free_bytes=1 << 30, reclaimable_bytes=0)
        for i, n in machine.numa_nodes.items()
    }
    write_sysfs(tmp_path / "used", machine, used)
    files = write(pod("db", 4, "2Gi", SINGLE))
    assert simulate(files, machine=str(tmp_path / "used")).exit_code == 0
    done = simulate("--measured-memory", files, machine=str(tmp_path / "used"), code=1)
    assert "TopologyAffinityError" in done.output


# --- mistakes -------------------------------------------------------------------------------------


def test_mistakes_in_manifests_are_2_and_come_all_at_once() -> None:
    bad = document("Pod", "P", {"containers": [container("A", {"limits": {"cpu": "x"}})]})
    done = simulate(write(bad), code=2)
    shows(done.output, "3 mistakes in the manifests", "metadata.name")
    assert "spec.containers[0].resources.limits.cpu is 'x'" in done.output


def test_standard_input_is_a_dash() -> None:
    done = simulate("-", stdin=pod("db", 4, "2Gi", SINGLE), code=0)
    assert " db " in done.output


def test_the_configuration_counts_and_set_beats_it() -> None:
    Path("agent.yaml").write_text("strategy: pack\nreservedCPUs: 0-3,16-19\n")
    files = write(pod("a", 2, "1Gi", SINGLE), pod("b", 2, "1Gi", SINGLE))
    packed = as_json("--config", "agent.yaml", files)
    assert [s["mems"] for s in packed["running"]] == ["1", "1"]
    spread = as_json("--config", "agent.yaml", "--set", "strategy=spread", files)
    assert [s["mems"] for s in spread["running"]] == ["1", "2"]


# --- devices --------------------------------------------------------------------------------------

GPU = "nvidia.com/gpu"


def gpu_pod(name: str = "train", count: object = 1) -> str:
    limits = {"cpu": 2, "memory": "1Gi", GPU: count}
    return document("Pod", name, {"containers": [container("app", {"limits": limits})]}, SINGLE)


def inventory(text: str) -> str:
    Path("devices.yaml").write_text(text)
    return "devices.yaml"


def test_pods_are_placed_beside_the_devices_of_an_inventory() -> None:
    devices = inventory(f"{GPU}: [{{id: g0, numaNodes: 2}}, {{id: g1, numaNodes: 1}}]")
    files = write(gpu_pod("a"), gpu_pod("b"), gpu_pod("c"))
    done = simulate("--devices", devices, files, code=1)
    assert "1: default/a/app: nvidia.com/gpu g0 (NUMA node 2)" in done.output
    text = " ".join(done.output.split())
    assert "1 nvidia.com/gpu needed, 0 of the inventory's 2 are free" in text
    assert "devices.enabled is off in the configuration" in text
    found = as_json("--devices", devices, "--set", "devices.enabled=true", files)
    (first,), (second,), (third,) = (event["containers"] for event in found["events"])
    assert (first["mems"], second["mems"]) == ("2", "1")
    assert first["devices"] == [{"resource": GPU, "id": "g0", "numaNodes": "2"}]
    assert third["reason"] == "UnexpectedAdmissionError"
    assert "devices" not in third
    assert found["notes"] == []


def test_a_captured_machine_says_where_its_devices_are() -> None:
    machine = Path("machine")
    write_sysfs(machine, snc_smt())
    for address, node in (("0000:3b:00.0", "3\n"), ("0000:3c:00.0", "-1\n")):
        at = machine / "sys/bus/pci/devices" / address
        at.mkdir(parents=True)
        facts = {"class": "0x030200\n", "vendor": "0x10de\n", "device": "0x20b0\n"}
        for name, content in {**facts, "numa_node": node}.items():
            (at / name).write_text(content)
    packed = invoke("capture", "m.tar.gz", "--sysfs-root", str(machine))
    assert packed.exit_code == 0, packed.output
    files = write(gpu_pod())
    done = simulate("--devices", inventory(f"{GPU}: ['0000:3b:00.0']"), files, machine="m.tar.gz")
    assert done.exit_code == 0, done.output
    assert "nvidia.com/gpu 0000:3b:00.0 (NUMA node 3)" in done.output
    done = simulate("--devices", inventory(f"{GPU}: [{{pci: 10de}}]"), files, machine="m.tar.gz")
    assert done.exit_code == 2
    assert "is 0000:3c:00.0, whose NUMA node this machine does not report" in done.output


# --- machines made up -----------------------------------------------------------------------------


def test_a_machine_made_up_can_be_odd() -> None:
    machine = parse_synthetic(
        "numa=1,memory=8,memory-only=4+64Gi,offline=1+3,isolated=2,nohz-full=2,efficient-cores=2,"
        "l3-cores=2,numbering=adjacent"
    )
    assert machine.numa_nodes[0].memory_bytes == 8 << 30
    assert [machine.numa_nodes[i].memory_bytes >> 30 for i in (2, 3)] == [4, 64]
    assert not machine.online & CPUSet.parse("1,3")
    assert machine.isolated == machine.nohz_full == CPUSet.parse("2")
    assert len(parse_synthetic("sockets=4,sockets-per-numa=2").numa_nodes) == 2
    assert len(parse_synthetic("").online) == 32


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sockets", "is not KEY=VALUE"),
        ("socket=2", "did you mean sockets"),
        ("xyz=2", "there is no key 'xyz'"),
        ("sockets=two", "expected a whole number"),
        ("sockets=-1", "expected a whole number"),
        ("sockets=0", "at least 1"),
        ("sockets=4000,cores=4000", "at most 4096"),
        ("memory=lots", "expected a quantity"),
        ("numbering=random", "expected split"),
        ("offline=3-1", "expected a list of CPUs"),
        ("hugepages-3Mi=1Gi", "expected hugepages-2Mi"),
        ("hugepages-2Mi=x", "expected a quantity"),
        ("hugepages-1Gi=2", "hugepages-1Gi is '2', expected a multiple of 1 GiB such as 2Gi"),
        ("sockets=3,sockets-per-numa=2", "cannot be joined"),
        ("cores=4,cores=8", "cores is given twice; expected it once"),
        ("hugepages-2Mi=1Gi,hugepages-2Mi=2Gi", "hugepages-2Mi is given twice"),
        (
            "sockets=1,numa=1,cores=4,offline=4000",
            "offline names CPU 4000, which does not exist; expected CPUs among 0-7",
        ),
        ("numa=1,cores=2,isolated=2+9-10", "isolated names CPUs 9-10, which do not exist"),
        ("numa=1,cores=2,nohz-full=9", "nohz-full names CPU 9, which does not exist"),
        ("sockets=1,numa=1,cores=1,offline=0-1", "offline is all of 0-1; expected one CPU"),
    ],
)
def test_a_machine_that_cannot_be_is_wrong_usage(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_synthetic(text)
