"""The texts that are a promise to whoever reads Nodes, Pods and Events."""

import json

import pytest
from msgspec.structs import replace

from nri_numa.kube.events import event_name
from nri_numa.model.machine import topology_document
from nri_numa.publisher import desired_objects
from nri_numa.web.responses import MachineNUMAInfo, NUMAInfoData
from tests.beds.http_view import HOSTILE, assignment
from tests.beds.publisher_bed import NOTICE
from tests.machines import named as machines


def test_the_node_is_announced_field_by_field() -> None:
    info = MachineNUMAInfo(
        code=200,
        message="OK",
        data=NUMAInfoData(nodenums=2, cpulist=("0,22", "1,23"), memsize=("67257405440", "6")),
    )
    assert desired_objects.node_annotations("numa.kubernetes.io", info) == {
        "numa.kubernetes.io/numacpu": "0,22|1,23",
        "numa.kubernetes.io/numamem": "67257405440|6",
    }


def test_labels_have_the_shape_of_the_machine() -> None:
    labels = desired_objects.node_labels("x.io", topology_document(machines.snc_smt()))
    assert labels.keys() == {f"x.io/{key}" for key in desired_objects.NODE_LABELS}
    assert labels["x.io/sockets"] == "2"
    assert labels["x.io/numa-nodes"] == "4"
    assert labels["x.io/threads-per-core"] == "2"
    assert labels["x.io/largest-numa-node-cpus"] == str(int(labels["x.io/cpus"]) // 4)
    assert labels["x.io/memory-only-numa-nodes"] == "0"


def test_a_pod_tells_of_its_pinned_containers_only() -> None:
    containers = [
        assignment(1),
        replace(assignment(1, "second"), cpus="4"),
        replace(assignment(1, "plain"), kind="unpinned", mems=""),
        replace(assignment(1, "memory"), kind="unpinned", mems="1"),
        replace(assignment(1, "granted"), kind="kubelet", cpus="", foreign_cpus="6-7", mems=""),
        replace(assignment(2), kind="foreign"),
    ]
    ((name, (uid, text)),) = desired_objects.pod_annotations(containers).items()
    assert (name, uid) == (("shop", "pod-1"), "uid-1")
    assert {key: (one["cpus"], one["mems"]) for key, one in json.loads(text).items()} == {
        "server": ("0-3", "0"),
        "second": ("4", "0"),
        "memory": ("", "1"),  # numamem alone
        "granted": ("6-7", ""),  # by the kubelet's static policy
    }


def test_an_event_is_about_the_container() -> None:
    event = desired_objects.build_event(NOTICE, prefix="numa.kubernetes.io", node="n1")
    assert event["metadata"] == {"name": "web-0.0a0b0c0d1f", "namespace": "shop"}
    assert event["eventTime"] == "2023-11-14T22:13:20.250000Z"
    assert event["regarding"]["fieldPath"] == "spec.containers{main}"
    assert event["regarding"]["uid"] == "8d7c"
    assert event["note"] == "NoSuchCPU: CPU 63 is not here"
    assert (event["reason"], event["type"]) == ("PlacementRejected", "Warning")
    assert "series" not in event


def test_repetitions_are_a_series() -> None:
    again = replace(NOTICE, count=3, last_time=1_700_000_060.0)
    assert desired_objects.build_event(again, prefix="p", node="n1")["series"] == {
        "count": 3,
        "lastObservedTime": "2023-11-14T22:14:20.000000Z",
    }


@pytest.mark.parametrize("message", ["x" * 5000, "ü" * 1500, HOSTILE * 100, "\ud800" * 600])
def test_a_note_is_never_longer_than_the_api_server_takes(message: str) -> None:
    event = desired_objects.build_event(
        replace(NOTICE, message=message), prefix="p", node="n" * 253
    )
    assert len(event["note"].encode()) <= 1024
    assert len(event["reportingInstance"]) <= 128


def test_the_name_of_an_event_fits_and_stays_a_dns_name() -> None:
    for pod in ("a" * 253, "a" * 241 + ".-b" + "c" * 9):
        name = event_name(pod, NOTICE.id)
        assert len(name) <= 253
        assert "-." not in name
        assert ".." not in name


def test_what_a_newer_agent_tells_becomes_an_event_too() -> None:
    event = desired_objects.build_event(
        replace(NOTICE, notice_kind="contested"), prefix="p", node="n"
    )
    assert event["reason"] == "NUMAContested"
