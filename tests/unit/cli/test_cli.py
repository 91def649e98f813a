"""The command line as a user meets it: help, slips, exit codes, output that fits."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from msgspec.structs import replace

from nri_numa import cli as package
from nri_numa.agent.http_api import AgentServer
from nri_numa.config import derive_settings, load_config, validate_config
from nri_numa.web.server import MetricsAndProbeServer
from tests.beds.cli import Columns, invoke, shows
from tests.beds.http_view import HOSTILE, FakeView, assignment, intruder
from tests.machines import named as machines

SUBCOMMANDS = list(package.COMMANDS)


# --- help and slips -----------------------------------------------------------------------------


def test_help_lists_every_command_within_80_columns() -> None:
    assert invoke("--version").output.startswith("nri-numa ")
    result = invoke("--help", code=0)
    for name in SUBCOMMANDS:
        assert f"\n  {name} " in result.output
    assert max(map(len, result.output.splitlines())) <= 80
    assert "Exit codes:" in result.output


def test_words_that_other_programs_have_work_here() -> None:
    assert invoke("version").output == invoke("--version").output
    assert invoke("help", code=0).output == invoke("--help").output
    assert invoke("help", "topology", code=0).output == invoke("topology", "--help").output
    assert "There is no command 'x'" in invoke("help", "x", code=2).output


@pytest.mark.parametrize("kind", [KeyboardInterrupt, click.Abort])
def test_an_interrupted_command_ends_as_shells_expect_it(
    monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    def interrupted(*_args: object, **_more: object) -> None:
        raise kind

    monkeypatch.setattr("nri_numa.cli.machine.show_topology.invoke", interrupted)
    assert invoke("topology", code=130).output == "\n"


@pytest.mark.parametrize("quiet", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {}])
def test_check_is_coloured_only_where_that_is_wanted(
    sound: Path, terminal: Columns, monkeypatch: pytest.MonkeyPatch, quiet: dict[str, str]
) -> None:
    for name, value in {"NO_COLOR": "", "TERM": "xterm", **quiet}.items():
        monkeypatch.setenv(name, value)
    assert ("\x1b[" in invoke("check", "--config", str(sound)).output) == (not quiet)


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    """And none of them is a door with nothing behind it."""
    result = invoke(name, "--help", code=0)
    assert len(result.output) > 150
    assert max(map(len, result.output.splitlines())) <= 80


def test_help_and_run_load_no_more_than_they_need() -> None:
    """Registering with the runtime within 400 ms begins with not importing the world."""
    code = (
        "import sys\nfrom nri_numa.cli import cli\n"
        "cli(['--help'], standalone_mode=False)\nprint(sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for module in ("yaml", "asyncio", "structlog", "prometheus_client", "nri_numa.config"):
        assert f"'{module}'" not in done.stdout
    code = (
        "import sys\nimport nri_numa.cli.processes, nri_numa.agent.daemon\n"
        "print(sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for module in (
        *("aiohttp", "grpc", "h11", "jsonschema", "rich", "structlog", "yaml"),
        *("nri_numa.web.server", "nri_numa.agent.preflight", "nri_numa.agent.view"),
        *("nri_numa.kube", "nri_numa.publisher"),
        # What stays in memory for ever and is of no use there.
        *("bz2", "email", "gzip", "http.server", "lzma", "shutil", "tarfile", "urllib.request"),
    ):
        assert f"'{module}'" not in done.stdout


# --- topology -----------------------------------------------------------------------------------


def test_topology_reads_another_machine_in_every_form(tmp_path: Path) -> None:
    root = str(machines.write_sysfs(tmp_path, machines.dual_smt()))
    assert "2 NUMA nodes" in invoke("topology", "--sysfs-root", root, code=0).output
    as_json = json.loads(invoke("topology", "--sysfs-root", root, "-o", "json").output)
    as_yaml = yaml.safe_load(invoke("topology", "--sysfs-root", root, "-o", "yaml").output)
    assert as_json == as_yaml
    assert as_json["counts"]["numaNodes"] == 2


# --- run ----------------------------------------------------------------------------------------


def test_run_lists_every_mistake_and_exits_with_2(tmp_path: Path) -> None:
    path = tmp_path / "agent.yaml"
    path.write_text("htpp: {}\nstrategy: packed\n")
    flags = "--http", "nowhere", "--plugin-index", "x"
    told = invoke("run", "--config", str(path), *flags, code=2).output
    shows(told, "4 mistakes", "htpp", "strategy", "http.address", "runtime.pluginIndex")
    assert "(from command line)" in told


# --- check --------------------------------------------------------------------------------------


@pytest.fixture
def sound(tmp_path: Path) -> Iterator[Path]:
    """A configuration for which everything is in order, with a runtime that listens."""
    root = machines.write_sysfs(tmp_path / "machine", machines.dual_smt())
    cgroup = tmp_path / "cgroup"
    cgroup.mkdir()
    (cgroup / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    path = tmp_path / "nri.sock"
    with socket.socket(socket.AF_UNIX) as runtime:
        runtime.bind(str(path))
        runtime.listen()
        config = tmp_path / "agent.yaml"
        config.write_text(
            f"runtime: {{nriSocket: {path}}}\nstateDir: {tmp_path}/state\n"
            f"sysfsRoot: {root}\ncgroupRoot: {cgroup}\nkubeletRoot: {tmp_path}/kubelet\n"
            "http: {address: '127.0.0.1:1'}\n"
        )
        yield config


def test_check_of_a_sound_machine_is_0_and_shows_what_is_in_effect(sound: Path) -> None:
    result = invoke("check", "--config", str(sound), code=0)
    assert "FAIL" not in result.output
    assert "ok    NRI:" in result.output
    assert result.output.splitlines()[-1].startswith("Ready")
    assert max(map(len, result.output.splitlines())) <= 80
    shown = invoke("check", "--config", str(sound), "--show-config").output
    assert shown.endswith(result.output)
    assert yaml.safe_load(shown.removesuffix(result.output))["strategy"] == "spread"


def test_what_is_in_effect_has_what_the_kubelet_reserves(sound: Path) -> None:
    kubelet = sound.parent / "kubelet/config.yaml"
    kubelet.parent.mkdir(exist_ok=True)
    kubelet.write_text(json.dumps({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "reservedSystemCPUs": "0", "cpuManagerPolicyOptions": {"strict-cpu-reservation": "true"},
        "reservedMemory": [{"numaNode": 0, "limits": {"memory": "1Gi", "hugepages-2Mi": "4Mi"}}],
    }))  # fmt: skip
    for own, reserved in (("", "0"), ("reservedCPUs: 1\nreservedMemory: {0: 2Gi}\n", "1")):
        sound.write_text(sound.read_text() + own)
        shown = json.loads(invoke("check", "--config", str(sound), "-o", "json").output)["config"]
        assert (shown["reservedCPUs"], shown["strictCPUReservation"]) == (reserved, not own)
        # Which gives the same again.
        made = load_config(text=json.dumps(shown))
        assert validate_config(made) == []
        memory = {0: (2 if own else 1) << 30}
        assert derive_settings(made).reserved_memory == memory
        assert derive_settings(made).reserved_hugepages == ({} if own else {0: {2 << 20: 4 << 20}})


def test_check_ends_with_failures_and_verdict(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pod too, where the kubelet's folder is not mounted by default; devices are listed."""
    (sound.parent / "nri.sock").unlink()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    devices = sound.parent / "machine/sys/bus/pci/devices"
    for number, (code, numa_node) in enumerate((("0x030200", 1), ("0x020000", 0), ("0x020000", 0))):
        card = devices / f"0000:0{number}:00.0"
        card.mkdir(parents=True)
        (card / "class").write_text(f"{code}\n")
        (card / "numa_node").write_text(f"{numa_node}\n")
    result = invoke("check", "--config", str(sound))
    marks = [line[:4].strip() for line in result.output.splitlines() if line[:4].strip()]
    marks.pop()  # the verdict
    assert marks == sorted(marks, key=["ok", "warn", "FAIL"].index)
    warnings = marks.count("warn")
    said = result.output.splitlines()[-1]
    assert said == f"1 failed, {warnings} warning{'s' if warnings != 1 else ''}"
    output = " ".join(result.output.split())
    assert "devices: NUMA node 0: 2 NICs; NUMA node 1: 1 GPU (devices.enabled is off" in output
    # Long lines are broken, paths at their hyphens too.
    mount = f"hostPaths.kubelet: {sound.parent}/kubelet in the chart"
    assert mount.replace(" ", "") in output.replace(" ", "")
    (sound.parent / "kubelet").mkdir()
    (sound.parent / "kubelet/cpu_manager_state").write_text("{}")
    assert "hostPaths.kubelet" not in invoke("check", "--config", str(sound)).output
    # A terminal without the letter for an arrow gets another.
    command = [sys.executable, "-m", "nri_numa", "check", "--config", str(sound)]
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, env=env, capture_output=True, check=False)
    assert (done.returncode, b" ? Turn NRI on" in done.stdout) == (1, True), done


def test_a_folder_without_access_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NRI_NUMA_CONFIG")
    locked, user = tmp_path / "locked", os.geteuid()
    locked.mkdir(mode=0)
    for line, code, said in (
        (f"check --state-dir {locked}/x", 1, " cannot be written"),
        (f"simulate {locked}/x", 2, f"{locked}/x: cannot be read: Permission denied"),
        ("check", 3, f"nri-numa: {locked}/cpuset: Permission denied"),
        ("report report.tar.gz", 3, f"nri-numa: {locked}/cpuset: Permission denied"),
    ):
        if line == "check":
            monkeypatch.setenv("NRI_NUMA_CGROUP_ROOT", str(locked))
        invoke(*line.split())  # imports what only this user may read
        os.setresuid(user or 65534, user or 65534, user)
        try:
            result = invoke(*line.split())
        finally:
            os.setresuid(user, user, user)
        assert (result.exit_code, said in result.output) == (code, True), result.output


def test_check_in_json_has_every_finding_with_its_remedy(sound: Path) -> None:
    (sound.parent / "nri.sock").unlink()
    result = invoke("check", "--config", str(sound), "-o", "json", code=1)
    document = json.loads(result.output)
    assert document["ready"] is False
    failed = [f for f in document["findings"] if f["level"] == "fail"]
    assert [f["subject"] for f in failed] == ["NRI"]
    # Where containerd 2 is installed, NRI is on.
    assert re.search("--fix-runtime|Start containerd", failed[0]["remedy"])
    assert document["config"]["strategy"] == "spread"


def test_check_of_a_configuration_with_mistakes_is_2(sound: Path) -> None:
    sound.write_text(sound.read_text() + "reservedCPUs: 999\n")
    result = invoke("check", "--config", str(sound), code=2)
    assert "reservedCPUs: this machine has no CPU 999" in " ".join(result.output.split())
    sound.write_text("htpp: 1\ncpuOvercommit: 0\n")
    result = invoke("check", "--config", str(sound), "-o", "json", code=2)
    assert len(json.loads(result.output)["findings"]) == 2


def test_check_takes_the_places_that_run_takes(sound: Path, tmp_path: Path) -> None:
    """What is tried out with flags of `run` is checked with the same flags."""
    (tmp_path / "nri.sock").rename(tmp_path / "other.sock")
    elsewhere = "--nri-socket", str(tmp_path / "other.sock"), "--state-dir", str(tmp_path / "x")
    result = invoke("check", "--config", str(sound), *elsewhere, "-o", "json", code=0)
    said = {f["message"] for f in json.loads(result.output)["findings"]}
    assert {f"{tmp_path}/other.sock answers", f"{tmp_path}/x will be created"} <= said
    assert invoke("check", "--config", str(sound)).exit_code == 1


# --- talking to an agent ------------------------------------------------------------------------


@pytest.mark.usefixtures("terminal")
def test_status_shows_nodes_containers_rejections_in_80_columns(agent: tuple[str, object]) -> None:
    result = invoke("status", "--api", agent[0], code=0)
    shows(result.output, "nri-numa 0.1.0: ready, link to containerd v2.1.9 active", "NotEnoughCPUs")
    assert "pod-1" in result.output
    assert "?" not in result.output, "the agent says all that has a column"
    assert max(map(len, result.output.splitlines())) <= 80
    assert "!" not in result.output, "nothing differs"
    assert "meant" not in result.output


def test_status_is_1_when_the_agent_is_not_ready(agent: tuple[str, object]) -> None:
    agent[1].ready = False  # type: ignore[attr-defined]
    assert "NOT READY" in invoke("status", "--api", agent[0], code=1).output


def test_status_in_json_and_yaml_is_the_same_document(agent: tuple[str, object]) -> None:
    as_json = json.loads(invoke("status", "--api", agent[0], "-o", "json").output)
    as_yaml = yaml.safe_load(invoke("status", "--api", agent[0], "-o", "yaml").output)
    assert as_json == as_yaml
    assert as_json["containers"][0]["cpus"] == "0-3"
    assert as_json["rejections"][0]["container"] == HOSTILE


def test_status_tells_desired_and_actual(agent: tuple[str, FakeView], terminal: Columns) -> None:
    agent[1].containers = [assignment(1), *(intruder(n) for n in range(2, 27))]
    result = invoke("status", "--api", agent[0])
    shows(result.output, "25 containers drifted, 25 of them on exclusive CPUs of others", "0-3!")
    assert "! 25 containers drifted:" in result.output
    assert "  infra/pod-2/server: desired 0-3, actual 0-7 since 1" in result.output
    told = " ".join(result.output.split())
    assert "on exclusive CPUs of shop/db/server and shop/<script>" in told
    shows(told, "because another program rewrites it", "and 5 more")
    assert max(map(len, result.output.splitlines())) <= 80
    terminal(400)
    wide = invoke("status", "--api", agent[0]).output
    assert len(wide.splitlines()) < len(result.output.splitlines()), "one line each"
    found = json.loads(invoke("status", "--api", agent[0], "-o", "json").output)
    assert found["containers"][0]["actual"] is None
    assert found["containers"][1]["actual"]["cpus"] == "0-7"
    assert found["status"]["onExclusiveCPUs"] == 25


def test_status_marks_who_is_on_the_pool_without_its_own_cpus(agent: tuple[str, FakeView]) -> None:
    displaced = replace(assignment(1), displaced="2"), replace(intruder(2), displaced="2-3")
    agent[1].containers = [*displaced]
    told = " ".join(invoke("status", "--api", agent[0]).output.split())
    shows(
        told, "0-3!", "displaced, because CPU 2 is offline; on the shared pool until it is online"
    )
    assert (
        "displaced, because CPUs 2-3 are offline; on the shared pool until one of them is "
        "online; desired" in told
    )


@pytest.mark.usefixtures("terminal")
def test_status_says_when_the_runtime_does_not_answer(agent: tuple[str, FakeView]) -> None:
    agent[
        1
    ].pending_registration = "the runtime has not answered a second registration for 60 s: it hangs"
    output = invoke("status", "--api", agent[0]).output
    assert "the runtime has not answered a second registration" in output
    assert max(map(len, output.splitlines())) <= 80


def test_explain_says_first_what_is_not_so(agent: tuple[str, FakeView]) -> None:
    agent[1].containers = [intruder(1)]
    lines = invoke("explain", "shop/pod-1", "--api", agent[0]).output.splitlines()
    assert lines[1].startswith("  At present: desired 0-3, actual 0-7 since 1")
    assert all(line.isprintable() for line in lines)


def test_explain_shows_the_steps(agent: tuple[str, object]) -> None:
    short = invoke("explain", "shop/pod-1", "--api", agent[0])
    result = invoke("explain", "shop/pod-1", "-v", "--api", agent[0])
    assert result.exit_code == short.exit_code == 0, result.output
    assert "It runs on CPUs 0-3, with memory of NUMA node 0." in result.output
    assert "It runs on CPUs 0-3, with memory of NUMA node 0." in short.output
    assert "Later\n  Looked" in result.output
    assert "Later" not in short.output
    result = invoke("explain", "pod-1", "server", "-n", "shop", "--api", agent[0], "-o", "json")
    assert json.loads(result.output)["explanations"][0]["container"] == "server"


def test_explain_adds_what_a_kubelet_says(agent: tuple[str, object], tmp_path: Path) -> None:
    asks = ("explain", "shop/pod-1", "-v", "--api", agent[0])
    silent = invoke(*asks, "--kubelet-root", str(tmp_path / "none"))
    assert "kubelet" not in silent.output
    result = invoke(*asks, "--kubelet-root", str(tmp_path), code=0)
    assert "Could not ask the kubelet" in " ".join(result.output.split())
    assert max(map(len, result.output.splitlines())) <= 80
    document = json.loads(invoke(*asks, "--kubelet-root", str(tmp_path), "-o", "json").output)
    assert "does not exist" in document["kubelet"]["problem"]
    assert "kubelet" not in json.loads(invoke(*asks, "--no-kubelet", "-o", "json").output)


def test_explain_of_an_unknown_pod_suggests_known_ones(agent: tuple[str, object]) -> None:
    for pod, *words in (
        ("default/pod-1", "Did you mean shop/pod-1?"),
        ("pod-11", "called pod-11 in any namespace", "Did you mean shop/pod-1"),
    ):
        result = invoke("explain", pod, "--api", agent[0])
        assert (result.exit_code, all(each in result.output for each in words)) == (1, True)
    assert invoke("explain", "/", "--api", agent[0]).exit_code == 2


@pytest.mark.parametrize("command", [["status"], ["explain", "a/b"]])
def test_an_agent_that_is_not_there_is_exit_code_3_with_advice(command: list[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    result = invoke(*command, "--api", address, code=3)
    shows(result.output, "no answer from", "Is the agent running")


def test_http_off_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRI_NUMA_HTTP", "off")
    assert "http.address is off" in invoke("status", code=3).output


def test_the_configured_address(agent: tuple[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRI_NUMA_HTTP_ADDRESS", agent[0])
    assert invoke("status").exit_code == 0


# --- wrong inputs: the thing, the value, what was expected ----------------------------------------

POD = """{apiVersion: v1, kind: Pod, metadata: {name: a}, spec: {containers: [%s]}}\n"""
FILES = {
    "pod.yaml": POD % "{name: c}",
    "empty-list.yaml": POD % "",
    "none.yaml": "{apiVersion: v1, kind: ConfigMap, metadata: {name: a}}\n",
    "tab.yaml": "log:\n\tlevel: info\n",
    "misplaced.yaml": "logLevel: info\n",
    "text.yaml": "hello world\n",
    "log.yaml": "log: {file: /proc/absent/log}\n",
    "gpu.yaml": POD % "{name: c, resources: {limits: {nvidia.com/gpu: 1}}}",
    "far.yaml": "nvidia.com/gpu: [{id: a, numaNodes: 9}]\n",
    "mig.yaml": "nvidia.com/mig: [{id: a, numaNodes: 0}]\n",
}


NOBODY = "--api 127.0.0.1:1"
"""Before anybody is asked."""


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("toplogy", 2, "Did you mean topology?"),
        ("run --nri-sokcet x", 2, "--nri-socket"),
        ("topology -o jsn", 2, "'json'"),
        ("frobnicate", 2, "There is no command 'frobnicate'."),
        *(
            (f"{command} ''", 2, "is empty; expected the name of a folder or file")
            for command in (
                "topology --sysfs-root",
                "check --sysfs-root",
                "capture x.tar.gz --sysfs-root",
                "simulate pod.yaml --machine",
                "simulate pod.yaml --devices",
            )
        ),
        ("topology --sysfs-root .", 3, "there is no sys/devices/system/cpu in it"),
        ("capture absent/x.tar.gz", 1, "cannot write"),
        ("topology --machine synthetic:cores=100000000", 2, "expected a whole number from 0 to"),
        ("topology --machine syntetic:sockets=2", 2, "no such file and no kind of machine 'syn"),
        ("simulate pod.yaml --machine syntetic:", 2, "did you mean synthetic:?"),
        ("simulate pod.yaml --cluster text.yaml", 2, "is 'hello world', expected what kubectl"),
        (
            "simulate empty-list.yaml",
            2,
            "spec.containers is an empty list, expected a list of at least",
        ),
        ("simulate none.yaml", 2, "there is no pod to place none.yaml, document 1: 'ConfigMap'"),
        ("simulate none.yaml --cluster text.yaml", 2, "there is no pod to place"),
        ("simulate tab.yaml", 2, "line 2, column 1: a tab; YAML allows spaces only"),
        ("check --config tab.yaml", 2, "line 2, column 1: a tab; YAML allows spaces only"),
        ("check --config misplaced.yaml", 2, "logLevel: unknown key, did you mean log.level?"),
        ("check --write", 2, "--fix-runtime"),
        ("run --config log.yaml", 2, "No such file"),
        ("publish", 2, "http.socket: is empty; nri-numa publish reads the agent there"),
        ("publish --socket x", 2, "http.socket: 'x', expected an absolute path"),
        ("publish --address 10.0.0.1:1", 2, "10.0.0.1:1, expected one on loopback, or off"),
        ("device-plugin --resource-name kubernetes.io/cpu", 2, "devicePlugin.resourceName: 'kub"),
        (f"device-plugin --directory /x {NOBODY}", 3, "the kubelet's directory for device plugins"),
        (f"explain shop/pod-1/server {NOBODY}", 2, "explain shop/pod-1 server"),
        (f"explain shop/pod-1/x server {NOBODY}", 2, "explain shop/pod-1 server"),
        (f"explain a/b/c/d {NOBODY}", 2, "explain a/b c/d"),
        (f"status -A -n shop {NOBODY}", 2, "contradict each other"),
        (f"status -n '' {NOBODY}", 2, "--namespace is ''"),
        (f"status -n shop/db {NOBODY}", 2, "expected a name without a slash"),
        (f"status --pod shop/db {NOBODY}", 2, "--pod is 'shop/db'"),
        (f"status -w -o yaml {NOBODY}", 2, "goes with -o table, wide or json, not with -o yaml"),
        (f"status -w -o name {NOBODY}", 2, "not with -o name"),
        *(
            (f"{command} --api {address}", 2, words)
            for command in ("status", "explain p")
            for address, words in (
                ("127.0.0.1:99999", "--api 127.0.0.1:99999: port 99999 is above 65535"),
                ("http://", "--api http://: '' is no address, expected host:port"),
                ("http://h:p/x", "--api http://h:p/x: 'h:p/x' is no address"),
                ("foo", "--api foo: 'foo' is no address"),
                ("off", "--api off: no host, expected host:port"),
                ("ftp://h:1", "--api ftp://h:1: unknown scheme ftp, expected host:port"),
                ("unix://run/x", "--api unix://run/x: no absolute path"),
            )
        ),
        ("status --api unix:///nosuch", 3, "no answer from /nosuch: No such file or directory"),
        ("status --token-file nosuch", 2, "token file nosuch: cannot be read: No such file or dir"),
        ("checkpoint nosuch", 3, "nosuch: there is no such file; expected a checkpoint such as /"),
        (f"checkpoint {'x' * 300}", 3, "cannot read: File name too long"),
        ("checkpoint --state-dir .", 3, "no agent has written it"),
        ("checkpoint text.yaml", 1, "is not a checkpoint"),
        ("simulate", 2, "Missing argument 'PODS.yaml...'"),
        ("simulate missing.yaml", 2, "No such file"),
        ("simulate pod.yaml --machine /nowhere", 3, "does not exist"),
        ("simulate pod.yaml --machine synthetic:socket=2", 2, "did you mean sockets?; keys are"),
        ("simulate pod.yaml --machine synthetic: --sysfs-root /", 2, "name the machine twice"),
        ("simulate pod.yaml --config missing.yaml", 2, "cannot be read"),
        ("simulate pod.yaml --compare nonsense=1", 2, "no configuration key 'nonsense'"),
        ("simulate gpu.yaml --devices far.yaml", 2, "1 mistake in the inventory of devices"),
        ("simulate gpu.yaml --devices mig.yaml", 2, "is not in the inventory of devices"),
        ("simulate gpu.yaml --devices missing.yaml", 2, "missing.yaml: cannot be read: No such"),
        (
            "simulate pod.yaml --devices mig.yaml --set devicePlugin.resourceName=nvidia.com/mig",
            2,
            "which counts exclusive CPUs",
        ),
        *(
            (f"simulate pod.yaml --set {setting}", 2, words)
            for setting, words in (
                ("strategy", "expected KEY=VALUE"),
                ("strateg=pack", "did you mean strategy"),
                ("strategy=pack --set strategy=spread", "strategy is given twice"),
                ("strategy=pak", "expected most-memory, pack or spread"),
                ("reservedCPUs=4096", "reservedCPUs"),
                ("'capacityFactor={1: '", "--set capacityFactor"),
            )
        ),
    ],
)
def test_what_is_wrong_is_named_with_what_was_expected(line: str, code: int, words: str) -> None:
    for name, text in FILES.items():
        Path(name).write_text(text)
    result = invoke(*shlex.split(line))
    said = " ".join(result.output.split())
    assert words in said
    assert result.exit_code == code
    assert "Errno" not in said


def test_another_server_of_ours_is_no_agent(
    agent: tuple[str, FakeView], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AgentServer, "error_response", MetricsAndProbeServer.error_response)
    result = invoke("explain", "shop/web-0", "--api", agent[0])
    assert "is served by nri-numa, but not by its agent" in result.output
    assert result.exit_code == 3


def test_explain_hints_at_capitals_and_the_pods_containers(agent: tuple[str, FakeView]) -> None:
    agent[1].containers = [assignment(1)]
    one = agent[1].containers[0]
    near = invoke("explain", one.pod.upper(), "--api", agent[0]).output
    assert f"Did you mean {one.namespace}/{one.pod}?" in near
    named = f"{one.namespace}/{one.pod}"
    result = invoke("explain", named, "nosuchcontainer", "--api", agent[0], code=1)
    assert f"its containers are {one.container}." in " ".join(result.output.split())
