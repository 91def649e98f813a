"""Where sysfs says that a device is, on trees as the kernel makes them."""

import shutil
from pathlib import Path

import pytest

from nri_numa.devices.sysfs import LocatedDevice, SysfsDevices
from nri_numa.model.cpuset import CPUSet
from tests.beds.device_tree import GPU_CLASS, NVME_CLASS, DeviceTree

GPU_AT, NIC_AT, DISK_AT = "0000:3b:00.0", "0000:af:00.1", "0000:5e:00.0"


@pytest.fixture
def tree(tmp_path: Path) -> DeviceTree:
    return DeviceTree(tmp_path)


def look(tree: DeviceTree) -> SysfsDevices:
    return SysfsDevices(str(tree.root))


def disk(tree: DeviceTree, at: str, numa_node: int, name: str) -> Path:
    return tree.child(tree.pci(at, numa_node, "0x010601"), "ata1", "host0", "block", name)


def over(volume: Path, *below: Path) -> None:
    """Let a volume stand on these."""
    (volume / "slaves").mkdir(exist_ok=True)
    for one in below:
        (volume / "slaves" / one.name).symlink_to(one)


def test_a_partition_is_where_its_disk_is(tree: DeviceTree) -> None:
    tree.number("block", "8:1", tree.child(disk(tree, DISK_AT, 1, "sda"), "sda1"))
    assert look(tree).by_number("b", 8, 1) == (LocatedDevice("disk", DISK_AT, frozenset({1})),)


@pytest.mark.parametrize(
    ("text", "local_cpus"), [("0-3,8\n", "0-3,8"), ("\n", ""), ("3-1", ""), ("many", "")]
)
def test_cpus_beside_a_root_are_the_devices(tree: DeviceTree, text: str, local_cpus: str) -> None:
    (tree.pci(NIC_AT, 0) / "local_cpulist").write_text(text)
    (nic,) = look(tree).by_pci(NIC_AT)
    assert nic.local_cpus == CPUSet.parse(local_cpus)


def test_an_nvme_disk_of_several_paths_is_where_all_its_controllers_are(tree: DeviceTree) -> None:
    """With native multipath the disk is the subsystem's, under another number than theirs."""
    subsystem = tree.virtual("nvme-subsystem", "nvme-subsys0")
    for at, node, name in ((DISK_AT, 0, "nvme3"), ("0000:d8:00.0", 1, "nvme7")):
        controller = tree.child(tree.pci(at, node, NVME_CLASS), "nvme", name)
        (subsystem / name).symlink_to(controller)
    tree.number("block", "259:4", tree.child(subsystem, "nvme0n1", "nvme0n1p1"))
    assert look(tree).by_number("b", 259, 4) == (
        LocatedDevice("NVMe disk", DISK_AT, frozenset({0})),
        LocatedDevice("NVMe disk", "0000:d8:00.0", frozenset({1})),
    )


def test_a_volume_over_several_disks_is_on_the_numa_nodes_of_all(tree: DeviceTree) -> None:
    disks = [disk(tree, DISK_AT, 0, "sda"), disk(tree, "0000:d8:00.0", 1, "sdb")]
    lower, upper = tree.virtual("block", "dm-0"), tree.virtual("block", "dm-1")
    over(lower, *disks)
    over(upper, lower)
    tree.number("block", "253:1", upper)
    assert look(tree).by_number("b", 253, 1) == (LocatedDevice("disk", "dm-1", frozenset({0, 1})),)


def test_volumes_that_stand_on_each_other_come_to_an_end(tree: DeviceTree) -> None:
    a, b = tree.virtual("block", "dm-0"), tree.virtual("block", "dm-1")
    over(a, b)
    over(b, a)
    tree.number("block", "253:0", a)
    assert look(tree).by_number("b", 253, 0) == ()


def test_a_vfio_group_is_all_devices_in_it(tree: DeviceTree) -> None:
    group = tree.root / "sys/kernel/iommu_groups/41/devices"
    group.mkdir(parents=True)
    for at, node in ((GPU_AT, 1), ("0000:3b:00.1", 1)):
        (group / at).symlink_to(tree.pci(at, node, GPU_CLASS))
    tree.number("char", "240:3", tree.virtual("vfio", "41"))
    assert {one.id for one in look(tree).by_number("c", 240, 3)} == {GPU_AT, "0000:3b:00.1"}
    assert {n for one in look(tree).by_number("c", 240, 3) for n in one.numa_nodes} == {1}


def test_an_rdma_device_is_called_one(tree: DeviceTree) -> None:
    verbs = tree.child(tree.pci(NIC_AT, 1), "infiniband_verbs", "uverbs0")
    tree.number("char", "231:192", verbs)
    assert look(tree).by_number("c", 231, 192) == (
        LocatedDevice("RDMA device", NIC_AT, frozenset({1})),
    )


def test_a_card_is_found_by_its_name_on_a_bus_and_by_its_interface(tree: DeviceTree) -> None:
    card = tree.pci(NIC_AT, 1)
    tree.link("sys/bus/virtio/devices/virtio3", tree.child(card, "virtio3"))
    tree.link("sys/class/net/ens1", tree.child(card, "net", "ens1"))
    expected = (LocatedDevice("NIC", NIC_AT, frozenset({1})),)
    assert look(tree).by_bus("virtio", "virtio3") == expected
    assert look(tree).by_bus("pci", NIC_AT) == expected
    assert look(tree).by_interface("ens1") == expected


def test_the_kernels_own_devices_are_nowhere(tree: DeviceTree) -> None:
    tree.number("char", "10:229", tree.virtual("misc", "fuse"))
    assert look(tree).by_number("c", 10, 229) == ()


@pytest.mark.parametrize("type", ["p", "", "x"])
def test_what_is_no_device_file_has_no_device(tree: DeviceTree, type: str) -> None:
    assert look(tree).by_number(type, 1, 3) == ()


def test_names_that_lead_elsewhere_are_not_followed(tree: DeviceTree, tmp_path: Path) -> None:
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    (outside / "numa_node").write_text("1\n")
    tree.number("char", "7:7", outside)
    devices = look(tree)
    assert devices.by_number("c", 7, 7) == ()
    assert devices.by_bus("..", "..") == devices.by_bus("pci", "../../..") == ()
    assert devices.by_interface("../ens1") == devices.by_interface("a" * 300) == ()
    assert devices.by_pci("0000:3b:00.8") == devices.by_pci("../0000:3b:00.0") == ()
    assert devices.by_number("c", -1, 3) == ()


def test_a_device_that_went_is_not_there_any_more(tree: DeviceTree) -> None:
    gpu = tree.pci(GPU_AT, 1, GPU_CLASS)
    devices = look(tree)
    assert devices.by_pci(GPU_AT)
    (tree.root / f"sys/bus/pci/devices/{GPU_AT}").unlink()
    shutil.rmtree(gpu)
    assert devices.by_pci(GPU_AT), "nothing is read for what is known"
    devices.reresolve_cached_links()
    assert devices.by_pci(GPU_AT) == ()
    # Another card in its place, on another NUMA node.
    tree.pci(GPU_AT, 0)
    assert devices.by_pci(GPU_AT) == (LocatedDevice("NIC", GPU_AT, frozenset({0})),)


def test_more_links_than_are_remembered_are_read_again(tree: DeviceTree) -> None:
    addresses = [f"{number:04x}:00:00.0" for number in range(600)]
    for address in addresses:
        tree.pci(address, 0)
    devices = look(tree)
    for _ in range(2):
        assert all(devices.by_pci(address)[0].id == address for address in addresses)


def test_a_disk_that_a_volume_gets_is_seen_the_next_time(tree: DeviceTree) -> None:
    volume = tree.virtual("block", "dm-0")
    over(volume)
    tree.number("block", "253:0", volume)
    devices = look(tree)
    assert devices.by_number("b", 253, 0) == ()
    over(volume, disk(tree, DISK_AT, 1, "sda"))
    devices.reresolve_cached_links()
    assert devices.by_number("b", 253, 0) == (LocatedDevice("disk", "dm-0", frozenset({1})),)
