"""Values that every link to a runtime makes: the QoS class, mentions of devices, updates."""

import pytest

from nri_numa.model.workload import (
    CLAIM_VARIABLE_PREFIX,
    MAX_CONTAINER_DEVICES,
    MAX_DEVICE_MENTION_CHARS,
    NO_DEVICE_MENTIONS,
    ContainerUpdate,
    DeviceFile,
    QoSClass,
    find_device_mentions,
)

G, B, BE = QoSClass.GUARANTEED, QoSClass.BURSTABLE, QoSClass.BEST_EFFORT
UID = "0a1b2c3d-1111-2222-3333-444455556666"
SLICE_UID = UID.replace("-", "_")


@pytest.mark.parametrize(
    ("cgroup_parent", "qos"),
    [
        (f"/kubepods/burstable/pod{UID}", B),
        (f"/kubepods/besteffort/pod{UID}", BE),
        (f"/kubepods/pod{UID}", G),
        (f"/kubelet/kubepods/burstable/pod{UID}", B),
        (f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SLICE_UID}.slice", B),
        (f"kubepods-burstable-pod{SLICE_UID}.slice", B),
        (f"/kubepods.slice/kubepods-pod{SLICE_UID}.slice", G),
        # kind: the kubelet's root is below a slice of its own
        (
            "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/"
            f"kubelet-kubepods-besteffort-pod{SLICE_UID}.slice",
            BE,
        ),
        ("", None),
        ("/system.slice", None),
        ("/burstable/pod1", None),
    ],
)
def test_the_qos_class_is_in_the_pods_cgroup(cgroup_parent: str, qos: QoSClass | None) -> None:
    assert QoSClass.of_cgroup(cgroup_parent) is qos


def test_nothing_that_tells_of_devices_is_no_mention() -> None:
    environment = ["PATH=/bin", "PCIDEVICE_A_INFO={}"]
    found = find_device_mentions(nodes=(), environment=environment, annotations={"other": "a/b=1"})
    assert found is NO_DEVICE_MENTIONS


def test_what_is_read_is_bounded() -> None:
    claims = [f"{CLAIM_VARIABLE_PREFIX}{number}=x" for number in range(MAX_CONTAINER_DEVICES + 1)]
    variables = [f"PCIDEVICE_{i}=x" for i in range(500)]
    found = find_device_mentions(
        nodes=[DeviceFile("c", 240, minor) for minor in range(MAX_CONTAINER_DEVICES + 5)],
        environment=[*variables, "PCIDEVICE_LONG=" + "x" * MAX_DEVICE_MENTION_CHARS, *claims],
        annotations={
            "cdi.k8s.io/a": ",".join(f"example.com/a={i}" for i in range(100)),
            "cdi.k8s.io/b": "x" * (MAX_DEVICE_MENTION_CHARS + 1),
        },
    )
    assert len(found.nodes) == len(found.variables) == len(found.cdi) == MAX_CONTAINER_DEVICES
    assert len(found.claims) == MAX_CONTAINER_DEVICES
    assert found.unread == 5 + 100 - MAX_CONTAINER_DEVICES


def test_a_later_update_counts_where_both_change_something() -> None:
    first = ContainerUpdate("a", cpus="0-3", mems="0", cpu_shares=2)
    later = ContainerUpdate("a", cpus="0-1", cpu_quota=-1)
    assert later.merge_onto(first) == ContainerUpdate("a", "0-1", "0", cpu_quota=-1, cpu_shares=2)
