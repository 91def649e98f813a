"""Claims are prepared, found again after every kill, and counted for no other pod."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nri_numa.dra.claims import CLAIM_NAME_IN_POD_ANNOTATION, InvalidClaim, claim_variable_name
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.workload import Container, ContainerAdjustment, DeviceMentions
from tests.beds.claim_bed import OTHER, ClaimBed
from tests.beds.resource_claims import DRIVER, UID, config, result
from tests.beds.world import container, pod, resources, says

NONE: tuple[list[str], list[str]] = ([], [])
BOTH = ([f"{UID}.json"], [f"{DRIVER}-claim_{UID}.json"])


@pytest.fixture
def bed(tmp_path: Path) -> ClaimBed:
    return ClaimBed(tmp_path)


def environment(uid: str = UID, number: int = 0) -> DeviceMentions:
    return DeviceMentions(claims=(claim_variable_name(uid, number),))


def test_what_the_kubelet_gets(bed: ClaimBed) -> None:
    (one,) = bed.prepare()
    assert (one.request, one.pool, one.device, one.share_id) == ("cpus", "n1", "numa1", "s-1")
    assert one.cdi == f"{DRIVER}/claim=claim-{UID}-0"
    assert bed.files() == BOTH
    assert bed.prepare() == [one]  # once more is the same


def dying(bed: ClaimBed) -> Container:
    """A container on all of NUMA node 1 but a CPU, whose pod the API server no longer knows."""
    of = pod("dying", {"cpus": "exclusive", "policy": "single-numa-node"})
    bed.world.place(pod("beside", {"numacpu": "0-7"}))
    made = container(of, wants=resources(6, 1))
    assert bed.world.place(of, made)[1] == "1"
    return made


def test_a_claim_waits_for_the_end_of_who_had_its_cpus(bed: ClaimBed) -> None:
    """A pod that was deleted without a grace period: its claim is free, and its container runs."""
    ends = dying(bed)

    def end() -> None:
        bed.world.stop(ends.id)
        bed.world.agent.stop_pod("uid-dying", "sandbox-dying")

    bed.meanwhile = end
    bed.prepare()
    assert bed.waits == 1
    of = pod("web")
    _, made = bed.book.complete_container(
        of, replace(container(of, wants=resources(4, 1)), mentions=environment())
    )
    cpus, _ = bed.world.place(of, made)
    assert len(CPUSet.parse(cpus)) == 4


def test_it_does_not_wait_for_ever_nor_again(bed: ClaimBed) -> None:
    """CPUs of a container that stays: the next one's refusal names it."""
    dying(bed)
    bed.prepare()
    assert bed.waits == 100
    bed.prepare()  # as after a restart of the kubelet, when its container may have them
    assert bed.waits == 100


def test_a_claim_that_nobody_hands_over_holds_up_no_other(bed: ClaimBed) -> None:
    bed.prepare()

    def late() -> None:
        other = threading.Thread(target=bed.book.unprepare_claim, args=(UID,), daemon=True)
        other.start()
        other.join(10)
        assert bed.files() == NONE
        raise InvalidClaim("nobody answers")

    bed.objects[OTHER] = late
    with pytest.raises(InvalidClaim, match="nobody answers"):
        bed.prepare(OTHER)


@pytest.mark.parametrize("gone", ["", "record", "cdi", "both"])
def test_whatever_a_kill_left_the_next_process_puts_right(bed: ClaimBed, gone: str) -> None:
    """Before the record nothing happened; after it the CDI file is made again."""
    bed.prepare()
    if gone in ("record", "both"):
        (bed.records / BOTH[0][0]).unlink()
    if gone in ("cdi", "both"):
        (bed.cdi / BOTH[1][0]).unlink()
    bed.boot()
    there = gone in ("", "cdi")
    assert bed.files() == (BOTH if there else NONE)
    assert list(bed.book.claims) == ([UID] if there else [])
    bed.prepare()  # the kubelet asks again
    assert bed.files() == BOTH


def test_files_that_were_cut_short_go_and_those_of_others_stay(bed: ClaimBed) -> None:
    (bed.records / f".{UID}.json.12.new").write_text("{")
    (bed.records / f"{OTHER}.json").write_text("{")
    bed.cdi.mkdir()
    (bed.cdi / f".{DRIVER}-claim_{UID}.json.12.new").write_text("{")
    (bed.cdi / "gpu.example.com-gpu.json").write_text("{}")
    bed.boot()
    assert bed.files() == ([f"{OTHER}.json"], ["gpu.example.com-gpu.json"])
    assert bed.book.claims == {}


def test_a_record_under_the_name_of_another_claim_does_not_count(bed: ClaimBed) -> None:
    bed.prepare()
    (bed.records / f"{UID}.json").rename(bed.records / f"{OTHER}.json")
    assert bed.boot().claims == {}


def test_forgetting_is_done_once_and_harmless_again(bed: ClaimBed) -> None:
    bed.prepare()
    for uid in (UID, UID, OTHER, "../../etc/passwd"):
        bed.book.unprepare_claim(uid)
        assert bed.files() == NONE
    assert bed.boot().claims == {}


def test_a_claim_that_a_second_pod_has_is_written_again(bed: ClaimBed) -> None:
    bed.prepare()
    bed.objects[UID] = bed.claim(pods="uid-next")
    bed.prepare()
    assert bed.boot().claims[UID].pods == {"uid-next"}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (ClaimBed.claim(result(device="numa7")), "NUMA node 7 does not exist"),
        (
            ClaimBed.claim(result(consumedCapacity={f"{DRIVER}/cpu": "8"})),
            "takes 8 of cpu, and NUMA node 1 has 7",
        ),
        (
            ClaimBed.claim(
                result(consumedCapacity={f"{DRIVER}/cpu": "1", f"{DRIVER}/memory": "1Ei"})
            ),
            "of memory, and NUMA node 1 has",
        ),
        (ClaimBed.claim(configs=[config({"smt": "twice"})]), "smt is 'twice'"),
        (ClaimBed.claim(configs=[config({"policy": "strict"})]), "policy is 'strict'"),
        (ClaimBed.claim(configs=[config({"numamem": "0-"})]), "numamem is '0-'"),
        (ClaimBed.claim(configs=[config({"bind": "none"})]), "bind is 'none'.*changes nothing"),
        (
            ClaimBed.claim(configs=[config({"numamem": "1,7"})]),
            "numamem is '1,7', and NUMA node 7 has no memory for containers; expected NUMA nodes "
            "among 0-1",
        ),
        (
            ClaimBed.claim(
                result(consumedCapacity={f"{DRIVER}/cpu": "1", f"{DRIVER}/memory": "1Gi"}),
                configs=[config({"numamem": "0"})],
            ),
            "numamem is '0', and the claim takes memory of NUMA node 1; expected that one in it",
        ),
        ({**ClaimBed.claim(), "metadata": {"uid": OTHER, "namespace": "default", "name": "four"}},
         f"has UID {OTHER} now, expected {UID}"),
    ],
)  # fmt: skip
def test_what_cannot_be_met_here_is_rejected(bed: ClaimBed, document: Any, words: str) -> None:
    bed.objects[UID] = document
    with pytest.raises(InvalidClaim, match=words):
        bed.prepare()
    assert bed.files() == NONE


def test_uids_that_are_none_become_no_file_names(bed: ClaimBed) -> None:
    with pytest.raises(InvalidClaim, match="expected a UUID"):
        bed.prepare("../../etc/passwd")


def test_another_allocation_of_the_same_claim_is_rejected(bed: ClaimBed) -> None:
    bed.prepare()
    bed.objects[UID] = bed.claim(result(device="numa0"))
    with pytest.raises(InvalidClaim, match="prepared with another allocation"):
        bed.prepare()


def test_a_place_that_cannot_be_written_is_the_kubelets_error(bed: ClaimBed) -> None:
    bed.cdi.write_text("no directory")
    with pytest.raises(OSError, match="cdi"):
        bed.prepare()


def test_a_place_that_cannot_be_made_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("no directory")
    assert ClaimBed(tmp_path).book.claims == {}


@pytest.mark.parametrize(
    ("parameters", "mems"),
    [
        ({}, "1"),
        ({"policy": "single-numa-node"}, "1"),
        ({"bind": "cpu"}, ""),
        ({"numamem": "0-1"}, "0-1"),
        ({"smt": "isolate", "load": "low", "devices": "ignore"}, "1"),
    ],
)
def test_a_claim_is_as_the_annotation(bed: ClaimBed, parameters: dict[str, str], mems: str) -> None:
    bed.objects[UID] = bed.claim(configs=[config(parameters)])
    bed.prepare()
    of = pod("web")
    made = container(of, "app", wants=resources(4, 0.1))
    cpus, found = bed.world.place(
        *bed.book.complete_container(of, replace(made, mentions=environment()))
    )
    assert CPUSet.parse(cpus) <= bed.world.topology.numa_nodes[1].cpus
    assert (len(CPUSet.parse(cpus)), found) == (4, mems)


def test_other_containers_are_untouched(bed: ClaimBed) -> None:
    bed.prepare()
    of = pod("web")
    made = container(of)
    seen = bed.book.complete_container(of, made)
    assert seen[0] is of
    assert seen[1] is made


@pytest.mark.parametrize(
    ("name", "namespace", "named", "words"),
    [
        ("thief", "default", environment(), "was prepared for another pod"),
        ("web", "other", environment(), "was prepared for another pod"),
        ("web", "default", environment(OTHER), f"its ResourceClaim {OTHER} is not prepared"),
        ("web", "default", environment(UID, 1), f"its ResourceClaim {UID} is not prepared"),
    ],
)
def test_a_variable_of_ones_own_gives_nothing(
    bed: ClaimBed, name: str, namespace: str, named: DeviceMentions, words: str
) -> None:
    bed.prepare()
    of = pod(name, namespace=namespace)
    made = replace(container(of, wants=resources(4, 0.1)), mentions=named)
    says(bed.world.reject(*bed.book.complete_container(of, made)), "ClaimNotPrepared", words)


def test_a_container_finds_its_cpus_in_device_metadata(bed: ClaimBed) -> None:
    bed.objects[UID]["metadata"]["annotations"] = {CLAIM_NAME_IN_POD_ANNOTATION: "numa"}
    bed.prepare()
    of = pod("web")
    made = replace(container(of, wants=resources(4, 0.1)), mentions=environment())
    cpus, _ = bed.world.place(*bed.book.complete_container(of, made))
    allocation = bed.world.allocation(made.id)
    to = bed.book.extend_adjustment(allocation, made, ContainerAdjustment(cpus=cpus))
    ((inside, path),) = to.mounts
    where = "/var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates/numa/cpus"
    assert inside == f"{where}/{DRIVER}-metadata.json"
    assert Path(path).stat().st_mode & 0o777 == 0o644
    first, second = (json.loads(line) for line in Path(path).read_text().splitlines())
    assert first["apiVersion"].endswith("/v1beta1")
    assert second["apiVersion"].endswith("/v1alpha1")
    (request,) = second["requests"]
    numbers = [one["attributes"].get("dra.cpu/cpuID") for one in request["devices"]]
    assert numbers == [None, *({"int": cpu} for cpu in CPUSet.parse(cpus))]
    bed.boot()
    assert Path(path).exists()
    bed.book.unprepare_claim(UID)
    assert not Path(path).exists()


def test_a_cpu_that_is_offline_is_said_of_its_numa_node_alone(bed: ClaimBed) -> None:
    bed.objects[UID] = bed.claim(result(), result(request="more", device="numa0"))
    bed.prepare()
    of, named = (
        pod("web"),
        DeviceMentions(claims=(claim_variable_name(UID, 0), claim_variable_name(UID, 1))),
    )
    made = replace(container(of, wants=resources(8, 0.1)), mentions=named)
    assert bed.world.place(*bed.book.complete_container(of, made))[0] == "0-3,9-12"
    assert bed.book.pool_and_device_health() == ("n1", {"numa0": "", "numa1": ""})
    machine = bed.world.agent.current.machine
    online = machine.topology.online - CPUSet([9])
    bed.world.agent.current.machine = replace(
        machine, topology=replace(machine.topology, online=online)
    )
    assert bed.book.pool_and_device_health()[1] == {"numa0": "", "numa1": "CPU 9 is offline"}
