"""How the answers of several plugins become one container."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nri_numa.nri.wire.pb import nri_pb2 as pb
from tests.beds.embedded.combine import (
    CreateMerge,
    MergeConflict,
    UpdateMerge,
    merge_resources,
    merge_update,
)
from tests.beds.recording_plugin import pin

Edit = Callable[[pb.ContainerAdjustment], object]


def update(container_id: str, cpus: str = "", mems: str = "") -> pb.ContainerUpdate:
    return pb.ContainerUpdate(
        container_id=container_id, linux=pb.LinuxContainerUpdate(resources=pin(cpus, mems))
    )


def adjustment(cpus: str = "", mems: str = "") -> pb.ContainerAdjustment:
    return pb.ContainerAdjustment(linux=pb.LinuxContainerAdjustment(resources=pin(cpus, mems)))


def container() -> pb.Container:
    made = pb.Container(
        id="c1",
        args=["sleep"],
        env=["A=1", "B=2"],
        annotations={"a": "1"},
        mounts=[pb.Mount(destination="/data", source="/old")],
    )
    made.linux.devices.append(pb.LinuxDevice(path="/dev/x", major=1))
    made.linux.namespaces.append(pb.LinuxNamespace(type="ipc", path="/p"))
    made.linux.sysctl["net.core"] = "1"
    made.linux.net_devices["eth1"].name = "e"
    made.linux.rdt.clos_id.value = "low"
    return made


def changed(*edits: Edit) -> pb.Container:
    """Return the container after one plugin for each edit."""
    merge = CreateMerge(container())
    for number, edit in enumerate(edits):
        response = pb.CreateContainerResponse()
        edit(response.adjust)
        merge.add(f"{number}0-plugin", response)
    return merge.container


EDITS: dict[str, Edit] = {
    "CPUSetCPUs ": lambda a: a.MergeFrom(adjustment("1")),
    "CPUSetMems ": lambda a: a.MergeFrom(adjustment("", "0")),
    "CPUShares ": lambda a: setattr(a.linux.resources.cpu.shares, "value", 5),
    "CPUQuota ": lambda a: a.linux.resources.cpu.quota.SetInParent(),
    "CPUPeriod ": lambda a: setattr(a.linux.resources.cpu.period, "value", 5),
    "CPURealtimeRuntime ": lambda a: setattr(a.linux.resources.cpu.realtime_runtime, "value", 5),
    "CPURealtimePeriod ": lambda a: setattr(a.linux.resources.cpu.realtime_period, "value", 5),
    "MemLimit ": lambda a: setattr(a.linux.resources.memory.limit, "value", 5),
    "MemSwappiness ": lambda a: setattr(a.linux.resources.memory.swappiness, "value", 5),
    "HugepageLimits 2MB": lambda a: a.linux.resources.hugepage_limits.add(page_size="2MB"),
    "CgroupsUnified io.max": lambda a: a.linux.resources.unified.update({"io.max": "x"}),
    "PidsLimit ": lambda a: setattr(a.linux.resources.pids, "limit", 5),
    "BlockioClass ": lambda a: setattr(a.linux.resources.blockio_class, "value", "b"),
    "RdtClass ": lambda a: setattr(a.linux.resources.rdt_class, "value", "r"),
    "Annotations k": lambda a: a.annotations.update({"k": "v"}),
    "Env K": lambda a: a.env.add(key="K", value="v"),
    "Mounts /m": lambda a: a.mounts.add(destination="/m"),
    "Devices /dev/y": lambda a: a.linux.devices.add(path="/dev/y"),
    "Rlimits NOFILE": lambda a: a.rlimits.add(type="NOFILE"),
    "CdiDevices v/c=1": lambda a: a.CDI_devices.add(name="v/c=1"),
    "Args ": lambda a: a.args.append("run"),
    "CgroupsPath ": lambda a: setattr(a.linux, "cgroups_path", "/p"),
    "OomScoreAdj ": lambda a: a.linux.oom_score_adj.SetInParent(),
    "IoPriority ": lambda a: setattr(a.linux.io_priority, "priority", 5),
    "SeccompPolicy ": lambda a: setattr(a.linux.seccomp_policy, "default_action", "x"),
    "Namespace uts": lambda a: a.linux.namespaces.add(type="uts"),
    "Sysctl k": lambda a: a.linux.sysctl.update({"k": "v"}),
    "LinuxNetDevices eth9": lambda a: setattr(a.linux.net_devices["eth9"], "name", "n"),
    "LinuxSched ": lambda a: setattr(a.linux.scheduler, "nice", 5),
    "RdtClosID ": lambda a: setattr(a.linux.rdt.clos_id, "value", "x"),
    "RdtSchemata ": lambda a: a.linux.rdt.schemata.value.append("x"),
    "RdtEnableMonitoring ": lambda a: a.linux.rdt.enable_monitoring.SetInParent(),
    "MemoryPolicy ": lambda a: setattr(a.linux.memory_policy, "nodes", "0"),
}


@pytest.mark.parametrize("what", EDITS)
def test_everything_has_one_owner_even_for_equal_values(what: str) -> None:
    """The text is the runtime's own, down to the blank before a key that is not there."""
    with pytest.raises(MergeConflict) as caught:
        changed(EDITS[what], EDITS[what])
    assert str(caught.value) == f'plugins "10-plugin" and "00-plugin" both tried to set {what}'


def test_different_fields_of_one_container_go_together() -> None:
    merged = changed(*EDITS.values())
    cpu = merged.linux.resources.cpu
    assert (cpu.cpus, cpu.mems, cpu.shares.value, cpu.quota.value) == ("1", "0", 5, 0)
    assert cpu.HasField("quota")  # present and zero is a value
    assert list(merged.args) == ["run"]
    assert list(merged.env) == ["A=1", "B=2", "K=v"]
    assert merged.linux.rdt.clos_id.value == "x"


def test_hooks_never_conflict() -> None:
    def hook(adjust: pb.ContainerAdjustment) -> None:
        adjust.hooks.prestart.add(path="/bin/h")

    assert len(changed(hook, hook).hooks.prestart) == 2


@pytest.mark.parametrize(
    ("remove", "look"),
    [
        (lambda a: a.annotations.update({"-a": ""}), lambda c: c.annotations),
        (lambda a: a.env.add(key="-A"), lambda c: [e for e in c.env if e.startswith("A")]),
        (lambda a: a.mounts.add(destination="-/data"), lambda c: c.mounts),
        (lambda a: a.linux.devices.add(path="-/dev/x"), lambda c: c.linux.devices),
        (lambda a: a.linux.namespaces.add(type="-ipc"), lambda c: c.linux.namespaces),
        (lambda a: a.linux.sysctl.update({"-net.core": ""}), lambda c: c.linux.sysctl),
        (
            lambda a: a.linux.net_devices["-eth1"].SetInParent(),
            lambda c: c.linux.net_devices,
        ),
        (
            lambda a: setattr(a.linux.rdt, "remove", True),
            lambda c: [1] if c.linux.HasField("rdt") else [],
        ),
    ],
)
def test_a_marker_removes(remove: Edit, look: Callable[[pb.Container], list[object]]) -> None:
    assert look(changed(lambda _adjust: None))
    assert not look(changed(remove))


@pytest.mark.parametrize(
    ("key", "marker"),
    [
        ("Annotations k", lambda a: a.annotations.update({"-k": ""})),
        ("Env K", lambda a: a.env.add(key="-K")),
        ("Mounts /m", lambda a: a.mounts.add(destination="-/m")),
        ("Devices /dev/y", lambda a: a.linux.devices.add(path="-/dev/y")),
        ("Namespace uts", lambda a: a.linux.namespaces.add(type="-uts")),
        ("Sysctl k", lambda a: a.linux.sysctl.update({"-k": ""})),
        ("LinuxNetDevices eth9", lambda a: a.linux.net_devices["-eth9"].SetInParent()),
        ("RdtClosID ", lambda a: setattr(a.linux.rdt, "remove", True)),
        ("Args ", lambda a: a.args.insert(0, "")),
    ],
)
def test_remove_and_set_in_one_answer_takes_a_field_over(key: str, marker: Edit) -> None:
    """The legal way for a later plugin to have its way; the set value remains."""

    def take_over(adjust: pb.ContainerAdjustment) -> None:
        EDITS[key](adjust)
        marker(adjust)

    assert changed(EDITS[key], take_over) == changed(EDITS[key])


def test_each_plugin_is_shown_what_the_earlier_ones_made() -> None:
    merge = CreateMerge(pb.Container(id="c1"))
    # Sub-messages are always there, as a real runtime shows them.
    assert merge.container.linux.resources.HasField("cpu")
    assert merge.container.HasField("hooks")
    merge.add("10-a", pb.CreateContainerResponse(adjust=adjustment("2-3")))
    assert merge.container.linux.resources.cpu.cpus == "2-3"


def test_the_container_being_created_cannot_be_updated() -> None:
    merge = CreateMerge(pb.Container(id="c1"))
    with pytest.raises(MergeConflict, match='plugin "10-a" asked update of "c1" during creation'):
        merge.add("10-a", pb.CreateContainerResponse(update=[update("c1", "1")]))


def test_updates_of_others_keep_the_order_in_which_they_were_first_touched() -> None:
    merge = UpdateMerge()
    merge.add("10-a", [update("x", "1"), update("y", "2"), update("", "3")])
    merge.add("20-b", [update("x", "", "0")])
    assert [(u.container_id, u.linux.resources.cpu.mems) for u in merge.updates()] == [
        ("x", "0"),
        ("y", ""),
    ]


def test_a_plugin_conflicts_with_itself() -> None:
    """At most one update for each container and field in one answer."""
    merge = UpdateMerge()
    with pytest.raises(MergeConflict, match='plugins "10-a" and "10-a" both tried to set CPUSet'):
        merge.add("10-a", [update("x", "1"), update("x", "1")])
    split = UpdateMerge()
    split.add("10-a", [update("x", "1"), update("x", "", "0")])
    assert split.updates() == [update("x", "1", "0")]


def test_an_update_that_ignores_failures_is_dropped_whole_on_a_conflict() -> None:
    merge = UpdateMerge()
    merge.add("10-a", [update("x", "1")])
    second = update("x", "2", "0")
    second.linux.resources.cpu.shares.value = 7  # before the conflicting field
    second.ignore_failure = True
    merge.add("20-b", [second])
    (kept,) = merge.updates()
    assert kept == update("x", "1")


@pytest.mark.parametrize(
    ("first", "second", "both"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_failures_are_ignored_only_when_everyone_says_so(
    first: bool, second: bool, both: bool
) -> None:
    one, two = update("x", "1"), update("x", "", "0")
    one.ignore_failure, two.ignore_failure = first, second
    merge = UpdateMerge()
    merge.add("10-a", [one])
    merge.add("20-b", [two])
    assert merge.updates()[0].ignore_failure is both


def test_the_containers_own_update_goes_over_the_request() -> None:
    merge = UpdateMerge()
    merge.add("10-a", [update("x", "3", "0"), update("y", "1")])
    own = merge.take("x")
    assert own is not None
    request = pin("0-1")
    request.cpu.shares.value = 512
    merged = merge_update(request, own)
    assert (merged.cpu.cpus, merged.cpu.mems, merged.cpu.shares.value) == ("3", "0", 512)
    assert merge_update(request, merge.take("x")) == request
    assert [u.container_id for u in merge.updates()] == ["y"]


def test_lists_inside_resources_are_replaced_by_key() -> None:
    target = pb.LinuxResources(hugepage_limits=[pb.HugepageLimit(page_size="2MB", limit=1)])
    source = pb.LinuxResources(
        hugepage_limits=[pb.HugepageLimit(page_size="2MB", limit=2)],
        devices=[pb.LinuxDeviceCgroup(allow=True)],
    )
    merge_resources(target, source, lambda _field, _key: None)
    assert [limit.limit for limit in target.hugepage_limits] == [2]
    assert len(target.devices) == 1
