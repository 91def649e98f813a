"""What the runtime's message about a container says of its devices, before anything is looked up.

All of it but the device nodes may come from the pod's author: it is a hint where to look, and never
a grant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

MOST_DEVICES: Final = 64
"""Devices of one container that are looked at. Whoever has more has the machine's, not some."""

MOST_CHARACTERS: Final = 4096
"""Of one variable or annotation; 64 UUIDs are 2600."""

PCI_VARIABLE: Final = "PCIDEVICE_"
"""Variables of the SR-IOV network device plugin begin so; ``…_INFO`` holds JSON for programs."""
NVIDIA_VARIABLE: Final = "NVIDIA_VISIBLE_DEVICES"
CLAIM_VARIABLE: Final = "NRI_NUMA_CLAIM_"
"""How the variable begins by which a container is known to belong to a ResourceClaim of ours."""
VARIABLES: Final = (PCI_VARIABLE, NVIDIA_VARIABLE, CLAIM_VARIABLE)
CDI_ANNOTATION: Final = "cdi.k8s.io/"


class DeviceNode(NamedTuple):
    """A device file: its OCI type (``c``, ``u``, ``b``, ``p``) and its number."""

    type: str
    major: int
    minor: int


class Mentions(msgspec.Struct, frozen=True, kw_only=True):
    """The devices that a message mentions.

    Attributes:
        nodes: device files; empty for a privileged container, which gets those of the host.
        variables: environment variables that device plugins set, by name.
        cdi: names of the Container Device Interface, ``vendor/class=device``.
        claims: names of the variables of our ResourceClaims.
        unread: how many device files and names there were beyond `MOST_DEVICES`.
    """

    nodes: tuple[DeviceNode, ...] = ()
    variables: Mapping[str, str] = msgspec.field(default_factory=dict)
    cdi: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    unread: int = 0


NO_MENTIONS: Final = Mentions()


def mentions_in(
    *,
    nodes: Sequence[DeviceNode],
    environment: Iterable[str],
    annotations: Mapping[str, str],
    names: Iterable[str] = (),
) -> Mentions:
    """Read what a container has, at most `MOST_DEVICES` of each sort, and only what is short.

    ``names`` are CDI names that the runtime gives beside those in annotations.
    """
    variables: dict[str, str] = {}
    claims: list[str] = []
    for item in environment:
        if not item.startswith(VARIABLES) or len(item) > MOST_CHARACTERS:
            continue
        name, _, value = item.partition("=")
        if name.startswith(CLAIM_VARIABLE):
            claims.append(name)
        elif not name.endswith("_INFO") and (name in variables or len(variables) < MOST_DEVICES):
            variables[name] = value  # as in an environment, the last one counts
    cdi = list(names)
    for key, value in annotations.items():
        if key.startswith(CDI_ANNOTATION) and len(value) <= MOST_CHARACTERS:
            cdi += [name.strip() for name in value.split(",")]
    cdi = list(dict.fromkeys(filter(None, cdi)))
    if not nodes and not variables and not cdi and not claims:
        return NO_MENTIONS
    return Mentions(
        nodes=tuple(nodes[:MOST_DEVICES]),
        variables=variables,
        cdi=tuple(cdi[:MOST_DEVICES]),
        claims=tuple(claims[:MOST_DEVICES]),
        unread=max(0, len(nodes) - MOST_DEVICES) + max(0, len(cdi) - MOST_DEVICES),
    )
