"""``nri-numa simulate``: the placement of pods on a machine, without a runtime."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Final

import click

from nri_numa.cli.common import (
    InputError,
    config_option,
    listing_option,
    machine_option,
    old_options,
    problems_text,
    require_nonempty_name,
    show_progress,
    sysfs_option,
    translate_errors,
)
from nri_numa.cli.common import find_config_path as default_path
from nri_numa.cli.output import write_document_or_lines
from nri_numa.errors import ConfigError
from nri_numa.model.machine import count_text

if TYPE_CHECKING:
    from nri_numa.engine.node_model import MeasuredFree, NodeModel
    from nri_numa.machine.tree import Tree
    from nri_numa.model.machine import Topology
    from nri_numa.simulate.devices import DeviceInventory
    from nri_numa.simulate.manifests import Manifests
    from nri_numa.simulate.simulator import Simulation

SIMULATE_EPILOG = """\b
A synthetic machine (numa: per socket; cores, memory: per NUMA node):
  --machine synthetic:sockets=2,numa=2,cores=8,threads=2,memory=64Gi
  other keys: hugepages-2Mi=, hugepages-1Gi=, memory-only=64Gi+64Gi,
  l3-cores=, efficient-cores=, sockets-per-numa=, offline=4+12, isolated=2-3,
  nohz-full=2-3, numbering=split|adjacent|alternating

\b
Exit codes:
  0  all pods were placed
  1  a pod was rejected
  2  mistakes in the manifests (also annotations without effect), in the
     configuration or in the usage
  3  the machine cannot be read"""

_NEW_OPTION_OF: Final = {"--continue": "--keep-going", "--live-memory": "--measured-memory"}
"""By old option, the one that replaced it. Deleted with the first release."""


@click.command(epilog=SIMULATE_EPILOG)
@click.argument("pods", metavar="PODS.yaml...", nargs=-1, required=True, type=click.Path())
@machine_option
@sysfs_option
@click.option(
    "--devices",
    "inventory",
    metavar="FILE",
    callback=require_nonempty_name,
    help="An inventory: the devices of each extended resource, and their NUMA nodes.",
)
@click.option(
    "--cluster",
    metavar="FILE",
    callback=require_nonempty_name,
    help="Evaluate this cluster by the scheduler's rules: NodeResourceTopology, Nodes and Pods as "
    "kubectl get -o json or yaml prints them; - for standard input.",
)
@config_option
@click.option(
    "--set",
    "settings",
    metavar="KEY=VALUE",
    multiple=True,
    help="Configuration key, such as strategy=pack.",
)
@click.option(
    "--compare",
    metavar="KEY=VALUE",
    multiple=True,
    help="Simulate a second time with this key, and show both; all --compare keys apply together.",
)
@click.option("--keep-going", is_flag=True, help="Continue after a rejection.")
@click.option(
    "--measured-memory",
    is_flag=True,
    help="Count the memory and huge pages that the machine's kernel reports as free.",
)
@old_options(_NEW_OPTION_OF)
@click.option("--verbose", "-v", is_flag=True, help="Explain the placement of every container.")
@listing_option
@click.pass_context
def simulate(
    ctx: click.Context,
    pods: tuple[str, ...],
    machine: str | None,
    sysfs_root: str | None,
    inventory: str | None,
    cluster: str | None,
    config_path: str | None,
    settings: tuple[str, ...],
    compare: tuple[str, ...],
    keep_going: bool,
    measured_memory: bool,
    verbose: bool,
    output: str,
) -> None:
    """Simulate where pods would be placed, and which would be rejected.

    PODS.yaml are ordinary manifests: Pod, Deployment, StatefulSet, ReplicaSet, DaemonSet, Job,
    List. A directory stands for all of its files, - for standard input. Their pods are placed in
    order on the machine, which is empty at the start; without --machine it is this one. A later
    document of the same kind and name is a change: other resources resize in place, other replicas
    add or remove pods. With --devices, containers get the first free devices they request, in the
    inventory's order, and are placed beside them. With --cluster, the answer names the nodes of
    that cluster on which the pods fit, and why they do not fit on others.
    """
    if cluster is not None:
        if machine or sysfs_root or inventory or compare or measured_memory or verbose:
            raise click.UsageError(
                "--cluster goes with --config, --set and --output, and with none of --machine, "
                "--sysfs-root, --devices, --compare, --measured-memory and --verbose"
            )
        ctx.exit(_simulate_cluster(cluster, pods, config_path, settings, output))
    from nri_numa.cli import simulate_output as view
    from nri_numa.cli.machine import choose_machine_source, read_machine
    from nri_numa.cluster.pods import ineffective_annotation_sentences
    from nri_numa.simulate.manifests import read_manifests
    from nri_numa.simulate.simulator import plan_actions
    from nri_numa.simulate.simulator import simulate_plan as run

    source = choose_machine_source(machine, sysfs_root)
    with translate_errors(), show_progress(f"reading {source or 'this machine'}"):
        topology, tree = read_machine(source)
        reading = (
            _read_free_memory_and_hugepages(source, topology)
            if measured_memory and tree is not None
            else None
        )
    # The configuration of this node says nothing about other machines.
    path = config_path if source else default_path(config_path)
    values = [_parse_settings("--set", settings)]
    if compare:
        values.append({**values[0], **_parse_settings("--compare", compare)})
    configured = [_build_node_model(path, topology, v, is_local=source is None) for v in values]
    model, slots_name, hinted, adopted = configured[0]
    devices = (
        None if inventory is None else _read_device_inventory(inventory, topology, tree, slots_name)
    )
    # No progress is shown while manifests may be typed in.
    reading_them = nullcontext() if "-" in pods else show_progress("reading manifests")
    with reading_them, _combine_errors("the manifests"):
        manifests = read_manifests(pods, slots_name, devices)
        planned = plan_actions(manifests.workloads)
    _require_pods(manifests)

    with show_progress(f"placing {len(planned)} pods"):
        runs = [
            run(m, planned, reading=reading, keep_going=keep_going, inventory=devices)
            for m, *_ in configured
        ]
    result, comparison = runs[0], runs[1] if compare else None
    has_rejection = any(r.first_rejected is not None for r in runs)
    mistaken = ineffective_annotation_sentences(manifests.workloads, model.settings.prefix)
    notes = [*adopted, *manifests.notes, *mistaken, *topology.warnings]
    notes += [*_outcome_warnings(result), *_memory_policy_notes(result)]
    if devices is not None and not hinted:
        notes.append(
            "devices.enabled is off in the configuration. This simulation assumes that it is on, "
            "because an inventory of devices was given"
        )
    if source is None and has_rejection:
        notes.append(
            f"This machine has {count_text(len(topology.online), 'CPU')} on "
            f"{count_text(len(topology.numa_nodes), 'NUMA node')}; --machine simulates another "
            "one, "
            "captured or synthetic: see --help."
        )
    described = source or "this machine"
    if comparison is None:
        lines = view.report_lines(described, result, notes, verbose=verbose)
    else:
        lines = view.simulation_comparison_lines(described, result, comparison, compare, notes)
    write_document_or_lines(
        view.simulation_document(described, result, comparison, compare, notes), output, lines
    )
    if mistaken or has_rejection:
        ctx.exit(2 if mistaken else 1)


@contextmanager
def _combine_errors(subject: str) -> Iterator[None]:
    """Turn the problems of manifests into an `InputError`, one on each line."""
    from nri_numa.cluster.manifests import ManifestError

    try:
        yield
    except ManifestError as error:
        raise InputError(problems_text(error.problems, subject)) from error


def _require_pods(manifests: Manifests) -> None:
    """Reject manifests without a pod, because it is the wrong file."""
    if not manifests.workloads:
        raise InputError(problems_text(manifests.notes, "the manifests: there is no pod to place"))


def _outcome_warnings(result: Simulation) -> list[str]:
    """Return the warnings of all containers."""
    return [
        f"{event.pod.full_name}, container {outcome.container}: {warning}"
        for event in result.events
        for outcome in event.outcomes
        for warning in outcome.warnings
    ]


def _memory_policy_notes(result: Simulation) -> list[str]:
    """Return the requirements of the memory policies; the simulation assumes that they are met."""
    from nri_numa.model.workload import MIN_KERNEL_VERSIONS, MIN_RUNTIMES_TEXT, MemoryPolicy

    modes = {
        o.allocation.mempolicy
        for event in result.events
        for o in event.outcomes
        if o.allocation is not None
    }
    return [
        f"mempolicy {mode} needs {MIN_RUNTIMES_TEXT}"
        + (
            f", and Linux {MIN_KERNEL_VERSIONS[mode][0]}.{MIN_KERNEL_VERSIONS[mode][1]} or newer"
            if mode in MIN_KERNEL_VERSIONS
            else ""
        )
        + "; other nodes reject it (MemoryPolicyUnsupported), or pin without it with on-failure: "
        "best-effort."
        for mode in sorted(modes - {MemoryPolicy.DEFAULT})
    ]


def _simulate_cluster(
    cluster: str, pods: tuple[str, ...], path: str | None, settings: Iterable[str], output: str
) -> int:
    """Simulate the pods in a cluster; return the exit code."""
    from nri_numa import config as configuration
    from nri_numa.cli.simulate_cluster import simulate_cluster
    from nri_numa.config.derived import slots_resource
    from nri_numa.simulate.manifests import read_manifests

    if cluster == "-" and "-" in pods:
        raise click.UsageError("--cluster - and - are both standard input; expected a file of one")
    with translate_errors():
        config = configuration.load_config(path, {}, _parse_settings("--set", settings))
    with _combine_errors("the manifests"):
        manifests = read_manifests(pods, slots_resource(config), every_device=True)
    _require_pods(manifests)
    return simulate_cluster(cluster, manifests.workloads, config, output)


def _read_free_memory_and_hugepages(path: str | None, topology: Topology) -> MeasuredFree:
    """Read the free memory and huge pages from the machine's kernel."""
    from nri_numa.engine.node_model import MeasuredFree
    from nri_numa.machine.sysfs import read_memory

    nodes = read_memory(path or "/", topology)
    return MeasuredFree(
        memory={i: n.available_bytes for i, n in nodes.items()},
        hugepages={i: dict(n.free_hugepages) for i, n in nodes.items()},
    )


def _read_device_inventory(
    path: str, topology: Topology, tree: Tree | None, slots_name: str
) -> DeviceInventory:
    """Read the machine's devices from an inventory."""
    from nri_numa.machine.pci import list_pci_devices
    from nri_numa.simulate.devices import read_device_inventory

    with translate_errors():
        pci = () if tree is None else list_pci_devices(tree)
    with _combine_errors("the inventory of devices"):
        return read_device_inventory(path, topology, pci, slots_name)


def _parse_settings(option: str, texts: Iterable[str]) -> dict[str, object]:
    """Parse configuration keys and values as in the file."""
    from nri_numa import safe_yaml
    from nri_numa.config.old_keys import OLD_KEYS
    from nri_numa.config.sections import config_keys

    values: dict[str, object] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError(f"{option} {text}: expected KEY=VALUE, such as strategy=pack")
        leaf = config_keys().get(key)
        if sentence := OLD_KEYS.get(key):
            raise click.UsageError(f"{option} {text}: {key} {sentence}")
        if leaf is None:
            matches = difflib.get_close_matches(key, config_keys(), n=2)
            hint = f", did you mean {' or '.join(matches)}?" if matches else ""
            raise click.UsageError(f"{option} {text}: there is no configuration key {key!r}{hint}")
        if key in values:
            raise click.UsageError(f"{option} {text}: {key} is given twice; expected it once")
        try:
            values[key] = value if isinstance(leaf.default, str) else safe_yaml.parse_yaml12(value)
        except safe_yaml.YAMLProblem as problem:
            raise click.UsageError(f"{option} {text}: {problem}") from problem
    return values


def _build_node_model(
    path: str | None, topology: Topology, values: Mapping[str, object], *, is_local: bool
) -> tuple[NodeModel, str, bool, tuple[str, ...]]:
    """Return the node model, the resource of exclusive CPUs, whether devices are on, and notes.

    The notes are about the kubelet's configuration, which counts if this is the local machine.
    """
    from nri_numa import config as configuration
    from nri_numa.config.derived import slots_resource
    from nri_numa.engine.node_model import NodeModel
    from nri_numa.kubelet.configuration import CONFIG_OFF, read_kubelet_config
    from nri_numa.kubelet.inherited_settings import adopt_kubelet_settings

    with translate_errors():
        config = configuration.load_config(path, {}, values)
        problems = configuration.validate_config(config, topology)
        if problems:
            raise ConfigError(path or "configuration", problems)
    section = config.kubelet
    kubelet = read_kubelet_config(
        section.config if is_local else CONFIG_OFF, section.config_dir, config.kubelet_root
    )
    adopted = adopt_kubelet_settings(config, kubelet.facts, topology)
    machine = NodeModel(topology=topology, settings=adopted.settings)
    notes = (*adopted.adopted, *kubelet.problems)
    return machine, slots_resource(config), config.devices.enabled, notes
