"""Checks that this machine is ready for nri-numa; each finding has its remedy.

Nothing is changed and nothing is registered; the runtime's socket is only connected to.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import StrEnum
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Final

import msgspec

from nri_numa.agent.interrupts import HOST_IRQ_DIRECTORY, IRQBALANCE_SOCKETS
from nri_numa.agent.kubelet_sync import KubeletConfigWatch
from nri_numa.agent.links import runtime_lock_socket
from nri_numa.agent.runtime_lock import RuntimeLock, find_lock_holder
from nri_numa.config import (
    AgentConfig,
    RuntimeLinkKind,
    derive_settings,
    split_address,
    validate_config,
)
from nri_numa.config.sections import config_keys
from nri_numa.config.values import parse_duration
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.state import NodeState
from nri_numa.errors import ConfigError, RuntimeBusy, TopologyError
from nri_numa.kubelet import pod_resources
from nri_numa.kubelet.configuration import DiscoveredConfig, KubeletFacts, read_kubelet_config
from nri_numa.kubelet.inherited_settings import adopt_kubelet_settings, with_inherited_settings
from nri_numa.kubelet.state_files import STATE_FILE_NAMES, KubeletStateFiles
from nri_numa.machine.allowed import partition_sentence
from nri_numa.machine.cgroups import CgroupReader, CgroupWriter, read_text_or_empty
from nri_numa.machine.pci import list_pci_devices
from nri_numa.machine.sysfs import discover_topology
from nri_numa.machine.tree import open_tree
from nri_numa.model.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.model.machine import Topology, count_text, cpus_text, listed_words_text, numa_text
from nri_numa.model.settings import IsolatedCPUs, NohzFullCPUs, Settings
from nri_numa.nri import crio_config
from nri_numa.nri.runtime_config import (
    FoundRuntime,
    choose_runtime,
    find_containerd_distribution,
    find_runtimes,
    nri_disabled_reason,
    nri_unsupported_reason,
    query_runtime,
)
from nri_numa.runtime_profile import CONTAINERD_FILES, CRI_O_FILES, RuntimeFiles
from nri_numa.store.checkpoint import LOCK_FILE_NAME
from nri_numa.store.files import directory_problem
from nri_numa.web.security import Certificate, TokenFile, certificate_seconds_left

_CONNECT_TIMEOUT_S = 2.0
_FIRST_BYTES_WAIT_S = 0.2
"""Seconds in which a gRPC server sends its settings; NRI sends nothing before the plugin does."""
_DEFAULT_REQUEST_TIMEOUT_S = 2.0
"""NRI's own limit for the answer to a request."""
_FOREIGN_FILE_READ_BYTES = 1 << 20  # bytes read of another program's file


class FindingLevel(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the check.

    Attributes:
        subject: part of the machine that was checked.
        message: sentence about it.
        remedy: advice; empty if all is well.
    """

    subject: str
    level: FindingLevel
    message: str
    remedy: str = ""


def _passed_finding(subject: str, message: str) -> Finding:
    return Finding(subject=subject, level=FindingLevel.OK, message=message)


def _warning_finding(subject: str, message: str, remedy: str) -> Finding:
    return Finding(subject=subject, level=FindingLevel.WARN, message=message, remedy=remedy)


def _failed_finding(subject: str, message: str, remedy: str) -> Finding:
    return Finding(subject=subject, level=FindingLevel.FAIL, message=message, remedy=remedy)


def run_checks(config: AgentConfig, root: Path = Path("/")) -> Iterator[Finding]:
    """Check everything that a running agent depends on; ``root`` differs from / in tests."""
    topology = None
    try:
        topology = discover_topology(config.sysfs_root)
    except TopologyError as error:
        yield _failed_finding(
            "machine", str(error), "Run on Linux with /sys mounted, or give --sysfs-root."
        )
    if topology is not None:
        yield from check_machine(topology)
        yield from check_configuration(config, topology)
        yield from check_nohz_full(config, topology)
        yield from check_host_processes(config, topology)
        yield from check_isolated_cpus(config, topology)
        yield from check_devices(config)
    yield from check_privileges()
    yield from check_cgroup_controllers(Path(config.cgroup_root), root)
    yield from check_runtime_link(config, root)
    yield from check_pod_level_resources(root)
    yield from check_other_agents(config)
    yield from check_kubelet(config, topology)
    yield from check_state_directory(Path(config.state_dir))
    yield from check_libraries(config)
    yield from check_http_section(config)
    yield from check_numa_balancing(root)
    yield from check_interrupt_steering(config, root)
    yield from check_systemd_service(config, root)


def read_config_in_effect(config: AgentConfig) -> AgentConfig:
    """Return the configuration with the settings inherited from the kubelet, if readable."""
    try:
        settings = _settings_in_effect(config, discover_topology(config.sysfs_root))
    except TopologyError:
        return config
    return with_inherited_settings(config, settings)


def _settings_in_effect(config: AgentConfig, topology: Topology) -> Settings:
    watch = KubeletConfigWatch(config.kubelet_root)
    watch.read_config(config)
    return watch.settings_with_kubelet_config(config, topology)


def check_machine(topology: Topology) -> Iterator[Finding]:
    """Report the machine and its oddities."""
    parts = {
        "socket": len(topology.sockets),
        "NUMA node": len(topology.numa_nodes),
        "core": len(topology.cores),
        "CPU": len(topology.online),
    }
    counts = ", ".join(count_text(count, noun) for noun, count in parts.items())
    if len(topology.numa_nodes) > 1:
        yield _passed_finding("machine", counts)
    else:
        yield _warning_finding(
            "machine",
            f"{counts}: nothing to align",
            "Exclusive CPUs and lists still work. Give a virtual machine vNUMA.",
        )
    partitions = {partition_sentence(partition) for partition in topology.partitions}
    for warning in topology.warnings:
        remedy = "See `nri-numa topology`; placement uses what the kernel reports."
        if warning in partitions:
            remedy = "If they were meant for pods, end the partition (cgroup-v2.rst, cpuset.cpus."
            remedy += "partition; cpuset.cpu_exclusive on version 1); they come back by themselves."
        yield _warning_finding("machine", warning, remedy)


def check_devices(config: AgentConfig) -> Iterator[Finding]:
    """Report the devices that can be aligned with containers, by NUMA node."""
    texts: list[str] = []
    # Order: by NUMA node, unknown ones last, then kind.
    devices = sorted(
        list_pci_devices(open_tree(config.sysfs_root)),
        key=lambda d: (d.numa_node is None, d.numa_node, d.kind),
    )
    for numa_node, node_devices in groupby(devices, key=lambda d: d.numa_node):
        counts = Counter(device.kind for device in node_devices)
        place = "unknown NUMA node" if numa_node is None else f"NUMA node {numa_node}"
        texts.append(f"{place}: {', '.join(count_text(n, kind) for kind, n in counts.items())}")
    text = "; ".join(texts)
    use = "" if config.devices.enabled else " (devices.enabled is off: placement ignores devices)"
    yield _passed_finding("devices", f"{text}{use}" if text else "no PCI devices for containers")


def check_nohz_full(config: AgentConfig, topology: Topology) -> Iterator[Finding]:
    """Report if the kernel's nohz_full list is not used."""
    if topology.nohz_full and config.nohz_full_cpus is NohzFullCPUs.ANY:
        yield _passed_finding(
            "kernel",
            f"{cpus_text(topology.nohz_full, 'runs', 'run')} without a timer tick (nohz_full); "
            "nohzFullCPUs: prefer keeps exclusive containers there",
        )


def check_isolated_cpus(config: AgentConfig, topology: Topology) -> Iterator[Finding]:
    """Check that the kernel balances load between the CPUs of shared containers."""
    if config.isolated_cpus is IsolatedCPUs.ONLY and not topology.isolated & topology.allowed:
        yield _warning_finding(
            "kernel",
            "isolatedCPUs is only, but no CPU that containers may use is isolated: no container "
            "can have exclusive CPUs",
            "Boot with isolcpus=, or set isolatedCPUs: avoid.",
        )
    machine = NodeModel(topology=topology, settings=derive_settings(config))
    pool = NodeSnapshot(machine, NodeState()).pool
    lone = [
        i for i, node in topology.numa_nodes.items()
        if (shared_cpus := node.cpus & pool) and shared_cpus <= topology.isolated
    ]  # fmt: skip
    if lone:
        yield _warning_finding(
            "kernel",
            f"all shared CPUs of {numa_text(NUMASet(lone))} are isolated (isolcpus): the kernel "
            f"moves no process between them, so all processes of a container may run on one of "
            f"them",
            "Set isolatedCPUs to another value than any, or remove CPUs of that NUMA node from "
            "isolcpus= and reservedCPUs.",
        )


def check_configuration(config: AgentConfig, topology: Topology) -> Iterator[Finding]:
    """Check the configuration against this machine."""
    problems = validate_config(config, topology)
    for problem in problems:
        yield _failed_finding("configuration", problem, "Correct the configuration file.")
    if not problems:
        group = f"; settings of node group {config.node_group}" if config.node_group else ""
        yield _passed_finding("configuration", f"sound, and fits this machine{group}")


def check_privileges() -> Iterator[Finding]:
    """Check that this process has the agent's privileges."""
    if os.geteuid() == 0:
        yield _passed_finding("privileges", "running as root")
        yield from check_installation_ownership()
    else:
        yield _warning_finding(
            "privileges",
            f"running as user {os.geteuid()}: some files and sockets cannot be read",
            "Run the check as the user that the agent runs as, usually root.",
        )


def check_installation_ownership(
    paths: Iterable[str] = (sys.executable, __file__),
) -> Iterator[Finding]:
    """Check that only root can write the interpreter and the package."""
    for path in paths:
        real = Path(os.path.realpath(path))
        for part in (*Path(os.path.abspath(path)).parents, real, *real.parents):
            about = os.stat(part)
            writable = about.st_mode & 0o022 and not about.st_mode & stat.S_ISVTX
            if about.st_uid or writable:
                ownership = (
                    f"belongs to user {about.st_uid}" if about.st_uid else "is writable by others"
                )
                yield _warning_finding(
                    "installation",
                    f"{part} {ownership}, so others can make root run their code",
                    "Install it for root: sudo make node makes /opt/nri-numa.",
                )
                return


# --- cgroups ------------------------------------------------------------------------------------

_REQUIRED_CONTROLLERS = ("cpuset", "memory")


def check_cgroup_controllers(mount: Path, root: Path = Path("/")) -> Iterator[Finding]:
    """Check that the cpuset and memory controllers exist."""
    unified = _read_text_or_none(mount / "cgroup.controllers")
    controllers = (
        [n for n in _REQUIRED_CONTROLLERS if (mount / n).is_dir()]
        if unified is None
        else unified.split()
    )
    version = "v1" if unified is None else "v2"
    missing = [name for name in _REQUIRED_CONTROLLERS if name not in controllers]
    if unified is None and len(missing) == len(_REQUIRED_CONTROLLERS):
        lines = read_text_or_empty(str(root / "proc/cgroups")).splitlines()
        kernel_controllers = {line.split("\t")[0] for line in lines}
        absent = [name for name in _REQUIRED_CONTROLLERS if name not in kernel_controllers]
        yield _failed_finding(
            "cgroups",
            f"no cgroup controllers below {mount}",
            f"The kernel lacks {', '.join(absent)}; boot one that has them."
            if absent
            else "Mount the cgroup file system, or set cgroupRoot.",
        )
    elif missing:
        alternative = ", or move to cgroup v2."
        if unified is not None:
            alternative = "; on a hybrid set-up unmount the v1 controllers."
        yield _failed_finding(
            "cgroups",
            f"cgroup {version} without the controller {', '.join(missing)}",
            f"Boot without cgroup_disable={alternative}",
        )
    else:
        yield _passed_finding("cgroups", f"cgroup {version} with cpuset and memory")
        yield from _check_writes(mount, root)
        for name in ("kubepods.slice", "kubepods"):
            inside = _read_text_or_none(mount / name / "cgroup.controllers")
            if inside is not None and "cpuset" not in inside.split():
                yield _warning_finding(
                    "cgroups",
                    f"cpuset is not enabled for {name}",
                    "The runtime enables it with the first pinned container; if it does not, check "
                    "Delegate= of the kubelet's and the runtime's unit.",
                )


def _check_writes(mount: Path, root: Path) -> Iterator[Finding]:
    """Check that the installed service, or this container, can write cgroups."""
    problem, protection = "", dict(_read_unit_settings(root)).get("ProtectControlGroups", "no")
    if protection.lower() not in _SYSTEMD_FALSE:
        problem = f"{SYSTEMD_UNIT} has ProtectControlGroups={protection}"
    elif os.geteuid() == 0:
        problem = CgroupWriter(CgroupReader(str(mount))).unwritable_cpuset_reason()
    if problem:
        yield _warning_finding(
            "cgroups",
            f"they cannot be written: {problem}. The runtime writes them instead, which takes "
            f"longer, and no container moves",
            "systemctl edit nri-numa, with [Service] ProtectControlGroups=no; in a container mount "
            "the host's /sys/fs/cgroup without readOnly.",
        )


_HOST_PROCESSES_SUBJECT = "host processes"


def check_host_processes(config: AgentConfig, topology: Topology) -> Iterator[Finding]:
    """Check that processes outside of pods cannot run on exclusive CPUs."""
    reserved = _settings_in_effect(config, topology).reserved_cpus & topology.online
    if not reserved:
        yield _warning_finding(
            _HOST_PROCESSES_SUBJECT,
            "no CPUs are reserved for them, so they also run on exclusive CPUs",
            "Set reservedCPUs. See docs/quiet-cpus.md, host processes.",
        )
        return
    mount = Path(config.cgroup_root)
    if not (mount / "cgroup.controllers").exists():
        yield _warning_finding(
            _HOST_PROCESSES_SUBJECT,
            "with cgroup v1 systemd cannot restrict slices",
            "Write it into /etc/systemd/system.conf and reboot: "
            f"CPUAffinity={str(reserved).replace(',', ' ')}.",
        )
        return
    all_cpus = _read_effective_cpus(mount) or topology.online
    units = {
        unit.name: cpus
        for unit in sorted(mount.iterdir())
        if unit.suffix in (".slice", ".scope") and not unit.name.startswith("kubepods")
        if not any(unit.glob("kubepods*"))
        if (cpus := _read_effective_cpus(unit) or all_cpus) - reserved
    }
    if not units:
        yield _passed_finding(_HOST_PROCESSES_SUBJECT, f"restricted to reserved CPUs {reserved}")
        return
    text = ", ".join(f"{name} ({cpus})" for name, cpus in units.items())
    yield _warning_finding(
        _HOST_PROCESSES_SUBJECT,
        f"{cpus_text(reserved, 'is', 'are')} reserved for them, but they also run on other CPUs: "
        f"{text}",
        "; ".join(f"systemctl set-property {name} AllowedCPUs={reserved}" for name in units)
        + ". See docs/quiet-cpus.md, host processes.",
    )


def _read_effective_cpus(directory: Path) -> CPUSet:
    text = read_text_or_empty(str(directory / "cpuset.cpus.effective"))
    return CPUSet.parse_or_none(text) or NO_CPUS


# --- the runtime --------------------------------------------------------------------------------


def check_runtime_link(config: AgentConfig, root: Path = Path("/")) -> Iterator[Finding]:
    """Check that the kubelet's runtime serves NRI, or CRI if that is the link."""
    runtimes, endpoint = find_runtimes(root), read_runtime_endpoint(config, root)
    files = choose_runtime(runtimes, endpoint)
    yield from _check_second_runtime(runtimes, files)
    if config.runtime.link is RuntimeLinkKind.CRI:
        path = config.runtime.cri_socket.removeprefix("unix://")
        usual = f", such as {files.cri_socket}" if files is not None else ""
        remedy = f"Start the runtime, or set runtime.criSocket to its CRI socket{usual}."
        yield from _check_runtime_socket("CRI", path, remedy, "runtime.criSocket")
        return
    lacks = nri_unsupported_reason(files or CONTAINERD_FILES, root)
    if lacks and not os.path.exists(config.runtime.nri_socket):
        title = (files or CONTAINERD_FILES).title
        remedy = f"Install a newer {title}, or set runtime.link: cri."
        yield _failed_finding("NRI", lacks, remedy)
    elif files is CRI_O_FILES:
        yield from _check_crio_nri(config, root)
    else:
        yield from _check_containerd_nri(config, files, root)


def read_runtime_endpoint(config: AgentConfig, root: Path = Path("/")) -> str:
    """Read the kubelet's ``containerRuntimeEndpoint``; empty if it is not set or not readable."""
    section = config.kubelet
    facts = read_kubelet_config(
        section.config, section.config_dir, config.kubelet_root, str(root / "proc")
    ).facts
    return facts.runtime_endpoint if facts is not None else ""


def _check_second_runtime(
    runtimes: Iterable[FoundRuntime], files: RuntimeFiles | None
) -> Iterator[Finding]:
    running = [runtime for runtime in runtimes if runtime.is_running]
    if len(running) < 2:
        return
    text = " and ".join(f"{runtime.files.title} ({runtime.evidence})" for runtime in running)
    choice = f"the kubelet uses {files.title}" if files else "the kubelet's is not known"
    yield _warning_finding(
        "runtime",
        f"{text} run here, and {choice}; both serve NRI at the same socket by default",
        "Stop the one that Kubernetes does not use, or give it another NRI socket (nri_listen of "
        "CRI-O, socket_path of containerd).",
    )


def _check_containerd_nri(
    config: AgentConfig, files: RuntimeFiles | None, root: Path
) -> Iterator[Finding]:
    disabled, installed = nri_disabled_reason(root), query_runtime(CONTAINERD_FILES, root)
    remedy = _FIX_RUNTIME_REMEDY
    if disabled is None and installed is not None and installed.profile.nri_by_default:
        remedy = "Start containerd, or set runtime.nriSocket (--nri-socket) to its NRI socket."
    elif distribution := find_containerd_distribution(root):
        remedy = f"{distribution.nri_enabling_hint}."
    because = "" if disabled is None else f": {disabled}"
    path = config.runtime.nri_socket
    other = CRI_O_FILES if files is CONTAINERD_FILES else None
    yield from _check_runtime_socket("NRI", path, remedy, "runtime.nriSocket", because, other, root)


_FIX_RUNTIME_REMEDY: Final = (
    "Turn NRI on (`nri-numa check --fix-runtime` shows how) and restart the runtime."
)


def _check_crio_nri(config: AgentConfig, root: Path) -> Iterator[Finding]:
    """Check CRI-O's files, and that it serves NRI where the agent connects."""
    path = config.runtime.nri_socket
    try:
        crio = crio_config.read_crio_config(root)
    except (OSError, ValueError) as error:
        problem = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        is_denied = isinstance(error, PermissionError)
        remedy = "Run as root." if is_denied else "Correct it: CRI-O does not start with it."
        yield _failed_finding("runtime", str(problem), remedy)
        return
    yield from _check_crio_settings(crio, root)
    reason = crio_config.nri_disabled_reason(crio, root)
    listen = crio.values.get("nri_listen", "")
    if reason:
        remedy = _FIX_RUNTIME_REMEDY
        if crio_config.is_written_by_openshift(root):
            remedy = f"{crio_config.OPENSHIFT_HINT}; `nri-numa check --fix-runtime` shows it."
    elif listen and os.path.realpath(listen) != os.path.realpath(path):
        reason = crio.setting_text("nri_listen")
        remedy = f"Set runtime.nriSocket (--nri-socket) to {listen}."
    else:
        remedy = "Start CRI-O, or set runtime.nriSocket (--nri-socket) to its NRI socket."
    because = f": {reason}" if reason else ""
    for finding in _check_runtime_socket(
        "NRI", path, remedy, "runtime.nriSocket", because, CONTAINERD_FILES, root
    ):
        if reason and finding.level is FindingLevel.OK:
            finding = _warning_finding("NRI", f"{path} answers, but {reason}", remedy)
        yield finding


def _check_crio_settings(crio: crio_config.CRIOConfig, root: Path) -> Iterator[Finding]:
    """Report the version and drivers of CRI-O, and a request timeout below NRI's own."""
    installed = query_runtime(CRI_O_FILES, root)
    version = f" {installed.version}" if installed is not None else ""
    manager = crio.values.get("cgroup_manager", "systemd")
    oci_runtime = crio.values.get("default_runtime", "its default")
    yield _passed_finding(
        "runtime", f"CRI-O{version}, cgroup manager {manager}, OCI runtime {oci_runtime}"
    )
    if timeout := crio.values.get("nri_plugin_request_timeout"):
        with contextlib.suppress(ValueError):
            if 0 < parse_duration(timeout) < _DEFAULT_REQUEST_TIMEOUT_S:
                text = crio.setting_text("nri_plugin_request_timeout")
                yield _warning_finding(
                    "runtime",
                    f"{text}: CRI-O disconnects a plugin that takes longer",
                    "Remove that key; 2s is the default.",
                )


def _check_runtime_socket(
    name: str,
    path: str,
    remedy: str,
    key: str,
    because: str = "",
    other: RuntimeFiles | None = None,
    root: Path = Path("/"),
) -> Iterator[Finding]:
    """Check that a socket accepts connections, speaks NRI if that is meant, and is not another's.

    ``other`` is the runtime that the kubelet does not use.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        yield _failed_finding(name, f"there is no socket {path}{because}", remedy)
        return
    except OSError as error:
        yield _failed_finding(name, f"{path}: {error.strerror}", "Run as root.")
        return
    if not stat.S_ISSOCK(mode):
        yield _failed_finding(name, f"{path} is no socket", f"Set {key}.")
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(_CONNECT_TIMEOUT_S)
            sock.connect(path)
            is_grpc = name == "NRI" and _sends_first(sock)
            program = _read_serving_program(sock, root)
    except PermissionError:
        yield _warning_finding(name, f"{path} may only be opened by another user", "Run as root.")
    except OSError as error:
        yield _failed_finding(
            name,
            f"{path} does not answer: {error.strerror or error}",
            remedy if remedy.startswith("Start") else f"Start the runtime. {remedy}",
        )
    else:
        problem = ""
        if is_grpc:
            problem = f"{path} serves gRPC, as CRI does, and not NRI"
        elif other is not None and program == other.program:
            problem = f"{path} is served by {other.title}, which the kubelet does not use"
        if problem:
            yield _failed_finding(name, problem, f"Set {key} to the NRI socket of the runtime.")
        else:
            yield _passed_finding(name, f"{path} answers")


def _read_serving_program(sock: socket.socket, root: Path) -> str:
    """Read the name of the process that listens; empty if it is unknown. See unix(7)."""
    process_id = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return read_text_or_empty(str(root / f"proc/{process_id}/comm"))


def _sends_first(sock: socket.socket) -> bool:
    """True if the server sends something before it received anything."""
    sock.settimeout(_FIRST_BYTES_WAIT_S)
    try:
        return bool(sock.recv(1))
    except TimeoutError:
        return False


def check_other_agents(config: AgentConfig) -> Iterator[Finding]:
    """Check that no agent with another state directory has this runtime's lock.

    Skipped if no agent can use the directory, since its agent could not be told from another one.
    """
    with contextlib.suppress(OSError):
        if directory_problem(os.stat(config.state_dir)):
            return
    lock = RuntimeLock(runtime_lock_socket(config))
    try:
        lock.acquire()
    except RuntimeBusy as error:
        if error.pid is not None and error.pid == find_lock_holder(
            os.path.join(config.state_dir, LOCK_FILE_NAME)
        ):
            yield _passed_finding("agent", f"process {error.pid} already serves this runtime")
        else:
            message, _, remedy = str(error).partition("; ")
            yield _failed_finding("agent", message, f"{remedy[:1].upper()}{remedy[1:]}.")
    finally:
        lock.close()


def check_pod_level_resources(root: Path = Path("/")) -> Iterator[Finding]:
    """Report the runtime's support for pod-level resources (``spec.resources``)."""
    installed = query_runtime(CONTAINERD_FILES, root)
    if installed is None or choose_runtime(find_runtimes(root), "") is CRI_O_FILES:
        return
    text = f"containerd {installed.version} reports the pod's sum when its sandbox is created"
    if not installed.profile.tells_pod_resize:
        text += ", but not when it is resized (2.3 does): the sizes of its containers count"
    yield _passed_finding("pod-level resources", text)


# --- the agent's needs --------------------------------------------------------------------------


def check_state_directory(directory: Path) -> Iterator[Finding]:
    """Check that the checkpoint can be written, and by no other user."""
    path = directory
    while not os.path.exists(path) and path != path.parent:  # also without permission to look
        path = path.parent
    if not path.is_dir():
        yield _failed_finding("state", f"{path} is no directory", "Set stateDir.")
    elif not os.access(path, os.W_OK | os.X_OK):
        yield _failed_finding("state", f"{path} cannot be written", "Run as root, or set stateDir.")
    elif path != directory:
        yield _passed_finding("state", f"{directory} will be created")
    elif problem := directory_problem(path.stat()):
        yield _failed_finding(
            "state",
            f"{path} {problem}: other users could change which CPUs are exclusive",
            f"chown root: {path} && chmod 700 {path}, or set stateDir.",
        )
    else:
        yield _passed_finding("state", f"{directory} can be written")


_LIBRARY_BY_SETTING: Final = {
    "devices.networkInterfaces": "pyroute2",
    "devices.podResources": "grpc",
    "devices.countFree": "grpc",
    "dra.enabled": "grpc",
    "publish.otlpEndpoint": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
"""Libraries that are imported only if a key is on."""


def check_libraries(config: AgentConfig) -> Iterator[Finding]:
    """Check that the libraries of switched-on features can be imported."""
    for key, module in _LIBRARY_BY_SETTING.items():
        is_device = key in ("devices.networkInterfaces", "devices.podResources")
        if not config_keys()[key].value_in(config) or (is_device and not config.devices.enabled):
            continue
        try:
            import_module(module)
        except ImportError as error:
            package = "everything that nri-numa needs"
            if key == "publish.otlpEndpoint":
                package = "nri-numa[otel]"
            problem = f"{key} is on, but has no effect: {error}"
            yield _failed_finding(
                key.partition(".")[0], problem, f"Install {package}, or switch it off."
            )


def check_http_section(config: AgentConfig) -> Iterator[Finding]:
    """Check that the API's address is free or served by nri-numa, and its files are valid."""
    section = config.http
    address = split_address(section.address)
    if address is None:
        yield _passed_finding("http", "off")
        return
    if section.token_file:
        try:
            TokenFile(section.token_file)
        except ConfigError as error:
            remedy = "Write a token into it: openssl rand -hex 32."
            yield _failed_finding("http", error.problems[0], remedy)
        else:
            if os.stat(section.token_file).st_mode & 0o077:
                yield _warning_finding(
                    "http", f"{section.token_file} can be read by others", "chmod 600 it."
                )
    if section.tls_cert:
        try:
            Certificate(section.tls_cert, section.tls_key)
        except ConfigError as error:
            yield _failed_finding("http", error.problems[0], "Give PEM files that belong together.")
        else:
            yield from _check_certificate_validity(section.tls_cert)
    host, port = address
    answer = _who_listens(host, port, tls=bool(section.tls_cert))
    if answer == "none":
        yield _passed_finding("http", f"{section.address} is free")
    elif answer == "nri-numa":
        yield _passed_finding("http", f"{section.address} is served by a running nri-numa")
    else:
        yield _failed_finding(
            "http",
            f"{section.address} is taken by another program; the agent would serve no HTTP",
            "Set http.address to a free port.",
        )


def _check_certificate_validity(cert: str) -> Iterator[Finding]:
    seconds = certificate_seconds_left(cert, time.time())
    if seconds is not None and seconds < 0:
        yield _failed_finding("http", f"{cert} has expired", "Renew the certificate.")
    elif seconds is not None and seconds < 14 * 86400:
        yield _warning_finding(
            "http", f"{cert} expires in {int(seconds // 86400)} days", "Renew it before that."
        )


def _who_listens(host: str, port: int, *, tls: bool) -> str:
    """Return ``none``, ``nri-numa`` or ``other``."""
    import http.client
    import ssl

    target = host if host not in ("", "0.0.0.0", "::") else "127.0.0.1"  # noqa: S104  # compared
    try:
        socket.create_connection((target, port), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError:
        return "none"
    connection = http.client.HTTPConnection(target, port, timeout=_CONNECT_TIMEOUT_S)
    if tls:
        # Only the name in the answer matters, so a private authority is accepted.
        context = ssl._create_unverified_context()  # noqa: S323
        connection = http.client.HTTPSConnection(
            target, port, timeout=_CONNECT_TIMEOUT_S, context=context
        )
    try:
        connection.request("GET", "/healthz")
        server = connection.getresponse().getheader("Server", "")
    except (OSError, http.client.HTTPException):
        return "other"
    finally:
        connection.close()
    return "nri-numa" if server.startswith("nri-numa") else "other"


def check_numa_balancing(root: Path = Path("/")) -> Iterator[Finding]:
    """Report automatic NUMA balancing by the kernel."""
    if read_text_or_empty(str(root / "proc/sys/kernel/numa_balancing")) not in ("", "0"):
        yield _passed_finding(
            "kernel",
            "automatic NUMA balancing is on; kernel.numa_balancing=0 saves pinned containers its "
            "page faults",
        )


def check_interrupt_steering(config: AgentConfig, root: Path = Path("/")) -> Iterator[Finding]:
    """Check that device interrupts can be kept off exclusive CPUs, if configured."""
    if not config.interrupts_off_exclusive_cpus:
        return
    lists = [*(root / HOST_IRQ_DIRECTORY[1:]).glob("*/smp_affinity_list")]
    lists = lists or [*(root / "proc/irq").glob("*/smp_affinity_list")]
    protection = dict(_read_unit_settings(root)).get("ProtectKernelTunables", "no")
    if any(root.glob(IRQBALANCE_SOCKETS[1:])):
        yield _passed_finding("interrupts", "irqbalance runs, and exclusive CPUs are banned there")
    elif any(read_text_or_empty(str(p)) == "irqbalance" for p in root.glob("proc/[0-9]*/comm")):
        yield _warning_finding(
            "interrupts",
            f"irqbalance runs without a socket at /{IRQBALANCE_SOCKETS[1:]}, and moves "
            "interrupts back",
            "Give the agent /run/irqbalance, or stop irqbalance.",
        )
    elif protection.lower() in _SYSTEMD_TRUE or not any(os.access(path, os.W_OK) for path in lists):
        yield _warning_finding(
            "interrupts",
            "interruptsOffExclusiveCPUs has no effect: /proc/irq cannot be written",
            "systemctl edit nri-numa, with [Service] ProtectKernelTunables=no; in a container "
            f"mount the host's /proc/irq at {HOST_IRQ_DIRECTORY}.",
        )
    else:
        yield _passed_finding("interrupts", "interrupts of devices can be kept off exclusive CPUs")


def _read_text_or_none(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(_FOREIGN_FILE_READ_BYTES).decode(errors="replace")
    except OSError:
        return None


def worst_level(findings: list[Finding]) -> FindingLevel:
    """Return the worst level among the findings."""
    return max((f.level for f in findings), key=list(FindingLevel).index, default=FindingLevel.OK)


# --- The kubelet on this node ---

_KUBELET_GUIDE_TEXT = (
    "docs/kubelet.md has two ways to combine them, and how to change between them."
)


def check_kubelet(
    config: AgentConfig, topology: Topology | None, proc: str = "/proc"
) -> Iterator[Finding]:
    """Check if the kubelet's managers pin containers too, and if its settings agree."""
    directory = Path(config.kubelet_root)
    if "KUBERNETES_SERVICE_HOST" in os.environ and not os.path.exists(
        directory / STATE_FILE_NAMES["cpu"]
    ):
        yield _warning_finding(
            "kubelet",
            f"this pod does not see {directory} of the node, so CPUs granted by the kubelet are "
            f"not known",
            f"Mount it there, read only: hostPaths.kubelet: {directory} in the chart.",
        )
        return
    if not directory.is_dir():
        yield _passed_finding("kubelet", f"none below {directory}")
        return
    kubelet_config = read_kubelet_config(
        config.kubelet.config, config.kubelet.config_dir, str(directory), proc
    )
    for problem in kubelet_config.problems:
        yield _warning_finding(
            "kubelet",
            f"its configuration: {problem}",
            "Correct it: the kubelet reads the same. Or set kubelet.config to the right file.",
        )
    files = KubeletStateFiles(str(directory))
    if topology is not None:
        files.refresh_and_report_change(topology.possible, topology.numa_ids)
    for problem in files.problems:
        yield _warning_finding(
            "kubelet",
            f"its state: {problem}",
            "Until it can be read, nri-numa does not know the kubelet's CPUs.",
        )
    yield from _check_kubelet_policies(files, kubelet_config.facts, config)
    yield from _check_device_alignment(config, kubelet_config.facts)
    yield from _check_settings_against_kubelet(config, topology, kubelet_config)


def _check_kubelet_policies(
    files: KubeletStateFiles, facts: KubeletFacts | None, config: AgentConfig
) -> Iterator[Finding]:
    grants = files.grants
    # The state files show how it runs; its configuration may be newer.
    cpu = grants.cpu_policy or (facts.cpu_policy if facts else "")
    memory = grants.memory_policy or (facts.memory_policy if facts else "")
    if cpu == "static":
        details = f"; {cpus_text(grants.granted_cpus)} granted now" if grants.granted_cpus else ""
        yield _warning_finding(
            "kubelet",
            f"its CPU manager policy is static: it pins Guaranteed pods itself{details}",
            "nri-numa leaves its grants to it (kubelet.overrideGrants: "
            f"{config.kubelet.override_grants}). For full control set cpuManagerPolicy: none, "
            f"drain the node, delete {files.state_file_path('cpu')} and restart the kubelet. "
            f"{_KUBELET_GUIDE_TEXT}",
        )
    if memory == "Static":
        yield _warning_finding(
            "kubelet",
            "its memory manager policy is Static: it sets memory nodes of Guaranteed pods itself",
            "For full control set memoryManagerPolicy: None, drain the node, delete "
            f"{files.state_file_path('memory')} and restart the kubelet. {_KUBELET_GUIDE_TEXT}",
        )
    if facts is not None:
        yield from _check_next_kubelet_start(files, facts)
    if cpu != "static" and memory != "Static":
        policy = "cpuManagerPolicy none" if cpu or memory else "its configuration cannot be read"
        yield _passed_finding("kubelet", policy)


def _check_device_alignment(config: AgentConfig, facts: KubeletFacts | None) -> Iterator[Finding]:
    """Check that a pod with two kinds of devices gets them on one NUMA node."""
    socket_path = pod_resources.pod_resources_socket_path(config.kubelet_root)
    if facts is None or not os.path.exists(socket_path):
        return
    try:
        devices = pod_resources.query_node_devices(config.kubelet_root)
    except ImportError:  # without grpc
        return
    if isinstance(devices, str):
        return
    node_count = Counter(count.resource for count in pod_resources.count_devices(devices))
    del node_count[config.device_plugin.resource_name]  # its devices are CPUs
    resources = sorted(name for name, number in node_count.items() if number > 1)
    if len(resources) < 2:
        return
    text = listed_words_text(resources)
    if facts.topology_policy == "none":
        yield _warning_finding(
            "kubelet",
            f"its topologyManagerPolicy is none: it chooses {text} separately, and a pod with "
            "several of them may get them on different NUMA nodes",
            "Set topologyManagerPolicy: best-effort in its configuration, with cpuManagerPolicy: "
            "none and memoryManagerPolicy: None, and restart it. See docs/devices.md.",
        )
    else:
        yield _passed_finding(
            "kubelet",
            f"topologyManagerPolicy {facts.topology_policy}, scope {facts.topology_scope}: it "
            f"aligns {text}",
        )


def _check_next_kubelet_start(files: KubeletStateFiles, facts: KubeletFacts) -> Iterator[Finding]:
    for manager, last_policy, next_policy in (
        ("cpu", files.grants.cpu_policy, facts.cpu_policy),
        ("memory", files.grants.memory_policy, facts.memory_policy),
    ):
        if last_policy and last_policy != next_policy:
            yield _warning_finding(
                "kubelet",
                f"{files.state_file_path(manager)} has policy {last_policy}, and its configuration "
                f"has {next_policy}: the kubelet will not start again",
                f"Drain the node, delete {files.state_file_path(manager)}, restart the kubelet.",
            )


def _check_settings_against_kubelet(
    config: AgentConfig, topology: Topology | None, kubelet_config: DiscoveredConfig
) -> Iterator[Finding]:
    if topology is None:
        return
    adopted = adopt_kubelet_settings(config, kubelet_config.facts, topology)
    for difference in adopted.differences:
        yield _warning_finding(
            "kubelet",
            difference,
            f"Make {kubelet_config.path} and the configuration of nri-numa say the same. "
            f"{_KUBELET_GUIDE_TEXT}",
        )
    for adoption in adopted.adopted:
        yield _passed_finding("kubelet", f"inherited from its configuration: {adoption}")


# --- The systemd service: restrictions of its unit ---

SYSTEMD_UNIT: Final = "nri-numa.service"
_UNIT_DIRECTORIES: Final = ("etc/systemd/system", "run/systemd/system", "usr/lib/systemd/system")
"""Directories of units by precedence; see systemd.unit(5)."""
_HOME_DIRECTORIES: Final = ("/home/", "/root/", "/run/user/")
"""Directories hidden by ``ProtectHome=``; see systemd.exec(5)."""
_SYSTEMD_TRUE: Final = ("yes", "true", "on", "1", "y", "t")
_SYSTEMD_FALSE: Final = ("no", "false", "off", "0", "n", "f")
_CAP_SYS_ADMIN: Final = 21
_UNIT_SETTING_PATTERN: Final = re.compile(r"^[ \t]*(\w+)[ \t]*=[ \t]*(.*?)[ \t]*$", re.MULTILINE)
_PROC_STATUS_PATTERN: Final = re.compile(r"^(Uid|CapEff):\s*(\w+)", re.MULTILINE)


def check_systemd_service(config: AgentConfig, root: Path = Path("/")) -> Iterator[Finding]:
    """Check that the installed service can read its program; skipped without a service."""
    lines = _read_unit_settings(root)
    unit = dict(lines)
    if config.devices.enabled and config.devices.network_interfaces:
        yield from _check_network_namespaces(lines, root)
    program = unit.get("ExecStart", "").lstrip("-@:+!").partition(" ")[0]
    if not program.startswith("/"):
        return
    hidden = [p for p in _executed_files(root, program) if p.startswith(_HOME_DIRECTORIES)]
    if not hidden or unit.get("ProtectHome", "no").lower() not in (*_SYSTEMD_TRUE, "tmpfs"):
        yield _passed_finding("service", f"{SYSTEMD_UNIT} runs {program}")
        return
    extra = " CapabilityBoundingSet=CAP_DAC_READ_SEARCH" if hidden[0].startswith("/home/") else ""
    yield _failed_finding(
        "service",
        f"{SYSTEMD_UNIT} cannot start: {hidden[0]} is in a home directory, which "
        f"ProtectHome={unit['ProtectHome']} hides from it",
        "Make the virtual environment elsewhere, in /opt/nri-numa for example. Or let the "
        f"service see home directories: systemctl edit nri-numa, with [Service] "
        f"ProtectHome=read-only{extra} on lines of their own.",
    )


def _check_network_namespaces(lines: list[tuple[str, str]], root: Path) -> Iterator[Finding]:
    """Check that the service, or this container, may enter network namespaces of pods."""
    if lines:
        allowed = _systemd_list_allows(
            lines, "CapabilityBoundingSet", "CAP_SYS_ADMIN", nothing=("",), everything=("~",)
        )
        allowed = allowed and _systemd_list_allows(
            lines,
            "RestrictNamespaces",
            "net",
            nothing=_SYSTEMD_TRUE,
            everything=("", *_SYSTEMD_FALSE),
        )
        subject = SYSTEMD_UNIT
        remedy = "systemctl edit nri-numa, with [Service] CapabilityBoundingSet=CAP_SYS_ADMIN "
        remedy += "RestrictNamespaces=net on lines of their own"
    else:
        text = read_text_or_empty(str(root / "proc/self/status"))
        status = dict(_PROC_STATUS_PATTERN.findall(text))
        # For another user than root, what the agent may do is not known.
        allowed = status.get("Uid") != "0" or bool(int(status["CapEff"], 16) >> _CAP_SYS_ADMIN & 1)
        subject = "this container"
        remedy = "Add the capability SYS_ADMIN and the host's /run/netns"
    if not allowed:
        yield _warning_finding(
            "devices",
            f"devices.networkInterfaces gives no hints: {subject} may not enter the network "
            "namespaces of pods",
            f"{remedy}. Or set devices.networkInterfaces: false.",
        )


def _systemd_list_allows(
    lines: list[tuple[str, str]],
    key: str,
    item: str,
    *,
    nothing: tuple[str, ...],
    everything: tuple[str, ...],
) -> bool:
    """True if a list of systemd.exec(5) allows ``item``; values merge in order of lines."""
    allowed = full = True
    for value in (value for name, value in lines if name == key):
        listed = item in value.removeprefix("~").split()
        if value.lower() in (*nothing, *everything):
            allowed = full = value.lower() in everything
        elif value.startswith("~"):
            allowed, full = allowed and not listed, False
        else:
            allowed, full = listed or (allowed and not full), False
    return allowed


def _read_unit_settings(root: Path) -> list[tuple[str, str]]:
    """Read keys and values of the unit and its drop-ins; continued lines are not joined."""
    units = [
        root / d / SYSTEMD_UNIT for d in _UNIT_DIRECTORIES if (root / d / SYSTEMD_UNIT).is_file()
    ]
    # Drop-ins apply in the order of their names in all directories; the first of a name wins.
    drop_ins: dict[str, Path] = {}
    for directory in _UNIT_DIRECTORIES:
        for path in (root / directory / f"{SYSTEMD_UNIT}.d").glob("*.conf"):
            drop_ins.setdefault(path.name, path)
    paths = [units[0], *(path for _, path in sorted(drop_ins.items()))] if units else []
    return _UNIT_SETTING_PATTERN.findall(
        "\n".join(_read_text_or_none(path) or "" for path in paths)
    )


def _executed_files(root: Path, program: str) -> Iterator[str]:
    """Return the files executed for a program: its link target, and its interpreter."""
    path = _resolve_in_root(root, program)
    yield path
    first_line = (_read_text_or_none(root / path.lstrip("/")) or "").partition("\n")[0]
    interpreter = first_line.removeprefix("#!").split()[:1] if first_line.startswith("#!") else []
    if interpreter:
        yield interpreter[0]
        yield _resolve_in_root(root, interpreter[0])


def _resolve_in_root(root: Path, path: str) -> str:
    real = str((root / path.lstrip("/")).resolve())
    top = str(root.resolve()).rstrip("/")
    return real.removeprefix(top) if real.startswith(f"{top}/") else real
