"""The agent with the rights that it has on a node: our seccomp profile, and no capability.

Whoever tries to break in gets no more than that. What a real runtime makes of the profile is in
`tests/e2e/test_install_image.py`.
"""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_numa.demo.runtime import PodOperationFailed
from nri_numa.model.cpuset import CPUSet
from tests.beds import confinement
from tests.beds.embedded_node import EmbeddedNode, until
from tests.machines import named as machines

ROOT = Path(__file__).resolve().parents[2]
try:
    confinement.number("read", "x86_64")
except OSError as missing:
    pytest.skip(f"libseccomp.so.2 is needed: {missing}", allow_module_level=True)
PROFILE = ROOT / "config/security/nri-numa.json"


@pytest.fixture
def confined(tmp_path: Path) -> Iterator[EmbeddedNode]:
    """A node where the agent runs with these rights from its first instruction on."""
    with EmbeddedNode(tmp_path, config={"reconcile": {"interval": "200ms"}}) as node:
        node.start(f"confined:{PROFILE}")
        yield node


def test_the_agent_has_the_filter_and_no_capability(confined: EmbeddedNode) -> None:
    status = Path(f"/proc/{confined.plugin.pid}/status").read_text()
    assert "Seccomp:\t2\n" in status
    assert "NoNewPrivs:\t1\n" in status or os.geteuid() != 0
    assert "CapEff:\t0000000000000000\n" in status


def test_the_whole_job_is_done_with_it(confined: EmbeddedNode) -> None:
    """Placement, repair, reload, checkpoint, restart of either side, HTTP, and an orderly end."""
    node = confined
    _, listed, _, _ = node.four()
    node.check()
    path = node.cgroup(listed.id)
    node.tamper(listed, "0-31", "0-3")
    until(lambda: node.cgroups.cpus_of(path) == "1", "put right")
    node.plugin.reload({**node.config, "strategy": "pack"})
    node.logged("configuration reloaded")
    node.restart_runtime()
    until(node.plugin.ready, "connected again")
    node.check()
    for target in ("/metrics", "/v1/topology", "/readyz"):
        assert node.plugin.get(target)[0] == 200
    node.plugin.restart()
    node.check()
    node.plugin.restart(kill=True)
    node.usable()
    assert node.plugin.terminate() == 0
    rejected = [r for r in node.plugin.records() if "not permitted" in json.dumps(r)]
    assert rejected == []


def test_the_cgroup_of_a_container_started_without_it_is_marked(confined: EmbeddedNode) -> None:
    node = confined
    node.plugin.kill()
    met = node.free()
    node.start(f"confined:{PROFILE}")
    name = "user.numa.kubernetes.io/assigned"
    directory = node.cgroups.directory(node.cgroup(met.id))
    until(lambda: name in os.listxattr(directory), "the mark")
    assert json.loads(os.getxattr(directory, name))["kind"] == "unpinned"


@pytest.mark.parametrize("writable", [True, False])
def test_room_is_made_where_container_lists_can_be_written(tmp_path: Path, writable: bool) -> None:
    """The root directory can be written by nobody, as on each node with cgroups of version 2."""
    machine = machines.snc_single_no_smt(cores_per_numa=8)
    single = {"policy": "single-numa-node"}
    with EmbeddedNode(tmp_path, topology=machine, version=2) as node:
        node.start(f"confined:{PROFILE}")
        for name in ("a", "b"):
            made = node.run(name, single | {"movable": "true", "bind": "cpu"}, cpus=3)
            if not writable:
                (node.cgroups.directory(node.cgroup(made.id)) / "cpuset.cpus").chmod(0o444)
        node.cgroups.base.chmod(0o555)
        if writable:
            new = node.run("new", single, cpus=6)
            assert len(CPUSet.parse(new.cpus)) == 6
            node.check()
        else:
            with pytest.raises(
                PodOperationFailed, match=r"no container could be moved: .*/cpuset\.cpus: Perm"
            ):
                node.run("new", single, cpus=6)


# Each as (what, statement); `syscall` and `libc` are there.
ATTEMPTS = {
    "another program as a child": "os.fork()",
    "a child that shares memory": "syscall('vfork')",
    "a process by clone": "syscall('clone', 17, 0, 0, 0, 0)",
    "namespaces": "syscall('unshare', 0x20000)",
    "somebody else's namespaces": "syscall('setns', -1, 0)",
    "mounting": "syscall('mount', 0, 0, 0, 0, 0)",
    "mounting, the new way": "syscall('fsopen', 0, 0)",
    "another root": "syscall('pivot_root', 0, 0)",
    "chroot": "os.chroot('/')",
    "tracing": "syscall('ptrace', 0, 0, 0, 0)",
    "memory of other processes": "syscall('process_vm_readv', os.getpid(), 0, 0, 0, 0, 0)",
    "signals to other processes": "os.kill(os.getppid(), 0)",
    "BPF": "syscall('bpf', 0, 0, 0)",
    "performance counters": "syscall('perf_event_open', 0, 0, 0, 0, 0)",
    "page faults handled by itself": "syscall('userfaultfd', 0)",
    "io_uring": "syscall('io_uring_setup', 1, 0)",
    "keys of the kernel": "syscall('keyctl', 0, 0, 0, 0, 0)",
    "kernel modules": "syscall('init_module', 0, 0, 0)",
    "another kernel": "syscall('kexec_load', 0, 0, 0, 0)",
    "the clock": "time.clock_settime(0, time.time())",
    "the host's name": "syscall('sethostname', 0, 0)",
    "other users": "os.setuid(0)",
    "files by their handles": "syscall('open_by_handle_at', 0, 0, 0)",
    "device files": "os.mknod('/nowhere/device', 0o020600, 0)",
    "affinity of processes": "os.sched_setaffinity(0, {0})",
    "NUMA policy of processes": "syscall('set_mempolicy', 0, 0, 0)",
    "moving others' memory": "syscall('migrate_pages', 0, 0, 0, 0)",
    "priorities": "os.setpriority(0, 0, 0)",
    "limits of others": "syscall('setrlimit', 7, 0)",
    "packets": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "the kernel's audit": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 9)",
    "sockets of virtual machines": "socket.socket(40, socket.SOCK_STREAM)",
}
_PROGRAM = """
import ctypes, json, os, socket, sys, time
from pathlib import Path
from tests.beds import confinement
libc = ctypes.CDLL(None, use_errno=True)
attempts = json.loads(sys.argv[2])
called = [each.split("'")[1] for each in attempts.values() if each.startswith('syscall')]
numbers = {name: confinement.number(name, os.uname().machine) for name in called}
def syscall(name, *arguments):
    if numbers[name] is None:
        raise PermissionError(1, 'this architecture has none')
    if libc.syscall(ctypes.c_long(numbers[name]), *map(ctypes.c_long, arguments)) < 0:
        raise OSError(ctypes.get_errno(), name)
if sys.argv[1]:
    confinement.load(Path(sys.argv[1]))
found = {}
for what, statement in attempts.items():
    try:
        exec(statement)
    except OSError as error:
        found[what] = error.errno
    else:
        found[what] = 0
print(json.dumps(found))
"""


def test_what_it_never_does_is_denied() -> None:
    """With all capabilities of root where the test has them: the filter alone says no."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(PROFILE), json.dumps(ATTEMPTS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == dict.fromkeys(ATTEMPTS, errno.EPERM)


@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
def test_every_call_is_one_of_the_kernels(architecture: str) -> None:
    """A slip in a name would be left out by the runtime without a word."""
    document = json.loads(PROFILE.read_text())
    names = [name for rule in document["syscalls"] for name in rule["names"]]
    there = {name for name in names if confinement.number(name, architecture) is not None}
    # Both have what the interpreter lives on.
    assert {"openat", "read", "write", "futex", "mmap", "epoll_pwait", "accept4", "clone"} <= there
    assert f"SCMP_ARCH_{architecture.upper()}" in document["architectures"]
