"""What the page tells of the machine besides who has which CPU."""

from msgspec.structs import replace

from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import CgroupPartitionKind, Partition, PCIDevice
from tests.beds.browser import Page, label, visit
from tests.beds.page_bed import PageBed, page_bed
from tests.machines import named as machines

ROWS = (
    "[...document.querySelectorAll('#devices tr')].slice(1)"
    ".map(r => [...r.children].map(c => c.textContent))"
)


def test_devices_stand_there_with_their_numa_node(page: Page) -> None:
    with page_bed(machines.dual_smt_16()) as bed:
        visit(page, bed)
        assert page.run("document.getElementById('devices').hidden")
    with page_bed(machines.dual_smt_16()) as bed:
        bed.pci = (
            PCIDevice(address="0000:3b:00.0", kind="GPU", numa_node=1),
            PCIDevice(address="0000:3b:00.1", kind="GPU", numa_node=1),
            PCIDevice(address="0000:02:00.0", kind="NIC"),
            PCIDevice(address="0000:01:00.0", kind="NIC", numa_node=0),
        )
        visit(page, bed)
        assert not page.run("document.getElementById('devices').hidden")
        assert page.run(ROWS) == [
            ["GPU", "1", "2", "0000:3b:00.0 0000:3b:00.1"],
            ["NIC", "0", "1", "0000:01:00.0"],
            ["NIC", "unknown", "1", "0000:02:00.0"],
        ]


def _with(bed: PageBed, partitions: tuple[Partition, ...]) -> None:
    """The agent finds the machine with these partitions."""
    machine = bed.agent.current.machine
    taken = CPUSet(i for one in partitions for i in one.cpus)
    topology = replace(
        machine.topology, allowed=machine.topology.online - taken, partitions=partitions
    )
    bed.do(lambda: bed.agent.apply_node_model(replace(machine, topology=topology)))


def test_a_partition_is_seen_to_begin_and_to_end(page: Page) -> None:
    with page_bed(machines.dual_smt_16()) as bed:
        visit(page, bed)
        assert page.run(label(6)).endswith("shared pool")
        one = Partition(cgroup="rt.slice", kind=CgroupPartitionKind.ISOLATED, cpus=CPUSet([6, 7]))
        _with(bed, (one,))
        told = "not used: of the cpuset partition rt.slice"
        page.wait(f"({label(6)}).includes('{told}') && ({label(7)}).includes('{told}')")
        _with(bed, ())
        page.wait(f"({label(6)}).endsWith('shared pool')")


def test_cpus_without_a_tick_say_so(page: Page) -> None:
    with page_bed(machines.nohz_full_cpus()) as bed:
        visit(page, bed)
        assert "nohz_full" in page.run(label(1))
        assert "nohz_full" not in page.run(label(4))
