"""NUMA nodes as devices: what is published, when again, and what stands in the way."""

from typing import Any

from msgspec.structs import replace

from nri_numa.kube.requests import APIRequest, Outcome, Resource
from nri_numa.publisher.slices import SliceOutput, build_slice_devices
from nri_numa.web.responses import NUMANodeExclusiveCPUSlots
from tests.beds.http_view import FakeView
from tests.beds.publisher_bed import ObjectBed

DRIVER = "dra.example.com"


def found(cpus: int = 3) -> list[dict[str, Any]]:
    view = FakeView()
    slots = replace(
        view.slots_document(),
        numa_nodes=(NUMANodeExclusiveCPUSlots(id=0, allocated=1, free=cpus - 1),),
    )
    return build_slice_devices(view.scheduler_zones_document(), slots, DRIVER)


def attributes(*, lists: bool = False, **zone: Any) -> dict[str, Any]:
    view = FakeView()
    zones = view.scheduler_zones_document()
    zones = replace(zones, zones=(replace(zones.zones[0], **zone),))
    slots = replace(
        view.slots_document(), numa_nodes=(NUMANodeExclusiveCPUSlots(id=0, allocated=1, free=1),)
    )
    (device,) = build_slice_devices(zones, slots, DRIVER, lists=lists)
    found: dict[str, Any] = device["attributes"]
    return found


def test_a_numa_node_with_one_pcie_root_has_it_as_an_attribute() -> None:
    root = "resource.kubernetes.io/pcieRoot"
    one, two = ("pci0000:00",), ("pci0000:00", "pci0000:40")
    assert attributes(pcie_roots=one)[root] == {"string": "pci0000:00"}
    assert attributes(pcie_roots=one, lists=True)[root] == {"string": "pci0000:00"}
    # A server without the gate refuses lists, and one of two would be half of the truth.
    assert root not in attributes(pcie_roots=two)
    assert attributes(pcie_roots=two, lists=True)[root] == {"strings": list(two)}
    assert root not in attributes(lists=True)


def test_the_kind_of_cores_is_told_where_there_are_several() -> None:
    assert attributes(core_kind="efficient")[f"{DRIVER}/coreKind"] == {"string": "efficient"}
    assert f"{DRIVER}/coreKind" not in attributes()


def test_a_numa_node_is_a_device_that_many_claims_share() -> None:
    (device,) = found()
    assert (device["name"], device["allowMultipleAllocations"]) == ("numa0", True)
    assert device["attributes"] == {
        "resource.kubernetes.io/numaNode": {"int": 0},
        f"{DRIVER}/smt": {"bool": True},
        f"{DRIVER}/threadsPerCore": {"int": 2},
        f"{DRIVER}/socket": {"int": 0},
    }
    cpu = device["capacity"][f"{DRIVER}/cpu"]
    assert cpu["value"] == "3"
    assert cpu["requestPolicy"] == {"default": "1", "validRange": {"min": "1", "step": "1"}}
    assert device["capacity"][f"{DRIVER}/memory"]["value"] == str(1 << 34)
    assert device["capacity"][f"{DRIVER}/memory"]["requestPolicy"]["default"] == "0"
    assert device["capacity"][f"{DRIVER}/hugepages2Mi"]["value"] == str(4 << 20)


def test_a_range_has_room_for_one_step() -> None:
    """The API server refuses it otherwise."""
    (device,) = found(1)
    policy = device["capacity"][f"{DRIVER}/cpu"]["requestPolicy"]
    assert policy == {"default": "1", "validValues": ["1"]}
    assert found(0) == []


def test_an_agent_that_does_not_pin_offers_what_claims_hold() -> None:
    view = FakeView()
    view.ready = False
    (device,) = build_slice_devices(view.scheduler_zones_document(), view.slots_document(), DRIVER)
    assert device["capacity"][f"{DRIVER}/cpu"]["value"] == "1"


def test_sizes_of_pages_and_sockets_that_are_not_known() -> None:
    view = FakeView()
    (zone,) = view.scheduler_zones_document().zones
    pages = [replace(zone.huge_pages[0], size_bytes=size) for size in (1 << 30, 2 << 20, 64 << 10)]
    none = replace(zone.huge_pages[0], size_bytes=4 << 20, allocatable_bytes=0)
    zone = replace(zone, huge_pages=(*pages, none), socket=None)
    (device,) = build_slice_devices(
        replace(view.scheduler_zones_document(), zones=(zone,)), view.slots_document(), DRIVER
    )
    names = [one.partition("/")[2] for one in device["capacity"]]
    assert names == ["cpu", "memory", "hugepages1Gi", "hugepages2Mi", "hugepages64Ki"]
    assert f"{DRIVER}/socket" not in device["attributes"]


def test_it_belongs_to_the_node_and_is_written_when_it_changes() -> None:
    bed = ObjectBed(SliceOutput("n1", DRIVER), Resource.SLICES, f"00000-{DRIVER}-n1")
    output = bed.output
    bed.work(100)
    assert bed.requests == []
    for cpus in (3, 3, 2):
        output.set_desired(found(cpus))
        bed.later(60)
        assert output.pending_count() == 0
    assert bed.verbs() == ["get", "patch", "patch"]
    owner = {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "node-1", "controller": True}
    assert bed.metadata["name"] == f"00000-{DRIVER}-n1"
    assert bed.owner == owner
    assert bed.object["spec"]["pool"] == {
        "name": "n1", "generation": 1, "resourceSliceCount": 1,
    }  # fmt: skip


def test_it_is_there_again_after_the_kubelet_deleted_it() -> None:
    """Whether that comes before or after the kubelet takes the driver."""
    bed = ObjectBed(SliceOutput("n1", DRIVER), Resource.SLICES, f"00000-{DRIVER}-n1")
    output = bed.output
    output.set_desired(found())
    bed.work(10)
    output.schedule_rechecks(bed.now)
    for after in (2.0, 20.0, 60.0):
        bed.put_object()
        bed.work(10 + after)
        assert bed.object, after
    bed.put_object()
    bed.work(1000)
    assert not bed.object  # nobody said anything
    bed.put_node(uid="node-2")
    output.schedule_resync()
    bed.work(1010)
    assert bed.owner["uid"] == "node-2"


def test_a_server_that_does_not_know_consumable_capacity_is_named() -> None:
    bed = ObjectBed(SliceOutput("n1", DRIVER), Resource.SLICES, f"00000-{DRIVER}-n1")
    output = bed.output

    def old(request: APIRequest) -> Outcome:
        """Drops what it does not know."""
        answer = bed.cluster.execute_at_once(request)
        for device in answer.documents[0].get("spec", {}).get("devices", ()):
            del device["allowMultipleAllocations"]
        return answer

    bed.answer = old
    output.set_desired(found())
    bed.work()
    assert "DRAConsumableCapacity" in output.problem
