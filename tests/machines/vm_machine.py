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
                              # disks that hold zeros (and an IOMMU with them), generators
      - {numa_node: 1, device: e1000e}
    containerd: "2.3"         # series of containerd in the guest: "1.7", "2.3" or "2.4"
    core: true                # part of the core set, which CI runs
    system: trixie            # a whole Debian of this release, with systemd as init
    kubernetes: true          # a node of a Kubernetes on the host (tests/kube), not for the cases

Everything here is pure; `tests.beds.vm_bed` does the booting.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

# Tag of a second export of the host's root, which the guest mounts with a cache. virtme-ng's own
# has none: each start of a program would read all its files through the hypervisor again.
CACHED_ROOT_TAG = "cached-root"

# Two hardware threads per core are shown to the guest for few CPU models only (not for `max` and
# not for EPYC), and numpy and friends want the instructions of x86-64-v2.
CPU_MODEL = "Nehalem"
QEMU_PCI_DEVICES = ("e1000e", "igb", "nvme", "virtio-net-pci", "virtio-rng-pci")
_DISK_BYTES = 64 * 1024 * 1024

_LOCAL_DISTANCE = 10
_REMOTE_DISTANCE = 20
_SIZE = re.compile(r"([1-9][0-9]*)([MG])")
_MIB = {"M": 1, "G": 1024}
# A Debian kernel with 9p root, containerd and its images on a tmpfs do not fit into less.
_LEAST_MEMORY_MIB = 1536
_MOST_CPUS = 64  # emulation of more takes minutes to boot


class MachineError(ValueError):
    """A machine document is wrong; says every problem found, each with its path."""

    def __init__(self, name: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"machine {name}: " + "; ".join(problems))


class _NumaNodeDocument(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    memory: str | int = 0
    cpus: str | int = ""


class _PciDocument(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    numa_node: int
    device: str


class _MachineDocument(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    description: str
    sockets: int
    cores: int
    threads: int
    numa: list[_NumaNodeDocument]
    distances: list[list[int]] | None = None
    offline: str | int = ""
    unplugged: str | int = ""
    nohz_full: str | int = ""
    pci: list[_PciDocument] = []
    containerd: Literal["1.7", "2.3", "2.4"] = "2.3"
    core: bool = False
    system: Literal["", "bookworm", "trixie"] = ""
    kubernetes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """One NUMA node: its CPUs (present or not) and memory in MiB, 0 for none."""

    cpus: frozenset[int]
    memory_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """A device that the firmware places on a NUMA node."""

    numa_node: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A valid machine.

    CPU ids count threads first, then cores, then sockets, which is QEMU's order and the guest
    kernel's: ``cpu = (socket * cores + core) * threads + thread``.
    """

    name: str
    description: str
    sockets: int
    cores: int
    threads: int
    numa: tuple[NumaNode, ...]
    distances: tuple[tuple[int, ...], ...]
    offline: frozenset[int]
    unplugged: frozenset[int]
    pci: tuple[PciDevice, ...]
    containerd: Literal["1.7", "2.3", "2.4"]
    core: bool
    explicit_distances: bool = field(default=True)
    nohz_full: frozenset[int] = frozenset()
    system: str = ""
    kubernetes: bool = False

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
    def present(self) -> frozenset[int]:
        """CPUs in their sockets at boot."""
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
        """The NUMA node of a CPU."""
        return next(i for i, node in enumerate(self.numa) if cpu in node.cpus)


def parse_list(text: str) -> frozenset[int]:
    """The numbers of a list in the kernel's form, ``0-3,8``; white space around it is dropped.

    Raises:
        ValueError: the text is no such list.
    """
    numbers: set[int] = set()
    for item in text.strip().split(",") if text.strip() else ():
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", item)
        if match is None:
            raise ValueError(f"{item!r} is not a number or a range such as 0-3")
        low = int(match.group(1))
        high = int(match.group(2) or low)
        if high < low:
            raise ValueError(f"range {item} runs backwards")
        numbers.update(range(low, high + 1))
    return frozenset(numbers)


def format_list(numbers: Iterable[int]) -> str:
    """The kernel's list form, ranges as long as possible: the inverse of `parse_list`."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in ranges)


class _Check:
    """Collects every problem of one document."""

    def __init__(self, document: _MachineDocument) -> None:
        self.document = document
        self.problems: list[str] = []

    def say(self, path: str, problem: str) -> None:
        self.problems.append(f"{path}: {problem}")

    def cpus(self, path: str, value: str | int, allowed: range) -> frozenset[int]:
        try:
            cpus = parse_list(str(value))
        except ValueError as error:
            self.say(path, f"{error}, expected a CPU list such as 0-3,8")
            return frozenset()
        if outside := cpus - set(allowed):
            self.say(
                path,
                f"CPUs {format_list(outside)} do not exist, "
                f"sockets x cores x threads gives {allowed.start}-{allowed.stop - 1}",
            )
        return cpus & set(allowed)

    def memory(self, path: str, value: str | int) -> int:
        if value == 0:
            return 0
        match = _SIZE.fullmatch(str(value))
        if match is None:
            self.say(path, f"{value!r} is not a size such as 512M or 2G")
            return 0
        return int(match.group(1)) * _MIB[match.group(2)]

    def shape(self) -> range:
        document = self.document
        for name, value, most in (
            ("sockets", document.sockets, 8),
            ("cores", document.cores, 32),
            ("threads", document.threads, 2),
        ):
            if not 1 <= value <= most:
                self.say(name, f"{value}, expected 1 to {most}")
        count = document.sockets * document.cores * document.threads
        if count > _MOST_CPUS:
            self.say("sockets", f"{count} CPUs in all, expected {_MOST_CPUS} at most")
        return range(max(0, count))

    def numa(self, allowed: range) -> tuple[NumaNode, ...]:
        nodes: list[NumaNode] = []
        owner: dict[int, int] = {}
        if not self.document.numa:
            self.say("numa", "no NUMA node, expected one at least")
        for i, node in enumerate(self.document.numa):
            path = f"numa[{i}]"
            cpus = self.cpus(f"{path}.cpus", node.cpus, allowed)
            memory = self.memory(f"{path}.memory", node.memory)
            for cpu in sorted(cpus):
                if cpu in owner:
                    self.say(f"{path}.cpus", f"CPU {cpu} is in numa[{owner[cpu]}] already")
                owner.setdefault(cpu, i)
            if not cpus and not memory:
                self.say(path, "neither CPUs nor memory, expected one of them")
            nodes.append(NumaNode(cpus=cpus, memory_mib=memory))
        if homeless := set(allowed) - set(owner):
            self.say("numa", f"CPUs {format_list(homeless)} are in no NUMA node")
        total = sum(node.memory_mib for node in nodes)
        if total < _LEAST_MEMORY_MIB:
            self.say("numa", f"{total} MiB in all, expected {_LEAST_MEMORY_MIB} MiB at least")
        return tuple(nodes)

    def distances(self, count: int) -> tuple[tuple[int, ...], ...]:
        rows = self.document.distances
        if rows is None:
            return tuple(
                tuple(_LOCAL_DISTANCE if i == j else _REMOTE_DISTANCE for j in range(count))
                for i in range(count)
            )
        if len(rows) != count or any(len(row) != count for row in rows):
            self.say("distances", f"expected {count} rows of {count} numbers, one per NUMA node")
            return ()
        for i, row in enumerate(rows):
            for j, value in enumerate(row):
                if i == j and value != _LOCAL_DISTANCE:
                    self.say(f"distances[{i}][{j}]", f"{value}, expected 10 from a node to itself")
                elif i != j and not _LOCAL_DISTANCE < value < 255:
                    self.say(f"distances[{i}][{j}]", f"{value}, expected 11 to 254")
        return tuple(tuple(row) for row in rows)

    def absent(self, allowed: range) -> tuple[frozenset[int], frozenset[int]]:
        offline = self.cpus("offline", self.document.offline, allowed)
        unplugged = self.cpus("unplugged", self.document.unplugged, allowed)
        if 0 in offline:
            self.say("offline", "CPU 0 cannot be switched off")
        if both := offline & unplugged:
            self.say("offline", f"CPUs {format_list(both)} are unplugged as well")
        if unplugged and unplugged != set(allowed[len(allowed) - len(unplugged) :]):
            self.say("unplugged", "expected the last CPUs: the guest numbers those it finds")
        if not set(allowed) - offline - unplugged:
            self.say("offline", "no CPU is left")
        return offline, unplugged

    def without_tick(self, allowed: range) -> frozenset[int]:
        nohz_full = self.cpus("nohz_full", self.document.nohz_full, allowed)
        if 0 in nohz_full:
            self.say("nohz_full", "CPU 0 keeps the time for the others")
        return nohz_full

    def pci(self, count: int) -> tuple[PciDevice, ...]:
        for i, device in enumerate(self.document.pci):
            if not 0 <= device.numa_node < count:
                self.say(f"pci[{i}].numa_node", f"{device.numa_node}, there are {count} nodes")
            if device.device not in QEMU_PCI_DEVICES:
                self.say(
                    f"pci[{i}].device",
                    f"{device.device!r}, expected one of {', '.join(QEMU_PCI_DEVICES)}",
                )
        return tuple(PciDevice(numa_node=d.numa_node, device=d.device) for d in self.document.pci)


def parse_machine(name: str, text: str | bytes) -> Machine:
    """Read one machine document.

    Raises:
        MachineError: with every problem found, unless the document's form itself is wrong.
    """
    try:
        document = msgspec.yaml.decode(text, type=_MachineDocument)
    except msgspec.MsgspecError as error:
        raise MachineError(name, [str(error)]) from error
    check = _Check(document)
    allowed = check.shape()
    numa = check.numa(allowed)
    distances = check.distances(len(numa))
    offline, unplugged = check.absent(allowed)
    nohz_full = check.without_tick(allowed)
    pci = check.pci(len(numa))
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,30}", name):
        check.say("file name", f"{name!r}, expected lower-case letters, digits and hyphens")
    if check.problems:
        raise MachineError(name, check.problems)
    return Machine(
        name=name,
        description=document.description,
        sockets=document.sockets,
        cores=document.cores,
        threads=document.threads,
        numa=numa,
        distances=distances,
        explicit_distances=document.distances is not None,
        offline=offline,
        unplugged=unplugged,
        nohz_full=nohz_full,
        pci=pci,
        containerd=document.containerd,
        core=document.core,
        system=document.system,
        kubernetes=document.kubernetes,
    )


def load_machines(directory: Path) -> dict[str, Machine]:
    """All machines of a directory by name, sorted by name.

    Raises:
        MachineError: the first document that is wrong.
    """
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
    options = ["-accel", "tcg,thread=single", "-cpu", CPU_MODEL]
    for i, node in enumerate(machine.numa):
        value = f"node,nodeid={i}"
        if node.cpus:
            value += "".join(f",cpus={item}" for item in format_list(node.cpus).split(","))
        if node.memory_mib:
            options += [
                "-object",
                f"memory-backend-ram,id=numa{i},size={node.memory_mib}M",
            ]
            value += f",memdev=numa{i}"
        options += ["-numa", value]
    if machine.explicit_distances:
        # One asymmetric pair makes QEMU want both directions of every pair: always say all.
        for i, row in enumerate(machine.distances):
            for j, value_ij in enumerate(row):
                if i != j:
                    options += ["-numa", f"dist,src={i},dst={j},val={value_ij}"]
    if machine.iommu:
        options += ["-device", "intel-iommu"]  # before what is behind it
    bridges = sorted({device.numa_node for device in machine.pci})
    for numa_node in bridges:
        # Bus numbers between bridges leave room for the buses below each of them.
        bus = 0x40 + 0x10 * numa_node
        options += [
            "-device",
            f"pxb-pcie,id=host{numa_node},bus=pcie.0,bus_nr={bus},numa_node={numa_node}",
        ]
    for slot, device in enumerate(machine.pci):
        port, disk = f"port{slot}", ""
        if device.device == "nvme":
            disk = f",drive=disk{slot},serial=disk{slot}"
            options += [
                "-blockdev",
                f"null-co,node-name=disk{slot},size={_DISK_BYTES},read-zeroes=on",
            ]
        options += [
            "-device",
            f"pcie-root-port,id={port},bus=host{device.numa_node},chassis={slot + 1},slot={slot}",
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

    Args:
        machine: what to boot.
        kernel: the kernel's image.
        shared: directory of the host that the guest may write.
        guest_shared: where the guest sees it.
        command: shell command; short, it travels on the kernel's command line.
        control: socket for QEMU's machine protocol, needed to plug CPUs.
        more: further options of QEMU, without white space.
        emulator: QEMU's program; default: the one that is installed.
        kvm: whether the host's processors run the guest; else it is emulated.
        parameters: of the kernel, besides those that every machine has.
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
