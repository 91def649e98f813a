"""The machine check: each finding on a machine made for it."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from msgspec.structs import replace

from nri_numa import config
from nri_numa.agent import preflight
from nri_numa.agent.preflight import (
    Finding,
    FindingLevel,
    check_pod_level_resources,
    check_systemd_service,
)
from nri_numa.config import HTTP, AgentConfig, RuntimeLinkKind
from nri_numa.config.sections import Devices, KubeletSection, RuntimeLinkSection
from nri_numa.kubelet.pb import podresources_pb2
from nri_numa.machine.sysfs import discover_topology
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import Topology
from nri_numa.model.settings import IsolatedCPUs, NohzFullCPUs
from nri_numa.publisher.traces import EXPORTER_LOGGER_NAME
from tests.beds.certificates import make_certificate, make_expired
from tests.beds.fake_kubelet import pod_resources
from tests.machines import named as machines
from tests.machines.named import write_sysfs, write_tree

CONTAINERD = "etc/containerd/config.toml"
NRI = "[plugins.'io.containerd.nri.v1.nri']\n"


def only(findings: object) -> Finding:
    (one,) = list(findings)  # type: ignore[call-overload]
    assert isinstance(one, Finding)
    assert bool(one.remedy) == (one.level is not FindingLevel.OK)
    return one


# --- cgroups ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "level", "part"),
    [
        ({"cgroup.controllers": "cpuset cpu memory"}, FindingLevel.OK, "cgroup v2 with cpuset"),
        ({"cgroup.controllers": "cpu memory"}, FindingLevel.FAIL, "without the controller cpuset"),
        ({"cgroup.controllers": ""}, FindingLevel.FAIL, "cpuset, memory"),
        ({"cpuset/x": "", "memory/x": ""}, FindingLevel.OK, "cgroup v1"),
        ({"cpuset/x": ""}, FindingLevel.FAIL, "cgroup v1 without the controller memory"),
        ({}, FindingLevel.FAIL, "no cgroup controllers"),
    ],
)
def test_cgroup_controllers(
    tmp_path: Path, files: dict[str, str], level: FindingLevel, part: str
) -> None:
    found = only(preflight.check_cgroup_controllers(write_tree(tmp_path, files), tmp_path))
    assert (found.level, part in found.message) == (level, True), found


def test_a_kernel_without_controllers_is_told_apart_from_a_missing_mount(tmp_path: Path) -> None:
    for controller, remedy in (("cpuset", "Mount"), ("cpu", "lacks cpuset")):
        text = f"#subsys_name\thierarchy\n{controller}\t0\t1\t1\nmemory\t0\t1\t1\n"
        write_tree(tmp_path, {"proc/cgroups": text})
        assert remedy in only(preflight.check_cgroup_controllers(tmp_path / "x", tmp_path)).remedy


def host(tmp_path: Path, reserved: str, files: dict[str, str]) -> Finding:
    write_tree(tmp_path / "cgroup", files)
    loaded = AgentConfig(
        reserved_cpus=reserved,
        cgroup_root=str(tmp_path / "cgroup"),
        kubelet_root=str(tmp_path / "kubelet"),
    )
    return only(preflight.check_host_processes(loaded, machines.dual_smt_16()))


def test_host_processes_on_unreserved_cpus_are_named_with_what_to_do(tmp_path: Path) -> None:
    effective = "cpuset.cpus.effective"
    files = {
        "cgroup.controllers": "cpuset cpu memory\n",
        effective: "0-15\n",
        "init.scope/cgroup.procs": "1\n",  # without the controller: as the root
        f"system.slice/{effective}": "0-1\n",
        f"user.slice/{effective}": "0-3\n",
        f"kubepods.slice/{effective}": "0-15\n",
        f"pods.slice/kubepods-besteffort.slice/{effective}": "0-15\n",
    }
    found = host(tmp_path, "0-1", files)
    assert found.level is FindingLevel.WARN
    assert found.message == (
        "CPUs 0-1 are reserved for them, but they also run on other CPUs: "
        "init.scope (0-15), user.slice (0-3)"
    )
    assert found.remedy.startswith(
        "systemctl set-property init.scope AllowedCPUs=0-1; "
        "systemctl set-property user.slice AllowedCPUs=0-1. "
    )
    files |= {f"init.scope/{effective}": "0-1\n", f"user.slice/{effective}": "1\n"}
    assert host(tmp_path, "0-1", files).level is FindingLevel.OK


def test_host_processes_without_reserved_cpus_and_on_version_1(tmp_path: Path) -> None:
    found = host(tmp_path, "", {"cgroup.controllers": "cpuset\n"})
    assert (found.level, "reservedCPUs" in found.remedy) == (FindingLevel.WARN, True)
    (tmp_path / "cgroup/cgroup.controllers").unlink()
    found = host(tmp_path, "0-1,8", {"cpuset/cpuset.cpus": "0-15\n"})
    assert (found.level, "cgroup v1" in found.message) == (FindingLevel.WARN, True)
    assert found.remedy.endswith("CPUAffinity=0-1 8.")


def test_a_pod_cgroup_without_cpuset_is_a_warning(tmp_path: Path) -> None:
    there = "cgroup.controllers"
    write_tree(tmp_path, {there: "cpuset memory", f"kubepods.slice/{there}": "memory"})
    levels = [f.level for f in preflight.check_cgroup_controllers(tmp_path)]
    assert levels == [FindingLevel.OK, FindingLevel.WARN]


@pytest.mark.parametrize("by_the_unit", [True, False])
def test_cgroups_that_cannot_be_written_are_a_warning(tmp_path: Path, by_the_unit: bool) -> None:
    write_tree(tmp_path, {"cgroup.controllers": "cpuset memory"})
    if by_the_unit:
        unit = {"etc/systemd/system/nri-numa.service": "[Service]\nProtectControlGroups=yes\n"}
        write_tree(tmp_path, unit)
    else:
        (tmp_path / "cgroup.procs").mkdir()  # root may write all but a directory
    (_, found) = preflight.check_cgroup_controllers(tmp_path, tmp_path)
    assert found.level is FindingLevel.WARN
    assert ("ProtectControlGroups=yes" if by_the_unit else "Is a directory") in found.message
    assert "no container moves" in found.message


# --- the runtime --------------------------------------------------------------------------------


def runtime(path: Path, root: Path) -> Finding:
    return only(
        preflight.check_runtime_link(
            AgentConfig(runtime=RuntimeLinkSection(nri_socket=str(path))), root
        )
    )


def test_a_socket_that_answers_is_fine_and_one_that_does_not_is_not(tmp_path: Path) -> None:
    path = tmp_path / "nri.sock"
    assert "there is no socket" in runtime(path, tmp_path).message
    path.touch()
    assert "is no socket" in runtime(path, tmp_path).message
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        found = runtime(path, tmp_path)
        assert "does not answer: Connection refused" in found.message
        assert found.remedy.startswith("Start the runtime. Turn NRI on")
        server.listen()
        assert runtime(path, tmp_path).level is FindingLevel.OK


def test_over_cri_its_socket_is_looked_at_and_not_that_of_nri(tmp_path: Path) -> None:
    path = tmp_path / "cri.sock"
    given = RuntimeLinkSection(
        link=RuntimeLinkKind.CRI, cri_socket=f"unix://{path}", nri_socket="/nowhere"
    )
    config = AgentConfig(runtime=given)
    missing = only(preflight.check_runtime_link(config, tmp_path))
    assert (missing.subject, missing.level) == ("CRI", FindingLevel.FAIL)
    assert "runtime.criSocket" in missing.remedy
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        deaf = only(preflight.check_runtime_link(config, tmp_path))
        assert deaf.remedy.startswith("Start the runtime, or set runtime.criSocket")
        server.listen()
        assert only(preflight.check_runtime_link(config, tmp_path)).level is FindingLevel.OK


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (None, "there is no socket"),
        ("version = 2\n", "which containerd before 2.0 needs"),
        ("version = 3\n", "there is no socket"),
        ("", "which containerd before 2.0 needs"),
        (f"version = 2\n{NRI}disable = true\n", "disables it"),
        ('version = 3\n[plugins."io.containerd.nri.v1.nri"]\ndisable = true\n', "disables it"),
        (f"version = 3\n{NRI}disable_connections = true\n", "disable_connections"),
        ("version = [", "not valid TOML"),
        ("imports = ['a']", "/etc/containerd/a: No such file or directory"),
        ("plugins = 3\n", "which containerd before 2.0 needs"),
    ],
)
def test_a_missing_socket_leads_to_containerd(tmp_path: Path, text: str | None, part: str) -> None:
    if text is not None:
        write_tree(tmp_path, {CONTAINERD: text})
    found = runtime(tmp_path / "nri.sock", tmp_path)
    assert (found.level, part in found.message) == (FindingLevel.FAIL, True), found


def installed(root: Path, told: str) -> None:
    """A containerd that tells this when it is asked for its version."""
    write_tree(root, {"usr/bin/containerd": f"#!/bin/sh\necho '{told}'\n"})
    (root / "usr/bin/containerd").chmod(0o755)


@pytest.mark.parametrize(
    ("told", "blames", "remedy"),
    [
        ("containerd github.com/containerd/containerd v1.7.24 5b3e", True, "--fix-runtime"),
        ("containerd github.com/containerd/containerd/v2 v2.1.9 5b3e", False, "Start containerd"),
        ("containerd github.com/containerd/containerd/v2 2.2.0~rc1", False, "Start containerd"),
        ("nonsense", True, "--fix-runtime"),
    ],
)
def test_a_file_of_version_2_is_blamed_only_where_containerd_is_older_than_that(
    tmp_path: Path, told: str, blames: bool, remedy: str
) -> None:
    """A containerd 2 reads files of version 2 too, and has NRI on unless they say otherwise."""
    write_tree(tmp_path, {CONTAINERD: "version = 2\n"})
    installed(tmp_path, told)
    found = runtime(tmp_path / "nri.sock", tmp_path)
    assert found.level is FindingLevel.FAIL
    assert ("does not turn it on" in found.message) is blames, found
    assert remedy in found.remedy
    write_tree(tmp_path, {CONTAINERD: f"version = 2\n{NRI}disable = true\n"})
    assert "--fix-runtime" in runtime(tmp_path / "nri.sock", tmp_path).remedy


@pytest.mark.parametrize(
    ("mode", "owner", "said"),
    [
        (0o755, 0, None),
        (0o775, 0, "is writable by others"),
        (0o757, 0, "is writable by others"),
        (0o1777, 0, None),
        (0o755, 1000, "belongs to user 1000"),
    ],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away, which needs root")
def test_root_runs_what_root_wrote(tmp_path: Path, mode: int, owner: int, said: str | None) -> None:
    """Whoever owns the checkout would be root."""
    write_tree(tmp_path, {"venv/bin/python": ""})
    (tmp_path / "venv/bin/python").chmod(0o755)
    (tmp_path / "venv/bin").chmod(0o755)
    os.chown(tmp_path / "venv", owner, 0)
    (tmp_path / "venv").chmod(mode)
    found = list(preflight.check_installation_ownership([str(tmp_path / "venv/bin/python")]))
    assert [(one.level, said in one.message) for one in found] == (
        [(FindingLevel.WARN, True)] if said else []
    )


@pytest.mark.parametrize("configuration", ["version = 2\n", f"version = 2\n{NRI}disable = false\n"])
def test_containerd_without_nri_is_named_in_any_config(tmp_path: Path, configuration: str) -> None:
    """Debian 12's own package; no setting helps."""
    write_tree(tmp_path, {CONTAINERD: configuration})
    installed(tmp_path, "containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20")
    found = runtime(tmp_path / "nri.sock", tmp_path)
    assert (found.level, found.message) == (
        FindingLevel.FAIL,
        "containerd 1.6 has no NRI, expected 1.7 or newer",
    )
    assert "--fix-runtime" not in found.remedy
    assert "runtime.link: cri" in found.remedy


@pytest.mark.parametrize("name", ["k3s", "rke2"])
def test_a_distribution_is_named_with_containerds_template(tmp_path: Path, name: str) -> None:
    where = f"var/lib/rancher/{name}/agent/etc/containerd/config.toml"
    write_tree(tmp_path, {where: "version = 2\n"})
    found = runtime(tmp_path / "nri.sock", tmp_path)
    assert f"/{where} does not turn it on" in found.message
    assert "config-v3.toml.tmpl" in found.remedy
    assert "--fix-runtime" not in found.remedy


@pytest.mark.parametrize(
    ("told", "files", "said"),
    [
        ("v2.1.9", {"b": "disable = false"}, "nri.sock$"),
        ("v2.1.9", {"a": "disable = true", "b": "disable = false"}, "nri.sock$"),
        ("v2.1.9", {"b": "plugin_path = '/x'"}, "config.toml disables it"),  # key by key
        ("v1.7.24", {"b": "plugin_path = '/x'"}, "b.toml does not turn it on, and"),
        ("v1.7.24", {"b": "disable_connections = true\ndisable = false"}, "b.toml sets disable_c"),
    ],
)
def test_imported_files_win(tmp_path: Path, told: str, files: dict[str, str], said: str) -> None:
    main = f"version = 2\nimports = ['/etc/containerd/conf.d/*.toml', '../*/config.toml']\n{NRI}"
    parts = {f"etc/containerd/conf.d/{name}.toml": NRI + text for name, text in files.items()}
    write_tree(tmp_path, {CONTAINERD: f"{main}disable = true\n", **parts})
    installed(tmp_path, told)
    assert re.search(said, runtime(tmp_path / "nri.sock", tmp_path).message)


# --- our own needs ------------------------------------------------------------------------------


def test_the_state_directory_is_there_or_can_be_made(tmp_path: Path) -> None:
    assert only(preflight.check_state_directory(tmp_path)).message.endswith("can be written")
    assert only(preflight.check_state_directory(tmp_path / "a" / "b")).message.endswith(
        "will be created"
    )
    file = tmp_path / "file"
    file.touch()
    assert only(preflight.check_state_directory(file / "x")).level is FindingLevel.FAIL


def http(**section: object) -> list[Finding]:
    return list(preflight.check_http_section(AgentConfig(http=HTTP(**section))))  # type: ignore[arg-type]


def test_the_address_is_free_or_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [f.message for f in http(address="off")] == ["off"]
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{other.getsockname()[1]}"
        assert http(address=address)[0].message.endswith("is free")
        other.listen()
        monkeypatch.setattr(preflight, "_CONNECT_TIMEOUT_S", 0.05)
        (found,) = http(address=address)
        assert (found.level, "another program" in found.message) == (FindingLevel.FAIL, True)
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as ours:
        Thread(target=ours.serve_forever, daemon=True).start()
        monkeypatch.setattr(BaseHTTPRequestHandler, "server_version", "nri-numa/1")
        monkeypatch.setattr(preflight, "_CONNECT_TIMEOUT_S", 60)
        (found,) = http(address=f"127.0.0.1:{ours.server_port}")
        ours.shutdown()
    assert (found.level, "a running nri-numa" in found.message) == (FindingLevel.OK, True)


def test_the_token_file_is_looked_at(tmp_path: Path) -> None:
    token = tmp_path / "token"

    def levels() -> list[FindingLevel]:
        return [f.level for f in http(address="127.0.0.1:1", token_file=str(token))]

    assert levels() == [FindingLevel.FAIL, FindingLevel.OK]
    token.write_text("0123456789abcdef")
    token.chmod(0o644)
    assert levels() == [FindingLevel.WARN, FindingLevel.OK]
    token.chmod(0o600)
    assert levels() == [FindingLevel.OK]


def test_the_certificate_is_looked_at(tmp_path: Path) -> None:
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")

    def look() -> Finding:
        return http(address="127.0.0.1:1", tls_cert=cert, tls_key=key)[0]

    make_expired(tmp_path)
    assert (look().level, "has expired" in look().message) == (FindingLevel.FAIL, True)
    make_certificate(tmp_path, "localhost")
    assert (look().level, "expires in" in look().message) == (FindingLevel.WARN, True)
    renew = ["openssl", "x509", "-days", "90", "-signkey", key, "-in", cert, "-out", cert]
    subprocess.run(renew, check=True, capture_output=True)
    assert look().level is FindingLevel.OK
    Path(cert).write_text("nonsense")
    assert (look().level, "cannot be used" in look().message) == (FindingLevel.FAIL, True)


def test_numa_balancing_is_mentioned(tmp_path: Path) -> None:
    assert list(preflight.check_numa_balancing(tmp_path)) == []
    write_tree(tmp_path, {"proc/sys/kernel/numa_balancing": "1\n"})
    assert "numa_balancing=0" in only(preflight.check_numa_balancing(tmp_path)).message


def test_what_needs_root_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert only(preflight.check_privileges()).level is FindingLevel.WARN
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert only(preflight.check_privileges()).level is FindingLevel.OK


# --- all of it ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "module", "said"),
    [
        (
            {"devices": {"enabled": True}},
            "pyroute2",
            "devices.networkInterfaces is on, but has no effect",
        ),
        ({"devices": {"enabled": True}}, "grpc", "devices.podResources is on"),
        (
            {"publish": {"otlpEndpoint": "http://127.0.0.1:4318"}},
            EXPORTER_LOGGER_NAME,
            "publish.otlpEndpoint",
        ),
    ],
)
def test_what_is_on_and_cannot_be_imported_fails(
    sections: dict[str, object], module: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = config.load_config(text=json.dumps(sections))
    assert not list(preflight.check_libraries(asked))
    monkeypatch.setitem(sys.modules, module, None)
    found = only(preflight.check_libraries(asked))
    assert (found.level, said in found.message) == (FindingLevel.FAIL, True), found
    assert not list(preflight.check_libraries(AgentConfig()))


def examined(tmp_path: Path, topology: Topology, text: str = "") -> dict[str, list[Finding]]:
    """Everything that is looked at, on another machine, by subject."""
    root = write_sysfs(tmp_path / "machine", topology)
    loaded = config.load_config(
        text=f"{text}\nsysfsRoot: {root}\nstateDir: {tmp_path / 'state'}\nhttp: {{address: off}}\n"
        f"cgroupRoot: {tmp_path / 'cgroup'}\nkubeletRoot: {tmp_path / 'kubelet'}\n"
        f"runtime: {{nriSocket: {tmp_path / 'nri.sock'}}}\n"
    )
    found: dict[str, list[Finding]] = {}
    for one in preflight.run_checks(loaded, tmp_path):
        assert bool(one.remedy) == (one.level is not FindingLevel.OK), one
        found.setdefault(one.subject, []).append(one)
    return found


def test_everything_is_examined_and_every_complaint_has_a_remedy(tmp_path: Path) -> None:
    found = examined(tmp_path, machines.snc_smt())
    assert {"machine", "configuration", "cgroups", "NRI", "state", "http"} <= set(found), set(found)
    assert found["machine"][0].level is FindingLevel.OK
    assert "NUMA nodes" in found["machine"][0].message
    sound = Finding(
        subject="configuration", level=FindingLevel.OK, message="sound, and fits this machine"
    )
    assert found["configuration"] == [sound]


def test_a_machine_with_one_numa_node_and_the_configuration_of_another(tmp_path: Path) -> None:
    found = examined(tmp_path, machines.single_no_smt(), "reservedCPUs: 500")
    (one, *_) = found["machine"]
    assert (one.level, "nothing to align" in one.message) == (FindingLevel.WARN, True)
    (wrong,) = found["configuration"]
    assert wrong.level is FindingLevel.FAIL
    assert "reservedCPUs" in wrong.message
    assert "500" in wrong.message


def test_who_took_cpus_is_said_with_what_to_do(tmp_path: Path) -> None:
    root = write_sysfs(tmp_path / "machine", machines.dual_smt_16())
    pods, other = "sys/fs/cgroup/kubepods.slice", "sys/fs/cgroup/rt.slice"
    write_tree(
        root,
        {
            "sys/fs/cgroup/cpuset.cpus.effective": "0-5,8-15\n",
            f"{pods}/cpuset.cpus.effective": "0-5,8-15\n",
            f"{other}/cpuset.cpus.effective": "6-7\n",
            f"{other}/cpuset.cpus.partition": "isolated\n",
        },
    )
    found = list(preflight.check_machine(discover_topology(root)))
    (told,) = [f for f in found if "partition rt.slice (isolated)" in f.message]
    assert told.level is FindingLevel.WARN
    assert "end the partition" in told.remedy


def test_a_list_of_cpus_without_a_tick_that_nobody_asks_for_is_mentioned(tmp_path: Path) -> None:
    found = examined(tmp_path, machines.nohz_full_cpus())["kernel"]
    assert "CPUs 1-3,7,9-11,15 run without a timer tick" in found[0].message
    assert "nohzFullCPUs: prefer" in found[0].message
    asked = AgentConfig(nohz_full_cpus=NohzFullCPUs.PREFER)
    assert not list(preflight.check_nohz_full(asked, machines.nohz_full_cpus()))


def test_isolated_cpus_are_mentioned_where_containers_would_share_nothing_else() -> None:
    every = replace(machines.dual_smt_16(), isolated=CPUSet(range(16)))
    assert not list(preflight.check_isolated_cpus(AgentConfig(), machines.isolated_cpus()))
    message = only(preflight.check_isolated_cpus(AgentConfig(), every)).message
    assert "all shared CPUs of NUMA nodes 0-1 are isolated" in message
    one = replace(machines.dual_smt_16(), isolated=CPUSet.parse("0-3,8-11"))
    assert not list(preflight.check_isolated_cpus(AgentConfig(), one))
    shared = AgentConfig(isolated_cpus=IsolatedCPUs.ANY)
    assert (
        "all shared CPUs of NUMA node 0 are"
        in only(preflight.check_isolated_cpus(shared, one)).message
    )
    alone = AgentConfig(isolated_cpus=IsolatedCPUs.ONLY)
    assert not list(preflight.check_isolated_cpus(alone, one))
    none = only(preflight.check_isolated_cpus(alone, machines.dual_smt_16())).message
    assert "no container can have exclusive CPUs" in none


def test_no_machine_at_all_is_said_and_the_rest_is_looked_at_too(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    loaded = config.load_config(text=f"sysfsRoot: {tmp_path / 'empty'}\nhttp: {{address: off}}")
    found = list(preflight.run_checks(loaded, tmp_path))
    assert (found[0].subject, found[0].level) == ("machine", FindingLevel.FAIL)
    assert "--sysfs-root" in found[0].remedy
    assert {"NRI", "state"} <= {f.subject for f in found}


@pytest.mark.parametrize(("version", "says"), [("v2.2.1", True), ("2.3.0", False), ("?", None)])
def test_containerds_pod_level_resources(tmp_path: Path, version: str, says: bool | None) -> None:
    installed(tmp_path, f"containerd github.com/containerd/containerd {version} x")
    found = ["not when it is resized" in one.message for one in check_pod_level_resources(tmp_path)]
    assert found == ([] if says is None else [says])


# --- the kubelet ---------------------------------------------------------------------------------

HEAD = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"
PINS = f"{HEAD}cpuManagerPolicy: static\n"
UNREAD = "its configuration cannot be read"
STATIC = '{"policyName":"static","defaultCpuSet":"0-1","entries":{"u":{"c":"2-3"}}}'


def look(directory: Path, reserved: str = "", **section: str) -> list[Finding]:
    kubelet = KubeletSection(**section)  # type: ignore[arg-type]
    config = AgentConfig(kubelet_root=str(directory), kubelet=kubelet, reserved_cpus=reserved)
    found = list(preflight.check_kubelet(config, machines.dual_smt(), str(directory / "proc")))
    assert all(f.subject == "kubelet" for f in found)
    assert all(bool(f.remedy) == (f.level is FindingLevel.WARN) for f in found)
    return found


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, [UNREAD]),
        ({"config.yaml": HEAD + "cpuManagerPolicy: none\n"}, ["cpuManagerPolicy none"]),
        ({"config.yaml": PINS}, ["CPU manager policy is static"]),
        (
            {"config.yaml": f"{PINS}memoryManagerPolicy: Static\n"},
            ["CPU manager policy is static", "memory manager policy is Static"],
        ),
        # The state file is what the kubelet really runs with.
        (
            {"config.yaml": PINS, "cpu_manager_state": '{"policyName":"none","defaultCpuSet":""}'},
            ["will not start again", "cpuManagerPolicy none"],
        ),
        ({"cpu_manager_state": STATIC}, ["static: it pins Guaranteed pods itself; CPUs 2-3 gra"]),
        ({"memory_manager_state": '{"policyName":"Static"}'}, ["policy is Static"]),
        (
            {"cpu_manager_state": "garbage", "config.yaml": "{"},
            ["its configuration: ", "its state: ", UNREAD],
        ),
        (
            {"cpu_manager_state": "[]", "config.yaml": "[]"},
            ["expected a KubeletConfiguration", "Expected `object`", UNREAD],
        ),
        (
            {"config.yaml": HEAD + "reservedSystemCPUs: '0'\n"},
            ["cpuManagerPolicy none", "inherited from its configuration: reservedCPUs 0"],
        ),
    ],
)
def test_the_kubelets_own_managers(tmp_path: Path, files: dict[str, str], words: list[str]) -> None:
    found = look(write_tree(tmp_path, files))
    assert len(found) == len(words), found
    for finding, part in zip(found, words, strict=True):
        assert part in finding.message
        fine = (UNREAD, "cpuManagerPolicy none", "inherited from")
        assert (finding.level is FindingLevel.OK) == any(one in finding.message for one in fine)


def test_differences_are_warnings(tmp_path: Path) -> None:
    (tmp_path / "k.yaml").write_text(HEAD + "reservedSystemCPUs: 0-1\n")
    found = look(tmp_path, reserved="0", config=str(tmp_path / "k.yaml"))
    warnings = [f.message for f in found if f.level is FindingLevel.WARN]
    assert len(warnings) == 1
    assert "reservedCPUs is 0, and the kubelet's reservedSystemCPUs reserves 0-1" in warnings[0]


@contextlib.contextmanager
def devices_of(directory: Path, *resources: str) -> Iterator[None]:
    """A kubelet with a device of each resource on either of two NUMA nodes."""

    def allocatable(request: Any, context: Any) -> Any:
        answer = podresources_pb2.AllocatableResourcesResponse()
        for resource in resources:
            for i in range(2):
                entry = answer.devices.add(resource_name=resource, device_ids=[f"{resource}-{i}"])
                entry.topology.nodes.add(ID=i)
        return answer

    def none(request: Any, context: Any) -> Any:
        return podresources_pb2.ListPodResourcesResponse()

    with pod_resources(directory, none, none, allocatable):
        yield


@pytest.mark.parametrize(
    ("policy", "level", "words"),
    [
        ("none", FindingLevel.WARN, "is none: it chooses example.com/gpu and example.com/nic sep"),
        ("best-effort", FindingLevel.OK, "scope container: it aligns example.com/gpu and example."),
    ],
)
def test_devices_of_two_kinds_are_aligned_by_the_kubelet_or_by_chance(
    tmp_path: Path, policy: str, level: FindingLevel, words: str
) -> None:
    write_tree(tmp_path, {"config.yaml": f"{HEAD}topologyManagerPolicy: {policy}\n"})
    with devices_of(tmp_path, "example.com/nic", "example.com/gpu"):
        _, finding = look(tmp_path)
    assert finding.level is level
    assert words in finding.message
    assert ("best-effort" in finding.remedy) == (level is FindingLevel.WARN)


def test_alignment_is_no_matter_for_devices_of_one_kind(tmp_path: Path) -> None:
    write_tree(tmp_path, {"config.yaml": HEAD})
    # What the device plugin of this project counts are CPUs.
    with devices_of(tmp_path, "example.com/gpu", AgentConfig().device_plugin.resource_name):
        assert [f.message for f in look(tmp_path)] == ["cpuManagerPolicy none"]
    with devices_of(tmp_path, *(f"example.com/{i}" for i in range(11))):
        assert "example.com/6 and 3 more" in look(tmp_path)[1].message


REPOSITORY = Path(__file__).resolve().parents[3]
OURS = REPOSITORY / "systemd" / "nri-numa.service"
UNIT = "etc/systemd/system/nri-numa.service"


def install(root: Path, venv: str, *, drop_in: str = "") -> None:
    """Our unit, the link of docs/install-node.md, and a virtual environment below ``venv``."""
    script = f"{venv}/bin/nri-numa"
    write_tree(root, {UNIT: OURS.read_text(), script: f"#!/{venv}/bin/python\n"})
    (root / "usr/local/bin").mkdir(parents=True)
    (root / "usr/local/bin/nri-numa").symlink_to(root / script)
    if drop_in:
        write_tree(root, {f"{UNIT}.d/override.conf": drop_in})


def found(root: Path) -> Finding:
    (one,) = check_systemd_service(AgentConfig(), root)
    assert bool(one.remedy) == (one.level is not FindingLevel.OK)
    return one


@pytest.mark.parametrize(
    ("venv", "capability"), [("home/ann/nri-numa/.venv", True), ("root/nri-numa/.venv", False)]
)
def test_a_virtual_environment_below_a_home_directory_is_hidden_from_the_service(
    tmp_path: Path, venv: str, capability: bool
) -> None:
    """Somebody else's home is closed for a root without capabilities, root's own is not."""
    install(tmp_path, venv)
    one = found(tmp_path)
    assert one.level is FindingLevel.FAIL
    assert f"/{venv}" in one.message
    assert "ProtectHome=read-only" in one.remedy
    assert ("CAP_DAC_READ_SEARCH" in one.remedy) is capability


def test_the_drop_in_that_the_remedy_names_is_a_remedy(tmp_path: Path) -> None:
    install(tmp_path, "home/ann/.venv", drop_in="[Service]\nProtectHome=read-only\n")
    assert found(tmp_path).level is FindingLevel.OK


def test_elsewhere_it_is_seen(tmp_path: Path) -> None:
    install(tmp_path, "opt/nri-numa/.venv")
    assert found(tmp_path).message == "nri-numa.service runs /usr/local/bin/nri-numa"


def test_an_interpreter_below_a_home_directory_is_hidden_too(tmp_path: Path) -> None:
    install(tmp_path, "opt/nri-numa/.venv")
    (tmp_path / "opt/nri-numa/.venv/bin/nri-numa").write_text("#!/home/ann/python/bin/python3 -I\n")
    assert "/home/ann/python/bin/python3" in found(tmp_path).message


def test_without_a_service_there_is_nothing_to_say(tmp_path: Path) -> None:
    assert list(check_systemd_service(AgentConfig(), tmp_path)) == []
    write_tree(tmp_path, {f"{UNIT}.d/x.conf": "ExecStart=/bin/x\n"})
    assert list(check_systemd_service(AgentConfig(), tmp_path)) == []


# --- devices.networkInterfaces ------------------------------------------------------------------

CARDS = AgentConfig(devices=Devices(enabled=True))


def withheld(root: Path, config: AgentConfig = CARDS) -> bool:
    """Whether the check says that network namespaces cannot be entered, and what to do."""
    found = [one for one in check_systemd_service(config, root) if one.subject == "devices"]
    assert all(one.level is FindingLevel.WARN and one.remedy for one in found)
    if (root / "etc").exists():
        assert all("] CapabilityBoundingSet=CAP_SYS_ADMIN Restrict" in one.remedy for one in found)
    return bool(found)


def documented() -> str:
    text = (REPOSITORY / "docs" / "devices.md").read_text()
    (block,) = re.findall(r"\n\n((?: {6}.*\n)+)\n", text)
    assert "[Service]" in block
    return textwrap.dedent(block)


@pytest.mark.parametrize(
    ("drop_in", "warns"),
    [
        ("", True),
        ("CapabilityBoundingSet=CAP_SYS_ADMIN", True),
        ("RestrictNamespaces=net", True),
        ("RestrictNamespaces=yes\nRestrictNamespaces=ipc net\nCapabilityBoundingSet=~", False),
        ("RestrictNamespaces=no\nCapabilityBoundingSet=CAP_SYS_ADMIN CAP_SYS_NICE", False),
        ("RestrictNamespaces=\nCapabilityBoundingSet=~\nCapabilityBoundingSet=~CAP_KILL", False),
        ("RestrictNamespaces=\nCapabilityBoundingSet=~CAP_SYS_ADMIN", True),
        (
            "RestrictNamespaces=\nCapabilityBoundingSet=~\nCapabilityBoundingSet=~CAP_KILL\n"
            "CapabilityBoundingSet=CAP_KILL",
            False,
        ),
        ("RestrictNamespaces=\nRestrictNamespaces=~net\nCapabilityBoundingSet=~", True),
        ("CapabilityBoundingSet=CAP_SYS_ADMIN\nRestrictNamespaces=net\nRestrictNamespaces=1", True),
    ],
)
def test_the_unit_hides_network_namespaces(tmp_path: Path, drop_in: str, warns: bool) -> None:
    install(tmp_path, "opt/nri-numa/.venv", drop_in=drop_in)
    assert withheld(tmp_path) is warns
    assert not withheld(tmp_path, AgentConfig())
    assert not withheld(
        tmp_path, AgentConfig(devices=Devices(enabled=True, network_interfaces=False))
    )


def test_the_documented_drop_in_lets_it_in_beside_others(tmp_path: Path) -> None:
    install(tmp_path, "opt/nri-numa/.venv", drop_in=documented())
    assert not withheld(tmp_path)
    other = "[Service]\nProtectHome=read-only\nCapabilityBoundingSet=CAP_DAC_READ_SEARCH\n"
    write_tree(tmp_path, {f"{UNIT}.d/zz-home.conf": other})
    assert not withheld(tmp_path)


@pytest.mark.parametrize(
    ("status", "warns"),
    [
        ("Uid:\t0\t0\t0\t0\nCapEff:\t0000000000000000\n", True),
        ("Uid:\t0\t0\t0\t0\nCapEff:\t0000000000200000\n", False),
        ("Uid:\t0\t0\t0\t0\nCapEff:\t00000000a80425fb\n", True),
        ("Uid:\t1000\t0\t0\t0\nCapEff:\t0000000000000000\n", False),
        ("", False),
    ],
)
def test_a_containers_capabilities_are_the_agents(tmp_path: Path, status: str, warns: bool) -> None:
    write_tree(tmp_path, {"proc/self/status": status})
    assert withheld(tmp_path) is warns
