"""``nri-numa demo``: placement of example pods on a modelled machine.

The plugin is the real one: a separate process, started like a service, which reads the machine
from a ``sys/`` tree and connects over NRI. The runtime is `nri_numa.demo.runtime`, which has specs
and no processes. Everything that is shown is checked, so the demo is a test too: it exits with 1
and names the expectation that was not met.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import signal
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
from msgspec.structs import replace

from nri_numa.cli.common import show_progress
from nri_numa.cli.output import DEFAULT_WIDTH_COLUMNS, is_coloured, wrap_text
from nri_numa.cluster.pods import ContainerManifest, ContainerRole, PodManifest
from nri_numa.demo.runtime import DemoContainer, PodOperationFailed
from nri_numa.demo.stage import (
    ANNOTATION_PREFIX,
    SYNTHETIC_MACHINE_TEXT,
    DemoFailure,
    Stage,
    examples_directory,
    read_assigned_annotation,
    read_example_pods,
    union_of_container_cpus,
)
from nri_numa.engine.explain.sentences import choice_sentences
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.machine import cpus_text, human_milli, numa_text
from nri_numa.text import human_bytes

bold_text = functools.partial(click.style, bold=True)
red_text = functools.partial(click.style, fg="red")
green_text = functools.partial(click.style, fg="green")


@click.command("demo")
@click.option("--keep", is_flag=True, help="Keep the plugin's files and its log.")
@click.option("--serve", is_flag=True, help="Serve the plugin's page with these pods until Ctrl-C.")
def show_demo(keep: bool, serve: bool) -> None:
    """Show nri-numa at work on a modelled machine, without Kubernetes.

    It starts the real plugin and a container runtime that exists only in memory, creates the
    example pods, and shows what each gets and why: lists, shared and exclusive CPUs, a rejection,
    CPUs that return to the shared pool, and a plugin that is killed and restarted. It takes
    seconds, needs no privileges and leaves no files.
    """
    directory = Path(tempfile.mkdtemp(prefix="nri-numa-demo-", dir=_short_temp_parent()))
    files_kept = keep
    try:
        asyncio.run(play_demo(directory, serve=serve))
    except DemoFailure as problem:
        files_kept = True
        raise click.ClickException(
            f"the demo failed: {problem}{_plugin_log_tail(directory)}"
        ) from None
    finally:
        if keep:
            click.echo(f"\nThe files are in {directory}", err=True)
        if not files_kept:
            shutil.rmtree(directory, ignore_errors=True)


def _short_temp_parent() -> str | None:
    """Parent directory that keeps unix socket paths below 108 bytes; None for the usual one."""
    usual = Path(tempfile.gettempdir())
    return None if len(bytes(usual)) < 72 else "/tmp"  # noqa: S108  # a private directory in it


def _plugin_log_tail(directory: Path) -> str:
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (directory / "plugin.log").read_text(errors="replace").splitlines()[-15:]
    return "\n".join([f"\nThe files are in {directory}; the plugin's log ends:", *lines])


async def play_demo(directory: Path, *, serve: bool = False) -> None:
    """Play the demo in an empty directory, for the model of the machine and the plugin's files.

    Afterwards ``serve`` keeps the plugin until SIGINT, SIGTERM, or the terminal is closed.

    Raises:
        DemoFailure: an expectation was not met.
    """
    start_time = time.monotonic()
    async with Stage(directory) as stage:
        await _DemoScript(stage).play_all_scenes()
        span = time.monotonic() - start_time
        print_line()
        print_paragraph(f"The demo checked everything above. It took {span:.1f} seconds.")
        if serve:
            stopped, loop = asyncio.Event(), asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, stopped.set)
            print_line()
            page = f"http://{await stage.wait_for_address()}/"
            print_line(f"These pods are on the page {page} until Ctrl-C.")
            await stopped.wait()
    print_heading("Next steps")
    for command, purpose in (
        ("nri-numa topology", "this machine"),
        ("nri-numa check", "is it ready, and what to do"),
        (
            f"nri-numa simulate {_examples_path(examples_directory())} \\\n    --machine "
            f"{SYNTHETIC_MACHINE_TEXT}",
            "these pods on this model again; without --machine on your machine",
        ),
        ("nri-numa run", "the plugin; needs containerd"),
        ("README.md", "installation on a real node"),
    ):
        if len(command) > 37:
            for line in command.split("\n"):
                print_line(f"  {line}")
            print_line(f"      {purpose}")
        else:
            print_line(f"  {command:<38}{purpose}")


def _examples_path(folder: Path) -> str:
    """Path of the examples in the checkout if there is one, else of the installed ones."""
    checkout = folder.parents[2] / "config" / "examples"
    path = checkout if checkout.is_dir() else folder
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


_MAX_POLLS = 600
"""Polls, ten a second, until other containers get the CPUs of a pod that ended."""


class _DemoScript:
    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._machine = stage.machine

    async def play_all_scenes(self) -> None:
        await self._introduce_machine()
        await self._show_listed_and_shared_pods()
        await self._show_exclusive_pod()
        await self._show_explanation()
        await self._show_siblings_and_pod_scope()
        await self._show_rejection()
        await self._show_cpu_release()
        await self._show_plugin_restart()

    # --- chapters ---------------------------------------------------------------------------------

    async def _introduce_machine(self) -> None:
        title = "nri-numa: containers on the right CPUs and memory from their first instruction"
        print_line(bold_text(title))
        print_line()
        with show_progress("starting the plugin"):
            pid = await self._stage.start_plugin()
        print_paragraph(
            f"The plugin runs as process {pid} and is connected over NRI. The runtime at the other "
            "end lives in memory only, and the machine is a model:"
        )
        print_line()
        for i, numa_node in self._machine.numa_nodes.items():
            socket = next(s.id for s in self._machine.sockets.values() if i in s.numa_nodes)
            cpus = f"{len(numa_node.cpus)} CPUs {numa_node.cpus!s:<13}"
            print_line(
                f"  socket {socket}  NUMA node {i}  {cpus} {human_bytes(numa_node.memory_bytes)}"
            )
        print_line("  CPUs 0 and 16 are the two threads of one core, 1 and 17 of the next, ...")

    async def _show_listed_and_shared_pods(self) -> None:
        print_heading("1  Pods request a placement by annotation")
        (pinned,) = await self._show_example("01-explicit-lists.yaml")
        require_expectation(
            pinned.cpus == "1,17" and pinned.mems == "0", "pinned must have what it lists"
        )
        for server in await self._show_example("02-web.yaml", name="web"):
            self._require_one_numa_node([server])

    async def _show_exclusive_pod(self) -> None:
        print_heading("2  Exclusive CPUs: the other containers move away first")
        prior = self._stage.cpus_and_mems_by_container()
        (engine,) = await self._show_example("03-database.yaml")
        cpus = self._require_one_numa_node([engine])
        cores = {self._machine.cpus[i].core for i in cpus}
        require_expectation(len(cpus) == 4, "the database must have four CPUs")
        require_expectation(len(cores) == 4, "the database must not have two threads of one core")
        self._check_exclusive(cpus, engine)
        changed = self._changed_cpus(prior)
        require_expectation(bool(changed), "containers must have left the CPUs of the database")
        self._print_cpu_changes(changed)

    async def _show_explanation(self) -> None:
        print_line("  nri-numa explain says why these CPUs:")
        document = await self._stage.get_document("/v1/explain/default/database-0/engine")
        (explanation,) = document["explanations"]
        texts = choice_sentences(explanation["details"])
        require_expectation(bool(texts), "the plugin must explain its choice")
        for text in texts:
            for line in wrap_text(text, "    ", "      ", width=DEFAULT_WIDTH_COLUMNS):
                print_line(line)

    async def _show_siblings_and_pod_scope(self) -> None:
        print_heading("3  Siblings, huge pages, pods that are placed as a whole")
        trading, daytime, nightly = await self._show_example("04-siblings.yaml")
        print_detail(
            "beside", f"daytime, on the siblings of {cpus_text(daytime.cpus)}: busy at other hours"
        )
        cpus = CPUSet.parse(trading.cpus)
        self._check_exclusive(self._machine.siblings_of(cpus), trading)
        day, night = CPUSet.parse(daytime.cpus), CPUSet.parse(nightly.cpus)
        siblings = self._machine.siblings_of(day)
        require_expectation(
            night <= siblings - day, "nightly must run on the threads beside daytime's"
        )
        (forwarder,) = await self._show_example("05-hugepages.yaml")
        self._require_one_numa_node([forwarder])
        prepare, proxy, app = await self._show_example("06-sidecar.yaml")
        self._require_one_numa_node([proxy, app])
        require_expectation(
            prepare.cpus == app.cpus, "the application must get the init container's CPUs"
        )

    async def _show_rejection(self) -> None:
        print_heading("4  A pod that does not fit is rejected, with the reason")
        (pod,) = read_example_pods("07-too-big.yaml")
        assignments = self._stage.cpus_and_mems_by_container()
        try:
            await self._stage.run_pod(pod)
        except PodOperationFailed as error:
            text = str(error)
        else:
            raise DemoFailure("too-big must be rejected, but it was started")
        require_expectation(
            "TopologyAffinityError" in text, f"the rejection must name its reason: {text}"
        )
        require_expectation(pod.full_name in text, f"the rejection must name the pod: {text}")
        require_expectation(
            self._stage.cpus_and_mems_by_container() == assignments,
            "a rejected pod must change nothing",
        )
        print_container_heading(f"{pod.name}/{pod.containers[0].name}", "07-too-big.yaml")
        print_detail("asks", _container_request_text(pod, pod.containers[0]))
        print_detail("error", text.partition(" desc = ")[2] or text, paint=red_text)

    async def _show_cpu_release(self) -> None:
        print_heading("5  A pod ends: its CPUs return to the shared pool")
        (pod,) = read_example_pods("03-database.yaml")
        prior = self._stage.cpus_and_mems_by_container()
        await self._stage.remove_pod(pod)
        print_line(f"  {pod.name} is removed.")
        # The CPUs were reserved until the sandbox stopped, and updates are pushed after that.
        changed = self._changed_cpus(prior)
        for _ in range(_MAX_POLLS):
            if changed:
                break
            await asyncio.sleep(0.1)
            changed = self._changed_cpus(prior)
        require_expectation(bool(changed), "containers must have the database's CPUs again")
        self._print_cpu_changes(changed)

    async def _show_plugin_restart(self) -> None:
        print_heading("6  The plugin is killed and started again: nothing moves")
        stage = self._stage
        prior = stage.cpus_and_mems_by_container()
        await stage.kill_plugin()
        print_line("  kill -9. While the plugin does not run, another web server starts, unpinned:")
        manifest = replace(
            read_example_pods("02-web.yaml")[0], name="web-meanwhile", uid="web-meanwhile"
        )
        (server,) = await stage.run_pod(manifest)
        require_expectation(
            server.cpus == str(self._machine.online), "web-meanwhile must be unpinned"
        )
        print_detail("has", cpus_text(server.cpus))
        with show_progress("starting the plugin again"):
            pid = await stage.start_plugin()
        print_line(f"  The plugin runs again as process {pid}, and checks all containers:")
        current = stage.cpus_and_mems_by_container()
        (name,) = current.keys() - prior.keys()
        changed = [n for n in prior if prior[n] != current.get(n)]
        require_expectation(
            not changed, f"a restart must move nothing, but moved {', '.join(changed)}"
        )
        self._require_one_numa_node([server])
        print_detail("moved", f"none of {len(prior)} containers", paint=green_text)
        print_detail(
            "found", f"{name}: now {cpus_text(server.cpus)}, memory of {numa_text(server.mems)}"
        )
        (pod,) = read_example_pods("03-database.yaml")
        exclusive = union_of_container_cpus(
            c
            for c in stage.running_containers()
            # A container that started without the plugin has no annotation.
            if f"{ANNOTATION_PREFIX}assigned" in c.message.annotations
            and read_assigned_annotation(c)["kind"] == "exclusive"
        )
        (engine,) = await stage.run_pod(pod)
        cpus = CPUSet.parse(engine.cpus)
        require_expectation(
            not cpus & exclusive, f"{cpus_text(cpus & exclusive)} must not be exclusive twice"
        )
        self._check_exclusive(cpus, engine)
        print_detail(
            "knows",
            f"{stage.pod_and_container_name(engine)} starts again, exclusive on {cpus_text(cpus)}",
        )

    # --- showing ----------------------------------------------------------------------------------

    async def _show_example(self, file: str, *, name: str = "") -> list[DemoContainer]:
        """Run the pods of an example and show them; replicas of ``name`` are shown together."""
        containers: list[DemoContainer] = []
        for number, pod in enumerate(read_example_pods(file)):
            members = await self._stage.run_pod(pod)
            containers += members
            for container, manifest in zip(members, pod.containers, strict=True):
                if not name or not number:
                    label = f"{name or pod.name}/{container.message.name}"
                    is_app = manifest.role is ContainerRole.APP
                    role = "" if is_app else f", {manifest.role} container"
                    print_container_heading(label, f"{file}{role}")
                    print_detail("asks", _container_request_text(pod, manifest))
                self._print_assignment(container, f"#{number + 1} " if name else "")
        return containers

    def _print_assignment(self, container: DemoContainer, head: str) -> None:
        decision = read_assigned_annotation(container)
        note = f", and {cpus_text(decision['idle'])} stays idle" if decision.get("idle") else ""
        memory = f"memory of {numa_text(container.mems)}{note}"
        print_detail("gets", f"{head}{cpus_text(container.cpus)}, {memory}")
        if decision["kind"] != "shared":  # their CPUs change, the annotation does not
            require_expectation(
                decision["cpus"] == container.cpus,
                f"{container.message.name} has other CPUs than its annotation says",
            )
        if head in ("", "#1 "):
            print_detail("why", str(decision["reason"]))

    def _changed_cpus(self, prior: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
        current = self._stage.cpus_and_mems_by_container()
        return {
            name: (cpus, current[name][0])
            for name, (cpus, _) in prior.items()
            if name in current and current[name][0] != cpus
        }

    def _print_cpu_changes(self, changed: dict[str, tuple[str, str]]) -> None:
        print_line("    container                     CPUs before    CPUs after")
        for name, (old_cpus, cpus) in changed.items():
            print_line(f"    {name:<29} {old_cpus:<14} {cpus}")

    # --- checks -----------------------------------------------------------------------------------

    def _require_one_numa_node(self, containers: Sequence[DemoContainer]) -> CPUSet:
        cpus = union_of_container_cpus(containers)
        names = ", ".join(self._stage.pod_and_container_name(c) for c in containers)
        numa_nodes = self._machine.numa_of(cpus)
        require_expectation(
            len(numa_nodes) == 1, f"{names} must be on one NUMA node, and has {cpus_text(cpus)}"
        )
        for container in containers:
            mems = NUMASet.parse(container.mems)
            require_expectation(
                mems == numa_nodes, f"{names} must have its memory there, not on {mems}"
            )
        return cpus

    def _check_exclusive(self, cpus: CPUSet, owner: DemoContainer) -> None:
        for container in self._stage.running_containers():
            if container is not owner:
                common = CPUSet.parse(container.cpus) & cpus
                name = self._stage.pod_and_container_name(container)
                exclusive_text = f"{cpus_text(common, 'is', 'are')} exclusive to others"
                require_expectation(not common, f"{exclusive_text}, and {name} may run there")


def require_expectation(condition: bool, expectation: str) -> None:
    """Raise `DemoFailure` with the expectation unless the condition holds."""
    if not condition:
        raise DemoFailure(expectation)


def _container_request_text(pod: PodManifest, container: ContainerManifest) -> str:
    annotations = [
        f"{key.removeprefix(ANNOTATION_PREFIX)}: {value}"
        for key, value in pod.annotations.items()
        if key.startswith(ANNOTATION_PREFIX)
    ]
    requests, limits = container.requests, container.limits
    amounts = []
    if milli := limits.cpu_milli or requests.cpu_milli:
        amounts.append(human_milli(milli))
    if memory := limits.memory or requests.memory:
        amounts.append(human_bytes(memory))
    for size, amount in limits.hugepages.items():
        amounts.append(f"{human_bytes(amount)} in huge pages of {human_bytes(size)}")
    return "; ".join([*annotations, ", ".join(amounts)])


# --- on the terminal ------------------------------------------------------------------------------


def print_line(text: str = "") -> None:
    """Print one line, in colour only if the terminal supports it."""
    click.echo(text, color=is_coloured())


def print_heading(text: str) -> None:
    """Print the title of a chapter."""
    print_line()
    print_line(bold_text(text))


def print_paragraph(text: str) -> None:
    """Print wrapped text."""
    print_line("\n".join(textwrap.wrap(text, DEFAULT_WIDTH_COLUMNS)))


def print_container_heading(name: str, file: str) -> None:
    """Print the heading of one container."""
    print_line(f"  {bold_text(name)}  ({file})")


def print_detail(label: str, text: str, *, paint: Callable[[str], str] = str) -> None:
    """Print a labelled text, wrapped beside its label."""
    for line in wrap_text(text, f"    {label:<8}", " " * 12, width=DEFAULT_WIDTH_COLUMNS):
        print_line(paint(line))
