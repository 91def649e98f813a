"""Says how the kubelet on this node and nri-numa get on, for ``nri-numa check``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from nri_numa import config as configuration
from nri_numa.config import AgentConfig
from nri_numa.engine.cpus.index import index
from nri_numa.engine.values.workload import KubeletGrants
from nri_numa.kubelet.adoption import adopt
from nri_numa.kubelet.configuration import Found, KubeletFacts, read
from nri_numa.kubelet.state_files import StateFiles
from nri_numa.machine.model import Topology, cpus_text
from nri_numa.node.preflight import Finding, Level

_GUIDE = "See docs/kubelet.md: two ways to live with it, and how to change from one to the other."


def kubelet(
    config: AgentConfig, topology: Topology | None, proc: str = "/proc"
) -> Iterator[Finding]:
    """Whether the kubelet's own managers pin containers too, and whether both agree."""
    directory = Path(config.kubelet_root)
    if not directory.is_dir():
        yield _ok(f"none below {directory}")
        return
    found = read(config.kubelet.config, config.kubelet.config_dir, str(directory), proc)
    for problem in found.problems:
        yield _warn(
            f"its configuration: {problem}",
            "Correct it: the kubelet reads the same. Or set kubelet.config to the right file.",
        )
    files = StateFiles(str(directory))
    if topology is not None:
        files.look(topology.possible, topology.numa_ids)
    for problem in files.problems:
        yield _warn(
            f"its state: {problem}",
            "Until it can be read, nri-numa does not know which CPUs are the kubelet's.",
        )
    yield from _policies(files, found.facts, config)
    yield from _differences(config, topology, found)


def _policies(
    files: StateFiles, facts: KubeletFacts | None, config: AgentConfig
) -> Iterator[Finding]:
    grants = files.grants
    # The state files are what it really runs with; its configuration may be newer.
    cpu = grants.cpu_policy or (facts.cpu_policy if facts else "")
    memory = grants.memory_policy or (facts.memory_policy if facts else "")
    if cpu == "static":
        held = f"; {cpus_text(grants.granted)} granted now" if grants.granted else ""
        yield _warn(
            f"its CPU manager policy is static: it pins Guaranteed pods itself{held}",
            f"What it grants is left to it (kubelet.override: {config.kubelet.override}). For full "
            "control set cpuManagerPolicy: none, drain the node, delete "
            f"{files.path('cpu')} and restart the kubelet. {_GUIDE}",
        )
    if memory == "Static":
        yield _warn(
            "its memory manager policy is Static: it sets memory nodes of Guaranteed pods itself",
            "For full control set memoryManagerPolicy: None, drain the node, delete "
            f"{files.path('memory')} and restart the kubelet. {_GUIDE}",
        )
    if facts is not None:
        yield from _next_start(files, grants, facts)
    if cpu != "static" and memory != "Static":
        known = "cpuManagerPolicy none" if cpu or memory else "its configuration cannot be read"
        yield _ok(known)


def _next_start(files: StateFiles, grants: KubeletGrants, facts: KubeletFacts) -> Iterator[Finding]:
    policies: Mapping[str, tuple[str, str]] = {
        "cpu": (grants.cpu_policy, facts.cpu_policy),
        "memory": (grants.memory_policy, facts.memory_policy),
    }
    for manager, (noted, wanted) in policies.items():
        if noted and noted != wanted:
            yield _warn(
                f"{files.path(manager)} has policy {noted}, and its configuration has {wanted}: it "
                "does not start again like this",
                f"Drain the node, delete {files.path(manager)}, restart the kubelet.",
            )


def _differences(config: AgentConfig, topology: Topology | None, found: Found) -> Iterator[Finding]:
    if topology is None or found.facts is None:
        return
    ours = configuration.settings(config)
    adopted = adopt(ours, config, found.facts, topology, index(topology))
    for difference in adopted.differences:
        yield _warn(
            difference,
            f"Make {found.path} and ours say the same. {_GUIDE}",
        )
    for sentence in adopted.adopted:
        yield _ok(f"ours by its configuration: {sentence}")


def _ok(message: str) -> Finding:
    return Finding(subject="kubelet", level=Level.OK, message=message)


def _warn(message: str, remedy: str) -> Finding:
    return Finding(subject="kubelet", level=Level.WARN, message=message, remedy=remedy)
