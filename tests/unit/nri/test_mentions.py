"""What NRI messages say of devices."""

from __future__ import annotations

from nri_numa.engine.values.workload import NO_MENTIONS, DeviceNode
from nri_numa.nri.conversion import mentions_of, pod_from
from nri_numa.nri.wire.pb import nri_pb2 as pb


def container(count: int = 1, **kwargs: object) -> pb.Container:
    made = pb.Container(id="c", **kwargs)  # type: ignore[arg-type]  # fields of the message
    for minor in range(count):
        made.linux.devices.add(path=f"/dev/x{minor}", type="c", major=240, minor=minor)
    return made


def test_device_files_variables_and_cdi_names_are_read() -> None:
    made = container(
        env=[
            "PATH=/bin",
            "PCIDEVICE_A=0000:3b:00.0",
            "PCIDEVICE_A_INFO={}",
            "NVIDIA_VISIBLE_DEVICES=0",
        ],
        annotations={
            "cdi.k8s.io/x": "example.com/a=1, example.com/a=2",
            "other": "example.com/a=3",
        },
        CDI_devices=[pb.CDIDevice(name="example.com/b=1"), pb.CDIDevice(name="example.com/a=1")],
    )
    found = mentions_of(made)
    assert found.nodes == (DeviceNode("c", 240, 0),)
    assert found.variables == {"PCIDEVICE_A": "0000:3b:00.0", "NVIDIA_VISIBLE_DEVICES": "0"}
    assert found.cdi == ("example.com/b=1", "example.com/a=1", "example.com/a=2")
    assert found.unread == 0


def test_a_privileged_container_has_the_hosts_devices_and_none_of_its_own() -> None:
    for type in ("", "a"):
        made = container(3)
        made.linux.resources.devices.add(allow=True, type=type, access="rwm")
        assert mentions_of(made) is NO_MENTIONS
    made = container(3)
    made.linux.resources.devices.add(allow=False, access="rwm")
    made.linux.resources.devices.add(allow=True, type="c", access="m")
    rule = made.linux.resources.devices.add(allow=True, type="a", access="rwm")
    for some in (rule.major, rule.minor):
        for number in (0, 240):
            some.value = number
            assert len(mentions_of(made).nodes) == 3
        some.value = -1
        assert mentions_of(made) is NO_MENTIONS


def test_the_variables_of_a_privileged_container_count() -> None:
    made = container(3, env=["PCIDEVICE_A=0000:3b:00.0"])
    made.linux.resources.devices.add(allow=True, access="rwm")
    found = mentions_of(made)
    assert (found.nodes, found.variables) == ((), {"PCIDEVICE_A": "0000:3b:00.0"})


def test_the_network_namespace_is_the_pods_and_a_pod_of_the_hosts_has_none() -> None:
    pod = pb.PodSandbox(id="p")
    assert pod_from(pod, mentions=True).network_namespace == ""
    pod.linux.namespaces.add(type="ipc", path="/proc/1/ns/ipc")
    assert pod_from(pod, mentions=True).network_namespace == ""
    pod.linux.namespaces.add(type="network", path="/run/netns/cni-1")
    assert pod_from(pod, mentions=True).network_namespace == "/run/netns/cni-1"
    assert pod_from(pod).network_namespace == ""
