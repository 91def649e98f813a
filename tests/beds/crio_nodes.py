"""File trees of nodes with CRI-O, made by hand from the documentation of those who ship it.

Sources: crio.conf(5), crio.conf.d(5); the package of Fedora; the packages of the CRI-O project for
Debian (``10-crio.conf``); the templates of OpenShift's Machine Config Operator (``00-default``).
"""

from pathlib import Path
from typing import Final

from tests.machines.named import write_tree

KUBELET_FILE: Final = (
    "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"
    "containerRuntimeEndpoint: unix://{}\n"
)

_FEDORA_MAIN: Final = """\
# The CRI-O configuration file specifies all of the available configuration
# options and command-line flags for the crio(8) OCI Kubernetes Container Runtime
[crio]
# log_dir = "/var/log/crio/pods"
[crio.api]
# listen = "/var/run/crio/crio.sock"
[crio.runtime]
# cgroup_manager = "systemd"
conmon = "/usr/bin/conmon"
[crio.network]
plugin_dirs = ["/usr/libexec/cni", "/opt/cni/bin"]
[crio.metrics]
"""
_DEBIAN_DROP_IN: Final = """\
[crio.image]
signature_policy = "/etc/crio/policy.json"

[crio.runtime]
default_runtime = "crun"

[crio.runtime.runtimes.crun]
runtime_path = "/usr/libexec/crio/crun"
runtime_root = "/run/crun"
monitor_path = "/usr/libexec/crio/conmon"
allowed_annotations = ["io.containers.trace-syscall"]
"""
_OPENSHIFT_DROP_IN: Final = """\
[crio]
internal_wipe = true
[crio.api]
stream_address = "127.0.0.1"
stream_port = "0"
[crio.runtime]
selinux = true
conmon = ""
conmon_cgroup = "pod"
default_env = ["NSS_SDB_USE_CACHE=no"]
cgroup_manager = "systemd"
default_runtime = "crun"
hooks_dir = ["/etc/containers/oci/hooks.d", "/run/containers/oci/hooks.d"]
[crio.runtime.runtimes.crun]
runtime_root = "/run/crun"
[crio.runtime.workloads.openshift-builder]
activation_annotation = "io.openshift.builder"
[crio.metrics]
enable_metrics = true
"""


def add_program(root: Path, program: str, version_text: str) -> None:
    """Install a program that answers ``--version`` with this text."""
    write_tree(root, {f"usr/bin/{program}": f"#!/bin/sh\necho '{version_text}'\n"})
    (root / "usr/bin" / program).chmod(0o755)


def add_crio(root: Path, version: str) -> None:
    """Install CRI-O in this version."""
    add_program(root, "crio", f"crio version {version}")


def add_process(root: Path, process_id: int, *command: str) -> None:
    """Add a process of the node."""
    name = command[0].rpartition("/")[2]
    write_tree(
        root,
        {
            f"proc/{process_id}/comm": f"{name}\n",
            f"proc/{process_id}/cmdline": "\0".join(command) + "\0",
        },
    )
    (root / f"proc/{process_id}/root").symlink_to(root)


def fedora_coreos(root: Path, version: str = "1.34.1") -> None:
    """Make Fedora CoreOS with the package cri-o, and kubeadm's kubelet."""
    write_tree(
        root,
        {
            "etc/os-release": "ID=fedora\nVARIANT_ID=coreos\n",
            "etc/crio/crio.conf": _FEDORA_MAIN,
            "var/lib/kubelet/config.yaml": KUBELET_FILE.format("/var/run/crio/crio.sock"),
        },
    )
    add_crio(root, version)
    add_process(root, 812, "/usr/bin/crio")


def debian(root: Path, version: str = "1.29.4") -> None:
    """Make Debian with the CRI-O project's package, and kubeadm's kubelet; containerd is left over.

    The package has no main file.
    """
    write_tree(
        root,
        {
            "etc/crio/crio.conf.d/10-crio.conf": _DEBIAN_DROP_IN,
            "etc/containerd/config.toml": "version = 2\n",
            "var/lib/kubelet/config.yaml": KUBELET_FILE.format("/var/run/crio/crio.sock"),
        },
    )
    add_crio(root, version)
    add_program(root, "containerd", "containerd github.com/containerd/containerd 1.7.24")
    add_process(root, 640, "/usr/bin/crio")


def openshift(root: Path, version: str = "1.32.5-3.rhaos4.19.gitabcdef0.el9") -> None:
    """Make a worker of OpenShift, whose kubelet names the runtime on its command line."""
    write_tree(
        root,
        {
            "etc/os-release": 'ID="rhcos"\n',
            "etc/machine-config-daemon/currentconfig": "{}",
            "etc/crio/crio.conf.d/00-default": _OPENSHIFT_DROP_IN,
            "etc/crio/crio.conf.d/01-ctrcfg-pidsLimit": "[crio]\n  [crio.runtime]\n",
            "var/lib/kubelet/cpu_manager_state": "{}",
        },
    )
    add_crio(root, version)
    add_process(root, 2210, "/usr/bin/crio")
    add_process(
        root,
        2300,
        "/usr/bin/kubelet",
        "--config=/etc/kubernetes/kubelet.conf",
        "--container-runtime-endpoint=/var/run/crio/crio.sock",
    )
