"""Protobuf and the engine's types: nothing is lost, nothing is invented."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from nri_numa.errors import LocalProtocolError
from nri_numa.model.machine import NO_CFS_QUOTA
from nri_numa.model.workload import (
    NO_ADJUSTMENT,
    NO_DEVICE_MENTIONS,
    Container,
    ContainerAdjustment,
    ContainerUpdate,
    DeviceFile,
    QoSClass,
    Resources,
)
from nri_numa.nri.conversion import (
    answer_request,
    container_from,
    create_response,
    pod_from,
    read_device_mentions,
    resources_from,
    update_messages,
)
from nri_numa.nri.wire import events as ev
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.versions import Event
from nri_numa.runtime import parse_page_bytes
from tests.beds.recording_plugin import RecordingPlugin, update

G, B, BE = QoSClass.GUARANTEED, QoSClass.BURSTABLE, QoSClass.BEST_EFFORT


# --- pods -------------------------------------------------------------------------------------


def resources(
    *, shares: int | None = None, quota: int | None = None, limit: int | None = None
) -> pb.LinuxResources:
    message = pb.LinuxResources()
    if shares is not None:
        message.cpu.shares.value = shares
    if quota is not None:
        message.cpu.quota.value = quota
        message.cpu.period.value = 100_000
    if limit is not None:
        message.memory.limit.value = limit
    return message


@pytest.mark.parametrize(
    ("score", "given", "qos"),
    [
        (-997, resources(), G),
        (1000, resources(shares=4096), BE),
        (2, resources(), B),
        (999, resources(), B),
        # no score of the kubelet's: the resources decide
        (0, resources(), BE),
        (-998, resources(), BE),
        (None, resources(), BE),
        (None, resources(shares=2), BE),
        (None, resources(shares=102), B),
        (None, resources(limit=1 << 30), B),
        (None, resources(shares=2048, quota=200_000), B),
        (None, resources(shares=2048, quota=200_000, limit=1 << 30), G),
        # a limit of 1m becomes the least quota there is
        (None, resources(shares=2, quota=1_000, limit=1 << 30), G),
        # where only limits are given, requests are set to them
        (None, resources(quota=200_000, limit=1 << 30), G),
    ],
)
@pytest.mark.parametrize("where", ["pod", "container"])
def test_outside_the_kubelets_cgroups_score_and_resources_tell_the_class(
    score: int | None, given: pb.LinuxResources, qos: QoSClass, where: str
) -> None:
    pod = pb.PodSandbox(linux=pb.LinuxPodSandbox(cgroup_parent="/test"))
    container = pb.Container(linux=pb.LinuxContainer())
    if score is not None:
        container.linux.oom_score_adj.value = score
    if where == "pod":
        pod.linux.pod_resources.CopyFrom(given)
    else:
        container.linux.resources.CopyFrom(given)
    assert pod_from(pod, container).qos is qos


# --- containers -------------------------------------------------------------------------------


def test_a_whole_container_is_converted() -> None:
    message = pb.Container(
        id="c" * 64, pod_sandbox_id="sandbox", name="main", labels={"a": "b"},
        annotations={"x": "y"}, args=["sleep"], env=["A=b"], pid=42,
    )  # fmt: skip
    message.linux.cgroups_path = "kubepods.slice:cri-containerd:c"
    message.linux.oom_score_adj.value = -997
    given = message.linux.resources
    given.CopyFrom(resources(shares=2048, quota=200_000, limit=1 << 30))
    given.cpu.cpus, given.cpu.mems = "2-3", "0"
    for size, limit in (("64KB", 0), ("2MB", 4 << 20), ("1GB", 1 << 30)):
        given.hugepage_limits.add(page_size=size, limit=limit)
    assert container_from(pb.Container.FromString(message.SerializeToString())) == Container(
        id="c" * 64, pod_id="sandbox", name="main", annotations={"x": "y"},
        resources=Resources(
            cpu_shares=2048, cpu_quota=200_000, cpu_period=100_000, memory_limit=1 << 30,
            hugepages={2 << 20: 4 << 20, 1 << 30: 1 << 30}, cpus="2-3", mems="0",
        ),
        oom_score_adj=-997, pid=42, cgroups_path="kubepods.slice:cri-containerd:c",
    )  # fmt: skip


def test_resources_are_the_same_however_much_else_is_told_with_them() -> None:
    """Those of replicas are remembered by their bytes, unless they are long."""
    short = resources(shares=512, quota=50_000, limit=1 << 30)
    short.hugepage_limits.add(page_size="2MB", limit=4 << 20)
    long = pb.LinuxResources()
    long.CopyFrom(short)
    long.unified["io.max"] = "8:16 rbps=2097152 wiops=120 " * 100
    other = pb.LinuxResources()
    other.CopyFrom(short)
    other.cpu.cpus = "2-3"
    expected = Resources(
        cpu_shares=512,
        cpu_quota=50_000,
        cpu_period=100_000,
        memory_limit=1 << 30,
        hugepages={2 << 20: 4 << 20},
    )
    for _ in range(2):
        assert resources_from(short) == resources_from(long) == expected
        assert resources_from(other) == replace(expected, cpus="2-3")


def test_in_an_update_zero_means_not_given() -> None:
    message = resources(shares=0, quota=0, limit=0)
    message.cpu.period.value = 0
    message.cpu.cpus = "1"
    assert resources_from(message, update=True) == Resources(cpus="1")
    assert resources_from(message) == Resources(
        cpu_shares=0, cpu_quota=0, cpu_period=0, memory_limit=0, cpus="1"
    )


def test_an_update_without_quota_says_so() -> None:
    assert resources_from(resources(quota=-1), update=True).cpu_quota == -1


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2MB", 2 << 20),
        ("1GB", 1 << 30),
        ("2Mi", 2 << 20),
        ("2048kB", 2 << 20),
        ("1T", 1 << 40),
        ("2097152", 2 << 20),
        ("", 0),
        ("-2MB", 0),
        ("2XB", 0),
        ("٢MB", 0),
        ("9" * 100, 0),
    ],
)
def test_page_sizes(text: str, size: int) -> None:
    assert parse_page_bytes(text) == size


def test_a_page_size_nobody_knows_is_kept_under_zero_so_that_it_can_be_said() -> None:
    message = pb.LinuxResources()
    message.hugepage_limits.add(page_size="huge", limit=1)
    assert resources_from(message).hugepages == {0: 1}


# --- answers ----------------------------------------------------------------------------------


def messages_of(*updates: ContainerUpdate) -> list[pb.ContainerUpdate]:
    return list(pb.UpdateContainersRequest(update=update_messages(updates)).update)


def test_no_change_is_the_empty_message() -> None:
    empty = ContainerUpdate(container_id="x")
    assert empty.is_empty
    assert create_response(NO_ADJUSTMENT).SerializeToString() == b""
    assert messages_of(empty) == []


def test_an_adjustment_reaches_its_fields() -> None:
    response = create_response(
        ContainerAdjustment(
            cpus="2-3",
            mems="0",
            quota=NO_CFS_QUOTA,
            annotations={"numa.kubernetes.io/assigned": "{}"},
            env={"NUMA_CPUS": "2-3", "NUMA_MEMS": "0"},
        )
    )
    adjust = pb.CreateContainerResponse.FromString(response.SerializeToString()).adjust
    cpu = adjust.linux.resources.cpu
    assert (cpu.cpus, cpu.mems, cpu.quota.value) == ("2-3", "0", -1)
    assert not cpu.HasField("shares")
    assert not cpu.HasField("period")
    assert not adjust.linux.resources.HasField("memory")
    assert dict(adjust.annotations) == {"numa.kubernetes.io/assigned": "{}"}
    assert [(e.key, e.value) for e in adjust.env] == [("NUMA_CPUS", "2-3"), ("NUMA_MEMS", "0")]


@pytest.mark.parametrize(
    "adjustment",
    [
        ContainerAdjustment(cpus="1"),
        ContainerAdjustment(mems="1"),
        ContainerAdjustment(quota=-1),
        ContainerAdjustment(env={"A": ""}),
        ContainerAdjustment(annotations={"a": ""}),
    ],
)
def test_each_part_of_an_adjustment_goes_alone(adjustment: ContainerAdjustment) -> None:
    adjust = create_response(adjustment).adjust
    cpu = adjust.linux.resources.cpu
    assert (cpu.cpus, cpu.mems) == (adjustment.cpus, adjustment.mems)
    assert cpu.HasField("quota") is (adjustment.quota is not None)
    assert len(adjust.env) == len(adjustment.env)
    assert len(adjust.annotations) == len(adjustment.annotations)


def test_an_update_without_container_is_a_bug_in_us() -> None:
    with pytest.raises(LocalProtocolError, match="container_id"):
        messages_of(ContainerUpdate(container_id="", cpus="1"))


@pytest.mark.parametrize(
    "request_of",
    [
        lambda: ev.SynchronizeRequested(0, (), ()),
        lambda: event(Event.CREATE_CONTAINER, pb.CreateContainerRequest),
        lambda: event(Event.STOP_CONTAINER, pb.StopContainerRequest),
        lambda: event(Event.UPDATE_CONTAINER, pb.UpdateContainerRequest),
    ],
)
def test_a_failed_update_fails_the_request_only_if_it_is_of_its_own_container(
    request_of: Callable[[], ev.EventRequested | ev.SynchronizeRequested],
) -> None:
    """One that exits meanwhile must not fail another one's creation.

    CRI-O fails a whole Synchronize for it.
    """
    updates = [update("own", "1"), update("other", "1")]
    handler = RecordingPlugin(
        synchronize=lambda *given: updates,
        create_container=lambda *given: (NO_ADJUSTMENT, updates),
        stop_container=lambda *given: updates,
        update_container=lambda *given: updates,
    )
    request = request_of()
    answer: Any = answer_request(handler, request)
    is_update = isinstance(request, ev.EventRequested) and request.event is Event.UPDATE_CONTAINER
    ignored = {said.container_id: said.ignore_failure for said in answer.update}
    assert ignored == {"own": not is_update, "other": True}


def event(kind: Event, message: Callable[..., Any]) -> ev.EventRequested:
    return ev.EventRequested(0, kind, message(container=pb.Container(id="own")))


def test_each_container_is_named_once_with_all_that_is_meant() -> None:
    """Two updates of one container in one answer would be a conflict of ours with ourselves.

    A quota has its period, without which crun ignores it.
    """
    first, other, last = messages_of(
        ContainerUpdate("a", "0-3", "0", cpu_shares=2),
        ContainerUpdate("b", cpu_period=50_000, memory_limit=1 << 30),
        ContainerUpdate("a", "4", cpu_quota=-1),
        ContainerUpdate("é", mems="1", cpu_quota=20_000, cpu_period=50_000),
    )
    for said, name, meant in (
        (first, "a", Resources(cpus="4", mems="0", cpu_shares=2, cpu_quota=-1, cpu_period=100_000)),
        (other, "b", Resources(cpu_period=50_000, memory_limit=1 << 30)),
        (last, "é", Resources(mems="1", cpu_quota=20_000, cpu_period=50_000)),
    ):
        assert said.container_id == name
        assert resources_from(said.linux.resources) == meant


# --- what NRI messages say of devices -------------------------------------------------------------


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
    found = read_device_mentions(made)
    assert found.nodes == (DeviceFile("c", 240, 0),)
    assert found.variables == {"PCIDEVICE_A": "0000:3b:00.0", "NVIDIA_VISIBLE_DEVICES": "0"}
    assert found.cdi == ("example.com/b=1", "example.com/a=1", "example.com/a=2")
    assert found.unread == 0


def test_a_privileged_container_has_the_hosts_devices_and_none_of_its_own() -> None:
    for type in ("", "a"):
        made = container(3)
        made.linux.resources.devices.add(allow=True, type=type, access="rwm")
        assert read_device_mentions(made) is NO_DEVICE_MENTIONS
    made = container(3)
    made.linux.resources.devices.add(allow=False, access="rwm")
    made.linux.resources.devices.add(allow=True, type="c", access="m")
    rule = made.linux.resources.devices.add(allow=True, type="a", access="rwm")
    for some in (rule.major, rule.minor):
        for number in (0, 240):
            some.value = number
            assert len(read_device_mentions(made).nodes) == 3
        some.value = -1
        assert read_device_mentions(made) is NO_DEVICE_MENTIONS


def test_the_variables_of_a_privileged_container_count() -> None:
    made = container(3, env=["PCIDEVICE_A=0000:3b:00.0"])
    made.linux.resources.devices.add(allow=True, access="rwm")
    found = read_device_mentions(made)
    assert (found.nodes, found.variables) == ((), {"PCIDEVICE_A": "0000:3b:00.0"})


def test_the_network_namespace_is_the_pods_and_a_pod_of_the_hosts_has_none() -> None:
    pod = pb.PodSandbox(id="p")
    assert pod_from(pod, mentions=True).network_namespace == ""
    pod.linux.namespaces.add(type="ipc", path="/proc/1/ns/ipc")
    assert pod_from(pod, mentions=True).network_namespace == ""
    pod.linux.namespaces.add(type="network", path="/run/netns/cni-1")
    assert pod_from(pod, mentions=True).network_namespace == "/run/netns/cni-1"
    assert pod_from(pod).network_namespace == ""


# --- CPUs that the runtime adds -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotations", "env", "source"),
    [
        ({"cpu-shared.crio.io/app": "enable"}, [], "annotation cpu-shared.crio.io/app"),
        ({}, ["OPENSHIFT_SHARED_CPUS=3-4"], "variable OPENSHIFT_SHARED_CPUS"),
        ({"cpu-shared.crio.io/app": "disable"}, ["OPENSHIFT_SHARED_CPUS_X=3"], ""),
        ({"cpu-shared.crio.io/other": "enable"}, ["PATH=/bin"], ""),
    ],
)
@pytest.mark.parametrize("where", ["pod", "container"])
def test_a_creation_says_by_what_cri_o_adds_cpus(
    annotations: dict[str, str], env: list[str], source: str, where: str
) -> None:
    plugin, created = RecordingPlugin(), list[Container]()

    def create(_pod: object, one: Container) -> Any:
        created.append(one)
        return NO_ADJUSTMENT, ()

    plugin.hooks["create_container"] = create
    of, made = pb.PodSandbox(id="p"), pb.Container(id="c", name="app", env=env)
    (of if where == "pod" else made).annotations.update(annotations)
    request = pb.CreateContainerRequest(pod=of, container=made)
    answer_request(plugin, ev.EventRequested(0, Event.CREATE_CONTAINER, request))
    assert [one.added_cpus_source for one in created] == [source]


def test_an_event_that_was_not_subscribed_to_starts_nothing() -> None:
    plugin = RecordingPlugin()
    request = event(Event.POST_CREATE_CONTAINER, pb.PostCreateContainerRequest)
    assert answer_request(plugin, request) is None
    assert plugin.log == []
