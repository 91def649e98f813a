"""The devices that NRI messages mention; where protobuf stops, as in `nri_numa.nri.conversion`.

Only what is short is read: a message carries the whole environment of a container, and whoever
wrote the pod wrote most of it. Nearly all containers mention nothing, which a search through the
message's bytes shows for less than the 30 strings of 30 variables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from nri_numa.engine.values.workload import MOST_DEVICES, NO_MENTIONS, DeviceNode, Mentions
from nri_numa.nri.wire.pb import nri_pb2 as pb

PCI_VARIABLE: Final = "PCIDEVICE_"
"""Variables of the SR-IOV network device plugin begin so; ``…_INFO`` holds JSON for programs."""
NVIDIA_VARIABLE: Final = "NVIDIA_VISIBLE_DEVICES"
CDI_ANNOTATION: Final = "cdi.k8s.io/"

_PCI, _NVIDIA, _CDI = (text.encode() for text in (PCI_VARIABLE, NVIDIA_VARIABLE, CDI_ANNOTATION))

MOST_CHARACTERS: Final = 4096
"""Of one variable or annotation; 64 UUIDs are 2600."""


def mentions_of(container: pb.Container) -> Mentions:
    """What is said of a container's devices, at most `MOST_DEVICES` of each sort."""
    # Parts that are missing have the values of empty ones, and read like them.
    linux, devices = container.linux, container.CDI_devices
    files = linux.devices
    # Whatever stands in a variable or an annotation stands in here, as UTF-8.
    everything = container.SerializeToString()
    has_variables = _PCI in everything or _NVIDIA in everything
    has_names = devices or _CDI in everything
    if not files and not has_variables and not has_names:
        return NO_MENTIONS
    nodes, unread = _nodes_in(files, linux.resources.devices)
    variables = _variables_in(container) if has_variables else {}
    names = _names_in(container) if has_names else ()
    unread += max(0, len(names) - MOST_DEVICES)
    if not nodes and not variables and not names:
        return NO_MENTIONS
    return Mentions(
        nodes=nodes,
        variables=variables,
        cdi=names[:MOST_DEVICES],
        unread=unread,
    )


def _nodes_in(
    files: Sequence[pb.LinuxDevice], rules: Iterable[pb.LinuxDeviceCgroup]
) -> tuple[tuple[DeviceNode, ...], int]:
    """Device files that say something of their container, and how many there are beyond them."""
    if _gets_all(rules):
        return (), 0
    nodes = tuple(DeviceNode(one.type, one.major, one.minor) for one in files[:MOST_DEVICES])
    return nodes, max(0, len(files) - MOST_DEVICES)


def _variables_in(container: pb.Container) -> dict[str, str]:
    variables: dict[str, str] = {}
    for item in container.env:
        if item.startswith((PCI_VARIABLE, NVIDIA_VARIABLE)):
            name, _, value = item.partition("=")
            if name.endswith("_INFO") or len(item) > MOST_CHARACTERS:
                continue
            if name in variables or len(variables) < MOST_DEVICES:
                variables[name] = value  # as in an environment, the last one counts
    return variables


def _names_in(container: pb.Container) -> tuple[str, ...]:
    """Names of the Container Device Interface, each once."""
    annotations = container.annotations
    names = [one.name for one in container.CDI_devices[: MOST_DEVICES + 1]]
    for key in annotations:
        if key.startswith(CDI_ANNOTATION) and len(annotations[key]) <= MOST_CHARACTERS:
            names += [name.strip() for name in annotations[key].split(",")]
    return tuple(dict.fromkeys(name for name in names if name))


def _gets_all(rules: Iterable[pb.LinuxDeviceCgroup]) -> bool:
    """Whether it is privileged: every device may be used, so those listed say nothing of it."""
    for rule in rules:
        if (
            rule.allow
            and rule.type in ("", "a")
            and not (rule.HasField("major") and rule.major.value >= 0)
            and not (rule.HasField("minor") and rule.minor.value >= 0)
        ):
            return True
    return False


def network_namespace(pod: pb.PodSandbox) -> str:
    """Path of the pod's network namespace; empty for a pod on the host's network."""
    if pod.HasField("linux"):
        for namespace in pod.linux.namespaces:
            if namespace.type == "network":
                return namespace.path
    return ""
