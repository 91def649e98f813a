"""A virtual machine as one YAML document: read strictly, turned into command line options.

The document (``tests/vm/machines/*.yaml``)::

    description: two sockets, hyperthreads, one NUMA node each
    sockets: 2                # processor packages
    cores: 4                  # cores per socket
    threads: 2                # hardware threads per core, 1 or 2
    numa:                     # NUMA nodes; the position is the id
      - {cpus: 0-7, memory: 1G}
      - {cpus: 8-15, memory: 1G}
      - {memory: 512M}        # a node without CPUs
    distances:                # ACPI SLIT, row by row; may be asymmetric; default 10 and 20
      - [10, 21, 17]
      - [21, 10, 28]
      - [17, 28, 10]
    offline: 3,7              # CPUs switched off before the first case starts
    unplugged: 14-15          # CPU sockets empty at boot, to be plugged while the machine runs
    nohz_full: 4-5            # CPUs without a timer tick while one thread runs, for the kernel
    pci:                      # devices behind a host bridge that belongs to a NUMA node: cards,
                              # disks that hold zeros (and an IOMMU with them), generators of random
                              # numbers as stand-ins; behind its second one with root: 1
      - {numa_node: 1, device: e1000e}
    containerd: "2.3"         # series of containerd in the guest: "1.7", "2.3" or "2.4"
    core: true                # part of the core set, which CI runs
    system: trixie            # a whole Debian of this release, with systemd as init; arm64-trixie:
                              # of that architecture, emulated with its processors
    cases: [created_at_once]  # only these; default: all that make sense
    kubernetes: true          # a node of a Kubernetes on the host (tests/kube), not for the cases

Everything here is pure; `tests.beds.vm_bed` does the booting.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from nri_numa.model.cpuset import CPUSet

# Tag of a second export of the host's root, which the guest mounts with a cache. virtme-ng's own
# has none: each start of a program would read all its files through the hypervisor again.
CACHED_ROOT_TAG = "cached-root"

# Two hardware threads per core are shown to the guest for few CPU models only (not for `max` and
# not for EPYC), and numpy and friends want the instructions of x86-64-v2.
CPU_MODEL = "Nehalem"
ARM_MODEL = "cortex-a72"
_DISK_BYTES = 64 * 1024 * 1024

_LOCAL_DISTANCE = 10
_REMOTE_DISTANCE = 20
_SIZE = re.compile(r"([1-9][0-9]*)([MG])")
_MIB = {"M": 1, "G": 1024}


class MachineError(ValueError):
    """A machine document is wrong; says where."""


class CPUs(frozenset[int]):
    """A list in the kernel's form, ``0-3,8``, in the document."""


class MiB(int):
    """A size such as 512M or 2G in the document."""


def _of_document(kind: type, value: object) -> object:
    if kind is CPUs:
        return CPUs(parse_list(str(value)))
    match = _SIZE.fullmatch(str(value))
    if match is None:
        raise ValueError(f"memory: {value!r} is not a size such as 512M or 2G")
    return MiB(int(match.group(1)) * _MIB[match.group(2)])


class NumaNode(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, rename={"memory_mib": "memory"}
):
    """One NUMA node: its CPUs (present or not) and its memory, 0 for none."""

    cpus: CPUs = CPUs()
    memory_mib: MiB = MiB(0)


class PciDevice(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A device that the firmware places on a NUMA node."""

    numa_node: int
    device: Literal["e1000e", "igb", "nvme", "virtio-net-pci", "virtio-rng-pci"]
    root: Literal[0, 1] = 0


class Machine(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, rename={"slit": "distances"}
):
    """A valid machine; `name` is that of its file.

    CPU ids count threads first, then cores, then sockets, which is QEMU's order and the guest
    kernel's: ``cpu = (socket * cores + core) * threads + thread``.
    """

    description: str
    sockets: int
    cores: int
    threads: int
    numa: list[NumaNode]
    slit: tuple[tuple[int, ...], ...] | None = None
    offline: CPUs = CPUs()
    unplugged: CPUs = CPUs()
    nohz_full: CPUs = CPUs()
    pci: list[PciDevice] = []
    containerd: Literal["1.7", "2.3", "2.4"] = "2.3"
    core: bool = False
    system: Literal["", "bookworm", "trixie", "arm64-trixie"] = ""
    cases: list[str] = []
    kubernetes: bool = False
    name: str = ""

    @property
    def distances(self) -> tuple[tuple[int, ...], ...]:
        nodes = range(len(self.numa))
        return self.slit or tuple(
            tuple(_LOCAL_DISTANCE if i == j else _REMOTE_DISTANCE for j in nodes) for i in nodes
        )

    @property
    def cpu_count(self) -> int:
        """CPUs the machine has or can be given."""
        return self.sockets * self.cores * self.threads

    @property
    def memory_mib(self) -> int:
        """All memory, in MiB."""
        return sum(node.memory_mib for node in self.numa)

    def has_on_each_node(self, *devices: str) -> bool:
        """Whether one of these devices of QEMU is on every NUMA node, and there are several."""
        there = {each.numa_node for each in self.pci if each.device in devices}
        return len(self.numa) > 1 and there == set(range(len(self.numa)))

    @property
    def iommu(self) -> bool:
        """Whether it has one, for VFIO: disks are given to containers by it."""
        return any(each.device == "nvme" for each in self.pci)

    @property
    def arm64(self) -> bool:
        return self.system.startswith("arm64-")

    @property
    def present(self) -> frozenset[int]:
        return frozenset(range(self.cpu_count)) - self.unplugged

    @property
    def online(self) -> frozenset[int]:
        """CPUs that run programs when the first case starts."""
        return self.present - self.offline

    def core_of(self, cpu: int) -> tuple[int, int, int]:
        """``(socket, core within the socket, thread within the core)`` of a CPU."""
        core, thread = divmod(cpu, self.threads)
        socket, core = divmod(core, self.cores)
        return socket, core, thread

    def siblings(self, cpu: int) -> frozenset[int]:
        """All CPUs of the core that `cpu` is part of, `cpu` included."""
        first = cpu - cpu % self.threads
        return frozenset(range(first, first + self.threads))

    def numa_node_of(self, cpu: int) -> int:
        return next(i for i, node in enumerate(self.numa) if cpu in node.cpus)


def parse_list(text: str | int) -> frozenset[int]:
    """The numbers of a list in the kernel's form, ``0-3,8``; white space around it is dropped."""
    return frozenset(CPUSet.parse(str(text).strip()))


def format_list(numbers: Iterable[int]) -> str:
    """The kernel's list form, ranges as long as possible: the inverse of `parse_list`."""
    return str(CPUSet(numbers))


def parse_machine(name: str, text: str | bytes) -> Machine:
    try:
        machine = msgspec.yaml.decode(text, type=Machine, dec_hook=_of_document)
    except ValueError as error:
        raise MachineError(f"machine {name}: {error}") from error
    return replace(machine, name=name)


def load_machines(directory: Path) -> dict[str, Machine]:
    """All machines of a directory by name, sorted by name."""
    return {
        file.stem: parse_machine(file.stem, file.read_bytes())
        for file in sorted(directory.glob("*.yaml"))
    }


def qemu_options(machine: Machine) -> list[str]:
    """QEMU options for processors, NUMA nodes, distances and PCI devices.

    No option holds white space or a quote, so that they survive the shell inside virtme-ng.
    """
    # One thread for all processors: with one for each, QEMU 7.2 now and then goes on executing a
    # breakpoint that the guest's kernel has patched away again (text_poke), and the machine hangs.
    options = ["-accel", "tcg,thread=single", "-cpu", ARM_MODEL if machine.arm64 else CPU_MODEL]
    for i, node in enumerate(machine.numa):
        value = f"node,nodeid={i}"
        if node.cpus:
            value += "".join(f",cpus={item}" for item in format_list(node.cpus).split(","))
        if node.memory_mib:
            options += ["-object", f"memory-backend-ram,id=numa{i},size={node.memory_mib}M"]
            value += f",memdev=numa{i}"
        options += ["-numa", value]
    if machine.slit:
        # One asymmetric pair makes QEMU want both directions of every pair: always say all.
        for i, row in enumerate(machine.distances):
            for j, value_ij in enumerate(row):
                if i != j:
                    options += ["-numa", f"dist,src={i},dst={j},val={value_ij}"]
    if machine.iommu:
        options += ["-device", "intel-iommu"]  # before what is behind it
    bridges = sorted({(device.numa_node, device.root) for device in machine.pci})
    for numa_node, root in bridges:
        # Bus numbers between bridges leave room for the buses below each of them.
        bus = 0x40 + 0x10 * numa_node + 0x08 * root
        bridge = f"host{numa_node}root{root}"
        options += [
            "-device",
            f"pxb-pcie,id={bridge},bus=pcie.0,bus_nr={bus},numa_node={numa_node}",
        ]
    for slot, device in enumerate(machine.pci):
        port, bridge, disk = f"port{slot}", f"host{device.numa_node}root{device.root}", ""
        if device.device == "nvme":
            disk = f",drive=disk{slot},serial=disk{slot}"
            options += [
                "-blockdev",
                f"null-co,node-name=disk{slot},size={_DISK_BYTES},read-zeroes=on",
            ]
        options += [
            "-device",
            f"pcie-root-port,id={port},bus={bridge},chassis={slot + 1},slot={slot}",
            "-device",
            f"{device.device},bus={port}{disk}",
        ]
    return options


def virtme_arguments(
    machine: Machine,
    *,
    kernel: Path,
    shared: Path,
    guest_shared: Path,
    command: str,
    control: Path | None = None,
    more: Sequence[str] = (),
    emulator: Path | None = None,
    kvm: bool = False,
    parameters: Iterable[str] = (),
) -> list[str]:
    """The arguments of ``vng`` that boot `machine` and run one command in it as root.

    `command`: shell command; short, it travels on the kernel's command line.
    `more`: further options of QEMU, without white space.
    `emulator`: QEMU's program; default: the one that is installed.
    `kvm`: whether the host's processors run the guest; else it is emulated.
    """
    present = len(machine.present)
    cpus = (
        f"{present},maxcpus={machine.cpu_count},sockets={machine.sockets},"
        f"cores={machine.cores},threads={machine.threads}"
    )
    options = [
        *qemu_options(machine),
        # virtme's six serial devices have 64 queues each. With a file descriptor for every queue
        # QEMU's main loop asks the kernel for 390 of them at each timer of the guest, which was a
        # quarter of its processor time.
        *("-global", "virtio-serial-pci.ioeventfd=off"),
        *("-global", "virtio-9p-pci.ioeventfd=off"),
        "-fsdev",
        "local,id=cached,path=/,security_model=none,readonly=on,multidevs=remap",
        "-device",
        f"virtio-9p-pci,fsdev=cached,mount_tag={CACHED_ROOT_TAG},bus=pcie.0",
    ]
    options += more
    if control is not None:
        options += ["-qmp", f"unix:{control},server=on,wait=off"]
    return [
        *([] if emulator is None else ["--qemu", str(emulator)]),
        *(word for parameter in parameters for word in ("--append", parameter)),
        "--verbose",  # the kernel's messages come out at standard error
        "--run",
        str(kernel),
        "--name",
        machine.name,
        "--user",
        "root",
        *([] if kvm else ["--disable-kvm"]),
        "--force-9p",
        "--disable-microvm",
        "--append",
        "pci=nomsi",  # QEMU 7.2 fails an assertion on MSI-X under emulation
        "--append",
        "loglevel=6",
        # Interrupts from behind a second host bridge arrive at the line of somebody else, which the
        # kernel would switch off; with "irqfixup" it looks whose they are.
        *(("--append", "intel_iommu=on", "--append", "irqfixup") if machine.iommu else ()),
        *(("--append", f"nohz_full={format_list(machine.nohz_full)}") if machine.nohz_full else ()),
        "--append",
        "mitigations=off",  # nobody attacks this guest, and emulation is slow
        "--cpus",
        cpus,
        "--memory",
        f"{machine.memory_mib}M",
        "--rwdir",
        f"{guest_shared}={shared}",
        # With "=": the value starts with a hyphen.
        "--qemu-opts=" + " ".join(options),
        "--exec",
        command,
    ]
